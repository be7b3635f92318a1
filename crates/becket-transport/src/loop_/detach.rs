//! Clearing and resizing a loop device.
//! It never clears a device that is not the one that was meant: numbers are used again, sequence numbers are not.

use std::io;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use becket_uapi::{block, loop_ as uapi};

use super::{name, open_device, path};
use crate::{Error, node, sysfs};

/// How a detached device went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cleared {
    /// It is not bound any more.
    Gone,
    /// Somebody has it open; it goes when the last user closes it.
    WhenUnused,
}

/// Detaches device `number` if its sequence number is `diskseq` (where one is given), and waits up to `wait` until
/// it is gone. With a `diskseq` a device that is not bound any more is [`Cleared::Gone`] as well.
///
/// # Errors
/// [`Error::NotAttached`]: it is not bound, and no `diskseq` was given. [`Error::OtherDevice`]: the number is another
/// device's by now, which is left alone; a larger `found` means that the one that was meant is gone. Or the kernel
/// refuses.
pub fn detach(number: u32, diskseq: Option<u64>, wait: Option<Duration>) -> Result<Cleared, Error> {
    let device = match open_device(number, false) {
        Ok(device) => device,
        Err(error) if diskseq.is_some() && is_absent(error.raw_os_error()) => return Ok(Cleared::Gone),
        Err(error) => return Err(error),
    };
    // From here on the device cannot become another one: clearing waits for our descriptor as for any other.
    let bound = match uapi::get_status64(device.as_fd()) {
        Ok(_) => true,
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => false,
        Err(error) => return Err(Error::io("ask for the state of", path(number))(error)),
    };
    if !bound {
        return match diskseq {
            Some(_) => Ok(Cleared::Gone),
            None => Err(Error::NotAttached { device: path(number) }),
        };
    }
    let found = block::diskseq(device.as_fd()).ok();
    if let (Some(expected), Some(found)) = (diskseq, found)
        && expected != found
    {
        return Err(Error::OtherDevice { device: path(number), expected, found });
    }
    match uapi::clr_fd(device.as_fd()) {
        Ok(()) => {}
        // Its own autoclear was faster.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => return Ok(Cleared::Gone),
        Err(error) => return Err(Error::io("clear", path(number))(error)),
    }
    drop(device);
    Ok(await_gone(number, found, wait.unwrap_or_default()))
}

fn is_absent(errno: Option<i32>) -> bool {
    matches!(errno, Some(libc::ENOENT | libc::ENXIO | libc::ENODEV))
}

/// Looks, without opening it, until the device is gone or `wait` is over.
fn await_gone(number: u32, diskseq: Option<u64>, wait: Duration) -> Cleared {
    let started = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        if !is_there(number, diskseq) {
            return Cleared::Gone;
        }
        let left = wait.saturating_sub(started.elapsed());
        if left.is_zero() {
            return Cleared::WhenUnused;
        }
        thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Whether that very device is bound.
fn is_there(number: u32, diskseq: Option<u64>) -> bool {
    let name = name(number);
    if sysfs::is_there() {
        let same = match (diskseq, node::diskseq(&name)) {
            (Some(ours), Some(present)) => ours == present,
            _ => true,
        };
        return same && sysfs::directory(&name).join("loop").exists();
    }
    // No sysfs: there is no other way than to open it.
    open_device(number, false).is_ok_and(|device| {
        let bound = uapi::get_status64(device.as_fd()).is_ok();
        bound && (diskseq.is_none() || block::diskseq(device.as_fd()).ok() == diskseq)
    })
}

/// Takes over the backing file's present size and returns the device's new one, in bytes. A size limit stays.
///
/// # Errors
/// The device is not bound, or the kernel refuses.
pub fn refresh(number: u32) -> Result<u64, Error> {
    let device = open_device(number, false)?;
    uapi::set_capacity(device.as_fd()).map_err(|error| match error.raw_os_error() {
        Some(libc::ENXIO) => Error::NotAttached { device: path(number) },
        _ => Error::io("resize", path(number))(error),
    })?;
    block::size64(device.as_fd())
        .map_err(|error: io::Error| Error::io("ask for the size of", path(number))(error))
}
