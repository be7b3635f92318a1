//! What the containers of disks share: tables of entries, and a disk that is laid out block by block.
//! It never has more than a part of a table in memory, and never places a byte behind the file's end.

use crate::codec::Codec;
use crate::encoded::Block;
use crate::image::{Image, Layout};
use crate::layer::{LayerError, corrupt};

/// Bytes of a table that are read at once.
const CHUNK: u64 = 64 << 10;

/// Calls `each` for each entry of a table of `count` entries of `N` bytes, with its number.
///
/// # Errors
/// The table reaches beyond the image's end, or cannot be read; or what `each` returns.
pub(super) fn entries<const N: usize>(
    image: &Image,
    place: u64,
    count: u64,
    each: &mut dyn FnMut(u64, [u8; N]) -> Result<(), LayerError>,
) -> Result<(), LayerError> {
    let size = N as u64;
    let end = count.checked_mul(size).and_then(|len| len.checked_add(place));
    if end.is_none_or(|end| end > image.len()) {
        return corrupt(format!("a table of {count} entries at byte {place} reaches beyond the file's end"));
    }
    let mut first = 0;
    while first < count {
        let now = (CHUNK / size).min(count - first);
        let bytes =
            image.read_vec(place + first * size, usize::try_from(now * size).unwrap_or(usize::MAX))?;
        let (entries, _) = bytes.as_chunks::<N>();
        for (number, entry) in (first..).zip(entries) {
            each(number, *entry)?;
        }
        first += now;
    }
    Ok(())
}

/// A disk whose blocks are added one after another.
pub(super) struct Disk<'a> {
    image: &'a Image,
    layout: Layout,
    /// Bytes of the disk.
    len: u64,
    /// Bytes of each block; the last one may be longer than what is left of the disk.
    block: u64,
}

impl<'a> Disk<'a> {
    /// A disk of `len` bytes in the blocks of a file.
    pub(super) fn new(image: &'a Image, len: u64, block: u64) -> Result<Disk<'a>, LayerError> {
        Ok(Disk { image, layout: Layout::of(image)?, len, block })
    }

    /// The number of its blocks.
    pub(super) fn blocks(&self) -> u64 {
        self.len.div_ceil(self.block)
    }

    fn next(&self) -> u64 {
        self.block.min(self.len - self.layout.len())
    }

    /// The next `count` blocks are zeroes.
    pub(super) fn zero(&mut self, count: u64) -> Result<(), LayerError> {
        let left = self.len - self.layout.len();
        self.layout.zero(count.saturating_mul(self.block).min(left))
    }

    /// The next block is at byte `place` of the file. A file may end inside its last block: the rest of that
    /// is zeroes.
    pub(super) fn data(&mut self, place: u64) -> Result<(), LayerError> {
        let len = self.next();
        let there = self.image.len().saturating_sub(place).min(len);
        if there == 0 && len > 0 {
            return corrupt(format!(
                "data at byte {place}, beyond the file's end at byte {} (is the image cut short?)",
                self.image.len()
            ));
        }
        self.layout.data(place, there)?;
        self.layout.zero(len - there)
    }

    /// The next block is what `stored` bytes from byte `place` on yield.
    pub(super) fn encoded(&mut self, codec: Codec, place: u64, stored: u32) -> Result<(), LayerError> {
        let len = self.next();
        if len == 0 {
            return Ok(());
        }
        if place.checked_add(stored.into()).is_none_or(|end| end > self.image.len()) {
            return corrupt(format!("a compressed block at byte {place} reaches beyond the file's end"));
        }
        let short = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
        let yields = short(self.block);
        let block = Block { start: 0, len: short(len), input: place, input_len: stored, skip: 0, yields };
        self.layout.encoded(codec, block)
    }

    /// The disk; what has no block is zeroes.
    pub(super) fn finish(mut self) -> Result<Image, LayerError> {
        self.layout.zero(self.len - self.layout.len())?;
        self.image.compose(self.layout)
    }
}
