//! Device tests that every transport passes, run the way a user would: through the `becket` command.
//! Must never reach into becket's crates: the suite knows what the command and the kernel say, nothing else.
#![deny(unsafe_code)]

mod bench;
mod bytes;
mod command;
mod driver;
mod exercise;
mod exported;
mod ioctl;
mod stacked;
mod suite;
mod sysfs;
mod tests;
mod trace;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};

use driver::{Becket, Driver, Losetup, Via};
use exported::Exported;
use stacked::Stacked;
use suite::Suite;

/// Runs one body of device tests over one transport, as root, on real block devices.
#[derive(Debug, Parser)]
#[command(name = "becket-conformance")]
pub(crate) struct Args {
    /// The becket command to test
    #[arg(long, value_name = "PATH", default_value = "becket")]
    becket: PathBuf,
    /// The transport to test
    #[arg(long, value_enum)]
    via: Via,
    /// Each image is exported over NBD, and attached from there
    #[arg(long)]
    over_nbd: bool,
    /// A folder for images, on ext4 if flushes are to be observed; emptied afterwards
    #[arg(long, value_name = "DIR")]
    scratch: PathBuf,
    /// How ublk moves the data: copy or zero-copy; becket chooses when it is not given
    #[arg(long, value_name = "MODE", value_parser = ["copy", "zero-copy", "batch-copy", "batch-zero-copy"])]
    mode: Option<String>,
    /// Only the tests whose name contains this
    #[arg(long, value_name = "SUBSTR")]
    only: Option<String>,
    /// Decides everything random; taken from the clock when it is not given, and printed
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Operations of the random tests
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    ops: u64,
    /// Writes the outcomes there
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Prints the names of the tests and ends
    #[arg(long)]
    list: bool,
    /// Tests that may be ignored on this machine
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    allow_skip: Vec<String>,
    /// Seconds after which a test counts as hung
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    limit: u64,
    /// Who attaches: `losetup` shows that the suite's expectations hold for the kernel's own tool
    #[arg(long, value_enum, default_value = "becket", hide = true)]
    driver: DriverName,
}

/// The drivers by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DriverName {
    Becket,
    Losetup,
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("becket-conformance: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(args: Args) -> Result<bool> {
    std::fs::create_dir_all(&args.scratch)?;
    let scratch = args.scratch.canonicalize().with_context(|| format!("{}", args.scratch.display()))?;
    let driver: Arc<dyn Driver> = match args.driver {
        DriverName::Losetup => Arc::new(Losetup),
        DriverName::Becket => {
            let becket = Becket {
                program: args.becket,
                via: args.via,
                mode: args.mode.clone(),
                runtime: scratch.join("run"),
            };
            match args.via {
                _ if args.over_nbd => Arc::new(Exported::new(becket)?),
                Via::Ublk | Via::Loop | Via::Fuse => Arc::new(becket),
                Via::Dm => Arc::new(Stacked::new(becket)),
            }
        }
    };
    let seed = args.seed.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(1, |since| since.as_secs())
    });
    let suite = Suite {
        driver,
        via: args.via,
        mode: args.mode,
        scratch,
        seed,
        ops: args.ops,
        only: args.only,
        allow_skip: args.allow_skip,
        limit: Duration::from_secs(args.limit),
    };
    if args.list {
        suite.list();
        return Ok(true);
    }
    suite.run(args.json.as_deref())
}
