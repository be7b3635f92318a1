//! What devices did between two readings of their counters, as rates.
//! Never asks the system for anything: a reading is a value.

use becket_device::{Activity, DeviceInfo, Summary};
use serde::Serialize;
use std::{collections::HashMap, time::Duration};

/// What was read of all devices at one moment.
#[derive(Debug, Default)]
pub(super) struct Reading {
    /// By name, the counters of the devices that have some.
    pub(super) counters: HashMap<String, Summary>,
}

/// What a device did in an interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Rates {
    /// Requests under way at its end.
    pub(super) in_flight: u64,
    pub(super) read: Rate,
    pub(super) write: Rate,
    pub(super) flush: Rate,
    pub(super) discard: Rate,
    /// Failed requests; `None` where nobody counts them.
    pub(super) errors_per_s: Option<f64>,
    /// The part of the wanted blocks that were decoded already, from 0 to 1; `None` if none was wanted.
    pub(super) hit_ratio: Option<f64>,
}

/// One kind of request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Rate {
    pub(super) operations_per_s: f64,
    pub(super) bytes_per_s: f64,
    /// Mean latency of the requests that ended in the interval; `None` if none did.
    pub(super) mean_ns: Option<u64>,
}

/// A line of what is shown.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) info: DeviceInfo,
    /// `None` if a counter is missing at either end of the interval.
    pub(super) rates: Option<Rates>,
}

/// What each device did between two readings that are `apart`.
pub(super) fn rows(infos: &[DeviceInfo], before: &Reading, after: &Reading, apart: Duration) -> Vec<Row> {
    let of = |info: &DeviceInfo| {
        let (before, after) = (before.counters.get(&info.name)?, after.counters.get(&info.name)?);
        Some(between(before, after, apart))
    };
    infos.iter().map(|info| Row { info: info.clone(), rates: of(info) }).collect()
}

/// What was done between two states of the counters. A worker that was replaced counts from zero again: what
/// it has counted since is all that is known.
fn between(before: &Summary, after: &Summary, apart: Duration) -> Rates {
    let kinds = |summary: &Summary| {
        [&summary.read, &summary.write, &summary.flush, &summary.discard].map(|kind| *kind)
    };
    let (old, new) = (kinds(before), kinds(after));
    let restarted = old.iter().zip(&new).any(|(old, new)| new.operations < old.operations);
    let old = if restarted { [Activity::default(); 4] } else { old };
    let rate = |kind: usize| rate(&old[kind], &new[kind], apart);
    let errors = |kinds: &[Activity; 4]| kinds.iter().map(|kind| kind.errors).sum::<Option<u64>>();
    let (from, to) = (if restarted { (0, 0) } else { lookups(before) }, lookups(after));
    let (hits, waits) = (to.0.saturating_sub(from.0), to.1.saturating_sub(from.1));
    Rates {
        in_flight: after.in_flight,
        read: rate(0),
        write: rate(1),
        flush: rate(2),
        discard: rate(3),
        errors_per_s: errors(&new)
            .map(|now| per_second(now.saturating_sub(errors(&old).unwrap_or(0)), apart)),
        hit_ratio: (hits + waits > 0).then(|| hits as f64 / (hits + waits) as f64),
    }
}

/// How often what was wanted was there, decoded or fetched, and how often it was not yet.
fn lookups(summary: &Summary) -> (u64, u64) {
    let fetched = summary.fetched.map(|fetched| {
        let reads = summary.read.operations;
        (reads.saturating_sub(fetched.waits), fetched.waits)
    });
    let decoded = summary.decoded.map(|decoded| (decoded.hits, decoded.waits));
    let both = [fetched.unwrap_or_default(), decoded.unwrap_or_default()];
    both.into_iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

fn rate(old: &Activity, new: &Activity, apart: Duration) -> Rate {
    let done = new.since(old);
    Rate {
        operations_per_s: per_second(done.operations, apart),
        bytes_per_s: per_second(done.bytes, apart),
        mean_ns: done.mean_ns,
    }
}

fn per_second(count: u64, apart: Duration) -> f64 {
    let seconds = apart.as_secs_f64();
    if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
}

/// The sum over all devices.
pub(super) fn sum(rows: &[Row]) -> Rates {
    let mut sum = Rates::default();
    for rates in rows.iter().filter_map(|row| row.rates.as_ref()) {
        sum.in_flight += rates.in_flight;
        for (sum, kind) in [(&mut sum.read, rates.read), (&mut sum.write, rates.write)] {
            sum.operations_per_s += kind.operations_per_s;
            sum.bytes_per_s += kind.bytes_per_s;
        }
    }
    sum
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use becket_device::{Decodings, Fetched};

    pub(in super::super) fn activity(operations: u64, bytes: u64, mean: u64) -> Activity {
        Activity { operations, bytes, mean_ns: Some(mean), errors: Some(0), ..Activity::default() }
    }

    #[test]
    fn rates_are_of_the_interval_and_not_of_the_whole_life() {
        let before = Summary { read: activity(100, 400, 1000), ..Summary::default() };
        let after = Summary { read: activity(300, 1400, 3000), in_flight: 7, ..Summary::default() };
        let rates = between(&before, &after, Duration::from_secs(2));
        assert_eq!((rates.read.operations_per_s, rates.read.bytes_per_s, rates.in_flight), (100.0, 500.0, 7));
        // 300 * 3000 - 100 * 1000 nanoseconds for 200 reads.
        assert_eq!(rates.read.mean_ns, Some(4000));
        assert_eq!(rates.write, Rate::default());
        assert_eq!(rates.hit_ratio, None);
    }

    #[test]
    fn a_worker_that_counts_anew_does_not_count_backwards() {
        let before = Summary { write: activity(1000, 4096, 5), ..Summary::default() };
        let after = Summary { write: activity(10, 40, 5), ..Summary::default() };
        let rates = between(&before, &after, Duration::from_secs(1));
        assert_eq!((rates.write.operations_per_s, rates.write.bytes_per_s), (10.0, 40.0));
        assert_eq!(rates.write.mean_ns, Some(5));
    }

    #[test]
    fn no_time_and_no_requests_are_no_division() {
        let nothing = Summary::default();
        let rates = between(&nothing, &nothing, Duration::ZERO);
        assert_eq!(rates, Rates { errors_per_s: None, ..Rates::default() });
        let huge = Summary { read: activity(u64::MAX, u64::MAX, u64::MAX), ..Summary::default() };
        assert_eq!(between(&nothing, &huge, Duration::from_secs(1)).read.mean_ns, Some(u64::MAX));
    }

    #[test]
    fn the_part_of_blocks_that_were_there_is_of_the_interval() {
        let decoded = |hits, waits| Some(Decodings { hits, waits, ..Decodings::default() });
        let before = Summary { decoded: decoded(10, 10), ..Summary::default() };
        let after = Summary { decoded: decoded(13, 11), ..Summary::default() };
        assert_eq!(between(&before, &after, Duration::from_secs(1)).hit_ratio, Some(0.75));
        // Reads from a server: ten, of which four waited.
        let fetched = |reads, waits| {
            let fetched = Some(Fetched { waits, ..Fetched::default() });
            Summary { read: activity(reads, 0, 1), fetched, ..Summary::default() }
        };
        let rates = between(&fetched(20, 10), &fetched(30, 14), Duration::from_secs(1));
        assert_eq!(rates.hit_ratio, Some(0.6));
    }
}
