//! One disturbance after another, under load: no user notices it, and its pause is in bounds.
//! It never goes on when a load does not.

use std::{
    collections::BTreeMap,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use becket_testkit::Scratch;
use serde_json::{Value, json};

use crate::common::disturb::{DISTURBANCES, Disturbance, PATIENCE};
use crate::common::load::{Random, Seen};
use crate::held::times;
use crate::script::Script;

/// The device by which it is seen whether those who serve are there.
pub(crate) const RAW: &str = "raw";

pub(crate) struct Course {
    possible: Vec<&'static Disturbance>,
    pauses: BTreeMap<String, Vec<u64>>,
    pub(crate) done: usize,
    pub(crate) random: Random,
}

impl Course {
    pub(crate) fn new(seed: u64) -> Course {
        let possible = DISTURBANCES.iter().filter(|one| one.possible()).collect();
        Course { possible, pauses: BTreeMap::new(), done: 0, random: Random::new(seed) }
    }

    /// How many different ones there are.
    pub(crate) fn kinds(&self) -> usize {
        self.possible.len()
    }

    /// A random moment.
    pub(crate) fn moment(&mut self) -> Duration {
        Duration::from_millis(500 + self.random.below(3000) as u64)
    }

    /// The next one. Returns when the loads have gone on after it.
    pub(crate) fn next(&mut self, place: &Scratch, seen: &Seen, scripts: &mut [Script]) {
        let disturbance = self.possible[self.done % self.possible.len()];
        seen.longest.store(0, Ordering::Relaxed);
        let begun = Instant::now();
        println!("{}: {}", self.done, disturbance.name());
        let stopped = disturbance.happen(place, RAW, &mut self.random);
        assert!(seen.goes_on(PATIENCE), "{}: the load does not go on", disturbance.name());
        let pause = u128::from(seen.longest.load(Ordering::Relaxed) / 1000);
        let pause = pause.saturating_sub(stopped.as_millis()).min(begun.elapsed().as_millis());
        self.pauses.entry(disturbance.name()).or_default().push(u64::try_from(pause).unwrap());
        scripts.iter_mut().for_each(Script::goes_on);
        self.done += 1;
    }

    /// The pauses: all together, and of each kind.
    pub(crate) fn pauses(&mut self) -> [Value; 2] {
        let mut all: Vec<u64> = self.pauses.values().flatten().copied().collect();
        let each: BTreeMap<_, _> =
            self.pauses.iter_mut().map(|(name, pauses)| (name.clone(), times(pauses))).collect();
        [times(&mut all), json!(each)]
    }
}
