//! A source of any kind.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::file::facts::{DirectIo, Facts};
use super::file::{FileFacts, FileSource};
use super::filled::{FilledFacts, FilledSource};
use super::kind::{Identity, SourceKind};
use super::link::{LinkFacts, LinkSource};
use crate::ReadAt;

/// One place that bytes of an image come from.
#[derive(Debug)]
pub enum Source {
    /// A regular file or a block device of this host.
    File(FileSource),
    /// An export of an NBD server.
    Link(LinkSource),
    /// A store file of this host that is filled while it is read.
    Filled(FilledSource),
}

/// What is said of a source to another process, beside its descriptors. Each kind has fields that no other
/// has, and refuses those of others; a file's have no word for the kind, because older builds know none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SourceFacts {
    /// Of a [`Source::File`].
    File(FileFacts),
    /// Of a [`Source::Link`].
    Link(LinkFacts),
    /// Of a [`Source::Filled`].
    Filled(FilledFacts),
}

impl SourceFacts {
    /// How many descriptors come with it.
    pub fn descriptors(&self) -> usize {
        match self {
            SourceFacts::File(file) => file.descriptors(),
            SourceFacts::Link(link) => link.descriptors(),
            SourceFacts::Filled(filled) => filled.descriptors(),
        }
    }

    /// The feature that a process must have to understand it; `None` where every one does.
    pub fn feature(&self) -> Option<&'static str> {
        match self {
            SourceFacts::File(file) => file.feature(),
            SourceFacts::Link(link) => Some(link.feature()),
            SourceFacts::Filled(filled) => Some(filled.feature()),
        }
    }

    /// Whether the process that serves it talks to a stranger, and so must have nothing of anybody else.
    pub fn is_talkative(&self) -> bool {
        matches!(self, SourceFacts::Link(_))
    }

    /// The source again, of its next descriptors in the order of [`Source::descriptors`]; `None` where some
    /// are missing.
    pub fn join(self, fds: &mut impl Iterator<Item = OwnedFd>) -> Option<Source> {
        match self {
            SourceFacts::File(file) => file.join(fds).map(Source::File),
            SourceFacts::Link(link) => link.join(fds).map(Source::Link),
            SourceFacts::Filled(filled) => filled.join(fds).map(Source::Filled),
        }
    }
}

impl From<FileFacts> for SourceFacts {
    fn from(file: FileFacts) -> SourceFacts {
        SourceFacts::File(file)
    }
}

impl Source {
    fn kind(&self) -> &dyn SourceKind {
        match self {
            Source::File(file) => file,
            Source::Link(link) => link,
            Source::Filled(filled) => filled,
        }
    }

    /// The file, where it is one of this host whose bytes are all there.
    pub fn file(&self) -> Option<&FileSource> {
        if let Source::File(file) = self { Some(file) } else { None }
    }

    /// The export, where it is one of an NBD server.
    pub fn link(&self) -> Option<&LinkSource> {
        if let Source::Link(link) = self { Some(link) } else { None }
    }

    /// The store file, where it is one that is filled.
    pub fn filled(&self) -> Option<&FilledSource> {
        if let Source::Filled(filled) = self { Some(filled) } else { None }
    }

    /// The same, to be changed.
    pub fn filled_mut(&mut self) -> Option<&mut FilledSource> {
        if let Source::Filled(filled) = self { Some(filled) } else { None }
    }

    /// The smallest unit in bytes in which the servers of all these sources take requests; `None` where there
    /// is no server.
    pub fn smallest_unit(sources: &[Source]) -> Option<u32> {
        sources.iter().filter_map(Source::link).map(|link| link.agreed().smallest).max()
    }

    /// Whether finished writes to it may be lost if we do not have them flushed in the end: nothing on this
    /// host has them.
    pub fn needs_last_flush(&self) -> bool {
        match self {
            Source::File(_) | Source::Filled(_) => false,
            Source::Link(link) => link.may_write() && !link.is_durable(),
        }
    }

    /// What it can do. Of a source that is not a file, [`Facts::kind`] means nothing.
    pub fn facts(&self) -> &Facts {
        self.kind().facts()
    }

    /// Whether its bytes can go past the page cache.
    pub fn is_direct(&self) -> bool {
        match self {
            Source::File(file) => file.direct.is_some(),
            Source::Link(_) => false,
            Source::Filled(filled) => filled.file().direct.is_some(),
        }
    }

    /// What is said of it to another process.
    pub fn described(&self) -> SourceFacts {
        match self {
            Source::File(file) => SourceFacts::File(file.described()),
            Source::Link(link) => SourceFacts::Link(link.described()),
            Source::Filled(filled) => SourceFacts::Filled(filled.described()),
        }
    }

    /// Asks what else a process that serves it must know, and lets the page cache go where `wanted` and the
    /// image, which may be `encoded`, make no use of it.
    ///
    /// # Errors
    /// What syncs of a file hear cannot be kept.
    pub(crate) fn complete(&mut self, wanted: DirectIo, encoded: bool) -> io::Result<()> {
        match self {
            Source::File(file) => {
                let completed = file.complete();
                // What opening the others has read is forgotten already.
                if encoded && !file.facts.caches_stored(wanted) {
                    file.forget(wanted);
                }
                completed
            }
            Source::Link(_) => Ok(()),
            Source::Filled(filled) => filled.complete(),
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

    /// The same, which are given away.
    pub fn into_descriptors(self) -> Vec<OwnedFd> {
        match self {
            Source::File(file) => file.into_descriptors(),
            Source::Link(link) => link.into_descriptors(),
            Source::Filled(filled) => filled.into_descriptors(),
        }
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

impl From<LinkSource> for Source {
    fn from(link: LinkSource) -> Source {
        Source::Link(link)
    }
}

impl From<FilledSource> for Source {
    fn from(filled: FilledSource) -> Source {
        Source::Filled(filled)
    }
}
