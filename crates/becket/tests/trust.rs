//! What an image says of itself is never trusted: foreign containers, references, formats that were named.
//! Nothing here may leave a device.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{Ran, Scratch, crc_whole, image, require_device, require_loop, require_tools, tool};
use common::{scratch, text};
use std::{fs, os::unix::fs::FileExt as _, path::PathBuf, process::Command};

const MIB: u64 = 1 << 20;

fn sh(place: &Scratch, line: &str) {
    tool(Command::new("bash").current_dir(place.path("")).args(["-ec", line]));
}

/// Every way in to an image that must not be attached as it is; each must fail with these words.
#[track_caller]
fn refused_everywhere(place: &Scratch, image: &str, words: &[&str], except: &[&str]) {
    let absolute = place.path(image);
    let listed = place.path("list");
    fs::write(&listed, format!("'{}'\n", absolute.display())).unwrap();
    let table = place.path("tab");
    fs::write(&table, format!("one '{}' via=loop\n", absolute.display())).unwrap();
    place.dir("mnt");
    let list = listed.display().to_string();
    let tab = format!("--tab={}", table.display());
    let ways: [(&str, &[&str]); 10] = [
        ("attach", &["attach", "--via", "loop", image]),
        ("attach -r", &["attach", "--via", "loop", "-r", image]),
        ("attach --from", &["attach", "--via", "loop", "--from", &list]),
        ("attach --cow", &["attach", "--via", "fuse", image, "--cow", "over.qcow2"]),
        ("attach --tab", &["attach", &tab, "one"]),
        ("run", &["run", "--via", "loop", image, "--", "true"]),
        ("mount", &["mount", "--via", "loop", image, "mnt"]),
        ("inspect", &["inspect", image]),
        ("ls", &["ls", image]),
        ("map", &["map", image]),
    ];
    for (way, command) in ways.into_iter().filter(|(way, _)| !except.contains(way)) {
        let ran = place.run(command);
        assert_ne!(ran.code, 0, "{way}: {ran:?}");
        for word in words {
            assert!(ran.err.contains(word), "{way}: no {word:?} in {ran:?}");
        }
        assert!(place.devices().is_empty(), "{way} left a device");
        assert!(!place.path("over.qcow2").exists(), "{way} left an overlay");
    }
}

/// Detaches what a test attached, whatever became of it.
fn attach(place: &Scratch, words: &[&str]) -> (PathBuf, Ran) {
    let ran = place.run(["attach", "--json"].iter().chain(words));
    assert_eq!(ran.code, 0, "{ran:?}");
    (PathBuf::from(text(&ran.json()["devices"][0], "device")), ran)
}

#[test]
fn a_foreign_container_is_refused_at_every_way_in() {
    let name = "trust::a_foreign_container_is_refused_at_every_way_in";
    if !require_device(name) || !require_loop(name) || !require_tools(name, &["qemu-img", "sfdisk"]) {
        return;
    }
    let place = scratch();
    image::gpt(&place.path("gpt.img"), 8 * MIB);
    sh(&place, "qemu-img convert -f raw -O qed gpt.img v.qed");
    let convert = "qemu-img convert -f qed -O raw";
    refused_everywhere(&place, "v.qed", &["QED", convert, "--format raw"], &["inspect"]);
    refused_everywhere(&place, "v.qed/p1", &["QED", convert], &[]);
    // `inspect` names it, and says that nothing else does more.
    let reply = place.json(["inspect", "v.qed"]);
    assert_eq!(text(&reply["image"], "format"), "qed");
    assert!(reply["image"]["problems"][0].as_str().unwrap().contains(convert), "{reply:#}");
    assert!(place.ok(["inspect", "v.qed"]).contains(convert));
    // The bytes as they are, on request.
    let before = crc_whole(&place.path("v.qed"));
    let (device, _) = attach(&place, &["--via", "loop", "--format", "raw", "v.qed"]);
    assert_eq!(crc_whole(&device), before);
    place.ok(["detach", "v.qed"]);
    // In the place of another image.
    let size = fs::metadata(place.path("v.qed")).unwrap().len();
    image::random(&place.path("other.img"), size, 1);
    attach(&place, &["--via", "loop", "-r", "--name", "swap", "other.img"]);
    let ran = place.run(["set", "swap", "--image", "v.qed"]);
    assert!(ran.code == 1 && ran.err.contains(convert), "{ran:?}");
    place.ok(["set", "swap", "--image", "v.qed", "--format", "raw"]);
    place.ok(["detach", "swap"]);
}

#[test]
fn a_reference_is_followed_only_by_the_word_of_the_host() {
    let name = "trust::a_reference_is_followed_only_by_the_word_of_the_host";
    if !require_device(name) || !require_loop(name) || !require_tools(name, &["qemu-img"]) {
        return;
    }
    let place = scratch();
    image::random(&place.path("neighbour.img"), MIB, 1);
    image::sparse(&place.path("disk.img"), MIB);
    sh(&place, "qemu-img create -q -f qcow2 -F raw -b neighbour.img header.qcow2");
    let header = fs::read(place.path("header.qcow2")).unwrap();
    fs::OpenOptions::new()
        .write(true)
        .open(place.path("disk.img"))
        .unwrap()
        .write_all_at(&header, 0)
        .unwrap();
    let both = ["refers to other files", "--format qcow2", "--format raw"];
    refused_everywhere(&place, "disk.img", &both, &[]);
    refused_everywhere(&place, "disk.img/p1", &both, &[]);
    let (device, _) = attach(&place, &["--via", "loop", "--format", "raw", "disk.img"]);
    assert_eq!(crc_whole(&device), crc_whole(&place.path("disk.img")));
    place.ok(["detach", "disk.img"]);
    let secret = crc_whole(&place.path("neighbour.img"));
    let (device, _) = attach(&place, &["--via", "fuse", "-r", "--format", "qcow2", "disk.img"]);
    assert_eq!(crc_whole(&device), secret);
    place.ok(["detach", "disk.img"]);
    let (device, _) = attach(&place, &["--via", "fuse", "-r", "header.qcow2"]);
    assert_eq!(crc_whole(&device), secret);
    place.ok(["detach", "header.qcow2"]);
    // A line of the table can say the same.
    let table = place.path("tab");
    fs::write(&table, format!("one {} via=fuse,ro,format=qcow2\n", place.path("disk.img").display()))
        .unwrap();
    let ran = place.run(["attach", &format!("--tab={}", table.display()), "one"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    place.ok(["detach", "one"]);
}

#[test]
fn a_hybrid_iso_is_mounted_as_a_whole() {
    let name = "trust::a_hybrid_iso_is_mounted_as_a_whole";
    if !require_device(name)
        || !require_loop(name)
        || !require_tools(name, &["genisoimage", "sfdisk", "mount"])
    {
        return;
    }
    let place = scratch();
    let tree = place.dir("tree");
    fs::write(tree.join("hello"), "from the iso").unwrap();
    sh(&place, "genisoimage -quiet -R -o plain.iso tree; truncate -s 4M plain.iso");
    let point = place.dir("mnt");
    // As isohybrid makes it; as xorriso does; and as the MBR of memtest86+ has it, of type 0.
    for (iso, table) in [
        ("hybrid.iso", "start=0, size=2048, type=17, bootable\nstart=4096, size=1024, type=ef"),
        ("gap.iso", "start=64, size=2048, type=cd"),
        ("memtest.iso", "start=0, size=2048, type=0"),
    ] {
        fs::copy(place.path("plain.iso"), place.path(iso)).unwrap();
        let disk = fs::OpenOptions::new().write(true).open(place.path(iso)).unwrap();
        mbr(&disk, table);
        let ran = place.run(["mount", "--json", "--via", "loop", iso, "mnt"]);
        if ran.err.contains("unknown filesystem type 'iso9660'") {
            // It was the whole that was to be mounted: no partition is refused before that.
            continue;
        }
        assert_eq!(ran.code, 0, "{iso}: {ran:?}");
        let reply = ran.json();
        let hello = fs::read_to_string(point.join("hello"));
        place.ok(["umount", "mnt"]);
        assert_eq!(hello.unwrap(), "from the iso", "{iso}");
        assert_eq!(reply["source"], reply["device"]["device"], "{iso}");
        assert!(!reply["device"]["partitions"].as_array().unwrap().is_empty(), "{iso}: {reply:#}");
    }
    let (_, ran) = attach(&place, &["--via", "loop", "-r", "memtest.iso"]);
    assert_eq!(ran.json()["devices"][0]["partitions"][0]["number"], 1);
    place.ok(["detach", "memtest.iso"]);
    // An ISO that was left behind on a disk that was partitioned anew is not what is meant.
    fs::copy(place.path("plain.iso"), place.path("stale.img")).unwrap();
    mbr(
        &fs::OpenOptions::new().write(true).open(place.path("stale.img")).unwrap(),
        "start=2048, size=2048, type=83",
    );
    let ran = place.run(["mount", "--via", "loop", "stale.img", "mnt"]);
    assert!(ran.code == 1 && ran.err.contains("it has partitions"), "{ran:?}");
    assert!(place.devices().is_empty());
}

/// An MBR, written by hand: sfdisk puts no partition over the table itself.
fn mbr(disk: &fs::File, table: &str) {
    for (slot, line) in (0..).zip(table.lines()) {
        let value = |key: &str| {
            let field = line.split(", ").find_map(|field| field.strip_prefix(key)).unwrap();
            field.strip_prefix('=').unwrap().to_owned()
        };
        let mut entry = [0; 16];
        entry[4] = u8::from_str_radix(&value("type"), 16).unwrap();
        entry[8..12].copy_from_slice(&value("start").parse::<u32>().unwrap().to_le_bytes());
        entry[12..].copy_from_slice(&value("size").parse::<u32>().unwrap().to_le_bytes());
        disk.write_all_at(&entry, 446 + 16 * slot).unwrap();
    }
    disk.write_all_at(&[0x55, 0xaa], 510).unwrap();
}

#[test]
fn an_inner_file_is_attached_as_it_is_stored() {
    let name = "trust::an_inner_file_is_attached_as_it_is_stored";
    if !require_device(name) || !require_loop(name) || !require_tools(name, &["mke2fs", "sfdisk", "xz"]) {
        return;
    }
    let place = scratch();
    let tree = place.dir("tree");
    image::random(&place.path("file.img"), MIB, 2);
    sh(&place, "xz --block-size=64KiB -c file.img >tree/file.img.xz; truncate -s %512 tree/file.img.xz");
    image::partitioned(&place.path("disk.img"), &tree);
    let path = "disk.img/p1/file.img.xz";
    let (device, _) = attach(&place, &["--via", "loop", "-r", "--format", "raw", path]);
    assert_eq!(crc_whole(&device), crc_whole(&tree.join("file.img.xz")));
    place.ok(["detach", path]);
    // By the same path: a container that becket does not read has a place, too.
    fs::remove_file(tree.join("file.img.xz")).unwrap();
    let footer = b"conectix\0\0\0\x02\0\x01\0\0";
    fs::write(tree.join("v.vhd"), [&footer[..], &image::random_bytes(4080, 4)].concat()).unwrap();
    image::partitioned(&place.path("disk.img"), &tree);
    let path = "disk.img/p1/v.vhd";
    assert!(place.run(["attach", "--via", "loop", "-r", path]).err.contains("Virtual PC"));
    attach(&place, &["--via", "loop", "-r", "--format", "raw", path]);
    place.ok(["detach", path]);
}
