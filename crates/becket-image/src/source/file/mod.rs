//! A source that is a regular file or a block device of this host: open, locked, and asked what it can do.
//! It is never looked up by its path a second time.
//!
//! Uses go down this list: `outer` locks the disk around a partition, `host` opens and locks, `kernel_users`
//! finds loop devices and swap space, `place` knows where a partition is, `locks` excludes other programs,
//! `facts` asks what the file can do, `heard` keeps what its syncs have heard.

pub(crate) mod facts;
pub mod heard;
pub(crate) mod host;
pub(crate) mod kernel_users;
pub(crate) mod locks;
pub(crate) mod outer;
pub(crate) mod place;

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, StatxFlags, makedev, statx};
use serde::{Deserialize, Serialize};

use self::facts::{DirectIo, Facts, FileKind, Known};
use self::heard::Heard;
use self::host::{HostFile, forget_cached, lock_alone};
use self::locks::Claim;
use super::kind::{Identity, SourceKind};
use crate::{Error, ReadAt};

/// A file or block device that holds bytes of an image.
#[derive(Debug)]
pub struct FileSource {
    /// Goes through the page cache; carries the locks.
    pub buffered: OwnedFd,
    /// The same inode with `O_DIRECT`, if that is possible: whether it is used can change while it is open.
    pub direct: Option<OwnedFd>,
    /// What it can do.
    pub facts: Facts,
    /// What its syncs have heard: of one that is written, and that a process is to serve.
    pub heard: Option<Heard>,
}

/// What is said of a file to another process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileFacts {
    /// What it can do.
    pub facts: Facts,
    /// A second descriptor comes along, for direct I/O.
    pub direct: bool,
    /// Those of [`FileSource::heard`] do. Builds that do not know it have served none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub heard: bool,
}

impl FileFacts {
    /// See `SourceFacts::descriptors`.
    pub(super) fn descriptors(&self) -> usize {
        1 + usize::from(self.direct) + if self.heard { heard::DESCRIPTORS } else { 0 }
    }

    /// See `SourceFacts::feature`.
    pub(super) fn feature(&self) -> Option<&'static str> {
        self.heard.then_some(heard::FEATURE)
    }

    /// See `SourceFacts::join`.
    pub(super) fn join(self, fds: &mut impl Iterator<Item = OwnedFd>) -> Option<FileSource> {
        let buffered = fds.next()?;
        let direct = if self.direct { Some(fds.next()?) } else { None };
        let heard = if self.heard { Some(Heard::join(fds)?) } else { None };
        Some(FileSource { buffered, direct, facts: self.facts, heard })
    }
}

impl FileSource {
    /// See `Source::described`.
    pub(super) fn described(&self) -> FileFacts {
        let (direct, heard) = (self.direct.is_some(), self.heard.is_some());
        FileFacts { facts: self.facts.clone(), direct, heard }
    }

    /// Asks an open file for what every opener needs; the image begins at its byte `offset`.
    ///
    /// # Errors
    /// Direct I/O is impossible, and was insisted on.
    pub(crate) fn new(
        file: HostFile,
        writable: bool,
        offset: u64,
        wanted: DirectIo,
    ) -> Result<FileSource, Error> {
        let HostFile { path, fd: buffered, kind, stat, size } = file;
        let known = Known { fd: buffered.as_fd(), stat: &stat, kind, size, writable, offset };
        let (facts, direct) = facts::ask(&known);
        if wanted == DirectIo::On && direct.is_none() {
            return Err(Error::DirectIo { path, reason: facts.direct_reason });
        }
        Ok(FileSource::of(buffered, direct, facts))
    }

    /// One of which nothing was heard.
    pub fn of(buffered: OwnedFd, direct: Option<OwnedFd>, facts: Facts) -> FileSource {
        FileSource { buffered, direct, facts, heard: None }
    }

    /// Asks what else a server must know.
    ///
    /// # Errors
    /// What its syncs hear cannot be kept.
    pub(crate) fn complete(&mut self) -> io::Result<()> {
        let direct = self.direct.as_ref().map(AsFd::as_fd);
        facts::complete(self.buffered.as_fd(), direct, &mut self.facts);
        if self.facts.writable {
            self.heard = Some(Heard::new(&self.buffered)?);
        }
        Ok(())
    }

    /// See `Source::into_descriptors`.
    pub(super) fn into_descriptors(self) -> Vec<OwnedFd> {
        let heard = self.heard.into_iter().flat_map(Heard::into_descriptors);
        std::iter::once(self.buffered).chain(self.direct).chain(heard).collect()
    }

    /// Leaves nothing in the page cache of a file that is read past it.
    pub(crate) fn forget(&self, wanted: DirectIo) {
        if self.direct.is_some() && wanted != DirectIo::Off && self.facts.kind == FileKind::Regular {
            forget_cached(self.buffered.as_fd());
        }
    }

    /// Takes the locks of an image that was opened `shared`, now that the conflicting users are gone; those
    /// of the disk around a partition are [`outer::OuterDisk`]'s.
    ///
    /// # Errors
    /// They are not.
    pub fn lock(&self, path: &Path, range: Option<&Range<u64>>, write: bool) -> Result<(), Error> {
        let range = range.cloned().unwrap_or(locks::WHOLE);
        let claim = Claim { write, shared: false, range };
        // Without locks it was opened with a warning already.
        lock_alone(path, &self.buffered, self.facts.kind, &claim, &mut Vec::new())
    }

    /// The same file by other descriptors, for reading.
    ///
    /// # Errors
    /// There is no room for them.
    pub fn try_clone(&self) -> io::Result<FileSource> {
        let direct = self.direct.as_ref().map(OwnedFd::try_clone).transpose()?;
        Ok(FileSource::of(self.buffered.try_clone()?, direct, self.facts.clone()))
    }
}

impl SourceKind for FileSource {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn len(&self) -> u64 {
        self.facts.size
    }

    fn identity(&self) -> Option<Identity> {
        // Neither changes while it is open, so the file system is not asked: it may not answer.
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let known = statx(&self.buffered, "", flags, StatxFlags::INO).ok()?;
        Some(Identity { dev: makedev(known.stx_dev_major, known.stx_dev_minor), ino: known.stx_ino })
    }

    /// The buffered one, then the direct one where there is one, then those of what was heard.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let heard = self.heard.iter().flat_map(|heard| heard.descriptors());
        std::iter::once(&self.buffered).chain(&self.direct).map(AsFd::as_fd).chain(heard).collect()
    }

    fn is_writable(&self) -> bool {
        self.facts.writable
    }

    fn reader(&self) -> io::Result<Arc<dyn ReadAt>> {
        Ok(Arc::new(self.buffered.try_clone()?))
    }

    fn unlock(&self) {
        for fd in self.descriptors() {
            // A file that could not be locked has no lock to give up, and what is left goes with the last
            // copy.
            let _ = becket_uapi::lock::ofd_unlock(fd, 0, 0);
        }
    }
}
