//! Attributes of SquashFS's files: modes, owners by the table of numbers, extended attributes.
//! It never reads either table as a whole.

use super::metadata::{Cursor, Metadata};
use crate::bytes::{u16_at, u32_at, u64_at};
use crate::image::Image;
use crate::layer::attributes::{self, FoundXattrs, VALUE_MAX};
use crate::layer::{Attributes, LayerError, NodeKind, Stat, Time, Xattrs, corrupt, unsupported};

/// An inode without extended attributes, and an image without their table.
const NONE: u32 = !0;
const NO_TABLE: u64 = !0;
/// Length of a metadata block's contents, and of entries of both tables.
const BLOCK: u64 = 8192;
const NUMBER: u64 = 4;
const ENTRY: u64 = 16;
/// The bit of an attribute's type that says that its value is elsewhere.
const ELSEWHERE: u16 = 0x100;

/// What every inode says, whatever its type.
#[derive(Debug)]
pub(super) struct Head {
    /// Type, mode, owner, time and number.
    pub(super) raw: Vec<u8>,
    pub(super) links: u32,
    pub(super) device: Option<u32>,
    /// Which extended attributes it has.
    pub(super) xattrs: Option<u32>,
}

/// Where the tables are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tables {
    /// How many numbers of owners there are.
    pub(super) ids: u16,
    pub(super) id_table: u64,
    pub(super) xattr_table: u64,
}

/// The tables, and what they are read by.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a> {
    pub(super) image: &'a Image,
    pub(super) metadata: &'a Metadata,
    pub(super) tables: Tables,
}

/// What the head of an inode and its type's fields say.
pub(super) fn of_inode(squash: Reader<'_>, head: &Head, stat: Stat) -> Result<Attributes, LayerError> {
    let Head { raw, links, device, .. } = head;
    let kind = match u16_at(raw, 0) {
        1 | 8 => 0x4000,
        2 | 9 => 0x8000,
        3 | 10 => 0xa000,
        4 | 11 => 0x6000,
        5 | 12 => 0x2000,
        6 | 13 => 0x1000,
        _ => 0xc000,
    };
    let owner = (number(squash, u16_at(raw, 4))?, number(squash, u16_at(raw, 6))?);
    let identity = (*links > 1 && stat.kind != NodeKind::Directory).then_some(u32_at(raw, 12).into());
    Ok(Attributes {
        mode: Some(kind | u16_at(raw, 2) & 0xfff),
        owner: Some(owner),
        links: Some(*links),
        identity,
        modified: Some(Time::at(u32_at(raw, 8).into())),
        device: device.map(attributes::device),
        ..Attributes::of(stat.kind, stat.size)
    })
}

/// A user's or group's number, of which inodes have the index.
fn number(squash: Reader<'_>, index: u16) -> Result<u32, LayerError> {
    if index >= squash.tables.ids {
        return corrupt(format!("owner {index} of {}", squash.tables.ids));
    }
    let mut cursor = entry(squash, squash.tables.id_table, index.into(), NUMBER)?;
    Ok(u32_at(&squash.metadata.read(&mut cursor, 4)?, 0))
}

/// The place of an entry of a table that is found by a list of its metadata blocks.
fn entry(squash: Reader<'_>, list: u64, index: u64, len: u64) -> Result<Cursor, LayerError> {
    let pointer = list.checked_add(index / (BLOCK / len) * 8);
    let pointer = pointer.ok_or_else(|| LayerError::Corrupt("a table beyond 2^64 bytes".to_owned()))?;
    let block = u64_at(&squash.image.read_vec(pointer, 8)?, 0);
    Ok(Cursor { block, offset: index % (BLOCK / len) * len })
}

/// The extended attributes of an inode.
pub(super) fn xattrs(squash: Reader<'_>, head: &Head) -> Result<Xattrs, LayerError> {
    let mut found = FoundXattrs::default();
    let Some(index) = head.xattrs.filter(|index| *index != NONE && squash.tables.xattr_table != NO_TABLE)
    else {
        return Ok(found.all());
    };
    let table = squash.image.read_vec(squash.tables.xattr_table, 16)?;
    let (start, count) = (u64_at(&table, 0), u32_at(&table, 8));
    if index >= count {
        return corrupt(format!("extended attributes {index} of {count}"));
    }
    let mut cursor = entry(squash, squash.tables.xattr_table.saturating_add(16), index.into(), ENTRY)?;
    let list = squash.metadata.read(&mut cursor, 16)?;
    let at = |reference: u64| Cursor::new(start, reference >> 16, reference & 0xffff);
    let mut cursor = at(u64_at(&list, 0))?;
    let take = |cursor: &mut Cursor, len: usize| squash.metadata.read(cursor, len);
    for _ in 0..u32_at(&list, 8) {
        squash.image.budget().steps(1, "extended attributes")?;
        let fixed = take(&mut cursor, 4)?;
        let (kind, len) = (u16_at(&fixed, 0), u16_at(&fixed, 2));
        let name = take(&mut cursor, len.into())?;
        let prefix: &[u8] = match kind & !ELSEWHERE {
            0 => b"user.",
            1 => b"trusted.",
            2 => b"security.",
            other => return unsupported(format!("extended attributes of kind {other}")),
        };
        let value = |cursor: &mut Cursor| {
            let len = usize::try_from(u32_at(&take(cursor, 4)?, 0)).unwrap_or(usize::MAX);
            if len > VALUE_MAX {
                return corrupt(format!("an extended attribute of {len} bytes"));
            }
            take(cursor, len)
        };
        let mut bytes = value(&mut cursor)?;
        if kind & ELSEWHERE != 0 {
            bytes = value(&mut at(u64_at(&bytes, 0))?)?;
        }
        found.push(prefix, &name, bytes)?;
    }
    Ok(found.all())
}
