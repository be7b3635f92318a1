//! `becket copy` to and from exports of foreign NBD servers: the bytes are there, and flushed; what is beside
//! them stays.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs,
    os::unix::fs::FileExt as _,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use becket_testkit::{Scratch, image, require_plain_machine};
use common::nbd_server::Server;
use common::scratch;

/// Not a whole number of sectors.
const LEN: usize = (5 << 20) + 1000;
const EXPORT: usize = 8 << 20;
/// A server's script that has no room.
const FULL: &str = "echo ENOSPC no room >&2; exit 1";

/// What is copied, with a hole of 2 MiB, and the file that a server exports.
fn made(place: &Scratch) -> (PathBuf, Vec<u8>, PathBuf, Vec<u8>) {
    let (source, target) = (place.path("a.img"), place.path("b.img"));
    let mut bytes = image::random_bytes(LEN, 1);
    bytes[1 << 20..3 << 20].fill(0);
    let file = fs::File::create(&source).unwrap();
    file.set_len(LEN as u64).unwrap();
    file.write_all_at(&bytes[..1 << 20], 0).unwrap();
    file.write_all_at(&bytes[3 << 20..], 3 << 20).unwrap();
    let old = image::random_bytes(EXPORT, 2);
    fs::write(&target, &old).unwrap();
    let new = [&bytes, &old[LEN..]].concat();
    (source, bytes, target, new)
}

#[test]
fn a_copy_is_written_to_an_export_and_flushed() {
    let name = "copy_to_server::a_copy_is_written_to_an_export_and_flushed";
    if !require_plain_machine(name, &["qemu-nbd", "nbdkit"]) {
        return;
    }
    for words in [&[][..], &["-e", "2"]] {
        let place = scratch();
        let (source, _, target, new) = made(&place);
        let server = Server::qemu(&target, words);
        let uri = server.uri("disk");
        place.ok(["copy", "--force", source.to_str().unwrap(), &uri]);
        drop(server);
        assert!(fs::read(&target).unwrap() == new, "qemu-nbd {words:?}");
    }
    // A server that takes nothing but units of 4 KiB, and up to 64 KiB at once.
    let place = scratch();
    let (source, bytes, target, new) = made(&place);
    let (socket, log) = (place.path("s"), place.path("log"));
    let mut command = Command::new("nbdkit");
    command.args(["-f", "--filter=log", "--filter=blocksize-policy", "-U"]).arg(&socket).arg("file");
    command.arg(&target).arg(format!("logfile={}", log.display()));
    command.args(["blocksize-minimum=4096", "blocksize-preferred=4096", "blocksize-maximum=64K"]);
    command.arg("blocksize-error-policy=error");
    let server = Server::start(command, socket);
    place.ok(["copy", "--force", source.to_str().unwrap(), &server.uri("")]);
    // And back.
    let back = place.path("back.img");
    place.ok(["copy", &server.uri(""), back.to_str().unwrap()]);
    drop(server);
    assert!(fs::read(&target).unwrap() == new);
    assert!(fs::read(&back).unwrap()[..LEN] == bytes);
    let log = fs::read_to_string(&log).unwrap();
    let at = |what: &str| log.rfind(what).unwrap_or_else(|| panic!("no {what} in {log}"));
    assert!(at(" Flush ") > at(" Write ") && at(" Flush ") > at(" Zero "), "{log}");
}

/// A server that is far away is asked for several parts at once, over a connection each; one that takes two
/// clients is not waited for.
#[test]
fn a_far_server_is_read_over_several_connections() {
    let name = "copy_to_server::a_far_server_is_read_over_several_connections";
    if !require_plain_machine(name, &["qemu-nbd", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let (source, bytes, ..) = made(&place);
    let (socket, log, back) = (place.path("s"), place.path("log"), place.path("back.img"));
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-r", "--filter=log", "--filter=delay", "-U"]).arg(&socket).arg("file").arg(&source);
    command.args([format!("logfile={}", log.display()), "delay-read=50ms".to_owned()]);
    let server = Server::start(command, socket);
    place.ok(["copy", &server.uri(""), back.to_str().unwrap()]);
    drop(server);
    assert!(fs::read(&back).unwrap() == bytes);
    let log = fs::read_to_string(&log).unwrap();
    assert!(log.contains("connection=3 "), "{log}");
    let server = Server::qemu(&source, &["-r", "-e", "2"]);
    let begun = Instant::now();
    place.ok(["copy", "--force", &server.uri("disk"), back.to_str().unwrap()]);
    // It exports whole sectors.
    assert!(fs::read(&back).unwrap()[..LEN] == bytes);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn what_stands_against_it_is_said_and_nothing_is_written() {
    let name = "copy_to_server::what_stands_against_it_is_said_and_nothing_is_written";
    if !require_plain_machine(name, &["qemu-nbd", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let (source, _, target, _) = made(&place);
    let old = fs::read(&target).unwrap();
    let source = source.to_str().unwrap();
    let server = Server::qemu(&target, &[]);
    let uri = server.uri("disk");
    let fails = |words: &[&str], why: &str| {
        let ran = place.run([&["copy"], words].concat());
        assert!(ran.code == 1 || ran.code == 2, "{ran:?}");
        assert!(ran.err.contains(why), "{ran:?}");
    };
    fails(&[source, &uri], "it exists");
    fails(&["--force", "--to", "qcow2", source, &uri], "a qcow2 is written to a file only");
    fails(&["--force", &uri, &uri], "it holds what is copied");
    fails(&["--force", source, &format!("{uri}#p1")], "a part of an image on a server is only read");
    fails(&["--force", source, &server.uri("none")], "none");
    fails(&["--force", source, "http://127.0.0.1:1/x"], "what is on a web server is only read");
    let large = place.path("large.img");
    image::sparse(&large, 9 << 20);
    fails(&["--force", large.to_str().unwrap(), &uri], "it has 8388608 bytes, and 9437184 are copied");
    drop(server);
    let server = Server::qemu(&target, &["-r"]);
    fails(&["--force", source, &server.uri("disk")], "the server exports it read-only");
    drop(server);
    assert!(fs::read(&target).unwrap() == old);
    // Errors of the server are errors of the copy, those of the flush too.
    for (write, flush) in [(FULL, ""), ("cat >/dev/null", FULL)] {
        let socket = place.path("full");
        let mut command = Command::new("nbdkit");
        command.args(["-f", "-U"]).arg(&socket).args(["eval", "can_write=exit 0", "can_flush=exit 0"]);
        command.args([
            format!("get_size=echo {EXPORT}"),
            format!("pwrite={write}"),
            format!("flush={flush}"),
        ]);
        command.arg("pread=head -c $3 /dev/zero");
        let server = Server::start(command, socket);
        fails(&["--force", source, &server.uri("")], "it cannot be written: no space left");
    }
}
