//! Numbers that one thread writes and others read: counters, and latencies in buckets.
//! Knows nothing of requests.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Latencies below two to this power of nanoseconds share one bucket.
const LOWEST: u32 = 10;
/// Those of at least two to this power (137 s) share another.
pub(super) const HIGHEST: u32 = 37;
/// Linear steps between two powers of two, as a power of two.
const STEPS: u32 = 4;
pub(super) const BUCKETS: usize = (((HIGHEST - LOWEST) << STEPS) + 2) as usize;

/// What is counted of each kind of request.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) operations: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) errors: AtomicU64,
}

impl Counters {
    pub(super) fn add(&self, requests: u64, bytes: u64) {
        raise(&self.operations, requests);
        raise(&self.bytes, bytes);
    }
}

/// What is counted where latency matters.
#[derive(Debug, Default)]
pub(super) struct Timed {
    pub(super) counters: Counters,
    pub(super) histogram: Histogram,
}

impl Timed {
    pub(super) fn add(&self, requests: u64, bytes: u64, nanos: u64) {
        self.counters.add(requests, bytes);
        self.histogram.add(requests, nanos);
    }
}

/// Latencies in buckets whose width is at most a sixteenth of what they hold.
#[derive(Debug)]
pub(super) struct Histogram {
    pub(super) total: AtomicU64,
    pub(super) max: AtomicU64,
    pub(super) buckets: [AtomicU64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram {
            total: AtomicU64::new(0),
            max: AtomicU64::new(0),
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
        }
    }
}

impl Histogram {
    fn add(&self, requests: u64, nanos: u64) {
        raise(&self.total, nanos.wrapping_mul(requests));
        if nanos > self.max.load(Relaxed) {
            self.max.store(nanos, Relaxed);
        }
        raise(&self.buckets[bucket_of(nanos)], requests);
    }
}

/// Adds to a counter that only the calling thread writes.
pub(super) fn raise(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(by), Relaxed);
}

pub(super) fn bucket_of(nanos: u64) -> usize {
    match nanos.checked_ilog2() {
        Some(power) if power >= HIGHEST => BUCKETS - 1,
        Some(power) if power >= LOWEST => {
            let step = (nanos >> (power - STEPS)) & ((1 << STEPS) - 1);
            1 + (((power - LOWEST) << STEPS) as usize) + step as usize
        }
        _ => 0,
    }
}

/// The longest latency that a bucket holds.
pub(super) fn longest_in(bucket: usize) -> u64 {
    if bucket == 0 {
        return (1 << LOWEST) - 1;
    }
    if bucket >= BUCKETS - 1 {
        return u64::MAX;
    }
    let (power, step) = ((bucket - 1) >> STEPS, (bucket - 1) & ((1 << STEPS) - 1));
    let width = 1 << (power + (LOWEST - STEPS) as usize);
    (((1 << STEPS) + step as u64 + 1) * width) - 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_latency_has_its_bucket(nanos in any::<u64>()) {
            let bucket = bucket_of(nanos);
            prop_assert!(bucket < BUCKETS && nanos <= longest_in(bucket));
            prop_assert!(bucket == 0 || nanos > longest_in(bucket - 1));
        }
    }

    #[test]
    fn buckets_meet_without_a_gap() {
        for bucket in 0..BUCKETS - 1 {
            assert_eq!(bucket_of(longest_in(bucket)), bucket);
            assert_eq!(bucket_of(longest_in(bucket) + 1), bucket + 1);
        }
    }
}
