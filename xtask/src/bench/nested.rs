//! `cargo xtask bench nested`: files in images inside images, through becket's one map and through the
//! kernel's nested loops.
//! Never leaves the host changed: mounts, devices and workqueue settings are undone however it ends.

use std::path::PathBuf;

use anyhow::Result;

use super::build::Build;
use super::contestant::Field;
use super::goal::{self, Verdict};
use super::guest::{self, Guest};
use super::host::{self, Host};
use super::record::{self, Clock};
use super::series::{Series, ratio};
use crate::vm::Place;

const IMAGES: &str = include_str!("guest/nested-images.sh");
const SCRIPT: &str = include_str!("guest/nested.sh");
const RAW: &str = include_str!("guest/nested-raw.sh");
/// Before the images are read in the guest: they lie on ext4 in memory, as the image of other scenarios does.
const IN_GUEST: &str = include_str!("guest/nested-guest.sh");
/// Where it is measured: with FUSE, and with ublk.
const PLACE: &str = "host";
const GUEST: &str = "guest";
/// The record, and where the guest finds its images.
const RECORD: &str = "nested.json";
const GIVEN: &str = "/given";
/// What becket is compared with.
const LOOPS: &str = "loops";
const BECKET: &str = "becket";

/// For a document, before the tables.
pub(crate) const INTRODUCTION: &str =
    "An ISO image holds a SquashFS image, which holds an ext4 image with 8,000 files, as a live CD
does. The readers share all files and read them in random order, with nothing in the page
cache. Everything, the kernel's workers included, runs on the given number of CPUs. *loops*
are the kernel's drivers on top of each other. *becket* is one FUSE device with one map: with
its default memory for decoded blocks (a sixteenth of the machine's, 1 GiB at most), and with
768 MiB, in which all of these files fit. *s* is the time by the clock, *cpu-s* that of all
CPUs. *mib* is the peak memory of the page cache and of becket's processes; the page cache was
emptied at the start. *threads* is the peak number of becket's threads.

*one-piece* and *pieces*: a file on ext4 in a partition of an image on an ISO 9660 image, none
of them compressed, beside the same bytes of the outermost file, with direct I/O. The loop
driver serves the first; FUSE serves the second, which ext4's tables split. *resolve*: `becket
ls` of the root directory of an ext4 image in a SquashFS image (8 GiB in 65,000 blocks) in an
ISO of 4 GiB, with nothing in memory, becket's program included.";

/// Arguments of `cargo xtask bench nested`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    guest: guest::Options,
    /// Times that each contestant reads all files, in turn
    #[arg(long, default_value_t = 2)]
    rounds: u32,
    /// Compressions of the SquashFS image
    #[arg(long, value_delimiter = ',', default_value = "gzip,zstd,xz")]
    codecs: Vec<String>,
    /// Numbers of readers
    #[arg(long, value_delimiter = ',', default_value = "1,4")]
    readers: Vec<u32>,
    /// Numbers of CPUs
    #[arg(long = "on", value_delimiter = ',', default_value = "1,2")]
    on: Vec<u32>,
    /// Files in the images, which are made once
    #[arg(long, default_value_t = 8000)]
    files: u32,
    /// Files in the guest's images
    #[arg(long, default_value_t = 400)]
    guest_files: u32,
    /// Numbers of CPUs in the guest
    #[arg(long, value_delimiter = ',', default_value = "1,2,4")]
    guest_on: Vec<u32>,
    /// Not on the host: root, a loop driver and FUSE are needed there
    #[arg(long)]
    no_host: bool,
    /// Not in the guest
    #[arg(long)]
    no_guest: bool,
}

/// Measures, prints the tables, and keeps the record.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let build = Build::new(&args.guest)?;
    // A place that is not measured this time keeps its rows: no ratio is made of two places.
    let mut series: Series = record::load(RECORD)?.unwrap_or_default();
    if !args.no_host {
        on_host(args, &build, &mut series)?;
    }
    if !args.no_guest {
        in_guest(args, &build, &mut series)?;
    }
    let path = record::save(RECORD, &series)?;
    print!("{}{}", series.markdown(), goal::text(&verdicts(&series)));
    eprintln!("xtask: everything is in {}", path.display());
    Ok(u8::from(!series.complete()))
}

fn on_host(args: &Args, build: &Build, series: &mut Series) -> Result<()> {
    let host = Host::new()?;
    let images = host::word(&images(args.files)?);
    let head = head(args, args.files, &images, &args.on, "loops becket becket-768m");
    let script = format!(
        "{head} RAWS={} VIA=fuse BECKET={} WORK={}\nmkdir -p \"$WORK\"\n{IMAGES}\n{SCRIPT}\n{RAW}",
        host::word(&record::dir()?.join("nested-raw")),
        host::word(&build.path),
        host.word("work")
    );
    let report = host.run(&Field::none(), &script)?;
    let lacks = !std::fs::read_to_string("/proc/filesystems")?.contains("iso9660");
    let below = if lacks { ": two of them, for this kernel has no ISO 9660" } else { "" };
    let notes = vec![format!(
        "{PLACE}: {} files of 16 KiB to 2 MiB of its /usr, {} rounds, every other one backwards; loops with their defaults{below}",
        args.files, args.rounds
    )];
    series.take(PLACE, &report, host.setting(build, &report, notes)?)
}

fn in_guest(args: &Args, build: &Build, series: &mut Series) -> Result<()> {
    let images = images(args.guest_files)?;
    let making = head(args, args.guest_files, &host::word(&images), &[], "");
    // The guest has no tools to make them with.
    Host::new()?.run(&Field::none(), &format!("{making}\nsection made\n{IMAGES}"))?;
    let mut given = vec![Place { host: images.join("order"), guest: format!("{GIVEN}/order") }];
    let mut mib = 256;
    for codec in &args.codecs {
        let path = images.join(format!("{codec}.iso"));
        mib += path.metadata()?.len() >> 20;
        given.push(Place { host: path, guest: format!("{GIVEN}/{codec}.iso") });
    }
    let mut field = Field::none();
    field.programs.push(Place { host: build.path.clone(), guest: "/usr/local/bin/becket".to_owned() });
    let cpus = args.guest_on.iter().max().copied().unwrap_or(1);
    let guest = Guest::new(&args.guest, build, Clock::Time, cpus).with_memory(4096);
    let head = head(args, args.guest_files, GIVEN, &args.guest_on, "loops becket");
    let script = format!(
        "{head} GIVEN={GIVEN} MIB={mib} VIA=ublk BECKET=becket WORK=/scratch/nested\nmkdir -p \"$WORK\"\n{IN_GUEST}\n{SCRIPT}"
    );
    let report = guest.boot(&field, given, &script)?;
    let notes = vec![format!(
        "{GUEST}: {} files of 16 KiB to 2 MiB, {} rounds, every other one backwards; ublk; the images on ext4 on a null_blk in memory; \
         loops with their defaults, three of them; at most two of its CPUs run at the same time where the host has two",
        args.guest_files, args.rounds
    )];
    series.take(GUEST, &report, guest.setting(&guest::kernel_of(&report)?, notes)?)
}

/// Where images with so many files are kept between runs.
fn images(files: u32) -> Result<PathBuf> {
    Ok(record::dir()?.join(format!("nested-{files}")))
}

/// What the scripts know.
fn head(args: &Args, files: u32, images: &str, on: &[u32], entrants: &str) -> String {
    let numbers = |all: &[u32]| all.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    format!(
        "IMAGES={images} CODECS=({}) READERS=({}) CPUS=({}) FILES={files} ROUNDS={} ENTRANTS=({entrants})",
        args.codecs.join(" "),
        numbers(&args.readers),
        numbers(on),
        args.rounds
    )
}

/// The goals, met or not.
pub(crate) fn verdicts(series: &Series) -> Vec<Verdict> {
    let at = |place: &str, codec: &str, readers, cpus, what: &str, entrant| {
        series.median(place, &format!("{codec}-{readers}-readers-{cpus}-cpus-{what}"), entrant)
    };
    let of = |codec: &str, readers, cpus, what: &str, entrant| at(PLACE, codec, readers, cpus, what, entrant);
    let mut all = Vec::new();
    for (codec, least) in [("gzip", 2.0), ("xz", 2.0), ("zstd", 1.3)] {
        for (readers, least) in [(4, least), (1, 1.0)] {
            let (theirs, ours) = (of(codec, readers, 2, "s", LOOPS), of(codec, readers, 2, "s", BECKET));
            let got = theirs.zip(ours).map(|(theirs, ours)| theirs / ours);
            let what = format!("nested, {codec}, {readers} reader(s), times as fast as the kernel's loops");
            all.push(Verdict::at_least(what, least, got));
        }
        let time = |cpus| of(codec, 4, cpus, "s", BECKET);
        all.push(ratio(
            &format!("nested, {codec}, 4 readers, time on 2 CPUs to that on 1"),
            1.0,
            time(2),
            time(1),
        ));
        let memory = |entrant| of(codec, 4, 2, "mib", entrant);
        all.push(ratio(
            &format!("nested, {codec}, 4 readers, peak memory to that of the kernel's loops"),
            1.0,
            memory(BECKET),
            memory(LOOPS),
        ));
        // Two CPUs.
        let what = format!("nested, {codec}, 4 readers, becket's threads on 2 CPUs");
        all.push(Verdict::at_most(what, 2.0 * 2.0 + 8.0, of(codec, 4, 2, "threads", BECKET)));
    }
    for (codec, least) in [("gzip", 2.0), ("xz", 2.0), ("zstd", 1.3)] {
        let time = |cpus, entrant| at(GUEST, codec, 4, cpus, "s", entrant);
        let got = time(2, LOOPS).zip(time(2, BECKET)).map(|(theirs, ours)| theirs / ours);
        let what =
            format!("nested in the guest by ublk, {codec}, 4 readers, times as fast as the kernel's loops");
        all.push(Verdict::at_least(what, least, got));
        let what = format!("nested in the guest by ublk, {codec}, 4 readers, time on 4 CPUs to that on 1");
        all.push(ratio(&what, 1.0, time(4, BECKET), time(1, BECKET)));
    }
    for (pieces, how) in [("one-piece", "in one piece"), ("pieces", "in pieces")] {
        for (workload, what) in
            [("read-1m-d4", "1 MiB reads, depth 4"), ("randread-4k-d64", "4 KiB random reads, depth 64")]
        {
            let rate = |entrant| series.median(PLACE, &format!("{pieces}-{workload}-iops"), entrant);
            let got = rate(BECKET).zip(rate("file")).map(|(ours, theirs)| ours / theirs);
            let what = format!("a raw image three levels deep {how}, {what}, to the outer file");
            all.push(Verdict::at_least(what, 0.97, got));
        }
    }
    let what = "a path three levels deep in an ISO of 4 GiB, cold, ms".to_owned();
    all.push(Verdict::at_most(what, 50.0, series.median(PLACE, "resolve-ms", BECKET)));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::series::tests::example;

    #[test]
    fn times_as_fast_is_the_loops_time_to_beckets() {
        let mut series = example(PLACE, "gzip-4-readers-2-cpus-s");
        for row in series.rows.iter_mut().filter(|row| row.entrant == "losetup") {
            row.entrant = LOOPS.into();
        }
        let verdicts = verdicts(&series);
        assert_eq!((verdicts[0].got, verdicts[0].met), (Some(2.0), true));
        assert!(verdicts[1..].iter().all(|one| !one.met), "what was not measured is not met");
    }
}
