//! The guide for users: every command in it is run, page by page, and prints what the page shows.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, process::Command};

use becket_testkit::{Scratch, require_loop, require_plain_machine, require_root};
use common::scratch;

/// A command of a page, and what it prints there.
#[derive(Debug, Default)]
struct Step {
    command: String,
    output: Vec<String>,
}

fn pages() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/src");
    let mut pages: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    pages.retain(|page| page.extension().is_some_and(|kind| kind == "md"));
    pages.sort();
    pages
}

/// The commands in a page's blocks of `console`.
fn steps(page: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut inside = false;
    for line in page.lines() {
        if line.starts_with("```") {
            inside = line == "```console";
        } else if inside && let Some(command) = line.strip_prefix("$ ") {
            steps.push(Step { command: command.to_owned(), output: Vec::new() });
        } else if inside {
            steps.last_mut().expect("a block begins with a command").output.push(line.to_owned());
        }
    }
    steps
}

/// The programs of a page, by their names: what begins with a comment that has the name, and a colon.
fn programs(page: &str) -> Vec<(String, String)> {
    let mut programs: Vec<(String, String)> = Vec::new();
    let mut inside = false;
    for line in page.lines() {
        if line.starts_with("```") {
            inside = matches!(line, "```python" | "```go");
            if inside {
                programs.push((String::new(), String::new()));
            }
        } else if inside && let Some((name, text)) = programs.last_mut() {
            if name.is_empty() {
                let words = line.trim_start_matches(['#', '/', ' ']);
                words.split_once(':').expect("a program begins with its name").0.clone_into(name);
            }
            text.push_str(line);
            text.push('\n');
        }
    }
    programs
}

/// Without what differs from one machine to the next: the numbers of devices and the widths of columns.
fn comparable(line: &str, place: &Scratch) -> String {
    let line = line.replace(&place.links().display().to_string(), "/dev/becket");
    let line = line.replace(place.path("").to_str().unwrap(), "/srv/images/");
    let mut parts = line.split("/dev/loop");
    let first = parts.next().unwrap_or_default().to_owned();
    let line = parts.fold(first, |line, part| {
        let rest = part.trim_start_matches(|c: char| c.is_ascii_digit());
        line + "/dev/loopN" + rest
    });
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether a line is what a page shows; `...` stands for anything.
fn fits(line: &str, shown: &str) -> bool {
    let mut parts = shown.split("...");
    let Some(mut rest) = parts.next().and_then(|first| line.strip_prefix(first)) else { return false };
    let mut last = "";
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
        last = part;
    }
    rest.is_empty() || (shown.contains("...") && last.is_empty())
}

/// Whether lines are what a page shows; a line of `...` stands for any number of them.
fn all_fit(lines: &[String], shown: &[String]) -> bool {
    match shown.split_first() {
        None => lines.is_empty(),
        Some((first, rest)) if first == "..." => (0..=lines.len()).any(|n| all_fit(&lines[n..], rest)),
        Some((first, rest)) => {
            lines.split_first().is_some_and(|(line, more)| fits(line, first) && all_fit(more, rest))
        }
    }
}

/// Runs a page's commands in one shell, in a place of their own.
fn follow(name: &str, steps: &[Step], programs: &[(String, String)]) {
    let place = scratch();
    for (name, text) in programs {
        assert!(text.lines().count() <= 45, "{name} is longer than a page");
        fs::write(place.path(name), text).unwrap();
    }
    let binary = PathBuf::from(env!("CARGO_BIN_EXE_becket"));
    let mut script = String::new();
    for (n, step) in steps.iter().enumerate() {
        let command = step.command.replace("/dev/becket", place.links().to_str().unwrap());
        write!(script, "echo '@@ {n}'\n{{ {command}\n}} 2>&1\necho \"@= $?\"\n").unwrap();
    }
    let mut shell = Command::new("bash");
    place.prepare(&mut shell);
    shell.env("BECKET_STORE", place.path("store"));
    let path = env::join_paths(
        std::iter::once(binary.parent().unwrap().to_owned())
            .chain(env::split_paths(&env::var_os("PATH").unwrap())),
    );
    shell.current_dir(place.path("")).env("PATH", path.unwrap()).args(["-c", &script]);
    let ran = place.finish(&mut shell);
    for (n, step) in steps.iter().enumerate() {
        let begin = format!("@@ {n}\n");
        let said =
            ran.out.split_once(&begin).unwrap_or_else(|| panic!("{name}: {step:?} was not run: {ran:?}")).1;
        let (said, rest) =
            said.split_once("@= ").unwrap_or_else(|| panic!("{name}: {step:?} did not end: {ran:?}"));
        let code = rest.lines().next().unwrap_or_default();
        let said: Vec<String> = said.lines().map(|line| comparable(line, &place)).collect();
        let shown: Vec<String> = step.output.iter().map(|line| comparable(line, &place)).collect();
        assert!(
            all_fit(&said, &shown),
            "{name}: $ {}\nprinted {said:#?}\nand the page shows {shown:#?}",
            step.command
        );
        let refused = shown.iter().any(|line| {
            line.starts_with("becket: cannot")
                || ["\"kind\": ", "\"error\": "].iter().any(|word| line.contains(word))
        });
        assert_eq!(code != "0", refused, "{name}: $ {} ended with {code}: {said:?}", step.command);
    }
    assert!(place.devices().is_empty(), "{name} leaves devices: {:?}", place.devices());
}

#[test]
fn every_command_of_the_guide_does_what_the_page_shows() {
    let name = "guide::every_command_of_the_guide_does_what_the_page_shows";
    let tools = [
        ["sfdisk", "mkfs.ext4", "mksquashfs", "qemu-img", "blkid", "bash", "python3", "go"],
        ["mkfs.xfs", "mkfs.btrfs", "mkntfs", "mkfs.exfat", "mkfs.erofs", "genisoimage", "xz", "zstd"],
    ]
    .concat();
    if !require_root(name) || !require_plain_machine(name, &tools) || !require_loop(name) {
        return;
    }
    let mut run = 0;
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        let steps = steps(&text);
        run += steps.len();
        follow(&page.file_name().unwrap().to_string_lossy(), &steps, &programs(&text));
    }
    assert!(run > 40, "only {run} commands were found");
}

#[test]
fn what_a_page_does_not_show_is_seen() {
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    assert!(all_fit(&lines("a\nb\nc"), &lines("a\n...\nc")));
    assert!(all_fit(&lines("one two"), &lines("one ...")));
    assert!(all_fit(&lines("backing file: /x/base.img (y)"), &lines("backing file: ...base.img...")));
    assert!(!all_fit(&lines("a\nb"), &lines("a")));
    assert!(!all_fit(&lines("a"), &lines("a\nb")));
    assert!(!all_fit(&lines("one two"), &lines("one")));
    assert!(!all_fit(&lines("one"), &lines("... two")));
}
