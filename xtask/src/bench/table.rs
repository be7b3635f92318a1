//! The tables of `cost`: for the terminal, and for docs/benchmarks.md.
//! Never leaves a contestant out: without a number, its row says why.

use std::fmt::Write;

use super::record::Cost;

/// What loop with direct I/O is called among the contestants.
pub(crate) const LOOP_DIRECT: &str = "loop-direct";

/// One row.
pub(crate) struct Row<'a> {
    pub(crate) name: &'a str,
    pub(crate) ours: bool,
    pub(crate) peer: bool,
    /// The numbers, or why there are none.
    pub(crate) figures: Result<Figures, String>,
}

/// A row's numbers.
pub(crate) struct Figures {
    /// Median.
    pub(crate) iops: f64,
    /// To loop with direct I/O.
    pub(crate) to_loop: Option<f64>,
    /// To the best peer.
    pub(crate) to_peer: Option<f64>,
    /// (largest - smallest) / median.
    pub(crate) spread: f64,
    pub(crate) runs: usize,
    /// Runs that failed and are in no number.
    pub(crate) failed: usize,
}

/// The rows of one workload, in the order of the field.
pub(crate) fn rows<'a>(cost: &'a Cost, workload: &str) -> Vec<Row<'a>> {
    let base = cost.sample(LOOP_DIRECT, workload).map(|sample| sample.median);
    let best = cost.best_peer(workload).map(|(_, iops)| iops);
    let row = |entrant: &'a super::record::Entrant| Row {
        name: &entrant.name,
        ours: entrant.ours,
        peer: entrant.peer,
        figures: cost
            .sample(&entrant.name, workload)
            .map(|sample| Figures {
                iops: sample.median,
                to_loop: base.map(|base| sample.median / base),
                to_peer: best.map(|best| sample.median / best),
                spread: sample.spread,
                runs: sample.count,
                failed: cost.failed(&entrant.name, workload),
            })
            .ok_or_else(|| cost.failure(entrant, workload)),
    };
    cost.entrants.iter().map(row).collect()
}

/// For the terminal.
pub(crate) fn text(cost: &Cost) -> String {
    let mut text = String::new();
    let width = cost.entrants.iter().map(|entrant| entrant.name.len()).max().unwrap_or(0).max(12);
    for workload in &cost.workloads {
        let _ = writeln!(text, "\n{} (I/Os per 10^9 instructions)", workload.title());
        let _ = writeln!(
            text,
            "  {:<width$}  {:>9}  {:>7}  {:>9}  {:>7}  {:>4}",
            "", "I/Os", "to loop", "to peer", "spread", "runs"
        );
        for row in rows(cost, &workload.name) {
            let _ = match row.figures {
                Ok(figures) => writeln!(
                    text,
                    "  {:<width$}  {:>9.0}  {:>7}  {:>9}  {:>6.1}%  {:>4}{}",
                    row.name,
                    figures.iops,
                    ratio(figures.to_loop),
                    ratio(figures.to_peer),
                    figures.spread * 100.0,
                    figures.runs,
                    failures(figures.failed)
                ),
                Err(why) => writeln!(text, "  {:<width$}  {why}", row.name),
            };
        }
    }
    text
}

/// For a document.
pub(crate) fn markdown(cost: &Cost, workload: &str) -> String {
    let mut text = String::from(
        "| | I/Os per 10⁹ instructions | to loop with direct I/O | to the best peer | spread | runs |\n\
         | --- | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for row in rows(cost, workload) {
        let name = if row.ours { format!("**{}**", row.name) } else { row.name.to_owned() };
        let _ = match row.figures {
            Ok(figures) => writeln!(
                text,
                "| {name} | {:.0} | {} | {} | {:.1} % | {}{} |",
                figures.iops,
                ratio(figures.to_loop),
                ratio(figures.to_peer),
                figures.spread * 100.0,
                figures.runs,
                failures(figures.failed)
            ),
            Err(why) => writeln!(text, "| {name} | {} | | | | 0 |", why.replace('|', "\\|")),
        };
    }
    text
}

fn failures(count: usize) -> String {
    if count == 0 { String::new() } else { format!(", {count} failed") }
}

fn ratio(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::tests::example;

    #[test]
    fn ratios_are_to_loop_and_to_the_best_peer() {
        let cost = example();
        let rows = rows(&cost, "randread-4k-d64");
        let becket = rows[1].figures.as_ref().ok().unwrap();
        assert_eq!(becket.to_loop, Some(0.88));
        assert_eq!(becket.to_peer, Some(1.1));
        assert_eq!(becket.spread, 0.02);
        assert_eq!(rows[3].figures.as_ref().err().unwrap(), "no libclang");
    }

    #[test]
    fn the_tables_hold_everybody() {
        let mut cost = example();
        let mut lost = cost.runs[1].clone();
        lost.outcome = super::super::record::Outcome::Failed("stuck".into());
        cost.runs.push(lost);
        for text in [text(&cost), markdown(&cost, "randread-4k-d64")] {
            for word in [
                "loop-direct",
                "becket",
                "kublk",
                "rublk",
                "no libclang",
                "44000",
                "0.880",
                "1.100",
                "2.0",
                "3, 1 failed",
            ] {
                assert!(text.contains(word), "{word} is not in\n{text}");
            }
        }
    }
}
