//! Benchmarks: becket beside the kernel's loop driver and other servers, all in one run, so that ratios mean
//! something. Never part of the checks that gate a change; nothing here is built or fetched by `cargo xtask
//! ci`.

mod contestant;
mod goal;
mod harness;
mod peers;
mod record;
mod report;
mod scenario;
mod svg;

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::builder::{PossibleValue, PossibleValuesParser};

use record::Record;
use scenario::SCENARIOS;

/// Arguments of `cargo xtask bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to measure; `report` writes the pages and plots from the results in target/bench
    #[arg(value_parser = names())]
    scenario: String,
    /// Only there (default: everywhere)
    #[arg(long, value_delimiter = ',', value_name = "PLACE,...")]
    place: Vec<String>,
    /// Only these contestants (default: those of the scenario)
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    only: Vec<String>,
    /// Rounds, in each of which every contestant has its turn (default: those of the scenario)
    #[arg(long)]
    rounds: Option<u32>,
    /// See whether it works: small numbers, whose results are kept apart
    #[arg(long)]
    short: bool,
    /// Set a variable of the scenario's script, as `MOST=64` or `WORKLOADS=(randread-4k-d64)`
    #[arg(long, value_name = "NAME=VALUE")]
    set: Vec<String>,
    /// Measure this becket instead of building the checkout's
    #[arg(long, value_name = "PATH")]
    becket: Option<PathBuf>,
    /// Another build of becket, to be measured beside it
    #[arg(long, value_name = "NAME=PATH")]
    beside: Vec<contestant::Other>,
    /// Emulated CPUs (default: one where instructions are counted, two where time is)
    #[arg(long)]
    cpus: Option<u32>,
    /// Seconds of the host until a guest is stopped
    #[arg(long, default_value_t = 7200)]
    timeout: u64,
}

fn names() -> PossibleValuesParser {
    let named = SCENARIOS.iter().map(|one| PossibleValue::new(one.name).help(one.title));
    PossibleValuesParser::new(named.chain([PossibleValue::new("report")]))
}

/// Runs one scenario, prints its table and keeps the record; 1 when becket itself could not be measured.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let Some(scenario) = SCENARIOS.iter().find(|one| one.name == args.scenario) else { return report::run() };
    let known = |wanted: &&String| scenario.places.iter().any(|place| place.name == **wanted);
    if let Some(wrong) = args.place.iter().find(|wanted| !known(wanted)) {
        bail!("{} is not measured in {wrong}", scenario.name);
    }
    let build = harness::Build::new(args)?;
    let name = format!("{}{}", scenario.name, if args.short { "-short" } else { "" });
    // A place that is left out keeps what the same becket did there before.
    let old = Record::load(&name)?.filter(|old| old.settings.iter().all(|one| one.build == build.hash));
    let mut record = old.unwrap_or_default();
    for place in scenario.places {
        if args.place.is_empty() || args.place.iter().any(|wanted| wanted == place.name) {
            let (report, setting) = harness::measure(place, args, &build)?;
            record.take(&report, setting)?;
            record.save(&name)?;
        }
    }
    println!("{}", record.table(|_| true));
    if !args.short {
        println!("{}", goal::table(&goal::of(scenario.name, &record)));
    }
    eprintln!("xtask: everything is in target/bench/{name}.json");
    Ok(u8::from(!record.complete()))
}
