//! `--cow`, end to end: what is written is in the overlay and nowhere else, whatever the image is.
//! Never takes becket's own word for what an overlay or an image holds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{
    Scratch, image, require_device, require_fuse, require_tools, require_ublk, tool, wait_until,
};
use common::{
    disk::{kill_worker, scribble},
    scratch, text,
};
use serde_json::{Value, json};
use std::{
    fs::{self, Permissions},
    os::unix::fs::{FileExt as _, PermissionsExt as _, symlink},
    path::Path,
    process::Command,
    time::Duration,
};

const MIB: u64 = 1 << 20;

fn ready(name: &str, via: &str) -> bool {
    if via == "ublk" && !require_ublk(name) {
        return false;
    }
    let mut tools = vec!["qemu-img", "mksquashfs", "sfdisk", "blkdiscard"];
    // The guests have no xz, and what SquashFS compresses is decoded alike.
    if via == "fuse" {
        tools.push("xz");
    }
    (via != "fuse" || require_fuse(name)) && require_device(name) && require_tools(name, &tools)
}

fn qemu_img(place: &Scratch, words: &[&str]) -> (bool, String) {
    let ran = Command::new("qemu-img").current_dir(place.path("")).args(words).output().unwrap();
    (ran.status.success(), String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned())
}

#[track_caller]
fn qemu(place: &Scratch, words: &[&str]) -> String {
    let (done, reported) = qemu_img(place, words);
    assert!(done, "qemu-img {words:?}: {reported}");
    reported
}

#[track_caller]
fn attach(place: &Scratch, via: &str, image: &str, cow: &str) -> Value {
    let reported = place.json(["attach", "--via", via, image, "--cow", cow]);
    let info = reported["devices"][0].clone();
    assert_eq!(info["read_only"], json!(false), "{info}");
    assert_eq!(info["cow"], json!(place.path(cow)), "{info}");
    info
}

#[track_caller]
fn assert_holds(device: &Path, expected: &[u8], what: &str) {
    let found = fs::read(device).unwrap();
    assert_eq!(found.len(), expected.len(), "{what}");
    if found == expected {
        return;
    }
    let differs = found.iter().zip(expected).position(|(one, other)| one != other);
    assert_eq!(differs, None, "{what}: the first byte that differs");
}

/// Images of which each is read in another way, with the file that they lie in and what they hold.
fn images(place: &Scratch, xz: bool) -> Vec<(&'static str, &'static str, Vec<u8>)> {
    // Its end fills no sector: a device shows the rest of it as zeroes.
    let mut base = image::random_bytes(2 * MIB as usize + 100, 1);
    fs::write(place.path("base.raw"), &base).unwrap();
    if xz {
        tool(Command::new("xz").args(["--keep", "--block-size=256KiB"]).arg(place.path("base.raw")));
    }
    qemu(place, &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "base.qcow2", "3M"]);
    base.resize(base.len().next_multiple_of(512), 0);

    let inner = image::random_bytes(MIB as usize, 2);
    fs::write(place.dir("tree/dir").join("inner.img"), [&inner[..], &[7; 300_000]].concat()).unwrap();
    let tree = place.path("tree");
    tool(
        Command::new("mksquashfs").arg(&tree).arg(place.path("fs.squashfs")).args(["-quiet", "-no-progress"]),
    );
    let inner = fs::read(tree.join("dir/inner.img")).unwrap();
    let mut padded = inner;
    padded.resize(padded.len().next_multiple_of(512), 0);

    image::gpt(&place.path("disk.img"), 16 * MIB);
    let (start, len) = image::GPT_PARTITIONS[1];
    let part = image::random_bytes((len * 512) as usize, 3);
    let disk = fs::OpenOptions::new().write(true).open(place.path("disk.img")).unwrap();
    disk.write_all_at(&part, start * 512).unwrap();

    let mut longer = base.clone();
    longer.resize(3 * MIB as usize, 0);
    let mut images = vec![
        ("base.raw", "base.raw", base.clone()),
        ("base.qcow2", "base.qcow2", longer),
        ("fs.squashfs/dir/inner.img", "fs.squashfs", padded),
        ("disk.img/by-label/second", "disk.img", part),
    ];
    if xz {
        images.push(("base.raw.xz", "base.raw.xz", base));
    }
    images
}

#[test]
fn an_overlay_takes_what_is_written() {
    takes_what_is_written("cow::an_overlay_takes_what_is_written", "ublk");
}

#[test]
fn fuse_overlay_takes_what_is_written() {
    takes_what_is_written("cow::fuse_overlay_takes_what_is_written", "fuse");
}

fn takes_what_is_written(name: &str, via: &str) {
    if !ready(name, via) {
        return;
    }
    let place = scratch();
    for (index, (image, file, mut expected)) in images(&place, via == "fuse").into_iter().enumerate() {
        let before = fs::read(place.path(file)).unwrap();
        let cow = format!("over-{index}.qcow2");
        let info = attach(&place, via, image, &cow);
        assert_eq!(text(&info, "image"), place.path(image).to_str().unwrap());
        let mode = fs::metadata(place.path(&cow)).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600, "{cow}: nobody else reads what is written");
        let device = Path::new(text(&info, "device")).to_owned();
        assert_holds(&device, &expected, image);
        scribble(&device, &mut expected, 10, |_| {});
        assert_holds(&device, &expected, image);
        // By the overlay it is known, too.
        place.ok(["detach", &cow]);
        // What exists is used again.
        let device = attach(&place, via, image, &cow)["device"].as_str().unwrap().to_owned();
        assert_holds(Path::new(&device), &expected, image);
        place.ok(["detach", image]);
        assert!(fs::read(place.path(file)).unwrap() == before, "{file} was written to");

        let over = format!("driver=qcow2,backing=,file.filename={cow}");
        qemu(&place, &["check", "--image-opts", &over]);
        if image == file && !image.ends_with(".xz") {
            fs::write(place.path("expected"), &expected).unwrap();
            qemu(&place, &["compare", "-f", "qcow2", "-F", "raw", &cow, "expected"]);
        } else {
            let (done, reported) = qemu_img(&place, &["convert", "-O", "raw", &cow, "wrong"]);
            assert!(!done && reported.contains("becket"), "nobody reads half of it: {reported}");
            let ran = place.run(["attach", "--via", via, &cow]);
            assert!(ran.code == 1 && ran.err.contains(&format!("{image} --cow")), "{ran:?}");
        }
    }
}

#[test]
fn an_overlay_survives_its_worker() {
    survives_its_worker("cow::an_overlay_survives_its_worker", "ublk");
}

#[test]
fn fuse_overlay_survives_its_worker() {
    survives_its_worker("cow::fuse_overlay_survives_its_worker", "fuse");
}

/// A worker that dies with the overlay half filled is followed by one that finds all that was acknowledged.
fn survives_its_worker(name: &str, via: &str) {
    if !ready(name, via) {
        return;
    }
    let place = scratch();
    let mut expected = image::random_bytes(4 * MIB as usize, 5);
    fs::write(place.path("disk.img"), &expected).unwrap();
    let device = Path::new(text(&attach(&place, via, "disk.img", "over.qcow2"), "device")).to_owned();
    for death in 1..=2 {
        scribble(&device, &mut expected, 10, |_| {});
        kill_worker(&place);
        let live = || {
            let info = &place.devices()[0];
            info["state"] == "live" && info["recoveries"] == json!(death)
        };
        assert!(wait_until(Duration::from_secs(60), live), "{:?}", place.devices());
        assert_holds(&device, &expected, "after a death");
    }
    scribble(&device, &mut expected, 10, |_| {});
    place.ok(["detach", "disk.img"]);
    // 3: unused clusters, which a killed worker leaves, and nothing else.
    let check = Command::new("qemu-img").arg("check").arg(place.path("over.qcow2")).output().unwrap();
    assert!(matches!(check.status.code(), Some(0 | 3)), "{check:?}");
    fs::write(place.path("expected"), &expected).unwrap();
    qemu(&place, &["compare", "-f", "qcow2", "-F", "raw", "over.qcow2", "expected"]);
}

#[test]
fn fuse_overlay_of_something_else_is_refused() {
    let name = "cow::fuse_overlay_of_something_else_is_refused";
    if !ready(name, "fuse") {
        return;
    }
    let place = scratch();
    for name in ["disk.img", "other.img"] {
        image::random(&place.path(name), MIB, 1);
    }
    let over = |words: &[&str]| qemu(&place, &[&["create", "-q", "-f", "qcow2"], words].concat());
    over(&["-F", "raw", "-b", "other.img", "of-other.qcow2"]);
    over(&["-F", "qcow2", "-b", "of-other.qcow2", "of-qcow2.qcow2"]);
    over(&["alone.qcow2", "1M"]);
    fs::write(place.path("empty"), "").unwrap();
    symlink("nowhere", place.path("dangling")).unwrap();
    for (cow, why) in [
        ("of-other.qcow2", "it lies over other.img (raw)"),
        ("of-qcow2.qcow2", "it lies over of-other.qcow2 (qcow2)"),
        ("alone.qcow2", "it is a qcow2 without a backing file"),
        ("other.img", "it is not a qcow2"),
        ("empty", "it is not a qcow2"),
        ("disk.img", "the image itself is in this file"),
        ("dangling", "a symbolic link to nowhere"),
        (".", "is a directory"),
        ("none/over.qcow2", "its directory cannot be opened"),
    ] {
        let before = fs::read(place.path(cow)).ok();
        let ran = place.run(["attach", "disk.img", "--cow", cow]);
        assert!(ran.code == 1 && ran.err.contains(why) && ran.out.is_empty(), "{cow}: {ran:?}");
        assert_eq!(fs::read(place.path(cow)).ok(), before, "{cow} was touched");
    }
    let ran = place.run(["attach", "disk.img", "--cow", "of-other.qcow2"]);
    assert!(ran.err.contains("qemu-img rebase -u -F raw -b disk.img of-other.qcow2"), "{ran:?}");
    // The next step is one.
    qemu(&place, &["rebase", "-u", "-F", "raw", "-b", "disk.img", "of-other.qcow2"]);
    attach(&place, "fuse", "disk.img", "of-other.qcow2");

    // In use: named, and whatever it is attached as.
    let ran = place.run(["attach", "disk.img", "--cow", "of-other.qcow2"]);
    assert!(ran.code == 1 && ran.err.contains("of-other.qcow2: already attached as"), "{ran:?}");
    let ran = place.run(["attach", "disk.img"]);
    assert!(ran.code == 1, "nobody writes below an overlay: {ran:?}");
    assert!(ran.err.contains("which consists of it, is already attached as"), "{ran:?}");
    place.ok(["detach", "--all"]);

    // What fails leaves no overlay behind.
    let ran = place.run(["attach", "disk.img", "--partitions", "on", "--cow", "new.qcow2"]);
    assert!(ran.code == 1 && !place.path("new.qcow2").exists(), "{ran:?}");
    let ran = place.run(["attach", "-r", "disk.img", "--cow", "new.qcow2"]);
    assert!(ran.code == 1 && !place.path("new.qcow2").exists(), "{ran:?}");
    let ran = place.run(["attach", "disk.img", "other.img", "--cow", "new.qcow2"]);
    assert!(ran.code == 2 && !place.path("new.qcow2").exists(), "{ran:?}");
}

#[test]
fn fuse_overlays_of_one_image_stand_beside_each_other() {
    let name = "cow::fuse_overlays_of_one_image_stand_beside_each_other";
    if !ready(name, "fuse") {
        return;
    }
    let place = scratch();
    let bytes = image::random_bytes(MIB as usize, 1);
    fs::write(place.path("disk.img"), &bytes).unwrap();
    fs::set_permissions(place.path("disk.img"), Permissions::from_mode(0o400)).unwrap();
    let devices: Vec<String> = ["one.qcow2", "two.qcow2"]
        .map(|cow| text(&attach(&place, "fuse", "disk.img", cow), "device").to_owned())
        .to_vec();
    for (device, byte) in devices.iter().zip([1, 2]) {
        let device = fs::OpenOptions::new().write(true).open(device).unwrap();
        device.write_all_at(&[byte; 4096], 8192).unwrap();
        device.sync_all().unwrap();
    }
    for (device, byte) in devices.iter().zip([1, 2]) {
        let mut expected = bytes.clone();
        expected[8192..8192 + 4096].fill(byte);
        assert_holds(Path::new(device), &expected, device);
    }
    let table = place.ok(["list"]);
    assert!(table.contains(&format!("disk.img (--cow {})", place.path("two.qcow2").display())), "{table}");
    // The image stands for both, and each overlay for one.
    let ran = place.run(["detach", "disk.img"]);
    assert!(ran.code == 1 && ran.err.contains("fuse"), "{ran:?}");
    place.ok(["detach", "one.qcow2", "two.qcow2"]);
    assert!(fs::read(place.path("disk.img")).unwrap() == bytes);

    // What is attached read-only is not made, and is found again.
    let reported = place.json(["attach", "-r", "--via", "fuse", "disk.img", "--cow", "one.qcow2"]);
    assert_eq!(reported["devices"][0]["read_only"], json!(true));
    let inspected = place.ok(["inspect", "one.qcow2"]);
    assert!(inspected.contains("over disk.img"), "{inspected}");
    place.ok(["detach", "--all"]);
}
