//! Devices whose bytes come from elsewhere while they are read.

use std::{
    fs,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use becket_testkit::{Scratch, image, wait_until};

use super::one::{kill, only};
use super::web::ok;
use super::{alive, text};

pub(crate) const BLOCK: usize = 4096;

/// Attaches over FUSE and returns the disk.
pub(crate) fn attach(place: &Scratch, words: &[&str]) -> PathBuf {
    // A test that fails must not leave a reader behind that waits for ever.
    let limit: &[&str] = if words.contains(&"--origin-timeout") { &[] } else { &["--origin-timeout", "90s"] };
    let base = ["attach", "--via", "fuse", "--partitions", "off"];
    ok(place, &[&base, limit, words].concat()).trim().into()
}

/// The device's fetcher.
pub(crate) fn fetchers(place: &Scratch) -> Vec<u32> {
    let server = only(place)["server_pid"].as_u64().unwrap();
    let of = |pid: u32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        status.contains(&format!("\nPPid:\t{server}\n"))
            && words.split(|byte| *byte == 0).nth(1) == Some(b"fetcher")
            && alive(pid)
    };
    let all = fs::read_dir("/proc").unwrap().filter_map(|dir| dir.ok()?.file_name().to_str()?.parse().ok());
    all.filter(|pid| of(*pid)).collect()
}

/// A disk, past the page cache.
pub(crate) fn open(disk: &Path) -> fs::File {
    let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
    fs::File::options().read(true).custom_flags(flags).open(disk).unwrap()
}

/// A block that is aligned for direct I/O.
#[repr(align(4096))]
pub(crate) struct Block(pub(crate) [u8; BLOCK]);

pub(crate) fn read(disk: &fs::File, block: usize) -> std::io::Result<Box<Block>> {
    let mut found = Box::new(Block([0; BLOCK]));
    disk.read_exact_at(&mut found.0, (block * BLOCK) as u64).map(|()| found)
}

pub(crate) fn random(place: &Scratch, len: u64) -> Vec<u8> {
    let path = place.path("random");
    image::random(&path, len, 7);
    fs::read(path).unwrap()
}

pub(crate) fn block_of(bytes: &[u8], block: usize) -> &[u8] {
    &bytes[block * BLOCK..(block + 1) * BLOCK]
}

/// How many processes are killed: `BECKET_TEST_KILLS`, for a campaign.
pub(crate) fn kills() -> usize {
    std::env::var("BECKET_TEST_KILLS").map_or(6, |kills| kills.parse().unwrap())
}

/// A reader for each of these files reads blocks at random, the first in order, while the device's processes
/// are killed in turn. None sees an error or a wrong byte, and all go on after each kill; returns how much
/// they have read.
pub(crate) fn read_and_kill(place: &Scratch, disks: &[&fs::File], bytes: &[u8], kills: usize) -> u64 {
    /// Readers end, whatever becomes of the test.
    struct Ends<'a>(&'a AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let (ends, blocks) = (AtomicBool::new(false), bytes.len() / BLOCK);
    let counts: Vec<_> = disks.iter().map(|_| AtomicU64::new(0)).collect();
    thread::scope(|scope| {
        let _ends = Ends(&ends);
        for (number, (disk, count)) in disks.iter().zip(&counts).enumerate() {
            let ends = &ends;
            scope.spawn(move || {
                let mut at = number * 977;
                while !ends.load(Ordering::Relaxed) {
                    at = if number == 0 { at + 1 } else { at * 1_103_515_245 + 12_345 } % blocks;
                    let found = read(disk, at).unwrap_or_else(|error| panic!("block {at}: {error}"));
                    assert!(found.0 == block_of(bytes, at), "block {at}");
                    count.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(Duration::from_micros(500));
                }
            });
        }
        for number in 0..kills {
            thread::sleep(Duration::from_millis(300));
            let pid = |key: &str| u32::try_from(only(place)[key].as_u64().unwrap()).unwrap();
            match number % 3 {
                0 => kill(pid("worker_pid")),
                1 => {
                    let there = || !fetchers(place).is_empty();
                    assert!(wait_until(Duration::from_secs(20), there), "no other fetcher");
                    kill(fetchers(place)[0]);
                }
                _ => kill(pid("server_pid")),
            }
            let live = || place.devices().iter().all(|device| text(device, "state") == "live");
            assert!(wait_until(Duration::from_secs(30), live), "{:?} after kill {number}", place.devices());
            let now = || counts.iter().map(|count| count.load(Ordering::Relaxed)).collect::<Vec<_>>();
            let before = now();
            let go_on = || now().iter().zip(&before).all(|(now, before)| *now > before + 20);
            assert!(
                wait_until(Duration::from_secs(30), go_on),
                "{before:?}, {:?} after kill {number}",
                now()
            );
        }
    });
    counts.into_iter().map(AtomicU64::into_inner).sum()
}
