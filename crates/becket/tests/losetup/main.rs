//! becket in losetup's place: beside the system's own, as scripts call it, in a container, in a storm.
//! Never touches a loop device that no test here made or bound.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod differential;
mod scripts;
mod sequence;
mod side;

use becket_testkit::Scratch;
use becket_uapi::loop_ as uapi;
use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::RwLock;

/// Held for writing by tests that must be alone: one detaches all devices there are, one leaves free ones.
static DEVICES: RwLock<()> = RwLock::new(());

/// A place of its own for one test, with the binary that was just built.
fn scratch() -> Scratch {
    Scratch::new(env!("CARGO_BIN_EXE_becket"))
}

/// The system's losetup and becket's, both by that name.
fn links(place: &Scratch) -> [PathBuf; 2] {
    let system = ["/usr/sbin/losetup", "/sbin/losetup"].map(Path::new).into_iter().find(|path| path.exists());
    let link = place.dir("bin").join("losetup");
    symlink(env!("CARGO_BIN_EXE_becket"), &link).expect("links");
    [system.expect("was asked for").to_owned(), link]
}

/// Nodes of the devices whose file is below a directory.
fn bound_below(dir: &Path) -> Vec<PathBuf> {
    let prefix = format!("{}/", dir.display());
    let backing =
        |entry: &fs::DirEntry| fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
    let entries = fs::read_dir("/sys/block").expect("sysfs").flatten();
    let below = entries.filter(|entry| backing(entry).starts_with(&prefix));
    below.map(|entry| Path::new("/dev").join(entry.file_name())).collect()
}

/// The same once those that are going have gone: a program that lists all devices, as other tests do, has
/// ours open for a moment, and what was detached then goes after it.
fn left_below(dir: &Path) -> Vec<PathBuf> {
    let mut left = Vec::new();
    becket_testkit::wait_until(std::time::Duration::from_secs(10), || {
        left = bound_below(dir);
        left.is_empty()
    });
    left
}

/// Loop devices with numbers that no request for a free one returns; they go with this.
struct Numbers(Vec<u32>);

impl Numbers {
    fn take(count: usize) -> Numbers {
        let control = File::options().read(true).write(true).open("/dev/loop-control").expect("opens");
        // Free devices of low numbers, so that no process is given ours; they stay, as those of the driver's
        // own do.
        (0..32).for_each(|number| drop(uapi::ctl_add(control.as_fd(), number)));
        let first = 100_000 + std::process::id() % 40_000 * 20;
        let free = (first..).filter(|&number| uapi::ctl_add(control.as_fd(), number).is_ok());
        Numbers(free.take(count).collect())
    }
}

impl Drop for Numbers {
    fn drop(&mut self) {
        let control = File::options().read(true).write(true).open("/dev/loop-control").expect("opens");
        for &number in &self.0 {
            // One that a failed test left bound stays; its number is not used otherwise.
            let _ = uapi::ctl_remove(control.as_fd(), number);
        }
    }
}
