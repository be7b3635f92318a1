//! Many images by one command: in order, all or none, from a file, and more than a ring has room for.
//! Everything here runs over whichever transport is tested.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{Ran, Scratch, crc_whole, image, require_device, require_fuse, skip, via, wait_until};
use common::{Use, disk::kill_worker, scratch, text};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

/// So many images of 64 KiB, each of its own content.
fn images(place: &Scratch, count: usize) -> Vec<String> {
    let names: Vec<String> = (0..count).map(|number| format!("i{number}.img")).collect();
    for (number, name) in names.iter().enumerate() {
        image::random(&place.path(name), 64 << 10, number as u64);
    }
    names
}

fn lines_of(names: &[String]) -> String {
    names.iter().map(|name| format!("{name}\n")).collect()
}

#[test]
fn from_a_file_in_its_order() {
    if !require_device("from_a_file_in_its_order") {
        return;
    }
    let place = scratch();
    let names = images(&place, 20);
    fs::write(place.path("table"), format!("# twenty\n\n{}", lines_of(&names))).unwrap();
    let out = place.ok(["attach", "--via", &via(), "--from", "table"]);
    let devices: Vec<PathBuf> = out.lines().map(PathBuf::from).collect();
    assert_eq!(devices.len(), names.len());
    for (name, device) in names.iter().zip(&devices) {
        assert_eq!(crc_whole(device), crc_whole(&place.path(name)), "{name} is {}", device.display());
    }
    place.ok(["detach", "--all"]);
    assert_eq!(place.devices(), Vec::<Value>::new());
}

#[test]
fn from_standard_input_with_options_of_each_line() {
    if !require_device("from_standard_input_with_options_of_each_line") {
        return;
    }
    let place = scratch();
    image::random(&place.path("a b.img"), 64 << 10, 1);
    image::random(&place.path("c.img"), 64 << 10, 2);
    let mut command = place.becket();
    command.args(["attach", "--json", "--read-only", "--via", &via(), "--from", "-"]).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let table = "'a b.img' --name first # spaces\nc.img --size-limit 4K --name second\n";
    child.stdin.take().unwrap().write_all(table.as_bytes()).unwrap();
    let mut reported = String::new();
    child.stdout.take().unwrap().read_to_string(&mut reported).unwrap();
    assert!(child.wait().unwrap().success());
    let reported: Value = serde_json::from_str(&reported).unwrap();
    let of = |index: usize, key: &str| reported["devices"][index][key].clone();
    assert_eq!(
        (of(0, "name"), of(0, "size"), of(0, "read_only")),
        (json!("first"), json!(65536), json!(true))
    );
    assert_eq!(
        (of(1, "name"), of(1, "size"), of(1, "read_only")),
        (json!("second"), json!(4096), json!(true))
    );
    place.ok(["detach", "--all"]);
}

#[test]
fn one_missing_in_the_middle() {
    if !require_device("one_missing_in_the_middle") {
        return;
    }
    let place = scratch();
    let mut names = images(&place, 12);
    names.insert(6, "missing.img".to_owned());
    fs::write(place.path("table"), lines_of(&names)).unwrap();

    let ran = place.run(["attach", "--via", &via(), "--from", "table"]);
    assert_eq!((ran.code, ran.out.lines().count()), (1, 12), "{ran:?}");
    assert!(ran.err.starts_with("becket: table line 7: cannot attach missing.img: "), "{ran:?}");
    let uses: Vec<Use> = ran.out.lines().map(|device| Use::of(Path::new(device))).collect();
    assert!(uses.iter().all(Use::lasts));
    place.ok(["detach", "--all"]);

    let ran = place.run(["attach", "--atomic", "--via", &via(), "--from", "table"]);
    assert_eq!((ran.code, ran.out.as_str()), (1, ""), "no device is reported that goes again");
    assert_eq!(ran.err.matches("becket: ").count(), 1, "{ran:?}");
    assert!(ran.err.contains("table line 7: cannot attach missing.img: "), "{ran:?}");
    assert_eq!(place.devices(), Vec::<Value>::new(), "all or none");
    let leftover = |dir: PathBuf| fs::read_dir(dir).map_or(0, Iterator::count);
    assert_eq!(leftover(place.links()), 0);

    let reported =
        place.run(["attach", "--json", "--atomic", "--via", &via(), "i0.img", "missing.img"]).json();
    assert_eq!(reported["devices"], json!([]));
    assert_eq!(text(&reported["errors"][0], "image"), "missing.img");

    names.remove(6);
    fs::write(place.path("table"), lines_of(&names)).unwrap();
    let out = place.ok(["attach", "--atomic", "--via", &via(), "--from", "table"]);
    assert_eq!((out.lines().count(), place.devices().len()), (12, 12));
    place.ok(["detach", "--all"]);
}

/// Attaches so many images that a signal comes meanwhile; how many were attached is in the first.
#[track_caller]
fn interrupted(place: &Scratch, words: &[&str], names: &[String], signal: Signal) -> (usize, Ran) {
    // Tests may run in the background of a shell, which has such programs ignore SIGINT.
    let mut command = Command::new("env");
    place.prepare(&mut command);
    command.args(["--default-signal=INT,TERM", env!("CARGO_BIN_EXE_becket"), "attach", "--via", "fuse"]);
    command.args(words).args(names);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = || fs::read_dir(place.links()).is_ok_and(|mut links| links.next().is_some());
    while !begun() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before anything was attached");
        std::thread::sleep(Duration::from_millis(1));
    }
    kill_process(Pid::from_child(&child), signal).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap_or(-1);
    (place.devices().len(), Ran { code, out: text(output.stdout), err: text(output.stderr) })
}

#[test]
fn fuse_a_worker_that_dies_costs_no_image_of_many() {
    if !require_fuse("many::fuse_a_worker_that_dies_costs_no_image_of_many") {
        return;
    }
    let place = scratch();
    let names = images(&place, 100);
    for _ in 0..3 {
        let mut command = place.becket();
        command.args(["attach", "--via", "fuse"]).args(&names);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let attached = || fs::read_dir(place.links()).map_or(0, Iterator::count);
        assert!(wait_until(Duration::from_secs(20), || attached() >= 10));
        kill_worker(&place);
        let output = child.wait_with_output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{err}");
        for (device, name) in out.lines().zip(&names) {
            assert_eq!(crc_whole(Path::new(device)), crc_whole(&place.path(name)), "{name}");
        }
        place.ok(["detach", "--all"]);
    }
}

#[test]
fn fuse_an_interrupted_attach_says_what_is_attached() {
    if !require_fuse("many::fuse_an_interrupted_attach_says_what_is_attached") {
        return;
    }
    let place = scratch();
    let names = images(&place, 200);
    let (live, ran) = interrupted(&place, &[], &names, Signal::INT);
    assert_eq!((ran.code, ran.out.lines().count()), (130, live), "{ran:?}");
    assert!((1..200).contains(&live), "{live}");
    let said = format!("the attach was interrupted: {live} of 200 images are attached");
    assert!(ran.err.contains(&said), "{ran:?}");
    place.ok(["detach", "--all"]);

    let (live, ran) = interrupted(&place, &["--json"], &names, Signal::TERM);
    let printed = ran.json();
    assert_eq!((ran.code, printed["devices"].as_array().unwrap().len()), (143, live), "{ran:?}");
    assert_eq!(text(&printed["errors"][0], "kind"), "interrupted");
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_an_interrupted_attach_of_all_or_none_attaches_none() {
    if !require_fuse("many::fuse_an_interrupted_attach_of_all_or_none_attaches_none") {
        return;
    }
    let place = scratch();
    let names = images(&place, 200);
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let (live, ran) = interrupted(&place, &["--atomic"], &names, signal);
        assert_eq!((ran.code, ran.out.as_str(), live), (code, "", 0), "{ran:?}");
        assert!(ran.err.contains("what was attached is detached again"), "{ran:?}");
    }
}

#[test]
fn a_table_with_a_mistake_attaches_nothing() {
    let place = scratch();
    images(&place, 3);
    for (table, expected) in [
        ("i0.img\ni1.img --flat\n", "table: line 2: unexpected argument '--flat'"),
        ("i0.img\n'i1.img\n", "table: line 2, column 1: this quote is not closed"),
        ("i0.img i1.img\n", "table: line 1: unexpected argument 'i1.img'"),
        ("i0.img --name x\ni1.img --name x\n", "table: line 2: --name x is that of line 1 already"),
        ("i0.img\ni1.img --offset much\n", "table: line 2: invalid value 'much'"),
    ] {
        fs::write(place.path("table"), table).unwrap();
        let ran = place.run(["attach", "--via", &via(), "--from", "table"]);
        assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{ran:?}");
        assert!(ran.err.starts_with(&format!("becket: {expected}")), "{ran:?}");
    }
    let ran = place.run(["attach", "--from", "none"]);
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("cannot read none: no such file"), "{ran:?}");
    fs::write(place.path("table"), "i0.img\n").unwrap();
    assert_eq!(place.run(["attach", "--from", "table", "i1.img"]).code, 2);
    assert_eq!(place.run(["attach", "--from", "table", "--name", "x"]).code, 2);
    assert_eq!(place.devices(), Vec::<Value>::new());
    fs::write(place.path("table"), "# nothing\n").unwrap();
    assert_eq!(place.ok(["attach", "--from", "table"]), "");
}

/// Requests that a ring's table has room for without a copy, and those of a device as deep as can be.
const SLOTS_OF_A_RING: usize = 16384;
const DEEP: usize = 4096;

/// A ring's table has 16,384 slots for requests that are not copied: few such devices fill it.
#[test]
fn more_requests_than_a_ring_has_room_for() {
    let name = "more_requests_than_a_ring_has_room_for";
    if !require_device(name) {
        return;
    }
    let place = scratch();
    let rings = std::thread::available_parallelism().unwrap().get();
    let whole = SLOTS_OF_A_RING / DEEP * rings;
    let names = images(&place, whole + 2);
    image::random(&place.path("between.img"), 64 << 10, 99);
    let depth = DEEP.to_string();
    let deep = ["--depth", &depth, "--queues", "1"];
    let one = |name: &str| {
        place.attach(&place.path(name), &deep);
        let device = place.devices().into_iter().find(|device| text(device, "image").ends_with(name));
        device.expect("is listed")
    };
    place.attach(&place.path(&names[0]), &[]);
    if place.devices()[0]["mode"].as_str().is_none_or(|mode| !mode.ends_with("zero-copy")) {
        place.ok(["detach", "--all"]);
        return skip(name, "this transport copies on this kernel, which takes no slots");
    }
    place.ok(["detach", "--all"]);
    // A device of which nothing is in the rings' tables takes every other number: if each had only the ring
    // of its number, all others would want the same one.
    let devices = names.iter().map(|name| {
        place.attach(
            &place.path("between.img"),
            &["--shared", "--read-only", "--mode", "copy", "--depth", "1"],
        );
        one(name)
    });
    let devices: Vec<Value> = devices.collect();
    let copies = |device: &Value| !text(device, "mode").ends_with("zero-copy");
    let copied: Vec<usize> = (0..devices.len()).filter(|&at| copies(&devices[at])).collect();
    assert_eq!(copied, [whole, whole + 1], "the last two find all rings full: {devices:#?}");
    // Each finds its place again, whichever is served first.
    kill_worker(&place);
    for (device, name) in devices.iter().zip(&names) {
        let node = Path::new(text(device, "device"));
        assert_eq!(crc_whole(node), crc_whole(&place.path(name)));
        let file = fs::File::options().write(true).open(node).unwrap();
        file.write_all_at(&[0x5a; 4096], 8192).unwrap();
        file.sync_all().unwrap();
        let written = &fs::read(place.path(name)).unwrap()[8192..12288];
        assert_eq!(written, [0x5a; 4096], "{name}");
    }
    let copied = &devices[whole];
    assert_eq!(devices[0]["depth"], json!(DEEP));
    assert!(text(copied, "reason").contains("data is copied"), "{copied}");
    assert!(copied["warnings"].to_string().contains("depth that was asked for"), "{copied}");
    assert!(place.ok(["list", "-v"]).contains(&format!("mode {}", text(copied, "mode"))));

    place.ok(["detach", &names[0]]);
    assert!(!copies(&one(&names[0])), "a detached device gives its slots back");
    place.ok(["detach", "--all"]);
}
