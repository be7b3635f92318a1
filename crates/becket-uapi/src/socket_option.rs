//! What the kernel says of a socket (getsockopt(2)), where a crate for system calls has no call of its own.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

/// A value that the kernel may fill with any bytes, or with less than all of it.
pub(crate) trait Plain: Copy {}

impl Plain for libc::ucred {}
impl<const N: usize> Plain for [u32; N] {}

/// Fills `value` with that option of level `SOL_SOCKET`.
///
/// # Errors
/// The descriptor is not a socket, or the kernel has no such option.
pub(crate) fn read<T: Plain>(socket: impl AsFd, option: i32, mut value: T) -> io::Result<T> {
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: a descriptor that is open, and plain memory of that length which the kernel fills.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    if done == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}
