//! The room behind a table for chunks that their file has no room for: memory, read and written as a file.
//! It knows no chunks, and never decides what is in it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::FileExt as _;

use rustix::fs::{FallocateFlags, fallocate};

/// See the module. Offsets are those of the file whose bytes are here, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Memory<'a> {
    file: &'a File,
    start: u64,
}

impl<'a> Memory<'a> {
    pub(super) fn new(file: &'a File, start: u64) -> Memory<'a> {
        Memory { file, start }
    }

    /// The memory's descriptor, and where in it the file's first byte is.
    pub fn parts(self) -> (BorrowedFd<'a>, u64) {
        (self.file.as_fd(), self.start)
    }

    /// Writes all bytes at `offset`.
    ///
    /// # Errors
    /// There is no memory.
    pub fn write(self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, self.start.saturating_add(offset))
    }

    /// Fills `buf` with the bytes from `offset` on.
    ///
    /// # Errors
    /// There are not so many.
    pub fn read(self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buf, self.start.saturating_add(offset))
    }

    /// Frees the memory of a range, which reads as zeroes then.
    ///
    /// # Errors
    /// Those of `fallocate`.
    pub fn free(self, offset: u64, len: u64) -> io::Result<()> {
        let (how, at) =
            (FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, self.start.saturating_add(offset));
        Ok(rustix::io::retry_on_intr(|| fallocate(self.file, how, at, len))?)
    }
}
