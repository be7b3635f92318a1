//! Where the bytes of an image come from. A map says which byte is in which source ([`crate::Place::Data`]).
//! A source is open before a map speaks of it; nothing here looks at what the bytes mean.
//!
//! What only one kind of source has (facts, locks, direct I/O, an identity) is in the folder of that kind. A
//! kind is one variant here and one folder; the engine has a target for each kind.

pub(crate) mod file;

use file::FileSource;

/// One place that bytes of an image come from.
#[derive(Debug)]
pub enum Source {
    /// A regular file or a block device of this host.
    File(FileSource),
}

impl From<FileSource> for Source {
    fn from(file: FileSource) -> Source {
        Source::File(file)
    }
}
