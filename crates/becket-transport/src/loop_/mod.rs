//! Devices of the kernel's loop driver: no server, one contiguous range of one file or block device each.
//! It never keeps state: a device's life is the kernel's, and everything about it is read from there.

mod attach;
mod detach;
mod direct;
mod status;
#[cfg(test)]
mod tests;

pub use attach::{LoopDevice, LoopOptions, attach};
pub use detach::{Cleared, detach, refresh};
pub use status::{LoopStatus, numbers, status};

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use becket_image::Opened;
use becket_uapi::loop_ as uapi;

use crate::{Error, Kind, Probe, Transport, module, node, sysfs};

/// Why an image does not fit.
const NOT_ONE_RANGE: &str = "the image is not one contiguous range of one file";

/// The kernel's loop driver.
#[derive(Debug, Clone, Copy)]
pub struct LoopTransport;

impl Transport for LoopTransport {
    fn kind(&self) -> Kind {
        Kind::Loop
    }

    fn probe(&self) -> Probe {
        let attached = numbers().len();
        let details = vec![("devices attached".to_owned(), attached.to_string())];
        match open_control().and_then(|_| probe_node()) {
            Ok(()) => Probe {
                works: true,
                reason: "the kernel's loop driver is there".to_owned(),
                mend: None,
                details,
            },
            Err(error) => {
                let (reason, mend) = match error {
                    Error::Unavailable { reason, mend, .. } => (reason, mend),
                    other => (other.to_string(), other.hint()),
                };
                Probe { works: false, reason, mend, details }
            }
        }
    }

    fn fits(&self, opened: &Opened) -> Result<(), String> {
        match opened.map.single_range() {
            Some((file, ..)) if opened.files.get(file as usize).is_some() => Ok(()),
            _ => Err(NOT_ONE_RANGE.to_owned()),
        }
    }
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

/// Opens `/dev/loop-control`, whose node is made when it is missing. Opening it loads the driver where it is a module.
fn open_control() -> Result<File, Error> {
    let path = Path::new("/dev/loop-control");
    let open = || File::options().read(true).write(true).open(path);
    let opened = match open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let (major, minor) = uapi::LOOP_CONTROL;
            node::ensure_char(path, rustix::fs::makedev(major, minor))?;
            open()
        }
        other => other,
    };
    opened.map_err(|source| match source.raw_os_error() {
        Some(libc::ENODEV | libc::ENXIO) => module::missing(Kind::Loop, "loop", "CONFIG_BLK_DEV_LOOP"),
        _ => Error::io("open", path)(source),
    })
}

/// A container may allow the control node and forbid the devices.
fn probe_node() -> Result<(), Error> {
    match open_device(0, false) {
        // None yet: they are made when they are needed.
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        other => other.map(drop),
    }
}

/// Opens device `number`, whose node is made when it is missing.
fn open_device(number: u32, writable: bool) -> Result<File, Error> {
    let path = path(number);
    let dev = dev(number).ok_or(libc::ENODEV).map_err(io::Error::from_raw_os_error);
    node::ensure_block(&path, dev.map_err(Error::io("open", &path))?)?;
    File::options().read(true).write(writable).open(&path).map_err(Error::io("open", path))
}
