//! The table of an image's encoded blocks on its way from the client to the worker: a file in memory that nobody can
//! change any more. The supervisor passes it on and never reads it.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::fd::OwnedFd;

use becket_image::Encoded;
use rustix::fs::{FileType, MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};

/// Longest table in bytes: a million blocks.
const LARGEST: u64 = 128 << 20;

/// A table comes along, and how its blocks are to be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Encoding {
    /// Bytes of decoded blocks that the worker may keep, for all its devices; its own choice when not given.
    pub(crate) cache_size: Option<u64>,
}

/// What nobody can do to a table.
pub(crate) fn seals() -> SealFlags {
    SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE
}

/// Writes a table; nothing where no part of the image is encoded.
pub(crate) fn pack(encoded: &[Encoded]) -> io::Result<Option<OwnedFd>> {
    if encoded.is_empty() {
        return Ok(None);
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = BufWriter::new(File::from(rustix::fs::memfd_create("becket-blocks", flags)?));
    serde_json::to_writer(&mut file, encoded)?;
    file.flush()?;
    let file = OwnedFd::from(file.into_inner().map_err(io::IntoInnerError::into_error)?);
    rustix::fs::fcntl_add_seals(&file, seals())?;
    Ok(Some(file))
}

/// Whether it is a file in memory that cannot change, and is not too long.
pub(crate) fn is_table(fd: &OwnedFd) -> bool {
    let sealed = rustix::fs::fcntl_get_seals(fd).is_ok_and(|found| found.contains(seals()));
    let fits = |stat: rustix::fs::Stat| {
        let len = u64::try_from(stat.st_size).unwrap_or(u64::MAX);
        FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && len <= LARGEST
    };
    sealed && rustix::fs::fstat(fd).is_ok_and(fits)
}

/// Reads a table; what is in it is checked for itself, and not yet against the image.
pub(crate) fn unpack(fd: &OwnedFd) -> io::Result<Vec<Encoded>> {
    if !is_table(fd) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the table of encoded blocks is none"));
    }
    // The position belongs to all who have the descriptor.
    Ok(serde_json::from_reader(BufReader::new(Whole { fd, at: 0 }))?)
}

struct Whole<'a> {
    fd: &'a OwnedFd,
    at: u64,
}

impl Read for Whole<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let got = rustix::io::retry_on_intr(|| rustix::io::pread(self.fd, &mut *buf, self.at))?;
        self.at += got as u64;
        Ok(got)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use becket_image::Map;
    use becket_image::codec::Codec;
    use becket_image::encoded::Block;

    use super::*;

    /// One layer of one block, in 4096 bytes of file 0.
    pub(crate) fn layer() -> Encoded {
        let block = Block { start: 0, len: 8192, input: 0, input_len: 100, skip: 0, yields: 8192 };
        Encoded::new(Codec::Lz4, Map::contiguous(0, 0, 4096), vec![block]).unwrap()
    }

    #[test]
    fn a_table_arrives_as_often_as_it_is_read_and_cannot_be_changed() {
        assert!(pack(&[]).unwrap().is_none());
        let table = pack(&[layer(), layer()]).unwrap().unwrap();
        for _ in 0..2 {
            assert_eq!(unpack(&table).unwrap(), [layer(), layer()]);
        }
        assert!(rustix::io::pwrite(&table, b"x", 0).is_err());
        assert!(rustix::fs::ftruncate(&table, 0).is_err());
    }

    #[test]
    fn what_could_change_or_lies_is_refused() {
        let open = || rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let fill = |fd: &OwnedFd, text: &str| rustix::io::write(fd, text.as_bytes()).unwrap();
        let loose = open();
        fill(&loose, "[]");
        assert!(unpack(&loose).is_err());
        assert!(!is_table(&tempfile::tempfile().unwrap().into()));
        // A block that begins where none can.
        let good = serde_json::to_string(&[layer()]).unwrap();
        for (from, to) in [("\"start\":0,\"len\":8192", "\"start\":1,\"len\":8192"), ("8192", "4294967295")] {
            assert!(good.contains(from), "{good}");
            let lie = open();
            fill(&lie, &good.replacen(from, to, 2));
            rustix::fs::fcntl_add_seals(&lie, seals()).unwrap();
            assert!(unpack(&lie).is_err(), "{to}");
        }
    }
}
