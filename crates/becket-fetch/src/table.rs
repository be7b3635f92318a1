//! Which chunks of an object are in its store file, each with its checksum; a file of 8 bytes a chunk.
//! It never says that a chunk is there which a crash may have taken.
//!
//! An entry is a CRC-32 of the chunk and a seal over that, the chunk's number and a tag. The tag is that of
//! this boot until the chunk is on the disk, and another one afterwards. So after a power cut only entries
//! count whose chunks had been synced before; after the death of a process all count.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

/// What an entry needs, in bytes.
const ENTRY: u64 = 8;
/// The tag of chunks that are on the disk.
const DURABLE: [u8; 16] = *b"becket: on disk.";

#[derive(Debug)]
pub(crate) struct Table {
    file: File,
    boot: [u8; 16],
}

impl Table {
    pub(crate) fn new(file: File) -> io::Result<Table> {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        let digits: String = id.chars().filter(char::is_ascii_hexdigit).collect();
        let boot = u128::from_str_radix(&digits, 16).map_err(io::Error::other)?.to_be_bytes();
        Ok(Table { file, boot })
    }

    /// The same for a process that knows the tag of this boot and may not look it up.
    pub(crate) fn of_boot(file: File, boot: [u8; 16]) -> Table {
        Table { file, boot }
    }

    /// The file, and the tag of this boot.
    pub(crate) fn parts(&self) -> (&File, [u8; 16]) {
        (&self.file, self.boot)
    }

    /// The checksum of a chunk that is there.
    pub(crate) fn get(&self, chunk: u64) -> Option<u32> {
        let mut entry = [0; ENTRY as usize];
        self.file.read_exact_at(&mut entry, chunk.checked_mul(ENTRY)?).ok()?;
        let [a, b, c, d, e, f, g, h] = entry;
        let (sum, found) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
        [DURABLE, self.boot].iter().any(|tag| seal(chunk, sum, tag) == found).then_some(sum)
    }

    /// Whether none of the first chunks, which all are there, is lost by a power cut.
    pub(crate) fn is_durable(&self, chunks: u64) -> bool {
        let is = |chunk: u64| {
            let mut entry = [0; ENTRY as usize];
            let read = self.file.read_exact_at(&mut entry, chunk.saturating_mul(ENTRY));
            let [a, b, c, d, e, f, g, h] = entry;
            let (sum, found) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
            read.is_ok() && seal(chunk, sum, &DURABLE) == found
        };
        (0..chunks).all(is)
    }

    /// A chunk is in the file, with this checksum; `durable` once it is on the disk.
    pub(crate) fn set(&self, chunk: u64, sum: u32, durable: bool) -> io::Result<()> {
        let tag = if durable { &DURABLE } else { &self.boot };
        let mut entry = [0; ENTRY as usize];
        let bytes = sum.to_le_bytes().into_iter().chain(seal(chunk, sum, tag).to_le_bytes());
        entry.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
        self.file.write_all_at(&entry, chunk.saturating_mul(ENTRY))
    }

    /// A chunk is not there, or is damaged.
    pub(crate) fn clear(&self, chunk: u64) -> io::Result<()> {
        self.file.write_all_at(&[0; ENTRY as usize], chunk.saturating_mul(ENTRY))
    }

    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// Ties an entry to its place and its tag. An entry of zeroes has none.
fn seal(chunk: u64, sum: u32, tag: &[u8; 16]) -> u32 {
    let mut hash = crc32fast::Hasher::new();
    hash.update(&chunk.to_le_bytes());
    hash.update(&sum.to_le_bytes());
    hash.update(tag);
    hash.finalize().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_counts_at_its_place_only_and_until_the_next_boot_or_for_ever() {
        let mut table = Table::new(tempfile::tempfile().unwrap()).unwrap();
        assert_eq!(table.get(0), None);
        table.set(3, 7, false).unwrap();
        table.set(4, 8, true).unwrap();
        assert_eq!((table.get(3), table.get(4), table.get(5)), (Some(7), Some(8), None));
        let mut entry = [0; 8];
        table.file.read_exact_at(&mut entry, 24).unwrap();
        table.file.write_all_at(&entry, 40).unwrap();
        assert_eq!(table.get(5), None, "it was copied from another place");
        table.boot = [1; 16];
        assert_eq!((table.get(3), table.get(4)), (None, Some(8)), "the machine was switched off");
        for bit in 0..64 {
            table.set(9, 0x1234_5678, true).unwrap();
            table.file.read_exact_at(&mut entry, 72).unwrap();
            entry[bit / 8] ^= 1 << (bit % 8);
            table.file.write_all_at(&entry, 72).unwrap();
            assert_eq!(table.get(9), None, "bit {bit}");
        }
        table.clear(4).unwrap();
        assert_eq!(table.get(4), None);
    }
}
