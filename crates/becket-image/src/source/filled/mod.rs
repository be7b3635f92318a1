//! A source that is a store file which is filled while it is read: an ordinary file of this host where a
//! chunk is there. It knows no protocol and no store.
//!
//! Uses go down this list: `filler` brings bytes within the process that opens an image, `presence` says to
//! other processes which chunks are there (its words are in `bits`), `memory` has those for which the file
//! has no room.

mod bits;
mod filler;
mod memory;
mod presence;

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use self::bits::MOST_CHUNKS;
pub use self::filler::{Condition, Fetching, Filler, Fillers, Lent};
pub use self::memory::Memory;
pub use self::presence::{Presence, Where};
use super::file::facts::Facts;
use super::file::{FileFacts, FileSource};
use super::kind::{Identity, SourceKind};
use crate::ReadAt;

/// The feature of devices with such a source.
pub const FEATURE: &str = "filled-2";
/// That of devices of version 0.1.0, whose tables have no room for chunks in memory.
pub const FEATURE_OLD: &str = "filled";
/// That of devices whose bytes are decoded while they are read.
pub const FEATURE_PACKED: &str = "filled-packed";

/// What is said of a store file to another process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilledFacts {
    filled: Said,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Said {
    file: FileFacts,
    /// Length of a chunk in bytes.
    chunk: u64,
    /// How many descriptors come with it of what it is decoded from.
    #[serde(default, skip_serializing_if = "is_zero")]
    packed: u8,
}

/// The most of them.
const PACKED_MAX: u8 = 2;

fn is_zero(number: &u8) -> bool {
    *number == 0
}

impl FilledFacts {
    /// See `SourceFacts::descriptors`.
    pub(super) fn descriptors(&self) -> usize {
        self.filled.file.descriptors() + 3 + usize::from(self.filled.packed)
    }

    /// See `SourceFacts::feature`.
    pub(super) fn feature(&self) -> &'static str {
        if self.filled.packed == 0 { FEATURE } else { FEATURE_PACKED }
    }

    /// See `SourceFacts::join`.
    pub(super) fn join(self, fds: &mut impl Iterator<Item = OwnedFd>) -> Option<FilledSource> {
        let Said { file, chunk, packed } = self.filled;
        let file = file.join(fds)?;
        let presence = Presence::open(fds.next()?, file.facts.size, chunk).ok()?;
        let [table, order] = [fds.next()?, fds.next()?];
        if packed > PACKED_MAX {
            return None;
        }
        let packed = (0..packed).map(|_| fds.next()).collect::<Option<_>>()?;
        let envelopes = Envelopes { table, order, packed };
        Some(FilledSource { file, presence: Arc::new(presence), envelopes })
    }
}

/// A store file, and how the process that brings its bytes is reached.
#[derive(Debug)]
pub struct FilledSource {
    file: FileSource,
    presence: Arc<Presence>,
    envelopes: Envelopes,
}

/// What the process needs that brings the bytes. The worker only holds it for its successor.
#[derive(Debug)]
pub struct Envelopes {
    /// The store's table of checksums, and the fetcher's order: descriptors without a right to read
    /// (`O_PATH`).
    pub table: OwnedFd,
    /// See `table`.
    pub order: OwnedFd,
    /// [`Lent::packed`].
    pub packed: Vec<OwnedFd>,
}

impl Envelopes {
    /// All of them, in their order.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [&self.table, &self.order].into_iter().chain(&self.packed).map(OwnedFd::as_fd)
    }
}

impl FilledSource {
    /// The store file of a filler, which was opened as any file.
    ///
    /// # Errors
    /// It is not as long as what is lent.
    pub fn new(file: FileSource, lent: Lent) -> io::Result<FilledSource> {
        let Lent { presence, table, order, packed } = lent;
        if presence.size() != file.facts.size {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the store file has another length"));
        }
        let envelopes = Envelopes { table, order, packed };
        Ok(FilledSource { file, presence: Arc::new(presence), envelopes })
    }

    /// The file, as far as it is filled. A reader must ask [`FilledSource::presence`] first.
    pub fn file(&self) -> &FileSource {
        &self.file
    }

    /// Which file it is, whatever its path.
    pub fn identity(&self) -> Option<Identity> {
        self.file.identity()
    }

    /// Which chunks are there.
    pub fn presence(&self) -> &Arc<Presence> {
        &self.presence
    }

    /// Uses the table of another device of the same store file; what was asked of the own one is asked there.
    pub fn share(&mut self, presence: Arc<Presence>) {
        presence.take_over(&self.presence);
        self.presence = presence;
    }

    /// The file, the table and the envelopes.
    pub fn into_parts(self) -> (FileSource, Arc<Presence>, Envelopes) {
        (self.file, self.presence, self.envelopes)
    }

    /// What the process needs that brings the bytes.
    pub fn envelopes(&self) -> &Envelopes {
        &self.envelopes
    }

    /// See `Source::described`.
    pub(super) fn described(&self) -> FilledFacts {
        let packed = u8::try_from(self.envelopes.packed.len()).unwrap_or(u8::MAX);
        FilledFacts { filled: Said { file: self.file.described(), chunk: self.presence.chunk(), packed } }
    }

    /// See `Source::complete`.
    pub(super) fn complete(&mut self) -> io::Result<()> {
        self.file.complete()
    }

    /// See `Source::into_descriptors`.
    pub(super) fn into_descriptors(self) -> Vec<OwnedFd> {
        let FilledSource { file, presence, envelopes: Envelopes { table, order, packed } } = self;
        let presence = match Arc::try_unwrap(presence) {
            Ok(presence) => Some(presence.into_fd()),
            Err(shared) => shared.fd().try_clone_to_owned().ok(),
        };
        let rest = presence.into_iter().chain([table, order]).chain(packed);
        file.into_descriptors().into_iter().chain(rest).collect()
    }
}

impl SourceKind for FilledSource {
    fn facts(&self) -> &Facts {
        &self.file.facts
    }

    fn len(&self) -> u64 {
        self.file.len()
    }

    fn identity(&self) -> Option<Identity> {
        self.file.identity()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let mut all = self.file.descriptors();
        all.push(self.presence.fd());
        all.extend(self.envelopes.descriptors());
        all
    }

    /// What comes from elsewhere is only read.
    fn is_writable(&self) -> bool {
        false
    }

    fn reader(&self) -> io::Result<Arc<dyn ReadAt>> {
        Ok(Arc::new(Waiting { file: self.file.reader()?, presence: Arc::clone(&self.presence) }))
    }

    fn unlock(&self) {
        self.file.unlock();
    }
}

/// Reads such a file, and waits for what is not there.
struct Waiting {
    file: Arc<dyn ReadAt>,
    presence: Arc<Presence>,
}

impl ReadAt for Waiting {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let (mut done, mut asked) = (0, None);
        loop {
            let (seen, departures) = (self.presence.news(), self.presence.departures());
            let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) else { return Ok(()) };
            let (at, left) = (offset.saturating_add(done as u64), rest.len() as u64);
            let read = self.presence.read_start(&*self.file, rest, at)?;
            if read > 0 {
                done += read;
                continue;
            }
            if self.presence.fails() {
                return Err(io::Error::other("its bytes cannot be fetched"));
            }
            if asked != Some(departures) {
                self.presence.ask(at, left);
                asked = Some(departures);
            }
            self.presence.await_news(seen);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;

    use super::*;
    use crate::source::Source;

    #[test]
    fn a_reader_in_another_process_waits_for_a_chunk() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("store");
        let store = File::create_new(&path).unwrap();
        store.set_len(8 * 4096).unwrap();
        let opened =
            crate::open(&path, &crate::OpenOptions { read_only: true, ..Default::default() }).unwrap();
        let Some(Source::File(file)) = opened.sources.into_iter().next() else { panic!() };
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let table = Presence::new(8 * 4096, 4096).unwrap();
        table.put(0, Where::File);
        let lent = Lent { presence: table, table: null(), order: null(), packed: vec![null()] };
        let source = Source::from(FilledSource::new(file, lent).unwrap());
        let (facts, count) = (source.described(), source.descriptors().len());
        assert_eq!(facts.descriptors(), count);
        assert_eq!(facts.feature(), Some(FEATURE_PACKED));
        let text = serde_json::to_string(&facts).unwrap();
        let facts: crate::SourceFacts = serde_json::from_str(&text).unwrap();
        let Source::Filled(ours) = &source else { panic!() };
        let presence = Arc::clone(ours.presence());
        let mut fds = source.into_descriptors().into_iter();
        let there = facts.join(&mut fds).unwrap();
        assert!(fds.next().is_none() && there.file().is_none() && !there.is_writable());
        let reader = there.reader().unwrap();
        reader.read_at(&mut [1; 4096], 0).unwrap();
        std::thread::scope(|scope| {
            let reads = scope.spawn(|| {
                let mut bytes = [0; 2];
                reader.read_at(&mut bytes, 4 * 4096 - 1).map(|()| bytes)
            });
            while presence.next_wanted(0, false, &mut |_| true).is_none() {
                presence.await_ask(presence.asked(), Some(std::time::Duration::from_millis(10)));
            }
            for chunk in [3, 4] {
                assert!(presence.is_wanted(chunk) && !reads.is_finished());
                store.write_all_at(&[7; 4096], chunk * 4096).unwrap();
                presence.put(chunk, Where::File);
                presence.tell();
            }
            assert_eq!(reads.join().unwrap().unwrap(), [7, 7]);
        });
        // For the next two the file has no room.
        for chunk in [6, 7] {
            presence.memory().write(&[chunk as u8; 4096], chunk * 4096).unwrap();
            presence.put(chunk, Where::Memory);
        }
        let mut bytes = [0; 4096 * 4];
        presence.put(5, Where::File);
        reader.read_at(&mut bytes, 4 * 4096).unwrap();
        let firsts: Vec<u8> = bytes.chunks(4096).map(|chunk| chunk[0]).collect();
        assert_eq!(firsts, [7, 0, 6, 7], "of two files");
        presence.depart(6..7);
        presence.memory().free(6 * 4096, 4096).unwrap();
        std::thread::scope(|scope| {
            let reads = scope.spawn(|| reader.read_at(&mut bytes, 4 * 4096).unwrap());
            while presence.next_wanted(0, false, &mut |_| true).is_none() {
                presence.await_ask(presence.asked(), Some(std::time::Duration::from_millis(10)));
            }
            assert!(presence.is_wanted(6) && !presence.is_wanted(7) && !reads.is_finished());
            store.write_all_at(&[9; 4096], 6 * 4096).unwrap();
            presence.put(6, Where::File);
            presence.tell();
        });
        assert_eq!((bytes[2 * 4096], bytes[3 * 4096]), (9, 7), "it has room again");
        presence.depart([1, 7].into_iter());
        presence.set_fails(true);
        reader.read_at(&mut [0; 1], 3 * 4096).unwrap();
        reader.read_at(&mut [0; 1], 7 * 4096).unwrap_err();
    }
}
