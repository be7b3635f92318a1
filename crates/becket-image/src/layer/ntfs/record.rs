//! A record of the master file table, and the attributes in it.
//! It never takes a record for whole whose sectors were not written together.

use std::ops::Range;

use crate::bytes::{part, u8_at, u16_at, u32_at, u64_at};
use crate::layer::{LayerError, corrupt};

/// The bits of a reference that are the number of a record; those above count how often it was used.
pub(super) const NUMBER: u64 = (1 << 48) - 1;

/// In the value of a name: which kind it is of, and the kind that Windows makes up for DOS.
pub(super) const NAMESPACE: usize = 65;
pub(super) const DOS: u8 = 2;

/// What attributes are.
pub(super) mod kind {
    pub(in super::super) const STANDARD_INFORMATION: u32 = 0x10;
    pub(in super::super) const LIST: u32 = 0x20;
    pub(in super::super) const FILE_NAME: u32 = 0x30;
    pub(in super::super) const VOLUME_NAME: u32 = 0x60;
    pub(in super::super) const VOLUME_INFORMATION: u32 = 0x70;
    pub(in super::super) const DATA: u32 = 0x80;
    pub(in super::super) const INDEX_ROOT: u32 = 0x90;
    pub(in super::super) const INDEX_ALLOCATION: u32 = 0xa0;
    pub(in super::super) const BITMAP: u32 = 0xb0;
    pub(in super::super) const REPARSE: u32 = 0xc0;
    pub(super) const END: u32 = !0;
}

/// A record, or a block of a directory: several sectors that were written together.
#[derive(Debug)]
pub(super) struct Record {
    /// Its bytes as they are meant.
    pub(super) bytes: Vec<u8>,
    /// How long a sector is.
    stride: usize,
    /// Where the last two bytes of each sector are stored; the bytes at that place mark the write.
    saved: usize,
}

/// An attribute in a record.
#[derive(Debug, Clone)]
pub(super) struct Attribute {
    pub(super) kind: u32,
    /// UTF-16.
    pub(super) name: Vec<u8>,
    pub(super) flags: u16,
    pub(super) form: Form,
}

/// Where the value of an attribute is.
#[derive(Debug, Clone)]
pub(super) enum Form {
    /// In the record, at these bytes.
    Resident(Range<usize>),
    /// In clusters; a value in many runs has several attributes.
    Runs {
        /// The first cluster of the value that this attribute speaks of.
        first: u64,
        /// The bytes of the record that name the clusters.
        runs: Range<usize>,
        /// Clusters that are compressed together, as a power of two; 0 where none are.
        unit: u8,
        /// Length in bytes, and how many of them were written. Only where `first` is 0.
        size: u64,
        valid: u64,
    },
}

impl Record {
    /// Puts each sector's last bytes back, which a mark stands for on disk.
    pub(super) fn parse(magic: &[u8], mut bytes: Vec<u8>) -> Result<Record, LayerError> {
        let (saved, count) = (usize::from(u16_at(&bytes, 4)), usize::from(u16_at(&bytes, 6)));
        let sectors = count.saturating_sub(1);
        let torn = || LayerError::Corrupt("a record that was not written as a whole".to_owned());
        if !bytes.starts_with(magic) || sectors == 0 || !bytes.len().is_multiple_of(sectors * 256) {
            return corrupt("a record that is none");
        }
        let stride = bytes.len() / sectors;
        let marks: Vec<[u8; 2]> = part(&bytes, saved, 2 * count).as_chunks().0.to_vec();
        let Some((mark, ends)) = marks.split_first().filter(|(_, ends)| ends.len() == sectors) else {
            return Err(torn());
        };
        for (sector, end) in bytes.chunks_exact_mut(stride).zip(ends) {
            match sector.last_chunk_mut() {
                Some(last) if last == mark => *last = *end,
                _ => return Err(torn()),
            }
        }
        Ok(Record { bytes, stride, saved })
    }

    /// How often it was used.
    pub(super) fn sequence(&self) -> u64 {
        u16_at(&self.bytes, 16).into()
    }

    /// Whether a file has it.
    pub(super) fn is_used(&self) -> bool {
        u16_at(&self.bytes, 22) & 1 != 0
    }

    /// Whether it is a directory's.
    pub(super) fn is_directory(&self) -> bool {
        u16_at(&self.bytes, 22) & 2 != 0
    }

    /// The number of the record that this one goes on for; none for the first of a file.
    pub(super) fn base(&self) -> Option<u64> {
        let base = u64_at(&self.bytes, 32);
        (base != 0).then_some(base & NUMBER)
    }

    /// Its attributes, in order.
    pub(super) fn attributes(&self) -> Result<Vec<Attribute>, LayerError> {
        let mut all = Vec::new();
        let used = usize::try_from(u32_at(&self.bytes, 24)).unwrap_or(0);
        let bytes = part(&self.bytes, 0, used);
        let mut at = usize::from(u16_at(bytes, 20));
        while bytes.len() >= at + 8 && u32_at(bytes, at) != kind::END {
            let len = usize::try_from(u32_at(bytes, at + 4)).unwrap_or(0);
            let raw = part(bytes, at, len);
            if raw.len() < len || len < 24 {
                return corrupt("an attribute does not fit its record");
            }
            all.push(attribute(at, raw)?);
            at += len;
        }
        Ok(all)
    }

    /// Where the bytes `range` of this record are on disk, as first byte and length in it: the last two of
    /// each sector are elsewhere.
    pub(super) fn stored(&self, range: Range<usize>) -> Vec<(usize, usize)> {
        let mut pieces = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let (sector, within) = (at / self.stride, at % self.stride);
            let saved = within.checked_sub(self.stride - 2);
            let (from, most) = match saved {
                Some(byte) => (self.saved + 2 * (sector + 1) + byte, 2 - byte),
                None => (at, self.stride - 2 - within),
            };
            let len = most.min(range.end - at);
            pieces.push((from, len));
            at += len;
        }
        pieces
    }
}

/// An attribute, from its own bytes, which begin at byte `at` of the record.
fn attribute(at: usize, raw: &[u8]) -> Result<Attribute, LayerError> {
    let name = part(raw, u16_at(raw, 10).into(), 2 * usize::from(u8_at(raw, 9))).to_vec();
    let form = if u8_at(raw, 8) == 0 {
        let (from, len) = (usize::from(u16_at(raw, 20)), usize::try_from(u32_at(raw, 16)).unwrap_or(0));
        if from.checked_add(len).is_none_or(|end| end > raw.len()) {
            return corrupt("the value of an attribute does not fit its record");
        }
        Form::Resident(at + from..at + from + len)
    } else {
        let runs = usize::from(u16_at(raw, 32));
        if raw.len() < 64 || runs > raw.len() {
            return corrupt("an attribute does not fit its record");
        }
        Form::Runs {
            first: u64_at(raw, 16),
            runs: at + runs..at + raw.len(),
            unit: u8_at(raw, 34),
            size: u64_at(raw, 48),
            valid: u64_at(raw, 56),
        }
    };
    Ok(Attribute { kind: u32_at(raw, 0), name, flags: u16_at(raw, 12), form })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record of two sectors whose bytes count up.
    fn record() -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..1024_u32).map(|n| n as u8).collect();
        bytes[..8].copy_from_slice(b"FILE\x30\0\x03\0");
        bytes[0x30..0x36].copy_from_slice(&[7, 7, 0xaa, 0xbb, 0xcc, 0xdd]);
        bytes[510..512].copy_from_slice(&[7, 7]);
        bytes[1022..].copy_from_slice(&[7, 7]);
        bytes
    }

    #[test]
    fn the_ends_of_sectors_are_where_they_were_saved() {
        let disk = record();
        let record = Record::parse(b"FILE", disk.clone()).unwrap();
        assert_eq!(record.bytes[510..512], [0xaa, 0xbb]);
        assert_eq!(record.bytes[1022..], [0xcc, 0xdd]);
        for range in [100..1024, 100..510, 100..511, 511..512, 511..1023, 512..1022, 5..5] {
            let pieces = record.stored(range.clone());
            let bytes: Vec<u8> = pieces.iter().flat_map(|(at, len)| &disk[*at..at + len]).copied().collect();
            assert_eq!(bytes, record.bytes[range.clone()], "{range:?}");
        }
    }

    #[test]
    fn a_torn_record_is_an_error() {
        let mut torn = record();
        torn[1023] = 8;
        assert!(Record::parse(b"FILE", torn).is_err());
        let mut other = record();
        other[0] = b'B';
        assert!(Record::parse(b"FILE", other).is_err());
        let mut none = record();
        none[6] = 0;
        assert!(Record::parse(b"FILE", none).is_err());
    }
}
