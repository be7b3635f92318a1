//! `cargo xtask bench losetup`: the time of a call of losetup's, becket's beside the system's.
//! Never measures through a server: the kernel's loop driver alone is behind both.

use anyhow::Result;

use super::build::Build;
use super::contestant::Field;
use super::goal::{self, Verdict};
use super::guest;
use super::host::{self, Host};
use super::record;
use super::series::{Series, ratio};

const SCRIPT: &str = include_str!("guest/losetup.sh");
/// Where it is measured.
const PLACE: &str = "host";

/// For a document, before the tables.
pub(crate) const INTRODUCTION: &str =
    "Microseconds of one call of losetup, the start of the process included: the system's losetup,
and becket's. *list* is `-l`, *plain* is `-a`, *json* is `-lJ`, *file-of* is `-j FILE`, each
with that many devices attached. *version* is `-V`, which does nothing else.";

/// Arguments of `cargo xtask bench losetup`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    guest: guest::Options,
    /// Devices that are attached while lists are measured
    #[arg(long, default_value_t = 500)]
    count: u32,
    /// Rounds, every other one backwards
    #[arg(long, default_value_t = 7)]
    rounds: u32,
    /// Calls of each kind in a round
    #[arg(long, default_value_t = 10)]
    calls: u32,
}

/// Measures on the host, prints the table, and keeps the record.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let build = Build::new(&args.guest)?;
    let host = Host::new()?;
    let script = format!(
        "COUNT={} ROUNDS={} CALLS={} BECKET={} WORK={}\nmkdir -p \"$WORK\"\n{SCRIPT}",
        args.count,
        args.rounds,
        args.calls,
        host::word(&build.path),
        host.word("work")
    );
    let report = host.run(&Field::none(), &script)?;
    let notes =
        vec![format!("{PLACE}: {} rounds of {} calls, every other one backwards", args.rounds, args.calls)];
    let mut series = Series::default();
    series.take(PLACE, &report, host.setting(&build, &report, notes)?)?;
    let path = record::save("losetup.json", &series)?;
    print!("{}{}", series.markdown(), goal::text(&verdicts(&series)));
    eprintln!("xtask: everything is in {}", path.display());
    Ok(u8::from(!series.complete()))
}

/// The goals, met or not: lists with 500 devices take no longer than the system's.
pub(crate) fn verdicts(series: &Series) -> Vec<Verdict> {
    let against = |(what, words): (&str, &str)| {
        let of = |entrant| series.median(PLACE, what, entrant);
        ratio(
            &format!("losetup {words} with 500 devices, time to the system's"),
            1.0,
            of("becket"),
            of("losetup"),
        )
    };
    [("list-500-us", "-l"), ("json-500-us", "-lJ"), ("file-of-500-us", "-j FILE")].map(against).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::series::tests::example;

    #[test]
    fn lists_are_held_against_the_systems() {
        let verdicts = verdicts(&example("host", "list-500-us"));
        assert_eq!(verdicts.len(), 3);
        assert!(verdicts[0].met && verdicts[0].got == Some(0.5));
        assert!(!verdicts[1].met && verdicts[1].got.is_none(), "what was not measured is not met");
    }
}
