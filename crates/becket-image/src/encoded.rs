//! Encoded blocks: where they lie, and what they yield.
//! It never trusts a block's numbers beyond the bounds that were checked when its layer was made.

use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::codec::{Codec, Decode};
use crate::{Map, Place};

/// The longest block as it is stored, in bytes (clusters of qcow2 have 2 MiB, blocks of SquashFS 1 MiB).
pub const STORED_MAX: u32 = 2 << 20;
/// The longest block as it is decoded, in bytes (the most that EROFS lets one yield).
pub const BLOCK_MAX: u32 = 12 << 20;

/// One block: encoded bytes that yield others, of which a part is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// Where its wanted bytes are in the layer's own count ([`Place::Encoded`]).
    pub start: u64,
    /// How many are wanted.
    pub len: u32,
    /// First encoded byte, in [`Encoded::below`].
    pub input: u64,
    /// Number of encoded bytes.
    pub input_len: u32,
    /// Bytes that it yields before the wanted ones.
    pub skip: u32,
    /// The most that it can yield.
    pub yields: u32,
}

impl Block {
    /// The first byte behind its wanted ones, in the layer's own count.
    pub(crate) fn end(&self) -> u64 {
        self.start.saturating_add(self.len.into())
    }

    fn is_sound(&self, below: u64) -> bool {
        self.len > 0
            && self.input_len > 0
            && self.yields <= BLOCK_MAX
            && self.input_len <= STORED_MAX
            && self.skip.checked_add(self.len).is_some_and(|wanted| wanted <= self.yields)
            && self.input.checked_add(self.input_len.into()).is_some_and(|end| end <= below)
    }
}

/// A layer of encoded blocks. It says all that is needed to decode them, and holds no descriptor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked", into = "Unchecked")]
pub struct Encoded {
    codec: Codec,
    below: Map,
    blocks: Arc<Vec<Block>>,
}

/// An [`Encoded`] that came from anywhere.
#[derive(Debug, Serialize, Deserialize)]
struct Unchecked {
    codec: Codec,
    below: Map,
    blocks: Vec<Block>,
}

impl TryFrom<Unchecked> for Encoded {
    type Error = &'static str;

    fn try_from(Unchecked { codec, below, blocks }: Unchecked) -> Result<Encoded, &'static str> {
        Encoded::new(codec, below, blocks).ok_or("its blocks are not a layer")
    }
}

impl From<Encoded> for Unchecked {
    fn from(Encoded { codec, below, blocks }: Encoded) -> Unchecked {
        Unchecked { codec, below, blocks: Arc::unwrap_or_clone(blocks) }
    }
}

impl Encoded {
    /// A layer of `blocks`, whose encoded bytes are where `below` says; `None` if the blocks are not sorted
    /// and gapless from 0 on, or if one is impossible.
    pub fn new(codec: Codec, below: Map, blocks: Vec<Block>) -> Option<Encoded> {
        let mut expected = 0;
        for block in &blocks {
            if block.start != expected || !block.is_sound(below.len()) {
                return None;
            }
            expected = block.end();
        }
        Some(Encoded { codec, below, blocks: Arc::new(blocks) })
    }

    /// The same layer where so many sources and layers are counted before those below it; see
    /// [`Map::behind`].
    pub(crate) fn behind(&self, sources: u32, layers: u32) -> Option<Encoded> {
        Some(Encoded {
            below: self.below.behind(sources, layers)?,
            blocks: Arc::clone(&self.blocks),
            ..*self
        })
    }

    /// How its blocks are encoded.
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// Where the encoded bytes are. Its own encoded extents are of layers with smaller numbers.
    pub fn below(&self) -> &Map {
        &self.below
    }

    /// The blocks, in order.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// The block that holds byte `pos` of the layer's own count; `None` behind the end.
    pub fn block_at(&self, pos: u64) -> Option<(usize, &Block)> {
        let index = self.blocks.partition_point(|block| block.end() <= pos);
        self.blocks.get(index).map(|block| (index, block))
    }

    /// Whether `below` speaks of nothing but the first `sources` sources and the first `layers` layers.
    pub fn speaks_only_of(&self, sources: usize, layers: usize) -> bool {
        speaks_only_of(&self.below, sources, layers)
    }
}

/// The end of the block that holds byte `pos` of a map, where that is encoded in one of these layers; both in
/// bytes from the map's start on.
pub fn end_of_block<'a>(map: &Map, mut layers: impl Iterator<Item = &'a Encoded>, pos: u64) -> Option<u64> {
    let extent = map.lookup(pos)?;
    let Place::Encoded { layer, offset } = extent.place else { return None };
    let (_, block) = layers.nth(usize::try_from(layer).ok()?)?.block_at(offset)?;
    Some(pos + (block.end() - offset).min(extent.len))
}

/// Whether a map speaks of nothing but the first `sources` sources and the first `layers` layers.
pub(crate) fn speaks_only_of(map: &Map, sources: usize, layers: usize) -> bool {
    let within = |index: u32, end: usize| usize::try_from(index).is_ok_and(|index| index < end);
    map.extents().iter().all(|extent| match extent.place {
        Place::Data { source, .. } => within(source, sources),
        Place::Zero => true,
        Place::Encoded { layer, .. } => within(layer, layers),
    })
}

/// Decodes a block whose encoded bytes are there; the wanted ones of what it yields are left in `output`.
///
/// # Errors
/// It is damaged, or yields too little.
pub fn decode(block: &Block, input: &[u8], decoder: &mut dyn Decode, output: &mut Vec<u8>) -> io::Result<()> {
    decode_all(block, input, decoder, output)?;
    let len = wanted(block, output)?.len();
    output.drain(..usize::try_from(block.skip).unwrap_or(0));
    output.truncate(len);
    Ok(())
}

/// Decodes a block; all that it yields is left in `output`.
pub(crate) fn decode_all(
    block: &Block,
    input: &[u8],
    decoder: &mut dyn Decode,
    output: &mut Vec<u8>,
) -> io::Result<()> {
    output.clear();
    output.resize(usize::try_from(block.yields).unwrap_or(0), 0);
    let got = decoder.decode(input, output);
    output.truncate(got.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?);
    Ok(())
}

/// The wanted ones of the bytes that a block yielded.
pub(crate) fn wanted<'a>(block: &Block, yielded: &'a [u8]) -> io::Result<&'a [u8]> {
    let skip = usize::try_from(block.skip).unwrap_or(usize::MAX);
    let len = usize::try_from(block.len).unwrap_or(usize::MAX);
    yielded.get(skip..).and_then(|rest| rest.get(..len)).ok_or_else(|| {
        let needed = u64::from(block.skip) + u64::from(block.len);
        let why = format!("an encoded block yields {} bytes where {needed} are needed", yielded.len());
        io::Error::new(io::ErrorKind::InvalidData, why)
    })
}
