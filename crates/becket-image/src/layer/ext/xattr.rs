//! Attributes of ext's files, and the extended ones: behind the inode, in a block, or in an inode of their
//! own.
//! It never follows an entry out of the inode or block that holds it.

use super::metadata::{Ext, INODE_LEN, Inode};
use crate::bytes::{part, u8_at, u16_at, u32_at};
use crate::layer::attributes::{self, FoundXattrs, VALUE_MAX, acl_of_ext};
use crate::layer::{Attributes, LayerError, NodeKind, Time, Xattrs, corrupt};

const MAGIC: u32 = 0xea02_0000;
/// Length of an entry without its name, and of the head of a block.
const ENTRY: usize = 16;
const BLOCK_HEAD: usize = 32;

/// What an inode says.
pub(super) fn attributes_of(inode: &Inode, number: u64) -> Attributes {
    let raw = &inode.raw;
    let wide = |low: usize, high: usize| u32::from(u16_at(raw, high)) << 16 | u32::from(u16_at(raw, low));
    let links = u32::from(u16_at(raw, 26));
    let kind = NodeKind::of_mode(inode.mode);
    let is_device = matches!(inode.mode & 0xf000, 0x2000 | 0x6000);
    let (old, new) = (u32_at(raw, 40), u32_at(raw, 44));
    let device = if old == 0 { attributes::device(new) } else { ((old >> 8) & 0xff, old & 0xff) };
    Attributes {
        mode: Some(inode.mode),
        owner: Some((wide(2, 120), wide(24, 122))),
        links: Some(links),
        identity: (links > 1 && kind != NodeKind::Directory).then_some(number),
        modified: Some(time(raw, 16, 136)),
        device: is_device.then_some(device),
        ..Attributes::of(kind, inode.size)
    }
}

/// The seconds at one place of an inode, and what extends them at another, if the inode goes on so far.
fn time(raw: &[u8], at: usize, extra: usize) -> Time {
    let seconds = i64::from(u32_at(raw, at).cast_signed());
    let end = if raw.len() > INODE_LEN { INODE_LEN + usize::from(u16_at(raw, INODE_LEN)) } else { 0 };
    let extra = if extra + 4 <= end { u32_at(raw, extra) } else { 0 };
    Time { seconds: seconds + (i64::from(extra & 3) << 32), nanoseconds: (extra >> 2).min(999_999_999) }
}

/// The extended attributes of a file.
pub(super) fn read(ext: &Ext, inode: &Inode) -> Result<Xattrs, LayerError> {
    let mut found = FoundXattrs::default();
    let raw = &inode.raw;
    if raw.len() > INODE_LEN {
        let behind = INODE_LEN + usize::from(u16_at(raw, INODE_LEN));
        if u32_at(raw, behind) == MAGIC {
            let entries = raw.get(behind + 4..).unwrap_or_default();
            list(ext, entries, 0, &mut found)?;
        }
    }
    let block = u64::from(u16_at(raw, 118)) << 32 | u64::from(u32_at(raw, 104));
    if block != 0 {
        let block = ext.block(block)?;
        if u32_at(&block, 0) != MAGIC {
            return corrupt("a block of extended attributes has no magic number");
        }
        list(ext, &block, BLOCK_HEAD, &mut found)?;
    }
    Ok(found.all())
}

/// The entries from byte `at` of `area` on; places of values count from the area's start.
fn list(ext: &Ext, area: &[u8], mut at: usize, found: &mut FoundXattrs) -> Result<(), LayerError> {
    while u32_at(area, at) != 0 {
        let name_len = usize::from(u8_at(area, at));
        let name = part(area, at + ENTRY, name_len);
        if name.len() < name_len {
            return corrupt("an extended attribute does not fit its place");
        }
        let number = u8_at(area, at + 1);
        let here = at;
        at += (ENTRY + name_len).next_multiple_of(4);
        // Others are what encryption and fs-verity need: the kernel shows them to nobody.
        let Some(prefix) = attributes::prefix(number) else { continue };
        let len = usize::try_from(u32_at(area, here + 8)).unwrap_or(usize::MAX);
        let value = match u32_at(area, here + 4) {
            _ if len > VALUE_MAX => return corrupt(format!("an extended attribute of {len} bytes")),
            0 => part(area, u16_at(area, here + 2).into(), len).to_vec(),
            inode => {
                let inode = ext.inode(inode.into())?;
                ext.image.compose(ext.blocks_of(&inode)?)?.read_some(0, len)?
            }
        };
        if value.len() < len {
            return corrupt("the value of an extended attribute does not fit its place");
        }
        let value = if matches!(number, 2 | 3) { acl_of_ext(&value)? } else { value };
        // What inline data keeps behind the inode is part of the file.
        if (number, name) != (7, b"data") {
            found.push(prefix, name, value)?;
        }
    }
    Ok(())
}
