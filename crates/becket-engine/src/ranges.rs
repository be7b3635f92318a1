//! Which entries of a ring's table are free.
//! Knows nothing of what the entries are, and never hands one out twice.

/// Which entries of a table are free, as sorted ranges that do not touch.
#[derive(Debug)]
pub(crate) struct Ranges {
    size: u32,
    free: Vec<(u32, u32)>,
}

impl Ranges {
    /// All of `size` entries.
    pub(crate) fn new(size: u32) -> Ranges {
        Ranges { size, free: if size == 0 { Vec::new() } else { vec![(0, size)] } }
    }

    /// Neighbouring entries, of which the first is returned.
    pub(crate) fn take(&mut self, count: u32) -> Option<u32> {
        if count == 0 {
            return None;
        }
        let index = self.free.iter().position(|(_, len)| *len >= count)?;
        let (first, len) = self.free[index];
        if len == count {
            self.free.remove(index);
        } else {
            self.free[index] = (first + count, len - count);
        }
        Some(first)
    }

    /// The reverse.
    pub(crate) fn give(&mut self, first: u32, count: u32) {
        if count == 0 {
            return;
        }
        let index = self.free.partition_point(|(start, _)| *start < first);
        self.free.insert(index, (first, count));
        if let Some(&(next, len)) = self.free.get(index + 1)
            && first + count == next
        {
            self.free[index].1 += len;
            self.free.remove(index + 1);
        }
        if index > 0 {
            let (start, len) = self.free[index - 1];
            if start + len == first {
                self.free[index - 1].1 += self.free[index].1;
                self.free.remove(index);
            }
        }
    }

    /// Number of entries, free and taken.
    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// The most entries that can be taken `times` times.
    pub(crate) fn widest(&self, times: u32) -> u32 {
        let fits = |count: u32| self.free.iter().map(|(_, len)| len / count).sum::<u32>() >= times.max(1);
        let (mut fitting, mut beyond) = (0, self.size + 1);
        while beyond - fitting > 1 {
            let count = fitting + (beyond - fitting) / 2;
            if fits(count) { fitting = count } else { beyond = count }
        }
        fitting
    }

    #[cfg(test)]
    pub(crate) fn free(&self) -> &[(u32, u32)] {
        &self.free
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_run_out_and_come_back() {
        let mut ranges = Ranges::new(10);
        let a = ranges.take(4).unwrap();
        let b = ranges.take(4).unwrap();
        assert_eq!(ranges.take(4), None);
        assert_eq!(ranges.take(0), None);
        ranges.give(a, 4);
        ranges.give(b, 4);
        assert_eq!(ranges.free, [(0, 10)]);
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_all_come_back(counts in prop::collection::vec((1u32..20, any::<bool>()), 1..100)) {
            let mut ranges = Ranges::new(256);
            let mut held: Vec<(u32, u32)> = Vec::new();
            for (count, release) in counts {
                if release && !held.is_empty() {
                    let (first, count) = held.swap_remove(count as usize % held.len());
                    ranges.give(first, count);
                } else if let Some(first) = ranges.take(count) {
                    prop_assert!(first + count <= 256);
                    for (other, len) in &held {
                        prop_assert!(first + count <= *other || other + len <= first);
                    }
                    held.push((first, count));
                }
            }
            for (first, count) in held {
                ranges.give(first, count);
            }
            prop_assert_eq!(ranges.free, vec![(0, 256)]);
        }
    }

    proptest! {
        #[test]
        fn the_widest_can_be_taken_and_nothing_wider(
            taken in prop::collection::vec((1u32..20, any::<bool>()), 0..40), times in 1u32..6,
        ) {
            let mut ranges = Ranges::new(256);
            for (count, gives_back) in taken {
                let Some(first) = ranges.take(count) else { break };
                if gives_back {
                    // Leaves a hole of its size but one.
                    ranges.give(first, count - 1);
                }
            }
            let widest = ranges.widest(times);
            let all = |count: u32| {
                let mut ranges = Ranges { size: 256, free: ranges.free.clone() };
                (0..times).all(|_| ranges.take(count).is_some())
            };
            prop_assert!(widest == 0 || all(widest), "{times} x {widest} of {ranges:?}");
            prop_assert!(!all(widest + 1), "{times} x {} of {ranges:?}", widest + 1);
        }
    }
}
