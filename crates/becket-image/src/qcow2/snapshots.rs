//! The internal snapshots of a qcow2: their names, and the disk as it was when one was made.
//! It reads a bounded table, keeps one entry of it at a time, and believes no length in it.

use std::ops::ControlFlow;

use super::header::Header;
use crate::bytes::{be16_at, be32_at, be64_at, part};
use crate::image::Image;
use crate::layer::{LayerError, corrupt};
use crate::text::shown;

/// What QEMU takes at most: snapshots, bytes of their table, and of what an entry may have beside its names.
const MOST: u32 = 65_536;
const TABLE_MAX: u64 = 16 << 20;
const EXTRA_MAX: usize = 1024;
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

/// Calls `each` for those of an image, in the order of its table, until that has enough.
fn read(
    image: &Image,
    header: &Header,
    each: &mut dyn FnMut(Snapshot) -> ControlFlow<()>,
) -> Result<(), LayerError> {
    if header.snapshots > MOST {
        return corrupt(format!("{} snapshots", header.snapshots));
    }
    let mut at = header.snapshots_offset;
    let end = at.saturating_add(TABLE_MAX);
    for number in 1..=header.snapshots {
        if !at.is_multiple_of(8) || at >= end {
            return corrupt(format!("no place for snapshot {number} in its table"));
        }
        let fixed = image.read_vec(at, FIXED)?;
        let [id, name] = [12, 14].map(|place| usize::from(be16_at(&fixed, place)));
        let extra = be32_at(&fixed, 36) as usize;
        if extra > EXTRA_MAX {
            return corrupt(format!("{extra} more bytes for snapshot {number}"));
        }
        let rest = image.read_vec(at + FIXED as u64, extra + id + name)?;
        let snapshot = Snapshot {
            id: part(&rest, extra, id).to_vec(),
            name: part(&rest, extra + id, name).to_vec(),
            l1_offset: be64_at(&fixed, 0),
            l1_entries: be32_at(&fixed, 8),
            size: (extra >= 16).then(|| be64_at(&rest, 8)),
        };
        if each(snapshot).is_break() {
            return Ok(());
        }
        at += ((FIXED + rest.len()) as u64).next_multiple_of(8);
    }
    Ok(())
}

/// Their names, for people: the first of them, and how many more there are. One with a slash in its name
/// cannot be named by that, but by its number.
///
/// # Errors
/// Their table is damaged.
pub(super) fn names(image: &Image, header: &Header) -> Result<String, LayerError> {
    let mut first = Vec::new();
    read(image, header, &mut |one| {
        let name = shown(&one.name);
        let by_number = one.name.contains(&b'/').then(|| format!("{name} (named @{})", shown(&one.id)));
        first.push(by_number.unwrap_or(name));
        if first.len() == SHOWN { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    let more = (header.snapshots as usize).saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Ok(first.join(", ") + &more)
}

impl Header {
    /// What the header would be if the snapshot of this name were the disk; of several of one name the first.
    /// A number as QEMU gives it is a name, too, where none has it. `None`: there is no such snapshot.
    ///
    /// # Errors
    /// Its entry says what cannot be.
    pub(super) fn of_snapshot(&self, image: &Image, name: &[u8]) -> Result<Option<Header>, LayerError> {
        let (mut named, mut numbered) = (None, None);
        read(image, self, &mut |one| {
            if one.name == name {
                named = Some(one);
                return ControlFlow::Break(());
            }
            if one.id == name && numbered.is_none() {
                numbered = Some(one);
            }
            ControlFlow::Continue(())
        })?;
        let Some(Snapshot { l1_offset, l1_entries, size, .. }) = named.or(numbered) else { return Ok(None) };
        let size = size.unwrap_or(self.size);
        let mut header = self.clone();
        (header.l1_offset, header.l1_entries, header.size) = (l1_offset, l1_entries, size);
        header.check_tables(image.len())?;
        Ok(Some(header))
    }
}
