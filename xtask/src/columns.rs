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

#[test]
fn only_prose_and_comments_count() {
    let (long, code) = ("word ".repeat(30), format!("let x = \"{}\";", "y".repeat(120)));
    assert_eq!(too_long("a.rs", &format!("// {long}\n{code}\n/// | {long} |\n")), [1]);
    assert_eq!(too_long("a.md", &format!("{long}\n| {long} |\n```\n{long}\n```\n- {long}")), [1, 6]);
    assert_eq!(too_long("a.toml", &format!("# {long}\nkey = \"{long}\"\n")), [1]);
    assert_eq!(too_long("a.md", &format!("`{}`.", "x".repeat(120))), [0; 0]);
}
