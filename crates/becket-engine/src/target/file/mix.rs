//! Keeps direct writes and writes through the page cache of one file apart in time, where a device has both.
//!
//! The cache works in folios and whole blocks of the file system, so such writes collide even where their
//! ranges do not overlap: an old block may be written over a new one, or the kernel gives up what the cache
//! has and reports EIO to the next sync (see `core::hold`). Devices whose requests are all aligned have
//! direct writes only, and nothing of this. Of any other, direct writes are counted. The first one that is
//! not aligned waits until none is under way, and from then on all writes go through the cache.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

#[derive(Debug, Default)]
pub(super) struct Mix {
    /// A write that is not aligned has come.
    odd: AtomicBool,
    /// No direct write is under way, and none will be.
    cached: AtomicBool,
    /// Direct writes that are under way.
    direct: AtomicUsize,
}

impl Mix {
    /// Whether a write may begin past the cache; it [ends](Mix::ended) then.
    #[must_use]
    pub(super) fn begins(&self) -> bool {
        // In this order either this sees the odd one, or the odd one sees this.
        self.direct.fetch_add(1, SeqCst);
        let odd = self.odd.load(SeqCst);
        if odd {
            self.ended();
        }
        !odd
    }

    pub(super) fn ended(&self) {
        self.direct.fetch_sub(1, SeqCst);
    }

    /// Whether a write may begin through the cache; if not, it may soon.
    #[must_use]
    pub(super) fn begins_cached(&self) -> bool {
        if self.cached.load(SeqCst) {
            return true;
        }
        self.odd.store(true, SeqCst);
        let none = self.direct.load(SeqCst) == 0;
        if none {
            self.cached.store(true, SeqCst);
        }
        none
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_write_that_is_not_aligned_waits_and_is_the_last_to_do_so() {
        let mix = Mix::default();
        assert!(mix.begins() && mix.begins());
        mix.ended();
        assert!(!mix.begins_cached(), "one is under way");
        assert!(!mix.begins(), "no new one begins");
        assert!(!mix.begins_cached());
        mix.ended();
        assert!(mix.begins_cached() && mix.begins_cached());
        assert!(!mix.begins());
    }
}
