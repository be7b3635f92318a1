//! Chunks that are in memory, because the store has no room for them or because there is to be none: the
//! first that came is the first to go. It never lets a chunk go that is not whole, and never takes more than
//! its bound.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use becket_image::filled::{Presence, Where};

/// How many bytes of an object are in memory at most; one chunk has at most a sixteenth of that.
const MOST: u64 = 256 << 20;
/// How much goes at once, at least: readers look again whenever something goes.
const AT_ONCE: u64 = MOST / 8;

/// See the module.
#[derive(Debug)]
pub(crate) struct InMemory {
    line: Mutex<Line>,
    /// Another process has the same table, and what goes is for that one to say; or the table has no room.
    lent: AtomicBool,
}

#[derive(Debug, Default)]
struct Line {
    /// Whole chunks, the first that came in front.
    whole: VecDeque<u64>,
    /// Bytes of chunks, whole or not.
    bytes: u64,
}

impl InMemory {
    /// With the chunks that a predecessor has left.
    pub(crate) fn of(presence: &Presence) -> InMemory {
        let whole: VecDeque<u64> =
            (0..presence.chunks()).filter(|chunk| presence.place(*chunk) == Some(Where::Memory)).collect();
        let bytes = whole.len() as u64 * presence.chunk();
        InMemory { line: Mutex::new(Line { whole, bytes }), lent: AtomicBool::new(!presence.is_roomy()) }
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The whole chunks that there are.
    pub(crate) fn chunks(&self) -> Vec<u64> {
        self.line().whole.iter().copied().collect()
    }

    /// From now on nothing goes and nothing comes.
    pub(crate) fn lend(&self) {
        self.lent.store(true, Ordering::SeqCst);
    }

    /// Takes room for one more chunk of so many bytes. Returns the chunks that have to go for it, which the
    /// caller lets go by [`InMemory::free`].
    ///
    /// # Errors
    /// The chunks are another process's by now.
    pub(crate) fn take(&self, chunk: u64) -> io::Result<Vec<u64>> {
        if self.lent.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let mut line = self.line();
        line.bytes += chunk;
        let mut gone = Vec::new();
        if line.bytes > MOST {
            while line.bytes > MOST - AT_ONCE
                && let Some(first) = line.whole.pop_front()
            {
                line.bytes -= chunk;
                gone.push(first);
            }
        }
        Ok(gone)
    }

    /// A chunk for which room was taken is whole.
    pub(crate) fn is_whole(&self, chunk: u64) {
        self.line().whole.push_back(chunk);
    }

    /// Room that was taken is not needed after all.
    pub(crate) fn give_back(&self, chunk: u64) {
        let mut line = self.line();
        line.bytes = line.bytes.saturating_sub(chunk);
    }

    /// Frees the memory of chunks: first nobody finds them any more.
    pub(crate) fn free(presence: &Presence, chunks: &[u64]) -> io::Result<()> {
        presence.depart(chunks.iter().copied());
        let len = presence.chunk();
        chunks.iter().try_for_each(|chunk| presence.memory().free(chunk * len, len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_came_go_first_and_no_more_than_the_bound_is_taken() {
        let chunk = 16 << 20;
        let presence = Presence::new(64 * chunk, chunk).unwrap();
        let memory = InMemory::of(&presence);
        for number in 0..16 {
            assert_eq!(memory.take(chunk).unwrap(), [0; 0]);
            presence.memory().write(&[1; 4096], number * chunk).unwrap();
            presence.put(number, Where::Memory);
            memory.is_whole(number);
        }
        assert_eq!(memory.take(chunk).unwrap(), [0, 1, 2]);
        InMemory::free(&presence, &[0, 1, 2]).unwrap();
        assert_eq!(presence.there(), (13 * chunk, 13 * chunk));
        memory.give_back(chunk);
        let successor = InMemory::of(&presence);
        assert_eq!(successor.chunks(), (3..16).collect::<Vec<_>>());
        for _ in 0..3 {
            assert_eq!(successor.take(chunk).unwrap(), [0; 0]);
        }
        assert_eq!(successor.take(chunk).unwrap(), [3, 4, 5]);
        memory.lend();
        assert_eq!(memory.take(chunk).unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
