//! `cargo xtask bench profile`: where the instructions of one I/O go, by room and by function.
//! Never counts by time: the emulated clock advances with instructions, so a sample is a number of instructions.

use std::fmt::Write;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::build::Build;
use super::contestant::{Field, Other};
use super::fio::{self, Workload};
use super::guest::{self, Guest};
use super::record::{self, Clock, Setting};
use super::rooms::{self, ROOMS, Spot};
use super::svg::{self, Stack};
use crate::exec;
use crate::vm::{Apt, Place, quoted};

const SCRIPT: &str = include_str!("guest/profile.sh");

/// perf of the guest's Debian and the libraries that the guest does not have.
const PACKAGES: [&str; 15] = [
    "linux-perf",
    "libbabeltrace1",
    "libdw1",
    "libelf1",
    "libexpat1",
    "libglib2.0-0",
    "libnuma1",
    "libopencsd1",
    "libpcre2-8-0",
    "libperl5.36",
    "libpython3.11",
    "libslang2",
    "libstdc++6",
    "libunwind8",
    "libuuid1",
];

/// Arguments of `cargo xtask bench profile`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    guest: guest::Options,
    /// Whose path is sampled; the first one's functions are listed
    #[arg(default_values = ["becket", "kublk-batch-zero-copy", "loop-direct"])]
    contestants: Vec<String>,
    /// The workload
    #[arg(long, default_value = "randread-4k-d64")]
    workload: String,
    /// fio's engine: libaio or io_uring
    #[arg(long, default_value = "libaio")]
    engine: String,
    /// Functions below this share, in per cent, are not listed
    #[arg(long, default_value_t = 0.5)]
    from: f64,
    /// Another build of becket, by a name that can be given among the contestants
    #[arg(long, value_name = "NAME=PATH")]
    beside: Vec<Other>,
}

/// One contestant's samples.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Profile {
    pub(crate) entrant: String,
    /// I/Os in a second of the guest's clock while it was sampled.
    pub(crate) iops: f64,
    pub(crate) spots: Vec<Spot>,
}

/// `target/bench/profile.json`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Profiles {
    pub(crate) setting: Setting,
    pub(crate) workload: Workload,
    pub(crate) profiles: Vec<Profile>,
}

impl Profile {
    fn samples(&self) -> u64 {
        self.spots.iter().map(|spot| spot.samples).sum()
    }

    /// Instructions of one I/O in each of [`ROOMS`].
    fn rooms(&self) -> [f64; ROOMS.len()] {
        rooms::by_room(&self.spots).map(|samples| self.instructions(samples))
    }

    /// Instructions of one I/O that so many samples stand for.
    fn instructions(&self, samples: u64) -> f64 {
        1e9 / self.iops * samples as f64 / self.samples().max(1) as f64
    }
}

/// Samples, prints the tables, and keeps the record.
pub(crate) fn run(args: &Args) -> Result<u8> {
    let workload = Workload::all().into_iter().find(|one| one.name == args.workload);
    let workload = workload.with_context(|| format!("no workload is called {}", args.workload))?;
    let build = Build::new(&args.guest)?;
    let mut field = Field::all(build.path.clone(), &args.beside);
    field.keep(&args.contestants)?;
    if let Some(absent) = field.contestants.iter().find_map(|one| one.entrant.absent.as_ref()) {
        bail!("{absent}");
    }
    let entrants: Vec<String> = args.contestants.iter().map(|name| quoted(name)).collect();
    let script = format!(
        "ENTRANTS=({})\nWORKLOAD={}\n{SCRIPT}",
        entrants.join(" "),
        quoted(&workload.arguments(&args.engine, Clock::Instructions))
    );
    let perf = Place { host: perf()?, guest: "/opt/perf".to_owned() };
    let guest = Guest::new(&args.guest, &build, Clock::Instructions, 1);
    let report = guest.run(&field, vec![perf], &script)?;
    let (kernel, profiles) = gather(&report)?;
    let notes = vec![format!("perf record -a -e cpu-clock -F 9000, engine {}", args.engine)];
    let profiles = Profiles { setting: guest.setting(&kernel, notes)?, workload, profiles };
    print!("{}\n{}", by_room(&profiles), by_function(&profiles, args.from));
    eprintln!("xtask: everything is in {}", record::save("profile.json", &profiles)?.display());
    Ok(0)
}

fn gather(report: &str) -> Result<(String, Vec<Profile>)> {
    let (mut kernel, mut profiles) = (String::new(), Vec::new());
    let mut iops = None;
    for section in fio::sections(report) {
        match section.words[..] {
            ["kernel", release] => kernel = release.to_owned(),
            ["fio", _] => {}
            ["load", _] => iops = Some(fio::parse(section.body)?.iops),
            ["profile", name] => {
                let spots = rooms::parse(section.body);
                let iops = iops.take().context("a profile without its load")?;
                if spots.is_empty() {
                    bail!("perf sampled nothing of {name}");
                }
                profiles.push(Profile { entrant: name.to_owned(), iops, spots });
            }
            ["absent", name] => bail!("{name} could not be attached: {}", section.body),
            _ => bail!("the guest's report has a section `{}`", section.words.join(" ")),
        }
    }
    Ok((kernel, profiles))
}

/// Instructions of one I/O by room, contestants side by side.
pub(crate) fn by_room(all: &Profiles) -> String {
    let mut text = format!("\nInstructions of one I/O by room: {}\n  {:<28}", all.workload.title(), "");
    let width = |profile: &Profile| profile.entrant.len().max(8);
    for profile in &all.profiles {
        let _ = write!(text, "  {:>1$}", profile.entrant, width(profile));
    }
    text.push('\n');
    let rooms: Vec<_> = all.profiles.iter().map(|profile| rooms::by_room(&profile.spots)).collect();
    for (index, room) in ROOMS.iter().enumerate() {
        let _ = write!(text, "  {room:<28}");
        for (profile, rooms) in all.profiles.iter().zip(&rooms) {
            let _ = write!(text, "  {:>1$.0}", profile.instructions(rooms[index]), width(profile));
        }
        text.push('\n');
    }
    let _ = write!(text, "  {:<28}", "all");
    for profile in &all.profiles {
        let _ = write!(text, "  {:>1$.0}", 1e9 / profile.iops, width(profile));
    }
    text.push('\n');
    text
}

/// The same as a table of a document.
pub(crate) fn markdown(all: &Profiles) -> String {
    let names: Vec<&str> = all.profiles.iter().map(|profile| profile.entrant.as_str()).collect();
    let mut text = format!(
        "Instructions of one I/O, {}:\n\n| | {} |\n| --- |{}\n",
        all.workload.title(),
        names.join(" | "),
        " ---: |".repeat(names.len())
    );
    let mut row = |room: &str, cells: Vec<f64>| {
        let cells: Vec<String> = cells.into_iter().map(|cell| format!("{cell:.0}")).collect();
        let _ = writeln!(text, "| {room} | {} |", cells.join(" | "));
    };
    for (index, room) in ROOMS.iter().enumerate() {
        row(room, all.profiles.iter().map(|profile| profile.rooms()[index]).collect());
    }
    row("**all**", all.profiles.iter().map(|profile| 1e9 / profile.iops).collect());
    text
}

/// The same as a chart.
pub(crate) fn chart(all: &Profiles) -> String {
    let bars: Vec<Stack<'_>> = all
        .profiles
        .iter()
        .map(|profile| Stack {
            label: &profile.entrant,
            parts: profile.rooms().to_vec(),
            note: format!("{:.0}", 1e9 / profile.iops),
        })
        .collect();
    svg::stacks(&format!("{}: instructions by room", all.workload.title()), &ROOMS, &bars)
}

/// The first contestant's functions, the dearest first.
pub(crate) fn by_function(all: &Profiles, from: f64) -> String {
    let Some(profile) = all.profiles.first() else { return String::new() };
    let mut spots: Vec<&Spot> = profile.spots.iter().collect();
    spots.sort_by_key(|spot| std::cmp::Reverse(spot.samples));
    let total = profile.samples().max(1) as f64;
    let mut text = format!("{}: functions from {from} per cent\n", profile.entrant);
    for spot in spots {
        let share = spot.samples as f64 * 100.0 / total;
        if share < from {
            break;
        }
        let _ = writeln!(
            text,
            "  {share:>5.1}%  {:>6.0}  {:<28}  {:<15}  {}",
            profile.instructions(spot.samples),
            spot.room(),
            spot.thread,
            spot.function
        );
    }
    text
}

/// perf with its libraries, unpacked below target/bench.
fn perf() -> Result<PathBuf> {
    let dir = record::dir()?.join("perf");
    if dir.is_dir() {
        return Ok(dir);
    }
    eprintln!("xtask: fetching Debian's perf");
    let apt = Apt::update(&record::dir()?.join("apt-perf"), &["bookworm"])?;
    let work = tempfile::tempdir_in(record::dir()?)?;
    let unpacked = work.path().join("unpacked");
    apt.unpack(&PACKAGES.map(str::to_owned), &unpacked)?;
    // Only what runs: the packages' documents and scripts would cost time at every boot.
    let kept = work.path().join("perf");
    std::fs::create_dir_all(kept.join("usr/bin"))?;
    std::fs::copy(unpacked.join("usr/bin/perf"), kept.join("usr/bin/perf"))
        .context("the package linux-perf holds no usr/bin/perf")?;
    for libraries in ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"] {
        let from = unpacked.join(libraries);
        if from.is_dir() {
            std::fs::create_dir_all(kept.join(libraries))?;
            exec::quietly(
                Command::new("find")
                    .arg(from)
                    .args(["-maxdepth", "1", "-name", "*.so*", "-exec", "cp", "-P", "-t"])
                    .arg(kept.join(libraries))
                    .args(["{}", "+"]),
            )?;
        }
    }
    std::fs::rename(&kept, &dir)?;
    Ok(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_become_instructions_of_one_io() {
        let spot = |function: &str, samples| Spot {
            thread: "fio".into(),
            object: "[kernel.kallsyms]".into(),
            function: function.into(),
            kernel: true,
            samples,
        };
        let profile = Profile {
            entrant: "becket".into(),
            iops: 50_000.0,
            spots: vec![spot("blk_mq_submit_bio", 750), spot("io_issue_sqe", 250)],
        };
        assert_eq!(profile.instructions(750), 15_000.0);
        assert_eq!(profile.instructions(profile.samples()), 20_000.0);
    }

    #[test]
    fn a_profile_without_samples_is_an_error() {
        assert!(gather("@@ kernel 7\n@@ profile becket\n").is_err());
        assert!(gather("@@ absent becket\nno ublk\n").unwrap_err().to_string().contains("no ublk"));
    }
}
