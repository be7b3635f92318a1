//! `cargo xtask bench report`: docs/benchmarks.md, its charts and its data, from what is in target/bench.
//! Never writes a number that is not in the data kept beside it.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;

use super::attach::{self, Attach};
use super::goal::{self, Verdict};
use super::grid::Grid;
use super::metric::Metric;
use super::profile::{self, Profiles};
use super::record::{self, Setting};
use super::series::Series;
use super::svg::{self, Bar, Kind};
use super::writeback::Writeback;
use super::{configure, losetup, nested, storm, table, wall, writeback_table};
use crate::exec;

const INTRODUCTION: &str = "# Benchmarks

`cargo xtask bench report` writes this page from the JSON files in [benchmarks/](benchmarks/);
do not edit it.

The numbers of one table come from one run on one machine, so their ratios can be compared.
Where a table was put together from several runs of the same build, each row says when it was
measured. Do not compare numbers of different tables or of different machines. *Repeated*
counts runs of the load generator that failed and were made again. What was tried to improve
these numbers is in [decisions/](decisions/README.md).

";

/// The records that are grids: name, heading, what a reader must know.
const GRIDS: [(&str, &str, &str); 6] = [
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
    (
        "batch-cost",
        "Batches, one CPU",
        "The load generator submits a batch of I/Os and waits for all of them. The kernel counted the
system calls and futex calls of the server's threads (raw_syscalls:sys_enter) in a separate
run of 16,384 I/Os. A test shows that becket allocates nothing for a request:
`crates/becket-engine/tests/allocations.rs`.",
    ),
    (
        "batch-time",
        "Batches, two CPUs",
        "The same by the clock with two CPUs. Here a server may be as fast as requests arrive, and then
gets few at a time.",
    ),
];

const PROFILE: &str = "## Where the instructions go

Samples by instructions. The name of a function decides which part it is counted in; the
remainder is *rest*. `null_blk` is the backing, and also holds copies with interrupts off.

";

/// Writes the documents.
pub(crate) fn run() -> Result<u8> {
    let docs = exec::workspace().join("docs");
    let page = Page { folder: docs.join("benchmarks") };
    std::fs::create_dir_all(&page.folder)
        .with_context(|| format!("cannot make {}", page.folder.display()))?;
    let (mut text, mut verdicts) = (String::new(), Vec::new());
    for (name, heading, introduction) in GRIDS {
        if let Some(grid) = page.load::<Grid>(&format!("{name}.json"))? {
            let _ = writeln!(text, "## {heading}\n\n{introduction}\n");
            page.grid(&mut text, name, &grid)?;
            verdicts.extend(goal::of(name, &grid));
        } else {
            verdicts.extend(goal::unmeasured(name));
        }
    }
    let record = page.load::<Writeback>("writeback.json")?;
    if let Some(record) = &record {
        page.writeback(&mut text, record)?;
    }
    verdicts.extend(writeback_table::verdicts(&record.unwrap_or_default()));
    type Judge = fn(&Series) -> Vec<Verdict>;
    let many: [(&str, &str, &str, Judge); 4] = [
        ("storm", "Many devices", storm::INTRODUCTION, storm::verdicts),
        ("configure", "Configuring", configure::INTRODUCTION, configure::verdicts),
        ("losetup", "losetup", losetup::INTRODUCTION, losetup::verdicts),
        ("nested", "Images inside images", nested::INTRODUCTION, nested::verdicts),
    ];
    for (name, heading, introduction, judge) in many {
        let data = format!("{name}.json");
        let record = page.load::<Series>(&data)?;
        if let Some(series) = &record {
            let _ = writeln!(text, "## {heading}\n\n{introduction}\n");
            for setting in &series.settings {
                about(&mut text, setting, &data);
            }
            text.push_str(&series.markdown());
        }
        verdicts.extend(judge(&record.unwrap_or_default()));
    }
    if let Some(profiles) = page.load::<Profiles>("profile.json")? {
        text.push_str(PROFILE);
        about(&mut text, &profiles.setting, "profile.json");
        page.write("profile.svg", &profile::chart(&profiles))?;
        let _ = writeln!(text, "![by room](benchmarks/profile.svg)\n\n{}", profile::markdown(&profiles));
        let _ = writeln!(text, "```\n{}```\n", profile::by_function(&profiles, 1.0));
    }
    if let Some(attach) = page.load::<Attach>("attach.json")? {
        text.push_str("## Attaching and detaching\n\n");
        about(&mut text, &attach.setting, "attach.json");
        let _ = writeln!(text, "```\n{}```\n", attach::text(&attach).trim_start_matches('\n'));
    }
    let path = docs.join("benchmarks.md");
    write(&path, &format!("{INTRODUCTION}{}{}", goals(&verdicts), text.trim_end()))?;
    page.tidy(&text)?;
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

/// Where the document's charts and data go.
struct Page {
    folder: PathBuf,
}

impl Page {
    /// A grid's setting, its charts and its tables.
    fn grid(&self, text: &mut String, name: &str, grid: &Grid) -> Result<()> {
        for boot in &grid.boots {
            about(text, boot, &format!("{name}.json"));
        }
        contestants(text, grid);
        for workload in &grid.workloads {
            let title = workload.title();
            for (index, &metric) in grid.metrics.iter().enumerate() {
                // The first metric is the one that counts.
                if index == 0 {
                    let chart = format!("{name}-{}.svg", workload.name);
                    self.write(&chart, &chart_of(grid, &workload.name, &title, metric))?;
                    let _ = writeln!(text, "### {title}\n\n![{title}](benchmarks/{chart})\n");
                }
                let _ = writeln!(text, "{}", table::markdown(grid, &workload.name, metric));
            }
        }
        for (heading, part) in [
            ("How it grows with jobs and queues", wall::growth(grid)),
            ("System calls of the server for each I/O (futex calls in all)", table::calls(grid, true)),
        ] {
            if !part.is_empty() {
                let _ = writeln!(text, "### {heading}\n\n{part}");
            }
        }
        Ok(())
    }

    fn writeback(&self, text: &mut String, record: &Writeback) -> Result<()> {
        text.push_str("## Write-back\n\n");
        let _ = writeln!(text, "{}\n", writeback_table::INTRODUCTION);
        for setting in &record.settings {
            about(text, setting, "writeback.json");
        }
        for (name, chart) in writeback_table::charts(record) {
            self.write(&name, &chart)?;
            let _ = writeln!(text, "![{name}](benchmarks/{name})\n");
        }
        let _ = writeln!(text, "{}", writeback_table::markdown(record));
        Ok(())
    }

    /// Reads a result and keeps a copy beside the documents.
    fn load<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let value = record::load(name)?;
        if value.is_some() {
            std::fs::copy(record::dir()?.join(name), self.folder.join(name))
                .with_context(|| format!("cannot copy {name}"))?;
        } else {
            eprintln!("xtask: there is no {name} in target/bench: that part is left out");
        }
        Ok(value)
    }

    /// Removes the charts and data of earlier reports that this one does not name.
    fn tidy(&self, text: &str) -> Result<()> {
        for entry in std::fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let ours = path.extension().is_some_and(|kind| kind == "svg" || kind == "json");
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if ours && !text.contains(&format!("(benchmarks/{name})")) {
                std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
            }
        }
        Ok(())
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        write(&self.folder.join(name), text)
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    let text = if text.ends_with('\n') { text.to_owned() } else { format!("{text}\n") };
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// What was run, on what, when, and how to repeat it.
fn about(text: &mut String, setting: &Setting, data: &str) {
    let Setting { date, commit, build, kernel, cpus, emulator, command, notes, clock: _ } = setting;
    let _ = writeln!(text, "- when: {date} UTC, becket {commit}, SHA-256 {build}");
    let _ = writeln!(text, "- where: Linux {kernel}, {cpus} CPU(s), {emulator}");
    for note in notes {
        let _ = writeln!(text, "- {note}");
    }
    let _ = writeln!(text, "- again: `{command}`; all runs: [{data}](benchmarks/{data})\n");
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
        about(&mut text, &example().boots[0], "cost.json");
        for word in ["2026-01-31", "abc", "0123456789ab", "7.3", "QEMU 10", "cargo xtask bench cost", "fio 3"]
        {
            assert!(text.contains(word), "{word}");
        }
    }

    #[test]
    fn a_grids_charts_and_data_lie_beside_the_page() {
        let dir = tempfile::tempdir().unwrap();
        let mut text = String::new();
        Page { folder: dir.path().to_owned() }.grid(&mut text, "cost", &example()).unwrap();
        assert!(text.contains("(benchmarks/cost-randread-4k-d64.svg)"), "{text}");
        assert!(dir.path().join("cost-randread-4k-d64.svg").is_file());
        assert!(!text.contains("grows"), "one job only: {text}");
    }

    #[test]
    fn what_an_earlier_report_left_goes() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["old.svg", "old.json", "kept.svg", "notes.md"] {
            std::fs::write(dir.path().join(name), "x").unwrap();
        }
        Page { folder: dir.path().to_owned() }.tidy("![a](benchmarks/kept.svg)").unwrap();
        let left: std::collections::BTreeSet<_> =
            std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["kept.svg".into(), "notes.md".into()].into());
    }

    #[test]
    fn goals_are_counted() {
        let text = goals(&goal::of("cost", &example()));
        assert!(text.contains("1 of 5 are met"), "{text}");
        assert_eq!(goals(&[]), "");
    }
}
