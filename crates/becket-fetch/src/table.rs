//! Which chunks of an object are in its store file, each with its checksum; a file of 8 bytes a chunk.
//! It never says that a chunk is there which a crash may have taken.
//!
//! An entry is a CRC-32 of the chunk and a seal over that, the chunk's number and a tag. The tag is that of
//! this boot until the chunk is on the disk, and another one afterwards. So after a power cut only entries
//! count whose chunks had been synced before; after the death of a process all count.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

/// What an entry needs, in bytes.
const ENTRY: u64 = 8;
/// How many entries are read at once.
const AT_ONCE: u64 = 4096;
/// The tag of chunks that are on the disk.
const DURABLE: [u8; 16] = *b"becket: on disk.";
/// The same for the first one, when all bytes were compared with the digest that names them.
const WHOLE: [u8; 16] = *b"becket: is whole";

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

    /// The entries of some chunks: each chunk, its checksum and its seal. What cannot be read is zero.
    fn entries(&self, chunks: Range<u64>) -> impl Iterator<Item = (u64, u32, u32)> + '_ {
        chunks.clone().step_by(index(AT_ONCE)).flat_map(move |first| {
            let mut bytes = vec![0; index((chunks.end - first).min(AT_ONCE) * ENTRY)];
            if self.file.read_exact_at(&mut bytes, first.saturating_mul(ENTRY)).is_err() {
                bytes.fill(0);
            }
            let entries: Vec<_> =
                bytes.as_chunks().0.iter().map(|entry| u64::from_le_bytes(*entry)).collect();
            // The checksum comes first, and the lower half of a number, too.
            (first..).zip(entries).map(|(chunk, entry)| (chunk, entry as u32, (entry >> 32) as u32))
        })
    }

    /// The checksums of those of some chunks that are there, in their order.
    pub(crate) fn sums(&self, chunks: Range<u64>) -> impl Iterator<Item = Option<u32>> + '_ {
        self.entries(chunks).map(|(chunk, sum, found)| {
            let is_there = seal(chunk, sum, &self.boot) == found || is_on_disk((chunk, sum, found));
            (found != 0 && is_there).then_some(sum)
        })
    }

    /// How many of the first chunks have an entry, sound or not.
    pub(crate) fn count(&self, chunks: u64) -> u64 {
        self.entries(0..chunks).filter(|(.., found)| *found != 0).count() as u64
    }

    /// The checksum of a chunk that is there.
    pub(crate) fn get(&self, chunk: u64) -> Option<u32> {
        self.sums(chunk..chunk.saturating_add(1)).next().flatten()
    }

    /// Whether none of the first chunks, which all are there, is lost by a power cut.
    pub(crate) fn is_durable(&self, chunks: u64) -> bool {
        self.entries(0..chunks).all(is_on_disk)
    }

    /// Whether all bytes were compared with their digest, and no chunk has come since.
    pub(crate) fn is_whole(&self) -> bool {
        self.entries(0..1).all(|(chunk, sum, found)| seal(chunk, sum, &WHOLE) == found)
    }

    /// Notes whether that is so, of chunks that are on the disk.
    pub(crate) fn set_whole(&self, whole: bool) -> io::Result<()> {
        match self.get(0) {
            Some(sum) if whole != self.is_whole() => {
                self.set_by(0, &[sum], if whole { &WHOLE } else { &DURABLE })
            }
            _ => Ok(()),
        }
    }

    /// Chunks are in the file, from `first` on and with these checksums; `durable` once they are on the disk.
    pub(crate) fn set(&self, first: u64, sums: &[u32], durable: bool) -> io::Result<()> {
        self.set_by(first, sums, if durable { &DURABLE } else { &self.boot })
    }

    fn set_by(&self, first: u64, sums: &[u32], tag: &[u8; 16]) -> io::Result<()> {
        let entry = |(chunk, sum): (u64, &u32)| {
            (u64::from(seal(chunk, *sum, tag)) << 32 | u64::from(*sum)).to_le_bytes()
        };
        let entries: Vec<u8> = (first..).zip(sums).flat_map(entry).collect();
        self.file.write_all_at(&entries, first.saturating_mul(ENTRY))
    }

    /// Chunks are not there, or are damaged.
    pub(crate) fn clear(&self, chunks: Range<u64>) -> io::Result<()> {
        let len = (chunks.end.saturating_sub(chunks.start)).saturating_mul(ENTRY);
        self.file.write_all_at(&vec![0; index(len)], chunks.start.saturating_mul(ENTRY))
    }

    pub(crate) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// An index into memory; numbers of chunks always fit.
pub(crate) fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Whether an entry is one of a chunk that no power cut takes.
fn is_on_disk((chunk, sum, found): (u64, u32, u32)) -> bool {
    seal(chunk, sum, &DURABLE) == found || (chunk == 0 && seal(chunk, sum, &WHOLE) == found)
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
        table.set(3, &[7], false).unwrap();
        table.set(4, &[8], true).unwrap();
        assert_eq!((table.get(3), table.get(4), table.get(5)), (Some(7), Some(8), None));
        let mut entry = [0; 8];
        table.file.read_exact_at(&mut entry, 24).unwrap();
        table.file.write_all_at(&entry, 40).unwrap();
        assert_eq!(table.get(5), None, "it was copied from another place");
        table.boot = [1; 16];
        assert_eq!((table.get(3), table.get(4)), (None, Some(8)), "the machine was switched off");
        for bit in 0..64 {
            table.set(9, &[0x1234_5678], true).unwrap();
            table.file.read_exact_at(&mut entry, 72).unwrap();
            entry[bit / 8] ^= 1 << (bit % 8);
            table.file.write_all_at(&entry, 72).unwrap();
            assert_eq!(table.get(9), None, "bit {bit}");
        }
        table.clear(4..5).unwrap();
        assert_eq!(table.get(4), None);
    }

    #[test]
    fn what_is_whole_is_there_and_is_no_longer_whole_when_a_chunk_comes() {
        let table = Table::new(tempfile::tempfile().unwrap()).unwrap();
        table.set_whole(true).unwrap();
        assert!(!table.is_whole(), "nothing is there");
        table.set(0, &[7, 8], true).unwrap();
        assert!(!table.is_whole());
        table.set_whole(true).unwrap();
        assert!(table.is_whole() && table.is_durable(2));
        assert_eq!(table.get(0), Some(7));
        table.set_whole(false).unwrap();
        assert!(!table.is_whole() && table.is_durable(2));
    }

    #[test]
    fn many_entries_are_as_single_ones() {
        let table = Table::new(tempfile::tempfile().unwrap()).unwrap();
        let sums: Vec<u32> = (0..9000).collect();
        table.set(10, &sums, true).unwrap();
        assert!(!table.is_durable(9010) && !table.is_durable(1));
        table.set(0, &[5; 10], true).unwrap();
        assert!(table.is_durable(9010) && !table.is_durable(9011));
        let expected: Vec<_> = [5; 10].into_iter().chain(sums).map(Some).collect();
        assert_eq!(table.sums(0..9010).collect::<Vec<_>>(), expected);
        assert_eq!(table.get(9009), Some(8999));
        table.clear(4000..5000).unwrap();
        assert_eq!(table.sums(0..9010).flatten().count(), 8010);
        assert_eq!(table.sums(9000..9020).flatten().count(), 0, "they are not in the file as a whole");
    }
}
