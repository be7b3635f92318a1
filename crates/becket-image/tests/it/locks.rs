//! Locks, against other becket descriptions, against locks as QEMU takes them, and against QEMU itself.
//! It never relies on process identity: open file descriptions are what excludes each other.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;

use crate::common::{Dir, dir, file, have, open, open_read_only, skip, source_of};
use becket_image::{Error, ErrorKind, OpenOptions, Opened};
use becket_uapi::lock::{LockKind, ofd_lock, ofd_test};

fn image() -> (Dir, PathBuf) {
    let dir = dir();
    let path = file(dir.path(), "disk.img", 1 << 20);
    (dir, path)
}

fn open_shared(path: &Path) -> Result<Opened, Error> {
    becket_image::open(path, &OpenOptions { shared: true, ..OpenOptions::default() })
}

/// Asserts that the image is in use, for a reason with these words.
fn assert_in_use(result: Result<Opened, Error>, why: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InUse, "{error}");
    assert!(error.to_string().contains(why), "{error}");
    assert!(error.hint().unwrap().contains("--shared"));
}

#[test]
fn one_writer_or_many_readers() {
    let (_dir, path) = image();
    let writer = open(&path).unwrap();
    assert_in_use(open(&path), "another becket device writes to the same bytes");
    assert_in_use(open_read_only(&path), "another becket device writes to the same bytes");
    drop(writer);
    let readers = [open_read_only(&path).unwrap(), open_read_only(&path).unwrap()];
    assert_in_use(open(&path), "allows nobody else to write to it");
    drop(readers);
    open(&path).unwrap();
}

#[test]
fn a_refused_open_leaves_no_lock_behind() {
    let (_dir, path) = image();
    let reader = open_read_only(&path).unwrap();
    assert_in_use(open(&path), "write");
    open_read_only(&path).expect("the refused writer is gone without a trace");
    drop(reader);
}

#[test]
fn of_many_who_come_at_once_one_writes_at_most() {
    let (_dir, path) = image();
    for _ in 0..10 {
        let start = Barrier::new(4);
        let race = || {
            start.wait();
            open(&path).map_err(|error| assert_eq!(error.kind(), ErrorKind::InUse, "{error}"))
        };
        // All results are kept until all have come: a winner that is gone excludes nobody.
        let results: Vec<_> = std::thread::scope(|scope| {
            let racers: Vec<_> = (0..4).map(|_| scope.spawn(race)).collect();
            racers.into_iter().map(|racer| racer.join().unwrap()).collect()
        });
        assert!(results.iter().filter(|result| result.is_ok()).count() <= 1);
    }
}

#[test]
fn shared_stands_beside_everybody_but_is_seen() {
    let (_dir, path) = image();
    let writer = open(&path).unwrap();
    let shared = open_shared(&path).unwrap();
    drop(writer);
    assert_in_use(open(&path), "writes to it (lock byte 101)");
    open_shared(&path).unwrap();
    drop(shared);
    open(&path).unwrap();
}

#[test]
fn the_lock_goes_where_the_descriptor_goes() {
    let (_dir, path) = image();
    let opened = open(&path).unwrap();
    let passed_on = source_of(&opened, 0).buffered.try_clone().unwrap();
    drop(opened);
    assert_in_use(open(&path), "write");
    drop(passed_on);
    open(&path).unwrap();
}

#[test]
fn what_is_given_up_is_free_though_somebody_still_holds_the_descriptor() {
    let (_dir, path) = image();
    let opened = open(&path).unwrap();
    let held = source_of(&opened, 0).buffered.try_clone().unwrap();
    opened.sources[0].unlock();
    drop(opened);
    open(&path).unwrap();
    drop(held);
}

#[test]
fn the_bytes_are_those_that_qemu_knows() {
    let (_dir, path) = image();
    let other = File::open(&path).unwrap();
    let locked = || -> Vec<u64> {
        (0..512).filter(|byte| ofd_test(other.as_fd(), LockKind::Exclusive, *byte, 1).unwrap()).collect()
    };
    assert_eq!(locked(), [0; 0]);
    let writer = open(&path).unwrap();
    assert_eq!(locked(), [100, 101, 201, 203]);
    assert!(!ofd_test(other.as_fd(), LockKind::Shared, 0, 1 << 61).unwrap(), "only shared locks are held");
    drop(writer);
    let _reader = open_read_only(&path).unwrap();
    assert_eq!(locked(), [100, 201, 203]);
    drop(_reader);
    let _shared = open_shared(&path).unwrap();
    assert_eq!(locked(), [100, 101]);
}

#[test]
fn locks_as_qemu_takes_them_are_respected() {
    let (_dir, path) = image();
    // Byte that another process holds; what it does to a writer and to a reader.
    for (byte, writer, reader) in [
        (100, None, None),
        (101, Some("writes to it"), Some("writes to it")),
        (103, Some("resizes it"), Some("resizes it")),
        (200, Some("nobody else to read"), Some("nobody else to read")),
        (201, Some("nobody else to write"), None),
        (203, None, None),
    ] {
        let qemu = File::open(&path).unwrap();
        assert!(ofd_lock(qemu.as_fd(), LockKind::Shared, byte, 1).unwrap());
        for (open, expected) in [(open as fn(&Path) -> _, writer), (open_read_only, reader)] {
            match (open(&path), expected) {
                (result, Some(why)) => assert_in_use(result, why),
                (result, None) => drop(result.unwrap_or_else(|error| panic!("byte {byte}: {error}"))),
            }
        }
        open_shared(&path).unwrap();
    }
    let foreign = File::options().write(true).open(&path).unwrap();
    assert!(ofd_lock(foreign.as_fd(), LockKind::Exclusive, 0, 0).unwrap());
    assert_in_use(open(&path), "exclusively");
}

/// A disk with an MBR of four partitions: two of a mebibyte behind each other, the first of which has an MBR
/// and a partition of its own; and two that share a page only with each other.
fn parts() -> (Dir, PathBuf) {
    let (dir, path) = image();
    let disk = File::options().write(true).open(&path).unwrap();
    disk.set_len(4 << 20).unwrap();
    let table = |at: u64, parts: &[(u32, u32)]| {
        let mut sector = [0; 512];
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        for (entry, (start, len)) in sector[446..].chunks_mut(16).zip(parts) {
            entry[4] = 0x83;
            entry[8..12].copy_from_slice(&start.to_le_bytes());
            entry[12..].copy_from_slice(&len.to_le_bytes());
        }
        disk.write_all_at(&sector, at).unwrap();
    };
    table(0, &[(8, 2048), (2056, 2048), (4104, 1001), (5105, 1000)]);
    table(8 * 512, &[(64, 64)]);
    (dir, path)
}

#[test]
fn parts_that_do_not_meet_are_written_side_by_side() {
    let (_dir, path) = parts();
    let [first, second] = ["p1", "p2"].map(|part| path.join(part));
    let locked = || -> Vec<u64> {
        let other = File::open(&path).unwrap();
        (0..512).filter(|byte| ofd_test(other.as_fd(), LockKind::Exclusive, *byte, 1).unwrap()).collect()
    };
    let writers = [open(&first).unwrap(), open(&second).unwrap()];
    assert!(writers.iter().all(|opened| !opened.read_only));
    assert_eq!(locked(), [100, 101, 201, 203], "to QEMU it is an image that is written");
    for taken in [&first, &second, &path, &first.join("p1")] {
        assert_in_use(open(taken), "writes to the same bytes");
        assert_in_use(open_read_only(taken), "writes to the same bytes");
    }
    let [writer, gone] = writers;
    drop(gone);
    let reader = open_read_only(&second).expect("a reader of other bytes");
    open_read_only(&second).expect("another reader");
    assert_in_use(open(&second), "reads the same bytes");
    drop(reader);
    let again = open(&second).unwrap();
    drop(writer);
    assert_in_use(open_read_only(&second), "writes to the same bytes");
    open(&first.join("p1")).expect("inside the one that is free");
    drop(again);
    open(&path).expect("nobody is left");
}

#[test]
fn a_part_of_a_part_keeps_out_all_that_overlap() {
    let (_dir, path) = parts();
    let inner = open(&path.join("p1/p1")).unwrap();
    for meets in [path.join("p1"), path.clone()] {
        assert_in_use(open(&meets), "writes to the same bytes");
    }
    open(&path.join("p2")).unwrap();
    // Descriptors are passed on, and the lock with them.
    let passed_on = source_of(&inner, 0).buffered.try_clone().unwrap();
    drop(inner);
    assert_in_use(open(&path.join("p1")), "writes to the same bytes");
    drop(passed_on);
    open(&path.join("p1")).unwrap();
}

#[test]
fn parts_that_share_a_page_meet() {
    let (_dir, path) = parts();
    let _third = open(&path.join("p3")).unwrap();
    assert_in_use(open(&path.join("p4")), "writes to the same bytes");
    open(&path.join("p2")).expect("its end is that of a page");
}

/// No lock shows whether other processes read a part or the whole of an image.
#[test]
fn strangers_and_readers_keep_writers_of_all_parts_out() {
    let (_dir, path) = parts();
    let [first, second] = ["p1", "p2"].map(|part| path.join(part));
    let reader = open_read_only(&first).unwrap();
    assert_in_use(open(&second), "allows nobody else to write to it (lock byte 201)");
    open_read_only(&second).unwrap();
    drop(reader);

    let qemu = File::open(&path).unwrap();
    assert!(ofd_lock(qemu.as_fd(), LockKind::Shared, 201, 1).unwrap());
    assert_in_use(open(&first), "allows nobody else to write to it");
    drop(qemu);

    // A writer with `shared` asks no question and joins them; it keeps out openers that it could harm.
    let writer = open(&first).unwrap();
    let shared = open_shared(&path).unwrap();
    assert_in_use(open(&second), "with --shared");
    assert_in_use(open_read_only(&second), "with --shared");
    drop(shared);
    open(&second).unwrap();
    drop(writer);
}

#[test]
fn of_parts_that_come_at_once_all_are_let_in() {
    let (_dir, path) = parts();
    for _ in 0..20 {
        let start = Barrier::new(3);
        let come = |part: &str| {
            start.wait();
            open(&path.join(part))
        };
        let come = &come;
        let results: Vec<_> = std::thread::scope(|scope| {
            let racers: Vec<_> = ["p1", "p2", "p3"].map(|part| scope.spawn(move || come(part))).into();
            racers.into_iter().map(|racer| racer.join().unwrap()).collect()
        });
        for result in &results {
            assert!(!result.as_ref().unwrap().read_only);
        }
    }
}

/// `qemu-io` with the image open, waiting for commands.
struct QemuIo(Child);

impl QemuIo {
    fn open(path: &Path, options: &[&str]) -> QemuIo {
        let mut child = Command::new("qemu-io")
            .args(["-f", "raw"])
            .args(options)
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // An answer means that the image is open.
        child.stdin.as_mut().unwrap().write_all(b"length\n").unwrap();
        let answered = BufReader::new(child.stdout.as_mut().unwrap())
            .lines()
            .map_while(Result::ok)
            .any(|line| line.contains("MiB"));
        assert!(answered);
        QemuIo(child)
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn qemu_and_becket_keep_each_other_out() {
    let (_dir, path) = image();
    if !have("qemu-io") {
        return skip("qemu_and_becket_keep_each_other_out", "qemu-io is not installed");
    }
    let qemu_opens = |options: &[&str]| {
        let output = Command::new("qemu-io")
            .args(["-f", "raw"])
            .args(options)
            .args(["-c", "length"])
            .arg(&path)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.success(), !errors.contains("lock"), "{errors}");
        if output.status.success() { Ok(()) } else { Err(errors) }
    };

    let writing = QemuIo::open(&path, &[]);
    assert_in_use(open(&path), "writ");
    drop(writing);
    let reading = QemuIo::open(&path, &["-r"]);
    open_read_only(&path).expect("two readers");
    drop(reading);

    let writer = open(&path).unwrap();
    qemu_opens(&[]).expect_err("qemu must not write beside becket");
    drop(writer);
    let reader = open_read_only(&path).unwrap();
    qemu_opens(&["-r"]).expect("two readers");
    qemu_opens(&[]).expect_err("qemu must not write under a reader");
    drop(reader);
    qemu_opens(&[]).expect("nobody is left");
}
