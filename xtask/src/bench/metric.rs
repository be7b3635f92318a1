//! What of a run is compared, and what the numbers are called.
//! Never says which of two numbers is good: only which of them is better.

use serde::{Deserialize, Serialize};

use super::fio::Measure;
use super::record::Clock;

/// What a table of a grid compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Metric {
    /// I/Os in a second of the guest's clock.
    Rate,
    /// Nanoseconds of the guest's clock for each I/O.
    Price,
    /// Microseconds from submission to completion, the median of a run.
    Median,
    /// The same, 99 of 100 were faster.
    P99,
}

impl Metric {
    /// This metric's number of one run.
    pub(crate) fn of(self, measure: &Measure) -> f64 {
        match self {
            Metric::Rate => measure.iops,
            Metric::Price => 1e9 / measure.iops,
            Metric::Median => measure.latency_p50_ns / 1000.0,
            Metric::P99 => measure.latency_p99_ns / 1000.0,
        }
    }

    /// Whether the smaller of two numbers is the better one.
    pub(crate) fn less_is_better(self) -> bool {
        self != Metric::Rate
    }

    /// What the numbers are, for a heading.
    pub(crate) fn unit(self, clock: Clock) -> &'static str {
        match (self, clock) {
            (Metric::Rate, Clock::Instructions) => "I/Os per 10⁹ instructions",
            (Metric::Rate, Clock::Time) => "I/Os per second",
            (Metric::Price, Clock::Instructions) => "instructions per I/O",
            (Metric::Price, Clock::Time) => "ns per I/O",
            (Metric::Median, Clock::Instructions) => "median, 1000 instructions",
            (Metric::Median, Clock::Time) => "median, µs",
            (Metric::P99, Clock::Instructions) => "99th percentile, 1000 instructions",
            (Metric::P99, Clock::Time) => "99th percentile, µs",
        }
    }
}
