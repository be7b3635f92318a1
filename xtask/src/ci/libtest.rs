//! Reads what `cargo test` and its binaries print, the skip log of becket-testkit, and the conformance
//! suite's report.
//! Never trusts names alone: a runner's own closing counts must be reached.
//! A failed test's last words come with it: the report's end is what is read when only the end was kept.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use anyhow::{Context, Result};
use serde_json::Value;

use super::case::{Case, Outcome};

/// The cases of any number of test binaries' output.
pub(crate) fn cases(output: &str, place: &str, facts: &BTreeSet<String>) -> Vec<Case> {
    let case = |test: &str, outcome, note: &str| Case {
        outcome,
        note: note.to_owned(),
        ..Case::on(test, place, facts)
    };
    let mut cases = Vec::new();
    let (mut seen, mut promised) = ([0_usize; 3], [0_usize; 3]);
    let mut words = LastWords::default();
    for line in output.lines() {
        words.line(line);
        if let Some((name, result)) = line.strip_prefix("test ").and_then(|rest| rest.rsplit_once(" ... ")) {
            let (outcome, note) = match result.split_once(',').unwrap_or((result, "")) {
                ("ok", _) => (Outcome::Passed, ""),
                ("ignored", why) => (Outcome::Skipped, why.trim()),
                (word, _) if word.starts_with("FAILED") => (Outcome::Failed, "see its output above"),
                _ => continue,
            };
            seen[outcome as usize] += 1;
            cases.push(case(name, outcome, note));
        } else if let Some(counts) = line.strip_prefix("test result: ") {
            for (word, outcome) in [("passed", 0), ("failed", 1), ("ignored", 2)] {
                promised[outcome] += counted(counts, word).unwrap_or(0);
            }
        }
    }
    // A line can be torn by what a child of the test prints: the runner's count still stands.
    let outcomes = [Outcome::Passed, Outcome::Failed, Outcome::Skipped];
    for (index, outcome) in outcomes.into_iter().enumerate() {
        for _ in seen[index]..promised[index] {
            cases.push(case("(its line could not be read)", outcome, "counted by its runner"));
        }
    }
    for case in cases.iter_mut().filter(|case| case.outcome == Outcome::Failed) {
        if let Some(said) = words.by_test.get(&case.test) {
            case.note = format!("\n    {}", said.iter().cloned().collect::<Vec<_>>().join("\n    "));
        }
    }
    cases
}

/// The ends of what failed tests printed, which a runner shows after the last of its tests.
#[derive(Default)]
struct LastWords {
    by_test: BTreeMap<String, VecDeque<String>>,
    speaker: Option<String>,
}

impl LastWords {
    /// So many lines of each test are kept.
    const LINES: usize = 12;

    fn line(&mut self, line: &str) {
        if let Some(test) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            self.speaker = Some(test.to_owned());
        } else if ["failures:", "stack backtrace:"].contains(&line) || line.starts_with("test result: ") {
            self.speaker = None;
        } else if let Some(test) = self.speaker.as_ref().filter(|_| !line.trim().is_empty()) {
            let said = self.by_test.entry(test.clone()).or_default();
            if said.len() == Self::LINES {
                said.pop_front();
            }
            said.push_back(line.chars().take(300).collect());
        }
    }
}

/// Judges failed tests by a second run of theirs, in which nothing else ran beside them: what passes there,
/// with every test of its name, has passed, and keeps why it had failed.
pub(crate) fn apply_second_run(cases: &mut [Case], second: &[Case]) {
    for case in cases.iter_mut().filter(|case| case.outcome == Outcome::Failed) {
        let mut same = second.iter().filter(|again| again.test == case.test).peekable();
        if same.peek().is_some() && same.all(|again| again.outcome == Outcome::Passed) {
            case.outcome = Outcome::Passed;
            case.failed_first = Some(std::mem::take(&mut case.note));
        }
    }
}

/// The number before a word: `5 passed; 0 failed`.
fn counted(text: &str, word: &str) -> Option<usize> {
    text.split(['.', ';']).find_map(|part| part.trim().strip_suffix(word)?.trim().parse().ok())
}

/// Turns tests that returned early, and said so in the skip log (`NAME: WHY`), into skipped ones.
pub(crate) fn apply_skips(cases: &mut Vec<Case>, log: &str, place: &str, facts: &BTreeSet<String>) {
    for line in log.lines().filter(|line| !line.trim().is_empty()) {
        let (test, why) = line.split_once(": ").unwrap_or((line, "no reason given"));
        let found = cases
            .iter()
            .position(|case| last_part(&case.test) == last_part(test))
            .or_else(|| cases.iter().position(|case| last_part(&case.test).starts_with(last_part(test))));
        match found.map(|index| &mut cases[index]) {
            // It went on after all, and failed; or it had a second reason.
            Some(case) if case.outcome != Outcome::Passed => {}
            Some(case) => {
                case.outcome = Outcome::Skipped;
                case.note = why.trim().to_owned();
            }
            None => cases.push(Case {
                outcome: Outcome::Skipped,
                note: why.trim().to_owned(),
                ..Case::on(test, place, facts)
            }),
        }
    }
}

/// A test's name without its modules, which libtest and the log do not always both know.
fn last_part(name: &str) -> &str {
    name.rsplit("::").next().unwrap_or(name)
}

/// The cases of the conformance suite's JSON report.
pub(crate) fn conformance(json: &str, place: &str, facts: &BTreeSet<String>) -> Result<Vec<Case>> {
    let reports: Vec<Value> =
        serde_json::from_str(json).context("the conformance suite's report is not readable")?;
    let case = |report: &Value| Case {
        outcome: match report["outcome"].as_str() {
            Some("passed") => Outcome::Passed,
            Some("ignored") => Outcome::Skipped,
            _ => Outcome::Failed,
        },
        conformance: true,
        note: report["note"].as_str().unwrap_or_default().to_owned(),
        ..Case::on(report["test"].as_str().unwrap_or("(without a name)"), place, facts)
    };
    Ok(reports.iter().map(case).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ci::case::count;

    const OUTPUT: &str = "\nrunning 4 tests\ntest a::one ... ok\ntest a::two ... FAILED\n\
        test a::three ... ignored, needs the moon\ntest src/lib.rs - x (line 3) ... ok\n\n\
        failures:\n    a::two\n\ntest result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s\n";

    fn read(output: &str) -> Vec<Case> {
        cases(output, "host", &BTreeSet::new())
    }

    #[test]
    fn each_line_of_a_test_is_a_case() {
        let cases = read(OUTPUT);
        assert_eq!(count(&cases), (2, 1, 1));
        assert_eq!((cases[2].test.as_str(), cases[2].note.as_str()), ("a::three", "needs the moon"));
        assert_eq!(cases[3].test, "src/lib.rs - x (line 3)");
    }

    #[test]
    fn what_a_failed_test_said_last_comes_with_it() {
        let said = "failures:\n\n---- a::two stdout ----\n\nthread 'a::two' panicked at x.rs:3:4:\nleft: 1\nstack backtrace:\n   1: a::two\n\n\n\
            failures:\n    a::two\n";
        let lines: String = (0..50).map(|line| format!("line {line}\n")).collect();
        for (words, wanted) in [
            (said.to_owned(), "\n    thread 'a::two' panicked at x.rs:3:4:\n    left: 1"),
            (said.replace("left: 1\n", &lines), "\n    line 38\n"),
        ] {
            let cases = read(&OUTPUT.replace("failures:\n    a::two\n", &words));
            let failed = cases.iter().find(|case| case.outcome == Outcome::Failed).unwrap();
            assert!(failed.note.starts_with(wanted), "{}", failed.note);
            assert!(failed.note.lines().count() <= 1 + LastWords::LINES);
        }
    }

    #[test]
    fn a_second_run_judges_what_failed_and_nothing_else() {
        let failing =
            |test: &str| Case { note: "why".to_owned(), ..Case::on(test, "host", &BTreeSet::new()) };
        let passing = |test: &str| Case { outcome: Outcome::Passed, ..failing(test) };
        let mut cases = vec![failing("late"), failing("broken"), failing("twins"), failing("gone")];
        let second =
            [passing("late"), failing("broken"), passing("twins"), failing("twins"), passing("other")];
        apply_second_run(&mut cases, &second);
        assert_eq!(count(&cases), (1, 3, 0));
        assert_eq!(cases[0].failed_first.as_deref(), Some("why"));
    }

    #[test]
    fn torn_lines_are_counted_by_the_runners_sum() {
        let torn = OUTPUT.replace("a::two ... FAILED", "a::two ... hello\nFAILED");
        assert_eq!(count(&read(&torn)), (2, 1, 1));
    }

    #[test]
    fn a_skip_in_the_log_is_no_pass() {
        let mut cases = read(OUTPUT);
        let log = "file::one: needs root: always\none: and a tool\ntwo: failed later\nelsewhere: no loop\n";
        apply_skips(&mut cases, log, "host", &BTreeSet::new());
        assert_eq!(count(&cases), (1, 1, 3));
        assert_eq!(cases[0].note, "needs root: always");
    }

    #[test]
    fn the_conformance_report_is_read() {
        let json = r#"[{"test":"geometry","via":"ublk","mode":null,"outcome":"passed","seconds":1.0,"note":""},
            {"test":"trim","outcome":"ignored","note":"why"},{"test":"x","outcome":"failed","note":"bad"}]"#;
        assert_eq!(count(&conformance(json, "7.x", &BTreeSet::new()).unwrap()), (1, 1, 1));
        assert!(conformance("", "7.x", &BTreeSet::new()).is_err());
    }
}
