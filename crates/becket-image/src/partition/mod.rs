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
mod table;
mod types;

use std::io;

use crate::bytes::ReadAt;
pub use table::Partition;
pub(crate) use table::Table;

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

#[cfg(test)]
mod tests;
