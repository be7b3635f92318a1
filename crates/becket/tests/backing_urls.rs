//! Backing names that are URLs: opened where the user allows them, and never otherwise. Servers listen at a
//! unix socket in the test's own directory or at the loopback address.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{fs, os::unix::fs::FileExt as _, path::Path, process::Command};

use becket_testkit::{
    Scratch, image, origin::Origin, require_fuse, require_plain_machine, require_tools, tool,
};
use common::nbd_server::Server;
use common::one::{kill, only};
use common::{
    scratch,
    web::{ok, run},
};

/// An overlay of QEMU's over what it is said to name.
fn over(place: &Scratch, file: &str, backing: &str, format: &str) -> String {
    let path = place.path(file).to_str().unwrap().to_owned();
    let mut command = Command::new("qemu-img");
    tool(command.args(["create", "-q", "-u", "-f", "qcow2", "-F", format, "-b", backing, &path, "4M"]));
    path
}

fn write(path: &str, what: &str) {
    tool(Command::new("qemu-io").args(["-f", "qcow2", "-c", what, path]));
}

/// A raw disk of 4 MiB on an NBD server, the disk that a chain over it shows, the chain, and its URI.
fn chain(place: &Scratch) -> (Server, Vec<u8>, String, String) {
    let base = place.path("base.img");
    image::random(&base, 4 << 20, 7);
    let server = Server::nbdkit(&base, &["-r"]);
    let uri = server.uri("");
    let mut want = fs::read(&base).unwrap();
    write(&over(place, "ov.qcow2", &uri, "raw"), "write -P 7 64k 64k");
    want[64 << 10..128 << 10].fill(7);
    let top = over(place, "top.qcow2", "ov.qcow2", "qcow2");
    write(&top, "write -P 9 0 4k");
    want[..4096].fill(9);
    (server, want, top, uri)
}

fn copied(place: &Scratch, words: &[&str]) -> Vec<u8> {
    let copy = place.path("copy.raw");
    ok(place, &[&["copy", "--force"], words, &[copy.to_str().unwrap()]].concat());
    fs::read(copy).unwrap()
}

#[test]
fn an_image_names_a_server_that_the_user_allows() {
    let name = "backing_urls::an_image_names_a_server_that_the_user_allows";
    if !require_plain_machine(name, &["nbdkit", "qemu-img", "qemu-io"]) {
        return;
    }
    let place = scratch();
    let (server, want, top, uri) = chain(&place);
    let (start, socket) = uri.split_once('?').unwrap();
    let target = place.path("x.raw");
    let target = target.to_str().unwrap();
    for words in
        [&["cat", &top][..], &["inspect", &top], &["map", &top], &["copy", &top, target], &["attach", &top]]
    {
        let ran = run(&place, words);
        assert!(
            ran.code == 1 && ran.err.contains("an image opens no URL that you have not allowed"),
            "{ran:?}"
        );
        assert!(ran.err.contains(&format!("--backing-url '{uri}'")), "{ran:?}");
    }
    for other in
        [start, &format!("{start}?socket=/run/other"), &format!("{start}dis?{socket}"), "nbd://localhost/"]
    {
        let ran = run(&place, &["cat", "--backing-url", other, &top]);
        assert!(ran.code == 1 && ran.err.contains("have not allowed"), "{other}: {ran:?}");
    }
    let ran = run(&place, &["cat", "--backing-url", "/srv", &top]);
    assert!(ran.code == 2 && ran.err.contains("it is no URL"), "{ran:?}");
    assert!(copied(&place, &["--backing-url", &uri, &top]) == want);
    let ran = ok(&place, &["inspect", "--backing-url", &uri, &top]);
    assert!(ran.contains("over ov.qcow2"), "{ran}");
    ok(&place, &["map", "--backing-url", &uri, &top]);
    // What QEMU only understands itself.
    for name in ["nbd:localhost:10809", "json:{\"driver\":\"nbd\",\"host\":\"localhost\"}"] {
        let ran = run(&place, &["cat", "--backing-url", &uri, &over(&place, "q.qcow2", name, "raw")]);
        assert!(ran.code == 1 && ran.err.contains("neither the path of a file nor a URL"), "{ran:?}");
    }
    drop(server);
}

#[test]
fn an_image_on_a_server_names_others_by_the_same_rule() {
    let name = "backing_urls::an_image_on_a_server_names_others_by_the_same_rule";
    if !require_plain_machine(name, &["nbdkit", "qemu-img", "qemu-io"]) {
        return;
    }
    let place = scratch();
    let (_server, want, _, uri) = chain(&place);
    let served = |file: &str| Server::nbdkit(Path::new(file), &["-r"]);
    let middle = served(place.path("ov.qcow2").to_str().unwrap());
    let top = over(&place, "far.qcow2", &middle.uri(""), "qcow2");
    let ran = run(&place, &["cat", "--backing-url", &middle.uri(""), &top]);
    assert!(ran.code == 1 && ran.err.contains(&format!("--backing-url '{uri}'")), "{ran:?}");
    let both = copied(&place, &["--backing-url", &middle.uri(""), "--backing-url", &uri, &top]);
    assert!(both[4096..] == want[4096..], "both are allowed");
    // A file of this host, also one beside the first image, is nothing that a server may name.
    let secret = place.path("secret");
    fs::write(&secret, [1; 4096]).unwrap();
    for name in ["secret", secret.to_str().unwrap()] {
        let hostile = served(&over(&place, "hostile.qcow2", name, "raw"));
        let top = over(&place, "victim.qcow2", &hostile.uri(""), "qcow2");
        let ran = run(&place, &["cat", "--backing-url", &hostile.uri(""), &top]);
        assert!(ran.code == 1 && ran.out.is_empty(), "{name}: {ran:?}");
        assert!(
            ran.err.contains("no directory here") || ran.err.contains("outside the directory"),
            "{ran:?}"
        );
    }
    let circle = place.path("circle.qcow2");
    let uri = format!("nbd+unix:///?socket={}", circle.with_extension("nbdkit").display());
    let circle = over(&place, "circle.qcow2", &uri, "qcow2");
    let _server = served(&circle);
    let ran = run(&place, &["cat", "--backing-url", &uri, &circle]);
    assert!(ran.code == 1 && ran.err.contains("the chain is a circle"), "{ran:?}");
}

#[test]
fn fuse_a_chain_over_a_server_is_attached_and_its_worker_dies() {
    let name = "backing_urls::fuse_a_chain_over_a_server_is_attached_and_its_worker_dies";
    if !require_fuse(name) || !require_tools(name, &["nbdkit", "qemu-img", "qemu-io"]) {
        return;
    }
    let place = scratch();
    let (_server, mut want, top, uri) = chain(&place);
    let words = ["attach", "--via", "fuse", "--backing-url", &uri, &top];
    for round in 1..3_u8 {
        let node = ok(&place, &words);
        let device = only(&place);
        assert_eq!(
            (device["backing_url"].as_str(), device["read_only"].as_bool()),
            (Some(&*uri), Some(false))
        );
        let disk = fs::File::options().read(true).write(true).open(node.trim()).unwrap();
        let at = usize::from(round) << 20;
        disk.write_all_at(&[round; 4096], at as u64).unwrap();
        disk.sync_all().unwrap();
        want[at..at + 4096].fill(round);
        if round == 1 {
            kill(u32::try_from(device["worker_pid"].as_u64().unwrap()).unwrap());
        }
        drop(disk);
        assert!(fs::read(node.trim()).unwrap() == want, "round {round}");
        place.ok(["detach", "--all"]);
    }
    assert!(copied(&place, &["--backing-url", &uri, &top]) == want);
}

#[test]
fn fuse_a_chain_over_a_web_server_is_attached_as_long_as_that_has_the_version() {
    let name = "backing_urls::fuse_a_chain_over_a_web_server_is_attached_as_long_as_that_has_the_version";
    if !require_fuse(name) || !require_tools(name, &["qemu-img", "qemu-io"]) {
        return;
    }
    let place = scratch();
    let base = place.path("base.img");
    image::random(&base, 4 << 20, 7);
    let bytes = fs::read(&base).unwrap();
    let origin = Origin::start(bytes.clone());
    let (url, host) = (origin.url("/images/d.img"), origin.url("/images/"));
    // QEMU's word for it, and becket's.
    let theirs = over(&place, "theirs.qcow2", &url, "raw");
    ok(&place, &["attach", "--via", "fuse", &url, "--cow", place.path("ours.qcow2").to_str().unwrap()]);
    place.ok(["detach", "--all"]);
    let top = over(&place, "top.qcow2", "ours.qcow2", "qcow2");
    for image in [&theirs, &top] {
        let ran = run(&place, &["cat", image]);
        assert!(ran.code == 1 && ran.err.contains(&format!("--backing-url {url}")), "{ran:?}");
        let ran = run(&place, &["cat", "--backing-url", &origin.url("/image"), image]);
        assert!(ran.code == 1 && ran.err.contains("have not allowed"), "{ran:?}");
        assert!(copied(&place, &["--backing-url", &host, image]) == bytes);
        let node = ok(&place, &["attach", "--via", "fuse", "--fill", "--backing-url", &host, image]);
        let disk = fs::File::options().read(true).write(true).open(node.trim()).unwrap();
        disk.write_all_at(&[5; 4096], 0).unwrap();
        disk.sync_all().unwrap();
        drop(disk);
        let found = fs::read(node.trim()).unwrap();
        assert!(found[..4096] == [5; 4096] && found[4096..] == bytes[4096..]);
        place.ok(["detach", "--all"]);
    }
    origin.replace(bytes, "\"another\"");
    let ran = run(&place, &["cat", "--backing-url", &host, &top]);
    assert!(ran.code == 1 && ran.err.contains("it lies over version "), "{ran:?}");
}
