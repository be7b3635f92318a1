//! The internal snapshots of a qcow2: their names, and the disk as it was when one was made.
//! It reads a bounded table, and believes no length in it.

use super::header::Header;
use crate::bytes::{be16_at, be32_at, be64_at, part};
use crate::image::Image;
use crate::layer::{LayerError, corrupt};
use crate::text::shown;

/// What QEMU takes at most: snapshots, and bytes of their table.
const MOST: u32 = 65_536;
const TABLE_MAX: usize = 16 << 20;
/// Names in a message.
const SHOWN: usize = 8;
/// The part of an entry that each has.
const FIXED: usize = 40;

/// One of them.
#[derive(Debug)]
struct Snapshot {
    /// What QEMU numbers it.
    id: Vec<u8>,
    name: Vec<u8>,
    l1_offset: u64,
    l1_entries: u32,
    /// Length of the disk in bytes, where the entry says so.
    size: Option<u64>,
}

/// Those of an image, in the order of its table.
fn read(image: &Image, header: &Header) -> Result<Vec<Snapshot>, LayerError> {
    if header.snapshots > MOST {
        return corrupt(format!("{} snapshots", header.snapshots));
    }
    let mut found = Vec::new();
    let mut at = header.snapshots_offset;
    let end = at.saturating_add(TABLE_MAX as u64);
    for number in 1..=header.snapshots {
        if !at.is_multiple_of(8) || at >= end {
            return corrupt(format!("no place for snapshot {number} in its table"));
        }
        let fixed = image.read_vec(at, FIXED)?;
        let [id, name] = [12, 14].map(|place| usize::from(be16_at(&fixed, place)));
        let extra = be32_at(&fixed, 36) as usize;
        let len = FIXED + extra + id + name;
        if extra > TABLE_MAX || len > TABLE_MAX {
            return corrupt(format!("an entry of {len} bytes for snapshot {number}"));
        }
        let bytes = image.read_vec(at, len)?;
        let text = |from: usize, len| part(&bytes, from, len).to_vec();
        found.push(Snapshot {
            id: text(FIXED + extra, id),
            name: text(FIXED + extra + id, name),
            l1_offset: be64_at(&bytes, 0),
            l1_entries: be32_at(&bytes, 8),
            size: (extra >= 16).then(|| be64_at(&bytes, FIXED + 8)),
        });
        at += (len as u64).next_multiple_of(8);
    }
    Ok(found)
}

/// Their names, for people: the first of them, and how many more there are.
///
/// # Errors
/// Their table is damaged.
pub(super) fn names(image: &Image, header: &Header) -> Result<String, LayerError> {
    let all = read(image, header)?;
    let first: Vec<String> = all.iter().take(SHOWN).map(|one| shown(&one.name)).collect();
    let more = all.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Ok(first.join(", ") + &more)
}

impl Header {
    /// What the header would be if the snapshot of this name were the disk; of several of one name the first.
    /// A number as QEMU gives it is a name, too, where none has it. `None`: there is no such snapshot.
    ///
    /// # Errors
    /// Its entry says what cannot be.
    pub(super) fn of_snapshot(mut self, image: &Image, name: &[u8]) -> Result<Option<Header>, LayerError> {
        let all = read(image, &self)?;
        let named = all.iter().find(|one| one.name == name);
        let Some(found) = named.or_else(|| all.iter().find(|one| one.id == name)) else { return Ok(None) };
        let size = found.size.unwrap_or(self.size);
        (self.l1_offset, self.l1_entries, self.size) = (found.l1_offset, found.l1_entries, size);
        self.check_tables(image.len())?;
        Ok(Some(self))
    }
}
