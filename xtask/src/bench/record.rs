//! What a benchmark leaves behind: every run, and all that is needed to repeat it.
//! Never drops a contestant: one that did not run is kept with the reason.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::fio::{Measure, Workload};
use crate::exec;

/// Where and when something was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setting {
    /// UTC, as `2026-01-31 12:00`.
    pub(crate) date: String,
    /// becket's commit; `+` when the checkout had changes.
    pub(crate) commit: String,
    /// `uname -r` where it ran.
    pub(crate) kernel: String,
    /// CPUs that it ran on.
    pub(crate) cpus: u32,
    /// The emulator, or `none`.
    pub(crate) emulator: String,
    /// The command line that repeats it.
    pub(crate) command: String,
    /// What else matters: the load generator's version, the backing's file system.
    pub(crate) notes: Vec<String>,
}

/// Who is measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entrant {
    /// Short and without spaces.
    pub(crate) name: String,
    /// How it is attached, for people.
    pub(crate) about: String,
    /// Somebody else's server for ublk, which becket is held against.
    pub(crate) peer: bool,
    /// One of becket's ways.
    pub(crate) ours: bool,
    /// Why it could not even start.
    pub(crate) absent: Option<String>,
}

/// One run of one contestant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Run {
    pub(crate) entrant: String,
    pub(crate) workload: String,
    /// 1 for the first.
    pub(crate) round: u32,
    /// fio's command line.
    pub(crate) command: String,
    pub(crate) outcome: Outcome,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Measured(Measure),
    Failed(String),
}

/// `target/bench/cost.json`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Cost {
    pub(crate) setting: Setting,
    pub(crate) entrants: Vec<Entrant>,
    pub(crate) workloads: Vec<Workload>,
    pub(crate) runs: Vec<Run>,
}

/// Several measurements of one thing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Sample {
    pub(crate) median: f64,
    /// (largest - smallest) / median.
    pub(crate) spread: f64,
    pub(crate) count: usize,
}

impl Sample {
    /// Of at least one number.
    pub(crate) fn of(values: &[f64]) -> Option<Sample> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (first, last) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        let spread = if median == 0.0 { 0.0 } else { (last - first) / median };
        Some(Sample { median, spread, count: sorted.len() })
    }
}

impl Cost {
    /// I/Os per second of one contestant under one workload, over all rounds that succeeded.
    pub(crate) fn sample(&self, entrant: &str, workload: &str) -> Option<Sample> {
        let of = |run: &&Run| run.entrant == entrant && run.workload == workload;
        let values: Vec<f64> = self
            .runs
            .iter()
            .filter(of)
            .filter_map(|run| match &run.outcome {
                Outcome::Measured(measure) => Some(measure.iops),
                Outcome::Failed(_) => None,
            })
            .collect();
        Sample::of(&values)
    }

    /// Runs of one contestant under one workload that failed.
    pub(crate) fn failed(&self, entrant: &str, workload: &str) -> usize {
        let failed = |run: &&Run| {
            let of = run.entrant == entrant && run.workload == workload;
            of && matches!(run.outcome, Outcome::Failed(_))
        };
        self.runs.iter().filter(failed).count()
    }

    /// Why a contestant has no number under a workload.
    pub(crate) fn failure(&self, entrant: &Entrant, workload: &str) -> String {
        let failed = self.runs.iter().find_map(|run| match &run.outcome {
            Outcome::Failed(why) if run.entrant == entrant.name && run.workload == workload => Some(why),
            _ => None,
        });
        let why = entrant.absent.as_ref().or(failed).map_or("it was not run", String::as_str);
        why.lines().next().unwrap_or_default().to_owned()
    }

    /// The best peer's name and number under a workload.
    pub(crate) fn best_peer(&self, workload: &str) -> Option<(&str, f64)> {
        let peers = self.entrants.iter().filter(|entrant| entrant.peer);
        let numbers = peers.filter_map(|entrant| {
            Some((entrant.name.as_str(), self.sample(&entrant.name, workload)?.median))
        });
        numbers.max_by(|a, b| a.1.total_cmp(&b.1))
    }
}

/// `target/bench` of the checkout: built peers and results.
pub(crate) fn dir() -> Result<PathBuf> {
    let dir = exec::workspace().join("target/bench");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}

/// Keeps a result.
pub(crate) fn save<T: Serialize>(name: &str, value: &T) -> Result<PathBuf> {
    let path = dir()?.join(name);
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Now, in UTC.
pub(crate) fn date() -> Result<String> {
    Ok(exec::output(Command::new("date").args(["-u", "+%F %H:%M"]))?.trim().to_owned())
}

/// The checkout's commit.
pub(crate) fn commit() -> Result<String> {
    let git = |args: &[&str]| exec::output(Command::new("git").current_dir(exec::workspace()).args(args));
    let mut commit = git(&["rev-parse", "--short=12", "HEAD"])?.trim().to_owned();
    if !git(&["status", "--porcelain", "--untracked-files=no", "--", "crates"])?.is_empty() {
        commit.push('+');
    }
    Ok(commit)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Two peers, one of which did not start; becket between them and loop.
    pub(crate) fn example() -> Cost {
        let entrant = |name: &str, peer, ours, absent: Option<&str>| Entrant {
            name: name.into(),
            about: format!("about {name}"),
            peer,
            ours,
            absent: absent.map(str::to_owned),
        };
        let run = |name: &str, round, iops: f64| Run {
            entrant: name.into(),
            workload: "randread-4k-d64".into(),
            round,
            command: "fio --x".into(),
            outcome: Outcome::Measured(Measure {
                iops,
                bytes_per_second: iops * 4096.0,
                latency_mean_ns: 1.0,
                latency_p50_ns: 1.0,
                latency_p99_ns: 1.0,
                load_user_percent: 1.0,
                load_system_percent: 1.0,
            }),
        };
        Cost {
            setting: Setting {
                date: "2026-01-31 12:00".into(),
                commit: "abc".into(),
                kernel: "7.3".into(),
                cpus: 1,
                emulator: "QEMU 10".into(),
                command: "cargo xtask bench cost".into(),
                notes: vec!["fio 3".into()],
            },
            entrants: vec![
                entrant("loop-direct", false, false, None),
                entrant("becket", false, true, None),
                entrant("kublk", true, false, None),
                entrant("rublk", true, false, Some("no libclang")),
            ],
            workloads: vec![Workload::all().swap_remove(0)],
            runs: vec![
                run("loop-direct", 1, 50_000.0),
                run("becket", 1, 44_000.0),
                run("becket", 2, 44_440.0),
                run("becket", 3, 43_560.0),
                run("kublk", 1, 40_000.0),
            ],
        }
    }

    #[test]
    fn medians_and_spreads() {
        assert_eq!(Sample::of(&[]), None);
        assert_eq!(Sample::of(&[2.0]), Some(Sample { median: 2.0, spread: 0.0, count: 1 }));
        assert_eq!(Sample::of(&[3.0, 1.0, 2.0]), Some(Sample { median: 2.0, spread: 1.0, count: 3 }));
        assert_eq!(Sample::of(&[1.0, 3.0]).map(|sample| sample.median), Some(2.0));
    }

    #[test]
    fn the_best_peer_is_one_that_ran() {
        let cost = example();
        assert_eq!(cost.best_peer("randread-4k-d64"), Some(("kublk", 40_000.0)));
        assert_eq!(cost.failure(&cost.entrants[3], "randread-4k-d64"), "no libclang");
        assert_eq!(cost.failure(&cost.entrants[0], "other"), "it was not run");
    }

    #[test]
    fn a_record_survives_being_written() {
        let text = serde_json::to_string(&example()).unwrap();
        let back: Cost = serde_json::from_str(&text).unwrap();
        assert_eq!(back.runs, example().runs);
        assert_eq!(back.entrants, example().entrants);
    }
}
