//! What becket must reach (`goals.txt`), and whether it did: the same goals for the terminal and the page.
//! Never leaves a goal out: one that was missed, or not measured, is a row like the others.

use super::record::{Record, number};
use crate::exec::aligned;

const GOALS: &str = include_str!("goals.txt");

/// A goal and what was measured.
pub(crate) struct Verdict {
    what: String,
    goal: String,
    got: Option<f64>,
    pub(crate) met: bool,
}

/// The goals of a scenario.
pub(crate) fn of(scenario: &str, record: &Record) -> Vec<Verdict> {
    let goals = GOALS.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    goals.filter(|words| words[0] == scenario).filter_map(|words| judged(&words, record)).collect()
}

/// None: not a goal.
fn judged(words: &[&str], record: &Record) -> Option<Verdict> {
    let [scenario, place, what, ours, against, sign @ (">=" | "<="), bound] = *words else { return None };
    let bound: f64 = bound.parse().ok()?;
    let (other, theirs) = against.split_once(':').unwrap_or((what, against));
    let got = record.value(place, what, ours);
    let got = match against {
        "-" => got,
        _ => got.zip(record.value(place, other, theirs).filter(|base| *base > 0.0)).map(|(a, b)| a / b),
    };
    let met = got.is_some_and(|got| if sign == ">=" { got >= bound } else { got <= bound });
    let to = if against == "-" { String::new() } else { format!(" to {against}") };
    let goal = format!("{} {bound}", if sign == ">=" { "at least" } else { "at most" });
    Some(Verdict { what: format!("{scenario}, {place}, {what}: {ours}{to}"), goal, got, met })
}

/// For a document, and as readable at a terminal.
pub(crate) fn table(verdicts: &[Verdict]) -> String {
    let mut rows = vec![["", "", "goal", "measured"].map(str::to_owned)];
    for one in verdicts {
        let word = match (one.got, one.met) {
            (None, _) => "**not measured**",
            (_, true) => "met",
            (_, false) => "**missed**",
        };
        let got = one.got.map_or_else(|| "-".to_owned(), number);
        rows.push([one.what.clone(), word.to_owned(), one.goal.clone(), got]);
    }
    if verdicts.is_empty() { String::new() } else { aligned(&rows, 2) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::tests::example;
    use crate::bench::scenario::SCENARIOS;

    #[test]
    fn a_missed_goal_is_shown_as_missed() {
        // In the example becket has 1.1 of the best peer and 0.88 of loop.
        let verdicts = of("cost", &example("guest"));
        let words: Vec<(bool, bool)> = verdicts.iter().map(|one| (one.met, one.got.is_some())).collect();
        assert_eq!(words, [(true, true), (false, true), (false, false), (false, false), (false, false)]);
        let text = table(&verdicts);
        assert!(text.contains("| **missed** ") && text.contains("| at least 0.97 |     0.88 |"), "{text}");
    }

    #[test]
    fn every_line_is_a_goal_of_a_scenario() {
        let lines = GOALS.lines().filter(|line| !line.starts_with('#')).count();
        let all: Vec<Verdict> = SCENARIOS.iter().flat_map(|one| of(one.name, &Record::default())).collect();
        assert_eq!(all.len(), lines);
        assert!(lines > 60 && all.iter().all(|one| !one.met), "what was not measured is not met");
        let places: Vec<&str> = SCENARIOS.iter().flat_map(|one| one.places).map(|place| place.name).collect();
        let named = |line: &str| places.contains(&line.split(' ').nth(1).unwrap());
        assert!(GOALS.lines().filter(|line| !line.starts_with('#')).all(named));
    }
}
