//! Where the units of a growing image are: a sparse table that is read without a lock.
//! Its memory follows the units that have a place, never the length that the image claims. Only the thread
//! that makes places adds to it; an I/O thread reads and never allocates.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most parts of the root: 96 KiB of memory.
const ROOT_MAX: u64 = 4096;
/// Parts of a branch. Small, so that a unit far from all others costs little.
const BRANCH: u64 = 64;
/// Units of a leaf, at least and at most.
const LEAF: std::ops::RangeInclusive<u64> = 64..=4096;

/// One more than the place of each unit, 0 where it has none.
type Leaf = Box<[AtomicU64]>;

#[derive(Debug)]
enum Part {
    Branch(Box<[OnceLock<Part>]>),
    Leaf(Leaf),
}

/// The places of units.
#[derive(Debug)]
pub(crate) struct Places {
    /// Units of a leaf: a power of two.
    leaf: u64,
    /// Leaves below each part of the root: a power of [`BRANCH`].
    leaves: u64,
    root: Box<[OnceLock<Part>]>,
}

impl Places {
    /// A table for so many units of `unit` bytes, none of which has a place.
    pub(crate) fn new(units: u64, unit: u64) -> Places {
        // A leaf is no longer than the table of an image that has a place for one of its units usually is.
        let leaf = (unit / 8).next_power_of_two().clamp(*LEAF.start(), *LEAF.end());
        let all = units.div_ceil(leaf);
        let mut leaves = 1;
        while all.div_ceil(leaves) > ROOT_MAX {
            leaves *= BRANCH;
        }
        let root = (0..all.div_ceil(leaves)).map(|_| OnceLock::new()).collect();
        Places { leaf, leaves, root }
    }

    /// The place of a unit, where it has one.
    #[inline]
    pub(crate) fn get(&self, unit: u64) -> Option<u64> {
        let (leaf, mut leaves) = (unit / self.leaf, self.leaves);
        let mut part = self.root.get((leaf / leaves) as usize)?.get()?;
        loop {
            match part {
                Part::Leaf(units) => {
                    return units.get((unit % self.leaf) as usize)?.load(Ordering::Acquire).checked_sub(1);
                }
                Part::Branch(parts) => {
                    leaves /= BRANCH;
                    part = parts.get((leaf / leaves % BRANCH) as usize)?.get()?;
                }
            }
        }
    }

    /// A unit has a place. A thread that finds it sees what was written there before.
    pub(crate) fn set(&self, unit: u64, place: u64) {
        let (leaf, mut leaves) = (unit / self.leaf, self.leaves);
        let Some(mut slot) = self.root.get((leaf / leaves) as usize) else { return };
        loop {
            match slot.get_or_init(|| self.part(leaves)) {
                Part::Leaf(units) => {
                    if let Some(slot) = units.get((unit % self.leaf) as usize) {
                        slot.store(place + 1, Ordering::Release);
                    }
                    return;
                }
                Part::Branch(parts) => {
                    leaves /= BRANCH;
                    let Some(next) = parts.get((leaf / leaves % BRANCH) as usize) else { return };
                    slot = next;
                }
            }
        }
    }

    /// A part with so many leaves below it.
    fn part(&self, leaves: u64) -> Part {
        if leaves == 1 {
            Part::Leaf((0..self.leaf).map(|_| AtomicU64::new(0)).collect())
        } else {
            Part::Branch((0..BRANCH).map(|_| OnceLock::new()).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of all parts.
    fn size(places: &Places) -> usize {
        fn of(parts: &[OnceLock<Part>]) -> usize {
            let below = parts.iter().filter_map(OnceLock::get).map(|part| match part {
                Part::Leaf(units) => units.len() * 8,
                Part::Branch(parts) => of(parts),
            });
            size_of_val(parts) + below.sum::<usize>()
        }
        of(&places.root)
    }

    #[test]
    fn units_are_found_where_they_were_set_and_nowhere_else() {
        for (len, unit) in [(1 << 20, 4096), (1 << 40, 65536), (1 << 61, 512), (1 << 61, 2 << 20)] {
            let units: u64 = len / unit;
            let places = Places::new(units, unit);
            let some = [0, 1, 63, 64, 4095, 4096, units / 3, units / 2 - 1, units / 2, units - 2, units - 1];
            let some: std::collections::BTreeSet<u64> = some.into_iter().filter(|n| *n < units).collect();
            for unit in &some {
                assert_eq!(places.get(*unit), None);
                places.set(*unit, unit * 3);
            }
            for unit in some.iter().flat_map(|unit| [unit.saturating_sub(1), *unit, unit + 1]) {
                let expected = some.contains(&unit).then_some(unit * 3);
                assert_eq!(places.get(unit), expected, "unit {unit} of {units}");
            }
            places.set(units + (1 << 50), 5);
            assert_eq!(places.get(u64::MAX), None);
        }
    }

    #[test]
    fn memory_follows_what_is_placed_and_not_what_is_claimed() {
        for unit in [512, 4096, 65536, 2 << 20] {
            for bits in [20, 37, 40, 50, 61] {
                let places = Places::new((1 << bits) / unit, unit);
                assert!(size(&places) <= 160 << 10, "2^{bits} in units of {unit}: {}", size(&places));
                // Far from each other, so each has a leaf of its own.
                let (before, count) = (size(&places), 100);
                (0..count).for_each(|n| places.set((1 << bits) / unit / count * n, 0));
                let each = (size(&places) - before) / count as usize;
                assert!(
                    each <= (unit as usize).clamp(512, 32768) + 16384,
                    "2^{bits} in units of {unit}: {each}"
                );
            }
        }
    }
}
