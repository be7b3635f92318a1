//! Directories of XFS: in the inode, in one block, or in many with an index behind 32 GiB.
//! It never needs the index: the names are in the blocks before it.

use std::ops::ControlFlow;

use super::fork::lay_out;
use super::metadata::{Inode, Xfs, form};
use crate::Place;
use crate::bytes::{be16_at, be32_at, be64_at, part, u8_at};
use crate::layer::{Entry, LayerError, corrupt, directory_len};

/// Marks a part of a block that has no entry.
const FREE: u16 = 0xffff;
/// The shortest entry, and what all of them are aligned to.
const ALIGN: usize = 8;

/// Reports the entries of a directory.
pub(super) fn list(xfs: &Xfs, dir: &Inode, entry: &mut Entry<'_>) -> Result<(), LayerError> {
    if dir.data.form == form::LOCAL {
        return short(xfs, dir, entry);
    }
    let len = directory_len(dir.size)?;
    let layout = lay_out(xfs, &dir.data, dir.size)?;
    // A block without entries is given back, and is a hole.
    let holes: Vec<_> =
        layout.extents().iter().filter(|extent| extent.place == Place::Zero).copied().collect();
    let bytes = xfs.image.compose(layout)?;
    for start in (0..len).step_by(xfs.dir_block) {
        let at = start as u64;
        let next = holes.partition_point(|hole| hole.end() <= at);
        if holes.get(next).is_some_and(|hole| hole.start <= at) {
            continue;
        }
        let block = bytes.read_vec(at, xfs.dir_block.min(len - start))?;
        if names(xfs, dir, &block, entry)? == ControlFlow::Break(()) {
            return Ok(());
        }
    }
    Ok(())
}

/// The entries in one block.
fn names(xfs: &Xfs, dir: &Inode, block: &[u8], entry: &mut Entry<'_>) -> Result<ControlFlow<()>, LayerError> {
    let (head, single, one_of_many): (usize, &[u8], &[u8]) =
        if xfs.summed { (64, b"XDB3", b"XDD3") } else { (16, b"XD2B", b"XD2D") };
    let end = if block.starts_with(single) {
        // An index of the block is at its end.
        let count = usize::try_from(be32_at(block, block.len().saturating_sub(8))).unwrap_or(usize::MAX);
        block.len().checked_sub(8).and_then(|end| end.checked_sub(count.checked_mul(8)?))
    } else {
        block.starts_with(one_of_many).then_some(block.len())
    };
    let Some(end) = end.filter(|end| *end >= head) else {
        return corrupt("an impossible block of a directory");
    };
    xfs.check(block, 4, "a block of a directory")?;
    if xfs.summed && be64_at(block, 40) != dir.number {
        return corrupt("a block of a directory belongs to another one");
    }
    let mut at = head;
    while at + ALIGN <= end {
        if be16_at(block, at) == FREE {
            let len = usize::from(be16_at(block, at + 2));
            if len < ALIGN || !len.is_multiple_of(ALIGN) {
                return corrupt("an impossible gap in a directory");
            }
            at += len;
            continue;
        }
        let len = usize::from(u8_at(block, at + 8));
        // Number, length, name, type, and the place of the entry.
        let whole = (8 + 1 + len + usize::from(xfs.typed) + 2).next_multiple_of(ALIGN);
        if len == 0 || at + whole > end {
            return corrupt("an entry of a directory does not fit its block");
        }
        let name = part(block, at + 9, len);
        let listed = name != b"." && name != b"..";
        if listed && entry(name, be64_at(block, at)) == ControlFlow::Break(()) {
            return Ok(ControlFlow::Break(()));
        }
        at += whole;
    }
    Ok(ControlFlow::Continue(()))
}

/// The entries in an inode.
fn short(xfs: &Xfs, dir: &Inode, entry: &mut Entry<'_>) -> Result<(), LayerError> {
    let size = usize::try_from(dir.size).unwrap_or(usize::MAX);
    let Some(bytes) = dir.data.bytes.get(..size) else {
        return corrupt("a directory does not fit its inode");
    };
    let count = usize::from(u8_at(bytes, 0));
    // Numbers have eight bytes as soon as one of them needs that.
    let number = if u8_at(bytes, 1) > 0 { 8 } else { 4 };
    let mut at = 2 + number;
    for _ in 0..count {
        let len = usize::from(u8_at(bytes, at));
        let (name, inode) = (at + 3, at + 3 + len + usize::from(xfs.typed));
        if len == 0 || inode + number > bytes.len() {
            return corrupt("an entry of a directory does not fit its inode");
        }
        let node = if number == 8 { be64_at(bytes, inode) } else { be32_at(bytes, inode).into() };
        if entry(part(bytes, name, len), node) == ControlFlow::Break(()) {
            return Ok(());
        }
        at = inode + number;
    }
    Ok(())
}
