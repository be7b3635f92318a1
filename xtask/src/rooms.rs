//! Checks the sources against what the documents say of their structure: the folders of becket-device and
//! their dependencies, and the path of one read.

use std::fs;
use std::path::{Path, PathBuf};

/// Each folder, and the folders that its files may use (docs/decisions/0063).
const ROOMS: [(&str, &[&str]); 11] = [
    ("contract", &[]),
    ("system", &["contract"]),
    ("record", &["contract", "system"]),
    ("control", &["contract", "system", "record"]),
    ("client", &["contract", "system", "record", "control"]),
    ("supervisor", &["contract", "system", "record", "control"]),
    ("worker", &["contract", "system"]),
    ("doorman", &["contract", "system"]),
    ("connector", &["contract", "system"]),
    ("fetcher", &["contract", "system"]),
    ("reporter", &["contract", "system"]),
];

pub(crate) fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(sources(&path)),
            false => found.extend(path.extension().is_some_and(|end| end == "rs").then_some(path)),
        }
    }
    found
}

/// The rooms that a line of source names.
fn named(line: &str) -> impl Iterator<Item = &str> {
    let code = line.split("//").next().unwrap_or_default();
    let words = code.split("crate::").skip(1);
    words.filter_map(|rest| rest.split(|c: char| !c.is_alphanumeric() && c != '_').next())
}

/// Arrows that no room may have, in text without its tests.
fn refused(room: &str, allowed: &[&str], text: &str) -> Vec<String> {
    let product = text.split("#[cfg(test)]").next().unwrap_or_default();
    let other = |name: &&str| *name != room && !allowed.contains(name);
    product.lines().flat_map(|line| named(line).filter(other).map(str::to_owned)).collect()
}

#[test]
fn arrows_between_rooms_run_one_way() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/becket-device/src");
    let mut looked_at = 0;
    for (room, allowed) in ROOMS {
        for path in sources(&root.join(room)) {
            if path.file_stem().is_some_and(|stem| stem.to_string_lossy().ends_with("_tests")) {
                continue;
            }
            looked_at += 1;
            let arrows = refused(room, allowed, &fs::read_to_string(&path).unwrap());
            assert!(arrows.is_empty(), "{} uses {arrows:?}; {room} may use {allowed:?}", path.display());
        }
    }
    assert!(looked_at > 70, "only {looked_at} files were found");
    let rooms = fs::read_dir(&root).unwrap().filter(|entry| entry.as_ref().unwrap().path().is_dir()).count();
    assert_eq!(rooms, ROOMS.len(), "a folder without a line in the table");
}

/// The rows of a table of functions: the file that a row links to, and the functions that it names.
fn rows(page: &str) -> Vec<(PathBuf, Vec<String>)> {
    let mut rows = Vec::new();
    for line in page.lines().filter(|line| line.starts_with("| ") && line.contains("](../")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let path = cells[2].split("](../").nth(1).unwrap().trim_end_matches(')');
        let names = cells[3].split('`').skip(1).step_by(2).map(str::to_owned).collect();
        rows.push((Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path), names));
    }
    rows
}

#[test]
fn one_read_goes_through_the_functions_of_its_page_and_eight_files() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/one-read.md");
    let rows = rows(&fs::read_to_string(page).unwrap());
    assert!(rows.len() > 10, "only {} rows were found", rows.len());
    for (path, names) in &rows {
        let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(!names.is_empty(), "a row of {} names no function", path.display());
        for name in names {
            assert!(text.contains(&format!("fn {name}(")), "{} has no function {name}", path.display());
        }
    }
    let files: std::collections::BTreeSet<_> = rows.iter().map(|(path, _)| path).collect();
    assert!(files.len() <= 8, "a read goes through {} files", files.len());
}

#[test]
fn an_arrow_upwards_is_seen() {
    assert_eq!(refused("record", &["contract"], "use crate::client::list; // crate::worker"), ["client"]);
    assert_eq!(refused("record", &["contract"], "use crate::contract::{Error, crate::record::x};"), [""; 0]);
}

/// A semicolon ends a statement of Mermaid's, also in a text that it would show: the drawing is then an
/// error.
#[test]
fn three_drawings_have_no_semicolon() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/ARCHITECTURE.md");
    let page = fs::read_to_string(page).unwrap();
    let drawings: Vec<&str> =
        page.split("```mermaid\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert_eq!(drawings.len(), 3);
    assert!(drawings.iter().all(|drawing| !drawing.contains(';')), "{drawings:?}");
}
