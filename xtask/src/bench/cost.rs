//! `cargo xtask bench cost`: I/Os for a thousand million instructions, of becket, the kernel's loop and the
//! peers. Never compares numbers of different machines: all contestants run in one guest, in turn.

use anyhow::Result;

use super::build::Build;
use super::contestant::{Field, Other};
use super::fio::Workload;
use super::grid::{self, Plan};
use super::metric::Metric;
use super::record::Clock;
use super::{goal, table};

/// The default rows of the table: becket in all its modes (its default is the best that the kernel has), each
/// peer in its best.
const ROWS: [&str; 9] = [
    "file",
    "loop-direct",
    "loop-buffered",
    "becket",
    "becket-zero-copy",
    "becket-batch-copy",
    "becket-copy",
    "kublk-batch-zero-copy",
    "rublk-zero-copy",
];

/// Arguments of `cargo xtask bench cost`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    grid: grid::Choice,
    /// Another build of becket to measure beside this one
    #[arg(long, value_name = "NAME=PATH")]
    beside: Vec<Other>,
}

/// Measures, prints the table, and keeps the record.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let build = Build::new(&args.grid.guest)?;
    let field = Field::all(build.path.clone(), &args.beside);
    let mut rows = ROWS.to_vec();
    rows.extend(args.beside.iter().map(|other| other.name.as_str()));
    let field = field.narrowed(&rows, &args.grid.only);
    let plan = Plan {
        json: "cost.json",
        clock: Clock::Instructions,
        cpus: 1,
        rounds: 2,
        metrics: vec![Metric::Rate],
        workloads: Workload::all(),
    };
    let grid = grid::run(&args.grid, &build, plan, field)?;
    print!("{}{}", table::text(&grid), goal::text(&goal::of("cost", &grid)));
    Ok(u8::from(!grid.complete()))
}
