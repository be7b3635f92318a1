//! qcow2 images that a device must not damage, and that must not damage the server: bitmaps, overlaps, absurd
//! sizes, leaks. Never relies on becket for the state of an image: QEMU's tools and the bytes of the file
//! show it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{
    Scratch, crc_whole, in_a_guest, patience, require_device, require_fuse, require_tools, tool,
};
use common::{disk::kill_worker, scratch, text};
use serde_json::json;
use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

const COPIED: u64 = 1 << 63;
const CLUSTER: u64 = 64 << 10;

fn ready(name: &str) -> bool {
    let name = format!("qcow2_guard::{name}");
    require_device(&name) && require_fuse(&name) && require_tools(&name, &["qemu-img", "qemu-io"])
}

fn qemu_img(place: &Scratch, words: &[&str]) {
    tool(Command::new("qemu-img").current_dir(place.path("")).args(words));
}

/// `disk.qcow2`, with a cluster of data.
fn disk(place: &Scratch) {
    qemu_img(place, &["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"]);
    let write = ["-f", "qcow2", "-c", "write -P 1 0 64k", "disk.qcow2"];
    tool(Command::new("qemu-io").current_dir(place.path("")).args(write));
}

fn bytes(place: &Scratch) -> Vec<u8> {
    fs::read(place.path("disk.qcow2")).unwrap()
}

#[track_caller]
fn assert_sound(place: &Scratch) {
    qemu_img(place, &["check", "-q", "disk.qcow2"]);
}

/// Writes a sector at the beginning and one where nothing is allocated.
fn write(device: &Path) -> std::io::Result<()> {
    let file = File::options().read(true).write(true).open(device)?;
    file.write_all_at(&[7; 4096], 0)?;
    file.write_all_at(&[8; 4096], 32 << 20)?;
    file.sync_all()
}

#[test]
fn fuse_bitmaps_survive_whatever_does_not_ask_for_their_end() {
    if !ready("fuse_bitmaps_survive_whatever_does_not_ask_for_their_end") {
        return;
    }
    let place = scratch();
    disk(&place);
    qemu_img(&place, &["bitmap", "--add", "disk.qcow2", "b0"]);
    let before = bytes(&place);
    let unchanged = |what: &str| {
        assert!(bytes(&place) == before, "{what}: the file was changed");
        assert_sound(&place);
    };
    let reply = place.json(["attach", "--via", "fuse", "disk.qcow2"]);
    let info = reply["devices"][0].clone();
    assert_eq!(info["read_only"], json!(true), "{info}");
    assert!(
        info.to_string().contains("persistent bitmap") && info.to_string().contains("--drop-bitmaps"),
        "{info}"
    );
    assert!(write(Path::new(text(&info, "device"))).is_err());
    let ran = place.run(["set", "--read-only", "off", text(&info, "device")]);
    assert!(ran.code == 1 && ran.err.contains("persistent bitmap"), "{ran:?}");
    place.ok(["detach", "--all"]);
    unchanged("attached");
    place.ok(["run", "--via", "fuse", "disk.qcow2", "--", "true"]);
    unchanged("run");
    let reply = place.json(["attach", "--via", "fuse", "--cow", "over.qcow2", "disk.qcow2"]);
    write(Path::new(text(&reply["devices"][0], "device"))).unwrap();
    place.ok(["detach", "--all"]);
    unchanged("below an overlay that becket made");
    qemu_img(&place, &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "disk.qcow2", "top.qcow2"]);
    let reply = place.json(["attach", "--via", "fuse", "top.qcow2"]);
    write(Path::new(text(&reply["devices"][0], "device"))).unwrap();
    place.ok(["detach", "--all"]);
    unchanged("below another image");

    let reply = place.json(["attach", "--via", "fuse", "--drop-bitmaps", "disk.qcow2"]);
    let info = reply["devices"][0].clone();
    assert_eq!(info["read_only"], json!(false), "{info}");
    assert!(info.to_string().contains("first write will remove a persistent bitmap"), "{info}");
    let device = Path::new(text(&info, "device"));
    crc_whole(device);
    place.ok(["set", "--read-only", "on", text(&info, "device")]);
    place.ok(["set", "--read-only", "off", text(&info, "device")]);
    File::options().write(true).open(device).unwrap().sync_all().unwrap();
    place.ok(["detach", "--all"]);
    unchanged("attached with --drop-bitmaps");
    let reply = place.json(["attach", "--via", "fuse", "--drop-bitmaps", "disk.qcow2"]);
    write(Path::new(text(&reply["devices"][0], "device"))).unwrap();
    place.ok(["detach", "--all"]);
    assert_sound(&place);
    let reply = place.json(["attach", "--via", "fuse", "disk.qcow2"]);
    let info = reply["devices"][0].clone();
    assert_eq!(info["read_only"], json!(false), "there are no bitmaps any more: {info}");
    let mut read = [0; 4096];
    let device = File::open(text(&info, "device")).unwrap();
    for (at, byte) in [(0, 7), (4096, 1), (32 << 20, 8)] {
        device.read_exact_at(&mut read, at).unwrap();
        assert!(read == [byte; 4096], "at {at}");
    }
    drop(device);
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_a_line_of_beckettab_drops_bitmaps() {
    if !ready("fuse_a_line_of_beckettab_drops_bitmaps") {
        return;
    }
    let place = scratch();
    disk(&place);
    qemu_img(&place, &["bitmap", "--add", "disk.qcow2", "b0"]);
    let image = place.path("disk.qcow2");
    let lines = format!("kept {0} via=fuse\ndropped {0} via=fuse,drop-bitmaps\n", image.display());
    fs::write(place.path("tab"), lines).unwrap();
    let table = format!("--tab={}", place.path("tab").display());
    for (name, writable) in [("kept", false), ("dropped", true)] {
        let reply = place.json(["attach", &table, name]);
        let info = &reply["devices"][0];
        assert_eq!((&info["name"], &info["read_only"]), (&json!(name), &json!(!writable)), "{info}");
        assert_eq!(write(Path::new(text(info, "device"))).is_ok(), writable, "{name}");
        place.ok(["detach", name]);
        let about = Command::new("qemu-img").args(["info", "--output=json"]).arg(&image).output().unwrap();
        let about = String::from_utf8(about.stdout).unwrap();
        assert_eq!(about.contains("\"b0\""), !writable, "{name}: {about}");
    }
    assert_sound(&place);
}

#[test]
fn fuse_user_cannot_rewrite_the_tables_of_an_image() {
    if !ready("fuse_user_cannot_rewrite_the_tables_of_an_image") {
        return;
    }
    let place = scratch();
    disk(&place);
    let number =
        |at: u64| u64::from_be_bytes(bytes(&place)[at as usize..][..8].try_into().unwrap()) & !COPIED;
    let (l1, block) = (number(40), number(number(48)));
    let l2 = number(l1);
    for (offset, value) in [(l2, l1 | COPIED), (l2, l2 | COPIED), (l2, block | COPIED), (l2 + 8, l2 | COPIED)]
    {
        disk(&place);
        let file = File::options().write(true).open(place.path("disk.qcow2")).unwrap();
        file.write_all_at(&value.to_be_bytes(), offset).unwrap();
        let before = bytes(&place);
        let reply = place.json(["attach", "--via", "fuse", "disk.qcow2"]);
        let info = reply["devices"][0].clone();
        assert_eq!(info["read_only"], json!(true), "{info}");
        assert!(info.to_string().contains("could destroy the image"), "{info}");
        assert!(info.to_string().contains("marked as corrupt now"), "{info}");
        assert!(write(Path::new(text(&info, "device"))).is_err());
        let ran = place.run(["set", "--read-only", "off", text(&info, "device")]);
        assert!(ran.code == 1 && ran.err.contains("qemu-img check -r all"), "{ran:?}");
        place.ok(["detach", "--all"]);
        let mut marked = before.clone();
        marked[79] |= 2;
        assert!(bytes(&place) == marked, "nothing else was changed");
        let reply = place.json(["attach", "--via", "fuse", "disk.qcow2"]);
        let info = reply["devices"][0].clone();
        assert_eq!(info["read_only"], json!(true), "{info}");
        assert!(info.to_string().contains("marked as corrupt: qemu-img check -r all"), "{info}");
        place.ok(["detach", "--all"]);
        // The next image has the same name.
        fs::remove_file(place.path("disk.qcow2")).unwrap();
    }
}

/// A qcow2 that claims 2^`size` bytes, without a byte of data. Its file is a few KiB with a hole for the L1
/// table.
fn claiming(path: &Path, size: u32, cluster_bits: u32) {
    let cluster = 1_u64 << cluster_bits;
    let l1_entries = (1_u64 << size).div_ceil(cluster / 8 * cluster);
    let mut header = vec![0; 104];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"QFI\xfb");
    put(4, &3_u32.to_be_bytes());
    put(20, &cluster_bits.to_be_bytes());
    put(24, &(1_u64 << size).to_be_bytes());
    put(36, &u32::try_from(l1_entries).unwrap().to_be_bytes());
    put(40, &(3 * cluster).to_be_bytes());
    put(48, &cluster.to_be_bytes());
    put(56, &1_u32.to_be_bytes());
    put(96, &4_u32.to_be_bytes());
    put(100, &104_u32.to_be_bytes());
    let file = File::create(path).unwrap();
    let used = 3 + (l1_entries * 8).div_ceil(cluster);
    file.set_len(used * cluster).unwrap();
    file.write_all_at(&header, 0).unwrap();
    file.write_all_at(&(2 * cluster).to_be_bytes(), cluster).unwrap();
    // As many counts as one block holds.
    let counts: Vec<u8> = [0, 1].repeat(used.min(cluster / 2) as usize);
    file.write_all_at(&counts, 2 * cluster).unwrap();
}

/// Peak of the resident memory of a process, in KiB.
fn peak(pid: u64) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn fuse_image_takes_memory_for_what_it_holds_and_not_for_what_it_claims() {
    if !ready("fuse_image_takes_memory_for_what_it_holds_and_not_for_what_it_claims") {
        return;
    }
    let place = scratch();
    disk(&place);
    place.ok(["attach", "--via", "fuse", "--name", "small", "disk.qcow2"]);
    let worker = place.devices()[0]["worker_pid"].as_u64().unwrap();
    let base = peak(worker);
    for (size, cluster_bits) in [(61, 21), (50, 21), (50, 16), (45, 16), (40, 16), (40, 12), (37, 12)] {
        let image = place.path("claims.qcow2");
        claiming(&image, size, cluster_bits);
        let begun = Instant::now();
        let reply = place.json(["attach", "--via", "fuse", "--name", "claims", "claims.qcow2"]);
        let took = begun.elapsed();
        let info = reply["devices"][0].clone();
        assert_eq!(info["worker_pid"].as_u64(), Some(worker), "{info}");
        assert_eq!((info["size"].as_u64(), &info["read_only"]), (Some(1 << size), &json!(false)), "{info}");
        let device = File::options().read(true).write(true).open(text(&info, "device")).unwrap();
        for at in [0, 1 << (size - 1), (1 << size) - 4096] {
            device.write_all_at(&[9; 4096], at).unwrap();
        }
        device.sync_all().unwrap();
        let more = peak(worker).saturating_sub(base);
        println!(
            "2^{size} bytes, clusters of 2^{cluster_bits}: attached in {took:?}, {more} KiB more at most"
        );
        // The guest makes huge pages of everything.
        let most = if in_a_guest() { 64 << 10 } else { 16 << 10 };
        assert!(more < most, "{more} KiB");
        assert!(took < patience(Duration::from_secs(2)), "{took:?}");
        drop(device);
        place.ok(["detach", "claims"]);
        fs::remove_file(image).unwrap();
    }
    place.ok(["detach", "--all"]);
}

/// A worker that is killed leaves clusters that nothing uses; the one after it returns them.
#[test]
fn fuse_leaked_clusters_are_returned_at_detach() {
    if !ready("fuse_leaked_clusters_are_returned_at_detach") {
        return;
    }
    let place = scratch();
    disk(&place);
    let reply = place.json(["attach", "--via", "fuse", "disk.qcow2"]);
    let device = Path::new(text(&reply["devices"][0], "device")).to_owned();
    write(&device).unwrap();
    kill_worker(&place);
    crc_whole(&device);
    place.ok(["detach", "--all"]);
    assert_sound(&place);
    let len = bytes(&place).len() as u64;
    assert!(len < 2 * (32 << 20) + 16 * CLUSTER, "{len}");
}

#[test]
fn fuse_length_of_a_qcow2_is_answered_clearly() {
    if !ready("fuse_length_of_a_qcow2_is_answered_clearly") {
        return;
    }
    let place = scratch();
    disk(&place);
    let reply = place.json(["attach", "--via", "fuse", "disk.qcow2"]);
    let name = text(&reply["devices"][0], "name").to_owned();
    let before = bytes(&place);
    place.ok(["set", "--size-limit", "64M", &name]);
    place.ok(["refresh", &name]);
    for limit in ["32M", "128M", "none"] {
        let ran = place.run(["set", "--size-limit", limit, &name]);
        assert!(ran.code == 1 && ran.err.contains("67108864 bytes long"), "{limit}: {ran:?}");
        assert!(
            ran.err.contains("qemu-img resize") && ran.err.contains("becket detach fuse"),
            "{limit}: {ran:?}"
        );
    }
    assert_eq!(place.devices()[0]["size"], json!(64 << 20));
    place.ok(["detach", "--all"]);
    assert!(bytes(&place) == before);
    // A limit from the start makes it a part, which is only read.
    let reply = place.json(["attach", "--via", "fuse", "--size-limit", "32M", "disk.qcow2"]);
    let info = &reply["devices"][0];
    assert_eq!((&info["size"], &info["read_only"]), (&json!(32 << 20), &json!(true)), "{info}");
    assert!(info.to_string().contains("only the whole of a qcow2 is written"), "{info}");
    place.ok(["detach", "--all"]);
}
