//! Where the blocks of a fork are: a list of extents in the inode, or a B+tree whose root is there.
//! It never goes deeper than a node's level says; how many nodes it reads is for the image's budget to bound.

use super::metadata::{Fork, Xfs, form};
use crate::bytes::{be16_at, be64_at, part};
use crate::image::Layout;
use crate::layer::{LayerError, corrupt};

/// Bytes of an extent.
const RECORD: usize = 16;
/// The deepest tree of a fork.
const LEVELS_MAX: u16 = 12;

/// A run of blocks of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    /// First block in the file, and on the disk (as [`Xfs::byte_of`] takes it).
    pub(super) logical: u64,
    pub(super) start: u64,
    /// Blocks.
    pub(super) count: u64,
    /// Whether the blocks were only reserved: they read as zeroes.
    pub(super) unwritten: bool,
}

impl Extent {
    fn parse(record: &[u8; RECORD]) -> Extent {
        let (high, low) = (be64_at(record, 0), be64_at(record, 8));
        Extent {
            logical: (high & (u64::MAX >> 1)) >> 9,
            start: (high & 0x1ff) << 43 | low >> 21,
            count: low & 0x1f_ffff,
            unwritten: high >> 63 != 0,
        }
    }
}

/// What [`walk`] calls for each extent.
type Each<'a> = dyn FnMut(Extent) -> Result<(), LayerError> + 'a;

/// Calls `each` for the extents of a fork, in order.
pub(super) fn walk(xfs: &Xfs, fork: &Fork, each: &mut Each<'_>) -> Result<(), LayerError> {
    match fork.form {
        form::EXTENTS => {
            let count = usize::try_from(fork.extents).unwrap_or(usize::MAX);
            let records = part(&fork.bytes, 0, count.saturating_mul(RECORD)).as_chunks::<RECORD>().0;
            if records.len() < count {
                return corrupt(format!("{count} extents do not fit an inode"));
            }
            records.iter().try_for_each(|record| each(Extent::parse(record)))
        }
        form::BTREE => {
            let (level, count) = (be16_at(&fork.bytes, 0), usize::from(be16_at(&fork.bytes, 2)));
            if level == 0 || level > LEVELS_MAX {
                return corrupt(format!("a tree of extents of {level} levels"));
            }
            pointers(&fork.bytes, 4, count)?.try_for_each(|child| node(xfs, child, level - 1, each))
        }
        other => corrupt(format!("a fork of an inode of form {other} has no extents")),
    }
}

/// The children of a node whose head has `head` bytes: they follow as many keys as there is room for.
fn pointers(node: &[u8], head: usize, count: usize) -> Result<impl Iterator<Item = u64>, LayerError> {
    let room = node.len().saturating_sub(head) / 16;
    if count > room {
        return corrupt(format!("{count} children do not fit a node of a tree of extents"));
    }
    Ok(part(node, head + room * 8, count * 8).as_chunks::<8>().0.iter().copied().map(u64::from_be_bytes))
}

/// The extents below a block, which must be of this level.
fn node(xfs: &Xfs, number: u64, level: u16, each: &mut Each<'_>) -> Result<(), LayerError> {
    let block = xfs.block(number)?;
    let (magic, head): (&[u8], usize) = if xfs.summed { (b"BMA3", 72) } else { (b"BMAP", 24) };
    let count = usize::from(be16_at(&block, 6));
    // Without an entry a node would cost a read and lead nowhere, as often as it is named.
    if !block.starts_with(magic) || be16_at(&block, 4) != level || count == 0 {
        return corrupt("an impossible node in the tree of a file's extents");
    }
    xfs.check(&block, 64, "a node of a tree of extents")?;
    if level > 0 {
        return pointers(&block, head, count)?.try_for_each(|child| node(xfs, child, level - 1, each));
    }
    let records = part(&block, head, count * RECORD).as_chunks::<RECORD>().0;
    if records.len() < count {
        return corrupt(format!("{count} extents do not fit a node"));
    }
    records.iter().try_for_each(|record| each(Extent::parse(record)))
}

/// Where the first `size` bytes of a fork are. What has no blocks, or blocks that were only reserved, is
/// zeroes.
pub(super) fn lay_out(xfs: &Xfs, fork: &Fork, size: u64) -> Result<Layout, LayerError> {
    let mut layout = Layout::of(&xfs.image)?;
    walk(xfs, fork, &mut |extent| {
        let Extent { logical, start, count, unwritten } = extent;
        if count == 0 {
            return corrupt("an extent of a file is empty");
        }
        let from = logical.saturating_mul(xfs.block_size);
        // What is reserved behind the end is no part of the file.
        if from >= size {
            return Ok(());
        }
        if from < layout.len() {
            return corrupt("a file's extents overlap");
        }
        layout.zero(from - layout.len())?;
        let at = xfs.byte_of(start, count)?;
        let len = (count * xfs.block_size).min(size - from);
        if unwritten { layout.zero(len) } else { layout.data(at, len) }
    })?;
    layout.zero(size.saturating_sub(layout.len()))?;
    Ok(layout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_is_cut_out_of_two_numbers() {
        let high = 1 << 63 | 0x1234_u64 << 9 | 0x3;
        let low = 0x55_u64 << 21 | 77;
        let record = u128::from(high) << 64 | u128::from(low);
        let extent = Extent::parse(&record.to_be_bytes());
        assert_eq!(extent, Extent { logical: 0x1234, start: 3 << 43 | 0x55, count: 77, unwritten: true });
    }
}
