//! Locks, against other becket descriptions, against locks as QEMU takes them, and against QEMU itself.
//! It never relies on process identity: open file descriptions are what excludes each other.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;

use crate::common::{Dir, dir, file, have, open, open_read_only, skip};
use becket_image::{Error, ErrorKind, OpenOptions, Opened};
use becket_uapi::lock::{Kind, ofd_lock, ofd_test};

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
    assert_in_use(open(&path), "allows nobody else to write to it (lock byte 201)");
    assert_in_use(open_read_only(&path), "writes to it (lock byte 101)");
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
    let passed_on = opened.files[0].buffered.try_clone().unwrap();
    drop(opened);
    assert_in_use(open(&path), "write");
    drop(passed_on);
    open(&path).unwrap();
}

#[test]
fn the_bytes_are_those_that_qemu_knows() {
    let (_dir, path) = image();
    let other = File::open(&path).unwrap();
    let locked = || -> Vec<u64> {
        (0..512).filter(|byte| ofd_test(other.as_fd(), Kind::Exclusive, *byte, 1).unwrap()).collect()
    };
    assert_eq!(locked(), [0; 0]);
    let writer = open(&path).unwrap();
    assert_eq!(locked(), [100, 101, 201, 203]);
    assert!(!ofd_test(other.as_fd(), Kind::Shared, 0, 0).unwrap(), "only shared locks are held");
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
    // Byte that somebody else holds; what it does to a writer and to a reader.
    for (byte, writer, reader) in [
        (100, None, None),
        (101, Some("writes to it"), Some("writes to it")),
        (103, Some("resizes it"), Some("resizes it")),
        (200, Some("nobody else to read"), Some("nobody else to read")),
        (201, Some("nobody else to write"), None),
        (203, None, None),
    ] {
        let qemu = File::open(&path).unwrap();
        assert!(ofd_lock(qemu.as_fd(), Kind::Shared, byte, 1).unwrap());
        for (open, expected) in [(open as fn(&Path) -> _, writer), (open_read_only, reader)] {
            match (open(&path), expected) {
                (result, Some(why)) => assert_in_use(result, why),
                (result, None) => drop(result.unwrap_or_else(|error| panic!("byte {byte}: {error}"))),
            }
        }
        open_shared(&path).unwrap();
    }
    let foreign = File::options().write(true).open(&path).unwrap();
    assert!(ofd_lock(foreign.as_fd(), Kind::Exclusive, 0, 0).unwrap());
    assert_in_use(open(&path), "exclusively");
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
