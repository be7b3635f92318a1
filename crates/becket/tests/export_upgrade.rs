//! An upgrade while a client of an export does not go on: who waits for it, and for how long.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::io::{ErrorKind, Read as _, Write as _};
use std::path::Path;
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use becket_testkit::{Scratch, image, patience, require_fuse, wait_until};
use common::nbd::{self, Client};
use common::{scratch, text};

const SIZE: u64 = 8 << 20;
/// How long anybody else may wait: a client may stand still for five seconds.
const PAUSE: Duration = Duration::from_secs(9);

fn exported(place: &Scratch, name: &str) {
    image::random(&place.path(&format!("{name}.img")), SIZE, 7);
    let address = format!("unix:{}", place.path(&format!("{name}.sock")).display());
    place.ok(["export", "--nbd", &address, "--name", name, &format!("{name}.img")]);
}

/// Small reads until it is asked to stop; returns the longest time that one took.
fn reads(socket: &Path, name: &str, stop: &AtomicBool) -> Duration {
    let mut client = Client::connect(socket, name).unwrap();
    let mut longest = Duration::ZERO;
    while !stop.load(Ordering::Relaxed) {
        let began = Instant::now();
        assert_eq!(client.read(0, 512).unwrap().len(), 512);
        longest = longest.max(began.elapsed());
        std::thread::sleep(Duration::from_millis(2));
    }
    longest
}

/// One that sends requests and reads no answer.
fn deaf(socket: &Path) -> Client {
    let mut deaf = Client::connect(socket, "one").unwrap();
    deaf.socket.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    while deaf.socket.write_all(&nbd::request(0, nbd::READ, 1, 0, 1 << 20)).is_ok() {}
    deaf
}

/// One that stops in the middle of a write.
fn half(socket: &Path) -> Client {
    let mut half = Client::connect(socket, "one").unwrap();
    half.socket.write_all(&nbd::request(0, nbd::WRITE, 1, 1 << 20, 1 << 20)).unwrap();
    half.socket.write_all(&[1; 300_000]).unwrap();
    half
}

/// Ends what waits for it, also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn takeover(place: &Scratch) -> Child {
    let mut serve = place.becket();
    serve.args(["serve", "--takeover", "--until-idle"]).spawn().unwrap()
}

/// Upgrades while the clients that `stuck` makes do not go on; `others` is done while the devices move.
fn upgrade(place: &Scratch, stuck: fn(&Path) -> Client, others: impl Fn()) {
    let (one, two) = (place.path("one.sock"), place.path("two.sock"));
    let mut still = stuck(&one);
    let mut idle = Client::connect(&one, "one").unwrap();
    let stop = AtomicBool::new(false);
    let workers = || -> Vec<_> { place.devices().iter().map(|it| it["worker_pid"].clone()).collect() };
    let before = workers();
    let longest = std::thread::scope(|scope| {
        let loads = [(&one, "one"), (&two, "two")]
            .map(|(socket, name)| (name, scope.spawn(|| reads(socket, name, &stop))));
        let stopping = Stop(&stop);
        std::thread::sleep(Duration::from_millis(300));
        let mut serve = takeover(place);
        let began = Instant::now();
        let moved = || {
            for device in place.devices() {
                assert_ne!(text(&device, "state"), "not_responding", "{device}");
            }
            others();
            workers().iter().all(|worker| !before.contains(worker))
        };
        assert!(wait_until(Duration::from_secs(60), moved), "other workers serve them");
        assert!(began.elapsed() < patience(PAUSE), "{:?}", began.elapsed());
        std::thread::sleep(Duration::from_millis(300));
        drop(stopping);
        std::thread::spawn(move || serve.wait());
        loads.map(|(name, load)| (name, load.join().expect("no request has failed")))
    });
    for (name, longest) in longest {
        assert!(longest < patience(PAUSE), "{name}: {longest:?}");
    }
    assert_eq!(idle.read(0, 512).unwrap().len(), 512, "one that asks for nothing stays");
    still.socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let error = still.socket.read_to_end(&mut Vec::new()).err().map(|error| error.kind());
    assert_ne!(error, Some(ErrorKind::WouldBlock), "it has lost its connection");
}

#[test]
fn a_client_that_reads_nothing_keeps_nobody_waiting() {
    let place = scratch();
    exported(&place, "one");
    exported(&place, "two");
    let number = std::cell::Cell::new(0);
    upgrade(&place, deaf, || {
        // Commands go on meanwhile.
        number.set(number.get() + 1);
        if number.get() == 1 {
            let began = Instant::now();
            exported(&place, "new");
            place.ok(["detach", "new"]);
            assert!(began.elapsed() < patience(Duration::from_secs(4)), "{:?}", began.elapsed());
        }
    });
    place.ok(["detach", "--all", "--force"]);
}

#[test]
fn fuse_a_client_that_stops_in_a_write_keeps_nobody_waiting() {
    if !require_fuse("export_upgrade::fuse_a_client_that_stops_in_a_write_keeps_nobody_waiting") {
        return;
    }
    let place = scratch();
    exported(&place, "one");
    exported(&place, "two");
    image::random(&place.path("disk.img"), SIZE, 7);
    place.ok(["attach", "--via", "fuse", "--name", "disk", "disk.img"]);
    upgrade(&place, half, || {});
    place.ok(["detach", "--all", "--force"]);
}
