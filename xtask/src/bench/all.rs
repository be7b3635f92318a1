//! `cargo xtask bench all`: every scenario with its own defaults, one after another, then the report.
//! Never runs two at once: they would measure each other. One that fails does not stop the others.

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use super::guest::Options;

/// In this order: the tables that matter most come first.
const SCENARIOS: [&str; 11] = [
    "cost",
    "wall",
    "latency",
    "batch",
    "writeback",
    "storm",
    "configure",
    "losetup",
    "nested",
    "profile",
    "attach",
];

/// Runs them; 1 when any of them failed.
pub(crate) fn run(options: &Options) -> Result<u8> {
    let mut failed = Vec::new();
    for scenario in SCENARIOS {
        let begin = Instant::now();
        if !one(&words(options, scenario))? {
            failed.push(scenario);
        }
        eprintln!("xtask: {scenario} took {} s", begin.elapsed().as_secs());
    }
    if !one(&["report".to_owned()])? {
        failed.push("report");
    }
    if !failed.is_empty() {
        eprintln!("xtask: failed: {}", failed.join(", "));
    }
    Ok(u8::from(!failed.is_empty()))
}

/// A scenario's command line: as one would type it, since it becomes part of the record.
fn words(options: &Options, scenario: &str) -> Vec<String> {
    let mut words = vec![scenario.to_owned(), format!("--timeout={}", options.timeout)];
    words.extend(options.cpus.map(|cpus| format!("--cpus={cpus}")));
    words.extend(options.becket.as_ref().map(|path| format!("--becket={}", path.display())));
    words
}

fn one(words: &[String]) -> Result<bool> {
    let program = std::env::current_exe().context("cannot tell which program this is")?;
    eprintln!("xtask: bench {}", words.join(" "));
    let status = Command::new(program).arg("bench").args(words).status().context("cannot start myself")?;
    Ok(status.success())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Parser, Subcommand};

    #[derive(Parser)]
    struct Line {
        #[command(subcommand)]
        scenario: Whole,
    }

    #[derive(Subcommand)]
    enum Whole {
        Bench(crate::bench::Args),
    }

    #[test]
    fn every_scenario_takes_the_options() {
        let options = Options { cpus: Some(2), timeout: 60, becket: Some("/x/becket".into()) };
        for scenario in SCENARIOS {
            let mut line = vec!["xtask".to_owned(), "bench".to_owned()];
            line.extend(words(&options, scenario));
            assert!(Line::try_parse_from(&line).map(|line| line.scenario).is_ok(), "{line:?}");
        }
    }
}
