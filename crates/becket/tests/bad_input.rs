//! Bad input gets a clear error and harms nothing: what failed, why, and what to do next.
//! Nothing here may leave a device, and every message is looked at.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{
    Ran, Scratch, crc_whole, image, require_device, require_fuse, require_tools, require_ublk, tool, via,
};
use common::{Small, scratch, text};
use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::{fs::PermissionsExt as _, net::UnixListener},
    path::{Path, PathBuf},
    process::Command,
};

/// Attaches with these words, which must fail; the error must have the `expected` parts, and a hint.
#[track_caller]
fn refused(place: &Scratch, words: &[&str], kind: &str, expected: &[&str]) -> Ran {
    let ran = place.run(["attach", "--json", "--via", &via()].iter().chain(words));
    assert_eq!(ran.code, 1, "{words:?}: {ran:?}");
    assert!(ran.err.starts_with("becket: cannot attach "), "{ran:?}");
    for part in expected {
        assert!(ran.err.contains(part), "{words:?}: no {part:?} in {ran:?}");
    }
    let error = &ran.json()["errors"][0];
    assert_eq!(text(error, "kind"), kind, "{ran:?}");
    assert!(
        ran.err.contains("\n  hint: ") && error["hint"].is_string(),
        "{words:?} has no next step: {ran:?}"
    );
    assert!(!ran.err.contains("os error"), "{ran:?}");
    assert!(place.devices().is_empty(), "{words:?} left a device");
    ran
}

/// A result that nobody could read names what is there all the same.
#[test]
fn a_result_that_cannot_be_printed_is_named_with_what_it_left() {
    let name = "bad_input::a_result_that_cannot_be_printed_is_named_with_what_it_left";
    if !require_device(name) {
        return;
    }
    let place = scratch();
    for name in ["a.img", "b.img"] {
        image::random(&place.path(name), 1 << 20, 1);
    }
    let export = format!("unix:{}", place.path("s").display());
    for words in [
        &["attach", "--via", &via(), "a.img", "b.img"][..],
        &["attach", "--via", &via(), "--json", "a.img", "b.img"],
        &["attach", "--via", &via(), "--atomic", "a.img", "b.img"],
        &["export", "--nbd", &export, "a.img", "b.img"],
    ] {
        for full in [true, false] {
            let mut becket = place.becket();
            // The end of a pipe that nobody reads, or a full device.
            let (_, closed) = std::io::pipe().unwrap();
            match full {
                true => becket.stdout(fs::File::options().write(true).open("/dev/full").unwrap()),
                false => becket.stdout(closed),
            };
            let ran = becket.args(words).output().unwrap();
            let said = String::from_utf8(ran.stderr).unwrap();
            assert_eq!(ran.status.code(), Some(1), "{words:?}: {said}");
            let devices = place.devices();
            assert_eq!(devices.len(), 2, "{words:?}");
            for device in devices {
                assert!(said.contains(text(&device, "device")), "{words:?}: {said}");
                place.ok(["detach", text(&device, "name")]);
            }
            assert!(
                said.contains("cannot write to standard output") && said.contains("becket detach "),
                "{said}"
            );
        }
    }
}

#[test]
fn paths_that_are_no_images() {
    if !require_device("bad_input::paths_that_are_no_images") {
        return;
    }
    let place = scratch();
    refused(&place, &["missing.img"], "not_found", &["missing.img", "not found"]);
    refused(&place, &["no/such/dir.img"], "not_found", &["no"]);
    place.dir("dir");
    refused(&place, &["dir"], "not_an_image", &["a directory"]);
    fs::write(place.path("empty.img"), b"").unwrap();
    refused(&place, &["empty.img"], "not_an_image", &["empty"]);
    tool(Command::new("mkfifo").arg(place.path("fifo")));
    refused(&place, &["fifo"], "not_an_image", &["FIFO"]);
    let _socket = UnixListener::bind(place.path("socket")).unwrap();
    refused(&place, &["socket"], "not_an_image", &["socket"]);
    refused(&place, &["/dev/null"], "not_an_image", &["character device"]);
    std::os::unix::fs::symlink("nowhere", place.path("dangling")).unwrap();
    refused(&place, &["dangling"], "not_found", &["dangling"]);
    std::os::unix::fs::symlink("circle", place.path("circle")).unwrap();
    refused(&place, &["circle"], "not_found", &["circle"]);
    image::random(&place.path("file"), 4096, 1);
    refused(&place, &["file/inside"], "not_an_image", &["no partition table or file system is recognised"]);
    refused(&place, &["/dev/null/inside"], "not_found", &["not a directory"]);
    refused(&place, &["file/.."], "not_an_image", &["a directory"]);
}

#[test]
fn options_that_do_not_fit() {
    if !require_device("bad_input::options_that_do_not_fit") {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 64 << 10, 1);
    let before = crc_whole(&place.path("a.img"));
    refused(&place, &["--offset", "1M", "a.img"], "invalid_option", &["is left", "behind byte 1048576"]);
    refused(&place, &["--offset", "64K", "a.img"], "invalid_option", &["less than one block is left"]);
    refused(&place, &["--size-limit", "100", "a.img"], "invalid_option", &["100", "block"]);
    for size in ["0", "1", "100", "513", "768", "1000", "3K", "64K", "1G"] {
        let ran = refused(&place, &["--block-size", size, "a.img"], "invalid_option", &["power of two"]);
        assert!(ran.err.contains("--block-size 512 or 4096"), "{ran:?}");
    }
    refused(&place, &["--partitions", "on", "a.img"], "invalid_option", &["no partition table"]);
    assert_eq!(crc_whole(&place.path("a.img")), before);
}

#[test]
fn wrong_words_are_wrong_usage() {
    let place = scratch();
    for (words, part) in [
        (&["attach"][..], "<IMAGE>..."),
        (&["attach", ""], "[IMAGE]..."),
        (&["atach", "a.img"], "attach"),
        (&["attach", "--ofset", "1", "a.img"], "--offset"),
        (&["attach", "--offset", "1X", "a.img"], "1MiB"),
        (&["attach", "--offset", "-4K", "a.img"], "-4"),
        (&["attach", "--size-limit", "99999999999G", "a.img"], "8 EiB"),
        (&["attach", "--block-size", "huge", "a.img"], "512"),
        (&["attach", "--via", "floppy", "a.img"], "possible values"),
        (&["attach", "--depth", "0", "a.img"], "1..="),
        (&["detach"], "TARGET"),
        (&["run", "a.img"], "<CMD>"),
        (&["run", "a.img", "true"], "--"),
        (&["detach", "--timeout", "soon", "x"], "500ms"),
    ] {
        let ran = place.run(words);
        assert_eq!(ran.code, 2, "{words:?}: {ran:?}");
        assert!(ran.err.contains(part), "{words:?}: no {part:?} in {ran:?}");
        assert_eq!(ran.out, "", "{words:?}");
        let ran = place.run(words.iter().take(1).chain(&["--json"]).chain(words.iter().skip(1)));
        let reported = ran.json();
        assert_eq!(text(&reported["error"], "kind"), "usage", "{words:?}");
        let message = text(&reported["error"], "message");
        let is_listed = ran.err.contains("\n  <") || ran.err.contains("\n  [");
        assert!(!is_listed || message.contains(part), "{words:?}: {message}");
    }
}

#[test]
fn a_negative_number_is_called_one() {
    let place = scratch();
    for option in ["--offset", "--size-limit", "--block-size", "--queues", "--depth"] {
        let ran = place.run(["attach", option, "-1", "a.img"]);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert!(ran.err.contains("invalid value '-1'") && ran.err.contains(option), "{ran:?}");
    }
}

#[test]
fn no_place_for_records() {
    let place = scratch();
    let mut command = place.becket();
    let ran = place.finish(command.arg("list").env("BECKET_RUNTIME_DIR", "/nonexistent/dir"));
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("/nonexistent/dir") && ran.err.contains("hint: set "), "{ran:?}");
    let shared = place.dir("shared");
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o777)).unwrap();
    let mut command = place.becket();
    let ran = place.finish(command.arg("list").env("BECKET_RUNTIME_DIR", &shared));
    assert!(ran.err.contains("only this user may write") && ran.err.contains("hint: set "), "{ran:?}");
}

#[test]
fn a_place_for_records_that_takes_none() {
    if !require_device("a_place_for_records_that_takes_none") {
        return;
    }
    let place = scratch();
    let small = Small::mount(place.dir("run"));
    for name in ["one.img", "two.img"] {
        image::random(&place.path(name), 64 << 10, 1);
    }
    place.attach(&place.path("one.img"), &["--name", "one"]);
    let attach = || place.run(["attach", "--via", &via(), "--name", "two", "two.img"]);

    // Full to the last byte.
    let mut rest = fs::File::create(small.0.join("rest")).unwrap();
    while rest.write(&[0; 512]).is_ok_and(|written| written > 0) {}
    let ran = attach();
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("No space left"), "{ran:?}");
    assert_eq!(place.devices().len(), 1, "the one that was there, and no more");
    // A process that another test is starting may still have it open: its room must be free all the same.
    rest.set_len(0).unwrap();
    drop(rest);
    fs::remove_file(small.0.join("rest")).unwrap();

    // A server keeps its log open there, and nothing becomes read-only under who writes.
    if via() == "loop" {
        small.again("ro");
        let ran = attach();
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(ran.err.contains("Read-only file system"), "{ran:?}");
        assert_eq!(place.devices().len(), 1, "what is there can still be listed");
        small.again("rw");
    }

    let ran = attach();
    assert_eq!(ran.code, 0, "nothing of the failures is left in the way: {ran:?}");
    place.ok(["detach", "--all"]);
    let left: Vec<_> =
        fs::read_dir(small.0.join("devices")).unwrap().map(|item| item.unwrap().file_name()).collect();
    assert_eq!(left, [".lock"], "no half-written record");
}

/// Commands that come at once find one server, whichever of them started it, and no other becomes one.
fn one_server_is_enough(name: &str, via: &str) {
    let place = scratch();
    let images: Vec<PathBuf> = (0..8).map(|number| place.path(&format!("{number}.img"))).collect();
    for (path, seed) in images.iter().zip(1..) {
        image::random(path, 64 << 10, seed);
    }
    std::thread::scope(|scope| {
        for path in &images {
            scope.spawn(|| place.attach(path, &["--via", via]));
        }
    });
    let server = |device: &serde_json::Value| device["server_pid"].as_u64().unwrap();
    let before: Vec<u64> = place.devices().iter().map(server).collect();
    assert_eq!(before.len(), 8, "{name}");
    assert!(before.windows(2).all(|two| two[0] == two[1]), "{name}: {before:?}");
    for words in [&["serve"][..], &["serve", "--until-idle"]] {
        let ran = place.run(words);
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(
            ran.err.contains("becket's server runs already")
                && ran.err.contains("hint: replace it with --takeover"),
            "{ran:?}"
        );
    }
    assert_eq!(place.devices().iter().map(server).collect::<Vec<u64>>(), before);
    for device in place.devices() {
        assert_eq!(
            crc_whole(Path::new(text(&device, "device"))),
            crc_whole(Path::new(text(&device, "image")))
        );
    }
    place.ok(["detach", "--all"]);
}

#[test]
fn ublk_two_servers_at_once() {
    let name = "bad_input::ublk_two_servers_at_once";
    if require_ublk(name) {
        one_server_is_enough(name, "ublk");
    }
}

#[test]
fn fuse_two_servers_at_once() {
    let name = "bad_input::fuse_two_servers_at_once";
    if require_fuse(name) {
        one_server_is_enough(name, "fuse");
    }
}

#[test]
fn a_node_that_somebody_removed() {
    if !require_device("a_node_that_somebody_removed") {
        return;
    }
    let place = scratch();
    image::random(&place.path("one.img"), 64 << 10, 1);
    for how in ["name", "node", "image"] {
        let device = place.attach(&place.path("one.img"), &["--name", "one"]);
        fs::remove_file(&device).unwrap();
        assert_eq!(text(&place.devices()[0], "state"), "live", "the device is there without its node");
        let by = match how {
            "name" => PathBuf::from("one"),
            "node" => device.clone(),
            _ => place.path("one.img"),
        };
        place.ok(["detach".as_ref(), by.as_os_str()]);
        assert_eq!(place.devices().len(), 0, "{how}");
        // The next device of that number has a node again.
        let device = place.attach(&place.path("one.img"), &[]);
        assert_eq!(crc_whole(&device), crc_whole(&place.path("one.img")));
        place.ok(["detach", "--all"]);
    }
}

#[test]
fn a_size_between_blocks_is_cut_with_a_warning() {
    if !require_device("bad_input::a_size_between_blocks_is_cut_with_a_warning") {
        return;
    }
    let place = scratch();
    let image = place.path("odd.img");
    image::random(&image, 4096 + 100, 1);
    let ran = place.run(["attach", "--via", &via(), "odd.img"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.err.starts_with("becket: warning: ") && ran.err.contains("100"), "{ran:?}");
    assert_eq!(crc_whole(Path::new(ran.out.trim_end())).1, 4096);
    place.ok(["detach", "--all"]);
    assert_eq!(fs::metadata(&image).unwrap().len(), 4196);
}

#[test]
fn targets_that_are_not_there() {
    let place = scratch();
    for command in ["detach", "refresh", "stat"] {
        for target in ["nothing", "/dev/nothing", "/dev/null", "", ".."] {
            let ran = place.run([command, "--json", target]);
            assert_eq!(ran.code, 1, "{command} {target:?}: {ran:?}");
            assert!(ran.err.starts_with(&format!("becket: cannot {command} {target}: ")), "{ran:?}");
            assert_eq!(text(&ran.json()["errors"][0], "target"), target);
            assert!(ran.err.contains("  hint: "), "{ran:?}");
        }
    }
}

#[test]
fn foreign_loop_devices_are_left_alone() {
    let name = "bad_input::foreign_loop_devices_are_left_alone";
    if !becket_testkit::require_loop(name) || !require_tools(name, &["losetup"]) {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 64 << 10, 1);
    let device = tool(Command::new("losetup").args(["--find", "--show"]).arg(place.path("a.img")));
    let used = common::Use::of(Path::new(device.trim_end()));
    let ran = place.run(["detach", device.trim_end()]);
    let all = place.run(["detach", "--all"]);
    let still = used.lasts();
    tool(Command::new("losetup").args(["--detach", device.trim_end()]));
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("only what it attached"), "{ran:?}");
    assert_eq!(all.code, 0, "{all:?}");
    assert!(still);
}

#[test]
fn without_privileges_it_says_so() {
    let name = "bad_input::without_privileges_it_says_so";
    if !require_device(name) || !require_tools(name, &["setpriv", "unshare"]) {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 64 << 10, 1);
    image::random(&place.path("secret.img"), 64 << 10, 1);
    fs::set_permissions(place.path("a.img"), fs::Permissions::from_mode(0o666)).unwrap();
    fs::set_permissions(place.path("secret.img"), fs::Permissions::from_mode(0o600)).unwrap();
    // Somewhere that the user may go, with a binary that the user may run.
    fs::set_permissions(place.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_becket"), place.path("becket")).unwrap();
    let home = place.dir("home");
    tool(Command::new("chown").arg("65534:65534").arg(&home));
    // With /dev/fuse as this machine has it, and as udev makes it; a set-uid helper, if installed, gains
    // nothing.
    let with_fuse = |open: bool, words: &[&str]| {
        let mut command = Command::new("unshare");
        place.prepare(&mut command);
        command.env("BECKET_RUNTIME_DIR", home.join("run"));
        let node = "mknod -m 666 fuse c 10 229; mount --bind fuse /dev/fuse; rm fuse";
        let script = format!("[ $1 = false ] || [ ! -e /dev/fuse ] || {{ {node}; }}; shift; exec \"$@\"");
        command.args(["--mount", "--propagation", "private", "sh", "-euc", &script, "sh", &open.to_string()]);
        command.args(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]);
        command.args(["--inh-caps=-all", "--bounding-set=-all"]).arg(place.path("becket")).args(words);
        place.finish(&mut command)
    };
    let nobody = |words: &[&str]| with_fuse(false, words);
    for open in [false, true] {
        let ran = with_fuse(open, &["attach", "--via", &via(), "a.img"]);
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(ran.err.starts_with("becket: cannot attach a.img: ") && ran.err.contains("root"), "{ran:?}");
        assert!(ran.err.contains("hint: "), "{ran:?}");
    }
    let ran = nobody(&["attach", "--json", "--via", &via(), "secret.img"]);
    assert_eq!(text(&ran.json()["errors"][0], "kind"), "permission", "{ran:?}");
    assert!(ran.err.contains("permission denied") || ran.err.contains("Permission denied"), "{ran:?}");
    let ran = nobody(&["mount", "a.img", "home"]);
    assert!(ran.code == 1 && ran.err.contains("mounting needs root"), "{ran:?}");
    assert!(ran.err.contains("becket ls a.img"), "{ran:?}");
    // What needs no privileges works.
    assert_eq!(nobody(&["list"]).code, 0);
    let doctor = nobody(&["doctor"]);
    assert_eq!(doctor.code, 0, "{doctor:?}");
    assert!(doctor.out.contains("without privileges"), "{doctor:?}");
}

#[test]
fn an_image_cut_short_gives_errors_and_no_crash() {
    if !require_device("bad_input::an_image_cut_short_gives_errors_and_no_crash") {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    image::random(&image, 4 << 20, 1);
    let device = place.attach(&image, &[]);
    fs::OpenOptions::new().write(true).open(&image).unwrap().set_len(1 << 20).unwrap();
    let mut file = fs::File::open(&device).unwrap();
    let mut kept = vec![0; 1 << 20];
    file.read_exact(&mut kept).unwrap();
    assert!(kept == image::random_bytes(4 << 20, 1)[..1 << 20], "what is still there is still right");
    let mut rest = Vec::new();
    // The kernel's loop driver fills up with zeroes, becket's own server gives an error; nothing invents
    // data.
    if file.read_to_end(&mut rest).is_ok() {
        assert!(rest.iter().all(|&byte| byte == 0));
    }
    drop(file);
    assert_eq!(place.devices().len(), 1);
    place.ok(["detach", "--all"]);
    assert_eq!(fs::metadata(&image).unwrap().len(), 1 << 20, "nobody made it longer again");
}
