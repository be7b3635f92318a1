//! What the writer does before the first write and after the last: clear autoclear features, and return
//! leaked clusters.
//! It never changes a file to which nothing is written.

use std::io;

use super::state::Grower;

/// The most bytes of reference counts that are searched for leaked clusters: those of 2 TiB in clusters of 64
/// KiB.
const SEARCHED_MAX: u64 = 64 << 20;
/// Where a header has its autoclear features.
const AUTOCLEAR: u64 = 88;

impl Grower {
    /// Does what must be done before the first write.
    pub(super) fn prepare(&mut self) -> io::Result<()> {
        if self.prepared {
            return Ok(());
        }
        // A write may reach all of the last cluster, which may be cut where its bytes end.
        self.file.set_len(self.end * self.cluster())?;
        if self.header.autoclear != 0 {
            // They say what is true only as long as all writers know these features.
            self.write(&[0; 8], AUTOCLEAR)?;
            self.sync()?;
            self.header.autoclear = 0;
        }
        if let Some(bitmaps) = self.header.bitmaps.take_if(|bitmaps| bitmaps.is_last) {
            // Without it the list of extensions ends here. The bitmaps' clusters are leaks from now on. No
            // sync is needed: without the feature the extension means nothing.
            self.write(&[0; 8], bitmaps.at)?;
        }
        self.prepared = true;
        Ok(())
    }

    /// Counts clusters as free that nothing used when this writer began: a writer that was killed or lost its
    /// power has leaked them, or they held bitmaps. The caller has synced all that was written.
    pub(super) fn release_leaks(&mut self) -> io::Result<()> {
        let Some(mut uses) = self.uses.take().filter(|uses| !uses.overflowed) else { return Ok(()) };
        if !self.wrote || self.header.has_unknown {
            return Ok(());
        }
        let cluster = self.cluster();
        let per_block = cluster / 2;
        let (mut searched, mut bytes, mut here) = (0, Vec::new(), None);
        for gap in uses.gaps(self.known) {
            let mut first = gap.start;
            while first < gap.end {
                let block = first / per_block;
                let end = gap.end.min((block + 1) * per_block);
                let (from, to) = (first % per_block * 2, (first % per_block + end - first) * 2);
                first = end;
                let Some(place) = self.blocks.get(&block).copied() else {
                    // Gaps may be as long as a file claims to be: only blocks that are there cost anything.
                    first = self.blocks.range(block..).next().map_or(gap.end, |(next, _)| next * per_block);
                    continue;
                };
                if here != Some(block) {
                    searched += cluster;
                    if searched > SEARCHED_MAX {
                        return Ok(());
                    }
                    bytes.resize(usize::try_from(cluster).unwrap_or(0), 0);
                    self.file.read_at(&mut bytes, place)?;
                    here = Some(block);
                }
                let mut counts = (from..to).step_by(2);
                while let Some(start) = counts.find(|at| is_counted(&bytes, *at)) {
                    let end = counts.find(|at| !is_counted(&bytes, *at)).unwrap_or(to);
                    let zeroes = vec![0; usize::try_from(end - start).unwrap_or(0)];
                    self.write(&zeroes, place + start)?;
                }
            }
        }
        Ok(())
    }
}

/// Whether the count at byte `at` of a block is not 0.
fn is_counted(block: &[u8], at: u64) -> bool {
    let at = usize::try_from(at).unwrap_or(usize::MAX);
    block.get(at..).and_then(|rest| rest.get(..2)).is_some_and(|count| count != [0, 0])
}
