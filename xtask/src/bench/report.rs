//! `cargo xtask bench report`: a page with all results in target/bench, and a chart. docs/benchmarks.md was
//! made by it.
//! Never writes a number that is not in the data beside it.

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;

use super::goal::{self, Verdict};
use super::grid::Grid;
use super::metric::Metric;
use super::record::{self, Setting};
use super::series::Series;
use super::svg::{self, Bar, Kind};
use super::writeback::Writeback;
use super::{attach, losetup, nested, storm, table, wall, writeback_table};

const INTRODUCTION: &str = "# Benchmarks

`cargo xtask bench report` writes such a page to `target/bench` from the results there. This one was
kept; the results with all runs are not part of the sources.

The numbers of one table come from one run on one machine, so their ratios can be compared.
Where a table was put together from several runs of the same build, each row says when it was
measured. Do not compare numbers of different tables or of different machines. *Repeated*
counts runs of the load generator that failed and were made again. What was tried to improve
these numbers is in [decisions/](decisions/README.md).

";

/// The records that are grids: name, heading, what a reader must know.
const GRIDS: [(&str, &str, &str); 4] = [
    (
        "cost",
        "Instructions of one I/O",
        "The guest is emulated, and its clock advances with the instructions that it executes. So I/Os
in a guest second are I/Os per 10⁹ instructions: the cost of the whole path (load generator,
kernel and server), whatever else the host does. These numbers do not show how well work
overlaps on several CPUs. More is better; the line is the kernel's loop driver with direct
I/O.",
    ),
    (
        "wall",
        "Time, jobs and queues",
        "I/Os per second by the clock, in a guest with two emulated CPUs, each a thread of the host.
Emulation makes user code slower than system calls, and other work on the host disturbs it.
Read the spread first.",
    ),
    (
        "latency-time",
        "One I/O at a time: time",
        "From the submission of one I/O to its completion, by the clock in a guest with two emulated
CPUs. Less is better.",
    ),
    (
        "latency-cost",
        "One I/O at a time: instructions",
        "The same in instructions of the whole path, every task switch included. Less is better.",
    ),
];

/// The one workload that has a chart.
const CHART: (&str, &str) = ("cost", "randread-4k-d64");

/// Writes the page.
pub(crate) fn run() -> Result<u8> {
    let page = Page { folder: record::dir()? };
    let (mut text, mut verdicts) = (String::new(), Vec::new());
    for (name, heading, introduction) in GRIDS {
        if let Some(grid) = load::<Grid>(&format!("{name}.json"))? {
            let _ = writeln!(text, "## {heading}\n\n{introduction}\n");
            page.grid(&mut text, name, &grid)?;
            verdicts.extend(goal::of(name, &grid));
        } else {
            verdicts.extend(goal::unmeasured(name));
        }
    }
    let record = load::<Writeback>("writeback.json")?;
    if let Some(record) = &record {
        let _ = writeln!(text, "## Write-back\n\n{}\n", writeback_table::INTRODUCTION);
        record.settings.iter().for_each(|setting| about(&mut text, setting));
        let _ = writeln!(text, "{}", writeback_table::markdown(record));
    }
    verdicts.extend(writeback_table::verdicts(&record.unwrap_or_default()));
    type Judge = fn(&Series) -> Vec<Verdict>;
    let many: [(&str, &str, &str, Judge); 4] = [
        ("storm", "Many devices", storm::INTRODUCTION, storm::verdicts),
        ("losetup", "losetup", losetup::INTRODUCTION, losetup::verdicts),
        ("nested", "Images inside images", nested::INTRODUCTION, nested::verdicts),
        ("attach", "Attaching and detaching", attach::INTRODUCTION, |_| Vec::new()),
    ];
    for (name, heading, introduction, judge) in many {
        let record = load::<Series>(&format!("{name}.json"))?;
        if let Some(series) = &record {
            let _ = writeln!(text, "## {heading}\n\n{introduction}\n");
            for setting in &series.settings {
                about(&mut text, setting);
            }
            text.push_str(&series.markdown());
        }
        verdicts.extend(judge(&record.unwrap_or_default()));
    }
    let path =
        page.write("benchmarks.md", &format!("{INTRODUCTION}{}{}", goals(&verdicts), text.trim_end()))?;
    println!("{}", path.display());
    Ok(0)
}

fn goals(verdicts: &[Verdict]) -> String {
    if verdicts.is_empty() {
        return String::new();
    }
    let met = verdicts.iter().filter(|one| one.met).count();
    let of = verdicts.len();
    format!("## Goals\n\n{met} of {of} are met.\n\n{}\n", goal::markdown(verdicts))
}

/// Where the page and its chart go.
struct Page {
    folder: PathBuf,
}

impl Page {
    /// A grid's setting, its tables and its chart.
    fn grid(&self, text: &mut String, name: &str, grid: &Grid) -> Result<()> {
        for boot in &grid.boots {
            about(text, boot);
        }
        contestants(text, grid);
        for workload in &grid.workloads {
            let title = workload.title();
            for (index, &metric) in grid.metrics.iter().enumerate() {
                if index == 0 {
                    let _ = writeln!(text, "### {title}\n");
                }
                if (name, workload.name.as_str()) == CHART {
                    let chart = format!("{name}-{}.svg", workload.name);
                    self.write(&chart, &chart_of(grid, &workload.name, &title, metric))?;
                    let _ = writeln!(text, "![{title}]({chart})\n");
                }
                let _ = writeln!(text, "{}", table::markdown(grid, &workload.name, metric));
            }
        }
        let growth = wall::growth(grid);
        if !growth.is_empty() {
            let _ = writeln!(text, "### How it grows with jobs and queues\n\n{growth}");
        }
        Ok(())
    }

    fn write(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.folder.join(name);
        std::fs::write(&path, format!("{}\n", text.trim_end()))
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }
}

/// Reads a result.
fn load<T: DeserializeOwned>(name: &str) -> Result<Option<T>> {
    let value = record::load(name)?;
    if value.is_none() {
        eprintln!("xtask: there is no {name} in target/bench: that part is left out");
    }
    Ok(value)
}

/// What was run, on what, when, and how to repeat it.
fn about(text: &mut String, setting: &Setting) {
    let Setting { date, commit, build, kernel, cpus, emulator, command, notes, clock: _ } = setting;
    let _ = writeln!(text, "- when: {date} UTC, becket {commit}, SHA-256 {build}");
    let _ = writeln!(text, "- where: Linux {kernel}, {cpus} CPU(s), {emulator}");
    for note in notes {
        let _ = writeln!(text, "- {note}");
    }
    let _ = writeln!(text, "- again: `{command}`\n");
}

fn contestants(text: &mut String, grid: &Grid) {
    text.push_str("| contestant | attached by |\n| --- | --- |\n");
    for one in &grid.entrants {
        let _ = writeln!(text, "| {} | `{}` |", one.name, one.about);
    }
    text.push_str("\nThe best peer is the best server of another project.\n\n");
}

fn chart_of(grid: &Grid, workload: &str, title: &str, metric: Metric) -> String {
    let rows = table::rows(grid, workload, metric);
    let bars: Vec<Bar<'_>> = rows
        .iter()
        .map(|row| Bar {
            label: row.name,
            value: row.figures.as_ref().ok().map(|figures| figures.value),
            note: match &row.figures {
                Ok(figures) => match figures.to_loop {
                    Some(ratio) => format!("{:.0} ({ratio:.3})", figures.value),
                    None => format!("{:.0}", figures.value),
                },
                Err(_) => "not measured".to_owned(),
            },
            kind: Kind::of(row.ours, row.peer),
        })
        .collect();
    let mark = grid.sample(table::LOOP_DIRECT, workload, metric).map(|sample| sample.median);
    svg::bars(&format!("{title}: {} (ratio to loop)", metric.unit(grid.clock())), &bars, mark)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::grid::tests::example;

    #[test]
    fn the_chart_shows_who_was_not_measured() {
        let svg = chart_of(&example(), "randread-4k-d64", "t", Metric::Rate);
        assert!(svg.contains("not measured") && svg.contains("44000 (0.880)"), "{svg}");
        assert_eq!(svg.matches("class=\"ours\"").count(), 1);
    }

    #[test]
    fn a_reader_learns_how_to_repeat_it() {
        let mut text = String::new();
        about(&mut text, &example().boots[0]);
        for word in ["2026-01-31", "abc", "0123456789ab", "7.3", "QEMU 10", "cargo xtask bench cost", "fio 3"]
        {
            assert!(text.contains(word), "{word}");
        }
    }

    #[test]
    fn a_grids_chart_lies_beside_the_page() {
        let dir = tempfile::tempdir().unwrap();
        let mut text = String::new();
        Page { folder: dir.path().to_owned() }.grid(&mut text, "cost", &example()).unwrap();
        assert!(text.contains("(cost-randread-4k-d64.svg)"), "{text}");
        assert!(dir.path().join("cost-randread-4k-d64.svg").is_file());
        assert!(!text.contains("grows"), "one job only: {text}");
    }

    #[test]
    fn goals_are_counted() {
        let text = goals(&goal::of("cost", &example()));
        assert!(text.contains("1 of 5 are met"), "{text}");
        assert_eq!(goals(&[]), "");
    }
}
