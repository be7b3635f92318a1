//! A source of any kind.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::file::FileSource;
use super::kind::{Identity, Kind};
use crate::ReadAt;

/// One place that bytes of an image come from.
#[derive(Debug)]
pub enum Source {
    /// A regular file or a block device of this host.
    File(FileSource),
}

impl Source {
    fn kind(&self) -> &dyn Kind {
        match self {
            Source::File(file) => file,
        }
    }

    /// Its length in bytes when it was opened. It can have grown since.
    #[allow(clippy::len_without_is_empty, reason = "an empty source is refused when it is opened")]
    pub fn len(&self) -> u64 {
        self.kind().len()
    }

    /// Which file it is, whatever its path; `None` where it is none of this host, or none can be named.
    pub fn identity(&self) -> Option<Identity> {
        self.kind().identity()
    }

    /// The descriptors that cross to the process that serves it, in this order. That process gets nothing
    /// else by which it could reach the bytes.
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.kind().descriptors()
    }

    /// Whether its descriptors can be written to.
    pub fn is_writable(&self) -> bool {
        self.kind().is_writable()
    }

    /// What reads its bytes now, for a process that may wait for them.
    ///
    /// # Errors
    /// A descriptor cannot be duplicated. Of a source whose bytes only its server can bring:
    /// [`io::ErrorKind::Unsupported`].
    pub fn reader(&self) -> io::Result<Arc<dyn ReadAt>> {
        self.kind().reader()
    }

    /// Gives up what keeps others away from it, even if other processes still hold copies of its descriptors:
    /// nothing may use these any more.
    pub fn unlock(&self) {
        self.kind().unlock();
    }
}

impl From<FileSource> for Source {
    fn from(file: FileSource) -> Source {
        Source::File(file)
    }
}
