//! What a benchmark leaves behind: every run, and all that is needed to repeat it.
//! Never drops a contestant: one that did not run is kept with the reason.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::fio::Measure;
use crate::exec;

/// What a guest's clock counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Clock {
    /// Executed instructions: one thread of the host for all CPUs, a nanosecond for each instruction.
    Instructions,
    /// Time: a thread of the host for each CPU.
    Time,
}

/// Where and when something was measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Setting {
    /// UTC, as `2026-01-31 12:00`.
    pub(crate) date: String,
    /// becket's commit; `+` when the checkout had changes.
    pub(crate) commit: String,
    /// The beginning of becket's SHA-256: which program this was, whatever the checkout was.
    pub(crate) build: String,
    pub(crate) clock: Clock,
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

/// A contestant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entrant {
    /// Short and without spaces.
    pub(crate) name: String,
    /// How it is attached, for people.
    pub(crate) about: String,
    /// Another project's server for ublk, which becket is compared with.
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
    /// The boot that it was part of: an index into the record's settings.
    pub(crate) boot: usize,
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

/// `target/bench` of the checkout: built peers and results.
pub(crate) fn dir() -> Result<PathBuf> {
    let dir = exec::workspace().join("target/bench");
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}

/// Keeps a result.
pub(crate) fn save<T: Serialize>(name: &str, value: &T) -> Result<PathBuf> {
    let path = dir()?.join(name);
    let home = std::env::var("HOME").unwrap_or_default();
    let mut text = placeless(&serde_json::to_string_pretty(value)?, &home);
    text.push('\n');
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// A record is published, and programs that fail name places of the machine that they were built on.
fn placeless(text: &str, home: &str) -> String {
    let checkout = format!("{}/", exec::workspace().display());
    let text = text.replace(&checkout, "");
    if home.len() > 1 { text.replace(&format!("{home}/"), "~/") } else { text }
}

/// What was kept under this name, if anything.
pub(crate) fn load<T: DeserializeOwned>(name: &str) -> Result<Option<T>> {
    let path = dir()?.join(name);
    if !path.is_file() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(&path)?;
    let hint =
        || format!("{} is not as expected; an older xtask wrote it, perhaps: remove it", path.display());
    serde_json::from_str(&text).with_context(hint).map(Some)
}

/// Now, in UTC.
pub(crate) fn date() -> Result<String> {
    Ok(exec::output(Command::new("date").args(["-u", "+%F %H:%M"]))?.trim().to_owned())
}

/// The beginning of a program's SHA-256.
pub(crate) fn build_of(program: &Path) -> Result<String> {
    let sum = exec::output(Command::new("sha256sum").arg("--").arg(program))?;
    Ok(sum.trim_start_matches('\\').chars().take(12).collect())
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
mod tests {
    use super::*;

    #[test]
    fn medians_and_spreads() {
        assert_eq!(Sample::of(&[]), None);
        assert_eq!(Sample::of(&[2.0]), Some(Sample { median: 2.0, spread: 0.0, count: 1 }));
        assert_eq!(Sample::of(&[3.0, 1.0, 2.0]), Some(Sample { median: 2.0, spread: 1.0, count: 3 }));
        assert_eq!(Sample::of(&[1.0, 3.0]).map(|sample| sample.median), Some(2.0));
    }

    #[test]
    fn records_name_no_place_of_this_machine() {
        let text = format!("panicked at /home/me/.cargo/x.rs, {}/xtask/y.rs", exec::workspace().display());
        assert_eq!(placeless(&text, "/home/me"), "panicked at ~/.cargo/x.rs, xtask/y.rs");
        assert_eq!(placeless("/a/b", "/"), "/a/b");
    }

    #[test]
    fn a_build_is_named_by_its_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        std::fs::write(&path, "becket").unwrap();
        let before = build_of(&path).unwrap();
        assert_eq!(before.len(), 12);
        std::fs::write(&path, "Becket").unwrap();
        assert_ne!(build_of(&path).unwrap(), before);
    }
}
