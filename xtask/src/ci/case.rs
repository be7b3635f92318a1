//! One test's outcome, wherever it ran.
//! Never merges two machines: a case says which kernel and transport it belongs to.

use std::collections::BTreeSet;
use std::time::Duration;

/// How a test ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    Failed,
    Skipped,
}

/// One test on one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    /// The test's name as its own runner prints it.
    pub(crate) test: String,
    /// Where it ran, for people: `host`, `7.x ublk zero-copy`.
    pub(crate) place: String,
    /// A cell of the conformance table.
    pub(crate) conformance: bool,
    pub(crate) outcome: Outcome,
    /// Why it failed or was skipped.
    pub(crate) note: String,
    /// It passed when it was run again; this is why it had failed.
    pub(crate) failed_first: Option<String>,
    /// What is true of the machine it ran on; the conditions of allowed skips are taken from these.
    pub(crate) facts: BTreeSet<String>,
}

impl Case {
    /// The outcome of a step that has no tests of its own, or that broke down.
    pub(crate) fn of_step(name: &str, outcome: Outcome, note: String) -> Case {
        Case { outcome, note, ..Case::on(name, "step", &BTreeSet::new()) }
    }

    /// One that has not passed yet.
    pub(crate) fn on(test: &str, place: &str, facts: &BTreeSet<String>) -> Case {
        let (test, place) = (test.to_owned(), place.to_owned());
        let (outcome, note, facts) = (Outcome::Failed, String::new(), facts.clone());
        Case { test, place, conformance: false, outcome, note, failed_first: None, facts }
    }
}

/// Passed, failed, skipped.
pub(crate) fn count<'a>(cases: impl IntoIterator<Item = &'a Case>) -> (usize, usize, usize) {
    cases.into_iter().fold((0, 0, 0), |(passed, failed, skipped), case| match case.outcome {
        Outcome::Passed => (passed + 1, failed, skipped),
        Outcome::Failed => (passed, failed + 1, skipped),
        Outcome::Skipped => (passed, failed, skipped + 1),
    })
}

/// What a step found out, and how long it took.
pub(crate) struct Finished {
    pub(super) name: &'static str,
    pub(super) cases: Vec<Case>,
    pub(super) took: Duration,
}
