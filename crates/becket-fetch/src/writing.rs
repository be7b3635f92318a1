//! A file of the store that is written from its start to its end.
//! It never knows how long it becomes.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use becket_image::zeroes;

use crate::Error;

/// The smallest chunk, in bytes.
pub(crate) const CHUNK: u64 = 64 << 10;
/// The most chunks of an object: larger objects have larger chunks.
pub(crate) const CHUNKS: u64 = 1 << 20;

/// A file of the store that is written from its start to its end, with a checksum of each chunk. How long it
/// becomes is not known: where it has too many chunks, two of them become one.
pub(crate) struct Writing<'a> {
    file: &'a File,
    path: &'a Path,
    /// What is not yet written: less than the smallest chunk.
    rest: Vec<u8>,
    at: u64,
    /// Bytes that are not holes.
    stored: u64,
    /// Length of a chunk in bytes.
    chunk: u64,
    /// The most chunks.
    most: u64,
    /// The checksum of each chunk, and its length.
    sums: Vec<(crc32fast::Hasher, u64)>,
}

impl<'a> Writing<'a> {
    pub(crate) fn new(file: &'a File, path: &'a Path) -> Writing<'a> {
        let rest = Vec::with_capacity(usize::try_from(CHUNK).unwrap_or(0));
        Writing { file, path, rest, at: 0, stored: 0, chunk: CHUNK, most: CHUNKS, sums: Vec::new() }
    }

    pub(crate) fn file(&self) -> &File {
        self.file
    }

    pub(crate) fn path(&self) -> &Path {
        self.path
    }

    /// How many bytes of the disk it takes, but for the last few.
    pub(crate) fn stored(&self) -> u64 {
        self.stored
    }

    pub(crate) fn write(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        let unit = usize::try_from(CHUNK).unwrap_or(usize::MAX);
        while !bytes.is_empty() {
            let take = bytes.len().min(unit.saturating_sub(self.rest.len()));
            let (now, later) = bytes.split_at(take);
            bytes = later;
            if self.rest.is_empty() && now.len() == unit {
                self.put(now)?;
                continue;
            }
            self.rest.extend_from_slice(now);
            if self.rest.len() == unit {
                let full = std::mem::take(&mut self.rest);
                self.put(&full)?;
                self.rest = full;
                self.rest.clear();
            }
        }
        Ok(())
    }

    /// Writes the next bytes: as many as the smallest chunk has, or the last ones.
    fn put(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let len = bytes.len() as u64;
        // What is not written is zero.
        if !zeroes::is_all(bytes) {
            self.file
                .write_all_at(bytes, self.at)
                .map_err(Error::store(self.path, "the store file cannot be written"))?;
            self.stored += len;
        }
        self.at += len;
        let mut sum = crc32fast::Hasher::new();
        sum.update(bytes);
        let room = self.chunk;
        match self.sums.last_mut().filter(|(_, have)| *have < room) {
            Some((last, have)) => {
                last.combine(&sum);
                *have += len;
            }
            None => self.sums.push((sum, len)),
        }
        if self.sums.len() as u64 > self.most {
            self.sums = self.sums.chunks(2).map(joined).collect();
            self.chunk *= 2;
        }
        Ok(())
    }

    /// Writes what is left; returns its length, that of its chunks, and their checksums.
    pub(crate) fn end(mut self) -> Result<(u64, u64, Vec<u32>), Error> {
        let rest = std::mem::take(&mut self.rest);
        if !rest.is_empty() {
            self.put(&rest)?;
        }
        self.file.set_len(self.at).map_err(Error::store(self.path, "the store file cannot be written"))?;
        Ok((self.at, self.chunk, self.sums.into_iter().map(|(sum, _)| sum.finalize()).collect()))
    }
}

/// One chunk of two.
fn joined(pair: &[(crc32fast::Hasher, u64)]) -> (crc32fast::Hasher, u64) {
    let mut parts = pair.iter();
    let (mut sum, mut len) = parts.next().cloned().unwrap_or_default();
    for (other, more) in parts {
        sum.combine(other);
        len += more;
    }
    (sum, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_chunk_has_its_checksum_whatever_the_pieces() {
        let bytes: Vec<u8> = (0..300_000_u32).map(|number| (number % 251) as u8).collect();
        let expected: Vec<u32> = bytes.chunks(CHUNK as usize).map(crc32fast::hash).collect();
        for piece in [1000, 65_536, 100_000, 300_000] {
            let file = tempfile::tempfile().unwrap();
            let mut writing = Writing::new(&file, Path::new("x"));
            bytes.chunks(piece).for_each(|piece| writing.write(piece).unwrap());
            assert_eq!(writing.end().unwrap(), (300_000, CHUNK, expected.clone()));
            let mut found = vec![0; bytes.len()];
            file.read_exact_at(&mut found, 0).unwrap();
            assert!(found == bytes);
        }
    }

    #[test]
    fn zeroes_take_no_room_and_chunks_grow_with_the_file() {
        use std::os::unix::fs::MetadataExt as _;
        let file = tempfile::tempfile().unwrap();
        // CHUNKS of them would be 64 GiB.
        let most = 1 << 10;
        let mut writing = Writing { most, ..Writing::new(&file, Path::new("x")) };
        writing.write(&[7; 10]).unwrap();
        let zeroes = vec![0; 8 << 20];
        let count = (most * CHUNK) / zeroes.len() as u64 + 1;
        (0..count).for_each(|_| writing.write(&zeroes).unwrap());
        let (size, chunk, sums) = writing.end().unwrap();
        assert_eq!((size, chunk), (10 + count * zeroes.len() as u64, 2 * CHUNK));
        assert_eq!(sums.len() as u64, size.div_ceil(chunk));
        let mut first = vec![0; chunk as usize];
        first[..10].fill(7);
        assert_eq!(sums[0], crc32fast::hash(&first), "of two chunks that became one");
        let empty = vec![0; chunk as usize];
        assert!(sums[1..sums.len() - 1].iter().all(|sum| *sum == crc32fast::hash(&empty)));
        assert!(file.metadata().unwrap().blocks() * 512 < 1 << 20, "it is sparse");
    }
}
