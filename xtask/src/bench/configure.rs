//! `cargo xtask bench configure`: one device with all its settings beside losetup, and what live changes do to a load.
//! Never calls the price of starting a hundred commands that of a change: they are started in a run of their own, too.

use anyhow::Result;

use super::build::Build;
use super::contestant::Field;
use super::goal::{self, Verdict};
use super::guest::{self, Guest};
use super::host::{self, Host};
use super::record::{self, Clock};
use super::series::{Series, ratio};
use crate::vm::{Place, quoted};

const SCRIPT: &str = include_str!("guest/configure.sh");
const LIVE: &str = include_str!("guest/configure-live.sh");

/// For a document, before the tables.
pub(crate) const INTRODUCTION: &str =
    "A device with offset, size limit, block size, direct I/O and read-only, attached by one
command each. Then reads of 4 KiB at depth 4 on a ublk device while `becket set --direct-io`
changes it a hundred times (*changing*), beside the load alone (*undisturbed*) and beside a
hundred commands that change nothing (*looking*).";

/// Arguments of `cargo xtask bench configure`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    guest: guest::Options,
    /// Devices that are attached one after another
    #[arg(long, default_value_t = 100)]
    rounds: u32,
    /// Runs of each load
    #[arg(long, default_value_t = 5)]
    live: u32,
    /// Only in the guest: root and a loop driver are needed otherwise
    #[arg(long)]
    no_host: bool,
}

/// Measures, prints the tables, and keeps the record.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let build = Build::new(&args.guest)?;
    let mut series = Series::default();
    if !args.no_host {
        let host = Host::new()?.with_records_in_memory()?;
        let script = script(args.rounds, "loop", &host::word(&build.path), &host.word("work"));
        let report = host.run(&Field::none(), &script)?;
        let notes = vec![format!(
            "host: the kernel's loop driver, becket's records in memory, {} rounds in turn",
            args.rounds
        )];
        series.take("host", &report, host.setting(&build, &report, notes)?)?;
    }
    let mut field = Field::none();
    field.programs.push(Place { host: build.path.clone(), guest: "/usr/local/bin/becket".to_owned() });
    let guest = Guest::new(&args.guest, &build, Clock::Time, 2);
    let script = script(args.rounds, "ublk", "becket", "/scratch/configure");
    let report = guest.run(&field, Vec::new(), &format!("{script}\nLIVE={}\n{LIVE}", args.live))?;
    let notes = vec![
        format!("guest: ublk, {} rounds in turn; each load {} times", args.rounds, args.live),
        guest::IMAGE.to_owned(),
    ];
    series.take("guest", &report, guest.setting(&guest::kernel_of(&report)?, notes)?)?;
    let path = record::save("configure.json", &series)?;
    print!("{}{}", series.markdown(), goal::text(&verdicts(&series)));
    eprintln!("xtask: everything is in {}", path.display());
    Ok(u8::from(!series.complete()))
}

fn script(rounds: u32, via: &str, becket: &str, work: &str) -> String {
    let via = quoted(via);
    format!("ROUNDS={rounds} VIA={via} BECKET={becket} WORK={work}\nmkdir -p \"$WORK\"\n{SCRIPT}")
}

/// The goals, met or not.
pub(crate) fn verdicts(series: &Series) -> Vec<Verdict> {
    let attach = |what: &str, place, entrant: &str, per_cent| {
        let of = |entrant| series.percentile(place, "configured-attach-ms", entrant, per_cent);
        let what = format!("attach with all settings, {what}, {per_cent}th percentile, to losetup's");
        ratio(&what, 1.0, of(entrant), of("losetup"))
    };
    let high = |what| series.median("guest", "live-p99.9-us", what);
    vec![
        attach("loop on the host", "host", "becket-loop", 50.0),
        attach("loop on the host", "host", "becket-loop", 99.0),
        attach("ublk in the guest", "guest", "becket-ublk", 50.0),
        attach("ublk in the guest", "guest", "becket-ublk", 99.0),
        ratio(
            "reads during 100 live changes, p99.9 to undisturbed",
            2.0,
            high("changing"),
            high("undisturbed"),
        ),
        ratio("the same to 100 commands that change nothing", 2.0, high("changing"), high("looking")),
        Verdict::at_most(
            "errors of reads during 100 live changes".to_owned(),
            0.0,
            series.median("guest", "live-read-errors", "changing"),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::series::tests::example;

    #[test]
    fn changes_are_held_against_the_load_alone() {
        let mut series = example("guest", "live-p99.9-us");
        series.rows[0].entrant = "undisturbed".into();
        series.rows[1].entrant = "changing".into();
        let verdicts = verdicts(&series);
        assert_eq!((verdicts[4].got, verdicts[4].met), (Some(0.5), true));
        assert!(
            verdicts.iter().enumerate().all(|(at, one)| one.met == (at == 4)),
            "the others were not measured"
        );
    }
}
