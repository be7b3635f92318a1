//! Images on NBD servers that are away or say nothing: how long they are waited for, and by whom.
//! Every server listens at a unix socket in the test's own directory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs::File,
    io::{BufRead as _, BufReader},
    os::unix::fs::FileExt as _,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use becket_testkit::{require_fuse, require_plain_machine, require_tools, tool, wait_until};
use common::nbd_server::{Server, attach, ext4};
use common::one::{Block, kill, only};
use common::page::direct as open;
use common::{helpers, nbd, scratch};

#[test]
fn fuse_requests_fail_once_a_server_was_away_for_too_long() {
    let name = "nbd_away::fuse_requests_fail_once_a_server_was_away_for_too_long";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let mut server = Server::nbdkit(&ext4(&place), &[]);
    let disk = open(&attach(&place, &[&server.uri(""), "--origin-timeout", "1s"]));
    server.die();
    let mut block = Block::of(0);
    let failed = disk.read_exact_at(&mut block.0, 1 << 20).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(5));
    server.again();
    disk.read_exact_at(&mut block.0, 1 << 20).unwrap();
    drop(disk);
    // A server that is away keeps nobody from detaching.
    server.die();
    place.ok(["detach", "--all"]);
}

/// A server that is stopped keeps its connections and takes new ones: only its silence says so.
#[test]
fn fuse_a_server_that_says_nothing_is_away() {
    let name = "nbd_away::fuse_a_server_that_says_nothing_is_away";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let server = Server::nbdkit(&ext4(&place), &[]);
    // Where the user has set a time, requests fail by it.
    let path = attach(&place, &[&server.uri(""), "--origin-timeout", "1s"]);
    let disk = open(&path);
    let mut block = Block::of(0);
    disk.read_exact_at(&mut block.0, 0).unwrap();
    server.signal("STOP");
    let failed = disk.read_exact_at(&mut block.0, 1 << 20).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(5));
    let away = |says: &str| only(&place)["away"].as_str().is_some_and(|why| why.contains(says));
    assert!(wait_until(Duration::from_secs(20), || away("does not answer")));
    // It is seen when it is back, also if nothing is asked.
    server.signal("CONT");
    assert!(wait_until(Duration::from_secs(20), || only(&place)["away"].is_null()));
    disk.read_exact_at(&mut block.0, 1 << 20).unwrap();
    drop(disk);
    place.ok(["detach", "--all"]);
}

#[test]
fn a_command_gives_a_silent_server_up_by_the_users_time() {
    let name = "nbd_away::a_command_gives_a_silent_server_up_by_the_users_time";
    if !require_plain_machine(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let server = Server::nbdkit(&image, &[]);
    server.signal("STOP");
    let (uri, copy) = (server.uri(""), place.path("copy"));
    let (image, copy) = (image.to_str().unwrap(), copy.to_str().unwrap());
    for words in [
        &["inspect", &uri][..],
        &["copy", &uri, copy],
        &["copy", "--force", image, &uri],
        &["attach", "--via", "fuse", &uri],
    ] {
        let began = Instant::now();
        let ran = place.run([words, &["--origin-timeout", "2s"]].concat());
        assert!(ran.code == 1 && ran.err.contains("does not answer"), "{words:?}: {ran:?}");
        assert!(ran.err.contains("at that socket"), "{words:?}: {ran:?}");
        assert!(began.elapsed() < Duration::from_secs(8), "{words:?}: {:?}", began.elapsed());
    }
    server.signal("CONT");
}

/// A program that reads from a disk whose server is silent, and is killed.
fn killed_reader(disk: &Path) -> Child {
    let mut reader = Command::new("dd");
    reader.arg(format!("if={}", disk.display())).args(["of=/dev/null", "iflag=direct", "bs=64k"]);
    let mut reader = reader.args(["skip=16", "count=1", "status=none"]).spawn().unwrap();
    thread::sleep(Duration::from_secs(1));
    assert_eq!(reader.try_wait().unwrap(), None, "it waits");
    reader.kill().unwrap();
    reader
}

/// Without such a time requests wait; but nobody waits for a reader that has died.
#[test]
fn fuse_a_reader_of_a_silent_server_that_died_locks_nobody_out() {
    let name = "nbd_away::fuse_a_reader_of_a_silent_server_that_died_locks_nobody_out";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit", "dd", "blockdev"]) {
        return;
    }
    let place = scratch();
    let server = Server::nbdkit(&ext4(&place), &[]);
    let disk = attach(&place, &[&server.uri("")]);
    server.signal("STOP");
    let mut reader = killed_reader(&disk);
    let dead = || reader.try_wait().unwrap().is_some();
    assert!(wait_until(Duration::from_secs(150), dead), "its read waits forever");
    // Opens the disk, for which the kernel waits until its reads have ended.
    tool(Command::new("timeout").args(["-s", "KILL", "20", "blockdev", "--getsize64"]).arg(&disk));
    place.ok(["detach", "--all"]);
    server.signal("CONT");
}

/// Before it is known that the server is away.
#[test]
fn fuse_a_reader_of_a_silent_server_that_died_keeps_nobody_from_detaching() {
    let name = "nbd_away::fuse_a_reader_of_a_silent_server_that_died_keeps_nobody_from_detaching";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit", "dd"]) {
        return;
    }
    let place = scratch();
    let server = Server::nbdkit(&ext4(&place), &[]);
    let disk = attach(&place, &[&server.uri("")]);
    server.signal("STOP");
    let mut reader = killed_reader(&disk);
    let began = Instant::now();
    let ran = place.run(["detach", "--all"]);
    server.signal("CONT");
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    reader.wait().unwrap();
}

/// Else it would read the table of a disk whose requests wait, and nothing could end it.
#[test]
fn fuse_a_refresh_says_at_once_that_the_server_is_away() {
    let name = "nbd_away::fuse_a_refresh_says_at_once_that_the_server_is_away";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let image = ext4(&place);
    let length = |len| File::options().write(true).open(&image).unwrap().set_len(len).unwrap();
    let mut server = Server::nbdkit(&image, &[]);
    attach(&place, &[&server.uri(""), "--name", "disk"]);
    for (shorter, why) in [(false, "refused"), (true, "16777216 bytes")] {
        server.die();
        if shorter {
            length(16 << 20);
            server.again();
        }
        let mut refresh = place.becket();
        let mut refresh = refresh.args(["refresh", "disk"]).stderr(Stdio::piped()).spawn().unwrap();
        let ended = wait_until(Duration::from_secs(10), || refresh.try_wait().unwrap().is_some());
        if !ended {
            length(32 << 20);
            server.again();
        }
        let ran = refresh.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(ended && ran.status.code() == Some(1), "{shorter}: {said}");
        assert!(said.contains("cannot be asked how long that is") && said.contains(why), "{shorter}: {said}");
        // As long as it is away, other commands that look at the device say what they know.
        for words in [&["stat", "disk"][..], &["list", "disk"], &["why", "disk"]] {
            place.ok(words);
        }
    }
    length(32 << 20);
    server.die();
    server.again();
    assert!(wait_until(Duration::from_secs(20), || only(&place)["away"].is_null()), "{:?}", only(&place));
    place.ok(["refresh", "disk"]);
    place.ok(["detach", "--all"]);
}

/// Else it would write back what programs have written, in a thread of its own that nothing can end.
#[test]
fn fuse_a_change_that_needs_the_server_says_at_once_that_it_is_away() {
    let name = "nbd_away::fuse_a_change_that_needs_the_server_says_at_once_that_it_is_away";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let mut server = Server::nbdkit(&ext4(&place), &[]);
    let disk = attach(&place, &[&server.uri(""), "--name", "disk"]);
    let set = |words: &[&str]| {
        let mut set = place.becket();
        set.args([&["set", "disk"], words].concat()).stdout(Stdio::null()).stderr(Stdio::piped());
        set.spawn().unwrap()
    };
    // In the page cache of the disk.
    let user = File::options().write(true).open(&disk).unwrap();
    user.write_all_at(&[7; 4096], 1 << 20).unwrap();
    server.die();
    let mut freeze = set(&["--read-only", "on"]);
    let ended = wait_until(Duration::from_secs(10), || freeze.try_wait().unwrap().is_some());
    if !ended {
        server.again();
    }
    let ran = freeze.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ended && ran.status.code() == Some(1), "{said}");
    assert!(said.contains("does not answer") && said.contains("refused"), "{said}");
    assert_eq!(only(&place)["read_only"], false);
    // What needs no server is done.
    let mut other = set(&["--direct-io", "auto"]);
    assert!(wait_until(Duration::from_secs(10), || other.try_wait().unwrap().is_some()));
    assert_eq!(other.wait().unwrap().code(), Some(0));
    server.again();
    assert!(wait_until(Duration::from_secs(20), || place.run(["set", "disk", "--read-only", "on"]).code == 0));
    drop(user);
    place.ok(["detach", "disk"]);

    // One that only says nothing is waited for, and a person hears why.
    attach(&place, &[&server.uri(""), "--name", "disk"]);
    server.signal("STOP");
    let mut freeze = set(&["--read-only", "on"]);
    let mut heard = BufReader::new(freeze.stderr.take().unwrap()).lines();
    let said = heard.next().unwrap().unwrap();
    server.signal("CONT");
    assert!(said.contains("disk: waits for"), "{said}");
    assert_eq!(freeze.wait().unwrap().code(), Some(0));
    place.ok(["detach", "--all"]);
}

/// Of a device to which nothing was written, nothing has to reach the server; of one past whose page cache
/// something was, all of it has to.
#[test]
fn fuse_a_clean_device_becomes_read_only_without_its_server() {
    let name = "nbd_away::fuse_a_clean_device_becomes_read_only_without_its_server";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let mut server = Server::nbdkit(&ext4(&place), &[]);
    for written in [true, false] {
        let disk = attach(&place, &[&server.uri(""), "--name", "disk"]);
        let user = common::page::direct(&disk);
        if written {
            common::page::write(&user, 1 << 20, 7).unwrap();
        } else {
            common::page::read(&user, 1 << 20).unwrap();
        }
        server.die();
        let mut freeze = place.becket();
        freeze.args(["set", "disk", "--read-only", "on"]).stderr(Stdio::piped());
        let mut freeze = freeze.spawn().unwrap();
        let ended = wait_until(Duration::from_secs(30), || freeze.try_wait().unwrap().is_some());
        server.again();
        let ran = freeze.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ran.stderr);
        assert_eq!((ended, ran.status.code()), (true, Some(written.into())), "{said}");
        assert!(!written || (said.contains("does not answer") && said.contains("refused")), "{said}");
        assert_eq!(only(&place)["read_only"], !written);
        assert_eq!(common::page::write(&user, 1 << 20, 8).is_ok(), written);
        drop(user);
        // Its last flush may be the one that says that the server has lost what was not flushed.
        let ran = place.run(["detach", "disk"]);
        assert!(place.devices().is_empty() && (ran.code == 0 || written), "{ran:?}");
    }
}

/// No device follows another limit of what is on a server, which is therefore not asked.
#[test]
fn fuse_a_limit_is_refused_without_asking_a_silent_server() {
    let name = "nbd_away::fuse_a_limit_is_refused_without_asking_a_silent_server";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let server = Server::nbdkit(&ext4(&place), &[]);
    attach(&place, &[&server.uri(""), "--name", "disk", "--size-limit", "16M"]);
    server.signal("STOP");
    let began = Instant::now();
    let ran = place.run(["set", "disk", "--size-limit", "24M"]);
    let took = began.elapsed();
    // What has to be asked says what it waits for.
    let mut refresh = place.becket();
    let mut refresh = refresh.args(["refresh", "disk"]).stderr(Stdio::piped()).spawn().unwrap();
    let heard = BufReader::new(refresh.stderr.take().unwrap()).lines().next().unwrap().unwrap();
    server.signal("CONT");
    assert!(ran.code == 1 && ran.err.contains("is 16777216 bytes long"), "{ran:?}");
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert!(heard.contains("disk: waits for"), "{heard}");
    refresh.wait().unwrap();
    place.ok(["detach", "--all"]);
}

/// Over an export, whose client is no part of the kernel's and waits for no longer than it wants.
#[test]
fn a_connection_that_was_asked_of_a_dead_connector_is_made_by_the_next() {
    let name = "nbd_away::a_connection_that_was_asked_of_a_dead_connector_is_made_by_the_next";
    if !require_plain_machine(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let mut server = Server::nbdkit(&ext4(&place), &[]);
    let socket = place.path("out");
    place.ok(["export", &server.uri(""), "--nbd", &format!("unix:{}", socket.display()), "--name", "x"]);
    let mut client = nbd::Client::connect(&socket, "x").unwrap();
    client.write(0, &[7; 4096]).unwrap();
    client.flush().unwrap();
    server.die();
    let reads = thread::spawn(move || client.read(0, 4096));
    let shown = || only(&place)["away"].as_str().is_some_and(|away| away.starts_with("reconnecting"));
    assert!(wait_until(Duration::from_secs(20), shown), "{:?}", only(&place));
    let server_pid = only(&place)["server_pid"].as_u64().unwrap().try_into().unwrap();
    // Each of them dies while it tries to make the connection that it was asked for.
    let mut last = 0;
    for _ in 0..3 {
        let mut found = Vec::new();
        let another = || {
            found = helpers(server_pid, "connector");
            matches!(found.as_slice(), [pid] if *pid != last)
        };
        assert!(wait_until(Duration::from_secs(20), another), "no other connector");
        last = found[0];
        // Time to take the request.
        thread::sleep(Duration::from_millis(300));
        kill(last);
    }
    assert!(!reads.is_finished(), "it waits");
    server.again();
    assert!(wait_until(Duration::from_secs(20), || reads.is_finished()), "its request was lost");
    assert_eq!(reads.join().unwrap().unwrap(), [7; 4096]);
    // It takes a moment until the end of the client is seen.
    let detached = || place.run(["detach", "--all"]).code == 0;
    assert!(wait_until(Duration::from_secs(20), detached), "{:?}", only(&place));
}
