//! A device under a verifying load while those who serve it are killed or replaced: no error, no wrong byte.
//!
//! CI kills and replaces a few times. `cargo xtask campaign` runs the same for as long as it is told, by
//! BECKET_CAMPAIGN, and shows the closing line.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::Ordering,
    thread,
    time::Duration,
};

use becket_testkit::{Scratch, require_device, require_fuse, skip, tool, wait_until};
use common::load::{SIZE, Seen, Stop, THREADS, load};
use common::scratch;
use serde_json::Value;

/// A worker that has lived for so long did not die at once, and the next one is not waited for.
const LIFE: Duration = Duration::from_millis(2200);

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
