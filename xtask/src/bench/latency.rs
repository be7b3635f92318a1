//! `cargo xtask bench latency`: one I/O at a time, by time on two CPUs and by instructions on one.
//! Never calls a count of instructions a latency: it is what the path costs, not what a program waits for.

use anyhow::Result;

use super::build::Build;
use super::contestant::{Field, MAIN};
use super::fio::Workload;
use super::grid::{self, Choice, Plan};
use super::metric::Metric;
use super::record::Clock;
use super::{goal, table};

/// Measures, prints the tables, and keeps the records.
pub(crate) fn run(choice: &Choice) -> Result<u8> {
    let build = Build::new(&choice.guest)?;
    let workloads = || ["randread", "randwrite"].map(|pattern| Workload::new(pattern, 4, 1)).to_vec();
    let plans = [
        Plan {
            json: "latency-time.json",
            clock: Clock::Time,
            cpus: 2,
            rounds: 7,
            metrics: vec![Metric::Median, Metric::P99],
            workloads: workloads(),
        },
        Plan {
            json: "latency-cost.json",
            clock: Clock::Instructions,
            cpus: 1,
            rounds: 2,
            metrics: vec![Metric::Price],
            workloads: workloads(),
        },
    ];
    let mut complete = true;
    for plan in plans {
        let field = Field::all(build.path.clone(), &[]).narrowed(&MAIN, &choice.only);
        let name = plan.json.trim_end_matches(".json");
        let grid = grid::run(choice, &build, plan, field)?;
        print!("{}{}", table::text(&grid), goal::text(&goal::of(name, &grid)));
        complete &= grid.complete();
    }
    Ok(u8::from(!complete))
}
