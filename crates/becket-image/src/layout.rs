//! Where the bytes of an image are in terms of the image that it lies in: what the readers of layers answer.
//! It never takes more pieces than an image may have.

use crate::budget::{Budget, Held};
use crate::codec::Codec;
use crate::encoded::Block;
use crate::layer::LayerError;
use crate::{Extent, Partition, Place};

/// The most extents, and the most encoded blocks, that one image may have: 40 and 32 MiB of memory. It holds
/// without a budget, too: the process that serves devices has no more room.
pub const PIECES_MAX: usize = 1 << 20;
/// The source of a [`Layout`] that stands for the image behind.
pub(crate) const BEHIND: u32 = 1;

/// What takes the memory of maps, for people.
pub(crate) const PIECES: &str = "the pieces that an image lies in";
pub(crate) const BLOCKS: &str = "the blocks of a compressed image";
/// Bytes of memory for one of each.
pub(crate) const EXTENT: u64 = size_of::<Extent>() as u64;
pub(crate) const BLOCK: u64 = size_of::<Block>() as u64;

/// What the first bytes of an image can mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// A file or device: whatever they are the magic number of.
    File,
    /// A disk or partition. Its user wrote them, and can have written what begins like a compressed file or
    /// an archive: it is none.
    Disk,
    /// An extended partition. They are a record of the table of the disk around it.
    Extended,
}

impl Role {
    /// That of a partition.
    pub(crate) fn of(partition: &Partition) -> Role {
        if partition.is_extended() { Role::Extended } else { Role::Disk }
    }
}

/// Where the bytes of an image are in terms of the image that it lies in; pushed piece by piece, in order.
#[derive(Debug)]
pub struct Layout {
    /// Source 0 is the image below, source 1 the one behind it; encoded layers are those of `encoded`.
    pub(crate) extents: Vec<Extent>,
    /// Blocks that are encoded in one way are one layer.
    pub(crate) encoded: Vec<(Codec, Vec<Block>)>,
    /// Where what the blocks are decoded from lies, if that is not the image below as it is.
    pub(crate) gathered: Vec<Extent>,
    /// What the first bytes of the image can mean.
    pub(crate) role: Role,
    len: u64,
    held: Held,
}

impl Layout {
    /// One that is empty, whose memory is counted.
    pub(crate) fn within(budget: &Budget) -> Result<Layout, LayerError> {
        let held = budget.hold(0, PIECES)?;
        Ok(Layout {
            extents: Vec::new(),
            encoded: Vec::new(),
            gathered: Vec::new(),
            role: Role::File,
            len: 0,
            held,
        })
    }

    /// The next `len` bytes are those from byte `offset` of the image below on.
    ///
    /// # Errors
    /// There are too many pieces, or their numbers overflow; as for the other pieces.
    pub fn data(&mut self, offset: u64, len: u64) -> Result<(), LayerError> {
        self.push(len, Place::Data { source: 0, offset })
    }

    /// The next `len` bytes are those from byte `offset` on of the image that lies behind: see
    /// [`Image::compose_over`](crate::Image::compose_over).
    pub(crate) fn backing(&mut self, offset: u64, len: u64) -> Result<(), LayerError> {
        self.push(len, Place::Data { source: BEHIND, offset })
    }

    /// The next `len` bytes are zeroes.
    ///
    /// # Errors
    /// As [`Layout::data`].
    pub fn zero(&mut self, len: u64) -> Result<(), LayerError> {
        self.push(len, Place::Zero)
    }

    /// The next bytes are what a block yields. `Block::start` is set here.
    ///
    /// # Errors
    /// As [`Layout::data`].
    pub fn encoded(&mut self, codec: Codec, mut block: Block) -> Result<(), LayerError> {
        let known = self.encoded.iter().position(|(known, _)| *known == codec);
        let layer = known.unwrap_or(self.encoded.len());
        let blocks = self.encoded.get(layer).map_or(&[][..], |(_, blocks)| blocks);
        if blocks.len() >= PIECES_MAX {
            return Err(LayerError::Limit(format!("it has more than {PIECES_MAX} encoded blocks")));
        }
        block.start = blocks.last().map_or(0, Block::end);
        let place = Place::Encoded { layer: u32::try_from(layer).unwrap_or(u32::MAX), offset: block.start };
        self.push(block.len.into(), place)?;
        self.held.grow(BLOCK, BLOCKS)?;
        match self.encoded.get_mut(layer) {
            Some((_, blocks)) => blocks.push(block),
            None => self.encoded.push((codec, vec![block])),
        }
        Ok(())
    }

    /// Adds `len` bytes from byte `offset` of the image below on to what blocks are decoded from; where they
    /// are in that. All blocks of a layout, or none, are decoded from what was gathered.
    ///
    /// # Errors
    /// As [`Layout::data`].
    pub(crate) fn gather(&mut self, offset: u64, len: u64) -> Result<u64, LayerError> {
        let start = self.gathered.last().map_or(0, Extent::end);
        let extent = Extent { start, len, place: Place::Data { source: 0, offset } };
        if self.gathered.len() >= PIECES_MAX || !extent.is_bounded() {
            return Err(LayerError::Limit(format!("it is decoded from more than {PIECES_MAX} pieces")));
        }
        self.held.grow(EXTENT, PIECES)?;
        self.gathered.push(extent);
        Ok(start)
    }

    /// The next bytes are `len` of another layout of the same image, from byte `from` of that on.
    ///
    /// # Errors
    /// As [`Layout::data`]; or it does not have them.
    pub(crate) fn part_of(&mut self, other: &Layout, from: u64, len: u64) -> Result<(), LayerError> {
        let end = from.checked_add(len).filter(|end| *end <= other.len);
        let end =
            end.ok_or_else(|| LayerError::Corrupt("it goes on behind the end of another".to_owned()))?;
        let first = other.extents.partition_point(|extent| extent.end() <= from);
        for extent in other.extents.iter().skip(first).take_while(|extent| extent.start < end) {
            let (start, stop) = (extent.start.max(from), extent.end().min(end));
            let (skip, len) = (start - extent.start, stop - start);
            match extent.place {
                Place::Data { offset, .. } => self.data(offset + skip, len)?,
                Place::Zero => self.zero(len)?,
                Place::Encoded { layer, offset } => {
                    self.blocks_of(other, layer, offset + skip, offset + skip + len)?;
                }
            }
        }
        Ok(())
    }

    /// The blocks of another layout's layer that yield its bytes `from..to`.
    fn blocks_of(&mut self, other: &Layout, layer: u32, from: u64, to: u64) -> Result<(), LayerError> {
        let layer = usize::try_from(layer).ok().and_then(|layer| other.encoded.get(layer));
        let Some((codec, blocks)) = layer else { return Ok(()) };
        let first = blocks.partition_point(|block| block.end() <= from);
        for block in blocks.iter().skip(first).take_while(|block| block.start < to) {
            let (start, stop) = (block.start.max(from), block.end().min(to));
            // Both lie in the block, whose length has 32 bits.
            let part = |bytes: u64| u32::try_from(bytes).unwrap_or(0);
            let (skip, len) = (block.skip + part(start - block.start), part(stop - start));
            self.encoded(*codec, Block { skip, len, ..*block })?;
        }
        Ok(())
    }

    /// Length so far, in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether nothing was pushed yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pieces so far.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// From where to where its bytes lie in the image below.
    pub(crate) fn span(&self) -> Option<(u64, u64)> {
        let data = self.extents.iter().chain(&self.gathered).filter_map(|extent| match extent.place {
            Place::Data { source: 0, offset } => Some((offset, extent.len)),
            _ => None,
        });
        let all = self.encoded.iter().flat_map(|(_, blocks)| blocks);
        let direct = all.filter(|_| self.gathered.is_empty());
        let blocks = direct.map(|block| (block.input, block.input_len.into()));
        let all = data.chain(blocks).map(|(start, len)| (start, start.saturating_add(len)));
        all.reduce(|(from, to), (start, end)| (from.min(start), to.max(end)))
    }

    fn push(&mut self, len: u64, place: Place) -> Result<(), LayerError> {
        if len == 0 {
            return Ok(());
        }
        let extent = Extent { start: self.len, len, place };
        if !extent.is_bounded() {
            return Err(LayerError::Corrupt("a piece of it ends beyond 2^64 bytes".to_owned()));
        }
        let full = self.extents.len() >= PIECES_MAX;
        match self.extents.last_mut() {
            Some(last) if last.continues_in(&extent) => last.len += len,
            _ if full => return Err(LayerError::Limit(format!("it lies in more than {PIECES_MAX} pieces"))),
            _ => {
                self.held.grow(EXTENT, PIECES)?;
                self.extents.push(extent);
            }
        }
        self.len = extent.end();
        Ok(())
    }
}
