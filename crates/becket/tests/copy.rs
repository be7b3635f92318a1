//! `becket copy`: the copy is the image, whatever it was stored as; and a failed one leaves nothing.
//! Never attaches anything but, for a device to write to, a loop device by losetup.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs::{self, File},
    os::{
        fd::AsFd as _,
        unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, chown, symlink},
    },
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use becket_testkit::{
    Scratch, image, require_loop, require_plain_machine, require_root, require_tools, tool,
};
use becket_uapi::lock::{LockKind, ofd_lock};
use common::scratch;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

const MIB: u64 = 1 << 20;
/// Not a whole number of sectors.
const LEN: u64 = 5 * MIB + 1000;

/// A file with data, zeroes and holes of all lengths, in no unit.
fn ragged(path: &Path, len: u64, seed: u64) {
    let random = &mut SmallRng::seed_from_u64(seed);
    let file = File::create(path).unwrap();
    file.set_len(len).unwrap();
    let mut at = 0;
    while at < len {
        let some = random.random_range(1..300_000).min(len - at);
        let bytes = match random.random_range(0..3) {
            0 => image::random_bytes(usize::try_from(some).unwrap(), random.random()),
            1 => vec![0; usize::try_from(some).unwrap()],
            _ => Vec::new(),
        };
        file.write_all_at(&bytes, at).unwrap();
        at += some + if random.random_bool(0.1) { 3 * MIB } else { 0 };
    }
}

#[track_caller]
fn assert_same(place: &Scratch, one: &str, other: &str) {
    assert!(fs::read(place.path(one)).unwrap() == fs::read(place.path(other)).unwrap(), "{one} and {other}");
}

#[track_caller]
fn assert_qcow2_is(place: &Scratch, qcow2: &str, raw: &str) {
    tool(Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(place.path(qcow2)));
    let mut compare = Command::new("qemu-img");
    compare.args(["compare", "-f", "qcow2", "-F", "raw"]);
    tool(compare.arg(place.path(qcow2)).arg(place.path(raw)));
}

/// Locks a file or device as QEMU does that writes to it: uses reading and writing, and shares neither
/// writing nor resizing.
fn as_qemu(path: &Path) -> File {
    let file = File::options().read(true).write(true).open(path).unwrap();
    for byte in [100, 101, 201, 203] {
        assert!(ofd_lock(file.as_fd(), LockKind::Shared, byte, 1).unwrap());
    }
    file
}

fn names(place: &Scratch) -> Vec<String> {
    let entries = fs::read_dir(place.path("")).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    // The test kit keeps what commands print.
    names.retain(|name| !name.starts_with(".err") && !name.starts_with(".out"));
    names.sort();
    names
}

#[test]
fn a_copy_is_the_image_whatever_it_was_stored_as() {
    let name = "copy::a_copy_is_the_image_whatever_it_was_stored_as";
    if !require_plain_machine(name, &["qemu-img", "xz", "bgzip"]) {
        return;
    }
    let place = scratch();
    let path = |name: &str| place.path(name);
    ragged(&path("raw"), LEN, 1);
    for (made, options) in [("plain.qcow2", &[][..]), ("packed.qcow2", &["-c"])] {
        let mut convert = Command::new("qemu-img");
        convert.args(["convert", "-f", "raw", "-O", "qcow2"]).args(options);
        tool(convert.arg(path("raw")).arg(path(made)));
    }
    tool(Command::new("xz").args(["-0", "-k", "--block-size=700KiB"]).arg(path("raw")));
    tool(Command::new("sh").args(["-c", "bgzip -c < raw > raw.gz"]).current_dir(path("")));
    for (number, source) in ["raw", "raw.xz", "raw.gz", "plain.qcow2", "packed.qcow2"].iter().enumerate() {
        for more in [&[][..], &["--sparse"]] {
            let (raw, qcow2) =
                (format!("{number}{}.raw", more.len()), format!("{number}{}.qcow2", more.len()));
            place.ok(["copy", source, &raw].iter().chain(more));
            place.ok(["copy", source, &qcow2].iter().chain(more));
            let len = fs::metadata(path(&raw)).unwrap().len();
            // A qcow2 counts in sectors.
            assert_eq!(len, if source.ends_with("qcow2") { LEN.next_multiple_of(512) } else { LEN });
            File::options().write(true).open(path(&raw)).unwrap().set_len(LEN).unwrap();
            assert_same(&place, "raw", &raw);
            assert_qcow2_is(&place, &qcow2, "raw");
            if !more.is_empty() {
                let sectors = |name: &str| fs::metadata(path(name)).unwrap().blocks();
                assert!(sectors(&raw) <= sectors("raw"), "{source}: {} of {}", sectors(&raw), sectors("raw"));
            }
        }
        let mut shell = Command::new("sh");
        place.prepare(shell.args(["-c", &format!("\"$BECKET\" copy {source} - > stream")]));
        let ran = place.finish(shell.env("BECKET", env!("CARGO_BIN_EXE_becket")));
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{source}");
        File::options().write(true).open(path("stream")).unwrap().set_len(LEN).unwrap();
        assert_same(&place, "raw", "stream");
    }
    place.ok(["copy", "--to", "raw", "raw", "named.qcow2"]);
    assert_same(&place, "raw", "named.qcow2");
}

#[test]
fn holes_are_not_read() {
    let name = "copy::holes_are_not_read";
    if !require_plain_machine(name, &["qemu-img"]) {
        return;
    }
    let place = scratch();
    // To read it would take hours.
    image::sparse(&place.path("raw"), 4 << 40);
    let file = File::options().write(true).open(place.path("raw")).unwrap();
    for at in [0, 5 << 30, (4 << 40) - 4096] {
        file.write_all_at(&[9; 4096], at).unwrap();
    }
    let reported = place.json(["copy", "raw", "copy"]);
    assert!(reported["copied"]["allocated"].as_u64().unwrap() < MIB, "{reported}");
    for at in [0, 5 << 30, (4 << 40) - 4096] {
        let mut bytes = [0; 4096];
        File::open(place.path("copy")).unwrap().read_exact_at(&mut bytes, at).unwrap();
        assert_eq!(bytes, [9; 4096]);
    }
    place.ok(["copy", "raw", "copy.qcow2"]);
    tool(Command::new("qemu-img").args(["check"]).arg(place.path("copy.qcow2")));
    place.ok(["copy", "copy.qcow2", "again"]);
    assert!(fs::metadata(place.path("again")).unwrap().blocks() < 2048);
    place.ok(["copy", "again", "again.qcow2"]);
    assert_same(&place, "copy.qcow2", "again.qcow2");
}

#[test]
fn a_failed_copy_leaves_nothing() {
    let name = "copy::a_failed_copy_leaves_nothing";
    if !require_plain_machine(name, &["xz"]) {
        return;
    }
    let place = scratch();
    image::random(&place.path("raw"), 5 * MIB, 3);
    tool(Command::new("xz").args(["-0", "-k", "--block-size=512KiB"]).arg(place.path("raw")));
    fs::write(place.path("old"), "old").unwrap();
    let before = names(&place);
    for target in ["new", "new.qcow2", "old"] {
        let mut copy = place.becket();
        let mut copy =
            copy.args(["copy", "--force", "raw.xz", target]).stderr(Stdio::null()).spawn().unwrap();
        thread::sleep(Duration::from_millis(30));
        copy.kill().unwrap();
        copy.wait().unwrap();
        if names(&place) != before || fs::read(place.path("old")).unwrap() != b"old" {
            // It was complete when the signal came.
            let shown = place.becket().args(["copy", target, "-"]).output().unwrap();
            assert!(shown.stdout == fs::read(place.path("raw")).unwrap(), "{target} is a part of the image");
            fs::write(place.path("old"), "old").unwrap();
            names(&place).iter().filter(|name| name.starts_with("new")).for_each(|name| {
                fs::remove_file(place.path(name)).unwrap();
            });
            assert_eq!(names(&place), before, "{target}");
        }
    }
    // A block in the middle is damaged.
    let file = File::options().write(true).open(place.path("raw.xz")).unwrap();
    file.write_all_at(&[0x55; 4096], 3 * MIB).unwrap();
    for target in ["new", "new.qcow2", "old"] {
        let ran = place.run(["copy", "--force", "raw.xz", target]);
        assert!(ran.code == 1 && ran.err.contains("cannot read raw.xz"), "{ran:?}");
        assert_eq!(names(&place), before, "{target}: {ran:?}");
    }
    let mut stream = place.becket();
    let streamed = stream.args(["copy", "raw.xz", "-"]).output().unwrap();
    assert_eq!(streamed.status.code(), Some(1));
    let whole = fs::read(place.path("raw")).unwrap();
    assert!(whole.starts_with(&streamed.stdout), "what came before is right");
}

#[test]
fn what_exists_is_replaced_only_by_force() {
    let place = scratch();
    image::random(&place.path("raw"), MIB, 4);
    fs::write(place.path("old"), "old").unwrap();
    fs::write(place.path("target"), "target").unwrap();
    symlink("target", place.path("link")).unwrap();
    symlink("nowhere", place.path("dangling")).unwrap();
    place.dir("dir");
    for target in ["old", "link", "dangling", "dir", "/dev/null"] {
        let ran = place.run(["copy", "raw", target]);
        assert_eq!(ran.code, 1, "{target}: {ran:?}");
        assert_eq!(ran.err.contains("--force"), target != "dir", "{target}: {ran:?}");
    }
    assert_eq!(fs::read_to_string(place.path("old")).unwrap(), "old");
    for target in ["old", "link", "dangling"] {
        place.ok(["copy", "--force", "raw", target]);
        assert_same(&place, "raw", target);
        assert!(!fs::symlink_metadata(place.path(target)).unwrap().is_symlink());
    }
    assert_eq!(fs::read_to_string(place.path("target")).unwrap(), "target");
    place.ok(["copy", "--force", "raw", "raw"]);
    assert_eq!(fs::metadata(place.path("raw")).unwrap().len(), MIB, "of itself, too");
    place.ok(["copy", "--force", "raw", "/dev/null"]);
    let long = "n".repeat(255);
    place.ok(["copy", "raw", &long]);
    place.ok(["copy", "--force", "raw", &long]);
    assert_eq!(place.run(["copy", "--json", "raw", "-"]).code, 2);
    assert_eq!(place.run(["copy", "nothing", "new"]).code, 1);
    assert!(!place.path("new").exists());
}

#[test]
fn a_part_does_not_replace_the_image_around_it() {
    if !require_tools("copy::a_part_does_not_replace_the_image_around_it", &["gzip", "sfdisk"]) {
        return;
    }
    let place = scratch();
    image::gpt(&place.path("disk.img"), 8 * MIB);
    tool(Command::new("gzip").arg("--keep").arg(place.path("disk.img")));
    fs::hard_link(place.path("disk.img"), place.path("other")).unwrap();
    symlink("disk.img", place.path("link")).unwrap();
    for (file, target) in [("disk.img", "disk.img"), ("disk.img", "other"), ("disk.img.gz", "disk.img.gz")] {
        let before = fs::read(place.path(file)).unwrap();
        let part = format!("{file}/p1");
        for words in [&["copy", "--force"][..], &["copy", "--force", "--shared"]] {
            let ran = place.run([words, &[&part, target]].concat());
            assert_eq!(ran.code, 1, "{words:?} {part} {target}: {ran:?}");
            assert!(ran.err.contains("it is copied from"), "{ran:?}");
            assert!(fs::read(place.path(target)).unwrap() == before, "{target} was changed");
        }
    }
    // A link is replaced itself, and the image stays.
    place.ok(["copy", "--force", "disk.img/p1", "link"]);
    assert_same(&place, "disk.img", "other");
}

#[test]
fn a_device_gets_every_byte() {
    let name = "copy::a_device_gets_every_byte";
    if !require_root(name) || !require_plain_machine(name, &["losetup"]) || !require_loop(name) {
        return;
    }
    let place = scratch();
    ragged(&place.path("raw"), 6 * MIB, 5);
    fs::write(place.path("disk"), vec![0xff; 8 << 20]).unwrap();
    let mut losetup = Command::new("losetup");
    let device = tool(losetup.args(["--find", "--show"]).arg(place.path("disk")));
    let device = device.trim().to_owned();
    let refused = place.run(["copy", "raw", &device]);
    let copied = place.run(["copy", "--force", "raw", &device]);
    image::sparse(&place.path("large"), 9 << 20);
    let too_large = place.run(["copy", "--force", "large", &device]);
    let qcow2 = place.run(["copy", "--force", "--to", "qcow2", "raw", &device]);
    let itself = place.run(["copy", "--force", &device, &device]);
    let shared = place.run(["copy", "--force", "--shared", &device, &device]);
    let locked = as_qemu(Path::new(&device));
    let used = place.run(["copy", "--force", "raw", &device]);
    drop(locked);
    let over = tool(Command::new("losetup").args(["--find", "--show", &device]));
    let below = place.run(["copy", "--force", "raw", &device]);
    tool(Command::new("losetup").args(["--detach", over.trim()]));
    tool(Command::new("losetup").args(["--detach", &device]));
    assert_eq!(
        (refused.code, copied.code, too_large.code, qcow2.code),
        (1, 0, 1, 1),
        "{refused:?} {copied:?} {too_large:?} {qcow2:?}"
    );
    for ran in [itself, shared, used, below] {
        assert!(ran.code == 1 && (ran.err.contains("in use") || ran.err.contains("holds")), "{ran:?}");
    }
    let disk = fs::read(place.path("disk")).unwrap();
    assert!(disk[..6 << 20] == fs::read(place.path("raw")).unwrap(), "zeroes are written, too");
    assert!(disk[6 << 20..].iter().all(|byte| *byte == 0xff), "the rest stays");
}

#[test]
fn a_file_in_use_is_not_replaced() {
    let place = scratch();
    image::random(&place.path("raw"), MIB, 6);
    fs::write(place.path("old"), "old").unwrap();
    let locked = as_qemu(&place.path("old"));
    let ran = place.run(["copy", "--force", "raw", "old"]);
    assert!(ran.code == 1 && ran.err.contains("in use"), "{ran:?}");
    assert_eq!(fs::read_to_string(place.path("old")).unwrap(), "old");
    drop(locked);
    place.ok(["copy", "--force", "raw", "old"]);
    assert_same(&place, "raw", "old");
    // Of itself, too, but not under its writer.
    place.ok(["copy", "--force", "raw", "raw"]);
    let _locked = as_qemu(&place.path("raw"));
    let ran = place.run(["copy", "--force", "--shared", "raw", "raw"]);
    assert!(ran.code == 1 && ran.err.contains("in use"), "{ran:?}");
}

#[test]
fn what_replaces_a_file_is_for_the_same_users() {
    let place = scratch();
    image::random(&place.path("raw"), MIB, 7);
    let path = |name: &str| place.path(name);
    fs::write(path("old"), "old").unwrap();
    let owner = rustix::process::geteuid().is_root().then_some(1);
    chown(path("old"), owner, owner).unwrap();
    fs::set_permissions(path("old"), fs::Permissions::from_mode(0o600)).unwrap();
    let seen = |name: &str| {
        let stat = fs::metadata(path(name)).unwrap();
        (stat.mode(), stat.uid(), stat.gid())
    };
    let before = seen("old");
    place.ok(["copy", "--force", "raw", "old"]);
    assert_eq!(seen("old"), before);
    assert_same(&place, "raw", "old");
    // Read by user 1, too: entries of tag, permissions and user.
    let acl: Vec<u8> = [(1, 6, u32::MAX), (2, 4, 1), (4, 0, u32::MAX), (16, 4, u32::MAX), (32, 0, u32::MAX)]
        .iter()
        .flat_map(|&(tag, allowed, user): &(u16, u16, u32)| {
            [&tag.to_le_bytes()[..], &allowed.to_le_bytes(), &user.to_le_bytes()].concat()
        })
        .collect();
    let acl = [&2_u32.to_le_bytes()[..], &acl].concat();
    let name = "system.posix_acl_access";
    if rustix::fs::setxattr(path("old"), name, &acl, rustix::fs::XattrFlags::empty()).is_err() {
        return;
    }
    place.ok(["copy", "--force", "raw", "old"]);
    let mut copied = vec![0; 256];
    let len = rustix::fs::getxattr(path("old"), name, &mut copied[..]).unwrap();
    assert_eq!(copied[..len], acl);
}

#[test]
fn a_copy_is_as_long_as_the_image() {
    let name = "copy::a_copy_is_as_long_as_the_image";
    if !require_plain_machine(name, &["mkfs.ext4"]) {
        return;
    }
    let place = scratch();
    place.dir("dir");
    for (file, start) in [("hole", ""), ("tail", "some")] {
        let path = place.path("dir").join(file);
        fs::write(&path, start).unwrap();
        File::options().write(true).open(path).unwrap().set_len(1_000_001).unwrap();
    }
    fs::write(place.path("dir/short"), "short").unwrap();
    let mut mkfs = Command::new("mkfs.ext4");
    tool(mkfs.args(["-q", "-d", "dir", "disk", "4M"]).current_dir(place.path("")));
    for file in ["hole", "tail", "short"] {
        place.ok(["copy", &format!("disk/{file}"), file]);
        assert_same(&place, &format!("dir/{file}"), file);
    }
}

#[test]
fn a_pipe_whose_reader_goes_is_a_failure_and_standard_output_one_without_a_message() {
    let name = "copy::a_pipe_whose_reader_goes_is_a_failure_and_standard_output_one_without_a_message";
    if !require_plain_machine(name, &["mkfifo", "head"]) {
        return;
    }
    let place = scratch();
    image::random(&place.path("raw"), 5 * MIB, 8);
    tool(Command::new("mkfifo").arg(place.path("fifo")));
    let mut head = Command::new("head");
    let head = head.args(["-c", "1"]).arg(place.path("fifo")).stdout(Stdio::null()).spawn();
    let ran = place.run(["copy", "--force", "raw", "fifo"]);
    head.unwrap().wait().unwrap();
    assert!(ran.code == 1 && ran.err.contains("cannot write fifo"), "{ran:?}");
    let mut shell = Command::new("sh");
    place.prepare(shell.args(["-c", "(\"$BECKET\" copy raw -; echo $? >&2) | head -c 1 >/dev/null"]));
    let ran = place.finish(shell.env("BECKET", env!("CARGO_BIN_EXE_becket")));
    assert_eq!((ran.err.trim(), ran.code), ("1", 0), "it is not complete, which needs no message: {ran:?}");
}
