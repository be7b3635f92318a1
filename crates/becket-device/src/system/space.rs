//! Room that a file has in its file system before it needs it, and what it is when there is none.
//! It never changes what a file says.

use std::fs::File;
use std::io;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

/// Takes room for so many bytes, where the file system can promise any. The file's length stays.
pub(crate) fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, 0, bytes) {
        Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Whether there was no room.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
