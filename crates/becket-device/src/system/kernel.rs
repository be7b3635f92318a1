//! What the kernel and /proc say of devices and processes, as far as records are judged by it.
//! It only asks; a double in tests answers instead.

use std::io::ErrorKind;
use std::path::Path;

use becket_transport::{dm, loop_, node, sysfs};

use crate::system::process::ProcessId;

/// The questions that decide what a record is worth.
pub(crate) trait Kernel {
    /// Sequence number of the disk of that name, where there is one.
    fn diskseq(&self, disk: &str) -> Option<u64>;
    /// Device and inode of a loop device's backing.
    fn loop_backing(&self, number: u32) -> Option<(u64, u64)>;
    /// Whether a loop device goes at its last close; `None` if it has no backing.
    fn loop_autoclear(&self, number: u32) -> Option<bool>;
    /// Whether a disk of that name is there.
    fn disk(&self, disk: &str) -> bool;
    /// Whether the kernel has a ublk device of that number, with a disk or without.
    fn ublk(&self, number: u32) -> bool;
    /// The mark of becket's on device-mapper's device of that number.
    fn dm_mark(&self, number: u32) -> Option<u64>;
    /// Whether becket's device of device-mapper with that mark goes at its last close.
    fn dm_leaves(&self, mark: u64) -> bool;
    /// Whether something is there at a path, be it a mount whose server is dead.
    fn place(&self, path: &Path) -> bool;
    /// Whether the process runs.
    fn alive(&self, process: ProcessId) -> bool;
}

/// The running system.
#[derive(Debug, Clone, Copy)]
pub(crate) struct System;

impl Kernel for System {
    fn diskseq(&self, disk: &str) -> Option<u64> {
        node::diskseq(disk)
    }

    fn loop_backing(&self, number: u32) -> Option<(u64, u64)> {
        loop_::status(number).ok().flatten().map(|status| (status.dev, status.ino))
    }

    fn loop_autoclear(&self, number: u32) -> Option<bool> {
        sysfs::flag(&format!("loop{number}"), "loop/autoclear")
    }

    fn disk(&self, disk: &str) -> bool {
        sysfs::directory(disk).exists()
    }

    fn ublk(&self, number: u32) -> bool {
        Path::new("/sys/class/ublk-char").join(format!("ublkc{number}")).exists()
    }

    fn dm_mark(&self, number: u32) -> Option<u64> {
        dm::mark_of(number)
    }

    fn dm_leaves(&self, mark: u64) -> bool {
        dm::is_leaving(mark)
    }

    fn place(&self, path: &Path) -> bool {
        !matches!(std::fs::symlink_metadata(path), Err(error) if error.kind() == ErrorKind::NotFound)
    }

    fn alive(&self, process: ProcessId) -> bool {
        process.alive()
    }
}
