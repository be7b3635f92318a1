//! Checks that no line of prose or comment is longer than a reader's window. Code is for rustfmt, and tables
//! are as wide as their cells.

use std::path::Path;
use std::process::Command;

use crate::exec;

const MOST: usize = 110;

/// The lines of a file that are too long, by their numbers.
fn too_long(name: &str, text: &str) -> Vec<usize> {
    let prose = name.ends_with(".md");
    let comment = if name.ends_with(".rs") { "//" } else { "#" };
    let mut code = false;
    let judged = text.lines().enumerate().filter(|(_, line)| {
        let line = line.trim_start();
        code ^= prose && line.starts_with("```");
        let table = line.trim_start_matches(['/', '!', ' ']).starts_with('|');
        !table && if prose { !code } else { line.starts_with(comment) }
    });
    // A word that is longer than the line, such as a shape in JSON, stays whole.
    let breaks = |line: &str| line.trim().trim_end_matches('.').contains(' ');
    let long = judged.filter(|(_, line)| line.chars().count() > MOST && breaks(line));
    long.map(|(index, _)| index + 1).collect()
}

#[test]
fn prose_and_comments_have_at_most_110_columns() {
    let listed = exec::output(Command::new("git").current_dir(exec::workspace()).args(["ls-files"]));
    let listed = listed.unwrap();
    let ends = [".md", ".rs", ".toml", ".service", ".socket", ".rules", "Makefile"];
    let mut found = Vec::new();
    let mut files = 0;
    for name in listed.lines().filter(|name| ends.iter().any(|end| name.ends_with(end))) {
        let Ok(text) = std::fs::read_to_string(Path::new(&exec::workspace()).join(name)) else { continue };
        files += 1;
        found.extend(too_long(name, &text).into_iter().map(|line| format!("{name}:{line}")));
    }
    assert!(files > 400, "only {files} files were found");
    assert!(found.is_empty(), "lines of more than {MOST} columns:\n{}", found.join("\n"));
}

/// It is to be read in ten minutes.
#[test]
fn the_page_on_the_architecture_is_short() {
    let page = exec::workspace().join("docs/ARCHITECTURE.md");
    let lines = std::fs::read_to_string(page).unwrap().lines().count();
    assert!(lines <= 300, "docs/ARCHITECTURE.md has {lines} lines");
}

/// Each record has a line, in the order of their numbers, with the first word of its own status.
#[test]
fn the_index_of_decisions_is_complete() {
    let folder = exec::workspace().join("docs/decisions");
    let mut wanted = Vec::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let text = std::fs::read_to_string(folder.join(&name)).unwrap();
        let status = text.lines().find_map(|line| line.strip_prefix("- Status: "));
        if let Some(word) = status.and_then(|status| status.split([' ', ';', ',', ':']).next()) {
            wanted.push((name[..4].to_owned(), word.to_owned(), name));
        }
    }
    wanted.sort();
    let index = std::fs::read_to_string(folder.join("README.md")).unwrap();
    let lines = index.lines().filter_map(|line| line.strip_prefix("| [")?.split_once("] | "));
    let listed: Vec<_> = lines.map(|(number, rest)| (number, rest.split(" | ").nth(1).unwrap())).collect();
    let files: Vec<_> = index.lines().filter_map(|line| line.strip_prefix('[')?.split_once("]: ")).collect();
    assert!(wanted.len() > 100);
    assert_eq!(listed, wanted.iter().map(|(number, word, _)| (&**number, &**word)).collect::<Vec<_>>());
    assert_eq!(files, wanted.iter().map(|(number, _, name)| (&**number, &**name)).collect::<Vec<_>>());
}

#[test]
fn only_prose_and_comments_count() {
    let (long, code) = ("word ".repeat(30), format!("let x = \"{}\";", "y".repeat(120)));
    assert_eq!(too_long("a.rs", &format!("// {long}\n{code}\n/// | {long} |\n")), [1]);
    assert_eq!(too_long("a.md", &format!("{long}\n| {long} |\n```\n{long}\n```\n- {long}")), [1, 6]);
    assert_eq!(too_long("a.toml", &format!("# {long}\nkey = \"{long}\"\n")), [1]);
    assert_eq!(too_long("a.md", &format!("`{}`.", "x".repeat(120))), [0; 0]);
}
