//! Where the blocks of a file are: extent trees, and ext2's lists of blocks.
//! It never goes deeper than a sound file does; how many nodes it reads is for the image's budget to bound.

use super::metadata::{Ext, Inode, crc32c, flag};
use crate::bytes::{part, u16_at, u32_at};
use crate::image::Layout;
use crate::layer::{LayerError, corrupt};

const EXTENT_MAGIC: u16 = 0xf30a;
/// Bytes of a node's head, and of each entry.
const ENTRY: usize = 12;
/// The deepest tree that ext4 makes.
const DEPTH_MAX: u16 = 5;
/// Longer extents are of blocks that were reserved and never written.
const WRITTEN_MAX: u16 = 0x8000;

/// The layout of a file's bytes.
pub(super) fn lay_out(ext: &Ext, inode: &Inode) -> Result<Layout, LayerError> {
    let mut file = File { ext, size: inode.size, layout: Layout::of(&ext.image)? };
    if inode.flags & flag::EXTENTS != 0 {
        let root = &inode.block;
        file.extents(root, u16_at(root, 6), inode.seed)?;
    } else {
        file.lists(&inode.block)?;
    }
    file.zero_until(inode.size)?;
    Ok(file.layout)
}

/// A file whose layout grows.
struct File<'a> {
    ext: &'a Ext,
    size: u64,
    layout: Layout,
}

impl File<'_> {
    /// Fills what has no blocks with zeroes.
    fn zero_until(&mut self, end: u64) -> Result<(), LayerError> {
        self.layout.zero(end.min(self.size).saturating_sub(self.layout.len()))
    }

    /// Adds `count` blocks from block `first` on, which hold the file's blocks from `logical` on. Blocks
    /// behind the end of the file are cut.
    fn add(&mut self, logical: u64, first: u64, count: u64, written: bool) -> Result<(), LayerError> {
        let start = logical.saturating_mul(self.ext.block_size);
        if start < self.layout.len() && start < self.size {
            return corrupt("a file's extents overlap");
        }
        self.zero_until(start)?;
        let len = count.saturating_mul(self.ext.block_size).min(self.size.saturating_sub(start));
        let last = first.saturating_add(count.saturating_sub(1));
        let (at, _) = (self.ext.byte_of(first)?, self.ext.byte_of(last)?);
        if written { self.layout.data(at, len) } else { self.layout.zero(len) }
    }

    /// A node of an extent tree, which must be of this depth.
    fn extents(&mut self, node: &[u8], depth: u16, seed: Option<u32>) -> Result<(), LayerError> {
        let (count, room) = (usize::from(u16_at(node, 2)), usize::from(u16_at(node, 4)));
        let sound = u16_at(node, 0) == EXTENT_MAGIC && depth <= DEPTH_MAX && u16_at(node, 6) == depth;
        if !sound || count > room || ENTRY * (room + 1) > node.len() {
            return corrupt("an impossible node in the extent tree of a file");
        }
        let entries = part(node, ENTRY, count * ENTRY);
        for entry in entries.chunks_exact(ENTRY) {
            let (logical, low) = (u64::from(u32_at(entry, 0)), u64::from(u32_at(entry, 8)));
            // What was reserved behind the end is no part of the file.
            if logical.saturating_mul(self.ext.block_size) >= self.size {
                continue;
            }
            if depth == 0 {
                let len = u16_at(entry, 4);
                let (count, written) =
                    if len <= WRITTEN_MAX { (len, true) } else { (len - WRITTEN_MAX, false) };
                if count == 0 {
                    return corrupt("an extent of a file is empty");
                }
                self.add(logical, u64::from(u16_at(entry, 6)) << 32 | low, count.into(), written)?;
                continue;
            }
            if logical.saturating_mul(self.ext.block_size) < self.layout.len() && !self.layout.is_empty() {
                return corrupt("a file's extent tree is out of order");
            }
            let child = u64::from(u16_at(entry, 8)) << 32 | u64::from(u32_at(entry, 4));
            let block = self.ext.block(child)?;
            // Without an entry a node would cost a read and lead nowhere, as often as it is named.
            if u16_at(&block, 2) == 0 {
                return corrupt("a node of a file's extent tree is empty");
            }
            check_node(&block, seed)?;
            self.extents(&block, depth - 1, seed)?;
        }
        Ok(())
    }

    /// The lists of blocks of ext2: twelve blocks, then lists of one, two and three levels.
    fn lists(&mut self, root: &[u8]) -> Result<(), LayerError> {
        let mut logical = 0;
        for (index, number) in root.chunks_exact(4).enumerate() {
            let level = u32::try_from(index.saturating_sub(11)).unwrap_or(0);
            self.list(u32_at(number, 0), level, &mut logical)?;
        }
        Ok(())
    }

    /// What block `number` stands for: itself, or a list of the level below. 0 is a hole.
    fn list(&mut self, number: u32, level: u32, logical: &mut u64) -> Result<(), LayerError> {
        let per_list = self.ext.block_size / 4;
        if logical.saturating_mul(self.ext.block_size) >= self.size {
            return Ok(());
        }
        if number == 0 {
            *logical = logical.saturating_add(per_list.saturating_pow(level));
            return Ok(());
        }
        if level == 0 {
            self.add(*logical, number.into(), 1, true)?;
            *logical += 1;
            return Ok(());
        }
        let block = self.ext.block(number.into())?;
        block.chunks_exact(4).try_for_each(|number| self.list(u32_at(number, 0), level - 1, logical))
    }
}

/// Compares a node of an extent tree with the checksum behind its entries.
fn check_node(node: &[u8], seed: Option<u32>) -> Result<(), LayerError> {
    let Some(seed) = seed else { return Ok(()) };
    let end = ENTRY * (usize::from(u16_at(node, 4)) + 1);
    if end + 4 <= node.len() && crc32c(seed, part(node, 0, end)) == u32_at(node, end) {
        return Ok(());
    }
    corrupt("the checksum of a node of a file's extent tree is wrong")
}
