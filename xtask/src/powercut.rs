//! `cargo xtask powercut`: file systems on a becket device, looked at wherever the power could have gone.
//! The test is that of CI (`crates/becket/tests/powercut`), only longer.

use std::time::Duration;

use anyhow::Result;

use crate::campaign::guest;
use crate::ci::test_of_becket;
use crate::vm::{Series, show};

/// Arguments of `cargo xtask powercut`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// At how many places of each file system's log it is mounted and checked
    #[arg(long, default_value_t = 40)]
    points: u32,
    /// Which kernel to boot
    #[arg(long, default_value = "7.x")]
    kernel: Series,
}

/// Makes the logs, replays them, and shows a line for each file system; its exit code.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let (binary, becket) = test_of_becket("powercut")?;
    let test = "dm_log_a_file_system_is_whole_wherever_the_power_goes";
    let mut machine = guest(args.kernel, &becket, &binary, test, &format!("BECKET_POWERCUT={}", args.points));
    machine.timeout = Duration::from_secs(600 + u64::from(args.points) * 60);
    machine.boot(&mut show)
}
