//! .xz files: one or more streams, each with an index of its blocks behind them.
//! It never reads a block: what the index says of it is checked when it is decoded.
//!
//! Followed: The .xz File Format 1.2.1.

use super::pieces::Pieces;
use crate::bytes::{part, u8_at, u16_at, u32_at};
use crate::image::{Image, PIECES_MAX};
use crate::layer::{LayerError, corrupt, unsupported};
use crate::varint;

pub(super) const MAGIC: &[u8] = b"\xfd7zXZ\0";
/// Of a stream's header, and of its footer.
const EDGE: u64 = 12;
/// The most zeroes behind a stream that are passed over, in bytes: what a device has behind a file.
const PADDING_MAX: usize = 1 << 20;

/// A block as the index has it.
struct Record {
    at: u64,
    len: u64,
    yields: u64,
}

/// Reports the blocks of all streams. They are found from the last to the first.
pub(super) fn read(image: &Image, pieces: &mut Pieces) -> Result<(), LayerError> {
    let mut streams = Vec::new();
    let mut held = image.budget().held();
    let mut end = image.len();
    let mut room = PIECES_MAX;
    while end > 0 {
        end = before_padding(image, end)?;
        let (start, records) = stream(image, end, room)?;
        // A stream counts as well, so that no file is made of very many without a block.
        room = room.saturating_sub(records.len() + 1);
        held.grow((records.len() + 1) as u64 * size_of::<Record>() as u64, "an index of blocks")?;
        streams.push(records);
        end = start;
    }
    for Record { at, len, yields } in streams.into_iter().rev().flatten() {
        pieces.push(at, len, yields)?;
    }
    Ok(())
}

/// Where the padding begins that ends at `end`.
fn before_padding(image: &Image, end: u64) -> Result<u64, LayerError> {
    let len = usize::try_from(end).unwrap_or(usize::MAX).min(PADDING_MAX);
    // A stream ends with what is not a zero, so nearly always the first look is enough.
    for len in [len.min(16), len] {
        let tail = image.read_vec(end - len as u64, len)?;
        if let Some(last) = tail.iter().rposition(|byte| *byte != 0) {
            let padding = (len - 1 - last) as u64;
            if !padding.is_multiple_of(4) {
                return corrupt("it does not end with an index (is it cut short?)");
            }
            return Ok(end - padding);
        }
    }
    corrupt("an .xz file with nothing but zeroes in it")
}

/// The stream that ends at `end`: where it starts, and its blocks, of which there is room for so many.
fn stream(image: &Image, end: u64, room: usize) -> Result<(u64, Vec<Record>), LayerError> {
    let short = || LayerError::Corrupt("it does not end with an index (is it cut short?)".to_owned());
    let footer_at = end.checked_sub(EDGE).ok_or_else(short)?;
    let footer = image.read_vec(footer_at, 12)?;
    if part(&footer, 10, 2) != b"YZ" || crc32fast::hash(part(&footer, 4, 6)) != u32_at(&footer, 0) {
        return Err(short());
    }
    let flags = u16_at(&footer, 8);
    match flags.to_le_bytes() {
        // Without a check, CRC32, CRC64, SHA-256.
        [0, 0 | 1 | 4 | 10] => {}
        _ => return unsupported(format!("an .xz file with flags {flags:#06x}")),
    }
    let index_len = (u64::from(u32_at(&footer, 4)) + 1) * 4;
    let index_at = footer_at.checked_sub(index_len).ok_or_else(short)?;
    let index = image.read_vec(index_at, usize::try_from(index_len).unwrap_or(usize::MAX))?;
    let mut records = records(&index, room)?;
    let blocks = records.iter().try_fold(0_u64, |sum, record| sum.checked_add(record.len));
    let lying = || LayerError::Corrupt("its index describes more than the file has".to_owned());
    let mut at = blocks.and_then(|blocks| index_at.checked_sub(blocks)).ok_or_else(lying)?;
    let start = at.checked_sub(EDGE).ok_or_else(lying)?;
    let header = image.read_vec(start, 12)?;
    let sound = header.starts_with(MAGIC)
        && u16_at(&header, 6) == flags
        && crc32fast::hash(part(&header, 6, 2)) == u32_at(&header, 8);
    if !sound {
        return corrupt("its index does not fit its length");
    }
    for record in &mut records {
        record.at = at;
        at += record.len;
    }
    Ok((start, records))
}

/// Reads an index; where the blocks are is not known yet.
fn records(index: &[u8], room: usize) -> Result<Vec<Record>, LayerError> {
    let fields = part(index, 0, index.len().saturating_sub(4));
    if u8_at(index, 0) != 0 || crc32fast::hash(fields) != u32_at(index, fields.len()) {
        return corrupt("the checksum of its index does not match");
    }
    let mut rest = fields.get(1..).unwrap_or_default();
    let damaged = || LayerError::Corrupt("its index is damaged".to_owned());
    let count = varint::take(&mut rest).ok_or_else(damaged)?;
    if count > room as u64 {
        return Err(LayerError::Limit(format!("it has more than {PIECES_MAX} blocks")));
    }
    let mut records = Vec::new();
    for _ in 0..count {
        let unpadded = varint::take(&mut rest).ok_or_else(damaged)?;
        let yields = varint::take(&mut rest).ok_or_else(damaged)?;
        let len = unpadded.checked_next_multiple_of(4).filter(|_| unpadded >= 5).ok_or_else(damaged)?;
        records.push(Record { at: 0, len, yields });
    }
    if rest.len() > 3 || rest.iter().any(|byte| *byte != 0) {
        return Err(damaged());
    }
    Ok(records)
}
