//! The nodes of the loop driver: its control device, and its devices by number.
//! Never configures or clears one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use becket_uapi::loop_ as uapi;
use rustix::fs::FileType;

use crate::{Error, Kind, module, node, sysfs};

/// Whether an error of opening a device says that there is none.
pub(super) fn is_absent(errno: Option<i32>) -> bool {
    matches!(errno, Some(libc::ENOENT | libc::ENXIO | libc::ENODEV))
}

/// The name of device `number` in sysfs.
pub(super) fn name(number: u32) -> String {
    format!("loop{number}")
}

/// The node of device `number`.
pub(super) fn path(number: u32) -> PathBuf {
    sysfs::node(&name(number))
}

/// Its device number; without sysfs that of a driver whose `max_part` is 0, the default. `None` when there is
/// no such device: a node would only lead to one that the kernel makes when it is opened.
pub(super) fn dev(number: u32) -> Option<u64> {
    let by_default = || rustix::fs::makedev(uapi::LOOP_MAJOR, number);
    sysfs::dev(&name(number)).or_else(|| (!sysfs::is_there()).then(by_default))
}

/// Opens `/dev/loop-control`, also where it has no node.
pub(super) fn open_control() -> Result<File, Error> {
    let (major, minor) = uapi::LOOP_CONTROL;
    let path = Path::new("/dev/loop-control");
    match node::open_control(Kind::Loop, path, Some(rustix::fs::makedev(major, minor))) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENXIO)) => {
            Err(module::missing(Kind::Loop, "loop", "CONFIG_BLK_DEV_LOOP"))
        }
        other => other.map(File::from),
    }
}

/// The same, opened once for all devices that a process attaches.
pub(super) fn control() -> Result<&'static File, Error> {
    static CONTROL: OnceLock<File> = OnceLock::new();
    if let Some(control) = CONTROL.get() {
        return Ok(control);
    }
    let opened = open_control()?;
    Ok(CONTROL.get_or_init(|| opened))
}

/// Opens device `number`, whose node is made when it is missing.
pub(super) fn open_device(number: u32, writable: bool) -> Result<File, Error> {
    open_with(number, File::options().read(true).write(writable))
}

/// Opens device `number` as its only exclusive user. That fails with EBUSY while it, or a partition of it, is
/// mounted, used as swap or stacked upon.
pub(super) fn open_exclusive(number: u32) -> Result<File, Error> {
    open_with(number, File::options().read(true).custom_flags(libc::O_EXCL))
}

fn open_with(number: u32, options: &OpenOptions) -> Result<File, Error> {
    let path = path(number);
    // Most nodes exist and are the right ones: where partitions have no numbers of their own, a look at the
    // open one tells.
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
