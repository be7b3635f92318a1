//! The inodes of btrfs, and where the bytes of a file are.
//! It never takes extents that overlap.

use std::ops::ControlFlow;

use super::tree::{Item, Key, Root, Trees, kind};
use crate::bytes::{u8_at, u16_at, u32_at, u64_at};
use crate::codec::Codec;
use crate::encoded::{Block, STORED_MAX};
use crate::image::Layout;
use crate::layer::{Attributes, LayerError, NodeKind, Time, corrupt, unsupported};

/// Length of an inode, of an extent's head, and of an extent that is not in its item, in bytes.
const INODE: usize = 160;
const HEAD: usize = 21;
const EXTENT: usize = 53;

/// What is needed of an inode.
pub(super) struct Inode {
    pub(super) size: u64,
    links: u32,
    owner: (u32, u32),
    mode: u16,
    device: u64,
    modified: Time,
}

impl Inode {
    pub(super) fn parse(bytes: &[u8]) -> Result<Inode, LayerError> {
        if bytes.len() < INODE {
            return corrupt("an inode is cut short");
        }
        let nanoseconds = u32_at(bytes, 144).min(999_999_999);
        Ok(Inode {
            size: u64_at(bytes, 16),
            links: u32_at(bytes, 40),
            owner: (u32_at(bytes, 44), u32_at(bytes, 48)),
            mode: u16_at(bytes, 52),
            device: u64_at(bytes, 56),
            modified: Time { seconds: u64_at(bytes, 136).cast_signed(), nanoseconds },
        })
    }

    pub(super) fn kind(&self) -> NodeKind {
        NodeKind::of_mode(self.mode)
    }

    pub(super) fn attributes(&self, node: u64) -> Attributes {
        let kind = self.kind();
        // Twelve bits of major number, twenty of minor number.
        let number = |bits: u64| u32::try_from(bits).unwrap_or(0);
        let device = (number(self.device >> 20 & 0xfff), number(self.device & 0xf_ffff));
        Attributes {
            mode: Some(self.mode),
            owner: Some(self.owner),
            links: Some(self.links),
            identity: (self.links > 1 && kind != NodeKind::Directory).then_some(node),
            modified: Some(self.modified),
            device: matches!(self.mode & 0xf000, 0x2000 | 0x6000).then_some(device),
            ..Attributes::of(kind, self.size)
        }
    }
}

/// Where the first `size` bytes of a file are. Between its extents are zeroes.
pub(super) fn lay_out(trees: &Trees, root: Root, number: u64, size: u64) -> Result<Layout, LayerError> {
    let mut layout = Layout::of(&trees.image)?;
    trees.items(root, Key::new(number, kind::EXTENT, 0), &mut |item| {
        let from = item.key.offset;
        // What is reserved behind the end is no part of the file.
        if from >= size {
            return Ok(ControlFlow::Break(()));
        }
        if from < layout.len() {
            return corrupt("a file's extents overlap");
        }
        layout.zero(from - layout.len())?;
        add(trees, &mut layout, &item, size - from)?;
        Ok(ControlFlow::Continue(()))
    })?;
    layout.zero(size.saturating_sub(layout.len()))?;
    Ok(layout)
}

/// Adds an extent, of which the file has at most `most` bytes.
fn add(trees: &Trees, layout: &mut Layout, item: &Item<'_>, most: u64) -> Result<(), LayerError> {
    let bytes = item.bytes;
    let codec = codec(u8_at(bytes, 16), trees.sector)?;
    if u8_at(bytes, 17) != 0 || u16_at(bytes, 18) != 0 {
        return unsupported("files of btrfs that are encrypted");
    }
    let yields = u64_at(bytes, 8);
    // Where the bytes of the extent are stored, and which of those that they yield are the file's.
    let (at, stored, skip, len) = match u8_at(bytes, 20) {
        0 if bytes.len() >= HEAD => (item.at + HEAD as u64, (bytes.len() - HEAD) as u64, 0, yields),
        kind @ (1 | 2) if bytes.len() >= EXTENT => {
            let (address, stored) = (u64_at(bytes, 21), u64_at(bytes, 29));
            let (skip, len) = (u64_at(bytes, 37), u64_at(bytes, 45));
            // A hole, or blocks that were only reserved.
            if address == 0 || kind == 2 {
                return layout.zero(len.min(most));
            }
            (trees.place_of(address, stored)?, stored, skip, len)
        }
        kind => return corrupt(format!("an extent of a file of kind {kind}")),
    };
    let whole = if codec.is_some() { yields } else { stored };
    if len == 0 || skip.checked_add(len).is_none_or(|end| end > whole) {
        return corrupt("an extent of a file is not where it says");
    }
    let len = len.min(most);
    let Some(codec) = codec else { return layout.data(at + skip, len) };
    let small = |number: u64| u32::try_from(number).ok().filter(|number| *number <= STORED_MAX);
    match (small(stored), small(yields), small(skip), small(len)) {
        (Some(input_len), Some(yields), Some(skip), Some(len)) => {
            layout.encoded(codec, Block { start: 0, len, input: at, input_len, skip, yields })
        }
        _ => corrupt("a compressed extent is too long"),
    }
}

/// How an extent is compressed.
fn codec(number: u8, sector: u32) -> Result<Option<Codec>, LayerError> {
    match number {
        0 => Ok(None),
        1 => Ok(Some(Codec::FilledGzip)),
        // Its blocks are of a sector each.
        2 if sector != 4096 => unsupported(format!("lzo on a btrfs with sectors of {sector} bytes")),
        2 => Ok(Some(Codec::FilledLzo)),
        3 => Ok(Some(Codec::FilledZstd)),
        other => unsupported(format!("files of btrfs that are compressed with method {other}")),
    }
}
