//! Whether a loop device bypasses the page cache of its backing, decided before and verified after.
//! It never trusts the driver: some kernels silently drop the request, others grant it where I/O would then
//! fail.

use std::os::fd::{AsFd as _, BorrowedFd};

use becket_image::{DirectIo, Opened};
use becket_uapi::loop_ as uapi;

use super::device::{open_device, path};
use super::range::Range;
use super::status;
use crate::Error;

/// What memory a loop device's users must align to for their own direct I/O, whatever the backing wants.
const MEMORY: u32 = 512;

/// What to do about direct I/O.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Wish {
    /// It is not wanted, or the backing cannot do it, which its facts say already.
    Without,
    /// The driver cannot do it on this backing although others can; the reason.
    Cannot(String),
    /// The driver is asked for it.
    Ask,
}

/// Decides for one image.
///
/// # Errors
/// It was demanded and cannot be.
pub(super) fn wish(opened: &Opened, range: &Range<'_>, asked: DirectIo) -> Result<Wish, Error> {
    let wish = match (asked, range.file.facts.direct) {
        (DirectIo::Off, _) | (DirectIo::Auto, None) => Wish::Without,
        (DirectIo::On, None) => Wish::Cannot(range.file.facts.direct_reason.clone()),
        // Not every kernel compares these: the device would be there and its small requests would fail.
        (_, Some(align)) if align.offset > opened.block_size => Wish::Cannot(format!(
            "the backing wants units of {} bytes, the blocks have {}",
            align.offset, opened.block_size
        )),
        (_, Some(align)) if !range.offset.is_multiple_of(align.offset.max(1).into()) => {
            Wish::Cannot(format!(
                "the backing wants units of {} bytes, the image starts at byte {}",
                align.offset, range.offset
            ))
        }
        (_, Some(align)) if align.memory > MEMORY => Wish::Cannot(format!(
            "the backing wants memory aligned to {} bytes, users of a loop device align to {MEMORY}",
            align.memory
        )),
        (_, Some(_)) => Wish::Ask,
    };
    match wish {
        Wish::Cannot(reason) if asked == DirectIo::On => refused(opened, reason),
        wish => Ok(wish),
    }
}

/// What came of it on the bound device: whether it is on, and a warning where it should have been.
///
/// # Errors
/// It was demanded and the driver refuses.
pub(super) fn settle(
    device: BorrowedFd<'_>,
    opened: &Opened,
    asked: DirectIo,
    wish: Wish,
) -> Result<(bool, Option<String>), Error> {
    let reason = match wish {
        Wish::Without => return Ok((false, None)),
        Wish::Cannot(reason) => reason,
        Wish::Ask => match refusal(device) {
            None => return Ok((true, None)),
            Some(reason) => reason,
        },
    };
    if asked == DirectIo::On {
        return refused(opened, reason);
    }
    let warning =
        format!("I/O goes through the page cache: the loop driver cannot do direct I/O here ({reason})");
    Ok((false, Some(warning)))
}

/// Switches a bound device between direct I/O and the page cache. The driver holds its requests for the
/// moment and writes dirty pages back. Returns the new state, and why.
///
/// # Errors
/// The device is not bound, the file system of its image does not answer, or direct I/O was demanded and is
/// refused.
pub fn set_direct_io(number: u32, wanted: DirectIo) -> Result<(bool, String), Error> {
    let device = open_device(number, false)?;
    // The driver syncs the image while it holds the device.
    status::reported(number, &device)?;
    let device = device.as_fd();
    let failed = |error: std::io::Error| match error.raw_os_error() {
        Some(libc::ENXIO) => Error::NotAttached { device: path(number) },
        _ => Error::io("switch direct I/O of", path(number))(error),
    };
    if wanted == DirectIo::Off {
        uapi::set_direct_io(device, false).map_err(failed)?;
        return Ok((false, "switched off".to_owned()));
    }
    match refusal(device) {
        None => Ok((true, "the loop driver does it".to_owned())),
        Some(reason) if wanted == DirectIo::On => Err(Error::NoDirectIo { image: path(number), reason }),
        Some(reason) => Ok((false, format!("the loop driver refuses it: {reason}"))),
    }
}

fn refused<T>(opened: &Opened, reason: String) -> Result<T, Error> {
    Err(Error::NoDirectIo { image: opened.path.clone(), reason })
}

/// Why direct I/O did not come to be, if it did not. The driver is asked for it once more: if it is on
/// already this does nothing, and if it was silently dropped this returns the error. The flag of the device's
/// state is the request, before Linux 6.14, and sysfs, which has the truth, costs more than all other
/// questions about a new device: its directory is as new as the device is.
fn refusal(device: BorrowedFd<'_>) -> Option<String> {
    uapi::set_direct_io(device, true).err().map(|error| error.to_string())
}
