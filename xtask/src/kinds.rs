//! Holds becket-device to its offers: what an offer can do is asked of a table, and nothing outside of it
//! asks which kind a device is (docs/decisions/0093).

use std::fs;
use std::path::Path;

use crate::rooms::sources;

/// The files that may name kinds: the tables, the planner, and the implementation of a kind itself.
const MAY_NAME_KINDS: [&str; 11] = [
    // Tables, one line for each kind.
    "contract/shape.rs",
    "client/kernel_drivers.rs",
    "supervisor/offers/ublk.rs",
    "supervisor/offers/fuse/mod.rs",
    "supervisor/offers/export/mod.rs",
    // Numbers of the kinds in messages.
    "contract/device_id.rs",
    // The words of `--via`.
    "contract/types.rs",
    // What moves the bytes of a served kind.
    "contract/kept.rs",
    "client/planner.rs",
    // The sockets of exports.
    "client/doorway.rs",
    // It looks for loop devices and for nothing else.
    "client/unrecorded.rs",
];

/// Lines of a source, without its tests and comments, that have one of these words.
fn lines_with(text: &str, words: &[&str]) -> Vec<String> {
    let tests = ["#[cfg(test)]\nmod tests", "#[cfg(test)]\npub(crate) mod tests"];
    let end = tests.iter().filter_map(|tests| text.find(tests)).min().unwrap_or(text.len());
    let code = text[..end].lines().map(|line| line.split("//").next().unwrap_or_default());
    let found = code.filter(|line| words.iter().any(|word| line.contains(word)));
    found.map(|line| line.trim().to_owned()).collect()
}

/// All sources of becket-device but its tests, by their paths below `src`.
fn device_sources() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/becket-device/src");
    let all = sources(&root).into_iter();
    let name = |path: &Path| path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
    let all = all.map(|path| (name(&path), fs::read_to_string(&path).unwrap()));
    all.filter(|(name, _)| !name.ends_with("_tests.rs") && !name.ends_with("doubles.rs")).collect()
}

/// The places where a line names a transport's kind; other crates have a `Kind`, too.
fn named_kinds(text: &str) -> Vec<String> {
    lines_with(text, &["Kind::Ublk", "Kind::Loop", "Kind::Dm", "Kind::Fuse", "Kind::Nbd", "Kind::VhostUser"])
}

#[test]
fn nobody_but_the_tables_and_the_planner_asks_which_kind_a_device_is() {
    let mut used = Vec::new();
    for (name, text) in device_sources() {
        let lines = named_kinds(&text);
        match MAY_NAME_KINDS.iter().find(|allowed| **allowed == name) {
            Some(allowed) if !lines.is_empty() => used.push(*allowed),
            _ => assert!(lines.is_empty(), "{name}: {lines:#?}: ask contract::shape or supervisor::offers"),
        }
    }
    for allowed in MAY_NAME_KINDS {
        assert!(used.contains(&allowed), "{allowed} names no kind any more, and need not be allowed to");
    }
}

#[test]
fn ublk_s_own_words_stay_below_the_transport() {
    for (name, text) in device_sources() {
        let lines = lines_with(&text, &["UBLK_", "uapi::ublk"]);
        assert!(lines.is_empty(), "{name}: {lines:#?}: becket_transport::Abilities says it");
    }
}

#[test]
fn a_line_that_asks_is_seen_and_a_comment_or_a_test_is_not() {
    let text =
        "if kind == Kind::Fuse {\n// Kind::Dm\nErrorKind::Busy\n#[cfg(test)]\nmod tests { Kind::Loop }";
    assert_eq!(named_kinds(text), ["if kind == Kind::Fuse {"]);
}
