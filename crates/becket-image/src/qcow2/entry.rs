//! The entries of the tables of a qcow2: what their bits say, and how a table is read.
//! It never has more than a part of a table in memory.

use crate::bytes::be64_at;
use crate::image::Image;
use crate::layer::LayerError;
use crate::zeroes;

/// The bits of an entry that are a place in the file.
pub(super) const PLACE: u64 = 0x00ff_ffff_ffff_fe00;
pub(super) const COMPRESSED: u64 = 1 << 62;
/// Since version 3: the cluster reads as zeroes, wherever it lies.
pub(super) const ZERO: u64 = 1;
/// What it points to has no other user.
pub(super) const COPIED: u64 = 1 << 63;
/// Bytes of a table that are read at once.
const CHUNK: u64 = 64 << 10;

/// Where the bytes of a compressed cluster are, and how many at most.
pub(super) fn compressed_place(entry: u64, cluster_bits: u32) -> (u64, u64) {
    // The lower bits are the place, those above it the number of sectors behind the first.
    let bits = 62 - (cluster_bits - 8);
    let place = entry & ((1 << bits) - 1);
    let sectors = (entry & (COMPRESSED - 1)) >> bits;
    (place, (sectors + 1) * 512 - place % 512)
}

/// Calls `each` for the non-zero entries of a table, with their numbers. Only a part of the table is in
/// memory at a time.
pub(super) fn entries(
    image: &Image,
    place: u64,
    count: u64,
    each: &mut dyn FnMut(u64, u64) -> Result<(), LayerError>,
) -> Result<(), LayerError> {
    let per_chunk = CHUNK / 8;
    let mut first = 0;
    while first < count {
        let now = per_chunk.min(count - first);
        let bytes = image.read_vec(place + first * 8, usize::try_from(now * 8).unwrap_or(usize::MAX))?;
        // Most of a table that claims much is a hole.
        if !zeroes::is_all(&bytes) {
            for (number, entry) in (first..).zip(bytes.chunks_exact(8)) {
                match be64_at(entry, 0) {
                    0 => {}
                    entry => each(number, entry)?,
                }
            }
        }
        first += now;
    }
    Ok(())
}
