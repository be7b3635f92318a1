//! What would be done, why a device is as it is, and what devices do while one watches.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{
    Scratch, image, origin::Origin, require_device, require_fuse, require_loop, require_root, require_tools,
    tool, wait_until,
};
use common::{
    scratch, text,
    web::{command, ext4, run},
};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead as _, BufReader, Read as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

/// Every file below a directory, with its bytes.
fn files(dir: &Path) -> BTreeSet<(PathBuf, Vec<u8>)> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        match entry.file_type().unwrap() {
            kind if kind.is_dir() => found.extend(files(&entry.path())),
            kind if kind.is_file() => _ = found.insert((entry.path(), fs::read(entry.path()).unwrap())),
            _ => {}
        }
    }
    found
}

fn foreseen(place: &Scratch, words: &[&str]) -> Value {
    let all = [&["attach", "--dry-run", "--json"], words].concat();
    let ran = run(place, &all);
    assert_eq!(ran.code, 0, "{ran:?}");
    ran.json()["devices"][0].clone()
}

#[test]
fn fuse_a_dry_attach_foresees_what_an_attach_does_and_does_nothing() {
    let name = "foresee::fuse_a_dry_attach_foresees_what_an_attach_does_and_does_nothing";
    if !require_root(name) || !require_fuse(name) || !require_loop(name) || !require_tools(name, &["sfdisk"])
    {
        return;
    }
    let place = scratch();
    image::gpt(&place.path("disk.img"), 64 << 20);
    let images = place.dir("images");
    fs::copy(place.path("disk.img"), images.join("disk.img")).unwrap();
    let before = files(&images);
    for words in [
        &["images/disk.img", "--name", "one"][..],
        &["images/disk.img", "--via", "loop"],
        &["images/disk.img", "-r", "--via", "fuse", "--partitions", "off"],
        &["images/disk.img", "--cow", "images/new.qcow2"],
        &["images/disk.img/p1"],
    ] {
        let foreseen = foreseen(&place, words);
        assert!(place.devices().is_empty(), "{words:?}");
        assert!(files(&images) == before, "{words:?} wrote something");
        let attached = run(&place, &[&["attach", "--json"], words].concat());
        let info = attached.json()["devices"][0].clone();
        for field in ["transport", "reason", "size", "block_size", "read_only", "image", "cow"] {
            assert_eq!(foreseen[field], info[field], "{words:?} {field}: {foreseen:#} {info:#}");
        }
        let numbers = |value: &Value| -> Vec<(Value, Value)> {
            let parts = value["partitions"].as_array().unwrap();
            parts.iter().map(|part| (part["start"].clone(), part["size"].clone())).collect()
        };
        assert_eq!(numbers(&foreseen), numbers(&info), "{words:?}");
        let device = text(&info, "device").to_owned();
        let left = place.json(["detach", "--dry-run", &device]);
        assert_eq!(left["devices"][0]["outcome"], "detached", "{left:#}");
        assert_eq!(place.devices().len(), 1, "it is still there");
        place.ok(["detach", &device]);
        let _ = fs::remove_file(images.join("new.qcow2"));
        // Attaching and detaching a partition's image writes no byte either.
        assert!(files(&images) == before, "{words:?}");
    }
    let overlay = foreseen(&place, &["images/disk.img", "--cow", "images/new.qcow2"]);
    assert_eq!((&overlay["creates_cow"], &overlay["read_only"]), (&json!(true), &json!(false)));
    for (words, why) in [
        (&["attach", "--dry-run", "nothing.img"][..], "cannot attach nothing.img"),
        (&["attach", "--dry-run", "images/disk.img", "--name", "a b"], "name"),
        (&["attach", "--dry-run", "images/disk.img", "--cow", "nowhere/new.qcow2"], "nowhere"),
        (&["attach", "--dry-run", "images/disk.img", "--via", "dm"], "dm cannot take it"),
        (&["detach", "--dry-run", "nothing"], "no device or image"),
    ] {
        let ran = place.run(words);
        assert_eq!(ran.code, 1, "{words:?}: {ran:?}");
        assert!(ran.err.contains(why), "{words:?}: {ran:?}");
    }
    place.attach(&images.join("disk.img"), &["--name", "one"]);
    let ran = place.run(["attach", "--dry-run", "disk.img", "--name", "one"]);
    assert!(ran.code == 1 && ran.err.contains("the name one is in use"), "{ran:?}");
    let ran = place.run(["attach", "--dry-run", "images/disk.img"]);
    assert!(ran.code == 1 && ran.err.contains("already attached as one"), "a lock is seen: {ran:?}");
    place.ok(["detach", "one"]);
    let ran = place.run(["attach", "--dry-run", "images/disk.img", "images/disk.img"]);
    assert!(ran.code == 1 && ran.out.lines().count() == 1 && ran.err.contains("in use"), "{ran:?}");
    fs::copy(images.join("disk.img"), images.join("other.img")).unwrap();
    let list = "images/disk.img --cow new.qcow2\nimages/other.img --cow new.qcow2\n";
    fs::write(place.path("list"), list).unwrap();
    let ran = place.run(["attach", "--dry-run", "--from", "list"]);
    assert!(ran.code == 1 && ran.out.lines().count() == 1 && ran.err.contains("in use"), "{ran:?}");
    fs::remove_file(images.join("other.img")).unwrap();

    place.attach(&images.join("disk.img"), &["--name", "one", "--via", "fuse", "--autoclear"]);
    let why = place.ok(["why", "one"]);
    assert!(why.contains("loop: not possible: ") && !why.contains("loop can take it by now"), "{why}");
    place.ok(["detach", "one"]);
}

#[test]
fn fuse_a_dry_attach_of_a_url_fetches_no_more_than_opening_needs() {
    let name = "foresee::fuse_a_dry_attach_of_a_url_fetches_no_more_than_opening_needs";
    if !require_fuse(name) || !require_tools(name, &["mke2fs"]) {
        return;
    }
    let place = scratch();
    let origin = Origin::start(fs::read(ext4(&place)).unwrap());
    let url = origin.url("/d.img");
    let foreseen = foreseen(&place, &[&url, "--fill", "--via", "fuse", "--store-limit", "1"]);
    assert_eq!((text(&foreseen, "transport"), text(&foreseen, "url")), ("fuse", url.as_str()));
    assert!(origin.sent() < 1 << 20, "{} bytes of 48 MiB", origin.sent());
    assert!(place.devices().is_empty());
    let automatic = run(&place, &["attach", "--dry-run", "-v", &url]);
    assert!(!automatic.out.contains(" by loop,"), "the kernel cannot wait for a server: {automatic:?}");
    assert!(origin.sent() < 1 << 20, "{} bytes of 48 MiB", origin.sent());
}

#[test]
fn a_dry_detach_names_the_users() {
    if !require_root("foresee::a_dry_detach_names_the_users")
        || !common::ready("foresee::a_dry_detach_names_the_users")
    {
        return;
    }
    let place = scratch();
    tool(Command::new("mke2fs").args(["-q", "-t", "ext4"]).arg(place.path("fs.img")).arg("8M"));
    let device = place.attach(&place.path("fs.img"), &["--name", "busy"]);
    let point = place.dir("mnt");
    tool(Command::new("mount").args([&device, &point]));
    let ran = place.run(["detach", "--dry-run", "busy"]);
    let lazily = place.json(["detach", "--dry-run", "--lazy", "busy"]);
    let all = place.run(["detach", "--dry-run", "--all", "--json"]);
    let still = place.devices().len();
    becket_testkit::umount(&point);
    assert_eq!(ran.code, 1, "{ran:?}");
    let words = format!("would not detach {}: mounted on {}", device.display(), point.display());
    assert!(ran.out.contains(&words), "{ran:?}");
    assert_eq!(lazily["devices"][0]["outcome"], "detached_later", "{lazily:#}");
    assert_eq!((all.code, all.json()["devices"][0]["outcome"].clone()), (1, json!("refused")));
    assert_eq!(still, 1);
    // Neither does it go while a program merely has it open.
    let mut open = Command::new("sleep").arg("60").stdin(fs::File::open(&device).unwrap()).spawn().unwrap();
    let ran = place.run(["detach", "--dry-run", "busy"]);
    let refused = place.run(["detach", "busy"]);
    open.kill().unwrap();
    open.wait().unwrap();
    assert_eq!((ran.code, refused.code), (1, 1), "{ran:?} {refused:?}");
    assert!(ran.out.contains(&format!("would not detach {}: open by sleep", device.display())), "{ran:?}");
    let ran = place.run(["detach", "--dry-run", "busy"]);
    assert_eq!(ran.out, format!("would detach {}\n", device.display()), "{ran:?}");
    place.ok(["detach", "busy"]);
}

#[test]
fn fuse_why_has_the_reasons_of_the_planner() {
    let name = "foresee::fuse_why_has_the_reasons_of_the_planner";
    if !require_root(name) || !require_fuse(name) || !require_loop(name) {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 1 << 20, 1);
    place.ok([
        "attach",
        "--via",
        "fuse",
        "--name",
        "a",
        "--direct-io",
        "off",
        "a.img",
        "--fault",
        "delay=read:1ms",
    ]);
    let why = place.json(["why", "a"])["devices"][0].clone();
    assert_eq!((text(&why, "transport"), text(&why, "reason")), ("fuse", "--via fuse"));
    let doctor = place.json(["doctor"]);
    let choices = why["choices"].as_array().unwrap();
    let kinds: Vec<&str> = choices.iter().map(|choice| text(choice, "transport")).collect();
    assert_eq!(kinds, ["dm", "ublk", "loop", "fuse"]);
    for (choice, report) in choices.iter().zip(doctor["transports"].as_array().unwrap()) {
        if text(choice, "transport") == "ublk" {
            assert_eq!((&choice["possible"], &choice["reason"]), (&report["works"], &report["reason"]));
        }
    }
    let loop_ = choices.iter().find(|choice| choice["transport"] == "loop").unwrap();
    assert!(text(loop_, "reason").contains("no operation can be spoiled"), "{loop_:#}");
    let advice: Vec<&str> = why["faster"].as_array().unwrap().iter().map(|one| text(one, "what")).collect();
    assert!(advice.iter().any(|what| what.contains("direct I/O is off")), "{why:#}");
    assert!(advice.iter().any(|what| what.contains("faults are injected")), "{why:#}");
    let words = place.ok(["why", "a"]);
    assert!(words.starts_with("a: /dev/") && words.contains("  why: --via fuse\n"), "{words}");
    assert!(words.contains("    try: becket detach a, and attach it again without --fault\n"), "{words}");
    place.ok(["detach", "a"]);

    place.ok(["attach", "--via", "fuse", "--name", "b", "a.img"]);
    let words = place.ok(["why", "a.img"]);
    assert!(words.contains("loop can take it by now") && words.contains("without --via"), "{words}");
    let why = place.json(["why", "b"])["devices"][0]["faster"].to_string();
    assert!(why.contains("FUSE has no zero copy") && !why.contains("allow zero copy"), "{why}");
    let ran = place.run(["why", "b", "nothing"]);
    assert!(ran.code == 1 && ran.err.contains("cannot explain nothing"), "{ran:?}");
    place.ok(["detach", "b"]);
}

#[test]
fn fuse_why_asks_no_server_of_an_image() {
    let name = "foresee::fuse_why_asks_no_server_of_an_image";
    if !require_fuse(name) || !require_tools(name, &["mke2fs"]) {
        return;
    }
    let place = scratch();
    let origin = Origin::start(fs::read(ext4(&place)).unwrap());
    let url = origin.url("/d.img");
    let words =
        ["attach", "--via", "fuse", "--origin-timeout", "30s", "--partitions", "off", "--name", "far", &url];
    assert_eq!(run(&place, &words).code, 0);
    let sent = origin.sent();
    let why = run(&place, &["why", "far", "--json"]).json()["devices"][0].clone();
    assert_eq!(origin.sent(), sent, "nothing was fetched");
    let loop_ =
        why["choices"].as_array().unwrap().iter().find(|one| one["transport"] == "loop").unwrap().clone();
    assert_eq!(loop_["possible"], false);
    assert!(why["faster"].to_string().contains("becket store prefetch"), "{why:#}");
    assert_eq!(run(&place, &["detach", "far"]).code, 0);
}

#[test]
fn watching_shows_each_interval_until_the_device_is_gone() {
    let name = "foresee::watching_shows_each_interval_until_the_device_is_gone";
    if !require_device(name) {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 4 << 20, 1);
    let device = place.attach(&place.path("a.img"), &["--name", "busy"]);
    let table = place.ok(["stat", "--watch", "100ms", "--count", "3", "busy"]);
    assert_eq!(table.lines().count(), 4, "{table}");
    assert!(
        table.starts_with("NAME ") && table.lines().skip(1).all(|line| line.starts_with("busy ")),
        "{table}"
    );

    let mut watch = command(&place, &["stat", "--watch", "200ms", "--json", "busy"]);
    let mut watch = watch.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(next()["devices"][0]["name"], "busy");
    // Read past the page cache, so that each interval has reads of its own.
    let read = || {
        tool(Command::new("dd").arg(format!("if={}", device.display())).args([
            "of=/dev/null",
            "bs=1M",
            "iflag=direct",
        ]))
    };
    let seen = (0..20).any(|_| {
        read();
        next()["devices"][0]["rates"]["read"]["bytes_per_s"].as_f64().unwrap() > 0.0
    });
    assert!(seen, "no interval had the reads that were made in it");
    let old = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    assert!((next()["at"].as_f64().unwrap() - old).abs() < 60.0);
    place.ok(["detach", "busy"]);
    assert!(
        wait_until(Duration::from_secs(20), || watch.try_wait().unwrap().is_some()),
        "it ends with its device"
    );
    let mut err = String::new();
    watch.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert!(watch.wait().unwrap().success() && err.contains("the devices are gone"), "{err}");
    for words in [&["stat", "--count", "3", "busy"][..], &["stat", "--watch", "1ms", "busy"]] {
        assert_eq!(place.run(words).code, 2, "{words:?}");
    }
}
