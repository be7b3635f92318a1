//! What becket must reach, and whether it did: the same goals for the terminal and for the report.
//! Never leaves a goal out: one that was missed, or not measured, is a row like the others.

use std::fmt::Write;

use super::grid::Grid;
use super::metric::Metric;
use super::table::LOOP_DIRECT;

/// becket as it is without options.
const BECKET: &str = "becket";

/// What becket is compared with.
#[derive(Clone, Copy)]
enum Against {
    Loop,
    Peer,
    File,
}

/// One goal: record, workload, metric, compared with what, and the ratio: a minimum for rates, a maximum for
/// the rest.
type Goal = (&'static str, &'static str, Metric, Against, f64);

/// The table of goals, for the records that are grids.
const GOALS: &[Goal] = &[
    ("cost", "randread-4k-d64", Metric::Rate, Against::Peer, 1.02),
    ("cost", "randread-4k-d64", Metric::Rate, Against::Loop, 0.97),
    ("cost", "randwrite-4k-d64", Metric::Rate, Against::Peer, 1.02),
    ("cost", "read-1m-d4", Metric::Rate, Against::File, 0.97),
    ("cost", "write-1m-d4", Metric::Rate, Against::File, 0.97),
    ("wall", "randread-4k-d64", Metric::Rate, Against::Loop, 1.5),
    ("wall", "randread-4k-d64", Metric::Rate, Against::Peer, 1.1),
    ("wall", "randwrite-4k-d64", Metric::Rate, Against::Loop, 1.3),
    ("wall", "randwrite-4k-d64", Metric::Rate, Against::Peer, 1.1),
    ("wall", "read-1m-d4", Metric::Rate, Against::File, 0.97),
    ("wall", "write-1m-d4", Metric::Rate, Against::File, 0.97),
    ("latency-time", "randread-4k-d1", Metric::Median, Against::Loop, 1.1),
    ("latency-time", "randwrite-4k-d1", Metric::Median, Against::Loop, 1.1),
    ("latency-cost", "randread-4k-d1", Metric::Price, Against::Loop, 1.1),
    ("latency-cost", "randwrite-4k-d1", Metric::Price, Against::Loop, 1.1),
];

/// A goal and what was measured.
#[derive(Debug, PartialEq)]
pub(crate) struct Verdict {
    pub(crate) what: String,
    pub(crate) goal: String,
    /// None: not measured.
    pub(crate) got: Option<f64>,
    pub(crate) met: bool,
}

impl Verdict {
    /// Against a largest value.
    pub(crate) fn at_most(what: String, most: f64, got: Option<f64>) -> Verdict {
        let met = got.is_some_and(|got| got <= most);
        Verdict { what, goal: format!("at most {most}"), got, met }
    }

    /// Against a least value.
    pub(crate) fn at_least(what: String, least: f64, got: Option<f64>) -> Verdict {
        let met = got.is_some_and(|got| got >= least);
        Verdict { what, goal: format!("at least {least}"), got, met }
    }

    fn word(&self) -> &'static str {
        match (self.got, self.met) {
            (None, _) => "not measured",
            (_, true) => "met",
            (_, false) => "missed",
        }
    }

    fn figure(&self) -> String {
        self.got.map_or_else(|| "-".to_owned(), |got| format!("{got:.3}"))
    }
}

/// The goals that a record of this name is held to.
pub(crate) fn of(name: &str, grid: &Grid) -> Vec<Verdict> {
    let of = |goal: &&Goal| goal.0 == name;
    GOALS.iter().filter(of).map(|goal| judged(goal, grid)).collect()
}

/// The same goals when there is no such record.
pub(crate) fn unmeasured(name: &str) -> Vec<Verdict> {
    let verdict = |&(_, workload, metric, _, bound): &Goal| {
        let least = !metric.less_is_better();
        let what = format!("{workload} (`cargo xtask bench {}`)", name.split('-').next().unwrap_or(name));
        if least { Verdict::at_least(what, bound, None) } else { Verdict::at_most(what, bound, None) }
    };
    GOALS.iter().filter(|goal| goal.0 == name).map(verdict).collect()
}

fn judged(&(_, workload, metric, against, bound): &Goal, grid: &Grid) -> Verdict {
    let title = grid.workloads.iter().find(|one| one.name == workload);
    let title = title.map_or_else(|| workload.to_owned(), |one| one.title());
    let value = |name: &str| grid.sample(name, workload, metric).map(|sample| sample.median);
    let unit = metric.unit(grid.clock());
    let (whom, base) = match against {
        Against::Loop => ("loop with direct I/O", value(LOOP_DIRECT)),
        Against::Peer => ("the best peer", grid.best_peer(workload, metric).map(|(_, value)| value)),
        Against::File => ("the file itself", value("file")),
    };
    let what = format!("{title}: {unit}, to {whom}");
    let got = value(BECKET).zip(base).map(|(ours, base)| ours / base);
    if metric.less_is_better() {
        Verdict::at_most(what, bound, got)
    } else {
        Verdict::at_least(what, bound, got)
    }
}

/// For the terminal.
pub(crate) fn text(verdicts: &[Verdict]) -> String {
    let mut text = String::new();
    for one in verdicts {
        let _ = writeln!(text, "goal: {}: {}, {}: {}", one.what, one.goal, one.figure(), one.word());
    }
    if text.is_empty() { text } else { format!("\n{text}") }
}

/// For a document.
pub(crate) fn markdown(verdicts: &[Verdict]) -> String {
    let mut text = String::from("| becket | goal | measured | |\n| --- | ---: | ---: | --- |\n");
    for one in verdicts {
        let word = if one.met { one.word().to_owned() } else { format!("**{}**", one.word()) };
        let _ = writeln!(text, "| {} | {} | {} | {word} |", one.what, one.goal, one.figure());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::fio::Workload;
    use crate::bench::grid::tests::example;

    #[test]
    fn a_missed_goal_is_said_to_be_missed() {
        // In the example becket has 1.1 of the best peer and 0.88 of loop.
        let verdicts = of("cost", &example());
        let words: Vec<&str> = verdicts.iter().map(Verdict::word).collect();
        assert_eq!(words, ["met", "missed", "not measured", "not measured", "not measured"]);
        let text = markdown(&verdicts);
        assert!(text.contains("| at least 0.97 | 0.880 | **missed** |"), "{text}");
        assert!(text.contains("to the best peer | at least 1.02 | 1.100 | met |"), "{text}");
    }

    #[test]
    fn goals_without_a_record_are_still_there() {
        let verdicts = unmeasured("cost");
        assert_eq!(verdicts.len(), of("cost", &example()).len());
        assert!(verdicts.iter().all(|one| one.word() == "not measured"));
        assert_eq!(verdicts[0].goal, "at least 1.02");
        assert_eq!(unmeasured("latency-time")[0].goal, "at most 1.1");
    }

    #[test]
    fn a_latency_must_be_small() {
        let verdict = |got| Verdict::at_most("x".into(), 1.1, got).word();
        assert_eq!(
            (verdict(Some(1.0)), verdict(Some(1.2)), verdict(None)),
            ("met", "missed", "not measured")
        );
    }

    #[test]
    fn each_goal_is_of_a_workload_that_is_run() {
        let names: Vec<String> = Workload::all().into_iter().map(|one| one.name).collect();
        for goal in GOALS {
            assert!(names.iter().any(|name| name == goal.1), "{}", goal.1);
        }
    }
}
