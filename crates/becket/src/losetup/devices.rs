//! Devices of both kinds, the loop driver's and becket's own, and which of them show a file.
//! Never changes one.

use super::columns::Column;
use super::device::{self, Loop};
use super::served::{self, Served};
use super::table::Value;
use super::trouble::Trouble;
use becket_uapi::loop_::LoopInfo64;
use rustix::fs::Stat;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;

/// A device of either kind.
pub(super) enum Device {
    Loop(Box<Loop>),
    Served(Box<Served>),
}

impl Device {
    /// The device that a word of the command line means.
    pub(super) fn named(word: &OsStr) -> Result<Device, Trouble> {
        let path = device::path_of(word);
        if served::is_served(&path) {
            return served::find(&path).map(|served| Device::Served(Box::new(served)));
        }
        Loop::named(word).map(|device| Device::Loop(Box::new(device))).ok_or_else(|| no_device(word))
    }

    /// All devices in use.
    pub(super) fn in_use() -> Result<Vec<Device>, Trouble> {
        let mut devices: Vec<_> =
            device::in_use().into_iter().map(|device| Device::Loop(Box::new(device))).collect();
        if served::wanted() {
            devices.extend(served::all()?.into_iter().map(|served| Device::Served(Box::new(served))));
        }
        Ok(devices)
    }

    /// First byte of the file. `None` when the device is going away.
    pub(super) fn offset(&self) -> Option<u64> {
        match self {
            Device::Loop(device) => device.offset(),
            Device::Served(served) => Some(served.info.spec.offset),
        }
    }

    /// Most bytes, 0 for all that there are. `None` when the device is going away.
    pub(super) fn size_limit(&self) -> Option<u64> {
        match self {
            Device::Loop(device) => device.size_limit(),
            Device::Served(served) => Some(served.info.spec.size_limit.unwrap_or(0)),
        }
    }

    pub(super) fn is_read_only(&self) -> bool {
        match self {
            Device::Loop(device) => device.is_read_only(),
            Device::Served(served) => served.info.spec.read_only,
        }
    }

    pub(super) fn cell(&self, column: Column) -> Option<Value> {
        match self {
            Device::Loop(device) => device.cell(column),
            Device::Served(served) => served.cell(column),
        }
    }

    /// Device number and inode of the file, where they can be known.
    pub(super) fn identity(&self) -> Option<(u64, u64)> {
        match self {
            Device::Loop(device) => device.info().map(|info| (info.lo_device, info.lo_inode)),
            Device::Served(served) => served.identity(),
        }
    }
}

/// What is said of a word that is not a loop device.
pub(super) fn no_device(word: &OsStr) -> Trouble {
    Trouble::because(&format!("{}: failed to use device", word.display()), &rustix::io::Errno::NODEV.into())
}

/// The devices of a file: those that have its inode; where that cannot be known, those that name its path.
pub(super) struct Wanted {
    stat: Option<Stat>,
    paths: [OsString; 2],
    offset: Option<u64>,
}

impl Wanted {
    pub(super) fn new(file: &OsStr, offset: Option<u64>) -> Wanted {
        Wanted { stat: rustix::fs::stat(file).ok(), paths: [file.to_owned(), device::real(file)], offset }
    }

    pub(super) fn is(&self, device: &Device) -> bool {
        let of_file = match device {
            Device::Loop(device) => self.is_backing(device),
            Device::Served(served) => served.is_of(self.stat.as_ref(), &self.paths),
        };
        of_file && self.offset.is_none_or(|offset| device.offset() == Some(offset))
    }

    fn is_backing(&self, device: &Loop) -> bool {
        let same =
            |stat: &Stat, info: &LoopInfo64| (info.lo_inode, info.lo_device) == (stat.st_ino, stat.st_dev);
        match self.stat.as_ref().and_then(|stat| Some(same(stat, device.info()?))) {
            Some(same) => same,
            None => {
                let backing = device.backing_file();
                backing.is_some_and(|backing| self.paths.iter().any(|path| path.as_bytes() == backing))
            }
        }
    }
}
