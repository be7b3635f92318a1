//! `cargo xtask bench nested`: files in images inside images, through becket's one map and through the kernel's nested loops.
//! Never leaves the host changed: what is mounted, attached and told to workqueues is put back however it ends.

use anyhow::Result;

use super::build::Build;
use super::contestant::Field;
use super::goal::{self, Verdict};
use super::guest;
use super::host::{self, Host};
use super::record;
use super::series::{Series, ratio};

const IMAGES: &str = include_str!("guest/nested-images.sh");
const SCRIPT: &str = include_str!("guest/nested.sh");
/// Where it is measured.
const PLACE: &str = "host";
/// Whom becket is held against.
const LOOPS: &str = "loops";
const BECKET: &str = "becket";

/// For a document, before the tables.
pub(crate) const INTRODUCTION: &str = "An ISO image holds a SquashFS image, which holds an ext4 image with 8,000 files, as a live CD does. All files are read in random
order, shared out among so many readers, with nothing in the page cache; everything, the kernel's workers included, runs on so
many CPUs. *loops* are the kernel's drivers over each other, *becket* is one device of FUSE with one map, with
the memory for decoded blocks that it takes by itself (a sixteenth of the machine's, 256 MiB at most) and with 768 MiB, in which all of
these files have room. *s* is the time by the
clock, *cpu-s* that of all CPUs, *mib* the most memory that the whole machine took meanwhile, processes and page cache, and
*threads* the most that becket's processes had.";

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
}

/// Measures on the host, prints the table, and keeps the record.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let build = Build::new(&args.guest)?;
    let host = Host::new()?;
    let images = record::dir()?.join(format!("nested-{}", args.files));
    let numbers = |all: &[u32]| all.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
    let script = format!(
        "IMAGES={} CODECS=({}) READERS=({}) CPUS=({}) FILES={} ROUNDS={} VIA=fuse BECKET={} WORK={}\n\
         mkdir -p \"$WORK\"\n{IMAGES}\n{SCRIPT}",
        host::word(&images),
        args.codecs.join(" "),
        numbers(&args.readers),
        numbers(&args.on),
        args.files,
        args.rounds,
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
    let mut series = Series::default();
    series.take(PLACE, &report, host.setting(&build, &report, notes)?)?;
    let path = record::save("nested.json", &series)?;
    print!("{}{}", series.markdown(), goal::text(&verdicts(&series)));
    eprintln!("xtask: everything is in {}", path.display());
    Ok(u8::from(!series.complete()))
}

/// The goals, met or not.
pub(crate) fn verdicts(series: &Series) -> Vec<Verdict> {
    let of = |codec: &str, readers, cpus, what: &str, entrant| {
        series.median(PLACE, &format!("{codec}-{readers}-readers-{cpus}-cpus-{what}"), entrant)
    };
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
