//! Devices on NBD servers: what names them, and what is refused of them.
//! Every server listens in the test's own directory, or at a port of this host.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{process::Command, time::Duration};

use becket_testkit::{image, require_fuse, require_plain_machine, require_tools, tool, wait_until};
use common::nbd_server::{Server, attach, ext4};
use common::one::{kill, only};
use common::{scratch, text};

#[test]
fn fuse_a_device_on_a_server_goes_by_what_was_typed_and_by_what_is_shown() {
    let name = "nbd_named::fuse_a_device_on_a_server_goes_by_what_was_typed_and_by_what_is_shown";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let server = Server::nbdkit(&ext4(&place), &["-e", "disk"]);
    // Commands run in the directory of the socket.
    let socket = server.socket.file_name().unwrap().to_str().unwrap();
    for typed in [
        server.uri("disk"),
        format!("nbd+unix:///disk?socket={socket}"),
        format!("nbd+unix:///d%69sk?unheard=1&socket={socket}"),
        format!("nbd+unix:///disk?socket={socket}#dir/file"),
    ] {
        attach(&place, &["-r", &typed]);
        let device = only(&place);
        let shown = text(&device, "image").to_owned();
        for command in ["list", "stat", "why", "refresh"] {
            place.ok([command, &typed]);
            place.ok([command, &shown]);
        }
        let other = place.run(["stat", &typed.replace("sk?", "sk-2?")]);
        assert!(other.code == 1 && other.err.contains("no device or image"), "{other:?}");
        place.ok(["set", "--read-only", "on", &typed]);
        place.ok(["detach", &typed]);
        assert!(place.devices().is_empty());
        attach(&place, &["-r", &typed]);
        place.ok(["detach", &shown]);
    }
}

#[test]
fn what_only_a_store_can_do_is_refused_of_an_image_that_is_never_in_one() {
    let name = "nbd_named::what_only_a_store_can_do_is_refused_of_an_image_that_is_never_in_one";
    if !require_plain_machine(name, &["mke2fs", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let server = Server::nbdkit(&ext4(&place), &[]);
    let (uri, socket) = (server.uri(""), format!("unix:{}", place.path("s.sock").display()));
    std::fs::write(place.path("trace"), "").unwrap();
    let fuse = ["attach", "--via", "fuse", "-r"];
    for (words, option, of) in [
        (vec![&uri, "--fill"], "--fill", "an NBD server"),
        (vec![&uri, "--record"], "--record", "an NBD server"),
        (vec![&uri, "--prefetch", "trace"], "--prefetch", "an NBD server"),
        (vec![&uri, "--fill", "--dry-run"], "--fill", "an NBD server"),
        (vec!["rbd:pool/image", "--fill"], "--fill", "a Ceph cluster"),
    ] {
        let ran = place.run([&fuse[..], &words].concat());
        let why = format!("{option} needs becket's store, and an image on {of} is never in it");
        assert!(ran.code == 1 && ran.err.contains(&why), "{words:?}: {ran:?}");
        assert!(ran.err.contains(&format!("becket copy {} FILE", words[0])), "{ran:?}");
        assert!(place.devices().is_empty());
    }
    let ran = place.run(["export", &uri, "--nbd", &socket, "--record"]);
    assert!(ran.code == 1 && ran.err.contains("--record needs becket's store"), "{ran:?}");
}

#[test]
fn fuse_an_export_has_one_writer_like_a_file() {
    let name = "nbd_named::fuse_an_export_has_one_writer_like_a_file";
    if !require_fuse(name) || !require_tools(name, &["sfdisk", "nbdkit"]) {
        return;
    }
    let place = scratch();
    let image = place.path("d.img");
    image::sparse(&image, 64 << 20);
    let table = "printf 'label: dos\\n,16M\\n,16M\\n' | sfdisk -q \"$0\"";
    tool(Command::new("sh").args(["-c", table]).arg(&image));
    let server = Server::nbdkit(&image, &[]);
    let (uri, again) = (server.uri(""), "nbd+unix:///?unheard=1&socket=d.nbdkit".to_owned());
    let part = |number| format!("{uri}#p{number}");
    let fuse = |words: &[&str]| place.run([&["attach", "--via", "fuse"], words].concat());
    let refused = |words: &[&str]| {
        let ran = fuse(words);
        assert!(ran.code == 1 && ran.err.contains("already attached as"), "{words:?}: {ran:?}");
        assert!(ran.err.contains("becket detach ") && ran.err.contains("--shared"), "{words:?}: {ran:?}");
        // In the same words.
        let foreseen = fuse(&[&["--dry-run"], words].concat());
        assert_eq!((foreseen.code, foreseen.err), (1, ran.err), "{words:?}");
    };
    let taken = |words: &[&str]| {
        let devices = place.devices();
        let foreseen = fuse(&[&["--dry-run"], words].concat());
        assert!(foreseen.code == 0 && place.devices() == devices, "{words:?}: {foreseen:?}");
        let ran = fuse(words);
        assert_eq!(ran.code, 0, "{words:?}: {ran:?}");
    };
    taken(&[&uri]);
    let overlay = place.path("o.qcow2");
    let overlay = overlay.to_str().unwrap();
    for words in [&[&*uri][..], &[&again], &["-r", &uri], &[&part(1)], &["--cow", overlay, &uri]] {
        refused(words);
    }
    // The device that is there keeps it beside other processes of becket's, too.
    kill(&only(&place)["worker_pid"]);
    assert!(wait_until(Duration::from_secs(20), || only(&place)["state"] == "live"));
    refused(&[&uri]);
    kill(&only(&place)["server_pid"]);
    refused(&[&uri]);
    taken(&["--shared", &uri]);
    place.ok(["detach", "--all"]);
    // Readers do not exclude each other, nor do writers of different parts.
    taken(&["-r", &uri]);
    taken(&["-r", &uri]);
    refused(&[&uri]);
    place.ok(["detach", "--all"]);
    taken(&["--size-limit", "1M", &uri]);
    refused(&["--offset", "2M", &uri]);
    place.ok(["detach", "--all"]);
    taken(&[&part(1)]);
    taken(&[&part(2)]);
    refused(&[&part(2)]);
    place.ok(["detach", "--all"]);
    // Of two at once, too, which a rehearsal sees.
    let foreseen = fuse(&["--dry-run", &uri, &again]);
    assert!(foreseen.code == 1 && foreseen.out.lines().count() == 1, "{foreseen:?}");
    assert!(foreseen.err.contains("in use"), "{foreseen:?}");
    for words in [&["--shared", &*uri, &again][..], &["-r", &uri, &again], &[&part(1), &part(2)]] {
        let foreseen = fuse(&[&["--dry-run"], words].concat());
        assert_eq!(foreseen.code, 0, "{words:?}: {foreseen:?}");
    }
    let ran = fuse(&[&uri, &again]);
    assert!(ran.code == 1 && place.devices().len() == 1, "{ran:?}");
    place.ok(["detach", &again]);
    taken(&[&uri]);
    place.ok(["detach", "--all"]);
}
