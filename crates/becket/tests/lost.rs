//! Supervisor, guard and worker of a device die at the same instant: no copy of its image's
//! descriptors is left. Its users get errors and do not wait, becket says what happened and what to do, and
//! nothing of it is left afterwards.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs,
    io::ErrorKind,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use becket_testkit::{
    image, require_device, require_fuse, require_loop, require_tools, skip, tool, via, wait_until,
};
use common::disturb::{PATIENCE, SUPERVISOR, WORKER, await_device};
use common::load::{Aligned, BLOCK};
use common::page::direct;
use common::{Use, alive, scratch};
use serde_json::Value;

const SIZE: u64 = 4 << 20;

#[test]
fn a_lost_device_gives_errors_and_says_what_to_do() {
    let name = "lost::a_lost_device_gives_errors_and_says_what_to_do";
    if require_device(name) {
        lose(name, &via());
    }
}

#[test]
fn fuse_device_that_is_lost_gives_errors_and_says_what_to_do() {
    let name = "lost::fuse_device_that_is_lost_gives_errors_and_says_what_to_do";
    if require_fuse(name) {
        lose(name, "fuse");
    }
}

fn lose(name: &str, via: &str) {
    let place = scratch();
    let path = place.path("image");
    image::random(&path, SIZE, 1);
    let attach = || place.attach(&path, &["--via", via, "--name", "one"]);
    let device = attach();
    let info = await_device(&place, "one", |_| true);
    if info[WORKER].is_null() {
        return skip(name, "this transport has no server");
    }
    let doctor = place.run(["doctor"]);
    let server = place.json(["doctor"])["server"].clone();
    assert_eq!(server["worker_pid"], info[WORKER]);
    let notes = server["notes"].as_array().unwrap();
    let confined = doctor.out.contains("confined: no capability");
    let all_named = notes.iter().all(|note| doctor.out.contains(note.as_str().unwrap()));
    assert!(if notes.is_empty() { confined } else { !confined && all_named }, "{doctor:?}");
    let used = Use::of(&device);
    let user = thread::spawn(move || {
        let file = direct(&device);
        let mut buffer = Aligned::new(BLOCK);
        (0u64..).find_map(|n| file.read_exact_at(buffer.slice(BLOCK), n * 4096 % SIZE).err())
    });
    thread::sleep(Duration::from_millis(300));
    assert!(!user.is_finished(), "it reads until a process dies");
    // No process may be left to see the other's death: a worker that lives a moment longer would give all to
    // a successor, and a supervisor would start another worker.
    let [supervisor, worker] = [SUPERVISOR, WORKER].map(|whom| info[whom].to_string());
    tool(Command::new("kill").args(["-STOP", &supervisor]));
    let stopped = || {
        let tasks = fs::read_dir(format!("/proc/{supervisor}/task")).unwrap();
        let state = |task: fs::DirEntry| fs::read_to_string(task.path().join("status")).unwrap_or_default();
        tasks.flatten().all(|task| state(task).contains("State:\tT"))
    };
    assert!(wait_until(PATIENCE, stopped), "the supervisor goes on");
    // All its children: its worker, and the guard, which would be its successor.
    let tasks = fs::read_dir(format!("/proc/{supervisor}/task")).unwrap().flatten();
    let children = tasks.map(|task| fs::read_to_string(task.path().join("children")).unwrap_or_default());
    let children: String = children.collect();
    assert!(children.split_whitespace().count() > 1, "{children}");
    tool(Command::new("kill").arg("-KILL").args(children.split_whitespace()));
    let number = worker.parse().unwrap();
    assert!(wait_until(PATIENCE, || !alive(number)), "the worker goes on");
    tool(Command::new("kill").args(["-KILL", &supervisor]));
    // The kernel keeps requests of ublk for the next server: they end when the device is detached.
    assert!(via == "ublk" || wait_until(PATIENCE, || user.is_finished()), "its user waits for ever");

    let reported =
        |state: &str| place.devices().iter().any(|info| info["name"] == "one" && info["state"] == state);
    assert!(wait_until(PATIENCE, || reported("lost")), "{:#?}", place.devices());
    for words in [&["stat", "one"][..], &["set", "--read-only", "on", "one"], &["refresh", "one"]] {
        let ran = place.run(words);
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(ran.err.contains("lost") && ran.err.contains("becket detach one"), "{ran:?}");
    }
    assert!(reported("lost"), "asking changes nothing");
    let listed = place.run(["list"]);
    assert!(listed.out.contains("lost"), "{listed:?}");
    place.ok(["detach", "one"]);
    assert!(wait_until(PATIENCE, || user.is_finished()), "its user waits for ever");
    let error = user.join().unwrap().unwrap();
    let refused = [ErrorKind::Other, ErrorKind::NotFound].contains(&error.kind());
    assert!(error.raw_os_error() == Some(5) || refused, "{error:?}");
    assert!(!used.lasts());
    assert!(place.devices().is_empty());
    // Its image's locks are free.
    let again = attach();
    assert!(fs::read(again).unwrap() == fs::read(Path::new(&path)).unwrap());
    place.ok(["detach", "one"]);
}

/// The supervisor dies when the device has its disk, and before that could be recorded. That moment is too
/// short to hit, so the test makes the record that would be left.
#[test]
fn fuse_device_whose_maker_dies_is_taken_away() {
    if !require_fuse("lost::fuse_device_whose_maker_dies_is_taken_away") {
        return;
    }
    let place = scratch();
    let attach = |name: &str| {
        image::sparse(&place.path(name), SIZE);
        PathBuf::from(place.ok(["attach", "--via", "fuse", "--name", name, name]).trim_end())
    };
    attach("one");
    let used = Use::of(&attach("half"));
    let info = await_device(&place, "one", |_| true);
    // Its guard would be its successor at once.
    let supervisor = info[SUPERVISOR].to_string();
    let tasks = fs::read_dir(format!("/proc/{supervisor}/task")).unwrap().flatten();
    let children = tasks.map(|task| fs::read_to_string(task.path().join("children")).unwrap_or_default());
    let children: String = children.collect();
    let worker = info[WORKER].to_string();
    let others = children.split_whitespace().filter(|child| **child != worker);
    // While it is stopped it starts no other guard.
    tool(Command::new("kill").args(["-STOP", &supervisor]));
    tool(Command::new("kill").arg("-KILL").args(others).arg(&supervisor));
    let records = place.runtime().join("devices");
    // The last one counts: the first is of before it had a disk.
    let text = fs::read_to_string(records.join("half.json")).unwrap();
    let mut record: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let device = &mut record["entry"];
    assert_eq!(device["starting"], false);
    device["starting"] = true.into();
    device["info"]["device"] = "".into();
    device["info"]["diskseq"] = Value::Null;
    fs::write(records.join("half.json"), record.to_string()).unwrap();
    // And one that no worker was given yet.
    record["name"] = "begun".into();
    record["entry"]["info"]["name"] = "begun".into();
    record["entry"]["info"]["number"] = 77.into();
    record["entry"]["mark"] = 77.into();
    fs::write(records.join("begun.json"), record.to_string()).unwrap();
    // A command that looks before there is a successor leaves it what it needs.
    // The killed ones may take a moment to die.
    assert!(wait_until(PATIENCE, || place.devices().len() == 3), "{:#?}", place.devices());
    attach("two");
    await_device(&place, "one", |now| now[SUPERVISOR] != info[SUPERVISOR]);
    assert!(wait_until(PATIENCE, || !used.lasts()), "{used:?} is left");
    // Its record goes after it, and that of the other one.
    let names = || place.devices().iter().map(|info| info["name"].clone()).collect::<Vec<_>>();
    assert!(wait_until(PATIENCE, || names() == ["one", "two"]), "{:?}", names());
    place.ok(["detach", "--all"]);
    let worker = worker.parse().unwrap();
    assert!(wait_until(PATIENCE, || !alive(worker)), "it still serves something");
}

/// A device that was made read-only while it lived is not taken for one that was made for reading only.
#[test]
fn fuse_device_thaws_under_the_next_supervisor() {
    if !require_fuse("lost::fuse_device_thaws_under_the_next_supervisor") {
        return;
    }
    let place = scratch();
    image::sparse(&place.path("image"), SIZE);
    for (name, more) in [("one", &["--shared"][..]), ("reading", &["--shared", "--read-only"])] {
        place.ok(["attach", "--via", "fuse", "--name", name].iter().chain(more).chain(&["image"]));
    }
    let info = await_device(&place, "one", |_| true);
    place.ok(["set", "--read-only", "on", "one"]);
    tool(Command::new("kill").args(["-KILL", &info[SUPERVISOR].to_string()]));
    await_device(&place, "one", |now| now[SUPERVISOR] != info[SUPERVISOR]);
    place.ok(["set", "--read-only", "off", "one"]);
    let device = place.links().join("one");
    fs::OpenOptions::new().write(true).open(device).unwrap().write_all_at(&[1; BLOCK], 0).unwrap();
    let ran = place.run(["set", "--read-only", "off", "reading"]);
    assert!(ran.code == 1 && ran.err.contains("read"), "{ran:?}");
    place.ok(["detach", "--all"]);
}

/// All loop devices of a file.
fn loops_of(image: &Path) -> Vec<PathBuf> {
    let disks = fs::read_dir("/sys/block").unwrap().map(|disk| disk.unwrap().path());
    let of_image = |disk: &PathBuf| {
        fs::read_to_string(disk.join("loop/backing_file"))
            .is_ok_and(|path| Path::new(path.trim_end()) == image)
    };
    disks.filter(of_image).map(|disk| Path::new("/dev").join(disk.file_name().unwrap())).collect()
}

/// The first thing that an attach does with a device's record is to reserve its room: the loop device is
/// there then, and in no record.
#[test]
fn an_attach_that_is_ended_leaves_no_device_without_a_record() {
    let name = "lost::an_attach_that_is_ended_leaves_no_device_without_a_record";
    if !require_loop(name) || !require_tools(name, &["strace"]) {
        return;
    }
    let place = scratch();
    let image = place.path("x.img");
    image::sparse(&image, 1 << 20);
    let becket = env!("CARGO_BIN_EXE_becket");
    let ended_by = |signal: &str| {
        // A shell has its background jobs ignore SIGINT, and so all that they start.
        let mut strace = Command::new("env");
        place.prepare(strace.args(["--default-signal=HUP,INT,TERM", "strace"]));
        let inject = format!("inject=fallocate:signal={signal}:when=1");
        strace.args(["-qq", "-o", "/dev/null", "-e", "trace=fallocate", "-e", &inject, becket]);
        let ran = place.finish(strace.args(["attach", "--via", "loop", "x.img"]));
        assert!(ran.code != 0, "{signal}: {ran:?}");
    };
    let left = || {
        let files =
            fs::read_dir(place.runtime().join("devices")).unwrap().map(|file| file.unwrap().file_name());
        files.filter(|file| file.to_string_lossy().ends_with(".new")).count()
    };
    for signal in ["TERM", "INT", "HUP"] {
        ended_by(signal);
        let device = loops_of(&image).pop().expect("it was on its way, and is in a record");
        assert_eq!((place.devices().len(), left()), (1, 0), "{signal}");
        place.ok(["detach", device.to_str().unwrap()]);
    }
    // A limit on the size of files, before and after the device is made.
    for limit in ["0", "1"] {
        let mut limited = Command::new("sh");
        place.prepare(&mut limited);
        let line = format!("ulimit -f {limit}; exec {becket} attach --via loop x.img");
        let ran = place.finish(limited.args(["-c", &line]));
        assert!(ran.code != 0, "{ran:?}");
        assert_eq!((loops_of(&image), left()), (Vec::new(), 0), "{limit}: {ran:?}");
    }
    // Nothing delays this one.
    for next in ["list", "attach", "detach"] {
        ended_by("KILL");
        let device = loops_of(&image).pop().expect("it was killed after that").display().to_string();
        let ran = match next {
            "list" => place.run(["list"]),
            "attach" => place.run(["attach", "--via", "loop", "x.img"]),
            _ => place.run(["detach", &device]),
        };
        assert!(ran.err.contains(&device) && ran.err.contains("was killed"), "{next}: {ran:?}");
        assert_eq!(ran.code, i32::from(next == "detach"), "{ran:?}");
        if next == "attach" {
            place.ok(["detach", "x.img"]);
        }
        assert_eq!((loops_of(&image), left()), (Vec::new(), 0), "{next}");
    }
}
