//! Buffers that the kernel picks from when it answers a multishot command: one group for all queues of a
//! ring. Never hands a buffer to the kernel while it is being read here: reading borrows, giving back borrows
//! mutably.
//!
//! Source: `io_uring_register_buf_ring(3)`: a ring of entries (address, length, buffer id) whose tail only we
//! move; the tail lives in the unused field of the first entry.

use std::sync::atomic::{AtomicU16, Ordering};

use crate::{
    Answer, Error,
    memory::{Buffers, Region},
};

/// Bytes of each buffer.
pub const PICK_SIZE: usize = 256;
/// Buffers of a ring; a power of two. An answer's is given back in the turn that reads it, so as many are out
/// as answers have come since the last turn. Should there ever be more of them, a command ends with ENOBUFS,
/// loses nothing, and is begun anew: that is dearer than an answer and cheaper than buffers for each of a
/// thousand queues.
const COUNT: u16 = 256;
/// The number of the group: a ring has no other.
const GROUP: u16 = 0;

/// Bytes of an entry, and where its fields are (`struct io_uring_buf`).
const ENTRY: usize = 16;
const LEN: usize = 8;
const ID: usize = 12;
/// Where the ring's tail is.
const TAIL: usize = 14;

/// A group of buffers, all of one size.
pub(crate) struct Provided {
    entries: Region,
    data: Buffers,
    group: u16,
    count: u16,
    tail: u16,
}

impl Provided {
    /// Those of a ring, all given.
    pub(crate) fn of_a_ring() -> Result<Provided, Error> {
        let mut provided = Provided::new(GROUP, COUNT, PICK_SIZE)?;
        (0..COUNT).for_each(|id| provided.give(id));
        Ok(provided)
    }

    /// `count` buffers (a power of two) of `size` bytes each, none of them given yet.
    fn new(group: u16, count: u16, size: usize) -> Result<Provided, Error> {
        let entries = Region::anonymous(usize::from(count) * ENTRY, "buffer ring")?;
        Ok(Provided { entries, data: Buffers::new(count.into(), size)?, group, count, tail: 0 })
    }

    /// The group's number in its ring.
    pub(crate) fn group(&self) -> u16 {
        self.group
    }

    /// Number of buffers.
    pub(crate) fn count(&self) -> u16 {
        self.count
    }

    /// Address of the first entry, for the registration.
    pub(crate) fn address(&self) -> u64 {
        self.entries.start() as u64
    }

    /// Gives a buffer to the kernel, which picks in the order of giving. Each is given once until it was
    /// picked.
    fn give(&mut self, id: u16) {
        let address = self.data.address(id.into());
        if address.is_null() {
            return;
        }
        let entry = self.entries.start().wrapping_add(usize::from(self.tail & (self.count - 1)) * ENTRY);
        // SAFETY: the entry lies in our mapping (the tail is masked by a power of two), each field is
        // aligned, and the kernel looks at it only after the tail was moved past it. The tail's own place is
        // not touched.
        unsafe {
            entry.cast::<u64>().write(address as u64);
            entry.wrapping_add(LEN).cast::<u32>().write(self.data.size() as u32);
            entry.wrapping_add(ID).cast::<u16>().write(id);
        }
        self.tail = self.tail.wrapping_add(1);
        // SAFETY: in our mapping, aligned, and read by the kernel with acquire semantics.
        let tail = unsafe { AtomicU16::from_ptr(self.entries.start().wrapping_add(TAIL).cast::<u16>()) };
        tail.store(self.tail, Ordering::Release);
    }

    /// Copies what the kernel wrote into the buffer that it picked for an answer and gives that back; returns
    /// the number of bytes.
    pub(crate) fn take(&mut self, answer: Answer, into: &mut [u8]) -> usize {
        let Some(id) = answer.buffer else { return 0 };
        let len = usize::try_from(answer.result).unwrap_or(0).min(into.len());
        let bytes = self.bytes(id, len);
        let len = bytes.len();
        into[..len].copy_from_slice(bytes);
        self.give(id);
        len
    }

    /// What the kernel wrote into a buffer that it picked, at most `len` bytes.
    fn bytes(&mut self, id: u16, len: usize) -> &[u8] {
        let bytes = self.data.slice(id.into());
        &bytes[..len.min(bytes.len())]
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use io_uring::{IoUring, cqueue, opcode, squeue, types::Fd};

    use super::*;

    /// Reads a byte from a pipe into whatever buffer the kernel picks; returns result, buffer and contents.
    fn read(
        uring: &mut IoUring,
        provided: &mut Provided,
        pipe: &std::os::fd::OwnedFd,
    ) -> (i32, Option<u16>, Vec<u8>) {
        let entry = opcode::Read::new(Fd(pipe.as_raw_fd()), std::ptr::null_mut(), 64)
            .buf_group(provided.group())
            .build()
            .flags(squeue::Flags::BUFFER_SELECT);
        // SAFETY: the buffers live longer than the ring's operation, which is waited for.
        unsafe { uring.submission().push(&entry) }.unwrap();
        uring.submit_and_wait(1).unwrap();
        let completion = uring.completion().next().unwrap();
        let id = cqueue::buffer_select(completion.flags());
        let bytes = id.map(|id| provided.bytes(id, completion.result().max(0) as usize).to_vec());
        (completion.result(), id, bytes.unwrap_or_default())
    }

    #[test]
    fn the_kernel_picks_what_was_given_and_nothing_else() {
        let mut uring = IoUring::new(8).unwrap();
        let mut provided = Provided::new(3, 2, 64).unwrap();
        // SAFETY: the entries live as long as the ring: both are dropped at the end, the ring first.
        unsafe { uring.submitter().register_buf_ring_with_flags(provided.address(), 2, 3, 0) }.unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let say = |word: &[u8]| rustix::io::write(&writer, word).unwrap();

        say(b"none");
        assert_eq!(read(&mut uring, &mut provided, &reader).0, -libc::ENOBUFS);
        provided.give(1);
        assert_eq!(read(&mut uring, &mut provided, &reader), (4, Some(1), b"none".to_vec()));
        for round in 0..5u8 {
            provided.give(0);
            provided.give(1);
            say(&[round; 3]);
            assert_eq!(read(&mut uring, &mut provided, &reader), (3, Some(0), vec![round; 3]));
            say(&[round; 2]);
            assert_eq!(read(&mut uring, &mut provided, &reader), (2, Some(1), vec![round; 2]));
        }
        say(b"more");
        assert_eq!(read(&mut uring, &mut provided, &reader).0, -libc::ENOBUFS);
        drop(uring);
    }
}
