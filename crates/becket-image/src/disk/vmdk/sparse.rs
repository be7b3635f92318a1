//! VMDK with tables of its own: sparse and stream-optimised ones, in one file or as a piece of a disk.
//! It never reads a snapshot: what its parent holds is not here.
//!
//! A directory names grain tables, and those say of each grain where it lies. In a stream-optimised image
//! each grain is compressed behind a marker, and the header that counts is a copy at the file's end.
//!
//! Followed: VMware's Virtual Disk Format 5.0 and QEMU's block/vmdk.c.

use super::super::blocks::{Disk, entries};
use super::descriptor::{LONGEST, foreign, parse};
use crate::bytes::{part, u16_at, u32_at, u64_at};
use crate::codec::Codec;
use crate::image::Image;
use crate::layer::{About, LayerError, corrupt};

const SECTOR: u64 = 512;
const MAGIC: &[u8] = b"KDMV";
/// Flags of the header.
const ZERO_GRAINS: u32 = 1 << 2;
const COMPRESSED: u32 = 1 << 16;
const MARKERS: u32 = 1 << 17;
/// The place of a directory that stands in the copy of the header.
const AT_END: u64 = !0;
/// Where the copy is, counted from the end: behind a marker, and before another one.
const COPY: u64 = 2 * SECTOR;
/// Bytes of a grain, compressed or not, that can be a block of an encoded layer.
const GRAIN_MAX: u64 = 2 << 20;
/// The most entries of a grain table.
const PER_TABLE_MAX: u32 = 512;
/// Length of the marker before a compressed grain, in bytes.
const MARKER: usize = 12;

/// What is needed of the header.
struct Header {
    flags: u32,
    /// Bytes.
    len: u64,
    grain: u64,
    directory: u64,
    per_table: u64,
    /// Where the text is, and its length; nothing in a piece of a disk.
    text: (u64, u64),
}

impl Header {
    fn read(image: &Image) -> Result<Header, LayerError> {
        let mut raw = image.read_vec(0, 512)?;
        let text = (sectors(u64_at(&raw, 28))?, sectors(u64_at(&raw, 36))?);
        if u64_at(&raw, 56) == AT_END {
            raw = image.read_vec(image.len().saturating_sub(COPY), 512)?;
            if !raw.starts_with(MAGIC) {
                return corrupt("the copy of the header at the end is missing (is the image cut short?)");
            }
        }
        let (version, flags) = (u32_at(&raw, 4), u32_at(&raw, 8));
        if !(1..=3).contains(&version) {
            return Err(foreign(format!("its version is {version}")));
        }
        if flags & COMPRESSED != 0 && (flags & MARKERS == 0 || u16_at(&raw, 77) != 1) {
            return Err(foreign("its grains are compressed in a way that is not known".to_owned()));
        }
        let (len, grain) = (sectors(u64_at(&raw, 12))?, sectors(u64_at(&raw, 20))?);
        let per_table = u32_at(&raw, 44);
        if !grain.is_power_of_two() || grain > GRAIN_MAX || !(1..=PER_TABLE_MAX).contains(&per_table) {
            return corrupt(format!("grains of {grain} bytes, {per_table} of them in a table"));
        }
        let directory = sectors(u64_at(&raw, 56))?;
        Ok(Header { flags, len, grain, directory, per_table: per_table.into(), text })
    }
}

/// Bytes of so many sectors.
fn sectors(count: u64) -> Result<u64, LayerError> {
    match count {
        AT_END => Ok(0),
        count => count
            .checked_mul(SECTOR)
            .ok_or_else(|| LayerError::Corrupt(format!("{count} sectors are more than 2^64 bytes"))),
    }
}

/// The disk in an image that begins like a sparse VMDK.
pub(in crate::disk) fn unpack(image: &Image) -> Result<Option<Image>, LayerError> {
    let header = Header::read(image)?;
    let (at, len) = header.text;
    let text = image.read_vec(at, usize::try_from(len.min(LONGEST)).unwrap_or(0))?;
    // A piece has no text, or room for one.
    if at == 0 || text.iter().all(|byte| *byte == 0) {
        return Err(foreign("it is a piece of a disk, which its description names".to_owned()));
    }
    if parse(&text)?.len() != 1 {
        return Err(foreign("it is one of several pieces of a disk".to_owned()));
    }
    let how = if header.flags & COMPRESSED != 0 { "stream-optimised" } else { "sparse" };
    let notes = vec![how.to_owned(), format!("grains of {}", header.grain)];
    let compression = (header.flags & COMPRESSED != 0).then_some("deflate");
    let about = About { format: "vmdk", notes, compression, ..About::default() };
    Ok(Some(lay_out(image, &header)?.stored_as(about)))
}

/// What a sparse piece of a disk holds.
pub(super) fn piece(image: &Image) -> Result<Image, LayerError> {
    if image.read_some(0, MAGIC.len())? != MAGIC {
        return corrupt("a piece that its description calls SPARSE is none");
    }
    lay_out(image, &Header::read(image)?)
}

fn lay_out(image: &Image, header: &Header) -> Result<Image, LayerError> {
    let mut disk = Disk::new(image, header.len, header.grain)?;
    let mut left = disk.blocks();
    let tables = left.div_ceil(header.per_table);
    entries(image, header.directory, tables, &mut |_, table: [u8; 4]| {
        let count = header.per_table.min(left);
        left -= count;
        match u64::from(u32::from_le_bytes(table)) {
            0 => disk.zero(count),
            table => entries(image, table * SECTOR, count, &mut |_, entry: [u8; 4]| {
                grain(image, header, &mut disk, u32::from_le_bytes(entry))
            }),
        }
    })?;
    disk.finish()
}

/// The next grain is where an entry of a grain table says.
fn grain(image: &Image, header: &Header, disk: &mut Disk<'_>, entry: u32) -> Result<(), LayerError> {
    let place = u64::from(entry) * SECTOR;
    match entry {
        0 => disk.zero(1),
        1 if header.flags & ZERO_GRAINS != 0 => disk.zero(1),
        _ if header.flags & COMPRESSED != 0 => {
            let marker = image.read_vec(place, MARKER)?;
            let stored = u32_at(part(&marker, 8, 4), 0);
            // What does not shrink grows by a few bytes.
            if stored == 0 || u64::from(stored) > GRAIN_MAX {
                return corrupt(format!("a compressed grain of {stored} bytes at byte {place}"));
            }
            disk.encoded(Codec::Gzip, place + MARKER as u64, stored)
        }
        _ => disk.data(place),
    }
}
