//! Clearing and resizing a loop device.
//! It never clears a device that is not the one that was meant: numbers are used again, sequence numbers are not.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use becket_uapi::{block, loop_ as uapi};

use super::{is_absent, name, open_device, open_exclusive, path};
use crate::{Error, node, sysfs};

/// How long the kernel may take to clear a device at its last close, which on all kernels seen is over with the close.
const LAST_CLOSE: Duration = Duration::from_secs(5);

/// How a detached device went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cleared {
    /// It is not bound any more.
    Gone,
    /// Somebody has it open; it goes when the last user closes it.
    WhenUnused,
}

/// Detaches device `number` if its sequence number is `diskseq` (where one is given), and waits up to `wait` until
/// it is gone. One in use goes with its last user. With a `diskseq` a device that is not bound any more is
/// [`Cleared::Gone`] as well.
///
/// # Errors
/// [`Error::NotAttached`]: it is not bound, and no `diskseq` was given. [`Error::OtherDevice`]: the number is another
/// device's by now, which is left alone; a larger `found` means that the one that was meant is gone. Or the kernel
/// refuses.
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

/// Detaches device `number` as [`detach`] does, but only when nobody else uses it in any way; says whether it is gone.
/// It asks the kernel alone, which costs a few system calls.
///
/// With other openers LOOP_CLR_FD marks a device to go with the last of them, and says nothing. A sole opener's device
/// is cleared at once up to Linux 6.10, and on later ones marked beyond recall and cleared at our close; both answer
/// the next question for their state with ENXIO. One that still has a state is thus in use, and its mark is taken
/// back, which no kernel refuses to an exclusive opener.
///
/// The race that is left: for the moment between the two calls the device is marked. It cannot go meanwhile, since we
/// have it open; but if we are killed just then it goes with its last user, and when somebody else tells it to do so
/// in that very moment, that is forgotten.
///
/// A device whose file's server is dead has no state that could be asked for, and nothing but errors for its users: it is
/// told to go in any case, if need be with the last of them.
///
/// # Errors
/// Those of [`detach`].
pub fn detach_unused(number: u32, diskseq: Option<u64>) -> Result<bool, Error> {
    let opened = match open_exclusive(number) {
        // The claim of one who uses it, or of one who has got the number after it.
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Ok(!is_there(number, diskseq)),
        opened => opened,
    };
    let Some(meant) = Meant::check(number, diskseq, opened)? else { return Ok(true) };
    if !clear(number, &meant.device)? {
        return Ok(true);
    }
    match (uapi::get_status64(meant.device.as_fd()), &meant.info) {
        (Ok(_), Some(info)) if info.lo_flags & uapi::LO_FLAGS_AUTOCLEAR == 0 => {
            uapi::set_status64(meant.device.as_fd(), info)
                .map_err(Error::io("take back the clearing of", path(number)))?;
            Ok(false)
        }
        // It was to go with its last user before we came.
        (Ok(_), _) => Ok(false),
        (Err(error), _) if error.raw_os_error() == Some(libc::ENXIO) => {
            // What BLKROSET has said of the node would outlive the device and meet the next user of its number. The
            // image's own flag is another one, which goes with it.
            if block::read_only(meant.device.as_fd()).unwrap_or(false) {
                let _ = block::set_read_only(meant.device.as_fd(), false);
            }
            drop(meant.device);
            Ok(await_gone(number, meant.diskseq, LAST_CLOSE) == Cleared::Gone)
        }
        (Err(_), None) => {
            drop(meant.device);
            Ok(await_gone(number, meant.diskseq, Duration::ZERO) == Cleared::Gone)
        }
        (Err(error), Some(_)) => Err(Error::io("ask for the state of", path(number))(error)),
    }
}

/// A bound device that is the one that was meant. While it is open it cannot become another one: clearing waits for
/// our descriptor as for any other.
struct Meant {
    device: File,
    /// `None` when its file has died, which the kernel asks for the state.
    info: Option<uapi::LoopInfo64>,
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
        let info = match (uapi::get_status64(device.as_fd()), diskseq) {
            (Ok(info), _) => Some(info),
            (Err(error), Some(_)) if error.raw_os_error() == Some(libc::ENXIO) => return Ok(None),
            (Err(error), None) if error.raw_os_error() == Some(libc::ENXIO) => {
                return Err(Error::NotAttached { device: path(number) });
            }
            // Of a FUSE server that is gone.
            (Err(error), Some(_)) if has_died(error.raw_os_error()) => None,
            (Err(error), _) => return Err(Error::io("ask for the state of", path(number))(error)),
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

fn has_died(errno: Option<i32>) -> bool {
    matches!(errno, Some(libc::ENOTCONN | libc::ECONNABORTED | libc::EIO))
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

/// Has the node of a device that is not bound take writes again: what BLKROSET has said outlives the device, also where
/// another program has cleared it, and would meet the next user of its number.
pub fn thaw(number: u32) {
    let Ok(device) = open_device(number, false) else { return };
    let device = device.as_fd();
    // The flag of an image that is for reading only is another one, so whoever binds the device meanwhile loses nothing.
    let unbound = uapi::get_status64(device).is_err_and(|error| error.raw_os_error() == Some(libc::ENXIO));
    if unbound && block::read_only(device).unwrap_or(false) {
        let _ = block::set_read_only(device, false);
    }
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
