//! Zstandard files of many frames: with the seek table of the seekable format, or with the sizes in each
//! frame's header.
//! It never decodes a frame to learn how long it is.
//!
//! The seek table's own checksums (XXH64 of each frame) are not compared; those of the frames are, if they
//! have any.
//!
//! Followed: RFC 8878, and contrib/seekable_format/zstd_seekable_compression_format.md of zstd 1.5.7.

use super::pieces::Pieces;
use crate::bytes::{Reach, field, part, u8_at, u16_at, u32_at, u64_at};
use crate::image::{Image, PIECES_MAX};
use crate::layer::{LayerError, corrupt, unsupported};

pub(super) const MAGIC: u32 = 0xfd2f_b528;
/// Frames that a decoder passes over have one of sixteen numbers.
pub(super) const SKIPPABLE: u32 = 0x184d_2a50;
pub(super) const SKIPPABLE_LAST: u32 = SKIPPABLE + 15;
/// The one whose frame is a seek table, and what it ends with.
const SEEK_TABLE: u32 = SKIPPABLE + 14;
const SEEKABLE: u32 = 0x8f92_eab1;
const SEEK_FOOTER: u64 = 9;
/// The most blocks that are passed over where one of them is too long. They have at most 128 KiB each.
const BLOCKS_MAX: u32 = 1 << 16;
/// Longest header of a frame.
const HEADER_MAX: usize = 18;

/// Reports the frames.
pub(super) fn read(image: &Image, pieces: &mut Pieces) -> Result<(), LayerError> {
    match image.len().checked_sub(SEEK_FOOTER) {
        Some(at) => {
            let footer = image.read_vec(at, 9)?;
            match u32_at(&footer, 5) {
                SEEKABLE => by_table(image, &footer, pieces),
                _ => by_headers(image, pieces),
            }
        }
        None => by_headers(image, pieces),
    }
}

fn by_table(image: &Image, footer: &[u8], pieces: &mut Pieces) -> Result<(), LayerError> {
    let (count, flags) = (u32_at(footer, 0), u8_at(footer, 4));
    if flags & 0x7c != 0 {
        return unsupported(format!("a seek table with flags {flags:#x}"));
    }
    if count as usize > PIECES_MAX {
        return Err(LayerError::Limit(format!("it has more than {PIECES_MAX} frames")));
    }
    let entry = if flags & 0x80 == 0 { 8 } else { 12 };
    let len = u64::from(count) * entry + SEEK_FOOTER;
    let start = image.len().checked_sub(len + 8);
    let start =
        start.ok_or_else(|| LayerError::Corrupt("its seek table is longer than the file".to_owned()))?;
    let table = image.read_vec(start, usize::try_from(len + 8).unwrap_or(usize::MAX))?;
    if u32_at(&table, 0) != SEEK_TABLE || u64::from(u32_at(&table, 4)) != len {
        return corrupt("its seek table is damaged");
    }
    let mut at = 0;
    for index in 0..count as usize {
        let entry = part(&table, 8 + index * usize::try_from(entry).unwrap_or(8), 8);
        let (len, yields) = (u32_at(entry, 0), u32_at(entry, 4));
        if len == 0 && yields > 0 {
            return corrupt("its seek table has a frame without bytes");
        }
        pieces.push(at, len.into(), yields.into())?;
        at += u64::from(len);
    }
    if at != start {
        return corrupt(format!("its seek table describes {at} bytes, but the file has {start}"));
    }
    Ok(())
}

fn by_headers(image: &Image, pieces: &mut Pieces) -> Result<(), LayerError> {
    let mut window = Window { image, start: 0, bytes: Vec::new() };
    let mut at = 0;
    while at < image.len() {
        let head: [u8; HEADER_MAX] = window.take(at)?;
        let len = match u32_at(&head, 0) {
            SKIPPABLE..=SKIPPABLE_LAST => 8 + u64::from(u32_at(&head, 4)),
            MAGIC => {
                let (header, yields) = frame_header(&head, pieces)?;
                // Before its blocks are looked for: there may be very many.
                let fits = pieces.fits(yields);
                if fits.is_err() && image.reach() != Reach::Near {
                    return fits;
                }
                let blocks = frame_blocks(&mut window, at + header, fits.is_err());
                // Whether frames follow is a detail where it can only be read from its start.
                let len = header + blocks.or_else(|error| fits.and(Err(error)))?;
                let sum = if u8_at(&head, 4) & 4 == 0 { 0 } else { 4 };
                pieces.push(at, len + sum, yields)?;
                len + sum
            }
            _ => return corrupt("between its frames there is something else (is it cut short?)"),
        };
        at = at.saturating_add(len);
    }
    if at > image.len() {
        return corrupt("its last frame is cut short");
    }
    Ok(())
}

/// The length of a frame's header, and how many bytes the frame yields.
fn frame_header(head: &[u8; HEADER_MAX], pieces: &Pieces) -> Result<(u64, u64), LayerError> {
    let flags = u8_at(head, 4);
    if flags & 8 != 0 {
        return unsupported("a Zstandard frame with flags that are not known");
    }
    if flags & 3 != 0 {
        return unsupported("a Zstandard frame that needs a dictionary");
    }
    let single = flags & 0x20 != 0;
    let at = if single { 5 } else { 6 };
    let (len, yields) = match (flags >> 6, single) {
        (0, false) => return pieces.sequential("its frames do not say how long they are", None),
        (0, true) => (1, u8_at(head, at).into()),
        (1, _) => (2, u64::from(u16_at(head, at)) + 256),
        (2, _) => (4, u32_at(head, at).into()),
        _ => (8, u64_at(head, at)),
    };
    Ok((at as u64 + len, yields))
}

/// The length of a frame's blocks, the first of which is at `start`. Where only few are to be looked at, it
/// is an error if they are many.
fn frame_blocks(window: &mut Window<'_>, start: u64, few: bool) -> Result<u64, LayerError> {
    let (mut at, mut count) = (start, 0);
    loop {
        count += 1;
        if few && count > BLOCKS_MAX {
            return Err(LayerError::Limit("a frame of very many blocks".to_owned()));
        }
        if at >= window.image.len() {
            return corrupt("its last frame is cut short");
        }
        let [low, middle, high] = window.take(at)?;
        let header = u32::from_le_bytes([low, middle, high, 0]);
        at += match header >> 1 & 3 {
            // One byte stands for many.
            1 => 4,
            0 | 2 => 3 + u64::from(header >> 3),
            _ => return corrupt("a block of a frame is of no known kind"),
        };
        if header & 1 == 1 {
            return Ok(at - start);
        }
    }
}

/// A part of an image that was read, for looks that lie near each other.
struct Window<'a> {
    image: &'a Image,
    start: u64,
    bytes: Vec<u8>,
}

impl Window<'_> {
    /// The bytes at `at`; zeroes behind the end.
    fn take<const N: usize>(&mut self, at: u64) -> Result<[u8; N], LayerError> {
        let inside = |start: u64, len: usize| at >= start && at - start + N as u64 <= len as u64;
        if !inside(self.start, self.bytes.len()) {
            // Of long blocks no more is read than their heads.
            let near = at.saturating_sub(self.start) < 4096;
            self.bytes = self.image.read_some(at, if near { 4096 } else { HEADER_MAX })?;
            if self.bytes.len() < N {
                self.bytes.resize(N, 0);
            }
            self.start = at;
        }
        Ok(field(&self.bytes, usize::try_from(at - self.start).unwrap_or(usize::MAX)))
    }
}
