//! Images inside images, end to end: what is attached is what lies in the innermost file.
//! Never mounts anything: the kernel has no part in finding the bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::lvm::Lab;
use becket_testkit::{
    Scratch, crc, crc_whole, image, require_device, require_fuse, require_tools, require_ublk, skip, tool,
    via, wait_until,
};
use common::{disk::kill_worker, ended, ready, scratch, text};
use serde_json::json;
use std::{
    fs,
    io::{Seek as _, SeekFrom, Write as _},
    os::unix::fs::FileExt as _,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

const MIB: u64 = 1 << 20;

/// A disk with an ext4 in its first partition that holds `dir/nested.img` and `dir/holed.img`, and random
/// bytes in its second partition.
fn disk(place: &Scratch) {
    let tree = place.dir("tree/dir");
    image::random(&tree.join("nested.img"), MIB, 7);
    image::sparse(&tree.join("holed.img"), MIB);
    fs::OpenOptions::new()
        .write(true)
        .open(tree.join("holed.img"))
        .unwrap()
        .write_all_at(&[5; 4096], 512 << 10)
        .unwrap();
    std::os::unix::fs::symlink("dir/nested.img", place.path("tree/link.img")).unwrap();
    image::partitioned(&place.path("disk.img"), &place.path("tree"));
}

#[test]
fn a_partition_by_number_and_by_label() {
    if !ready("nested::a_partition_by_number_and_by_label") {
        return;
    }
    let place = scratch();
    disk(&place);
    let (start, len) = image::GPT_PARTITIONS[1];
    let expected = crc(&place.path("disk.img"), start * 512, len * 512);
    for path in ["disk.img/p2", "disk.img/by-label/second"] {
        let reported = place.json(["attach", "--via", &via(), path]);
        let info = &reported["devices"][0];
        let device = Path::new(text(info, "device"));
        assert_eq!(crc_whole(device), (expected, len * 512), "{path}");
        assert_eq!(info["read_only"], json!(false));
        assert!(text(info, "image").ends_with(path), "{info}");
        place.ok(["detach", path]);
        assert_eq!(place.devices(), Vec::<serde_json::Value>::new());
    }
    // Written through the device, it is in the file, in its place.
    let device = place.attach(&place.path("disk.img/p2"), &[]);
    let mut file = fs::OpenOptions::new().write(true).open(&device).unwrap();
    file.seek(SeekFrom::Start(4096)).unwrap();
    file.write_all(&[0xa5; 512]).unwrap();
    file.sync_all().unwrap();
    drop(file);
    place.ok(["refresh", device.to_str().unwrap()]);
    assert_eq!(crc_whole(&device).1, len * 512, "the size is the partition's, not the file's");
    place.ok(["detach", device.to_str().unwrap()]);
    let mut bytes = [0; 512];
    fs::File::open(place.path("disk.img")).unwrap().read_exact_at(&mut bytes, start * 512 + 4096).unwrap();
    assert_eq!(bytes, [0xa5; 512]);
}

#[test]
fn a_logical_volume_is_attached_and_written() {
    let name = "nested::a_logical_volume_is_attached_and_written";
    if !ready(name) {
        return;
    }
    let place = scratch();
    let Some(lab) = Lab::new(name, &place.dir("lvm"), 1) else { return };
    lab.lvm(&format!("pvcreate -q --dataalignment 1m {}", lab.device(0)));
    lab.lvm(&format!("vgcreate -q -s 1m vg {}", lab.device(0)));
    lab.create("-n root -l 8 vg");
    lab.create("-n other -l 4 vg");
    lab.lvm("lvextend -q -l +16 vg/root");
    lab.create("-n frozen -p r -l 4 vg");
    let before = lab.bytes(0);
    // In the second partition of a disk.
    let (start, len) = ((2 * MIB) as usize, before.len() as u64);
    let disk = place.path("disk.img");
    fs::write(&disk, [&vec![0; start], &before[..], &vec![0; MIB as usize]].concat()).unwrap();
    drop(lab);
    let table = format!("label: gpt\nstart=2048,size=8\nstart={},size={}\n", start / 512, len / 512);
    fs::write(place.path("table"), table).unwrap();
    let table = fs::File::open(place.path("table")).unwrap();
    tool(Command::new("/usr/sbin/sfdisk").arg("-q").arg(&disk).stdin(table));
    assert_eq!(place.ok(["ls", "disk.img/p2/vg"]).lines().count(), 3);
    let device = place.attach(&place.path("disk.img/p2/vg/root"), &[]);
    let written = image::random_bytes(24 * MIB as usize, 77);
    let file = fs::OpenOptions::new().write(true).open(&device).unwrap();
    file.write_all_at(&written, 0).unwrap();
    file.sync_all().unwrap();
    assert_eq!(crc_whole(&device).1, 24 * MIB);
    drop(file);
    place.ok(["detach", "--all"]);
    // Behind the data's start: 8 extents, 4 of another volume, 16 more.
    let mut after = before;
    let at = |extent: u64| (MIB * (1 + extent)) as usize;
    after[at(0)..at(8)].copy_from_slice(&written[..8 * MIB as usize]);
    after[at(12)..at(28)].copy_from_slice(&written[8 * MIB as usize..]);
    let mut now = fs::read(&disk).unwrap();
    assert!(now.drain(start..start + after.len()).eq(after), "only the volume's extents were written");
    let reported = place.json(["attach", "--via", &via(), "disk.img/p2/vg/frozen"]);
    assert_eq!(reported["devices"][0]["read_only"], json!(true), "{reported}");
    place.ok(["detach", "--all"]);
}

#[test]
fn a_file_in_a_file_system_in_a_partition() {
    if !ready("nested::a_file_in_a_file_system_in_a_partition") {
        return;
    }
    let place = scratch();
    disk(&place);
    let expected = crc_whole(&place.path("tree/dir/nested.img"));
    for path in ["disk.img/p1/dir/nested.img", "disk.img/p1/link.img", "disk.img/p1/dir/../dir/nested.img"] {
        let reported = place.json(["attach", "--via", &via(), path]);
        let info = &reported["devices"][0];
        assert_eq!(crc_whole(Path::new(text(info, "device"))), expected, "{path}");
        assert_eq!(info["read_only"], json!(false), "all its blocks are there and the file system is clean");
        place.ok(["detach", "--all"]);
    }
    let (start, _) = image::GPT_PARTITIONS[0];
    // A dirty journal: nothing may be written behind its back.
    let disk = fs::OpenOptions::new().read(true).write(true).open(place.path("disk.img")).unwrap();
    let incompat = start * 512 + 1024 + 96;
    let mut flags = [0; 4];
    disk.read_exact_at(&mut flags, incompat).unwrap();
    flags[0] |= 4;
    let state = start * 512 + 1024 + 58;
    // The superblock's checksum would be wrong: only the state is changed, which it covers, so it is turned
    // off.
    let mut ro_compat = [0; 4];
    disk.read_exact_at(&mut ro_compat, start * 512 + 1024 + 100).unwrap();
    ro_compat[1] &= !4;
    disk.write_all_at(&ro_compat, start * 512 + 1024 + 100).unwrap();
    for (at, bytes, why) in [(state, &[0, 0][..], "was not unmounted"), (incompat, &flags[..], "journal")] {
        disk.write_all_at(bytes, at).unwrap();
        let reported = place.json(["attach", "--via", &via(), "disk.img/p1/dir/nested.img"]);
        let info = &reported["devices"][0];
        assert_eq!(info["read_only"], json!(true));
        assert!(info["warnings"].to_string().contains(why), "{info}");
        assert_eq!(crc_whole(Path::new(text(info, "device"))), expected);
        place.ok(["detach", "--all"]);
    }
}

#[test]
fn what_is_not_there_is_said_with_what_is() {
    if !ready("nested::what_is_not_there_is_said_with_what_is") {
        return;
    }
    let place = scratch();
    disk(&place);
    for (path, kind, words) in [
        (
            "disk.img/p3",
            "not_found",
            &["disk.img: the partition table in it has no entry", "\"p3\"", "p1, p2"][..],
        ),
        ("disk.img/by-label/third", "not_found", &["by-label/third", "first, second"]),
        (
            "disk.img/p1/dir/nestd.img",
            "not_found",
            &["disk.img/p1: the ext4 in it", "dir/nestd.img", "nested.img"],
        ),
        ("disk.img/p1/dir", "not_an_image", &["a directory"]),
        ("disk.img/p1/dir/nested.img/p1", "not_an_image", &["nested.img: nothing can be looked up in it"]),
        ("disk.img/p2/x", "not_an_image", &["disk.img/p2: nothing can be looked up"]),
    ] {
        let ran = place.run(["attach", "--json", "--via", &via(), path]);
        assert_eq!(ran.code, 1, "{path}: {ran:?}");
        assert_eq!(text(&ran.json()["errors"][0], "kind"), kind, "{path}: {ran:?}");
        for word in words {
            assert!(ran.err.contains(word), "{path}: no {word:?} in {ran:?}");
        }
    }
    // The hint names what is missing, and the directory that was searched.
    for (path, hint) in [
        ("disk.img/p1/dir/nestd.img/more", "instead of \"dir/nestd.img\": becket ls disk.img/p1/dir\n"),
        ("disk.img/by-label/third", "instead of \"by-label/third\": becket ls disk.img\n"),
        ("no/such/disk.img", "instead of \"no\": ls .\n"),
    ] {
        let ran = place.run(["attach", "--via", &via(), path]);
        assert!(ran.err.contains(hint), "{path}: {ran:?}");
    }
    // `raw` is said of what the path names, and not of the disk on the way.
    place.ok(["attach", "--via", &via(), "--format", "raw", "disk.img/p2"]);
    place.ok(["detach", "disk.img/p2"]);
    let ran = place.run(["attach", "--via", &via(), "--format", "iso9660", "disk.img/p2"]);
    assert!(ran.code == 1 && ran.err.contains("it is not iso9660"), "{ran:?}");
    assert_eq!(place.devices(), Vec::<serde_json::Value>::new());
}

#[test]
fn a_file_in_an_iso_needs_no_server() {
    let name = "nested::a_file_in_an_iso_needs_no_server";
    if !require_device(name) || !require_tools(name, &["genisoimage"]) {
        return;
    }
    let place = scratch();
    let tree = place.dir("tree/boot");
    image::random(&tree.join("efi image.img"), 3 * MIB, 3);
    tool(
        Command::new("genisoimage")
            .args(["-quiet", "-R", "-o"])
            .args([place.path("live.iso"), place.path("tree")]),
    );
    let expected = crc_whole(&tree.join("efi image.img"));
    // Twice at once: readers do not shut each other out.
    for _ in 0..2 {
        let reported = place.json(["attach", "--via", "loop", "live.iso/boot/efi image.img"]);
        let info = &reported["devices"][0];
        assert_eq!(text(info, "transport"), "loop");
        assert_eq!(info["read_only"], json!(true));
        assert_eq!(crc_whole(Path::new(text(info, "device"))), expected);
    }
    place.ok(["detach", "--all"]);
}

/// An ISO with a SquashFS with an ext4 with a file, as a live medium has them.
fn live(place: &Scratch, name: &str) -> bool {
    if !squash(place, name) || !require_tools(name, &["genisoimage"]) {
        return false;
    }
    tool(
        Command::new("genisoimage")
            .args(["-quiet", "-R", "-V", "LIVE", "-o"])
            .args([place.path("live.iso"), place.path("iso")]),
    );
    true
}

/// That SquashFS, in the directory that becomes the ISO.
fn squash(place: &Scratch, name: &str) -> bool {
    if !require_tools(name, &["mke2fs", "mksquashfs"]) {
        return false;
    }
    let root = place.dir("root/etc");
    fs::write(root.join("two\nlines"), "x").unwrap();
    image::random(&place.path("root/blob.img"), 300_000, 4);
    image::ext4(&place.path("root.img"), 8 * MIB, &place.path("root"));
    let squash = place.dir("squash/LiveOS");
    fs::rename(place.path("root.img"), squash.join("rootfs.img")).unwrap();
    let iso = place.dir("iso/LiveOS");
    tool(Command::new("mksquashfs").args([place.path("squash"), iso.join("squashfs.img")]).args([
        "-quiet",
        "-no-progress",
        "-comp",
        "xz",
    ]));
    true
}

#[test]
fn looking_inside() {
    let place = scratch();
    if !live(&place, "nested::looking_inside") {
        return;
    }
    let tree = place.ok(["inspect", "live.iso"]);
    for words in [
        "live.iso  iso9660",
        "└─ LiveOS/squashfs.img  squashfs",
        "xz",
        "└─ LiveOS/rootfs.img  ext4  8M",
        "label LIVE",
    ] {
        assert!(tree.contains(words), "no {words:?} in\n{tree}");
    }
    let reported = place.json(["inspect", "live.iso"]);
    let inner = &reported["image"]["children"][0]["children"][0];
    assert_eq!((text(inner, "name"), text(inner, "format")), ("LiveOS/rootfs.img", "ext4"));
    assert!(inner["encoded"].as_u64().unwrap() > 300_000, "{inner}");

    let path = "live.iso/LiveOS/squashfs.img/LiveOS/rootfs.img";
    assert!(place.ok(["ls", path]).contains("blob.img"));
    assert_eq!(place.ok(["ls", &format!("{path}/etc")]).trim_end(), "file  1  two\\nlines");
    let entries = place.json(["ls", "live.iso/LiveOS"]);
    assert_eq!(
        (text(&entries["entries"][0], "name"), text(&entries["entries"][0], "type")),
        ("squashfs.img", "file")
    );
    let ran = place.run(["ls", &format!("{path}/etc/missing")]);
    assert!(ran.code == 1 && ran.err.contains("two\\nlines"), "{ran:?}");

    let map = place.json(["map", path]);
    let extents = map["extents"].as_array().unwrap();
    let sum: u64 = extents.iter().map(|extent| extent["len"].as_u64().unwrap()).sum();
    assert_eq!((sum, map["size"].as_u64()), (8 * MIB, Some(8 * MIB)));
    assert!(
        extents.iter().any(|extent| extent["kind"] == "xz")
            && extents.iter().any(|extent| extent["kind"] == "zero")
    );
    let blocks = place.json(["map", "--blocks", path]);
    let layer = &blocks["layers"][0];
    assert_eq!((text(layer, "codec"), &map["layers"][0]["table"]), ("xz", &serde_json::Value::Null));
    let table = layer["table"].as_array().unwrap();
    let total = |of: &str| table.iter().map(|block| block[of].as_u64().unwrap()).sum::<u64>();
    assert_eq!(layer["blocks"].as_u64(), Some(table.len() as u64));
    assert_eq!(
        (layer["len"].as_u64(), layer["stored"].as_u64()),
        (Some(total("len")), Some(total("input_len")))
    );
    assert!(0 < total("input_len") && total("input_len") < total("len"), "{layer}");
    let lies = layer["below"].as_array().unwrap().iter().all(|extent| extent["kind"] == "data");
    assert!(lies, "{layer}");
    let table = place.ok(["map", "--blocks", path]);
    assert!(table.contains("\nLAYER  ") && table.contains(" xz "), "{table}");
    let place_of = place.ok(["map", "live.iso/LiveOS/squashfs.img"]);
    assert_eq!(place_of.lines().count(), 2, "one piece: {place_of}");
    place.ok(["map", "--svg", "map.svg", path]);
    let svg = fs::read_to_string(place.path("map.svg")).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && svg.contains("rootfs.img"));
    assert_eq!(svg.matches("font-weight=\"bold\"").count(), 3, "a bar for each image");
}

#[test]
fn what_is_compressed_is_refused_with_a_way_out() {
    let place = scratch();
    let name = "nested::what_is_compressed_is_refused_with_a_way_out";
    if !require_device(name) || !live(&place, name) {
        return;
    }
    let ran = place.run(["attach", "--via", "loop", "live.iso/LiveOS/squashfs.img/LiveOS/rootfs.img"]);
    assert!(ran.code == 1 && ran.err.contains("not one contiguous range"), "{ran:?}");
    // The SquashFS itself lies in the ISO as it is.
    let reported = place.json(["attach", "--via", "loop", "live.iso/LiveOS/squashfs.img"]);
    let device = Path::new(text(&reported["devices"][0], "device"));
    let len = fs::metadata(place.path("iso/LiveOS/squashfs.img")).unwrap().len() / 512 * 512;
    assert_eq!(crc_whole(device), (crc(&place.path("iso/LiveOS/squashfs.img"), 0, len), len));
    place.ok(["detach", "--all"]);
}

#[test]
fn a_compressed_image_is_decoded() {
    let name = "nested::a_compressed_image_is_decoded";
    if !require_ublk(name) {
        return;
    }
    is_decoded(name, "ublk", &[]);
}

#[test]
fn a_compressed_image_is_decoded_for_pages_that_only_the_kernel_reaches() {
    let name = "nested::a_compressed_image_is_decoded_for_pages_that_only_the_kernel_reaches";
    if !require_ublk(name) {
        return;
    }
    let place = scratch();
    image::random(&place.path("plain.raw"), MIB, 2);
    let reported = place.json(["attach", "--via", "ublk", "plain.raw"]);
    place.ok(["detach", "plain.raw"]);
    if !text(&reported["devices"][0], "mode").contains("zero") {
        return skip(name, "this kernel copies what every device moves");
    }
    is_decoded(name, "ublk", &["--mode", "zero-copy"]);
    is_decoded(name, "ublk", &["--mode", "batch-zero-copy"]);
}

#[test]
fn fuse_image_that_is_compressed_is_decoded() {
    let name = "nested::fuse_image_that_is_compressed_is_decoded";
    if require_fuse(name) {
        is_decoded(name, "fuse", &[]);
    }
}

/// Kept from the host's loop driver by the compression: only a server of ours can offer it.
fn is_decoded(name: &str, via: &str, mode: &[&str]) {
    let place = scratch();
    if !squash(&place, name) {
        return;
    }
    let path = "iso/LiveOS/squashfs.img/LiveOS/rootfs.img";
    let expected = crc_whole(&place.path("squash/LiveOS/rootfs.img"));
    let reported = place.json([&["attach", "--via", via, "--cache-size", "32M"], mode, &[path]].concat());
    let info = &reported["devices"][0];
    assert_eq!(info["read_only"], json!(true));
    match mode {
        [_, mode] => assert_eq!(text(info, "mode"), *mode),
        _ => assert!(text(info, "mode").ends_with("copy") && !text(info, "mode").contains("zero"), "{info}"),
    }
    let device = Path::new(text(info, "device"));
    assert_eq!(crc_whole(device), expected);
    let reported = place.json(["stat", device.to_str().unwrap()]);
    let decoded = &reported["devices"][0]["decoded"];
    assert!(decoded["blocks"].as_u64() > Some(0) && decoded["errors"] == json!(0), "{reported}");
    // A later worker gets the table of blocks from its supervisor. Nothing is left of what was read before.
    let pid = info["worker_pid"].as_u64().unwrap() as i32;
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(pid).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    tool(Command::new("blockdev").arg("--flushbufs").arg(device));
    assert_eq!(crc_whole(device), expected, "by the next worker");
    place.ok(["detach", "--all"]);
}

#[test]
fn parts_of_one_disk_are_written_side_by_side() {
    are_written_side_by_side("nested::parts_of_one_disk_are_written_side_by_side", &via());
}

#[test]
fn fuse_parts_of_one_disk_are_written_side_by_side() {
    let name = "nested::fuse_parts_of_one_disk_are_written_side_by_side";
    if require_fuse(name) {
        are_written_side_by_side(name, "fuse");
    }
}

/// Two devices on one file, each with bytes of its own, which no other gets, whichever of becket's processes
/// dies.
fn are_written_side_by_side(name: &str, via: &str) {
    if !ready(name) {
        return;
    }
    let place = scratch();
    disk(&place);
    let reported = place.json(["attach", "--via", via, "disk.img/p2", "disk.img/p1/dir/nested.img"]);
    let devices = reported["devices"].as_array().unwrap();
    for (info, byte) in devices.iter().zip([2, 1]) {
        assert_eq!(info["read_only"], json!(false), "{info}");
        let device = fs::OpenOptions::new().write(true).open(text(info, "device")).unwrap();
        device.write_all_at(&[byte; 8192], 0).unwrap();
        device.sync_all().unwrap();
    }
    let all_are_kept = |when: &str| {
        for taken in [
            "disk.img",
            "disk.img/p1",
            "disk.img/p2",
            "disk.img/by-label/second",
            "disk.img/p1/dir/nested.img",
        ] {
            for how in [&["attach"][..], &["attach", "-r"]] {
                let ran = place.run([how, &["--via", via, taken]].concat());
                assert!(ran.code == 1 && ran.err.contains("the same bytes"), "{when}, {taken}: {ran:?}");
            }
        }
    };
    all_are_kept("attached");
    if !place.devices()[0]["worker_pid"].is_null() {
        let recovered = |from: u64| {
            let done = || {
                place
                    .devices()
                    .iter()
                    .all(|info| info["state"] == "live" && info["recoveries"] == json!(from))
            };
            assert!(wait_until(Duration::from_secs(60), done), "{:?}", place.devices());
        };
        kill_worker(&place);
        all_are_kept("while the worker is replaced");
        recovered(1);
        all_are_kept("by the next worker");
        // A new program: the supervisor is replaced, and the worker with it.
        let mut server = place.becket();
        let server = server.args(["serve", "--takeover", "--until-idle"]);
        let mut server = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        recovered(2);
        all_are_kept("by the next server");
        place.ok(["detach", "disk.img/p1/dir/nested.img"]);
        place.ok(["attach", "--via", via, "disk.img/p1"]);
        place.ok(["detach", "--all"]);
        ended(&mut server);
    }
    place.ok(["detach", "--all"]);
    let bytes = fs::read(place.path("disk.img")).unwrap();
    let (start, _) = image::GPT_PARTITIONS[1];
    assert!(bytes[(start * 512) as usize..][..8192].iter().all(|byte| *byte == 2));
    let device = place.attach(&place.path("disk.img/p1/dir/nested.img"), &["--via", via, "-r"]);
    assert!(fs::read(device).unwrap()[..8192].iter().all(|byte| *byte == 1));
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_server_keeps_as_many_decoded_bytes_as_it_may() {
    let name = "nested::fuse_server_keeps_as_many_decoded_bytes_as_it_may";
    if !require_fuse(name) || !require_tools(name, &["mksquashfs", "dd"]) {
        return;
    }
    // 24 MiB in 192 blocks, read twice past the page cache: what does not fit is decoded again, also by the
    // next worker.
    for (size, fits) in [("64M", true), ("16M", false)] {
        let place = scratch();
        let bytes: Vec<u8> = (0..24 * MIB).map(|n| (n / 7) as u8).collect();
        fs::write(place.dir("tree").join("big.img"), bytes).unwrap();
        let tree = place.path("tree");
        tool(Command::new("mksquashfs").arg(&tree).arg(place.path("fs.squashfs")).arg("-quiet"));
        let mut server = place.becket();
        let server = server.args(["serve", "--cache-size", size, "--until-idle"]);
        let mut server = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        assert!(wait_until(Duration::from_secs(30), || place.runtime().join("control").exists()));
        let device = place.attach(&place.path("fs.squashfs/big.img"), &["--via", "fuse"]);
        let blocks = || {
            for _ in 0..2 {
                let from = format!("if={}", device.display());
                tool(Command::new("dd").args([
                    &from,
                    "of=/dev/null",
                    "bs=1M",
                    "iflag=direct",
                    "status=none",
                ]));
            }
            let reported = place.json(["stat", device.to_str().unwrap()]);
            reported["devices"][0]["decoded"]["blocks"].as_u64().unwrap()
        };
        for worker in ["the first", "the next"] {
            let decoded = blocks();
            assert_eq!(decoded == 192, fits, "{worker} worker decoded {decoded} blocks with {size}");
            kill_worker(&place);
            let recovered =
                || place.devices()[0]["state"] == "live" && place.devices()[0]["recoveries"] == json!(1);
            assert!(worker == "the next" || wait_until(Duration::from_secs(60), recovered));
        }
        place.ok(["detach", "--all"]);
        ended(&mut server);
    }
}

/// As bgzip(1) makes it, which guests do not have: members of gzip with a field that says how long they are.
fn bgzf(place: &Scratch, bytes: &[u8]) -> Vec<u8> {
    let piece = place.path("piece");
    bytes
        .chunks(60_000)
        .chain([&[][..]])
        .flat_map(|chunk| {
            fs::write(&piece, chunk).unwrap();
            let gzip = Command::new("gzip").args(["-1", "-n", "-c"]).arg(&piece).output().unwrap().stdout;
            let (head, body) = gzip.split_at(10);
            let len = (gzip.len() + 8 - 1) as u16;
            let [low, high] = len.to_le_bytes();
            [&head[..3], &[4], &head[4..], &[6, 0, b'B', b'C', 2, 0, low, high], body].concat()
        })
        .collect()
}

/// A whole disk, compressed: its partitions are there, and one of them by itself.
#[test]
fn a_compressed_disk_is_decoded() {
    let name = "nested::a_compressed_disk_is_decoded";
    if !require_ublk(name) {
        return;
    }
    if !ready(name) {
        return;
    }
    let place = scratch();
    disk(&place);
    let packed = place.path("disk.img.gz");
    fs::write(&packed, bgzf(&place, &fs::read(place.path("disk.img")).unwrap())).unwrap();
    let reported = place.json(["attach", "--via", "ublk", "disk.img.gz"]);
    let info = &reported["devices"][0];
    assert_eq!(info["read_only"], json!(true));
    assert!(info["warnings"].to_string().contains("compressed by gzip"), "{info}");
    let device = Path::new(text(info, "device"));
    assert_eq!(crc_whole(device), crc_whole(&place.path("disk.img")));
    let (start, len) = image::GPT_PARTITIONS[1];
    let second = crc(&place.path("disk.img"), start * 512, len * 512);
    let part = Path::new(text(&info["partitions"][1], "device"));
    assert_eq!(crc_whole(part), (second, len * 512));
    place.ok(["detach", "--all"]);
    let reported = place.json(["attach", "--via", "ublk", "disk.img.gz/p2"]);
    assert_eq!(crc_whole(Path::new(text(&reported["devices"][0], "device"))), (second, len * 512));
    place.ok(["detach", "--all"]);
    // The compressed bytes themselves.
    let reported = place.json(["attach", "--via", "ublk", "--format", "raw", "-r", "disk.img.gz"]);
    // Its last block is filled up with zeroes.
    let whole = place.path("whole");
    fs::copy(&packed, &whole).unwrap();
    let len = fs::metadata(&packed).unwrap().len();
    fs::File::options().write(true).open(&whole).unwrap().set_len(len.next_multiple_of(512)).unwrap();
    assert_eq!(crc_whole(Path::new(text(&reported["devices"][0], "device"))), crc_whole(&whole));
    place.ok(["detach", "--all"]);
}
