//! The end of devices and exports whose images are on NBD servers: what was written and not flushed.
//! Every server listens at a unix socket in the test's own directory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use becket_testkit::{Scratch, require_fuse, require_plain_machine, require_tools, wait_until};
use common::nbd_server::{Server, attach, ext4};
use common::one::{Block, kill, only};
use common::page::direct as open;
use common::{nbd, scratch};
use serde_json::Value;

/// What a server of [`Server::nbdkit_with_log`] was asked, in its order.
fn asked(log: &Path) -> Vec<&'static str> {
    let of = |line: &str| match line {
        _ if line.contains(" Write ") && !line.contains("...Write") => Some("write"),
        _ if line.contains(" Flush ") && !line.contains("...Flush") => Some("flush"),
        _ => None,
    };
    fs::read_to_string(log).unwrap().lines().filter_map(of).collect()
}

fn write(disk: &Path, byte: u8, at: u64) {
    open(disk).write_all_at(&Block::of(byte.into()).0, at).unwrap();
}

/// A server of 1 MiB, which takes one connection at a time, writes down each flush in `flushed`, and fails
/// it while there is `fails`.
fn scripted(place: &Scratch) -> (Server, PathBuf, PathBuf) {
    let [bytes, flushed, fails] = ["bytes", "flushed", "fails"].map(|name| place.path(name));
    fs::File::create(&bytes).unwrap().set_len(1 << 20).unwrap();
    fs::write(&flushed, "").unwrap();
    let socket = place.path("scripted");
    let mut command = Command::new("nbdkit");
    let (file, log, bad) = (bytes.display(), flushed.display(), fails.display());
    command.args(["-f", "-U"]).arg(&socket).args(["eval", "get_size=echo 1048576", "can_write=exit 0"]);
    command.args(["can_flush=exit 0".to_owned()]);
    command.arg(format!("pread=dd if={file} iflag=skip_bytes,count_bytes skip=$4 count=$3 status=none"));
    command.arg(format!("pwrite=dd of={file} oflag=seek_bytes conv=notrunc seek=$4 status=none"));
    command.arg(format!("flush=echo flush >> {log}; [ ! -e {bad} ] || {{ echo EIO no >&2; exit 1; }}"));
    (Server::start(command, socket), flushed, fails)
}

#[test]
fn fuse_a_server_flushes_what_was_written_last_before_its_device_is_gone() {
    let name = "nbd_detach::fuse_a_server_flushes_what_was_written_last_before_its_device_is_gone";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let log = place.path("log");
    let server = Server::nbdkit_with_log(&ext4(&place), &log);
    for words in [&["detach", "--all"][..], &["detach", "--all", "--json"]] {
        let disk = attach(&place, &[&server.uri("")]);
        write(&disk, 7, 1 << 20);
        assert_eq!(asked(&log).last(), Some(&"write"), "no flush has covered it");
        let ran = place.run(words);
        assert!(ran.code == 0 && !ran.err.contains("may be lost"), "{ran:?}");
        assert_eq!(asked(&log).last(), Some(&"flush"), "{}", fs::read_to_string(&log).unwrap());
        let before = asked(&log).len();
        // Nothing is flushed without need.
        attach(&place, &[&server.uri("")]);
        place.ok(["detach", "--all"]);
        assert_eq!(asked(&log).len(), before, "{}", fs::read_to_string(&log).unwrap());
    }
    // What a dead worker has written, too, of a device that was refused to go.
    let disk = attach(&place, &[&server.uri("")]);
    let user = open(&disk);
    user.write_all_at(&Block::of(8).0, 1 << 20).unwrap();
    let before = asked(&log).len();
    let ran = place.run(["detach", disk.to_str().unwrap()]);
    assert!(ran.code == 1 && ran.err.contains("in use") && asked(&log).len() == before, "{ran:?}");
    drop(user);
    let worker = only(&place)["worker_pid"].clone();
    kill(worker.as_u64().unwrap() as u32);
    assert!(wait_until(Duration::from_secs(20), || {
        let now = only(&place);
        now["state"] == "live" && now["worker_pid"] != worker
    }));
    place.ok(["detach", "--all"]);
    assert_eq!(asked(&log).last(), Some(&"flush"), "{}", fs::read_to_string(&log).unwrap());
    // A device that goes with its last user.
    let disk = attach(&place, &[&server.uri("")]);
    let user = open(&disk);
    assert_eq!(place.run(["detach", disk.to_str().unwrap()]).code, 1, "it is in use");
    place.ok(["detach", "--lazy", disk.to_str().unwrap()]);
    user.write_all_at(&Block::of(9).0, 1 << 20).unwrap();
    drop(user);
    assert!(wait_until(Duration::from_secs(20), || place.devices().is_empty()));
    assert_eq!(asked(&log).last(), Some(&"flush"), "{}", fs::read_to_string(&log).unwrap());
    // And what a command leaves behind.
    let script = "dd if=/dev/zero of={} bs=4k count=1 seek=99 oflag=direct conv=notrunc status=none";
    place.ok(["run", "--via", "fuse", &server.uri(""), "--", "sh", "-c", script]);
    assert_eq!(asked(&log).last(), Some(&"flush"), "{}", fs::read_to_string(&log).unwrap());
}

#[test]
fn fuse_detach_says_what_its_server_failed_to_flush() {
    let name = "nbd_detach::fuse_detach_says_what_its_server_failed_to_flush";
    if !require_fuse(name) || !require_tools(name, &["nbdkit", "dd"]) {
        return;
    }
    let place = scratch();
    let (server, flushed, fails) = scripted(&place);
    let flushes = || fs::read_to_string(&flushed).unwrap().lines().count();
    let disk = attach(&place, &[&server.uri("")]);
    write(&disk, 1, 4096);
    let before = flushes();
    place.ok(["detach", "--all"]);
    assert_eq!(flushes(), before + 1);

    let disk = attach(&place, &[&server.uri("")]);
    write(&disk, 2, 4096);
    fs::write(&fails, "").unwrap();
    let ran = place.run(["detach", disk.to_str().unwrap()]);
    assert_eq!(ran.code, 1, "{ran:?}");
    for says in ["warning: ", &server.uri(""), "may be lost", "failed to flush", "write again"] {
        assert!(ran.err.contains(says), "{says}: {ran:?}");
    }
    assert_eq!(place.ok(["list", "--json"]).matches("\"device\"").count(), 0, "it is gone all the same");

    fs::remove_file(&fails).unwrap();
    let disk = attach(&place, &[&server.uri("")]);
    write(&disk, 3, 4096);
    fs::write(&fails, "").unwrap();
    let ran = place.run(["detach", "--json", disk.to_str().unwrap()]);
    let said: Value = serde_json::from_str(&ran.out).unwrap();
    let gone = &said["devices"][0];
    assert!(ran.code == 1 && said["errors"].as_array().unwrap().is_empty(), "{said}");
    assert!(gone["unsaved"].as_str().unwrap().contains("failed to flush"), "{said}");
    assert!(gone["warnings"].to_string().contains("may be lost"), "{said}");
    // The journal of events has it, too.
    let events = place.ok(["events", "--recent", "--no-follow"]);
    assert!(events.contains("unsaved"), "{events}");
}

#[test]
fn fuse_a_server_that_is_away_keeps_nobody_from_detaching_and_what_it_may_lose_is_said() {
    let name =
        "nbd_detach::fuse_a_server_that_is_away_keeps_nobody_from_detaching_and_what_it_may_lose_is_said";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let mut server = Server::nbdkit(&ext4(&place), &[]);
    let ends = |most: u64, lost: bool| {
        let began = Instant::now();
        let ran = place.run(["detach", "--all"]);
        assert_eq!((ran.code == 1, ran.err.contains("may be lost")), (lost, lost), "{ran:?}");
        assert!(began.elapsed() < Duration::from_secs(most), "{:?}", began.elapsed());
        assert_eq!(place.ok(["list", "--json"]).matches("\"device\"").count(), 0);
    };
    let disk = attach(&place, &[&server.uri("")]);
    write(&disk, 7, 1 << 20);
    server.die();
    ends(5, true);
    // Of one that was only read nothing is lost.
    server.again();
    let disk = attach(&place, &[&server.uri("")]);
    open(&disk).read_exact_at(&mut Block::of(0).0, 0).unwrap();
    server.die();
    ends(5, false);
    server.again();
    // One that is stopped is waited for, as long as it is said.
    for (words, most) in [(&[][..], 12), (&["--origin-timeout", "1s"], 5)] {
        let uri = server.uri("");
        let disk = attach(&place, &[&[uri.as_str()], words].concat());
        write(&disk, 7, 1 << 20);
        server.signal("STOP");
        ends(most, true);
        server.signal("CONT");
    }
}

#[test]
fn an_export_s_server_flushes_what_its_last_client_left() {
    let name = "nbd_detach::an_export_s_server_flushes_what_its_last_client_left";
    if !require_plain_machine(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let log = place.path("log");
    let server = Server::nbdkit_with_log(&ext4(&place), &log);
    let socket = place.path("out");
    let export = || {
        place.ok(["export", &server.uri(""), "--nbd", &format!("unix:{}", socket.display()), "--name", "x"]);
    };
    let gone = |words: &[&str]| wait_until(Duration::from_secs(20), || place.run(words).code == 0);
    export();
    for byte in [1, 2] {
        let mut client = nbd::Client::connect(&socket, "x").unwrap();
        client.write(0, &[byte; 4096]).unwrap();
    }
    assert_eq!(asked(&log), ["write", "write"]);
    assert!(gone(&["detach", "--all"]));
    assert_eq!(asked(&log), ["write", "write", "flush"], "{}", fs::read_to_string(&log).unwrap());
    // Also what is taken from a client.
    export();
    let mut client = nbd::Client::connect(&socket, "x").unwrap();
    client.write(0, &[3; 4096]).unwrap();
    assert!(gone(&["detach", "--all", "--force"]));
    assert_eq!(asked(&log).last(), Some(&"flush"), "{}", fs::read_to_string(&log).unwrap());
}
