//! The tables of a grid: for the terminal, and for the report.
//! Never leaves a contestant out: without a number, its row says why.

use std::fmt::Write;

use super::grid::Grid;
use super::metric::Metric;
use super::record::{Clock, Entrant};

/// What loop with direct I/O is called among the contestants.
pub(crate) const LOOP_DIRECT: &str = "loop-direct";

/// One row.
pub(crate) struct Row<'a> {
    pub(crate) name: &'a str,
    pub(crate) ours: bool,
    pub(crate) peer: bool,
    /// The numbers, or why there are none.
    pub(crate) figures: Result<Figures, String>,
    /// When it was measured, where a table is of several boots.
    pub(crate) when: Option<String>,
}

/// A row's numbers.
pub(crate) struct Figures {
    /// Median.
    pub(crate) value: f64,
    /// To loop with direct I/O.
    pub(crate) to_loop: Option<f64>,
    /// To the best peer.
    pub(crate) to_peer: Option<f64>,
    /// (largest - smallest) / median.
    pub(crate) spread: f64,
    pub(crate) runs: usize,
    /// Runs that did not end well but did when they were made again.
    pub(crate) repeated: usize,
    /// Runs that failed and are in no number.
    pub(crate) failed: usize,
}

/// The rows of one workload, in the order of the field.
pub(crate) fn rows<'a>(grid: &'a Grid, workload: &str, metric: Metric) -> Vec<Row<'a>> {
    let base = grid.sample(LOOP_DIRECT, workload, metric).map(|sample| sample.median);
    let best = grid.best_peer(workload, metric).map(|(_, value)| value);
    let boots: Vec<Vec<usize>> = grid.entrants.iter().map(|one| grid.boots_of(&one.name, workload)).collect();
    let mut all: Vec<usize> = boots.iter().flatten().copied().collect();
    all.sort_unstable();
    all.dedup();
    let row = |(entrant, boots): (&'a Entrant, &Vec<usize>)| Row {
        name: &entrant.name,
        ours: entrant.ours,
        peer: entrant.peer,
        figures: grid
            .sample(&entrant.name, workload, metric)
            .map(|sample| {
                let (repeated, failed) = grid.failed(&entrant.name, workload);
                Figures {
                    value: sample.median,
                    to_loop: base.map(|base| sample.median / base),
                    to_peer: best.map(|best| sample.median / best),
                    spread: sample.spread,
                    runs: sample.count,
                    repeated,
                    failed,
                }
            })
            .ok_or_else(|| grid.failure(entrant, workload)),
        when: (all.len() > 1).then(|| dates(grid, boots)),
    };
    grid.entrants.iter().zip(&boots).map(row).collect()
}

fn dates(grid: &Grid, boots: &[usize]) -> String {
    let dates: Vec<&str> =
        boots.iter().filter_map(|&boot| Some(grid.boots.get(boot)?.date.as_str())).collect();
    dates.join(", ")
}

/// For the terminal.
pub(crate) fn text(grid: &Grid) -> String {
    let mut text = String::new();
    let width = grid.entrants.iter().map(|entrant| entrant.name.len()).max().unwrap_or(0).max(12);
    let clock = grid.clock();
    for workload in &grid.workloads {
        for &metric in &grid.metrics {
            let _ = writeln!(text, "\n{} ({})", workload.title(), metric.unit(clock));
            let _ = writeln!(
                text,
                "  {:<width$}  {:>9}  {:>7}  {:>9}  {:>7}  {:>4}",
                "", "", "to loop", "to peer", "spread", "runs"
            );
            for row in rows(grid, &workload.name, metric) {
                let when = row.when.map(|when| format!("  {when}")).unwrap_or_default();
                let _ = match row.figures {
                    Ok(figures) => writeln!(
                        text,
                        "  {:<width$}  {:>9}  {:>7}  {:>9}  {:>6.1}%  {:>4}{}{when}",
                        row.name,
                        number(figures.value),
                        ratio(figures.to_loop),
                        ratio(figures.to_peer),
                        figures.spread * 100.0,
                        figures.runs,
                        failures(&figures)
                    ),
                    Err(why) => writeln!(text, "  {:<width$}  {why}", row.name),
                };
            }
        }
    }
    text
}

/// For a document.
pub(crate) fn markdown(grid: &Grid, workload: &str, metric: Metric) -> String {
    let rows = rows(grid, workload, metric);
    let dated = rows.iter().any(|row| row.when.is_some());
    let (head, line) = if dated { (" when (UTC) |", " --- |") } else { ("", "") };
    let mut text = format!(
        "| | {} | to loop with direct I/O | to the best peer | spread | runs |{head}\n\
         | --- | ---: | ---: | ---: | ---: | ---: |{line}\n",
        metric.unit(grid.clock())
    );
    for row in rows {
        let name = if row.ours { format!("**{}**", row.name) } else { row.name.to_owned() };
        let when = row.when.map(|when| format!(" {when} |")).unwrap_or_default();
        let _ = match row.figures {
            Ok(figures) => writeln!(
                text,
                "| {name} | {} | {} | {} | {:.1} % | {}{} |{when}",
                number(figures.value),
                ratio(figures.to_loop),
                ratio(figures.to_peer),
                figures.spread * 100.0,
                figures.runs,
                failures(&figures)
            ),
            Err(why) => writeln!(text, "| {name} | {} | | | | 0 |{when}", why.replace('|', "\\|")),
        };
    }
    text
}

fn failures(figures: &Figures) -> String {
    let part =
        |count: usize, what: &str| if count == 0 { String::new() } else { format!(", {count} {what}") };
    part(figures.repeated, "repeated") + &part(figures.failed, "failed")
}

/// Five digits are enough of anything that is measured here.
fn number(value: f64) -> String {
    if value < 1000.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

fn ratio(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"))
}

impl Grid {
    /// What the guest's clock counted.
    pub(crate) fn clock(&self) -> Clock {
        self.boots.first().map_or(Clock::Time, |boot| boot.clock)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::grid::tests::{example, failed_run};

    const JOB: &str = "randread-4k-d64";

    #[test]
    fn ratios_are_to_loop_and_to_the_best_peer() {
        let grid = example();
        let rows = rows(&grid, JOB, Metric::Rate);
        let becket = rows[1].figures.as_ref().ok().unwrap();
        assert_eq!(becket.to_loop, Some(0.88));
        assert_eq!(becket.to_peer, Some(1.1));
        assert_eq!(becket.spread, 0.02);
        assert_eq!(rows[3].figures.as_ref().err().unwrap(), "no libclang");
        assert!(rows.iter().all(|row| row.when.is_none()));
    }

    #[test]
    fn the_tables_hold_everybody() {
        let mut grid = example();
        // The first round was made again, a fourth was given up.
        grid.runs.push(failed_run("becket", 1));
        grid.runs.push(failed_run("becket", 4));
        for text in [text(&grid), markdown(&grid, JOB, Metric::Rate)] {
            for word in [
                "loop-direct",
                "kublk",
                "rublk",
                "no libclang",
                "44000",
                "0.880",
                "1.100",
                "2.0",
                "3, 1 repeated, 1 failed",
            ] {
                assert!(text.contains(word), "{word} is not in\n{text}");
            }
        }
    }
}
