//! Allocates space in a qcow2 for writes: clusters of its own, one after another at the file's end.
//! It never lets the file say anything that is not true on the disk, whenever the machine stops.
//!
//! # What is promised, and by which order
//!
//! A cluster that cannot be written where it is gets a copy at the file's end (*placing* it); writes then go
//! there as to any file. Placing changes no byte of the disk in the image, so it may happen at any time.
//!
//! - **The worker dies.** Everything is written to the file before it is reported, so the kernel has it.
//! - **The power fails.** Space is *reserved* in large pieces: the file is extended, the space is counted as
//!   used, and both are synced, before any of it is allocated. Fresh space reads as zeroes, so an entry that
//!   points there is true from the start if the cluster was zeroes; otherwise the copy is synced before the
//!   entry is written. A lost entry was not flushed by anyone. Unused clusters are counted as free only after
//!   the entries that left them are synced, when the image is closed.
//! - **A sync fails.** The data that it should have brought to the disk may be lost although later syncs
//!   succeed, so nothing is written any more that relies on it: nothing is placed, and no count changes.
//! - So after a crash clusters may be leaked (counted more often than they are used: `qemu-img check -r
//!   leaks`), and nothing else is wrong; after a close not even that, unless a write or a sync had failed:
//!   then it is not known what the file says. The next writer that writes something returns the clusters
//!   that nothing uses when it closes.
//! - A file to which nothing is written does not change.

mod leaks;
mod state;

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

pub use self::state::Grower;
use self::state::{COUNTS_MAX, small};
pub(super) use self::state::{blocks, unfit};
use super::entry::{COMPRESSED, COPIED, PLACE, ZERO, compressed_place};
use super::uses::{Use, Uses};
use crate::Place;
use crate::bytes::{ReadAt as _, be64_at};
use crate::grow::{Grow, Wanted};

/// Room that is reserved at once, in bytes, within these numbers of clusters.
const RESERVED: u64 = 32 << 20;
const FEWEST: u64 = 32;
const MOST: u64 = 4096;

/// The most runs of clusters that are kept to find those that nothing uses: 6 MiB of memory.
const RUNS_MAX: usize = 1 << 18;

/// A cluster that was allocated, the entry that is to point there, and what that says until then.
struct Allocation {
    entry_place: u64,
    place: u64,
    old: u64,
}

impl Grower {
    /// The next cluster of fresh room, which reads as zeroes.
    fn fresh(&mut self) -> io::Result<u64> {
        if self.reserve.is_empty() {
            self.reserve_more()?;
        }
        self.reserve.next().ok_or_else(|| io::ErrorKind::StorageFull.into())
    }

    /// Makes the file longer by room that is counted as used. It is all on the disk when this returns.
    fn reserve_more(&mut self) -> io::Result<()> {
        let cluster = self.cluster();
        let per_block = cluster / 2;
        let start = self.end;
        let wanted = (RESERVED / cluster).clamp(FEWEST, MOST);
        // The blocks that count the room are in it, and so is a longer table of them.
        let (mut meta, mut missing, mut table) = (0, Vec::new(), 0);
        loop {
            let blocks = start / per_block..(start + wanted + meta).div_ceil(per_block);
            if blocks.end > self.table_entries() {
                // Twice as long as it must be, but not longer than QEMU reads.
                let (least, most) = ((blocks.end * 8).div_ceil(cluster), COUNTS_MAX / cluster);
                if least > most {
                    let why = "the table of its reference counts is as long as it may be";
                    return Err(io::Error::new(io::ErrorKind::StorageFull, why));
                }
                table = (least * 2).min(most);
            }
            missing.clear();
            missing.extend(blocks.filter(|block| self.block(*block) == 0));
            let now = missing.len() as u64 + table;
            if now <= meta {
                break;
            }
            meta = now;
        }
        let end = start + wanted + meta;
        let len = end.checked_mul(cluster).ok_or(io::ErrorKind::FileTooLarge)?;
        self.file.set_len(len)?;
        let mut blocks = self.blocks.clone();
        let mut meta = start..end;
        blocks.extend(missing.iter().copied().zip(meta.by_ref().map(|place| place * cluster)));
        self.count(start..end, 1, &blocks)?;
        let new_table = meta.start..meta.start + table;
        meta.start += table;
        if table > 0 {
            let mut entries: Vec<u8> = Vec::new();
            for (index, place) in &blocks {
                entries.resize(small(index * 8), 0);
                entries.extend(place.to_be_bytes());
            }
            self.write(&entries, new_table.start * cluster)?;
        }
        self.sync()?;
        if table > 0 {
            // Both fields are in one sector, which a disk writes whole.
            let mut fields = (new_table.start * cluster).to_be_bytes().to_vec();
            fields.extend(u32::try_from(table).unwrap_or(u32::MAX).to_be_bytes());
            self.write(&fields, 48)?;
            self.freed.extend(std::mem::replace(&mut self.table, new_table));
        } else {
            for block in &missing {
                let entry = blocks.get(block).copied().unwrap_or(0);
                self.write(&entry.to_be_bytes(), self.table.start * cluster + block * 8)?;
            }
        }
        if !missing.is_empty() || table > 0 {
            self.sync()?;
        }
        self.blocks = blocks;
        self.end = end;
        self.reserve = meta;
        Ok(())
    }

    /// Where a block of reference counts is; 0 where there is none.
    fn block(&self, block: u64) -> u64 {
        self.blocks.get(&block).copied().unwrap_or(0)
    }

    /// How many blocks the table has room for.
    fn table_entries(&self) -> u64 {
        (self.table.end - self.table.start) * self.cluster() / 8
    }

    /// Where the entry of a cluster of the disk is; its table is made where there is none.
    fn entry_place(&mut self, unit: u64) -> io::Result<u64> {
        let per_table = self.cluster() / 8;
        let index = unit / per_table;
        if index >= self.header.l1_needed() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut table = self.l1.get(&index).copied().unwrap_or(0) & PLACE;
        if table == 0 {
            table = self.fresh()? * self.cluster();
            let entry = table | COPIED;
            self.write(&entry.to_be_bytes(), self.header.l1_offset + index * 8)?;
            self.l1.insert(index, entry);
        }
        Ok(table + unit % per_table * 8)
    }

    /// Copies what a cluster holds to a fresh one, where it holds anything; whether it does.
    fn copy(&self, unit: u64, place: u64) -> io::Result<bool> {
        let from = unit * self.cluster();
        let len = self.cluster().min(self.header.size.saturating_sub(from));
        let part = self.old.map().slice(from, len).map_err(|_| io::ErrorKind::InvalidInput)?;
        if part.extents().iter().all(|extent| extent.place == Place::Zero) {
            return Ok(false);
        }
        let mut bytes = vec![0; small(len)];
        self.old.read_at(&mut bytes, from)?;
        self.write(&bytes, place)?;
        Ok(true)
    }

    /// Finds or allocates a place for each unit. A new place holds the unit's bytes on the disk, and nothing
    /// points there.
    fn allocate(&mut self, units: &[Wanted], allocations: &mut Vec<Allocation>) -> io::Result<Vec<u64>> {
        let mut places: Vec<u64> = Vec::with_capacity(units.len());
        let mut copied = false;
        for (index, Wanted { unit, .. }) in units.iter().enumerate() {
            let mut same = units.iter().filter(|other| other.unit == *unit);
            if let Some(earlier) = units.iter().take(index).position(|other| other.unit == *unit) {
                places.extend(places.get(earlier).copied());
                continue;
            }
            let entry_place = self.entry_place(*unit)?;
            let mut entry = [0; 8];
            self.file.read_at(&mut entry, entry_place)?;
            let old = u64::from_be_bytes(entry);
            if is_own(old) {
                places.push(old & PLACE);
                continue;
            }
            let place = self.fresh()? * self.cluster();
            allocations.push(Allocation { entry_place, place, old });
            if !same.all(|one| one.zeroed) {
                copied |= self.copy(*unit, place)?;
            }
            places.push(place);
        }
        if copied {
            self.sync()?;
        }
        Ok(places)
    }

    /// Whether an entry says that a cluster reads as something else than what lies in its place.
    fn is_synthetic(&self, entry: u64) -> bool {
        entry & COMPRESSED != 0 || self.header.version >= 3 && entry & ZERO != 0
    }

    /// Notes that an entry's clusters lose a user.
    fn left(&mut self, entry: u64) {
        let cluster = self.cluster();
        if entry & COMPRESSED != 0 {
            let (place, stored) = compressed_place(entry, self.header.cluster_bits);
            self.freed.extend(place / cluster..(place + stored).div_ceil(cluster));
        } else if entry & PLACE != 0 {
            self.freed.push((entry & PLACE) / cluster);
        }
    }

    /// Counts so many users of each of these clusters.
    fn count(&self, clusters: Range<u64>, users: u16, blocks: &BTreeMap<u64, u64>) -> io::Result<()> {
        if clusters.is_empty() {
            return Ok(());
        }
        let per_block = self.cluster() / 2;
        for block in clusters.start / per_block..clusters.end.div_ceil(per_block) {
            let first = clusters.start.max(block * per_block);
            let last = clusters.end.min((block + 1) * per_block);
            let place = *blocks.get(&block).ok_or(io::ErrorKind::InvalidData)?;
            self.write(&users.to_be_bytes().repeat(small(last - first)), place + first % per_block * 2)?;
        }
        Ok(())
    }

    /// Counts one user of a cluster less.
    fn release(&self, cluster: u64) -> io::Result<()> {
        let per_block = self.cluster() / 2;
        let block = self.block(cluster / per_block);
        if block == 0 {
            return Ok(());
        }
        let place = block + cluster % per_block * 2;
        let mut count = [0; 2];
        self.file.read_at(&mut count, place)?;
        self.write(&u16::from_be_bytes(count).saturating_sub(1).to_be_bytes(), place)
    }
}

impl Grow for Grower {
    fn unit(&self) -> u64 {
        self.cluster()
    }

    fn is_untouched(&self) -> bool {
        !self.prepared
    }

    fn placed(&mut self, tell: &mut dyn FnMut(u64, u64)) -> io::Result<()> {
        let cluster = self.cluster();
        let per_table = cluster / 8;
        let units = self.header.size.div_ceil(cluster);
        let len = self.file.size()?;
        let mut uses = Uses::of(&self.header, RUNS_MAX);
        self.blocks.values().for_each(|block| uses.table(*block, Use::Block));
        let (mut bytes, mut plain) = (Vec::new(), 0);
        let shown = self.old.len().div_ceil(cluster);
        for (index, table) in
            self.l1.iter().map(|(index, entry)| (index, entry & PLACE)).filter(|(_, table)| *table != 0)
        {
            uses.table(table, Use::L2);
            let first = index * per_table;
            bytes.resize(small(cluster.min(len.saturating_sub(table))), 0);
            self.file.read_at(&mut bytes, table)?;
            for (unit, entry) in (first..).zip(numbers(&bytes)) {
                uses.entry(entry);
                plain += u64::from(unit < shown && entry & PLACE != 0 && !self.is_synthetic(entry));
                if self.prepared && unit < units && is_own(entry) {
                    tell(unit, entry & PLACE);
                }
            }
        }
        // An entry that the map does not know was written by a worker before this one.
        let data = self
            .old
            .map()
            .extents()
            .iter()
            .filter(|extent| matches!(extent.place, Place::Data { source: 0, .. }));
        self.wrote |= plain > data.map(|extent| extent.len.div_ceil(cluster)).sum();
        if self.uses.is_none() {
            self.uses = Some(uses);
        }
        Ok(())
    }

    fn place(&mut self, units: &[Wanted]) -> io::Result<Vec<u64>> {
        self.check()?;
        self.prepare()?;
        let mut allocations = Vec::with_capacity(units.len());
        let placed = self.allocate(units, &mut allocations);
        self.wrote = true;
        if placed.is_err() {
            // Nothing points to them.
            let cluster = self.cluster();
            self.freed.extend(allocations.iter().map(|one| one.place / cluster));
            return placed;
        }
        for Allocation { entry_place, place, old } in allocations {
            self.write(&(place | COPIED).to_be_bytes(), entry_place)?;
            self.left(old);
        }
        placed
    }

    fn has_lost(&self) -> bool {
        self.lost
    }

    fn close(&mut self) -> io::Result<()> {
        self.sync()?;
        for cluster in std::mem::take(&mut self.freed) {
            self.release(cluster)?;
        }
        self.release_leaks()?;
        let rest = std::mem::replace(&mut self.reserve, self.end..self.end);
        // None of these was ever allocated.
        self.count(rest.clone(), 0, &self.blocks)?;
        if rest.end == self.end && !rest.is_empty() {
            self.end = rest.start;
            self.reserve = rest.start..rest.start;
            self.file.set_len(rest.start * self.cluster())?;
        }
        self.sync()
    }
}

/// Whether a cluster is the image's own and may be written where it is.
fn is_own(entry: u64) -> bool {
    entry & (COPIED | COMPRESSED | ZERO) == COPIED && entry & PLACE != 0
}

fn numbers(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|number| be64_at(number, 0)).collect()
}
