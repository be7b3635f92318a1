//! `cargo xtask bench storm`: many devices at once beside losetup, the cost of an idle device, and which
//! waits for which.
//! Never compares the host's times with the guest's: loop is measured on the one, ublk in the other.

use anyhow::Result;

use super::build::Build;
use super::contestant::Field;
use super::goal::{self, Verdict};
use super::guest::{self, Guest};
use super::host::{self, Host};
use super::record::{self, Clock};
use super::series::{Series, ratio};
use crate::vm::{Place, quoted};

const SCRIPT: &str = include_str!("guest/storm.sh");
const UBLK: &str = include_str!("guest/storm-ublk.sh");
const MOST: &str = include_str!("guest/storm-most.sh");

/// Devices of the goal.
const MANY: u32 = 4096;

/// For a document, before the tables.
pub(crate) const INTRODUCTION: &str =
    "Images of 1 MiB are attached by one command of becket, by losetup one after another, and by
eight losetup processes at a time. On the host this uses the kernel's loop driver, with
becket's records in memory (as `/run` is) and on the checkout's disk. In the guest it uses
ublk, beside the guest's own losetup.

*one-attach* is one command for one device while the server runs. *contended* counts waits for
kernel locks by the tracepoint `lock:contention_begin`; *futexes* counts all futex calls of
becket. *guest-most* is one run with a large number of devices: *wrong* is 0 if each device
began with the bytes of its image, and *copied* counts the devices for which the tables of the
worker's rings had no room.";

/// Arguments of `cargo xtask bench storm`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    guest: guest::Options,
    /// Times that each contestant attaches each number of images, in turn
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// The same in the guest, where each takes fifty times as long
    #[arg(long, default_value_t = 1)]
    guest_rounds: u32,
    /// Numbers of images on the host
    #[arg(long, value_delimiter = ',', default_value = "1,69,500,1000")]
    host_counts: Vec<u32>,
    /// Numbers of images in the guest
    #[arg(long, value_delimiter = ',', default_value = "1,69,500,1000")]
    guest_counts: Vec<u32>,
    /// Not on the host: root and a loop driver are needed there
    #[arg(long)]
    no_host: bool,
    /// Not in the guest
    #[arg(long)]
    no_guest: bool,
    /// So many devices at once in a guest of their own, by ublk and by loop; 0: not that
    #[arg(long, value_name = "COUNT", default_value_t = MANY)]
    most: u32,
}

/// Measures on the host and in the guest, prints the tables, and keeps the record.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let build = Build::new(&args.guest)?;
    // A place that is left out keeps what the same becket did there before.
    let old =
        record::load::<Series>("storm.json")?.filter(|_| args.no_host || args.no_guest || args.most == 0);
    let same = |old: &Series| old.settings.iter().all(|one| one.build == build.hash);
    let mut series = old.filter(same).unwrap_or_default();
    if !args.no_host {
        on_host(args, &build, "host", &mut series)?;
        on_host(args, &build, "host-disk", &mut series)?;
    }
    if !args.no_guest {
        in_guest(args, &build, &mut series)?;
    }
    if args.most > 0 {
        very_many(args, &build, &mut series)?;
    }
    let path = record::save("storm.json", &series)?;
    print!("{}{}", series.markdown(), goal::text(&verdicts(&series)));
    eprintln!("xtask: everything is in {}", path.display());
    Ok(u8::from(!series.complete()))
}

fn on_host(args: &Args, build: &Build, place: &str, series: &mut Series) -> Result<()> {
    let host = Host::new()?;
    let host = if place == "host" { host.with_records_in_memory()? } else { host };
    let script = script(&args.host_counts, args.rounds, "loop", &host::word(&build.path), &host.word("work"));
    eprintln!("xtask: {place}: {:?} images, {} rounds", args.host_counts, args.rounds);
    let report = host.run(&Field::none(), &script)?;
    let records = if place == "host" { "in memory" } else { "on the checkout's disk" };
    let notes = vec![format!(
        "{place}: becket's records {records}; {} rounds, every other one backwards",
        args.rounds
    )];
    let setting = host.setting(build, &report, notes)?;
    series.take(place, &report, setting)
}

fn in_guest(args: &Args, build: &Build, series: &mut Series) -> Result<()> {
    let mut field = Field::none();
    field.programs.push(Place { host: build.path.clone(), guest: "/usr/local/bin/becket".to_owned() });
    let guest = Guest::new(&args.guest, build, Clock::Time, 2).with_memory(4096);
    let many = args.guest_counts.iter().max().copied().unwrap_or(69);
    let nodes = many + 8;
    let drivers = format!(
        "modprobe -r loop; modprobe loop max_loop={nodes} && modprobe ublk_drv || fail \"this kernel lacks loop or ublk\"\nNODES={nodes}"
    );
    let body = script(&args.guest_counts, args.guest_rounds, "ublk", "becket", "/scratch/storm");
    let script = format!("{drivers}\nMANY={many} CRYPT=69\n{body}\n{UBLK}");
    let report = guest.boot(&field, Vec::new(), &script)?;
    let rounds = args.guest_rounds;
    let notes =
        vec![format!("guest: {rounds} rounds, every other one backwards; images on the guest's ext4")];
    series.take("guest", &report, guest.setting(&guest::kernel_of(&report)?, notes)?)
}

/// As many as the goal says; only becket is measured with so many.
fn very_many(args: &Args, build: &Build, series: &mut Series) -> Result<()> {
    let most = args.most;
    let mut field = Field::none();
    field.programs.push(Place { host: build.path.clone(), guest: "/usr/local/bin/becket".to_owned() });
    let guest = Guest::new(&args.guest, build, Clock::Time, 2).with_memory(4096);
    let script = format!("MOST={most} BECKET=becket WORK=/scratch/most\n{MOST}");
    let report = guest.boot(&field, Vec::new(), &script)?;
    let notes = vec![format!("guest-most: {most} images on the guest's ext4, once by each transport")];
    series.take("guest-most", &report, guest.setting(&guest::kernel_of(&report)?, notes)?)
}

fn script(counts: &[u32], rounds: u32, via: &str, becket: &str, work: &str) -> String {
    let counts: Vec<String> = counts.iter().map(u32::to_string).collect();
    let via = quoted(via);
    format!(
        "COUNTS=({}) ROUNDS={rounds} NODES=${{NODES-}} ONE=100 VIA={via} BECKET={becket} WORK={work}\nmkdir -p \"$WORK\"\n{SCRIPT}",
        counts.join(" ")
    )
}

/// The goals, met or not.
pub(crate) fn verdicts(series: &Series) -> Vec<Verdict> {
    let all =
        |place: &str, count: u32, entrant: &str| series.median(place, &format!("attach-{count}-ms"), entrant);
    let faster = |what: &str, least: f64, place, entrant: &str, other: &str| {
        let got = all(place, 500, other).zip(all(place, 500, entrant)).map(|(theirs, ours)| theirs / ours);
        Verdict::at_least(format!("500 images, {what}, times as fast"), least, got)
    };
    let each = |place, entrant: &str, count| all(place, count, entrant).map(|ms| ms / f64::from(count));
    let flat = |what: &str, place, entrant: &str| {
        let what = format!("a device's cost among 1,000 to that among 69, {what}");
        ratio(&what, 1.5, each(place, entrant, 1000), each(place, entrant, 69))
    };
    let one = |what: &str, place, entrant: &str, per_cent| {
        let of = |entrant| series.percentile(place, "one-attach-ms", entrant, per_cent);
        ratio(
            &format!("one attach, {what}, {per_cent}th percentile, to losetup's"),
            1.0,
            of(entrant),
            of("losetup"),
        )
    };
    let idle = |what: &str, most, entrant| {
        Verdict::at_most(
            format!("an idle device of ublk, KiB: {what}"),
            most,
            series.median("guest", "idle-device-kib", entrant),
        )
    };
    let very_many = |via: &str, what: &str, attached: bool| {
        let got = series.median("guest-most", what, &format!("becket-{via}"));
        match attached {
            true => Verdict::at_least(
                format!("{MANY} images at once by {via} in the guest, devices"),
                MANY.into(),
                got,
            ),
            false => Verdict::at_most(
                format!("{MANY} images at once by {via}, devices in a wrong place"),
                0.0,
                got,
            ),
        }
    };
    // Two CPUs in the guest.
    let threads = series.median("guest", "threads", "worker");
    vec![
        faster("loop on the host, beside losetup one by one", 10.0, "host", "becket-loop", "losetup"),
        faster("loop on the host, beside eight losetups", 8.0, "host", "becket-loop", "losetup-8"),
        faster("loop on the host, records on disk", 10.0, "host-disk", "becket-loop", "losetup"),
        faster("ublk in the guest, beside losetup one by one", 3.0, "guest", "becket-ublk", "losetup"),
        flat("loop on the host", "host", "becket-loop"),
        flat("ublk in the guest", "guest", "becket-ublk"),
        one("loop on the host", "host", "becket-loop", 99.0),
        one("ublk in the guest", "guest", "becket-ublk", 99.0),
        idle("the worker's memory", 128.0, "worker"),
        idle("the kernel's", 64.0, "kernel"),
        Verdict::at_most(
            "the worker's threads with all devices, io-wq's included".to_owned(),
            2.0 * 2.0 + 8.0,
            threads,
        ),
        Verdict::at_most(
            "becket's futex calls while eight programs open and close 64 devices".to_owned(),
            0.0,
            series.median("guest", "open-close-futexes", "becket"),
        ),
        very_many("ublk", "devices", true),
        very_many("ublk", "wrong", false),
        very_many("loop", "devices", true),
        very_many("loop", "wrong", false),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::series::tests::example;

    #[test]
    fn a_goal_is_missed_when_it_was_not_measured() {
        assert!(verdicts(&Series::default()).iter().all(|one| !one.met));
    }

    #[test]
    fn times_as_fast_is_losetups_time_to_beckets() {
        let mut series = example("host", "attach-500-ms");
        series
            .rows
            .iter_mut()
            .filter(|row| row.entrant == "becket")
            .for_each(|row| row.entrant = "becket-loop".into());
        let first = verdicts(&series).swap_remove(0);
        assert_eq!((first.got, first.met), (Some(2.0), false));
    }

    #[test]
    fn the_script_says_what_to_attach() {
        let text = script(&[1, 69], 3, "loop", "'/x y/becket'", "/w");
        assert!(
            text.starts_with(
                "COUNTS=(1 69) ROUNDS=3 NODES=${NODES-} ONE=100 VIA='loop' BECKET='/x y/becket' WORK=/w\n"
            ),
            "{text}"
        );
    }
}
