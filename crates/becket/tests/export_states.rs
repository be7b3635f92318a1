//! Exports of images on foreign NBD servers: what those say of holes, clients hear, and nothing beyond it.
//! Servers and exports are at unix sockets in the test's own directory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use becket_testkit::{Scratch, image, require_plain_machine, tool};
use common::nbd_server::Server;
use common::{scratch, text};

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

/// A sparse image of 10 GiB with random bytes at 5 MiB and at 9 GiB.
fn sparse(place: &Scratch) -> PathBuf {
    let path = place.path("disk.img");
    image::random(&path, 3 * MIB, 7);
    let bytes = fs::read(&path).unwrap();
    let file = fs::File::create(&path).unwrap();
    file.set_len(10 * GIB).unwrap();
    file.write_all_at(&bytes, 5 * MIB).unwrap();
    file.write_all_at(&bytes[..2 << 20], 9 * GIB).unwrap();
    path
}

/// Exports it, and returns the URI.
fn exported(place: &Scratch, name: &str, image: &str, more: &[&str]) -> String {
    let socket = format!("unix:{}", place.path(&format!("{name}.sock")).display());
    let words = ["export", image, "--nbd", &socket, "--name", name].into_iter().chain(more.iter().copied());
    place.ok(words.collect::<Vec<_>>());
    let devices = place.devices();
    let uri = |device: &serde_json::Value| text(device, "device").to_owned();
    devices.iter().map(uri).find(|uri| uri.contains(&format!("/{name}?"))).unwrap()
}

/// Offset, length and state of each range, neighbours of one state as one.
fn map(uri: &str) -> Vec<(u64, u64, u64)> {
    let said = tool(Command::new("nbdinfo").args(["--json", "--map", uri]));
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    let mut all: Vec<(u64, u64, u64)> = Vec::new();
    for range in said.as_array().unwrap() {
        let [at, len, state] = ["offset", "length", "type"].map(|name| range[name].as_u64().unwrap());
        match all.last_mut() {
            Some((from, before, known)) if *known == state && *from + *before == at => *before += len,
            _ => all.push((at, len, state)),
        }
    }
    all
}

#[test]
fn what_a_server_knows_of_holes_clients_of_an_export_hear() {
    const NAME: &str = "export_states::what_a_server_knows_of_holes_clients_of_an_export_hear";
    if !require_plain_machine(NAME, &["nbdkit", "nbdinfo", "nbdcopy", "nbdsh"]) {
        return;
    }
    let place = scratch();
    let log = place.path("log");
    let disk = sparse(&place);
    let server = Server::nbdkit_with_log(&disk, &log);
    let uri = exported(&place, "disk", &server.uri(""), &[]);
    let of_server = map(&server.uri(""));
    assert_eq!(of_server.len(), 5, "{of_server:?}");
    assert_eq!(map(&uri), of_server);

    // A copy reads the data and nothing else.
    let read = || -> u64 {
        let log = fs::read_to_string(&log).unwrap();
        let counts = log.lines().filter(|line| line.contains(" Read ")).filter_map(|line| {
            let count = line.split(" count=0x").nth(1)?.split(' ').next()?;
            u64::from_str_radix(count, 16).ok()
        });
        counts.sum()
    };
    let before = read();
    tool(Command::new("nbdcopy").args([&uri, "null:"]));
    let copied = read() - before;
    assert!((5 * MIB..6 * MIB).contains(&copied), "{copied} bytes");

    // A part begins and ends within a range, and within a block of the file system.
    let words = ["--offset", "6292992", "--size-limit", "4194304", "--read-only", "--shared"];
    let part = exported(&place, "part", &server.uri(""), &words);
    let data = 8 * MIB - 6_292_992;
    assert_eq!(map(&part), [(0, data, 0), (data, 4 * MIB - data, 3)]);

    // What a client writes is no hole afterwards.
    let program = "h.pwrite(b'x' * 65536, 4 << 20)\nh.flush()\n";
    tool(Command::new("nbdsh").args(["-u", &uri, "-c", program]).env("PATH", "/usr/bin:/bin"));
    assert_eq!(map(&uri)[..3], [(0, 4 * MIB, 3), (4 * MIB, 65536, 0), (4 * MIB + 65536, MIB - 65536, 3)]);
    place.ok(["detach", "--all"]);
}

#[test]
fn holes_of_a_server_are_found_through_an_image_on_it() {
    const NAME: &str = "export_states::holes_of_a_server_are_found_through_an_image_on_it";
    if !require_plain_machine(NAME, &["nbdkit", "nbdinfo", "qemu-img", "qemu-io"]) {
        return;
    }
    let place = scratch();
    let disk = place.path("disk.qcow2");
    // All clusters have a place, and the file has bytes for few of them.
    let options = ["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata"];
    tool(Command::new("qemu-img").args(options).arg(&disk).arg("1G"));
    tool(
        Command::new("qemu-io").args(["-c", "write -q -P 7 5M 3M", "-c", "write -q -P 7 900M 1M"]).arg(&disk),
    );
    let server = Server::nbdkit(&disk, &[]);
    let words = ["--format", "qcow2", "--read-only"];
    let uri = exported(&place, "disk", &server.uri(""), &words);
    let found = map(&uri);
    let data: Vec<(u64, u64)> =
        found.iter().filter(|(.., state)| *state == 0).map(|(at, len, _)| (*at, *len)).collect();
    // Of a cluster beside them the file system may have allocated a block, too.
    let holds = |at: u64, len: u64| data.iter().any(|(from, had)| *from <= at && at + len <= from + had);
    assert!(holds(5 * MIB, 3 * MIB) && holds(900 * MIB, MIB), "{found:?}");
    assert!(data.iter().map(|(_, len)| len).sum::<u64>() < 6 * MIB, "{found:?}");
    assert_eq!(found.iter().map(|(_, len, _)| len).sum::<u64>(), GIB);
    place.ok(["detach", "--all"]);
}

/// Without an answer there are no holes, and nobody waits for long.
#[test]
fn a_server_that_is_away_has_no_holes() {
    const NAME: &str = "export_states::a_server_that_is_away_has_no_holes";
    if !require_plain_machine(NAME, &["nbdkit", "nbdinfo"]) {
        return;
    }
    let place = scratch();
    let mut server = Server::nbdkit(&sparse(&place), &[]);
    let uri = exported(&place, "disk", &server.uri(""), &[]);
    assert_eq!(map(&uri).len(), 5);
    server.die();
    let began = Instant::now();
    assert_eq!(map(&uri), [(0, 10 * GIB, 0)]);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    place.ok(["detach", "--all"]);

    // One that tells no holes.
    let other = Server::nbdkit_by(Path::new(&place.path("disk.img")), &["--filter", "noextents"], &[]);
    let uri = exported(&place, "other", &other.uri(""), &[]);
    assert_eq!(map(&uri), [(0, 10 * GIB, 0)]);
    place.ok(["detach", "--all"]);
}
