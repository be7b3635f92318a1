//! What queues have done together, as it is shown: sums, means and percentiles.
//! Counts nothing, and never makes a queue wait.

use std::sync::atomic::Ordering::Relaxed;

use serde::{Deserialize, Serialize};

use super::counters::{BUCKETS, Counters, Timed, bucket_of, longest_in};
use super::{Decodings, QueueStats};

/// The latencies by which [`Activity::below`] counts, in nanoseconds.
pub const BOUNDS: [u64; 11] =
    [1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30, 1 << 32, 1 << 34];

/// What several queues have done together since they began.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Requests that have arrived and not finished.
    pub in_flight: u64,
    /// Reads.
    pub read: Activity,
    /// Writes.
    pub write: Activity,
    /// Flushes.
    pub flush: Activity,
    /// Discards.
    pub discard: Activity,
    /// Ranges that were zeroed; `None` where they count as writes.
    pub write_zeroes: Option<Activity>,
    /// What was decoded; `None` where nothing is encoded.
    #[serde(default)]
    pub decoded: Option<Decodings>,
    /// What was fetched; `None` where the image is not on a server that it is fetched from. A queue knows
    /// only how often it waited.
    #[serde(default)]
    pub fetched: Option<Fetched>,
}

/// What the store has of an image that is fetched from a server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetched {
    /// Bytes of the image that are in the store.
    pub bytes: u64,
    /// Length of the image.
    pub size: u64,
    /// How often a request waited for what was not there yet.
    pub waits: u64,
    /// Bytes of the image that are in memory, because the store has no room for them.
    #[serde(default)]
    pub memory: u64,
    /// Whether what nobody waits for is not fetched until the store has room.
    #[serde(default)]
    pub no_room: bool,
}

/// What was done of one kind. Times are nanoseconds; `None` is what was not measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activity {
    /// Requests that have finished, with success or not.
    pub operations: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: Option<u64>,
    /// Mean latency.
    pub mean_ns: Option<u64>,
    /// Half of the requests took no longer. This and the other percentiles are never too low, and too high by
    /// at most a sixteenth, or a microsecond where that is more; above 137 s they say as much as the maximum.
    pub p50_ns: Option<u64>,
    /// 90 of 100 took no longer.
    pub p90_ns: Option<u64>,
    /// 99 of 100 took no longer.
    pub p99_ns: Option<u64>,
    /// 999 of 1000 took no longer.
    pub p999_ns: Option<u64>,
    /// The longest, exact.
    pub max_ns: Option<u64>,
    /// How many took less than each of [`BOUNDS`], and last how many there are; `None` if nothing is timed.
    #[serde(default)]
    pub below: Option<[u64; BOUNDS.len() + 1]>,
    /// How many of those that can block may be under way; `None` as long as none of them could.
    #[serde(default)]
    pub window: Option<u64>,
}

impl Summary {
    /// Adds up what queues have counted by now.
    pub fn of<'a>(queues: impl Iterator<Item = &'a QueueStats> + Clone) -> Summary {
        let window = |class: usize| {
            let sum = queues.clone().map(|queue| queue.windows[class].load(Relaxed)).sum();
            (sum > 0).then_some(sum)
        };
        let (read, write) =
            (queues.clone().map(|queue| &queue.read), queues.clone().map(|queue| &queue.write));
        let discard = Activity::counted(queues.clone().map(|queue| &queue.discard));
        let zeroed = Activity::counted(queues.clone().map(|queue| &queue.write_zeroes));
        let decoded = std::array::from_fn(|index| {
            queues.clone().map(|queue| queue.decodings[index].load(Relaxed)).sum()
        });
        Summary {
            in_flight: queues.clone().map(in_flight).sum(),
            read: Activity { window: window(0), ..Activity::timed(read) },
            write: Activity { window: window(1), ..Activity::timed(write) },
            flush: Activity::timed(queues.clone().map(|queue| &queue.flush)),
            discard: Activity { window: window(2), ..discard },
            write_zeroes: Some(Activity { window: window(2), ..zeroed }),
            decoded: Some(Decodings::of(decoded)).filter(|decoded| *decoded != Decodings::default()),
            fetched: Some(queues.map(|queue| queue.waits.load(Relaxed)).sum())
                .filter(|waits| *waits > 0)
                .map(|waits| Fetched { waits, ..Fetched::default() }),
        }
    }

    /// What was done since another summary of the same counters. What is not a sum stays as it is.
    #[must_use]
    pub fn since(&self, before: &Summary) -> Summary {
        Summary {
            read: self.read.since(&before.read),
            write: self.write.since(&before.write),
            flush: self.flush.since(&before.flush),
            discard: self.discard.since(&before.discard),
            ..*self
        }
    }
}

impl Activity {
    /// What was done since other counts of the same kind; percentiles and the window stay as they are.
    #[must_use]
    pub fn since(&self, before: &Activity) -> Activity {
        let operations = self.operations.saturating_sub(before.operations);
        let total = |kind: &Activity| u128::from(kind.mean_ns.unwrap_or(0)) * u128::from(kind.operations);
        let mean = total(self).saturating_sub(total(before)).checked_div(operations.into());
        Activity {
            operations,
            bytes: self.bytes.saturating_sub(before.bytes),
            errors: self.errors.map(|errors| errors.saturating_sub(before.errors.unwrap_or(0))),
            mean_ns: mean.filter(|_| self.mean_ns.is_some()).and_then(|mean| u64::try_from(mean).ok()),
            ..*self
        }
    }
}

/// Requests that have arrived at a queue and not finished.
fn in_flight(queue: &QueueStats) -> u64 {
    // What has finished is read first: it began before.
    let finished = queue.finished();
    queue.began.load(Relaxed).saturating_sub(finished)
}

impl Activity {
    fn counted<'a>(queues: impl Iterator<Item = &'a Counters>) -> Activity {
        let mut sum = Activity { errors: Some(0), ..Activity::default() };
        for queue in queues {
            sum.operations += queue.operations.load(Relaxed);
            sum.bytes += queue.bytes.load(Relaxed);
            sum.errors = sum.errors.map(|errors| errors + queue.errors.load(Relaxed));
        }
        sum
    }

    fn timed<'a>(queues: impl Iterator<Item = &'a Timed> + Clone) -> Activity {
        let sum = Activity::counted(queues.clone().map(|queue| &queue.counters));
        let mut buckets = [0; BUCKETS];
        let (mut total, mut max) = (0, 0);
        for Timed { histogram, .. } in queues {
            total += u128::from(histogram.total.load(Relaxed));
            max = max.max(histogram.max.load(Relaxed));
            for (sum, bucket) in buckets.iter_mut().zip(&histogram.buckets) {
                *sum += bucket.load(Relaxed);
            }
        }
        // Of the buckets and not the counter of operations, which may be of another moment.
        let count: u64 = buckets.iter().sum();
        if count == 0 {
            return sum;
        }
        let percentile = |permille| Some(percentile(&buckets, count, permille).min(max));
        Activity {
            mean_ns: u64::try_from(total / u128::from(count)).ok(),
            p50_ns: percentile(500),
            p90_ns: percentile(900),
            p99_ns: percentile(990),
            p999_ns: percentile(999),
            max_ns: Some(max),
            below: Some(std::array::from_fn(|at| {
                let end = BOUNDS.get(at).map_or(BUCKETS, |bound| bucket_of(*bound));
                buckets.iter().take(end).sum()
            })),
            ..sum
        }
    }
}

/// The longest latency in the bucket of the request that so many of a thousand did not exceed.
fn percentile(buckets: &[u64; BUCKETS], count: u64, permille: u64) -> u64 {
    let rank = (u128::from(count) * u128::from(permille)).div_ceil(1000);
    let mut passed = 0;
    for (bucket, held) in buckets.iter().enumerate() {
        passed += u128::from(*held);
        if passed >= rank {
            return longest_in(bucket);
        }
    }
    u64::MAX
}
