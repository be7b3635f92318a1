//! What this process knows of each chunk of an object, and which thread looks at it.
//! Never has two threads look at one chunk: one that is *busy* is waited for.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::table::index;

/// What is known of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Chunk {
    /// This process has not read it yet.
    Unknown,
    /// A thread looks at it, or fetches it.
    Busy,
    /// It is what its checksum says.
    Good,
}

/// All chunks of an object.
#[derive(Debug)]
pub(crate) struct Chunks {
    states: Mutex<Vec<Chunk>>,
    changed: Condvar,
    /// Those that are good, or have been.
    good: AtomicU64,
}

impl Chunks {
    /// Of so many, those in `good` are good.
    pub(crate) fn new(count: u64, good: &[u64]) -> Chunks {
        let mut states = vec![Chunk::Unknown; usize::try_from(count).unwrap_or(0)];
        for chunk in good.iter().copied() {
            if let Some(state) = states.get_mut(index(chunk)) {
                *state = Chunk::Good;
            }
        }
        Chunks { states: Mutex::new(states), changed: Condvar::new(), good: AtomicU64::new(0) }
    }

    /// Their states, which nobody else changes meanwhile.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Vec<Chunk>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until another thread has changed one.
    pub(crate) fn wait(&self, states: MutexGuard<'_, Vec<Chunk>>) {
        drop(self.changed.wait(states).unwrap_or_else(PoisonError::into_inner));
    }

    /// Wakes those who wait, after a change.
    pub(crate) fn tell(&self) {
        self.changed.notify_all();
    }

    /// Takes chunks from `from` on as far as nobody looks at them yet, up to `end`; returns where that ends.
    pub(crate) fn take_up_to(&self, from: u64, end: u64) -> u64 {
        from + take(self.lock().get_mut(index(from)..index(end)).unwrap_or_default().iter_mut())
    }

    /// Takes chunks before `end` as far as nobody looks at them yet, down to `first`; returns where they
    /// begin.
    pub(crate) fn take_down_to(&self, first: u64, end: u64) -> u64 {
        end - take(self.lock().get_mut(index(first)..index(end)).unwrap_or_default().iter_mut().rev())
    }

    /// Takes the first chunks of a range at which nobody looks yet, as far as they are beside each other and
    /// no more than `most`. They are none where the range has none.
    pub(crate) fn take_in(&self, range: Range<u64>, most: u64) -> Range<u64> {
        let mut states = self.lock();
        let all = states.get_mut(index(range.start)..index(range.end)).unwrap_or_default();
        let taken = all.iter().take_while(|chunk| **chunk != Chunk::Unknown).count();
        let first = range.start + taken as u64;
        first..first + take(all.iter_mut().skip(taken).take(index(most)))
    }

    /// They are of this state from now on.
    pub(crate) fn mark(&self, run: Range<u64>, state: Chunk) {
        let mut states = self.lock();
        let part = states.get_mut(index(run.start)..index(run.end)).unwrap_or_default();
        if state == Chunk::Good {
            let more = part.iter().filter(|chunk| **chunk != Chunk::Good).count();
            self.good.fetch_add(more as u64, Ordering::Relaxed);
        }
        part.fill(state);
        drop(states);
        self.tell();
    }

    pub(crate) fn are_good(&self, run: &Range<u64>) -> bool {
        let states = self.lock();
        let run = states.get(index(run.start)..index(run.end)).unwrap_or_default();
        run.iter().all(|chunk| *chunk == Chunk::Good)
    }

    /// How many have become good since the count began.
    pub(crate) fn counted_good(&self) -> u64 {
        self.good.load(Ordering::Relaxed)
    }

    /// Has that count begin anew.
    pub(crate) fn count_anew(&self) {
        self.good.store(0, Ordering::Relaxed);
    }
}

/// Takes chunks as far as nobody looks at them yet, and counts them.
fn take<'a>(chunks: impl Iterator<Item = &'a mut Chunk>) -> u64 {
    chunks.take_while(|chunk| **chunk == Chunk::Unknown).map(|chunk| *chunk = Chunk::Busy).count() as u64
}
