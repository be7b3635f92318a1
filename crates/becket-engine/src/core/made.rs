//! What no file of an image holds (zeroes, decoded blocks), for requests whose pages are registered: only the kernel reaches
//! these, and it fills them from files. So what is made up lies in files of memory, and is read from there.
//! It never stands between such a request and a file that holds its bytes, and leaves requests with buffers of ours alone.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use io_uring::squeue;
use rustix::io::Errno;

use super::Core;
use crate::{
    Error,
    memory::{Buffers, file_of_memory},
    request::{Step, Way},
    ring::{Ring, Transfer},
    straight::MAX_OPERATION,
};

/// Bytes of each buffer: what is longer is made up in pieces. They are locked in memory, 128 of them in each queue of the first
/// devices, and an operation costs little beside decoding what it brings.
const PIECE: usize = 16 << 10;

/// What a queue needs for that.
pub(super) struct Made {
    /// The slot of a file of zeroes in the ring's table.
    zeroes: u32,
    /// Buffers for decoded bytes, one for each request, and the slot of the file that they are in; where there is anything encoded.
    decoded: Option<(Buffers, u32)>,
}

/// The same before the file is in the ring's table.
pub(super) struct Making {
    zeroes: u32,
    decoded: Option<(Buffers, OwnedFd)>,
}

impl Making {
    /// For a queue of `depth` requests.
    pub(super) fn new(ring: &mut Ring, depth: u16, decodes: bool) -> Result<Making, Error> {
        let decoded = decodes.then(|| Buffers::in_a_file(depth.into(), PIECE)).transpose()?;
        Ok(Making { zeroes: zeroes(ring)?, decoded })
    }

    /// What the table must hold as long as the queue lives.
    pub(super) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.decoded.as_ref().map(|(_, file)| file.as_fd())
    }

    /// With the slot of that.
    pub(super) fn done(self, slot: u32) -> Made {
        Made { zeroes: self.zeroes, decoded: self.decoded.map(|(buffers, _)| (buffers, slot)) }
    }
}

impl Made {
    /// The memory for a request's decoded bytes, while no operation of it is in flight; empty where nothing is encoded.
    pub(super) fn buffer(&mut self, tag: u16) -> &mut [u8] {
        self.decoded.as_mut().map_or(&mut [], |(buffers, _)| buffers.slice(tag.into()))
    }
}

/// The slot of a file that is nothing but zeroes, as many as an operation can move: one for all queues of a ring, as long as it
/// lives.
fn zeroes(ring: &mut Ring) -> Result<u32, Error> {
    if let Some(slot) = ring.zeroes {
        return Ok(slot);
    }
    // The table keeps it open.
    let file = file_of_memory(MAX_OPERATION, "zeroes")?;
    let slot = ring.register_files(&[file.as_raw_fd()])?;
    ring.zeroes = Some(slot);
    Ok(slot)
}

impl Core {
    /// Brings zeroes to what a request asks for next.
    pub(crate) fn deliver_zeroes(&mut self, tag: u16) -> Result<Step, Errno> {
        let target = self.made.as_ref().ok_or(Errno::IO)?.zeroes;
        let len = self.slab[usize::from(tag)].asked;
        Ok(Step::Deliver(self.deliver(tag, target, 0, len)))
    }

    /// Brings it what was decoded for it.
    pub(crate) fn deliver_made(&mut self, tag: u16) -> Result<Step, Errno> {
        let decoded = self.made.as_ref().and_then(|made| made.decoded.as_ref());
        let (buffers, target) = decoded.ok_or(Errno::IO)?;
        let (target, offset) = (*target, u64::from(tag) * buffers.size() as u64);
        let len = self.slab[usize::from(tag)].made;
        Ok(Step::Deliver(self.deliver(tag, target, offset, len)))
    }

    /// The operation that fills the next `len` bytes of a request's pages from a file of memory. It waits for nothing.
    fn deliver(&mut self, tag: u16, target: u32, offset: u64, len: u64) -> squeue::Entry {
        let slot = &mut self.slab[usize::from(tag)];
        (slot.asked, slot.made, slot.way, slot.direct) = (len, 0, Way::Free, false);
        let (request, done) = (slot.request, slot.done);
        // No longer than an operation, and that fits.
        let way = Transfer { target, offset, len: len as u32, ..Transfer::default() };
        self.transfer(tag, &request, done, way)
    }
}

#[cfg(test)]
mod tests;
