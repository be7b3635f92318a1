//! Clearing and resizing a loop device.
//! It never clears another device than the one that was meant: numbers are used again, sequence numbers are
//! not.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use becket_uapi::{block, loop_ as uapi};

use super::device::{is_absent, name, open_device, open_exclusive, path};
use super::status::{known, reported};
use crate::{Error, node, sysfs};

/// How long the kernel may take to clear a device at its last close; on all kernels seen the close itself
/// clears it.
const LAST_CLOSE: Duration = Duration::from_secs(5);

/// How a detached device went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cleared {
    /// It is not bound any more.
    Gone,
    /// A process has it open; it goes when the last user closes it.
    WhenUnused,
}

/// Detaches device `number` if its sequence number is `diskseq` (if one is given), and waits up to `wait`
/// until it is gone. One in use goes with its last user. With a `diskseq` a device that is not bound any more
/// is [`Cleared::Gone`] as well.
///
/// # Errors
/// [`Error::NotAttached`]: it is not bound, and no `diskseq` was given. [`Error::OtherDevice`]: the number is
/// another device's by now, which is left alone; a larger `found` means that the one that was meant is gone.
/// Or the kernel refuses.
pub fn detach(number: u32, diskseq: Option<u64>, wait: Option<Duration>) -> Result<Cleared, Error> {
    let Some(meant) = Meant::check(number, diskseq, open_device(number, false))? else {
        return Ok(Cleared::Gone);
    };
    if !clear(number, &meant.device)? {
        return Ok(Cleared::Gone);
    }
    drop(meant.device);
    Ok(await_gone(number, meant.diskseq, wait.unwrap_or_default()))
}

/// Detaches device `number` as [`detach`] does, but only when it has no other user of any kind; returns
/// whether it is gone. It asks the kernel alone, which costs a few system calls.
///
/// With other openers LOOP_CLR_FD marks a device to go with the last of them, and says nothing. A sole
/// opener's device is cleared at once up to Linux 6.10, and on later ones marked beyond recall and cleared at
/// our close; both answer with ENXIO when their mark is to be taken back. If taking it back succeeds the
/// device is in use. No kernel refuses it to an exclusive opener.
///
/// The remaining race: for the moment between the two calls the device is marked. It cannot go meanwhile,
/// because we have it open; but if we are killed just then it goes with its last user, and when another
/// process marks it in that very moment, that mark is lost.
///
/// Taking the mark back waits for all requests under way, with the device locked meanwhile, so that it could
/// not be opened if its backing hangs. So one with requests under way is left alone: it is in use by those
/// who wait for them.
///
/// # Errors
/// Those of [`detach`].
pub fn detach_unused(number: u32, diskseq: Option<u64>) -> Result<bool, Error> {
    if sysfs::counted(&name(number)).is_some_and(|counted| counted.in_flight > 0) {
        return Ok(!is_there(number, diskseq));
    }
    let opened = match open_exclusive(number) {
        // The claim of one who uses it, or of one who has got the number after it.
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Ok(!is_there(number, diskseq)),
        opened => opened,
    };
    let Some(meant) = Meant::check(number, diskseq, opened)? else { return Ok(true) };
    if !clear(number, &meant.device)? {
        return Ok(true);
    }
    match uapi::set_status64(meant.device.as_fd(), &meant.info) {
        // With the mark of one that was to go with its last user before we came.
        Ok(()) => Ok(false),
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
            // BLKROSET's setting of the node would outlive the device and affect the next user of its number.
            // The image's own flag is another one, which goes with it.
            if block::read_only(meant.device.as_fd()).unwrap_or(false) {
                let _ = block::set_read_only(meant.device.as_fd(), false);
            }
            drop(meant.device);
            Ok(await_gone(number, meant.diskseq, LAST_CLOSE) == Cleared::Gone)
        }
        Err(error) => Err(Error::io("take back the clearing of", path(number))(error)),
    }
}

/// A bound device that is the one that was meant. While it is open it cannot become another one: clearing
/// waits for our descriptor as for any other.
struct Meant {
    device: File,
    info: uapi::LoopInfo64,
    diskseq: Option<u64>,
}

impl Meant {
    /// `None` when it is not bound any more and a `diskseq` says that it was.
    fn check(number: u32, diskseq: Option<u64>, opened: Result<File, Error>) -> Result<Option<Meant>, Error> {
        let device = match opened {
            Ok(device) => device,
            Err(error) if diskseq.is_some() && is_absent(error.raw_os_error()) => return Ok(None),
            Err(error) => return Err(error),
        };
        let Some(info) = bound(number, &device)? else {
            return diskseq.map(|_| None).ok_or_else(|| Error::NotAttached { device: path(number) });
        };
        let found = block::diskseq(device.as_fd()).ok();
        match (diskseq, found) {
            (Some(expected), Some(found)) if expected != found => {
                Err(Error::OtherDevice { device: path(number), expected, found })
            }
            _ => Ok(Some(Meant { device, info, diskseq: found })),
        }
    }
}

/// Tells the kernel; `false` when the device's own autoclear was faster.
fn clear(number: u32, device: &File) -> Result<bool, Error> {
    match uapi::clr_fd(device.as_fd()) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(false),
        Err(error) => Err(Error::io("clear", path(number))(error)),
    }
}

/// The driver's settings of an open device; `None` when it is not bound. The file system of its image is not
/// asked: it may be the reason why the user wants to remove the device. Without sysfs there is no other way.
fn bound(number: u32, device: &File) -> Result<Option<uapi::LoopInfo64>, Error> {
    if sysfs::is_there() {
        return Ok(known(number));
    }
    match uapi::get_status64(device.as_fd()) {
        Ok(info) => Ok(Some(info)),
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        Err(error) => Err(Error::io("ask for the state of", path(number))(error)),
    }
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
        bound(number, &device).is_ok_and(|info| info.is_some())
            && (diskseq.is_none() || block::diskseq(device.as_fd()).ok() == diskseq)
    })
}

/// Makes the node of a device that is not bound take writes again: BLKROSET's setting outlives the device,
/// also if another program has cleared it, and would affect the next user of its number.
pub fn thaw(number: u32) {
    let Ok(device) = open_device(number, false) else { return };
    // The flag of a read-only image is another one, so a process that binds the device meanwhile loses
    // nothing.
    let unbound = bound(number, &device).is_ok_and(|info| info.is_none());
    let device = device.as_fd();
    if unbound && block::read_only(device).unwrap_or(false) {
        let _ = block::set_read_only(device, false);
    }
}

/// Takes over the backing file's present size and returns the device's new one, in bytes. A size limit stays.
///
/// # Errors
/// The device is not bound, the file system of its image does not answer, or the kernel refuses.
pub fn refresh(number: u32) -> Result<u64, Error> {
    let device = open_device(number, false)?;
    reported(number, &device)?;
    uapi::set_capacity(device.as_fd()).map_err(|error| match error.raw_os_error() {
        Some(libc::ENXIO) => Error::NotAttached { device: path(number) },
        _ => Error::io("resize", path(number))(error),
    })?;
    block::size64(device.as_fd())
        .map_err(|error: io::Error| Error::io("ask for the size of", path(number))(error))
}
