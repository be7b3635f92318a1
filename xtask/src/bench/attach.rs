//! `cargo xtask bench attach`: how long attaching and detaching one raw image takes, beside losetup and the
//! peers.
//! Never leaves a device behind: each contestant's device is detached before the next one's turn.

use anyhow::Result;

use super::build::Build;
use super::contestant::Field;
use super::guest::{self, Guest};
use super::host::{self, Host};
use super::record::{self, Clock};
use super::series::Series;
use super::table::LOOP_DIRECT;
use crate::vm::quoted;

const SCRIPT: &str = include_str!("guest/attach.sh");

/// For a document, before the tables.
pub(crate) const INTRODUCTION: &str =
    "Milliseconds to attach and to detach one raw image: on the host by the clock, with the image in
the temporary directory; in the guest by a clock that counts instructions.";

/// Arguments of `cargo xtask bench attach`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    guest: guest::Options,
    /// Times that each contestant is attached, in turn
    #[arg(long, default_value_t = 9)]
    rounds: u32,
    /// Only in the guest: root and a loop driver are needed otherwise
    #[arg(long)]
    no_host: bool,
    /// Only on the host
    #[arg(long)]
    no_guest: bool,
}

/// Measures on the host and in the guest, prints the tables, and keeps the record.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let build = Build::new(&args.guest)?;
    let mut series = Series::default();
    if !args.no_host {
        on_host(args, &build, &mut series)?;
    }
    if !args.no_guest {
        in_guest(args, &build, &mut series)?;
    }
    // The host first, and what was measured of all contestants together.
    series.rows.sort_by(|a, b| b.place.cmp(&a.place).then(a.what.cmp(&b.what)));
    let path = record::save("attach.json", &series)?;
    print!("{}", series.markdown());
    eprintln!("xtask: everything is in {}", path.display());
    Ok(u8::from(!series.complete()))
}

fn script(field: &Field, rounds: u32) -> String {
    let entrants: Vec<String> = field.present().map(|one| quoted(&one.entrant.name)).collect();
    format!("ENTRANTS=({})\nROUNDS={rounds}\n{SCRIPT}", entrants.join(" "))
}

fn notes(place: &str, rounds: u32) -> Vec<String> {
    vec![format!("{place}: {rounds} rounds in turn, after one that does not count")]
}

/// losetup and becket on the kernel's loop driver, here.
fn on_host(args: &Args, build: &Build, series: &mut Series) -> Result<()> {
    let host = Host::new()?;
    let mut field = Field::none();
    field.loop_device("losetup", "--direct-io=on");
    field.becket_by_loop(&host::word(&build.path));
    let script = script(&field, args.rounds);
    let image = host.word("image");
    let report = host.run(&field, &format!("IMAGE={image}\ntruncate -s 256M $IMAGE\n{script}"))?;
    series.take("host", &report, host.setting(build, &report, notes("host", args.rounds))?)
}

/// loop, becket and the peers in the guest.
fn in_guest(args: &Args, build: &Build, series: &mut Series) -> Result<()> {
    let mut field = Field::all(build.path.clone(), &[]);
    field.becket_by_loop("becket");
    let names = [LOOP_DIRECT, "becket-loop", "becket", "kublk-batch-zero-copy", "rublk-zero-copy"];
    field.keep(&names.map(str::to_owned))?;
    let guest = Guest::new(&args.guest, build, Clock::Instructions, 1);
    let mut report = guest.run(&field, Vec::new(), &script(&field, args.rounds))?;
    for one in &field.contestants {
        if let Some(why) = &one.entrant.absent {
            report.push_str(&format!("@@ absent {} attach-ms\n{why}\n", one.entrant.name));
        }
    }
    let setting = guest.setting(&guest::kernel_of(&report)?, notes("guest", args.rounds))?;
    series.take("guest", &report, setting)
}
