//! Devices that becket serves over ublk, with losetup's words and columns.
//! Never starts anything unless a file is attached: listing looks at records alone.

use super::columns::Column;
use super::device::{disk_at, pair};
use super::options::Settings;
use super::table::Value;
use super::trouble::{Trouble, still_used};
use crate::failure::without_errno;
use becket_device::{AttachOptions, Changes, DetachOptions, DeviceInfo, DeviceState, Partitions, Via};
use becket_image::{DirectIo, Format, OpenOptions};
use becket_transport::{Kind, sysfs};
use rustix::fs::Stat;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Says by which driver new devices are made.
pub(super) const VARIABLE: &str = "BECKET_LOSETUP_VIA";

/// A device of becket's.
pub(super) struct Served {
    pub(super) info: DeviceInfo,
}

/// Whether to make new devices over ublk.
pub(super) fn wanted() -> bool {
    std::env::var_os(VARIABLE).is_some_and(|via| via == "ublk")
}

/// Whether the node at `path` is a ublk device's.
pub(super) fn is_served(path: &Path) -> bool {
    disk_at(path).is_some_and(|name| name.starts_with("ublkb"))
}

fn failed(what: impl std::fmt::Display, error: &becket_device::Error) -> Trouble {
    let trouble = Trouble::new(format!("{what}: {}", without_errno(&error.to_string())));
    match error.hint() {
        Some(hint) => trouble.more(hint),
        None => trouble,
    }
}

pub(super) fn find(path: &Path) -> Result<Served, Trouble> {
    let info = becket_device::find(path);
    info.map(|info| Served { info })
        .map_err(|error| failed(format_args!("{}: failed to use device", path.display()), &error))
}

pub(super) fn all() -> Result<Vec<Served>, Trouble> {
    let devices = becket_device::list().map_err(|error| failed("failed to inspect devices", &error))?;
    let ublk = devices.into_iter().filter(|info| info.transport == Kind::Ublk);
    Ok(ublk.map(|info| Served { info }).collect())
}

/// Attaches `file` to a device of its own; returns the device's path.
pub(super) fn create(file: &OsStr, settings: &Settings) -> Result<PathBuf, Trouble> {
    let shown = file.display();
    let block_size = settings.sector_size.map(u32::try_from).transpose();
    let block_size = block_size
        .map_err(|_| Trouble::new(format!("{shown}: failed to set up loop device: Invalid argument")))?;
    // losetup shows a file's bytes as they are, whatever they mean. Only becket itself has paths through
    // images.
    let format = if rustix::fs::stat(file).is_ok() { Format::Raw } else { Format::Auto };
    let open = OpenOptions {
        read_only: settings.read_only,
        direct_io: if settings.direct_io == Some(true) { DirectIo::On } else { DirectIo::Off },
        offset: settings.offset.unwrap_or(0),
        size_limit: settings.size_limit.filter(|&limit| limit > 0),
        block_size,
        // losetup attaches what others have attached, too.
        shared: true,
        format,
        ..OpenOptions::default()
    };
    let options = AttachOptions {
        open,
        via: Via::Ublk,
        partitions: if settings.partscan { Partitions::Auto } else { Partitions::Off },
        cut: true,
        ..AttachOptions::default()
    };
    let attached = becket_device::attach(Path::new(file), &options);
    attached
        .map(|info| info.device)
        .map_err(|error| failed(format_args!("{shown}: failed to set up loop device"), &error))
}

impl Served {
    pub(super) fn detach(&self) -> Result<(), Trouble> {
        let device = &self.info.device;
        // As the loop driver does: one in use goes with its last user.
        let options = DetachOptions { lazy: true, ..DetachOptions::default() };
        let info = becket_device::detach(device, &options)
            .map_err(|error| failed(format_args!("{}: detach failed", device.display()), &error))?;
        if info.state == DeviceState::Detaching
            && let Some(name) = disk_at(device)
        {
            still_used(&device.display().to_string(), &becket_device::users(&name));
        }
        match info.warnings.last().filter(|_| info.unsaved.is_some()) {
            Some(warning) => Err(Trouble::new(format!("{}: {warning}", device.display()))),
            None => Ok(()),
        }
    }

    pub(super) fn refresh(&self) -> Result<(), Trouble> {
        let device = &self.info.device;
        let what = || format!("{}: set capacity failed", device.display());
        becket_device::refresh(device).map(drop).map_err(|error| failed(what(), &error))
    }

    pub(super) fn set_direct_io(&self, wanted: bool) -> Result<(), Trouble> {
        let device = &self.info.device;
        let direct_io = Some(if wanted { DirectIo::On } else { DirectIo::Off });
        let what = || format!("{}: set direct io failed", device.display());
        becket_device::set(device, &Changes { direct_io, ..Changes::default() }, &mut |_, _| {})
            .map(drop)
            .map_err(|error| failed(what(), &error))
    }

    /// Device number and inode of the file, which its path must still name.
    pub(super) fn identity(&self) -> Option<(u64, u64)> {
        std::fs::metadata(&self.info.spec.image).ok().map(|data| (data.dev(), data.ino()))
    }

    pub(super) fn is_of(&self, stat: Option<&Stat>, paths: &[OsString]) -> bool {
        match (stat, self.identity()) {
            (Some(stat), Some(own)) => own == (stat.st_dev, stat.st_ino),
            _ => paths.iter().any(|path| path.as_bytes() == self.info.spec.image.as_os_str().as_bytes()),
        }
    }

    /// What stands in a column.
    pub(super) fn cell(&self, column: Column) -> Option<Value> {
        let info = &self.info;
        let text = |path: &Path| Some(Value::Text(path.as_os_str().as_bytes().to_vec()));
        let part = |number: u32| Value::Text(number.to_string().into_bytes());
        let own = || disk_at(&info.device).and_then(|name| sysfs::dev(&name));
        let back = || self.identity().map(|(dev, _)| dev);
        match column {
            Column::Name => text(&info.device),
            Column::Autoclear => {
                Some(Value::Flag(info.spec.autoclear || info.state == DeviceState::Detaching))
            }
            Column::BackFile | Column::Ref => text(&info.spec.image),
            Column::BackIno => self.identity().map(|(_, ino)| Value::Number(ino)),
            Column::BackMajMin => back().map(|dev| pair(dev, 8)),
            Column::BackMaj => back().map(|dev| part(rustix::fs::major(dev))),
            Column::BackMin => back().map(|dev| part(rustix::fs::minor(dev))),
            Column::MajMin => own().map(|dev| pair(dev, 3)),
            Column::Maj => own().map(|dev| Value::Number(rustix::fs::major(dev).into())),
            Column::Min => own().map(|dev| Value::Number(rustix::fs::minor(dev).into())),
            Column::Offset => Some(Value::Number(info.spec.offset)),
            Column::Partscan => Some(Value::Flag(!info.partitions.is_empty())),
            Column::Ro => Some(Value::Flag(info.spec.read_only)),
            Column::SizeLimit => Some(Value::Number(info.spec.size_limit.unwrap_or(0))),
            Column::Dio => Some(Value::Flag(info.direct_io)),
            Column::LogSec => Some(Value::Number(info.spec.block_size.into())),
        }
    }
}
