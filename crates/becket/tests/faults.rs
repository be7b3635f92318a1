//! `--fault`: what a program above a device sees when the backing fails, and that no other program sees
//! anything.
//! Devices of becket's own service only: where the kernel moves the bytes no fault can be injected.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use becket_testkit::{Scratch, image, require_device, require_fuse, require_loop, skip, wait_until};
use common::net::{Net, Stopped};
use common::one::kill;
use common::page::{EIO, ENOSPC, PAGE, direct, read, sync, write};
use common::{Use, scratch};
use rustix::fs::{Mode, OFlags};

const SIZE: u64 = 8 << 20;
const MIB: u64 = 1 << 20;

/// A device under faults with what its image holds; `None` where no server moves the bytes.
fn attach(name: &str, place: &Scratch, faults: &str) -> Option<(PathBuf, Vec<u8>)> {
    if !require_device(name) {
        return None;
    }
    let content = image::random_bytes(SIZE as usize, 3);
    std::fs::write(place.path("image"), &content).unwrap();
    let mut command = place.becket();
    command.args(["attach", "--via", &becket_testkit::via(), "--fault", faults, "image"]);
    let ran = place.finish(&mut command);
    if ran.code != 0 && ran.err.contains("no operation can be spoiled") {
        skip(name, "this transport has no server");
        return None;
    }
    assert_eq!(ran.code, 0, "{ran:?}");
    Some((PathBuf::from(ran.out.trim_end()), content))
}

const ENODATA: i32 = 61;

#[test]
fn a_faulty_backing_gives_the_right_error_for_the_right_request() {
    let place = scratch();
    let faults = "error=all:EIO@1M+4K,error=read:ENODATA@3M+512,error=write:ENOSPC@5M+1M,short=0.5,seed=3";
    let name = "faults::a_faulty_backing_gives_the_right_error_for_the_right_request";
    let Some((device, content)) = attach(name, &place, faults) else { return };
    let file = direct(&device);
    for at in (0..SIZE).step_by(PAGE) {
        let wanted = match at {
            MIB => Err(EIO),
            at if at == 3 * MIB => Err(ENODATA),
            _ => Ok(&content[at as usize..][..PAGE]),
        };
        let got = read(&file, at);
        assert_eq!(got.as_ref().map(|page| &page.0[..]).map_err(|errno| *errno), wanted, "at {at}");
    }
    assert_eq!(write(&file, MIB, 1), Err(EIO));
    assert_eq!(write(&file, 5 * MIB, 1), Err(ENOSPC));
    assert_eq!(write(&file, 3 * MIB, 1), Ok(()));
    assert_eq!(write(&file, 6 * MIB, 1), Ok(()));
    file.sync_all().expect("no sync is struck");
    let reported = &place.devices()[0]["faults"];
    assert_eq!(
        (&reported["rules"][0]["range"], &reported["short"]),
        (&serde_json::json!([MIB, PAGE]), &500_000.into())
    );
    let listed = place.run(["-v", "list"]);
    assert!(listed.out.contains("under faults"), "{listed:?}");
    drop(file);
    place.ok(["detach", device.to_str().unwrap()]);
    let left = std::fs::read(place.path("image")).unwrap();
    for page in (0..SIZE as usize).step_by(PAGE) {
        let written = [3 * MIB as usize, 6 * MIB as usize].contains(&page);
        let wanted = if written { &[1; PAGE][..] } else { &content[page..][..PAGE] };
        assert!(left[page..][..PAGE] == *wanted, "the image at {page}");
    }
}

#[test]
fn a_faulty_backing_that_is_late_keeps_nobody_else() {
    let place = scratch();
    let name = "faults::a_faulty_backing_that_is_late_keeps_nobody_else";
    let late = Duration::from_secs(4);
    let Some((device, content)) = attach(name, &place, "delay=read:4s@1M+4K,seed=1") else { return };
    let begun = Instant::now();
    let waiting = thread::spawn({
        let file = direct(&device);
        move || read(&file, MIB).map(|page| page.0.to_vec())
    });
    // As long as the late one is late, others are served: at least a few hundred of them.
    let file = direct(&device);
    let mut served = 0;
    while begun.elapsed() < late && !waiting.is_finished() {
        let at = (served * 13 % 64 + 512) * PAGE as u64;
        assert_eq!(read(&file, at).unwrap().0, content[at as usize..][..PAGE]);
        served += 1;
    }
    assert!(served > 100, "only {served} reads while one was late");
    assert_eq!(waiting.join().unwrap().unwrap(), content[MIB as usize..][..PAGE]);
    assert!(begun.elapsed() >= late);
    drop(file);
    place.ok(["detach", device.to_str().unwrap()]);
}

/// A file system on it goes read-only or gives errors; it comes back whole once the faults are gone.
#[test]
fn a_faulty_backing_without_room_fails_writes_and_keeps_what_it_took() {
    let place = scratch();
    let name = "faults::a_faulty_backing_without_room_fails_writes_and_keeps_what_it_took";
    let Some((device, content)) = attach(name, &place, "enospc-after=1M,seed=2") else { return };
    let file = direct(&device);
    let outcomes: Vec<_> = (0..512).map(|page| write(&file, page * PAGE as u64, 7)).collect();
    let taken = outcomes.iter().take_while(|outcome| outcome.is_ok()).count();
    assert_eq!(taken, (MIB as usize) / PAGE);
    assert!(
        outcomes[taken..].iter().all(|outcome| *outcome == Err(ENOSPC)),
        "{:?}",
        &outcomes[taken..taken + 4]
    );
    file.sync_all().expect("what was taken is synced");
    drop(file);
    place.ok(["detach", device.to_str().unwrap()]);
    let left = std::fs::read(place.path("image")).unwrap();
    assert!(left[..MIB as usize].iter().all(|byte| *byte == 7));
    assert!(left[MIB as usize..] == content[MIB as usize..]);
}

/// A network file system that hangs: here the server of the file system below is stopped, and goes on later.
#[test]
fn a_backing_that_hangs_holds_up_its_own_device_alone() {
    if !require_fuse("faults::a_backing_that_hangs_holds_up_its_own_device_alone") {
        return;
    }
    let place = scratch();
    let content = image::random_bytes(SIZE as usize, 5);
    std::fs::write(place.path("bottom"), &content).unwrap();
    std::fs::write(place.path("other"), &content).unwrap();
    let attach = |name: &str, image: &Path, more: &[&str]| {
        let words = ["attach", "--via", "fuse", "--name", name];
        let ran = place.finish(place.becket().args(words).args(more).arg(image));
        assert_eq!(ran.code, 0, "{ran:?}");
        PathBuf::from(ran.out.trim_end())
    };
    let bottom = attach("bottom", &place.path("bottom"), &["--isolate"]);
    let below = place.devices()[0]["worker_pid"].to_string();
    let top = direct(&attach("top", &bottom, &[]));
    let other = direct(&attach("other", &place.path("other"), &[]));
    let mut stopped = Stopped::new(&below);
    let hanging = thread::spawn(move || read(&top, MIB).map(|page| page.0.to_vec()));
    for round in 0..60u64 {
        let at = round * 37 % 2000 * PAGE as u64;
        assert_eq!(read(&other, at).unwrap().0, content[at as usize..][..PAGE]);
    }
    assert!(!hanging.is_finished(), "nobody could have answered");
    assert_eq!(place.devices().len(), 3, "list does not hang either");
    let ran = place.run(["detach", "top"]);
    assert!(stopped.lasts(), "detach has waited for the backing: {ran:?}");
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("in use"), "{ran:?}");
    drop(stopped);
    assert_eq!(hanging.join().unwrap().unwrap(), content[MIB as usize..][..PAGE]);
    let mut stopped = Stopped::new(&below);
    place.ok(["detach", "top"]);
    assert!(stopped.lasts(), "nobody uses it: what it lies on need not be asked");
    drop((stopped, other));
    for name in ["other", "bottom"] {
        place.ok(["detach", name]);
    }
}

/// A network file system that hangs: closing a file of it waits for its server, as does looking at one.
#[test]
fn fuse_a_file_system_that_hangs_holds_up_its_own_device_alone() {
    let name = "faults::fuse_a_file_system_that_hangs_holds_up_its_own_device_alone";
    let Some((net, place, content)) = Net::mount(name) else { return };
    for image in ["one", "two"] {
        std::fs::write(place.path(image), &content).unwrap();
    }
    // One queue each, so that one of the others shares its thread.
    let attach = |name: &str, image: &Path| {
        direct(&place.attach(image, &["--via", "fuse", "--queues", "1", "--name", name]))
    };
    drop(attach("net", &net.file));
    let others = ["one", "two"].map(|name| attach(name, &place.path(name)));

    let mut stopped = net.stop();
    let ran = place.run(["detach", "net"]);
    assert!(stopped.lasts(), "the server went on too early for this: {ran:?}");
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("the file system of its image may not answer"), "{ran:?}");
    for other in &others {
        assert_eq!(read(other, MIB).unwrap().0, content[MIB as usize..][..PAGE]);
    }
    let ran = place.run(["detach", "one"]);
    assert!(ran.code == 1 && ran.err.contains("in use: open by"), "{ran:?}");
    assert!(stopped.lasts(), "a process has waited for the server");
    drop((stopped, others));
    for name in ["one", "two"] {
        place.ok(["detach", name]);
    }
    // It may have gone by itself when its server went on.
    let _ = place.run(["detach", "net"]);
    assert!(wait_until(Duration::from_secs(30), || place.devices().is_empty()));
}

/// The kernel says once that it could not write pages back. The worker that hears it may be killed before
/// anybody else does, or after: until the device is attached anew every flush fails.
#[test]
fn fuse_a_failed_sync_outlives_the_worker_that_heard_it() {
    let name = "faults::fuse_a_failed_sync_outlives_the_worker_that_heard_it";
    if !require_fuse(name) {
        return;
    }
    let late = "delay=write:2s:1@1M+4K";
    let fails = "error=write:EIO:1@1M+4K";
    for (faults, heard, wanted) in [
        (format!("{late},{fails}"), false, Err(EIO)),
        (fails.to_owned(), true, Err(EIO)),
        (late.to_owned(), false, Ok(())),
        (String::from("seed=1"), true, Ok(())),
    ] {
        let place = scratch();
        image::random(&place.path("image"), SIZE, 3);
        let below = place.attach(
            &place.path("image"),
            &["--via", "fuse", "--isolate", "--name", "below", "--fault", &faults],
        );
        let how = ["--via", "fuse", "--isolate", "--direct-io", "off", "--name", "top"];
        let file = direct(&place.attach(&below, &how));
        let worker = || {
            let all = place.devices();
            let top = all.iter().find(|device| device["name"] == "top").unwrap();
            top["worker_pid"].as_u64().unwrap()
        };
        assert_eq!(write(&file, MIB, 7), Ok(()), "{faults}");
        let syncing = thread::spawn(move || (sync(&file), file));
        if heard {
            assert!(wait_until(Duration::from_secs(20), || syncing.is_finished()), "{faults}");
        } else {
            thread::sleep(Duration::from_millis(700));
            assert!(!syncing.is_finished(), "{faults}: the sync was to take longer");
        }
        kill(worker());
        let (synced, file) = syncing.join().unwrap();
        assert_eq!(synced, wanted, "{faults}");
        assert_eq!(sync(&file), wanted, "{faults}: once more");
        let before = worker();
        let mut serve = place.becket();
        let mut serve = serve.args(["serve", "--takeover", "--until-idle"]).spawn().unwrap();
        assert!(wait_until(Duration::from_secs(30), || worker() != before), "{faults}: it is not upgraded");
        assert_eq!(sync(&file), wanted, "{faults}: after an upgrade");
        drop(file);
        for name in ["top", "below"] {
            place.ok(["detach", name]);
        }
        assert!(serve.wait().unwrap().success());
    }
}

/// The kernel's own loop driver over such a file: nothing is begun that would wait for it with the device
/// locked, and a command that only removes the device asks no file system.
#[test]
fn fuse_a_loop_device_over_a_file_system_that_hangs_can_go() {
    let name = "faults::fuse_a_loop_device_over_a_file_system_that_hangs_can_go";
    let Some((net, place, content)) = Net::mount(name) else { return };
    std::fs::write(place.path("other"), &content).unwrap();
    let device = place.attach(&net.file, &["--via", "loop", "--read-only", "--name", "net"]);
    let mut stopped = net.stop();
    // Each of them would keep the next program from opening the device.
    let changes: [&[&str]; 4] = [
        &["set", "net", "--image", "other"],
        &["set", "net", "--size-limit", "4M"],
        &["set", "net", "--direct-io", "off"],
        &["refresh", "net"],
    ];
    thread::scope(|scope| {
        let place = &place;
        let ran: Vec<_> = changes.map(|words| scope.spawn(move || place.run(words))).into_iter().collect();
        assert_eq!(place.devices().len(), 1, "list asks nobody");
        place.ok(["doctor"]);
        for (ran, words) in ran.into_iter().zip(changes) {
            let ran = ran.join().unwrap();
            assert_eq!(ran.code, 1, "{words:?}: {ran:?}");
            let reported = format!("the file system below {} does not answer", device.display());
            assert!(ran.err.contains(&reported) && ran.err.contains("becket detach"), "{words:?}: {ran:?}");
        }
    });
    assert!(stopped.lasts(), "a process has waited for the server");
    // In use it stays, by a file that has no request under way either.
    let user = std::fs::File::open(&device).unwrap();
    let ran = place.run(["detach", "net"]);
    assert!(ran.code == 1 && ran.err.contains("in use: open by"), "{ran:?}");
    drop(user);
    let used = Use::of(&device);
    place.ok(["detach", "net"]);
    assert!(!used.lasts() && place.devices().is_empty());
    assert!(stopped.lasts(), "a process has waited for the server");
}

/// A device whose image no longer answers can be given another, unless that would have to be compared with
/// the old one.
#[test]
fn fuse_an_image_that_hangs_is_replaced_or_it_is_said_why_not() {
    let name = "faults::fuse_an_image_that_hangs_is_replaced_or_it_is_said_why_not";
    let Some((net, place, content)) = Net::mount(name) else { return };
    std::fs::write(place.path("other"), &content).unwrap();
    let device = place.attach(&net.file, &["--via", "fuse", "--read-only", "--name", "net"]);
    let mut stopped = net.stop();
    // Claimed, so that what it shows may not change.
    // Not for the commands of tests beside this one: whose copy is closed last waits.
    let claim = OFlags::EXCL | OFlags::RDONLY | OFlags::CLOEXEC;
    let claim = rustix::fs::open(&device, claim, Mode::empty()).unwrap();
    let ran = place.run(["set", "net", "--image", "other"]);
    assert!(ran.code == 1 && ran.err.contains("gave no byte for"), "{ran:?}");
    assert!(stopped.lasts(), "a process has waited for the server");
    // The device's last close waits for what is under way.
    drop(stopped);
    drop(claim);

    let mut stopped = net.stop();
    let ran = place.run(["set", "net", "--image", "other"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(read(&direct(&device), MIB).unwrap().0, content[MIB as usize..][..PAGE]);
    assert!(stopped.lasts(), "a process has waited for the server");
    drop(stopped);
    place.ok(["detach", "net"]);
}

#[test]
fn a_backing_that_is_removed_and_replaced_goes_on_as_it_was() {
    if !require_device("faults::a_backing_that_is_removed_and_replaced_goes_on_as_it_was") {
        return;
    }
    let place = scratch();
    let content = image::random_bytes(SIZE as usize, 7);
    std::fs::write(place.path("image"), &content).unwrap();
    let device = place.attach(&place.path("image"), &["--name", "one"]);
    std::fs::remove_file(place.path("image")).unwrap();
    std::fs::write(place.path("image"), vec![9; SIZE as usize]).unwrap();
    let file = direct(&device);
    assert_eq!(read(&file, MIB).unwrap().0, content[MIB as usize..][..PAGE]);
    write(&file, MIB, 1).unwrap();
    assert_eq!(read(&file, MIB).unwrap().0, [1; PAGE]);
    file.sync_all().unwrap();
    drop(file);
    place.ok(["detach", "one"]);
    let replaced = std::fs::read(place.path("image")).unwrap();
    assert!(replaced.iter().all(|byte| *byte == 9), "what came in its place is nobody's backing");
}

#[test]
fn faults_are_refused_where_the_kernel_moves_the_bytes() {
    if !require_loop("faults::faults_are_refused_where_the_kernel_moves_the_bytes") {
        return;
    }
    let place = scratch();
    image::sparse(&place.path("image"), SIZE);
    let ran = place.run(["attach", "--via", "loop", "--fault", "error=read:EIO", "image"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("the kernel's loop driver moves the bytes itself"), "{ran:?}");
    assert!(place.devices().is_empty());
}

#[test]
fn faults_that_make_no_sense_are_wrong_usage() {
    let place = scratch();
    image::sparse(&place.path("image"), SIZE);
    for faults in ["error=read", "torn=2", "eror=read:EIO"] {
        let ran = place.run(["attach", "--fault", faults, "image"]);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains("error=write:EIO:0.01") || ran.err.contains("is not a chance"), "{ran:?}");
    }
}
