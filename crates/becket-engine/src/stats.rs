//! What a queue counts, and how long its requests took: `counters` has the numbers, `summary` adds them up.
//! Counting takes no lock, no locked instruction and no memory, and a reader never makes the queue wait.
//!
//! Each counter has one writer, the I/O thread that owns the queue, so an addition is a plain load and a
//! plain store. Readers on other threads see every counter whole but not all of the same moment: a request
//! may be in the operations already and in the bytes or the histogram not yet. Counters never go back, except
//! the number in flight.
//!
//! Time is that of the turns of the I/O thread, whose clock is read once for each. A request's latency runs
//! from the turn in which it arrived to the turn in which it finished; the time until its I/O thread woke is
//! not in it. Many requests of a turn are of one kind and took equally long: [`Tally`] counts these together.

mod counters;
mod summary;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use serde::{Deserialize, Serialize};

use crate::Op;
use counters::{Counters, Timed, raise};
pub use summary::{Activity, BOUNDS, Fetched, Summary};

/// A queue's counters and histograms.
///
/// Aligned so that no two share a cache line, nor the pair of lines that processors fetch together.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueStats {
    began: AtomicU64,
    /// The governor's windows, of reads, writes and freed space; 0 where nothing was governed.
    windows: [AtomicU64; 3],
    read: Timed,
    write: Timed,
    flush: Timed,
    discard: Counters,
    write_zeroes: Counters,
    /// In the order of [`Decodings::each`].
    decodings: [AtomicU64; DECODINGS],
    /// Requests that waited for a server.
    waits: AtomicU64,
}

impl QueueStats {
    /// So many requests have arrived since the beginning.
    fn began(&self, requests: u64) {
        self.began.store(requests, Relaxed);
    }

    /// So many requests of one kind have succeeded, with so many bytes together, each after so many
    /// nanoseconds.
    fn succeeded(&self, kind: Counted, requests: u64, bytes: u64, nanos: u64) {
        match kind {
            Counted::Read => self.read.add(requests, bytes, nanos),
            Counted::Write => self.write.add(requests, bytes, nanos),
            Counted::Flush => self.flush.add(requests, bytes, nanos),
            Counted::Discard => self.discard.add(requests, bytes),
            Counted::WriteZeroes => self.write_zeroes.add(requests, bytes),
        }
    }

    /// One has failed after so many nanoseconds.
    fn failed(&self, kind: Counted, nanos: u64) {
        self.succeeded(kind, 1, 0, nanos);
        let counters = match kind {
            Counted::Read => &self.read.counters,
            Counted::Write => &self.write.counters,
            Counted::Flush => &self.flush.counters,
            Counted::Discard => &self.discard,
            Counted::WriteZeroes => &self.write_zeroes,
        };
        raise(&counters.errors, 1);
    }

    fn finished(&self) -> u64 {
        let counters = [
            &self.read.counters,
            &self.write.counters,
            &self.flush.counters,
            &self.discard,
            &self.write_zeroes,
        ];
        counters.iter().map(|counters| counters.operations.load(Relaxed)).sum()
    }
}

/// What is counted apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Counted {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

impl From<Op> for Counted {
    fn from(op: Op) -> Counted {
        match op {
            Op::Read => Counted::Read,
            Op::Write { .. } => Counted::Write,
            Op::Flush => Counted::Flush,
            Op::Discard => Counted::Discard,
            Op::WriteZeroes { .. } => Counted::WriteZeroes,
        }
    }
}

/// A queue's pen: gathers what is equal, and writes it into the counters before the turn ends.
#[derive(Debug)]
pub(crate) struct Tally {
    stats: Arc<QueueStats>,
    began: u64,
    /// What was seen last, how often in a row, and with how many bytes.
    kind: Counted,
    nanos: u64,
    requests: u64,
    bytes: u64,
}

impl Tally {
    pub(crate) fn new(stats: Arc<QueueStats>) -> Tally {
        // One that follows another queue goes on counting.
        let began = stats.began.load(Relaxed);
        Tally { stats, began, kind: Counted::Read, nanos: 0, requests: 0, bytes: 0 }
    }

    /// A request has arrived.
    pub(crate) fn began(&mut self) {
        self.began += 1;
    }

    /// One has succeeded, with so many bytes, after so many nanoseconds.
    #[inline]
    pub(crate) fn succeeded(&mut self, op: Op, bytes: u64, nanos: u64) {
        let kind = Counted::from(op);
        if kind != self.kind || nanos != self.nanos {
            self.write();
            (self.kind, self.nanos) = (kind, nanos);
        }
        self.requests += 1;
        self.bytes = self.bytes.wrapping_add(bytes);
    }

    /// One has failed, after so many nanoseconds.
    pub(crate) fn failed(&self, op: Op, nanos: u64) {
        self.stats.failed(op.into(), nanos);
    }

    /// A turn ends: readers may see what happened in it, and the governor's windows of reads, writes and
    /// freed space.
    pub(crate) fn turn_ended(&mut self, windows: [u16; 3]) {
        self.stats.began(self.began);
        for (shown, window) in self.stats.windows.iter().zip(windows) {
            shown.store(window.into(), Relaxed);
        }
        self.write();
    }

    /// A request waits for bytes that a server has.
    pub(crate) fn waits(&self) {
        raise(&self.stats.waits, 1);
    }

    /// So much has been decoded for the queue since the beginning.
    pub(crate) fn decoded(&self, decodings: &Decodings) {
        for (shown, number) in self.stats.decodings.iter().zip(decodings.each()) {
            shown.store(number, Relaxed);
        }
    }

    fn write(&mut self) {
        if self.requests > 0 {
            self.stats.succeeded(self.kind, self.requests, self.bytes, self.nanos);
            (self.requests, self.bytes) = (0, 0);
        }
    }
}

/// How many numbers [`Decodings`] has.
const DECODINGS: usize = 6;

/// What was done for the encoded extents of an image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decodings {
    /// Blocks that a request found decoded.
    pub hits: u64,
    /// Blocks that a request had to wait for.
    pub waits: u64,
    /// Blocks that were decoded; fewer than `waits` where several waited for one.
    pub blocks: u64,
    /// Bytes that these yielded.
    pub bytes: u64,
    /// Blocks that were read ahead.
    pub ahead: u64,
    /// Blocks that could not be read or decoded.
    pub errors: u64,
}

impl Decodings {
    fn each(&self) -> [u64; DECODINGS] {
        let Decodings { hits, waits, blocks, bytes, ahead, errors } = *self;
        [hits, waits, blocks, bytes, ahead, errors]
    }

    fn of([hits, waits, blocks, bytes, ahead, errors]: [u64; DECODINGS]) -> Decodings {
        Decodings { hits, waits, blocks, bytes, ahead, errors }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::counters::HIGHEST;
    use super::*;

    /// Latencies of all magnitudes, as likely short as long.
    fn latency() -> impl Strategy<Value = u64> {
        (0u32..HIGHEST, any::<u64>()).prop_map(|(power, bits)| (1 << power) | (bits & ((1 << power) - 1)))
    }

    fn exact(sorted: &[u64], permille: usize) -> u64 {
        sorted[(sorted.len() * permille).div_ceil(1000) - 1]
    }

    proptest! {
        #[test]
        fn percentiles_are_never_too_low_and_hardly_too_high(
            latencies in prop::collection::vec(latency(), 1..2000),
            split in any::<prop::sample::Index>(),
            repeat in 1..4usize,
        ) {
            // Over two queues, so that merging is in it.
            let queues = [Arc::<QueueStats>::default(), Arc::default()];
            let mut tallies = queues.clone().map(Tally::new);
            let split = split.index(latencies.len());
            for (place, nanos) in latencies.iter().enumerate() {
                let tally = &mut tallies[usize::from(place >= split)];
                // Some come in rows of equal ones.
                for _ in 0..repeat {
                    tally.began();
                    tally.succeeded(Op::Read, 512, *nanos);
                }
            }
            tallies.iter_mut().for_each(|tally| tally.turn_ended([0; 3]));
            let latencies: Vec<u64> =
                latencies.into_iter().flat_map(|nanos| std::iter::repeat_n(nanos, repeat)).collect();
            let summary = Summary::of(queues.iter().map(|queue| &**queue)).read;
            let mut sorted = latencies;
            sorted.sort_unstable();
            let percentiles = [
                (500, summary.p50_ns),
                (900, summary.p90_ns),
                (990, summary.p99_ns),
                (999, summary.p999_ns),
            ];
            for (permille, reported) in percentiles {
                let (exact, reported) = (exact(&sorted, permille), reported.unwrap());
                prop_assert!(reported >= exact, "p{permille}: {reported} is below {exact}");
                let error = reported - exact;
                prop_assert!(error <= (exact / 16).max(1023), "p{permille}: {reported} is far above {exact}");
            }
            prop_assert_eq!(summary.max_ns, sorted.last().copied());
            let total: u128 = sorted.iter().map(|nanos| u128::from(*nanos)).sum();
            prop_assert_eq!(u128::from(summary.mean_ns.unwrap()), total / sorted.len() as u128);
            let below = |bound: u64| sorted.iter().filter(|nanos| **nanos < bound).count() as u64;
            let count = sorted.len() as u64;
            prop_assert_eq!(&summary.below.unwrap()[..BOUNDS.len()], &BOUNDS.map(below)[..]);
            prop_assert_eq!(summary.below.unwrap()[BOUNDS.len()], count);
            prop_assert_eq!((summary.operations, summary.bytes), (count, 512 * count));
        }
    }

    #[test]
    fn kinds_are_kept_apart_and_errors_move_no_bytes() {
        let queue = Arc::<QueueStats>::default();
        let mut tally = Tally::new(Arc::clone(&queue));
        let ops =
            [Op::Write { durable: true }, Op::Flush, Op::Discard, Op::WriteZeroes { keep_allocated: false }];
        for (count, op) in (1..).zip(ops) {
            for _ in 0..count {
                tally.began();
                tally.succeeded(op, 1000, 5);
            }
            tally.began();
            tally.failed(op, 5);
        }
        tally.began();
        tally.turn_ended([0, 7, 2]);
        let summary = Summary::of(std::iter::once(&*queue));
        assert_eq!(summary.in_flight, 1);
        assert_eq!(summary.read, Activity { errors: Some(0), ..Activity::default() });
        assert_eq!(
            (summary.write.window, summary.flush.window, summary.discard.window),
            (Some(7), None, Some(2))
        );
        for (count, kind) in
            (1..).zip([&summary.write, &summary.flush, &summary.discard, &summary.write_zeroes.unwrap()])
        {
            assert_eq!((kind.operations, kind.bytes, kind.errors), (count + 1, 1000 * count, Some(1)));
        }
        assert_eq!(summary.write.p999_ns, Some(5), "no percentile is above the longest");
        assert_eq!(summary.discard.max_ns, None);
    }

    #[test]
    fn queues_share_no_cache_line() {
        assert_eq!(align_of::<QueueStats>() % 128, 0);
        assert_eq!(size_of::<QueueStats>() % 128, 0);
    }
}
