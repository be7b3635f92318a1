//! qcow2 images, end to end: what is attached is what QEMU reads.
//! Never takes becket's own word for what an image holds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{
    Scratch, crc_whole, image, require_device, require_fuse, require_plain_machine, require_tools,
    require_ublk, tool,
};
use common::{
    disk::{kill_worker, scribble},
    scratch, text,
};
use serde_json::json;
use std::{fs, path::Path, process::Command};

const MIB: u64 = 1 << 20;

fn qemu_img(place: &Scratch, words: &[&str]) {
    tool(Command::new("qemu-img").current_dir(place.path("")).args(words));
}

/// `top.qcow2` over `middle.qcow2`, which is compressed, over `base.raw`.
fn chain(place: &Scratch) {
    image::random(&place.path("base.raw"), 4 * MIB, 1);
    qemu_img(place, &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "first.qcow2", "6M"]);
    let io = |image: &str, command: &str| {
        tool(Command::new("qemu-io").current_dir(place.path("")).args(["-f", "qcow2", "-c", command, image]));
    };
    io("first.qcow2", "write -P 7 1M 1M");
    qemu_img(
        place,
        &["convert", "-c", "-O", "qcow2", "-B", "base.raw", "-F", "raw", "first.qcow2", "middle.qcow2"],
    );
    qemu_img(place, &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "middle.qcow2", "top.qcow2"]);
    io("top.qcow2", "write -P 9 1100k 300k");
    io("top.qcow2", "write -z 3M 200k");
    qemu_img(place, &["convert", "-O", "raw", "top.qcow2", "expected.raw"]);
}

#[test]
fn a_chain_is_attached_as_qemu_reads_it() {
    let name = "qcow2::a_chain_is_attached_as_qemu_reads_it";
    if !require_ublk(name) {
        return;
    }
    is_what_qemu_reads(name, "ublk");
}

#[test]
fn fuse_chain_is_attached_as_qemu_reads_it() {
    let name = "qcow2::fuse_chain_is_attached_as_qemu_reads_it";
    if require_fuse(name) {
        is_what_qemu_reads(name, "fuse");
    }
}

#[test]
fn fuse_a_snapshot_is_attached_and_detached_by_its_name() {
    let name = "qcow2::fuse_a_snapshot_is_attached_and_detached_by_its_name";
    if !require_fuse(name) || !require_plain_machine(name, &["qemu-img", "qemu-io"]) {
        return;
    }
    let place = scratch();
    qemu_img(&place, &["create", "-q", "-f", "qcow2", "d.qcow2", "2M"]);
    let io = |command: &str| {
        tool(
            Command::new("qemu-io")
                .current_dir(place.path(""))
                .args(["-f", "qcow2", "-c", command, "d.qcow2"]),
        );
    };
    io("write -q -P 7 0 1M");
    qemu_img(&place, &["snapshot", "-c", "before", "d.qcow2"]);
    io("write -q -P 9 0 2M");
    let disk = place.ok(["attach", "--via", "fuse", "d.qcow2@before"]).trim().to_owned();
    let read = fs::read(&disk).unwrap();
    assert!(read[..1 << 20].iter().all(|byte| *byte == 7) && read[1 << 20..].iter().all(|byte| *byte == 0));
    let device = place.devices().remove(0);
    assert_eq!(
        (text(&device, "image").ends_with("d.qcow2@before"), &device["read_only"]),
        (true, &json!(true))
    );
    let missing = place.run(["attach", "--via", "fuse", "d.qcow2@after"]);
    assert!(missing.code == 1 && missing.err.contains("it has before"), "{missing:?}");
    assert!(place.ok(["inspect", "d.qcow2"]).contains("1 snapshot: before"));
    place.ok(["copy", "d.qcow2@before", "out.img"]);
    assert!(fs::read(place.path("out.img")).unwrap() == read);
    // Readers do not exclude each other.
    place.ok(["attach", "--via", "fuse", "--name", "again", "d.qcow2@1"]);
    assert_eq!(place.devices().len(), 2);
    place.ok(["detach", "again"]);
    place.ok(["detach", "d.qcow2@before"]);
    assert!(place.devices().is_empty());
}

fn is_what_qemu_reads(name: &str, via: &str) {
    if !require_device(name) || !require_tools(name, &["qemu-img", "qemu-io"]) {
        return;
    }
    let place = scratch();
    chain(&place);
    let reported = place.json(["attach", "--via", via, "top.qcow2"]);
    let info = &reported["devices"][0];
    assert_eq!(info["read_only"], json!(false));
    moves_as_a_plain_image(&place, via, info);
    assert_eq!(crc_whole(Path::new(text(info, "device"))), crc_whole(&place.path("expected.raw")));
    place.ok(["detach", "top.qcow2"]);
    // In more pieces than a message holds.
    qemu_img(&place, &["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "pieces.qcow2", "8M"]);
    let file = place.path("io");
    // Each second cluster is written.
    let writes: String =
        (0..1000).map(|n| format!("write -q -P {} {} 512\n", n % 255 + 1, n * 2048)).collect();
    fs::write(&file, writes).unwrap();
    let input = fs::File::open(&file).unwrap();
    tool(Command::new("qemu-io").args(["-f", "qcow2"]).arg(place.path("pieces.qcow2")).stdin(input));
    qemu_img(&place, &["convert", "-O", "raw", "pieces.qcow2", "expected.raw"]);
    let device = place.attach(&place.path("pieces.qcow2"), &["--via", via]);
    assert_eq!(crc_whole(&device), crc_whole(&place.path("expected.raw")));
    place.ok(["detach", "--all"]);
}

/// Clusters that are stored as they are read take the hot path, whatever else the image has: clusters that
/// are not allocated, compressed ones, room to grow.
fn moves_as_a_plain_image(place: &Scratch, via: &str, info: &serde_json::Value) {
    image::random(&place.path("plain.raw"), MIB, 2);
    let reported = place.json(["attach", "--via", via, "plain.raw"]);
    assert_eq!(info["mode"], reported["devices"][0]["mode"], "{info}");
    place.ok(["detach", "plain.raw"]);
}

#[test]
fn what_cannot_be_attached_says_what_to_do() {
    let name = "qcow2::what_cannot_be_attached_says_what_to_do";
    if !require_device(name) || !require_tools(name, &["qemu-img", "qemu-io"]) {
        return;
    }
    let place = scratch();
    chain(&place);
    let ran = place.run(["attach", "--via", "loop", "top.qcow2"]);
    assert!(ran.code == 1 && ran.err.contains("qemu-img convert -O raw"), "{ran:?}");
    fs::create_dir(place.path("elsewhere")).unwrap();
    fs::rename(place.path("base.raw"), place.path("elsewhere/base.raw")).unwrap();
    fs::rename(place.path("top.qcow2"), place.path("elsewhere/top.qcow2")).unwrap();
    let dir = place.path("");
    let outside = dir.join("middle.qcow2").display().to_string();
    let top = place.path("elsewhere/top.qcow2").display().to_string();
    qemu_img(&place, &["rebase", "-u", "-F", "qcow2", "-b", &outside, &top]);
    let ran = place.run(["ls", &top]);
    assert!(
        ran.code == 1 && ran.err.contains("outside the directory") && ran.err.contains("--backing-dir"),
        "{ran:?}"
    );
    // Allowed there, what lies below that is missing and says so.
    let ran = place.run(["ls", "--backing-dir", dir.to_str().unwrap(), &top]);
    assert!(ran.code == 1 && ran.err.contains("base.raw: there is no such file"), "{ran:?}");
    fs::rename(place.path("elsewhere/base.raw"), place.path("base.raw")).unwrap();
    let reported = place.json(["inspect", "--backing-dir", dir.to_str().unwrap(), &top]);
    assert_eq!(reported["image"]["stored"]["format"], json!("qcow2"));
    assert_eq!(reported["image"]["size"], json!(6 * MIB));
    // As bytes it is a file like any other.
    let reported = place.json(["map", "--format", "raw", &top]);
    assert_eq!(reported["size"], json!(fs::metadata(&top).unwrap().len()));
}

#[test]
fn a_qcow2_is_written_as_qemu_reads_it() {
    let name = "qcow2::a_qcow2_is_written_as_qemu_reads_it";
    if !require_ublk(name) {
        return;
    }
    is_written(name, "ublk");
}

#[test]
fn fuse_qcow2_is_written_as_qemu_reads_it() {
    let name = "qcow2::fuse_qcow2_is_written_as_qemu_reads_it";
    if require_fuse(name) {
        is_written(name, "fuse");
    }
}

/// Writes, zeroes and discards through a device and into the expected bytes beside it, with a worker that is
/// killed on the way or not.
fn is_written(name: &str, via: &str) {
    if !require_device(name) || !require_tools(name, &["qemu-img", "qemu-io", "blkdiscard"]) {
        return;
    }
    // Over FUSE a write that the page cache holds fails when the worker dies, whatever the image.
    let deaths = if via == "ublk" { &[false, true][..] } else { &[false] };
    for killed in deaths.iter().copied() {
        let place = scratch();
        chain(&place);
        let base = crc_whole(&place.path("base.raw"));
        let middle = fs::read(place.path("middle.qcow2")).unwrap();
        let mut expected = fs::read(place.path("expected.raw")).unwrap();
        let reported = place.json(["attach", "--via", via, "top.qcow2"]);
        let info = reported["devices"][0].clone();
        assert_eq!(info["read_only"], json!(false), "{info}");
        moves_as_a_plain_image(&place, via, &info);
        let device = Path::new(text(&info, "device")).to_owned();
        scribble(&device, &mut expected, 60, |round| {
            if killed && round % 20 == 10 {
                kill_worker(&place);
            }
        });
        fs::write(place.path("expected.raw"), &expected).unwrap();
        assert_eq!(crc_whole(&device), crc_whole(&place.path("expected.raw")), "through the device");
        place.ok(["detach", "top.qcow2"]);
        let check = Command::new("qemu-img").arg("check").arg(place.path("top.qcow2")).output().unwrap();
        // 3: unused clusters, which a crash may leave, and nothing else.
        let allowed = if killed { &[0, 3][..] } else { &[0] };
        assert!(check.status.code().is_some_and(|code| allowed.contains(&code)), "{check:?}");
        qemu_img(&place, &["compare", "-q", "top.qcow2", "-f", "qcow2", "-F", "raw", "expected.raw"]);
        assert_eq!(crc_whole(&place.path("base.raw")), base, "nobody writes below");
        assert!(fs::read(place.path("middle.qcow2")).unwrap() == middle, "nobody writes below");
    }
}
