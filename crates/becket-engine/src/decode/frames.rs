//! Memory for decoded blocks: all of it is counted, and never is there more than was allowed.
//! It never gives memory back to the system that the next block can use.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The memory of decoded blocks, in use or waiting to be used again. Sizes are bytes.
#[derive(Debug)]
pub(crate) struct Frames {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    allowed: usize,
    /// Of all frames, used or not.
    total: usize,
    /// The most that `total` ever was.
    #[cfg(test)]
    peak: usize,
    unused: Vec<Box<[u8]>>,
    /// Counts changes after which memory may be found where there was none.
    changes: u64,
}

/// Bytes that a block yielded, and the memory that they are in.
#[derive(Debug)]
pub(crate) struct Decoded {
    frame: Box<[u8]>,
    /// The wanted ones.
    from: usize,
    len: usize,
    frames: Arc<Frames>,
}

impl Decoded {
    /// The block's wanted bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.frame.get(self.from..).and_then(|rest| rest.get(..self.len)).unwrap_or_default()
    }

    /// Memory that it takes.
    pub(crate) fn size(&self) -> usize {
        self.frame.len()
    }
}

impl Drop for Decoded {
    fn drop(&mut self) {
        self.frames.give(std::mem::take(&mut self.frame));
    }
}

/// Memory that a block is being decoded into.
pub(crate) struct Frame {
    bytes: Box<[u8]>,
    frames: Arc<Frames>,
}

impl Frame {
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// What was decoded: `len` bytes from `from` on are wanted.
    pub(crate) fn filled(mut self, from: usize, len: usize) -> Decoded {
        let frame = std::mem::take(&mut self.bytes);
        Decoded { frame, from, len, frames: Arc::clone(&self.frames) }
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        self.frames.give(std::mem::take(&mut self.bytes));
    }
}

/// There is no memory; what was seen, for [`Frames::wait`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NoRoom(u64);

impl Frames {
    pub(crate) fn new(allowed: usize) -> Arc<Frames> {
        let state = State { allowed, ..State::default() };
        Arc::new(Frames { state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Allows another amount. What is above it goes as it is given back.
    pub(crate) fn allow(&self, allowed: usize) {
        let mut state = self.state();
        state.allowed = allowed;
        let gone = state.shrink(0);
        self.tell(state);
        drop(gone);
    }

    /// How much is allowed.
    pub(crate) fn allowed(&self) -> usize {
        self.state().allowed
    }

    /// How much is taken.
    pub(crate) fn total(&self) -> usize {
        self.state().total
    }

    /// Memory of `size` bytes or up to twice that; used memory first, for it is warm.
    ///
    /// # Errors
    /// What is allowed is in use: something must be given back first.
    pub(crate) fn take(self: &Arc<Self>, size: usize) -> Result<Frame, NoRoom> {
        let mut state = self.state();
        if let Some(bytes) = state.fitting(size) {
            return Ok(Frame { bytes, frames: Arc::clone(self) });
        }
        let gone = state.shrink(size);
        if state.total.checked_add(size).is_none_or(|total| total > state.allowed) {
            return Err(NoRoom(state.changes));
        }
        state.total += size;
        state.note();
        drop(state);
        drop(gone);
        Ok(Frame { bytes: vec![0; size].into_boxed_slice(), frames: Arc::clone(self) })
    }

    /// Waits until something has changed since [`Frames::take`] found no memory.
    pub(crate) fn wait(&self, seen: NoRoom) {
        let state = self.state();
        let unchanged = |state: &mut State| state.changes == seen.0;
        drop(self.changed.wait_while(state, unchanged).unwrap_or_else(PoisonError::into_inner));
    }

    /// Something can be evicted now that could not before.
    pub(crate) fn changed(&self) {
        self.tell(self.state());
    }

    fn give(&self, bytes: Box<[u8]>) {
        if bytes.is_empty() {
            return;
        }
        let mut state = self.state();
        state.unused.push(bytes);
        let gone = state.shrink(0);
        self.tell(state);
        drop(gone);
    }

    fn tell(&self, mut state: MutexGuard<'_, State>) {
        state.changes += 1;
        drop(state);
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(crate) fn peak(&self) -> usize {
        self.state().peak
    }
}

impl State {
    fn fitting(&mut self, size: usize) -> Option<Box<[u8]>> {
        let fits = |len: usize| len >= size && len / 2 <= size;
        let found = self.unused.iter().rposition(|frame| fits(frame.len()))?;
        Some(self.unused.swap_remove(found))
    }

    /// Takes out unused memory until `more` bytes fit, or nothing is left. To be dropped without the lock.
    fn shrink(&mut self, more: usize) -> Vec<Box<[u8]>> {
        let mut gone = Vec::new();
        while self.total.saturating_add(more) > self.allowed
            && let Some(frame) = self.unused.pop()
        {
            self.total -= frame.len();
            gone.push(frame);
        }
        gone
    }

    fn note(&mut self) {
        #[cfg(test)]
        {
            self.peak = self.peak.max(self.total);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_and_used_again() {
        let frames = Frames::new(100);
        let first = frames.take(60).unwrap().filled(10, 20);
        assert_eq!((first.size(), first.bytes().len()), (60, 20));
        let seen = frames.take(60).err().unwrap();
        drop(first);
        frames.wait(seen);
        // The same memory does for a little less, not for a quarter.
        let again = frames.take(40).unwrap();
        assert_eq!(frames.total(), 60);
        let small = frames.take(15).unwrap();
        assert_eq!(frames.total(), 75);
        drop(again);
        drop(small);
        let whole = frames.take(100).unwrap();
        assert_eq!((frames.total(), frames.peak()), (100, 100), "what is not used makes room");
        drop(whole);
        frames.allow(50);
        assert_eq!(frames.total(), 0);
        assert!(frames.take(60).is_err());
        assert!(frames.take(usize::MAX).is_err());
    }

    #[test]
    fn wanted_bytes_outside_the_memory_are_none() {
        let frames = Frames::new(100);
        assert_eq!(frames.take(10).unwrap().filled(8, 3).bytes(), [0_u8; 0]);
        assert_eq!(frames.take(10).unwrap().filled(usize::MAX, usize::MAX).bytes(), [0_u8; 0]);
    }
}
