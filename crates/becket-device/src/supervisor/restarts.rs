//! How often a device's worker died at once, and how long the next one is to wait.
//! It asks no clock: callers pass the time.

use std::time::{Duration, Instant};

/// A worker that has served for so long did not die of what it was started with.
const SOON: Duration = Duration::from_secs(2);
/// This many quick deaths in a row cause no pause: a worker may be killed by hand, or when the system is
/// short of memory.
const FREE: u32 = 3;
/// Longest pause.
const LONGEST: Duration = Duration::from_secs(30);

/// The history of one device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Restarts {
    /// Failures in a row, each soon after the last beginning.
    quick: u32,
    begun: Instant,
    /// The pause that the last failure costs, until it is made.
    due: Duration,
}

impl Restarts {
    /// A worker serves from now on.
    pub(super) fn new(now: Instant) -> Restarts {
        Restarts { quick: 0, begun: now, due: Duration::ZERO }
    }

    /// Another worker serves from now on.
    pub(super) fn began(&mut self, now: Instant) {
        self.begun = now;
    }

    /// A worker died, or could not take the device.
    pub(super) fn failed(&mut self, now: Instant) {
        if now.saturating_duration_since(self.begun) >= SOON {
            self.quick = 0;
        }
        self.quick = self.quick.saturating_add(1);
        self.begun = now;
        self.due = match self.quick.checked_sub(FREE + 1) {
            None => Duration::ZERO,
            Some(doublings) => Duration::from_secs(1 << doublings.min(5)).min(LONGEST),
        };
    }

    /// How long the next attempt is to wait; asked again, it has waited.
    pub(super) fn take_pause(&mut self) -> Duration {
        std::mem::take(&mut self.due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_deaths_in_quick_succession_cost_a_pause() {
        let start = Instant::now();
        let mut restarts = Restarts::new(start);
        let pauses: Vec<u64> = (1..=10)
            .map(|death| {
                restarts.failed(start + Duration::from_millis(death));
                let pause = restarts.take_pause().as_secs();
                assert_eq!(restarts.take_pause(), Duration::ZERO, "waited for once");
                pause
            })
            .collect();
        assert_eq!(pauses, [0, 0, 0, 1, 2, 4, 8, 16, 30, 30]);
        // A hundred deaths, each after a while of service, are none of that kind.
        let mut now = start + Duration::from_secs(60);
        for _ in 0..100 {
            restarts.began(now);
            now += SOON;
            restarts.failed(now);
            assert_eq!(restarts.take_pause(), Duration::ZERO);
        }
        for _ in 0..100 {
            restarts.failed(now);
        }
        assert_eq!(restarts.take_pause(), LONGEST);
    }
}
