//! Reading a read-only image from the block device below its file system, where that is safe.
//! It never takes a block for the image's on the strength of a file system's word alone, and never writes one.
//!
//! # Design note
//!
//! A read through the file pays for the file system: its locks, its look-up of the extent, its own request. What the
//! look-up finds is, for a file that nobody changes, always the same: [`Opened::look_below`] finds it once (`FIEMAP`)
//! and the engine then reads those blocks from the device itself. The whole question is *for how long the answer holds*.
//! Blocks of a file that was cut or moved are soon another file's, so a mistake here does not show old bytes: it shows a
//! stranger's.
//!
//! **The rule.** A result that was read below is told only after a proof that began when the read had ended
//! ([`ReadLease::holds`]); results that cannot be proven are read again through the file, and from then on that queue
//! never goes below again. One proof serves all results of one turn of an I/O thread. No signal has to arrive, no
//! process has to be awake in time: a worker that was stopped for an hour, while the kernel took its lease away and the
//! blocks changed owner, finds this out before it tells anybody anything. (What it read is by then in the requester's
//! own pages and is overwritten before the request ends; if that fails too, the request fails.)
//!
//! **The proof** is two questions, in this order:
//! 1. `fstat`: has the inode the size and the time of change (ctime) that it had when the map was made?
//! 2. `F_GETLEASE`: does our read lease hold, and does nobody wait for its end?
//!
//! The *lease* (fcntl(2), `fs/locks.c`) stands against whoever could write: it is refused while the file is open for
//! writing anywhere (a writable mapping counts, and so does a descriptor with I/O still in flight), and from then on
//! every open for writing and every `truncate(2)` waits until it has gone, or until `fs.lease-break-time` has forced it
//! away. A break that has begun cannot be undone, and we never take a lease twice on one description, so a lease that
//! is there now was there all the time. `F_GETLEASE` says no as soon as a break *begins*, and lets a forced one take
//! effect itself. It was read from the source and is tested here, on files of ext4 and XFS.
//!
//! The *size and ctime* stand against what shrinks a file without opening it for writing, which no lease sees:
//! - `open(O_RDONLY | O_TRUNC)`: `break_lease` looks at the access mode alone (seen: the file is empty, the lease holds);
//! - NFS version 3's SETATTR of a size, and `truncate` of an overlay's file whose upper file this is (both come as
//!   `notify_change` with write access, which breaks delegations and no lease).
//!
//! All these set the size before they free the first block, and the ctime before a second call could put the size back.
//! So: first the size, then the lease. Whoever restored the size in between needed nothing that the ctime does not show;
//! and whoever *wrote* the blocks back had to open the file, which the later question sees. A ctime can only be believed
//! when a change that followed at once would have got another one: younger ones are waited for ([`lease`]).
//! Everything else that sets a ctime (chmod, link, unlink) ends the reading below too: harmless.
//!
//! **What moves blocks of a file that nobody writes**, each looked up in Linux 7.3's source:
//! | what | why it does no harm |
//! | --- | --- |
//! | `EXT4_IOC_MOVE_EXT` (e4defrag), `SWAP_BOOT`, XFS's `SWAPEXT` (xfs_fsr), `EXCHANGE_RANGE` | want descriptors open for writing |
//! | `fallocate` (holes, collapsing), `FITRIM` | wants one too; trims free blocks only |
//! | `FIDEDUPERANGE` onto a descriptor open for *reading* | frees the blocks of an unwritten-to file! Only where files can share blocks: such an XFS is refused as a whole |
//! | `FIEMAP`'s own flush, `chattr +j`, `EXT4_IOC_MIGRATE`, quotas, remounting, freezing | data blocks stay where they are |
//! | journalled data (`data=journal`, `chattr +j`), inline data, encryption, verity | `STATX_DIOALIGN` is 0 or an attribute says so: refused; data that was journalled before is in place when the mode is left (`jbd2_journal_flush`). (`+j` means nothing under delayed allocation, and does not refuse there: seen) |
//! | growing the file system while mounted | moves no data block; shrinking needs it unmounted, or (XFS) takes free space only |
//! | zoned XFS, whose collector moves data at will; the real-time device | refused: such a file or file system is not looked at |
//! | btrfs, f2fs, bcachefs, overlayfs, network and FUSE file systems | refused: only `ext4` and `xfs`, by the mount table |
//! | unlinking | our descriptors keep inode and blocks |
//! | `swapon`, `losetup`, nfsd and ksmbd writing | open for writing |
//! | whatever is below the device: LVM, RAID, a loop device | reads enter where the file system's own do |
//!
//! **The device's page cache** is never read: it would not see what the file system writes to the same blocks. So the
//! device's only descriptor is one for direct I/O, and the engine is given no other.
//!
//! **Who holds what.** The lease belongs to an open file description of its own, for reading, opened by the client. The
//! descriptor goes through the supervisor to the worker, and nobody keeps a copy: when the worker dies, or its last queue
//! has returned to the file, the description is closed and whoever waits can go on. (Giving it up by `F_UNLCK` would need
//! `CAP_LEASE` for another user's file, and a worker has no capability.) A signal makes the worker do so at
//! once; without it the next read would. It never goes below again, so that it cannot thrash.
//!
//! **Price**: a program that opens the image for writing waits for the worker to wake, some milliseconds; one that does
//! not wait (`O_NONBLOCK`) gets `EWOULDBLOCK` once. This, and that the device must be readable (root), is why nobody gets
//! it without asking.
//!
//! Sources: fcntl(2) and `fs/locks.c`, `fs/open.c`, `fs/namei.c`, `fs/nfsd/vfs.c`, `fs/remap_range.c`, `fs/ext4/ioctl.c`,
//! `fs/xfs/xfs_ioctl.c`, `block/fops.c` of Linux 7.3; Documentation/filesystems/fiemap.rst.

mod extents;
mod filesystem;
mod lease;

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use becket_uapi::block;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

pub use lease::{ReadLease, Untouched};

use crate::facts::open_quietly;
use crate::facts::proc_path;
use crate::{BackingKind, Map, Opened};

/// A second way to the bytes of an image, for as long as its lease holds.
#[derive(Debug)]
pub struct Below {
    /// Where the bytes are: in the files of the image, or, as the file behind the last of them, on `disk`.
    pub map: Map,
    /// The block device, for direct I/O only.
    pub disk: OwnedFd,
    /// What makes the map true.
    pub lease: ReadLease,
    /// The device's node, for people.
    pub device: PathBuf,
}

impl Opened {
    /// Looks for the blocks of a read-only image on the device below its file system.
    ///
    /// # Errors
    /// Why the image is better read through its file, in one sentence.
    pub fn look_below(&self) -> Result<Below, String> {
        let ([file], Some((0, offset, len))) = (self.files.as_slice(), self.map.single_range()) else {
            return Err("it is not one range of one file".to_owned());
        };
        if !self.read_only {
            return Err("it can be written".to_owned());
        }
        if file.facts.kind != BackingKind::Regular {
            return Err("it is a block device itself".to_owned());
        }
        if file.direct.is_none() {
            return Err(format!("there is no direct I/O on it: {}", file.facts.direct_reason));
        }
        let stat = rustix::fs::fstat(&file.buffered).map_err(|errno| format!("its inode: {errno}"))?;
        filesystem::check(file.buffered.as_fd(), stat.st_dev)?;
        let (disk, device) = open_disk(stat.st_dev)?;
        let fd = reopen(&file.buffered).map_err(|errno| format!("it cannot be opened again: {errno}"))?;
        let lease = ReadLease::take(fd)?;
        // Only now, since an answer of before the lease may be of before a change.
        let map = self.map_below(&disk, &lease, offset, len)?;
        if !lease.holds() {
            return Err("somebody has just opened it for writing".to_owned());
        }
        Ok(Below { map, disk, lease, device })
    }

    fn map_below(&self, disk: &OwnedFd, lease: &ReadLease, offset: u64, len: u64) -> Result<Map, String> {
        let asked = |what: &str, error: std::io::Error| format!("{what} of the device below: {error}");
        let unit = block::logical_block_size(disk.as_fd()).map_err(|error| asked("block size", error))?;
        if unit > self.block_size {
            return Err(format!(
                "the device below has blocks of {unit} bytes, this one of {}: --block-size {unit} would fit",
                self.block_size
            ));
        }
        let room = extents::Room {
            disk: u32::try_from(self.files.len()).unwrap_or(u32::MAX),
            size: block::size64(disk.as_fd()).map_err(|error| asked("size", error))?,
            unit: unit.into(),
        };
        let ask = |start, len| becket_uapi::extents::file_extents(lease.as_fd(), start, len);
        extents::map(&room, offset, len, ask)
    }
}

/// Another description of the same file, for reading.
fn reopen(file: &OwnedFd) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    rustix::io::retry_on_intr(|| rustix::fs::open(proc_path(file), flags, Mode::empty()))
}

/// Opens the block device of this number, found by its number and believed by it.
fn open_disk(number: u64) -> Result<(OwnedFd, PathBuf), String> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let event = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/uevent"))
        .map_err(|_| "there is no single block device below its file system".to_owned())?;
    let name = event.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    let device = format!("/dev/{}", name.ok_or("the device below has no name")?);
    let failed = |errno: Errno| format!("{device} cannot be opened: {errno}");
    let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let disk = open_quietly(&device, flags).map_err(failed)?;
    let stat = rustix::fs::fstat(&disk).map_err(failed)?;
    if !is_disk(&stat, number) {
        return Err(format!("{device} is not the device {major}:{minor}"));
    }
    Ok((disk, device.into()))
}

/// Whether this is the block device of that number.
pub(crate) fn is_disk(stat: &rustix::fs::Stat, number: u64) -> bool {
    rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::BlockDevice
        && stat.st_rdev == number
}
