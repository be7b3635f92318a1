//! Files in memory for bytes that no file below holds (zeroes, decoded blocks), for requests whose pages are
//! registered: only the kernel reaches such pages, and it fills them from files. So these bytes are staged in
//! a memfd and read from there. Never used for bytes that a file holds, nor by requests with buffers of ours.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::{
    Error,
    memory::{Buffers, file_of_memory},
    ring::Ring,
    slot::MAX_OPERATION,
};

/// Bytes of each buffer: what is longer is made up in pieces. They are locked in memory, 128 of them in each
/// queue of the first devices, and an operation costs little beside decoding what it brings.
pub(super) const PIECE: usize = 16 << 10;

/// What a queue needs for that.
pub(super) struct MemoryFiles {
    /// The slot of a file of zeroes in the ring's table.
    pub(super) zeroes: u32,
    /// Buffers for decoded bytes, one for each request, and the slot of the file that they are in; where
    /// there is anything encoded.
    pub(super) decoded: Option<(Buffers, u32)>,
}

/// The same before the file is in the ring's table.
pub(super) struct NewMemoryFiles {
    zeroes: u32,
    decoded: Option<(Buffers, OwnedFd)>,
}

impl NewMemoryFiles {
    /// For a queue of `depth` requests.
    pub(super) fn new(ring: &mut Ring, depth: u16, decodes: bool) -> Result<NewMemoryFiles, Error> {
        let decoded = decodes.then(|| Buffers::in_a_file(depth.into(), PIECE)).transpose()?;
        Ok(NewMemoryFiles { zeroes: zeroes(ring)?, decoded })
    }

    /// What the table must hold as long as the queue lives.
    pub(super) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.decoded.as_ref().map(|(_, file)| file.as_fd())
    }

    /// With the slot of that.
    pub(super) fn done(self, slot: u32) -> MemoryFiles {
        MemoryFiles { zeroes: self.zeroes, decoded: self.decoded.map(|(buffers, _)| (buffers, slot)) }
    }
}

impl MemoryFiles {
    /// The memory for a request's decoded bytes, while no operation of it is in flight; empty where nothing
    /// is encoded.
    pub(super) fn buffer(&mut self, tag: u16) -> &mut [u8] {
        self.decoded.as_mut().map_or(&mut [], |(buffers, _)| buffers.slice(tag.into()))
    }
}

/// The slot of a file that is nothing but zeroes, as many as an operation can move: one for all queues of a
/// ring, as long as it lives.
pub(super) fn zeroes(ring: &mut Ring) -> Result<u32, Error> {
    if let Some(slot) = ring.zeroes {
        return Ok(slot);
    }
    // The table keeps it open.
    let file = file_of_memory(MAX_OPERATION, "zeroes")?;
    let slot = ring.register_files(&[file.as_raw_fd()])?;
    ring.zeroes = Some(slot);
    Ok(slot)
}
