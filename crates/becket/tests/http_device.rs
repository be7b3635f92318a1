//! Devices over images on web servers: what is fetched, and what becomes of readers while servers and
//! processes of ours come and go.
//! Sends only to the loopback address.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use becket_testkit::{
    origin::{Origin, Reply},
    require_fuse, require_root, require_tools, require_ublk, tool, wait_until,
};
use common::fetched::{BLOCK, attach, block_of, fetchers, kills, open, random, read, read_and_kill};
use common::nbd::Client;
use common::one::{kill, only};
use common::scratch;
use common::web::{command, ext4, ok, run};

#[test]
fn fuse_only_what_is_read_is_fetched_and_once_for_all_devices() {
    let name = "http_device::fuse_only_what_is_read_is_fetched_and_once_for_all_devices";
    if !require_fuse(name) || !require_tools(name, &["mke2fs"]) {
        return;
    }
    let place = scratch();
    let origin = Origin::start(fs::read(ext4(&place)).unwrap());
    let url = origin.url("/d.img");
    let disk = attach(&place, &[&url]);
    assert!(origin.sent() < 2 << 20, "{} bytes of 48 MiB to attach it", origin.sent());
    let point = place.dir("mnt");
    tool(Command::new("mount").args(["-o", "ro"]).args([&disk, &point]));
    assert_eq!(fs::read_to_string(point.join("dir/file")).unwrap(), "from afar");
    assert!(origin.sent() < 6 << 20, "{} bytes of 48 MiB to read a file", origin.sent());
    assert!(fs::read(point.join("big")).unwrap() == fs::read(place.path("tree/big")).unwrap());
    let sent = origin.sent();
    // At most 16 MiB are fetched ahead of a reader (0141).
    assert!((20 << 20..38 << 20).contains(&sent), "{sent} bytes for 20 MiB");
    let mut disks = Vec::new();
    for number in 0..19 {
        disks.push(attach(&place, &[&url, "--name", &format!("d{number}")]));
    }
    assert_eq!(fetchers(&place).len(), 1, "one fetcher for twenty devices");
    thread::scope(|scope| {
        for disk in &disks {
            scope.spawn(|| {
                let (disk, bytes) = (open(disk), fs::read(place.path("d.img")).unwrap());
                for block in (0..bytes.len() / BLOCK).step_by(61) {
                    assert!(read(&disk, block).unwrap().0 == block_of(&bytes, block), "block {block}");
                }
            });
        }
    });
    let once = (48 << 20) + 20 * (64 << 10);
    assert!(origin.sent() <= once, "{} bytes for 20 devices", origin.sent());
    becket_testkit::umount(&point);
    // All devices say what the store has.
    let stored = run(&place, &["--json", "store", "list"]).json()["objects"][0]["stored"].clone();
    assert!(stored.as_u64().is_some_and(|stored| stored > 20 << 20), "{stored}");
    for name in ["d0", "d18"] {
        let fetched = &place.json(["stat", name])["devices"][0]["fetched"];
        assert_eq!((&fetched["bytes"], &fetched["size"]), (&stored, &(48 << 20).into()), "{name}");
    }
    let first = &place.json(["stat", disk.to_str().unwrap()])["devices"][0]["fetched"];
    assert!(first["waits"].as_u64().is_some_and(|waits| waits > 10), "{first}");
    let said = place.ok(["stat", "d0"]);
    assert!(said.contains("fetched: ") && said.contains(" of 48M; waited "), "{said}");
    let metrics = place.ok(["metrics"]);
    assert!(metrics.contains(&format!("becket_device_store_bytes{{name=\"d0\"}} {stored}\n")), "{metrics}");
    let worker = only(&place)["worker_pid"].clone();
    assert!(place.devices().iter().all(|device| device["worker_pid"] == worker), "none is isolated");
    place.ok(["detach", "--all"]);
    // So does one that comes later, before and while what the store has is compared with its checksums.
    let disk = open(&attach(&place, &[&url]));
    let says = || only(&place)["stored"]["bytes"].clone();
    assert_eq!(says(), stored);
    for block in (0..(48 << 20) / BLOCK).step_by(61) {
        read(&disk, block).unwrap();
    }
    assert_eq!(says(), run(&place, &["--json", "store", "list"]).json()["objects"][0]["stored"]);
    drop(disk);
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_a_line_of_the_table_may_be_a_url() {
    let name = "http_device::fuse_a_line_of_the_table_may_be_a_url";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 2 << 20);
    let origin = Origin::start(bytes.clone());
    let (url, socket) = (origin.url("/d.img"), place.path("s"));
    fs::write(
        place.path("tab"),
        format!("disk {url} via=fuse,partitions=off\nout {url} nbd=unix:{}\n", socket.display()),
    )
    .unwrap();
    let disk = ok(&place, &["attach", &format!("--tab={}", place.path("tab").display()), "disk", "out"]);
    let disk = open(Path::new(disk.lines().next().unwrap()));
    assert!(read(&disk, 7).unwrap().0 == block_of(&bytes, 7));
    assert_eq!(Client::connect(&socket, "out").unwrap().read(4096, 4096).unwrap(), block_of(&bytes, 1));
}

#[test]
fn fuse_readers_see_no_error_when_processes_die() {
    let name = "http_device::fuse_readers_see_no_error_when_processes_die";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 64 << 20);
    let origin = Origin::start(bytes.clone());
    origin.latency(Duration::from_millis(5));
    let disk = open(&attach(&place, &[&origin.url("/d.img")]));
    // Another device of the same object: both share one fetcher, which either of them starts.
    let other = open(&attach(&place, &[&origin.url("/d.img"), "--name", "other"]));
    let kills = kills();
    let done = read_and_kill(&place, &[&disk, &disk, &disk, &other], &bytes, kills);
    assert!(done > 500, "only {done} reads");
    assert!(wait_until(Duration::from_secs(20), || fetchers(&place).len() == 1));
    // What was in flight when a fetcher died is fetched again.
    let once = bytes.len() as u64 + kills as u64 * 2 * (8 << 20);
    assert!(origin.sent() < once, "{} bytes", origin.sent());
    drop((disk, other));
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_a_server_that_is_away_is_waited_for() {
    let name = "http_device::fuse_a_server_that_is_away_is_waited_for";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 16 << 20);
    let origin = Origin::start(bytes.clone());
    let path = attach(&place, &[&origin.url("/d.img")]);
    let disk = open(&path);
    read(&disk, 0).unwrap();
    origin.trick(|_, _| Reply::status(503));
    let waits = thread::spawn({
        let disk = disk.try_clone().unwrap();
        move || read(&disk, 2000).map(|found| found.0)
    });
    let host = origin.url("").replace("http://", "");
    let shown = || {
        only(&place)["away"]
            .as_str()
            .is_some_and(|away| away.starts_with(&format!("waiting for {host} since 2")))
    };
    assert!(wait_until(Duration::from_secs(20), shown), "{:?}", only(&place));
    assert!(place.ok(["list"]).contains("waiting"));
    let away = only(&place)["away"].as_str().unwrap_or_default().to_owned();
    assert!(away.contains("status 503") && !away.contains("no answer for"), "{away}");
    let metric = |value: u32| format!("\nbecket_device_origin_away{{name=\"fuse0\"}} {value}\n");
    assert!(place.ok(["metrics"]).contains(&metric(1)), "{}", place.ok(["metrics"]));
    assert!(!waits.is_finished(), "it waits");
    assert!(read(&disk, 0).unwrap().0 == block_of(&bytes, 0), "what is there is read");
    origin.honest();
    assert!(waits.join().unwrap().unwrap() == block_of(&bytes, 2000));
    assert!(wait_until(Duration::from_secs(20), || only(&place)["away"].is_null()), "{:?}", only(&place));
    assert!(place.ok(["metrics"]).contains(&metric(0)), "{}", place.ok(["metrics"]));
    // A server that is away keeps nobody from detaching.
    origin.trick(|_, _| Reply::status(503));
    drop(disk);
    let began = Instant::now();
    place.ok(["detach", path.to_str().unwrap()]);
    assert!(began.elapsed() < Duration::from_secs(5), "after {:?}", began.elapsed());
}

/// A reader of a disk whose server is away, through the page cache as most read, that was killed.
fn dead_reader(disk: &Path, way: &str) -> std::process::Child {
    let mut dd = Command::new("dd");
    // With direct I/O it ends only when its read does.
    dd.arg(format!("iflag={way}"));
    dd.arg(format!("if={}", disk.display())).args(["of=/dev/null", "bs=64k", "skip=100"]);
    let mut reader = dd.stderr(std::process::Stdio::null()).spawn().unwrap();
    let name = disk.file_name().unwrap().to_str().unwrap();
    let reads = || fs::read_to_string(format!("/sys/block/{name}/inflight")).unwrap();
    let waits = || !reads().trim().starts_with('0');
    assert!(wait_until(Duration::from_secs(20), waits), "it reads: {}", reads());
    reader.kill().unwrap();
    reader
}

#[test]
fn fuse_a_reader_that_died_locks_nobody_out() {
    let name = "http_device::fuse_a_reader_that_died_locks_nobody_out";
    if !require_fuse(name) || !require_tools(name, &["dd", "losetup"]) {
        return;
    }
    let place = scratch();
    let origin = Origin::start(random(&place, 16 << 20));
    let disk = attach(&place, &[&origin.url("/d.img")]);
    origin.trick(|_, _| Reply::status(503));
    let mut reader = dead_reader(&disk, "fullblock");
    // It needs the lock that the reader holds until its reads have ended.
    let began = Instant::now();
    tool(Command::new("losetup").arg("--list").arg(&disk));
    assert!(began.elapsed() < Duration::from_secs(40), "after {:?}", began.elapsed());
    reader.wait().unwrap();

    // One who waits and lives is spared, whatever becomes of others.
    let waits = thread::spawn({
        let disk = open(&disk);
        move || read(&disk, 3000)
    });
    let mut reader = dead_reader(&disk, "direct");
    thread::sleep(Duration::from_secs(4));
    if waits.is_finished() {
        panic!("its bytes are wanted, and it got {:?}", waits.join().unwrap().map(drop));
    }
    origin.honest();
    waits.join().unwrap().unwrap();
    reader.wait().unwrap();

    // And the device can be detached at once.
    origin.trick(|_, _| Reply::status(503));
    let mut reader = dead_reader(&disk, "direct");
    let began = Instant::now();
    place.ok(["detach", disk.to_str().unwrap()]);
    assert!(began.elapsed() < Duration::from_secs(10), "after {:?}", began.elapsed());
    reader.wait().unwrap();
}

#[test]
fn fuse_requests_fail_when_the_user_says_so() {
    let name = "http_device::fuse_requests_fail_when_the_user_says_so";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 16 << 20);
    let origin = Origin::start(bytes.clone());
    let disk = open(&attach(&place, &[&origin.url("/d.img"), "--origin-timeout", "3s"]));
    origin.trick(|_, _| Reply::status(503));
    let began = Instant::now();
    assert_eq!(read(&disk, 2000).map(drop).unwrap_err().raw_os_error(), Some(5));
    assert!(began.elapsed() > Duration::from_millis(2500), "it is tried for {:?} only", began.elapsed());
    origin.honest();
    let again = || read(&disk, 2000).is_ok_and(|found| found.0 == block_of(&bytes, 2000));
    assert!(wait_until(Duration::from_secs(20), again), "it is there again");
    drop(disk);
    place.ok(["detach", "--all"]);
}

/// Its kernel takes connections, and nobody answers.
#[test]
fn fuse_requests_fail_in_time_though_the_server_takes_them() {
    let name = "http_device::fuse_requests_fail_in_time_though_the_server_takes_them";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 16 << 20);
    let origin = Origin::start(bytes.clone());
    let disk = open(&attach(&place, &[&origin.url("/d.img"), "--origin-timeout", "4s"]));
    let ms = |ms| Some(Duration::from_millis(ms));
    // The last one sends its bytes just in time for each to count as an answer.
    for (late, drip, block) in [(None, ms(300), 2000), (ms(60_000), None, 3500), (None, ms(3900), 3000)] {
        origin.trick(move |_, reply| Reply { late, drip, ..reply });
        let began = Instant::now();
        assert_eq!(read(&disk, block).map(drop).unwrap_err().raw_os_error(), Some(5));
        let took = began.elapsed();
        assert!((Duration::from_millis(3500)..Duration::from_secs(7)).contains(&took), "{took:?}");
        origin.honest();
        let again = || read(&disk, block).is_ok_and(|found| found.0 == block_of(&bytes, block));
        assert!(wait_until(Duration::from_secs(20), again), "it is there again");
    }
    drop(disk);
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_an_object_that_was_replaced_is_never_mixed() {
    let name = "http_device::fuse_an_object_that_was_replaced_is_never_mixed";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 16 << 20);
    let origin = Origin::start(bytes.clone());
    let disk = open(&attach(&place, &[&origin.url("/d.img")]));
    for block in [0, 1000] {
        read(&disk, block).unwrap();
    }
    origin.replace(vec![9; 16 << 20], "\"two\"");
    assert_eq!(read(&disk, 3000).map(drop).unwrap_err().raw_os_error(), Some(5));
    assert_eq!(read(&disk, 3500).map(drop).unwrap_err().raw_os_error(), Some(5));
    for block in [0, 1000] {
        assert!(read(&disk, block).unwrap().0 == block_of(&bytes, block), "what is there stays");
    }
    let shown = || only(&place)["away"].as_str().is_some_and(|away| away.starts_with("source changed"));
    assert!(wait_until(Duration::from_secs(20), shown), "{:?}", only(&place));
    drop(disk);
    place.ok(["detach", "--all"]);
    // The new version is another object.
    let disk = open(&attach(&place, &[&origin.url("/d.img")]));
    assert!(read(&disk, 0).unwrap().0 == [9; BLOCK]);
    drop(disk);
    place.ok(["detach", "--all"]);
}

/// Reads some blocks far from each other, each behind the one before.
fn start(disk: &Path, bytes: &[u8], blocks: &[usize]) -> Duration {
    let (disk, began) = (open(disk), Instant::now());
    for block in blocks {
        assert!(read(&disk, *block).unwrap().0 == block_of(bytes, *block), "block {block}");
    }
    began.elapsed()
}

#[test]
fn fuse_a_start_that_was_recorded_is_fetched_in_its_order() {
    let name = "http_device::fuse_a_start_that_was_recorded_is_fetched_in_its_order";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 64 << 20);
    let origin = Origin::start(bytes.clone());
    let url = origin.url("/d.img");
    // A block of each of sixty chunks, in no order; then some neighbours, which a sequential reader would
    // have fetched ahead.
    let chunk = 16;
    let scattered = (0..60).map(|number| (number * 617 + 400) % 1000 * chunk + 3);
    let blocks: Vec<usize> = scattered.chain((0..6).map(|next| (1000 + next) * chunk)).collect();
    ok(&place, &["store", "list"]);
    assert_eq!(run(&place, &["store", "trace", &url]).code, 1, "nothing was recorded");

    let disk = attach(&place, &["--record", &url]);
    start(&disk, &bytes, &blocks);
    place.ok(["detach", disk.to_str().unwrap()]);
    let recorded = origin.sent();
    let trace = ok(&place, &["store", "trace", &url]);
    fs::write(place.path("start.trace"), &trace).unwrap();
    let needs = run(&place, &["--json", "store", "trace", &url]).json();
    let needs: Vec<(u64, u64, u64)> = needs["needs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|need| {
            let number = |key: &str| need[key].as_u64().unwrap();
            (number("at"), number("offset"), number("len"))
        })
        .collect();
    let noted: u64 = needs.iter().map(|(_, _, len)| len).sum();
    assert!(needs.is_sorted_by_key(|(at, ..)| *at), "{needs:?}");
    let has = |block: &usize| {
        let at = (block * BLOCK) as u64;
        needs.iter().any(|(_, offset, len)| (*offset..offset + len).contains(&at))
    };
    assert!(blocks.iter().all(has), "{needs:?}");
    // What the attach itself reads is needed, too: the beginning and the end.
    let needed = (blocks.len() as u64 + 8) * 65_536;
    assert!(
        noted <= needed && recorded <= needed + (64 << 10),
        "{noted} of {recorded} bytes, {needed} at most"
    );

    // With the trace, what comes next is there before it is asked for.
    let latency = Duration::from_millis(40);
    origin.latency(latency);
    let mut took = Vec::new();
    for words in [&["--prefetch", "start.trace"][..], &[]] {
        ok(&place, &["store", "drop", "--all"]);
        let before = origin.sent();
        let path = place.path("start.trace");
        let words: Vec<&str> = words
            .iter()
            .map(|word| if *word == "start.trace" { path.to_str().unwrap() } else { word })
            .collect();
        let disk = attach(&place, &[&words[..], &[url.as_str()]].concat());
        took.push(start(&disk, &bytes, &blocks));
        place.ok(["detach", disk.to_str().unwrap()]);
        let sent = origin.sent() - before;
        assert!(
            words.is_empty() || sent <= recorded + recorded / 20,
            "{sent} bytes, {recorded} when recorded"
        );
    }
    // Without it each block is waited for alone: sixty times the latency. With it eight are on their way at a
    // time.
    assert!(took[0] * 3 < took[1], "{took:?}");

    // Into the store, without a device; then nothing is fetched.
    ok(&place, &["store", "drop", "--all"]);
    let path = place.path("start.trace");
    let said = ok(&place, &["store", "prefetch", &url, "--trace", path.to_str().unwrap()]);
    assert!(said.contains("all that the trace names"), "{said}");
    let disk = attach(&place, &[&url]);
    let sent = origin.sent();
    start(&disk, &bytes, &blocks);
    assert!(origin.sent() == sent, "{} bytes", origin.sent() - sent);
    place.ok(["detach", disk.to_str().unwrap()]);

    // A trace of nonsense is refused before anything is attached.
    fs::write(&path, "0 1 2").unwrap();
    let refused = run(&place, &["attach", "--prefetch", path.to_str().unwrap(), &url]);
    assert!(refused.code == 1 && refused.err.contains("not a trace"), "{refused:?}");
}

#[test]
fn fuse_what_was_filled_needs_no_server() {
    let name = "http_device::fuse_what_was_filled_needs_no_server";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "qemu-img"]) {
        return;
    }
    let place = scratch();
    let bytes = fs::read(ext4(&place)).unwrap();
    let origin = Origin::start(bytes.clone());
    let url = origin.url("/d.img");
    let disk = attach(&place, &["--fill", &url]);
    let stored = || {
        let list = run(&place, &["--json", "store", "list"]).json();
        list["objects"][0]["stored"].as_u64() == Some(bytes.len() as u64)
    };
    assert!(wait_until(Duration::from_secs(30), stored), "{:?}", run(&place, &["store", "list"]));
    // An overlay over it, which reads the same store file.
    let over = attach(&place, &[&url, "--cow", place.path("o.qcow2").to_str().unwrap(), "--name", "over"]);
    drop(origin);
    assert!(fs::read(&disk).unwrap() == bytes);
    let point = place.dir("mnt");
    tool(Command::new("mount").args([&over, &point]));
    fs::write(point.join("new"), "written").unwrap();
    assert_eq!(fs::read_to_string(point.join("dir/file")).unwrap(), "from afar");
    becket_testkit::umount(&point);
    assert_eq!(run(&place, &["store", "drop", "--all"]).code, 1, "it is in use");
    place.ok(["detach", "--all"]);
    ok(&place, &["store", "verify", &url]);
}

#[test]
fn fuse_a_fetcher_that_died_has_a_successor_that_fetches() {
    let name = "http_device::fuse_a_fetcher_that_died_has_a_successor_that_fetches";
    if !require_fuse(name) || !require_tools(name, &["dd"]) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 16 << 20);
    let origin = Origin::start(bytes.clone());
    let disk = attach(&place, &[&origin.url("/d.img")]);
    for block in [1000, 2000, 3000] {
        let mut read = Command::new("timeout");
        read.args(["20", "dd", "bs=4096", "count=1", "iflag=direct", "status=none"]);
        read.arg(format!("if={}", disk.display())).arg(format!("skip={block}"));
        // Nothing else takes its place: the supervisor stays.
        let old = fetchers(&place);
        old.iter().copied().for_each(kill);
        let other = || fetchers(&place).first().is_some_and(|pid| !old.contains(pid));
        assert!(wait_until(Duration::from_secs(20), other));
        let found = read.output().unwrap();
        assert!(found.stdout == block_of(&bytes, block), "block {block}: {:?}", found.status);
    }
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_a_server_that_is_back_for_the_next_fetcher_is_not_waited_for_any_more() {
    let name = "http_device::fuse_a_server_that_is_back_for_the_next_fetcher_is_not_waited_for_any_more";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 16 << 20);
    let origin = Origin::start(bytes.clone());
    let disk = open(&attach(&place, &[&origin.url("/d.img")]));
    origin.trick(|_, _| Reply::status(503));
    let waits = thread::spawn({
        let disk = disk.try_clone().unwrap();
        move || read(&disk, 2000).map(|found| found.0)
    });
    let away = || only(&place)["away"].is_string();
    assert!(wait_until(Duration::from_secs(20), away), "{:?}", only(&place));
    let old = fetchers(&place);
    old.iter().copied().for_each(kill);
    origin.honest();
    assert!(waits.join().unwrap().unwrap() == block_of(&bytes, 2000));
    assert!(wait_until(Duration::from_secs(10), || !away()), "{:?}", only(&place));
    drop(disk);
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_without_a_store_a_device_lives_on_bounded_memory() {
    let name = "http_device::fuse_without_a_store_a_device_lives_on_bounded_memory";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    // More than the 256 MiB that are kept.
    let bytes = random(&place, 300 << 20);
    let origin = Origin::start(bytes.clone());
    let disk = attach(&place, &["--no-store", &origin.url("/d.img")]);
    let device = open(&disk);
    for block in (0..bytes.len() / BLOCK).step_by(7) {
        assert!(read(&device, block).unwrap().0 == block_of(&bytes, block), "block {block}");
    }
    let fetched = &place.json(["stat", disk.to_str().unwrap()])["devices"][0]["fetched"];
    let memory = fetched["memory"].as_u64().unwrap();
    assert!((100 << 20..=256 << 20).contains(&memory) && fetched["bytes"] == 0, "{fetched}");
    let done = read_and_kill(&place, &[&device; 3], &bytes, 6);
    assert!(done > 500, "only {done} reads");
    let fetched = &place.json(["stat", disk.to_str().unwrap()])["devices"][0]["fetched"];
    assert!(fetched["memory"].as_u64().unwrap() <= 256 << 20 && fetched["bytes"] == 0, "{fetched}");
    let said = place.ok(["stat", disk.to_str().unwrap()]);
    assert!(said.contains("fetched: 0 of 300M, and ") && said.contains(" in memory; waited "), "{said}");
    drop(device);
    place.ok(["detach", "--all"]);
    assert_eq!(run(&place, &["--json", "store", "list"]).json()["objects"].as_array().unwrap().len(), 0);
}

#[test]
fn fuse_a_full_store_is_no_reason_to_stop() {
    let name = "http_device::fuse_a_full_store_is_no_reason_to_stop";
    if !require_fuse(name) || !require_root(name) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 48 << 20);
    let origin = Origin::start(bytes.clone());
    let small = place.dir("small");
    tool(Command::new("mount").args(["-t", "tmpfs", "-o", "size=8m", "none"]).arg(&small));
    let store = small.join("store");
    let disk = attach(&place, &["--store", store.to_str().unwrap(), &origin.url("/d.img")]);
    let device = open(&disk);
    let half = bytes.len() / BLOCK / 2;
    for block in 0..half {
        assert!(read(&device, block).unwrap().0 == block_of(&bytes, block), "block {block}");
    }
    let fetched = || place.json(["stat", disk.to_str().unwrap()])["devices"][0]["fetched"].clone();
    let number = |value: &serde_json::Value, key: &str| value[key].as_u64().unwrap();
    let before = fetched();
    assert!((4 << 20..=8 << 20).contains(&number(&before, "bytes")), "{before}");
    assert!(number(&before, "memory") >= 16 << 20, "{before}");
    assert_eq!(only(&place)["state"], "live");
    let sent = origin.sent();
    read_and_kill(&place, &[&device; 3], &bytes[..half * BLOCK], 3);
    assert!(origin.sent() < sent + (2 << 20), "what is in memory outlives the processes");
    // There is room again.
    tool(Command::new("mount").args(["-o", "remount,size=64m"]).arg(&small));
    for block in half..2 * half {
        assert!(read(&device, block).unwrap().0 == block_of(&bytes, block), "block {block}");
    }
    let after = fetched();
    assert!(number(&after, "bytes") >= 20 << 20, "{after}");
    drop(device);
    place.ok(["detach", "--all"]);
    // Commands do the same, and say what to do where the store cannot even begin.
    let room = rustix::fs::statvfs(&small).unwrap();
    let used = (room.f_blocks - room.f_bfree) * room.f_frsize;
    tool(Command::new("mount").args(["-o", &format!("remount,size={}", used + (2 << 20))]).arg(&small));
    let other = Origin::start(bytes.clone());
    let cat = ["cat", "--store", store.to_str().unwrap(), &other.url("/other.img")];
    let got = command(&place, &cat).output().unwrap();
    assert!(got.status.success() && got.stdout == bytes, "{}", String::from_utf8_lossy(&got.stderr));
    assert!(other.sent() < 50 << 20, "{}", other.sent());
    let copy = ["copy", "--store", store.to_str().unwrap(), &other.url("/other.img")];
    let to = place.path("copy.img");
    let ran = run(&place, &[&copy[..], &[to.to_str().unwrap()]].concat());
    assert!(ran.code == 0 && fs::read(&to).unwrap() == bytes, "{ran:?}");
    becket_testkit::umount(&small);
}

#[test]
fn ublk_a_device_without_a_store_reads_memory_by_each_mode() {
    let name = "http_device::ublk_a_device_without_a_store_reads_memory_by_each_mode";
    if !require_ublk(name) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 4 << 20);
    let origin = Origin::start(bytes.clone());
    for mode in ["copy", "zero-copy"] {
        let attached =
            run(&place, &["attach", "--via", "ublk", "--mode", mode, "--no-store", &origin.url("/d.img")]);
        if attached.code != 0 && mode == "zero-copy" {
            // Not every kernel has it.
            assert!(attached.err.contains("zero"), "{attached:?}");
            continue;
        }
        assert_eq!(attached.code, 0, "{attached:?}");
        let disk = PathBuf::from(attached.out.trim());
        let device = open(&disk);
        for block in 0..bytes.len() / BLOCK {
            let found = read(&device, block * 37 % (bytes.len() / BLOCK)).unwrap();
            assert!(found.0 == block_of(&bytes, block * 37 % (bytes.len() / BLOCK)), "{mode}, block {block}");
        }
        drop(device);
        let mut all = vec![0; bytes.len()];
        fs::File::open(&disk).unwrap().read_exact_at(&mut all, 0).unwrap();
        assert!(all == bytes, "{mode}, in order");
        let fetched = place.json(["stat", attached.out.trim()])["devices"][0]["fetched"].clone();
        assert_eq!((&fetched["memory"], &fetched["bytes"]), (&(4 << 20).into(), &0.into()), "{mode}");
        place.ok(["detach", "--all"]);
    }
}

#[test]
fn fuse_a_device_goes_by_the_url_that_it_was_attached_by() {
    let name = "http_device::fuse_a_device_goes_by_the_url_that_it_was_attached_by";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    let mut bytes = vec![1; 1 << 20];
    // A partition table with one entry.
    bytes[446..512].fill(0);
    bytes[446 + 4] = 0x83;
    bytes[446 + 8] = 64;
    bytes[446 + 12] = 64;
    bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
    let origin = Origin::start(bytes);
    for place_of in ["/disk.img?x=1", "/disk.img?x=1#p1"] {
        let url = origin.url(place_of);
        attach(&place, &[&url]);
        for command in ["stat", "why", "refresh", "list", "detach"] {
            let ran = run(&place, &[command, &url]);
            assert_eq!(ran.code, 0, "{command} {url}: {ran:?}");
            assert!(!ran.out.contains("x=1"), "a query may be a signature: {ran:?}");
        }
    }
}
