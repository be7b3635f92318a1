//! Files and devices of the host: opened for what is possible, locked, measured.
//! It never follows a path a second time: what was found is opened by its descriptor.

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;

use super::facts::{open_quietly, proc_path};
use super::kernel_users;
use super::locks::{self, Claim, Refused};
use crate::resolve::io;
use crate::{Error, FileKind, Identity};

/// A file or device that is open.
#[derive(Debug)]
pub(crate) struct HostFile {
    /// Absolute, without symbolic links.
    pub(crate) path: PathBuf,
    pub(crate) fd: OwnedFd,
    pub(crate) kind: FileKind,
    pub(crate) stat: Stat,
    /// Length in bytes.
    pub(crate) size: u64,
}

impl HostFile {
    /// Which file it is.
    pub(crate) fn identity(&self) -> Identity {
        Identity { dev: self.stat.st_dev, ino: self.stat.st_ino }
    }

    /// Its path, or that of a snapshot of it.
    pub(crate) fn path_of(&self, snapshot: Option<&OsStr>) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        if let Some(snapshot) = snapshot {
            path.push("@");
            path.push(snapshot);
        }
        path.into()
    }

    /// Whether it is the file that `stat` is of.
    pub(crate) fn is(&self, stat: &Stat) -> bool {
        (self.stat.st_dev, self.stat.st_ino) == (stat.st_dev, stat.st_ino)
    }
}

/// Where an open file is: absolute, without symbolic links.
pub(crate) fn real_path(path: &Path, fd: &OwnedFd) -> Result<PathBuf, Error> {
    std::fs::read_link(proc_path(fd))
        .map_err(|error| io(path, "its name cannot be read from /proc/self/fd", error))
}

/// Opens the inode for what is possible; the reason when that is less than what was asked for.
pub(crate) fn open_inode(
    path: &Path,
    inode: &OwnedFd,
    kind: FileKind,
    read_only: bool,
) -> Result<(OwnedFd, Option<String>), Error> {
    let inode = proc_path(inode);
    let reopen = |access: OFlags| open_quietly(&inode, access | OFlags::CLOEXEC);
    let failed = |errno| match errno {
        Errno::ACCESS | Errno::PERM => Error::Permission { path: path.to_owned(), source: errno.into() },
        Errno::NOENT => io(path, "it cannot be opened through /proc/self/fd; is /proc mounted?", errno),
        errno => io(path, "it cannot be opened", errno),
    };
    let mut reason = None;
    if !read_only {
        match reopen(OFlags::RDWR) {
            Ok(fd)
                if kind == FileKind::Block && becket_uapi::block::read_only(fd.as_fd()).unwrap_or(false) =>
            {
                reason = Some("the device is read-only".to_owned());
            }
            Ok(fd) => return Ok((fd, None)),
            Err(errno) => reason = Some(why_read_only(errno, kind).ok_or_else(|| failed(errno))?.to_owned()),
        }
    }
    reopen(OFlags::RDONLY).map(|fd| (fd, reason)).map_err(failed)
}

/// What kept a file from being opened for writing; `None` when reading is no way out.
fn why_read_only(errno: Errno, kind: FileKind) -> Option<&'static str> {
    match (errno, kind) {
        (Errno::ROFS, FileKind::Regular) => Some("it lies on a read-only file system"),
        (Errno::ACCESS, FileKind::Regular) => Some("this user may not write to it"),
        (Errno::ROFS | Errno::ACCESS, FileKind::Block) => {
            Some("the device is read-only, or this user may not write to it")
        }
        (Errno::PERM, _) => Some("it is immutable, sealed or append-only"),
        (Errno::TXTBSY, _) => Some("it is being executed, or used as swap space"),
        _ => None,
    }
}

/// Refuses a block device that the kernel itself uses: mounted, swapped to, or part of another device.
///
/// Only a question: the claim is given back, because whatever is built on the device next (device-mapper)
/// must be able to make its own. Programs are kept apart by the locks.
fn refuse_claimed(path: &Path, device: &OwnedFd) -> Result<(), Error> {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    match rustix::io::retry_on_intr(|| rustix::fs::open(proc_path(device), flags, Mode::empty())) {
        Err(Errno::BUSY) => Err(Error::Claimed { path: path.to_owned() }),
        _ => Ok(()),
    }
}

pub(crate) fn size_of(path: &Path, fd: &OwnedFd, kind: FileKind) -> Result<u64, Error> {
    let size = match kind {
        FileKind::Regular => rustix::fs::fstat(fd)
            .map(|stat| u64::try_from(stat.st_size).unwrap_or(0))
            .map_err(|errno| io(path, "its size cannot be read", errno))?,
        FileKind::Block => becket_uapi::block::size64(fd.as_fd())
            .map_err(|error| io(path, "its size cannot be read", error))?,
    };
    if size == 0 { Err(Error::Empty { path: path.to_owned() }) } else { Ok(size) }
}

/// The logical block size of the backing by itself.
pub(crate) fn natural_block_size(path: &Path, fd: &OwnedFd, kind: FileKind) -> Result<u32, Error> {
    match kind {
        FileKind::Regular => Ok(512),
        FileKind::Block => becket_uapi::block::logical_block_size(fd.as_fd())
            .map(|size| size.max(512))
            .map_err(|error| io(path, "its block size cannot be read", error)),
    }
}

/// Keeps other programs away from the image, as far as the file system lets us; by way of the disk around a
/// partition it does not.
pub(crate) fn lock_alone(
    path: &Path,
    fd: &OwnedFd,
    kind: FileKind,
    claim: &Claim,
    warnings: &mut Vec<String>,
) -> Result<(), Error> {
    if !claim.shared && kind == FileKind::Block && claim.write {
        refuse_claimed(path, fd)?;
    }
    match locks::take(fd.as_fd(), claim, locks::a_moment) {
        Ok(()) => {}
        Err(Refused::Clash(clash)) => {
            let readers = claim.only_read(fd.as_fd());
            return Err(Error::InUse { path: path.to_owned(), clash, readers });
        }
        Err(Refused::Unsupported(error)) => warnings
            .push(format!("not locked against other programs: the file system has no such locks ({error})")),
        Err(Refused::Io(error)) => return Err(io(path, "it cannot be locked", error)),
    }
    kernel_users::refuse(path, fd.as_fd(), kind, claim)
}

/// The next reads of a file are a few bytes here and there: nothing is read ahead, because it would only be
/// dropped again.
pub(crate) fn read_here_and_there(file: BorrowedFd<'_>) {
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random);
}

/// From now on a file is read as its users like: the kernel looks how.
pub(crate) fn read_as_it_comes(file: BorrowedFd<'_>) {
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Normal);
}

/// Drops what the page cache holds of a file that will be gone past.
///
/// As long as one page is cached (reading a partition table is enough), the kernel looks for pages to
/// invalidate at each direct write: 9 per cent of a 4 KiB write's instructions were seen to go there.
pub(crate) fn forget_cached(file: BorrowedFd<'_>) {
    // Only advice: dirty pages stay until they are written, and nothing depends on it.
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
}

/// What a file is written in at least, in bytes, whether through the page cache or past it.
pub(crate) fn unit_of(fd: &OwnedFd) -> u64 {
    let unit = rustix::fs::fstatfs(fd).ok().and_then(|fs| u64::try_from(fs.f_bsize).ok()).unwrap_or(0);
    unit.max(rustix::param::page_size() as u64)
}
