//! What the run found: steps with their times, skips, the conformance table, failures, and the closing line.
//! Never leaves a failure or a skip out of the list, and prints the counts alone on the last line, the
//! failures just above it: the end is what is read when only the end was kept.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};

use super::case::{Case, Finished, Outcome, count};
use crate::exec::{self, aligned};

/// A step's line: counts and time.
pub(crate) fn summary(cases: &[Case], took: Duration) -> String {
    let (passed, failed, skipped) = count(cases);
    format!("{passed} passed, {failed} failed, {skipped} skipped in {:.0} s", took.as_secs_f64())
}

/// Prints everything, and which steps were left out; the exit code.
pub(crate) fn print(steps: &[Finished], left_out: &[&str], took: Duration) -> u8 {
    let all = || steps.iter().flat_map(|step| &step.cases);
    println!("\n== steps");
    for step in steps {
        println!("{:<26}{}", step.name, summary(&step.cases, step.took));
    }
    println!("{:<26}{:.0} s", "together", took.as_secs_f64());
    if !left_out.is_empty() {
        println!("not run, unless they are named: {}", left_out.join(", "));
    }

    let (passed, failed, skipped) = count(all());
    let with = |outcome| all().filter(move |case| case.outcome == outcome);
    if skipped > 0 {
        println!("\n== skipped, as xtask/allowed-skips.txt allows");
        with(Outcome::Skipped).for_each(|case| println!("{} ({}): {}", case.test, case.place, case.note));
    }
    let table = conformance_table(steps);
    if !table.is_empty() {
        println!("\n== conformance: test by transport by kernel\n{table}");
    }
    if failed > 0 {
        println!("\n== failed");
        with(Outcome::Failed).for_each(|case| println!("{} ({}): {}", case.test, case.place, case.note));
    }
    let again: Vec<_> = all().filter_map(|case| Some((case, case.failed_first.as_ref()?))).collect();
    if !again.is_empty() {
        println!("\n== passed, but only when run again, alone; at first");
        again.iter().for_each(|(case, why)| println!("{} ({}): {why}", case.test, case.place));
    }
    let again = match again.len() {
        0 => String::new(),
        count => format!(" ({count} of them only when run again)"),
    };
    println!("\n{passed} passed{again}, {failed} failed, {skipped} skipped");
    u8::from(failed > 0 || passed == 0)
}

/// Writes the conformance table to the target directory, when the suite ran anywhere.
pub(crate) fn write_conformance(steps: &[Finished]) -> Result<()> {
    let table = conformance_table(steps);
    if table.is_empty() {
        return Ok(());
    }
    let path = exec::target_dir().join("conformance.md");
    std::fs::write(&path, format!("# Conformance: test by transport by kernel\n\n{table}"))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// A Markdown table with a row for each test and a column for each machine.
fn conformance_table(steps: &[Finished]) -> String {
    let mut places: Vec<&str> = Vec::new();
    let mut rows: BTreeMap<&str, BTreeMap<&str, Outcome>> = BTreeMap::new();
    for case in steps.iter().flat_map(|step| &step.cases).filter(|case| case.conformance) {
        if !places.contains(&case.place.as_str()) {
            places.push(&case.place);
        }
        rows.entry(&case.test).or_default().insert(&case.place, case.outcome);
    }
    if rows.is_empty() {
        return String::new();
    }
    let head = ["test"].into_iter().chain(places.iter().copied()).map(str::to_owned).collect();
    let row = |(test, outcomes): (&&str, &BTreeMap<&str, Outcome>)| {
        let word = |place: &&str| match outcomes.get(place) {
            Some(Outcome::Passed) => "ok",
            Some(Outcome::Failed) => "FAILED",
            Some(Outcome::Skipped) => "skipped",
            None => "not run",
        };
        let cells = places.iter().map(|place| word(place).to_owned());
        [(*test).to_owned()].into_iter().chain(cells).collect::<Vec<String>>()
    };
    aligned(&[head].into_iter().chain(rows.iter().map(row)).collect::<Vec<_>>(), 1 + places.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(test: &str, place: &str, outcome: Outcome) -> Case {
        let mut case = Case::of_step(test, outcome, String::new());
        case.place = place.to_owned();
        case.conformance = true;
        case
    }

    #[test]
    fn the_table_has_a_cell_for_each_test_on_each_machine() {
        let cases = vec![
            case("trim", "host loop", Outcome::Passed),
            case("trim", "7.x ublk", Outcome::Failed),
            case("flush", "7.x ublk", Outcome::Skipped),
        ];
        let steps = [Finished { name: "x", cases, took: Duration::ZERO }];
        let table = conformance_table(&steps);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "| test  | host loop | 7.x ublk |");
        assert_eq!(lines[2], "| flush | not run   | skipped  |");
        assert_eq!(lines[3], "| trim  | ok        | FAILED   |");
    }

    #[test]
    fn a_failure_or_nothing_at_all_is_no_success() {
        let step =
            |outcome| Finished { name: "x", cases: vec![case("t", "p", outcome)], took: Duration::ZERO };
        assert_eq!(print(&[step(Outcome::Passed)], &[], Duration::ZERO), 0);
        assert_eq!(print(&[step(Outcome::Failed)], &[], Duration::ZERO), 1);
        assert_eq!(print(&[], &[], Duration::ZERO), 1);
    }
}
