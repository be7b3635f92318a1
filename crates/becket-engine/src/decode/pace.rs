//! How quickly the blocks of a layer are decoded.
//! Never measures: the thread that decodes reports the time.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

/// A block that takes no longer is quick: requests that come meanwhile wait for it, as they would for a slow
/// disk.
const QUICK: Duration = Duration::from_micros(500);
/// A block's time counts for one of so many parts of what is expected of the next.
const MEMORY: u32 = 8;

/// Nanoseconds for each KiB that a layer's blocks have yielded, lately; 0 as long as none has.
#[derive(Debug, Default)]
pub(crate) struct Pace(AtomicU32);

impl Pace {
    /// A block of so many bytes has been decoded. Two threads at the same time lose a figure, no more.
    pub(super) fn took(&self, yields: usize, time: Duration) {
        let each = time.as_nanos().saturating_mul(1024) / (yields.max(1) as u128);
        let each = u32::try_from(each).unwrap_or(u32::MAX).max(1);
        let before = match self.0.load(Ordering::Relaxed) {
            0 => each,
            before => before,
        };
        self.0.store(before - before / MEMORY + each / MEMORY, Ordering::Relaxed);
    }

    /// Whether a block of so many bytes will be decoded quickly, judged by those before it.
    pub(super) fn is_quick(&self, yields: usize) -> bool {
        let pace = self.0.load(Ordering::Relaxed);
        pace > 0 && u128::from(pace) * (yields as u128) / 1024 <= QUICK.as_nanos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_as_quick_as_its_blocks_were_lately() {
        let pace = Pace::default();
        let took = |micros, times| {
            (0..times).for_each(|_| pace.took(128 << 10, Duration::from_micros(micros)));
        };
        assert!(!pace.is_quick(4096), "nothing is known of it");
        took(200, 1);
        assert!(pace.is_quick(128 << 10));
        assert!(!pace.is_quick(1 << 20), "a longer block");
        took(900, 1);
        assert!(pace.is_quick(128 << 10), "once is no rule");
        took(900, 20);
        assert!(!pace.is_quick(128 << 10));
        took(200, 20);
        assert!(pace.is_quick(128 << 10), "nor for ever");
        pace.took(0, Duration::MAX);
    }
}
