//! What a backing can do, found by asking it: direct I/O, discard, block sizes.
//! It never guesses from a file system's name and never changes a byte of the backing.

use std::fmt;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::str::FromStr;

use becket_uapi::block;
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, Stat, StatxFlags, Timespec, Timestamps, UTIME_OMIT};
use rustix::io::{Errno, ReadWriteFlags};
use serde::{Deserialize, Serialize};

/// Whether to access the backing past the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DirectIo {
    /// Where the backing can.
    #[default]
    Auto,
    /// Yes, or the attach fails.
    On,
    /// No.
    Off,
}

impl fmt::Display for DirectIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DirectIo::Auto => "auto",
            DirectIo::On => "on",
            DirectIo::Off => "off",
        })
    }
}

impl FromStr for DirectIo {
    type Err = String;

    fn from_str(text: &str) -> Result<DirectIo, String> {
        match text {
            "auto" => Ok(DirectIo::Auto),
            "on" => Ok(DirectIo::On),
            "off" => Ok(DirectIo::Off),
            _ => Err(format!("{text:?} is none of auto, on, off")),
        }
    }
}

/// What kind of file a backing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    Block,
}

/// What direct I/O demands, in bytes; both are powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alignment {
    /// Of the address of the memory.
    pub memory: u32,
    /// Of the offset in the backing and of the length.
    pub offset: u32,
}

/// What a backing is and can do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// File or device.
    pub kind: FileKind,
    /// Length in bytes when it was opened.
    pub size: u64,
    /// Whether the descriptors can write.
    pub writable: bool,
    /// What direct I/O demands; `None` where there is none.
    pub direct: Option<Alignment>,
    /// Why there is direct I/O or not, for people.
    pub direct_reason: String,
    /// Smallest unit in bytes that is written without reading first; a power of two.
    pub physical_block_size: u32,
    /// Preferred smallest request in bytes.
    pub io_min: u32,
    /// Preferred large request in bytes, or 0 when none is named.
    pub io_opt: u32,
    /// Whether there is a seek time.
    pub rotational: bool,
    /// Whether ranges can be given back.
    pub discard: bool,
    /// Unit of discards in bytes, 0 when there are none.
    pub discard_granularity: u32,
    /// Whether ranges can be zeroed without writing them.
    pub write_zeroes: bool,
    /// Whether an operation can be tried without blocking (`RWF_NOWAIT`), on every descriptor.
    #[serde(default)]
    pub nowait: bool,
    /// Whether blocks were missing in the file when it was opened, so that writes may have to allocate them.
    #[serde(default)]
    pub sparse: bool,
    /// Whether an operation through the page cache can leave nothing behind in it (`RWF_DONTCACHE`).
    #[serde(default)]
    pub uncached: bool,
}

impl Facts {
    /// What is assumed of a backing before it was asked: the smallest blocks, and no optional operations.
    pub fn unasked(kind: FileKind, size: u64, writable: bool) -> Facts {
        Facts {
            kind,
            size,
            writable,
            direct: None,
            direct_reason: String::new(),
            physical_block_size: 512,
            io_min: 512,
            io_opt: 0,
            rotational: false,
            discard: false,
            discard_granularity: 0,
            write_zeroes: false,
            nowait: false,
            sparse: false,
            uncached: false,
        }
    }

    /// Whether stored bytes of encoded blocks are read through the page cache; `wanted` is the setting that
    /// was asked for.
    ///
    /// Through the page cache, the kernel reads ahead as far as the disk's `read_ahead_kb` says, even if
    /// files are read in random order.
    /// Not if the file cannot report that a read would block, which then costs a kernel thread for each read;
    /// and not beside writes, which would have to invalidate the cached pages that they bypass.
    pub fn caches_stored(&self, wanted: DirectIo) -> bool {
        match wanted {
            DirectIo::Auto => self.nowait && !self.writable,
            DirectIo::On => false,
            DirectIo::Off => true,
        }
    }
}

/// Largest unit that is believed; beyond it a number is taken for nonsense.
const UNIT_MAX: u64 = 1 << 20;
/// What the probe of direct I/O tries, smallest first, in bytes.
const PROBED: [usize; 2] = [512, 4096];

/// What is known of a backing before its facts are asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Known<'a> {
    /// The descriptor that goes through the page cache.
    pub(crate) fd: BorrowedFd<'a>,
    /// Its `fstat`.
    pub(crate) stat: &'a Stat,
    pub(crate) kind: FileKind,
    /// Length in bytes.
    pub(crate) size: u64,
    pub(crate) writable: bool,
    /// Where the image starts, in bytes.
    pub(crate) offset: u64,
}

/// Asks for the facts that every opener needs, and for the direct descriptor if there can be one.
///
/// The process that serves the image [`complete`]s the others: they take twenty system calls, and one dirties
/// the file's inode, which the kernel's loop driver would have to write before it attaches the file.
pub(crate) fn ask(known: &Known<'_>) -> (Facts, Option<OwnedFd>) {
    let (direct_fd, direct, direct_reason) = match ask_direct(known) {
        Ok((fd, alignment, reason)) => (Some(fd), Some(alignment), reason),
        Err(reason) => (None, None, reason),
    };
    let held = u64::try_from(known.stat.st_blocks).unwrap_or(0).saturating_mul(512);
    let facts = Facts {
        direct,
        direct_reason,
        sparse: known.kind == FileKind::Regular && held < known.size,
        ..Facts::unasked(known.kind, known.size, known.writable)
    };
    (facts, direct_fd)
}

/// Asks for what else a server has to know: what the backing can do, and in which units.
pub(crate) fn complete(buffered: BorrowedFd<'_>, direct: Option<BorrowedFd<'_>>, facts: &mut Facts) {
    match facts.kind {
        FileKind::Regular => ask_file(buffered, direct, facts),
        FileKind::Block => {
            let ways = Ways::of(buffered, direct, facts.size);
            (facts.nowait, facts.uncached) = (ways.nowait, ways.uncached);
            ask_device(buffered, facts);
        }
    }
}

/// `RWF_DONTCACHE` of the kernel's `fs.h` (Linux 6.14); rustix does not name it yet.
const DONTCACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);

/// Whether reads of a descriptor may carry a flag. It reads one byte with the flag at the end of the file:
/// nothing is read, and nothing enters the page cache.
///
/// The result of such a read does not matter: the kernel refuses flags that it or the file system does not
/// have before it checks anything else. A direct descriptor may refuse the single byte, and then has the
/// flag.
fn takes(fd: BorrowedFd<'_>, flag: ReadWriteFlags, end: u64) -> bool {
    let mut byte = [0];
    let read = retry(|| rustix::io::preadv2(fd, &mut [IoSliceMut::new(&mut byte)], end, flag));
    !matches!(read, Err(Errno::OPNOTSUPP | Errno::NOSYS))
}

fn ask_file(buffered: BorrowedFd<'_>, direct: Option<BorrowedFd<'_>>, facts: &mut Facts) {
    let disk = Disk::of(rustix::fs::fstat(buffered).map_or(0, |stat| stat.st_dev));
    let ways = Ways::of(buffered, direct, facts.size);
    let aligned = facts.direct.map_or(512, |alignment| alignment.offset);
    facts.physical_block_size = aligned.max(disk.physical_block_size).max(512);
    facts.io_min = facts.physical_block_size;
    facts.rotational = disk.rotational;
    (facts.nowait, facts.uncached) = (ways.nowait, ways.uncached);
    if facts.writable && can_punch(buffered, facts.size) {
        let block = rustix::fs::fstatfs(buffered).ok().and_then(|fs| u64::try_from(fs.f_bsize).ok());
        facts.discard = true;
        facts.discard_granularity = block.and_then(unit).unwrap_or(4096);
        // A hole reads as zeroes, so what can be punched can be zeroed.
        facts.write_zeroes = true;
    }
}

fn ask_device(fd: BorrowedFd<'_>, facts: &mut Facts) {
    let logical = block::logical_block_size(fd).unwrap_or(512);
    facts.physical_block_size =
        block::physical_block_size(fd).ok().and_then(|size| unit(size.into())).unwrap_or(512).max(logical);
    facts.io_min = block::io_min(fd).unwrap_or(0).max(facts.physical_block_size);
    facts.io_opt = block::io_opt(fd).unwrap_or(0);
    facts.rotational = block::rotational(fd).unwrap_or(false);
    let queue = rustix::fs::fstat(fd).ok().and_then(|stat| Queue::of(stat.st_rdev));
    let Some(queue) = queue.filter(|_| facts.writable) else { return };
    let allows = |limit| queue.number(limit).is_some_and(|bytes| bytes > 0);
    facts.write_zeroes = allows("write_zeroes_max_bytes");
    // Punching a device zeroes it and lets it unmap the zeroed range: one that discards but cannot zero
    // refuses.
    if facts.write_zeroes && allows("discard_max_bytes") {
        facts.discard = true;
        facts.discard_granularity = queue.unit("discard_granularity").unwrap_or(logical).max(logical);
    }
}

/// Whether ranges of the file can be given back, by punching the first byte behind its end.
///
/// Nothing is there to be lost, and one byte is less than a block, so not even blocks that were allocated
/// behind the end go. Some file systems note the time all the same; then it is put back, so that merely
/// attaching an image does not make it newer.
fn can_punch(fd: BorrowedFd<'_>, size: u64) -> bool {
    let times = rustix::fs::fstat(fd).map(|stat| (stat.st_mtime, stat.st_mtime_nsec));
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let punched = retry(|| rustix::fs::fallocate(fd, flags, size, 1)).is_ok();
    if let (true, Ok((tv_sec, nanoseconds))) = (punched, times) {
        let omitted = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        let before = Timespec { tv_sec: tv_sec as _, tv_nsec: nanoseconds as _ };
        // Only the owner may do this; for other users the image is a little newer.
        let _ = rustix::fs::futimens(fd, &Timestamps { last_access: omitted, last_modification: before });
    }
    punched
}

/// Opens the direct descriptor: it, what it demands, and how that is known. The error says why not.
fn ask_direct(known: &Known<'_>) -> Result<(OwnedFd, Alignment, String), String> {
    if !known.offset.is_multiple_of(512) {
        return Err(format!("the offset {} is not a multiple of 512", known.offset));
    }
    let reported = reported_alignment(known);
    if reported == Some(None) {
        return Err("the file system reports that it cannot do it for this file".to_owned());
    }
    let access = if known.writable { OFlags::RDWR } else { OFlags::RDONLY };
    let flags = access | OFlags::DIRECT | OFlags::CLOEXEC;
    let fd = open_quietly(&proc_path(known.fd), flags).map_err(|errno| match errno {
        Errno::INVAL => "the file system does not offer it".to_owned(),
        errno => format!("the file cannot be opened with O_DIRECT: {errno}"),
    })?;
    let (alignment, reason) = match reported {
        Some(Some(alignment)) => (alignment, "the file system reports its alignment"),
        _ => (probe_alignment(&fd)?, "a direct read worked"),
    };
    if !known.offset.is_multiple_of(alignment.offset.into()) {
        let Alignment { offset: unit, .. } = alignment;
        return Err(format!(
            "the offset {} is not a multiple of the {unit} bytes that it needs here",
            known.offset
        ));
    }
    Ok((fd, alignment, reason.to_owned()))
}

/// Where a descriptor of this process can be opened anew or asked for its name.
pub(crate) fn proc_path(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// Opens for I/O that leaves the image's access time alone, where the caller may ask for that.
///
/// A program that reads a device does not read its image as a file; and checking whether the time is due
/// costs each direct read a hundred instructions.
pub(crate) fn open_quietly(path: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    let open = |flags| retry(|| rustix::fs::open(path, flags, Mode::empty()));
    match open(flags | OFlags::NOATIME) {
        // Only the owner may ask for it.
        Err(Errno::PERM) => open(flags),
        other => other,
    }
}

/// What `STATX_DIOALIGN` says: `None` when it is silent, `Some(None)` when there is no direct I/O.
fn reported_alignment(known: &Known<'_>) -> Option<Option<Alignment>> {
    let stat = rustix::fs::statx(known.fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return None;
    }
    let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
    if offset == 0 || memory == 0 {
        return Some(None);
    }
    let sound = memory.is_power_of_two() && offset.is_power_of_two();
    sound.then_some(Some(Alignment { memory, offset: offset.max(512) }))
}

/// The smallest unit in which a direct read of the first bytes succeeds.
fn probe_alignment(fd: &OwnedFd) -> Result<Alignment, String> {
    let [.., largest] = PROBED;
    let mut memory = vec![0_u8; 2 * largest];
    let aligned = memory.as_ptr().align_offset(largest);
    let mut failure = Errno::INVAL;
    for size in PROBED {
        let Some(buf) = memory.get_mut(aligned..).and_then(|rest| rest.get_mut(..size)) else { continue };
        match retry(|| rustix::io::pread(fd, &mut *buf, 0)) {
            Ok(_) => {
                let unit = u32::try_from(size).unwrap_or(4096);
                return Ok(Alignment { memory: unit, offset: unit });
            }
            Err(errno) => failure = errno,
        }
    }
    Err(format!("a direct read failed: {failure}"))
}

/// A unit in bytes, when it can be one.
fn unit(bytes: u64) -> Option<u32> {
    u32::try_from(bytes)
        .ok()
        .filter(|bytes| bytes.is_power_of_two() && (512..=UNIT_MAX).contains(&u64::from(*bytes)))
}

/// Tries again what a signal interrupted.
fn retry<T>(call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    rustix::io::retry_on_intr(call)
}

/// With which flags descriptors can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ways {
    nowait: bool,
    uncached: bool,
}

impl Ways {
    fn of(buffered: BorrowedFd<'_>, direct: Option<BorrowedFd<'_>>, end: u64) -> Ways {
        let nowait = takes(buffered, ReadWriteFlags::NOWAIT, end)
            && direct.is_none_or(|direct| takes(direct, ReadWriteFlags::NOWAIT, end));
        Ways { nowait, uncached: takes(buffered, DONTCACHE, end) }
    }
}

/// What matters of the disk below a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Disk {
    physical_block_size: u32,
    rotational: bool,
}

impl Disk {
    /// That of a device number, where there is one to see: none below btrfs, network and memory file systems.
    fn of(device: u64) -> Disk {
        Queue::of(device).map_or(Disk { physical_block_size: 512, rotational: false }, |queue| Disk {
            physical_block_size: queue.unit("physical_block_size").unwrap_or(512),
            rotational: queue.number("rotational") == Some(1),
        })
    }
}

/// The limits of a block device's queue, as sysfs shows them.
#[derive(Debug)]
struct Queue(PathBuf);

impl Queue {
    /// Found by number, not by a name that may be renamed. A partition has no queue: it is its disk's.
    fn of(device: u64) -> Option<Queue> {
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let node = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        // The node is a symbolic link into the device tree, so `..` is the disk.
        let queue = if node.join("partition").exists() { node.join("../queue") } else { node.join("queue") };
        queue.is_dir().then_some(Queue(queue))
    }

    fn number(&self, name: &str) -> Option<u64> {
        std::fs::read_to_string(self.0.join(name)).ok()?.trim().parse().ok()
    }

    fn unit(&self, name: &str) -> Option<u32> {
        self.number(name).and_then(unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_bytes_are_cached_where_nobody_writes_and_no_thread_waits() {
        let facts = Facts { nowait: true, ..Facts::unasked(FileKind::Regular, 0, false) };
        let ways = [DirectIo::Auto, DirectIo::On, DirectIo::Off];
        assert_eq!(ways.map(|wanted| facts.caches_stored(wanted)), [true, false, true]);
        let written = Facts { writable: true, ..facts.clone() };
        assert_eq!(ways.map(|wanted| written.caches_stored(wanted)), [false, false, true]);
        let waits = Facts { nowait: false, ..facts };
        assert_eq!(ways.map(|wanted| waits.caches_stored(wanted)), [false, false, true]);
    }
}
