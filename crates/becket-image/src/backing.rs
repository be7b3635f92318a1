//! What the bytes of a backing file come from, opened: a file of this host, or a server.
//! It opens nothing itself.

use rustix::fs::Stat;

use crate::connected::Remote;
use crate::source::file::host::HostFile;
use crate::{DirectIo, Error, FileSource, Identity, Source};

/// See the module.
#[derive(Debug)]
pub(crate) enum Linked {
    File(HostFile),
    Server(Box<Remote>),
}

impl Linked {
    pub(crate) fn identity(&self) -> Identity {
        match self {
            Linked::File(file) => file.identity(),
            Linked::Server(remote) => remote.identity(),
        }
    }

    pub(crate) fn file(&self) -> Option<&HostFile> {
        if let Linked::File(file) = self { Some(file) } else { None }
    }

    pub(crate) fn server(&self) -> Option<&Remote> {
        if let Linked::Server(remote) = self { Some(remote) } else { None }
    }

    /// Whether it is the file that `stat` is of.
    pub(crate) fn is(&self, stat: &Stat) -> bool {
        self.file().is_some_and(|file| file.is(stat))
    }

    /// As a source, which begins at `offset` of a file.
    pub(crate) fn into_source(
        self,
        writable: bool,
        offset: u64,
        direct_io: DirectIo,
    ) -> Result<Source, Error> {
        match self {
            Linked::File(file) => FileSource::new(file, writable, offset, direct_io).map(Source::from),
            Linked::Server(remote) => Ok(remote.source),
        }
    }
}
