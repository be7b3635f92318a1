//! The trees of btrfs: nodes, items, and where a logical address is on the device.
//! It never follows a pointer whose node does not say what the pointer says of it, so a tree has no circles.
//!
//! Followed: the "On-disk Format" of btrfs.readthedocs.io, and include/uapi/linux/btrfs_tree.h of Linux.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

use crc::{CRC_32_ISCSI, Crc, Table};

use crate::bytes::{part, u8_at, u16_at, u32_at, u64_at};
use crate::codec::sha256;
use crate::image::Image;
use crate::layer::{LayerError, corrupt, unsupported};

/// Length of a node's head, of an item's head, and of a pointer to a child, in bytes.
const HEAD: usize = 101;
const ITEM: usize = 25;
const POINTER: usize = 33;
/// The deepest tree.
const LEVELS_MAX: u8 = 8;
/// Nodes that are kept; the tree's upper levels are asked for with each question.
const NODES_KEPT: usize = 128;
const NODES: &str = "nodes of btrfs";

/// What an item is known by. Trees are sorted by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) object: u64,
    pub(super) kind: u8,
    pub(super) offset: u64,
}

impl Key {
    /// Length in bytes.
    pub(super) const LEN: usize = 17;

    pub(super) fn new(object: u64, kind: u8, offset: u64) -> Key {
        Key { object, kind, offset }
    }

    pub(super) fn at(bytes: &[u8], at: usize) -> Key {
        Key { object: u64_at(bytes, at), kind: u8_at(bytes, at + 8), offset: u64_at(bytes, at + 9) }
    }
}

/// The kinds of items that are read.
pub(super) mod kind {
    pub(in super::super) const INODE: u8 = 1;
    pub(in super::super) const XATTR: u8 = 24;
    pub(in super::super) const DIR_ITEM: u8 = 84;
    pub(in super::super) const DIR_INDEX: u8 = 96;
    pub(in super::super) const EXTENT: u8 = 108;
    pub(in super::super) const ROOT: u8 = 132;
    pub(in super::super) const ROOT_REF: u8 = 156;
    pub(in super::super) const CHUNK: u8 = 228;
}

/// Where a tree begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Root {
    /// Logical address of its upper node, in bytes.
    pub(super) address: u64,
    pub(super) level: u8,
}

/// An item of a tree: its key, its bytes, and where those are in the image.
pub(super) struct Item<'a> {
    pub(super) key: Key,
    pub(super) bytes: &'a [u8],
    pub(super) at: u64,
}

/// A range of logical addresses, and where it is on this device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chunk {
    logical: u64,
    len: u64,
    /// `None` if it is on other devices, or on several.
    physical: Option<u64>,
}

/// How metadata are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sum {
    Crc32c,
    Sha256,
    /// By one that becket does not compute.
    Other(&'static str),
}

impl Sum {
    /// Refuses bytes whose checksum, at their start, is not that of what follows it.
    pub(super) fn check(self, bytes: &[u8], what: &str) -> Result<(), LayerError> {
        static CRC: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_ISCSI);
        let body = bytes.get(32..).unwrap_or_default();
        let right = match self {
            Sum::Crc32c => u32_at(bytes, 0) == CRC.checksum(body),
            Sum::Sha256 => part(bytes, 0, 32) == sha256(body),
            Sum::Other(_) => true,
        };
        if right { Ok(()) } else { corrupt(format!("the checksum of {what} is wrong")) }
    }
}

/// The trees of one file system.
pub(super) struct Trees {
    pub(super) image: Image,
    pub(super) sum: Sum,
    pub(super) node_size: usize,
    /// Bytes of a block of data.
    pub(super) sector: u32,
    /// The number of this device among those of the file system.
    pub(super) device: u64,
    /// By which all nodes say whose they are.
    pub(super) id: [u8; 16],
    chunks: Vec<Chunk>,
    nodes: Mutex<HashMap<u64, Arc<Vec<u8>>>>,
}

impl Trees {
    /// Those of a file system whose first chunks are in its superblock. They lead to the tree of all chunks.
    pub(super) fn new(
        (image, sum, node_size, sector): (Image, Sum, usize, u32),
        (device, id): (u64, [u8; 16]),
        first: &[u8],
        chunk_root: Root,
    ) -> Result<Trees, LayerError> {
        let nodes = Mutex::new(HashMap::new());
        let mut trees = Trees { image, sum, node_size, sector, device, id, chunks: Vec::new(), nodes };
        let mut rest = first;
        while !rest.is_empty() {
            let key = Key::at(rest, 0);
            let chunk = rest.get(Key::LEN..).unwrap_or_default();
            let len = Key::LEN + 48 + usize::from(u16_at(chunk, 44)) * 32;
            if key.kind != kind::CHUNK || rest.len() < len {
                return corrupt("the chunks in the superblock are cut short");
            }
            trees.add(key, chunk)?;
            rest = rest.get(len..).unwrap_or_default();
        }
        let mut all = Vec::new();
        let from = Key::new(0, 0, 0);
        trees.scan(chunk_root, from, &mut |item| {
            if item.key.kind == kind::CHUNK {
                all.push((item.key, item.bytes.to_vec()));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        trees.chunks.clear();
        all.iter().try_for_each(|(key, chunk)| trees.add(*key, chunk))?;
        Ok(trees)
    }

    /// Takes in a chunk. They come in the order of their addresses.
    fn add(&mut self, key: Key, chunk: &[u8]) -> Result<(), LayerError> {
        /// RAID 0, 10, 5 and 6: a chunk's bytes take turns on its stripes.
        const TAKE_TURNS: u64 = 0x8 | 0x40 | 0x80 | 0x100;
        let (len, profile) = (u64_at(chunk, 0), u64_at(chunk, 24));
        let before = self.chunks.last().map_or(0, |chunk| chunk.logical + chunk.len);
        if len == 0 || key.offset < before || key.offset.checked_add(len).is_none() {
            return corrupt("impossible chunks");
        }
        let stripes = chunk.get(48..).unwrap_or_default().as_chunks::<32>().0;
        let stripes = stripes.get(..usize::from(u16_at(chunk, 44))).unwrap_or_default();
        let whole = profile & TAKE_TURNS == 0 || stripes.len() == 1;
        let ours = stripes.iter().find(|stripe| whole && u64_at(*stripe, 0) == self.device);
        let physical = ours.map(|stripe| u64_at(stripe, 8));
        if physical.is_some_and(|at| at.checked_add(len).is_none()) {
            return corrupt("a chunk beyond 2^64 bytes");
        }
        self.chunks.push(Chunk { logical: key.offset, len, physical });
        Ok(())
    }

    /// Where `len` bytes from a logical address on are in the image.
    pub(super) fn place_of(&self, logical: u64, len: u64) -> Result<u64, LayerError> {
        let index = self.chunks.partition_point(|chunk| chunk.logical <= logical);
        let chunk = index.checked_sub(1).and_then(|index| self.chunks.get(index));
        let skip = |chunk: &Chunk| logical - chunk.logical;
        let fits = |chunk: &&Chunk| skip(chunk).checked_add(len).is_some_and(|end| end <= chunk.len);
        let Some(chunk) = chunk.filter(fits) else {
            return corrupt(format!("{len} bytes at the address {logical}, where no chunk is"));
        };
        match chunk.physical {
            Some(physical) => Ok(physical + skip(chunk)),
            None => unsupported("a btrfs on several devices: attach them all, and mount it"),
        }
    }

    /// The node at a logical address, and where it is in the image.
    fn node(&self, address: u64, level: u8) -> Result<(Arc<Vec<u8>>, u64), LayerError> {
        self.image.budget().steps(1, NODES)?;
        let at = self.place_of(address, self.node_size as u64)?;
        let kept = || self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        let known = kept().get(&address).cloned();
        let node = match known {
            Some(node) => node,
            None => {
                let node = Arc::new(self.image.read_vec(at, self.node_size)?);
                self.sum.check(&node, "a node of a tree")?;
                sound(&node)?;
                let mut kept = kept();
                if kept.len() >= NODES_KEPT {
                    kept.clear();
                }
                kept.insert(address, Arc::clone(&node));
                node
            }
        };
        if part(&node, 32, 16) == self.id && u64_at(&node, 48) == address && level_of(&node) == level {
            return Ok((node, at));
        }
        corrupt("a node of a tree that is another one")
    }

    /// Calls `each` for the items of a tree from a key on, in order, until it breaks.
    pub(super) fn scan(&self, root: Root, from: Key, each: &mut Each<'_>) -> Result<(), LayerError> {
        if root.level >= LEVELS_MAX {
            return corrupt(format!("a tree of {} levels", root.level));
        }
        self.below(root, None, from, each).map(drop)
    }

    /// The same below a node, whose first key is known if it has a parent.
    fn below(
        &self,
        Root { address, level }: Root,
        first: Option<Key>,
        from: Key,
        each: &mut Each<'_>,
    ) -> Result<ControlFlow<()>, LayerError> {
        let (node, at) = self.node(address, level)?;
        let (size, count) = (size_of_entry(level), count_of(&node));
        let key = |index: usize| Key::at(&node, HEAD + index * size);
        // Keys grow, and a child begins with its parent's key: no node comes twice.
        if first.is_some_and(|first| count == 0 || key(0) != first) {
            return corrupt("a node of a tree does not begin as its parent says");
        }
        let (mut index, mut end) = (0, count);
        while index < end {
            let middle = index.midpoint(end);
            if key(middle) < from { index = middle + 1 } else { end = middle }
        }
        if level > 0 {
            // A key between two pointers is below the first of them.
            if index == count || key(index) != from {
                index = index.saturating_sub(1);
            }
            for index in index..count {
                let child = Root { address: u64_at(&node, HEAD + index * size + Key::LEN), level: level - 1 };
                if self.below(child, Some(key(index)), from, each)?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
            return Ok(ControlFlow::Continue(()));
        }
        for index in index..count {
            let head = HEAD + index * size + Key::LEN;
            let (skip, len) = (u32_at(&node, head), u32_at(&node, head + 4));
            let skip = usize::try_from(skip).unwrap_or(usize::MAX).saturating_add(HEAD);
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            let Some(bytes) = node.get(skip..skip.saturating_add(len)) else {
                return corrupt("an item outside of its node");
            };
            if each(Item { key: key(index), bytes, at: at + skip as u64 })?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Calls `each` for the items of one object and kind, from an offset on.
    pub(super) fn items(&self, root: Root, from: Key, each: &mut Each<'_>) -> Result<(), LayerError> {
        self.scan(root, from, &mut |item| {
            if (item.key.object, item.key.kind) != (from.object, from.kind) {
                return Ok(ControlFlow::Break(()));
            }
            each(item)
        })
    }

    /// The bytes of the item with exactly this key.
    pub(super) fn find(&self, root: Root, key: Key) -> Result<Option<Vec<u8>>, LayerError> {
        let mut found = None;
        self.scan(root, key, &mut |item| {
            if item.key == key {
                found = Some(item.bytes.to_vec());
            }
            Ok(ControlFlow::Break(()))
        })?;
        Ok(found)
    }
}

fn level_of(node: &[u8]) -> u8 {
    u8_at(node, 100)
}

/// How many items or children a node has.
fn count_of(node: &[u8]) -> usize {
    usize::try_from(u32_at(node, 96)).unwrap_or(usize::MAX)
}

/// Bytes of an item's head, or of a pointer to a child.
fn size_of_entry(level: u8) -> usize {
    if level == 0 { ITEM } else { POINTER }
}

/// That a node has room for what it says to hold, by keys that grow.
fn sound(node: &[u8]) -> Result<(), LayerError> {
    let (size, count) = (size_of_entry(level_of(node)), count_of(node));
    let key = |index: usize| Key::at(node, HEAD + index * size);
    if count > (node.len() - HEAD) / size || (1..count).any(|index| key(index) <= key(index - 1)) {
        return corrupt("an impossible node of a tree");
    }
    Ok(())
}

/// What [`Trees::scan`] calls for each item.
pub(super) type Each<'a> = dyn FnMut(Item<'_>) -> Result<ControlFlow<()>, LayerError> + 'a;
