//! Which clusters of a qcow2 file are in use, and by what.
//! It allocates per run of clusters, never per byte that the image claims.
//!
//! Two uses of one cluster are an error of the image, and dangerous: the user of such a disk can rewrite a
//! table by writing data. So an image is checked once, before it is opened for writing, and requests need no
//! check.

use std::fmt;

use super::entry::{COMPRESSED, COPIED, PLACE, compressed_place};
use super::header::{Counts, Header};
use crate::image::PIECES_MAX;

/// The most runs of an image that is opened for writing: 48 MiB of memory, for the time of the check.
pub(super) const RUNS_MAX: usize = 2 * PIECES_MAX;
/// What a cluster is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    Header,
    L1,
    L2,
    /// The table of the blocks of reference counts.
    Counts,
    /// A block of reference counts.
    Block,
    /// Data of the disk that say to have no other user.
    Data,
    /// Data of the disk that may have other users.
    SharedData,
    /// Compressed data, several of which may lie in one cluster.
    Compressed,
}

impl Use {
    /// Whether two of these may lie in one cluster.
    fn may_share(self) -> bool {
        matches!(self, Use::SharedData | Use::Compressed)
    }

    /// Whether it is part of the image's own tables.
    fn is_metadata(self) -> bool {
        !matches!(self, Use::Data | Use::SharedData | Use::Compressed)
    }
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Use::Header => "the header",
            Use::L1 => "the L1 table",
            Use::L2 => "an L2 table",
            Use::Counts => "the refcount table",
            Use::Block => "a refcount block",
            Use::Data | Use::SharedData => "data of the disk",
            Use::Compressed => "compressed data of the disk",
        })
    }
}

/// Clusters that follow each other and are used for the same.
#[derive(Debug, Clone, Copy)]
struct Run {
    first: u64,
    /// The first cluster behind it.
    end: u64,
    used: Use,
}

/// Why nothing may be written to an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Clash {
    /// For people.
    pub(super) why: String,
    /// A write in place would change the image's tables. QEMU marks such an image as corrupt.
    pub(super) on_metadata: bool,
}

/// The uses of a file's clusters.
#[derive(Debug)]
pub(super) struct Uses {
    cluster_bits: u32,
    runs: Vec<Run>,
    most: usize,
    /// There are more runs than are kept.
    pub(super) overflowed: bool,
    /// An entry of a table has a place that begins no cluster.
    unaligned: Option<(u64, Use)>,
}

impl Uses {
    /// The uses that the header alone says; at most so many runs are kept.
    pub(super) fn of(header: &Header, most: usize) -> Uses {
        let mut uses = Uses {
            cluster_bits: header.cluster_bits,
            runs: Vec::new(),
            most,
            overflowed: false,
            unaligned: None,
        };
        uses.add(0, header.cluster(), Use::Header);
        uses.add(header.l1_offset, u64::from(header.l1_entries) * 8, Use::L1);
        let Counts { offset, clusters, .. } = header.counts;
        uses.add(offset, u64::from(clusters) << header.cluster_bits, Use::Counts);
        uses
    }

    /// Notes `len` bytes from byte `place` on.
    pub(super) fn add(&mut self, place: u64, len: u64, used: Use) {
        let first = place >> self.cluster_bits;
        let end = place.saturating_add(len).div_ceil(1 << self.cluster_bits).max(first + 1);
        let full = self.runs.len() >= self.most;
        match self.runs.last_mut() {
            Some(last) if last.used == used && last.end == first => last.end = end,
            // Compressed clusters that follow each other share the cluster between them.
            Some(last)
                if used == Use::Compressed
                    && last.used == used
                    && (last.first..=last.end).contains(&first) =>
            {
                last.end = last.end.max(end);
            }
            _ if full => self.overflowed = true,
            _ => self.runs.push(Run { first, end, used }),
        }
    }

    /// Notes a table or block of one cluster that an entry points to.
    pub(super) fn table(&mut self, place: u64, used: Use) {
        if place & ((1 << self.cluster_bits) - 1) != 0 {
            self.unaligned.get_or_insert((place, used));
        }
        self.add(place, 1, used);
    }

    /// Notes what an entry of an L2 table points to.
    pub(super) fn entry(&mut self, entry: u64) {
        if entry & COMPRESSED != 0 {
            let (place, stored) = compressed_place(entry, self.cluster_bits);
            self.add(place, stored, Use::Compressed);
        } else if entry & PLACE != 0 {
            self.table(entry & PLACE, if entry & COPIED == 0 { Use::SharedData } else { Use::Data });
        }
    }

    /// Why nothing may be written to a file of so many clusters.
    pub(super) fn clash(&mut self, clusters: u64) -> Option<Clash> {
        let bits = self.cluster_bits;
        let damaged = |what: String, on_metadata| {
            let why = format!(
                "{what}, and a write could destroy the image; `qemu-img check` shows what is damaged, \
                 `qemu-img convert -O qcow2` makes a sound copy"
            );
            Some(Clash { why, on_metadata })
        };
        if self.overflowed {
            let why = format!(
                "it lies in more than {} pieces, too many to be checked; `qemu-img convert -O qcow2` puts it in order",
                self.most
            );
            return Some(Clash { why, on_metadata: false });
        }
        if let Some((place, used)) = self.unaligned {
            return damaged(format!("{used} is said to be at byte {place}, which begins no cluster"), false);
        }
        self.runs.sort_unstable_by_key(|run| run.first);
        let mut furthest: Option<Run> = None;
        for run in &self.runs {
            if run.end > clusters {
                let end = clusters.checked_shl(bits).unwrap_or(u64::MAX);
                return damaged(format!("{} reaches beyond the file's end at byte {end}", run.used), false);
            }
            match furthest {
                Some(other) if run.first < other.end && !(run.used == other.used && run.used.may_share()) => {
                    let (place, one, two) = (run.first << bits, other.used, run.used);
                    // What may have other users is never written in place.
                    let in_place = |used: Use| used == Use::Data || used.is_metadata();
                    let on_metadata =
                        (one.is_metadata() || two.is_metadata()) && in_place(one) && in_place(two);
                    return damaged(
                        format!("the cluster at byte {place} is both {one} and {two}"),
                        on_metadata,
                    );
                }
                Some(other) if other.end >= run.end => {}
                _ => furthest = Some(*run),
            }
        }
        None
    }

    /// The runs of clusters before `end` that nothing uses, in order.
    pub(super) fn gaps(&mut self, end: u64) -> Vec<std::ops::Range<u64>> {
        self.runs.sort_unstable_by_key(|run| run.first);
        let (mut gaps, mut reached) = (Vec::new(), 0);
        for run in &self.runs {
            if run.first.min(end) > reached {
                gaps.push(reached..run.first.min(end));
            }
            reached = reached.max(run.end);
        }
        if reached < end {
            gaps.push(reached..end);
        }
        gaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses() -> Uses {
        Uses { cluster_bits: 16, runs: Vec::new(), most: 8, overflowed: false, unaligned: None }
    }

    const C: u64 = 65536;

    #[test]
    fn what_follows_each_other_is_one_run() {
        let mut uses = uses();
        (3..100).for_each(|cluster| uses.entry((cluster * C) | COPIED));
        assert_eq!(uses.runs.len(), 1);
        assert_eq!(uses.clash(100), None);
        assert_eq!(uses.gaps(200), [0..3, 100..200]);
        assert!(uses.clash(99).unwrap().why.contains("beyond the file's end at byte 6488064"));
    }

    #[test]
    fn two_uses_of_a_cluster_are_found() {
        let both = |one: &dyn Fn(&mut Uses), two: &dyn Fn(&mut Uses)| {
            let mut uses = uses();
            one(&mut uses);
            uses.table(9 * C, Use::L2);
            two(&mut uses);
            uses.clash(100)
        };
        let data = |uses: &mut Uses| uses.entry((5 * C) | COPIED);
        let shared = |uses: &mut Uses| uses.entry(5 * C);
        let packed = |uses: &mut Uses| uses.add(5 * C + 512, 1024, Use::Compressed);
        let table = |uses: &mut Uses| uses.table(5 * C, Use::Block);
        assert!(both(&data, &data).is_some() && both(&data, &shared).is_some());
        assert!(both(&table, &packed).unwrap().why.contains("both a refcount block and compressed data"));
        assert!(both(&packed, &shared).is_some() && both(&table, &table).is_some());
        assert!(both(&packed, &packed).is_none() && both(&shared, &shared).is_none());
        assert!(
            both(&data, &|uses| uses.table(7 * C + 512, Use::L2)).unwrap().why.contains("begins no cluster")
        );
        let marks = |one, two| both(one, two).unwrap().on_metadata;
        assert!(marks(&data, &table) && marks(&table, &data) && marks(&table, &table));
        assert!(!marks(&data, &data) && !marks(&shared, &table) && !marks(&table, &packed));
        // One of many that a long run covers.
        let long = |uses: &mut Uses| uses.add(2 * C, 6 * C, Use::Counts);
        assert!(both(&long, &data).unwrap().why.contains("byte 327680 is both the refcount table and data"));
    }

    #[test]
    fn no_more_is_kept_than_was_asked_for() {
        let mut uses = uses();
        (0..100).for_each(|n| uses.entry(n * 2 * C));
        assert!(uses.runs.len() == 8 && uses.overflowed);
        assert!(uses.clash(1000).unwrap().why.contains("more than 8 pieces"));
    }
}
