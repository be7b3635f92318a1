//! `cargo xtask bench batch`: I/Os submitted many at a time, what they cost, and the server's system calls for each.
//! Never counts and measures in one run: counting costs instructions of its own.

use anyhow::Result;

use super::build::Build;
use super::contestant::{Field, MAIN};
use super::fio::Workload;
use super::grid::{self, Choice, Plan};
use super::metric::Metric;
use super::record::Clock;
use super::{goal, table};

/// I/Os in flight.
const DEPTH: u32 = 256;

/// I/Os submitted at a time; 33 is one more than the kernel once took at once.
const BATCHES: [u32; 5] = [1, 32, 33, 64, 256];

/// Measures, prints the tables, and keeps the records.
pub(crate) fn run(choice: &Choice) -> Result<u8> {
    let build = Build::new(&choice.guest)?;
    let mut workloads = BATCHES.map(|batch| Workload::new("randread", 4, DEPTH).with_batch(batch)).to_vec();
    workloads.push(Workload::new("randwrite", 4, DEPTH).with_batch(32));
    // With one CPU a server sleeps while others submit and finds many requests; with two it may be as fast as they
    // come, and then it gets few at a time. Both are counted.
    let plans = [("batch-cost.json", Clock::Instructions, 1), ("batch-time.json", Clock::Time, 2)];
    let mut complete = true;
    for (json, clock, cpus) in plans {
        let plan = Plan {
            json,
            clock,
            cpus,
            rounds: if clock == Clock::Time { 5 } else { 2 },
            metrics: vec![Metric::Rate],
            workloads: workloads.clone(),
            count: true,
        };
        let field = Field::all(build.path.clone(), &[]).narrowed(&MAIN[1..], &choice.only);
        let grid = grid::run(choice, &build, plan, field)?;
        let name = json.trim_end_matches(".json");
        print!("{}{}", table::text(&grid), goal::text(&goal::of(name, &grid)));
        complete &= grid.complete();
    }
    Ok(u8::from(!complete))
}
