//! An image: a length, a map to where its bytes finally are, and a way to read them.
//! It never opens anything: all its bytes come from descriptors that were open before it was made.
//!
//! Whatever a layer is, what comes out of it is a map, so an image is one type and the layers are the trait
//! ([`crate::FileSystem`]). An image inside another is made by [`Image::compose`]: the layer's answer, in
//! terms of the image that it lies in, is looked up in that image's map. So at any depth a byte is found by
//! one look-up, and a parser at depth n reads with one system call.

use std::fmt;
use std::io;
use std::sync::Arc;

use crate::budget::{Budget, Held};
use crate::bytes::{Reach, ReadAt};
use crate::decoded::Decoded;
use crate::encoded::{self, Block, Encoded};
use crate::layer::{About, LayerError};
pub(crate) use crate::layout::Role;
use crate::layout::{BEHIND, BLOCK, BLOCKS, EXTENT, PIECES};
pub use crate::layout::{Layout, PIECES_MAX};
use crate::{Extent, Map, Partition, Place};

/// The most that a parser reads at once, in bytes: such memory is not counted, for it does not last.
const READ_MAX: usize = 64 << 20;

/// What takes steps and bytes, for people.
const READS: &str = "reads of the image";
pub(crate) const DECODING: &str = "decoding what is compressed";

/// Something that has a length and bytes. Cheap to clone.
#[derive(Clone)]
pub struct Image {
    map: Arc<Mapped>,
    sources: Sources,
    /// Bytes, a power of two: what the image is addressed in.
    block_size: u32,
    /// What it is stored as, where it is not stored as it is.
    stored: Option<Arc<About>>,
    /// What its first bytes can mean.
    role: Role,
}

/// A map, and the memory that it takes.
struct Mapped {
    map: Map,
    _held: Held,
    /// What was decoded last of the blocks that lie in it.
    decoded: Arc<Decoded>,
}

impl Mapped {
    fn new(map: Map, held: Held) -> Arc<Mapped> {
        Arc::new(Mapped { map, _held: held, decoded: Arc::default() })
    }
}

/// Where bytes come from: sources as they are, and layers that are decoded; and what that may cost.
#[derive(Clone)]
struct Sources {
    readers: Vec<Arc<dyn ReadAt>>,
    layers: Vec<Arc<Layer>>,
    budget: Budget,
}

/// A layer of encoded blocks, with those that were decoded last.
struct Layer {
    encoded: Encoded,
    decoded: Arc<Decoded>,
    _held: Held,
}

impl Layout {
    /// One that is empty, of what lies in `image`.
    ///
    /// # Errors
    /// The image's budget is spent.
    pub fn of(image: &Image) -> Result<Layout, LayerError> {
        Layout::within(image.budget())
    }
}

impl Image {
    /// The first `len` bytes of a file or device, whose blocks have `block_size` bytes.
    pub fn raw(file: Arc<dyn ReadAt>, len: u64, block_size: u32) -> Image {
        let budget = Budget::unlimited();
        let map = Mapped::new(Map::contiguous(0, 0, len), budget.held());
        let sources = Sources { readers: vec![file], layers: Vec::new(), budget };
        Image { map, sources, block_size, stored: None, role: Role::File }
    }

    /// The same image, whose reading and parsing, and that of all images in it, may cost so much.
    #[must_use]
    pub fn within(mut self, budget: &Budget) -> Image {
        self.sources.budget = budget.clone();
        self
    }

    /// What its reading and parsing may cost.
    pub fn budget(&self) -> &Budget {
        &self.sources.budget
    }

    /// An image of which was known before where its bytes are; `None` where that speaks of what is not there.
    pub fn assembled(map: Map, readers: Vec<Arc<dyn ReadAt>>, encoded: Vec<Encoded>) -> Option<Image> {
        let sound = encoded::speaks_only_of(&map, readers.len(), encoded.len())
            && encoded.iter().enumerate().all(|(layer, one)| one.speaks_only_of(readers.len(), layer));
        let budget = Budget::unlimited();
        let layer = |encoded| Arc::new(Layer { encoded, decoded: Arc::default(), _held: budget.held() });
        let layers = encoded.into_iter().map(layer).collect();
        let map = Mapped::new(map, budget.held());
        let sources = Sources { readers, layers, budget };
        sound.then(|| Image { map, sources, block_size: 512, stored: None, role: Role::File })
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.map().len()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.map().is_empty()
    }

    /// The unit in which it is addressed: partition tables count in it.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// The same bytes, addressed in other units.
    pub(crate) fn with_block_size(self, block_size: u32) -> Image {
        Image { block_size, ..self }
    }

    /// The same bytes, of which is known what they are stored as.
    pub(crate) fn stored_as(self, about: About) -> Image {
        Image { stored: Some(Arc::new(about)), role: Role::Disk, ..self }
    }

    /// What it is stored as (a qcow2), where it is not stored as it is.
    pub fn stored(&self) -> Option<&About> {
        self.stored.as_deref()
    }

    /// What its first bytes can mean.
    pub(crate) fn role(&self) -> Role {
        self.role
    }

    /// A partition of it, as an image.
    ///
    /// # Errors
    /// As [`Image::slice`].
    pub fn part(&self, partition: &Partition) -> Result<Image, LayerError> {
        let part = self.slice(partition.start, partition.len)?;
        Ok(Image { role: Role::of(partition), ..part })
    }

    /// What it takes to read its last bytes.
    pub(crate) fn reach(&self) -> Reach {
        match self.map().extents().last().map(|last| last.place) {
            Some(Place::Data { source, .. }) => {
                let reader = usize::try_from(source).ok().and_then(|source| self.sources.readers.get(source));
                reader.map_or(Reach::Near, |reader| reader.reach())
            }
            _ => Reach::Near,
        }
    }

    /// Where its bytes finally are.
    pub fn map(&self) -> &Map {
        &self.map.map
    }

    /// The layers that its map's encoded extents speak of.
    pub fn encoded(&self) -> impl ExactSizeIterator<Item = &Encoded> {
        self.sources.layers.iter().map(|layer| &layer.encoded)
    }

    /// The part of `len` bytes from byte `offset` on, as an image.
    ///
    /// # Errors
    /// It reaches beyond the end, or the budget is spent.
    pub fn slice(&self, offset: u64, len: u64) -> Result<Image, LayerError> {
        let map = self.map().slice(offset, len).map_err(|error| LayerError::Corrupt(error.to_string()))?;
        Ok(Image { map: self.sources.mapped(map)?, stored: None, role: Role::Disk, ..self.clone() })
    }

    /// The same with zeroes behind it.
    pub(crate) fn padded(self, zeroes: u64) -> Result<Image, LayerError> {
        if zeroes == 0 {
            return Ok(self);
        }
        let mut layout = Layout::of(&self)?;
        layout.data(0, self.len())?;
        layout.zero(zeroes)?;
        self.compose(layout)
    }

    /// The image inside this one whose bytes are where `layout` says.
    ///
    /// # Errors
    /// The layout speaks of bytes that this image does not have, or lies in too many pieces.
    pub fn compose(&self, layout: Layout) -> Result<Image, LayerError> {
        self.compose_over(layout, None, None)
    }

    /// The same where what is stored as it is lies in another image, if `data` is given, and where some bytes
    /// are those of the one that lies behind. Their files and layers come behind ours, in this order.
    pub(crate) fn compose_over(
        &self,
        layout: Layout,
        data: Option<&Image>,
        behind: Option<&Image>,
    ) -> Result<Image, LayerError> {
        let Layout { extents, encoded, gathered, role, .. } = layout;
        let mut sources = self.sources.clone();
        let data = data.map(|image| sources.append(image)).transpose()?;
        let stored = data.as_ref().unwrap_or(self.map());
        let behind = behind.map(|image| sources.append(image)).transpose()?;
        let own = index(sources.layers.len())?;
        let mut composed = Composed::new(&sources.budget)?;
        for Extent { start, len, place } in extents {
            match place {
                Place::Data { source, offset } => {
                    let map = if source == BEHIND { behind.as_ref() } else { Some(stored) };
                    composed.part(map, start, offset, len)?;
                }
                Place::Zero => composed.push(Extent { start, len, place })?,
                Place::Encoded { layer, offset } => {
                    let layer = own.saturating_add(layer);
                    composed.push(Extent { start, len, place: Place::Encoded { layer, offset } })?;
                }
            }
        }
        let map = composed.finish()?;
        let below = match gathered.is_empty() {
            true => Arc::clone(&self.map),
            false => self.gathered(&sources.budget, &gathered)?,
        };
        for (codec, blocks) in encoded {
            let held = sources.hold_layer(&below.map, &blocks)?;
            let encoded = Encoded::new(codec, below.map.clone(), blocks)
                .ok_or_else(|| LayerError::Corrupt("an encoded block of it is impossible".to_owned()))?;
            let decoded = Arc::clone(&below.decoded);
            sources.layers.push(Arc::new(Layer { encoded, decoded, _held: held }));
        }
        Ok(Image { map, sources, block_size: 512, stored: None, role })
    }

    /// What [`Layout::gather`] has put together.
    fn gathered(&self, budget: &Budget, pieces: &[Extent]) -> Result<Arc<Mapped>, LayerError> {
        let mut composed = Composed::new(budget)?;
        for piece in pieces {
            if let Place::Data { offset, .. } = piece.place {
                composed.part(Some(self.map()), piece.start, offset, piece.len)?;
            }
        }
        composed.finish()
    }

    /// The image in pieces of others, each with its length: which of `others` it is of and its first byte
    /// there, or zeroes. Their files and layers come behind ours.
    pub(crate) fn in_pieces(
        &self,
        others: &[Image],
        pieces: &[(u64, Option<(usize, u64)>)],
    ) -> Result<Image, LayerError> {
        let mut sources = self.sources.clone();
        let maps = others.iter().map(|other| sources.append(other)).collect::<Result<Vec<_>, _>>()?;
        let mut composed = Composed::new(&sources.budget)?;
        let mut start = 0_u64;
        for (len, from) in pieces {
            match from {
                None => composed.push(Extent { start, len: *len, place: Place::Zero })?,
                Some((other, offset)) => composed.part(maps.get(*other), start, *offset, *len)?,
            }
            start = start.saturating_add(*len);
        }
        Ok(Image { map: composed.finish()?, sources, block_size: 512, stored: None, role: Role::File })
    }

    /// `len` bytes from byte `offset` on, in memory of their own.
    ///
    /// # Errors
    /// They are not all there, are more than a parser may read at once, or cannot be read.
    pub fn read_vec(&self, offset: u64, len: usize) -> Result<Vec<u8>, LayerError> {
        if len > READ_MAX {
            return Err(LayerError::Limit(format!("{len} bytes at once are too many to read")));
        }
        // Asked first, so that no memory is taken for what is not there.
        if offset.checked_add(len as u64).is_none_or(|end| end > self.len()) {
            return Err(beyond(offset, len as u64, self.len()));
        }
        let mut bytes = vec![0; len];
        self.read_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    /// Up to `len` bytes from byte `offset` on: fewer at the end.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn read_some(&self, offset: u64, len: usize) -> Result<Vec<u8>, LayerError> {
        let there = usize::try_from(self.len().saturating_sub(offset)).unwrap_or(usize::MAX);
        self.read_vec(offset.min(self.len()), len.min(there))
    }
}

/// A map as it is put together of parts of others.
struct Composed {
    extents: Vec<Extent>,
    held: Held,
}

impl Composed {
    fn new(budget: &Budget) -> Result<Composed, LayerError> {
        Ok(Composed { extents: Vec::new(), held: budget.hold(0, PIECES)? })
    }

    fn push(&mut self, extent: Extent) -> Result<(), LayerError> {
        if let Some(last) = self.extents.last_mut().filter(|last| last.continues_in(&extent)) {
            last.len += extent.len;
            return Ok(());
        }
        if self.extents.len() >= PIECES_MAX {
            return Err(LayerError::Limit(format!("it lies in more than {PIECES_MAX} pieces")));
        }
        self.held.grow(EXTENT, PIECES)?;
        self.extents.push(extent);
        Ok(())
    }

    /// From `start` on it is `len` bytes of another map from byte `offset` on.
    fn part(&mut self, map: Option<&Map>, start: u64, offset: u64, len: u64) -> Result<(), LayerError> {
        let parts = map.and_then(|map| map.parts(offset, len).ok());
        let mut parts = parts.ok_or_else(|| beyond(offset, len, map.map_or(0, Map::len)))?;
        parts.try_for_each(|part| self.push(Extent { start: start + part.start, ..part }))
    }

    fn finish(self) -> Result<Arc<Mapped>, LayerError> {
        let map = Map::from_extents(self.extents).map_err(|error| LayerError::Corrupt(error.to_string()))?;
        Ok(Mapped::new(map, self.held))
    }
}

fn beyond(offset: u64, len: u64, end: u64) -> LayerError {
    LayerError::Corrupt(format!(
        "{len} bytes from byte {offset} on reach beyond its end at byte {end} (is the image cut short?)"
    ))
}

impl ReadAt for Image {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.sources.read(self.map(), buf, offset)
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image")
            .field("len", &self.len())
            .field("extents", &self.map().extents().len())
            .finish()
    }
}

/// A number of sources or layers as maps count them.
fn index(count: usize) -> Result<u32, LayerError> {
    u32::try_from(count).map_err(|_| LayerError::Limit("it has too many layers".to_owned()))
}

impl Sources {
    /// Takes another image's files and layers behind those that are there; its map, in terms of all of them.
    fn append(&mut self, image: &Image) -> Result<Map, LayerError> {
        let (sources, layers) = (index(self.readers.len())?, index(self.layers.len())?);
        let sound = || LayerError::Limit("it has too many sources or layers".to_owned());
        for layer in &image.sources.layers {
            let held = self.hold_layer(layer.encoded.below(), layer.encoded.blocks())?;
            let moved = layer.encoded.behind(sources, layers).ok_or_else(sound)?;
            let decoded = Arc::clone(&layer.decoded);
            self.layers.push(Arc::new(Layer { encoded: moved, decoded, _held: held }));
        }
        self.readers.extend(image.sources.readers.iter().cloned());
        image.map().behind(sources, layers).ok_or_else(sound)
    }

    /// A map with the memory that it takes.
    fn mapped(&self, map: Map) -> Result<Arc<Mapped>, LayerError> {
        let held = self.budget.hold(map.extents().len() as u64 * EXTENT, PIECES)?;
        Ok(Mapped::new(map, held))
    }

    /// The memory that a layer of encoded blocks takes.
    fn hold_layer(&self, below: &Map, blocks: &[Block]) -> Result<Held, LayerError> {
        let bytes = below.extents().len() as u64 * EXTENT + blocks.len() as u64 * BLOCK;
        Ok(self.budget.hold(bytes, BLOCKS)?)
    }

    /// Fills `buf` with what `map` says is at `offset`.
    fn read(&self, map: &Map, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !buf.is_empty() {
            let extent = map.lookup(offset).ok_or(io::ErrorKind::UnexpectedEof)?;
            let len = usize::try_from(extent.len).unwrap_or(usize::MAX).min(buf.len());
            let (now, rest) = buf.split_at_mut(len);
            self.budget.steps(1, READS)?;
            self.budget.bytes(len as u64, READS)?;
            match extent.place {
                Place::Zero => now.fill(0),
                Place::Data { source, offset } => {
                    let reader = usize::try_from(source).ok().and_then(|source| self.readers.get(source));
                    reader.ok_or(io::ErrorKind::NotFound)?.read_at(now, offset)?;
                }
                Place::Encoded { layer, offset } => {
                    let layer = usize::try_from(layer).ok().and_then(|layer| self.layers.get(layer));
                    layer.ok_or(io::ErrorKind::NotFound)?.read(self, now, offset)?;
                }
            }
            offset += len as u64;
            buf = rest;
        }
        Ok(())
    }
}

impl Layer {
    /// Fills `buf` with bytes of the layer's own count. What it needs from `sources` is of layers made before
    /// it, so this ends.
    fn read(&self, sources: &Sources, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !buf.is_empty() {
            let (_, block) = self.encoded.block_at(offset).ok_or(io::ErrorKind::UnexpectedEof)?;
            let from = usize::try_from(offset - block.start).unwrap_or(usize::MAX);
            let wanted = usize::try_from(block.len).unwrap_or(0).saturating_sub(from).min(buf.len());
            let (now, rest) = buf.split_at_mut(wanted);
            let input = || {
                sources.budget.bytes(block.yields.into(), DECODING)?;
                let mut input = vec![0; usize::try_from(block.input_len).unwrap_or(0)];
                sources.read(self.encoded.below(), &mut input, block.input)?;
                Ok(input)
            };
            let bytes = self.decoded.block(self.encoded.codec(), block, input)?;
            let there = encoded::wanted(block, &bytes)?.get(from..).and_then(|bytes| bytes.get(..wanted));
            now.copy_from_slice(there.ok_or(io::ErrorKind::UnexpectedEof)?);
            offset += wanted as u64;
            buf = rest;
        }
        Ok(())
    }
}
