//! What a queue counts, and how long its requests took.
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

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use serde::{Deserialize, Serialize};

use crate::Op;

/// Latencies below two to this power of nanoseconds share one bucket.
const LOWEST: u32 = 10;
/// Those of at least two to this power (137 s) share another.
const HIGHEST: u32 = 37;
/// Linear steps between two powers of two, as a power of two.
const STEPS: u32 = 4;
const BUCKETS: usize = (((HIGHEST - LOWEST) << STEPS) + 2) as usize;

/// The latencies by which [`Activity::below`] counts, in nanoseconds.
pub const BOUNDS: [u64; 11] =
    [1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30, 1 << 32, 1 << 34];

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

/// What is counted of each kind of request.
#[derive(Debug, Default)]
struct Counters {
    operations: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
}

impl Counters {
    fn add(&self, requests: u64, bytes: u64) {
        raise(&self.operations, requests);
        raise(&self.bytes, bytes);
    }
}

/// What is counted where latency matters.
#[derive(Debug, Default)]
struct Timed {
    counters: Counters,
    histogram: Histogram,
}

impl Timed {
    fn add(&self, requests: u64, bytes: u64, nanos: u64) {
        self.counters.add(requests, bytes);
        self.histogram.add(requests, nanos);
    }
}

/// Latencies in buckets whose width is at most a sixteenth of what they hold.
#[derive(Debug)]
struct Histogram {
    total: AtomicU64,
    max: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
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
fn raise(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Relaxed).wrapping_add(by), Relaxed);
}

fn bucket_of(nanos: u64) -> usize {
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
fn longest_in(bucket: usize) -> u64 {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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
