//! Reads a GUID partition table.
//! It never uses a header or an entry array whose checksum is wrong.

use std::io;

use super::table::{NUMBERS_END, Partition, RangeError, Table, byte_range};
use crate::bytes::{ReadAt, field, u32_at, u64_at, utf16};

const SIGNATURE: &[u8; 8] = b"EFI PART";
/// Bytes of the header that the specification defines.
const HEADER_LEN: usize = 92;
/// Bytes of an entry that the specification defines.
const ENTRY_LEN: usize = 128;
/// Longest entry array that is read. The usual one has 16 KiB; the kernel's limit is the same.
const ARRAY_MAX: u64 = 4 << 20;

/// Why a copy of the table cannot be used.
#[derive(Debug, thiserror::Error)]
enum Bad {
    #[error("there is none")]
    Missing,
    #[error("its header is {0} bytes long")]
    HeaderLen(u32),
    #[error("its header's checksum is wrong")]
    HeaderChecksum,
    #[error("it says that it lies in sector {0}")]
    Misplaced(u64),
    #[error("it speaks of sectors beyond the end of the image (is the image cut short?)")]
    BeyondEnd,
    #[error("it has {count} entries of {size} bytes")]
    Entries { count: u32, size: u32 },
    #[error("its entries' checksum is wrong")]
    EntriesChecksum,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Reads the table at the sector sizes that come into question; the first whole copy is taken.
pub(super) fn read(image: &dyn ReadAt, len: u64, preferred: u32) -> io::Result<Table> {
    let mut sectors = vec![preferred];
    sectors.extend([512, 4096].into_iter().filter(|sector| *sector != preferred));
    let mut primary_fault = None;
    for &sector in &sectors {
        match read_copy(image, len, sector, 1) {
            Ok(table) => return Ok(table),
            Err(Bad::Io(error)) => return Err(error),
            Err(Bad::Missing) => {}
            Err(bad) => primary_fault = primary_fault.or(Some(bad.to_string())),
        }
    }
    let fault = primary_fault.unwrap_or_else(|| Bad::Missing.to_string());
    for &sector in &sectors {
        let Some(last) = (len / u64::from(sector)).checked_sub(1).filter(|last| *last > 1) else { continue };
        match read_copy(image, len, sector, last) {
            Ok(mut table) => {
                table.warnings.insert(
                    0,
                    format!("the primary GPT is not usable ({fault}): its backup is used; repair it with gdisk or sgdisk"),
                );
                return Ok(table);
            }
            Err(Bad::Io(error)) => return Err(error),
            Err(_) => {}
        }
    }
    let warning = format!("no partitions: the GPT that the protective MBR announces is not usable ({fault})");
    Ok(Table { warnings: vec![warning], ..Table::default() })
}

/// Reads the copy whose header is in sector `lba`.
fn read_copy(image: &dyn ReadAt, len: u64, sector: u32, lba: u64) -> Result<Table, Bad> {
    let (start, header_room) = byte_range(lba, 1, sector, len).map_err(|_| Bad::Missing)?;
    let mut header = vec![0; usize::try_from(header_room).map_err(|_| Bad::Missing)?];
    image.read_at(&mut header, start)?;
    if !header.starts_with(SIGNATURE) {
        return Err(Bad::Missing);
    }
    let header_len = u32_at(&header, 12);
    let covered = usize::try_from(header_len).ok().filter(|covered| *covered >= HEADER_LEN);
    let covered = covered.and_then(|covered| header.get(..covered)).ok_or(Bad::HeaderLen(header_len))?;
    // The checksum counts itself as zero.
    let mut crc = crc32fast::Hasher::new();
    crc.update(covered.get(..16).unwrap_or_default());
    crc.update(&[0; 4]);
    crc.update(covered.get(20..).unwrap_or_default());
    if crc.finalize() != u32_at(&header, 16) {
        return Err(Bad::HeaderChecksum);
    }
    if u64_at(&header, 24) != lba {
        return Err(Bad::Misplaced(u64_at(&header, 24)));
    }
    let last_sector = len / u64::from(sector) - 1;
    let (first_usable, last_usable) = (u64_at(&header, 40), u64_at(&header, 48));
    if first_usable > last_sector || last_usable > last_sector || first_usable > last_usable {
        return Err(Bad::BeyondEnd);
    }
    let entries = read_entries(image, len, sector, &header)?;
    let size = u32_at(&header, 84) as usize;
    let mut table = Table { sector: Some(sector), ..Table::default() };
    for (number, entry) in (1_u32..).zip(entries.chunks_exact(size)) {
        add_entry(&mut table, number, entry, sector, len);
    }
    Ok(table)
}

/// Reads the entry array that `header` speaks of, whole, with its checksum checked.
fn read_entries(image: &dyn ReadAt, len: u64, sector: u32, header: &[u8]) -> Result<Vec<u8>, Bad> {
    let (count, size) = (u32_at(header, 80), u32_at(header, 84));
    let total = u64::from(count) * u64::from(size);
    if count == 0 || (size as usize) < ENTRY_LEN || !size.is_power_of_two() || total > ARRAY_MAX {
        return Err(Bad::Entries { count, size });
    }
    let start = u64_at(header, 72).checked_mul(sector.into()).ok_or(Bad::BeyondEnd)?;
    if start.checked_add(total).is_none_or(|end| end > len) {
        return Err(Bad::BeyondEnd);
    }
    let mut entries = vec![0; usize::try_from(total).map_err(|_| Bad::Entries { count, size })?];
    image.read_at(&mut entries, start)?;
    if crc32fast::hash(&entries) != u32_at(header, 88) {
        return Err(Bad::EntriesChecksum);
    }
    Ok(entries)
}

/// Takes over one entry, when it is used and sound.
fn add_entry(table: &mut Table, number: u32, entry: &[u8], sector: u32, len: u64) {
    let kind: [u8; 16] = field(entry, 0);
    if kind == [0; 16] {
        return;
    }
    if number >= NUMBERS_END {
        table
            .warnings
            .push(format!("partition {number} is left out: the kernel counts to {}", NUMBERS_END - 1));
        return;
    }
    let (first, last) = (u64_at(entry, 32), u64_at(entry, 40));
    let range = match last.checked_sub(first) {
        None => Err(RangeError::Backwards),
        Some(distance) => match distance.checked_add(1) {
            None => Err(RangeError::BeyondEnd),
            Some(count) => byte_range(first, count, sector, len),
        },
    };
    match range {
        Ok((start, len)) => table.partitions.push(Partition {
            number,
            start,
            len,
            label: label(entry),
            uuid: Some(guid(field(entry, 16))),
            type_: guid(kind),
        }),
        Err(error) => table.warnings.push(format!("partition {number} is left out: {error}")),
    }
}

/// The name of an entry; what is not Unicode becomes U+FFFD.
fn label(entry: &[u8]) -> Option<String> {
    let units = entry.get(56..ENTRY_LEN)?.chunks_exact(2).map(|unit| u16::from_le_bytes(field(unit, 0)));
    let name = utf16(units.take_while(|unit| *unit != 0));
    (!name.is_empty()).then_some(name)
}

/// A GUID as people write it: the first three fields are little-endian.
fn guid(bytes: [u8; 16]) -> String {
    let number = u128::from_be_bytes(bytes);
    let (a, b, c) =
        (u32_at(&bytes, 0), u16::from_le_bytes(field(&bytes, 4)), u16::from_le_bytes(field(&bytes, 6)));
    let d = (number >> 48) & 0xffff;
    let e = number & 0xffff_ffff_ffff;
    format!("{a:08x}-{b:04x}-{c:04x}-{d:04x}-{e:012x}")
}
