//! The arguments of `cargo xtask bench`.
//! It never reads a result.

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser};

use super::contestant::Other;
use super::scenario::SCENARIOS;

/// Arguments of `cargo xtask bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to measure; `report` writes the pages and plots from the results in target/bench
    #[arg(value_parser = names())]
    pub(super) scenario: String,
    /// Only there (default: everywhere)
    #[arg(long, value_delimiter = ',', value_name = "PLACE,...")]
    pub(super) place: Vec<String>,
    /// Only these contestants (default: those of the scenario)
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    pub(super) only: Vec<String>,
    /// Rounds, in each of which every contestant has its turn (default: those of the scenario)
    #[arg(long)]
    pub(super) rounds: Option<u32>,
    /// See whether it works: small numbers, whose results are kept apart
    #[arg(long)]
    pub(super) short: bool,
    /// Set a variable of the scenario's script, as `MOST=64` or `WORKLOADS=(randread-4k-d64)`
    #[arg(long, value_name = "NAME=VALUE")]
    pub(super) set: Vec<String>,
    /// Measure this becket instead of building the checkout's
    #[arg(long, value_name = "PATH")]
    pub(super) becket: Option<PathBuf>,
    /// Another build of becket, to be measured beside it
    #[arg(long, value_name = "NAME=PATH")]
    pub(super) beside: Vec<Other>,
    /// Emulated CPUs (default: one where instructions are counted, two where time is)
    #[arg(long)]
    pub(super) cpus: Option<u32>,
    /// Seconds of the host until a guest is stopped
    #[arg(long, default_value_t = 7200)]
    pub(super) timeout: u64,
}

fn names() -> PossibleValuesParser {
    let named = SCENARIOS.iter().map(|one| PossibleValue::new(one.name).help(one.title));
    PossibleValuesParser::new(named.chain([PossibleValue::new("report")]))
}
