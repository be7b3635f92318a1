//! Closing a file with what that says: a network file system writes then, and `Drop` drops its error.
//! It never closes a descriptor twice.

use std::io;
use std::os::fd::{IntoRawFd, OwnedFd};

/// Closes a file.
///
/// # Errors
/// Bytes that were written before were not taken (`ENOSPC`, `EDQUOT`, `EIO`). The file is closed all the
/// same.
pub fn close(file: OwnedFd) -> io::Result<()> {
    // SAFETY: the descriptor is ours alone, and is given up here.
    match unsafe { libc::close(file.into_raw_fd()) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
