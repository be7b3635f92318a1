//! Benchmarks: becket beside the kernel's loop driver and other servers, all in one run, so that ratios mean
//! something. Never part of the checks that gate a change; nothing here is built or fetched by `cargo xtask
//! ci`.

mod attach;
mod build;
mod contestant;
mod cost;
mod fio;
mod goal;
mod grid;
mod guest;
mod host;
mod latency;
mod losetup;
mod metric;
mod nested;
mod peers;
mod record;
mod report;
mod series;
mod storm;
mod svg;
mod table;
mod wall;
mod writeback;
mod writeback_table;

use anyhow::Result;
use clap::Subcommand;

/// Arguments of `cargo xtask bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    scenario: Scenario,
}

#[derive(Subcommand)]
enum Scenario {
    /// Instructions per I/O, in the emulator: the file, loop, becket's modes, and the peers
    Cost(cost::Args),
    /// I/Os per second by time, in the emulator with two CPUs, and how they grow with jobs and queues
    Wall(grid::Choice),
    /// One I/O at a time: what a program waits for, and what it costs
    Latency(grid::Choice),
    /// A new file system filled and synced while dirty pages are scarce, on xfs, ext4 and btrfs; on the host
    /// and in the guest
    Writeback(writeback::Args),
    /// How long attaching and detaching takes, beside losetup on the host and everybody in the guest
    Attach(attach::Args),
    /// Many devices at once beside losetup, what an idle one costs, and who waits for whom
    Storm(storm::Args),
    /// The time of one call of losetup's, becket's beside the system's
    Losetup(losetup::Args),
    /// Files in images inside images, beside the kernel's loop devices over each other
    Nested(nested::Args),
    /// Write target/bench/benchmarks.md and its chart from the results in target/bench
    Report,
}

/// Runs one scenario; 1 when becket itself could not be measured.
pub(crate) fn run(args: &Args) -> Result<u8> {
    match &args.scenario {
        Scenario::Cost(args) => cost::run(args),
        Scenario::Wall(args) => wall::run(args),
        Scenario::Latency(args) => latency::run(args),
        Scenario::Writeback(args) => writeback::run(args),
        Scenario::Attach(args) => attach::run(args),
        Scenario::Storm(args) => storm::run(args),
        Scenario::Losetup(args) => losetup::run(args),
        Scenario::Nested(args) => nested::run(args),
        Scenario::Report => report::run(),
    }
}
