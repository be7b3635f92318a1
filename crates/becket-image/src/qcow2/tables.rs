//! The two levels of tables that say where each cluster lies.
//! It never reads a table twice nor more of them than the file can hold, whatever they say.

use std::collections::HashSet;

use super::entry::{COMPRESSED, COPIED, PLACE, ZERO, compressed_place, entries};
use super::header::Header;
use super::uses::{Use, Uses};
use crate::bytes::be64_at;
use crate::encoded::Block;
use crate::image::{Image, Layout};
use crate::layer::{LayerError, corrupt};

/// Where each byte of the disk is: file 0 is the qcow2, or the one that its data are in, of `data` bytes; and
/// file 1 its backing file, of `backing` bytes. What the tables use of the file is recorded in `uses`.
///
/// # Errors
/// A table lies where none can, the file is cut short, or the disk is in too many pieces.
pub(super) fn lay_out(
    image: &Image,
    header: &Header,
    (data, backing): (u64, u64),
    mut uses: Option<&mut Uses>,
) -> Result<Layout, LayerError> {
    let mut disk = Disk { layout: Layout::of(image)?, header, file: data, backing };
    let cluster = header.cluster();
    // What lies behind the disk's end is no part of it, but it is used.
    let count = if uses.is_some() { header.l1_entries.into() } else { header.l1_needed() };
    let mut tables = HashSet::new();
    entries(image, header.l1_offset, count, &mut |index, entry| {
        let table = entry & PLACE;
        if table == 0 {
            return Ok(());
        }
        let start = index.saturating_mul(header.span()).min(header.size);
        disk.absent(start - disk.layout.len())?;
        if !table.is_multiple_of(cluster) {
            return corrupt(format!("an L2 table at byte {table}, which begins no cluster"));
        }
        // No two parts of a disk share a table, so all of them are no longer than the file.
        if !tables.insert(table) {
            return corrupt(format!("two parts of the disk share the L2 table at byte {table}"));
        }
        let short = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let used = short(header.span().min(header.size - start).div_ceil(cluster) * header.l2_entry());
        let mut bytes = image.read_vec(table, used)?;
        for entry in bytes.chunks_exact(short(header.l2_entry())) {
            match header.has_parts() {
                true => disk.parts(be64_at(entry, 0), be64_at(entry, 8))?,
                false => disk.cluster(be64_at(entry, 0))?,
            }
        }
        if let Some(uses) = uses.as_deref_mut() {
            bytes.extend(image.read_some(table + used as u64, short(cluster) - used)?);
            uses.table(table, Use::L2);
            bytes.chunks_exact(8).for_each(|entry| uses.entry(be64_at(entry, 0)));
        }
        Ok(())
    })?;
    disk.absent(header.size - disk.layout.len())?;
    Ok(disk.layout)
}

/// Parts of a cluster, where clusters have some.
const PARTS: u64 = 32;

/// A disk whose clusters are added one after another.
struct Disk<'a> {
    layout: Layout,
    header: &'a Header,
    /// Lengths of the file that the clusters are in and of the backing file, in bytes.
    file: u64,
    backing: u64,
}

impl Disk<'_> {
    /// The next cluster is where an entry of an L2 table says.
    fn cluster(&mut self, entry: u64) -> Result<(), LayerError> {
        let len = self.header.cluster().min(self.header.size - self.layout.len());
        if entry & COMPRESSED != 0 {
            return self.compressed(entry, len);
        }
        let place = entry & PLACE;
        if self.header.version >= 3 && entry & ZERO != 0 {
            return self.layout.zero(len);
        }
        // In a file of their own the first cluster may be anywhere; a bit says that it is there.
        if place == 0 && (self.header.data.is_none() || entry & COPIED == 0) {
            return self.absent(len);
        }
        self.stored(place, 0, len)
    }

    /// The next cluster is in parts, each of which is stored, zero, or absent.
    fn parts(&mut self, entry: u64, parts: u64) -> Result<(), LayerError> {
        let len = self.header.cluster().min(self.header.size - self.layout.len());
        if entry & COMPRESSED != 0 {
            return self.compressed(entry, len);
        }
        let part = self.header.cluster() / PARTS;
        let state = |number: u64| (parts >> number & 1 != 0, parts >> (PARTS + number) & 1 != 0);
        let mut first = 0;
        while first * part < len {
            let as_first = |number: &u64| state(*number) == state(first);
            let end = (first..PARTS).take_while(as_first).last().unwrap_or(first) + 1;
            let (from, to) = (first * part, (end * part).min(len));
            match state(first) {
                (true, true) => return corrupt("a part of a cluster that is stored and zero"),
                (true, false) if entry & PLACE == 0 && self.header.data.is_none() => {
                    return corrupt("a part of a cluster that is stored nowhere");
                }
                (true, false) => self.stored(entry & PLACE, from, to - from)?,
                (false, true) => self.layout.zero(to - from)?,
                (false, false) => self.absent(to - from)?,
            }
            first = end;
        }
        Ok(())
    }

    /// The next bytes are in a cluster at that place, `from` bytes behind its beginning.
    fn stored(&mut self, place: u64, from: u64, len: u64) -> Result<(), LayerError> {
        if !place.is_multiple_of(self.header.cluster()) {
            return corrupt(format!("data at byte {place}, which begins no cluster"));
        }
        let place = place + from;
        let there = self.file.saturating_sub(place).min(len);
        if there == 0 {
            return corrupt(format!(
                "data at byte {place}, beyond the file's end at byte {} (is the image cut short?)",
                self.file
            ));
        }
        self.layout.data(place, there)?;
        // The last cluster of a file may be cut where its bytes end.
        self.layout.zero(len - there)
    }

    /// The next cluster is what a compressed one yields.
    fn compressed(&mut self, entry: u64, len: u64) -> Result<(), LayerError> {
        if self.header.data.is_some() {
            return corrupt("a compressed cluster of a qcow2 whose data are in another file");
        }
        let cluster = self.header.cluster();
        let (place, stored) = compressed_place(entry, self.header.cluster_bits);
        // What is compressed is shorter than the cluster; the last sector of a file may be cut.
        let stored = stored.min(cluster).min(self.file.saturating_sub(place));
        if stored == 0 {
            return corrupt(format!(
                "compressed data at byte {place}, beyond the file's end at byte {}",
                self.file
            ));
        }
        let short = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
        let block = Block {
            start: 0,
            len: short(len),
            input: place,
            input_len: short(stored),
            skip: 0,
            yields: short(cluster),
        };
        self.layout.encoded(self.header.compression, block)
    }

    /// The next bytes are not in this file: they are the backing file's, as far as that goes.
    fn absent(&mut self, len: u64) -> Result<(), LayerError> {
        let from = self.layout.len();
        let backed = self.backing.saturating_sub(from).min(len);
        self.layout.backing(from, backed)?;
        self.layout.zero(len - backed)
    }
}
