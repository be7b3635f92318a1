//! Benchmarks: becket beside the kernel's loop driver and other servers, all in one run, so that ratios mean
//! something. Never part of the checks that gate a change; nothing here is built or fetched by `cargo xtask
//! ci`.

mod args;
mod contestant;
mod goal;
mod harness;
mod peers;
mod record;
mod report;
mod scenario;
mod svg;

use anyhow::{Result, bail};

pub(crate) use args::Args;
use record::Record;
use scenario::SCENARIOS;

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
