//! How long the answers of a server usually take to begin, and so how long one is waited for until the same
//! is asked again over another connection: of many servers behind one name, one is slow at times.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// An answer is late that takes so many times as long as usual, and at least this.
const TIMES: u32 = 8;
const LATE: Duration = Duration::from_millis(300);
/// How many of the last answers the usual time is of, roughly.
const OF: u64 = 8;

/// See the module. The usual time is in nanoseconds, and 0 when there was no answer yet.
#[derive(Debug, Default)]
pub(crate) struct Pace(AtomicU64);

impl Pace {
    /// An answer has begun after this time, or had not.
    pub(crate) fn took(&self, time: Duration) {
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1);
        let usual = self.0.load(Ordering::Relaxed);
        // Of several threads one may be ignored.
        self.0.store(if usual == 0 { time } else { usual - usual / OF + time / OF }, Ordering::Relaxed);
    }

    /// How long an answer is waited for that was asked `tries` times before; nothing as long as nobody knows.
    pub(crate) fn late(&self, tries: u32) -> Option<Duration> {
        let usual = Some(self.0.load(Ordering::Relaxed)).filter(|usual| *usual > 0)?;
        let late = Duration::from_nanos(usual).saturating_mul(TIMES).max(LATE);
        Some(late.saturating_mul(1 << tries.min(16)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_is_what_takes_much_longer_than_usual_and_a_slow_server_is_waited_for() {
        let pace = Pace::default();
        assert_eq!(pace.late(0), None);
        let ms = Duration::from_millis;
        pace.took(ms(2));
        assert_eq!(pace.late(0), Some(LATE), "the scheduler is no slow server");
        assert_eq!(pace.late(2), Some(4 * LATE));
        (0..60).for_each(|_| pace.took(ms(200)));
        let late = pace.late(0).unwrap();
        assert!((ms(1550)..=ms(1600)).contains(&late), "{late:?}");
    }
}
