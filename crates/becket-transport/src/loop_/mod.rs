//! Devices of the kernel's loop driver: no server, one contiguous range of one file or block device each.
//! It never keeps state: a device's life is the kernel's, and everything about it is read from there.

mod attach;
mod change;
mod detach;
mod direct;
mod status;
#[cfg(test)]
mod tests;

pub use attach::{LoopDevice, LoopOptions, attach};
pub use change::{change_image, set_size_limit};
pub use detach::{Cleared, detach, detach_unused, refresh, thaw};
pub use direct::set_direct_io;
pub use status::{LoopStatus, numbers, status};

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use becket_image::Opened;
use becket_uapi::loop_ as uapi;
use rustix::fs::FileType;

use crate::{Error, Kind, Probe, Transport, module, node, sysfs};

/// Why an image does not fit.
const NOT_ONE_RANGE: &str = "the image is not one contiguous range of one file: that takes ublk or fuse, or a raw copy (`qemu-img convert -O raw`)";

/// The kernel's loop driver.
#[derive(Debug, Clone, Copy)]
pub struct LoopTransport;

impl Transport for LoopTransport {
    fn kind(&self) -> Kind {
        Kind::Loop
    }

    fn probe(&self) -> Probe {
        judge(control().map(drop))
    }

    fn fits(&self, opened: &Opened) -> Result<(), String> {
        match opened.map.single_range() {
            Some((file, ..)) if opened.files.get(file as usize).is_some() && !opened.grows => Ok(()),
            _ => Err(NOT_ONE_RANGE.to_owned()),
        }
    }
}

/// The probe for people: slower, since it also tries a device and counts those attached. Every attach asks the quick
/// one, which leaves other people's devices alone.
pub fn examine() -> Probe {
    let attached = ("devices attached".to_owned(), numbers().len().to_string());
    Probe { details: vec![attached], ..judge(open_control().and_then(|_| probe_node())) }
}

fn judge(tried: Result<(), Error>) -> Probe {
    let (reason, fix) = match tried {
        Ok(()) => {
            let reason = "the kernel's loop driver is there".to_owned();
            return Probe { works: true, reason, fix: None, details: Vec::new() };
        }
        Err(Error::Unavailable { reason, fix, .. }) => (reason, fix),
        Err(other) => (other.to_string(), other.hint()),
    };
    Probe { works: false, reason, fix, details: Vec::new() }
}

/// Whether an error of opening a device says that there is none.
fn is_absent(errno: Option<i32>) -> bool {
    matches!(errno, Some(libc::ENOENT | libc::ENXIO | libc::ENODEV))
}

/// The name of device `number` in sysfs.
fn name(number: u32) -> String {
    format!("loop{number}")
}

/// The node of device `number`.
fn path(number: u32) -> PathBuf {
    sysfs::node(&name(number))
}

/// Its device number; without sysfs that of a driver whose `max_part` is 0, the default. `None` when there is no such
/// device: a node would only lead to one that the kernel makes when it is opened.
fn dev(number: u32) -> Option<u64> {
    let by_default = || rustix::fs::makedev(uapi::LOOP_MAJOR, number);
    sysfs::dev(&name(number)).or_else(|| (!sysfs::is_there()).then(by_default))
}

/// Opens `/dev/loop-control`, also where it has no node.
fn open_control() -> Result<File, Error> {
    let (major, minor) = uapi::LOOP_CONTROL;
    let path = Path::new("/dev/loop-control");
    match node::open_control(Kind::Loop, path, Some(rustix::fs::makedev(major, minor))) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENXIO)) => {
            Err(module::missing(Kind::Loop, "loop", "CONFIG_BLK_DEV_LOOP"))
        }
        other => other.map(File::from),
    }
}

/// A container may allow the control node and forbid the devices. A device or node that is missing is not made.
fn probe_node() -> Result<(), Error> {
    let path = path(0);
    if dev(0).is_none() || !path.exists() {
        return Ok(());
    }
    File::open(&path).map(drop).map_err(Error::io("open", path))
}

/// The same for whom a process that attaches many devices would open it again and again.
fn control() -> Result<&'static File, Error> {
    static CONTROL: OnceLock<File> = OnceLock::new();
    if let Some(control) = CONTROL.get() {
        return Ok(control);
    }
    let opened = open_control()?;
    Ok(CONTROL.get_or_init(|| opened))
}

/// Opens device `number`, whose node is made when it is missing.
fn open_device(number: u32, writable: bool) -> Result<File, Error> {
    open_with(number, File::options().read(true).write(writable))
}

/// Opens device `number` as its only exclusive user. That fails with EBUSY while it, or a partition of it, is mounted,
/// swapped to or stacked upon.
fn open_exclusive(number: u32) -> Result<File, Error> {
    open_with(number, File::options().read(true).custom_flags(libc::O_EXCL))
}

fn open_with(number: u32, options: &OpenOptions) -> Result<File, Error> {
    let path = path(number);
    // Most nodes are there and the right ones: where partitions have no numbers of their own, a look at the open one tells.
    let usual = rustix::fs::makedev(uapi::LOOP_MAJOR, number);
    if let Ok(device) = options.open(&path)
        && rustix::fs::fstat(&device).is_ok_and(|stat| {
            FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice && stat.st_rdev == usual
        })
    {
        return Ok(device);
    }
    let dev = dev(number).ok_or(libc::ENODEV).map_err(io::Error::from_raw_os_error);
    node::ensure_block(&path, dev.map_err(Error::io("open", &path))?)?;
    options.open(&path).map_err(Error::io("open", path))
}
