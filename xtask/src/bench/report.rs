//! `cargo xtask bench report`: docs/benchmarks.md, its charts and its data, from what is in target/bench.
//! Never writes a number that is not in the data kept beside it.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;

use super::attach::Attach;
use super::profile::{self, Profiles};
use super::record::{self, Cost, Setting};
use super::svg::{self, Bar, Kind};
use super::{attach, table};
use crate::exec;

const INTRODUCTION: &str = "# Benchmarks

Written by `cargo xtask bench report` from the JSON files in [benchmarks/](benchmarks/); do not edit.

Numbers of one table come from one run on one machine, so their ratios mean something. Numbers of different tables, or
of another machine, must not be compared.

";

const COST: &str = "## Instructions of one I/O

The guest is emulated and its clock advances with the instructions that it executes, so I/Os in a guest second are I/Os
per 10⁹ instructions: the price of the whole path, load generator, kernel and server, whatever else the host does. Nothing
of it says how well work overlaps on several CPUs. More is better; the line is the kernel's loop driver with direct I/O.

";

const PROFILE: &str = "## Where the instructions go

Sampled by instructions. A function is counted in a room by its name, what does not fit is in *rest*; `null_blk` is the
backing, and copies with interrupts off.

";

/// Writes the documents.
pub(crate) fn run() -> Result<u8> {
    let docs = exec::workspace().join("docs");
    let folder = docs.join("benchmarks");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut text = INTRODUCTION.to_owned();
    if let Some(cost) = load::<Cost>("cost.json", &folder)? {
        text.push_str(COST);
        about(&mut text, &cost.setting, "cost.json");
        contestants(&mut text, &cost);
        for workload in &cost.workloads {
            let chart = format!("cost-{}.svg", workload.name);
            write(&folder.join(&chart), &chart_of(&cost, &workload.name, &workload.title()))?;
            let _ =
                writeln!(text, "### {title}\n\n![{title}](benchmarks/{chart})\n", title = workload.title());
            text.push_str(&table::markdown(&cost, &workload.name));
            text.push('\n');
        }
    }
    if let Some(profiles) = load::<Profiles>("profile.json", &folder)? {
        text.push_str(PROFILE);
        about(&mut text, &profiles.setting, "profile.json");
        let _ = writeln!(text, "```\n{}```\n", profile::by_room(&profiles).trim_start_matches('\n'));
        let _ = writeln!(text, "```\n{}```\n", profile::by_function(&profiles, 1.0));
    }
    if let Some(attach) = load::<Attach>("attach.json", &folder)? {
        text.push_str("## Attaching and detaching\n\n");
        about(&mut text, &attach.setting, "attach.json");
        let _ = writeln!(text, "```\n{}```\n", attach::text(&attach).trim_start_matches('\n'));
    }
    let path = docs.join("benchmarks.md");
    write(&path, text.trim_end().to_owned().as_str())?;
    println!("{}", path.display());
    Ok(0)
}

/// Reads a result and keeps a copy beside the documents.
fn load<T: DeserializeOwned>(name: &str, folder: &Path) -> Result<Option<T>> {
    let path = record::dir()?.join(name);
    if !path.is_file() {
        eprintln!("xtask: there is no {}: that part is left out", path.display());
        return Ok(None);
    }
    let text = std::fs::read_to_string(&path)?;
    let value =
        serde_json::from_str(&text).with_context(|| format!("{} is not as expected", path.display()))?;
    write(&folder.join(name), &text)?;
    Ok(Some(value))
}

fn write(path: &Path, text: &str) -> Result<()> {
    let text = if text.ends_with('\n') { text.to_owned() } else { format!("{text}\n") };
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// What was run, on what, when, and how to repeat it.
fn about(text: &mut String, setting: &Setting, data: &str) {
    let Setting { date, commit, kernel, cpus, emulator, command, notes } = setting;
    let _ = writeln!(text, "- when: {date} UTC, becket {commit}");
    let _ = writeln!(text, "- where: Linux {kernel}, {cpus} CPU(s), {emulator}");
    for note in notes {
        let _ = writeln!(text, "- {note}");
    }
    let _ = writeln!(text, "- again: `{command}`; all runs: [{data}](benchmarks/{data})\n");
}

fn contestants(text: &mut String, cost: &Cost) {
    text.push_str("| contestant | attached by |\n| --- | --- |\n");
    for one in &cost.entrants {
        let _ = writeln!(text, "| {} | `{}` |", one.name, one.about);
    }
    text.push_str("\nThe best peer is the best of the servers that are not becket's.\n\n");
}

fn chart_of(cost: &Cost, workload: &str, title: &str) -> String {
    let rows = table::rows(cost, workload);
    let bars: Vec<Bar<'_>> = rows
        .iter()
        .map(|row| Bar {
            label: row.name,
            value: row.figures.as_ref().ok().map(|figures| figures.iops),
            note: match &row.figures {
                Ok(figures) => match figures.to_loop {
                    Some(ratio) => format!("{:.0} ({ratio:.3})", figures.iops),
                    None => format!("{:.0}", figures.iops),
                },
                Err(_) => "not measured".to_owned(),
            },
            kind: match (row.ours, row.peer) {
                (true, _) => Kind::Ours,
                (false, true) => Kind::Peer,
                _ => Kind::Other,
            },
        })
        .collect();
    let mark = cost.sample(table::LOOP_DIRECT, workload).map(|sample| sample.median);
    svg::bars(&format!("{title}: I/Os per 10⁹ instructions (ratio to loop)"), &bars, mark)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::record::tests::example;

    #[test]
    fn the_chart_shows_who_was_not_measured() {
        let svg = chart_of(&example(), "randread-4k-d64", "t");
        assert!(svg.contains("not measured") && svg.contains("44000 (0.880)"), "{svg}");
        assert_eq!(svg.matches("class=\"ours\"").count(), 1);
    }

    #[test]
    fn a_reader_learns_how_to_repeat_it() {
        let mut text = String::new();
        about(&mut text, &example().setting, "cost.json");
        for word in ["2026-01-31", "abc", "7.3", "QEMU 10", "cargo xtask bench cost", "fio 3"] {
            assert!(text.contains(word), "{word}");
        }
    }
}
