//! Partitions: their nodes are there when attach returns, with the right bytes, and go with the device.
//! Nothing waits for udev, and nothing needs it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{crc, crc_whole, image, require_device, require_tools, tool, via};
use common::{Use, scratch, text};
use serde_json::json;
use std::{fs, os::unix::fs::FileExt as _, path::Path, process::Command};

#[test]
fn are_there_at_return() {
    let name = "partitions::are_there_at_return";
    if !require_device(name) || !require_tools(name, &["sfdisk"]) {
        return;
    }
    let place = scratch();
    let disk = place.path("disk.img");
    image::gpt(&disk, 16 << 20);
    // Something to find in them.
    let mut bytes = fs::read(&disk).unwrap();
    for (number, (start, len)) in image::GPT_PARTITIONS.into_iter().enumerate() {
        let (start, len) = (start as usize * 512, len as usize * 512);
        bytes[start..start + len].copy_from_slice(&image::random_bytes(len, number as u64));
    }
    fs::write(&disk, bytes).unwrap();

    let told = place.json(["attach", "--via", &via(), "--name", "disk", "disk.img"]);
    let info = &told["devices"][0];
    let partitions = info["partitions"].as_array().unwrap();
    assert_eq!(partitions.len(), 2, "{info:#}");
    for (number, (partition, (start, len))) in partitions.iter().zip(image::GPT_PARTITIONS).enumerate() {
        let node = Path::new(text(partition, "device"));
        assert_eq!(partition["number"], json!(number + 1));
        assert_eq!(partition["start"], json!(start * 512));
        assert_eq!(text(partition, "label"), ["first", "second"][number]);
        assert_eq!(crc_whole(node), (crc(&disk, start * 512, len * 512), len * 512));
        let link = place.links().join(format!("diskp{}", number + 1));
        assert_eq!(fs::canonicalize(link).unwrap(), node);
    }
    let nodes: Vec<&str> = partitions.iter().map(|partition| text(partition, "device")).collect();
    let used = Use::of(Path::new(text(info, "device")));
    place.ok(["detach", "disk"]);
    assert!(!place.links().join("diskp1").exists());
    for node in nodes {
        let name = Path::new(node).file_name().unwrap().to_str().unwrap();
        let there = Path::new("/sys/class/block").join(name).exists();
        assert!(!there || used.is_anothers(), "{name} is gone with its disk");
    }
}

/// The disk's image becomes longer, the disk takes that over, and a partition is moved to its new end by the usual tools.
#[test]
fn the_last_grows_with_its_disk() {
    let name = "partitions::the_last_grows_with_its_disk";
    if !require_device(name) || !require_tools(name, &["sfdisk", "partx"]) {
        return;
    }
    let place = scratch();
    let disk = place.path("disk.img");
    image::gpt(&disk, 16 << 20);
    let device = place.attach(&disk, &["--name", "disk"]);
    let node = fs::canonicalize(place.links().join("diskp2")).unwrap();
    // In use all the while, as a mounted one is.
    let used = fs::File::options().read(true).write(true).open(&node).unwrap();
    fs::File::options().write(true).open(&disk).unwrap().set_len(32 << 20).unwrap();
    place.ok(["refresh", "disk"]);
    tool(
        Command::new("sfdisk")
            .args(["--quiet", "--no-reread", "--no-tell-kernel"])
            .args(["--relocate", "gpt-bak-std"])
            .arg(&device),
    );
    let grow =
        "echo ', 24MiB' | sfdisk --quiet --no-reread --no-tell-kernel -N 2 $0 && partx --update --nr 2 $0";
    tool(Command::new("sh").args(["-c", grow]).arg(&device));
    let (start, len) = (image::GPT_PARTITIONS[1].0 * 512, 24 << 20);
    let last = [0x5a; 4096];
    used.write_all_at(&last, len - 4096).unwrap();
    used.sync_all().unwrap();
    assert!(used.write_all_at(&last, len).is_err(), "and no further");
    drop(used);
    let mut bytes = [0; 4096];
    fs::File::open(&disk).unwrap().read_exact_at(&mut bytes, start + len - 4096).unwrap();
    assert_eq!(bytes, last);
    let second = &place.devices()[0]["partitions"][1];
    assert_eq!((text(second, "device"), &second["size"]), (node.to_str().unwrap(), &json!(len)));
    place.ok(["detach", "disk"]);
}

#[test]
fn run_tells_them_to_the_command() {
    let name = "partitions::run_tells_them_to_the_command";
    if !require_device(name) || !require_tools(name, &["sfdisk"]) {
        return;
    }
    let place = scratch();
    image::gpt(&place.path("disk.img"), 16 << 20);
    let ran = place.run([
        "run",
        "--via",
        &via(),
        "disk.img",
        "--",
        "sh",
        "-c",
        "echo $BECKET_PARTITIONS; test -b ${BECKET_DEVICE}p1 && test -b {}p2",
    ]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let nodes: Vec<&str> = ran.out.split_whitespace().collect();
    assert!(nodes.len() == 2 && nodes[1].ends_with("p2"), "{ran:?}");
}

#[test]
fn off_means_off() {
    let name = "partitions::off_means_off";
    if !require_device(name) || !require_tools(name, &["sfdisk"]) {
        return;
    }
    let place = scratch();
    image::gpt(&place.path("disk.img"), 16 << 20);
    let device = place.attach(&place.path("disk.img"), &["--partitions", "off"]);
    let name = device.file_name().unwrap().to_str().unwrap();
    assert!(!Path::new("/sys/class/block").join(format!("{name}p1")).exists());
    assert_eq!(place.devices()[0]["partitions"], json!([]));
}

/// In a container nobody makes device nodes: becket does.
#[test]
fn nodes_that_nobody_made() {
    let name = "partitions::nodes_that_nobody_made";
    if !require_device(name) || !require_tools(name, &["sfdisk", "unshare", "mknod"]) {
        return;
    }
    let place = scratch();
    let disk = place.path("disk.img");
    image::gpt(&disk, 16 << 20);
    let script = "set -e; mount -t tmpfs none /dev; mknod /dev/null c 1 3; mkdir /dev/shm; \
        [ -z \"$1\" ] || mknod /dev/loop-control c 10 237; [ -z \"$2\" ] || mknod /dev/ublk-control c $2; \
        dev=$(\"$BECKET\" attach --via \"$0\" disk.img); test -b $dev; test -b ${dev}p1; test -b ${dev}p2; \
        cmp -n 16777216 $dev disk.img; cmp -i 1048576:0 -n 4194304 disk.img ${dev}p1; \
        \"$BECKET\" detach $dev; \"$BECKET\" run --via \"$0\" disk.img -- sh -c 'test -b {}p1'; echo fine";
    let has_loop = if Path::new("/dev/loop-control").exists() { "yes" } else { "" };
    let misc = fs::read_to_string("/sys/class/misc/ublk-control/dev").unwrap_or_default();
    let mut command = Command::new("unshare");
    place.prepare(&mut command);
    command.args(["--mount", "--propagation", "private", "sh", "-c", script, &via(), has_loop]);
    let ran = place.finish(command.arg(misc.trim().replace(':', " ")));
    assert_eq!((ran.code, ran.out.as_str()), (0, "fine\n"), "{ran:?}");
    assert!(place.devices().is_empty());
}
