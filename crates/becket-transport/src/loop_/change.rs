//! Changes that the loop driver can make to a bound device. It holds requests back until those under way have
//! ended.
//! It never changes what was not asked for.

use std::os::fd::{AsFd, BorrowedFd};
use std::thread;
use std::time::Duration;

use becket_uapi::{block, loop_ as uapi};

use super::device::{open_device, path};
use super::status::reported;
use crate::Error;

/// How often the driver is asked again that found dirty pages of the device (before Linux 5.18).
const ATTEMPTS: u32 = 64;

/// Gives a bound device another limit in bytes, or none, and returns its new length.
///
/// # Errors
/// The device is not bound, the file system of its image does not answer, or the driver refuses.
pub fn set_size_limit(number: u32, limit: Option<u64>) -> Result<u64, Error> {
    let device = open_device(number, false)?;
    let mut info = reported(number, &device)?;
    let device = device.as_fd();
    info.lo_sizelimit = limit.unwrap_or(0);
    for attempt in 1.. {
        match uapi::set_status64(device, &info) {
            Err(error) if attempt < ATTEMPTS && error.raw_os_error() == Some(libc::EAGAIN) => {
                thread::sleep(Duration::from_millis(5));
            }
            other => {
                other.map_err(failed(number))?;
                break;
            }
        }
    }
    block::size64(device).map_err(Error::io("ask for the size of", path(number)))
}

/// Replaces the image of a read-only device. The device is bound to that very descriptor, which carries the
/// locks. To the kernel this is another medium: the device's sequence number is a new one.
///
/// # Errors
/// `EINVAL`: the device is not read-only, or the image is not as long as its own. Or the device is not bound,
/// or the file system of its present image does not answer.
pub fn change_image(number: u32, image: BorrowedFd<'_>) -> Result<(), Error> {
    let device = open_device(number, false)?;
    // The driver asks the old image, too, for its length.
    reported(number, &device)?;
    uapi::change_fd(device.as_fd(), image).map_err(failed(number))
}

fn failed(number: u32) -> impl FnOnce(std::io::Error) -> Error {
    move |error| match error.raw_os_error() {
        Some(libc::ENXIO) => Error::NotAttached { device: path(number) },
        _ => Error::io("change", path(number))(error),
    }
}
