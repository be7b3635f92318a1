//! Which chunks of a store file are there: a table in memory that the process which brings them shares with
//! all who read the file. Reading it needs no system call and no lock.
//!
//! Four maps have a bit for each chunk. *There*: set when its bytes can be read. *Wanted*: set by readers
//! who wait, cleared when the chunk is there. *Later*: wanted when nobody waits. *In memory*: its bytes are
//! not in the file, which has no room for them, but behind the table (`memory`).
//! Nothing is lost with a process: what was asked stands in the table for the next one. Other processes write
//! the words, so no length and no index is ever read from the table.
//!
//! A chunk that is in the file stays there. One in memory can go, and a reader may be about to read it:
//! *there* is cleared first, then the departures are counted, and then its memory is freed. So a reader that
//! notes the count, then looks, and finds the same count when it has read, has read the chunk
//! ([`Presence::departures`]).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use becket_uapi::shared;
use rustix::fs::FlockOperation;

use super::bits::{ASKED, Bits, CAME, DEPARTURES, FAILS, RESTS, UNCHECKED, USES_MEMORY, Which};
use super::memory::Memory;
use crate::ReadAt;

/// See the module.
#[derive(Debug)]
pub struct Presence {
    file: File,
    bits: Bits,
    /// The chunk's length in bytes is 1 shifted by this.
    shift: u32,
    /// Length of the file in bytes.
    size: u64,
}

/// Where the bytes of a chunk are that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Where {
    /// In the file.
    File,
    /// Behind the table.
    Memory,
}

impl Presence {
    /// The table of a file of `size` bytes in chunks of `chunk` bytes of which none is there.
    ///
    /// # Errors
    /// There are too many chunks, or no memory.
    pub fn new(size: u64, chunk: u64) -> io::Result<Presence> {
        Presence::open(Bits::file(size, chunk)?, size, chunk)
    }

    /// The table that a descriptor has, of such a file.
    ///
    /// # Errors
    /// It is none.
    pub fn open(fd: OwnedFd, size: u64, chunk: u64) -> io::Result<Presence> {
        let bits = Bits::map(&fd, size, chunk)?;
        Ok(Presence { file: fd.into(), bits, shift: chunk.trailing_zeros(), size })
    }

    /// Another handle of the same table.
    ///
    /// # Errors
    /// There is no descriptor or no memory.
    pub fn again(&self) -> io::Result<Presence> {
        Presence::open(self.file.try_clone()?.into(), self.size, 1 << self.shift)
    }

    /// The descriptor by which another process gets it.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Gives the descriptor away.
    pub fn into_fd(self) -> OwnedFd {
        self.file.into()
    }

    /// Length of the file in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Length of a chunk in bytes.
    pub fn chunk(&self) -> u64 {
        1 << self.shift
    }

    /// How many chunks there are.
    pub fn chunks(&self) -> u64 {
        self.size.div_ceil(self.chunk())
    }

    /// The chunks that a range of bytes touches, within the file.
    #[inline]
    pub fn chunks_of(&self, offset: u64, len: u64) -> Range<u64> {
        let end = offset.saturating_add(len).min(self.size);
        let last = end.wrapping_sub(1) >> self.shift;
        if offset >= end { 0..0 } else { offset >> self.shift..last + 1 }
    }

    /// Whether a chunk is there.
    #[inline]
    pub fn has(&self, chunk: u64) -> bool {
        self.bits.has(Which::There, chunk)
    }

    /// Where a chunk is. One that is in the file stays there, unless all are withdrawn.
    #[inline]
    pub fn place(&self, chunk: u64) -> Option<Where> {
        // In this order: what is no longer in memory is in the file.
        match self.has(chunk) {
            true if self.bits.has(Which::InMemory, chunk) => Some(Where::Memory),
            true => Some(Where::File),
            false => None,
        }
    }

    /// Where the first chunk of a range of bytes is, and how many bytes of the range are there in the same
    /// place, from its start on.
    #[inline]
    pub fn start_of(&self, offset: u64, len: u64) -> Option<(Where, u64)> {
        let mut chunks = self.chunks_of(offset, len);
        let place = self.place(chunks.next()?)?;
        let other = chunks.find(|chunk| self.place(*chunk) != Some(place));
        Some((place, other.map_or(len, |chunk| (chunk << self.shift) - offset)))
    }

    /// Whether all chunks of a range of bytes are there.
    #[inline]
    pub fn has_all(&self, offset: u64, len: u64) -> bool {
        self.chunks_of(offset, len).all(|chunk| self.has(chunk))
    }

    /// How many bytes of the file are there, and how many of them in memory.
    pub fn there(&self) -> (u64, u64) {
        let chunks = self.chunks();
        let load =
            |which, first| self.bits.word(which, first).map_or(0, |(word, _)| word.load(Ordering::Relaxed));
        let (mut all, mut memory) = (0, 0);
        for first in (0..chunks).step_by(32) {
            let there = load(Which::There, first);
            all += u64::from(there.count_ones());
            memory += u64::from((there & load(Which::InMemory, first)).count_ones());
        }
        // The last chunk may be a short one.
        let short = chunks * self.chunk() - self.size;
        let last = chunks.checked_sub(1).and_then(|last| self.place(last));
        let bytes = |count: u64, short| (count.min(chunks) * self.chunk()).saturating_sub(short);
        let short_in = |is: bool| if is { short } else { 0 };
        (bytes(all, short_in(last.is_some())), bytes(memory, short_in(last == Some(Where::Memory))))
    }

    /// Notes how many chunks the file has that are not there yet, since nobody has compared them with their
    /// checksums.
    pub fn expect(&self, chunks: u64) {
        self.bits.head(UNCHECKED).store(u32::try_from(chunks).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// One of them was compared. It may have been damaged.
    pub fn checked(&self) {
        let less = |count: u32| count.checked_sub(1);
        let _ = self.bits.head(UNCHECKED).fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// How many bytes of the file are stored, for people: those that are there, and those that are to be
    /// compared. And how many are in memory.
    pub fn stored(&self) -> (u64, u64) {
        let (all, memory) = self.there();
        let unchecked =
            u64::from(self.bits.head(UNCHECKED).load(Ordering::Relaxed)).saturating_mul(self.chunk());
        (all.saturating_sub(memory).saturating_add(unchecked).min(self.size), memory)
    }

    /// The range of bytes around a chunk that is in the file, as far as all of it is; no further than `most`
    /// chunks to each side.
    pub fn around(&self, chunk: u64, most: u64) -> Range<u64> {
        let (mut first, mut end) = (chunk, chunk + 1);
        let in_file = |chunk| self.place(chunk) == Some(Where::File);
        while first > 0 && chunk - first < most && in_file(first - 1) {
            first -= 1;
        }
        while end - chunk <= most && in_file(end) {
            end += 1;
        }
        first << self.shift..(end << self.shift).min(self.size)
    }

    /// Asks for the chunks of a range of bytes that are not there.
    pub fn ask(&self, offset: u64, len: u64) {
        self.bits.ask(Which::Wanted, self.chunks_of(offset, len));
    }

    /// The same for when nobody waits for anything.
    pub fn ask_later(&self, offset: u64, len: u64) {
        self.bits.ask(Which::Later, self.chunks_of(offset, len));
    }

    /// Has the fetcher look at what is asked for once more.
    pub fn look_again(&self) {
        self.bits.count(ASKED);
    }

    /// Takes over what was asked of another table of the same file. What is there is for the process to say
    /// that brings the chunks of this one.
    pub fn take_over(&self, other: &Presence) {
        for first in (0..self.chunks()).step_by(32) {
            for which in [Which::Wanted, Which::Later] {
                if let (Some((mine, _)), Some((theirs, _))) =
                    (self.bits.word(which, first), other.bits.word(which, first))
                {
                    mine.fetch_or(theirs.load(Ordering::SeqCst), Ordering::SeqCst);
                }
            }
        }
        self.bits.count(ASKED);
    }

    /// Whether no other process lets chunks go from memory: the first that asks is the one, as long as it
    /// lives.
    pub fn is_alone(&self) -> bool {
        rustix::fs::fcntl_lock(&self.file, FlockOperation::NonBlockingLockExclusive).is_ok()
    }

    /// Whether a request waits for a chunk.
    pub fn is_wanted(&self, chunk: u64) -> bool {
        self.bits.has(Which::Wanted, chunk) && !self.has(chunk)
    }

    /// Whether a chunk is to come when nobody waits for anything.
    pub fn is_later(&self, chunk: u64) -> bool {
        self.bits.has(Which::Later, chunk) && !self.has(chunk)
    }

    /// The first chunk from `from` on, and then from the beginning on, that is wanted, or wanted later, and
    /// of which `is` says so. That is asked once of each chunk at most, whatever comes meanwhile.
    pub fn next_wanted(&self, from: u64, later: bool, is: &mut dyn FnMut(u64) -> bool) -> Option<u64> {
        let which = if later { Which::Later } else { Which::Wanted };
        let chunks = self.chunks();
        let mut find = |range: Range<u64>| {
            let mut at = range.start;
            while at < range.end {
                match self.bits.word(which, at).map(|(word, _)| word.load(Ordering::SeqCst)) {
                    // A whole word of nothing.
                    Some(0) => at = (at / 32 + 1) * 32,
                    _ if self.bits.has(which, at) && !self.has(at) && is(at) => return Some(at),
                    _ => at += 1,
                }
            }
            None
        };
        let from = from.min(chunks);
        find(from..chunks).or_else(|| find(0..from))
    }

    /// A chunk's bytes are there. Readers hear of it by [`Presence::tell`].
    pub fn put(&self, chunk: u64, place: Where) {
        match place {
            Where::File => self.bits.clear(Which::InMemory, chunk),
            Where::Memory => {
                self.bits.head(USES_MEMORY).store(1, Ordering::SeqCst);
                self.bits.set(Which::InMemory, chunk);
            }
        }
        self.bits.set(Which::There, chunk);
        [Which::Wanted, Which::Later].into_iter().for_each(|which| self.bits.clear(which, chunk));
    }

    /// Chunks in memory are no longer there: their memory may be freed. Those that are in the file stay.
    pub fn depart(&self, chunks: impl Iterator<Item = u64>) {
        for chunk in chunks.filter(|chunk| self.place(*chunk) == Some(Where::Memory)) {
            self.bits.clear(Which::There, chunk);
        }
        self.bits.head(DEPARTURES).fetch_add(1, Ordering::SeqCst);
    }

    /// No chunk of the file is there any more: its bytes are not what they should be. A read that has begun
    /// still gets them.
    pub fn withdraw(&self) {
        (0..self.chunks()).for_each(|chunk| self.bits.clear(Which::There, chunk));
        self.tell();
    }

    /// Whether chunks are in memory, or have been: what is there can go then.
    #[inline]
    pub fn uses_memory(&self) -> bool {
        self.bits.head(USES_MEMORY).load(Ordering::Acquire) != 0
    }

    /// Whether a reader of a range of bytes can go on: all of it is there. Where chunks can go, all of it may
    /// never be there at once, and its start is enough.
    pub fn is_ready(&self, offset: u64, len: u64) -> bool {
        self.has_all(offset, len) || (self.uses_memory() && self.start_of(offset, len).is_some())
    }

    /// How often chunks have gone from memory. What was read of memory counts only if this is the same before
    /// the look at the table and after the read.
    #[inline]
    pub fn departures(&self) -> u32 {
        self.bits.head(DEPARTURES).load(Ordering::SeqCst)
    }

    /// Whether there is such room: see [`Presence::memory`].
    pub fn is_roomy(&self) -> bool {
        self.bits.is_roomy()
    }

    /// The room behind the table for chunks that are not in the file.
    pub fn memory(&self) -> Memory<'_> {
        Memory::new(&self.file, self.bits.behind())
    }

    /// Reads the bytes of a range that are there, from its start on, from memory or from `file`. Returns how
    /// many these are: 0 if the first chunk is not there.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn read_start(&self, file: &dyn ReadAt, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        loop {
            // The count is read before the table: a later departure changes it.
            let departures = self.departures();
            let Some((place, len)) = self.start_of(offset, buf.len() as u64) else { return Ok(0) };
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            let part = buf.get_mut(..len).ok_or(io::ErrorKind::UnexpectedEof)?;
            match place {
                Where::File => return file.read_at(part, offset).map(|()| len),
                Where::Memory => self.memory().read(part, offset)?,
            }
            if self.departures() == departures {
                return Ok(len);
            }
        }
    }

    /// Has all readers look again.
    pub fn tell(&self) {
        self.bits.count(CAME);
    }

    /// Whether readers of what is not there fail.
    #[inline]
    pub fn fails(&self) -> bool {
        self.bits.head(FAILS).load(Ordering::Acquire) != 0
    }

    /// Has readers of what is not there fail from now on, or wait again.
    pub fn set_fails(&self, fails: bool) {
        self.bits.head(FAILS).store(fails.into(), Ordering::SeqCst);
        self.tell();
    }

    /// Whether what is wanted later rests, because there is no room for it.
    pub fn rests(&self) -> bool {
        self.bits.head(RESTS).load(Ordering::Relaxed) != 0
    }

    /// Says whether that is so. Returns whether it is news.
    pub fn set_rests(&self, rests: bool) -> bool {
        self.bits.head(RESTS).swap(rests.into(), Ordering::Relaxed) != u32::from(rests)
    }

    /// How often something has come, for [`Presence::await_news`]. Look at the table after this.
    pub fn news(&self) -> u32 {
        self.bits.head(CAME).load(Ordering::SeqCst)
    }

    /// Waits until something comes after `seen`. May return early.
    pub fn await_news(&self, seen: u32) {
        shared::wait(self.bits.head(CAME), seen, None);
    }

    /// How often something was asked, for [`Presence::await_ask`]. Look at the table after this.
    pub fn asked(&self) -> u32 {
        self.bits.head(ASKED).load(Ordering::SeqCst)
    }

    /// Waits until something is asked after `seen`, no longer than `limit`. May return early.
    pub fn await_ask(&self, seen: u32, limit: Option<Duration>) {
        shared::wait(self.bits.head(ASKED), seen, limit);
    }
}

#[cfg(test)]
mod tests {
    use super::super::bits::{HEAD, MOST_CHUNKS};
    use super::*;

    const CHUNK: u64 = 4096;

    #[test]
    fn a_range_is_there_when_its_last_chunk_is() {
        let table = Presence::new(10 * CHUNK + 5, CHUNK).unwrap();
        assert_eq!((table.chunks(), table.chunk()), (11, CHUNK));
        table.put(3, Where::File);
        assert!(table.has_all(3 * CHUNK, CHUNK) && !table.has_all(3 * CHUNK, CHUNK + 1));
        assert!(!table.has_all(3 * CHUNK - 1, 2));
        assert_eq!(table.there(), (CHUNK, 0));
        table.put(10, Where::File);
        assert!(table.has_all(10 * CHUNK, 5), "the last chunk is short");
        assert_eq!(table.there(), (CHUNK + 5, 0));
        assert_eq!(table.around(10, 64), 10 * CHUNK..10 * CHUNK + 5);
        table.put(9, Where::File);
        table.put(4, Where::File);
        assert_eq!(table.around(9, 64), 9 * CHUNK..10 * CHUNK + 5);
        assert_eq!(table.around(3, 64), 3 * CHUNK..5 * CHUNK);
        assert_eq!(table.around(3, 0), 3 * CHUNK..4 * CHUNK);
    }

    #[test]
    fn what_is_asked_stays_until_it_is_there_in_each_mapping_of_the_table() {
        let table = Presence::new(100 * CHUNK, CHUNK).unwrap();
        let other = table.again().unwrap();
        let seen = other.asked();
        table.put(41, Where::File);
        table.ask(40 * CHUNK, 3 * CHUNK);
        table.ask_later(0, 2 * CHUNK);
        other.await_ask(seen, None);
        assert_eq!(other.next_wanted(0, false, &mut |_| true), Some(40));
        assert_eq!(other.next_wanted(41, false, &mut |_| true), Some(42), "what is there is not wanted");
        assert_eq!(other.next_wanted(43, false, &mut |_| true), Some(40), "from the beginning on");
        assert_eq!(other.next_wanted(0, true, &mut |_| true), Some(0));
        let news = table.news();
        [40, 42, 0].iter().for_each(|chunk| other.put(*chunk, Where::File));
        other.tell();
        table.await_news(news);
        assert!(table.has_all(40 * CHUNK, 3 * CHUNK));
        assert_eq!(
            (other.next_wanted(0, false, &mut |_| true), other.next_wanted(1, true, &mut |_| true)),
            (None, Some(1))
        );
        let third = Presence::new(100 * CHUNK, CHUNK).unwrap();
        third.ask(50 * CHUNK, 1);
        table.take_over(&third);
        assert_eq!(other.next_wanted(0, false, &mut |_| true), Some(50));
    }

    #[test]
    fn what_is_stored_counts_before_it_is_compared() {
        let table = Presence::new(3 * CHUNK + 5, CHUNK).unwrap();
        table.expect(2);
        assert_eq!((table.stored(), table.there()), ((2 * CHUNK, 0), (0, 0)));
        table.checked();
        table.put(0, Where::File);
        table.put(1, Where::Memory);
        assert_eq!(table.stored(), (2 * CHUNK, CHUNK), "what is in memory is not stored");
        // Said more often than expected, it changes nothing.
        table.checked();
        table.checked();
        assert_eq!(table.stored(), (CHUNK, CHUNK));
        table.expect(4);
        assert_eq!(table.stored(), (3 * CHUNK + 5, CHUNK));
    }

    #[test]
    fn a_table_of_another_file_is_refused() {
        let table = Presence::new(100 * CHUNK, CHUNK).unwrap();
        let open = |size, chunk| Presence::open(table.fd().try_clone_to_owned().unwrap(), size, chunk);
        assert!(open(100 * CHUNK, CHUNK).is_ok());
        assert!(open(200 * CHUNK, CHUNK).is_err() && open(100 * CHUNK, CHUNK / 2).is_err());
        assert!(open(100 * CHUNK, 3).is_err() && open(0, CHUNK).is_err());
        assert!(open((MOST_CHUNKS + 1) * CHUNK, CHUNK).is_err());
    }

    #[test]
    fn a_table_without_room_is_used_without() {
        let fd = shared::file("old", HEAD + 3 * 4, 0).unwrap();
        let table = Presence::open(fd, 100 * CHUNK, CHUNK).unwrap();
        assert!(!table.is_roomy() && Presence::new(100 * CHUNK, CHUNK).unwrap().is_roomy());
        table.ask(99 * CHUNK, 1);
        assert_eq!(table.again().unwrap().next_wanted(0, false, &mut |_| true), Some(99));
        table.put(99, Where::File);
        assert_eq!((table.place(99), table.there()), (Some(Where::File), (CHUNK, 0)));
        assert!(!table.uses_memory());
    }

    #[test]
    fn what_is_in_memory_is_there_until_it_goes_and_what_is_in_the_file_stays() {
        let table = Presence::new(10 * CHUNK + 5, CHUNK).unwrap();
        [(1, Where::File), (2, Where::Memory), (3, Where::Memory), (4, Where::File), (10, Where::Memory)]
            .into_iter()
            .for_each(|(chunk, place)| table.put(chunk, place));
        assert_eq!(table.there(), (4 * CHUNK + 5, 2 * CHUNK + 5));
        assert_eq!(table.around(1, 64), CHUNK..2 * CHUNK, "the straight way is the file's");
        assert_eq!(table.start_of(2 * CHUNK + 1, 3 * CHUNK), Some((Where::Memory, 2 * CHUNK - 1)));
        assert_eq!(table.start_of(4 * CHUNK, 2 * CHUNK), Some((Where::File, CHUNK)));
        assert_eq!(table.start_of(10 * CHUNK, 5), Some((Where::Memory, 5)));
        assert_eq!(table.start_of(0, CHUNK), None);
        let before = table.departures();
        table.depart([1, 2].into_iter());
        assert_ne!(table.departures(), before, "who reads now must look again");
        assert_eq!((table.place(1), table.place(2)), (Some(Where::File), None));
        table.put(2, Where::File);
        assert_eq!(table.place(2), Some(Where::File));
        let other = Presence::new(10 * CHUNK + 5, CHUNK).unwrap();
        other.put(7, Where::Memory);
        other.depart([7].into_iter());
        other.take_over(&table);
        assert_eq!(other.there(), (0, 0), "only who brings a chunk may say that it is there");
    }

    #[test]
    fn memory_is_taken_by_what_is_written_and_given_back() {
        use std::os::fd::AsFd as _;
        let table = Presence::new(1 << 40, 1 << 20).unwrap();
        let blocks = || rustix::fs::fstat(table.fd().as_fd()).unwrap().st_blocks * 512;
        let before = blocks();
        let at = (1 << 40) - (1 << 20);
        table.memory().write(&[5; 1 << 20], at).unwrap();
        assert!(blocks() - before >= 1 << 20);
        let mut bytes = [0; 100];
        table.memory().read(&mut bytes, at + 1000).unwrap();
        assert_eq!(bytes, [5; 100]);
        table.memory().read(&mut bytes, (1 << 40) + (1 << 20)).unwrap_err();
        table.memory().free(at, 1 << 20).unwrap();
        assert!(blocks() <= before + 4096);
        table.memory().read(&mut bytes, at + 1000).unwrap();
        assert_eq!(bytes, [0; 100]);
    }
}
