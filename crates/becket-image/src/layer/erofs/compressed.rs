//! Files that EROFS compresses: pieces of any length, each of which is stored in whole blocks.
//! It never takes a piece for longer than the engine decodes at once.
//!
//! A file is divided into logical clusters. An index says of each whether a piece begins in it, and where.
//!
//! Followed: fs/erofs/zmap.c and erofs_fs.h of Linux 7.3.

use super::index::{Cluster, Index, Shape, Storing};
use crate::bytes::{u8_at, u16_at, u32_at, u64_at};
use crate::codec::Codec;
use crate::encoded::{BLOCK_MAX, Block, STORED_MAX};
use crate::image::{Image, Layout};
use crate::layer::{LayerError, corrupt, unsupported};

/// Length of the head before the index, in bytes.
const HEAD: u64 = 8;
/// How a file is compressed, in its head: pieces of several blocks, of the two kinds; the last piece is
/// behind the index, or in the file of fragments; what is stored as it is keeps its place in its block.
const SEVERAL: [u16; 2] = [2, 4];
const LAST_INLINE: u16 = 8;
const INTERLACED: u16 = 0x10;
const LAST_FRAGMENT: u16 = 0x20;

/// What the head says of a file.
struct Head {
    advice: u16,
    /// By number, of the two kinds of pieces.
    algorithms: [u8; 2],
    /// Length of the last piece where it is behind the index, in bytes.
    inline_len: u16,
    /// Where the last piece is in the file of fragments.
    fragment: u64,
    /// Bytes of a logical cluster, as a power of two.
    cluster_shift: u32,
}

/// A piece as the index describes it.
#[derive(Clone, Copy)]
struct Piece {
    kind: Storing,
    /// Where it begins in the file, in bytes.
    start: u64,
    /// Its first block.
    block: u32,
    /// How many blocks it is stored in, where the index says so.
    blocks: Option<u32>,
}

/// Where the file of fragments lies.
pub(super) type Fragments<'a> = dyn Fn() -> Result<&'a Layout, LayerError> + 'a;

/// A compressed file.
pub(super) struct File<'a> {
    pub(super) image: &'a Image,
    /// Bytes of a block, as a power of two.
    pub(super) block_shift: u32,
    /// Where what follows its inode begins, in bytes.
    pub(super) behind: u64,
    /// Length in bytes.
    pub(super) size: u64,
    /// Whether its index is in packs.
    pub(super) compact: bool,
}

/// Where the bytes of a compressed file are.
pub(super) fn lay_out<'a>(file: &File<'_>, fragments: &Fragments<'a>) -> Result<Layout, LayerError> {
    let File { image, size, compact, .. } = *file;
    let mut layout = Layout::of(image)?;
    let at = file.behind.next_multiple_of(8);
    let raw = image.read_vec(at, HEAD as usize)?;
    // The whole file is a fragment.
    if u8_at(&raw, 7) & 0x80 != 0 {
        let from = u64_at(&raw, 0) & !(1 << 63);
        layout.part_of(fragments()?, from, size)?;
        return Ok(layout);
    }
    let head = Head {
        advice: u16_at(&raw, 4),
        algorithms: [u8_at(&raw, 6) & 0xf, u8_at(&raw, 6) >> 4],
        inline_len: u16_at(&raw, 2),
        fragment: u32_at(&raw, 0).into(),
        cluster_shift: file.block_shift + u32::from(u8_at(&raw, 7) & 7),
    };
    let count = size.div_ceil(1 << head.cluster_shift);
    let shape = head.shape(compact);
    let mut index = Index::new(image, at + HEAD, count, &shape)?;
    let mut current: Option<Piece> = None;
    for number in 0..count {
        let Cluster { kind, offset, block, blocks } = index.next(number)?;
        let Some(offset) = offset else {
            match &mut current {
                Some(piece) if blocks.is_some() => piece.blocks = blocks,
                Some(_) => {}
                None => return corrupt("a compressed file begins in the middle of a piece"),
            }
            continue;
        };
        let start = (number << head.cluster_shift) + u64::from(offset);
        if start >= size {
            // Where the last piece ends in the middle of a cluster, that may say so.
            continue;
        }
        if let Some(piece) = current {
            push(file, &head, &mut layout, piece, start)?;
        } else if start != 0 {
            return corrupt("a compressed file begins before its first piece");
        }
        current = Some(Piece { kind, start, block, blocks });
    }
    let Some(last) = current else { return Ok(layout) };
    let len = size - last.start;
    if head.advice & LAST_FRAGMENT != 0 {
        // A long index has room for the upper half of the place.
        let upper = if compact { 0 } else { u64::from(last.block) << 32 };
        layout.part_of(fragments()?, head.fragment | upper, len)?;
    } else if head.advice & LAST_INLINE != 0 {
        store(file, &head, &mut layout, last, len, (index.end(), head.inline_len.into()))?;
    } else {
        push(file, &head, &mut layout, last, size)?;
    }
    Ok(layout)
}

impl Head {
    fn shape(&self, compact: bool) -> Shape {
        Shape {
            compact,
            short: self.advice & 1 != 0,
            several: self.advice & SEVERAL[0] != 0,
            cluster_shift: self.cluster_shift,
        }
    }
}

/// Adds a piece that ends at byte `end` of the file.
fn push(file: &File<'_>, head: &Head, layout: &mut Layout, piece: Piece, end: u64) -> Result<(), LayerError> {
    let Some(len) = end.checked_sub(piece.start) else { return corrupt("pieces of a file are out of order") };
    let several = match piece.kind {
        Storing::Plain => head.advice & (SEVERAL[0] | SEVERAL[1]) != 0,
        Storing::First => head.advice & SEVERAL[0] != 0,
        Storing::Second => head.advice & SEVERAL[1] != 0,
    };
    let stored = match piece.blocks.filter(|_| several) {
        Some(blocks) => u64::from(blocks) << file.block_shift,
        None if several => 1 << file.block_shift,
        None => 1 << head.cluster_shift,
    };
    store(file, head, layout, piece, len, (u64::from(piece.block) << file.block_shift, stored))
}

/// Adds `len` bytes that are stored at a place, in so many bytes.
fn store(
    file: &File<'_>,
    head: &Head,
    layout: &mut Layout,
    piece: Piece,
    len: u64,
    (at, stored): (u64, u64),
) -> Result<(), LayerError> {
    if len == 0 {
        return Ok(());
    }
    let algorithm = match piece.kind {
        Storing::Plain if len > stored => return corrupt("a piece is longer than what it is stored in"),
        Storing::Plain if head.advice & INTERLACED != 0 => {
            // What is in the piece's first block is at the end of what it is stored in.
            let block = 1 << file.block_shift;
            let first = block - piece.start % block;
            let Some(skip) = stored.checked_sub(first) else { return corrupt("a piece lacks its start") };
            layout.data(at.saturating_add(skip), first.min(len))?;
            return layout.data(at, len.saturating_sub(first));
        }
        Storing::Plain => return layout.data(at, len),
        Storing::First => head.algorithms[0],
        Storing::Second => head.algorithms[1],
    };
    let codec = match algorithm {
        0 => Codec::PaddedLz4,
        1 => Codec::PaddedLzma,
        2 => Codec::PaddedDeflate,
        3 => Codec::PaddedZstd,
        other => return unsupported(format!("files of EROFS that are compressed with method {other}")),
    };
    let small = |number: u64, most| u32::try_from(number).ok().filter(|number| *number <= most);
    let (Some(yields), Some(input_len)) = (small(len, BLOCK_MAX), small(stored, STORED_MAX)) else {
        return corrupt(format!("a piece of {stored} bytes that yields {len}"));
    };
    layout.encoded(codec, Block { start: 0, len: yields, input: at, input_len, skip: 0, yields })
}
