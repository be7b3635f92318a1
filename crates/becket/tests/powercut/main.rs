//! File systems on a becket device when the power goes: device-mapper's log-writes logs what becket sends to
//! its backing. At places of that log, each of which a power cut could have left, the file system is mounted
//! and checked. In the same way the store of images on web servers is checked.
//!
//! CI does it at a few places of ext4 only; `cargo xtask powercut` at as many of each as BECKET_POWERCUT
//! says.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

#[path = "../common/mod.rs"]
mod common;
mod log;
mod store;
mod workload;

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
};

use becket_testkit::{Scratch, image, require_dm, require_tools, require_ublk, tool};
use common::{
    below::{Below, Mapped},
    scratch,
};
use log::Entry;

const MIB: u64 = 1 << 20;

/// A file system, and how it is made and checked.
#[derive(Debug, Clone, Copy)]
struct Kind {
    name: &'static str,
    size: u64,
    make: &'static [&'static str],
    check: &'static [&'static str],
}

const KINDS: [Kind; 3] = [
    Kind {
        name: "ext4",
        size: 64 * MIB,
        // All of it at once, and not later beside the load.
        make: &["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
        check: &["e2fsck", "-f", "-n"],
    },
    Kind { name: "xfs", size: 320 * MIB, make: &["mkfs.xfs", "-q", "-f"], check: &["xfs_repair", "-n"] },
    Kind {
        name: "btrfs",
        size: 256 * MIB,
        make: &["mkfs.btrfs", "-q", "-f"],
        check: &["btrfs", "check", "-q"],
    },
];

/// A device whose writes are logged.
struct Logged {
    mapped: Mapped,
    /// They go after the device over them.
    _below: [Below; 2],
    log: PathBuf,
}

impl Logged {
    fn new(place: &Scratch, size: u64) -> Logged {
        let (data, log) = (place.path("data"), place.path("log"));
        image::sparse(&data, size);
        image::sparse(&log, 2048 * MIB);
        let below = [&data, &log].map(|image| Below::new(image, &[]));
        let table = format!("0 {} log-writes {} {}", size / 512, below[0].path(), below[1].path());
        // The tests of this program run side by side.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("log{}", NEXT.fetch_add(1, Ordering::Relaxed));
        Logged { mapped: Mapped::new(&name, &table), _below: below, log }
    }

    fn mark(&self, text: &str) {
        self.mapped.dmsetup("message", &["0", "mark", text]);
    }
}

fn run(words: &[&str], device: &Path) {
    tool(Command::new(words[0]).args(&words[1..]).arg(device));
}

/// Puts a file system on becket and a load on that, until so many promises are made; returns the log of the
/// backing.
fn record(place: &Scratch, kind: Kind, promises: u64) -> PathBuf {
    let logged = Logged::new(place, kind.size);
    let device = place.attach(&logged.mapped.device(), &["--via", "ublk", "--name", "top"]);
    run(kind.make, &device);
    let point = place.dir("mnt");
    tool(Command::new("mount").arg(&device).arg(&point));
    logged.mark("begin");
    let stop = AtomicBool::new(false);
    let noise = thread::scope(|scope| {
        let noise = scope.spawn(|| workload::make_noise(&point, &stop));
        workload::keep_promises(&point, promises, |number| logged.mark(&format!("{number}")));
        stop.store(true, Ordering::Relaxed);
        noise.join().unwrap()
    });
    assert!(noise > promises, "{noise} operations beside {promises} promises");
    becket_testkit::umount(&point);
    place.ok(["detach", "top"]);
    logged.log.clone()
}

/// What is wrong with the file system in `image`, after a mount has repaired it as after any power cut. Of
/// `made` promises the first `kept` must hold.
fn wrong(place: &Scratch, kind: Kind, image: &Path, kept: u64, made: u64) -> Option<String> {
    let (device, point) = (Below::new(image, &[]), place.dir("mnt"));
    let mounted = Command::new("mount").arg(device.path()).arg(&point).output().unwrap();
    if !mounted.status.success() {
        return Some(format!("it cannot be mounted: {}", String::from_utf8_lossy(&mounted.stderr)));
    }
    let broken = workload::broken(&point, kept, made);
    becket_testkit::umount(&point);
    let checked = Command::new(kind.check[0]).args(&kind.check[1..]).arg(device.path()).output().unwrap();
    let found = || {
        let said = [&*checked.stdout, &*checked.stderr].concat();
        format!("{:?}: {}", kind.check, String::from_utf8_lossy(&said))
    };
    broken.or_else(|| (!checked.status.success()).then(found))
}

/// Replays a log, and looks at the file system at so many places of it; the numbers of it all, in words.
fn replay(place: &Scratch, kind: Kind, log: &Path, points: usize, promises: u64) -> String {
    let (file, entries) = log::entries(log);
    let disk = place.path("disk");
    image::sparse(&disk, kind.size);
    let disk_file = File::options().write(true).open(&disk).unwrap();
    let begin = begin_of(&entries);
    let (cuts, chosen) = log::cuts(&entries, begin, points);
    let mut kept = 0;
    for (index, entry) in entries.iter().enumerate() {
        entry.replay(&file, &disk_file);
        if let Some(number) = entry.mark.as_ref().and_then(|mark| mark.parse::<u64>().ok()) {
            kept = number + 1;
        }
        if chosen.contains(&index) {
            let copy = copy_of(place, &disk);
            let wrong = wrong(place, kind, &copy, kept, promises);
            assert_eq!(
                wrong,
                None,
                "{} at entry {index} of {}, {entry:?}, {kept} promises",
                kind.name,
                entries.len()
            );
        }
    }
    assert_eq!(kept, promises);
    forgetful(place, kind, &file, &entries, promises);
    format!(
        "{}: {} writes logged, {} places where the power could have gone, {} looked at, {promises} promises: all kept",
        kind.name,
        entries.iter().filter(|entry| entry.has_bytes()).count(),
        cuts,
        chosen.len()
    )
}

/// The checker itself: a disk that has lost some of what it had to keep is found out, as is a promise that
/// was not made.
fn forgetful(place: &Scratch, kind: Kind, log: &File, entries: &[Entry], promises: u64) {
    let begin = begin_of(entries);
    let disk = place.path("forgetful");
    image::sparse(&disk, kind.size);
    let file = File::options().write(true).open(&disk).unwrap();
    let last = entries.iter().rposition(|entry| entry.mark.is_some()).unwrap();
    for (index, entry) in entries[..=last].iter().enumerate() {
        if index < begin || index % 4 != 0 {
            entry.replay(log, &file);
        }
    }
    assert!(wrong(place, kind, &disk, promises, promises).is_some(), "nobody noticed that a quarter is gone");
}

/// Where the file system has been made and is mounted.
fn begin_of(entries: &[Entry]) -> usize {
    entries.iter().position(|entry| entry.mark.as_deref() == Some("begin")).unwrap()
}

fn copy_of(place: &Scratch, disk: &Path) -> PathBuf {
    let copy = place.path("copy");
    let _ = fs::remove_file(&copy);
    tool(Command::new("cp").args(["--sparse=always"]).arg(disk).arg(&copy));
    copy
}

#[test]
fn dm_log_a_file_system_is_whole_wherever_the_power_goes() {
    let name = "dm_log_a_file_system_is_whole_wherever_the_power_goes";
    let tools = ["dmsetup", "mkfs.ext4", "mkfs.xfs", "mkfs.btrfs"];
    if !require_dm(name) || !require_ublk(name) || !require_tools(name, &tools) {
        return;
    }
    tool(Command::new("modprobe").arg("dm-log-writes"));
    let points =
        std::env::var("BECKET_POWERCUT").ok().map(|text| text.parse().expect("BECKET_POWERCUT is a number"));
    let (kinds, points, promises) = match points {
        Some(points) => (&KINDS[..], points, 60),
        None => (&KINDS[..1], 5, 15),
    };
    for kind in kinds {
        let place = scratch();
        let log = record(&place, *kind, promises);
        println!("{}", replay(&place, *kind, &log, points, promises));
    }
}

#[test]
fn dm_log_a_store_has_nothing_that_the_power_took() {
    let name = "dm_log_a_store_has_nothing_that_the_power_took";
    if !require_dm(name) || !require_ublk(name) || !require_tools(name, &["dmsetup", "mkfs.ext4", "unshare"])
    {
        return;
    }
    tool(Command::new("modprobe").arg("dm-log-writes"));
    let points = std::env::var("BECKET_POWERCUT").map_or(4, |text| text.parse().expect("a number"));
    let place = scratch();
    let recorded = store::Recorded::new(&place);
    println!("{}", recorded.replay(&place, points));
}
