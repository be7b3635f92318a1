//! `becket export --vhost-user`: a driver in this process uses the disk while its server is killed, replaced
//! and changed. What a driver may send is tested in becket-transport.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use becket_testkit::{Scratch, wait_until};
use becket_virtio::{Driver, EVENT_IDX, IN, INDIRECT, OUT, Queue, Shape};
use common::disturb::{DISTURBANCES, How};
use common::load::Random;
use common::{scratch, text};
use serde_json::Value;

const PAGE: u32 = 4096;
const PAGES: u64 = 512;
const PATIENCE: Duration = Duration::from_secs(60);
const SHAPE: Shape = Shape { queues: 1, count: 64, depth: 32, buffer: PAGE, features: INDIRECT | EVENT_IDX };

fn connect(path: &Path) -> OwnedFd {
    UnixStream::connect(path).unwrap().into()
}

/// As a hypervisor does whose connection ends: until the export is served again. It ends here, for becket
/// keeps it.
fn reconnect(driver: &mut Driver, path: &Path) {
    driver.front.hang_up();
    let began = Instant::now();
    while let Err(error) = driver.reconnect(connect(path)) {
        assert!(began.elapsed() < PATIENCE, "{error:#}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn worker(info: &Value) -> rustix::process::Pid {
    let pid = info["worker_pid"].as_i64().unwrap();
    rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap()
}

fn fill(page: u64, generation: u64) -> Vec<u8> {
    [page.to_le_bytes(), generation.to_le_bytes()].concat().repeat(PAGE as usize / 16)
}

/// Writes some pages with a generation; all under way at once, up to the depth.
fn write(queue: &mut Queue, pages: impl Iterator<Item = u64>, generation: u64) {
    for page in pages {
        queue.submit(OUT, page * u64::from(PAGE), PAGE, &[], &fill(page, generation)).unwrap();
    }
    queue.announce();
}

fn all_end(queue: &mut Queue) {
    while queue.under_way() > 0 {
        assert_eq!(queue.next_ended(PATIENCE).unwrap().status, 0);
    }
}

/// An image that is exported as `disk`, and where.
fn exported() -> (Scratch, PathBuf, PathBuf) {
    let place = scratch();
    let image = place.path("a.img");
    std::fs::File::create(&image).unwrap().set_len(PAGES * u64::from(PAGE)).unwrap();
    let socket = place.path("s");
    let address = format!("unix:{}", socket.display());
    let printed = place.ok(["export", image.to_str().unwrap(), "--vhost-user", &address, "--name", "disk"]);
    assert_eq!(printed.trim(), socket.to_str().unwrap());
    (place, image, socket)
}

#[test]
fn a_disk_of_a_machine_outlives_its_servers() {
    let (place, image, socket) = exported();
    let info = place.devices().remove(0);
    assert_eq!((text(&info, "transport"), text(&info, "state")), ("vhost_user", "live"));

    let mut driver = Driver::start(connect(&socket), SHAPE).unwrap();
    write(&mut driver.queues[0], 0..32, 1);
    all_end(&mut driver.queues[0]);
    assert_eq!(place.devices()[0]["connections"], 1);
    let waiting = connect(&socket);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(place.devices()[0]["connections"], 1, "one that waits is not served");
    drop(waiting);

    // Workers die over requests, which their successors carry out.
    for generation in 2..7 {
        let dead = worker(&place.devices()[0]);
        write(&mut driver.queues[0], (0..32).map(|page| page * generation), generation);
        rustix::process::kill_process(dead, rustix::process::Signal::KILL).unwrap();
        reconnect(&mut driver, &socket);
        all_end(&mut driver.queues[0]);
        let served = || worker(&place.devices()[0]) != dead;
        assert!(wait_until(PATIENCE, served), "another worker serves it");
    }
    assert_eq!(place.devices()[0]["recoveries"], 5);

    // A client of the disk keeps it from being detached.
    let ran = place.run(["detach", "disk"]);
    assert_eq!(ran.code, 1, "{ran:?}");

    // It grows under its driver.
    std::fs::OpenOptions::new()
        .write(true)
        .open(&image)
        .unwrap()
        .set_len(2 * PAGES * u64::from(PAGE))
        .unwrap();
    place.ok(["refresh", "disk"]);
    let config = driver.front.config().unwrap();
    assert_eq!(u64::from_le_bytes(config[..8].try_into().unwrap()), 2 * PAGES * u64::from(PAGE) / 512);
    write(&mut driver.queues[0], PAGES..PAGES + 8, 7);
    all_end(&mut driver.queues[0]);

    // What was written is in the image.
    let bytes = std::fs::read(&image).unwrap();
    for (page, generation) in [(0, 6), (186, 6), (155, 5), (PAGES + 7, 7)] {
        let at = page as usize * PAGE as usize;
        assert!(bytes[at..at + PAGE as usize] == fill(page, generation), "page {page}");
    }
    driver.queues[0].submit(IN, 155 * u64::from(PAGE), PAGE, &[], &[]).unwrap();
    driver.queues[0].announce();
    let slot = driver.queues[0].next_ended(PATIENCE).unwrap().slot;
    let mut read = vec![0; PAGE as usize];
    driver.queues[0].bytes_of(slot, &mut read);
    assert!(read == fill(155, 5));

    drop(driver);
    assert!(wait_until(PATIENCE, || place.devices()[0]["connections"] == 0), "the driver has gone");
    place.ok(["detach", "disk"]);
    assert!(place.devices().is_empty() && !socket.exists());
}

/// A front-end that does not connect anew when its connection ends: it must not end.
#[test]
fn a_machine_that_never_connects_anew_notices_nothing() {
    let (place, image, socket) = exported();
    let mut driver = Driver::start(connect(&socket), SHAPE).unwrap();
    let mut random = Random::new(1);
    let mut latest = std::collections::BTreeMap::new();
    // Deaths of both at once are another matter: then nobody has its connection.
    let possible = DISTURBANCES.iter().filter(|one| !matches!(one.how, How::Both | How::Together));
    let possible: Vec<_> = possible.filter(|one| one.possible()).collect();
    let kills: u64 = std::env::var("BECKET_TEST_KILLS").map_or(18, |kills| kills.parse().unwrap());
    for (generation, disturbance) in (1..=kills).zip(possible.into_iter().cycle()) {
        let pages = || (0..32).map(|page| page * (1 + generation % 9));
        latest.extend(pages().map(|page| (page, generation)));
        write(&mut driver.queues[0], pages(), generation);
        disturbance.happen(&place, "disk", &mut random);
        all_end(&mut driver.queues[0]);
        assert!(!driver.front.is_closed(), "{}", disturbance.name());
    }
    assert_eq!(place.devices()[0]["connections"], 1);
    assert!(!driver.front.is_closed());
    let config = driver.front.config().unwrap();
    assert_eq!(u64::from_le_bytes(config[..8].try_into().unwrap()), PAGES * u64::from(PAGE) / 512);
    let bytes = std::fs::read(&image).unwrap();
    for (page, generation) in latest {
        let at = page as usize * PAGE as usize;
        assert!(bytes[at..at + PAGE as usize] == fill(page, generation), "page {page}");
    }
    drop(driver);
    assert!(wait_until(PATIENCE, || place.devices()[0]["connections"] == 0), "the driver has gone");
    place.ok(["detach", "disk"]);
}
