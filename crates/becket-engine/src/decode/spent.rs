//! Blocks all of which has been given out: their memory is warm, and nobody is likely to ask again.
//!
//! Above a device there is a page cache, as a rule, which keeps what it was given. To keep it here, too, would be to keep it
//! twice, in memory that has to be got from the system first, page by page, which takes a third of the time that decoding
//! with zstd does. So a *spent* block makes way for the next one before any fresh memory is taken, the latest first.
//!
//! Who reads past the page cache, and again and again, shows that soon: spent blocks are asked for. Each time raises a doubt,
//! each block that is spent takes some of it away, and as long as there is too much of it blocks stay as
//! [`cache`](super::cache) has it. One in sixteen that come back is what it takes. Who has said how much memory there is for
//! decoded blocks wants them kept: there they always stay.

use super::{block::Key, cache::Ghosts};

/// A block that was asked for again weighs as much as so many that were spent.
const AGAIN: u32 = 16;
/// So much doubt, and spent blocks stay.
const ENOUGH: u32 = 16 * AGAIN;
/// Doubt does not grow without end: after so many blocks that nobody asked for again they go once more.
const MOST: u32 = 2 * ENOUGH;
/// Names of blocks that have gone which are remembered, at most; as many as would have had room, otherwise.
const MOST_GHOSTS: usize = 1 << 14;

#[derive(Default)]
pub(super) struct Spent {
    /// With the stamps of their entries; some of them have gone since, or are in use again.
    stack: Vec<(Key, u64)>,
    ghosts: Ghosts,
    doubt: u32,
    thrifty: bool,
}

impl Spent {
    pub(super) fn new(thrifty: bool) -> Spent {
        Spent { thrifty, ..Spent::default() }
    }

    /// All of a block has been given out.
    pub(super) fn push(&mut self, key: Key, stamp: u64) {
        self.doubt = self.doubt.saturating_sub(1);
        if self.may_go() {
            self.stack.push((key, stamp));
        }
    }

    /// A block that was spent is asked for.
    pub(super) fn again(&mut self) {
        self.doubt = (self.doubt + AGAIN).min(MOST);
    }

    /// A block is there once more, or for the first time.
    pub(super) fn came(&mut self, key: Key) {
        if self.ghosts.laid(&key) {
            self.again();
        }
    }

    fn may_go(&self) -> bool {
        self.thrifty && self.doubt < ENOUGH
    }

    /// The latest that was spent and may go.
    pub(super) fn pop(&mut self) -> Option<(Key, u64)> {
        if !self.may_go() {
            self.stack.clear();
        }
        self.stack.pop()
    }

    /// A block of `size` bytes went because it was spent, where `all` bytes would have room.
    pub(super) fn went(&mut self, key: Key, size: usize, all: usize) {
        self.ghosts.remember(key, (all / size.max(1)).min(MOST_GHOSTS));
    }

    /// Names whose blocks are no more go, when most are of that kind; `is` says of which there are blocks.
    pub(super) fn tidy(&mut self, blocks: usize, is: impl Fn(&Key, u64) -> bool) {
        if self.stack.len() > 2 * blocks + 64 {
            self.stack.retain(|(key, stamp)| is(key, *stamp));
        }
    }

    pub(super) fn forget(&mut self, goes: impl Fn(&Key) -> bool) {
        self.stack.retain(|(key, _)| !goes(key));
        self.ghosts.forget(goes);
    }

    #[cfg(test)]
    pub(super) fn names(&self) -> usize {
        self.stack.len().max(self.ghosts.names())
    }
}
