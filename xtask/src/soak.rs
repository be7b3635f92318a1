//! `cargo xtask soak`: everything at once for hours: loads, faults, crashes, changes, devices that come and
//! go, queries.
//! It is a test of CI's (`crates/becket/tests/campaign/soak.rs`) that takes its time.

use std::time::Duration;

use anyhow::{Result, bail};

use crate::campaign::Course;
use crate::vm::Series;

/// Arguments of `cargo xtask soak`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long, in hours; parts of one, too
    #[arg(long, default_value_t = 1.0)]
    hours: f64,
    /// Over which transport: ublk in a virtual machine, fuse and loop on this machine (as root)
    #[arg(long, value_enum, default_value_t = Via::Ublk)]
    via: Via,
    /// Other numbers, other operations and moments
    #[arg(long, default_value_t = 0)]
    seed: u32,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Via {
    Ublk,
    Fuse,
    Loop,
}

/// What it may take beside the time itself: a start, and an end that waits for each load.
const AROUND: Duration = Duration::from_secs(3600);

/// Runs it and shows what it says; its exit code is 0 when nothing was wrong, lost, late or left behind.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let Ok(length) = Duration::try_from_secs_f64(args.hours * 3600.0) else {
        bail!("{} is no number of hours", args.hours);
    };
    let (via, test) = match args.via {
        Via::Ublk => ("ublk", "soak::a_soak_finds_nothing"),
        Via::Fuse => ("fuse", "soak::a_soak_over_fuse_finds_nothing"),
        Via::Loop => ("loop", "soak::a_soak_finds_nothing"),
    };
    let course = Course {
        program: "campaign",
        test,
        via,
        kernel: Series::V7,
        variables: vec![
            ("BECKET_SOAK", length.as_secs().to_string()),
            ("BECKET_SOAK_SEED", args.seed.to_string()),
        ],
        patience: length + AROUND,
        reports: true,
    };
    course.run("soak")
}
