//! A device under a verifying load while those who serve it are killed or replaced: no error, no wrong byte.
//!
//! CI kills and replaces a few times. `cargo xtask campaign` runs the same for as long as it is told, by
//! BECKET_CAMPAIGN, and shows the closing line.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs::OpenOptions,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use becket_testkit::{Scratch, require_device, require_fuse, skip, tool, wait_until};
use common::scratch;
use serde_json::Value;

/// Length of the device, divided among the threads.
const SIZE: usize = 32 << 20;
const THREADS: usize = 4;
const BLOCK: usize = 4096;
/// A worker that has lived for so long did not die at once, and the next one is not waited for.
const LIFE: Duration = Duration::from_millis(2200);

/// What the load has seen.
#[derive(Default)]
struct Seen {
    stop: AtomicBool,
    operations: AtomicU64,
    errors: AtomicU64,
    wrong_bytes: AtomicU64,
    /// The longest operation since it was last asked for, in microseconds.
    longest: AtomicU64,
    first: Mutex<Option<String>>,
}

impl Seen {
    fn went_wrong(&self, what: String) {
        self.first.lock().unwrap().get_or_insert(what);
    }
}

/// Bytes at an address that direct I/O takes.
struct Aligned(Vec<u8>, usize);

impl Aligned {
    fn new(len: usize) -> Aligned {
        let bytes = vec![0; len + BLOCK];
        let skew = bytes.as_ptr().align_offset(BLOCK);
        Aligned(bytes, skew)
    }

    fn slice(&mut self, len: usize) -> &mut [u8] {
        &mut self.0[self.1..self.1 + len]
    }
}

/// Writes and reads one part of the device, past the page cache, until told to stop; returns what must be there.
fn load(device: &Path, part: usize, seen: &Seen) -> Vec<u8> {
    const LARGEST: usize = 64 << 10;
    let flags = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap();
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(device).unwrap();
    let room = SIZE / THREADS;
    let base = part * room;
    let mut model = vec![0u8; room];
    let mut buffer = Aligned::new(LARGEST);
    let mut state = part as u64 + 1;
    let mut next = move || {
        // xorshift64: any sequence that repeats late will do.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize
    };
    while !seen.stop.load(Ordering::Relaxed) {
        let len = (next() % (LARGEST / BLOCK) + 1) * BLOCK;
        let at = next() % ((room - len) / BLOCK + 1) * BLOCK;
        let position = (base + at) as u64;
        let (kind, bytes) = (next() % 16, buffer.slice(len));
        let begun = Instant::now();
        let outcome = match kind {
            0..8 => {
                let salt = next() as u8;
                bytes.iter_mut().enumerate().for_each(|(i, byte)| *byte = salt.wrapping_add((i / 7) as u8));
                // What a write that fails leaves behind is nobody's promise; here none may fail.
                file.write_all_at(bytes, position).map(|()| model[at..at + len].copy_from_slice(bytes))
            }
            8..15 => file.read_exact_at(bytes, position).map(|()| {
                let wrong = bytes.iter().zip(&model[at..at + len]).filter(|(is, must)| is != must).count();
                if wrong > 0 {
                    seen.wrong_bytes.fetch_add(wrong as u64, Ordering::Relaxed);
                    seen.went_wrong(format!("{wrong} of {len} bytes at {position} are wrong"));
                }
            }),
            _ => file.sync_data(),
        };
        let took = u64::try_from(begun.elapsed().as_micros()).unwrap();
        seen.longest.fetch_max(took, Ordering::Relaxed);
        seen.operations.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = outcome {
            seen.errors.fetch_add(1, Ordering::Relaxed);
            seen.went_wrong(format!("operation {kind} of {len} bytes at {position}: {error}"));
        }
    }
    model
}

/// How often, by the environment or as CI wants it.
fn rounds(usual: usize) -> usize {
    std::env::var("BECKET_CAMPAIGN").ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// The one device, once it is served and `is` holds of it.
fn await_device(place: &Scratch, is: impl Fn(&Value) -> bool) -> Value {
    let found = || place.devices().into_iter().next().filter(|info| info["state"] == "live" && is(info));
    let mut info = None;
    assert!(
        wait_until(Duration::from_secs(60), || {
            info = found();
            info.is_some()
        }),
        "{:?}",
        place.devices()
    );
    info.unwrap()
}

/// Disturbs a device of the tested transport `usual` times, or as often as it is told.
fn disturb(name: &str, word: &str, usual: usize, once: impl FnMut(&Scratch, &Value)) {
    if require_device(name) {
        disturb_one(name, word, rounds(usual), &[], once);
    }
}

/// Disturbs a device `rounds` times under load, and says what came of it in one line.
fn disturb_one(
    name: &str,
    word: &str,
    rounds: usize,
    options: &[&str],
    mut once: impl FnMut(&Scratch, &Value),
) {
    let place = scratch();
    // Where direct I/O works, if the machine has such a place.
    let dir = tempfile::tempdir().unwrap();
    let path: PathBuf = dir.path().join("image");
    std::fs::write(&path, vec![0; SIZE]).unwrap();
    let device = place.attach(&path, options);
    if place.devices()[0]["worker_pid"].is_null() {
        skip(name, "this transport has no server");
        return;
    }
    let seen = Seen::default();
    let mut pauses = Vec::with_capacity(rounds);
    let model: Vec<u8> = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|part| {
                let (device, seen) = (&device, &seen);
                scope.spawn(move || load(device, part, seen))
            })
            .collect();
        let stop = Stop(&seen);
        for _ in 0..rounds {
            let info = await_device(&place, |_| true);
            thread::sleep(LIFE);
            seen.longest.store(0, Ordering::Relaxed);
            once(&place, &info);
            await_device(&place, |now| now["recoveries"].as_u64() > info["recoveries"].as_u64());
            let before = seen.operations.load(Ordering::Relaxed);
            let all_again = || seen.operations.load(Ordering::Relaxed) >= before + 2 * THREADS as u64;
            assert!(wait_until(Duration::from_secs(60), all_again), "the load goes on");
            pauses.push(seen.longest.load(Ordering::Relaxed) / 1000);
        }
        drop(stop);
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    // On the device, and, once it is gone, in the file.
    let mut wrong = seen.wrong_bytes.load(Ordering::Relaxed);
    let differs = |bytes: &[u8]| bytes.iter().zip(&model).filter(|(is, must)| is != must).count() as u64;
    wrong += differs(&std::fs::read(&device).unwrap());
    place.ok(["detach", device.to_str().unwrap()]);
    wrong += differs(&std::fs::read(&path).unwrap());
    pauses.sort_unstable();
    let percentile = |p: usize| pauses[(pauses.len() * p).div_ceil(100).clamp(1, pauses.len()) - 1];
    let errors = seen.errors.load(Ordering::Relaxed);
    println!(
        "campaign {word}: {rounds} times, {} operations, {errors} errors, {wrong} wrong bytes, pause p50 {} ms, p99 {} ms",
        seen.operations.load(Ordering::Relaxed),
        percentile(50),
        percentile(99)
    );
    let first = seen.first.lock().unwrap();
    assert!(errors == 0 && wrong == 0, "{first:?}");
}

/// Ends the load, also when the test has failed.
struct Stop<'a>(&'a Seen);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

fn kill(info: &Value, whom: &str) {
    tool(Command::new("kill").args(["-KILL", &info[whom].to_string()]));
}

#[test]
fn killed_workers_are_not_noticed() {
    disturb("survival::killed_workers_are_not_noticed", "kill", 3, |_, info| kill(info, "worker_pid"));
}

/// Kills the supervisor, and then the worker that its successor has taken over.
fn kill_both(place: &Scratch, info: &Value) {
    kill(info, "server_pid");
    let now = await_device(place, |now| now["server_pid"] != info["server_pid"]);
    kill(&now, "worker_pid");
}

#[test]
fn killed_supervisors_and_their_workers_are_not_noticed() {
    let name = "survival::killed_supervisors_and_their_workers_are_not_noticed";
    disturb(name, "succession", 2, kill_both);
}

/// The kernel has to send again what the dead worker had read, and only once what that can reach no image any more.
#[test]
fn fuse_workers_that_are_killed_are_not_noticed() {
    let name = "survival::fuse_workers_that_are_killed_are_not_noticed";
    if require_fuse(name) {
        let kill_worker = |_: &Scratch, info: &Value| kill(info, "worker_pid");
        disturb_one(name, "kill over fuse", rounds(2), &["--via", "fuse"], kill_worker);
    }
}

/// The connection's descriptors are in the worker alone between the two deaths.
#[test]
fn fuse_supervisors_that_are_killed_are_not_noticed() {
    let name = "survival::fuse_supervisors_that_are_killed_are_not_noticed";
    if require_fuse(name) {
        disturb_one(name, "succession over fuse", rounds(2), &["--via", "fuse"], kill_both);
    }
}

#[test]
fn upgrades_are_not_noticed() {
    let mut servers: Vec<Child> = Vec::new();
    disturb("survival::upgrades_are_not_noticed", "takeover", 2, |place, info| {
        let mut serve = place.becket();
        serve.args(["serve", "--takeover", "--until-idle"]).stdout(Stdio::null()).stderr(Stdio::null());
        servers.push(serve.spawn().unwrap());
        await_device(place, |now| now["server_pid"] != info["server_pid"]);
    });
    for mut server in servers {
        common::ended(&mut server);
    }
}
