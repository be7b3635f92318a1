//! The index of a compressed file: what each of its logical clusters holds.
//! It never keeps more of the index than it reads at once.

use crate::bytes::{part, u16_at, u32_at};
use crate::image::Image;
use crate::layer::{LayerError, corrupt, unsupported};

/// Bytes of the index that are read at once. Packs do not lie across.
const WINDOW: u64 = 16 << 10;
/// Length of an entry of the long form.
const LONG: u64 = 8;
/// In the number of a cluster in the middle of a piece: it is how many blocks the piece has.
const BLOCKS: u32 = 1 << 11;

/// How the index is written.
pub(super) struct Shape {
    /// In packs of two or sixteen entries, with one place for each pack; else in entries of eight bytes.
    pub(super) compact: bool,
    /// Packs of sixteen are used.
    pub(super) short: bool,
    /// Pieces may have several blocks.
    pub(super) several: bool,
    /// Bytes of a logical cluster, as a power of two.
    pub(super) cluster_shift: u32,
}

/// How a piece is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Storing {
    /// As it is.
    Plain,
    /// By the first of the file's algorithms, and by the second.
    First,
    Second,
}

/// What the index says of a cluster.
pub(super) struct Cluster {
    /// Of the piece that begins in it; of no meaning where none does.
    pub(super) kind: Storing,
    pub(super) block: u32,
    /// Where in the cluster a piece begins, in bytes; none where it is all in the middle of one.
    pub(super) offset: Option<u32>,
    /// How many blocks the piece has that it is in the middle of; only the first such cluster says so.
    pub(super) blocks: Option<u32>,
}

/// The index of a file, read in order.
pub(super) struct Index<'a> {
    image: &'a Image,
    at: u64,
    shape: &'a Shape,
    /// Clusters in packs of two before those in packs of sixteen, and in those.
    before: u64,
    short: u64,
    /// Where the entry that was read last ends, with its pack.
    end: u64,
    window: (u64, Vec<u8>),
    pack: Pack,
}

/// The longest pack, in bytes.
const PACK: usize = 32;

/// The pack that is read.
#[derive(Default)]
struct Pack {
    at: Option<u64>,
    bytes: [u8; PACK],
    /// Blocks of the pieces that began in it, as far as they are known.
    blocks: u32,
    /// A piece began in the cluster before.
    begun: bool,
}

impl<'a> Index<'a> {
    pub(super) fn new(
        image: &'a Image,
        at: u64,
        count: u64,
        shape: &'a Shape,
    ) -> Result<Index<'a>, LayerError> {
        if shape.compact && shape.cluster_shift > if shape.short { 12 } else { 14 } {
            return unsupported(format!("EROFS with clusters of 2^{} bytes", shape.cluster_shift));
        }
        // Packs of sixteen are aligned to their length.
        let before = (at.next_multiple_of(32) - at) / 4;
        let short = if shape.short && before < count { (count - before) / 16 * 16 } else { 0 };
        // The long form has eight bytes more before it.
        let at = if shape.compact { at } else { at + 8 };
        Ok(Index { image, at, shape, before, short, end: at, window: (0, Vec::new()), pack: Pack::default() })
    }

    /// The next cluster, of this number.
    pub(super) fn next(&mut self, number: u64) -> Result<Cluster, LayerError> {
        if !self.shape.compact {
            let at = self.at + number * LONG;
            self.end = at + LONG;
            let raw = self.bytes(at, LONG)?;
            return self.long(raw.as_slice());
        }
        let (behind, width) = match number.checked_sub(self.before) {
            None => (number * 4, 4),
            Some(further) if further < self.short => (self.before * 4 + further * 2, 2),
            Some(further) => (self.before * 4 + self.short * 2 + (further - self.short) * 4, 4),
        };
        let len = if width == 2 { 32 } else { 8 };
        let at = self.at + behind;
        let start = at / len * len;
        self.end = start + len;
        if self.pack.at != Some(start) {
            self.pack = Pack { at: Some(start), bytes: self.bytes(start, len)?, ..Pack::default() };
        }
        let len = usize::try_from(len).unwrap_or(0);
        Ok(self.packed(len, usize::try_from((at - start) / width).unwrap_or(0)))
    }

    /// Where the index ends.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// So many bytes of the index, and zeroes.
    fn bytes(&mut self, at: u64, len: u64) -> Result<[u8; PACK], LayerError> {
        let start = at / WINDOW * WINDOW;
        if self.window.1.is_empty() || self.window.0 != start {
            self.image.budget().steps(WINDOW / 16, "the indexes of compressed files")?;
            self.window = (start, self.image.read_some(start, WINDOW as usize)?);
        }
        let within = usize::try_from(at - start).unwrap_or(0);
        let bytes = part(&self.window.1, within, usize::try_from(len).unwrap_or(0));
        if (bytes.len() as u64) < len {
            return corrupt("the index of a compressed file is cut short");
        }
        let mut copy = [0; PACK];
        copy.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        Ok(copy)
    }

    fn long(&self, raw: &[u8]) -> Result<Cluster, LayerError> {
        let advice = u16_at(raw, 0);
        let Some(kind) = kind(advice.into()) else {
            let blocks = u32::from(u16_at(raw, 4));
            return Ok(middle((blocks & BLOCKS != 0).then_some(blocks & !BLOCKS)));
        };
        let offset = u32::from(u16_at(raw, 2));
        if u64::from(offset) >= 1 << self.shape.cluster_shift {
            return corrupt("a piece begins behind its cluster");
        }
        Ok(Cluster { kind, block: u32_at(raw, 4), offset: Some(offset), blocks: None })
    }

    /// The entry of this number in the pack, whose last four bytes are a place that those of its pieces are
    /// counted from.
    fn packed(&mut self, len: usize, number: usize) -> Cluster {
        let entries = if len == PACK { 16 } else { 2 };
        let at = number * ((len - 4) * 8 / entries);
        let low = self.shape.cluster_shift.max(12);
        let pack = &mut self.pack;
        let word = u32_at(&pack.bytes, at / 8) >> (at % 8);
        let (value, kind) = (word & ((1 << low) - 1), kind(word >> low));
        let begun = std::mem::replace(&mut pack.begun, kind.is_some());
        if self.shape.several && begun && kind.is_some() {
            // The piece before has one block.
            pack.blocks = pack.blocks.saturating_add(1);
        }
        let Some(kind) = kind else {
            let blocks = (self.shape.several && value & BLOCKS != 0).then_some(value & !BLOCKS);
            pack.blocks = pack.blocks.saturating_add(blocks.unwrap_or(0));
            return middle(blocks);
        };
        if !self.shape.several {
            pack.blocks += 1;
        }
        let block = u32_at(&pack.bytes, len - 4).wrapping_add(pack.blocks);
        Cluster { kind, block, offset: Some(value), blocks: None }
    }
}

fn middle(blocks: Option<u32>) -> Cluster {
    Cluster { kind: Storing::Plain, block: 0, offset: None, blocks }
}

/// What the lower two bits say; none for a cluster in the middle of a piece.
fn kind(bits: u32) -> Option<Storing> {
    match bits & 3 {
        0 => Some(Storing::Plain),
        1 => Some(Storing::First),
        3 => Some(Storing::Second),
        _ => None,
    }
}
