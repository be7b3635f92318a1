//! Reads the partition table of an image: GPT and MBR, as the kernel counts partitions.
//! It never trusts a number that it read, and reads and allocates a bounded amount whatever the table says.
//!
//! The parsers are our own. The crates gptman and mbrman were looked at: they edit tables well, but here an
//! untrusted image decides about the process. gptman reserves memory for as many entries as the header
//! claims (2^32) and multiplies addresses unchecked, mbrman follows a chain of logical partitions as long as
//! the disk allows, adds block numbers unchecked and unwraps; neither says which of two damaged copies was
//! taken. What is needed here is small: two formats, read only, bounded.
//!
//! Followed: the UEFI specification 2.10, chapter 5, and where it is silent what the kernel does
//! (`block/partitions/{efi,msdos}.c`), because a table must mean the same on every transport.

mod gpt;
mod mbr;

use std::io;

use serde::{Deserialize, Serialize};

use crate::bytes::ReadAt;

/// The kernel's `DISK_MAX_PARTS`: numbers go from 1 to one less.
const NUMBERS_END: u32 = 256;

/// A partition that a table names; it lies within its image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// As the kernel counts: a GPT entry's place in the array, MBR 1 to 4, logical ones from 5 on.
    pub number: u32,
    /// First byte, counted from the start of the image.
    pub start: u64,
    /// Length in bytes, never 0.
    pub len: u64,
    /// The name in a GPT entry.
    pub label: Option<String>,
    /// GPT: the entry's own UUID; MBR: disk signature and number, as in `/dev/disk/by-partuuid`.
    pub uuid: Option<String>,
    /// GPT: the type's UUID; MBR: the type byte as `0x83`.
    pub type_: String,
}

/// What a table says.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Sorted by number.
    pub partitions: Vec<Partition>,
    /// The sector size in bytes that the table counts in, where it says so (GPT).
    pub sector: Option<u32>,
    /// What is wrong with it, for people.
    pub warnings: Vec<String>,
}

/// Reads the table of an image of `len` bytes; no table is an empty one.
///
/// `sector` is the logical block size that the device would have: a GPT is looked for there first, then at
/// 512 and 4096 bytes, and an MBR counts in it.
pub(crate) fn read(image: &dyn ReadAt, len: u64, sector: u32) -> io::Result<Table> {
    let mut first = [0; mbr::LEN];
    if len < first.len() as u64 {
        return Ok(Table::default());
    }
    image.read_at(&mut first, 0)?;
    let Some(boot) = mbr::BootRecord::parse(&first) else { return Ok(Table::default()) };
    if boot.is_protective() { gpt::read(image, len, sector) } else { mbr::read(image, len, sector, &boot) }
}

/// Why a range of sectors is not a partition of an image of `len` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum RangeError {
    #[error("its end lies before its start")]
    Backwards,
    #[error("it reaches beyond the end of the image")]
    BeyondEnd,
}

/// Start and length in bytes of `count` sectors from `first` on, when they lie within `len` bytes.
fn byte_range(first: u64, count: u64, sector: u32, len: u64) -> Result<(u64, u64), RangeError> {
    let start = first.checked_mul(sector.into());
    let size = count.checked_mul(sector.into());
    match (start, size) {
        (Some(start), Some(size)) if start.checked_add(size).is_some_and(|end| end <= len) => {
            Ok((start, size))
        }
        _ => Err(RangeError::BeyondEnd),
    }
}

#[cfg(test)]
mod tests;
