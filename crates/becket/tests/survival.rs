//! A device under a verifying load while those who serve it are killed or replaced: no error, no wrong byte.
//!
//! CI kills and replaces a few times. `cargo xtask campaign` runs the same for as long as it should, by
//! BECKET_CAMPAIGN, and shows the closing line.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{sync::atomic::Ordering, thread, time::Duration};

use becket_testkit::{require_device, require_fuse, skip, via};
use common::disturb::{Disturbance, How, PATIENCE, SUPERVISOR, WORKER, await_device};
use common::load::{Random, SIZE, Seen, under_load};
use common::scratch;

/// A worker that has lived for so long did not die at once, and the next one is not waited for.
const LIFE: Duration = Duration::from_millis(2200);

const KILL: Disturbance = Disturbance { whom: WORKER, how: How::Signal("KILL") };
/// The supervisor, and then the worker that its successor has taken over.
const SUCCESSION: Disturbance = Disturbance { whom: SUPERVISOR, how: How::Both };
const TAKEOVER: Disturbance = Disturbance { whom: SUPERVISOR, how: How::Replaced };

/// Disturbs a device under load `usual` times, or as often as asked for, and says what came of it in one
/// line.
fn disturb(name: &str, via: &str, disturbance: &Disturbance, usual: usize) {
    let reported = std::env::var("BECKET_CAMPAIGN").ok().and_then(|text| text.parse().ok());
    let rounds = reported.unwrap_or(usual);
    let place = scratch();
    // Where direct I/O works, if the machine has such a place.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, vec![0; SIZE]).unwrap();
    let device = place.attach(&path, &["--via", via, "--name", "one"]);
    if place.devices()[0][WORKER].is_null() {
        skip(name, "this transport has no server");
        return;
    }
    let seen = Seen::default();
    let mut random = Random::new(0);
    let (mut pauses, model) = under_load(&device, &seen, || {
        let mut pauses = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            await_device(&place, "one", |_| true);
            thread::sleep(LIFE);
            seen.longest.store(0, Ordering::Relaxed);
            disturbance.happen(&place, "one", &mut random);
            assert!(seen.goes_on(PATIENCE), "the load goes on");
            pauses.push(seen.longest.load(Ordering::Relaxed) / 1000);
        }
        pauses
    });
    // On the device, and, once it is gone, in the file.
    seen.compare(&std::fs::read(&device).unwrap(), &model, 0);
    place.ok(["detach", "one"]);
    seen.compare(&std::fs::read(&path).unwrap(), &model, 0);
    pauses.sort_unstable();
    let percentile = |p: usize| pauses[(pauses.len() * p).div_ceil(100).clamp(1, pauses.len()) - 1];
    println!(
        "campaign: {} over {via}: {rounds} times, {} operations, {} errors, {} wrong bytes, pause p50 {} ms, p99 {} ms",
        disturbance.name(),
        seen.operations.load(Ordering::Relaxed),
        seen.errors.load(Ordering::Relaxed),
        seen.wrong_bytes.load(Ordering::Relaxed),
        percentile(50),
        percentile(99)
    );
    assert!(seen.nothing_wrong(), "{:?}", seen.first.lock().unwrap());
}

#[test]
fn killed_workers_are_not_noticed() {
    let name = "survival::killed_workers_are_not_noticed";
    if require_device(name) {
        disturb(name, &via(), &KILL, 3);
    }
}

#[test]
fn killed_supervisors_and_their_workers_are_not_noticed() {
    let name = "survival::killed_supervisors_and_their_workers_are_not_noticed";
    if require_device(name) {
        disturb(name, &via(), &SUCCESSION, 2);
    }
}

#[test]
fn upgrades_are_not_noticed() {
    let name = "survival::upgrades_are_not_noticed";
    if require_device(name) {
        disturb(name, &via(), &TAKEOVER, 2);
    }
}

/// The kernel has to send again what the dead worker had read, and only once that can reach no image any
/// more.
#[test]
fn fuse_workers_that_are_killed_are_not_noticed() {
    let name = "survival::fuse_workers_that_are_killed_are_not_noticed";
    if require_fuse(name) {
        disturb(name, "fuse", &KILL, 2);
    }
}

/// It takes no more requests, answers those that it has, and only then ends: by its death one could be lost.
#[test]
fn fuse_workers_that_are_replaced_finish_first() {
    if !require_fuse("survival::fuse_workers_that_are_replaced_finish_first") {
        return;
    }
    let place = scratch();
    let image = place.path("image");
    std::fs::write(&image, vec![7; 1 << 20]).unwrap();
    let options = ["--via", "fuse", "--name", "one", "--direct-io", "off", "--fault", "delay=read:1s"];
    let device = place.attach(&image, &options);
    let before = await_device(&place, "one", |_| true);
    // The last page was not read yet.
    let reader = thread::spawn(move || becket_testkit::crc(&device, (1 << 20) - 4096, 4096));
    thread::sleep(Duration::from_millis(300));
    let said = place.path("said");
    let mut serve = place.becket();
    serve.args(["serve", "--takeover", "--until-idle"]).stderr(std::fs::File::create(&said).unwrap());
    let mut server = serve.spawn().unwrap();
    let after = await_device(&place, "one", |now| now["recoveries"].as_u64() > before["recoveries"].as_u64());
    assert_ne!(after[WORKER], before[WORKER]);
    assert_eq!(reader.join().unwrap(), becket_testkit::crc(&image, 0, 4096));
    place.ok(["detach", "one"]);
    server.wait().unwrap();
    let said = std::fs::read_to_string(&said).unwrap();
    assert!(said.contains(" has been replaced") && !said.contains(" is ended"), "{said}");
}

/// The connection's descriptors are in the worker alone between the two deaths.
#[test]
fn fuse_supervisors_that_are_killed_are_not_noticed() {
    let name = "survival::fuse_supervisors_that_are_killed_are_not_noticed";
    if require_fuse(name) {
        disturb(name, "fuse", &SUCCESSION, 2);
    }
}

#[test]
fn fuse_upgrades_are_not_noticed() {
    let name = "survival::fuse_upgrades_are_not_noticed";
    if require_fuse(name) {
        disturb(name, "fuse", &TAKEOVER, 2);
    }
}
