//! The words of the table that `presence` speaks of: a header of counters and flags, and a map with a bit for
//! each chunk, several times. Says nothing of what they mean; no length and no index is read from them.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use becket_uapi::shared::{self, Words};

/// The most chunks of a file.
pub const MOST_CHUNKS: u64 = 1 << 20;

/// Words of the header; the maps follow.
pub(super) const HEAD: usize = 16;
/// Counts what readers ask. They wake the fetcher by it.
pub(super) const ASKED: usize = 0;
/// Counts what comes. Readers wait for it.
pub(super) const CAME: usize = 1;
/// Readers of what is not there fail and do not wait.
pub(super) const FAILS: usize = 2;
/// Counts how often chunks have gone from memory.
pub(super) const DEPARTURES: usize = 3;
/// Whether chunks are, or have been, in memory.
pub(super) const USES_MEMORY: usize = 4;
/// Whether what nobody waits for rests until there is room for it.
pub(super) const RESTS: usize = 6;
/// How many chunks the file had when this was made that nobody has compared with their checksums since.
pub(super) const UNCHECKED: usize = 5;

/// The words, mapped into memory.
#[derive(Debug)]
pub(super) struct Bits {
    words: Words,
    /// Words of a map.
    map: usize,
    /// It has room for chunks in memory. Tables of version 0.1.0 have none, and not the map for that.
    roomy: bool,
}

/// One of the four maps.
#[derive(Debug, Clone, Copy)]
pub(super) enum Which {
    There,
    Wanted,
    Later,
    InMemory,
}

/// How many maps there are.
const MAPS: usize = 4;

/// The words of a map, for so many bytes in chunks of that length.
fn words_of_map(size: u64, chunk: u64) -> io::Result<usize> {
    let chunks = size.div_ceil(chunk.max(1));
    if !chunk.is_power_of_two() || !(1..=MOST_CHUNKS).contains(&chunks) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "its chunks are impossible"));
    }
    usize::try_from(chunks.div_ceil(32)).map_err(io::Error::other)
}

/// The room behind the table in bytes: as long as the file, and longer by its words, so that the length is
/// that of no other table.
fn room(size: u64, map: usize) -> u64 {
    size.saturating_add(map as u64)
}

impl Bits {
    /// A file of such words, none of which is set.
    pub(super) fn file(size: u64, chunk: u64) -> io::Result<OwnedFd> {
        let map = words_of_map(size, chunk)?;
        shared::file("becket-presence", HEAD + MAPS * map, room(size, map))
    }

    /// The words that a descriptor has, of a file of so many bytes in chunks of that length.
    pub(super) fn map(fd: &OwnedFd, size: u64, chunk: u64) -> io::Result<Bits> {
        let map = words_of_map(size, chunk)?;
        let (words, roomy) = match Words::map(fd, HEAD + MAPS * map, room(size, map)) {
            Ok(words) => (words, true),
            Err(_) => (Words::map(fd, HEAD + Which::InMemory as usize * map, 0)?, false),
        };
        Ok(Bits { words, map, roomy })
    }

    /// Whether there is room behind the words.
    pub(super) fn is_roomy(&self) -> bool {
        self.roomy
    }

    /// Where that begins in the file.
    pub(super) fn behind(&self) -> u64 {
        shared::room_behind(HEAD + MAPS * self.map)
    }

    #[inline]
    pub(super) fn word(&self, which: Which, chunk: u64) -> Option<(&AtomicU32, u32)> {
        let index = usize::try_from(chunk / 32).ok().filter(|index| *index < self.map)?;
        Some((self.words.get(HEAD + which as usize * self.map + index)?, 1 << (chunk % 32)))
    }

    #[inline]
    pub(super) fn has(&self, which: Which, chunk: u64) -> bool {
        self.word(which, chunk).is_some_and(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
    }

    pub(super) fn set(&self, which: Which, chunk: u64) {
        if let Some((word, bit)) = self.word(which, chunk) {
            word.fetch_or(bit, Ordering::SeqCst);
        }
    }

    pub(super) fn clear(&self, which: Which, chunk: u64) {
        if let Some((word, bit)) = self.word(which, chunk) {
            word.fetch_and(!bit, Ordering::SeqCst);
        }
    }

    /// Sets the bits of a word at once, so that the fetcher sees few requests and not many.
    pub(super) fn ask(&self, which: Which, chunks: Range<u64>) {
        let mut at = chunks.start;
        while at < chunks.end {
            let end = chunks.end.min((at / 32 + 1) * 32);
            let bits = (u64::from(u32::MAX) >> (32 - (end - at))) << (at % 32);
            if let (Some((word, _)), Some((there, _))) = (self.word(which, at), self.word(Which::There, at)) {
                let missing = !there.load(Ordering::Acquire);
                word.fetch_or(u32::try_from(bits).unwrap_or(u32::MAX) & missing, Ordering::SeqCst);
            }
            at = end;
        }
        self.count(ASKED);
    }

    pub(super) fn count(&self, which: usize) {
        let word = self.head(which);
        word.fetch_add(1, Ordering::SeqCst);
        shared::wake(word);
    }

    #[inline]
    pub(super) fn head(&self, index: usize) -> &AtomicU32 {
        // Mapped with at least the header, so that there always is one.
        static NONE: AtomicU32 = AtomicU32::new(0);
        self.words.get(index).unwrap_or(&NONE)
    }
}
