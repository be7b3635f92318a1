//! The disk around a partition. Both devices have the same bytes, and the locks of one say nothing of the
//! other, so what is done with a partition is locked on its disk, too.
//! It reads sysfs and locks the disk, and never reads or writes a byte of it.

use std::fs;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use super::host::{HostFile, lock_alone, open_inode, size_of};
use super::locks::{self, Claim, Refused};
use super::place::{part, sysfs};
use crate::resolve::resolve;
use crate::{DirectIo, Error, FileKind, FileSource};

/// Keeps other programs away from the image, as far as the file system lets us. What comes back holds a part
/// of the locks.
pub(crate) fn lock_fd(
    path: &Path,
    fd: &OwnedFd,
    kind: FileKind,
    claim: &Claim,
    warnings: &mut Vec<String>,
) -> Result<Option<OuterDisk>, Error> {
    lock_alone(path, fd, kind, claim, warnings)?;
    match kind {
        FileKind::Block => OuterDisk::lock(path, fd.as_fd(), claim, warnings),
        FileKind::Regular => Ok(None),
    }
}

/// The disk around a partition, open for the lock on the partition's bytes, which lasts as long as the last
/// copy of the descriptors.
#[derive(Debug)]
pub struct OuterDisk {
    /// Never read or written.
    pub(crate) source: FileSource,
    /// What is locked of it.
    range: Range<u64>,
}

impl OuterDisk {
    /// Opens the disk around the device `fd`, if that is a partition, and locks what is claimed of it.
    ///
    /// # Errors
    /// Those bytes are in use by way of the disk.
    pub(super) fn lock(
        path: &Path,
        fd: BorrowedFd<'_>,
        claim: &Claim,
        warnings: &mut Vec<String>,
    ) -> Result<Option<OuterDisk>, Error> {
        let Ok(number) = rustix::fs::fstat(fd).map(|stat| stat.st_rdev) else { return Ok(None) };
        let Some(place) = part(&sysfs(number)) else { return Ok(None) };
        let outer = match open(&sysfs(number), place.disk, claim.write) {
            Ok(source) => OuterDisk { source, range: place.inner(&claim.range) },
            Err(why) => {
                warnings.push(format!("not locked against users of the whole disk: {why}"));
                return Ok(None);
            }
        };
        if !claim.shared {
            outer.relock(path, claim.write)?;
        }
        Ok(Some(outer))
    }

    /// Takes the lock of a writer or a reader, whichever there was.
    ///
    /// # Errors
    /// Those bytes are in use by way of the disk.
    pub fn relock(&self, path: &Path, write: bool) -> Result<(), Error> {
        let (fd, range) = (self.source.buffered.as_fd(), &self.range);
        match locks::take_range(fd, write, range, locks::a_moment) {
            // The partition's file system has none, either, which was said of it.
            Ok(()) | Err(Refused::Unsupported(_)) => Ok(()),
            Err(Refused::Clash(clash)) => {
                let readers = write && locks::may_be_read(fd, range);
                Err(Error::InUse { path: path.to_owned(), clash, readers })
            }
            Err(Refused::Io(error)) => Err(crate::resolve::io(path, "its disk cannot be locked", error)),
        }
    }

    /// Another copy of the descriptors, with the same lock.
    ///
    /// # Errors
    /// There is no room for them.
    pub fn try_clone(&self) -> std::io::Result<OuterDisk> {
        Ok(OuterDisk { source: self.source.try_clone()?, range: self.range.clone() })
    }
}

/// The disk of the partition with this directory in sysfs.
fn open(dir: &Path, disk: u64, write: bool) -> Result<FileSource, String> {
    let uevent = fs::read_to_string(dir.join("../uevent")).map_err(|error| error.to_string())?;
    let name = uevent.lines().find_map(|line| line.strip_prefix("DEVNAME=")).ok_or("it has no name")?;
    let path = Path::new("/dev").join(name);
    let opened = || -> Result<FileSource, Error> {
        let found = resolve(&path)?;
        let (fd, unwritable) = open_inode(&path, &found.inode, found.kind, !write)?;
        if unwritable.is_some() {
            return Err(Error::Permission { path: path.clone(), source: rustix::io::Errno::ACCESS.into() });
        }
        let size = size_of(&path, &fd, found.kind)?;
        let file = HostFile { path: path.clone(), fd, kind: found.kind, stat: found.stat, size };
        FileSource::new(file, write, 0, DirectIo::Auto)
    };
    let source = opened().map_err(|error| error.to_string())?;
    match rustix::fs::fstat(&source.buffered) {
        Ok(stat) if source.facts.kind == FileKind::Block && stat.st_rdev == disk => Ok(source),
        _ => Err(format!("{} is another device", path.display())),
    }
}
