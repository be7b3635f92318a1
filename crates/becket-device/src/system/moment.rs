//! Moments that one process names to another of the same system: nanoseconds of the clock that never goes
//! back (`CLOCK_MONOTONIC`), by which [`Instant`] counts, too.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// This moment.
pub(crate) fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

/// The same as an [`Instant`] of this process; one that is still to come is now.
pub(crate) fn instant(moment: u64) -> Instant {
    let (instant, ago) = (Instant::now(), now().saturating_sub(moment));
    instant.checked_sub(Duration::from_nanos(ago)).unwrap_or(instant)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_the_same_for_who_hears_of_it_later() {
        let (before, named, after) = (Instant::now(), now(), Instant::now());
        std::thread::sleep(Duration::from_millis(30));
        let heard = instant(named);
        let slack = Duration::from_millis(10);
        assert!(heard + slack >= before && heard <= after + slack, "{before:?} {heard:?} {after:?}");
        assert!(instant(u64::MAX) <= Instant::now());
    }
}
