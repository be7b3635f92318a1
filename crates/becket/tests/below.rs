//! Reading below the file system, while others write to the image, empty it, punch it, move it and reuse its blocks:
//! a device never shows bytes that are not the image's, nor such as it no longer has.
//!
//! Needs ublk, and a file system of each kind in a loop device of its own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use becket_testkit::{Scratch, require_device, require_loop, require_tools, require_ublk, tool, wait_until};
use common::{scratch, text};
use serde_json::Value;

const BLOCK: usize = 4096;
const BLOCKS: u64 = 1024;
/// What blocks hold that are not the image's, or not any more.
const FOREIGN: u8 = 0xff;

/// A file system in a loop device, mounted; both go with it.
struct Filesystem {
    device: String,
    dir: PathBuf,
}

impl Filesystem {
    fn new(place: &Scratch, make: &[&str], size: u64) -> Filesystem {
        let (file, dir) = (place.path("fs.img"), place.path("mnt"));
        File::create(&file).unwrap().set_len(size).unwrap();
        fs::create_dir(&dir).unwrap();
        tool(Command::new(make[0]).args(&make[1..]).arg(&file));
        let device = tool(Command::new("losetup").args(["--find", "--show", "--direct-io=on"]).arg(&file));
        let made = Filesystem { device: device.trim().to_owned(), dir };
        tool(Command::new("mount").args([made.device.as_ref(), made.dir.as_path()]));
        made
    }

    /// An image whose every block says which it is, and which version.
    fn image(&self) -> PathBuf {
        let path = self.dir.join("image");
        fs::write(&path, (0..BLOCKS).flat_map(|number| block(number, 0)).collect::<Vec<u8>>()).unwrap();
        tool(Command::new("sync").arg("-f").arg(&path));
        path
    }

    /// Takes every free block of the file system and fills it with what must never be seen.
    fn fill(&self) {
        let file = File::create(self.dir.join("foreign")).unwrap();
        let bytes = vec![FOREIGN; 1 << 20];
        while std::io::Write::write_all(&mut &file, &bytes).is_ok() {}
        file.sync_all().unwrap();
    }
}

impl Drop for Filesystem {
    fn drop(&mut self) {
        for args in [["umount", self.dir.to_str().unwrap_or_default()], ["losetup", &self.device]] {
            let mut command = Command::new(args[0]);
            if args[0] == "losetup" {
                command.arg("-d");
            }
            let _ = command.arg(args[1]).status();
        }
    }
}

/// The contents of a block: its number, then its version. Never [`FOREIGN`], never zeroes.
fn block(number: u64, version: u8) -> Vec<u8> {
    let mut bytes = vec![version | 0x10; BLOCK];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// Reads the device without end and holds every block against what the image may say.
struct Verifier {
    stop: Arc<AtomicBool>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    /// Versions below this one are old: whoever wrote the next has been told that it was written.
    oldest: AtomicU8,
    /// The image may have lost blocks: zeroes and errors are right, too.
    lossy: AtomicBool,
    reads: AtomicU64,
}

impl Verifier {
    fn start(device: &Path) -> Verifier {
        let (stop, shared) = (Arc::<AtomicBool>::default(), Arc::<Shared>::default());
        // Past the page cache of the device, which would answer instead.
        let direct = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap();
        let file = File::options().read(true).custom_flags(direct).open(device).unwrap();
        let (stopped, told) = (Arc::clone(&stop), Arc::clone(&shared));
        let thread = thread::spawn(move || {
            let mut seed = 1_u64;
            let mut memory = vec![0; 2 * BLOCK];
            let aligned = memory.as_ptr().align_offset(BLOCK);
            let buffer = &mut memory[aligned..aligned + BLOCK];
            while !stopped.load(Ordering::SeqCst) {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let number = (seed >> 33) % BLOCKS;
                // Asked before the read begins: what is old now is old for the whole read.
                let (oldest, was_lossy) =
                    (told.oldest.load(Ordering::SeqCst), told.lossy.load(Ordering::SeqCst));
                match file.read_exact_at(buffer, number * BLOCK as u64) {
                    Ok(()) => check(buffer, number, oldest, told.lossy.load(Ordering::SeqCst)),
                    Err(error) => assert!(was_lossy || told.lossy.load(Ordering::SeqCst), "{error}"),
                }
                told.reads.fetch_add(1, Ordering::SeqCst);
            }
        });
        Verifier { stop, shared, thread: Some(thread) }
    }

    /// Waits until so many more reads were right.
    fn await_reads(&self, more: u64) {
        let until = self.shared.reads.load(Ordering::SeqCst) + more;
        let done = || self.shared.reads.load(Ordering::SeqCst) >= until || self.has_failed();
        assert!(wait_until(Duration::from_secs(60), done), "reads no longer end");
        assert!(!self.has_failed(), "a block was wrong");
    }

    fn has_failed(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    fn finish(mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().expect("every block was right");
    }
}

fn check(bytes: &[u8], number: u64, oldest: u8, lossy: bool) {
    if lossy && bytes.iter().all(|byte| *byte == 0) {
        return;
    }
    assert_eq!(bytes[..8], number.to_le_bytes(), "block {number} is another one: {:?}", &bytes[..16]);
    // A read beside a write may find some bytes of either, but none that are older than both.
    let right = |byte: &u8| byte & 0xf0 == 0x10 && byte & 0x0f >= oldest;
    let wrong = bytes[8..].iter().find(|byte| !right(byte));
    assert_eq!(wrong, None, "block {number} holds what is old or foreign; version {oldest} is written");
}

/// Writes all blocks in a new version, in place or not.
fn rewrite(image: &Path, version: u8, verifier: &Verifier) {
    let file = File::options().write(true).open(image).unwrap();
    for number in 0..BLOCKS {
        file.write_all_at(&block(number, version), number * BLOCK as u64).unwrap();
    }
    verifier.shared.oldest.store(version, Ordering::SeqCst);
}

/// By the image's name, without opening it: truncate(2).
fn truncate(image: &Path) {
    tool(Command::new("perl").args(["-e", "truncate($ARGV[0], 0) or die $!"]).arg(image));
}

fn has_lease(image: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let stat = fs::metadata(image).unwrap();
    // As /proc/locks has it; file systems of tests beside this one have the same inodes.
    let (major, minor) = (rustix::fs::major(stat.dev()), rustix::fs::minor(stat.dev()));
    let inode = format!(" {major:02x}:{minor:02x}:{} ", stat.ino());
    let locks = fs::read_to_string("/proc/locks").unwrap();
    locks.lines().any(|line| line.contains("LEASE") && line.contains(&inode))
}

/// Whether this machine has what these tests need; when not, they are skipped.
fn can_run(name: &str) -> bool {
    require_device(name)
        && require_loop(name)
        && require_tools(name, &["mkfs.ext4", "mkfs.xfs", "perl"])
        && require_ublk(name)
}

/// What is done to an image while it is read.
type Deed = fn(&Filesystem, &Path, &Verifier, &Value);

/// One file system of each kind, one deed: attach, read, do it, read on.
fn on_each_filesystem(name: &str, deed: Deed) {
    if !can_run(name) {
        return;
    }
    let kinds = [(&["mkfs.ext4", "-q"][..], 64 << 20), (&["mkfs.xfs", "-q", "-m", "reflink=0"], 320 << 20)];
    for (make, size) in kinds {
        let place = scratch();
        let filesystem = Filesystem::new(&place, make, size);
        let image = filesystem.image();
        let options = ["attach", "--via", "ublk", "--read-only", "--below", "on"];
        let told = place.json(options.into_iter().chain([image.to_str().unwrap()]));
        let info = &told["devices"][0];
        assert_eq!(text(info, "below"), filesystem.device, "{told:#}");
        assert!(has_lease(&image), "{make:?}: nobody holds a lease");
        let verifier = Verifier::start(Path::new(text(info, "device")));
        verifier.await_reads(200);
        assert!(has_lease(&image), "{make:?}: reading alone has ended it");
        deed(&filesystem, &image, &verifier, info);
        verifier.await_reads(200);
        verifier.finish();
        place.ok(["detach", "--all"]);
    }
}

#[test]
fn a_writer_is_seen_at_once() {
    on_each_filesystem("below::a_writer_is_seen_at_once", |_, image, verifier, _| {
        for version in 1..4 {
            rewrite(image, version, verifier);
            verifier.await_reads(50);
        }
        assert!(!has_lease(image));
    });
}

#[test]
fn a_truncated_image_shows_nobody_elses_bytes() {
    on_each_filesystem(
        "below::a_truncated_image_shows_nobody_elses_bytes",
        |filesystem, image, verifier, _| {
            verifier.shared.lossy.store(true, Ordering::SeqCst);
            truncate(image);
            filesystem.fill();
            verifier.await_reads(200);
        },
    );
}

/// `open` for reading may truncate, and no lease is broken by it.
#[test]
fn an_image_emptied_by_a_reader_shows_nobody_elses_bytes() {
    on_each_filesystem(
        "below::an_image_emptied_by_a_reader_shows_nobody_elses_bytes",
        |filesystem, image, verifier, _| {
            verifier.shared.lossy.store(true, Ordering::SeqCst);
            let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::TRUNC;
            rustix::fs::open(image, flags, rustix::fs::Mode::empty()).unwrap();
            filesystem.fill();
            verifier.await_reads(200);
        },
    );
}

#[test]
fn a_punched_image_shows_nobody_elses_bytes() {
    on_each_filesystem(
        "below::a_punched_image_shows_nobody_elses_bytes",
        |filesystem, image, verifier, _| {
            verifier.shared.lossy.store(true, Ordering::SeqCst);
            let half = (BLOCKS / 2 * BLOCK as u64).to_string();
            tool(Command::new("fallocate").args(["-p", "-o", "0", "-l", &half]).arg(image));
            filesystem.fill();
            verifier.await_reads(200);
        },
    );
}

#[test]
fn a_defragmented_image_is_followed() {
    on_each_filesystem("below::a_defragmented_image_is_followed", |filesystem, image, verifier, _| {
        let (program, package) = match filesystem.dir.join("lost+found").exists() {
            true => ("e4defrag", "e2fsprogs"),
            false => ("xfs_fsr", "xfsprogs"),
        };
        if !require_tools("below::a_defragmented_image_is_followed", &[program]) {
            return eprintln!("{package} has it");
        }
        // It fails where it finds nothing to improve; what counts is that it tried, and had to open the image for that.
        Command::new(program).arg(image).status().unwrap();
        assert!(!has_lease(image), "{program} has not opened the image for writing");
        filesystem.fill();
        verifier.await_reads(200);
    });
}

#[test]
fn an_unlinked_image_goes_on() {
    on_each_filesystem("below::an_unlinked_image_goes_on", |filesystem, image, verifier, _| {
        fs::remove_file(image).unwrap();
        filesystem.fill();
        verifier.await_reads(200);
    });
}

/// The kernel takes a lease away after `fs.lease-break-time`, whatever its holder does. A worker that was stopped then
/// has reads under way whose blocks belong to somebody else when it wakes.
#[test]
fn a_worker_that_slept_through_it_all_tells_nothing_wrong() {
    let name = "below::a_worker_that_slept_through_it_all_tells_nothing_wrong";
    on_each_filesystem(name, |filesystem, image, verifier, info| {
        let _short = BreakTime::set("1");
        let worker = info["worker_pid"].as_u64().unwrap().to_string();
        tool(Command::new("kill").args(["-STOP", &worker]));
        verifier.shared.lossy.store(true, Ordering::SeqCst);
        truncate(image);
        filesystem.fill();
        tool(Command::new("kill").args(["-CONT", &worker]));
        verifier.await_reads(200);
    });
}

/// `fs.lease-break-time`, put back when it is dropped.
struct BreakTime(String);

impl BreakTime {
    const PATH: &str = "/proc/sys/fs/lease-break-time";

    fn set(seconds: &str) -> BreakTime {
        let before = fs::read_to_string(Self::PATH).unwrap();
        fs::write(Self::PATH, seconds).unwrap();
        BreakTime(before)
    }
}

impl Drop for BreakTime {
    fn drop(&mut self) {
        let _ = fs::write(Self::PATH, &self.0);
    }
}

#[test]
fn what_is_not_safe_is_refused_with_its_reason() {
    let name = "below::what_is_not_safe_is_refused_with_its_reason";
    if !can_run(name) {
        return;
    }
    let place = scratch();
    let filesystem = Filesystem::new(&place, &["mkfs.ext4", "-q"], 64 << 20);
    let image = filesystem.image();
    let refused = |options: &[&str], why: &str| {
        let on = ["attach", "--via", "ublk", "--below", "on"];
        let ran = place.run(on.iter().chain(options).copied().chain([image.to_str().unwrap()]));
        assert!(ran.code == 1 && ran.err.contains(why), "{why}: {ran:?}");
        assert!(!has_lease(&image));
    };
    refused(&[], "it can be written");
    refused(&["-r", "--direct-io", "off"], "no direct I/O");
    let writer = File::options().write(true).open(&image).unwrap();
    refused(&["-r"], "open for writing");
    // `auto` takes the file instead, without a word.
    let told = place.json(["attach", "--via", "ublk", "-r", "--below", "auto", image.to_str().unwrap()]);
    assert_eq!(told["devices"][0]["below"], Value::Null);
    drop(writer);
    place.ok(["detach", "--all"]);
    // Written by the file system into its journal first, and who knows when to their place. Not with delayed allocation,
    // under which the flag means nothing.
    tool(Command::new("umount").arg(&filesystem.dir));
    tool(Command::new("mount").args(["-o", "nodelalloc", &filesystem.device]).arg(&filesystem.dir));
    tool(Command::new("chattr").arg("+j").arg(&image));
    refused(&["-r"], "no direct I/O");
}

#[test]
fn an_xfs_whose_files_may_share_blocks_is_refused() {
    let name = "below::an_xfs_whose_files_may_share_blocks_is_refused";
    if !can_run(name) {
        return;
    }
    let place = scratch();
    let filesystem = Filesystem::new(&place, &["mkfs.xfs", "-q", "-m", "reflink=1"], 320 << 20);
    let image = filesystem.image();
    let ran = place.run(["attach", "--via", "ublk", "-r", "--below", "on", image.to_str().unwrap()]);
    assert!(ran.code == 1 && ran.err.contains("reflink"), "{ran:?}");
}
