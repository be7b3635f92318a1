//! Benchmarks: becket beside the kernel's loop driver and other servers, all in one run, so that ratios mean something.
//! Never part of the checks that gate a change; nothing here is built or fetched by `cargo xtask ci`.

mod attach;
mod contestant;
mod cost;
mod fio;
mod guest;
mod peers;
mod profile;
mod record;
mod report;
mod rooms;
mod svg;
mod table;

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
    /// Where the instructions of one I/O go: by room of the kernel and of the server, and by function
    Profile(profile::Args),
    /// How long attaching and detaching takes, beside losetup on the host and everybody in the guest
    Attach(attach::Args),
    /// Write docs/benchmarks.md and its charts from what is in target/bench
    Report,
}

/// Runs one scenario; 1 when becket itself could not be measured.
pub(crate) fn run(args: &Args) -> Result<u8> {
    match &args.scenario {
        Scenario::Cost(args) => cost::run(args),
        Scenario::Profile(args) => profile::run(args),
        Scenario::Attach(args) => attach::run(args),
        Scenario::Report => report::run(),
    }
}
