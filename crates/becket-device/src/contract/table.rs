//! The table of an image's encoded blocks on its way from the client to the worker: a sealed memfd, which
//! nothing can change any more. The supervisor passes it on and never reads it.

use std::io;
use std::os::fd::OwnedFd;

use becket_image::Encoded;
use serde::{Deserialize, Serialize};

use crate::contract::sealed;

/// A table comes along, and how its blocks are decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Encoding {
    /// Bytes of decoded blocks that the worker may keep, for all its devices; its own choice when not given.
    pub(crate) cache_size: Option<u64>,
    /// Their stored bytes go past the page cache, too. Only a client says it here: the worker's order has it
    /// elsewhere.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) direct_io: bool,
}

/// Writes a table; nothing where no part of the image is encoded.
pub(crate) fn pack(encoded: &[Encoded]) -> io::Result<Option<OwnedFd>> {
    if encoded.is_empty() {
        return Ok(None);
    }
    sealed::write_json("becket-blocks", &encoded).map(Some)
}

/// Reads a table; what is in it is checked for itself, and not yet against the image.
pub(crate) fn unpack(fd: &OwnedFd) -> io::Result<Vec<Encoded>> {
    sealed::read_json(fd)
}

#[cfg(test)]
pub(crate) mod tests {
    use becket_image::Map;
    use becket_image::codec::Codec;
    use becket_image::encoded::Block;

    use rustix::fs::MemfdFlags;

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

    /// The server accepts no longer one, so the client makes none.
    #[test]
    fn a_table_that_is_too_long_is_not_made() {
        let one =
            |at: u64| Block { start: at * 8192, len: 8192, input: 0, input_len: 100, skip: 0, yields: 8192 };
        let blocks: Vec<Block> = (0..600_000).map(one).collect();
        let layer = Encoded::new(Codec::Lz4, Map::contiguous(0, 0, 4096), blocks).unwrap();
        pack(std::slice::from_ref(&layer)).unwrap();
        let error = pack(&[layer.clone(), layer.clone(), layer]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn what_could_change_or_lies_is_refused() {
        let open = || rustix::fs::memfd_create("t", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let fill = |fd: &OwnedFd, text: &str| rustix::io::write(fd, text.as_bytes()).unwrap();
        let loose = open();
        fill(&loose, "[]");
        assert!(unpack(&loose).is_err());
        assert!(!sealed::is_sealed(&tempfile::tempfile().unwrap().into()));
        // A block that begins where none can.
        let good = serde_json::to_string(&[layer()]).unwrap();
        for (from, to) in [("\"start\":0,\"len\":8192", "\"start\":1,\"len\":8192"), ("8192", "4294967295")] {
            assert!(good.contains(from), "{good}");
            let lie = open();
            fill(&lie, &good.replacen(from, to, 2));
            rustix::fs::fcntl_add_seals(&lie, sealed::seals()).unwrap();
            assert!(unpack(&lie).is_err(), "{to}");
        }
    }
}
