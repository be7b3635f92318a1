//! The one way to send a ublk control command: a private io_uring with 128-byte entries.
//! It never returns while the kernel may still read or write the command's buffer.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use io_uring::{IoUring, cqueue, opcode, squeue, types};

use super::{CtrlCmd, DevInfo, Params};

/// Plain data that the kernel may read and fill.
///
/// # Safety
/// The type has no padding and no pointers, and every bit pattern is a value of it.
pub unsafe trait Plain: Copy {
    /// The value's bytes.
    fn bytes(&self) -> &[u8] {
        // SAFETY: without padding every byte is initialised; the slice borrows `self` and is as long as it.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }

    /// Replaces the value by the bytes at the start of `bytes`, as many as there are of both.
    fn fill(&mut self, bytes: &[u8]) {
        let length = bytes.len().min(size_of::<Self>());
        // SAFETY: `length` bounds both sides, they cannot overlap (one is borrowed mutably), and any bytes
        // are a value of this type.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), std::ptr::from_mut(self).cast(), length) }
    }
}

// SAFETY: an integer.
unsafe impl Plain for u64 {}
// SAFETY: integers.
unsafe impl<const N: usize> Plain for [u8; N] {}
// SAFETY: integers only, laid out without gaps (the layout test adds their sizes up).
unsafe impl Plain for CtrlCmd {}
// SAFETY: as above.
unsafe impl Plain for DevInfo {}
// SAFETY: as above; the one gap of the C structure is a named field here.
unsafe impl Plain for Params {}

/// A ring for control commands, one at a time. It can be used again and moved between threads.
pub struct ControlRing(IoUring<squeue::Entry128, cqueue::Entry>);

impl std::fmt::Debug for ControlRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ControlRing").field(&self.0.as_raw_fd()).finish()
    }
}

impl ControlRing {
    /// Makes a ring; `ENOSYS` or `EPERM` where io_uring is not allowed.
    pub fn new() -> io::Result<ControlRing> {
        IoUring::builder().dontfork().build(1).map(ControlRing)
    }

    /// Sends a command to `/dev/ublk-control` and blocks until it is answered; the answer is what the kernel
    /// returned, not negative. `command`'s `addr` and `len` are set from `buffer`, which receives what the
    /// kernel wrote. `path` is that of the char device, for commands about a device of a user without
    /// privileges; empty for others.
    ///
    /// With `patience` it gives up after that time. The ring must then be dropped, which makes the kernel
    /// cancel the command; until it does, the command may still take effect.
    ///
    /// # Errors
    /// The command's errno, or the ring's. `ETIMEDOUT` when it was given up. `InvalidInput` for a number that
    /// is not a control command or that passes memory by address (REG_BUF).
    pub fn send<T: Plain>(
        &mut self,
        control: BorrowedFd<'_>,
        number: u32,
        command: CtrlCmd,
        path: &[u8],
        buffer: Option<&mut T>,
        patience: Option<Duration>,
    ) -> io::Result<i32> {
        // What other drivers understand under another number could write anywhere, which would make this
        // unsafe.
        let (group, nr) = (number >> 8 & 0xff, number & 0xff);
        let bytes = buffer.as_deref().map_or(&[][..], Plain::bytes);
        let (Ok(len), Ok(dev_path_len)) =
            (u16::try_from(path.len() + bytes.len()), u16::try_from(path.len()))
        else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        if group != u32::from(b'u') || nr > 0x17 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // An own copy, so that there is something to leave to the kernel if it cannot be waited for.
        let mut owned = ManuallyDrop::new([path, bytes].concat());
        let addr = if owned.is_empty() { 0 } else { owned.as_mut_ptr() as u64 };
        let command = CtrlCmd { addr, len, dev_path_len, ..command };
        let mut inline = [0; 80];
        inline[..size_of::<CtrlCmd>()].copy_from_slice(command.bytes());
        let entry = opcode::UringCmd80::new(types::Fd(control.as_raw_fd()), number).cmd(inline).build();

        let result = self.round_trip(&entry, patience)?;
        if result >= 0
            && let Some(buffer) = buffer
        {
            buffer.fill(&owned[path.len()..]);
        }
        drop(ManuallyDrop::into_inner(owned));
        if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(result) }
    }

    /// Submits one entry and waits for its completion. On an error nothing is known of the entry.
    fn round_trip(&mut self, entry: &squeue::Entry128, patience: Option<Duration>) -> io::Result<i32> {
        let deadline = patience.and_then(|patience| Instant::now().checked_add(patience));
        // SAFETY: the descriptor is borrowed by the caller, the buffer stays allocated until the completion
        // was seen and is leaked when it was not.
        unsafe { self.0.submission().push(entry) }
            .map_err(|_| io::Error::from(io::ErrorKind::ResourceBusy))?;
        loop {
            let outcome = match deadline {
                None => self.0.submit_and_wait(1),
                Some(deadline) => {
                    let left = types::Timespec::from(deadline.saturating_duration_since(Instant::now()));
                    self.0.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&left))
                }
            };
            if let Some(completion) = self.0.completion().next() {
                return Ok(completion.result());
            }
            match outcome {
                Ok(_) => {}
                Err(error)
                    if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
                Err(error) if error.raw_os_error() == Some(libc::ETIME) => {
                    return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT));
                }
                Err(error) => return Err(error),
            }
        }
    }
}
