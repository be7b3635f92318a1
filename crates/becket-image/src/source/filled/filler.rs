//! What brings the bytes of a file that is filled while it is read: the store file of an image on another
//! host. It knows no protocol and no store, and never decides what is brought.

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::presence::Presence;
use crate::ReadAt;
use crate::source::kind::Identity;

/// What another process needs to bring the bytes of a file.
#[derive(Debug)]
pub struct Lent {
    /// Which chunks are there. Those in the file were compared with their checksums.
    pub presence: Presence,
    /// The store's table of checksums, and what to fetch and with which rights: both opened with `O_PATH`, so
    /// that only a process with rights to the files can read them.
    pub table: OwnedFd,
    /// See `table`.
    pub order: OwnedFd,
    /// Where its bytes come from, if they are decoded: the compressed file, and if that is filled, too, its
    /// table of checksums, opened as `table`.
    pub packed: Vec<OwnedFd>,
}

/// What a process gets that brings the bytes of one file for readers in other processes.
pub struct Fetching {
    /// The file, to be written.
    pub data: OwnedFd,
    /// The store's table of checksums, to be read and written.
    pub table: OwnedFd,
    /// What to fetch and with which rights: [`Lent::order`], to be read.
    pub order: OwnedFd,
    /// What readers ask, and what they are shown.
    pub presence: Presence,
    /// [`Lent::packed`]: a file that is filled, and its table, to be read and written.
    pub packed: Vec<OwnedFd>,
    /// How long the server may be away until requests fail; for ever, when not given.
    pub timeout: Option<Duration>,
    /// Hears how it goes.
    pub tell: Box<dyn Fn(Condition) + Send + Sync>,
}

impl Debug for Fetching {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fetching").field("presence", &self.presence).finish_non_exhaustive()
    }
}

/// How the fetching of a file goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// Its server answers.
    Fine,
    /// Its server or the store cannot be reached; it is tried again.
    Away(String),
    /// The store has no room for what nobody waits for.
    Full,
    /// The server has another version: what is missing cannot be had any more.
    Changed(String),
    /// What is missing cannot be decoded, or all of it is not what its digest says.
    Damaged(String),
}

/// What brings the bytes of one file. Its [`ReadAt`] waits until the bytes are there.
pub trait Filler: ReadAt + Debug {
    /// What the file is called: where its bytes come from. Safe to show.
    fn name(&self) -> String;

    /// Brings the bytes of a range. Says whether they are in the file: what that has no room for can only be
    /// read by [`ReadAt`].
    ///
    /// # Errors
    /// They cannot be brought, or the file cannot be written.
    fn bring(&self, range: Range<u64>) -> io::Result<bool>;

    /// What another process needs to go on with it.
    ///
    /// # Errors
    /// A descriptor cannot be made.
    fn lend(&self) -> io::Result<Lent>;
}

/// The files of a store, and what fills each while it is read.
#[derive(Debug, Clone, Default)]
pub struct Fillers(Vec<(Identity, Filled)>);

#[derive(Debug, Clone)]
enum Filled {
    By(Arc<dyn Filler>),
    /// All bytes are there; what the file is called.
    Complete(String),
}

impl Fillers {
    /// One more file.
    pub fn add(&mut self, file: Identity, filler: Arc<dyn Filler>) {
        self.0.push((file, Filled::By(filler)));
    }

    /// One more file whose bytes are all there; `name` as [`Filler::name`].
    pub fn add_complete(&mut self, file: Identity, name: String) {
        self.0.push((file, Filled::Complete(name)));
    }

    fn get(&self, file: Identity) -> Option<&Filled> {
        self.0.iter().find(|(known, _)| *known == file).map(|(_, filled)| filled)
    }

    /// All files of another set, too.
    pub fn extend(&mut self, others: Fillers) {
        self.0.extend(others.0);
    }

    /// What fills a file; `None` where all its bytes are there.
    pub fn of(&self, file: Identity) -> Option<Arc<dyn Filler>> {
        if let Some(Filled::By(filler)) = self.get(file) { Some(Arc::clone(filler)) } else { None }
    }

    /// What a file of the store is called.
    pub fn name_of(&self, file: Identity) -> Option<String> {
        self.get(file).map(|filled| match filled {
            Filled::By(filler) => filler.name(),
            Filled::Complete(name) => name.clone(),
        })
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a file is one of a store: it can be incomplete, and go.
    pub fn has(&self, file: Identity) -> bool {
        self.get(file).is_some()
    }
}

impl PartialEq for Fillers {
    /// Whether the same files are filled.
    fn eq(&self, other: &Fillers) -> bool {
        self.0.iter().map(|(file, _)| file).eq(other.0.iter().map(|(file, _)| file))
    }
}

impl Eq for Fillers {}
