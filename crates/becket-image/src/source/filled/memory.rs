//! The room behind a table for chunks that their file has no room for: memory, used as a file's.
//! It knows no chunks, and never decides what is in it.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

/// See the module. Offsets are those of the file whose bytes are here, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Memory<'a> {
    fd: BorrowedFd<'a>,
    start: u64,
}

impl<'a> Memory<'a> {
    pub(super) fn new(fd: BorrowedFd<'a>, start: u64) -> Memory<'a> {
        Memory { fd, start }
    }

    /// What is to be read, and where the file's first byte would be in it.
    pub fn parts(self) -> (BorrowedFd<'a>, u64) {
        (self.fd, self.start)
    }

    fn place(self, offset: u64, done: usize) -> io::Result<u64> {
        Ok(self.start.checked_add(offset).and_then(|at| at.checked_add(done as u64)).ok_or(Errno::INVAL)?)
    }

    /// Writes all bytes at `offset`.
    ///
    /// # Errors
    /// There is no memory.
    pub fn write(self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
            match rustix::io::pwrite(self.fd, rest, self.place(offset, done)?) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Fills `buf` with the bytes from `offset` on.
    ///
    /// # Errors
    /// There are not so many.
    pub fn read(self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match rustix::io::pread(self.fd, rest, self.place(offset, done)?) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Frees the memory of a range, which reads as zeroes then.
    ///
    /// # Errors
    /// Those of `fallocate`.
    pub fn free(self, offset: u64, len: u64) -> io::Result<()> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(self.fd, how, self.place(offset, 0).map_err(|_| Errno::INVAL)?, len)
        })?)
    }
}
