//! VHDX, the disks of Hyper-V: fixed and dynamic ones.
//! It never replays a log and never reads a disk that lies over another one: both are refused.
//!
//! Two headers, of which the newer counts, two region tables, a table of metadata, and a block allocation
//! table, in which an entry for a bitmap follows after every chunk of blocks.
//!
//! Followed: [MS-VHDX] 7.0.

use crc::{CRC_32_ISCSI, Crc, Table};

use super::blocks::{Disk, entries};
use crate::bytes::{field, part, u16_at, u32_at, u64_at};
use crate::image::Image;
use crate::layer::foreign::VHDX;
use crate::layer::{About, LayerError, corrupt, unsupported};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const HEADERS: [u64; 2] = [64 * KIB, 128 * KIB];
const HEADER: usize = 4 << 10;
const REGIONS: [u64; 2] = [192 * KIB, 256 * KIB];
/// Length of a region table, and of the table of metadata.
const TABLE: usize = 64 << 10;
/// The most entries of those.
const ENTRIES_MAX: usize = 2047;
/// Bytes between two places where an entry of the log may begin.
const LOG_UNIT: usize = 4 << 10;
/// The longest disk.
const LEN_MAX: u64 = 64 << 40;

/// A GUID as it is stored: the first three numbers of its text are little-endian.
const fn guid(text: u128) -> [u8; 16] {
    let [a, b, c, d, e, f, g, h, rest @ ..] = text.to_be_bytes();
    let [i, j, k, l, m, n, o, p] = rest;
    [d, c, b, a, f, e, h, g, i, j, k, l, m, n, o, p]
}

const BLOCK_TABLE: [u8; 16] = guid(0x2dc2_7766_f623_4200_9d64_115e_9bfd_4a08);
const METADATA: [u8; 16] = guid(0x8b7c_a206_4790_4b9a_b8fe_575f_050f_886e);
const PARAMETERS: [u8; 16] = guid(0xcaa1_6737_fa36_4d43_b3b6_33f0_aa44_e76b);
const DISK_SIZE: [u8; 16] = guid(0x2fa5_4224_cd1b_4876_b211_5dbe_d83b_f4b8);
const DISK_ID: [u8; 16] = guid(0xbeca_12ab_b2e6_4523_93ef_c309_e000_c746);
const LOGICAL_SECTOR: [u8; 16] = guid(0x8141_bf1d_a96f_4709_ba47_f233_a8fa_ab5f);
const PHYSICAL_SECTOR: [u8; 16] = guid(0xcda3_48c7_445d_4471_9cc9_e988_5251_c556);
const PARENT: [u8; 16] = guid(0xa8d3_5f2d_b30b_454d_abf7_d3d8_4834_ab0c);

/// The disk in an image that begins like a VHDX.
pub(super) fn unpack(image: &Image) -> Result<Option<Image>, LayerError> {
    check_log(image, &header(image)?)?;
    let (table, metadata) = regions(image)?;
    let Metadata { len, block, fixed, sector } = Metadata::read(image, metadata)?;
    let mut disk = Disk::new(image, len, block)?;
    // After every chunk of blocks comes an entry for a bitmap, which only disks over others use.
    let chunk = (u64::from(sector) << 23) / block;
    let blocks = disk.blocks();
    let count = blocks + blocks.saturating_sub(1) / chunk;
    if count > table.len / 8 {
        return corrupt(format!("a block table of {} bytes for {blocks} blocks", table.len));
    }
    entries(image, table.start, count, &mut |number, entry: [u8; 8]| {
        let entry = u64::from_le_bytes(entry);
        match entry & 7 {
            _ if number % (chunk + 1) == chunk => Ok(()),
            // Never written, unknown, zeroes, discarded (twice: an older number).
            0..=3 | 5 => disk.zero(1),
            6 => disk.data(entry & !(MIB - 1)),
            state => corrupt(format!("a block in the state {state}")),
        }
    })?;
    let how = if fixed { "fixed" } else { "dynamic" };
    let notes = vec![how.to_owned(), format!("blocks of {block}"), format!("sectors of {sector}")];
    let about = About { format: "vhdx", notes, ..About::default() };
    Ok(Some(disk.finish()?.with_block_size(sector).stored_as(about)))
}

/// Whether bytes have a signature, and a correct checksum behind it.
fn is_summed(bytes: &[u8], signature: &[u8]) -> bool {
    static CRC: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_ISCSI);
    let mut sum = CRC.digest();
    sum.update(part(bytes, 0, 4));
    sum.update(&[0; 4]);
    sum.update(bytes.get(8..).unwrap_or_default());
    bytes.starts_with(signature) && sum.finalize() == u32_at(bytes, 4)
}

/// The header that counts.
fn header(image: &Image) -> Result<Vec<u8>, LayerError> {
    let mut newest: Option<Vec<u8>> = None;
    for at in HEADERS {
        let header = image.read_vec(at, HEADER)?;
        let sequence = |header: &[u8]| u64_at(header, 8);
        if is_summed(&header, b"head")
            && newest.as_deref().is_none_or(|old| sequence(old) < sequence(&header))
        {
            newest = Some(header);
        }
    }
    let header =
        newest.ok_or_else(|| LayerError::Corrupt("both headers of the VHDX are wrong".to_owned()))?;
    match u16_at(&header, 66) {
        1 => Ok(header),
        version => unsupported(format!("VHDX of version {version}")),
    }
}

/// Refuses an image whose log holds what its tables do not have yet.
fn check_log(image: &Image, header: &[u8]) -> Result<(), LayerError> {
    let log: [u8; 16] = field(header, 48);
    if log == [0; 16] {
        return Ok(());
    }
    let (mut left, mut at) = (u64::from(u32_at(header, 68)), u64_at(header, 72));
    while left > 0 {
        let bytes = image.read_vec(at, usize::try_from(left.min(TABLE as u64)).unwrap_or(TABLE))?;
        let is_entry = |bytes: &[u8]| bytes.starts_with(b"loge") && field(bytes, 32) == log;
        if bytes.chunks(LOG_UNIT).any(is_entry) {
            let why = "its log has to be replayed first: `qemu-img check -r all` does so".to_owned();
            return Err(LayerError::Foreign { format: &VHDX, why: Some(why) });
        }
        left -= bytes.len() as u64;
        at = at.saturating_add(bytes.len() as u64);
    }
    Ok(())
}

/// A part of the file.
struct Region {
    start: u64,
    len: u64,
}

/// Where the block table and the metadata are.
fn regions(image: &Image) -> Result<(Region, Region), LayerError> {
    let mut table = Vec::new();
    for at in REGIONS {
        table = image.read_vec(at, TABLE)?;
        if is_summed(&table, b"regi") {
            break;
        }
        table.clear();
    }
    if table.is_empty() {
        return corrupt("both region tables of the VHDX are wrong");
    }
    let count = usize::try_from(u32_at(&table, 8)).unwrap_or(usize::MAX);
    if count > ENTRIES_MAX {
        return corrupt(format!("a region table of {count} entries"));
    }
    let (mut blocks, mut metadata) = (None, None);
    for entry in part(&table, 16, count * 32).as_chunks::<32>().0 {
        let region = Region { start: u64_at(entry, 16), len: u32_at(entry, 24).into() };
        match field(entry, 0) {
            BLOCK_TABLE => blocks = Some(region),
            METADATA => metadata = Some(region),
            _ if u32_at(entry, 28) & 1 != 0 => {
                return unsupported("VHDX with a required region of a new kind");
            }
            _ => {}
        }
    }
    let missing = || LayerError::Corrupt("a VHDX without block table or metadata".to_owned());
    blocks.zip(metadata).ok_or_else(missing)
}

/// What the metadata say.
struct Metadata {
    /// Bytes of the disk.
    len: u64,
    /// Bytes of a block.
    block: u64,
    /// Whether all blocks have a place.
    fixed: bool,
    /// Bytes of the disk's sectors.
    sector: u32,
}

impl Metadata {
    fn read(image: &Image, region: Region) -> Result<Metadata, LayerError> {
        let table = image.read_vec(region.start, TABLE)?;
        let count = usize::from(u16_at(&table, 10));
        if !table.starts_with(b"metadata") || count > ENTRIES_MAX {
            return corrupt("an impossible table of a VHDX's metadata");
        }
        let (mut parameters, mut len, mut sector) = (None, None, None);
        for entry in part(&table, 32, count * 32).as_chunks::<32>().0 {
            let offset = u64::from(u32_at(entry, 16));
            let item = || {
                let at = region.start.checked_add(offset).filter(|_| offset < region.len);
                let at = at.ok_or_else(|| LayerError::Corrupt("metadata outside their region".to_owned()))?;
                image.read_vec(at, 8)
            };
            match field(entry, 0) {
                PARAMETERS => parameters = Some(item()?),
                DISK_SIZE => len = Some(u64_at(&item()?, 0)),
                LOGICAL_SECTOR => sector = Some(u32_at(&item()?, 0)),
                PHYSICAL_SECTOR | DISK_ID | PARENT => {}
                _ if u32_at(entry, 24) & 4 != 0 => {
                    return unsupported("VHDX with required metadata of a new kind");
                }
                _ => {}
            }
        }
        let missing = || LayerError::Corrupt("a VHDX without its disk's size".to_owned());
        let (parameters, len) = parameters.zip(len).ok_or_else(missing)?;
        let (sector, flags) = (sector.ok_or_else(missing)?, u32_at(&parameters, 4));
        let block = u64::from(u32_at(&parameters, 0));
        if flags & 2 != 0 {
            let why = Some("it is a differencing disk over another one".to_owned());
            return Err(LayerError::Foreign { format: &VHDX, why });
        }
        let sound = block.is_power_of_two() && (MIB..=256 * MIB).contains(&block);
        if !sound || !matches!(sector, 512 | 4096) || len > LEN_MAX || !len.is_multiple_of(sector.into()) {
            return corrupt(format!("a VHDX of {len} bytes with blocks of {block} and sectors of {sector}"));
        }
        Ok(Metadata { len, block, fixed: flags & 1 != 0, sector })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guid_is_stored_with_its_numbers_turned() {
        assert_eq!(BLOCK_TABLE[..8], [0x66, 0x77, 0xc2, 0x2d, 0x23, 0xf6, 0x00, 0x42]);
        assert_eq!(BLOCK_TABLE[8..], [0x9d, 0x64, 0x11, 0x5e, 0x9b, 0xfd, 0x4a, 0x08]);
    }
}
