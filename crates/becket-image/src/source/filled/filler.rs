//! What brings the bytes of a file that is filled while it is read: the store file of an image on another
//! host. It knows no protocol and no store, and never decides what is brought.

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::ReadAt;
use crate::source::kind::Identity;

/// What another process needs to bring the bytes of a file.
#[derive(Debug)]
pub struct Lent {
    /// Length of a chunk in bytes, a power of two.
    pub chunk: u64,
    /// The store's table of checksums, and what to fetch and with which rights: both opened with `O_PATH`, so
    /// that only a process with rights to the files can read them.
    pub table: OwnedFd,
    /// See `table`.
    pub order: OwnedFd,
    /// Chunks that are in the file and were compared with their checksums.
    pub good: Vec<u64>,
}

/// What brings the bytes of one file. Its [`ReadAt`] waits until the bytes are there.
pub trait Filler: ReadAt + Debug {
    /// What the file is called: where its bytes come from. Safe to show.
    fn name(&self) -> String;

    /// Puts all bytes of these ranges, which are sorted by their starts, into the file. Ranges behind the end
    /// are ignored.
    ///
    /// # Errors
    /// They cannot be brought, or the file cannot be written.
    fn bring(&self, ranges: &[Range<u64>]) -> io::Result<()>;

    /// What another process needs to go on with it.
    ///
    /// # Errors
    /// A descriptor cannot be made.
    fn lend(&self) -> io::Result<Lent>;
}

/// The files that are filled while they are read, and what fills each.
#[derive(Debug, Clone, Default)]
pub struct Fillers(Vec<(Identity, Arc<dyn Filler>)>);

impl Fillers {
    /// One more file.
    pub fn add(&mut self, file: Identity, filler: Arc<dyn Filler>) {
        self.0.push((file, filler));
    }

    /// What fills a file; `None` where all its bytes are there.
    pub fn of(&self, file: Identity) -> Option<Arc<dyn Filler>> {
        self.0.iter().find(|(known, _)| *known == file).map(|(_, filler)| Arc::clone(filler))
    }
}

impl PartialEq for Fillers {
    /// Whether the same files are filled.
    fn eq(&self, other: &Fillers) -> bool {
        self.0.iter().map(|(file, _)| file).eq(other.0.iter().map(|(file, _)| file))
    }
}

impl Eq for Fillers {}
