//! Attaching a file to a loop device, in one LOOP_CONFIGURE.
//! Never leaves a device behind when it fails, and never takes one that another program has got.

use super::device::{self, is};
use super::options::Settings;
use super::overlap;
use super::trouble::{Trouble, explained, warn};
use becket_image::{Format, OpenOptions};
use becket_transport::{node, sysfs};
use becket_uapi::loop_::{self as uapi, LoopConfig, LoopInfo64};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How long a free device is looked for while others take each one first.
const PATIENCE: Duration = Duration::from_secs(13);
/// How long promised partitions may take.
const PARTITIONS: Duration = Duration::from_secs(5);

/// Attaches `file`, to a free device when none is named; returns the device's path.
pub(super) fn create(device: Option<&OsStr>, file: &OsStr, settings: &Settings) -> Result<PathBuf, Trouble> {
    let path = match device {
        None if settings.no_overlap => match overlap::reuse(file, settings)? {
            Some(path) => path,
            None => on_free(file, settings)?,
        },
        None => on_free(file, settings)?,
        Some(device) => on_named(device, file, settings)?,
    };
    complain_of_size(file, settings);
    Ok(path)
}

/// A free device's path; its node is there.
pub(super) fn free() -> Result<PathBuf, Trouble> {
    let refused = |error: io::Error| Trouble::because("cannot find an unused loop device", &error);
    let number = control().and_then(|control| uapi::ctl_get_free(control.as_fd())).map_err(refused)?;
    let name = format!("loop{number}");
    let path = sysfs::node(&name);
    // Without sysfs there is no saying; the driver makes nodes by its own number.
    let dev = sysfs::dev(&name).unwrap_or_else(|| rustix::fs::makedev(uapi::LOOP_MAJOR, number));
    node::ensure_block(&path, dev).map_err(|error| lost_node(&path, dev, &error))?;
    Ok(path)
}

/// What to say when a node is missing and cannot be made.
pub(super) fn lost_node(path: &Path, dev: u64, error: &becket_transport::Error) -> Trouble {
    let (major, minor) = (rustix::fs::major(dev), rustix::fs::minor(dev));
    let why = crate::failure::without_errno(&error.to_string());
    let text = format!("cannot find an unused loop device: {why}");
    let privilege = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::PERM) => "making it needs CAP_MKNOD in the first user namespace",
        Some(Errno::ROFS) => "/dev is mounted read-only here",
        Some(Errno::ACCESS) => "this user may not write to its directory",
        _ => "mknod(1) makes it",
    };
    Trouble::new(text).more(format!(
        "the kernel has device {major}:{minor}, but {} is not in this /dev: {privilege}",
        path.display()
    ))
}

fn control() -> io::Result<File> {
    let path = Path::new("/dev/loop-control");
    let open = || File::options().read(true).write(true).open(path);
    match open() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let (major, minor) = uapi::LOOP_CONTROL;
            node::ensure_char(path, rustix::fs::makedev(major, minor)).map_err(|_| error)?;
            open()
        }
        opened => opened,
    }
}

fn failed(what: impl std::fmt::Display, error: &io::Error) -> Trouble {
    Trouble::because(&format!("{what}: failed to set up loop device"), error)
}

fn on_free(file: &OsStr, settings: &Settings) -> Result<PathBuf, Trouble> {
    let until = Instant::now() + PATIENCE;
    let backing = Backing::open(file, settings).map_err(|error| failed(file.display(), &error))?;
    for attempt in 0_u32.. {
        let path = free()?;
        match backing.attach(&path, settings) {
            Ok(()) => return Ok(path),
            // Another program took it, or removed it.
            Err((error, _)) if retries(&error) && Instant::now() < until => {
                // At first at once; later out of step with those that do the same.
                if attempt >= 8 {
                    thread::sleep(Duration::from_micros(u64::from(attempt % 16 + 1) * 250));
                }
            }
            Err((error, opened)) => {
                return Err(explained(&path, opened, failed(file.display(), &error), &error));
            }
        }
    }
    Err(Trouble::new("cannot find an unused loop device".to_owned()))
}

fn retries(error: &io::Error) -> bool {
    [Errno::BUSY, Errno::AGAIN, Errno::NXIO, Errno::NODEV].iter().any(|&errno| is(error, errno))
}

fn on_named(device: &OsStr, file: &OsStr, settings: &Settings) -> Result<PathBuf, Trouble> {
    let path = device::path_of(device);
    if let Some(number) = path.file_name().and_then(|name| device::number(name.as_bytes())) {
        // Made when it is not there; whatever is wrong with that shows when it is opened.
        let _ = control().and_then(|control| uapi::ctl_add(control.as_fd(), number));
        if let Some(dev) = sysfs::dev(&format!("loop{number}")).filter(|_| !path.exists()) {
            let _ = node::ensure_block(&path, dev);
        }
    }
    if settings.no_overlap {
        overlap::refuse(file, settings)?;
    }
    let backing = Backing::open(file, settings).map_err(|error| failed(file.display(), &error))?;
    match backing.attach(&path, settings) {
        Ok(()) => Ok(path),
        Err((error, opened)) => {
            let what = if opened { file.display() } else { path.as_os_str().display() };
            Err(explained(&path, opened, failed(what, &error), &error))
        }
    }
}

/// A file that is open as the device will use it.
struct Backing {
    file: File,
    real: OsString,
    read_only: bool,
}

impl Backing {
    fn open(file: &OsStr, settings: &Settings) -> io::Result<Backing> {
        let real = device::real(file);
        let direct = if settings.direct_io == Some(true) { OFlags::DIRECT.bits() } else { 0 };
        let open = |write: bool| {
            File::options().read(true).write(write).custom_flags(direct.cast_signed()).open(&real)
        };
        let (file, read_only) = match open(!settings.read_only) {
            Err(error) if !settings.read_only && (is(&error, Errno::ROFS) || is(&error, Errno::ACCESS)) => {
                (open(false)?, true)
            }
            opened => (opened?, settings.read_only),
        };
        Ok(Backing { file, real, read_only })
    }

    /// Binds the device at `path`; with the error comes whether the device could be opened.
    fn attach(&self, path: &Path, settings: &Settings) -> Result<(), (io::Error, bool)> {
        let device =
            File::options().read(true).write(!self.read_only).open(path).map_err(|error| (error, false))?;
        let config = self.config(settings).map_err(|error| (error, true))?;
        uapi::configure(device.as_fd(), &config).map_err(|error| (error, true))?;
        if settings.partscan {
            self.await_partitions(path, settings);
        }
        Ok(())
    }

    fn config(&self, settings: &Settings) -> io::Result<LoopConfig> {
        let mut info = LoopInfo64 {
            lo_offset: settings.offset.unwrap_or(0),
            lo_sizelimit: settings.size_limit.unwrap_or(0),
            ..LoopInfo64::default()
        };
        info.set_file_name(settings.reference.as_ref().unwrap_or(&self.real).as_bytes());
        for (wanted, flag) in [
            (self.read_only, uapi::LO_FLAGS_READ_ONLY),
            (settings.partscan, uapi::LO_FLAGS_PARTSCAN),
            (settings.direct_io == Some(true), uapi::LO_FLAGS_DIRECT_IO),
        ] {
            if wanted {
                info.lo_flags |= flag;
            }
        }
        let block_size = u32::try_from(settings.sector_size.unwrap_or(0)).map_err(|_| Errno::INVAL)?;
        // A descriptor that is open is not negative.
        Ok(LoopConfig { fd: self.file.as_raw_fd().unsigned_abs(), block_size, info, reserved: [0; 8] })
    }

    /// Waits for or makes the nodes of the partitions: those that the kernel found and those that it cannot
    /// read. The device stays attached if this fails.
    fn await_partitions(&self, path: &Path, settings: &Settings) {
        let Some(disk) = device::disk_at(path) else { return };
        let options = OpenOptions {
            read_only: true,
            shared: true,
            offset: settings.offset.unwrap_or(0),
            size_limit: settings.size_limit.filter(|&limit| limit > 0),
            block_size: settings.sector_size.and_then(|size| u32::try_from(size).ok()),
            partitions: true,
            // The driver shows the bytes as they are, whatever they begin like.
            format: Format::Raw,
            ..OpenOptions::default()
        };
        // What is not an image has no partitions, which is for the kernel to say.
        let promised = becket_image::open(Path::new(&self.real), &options).map(|opened| opened.partitions);
        let made = match promised {
            Ok(promised) if !promised.is_empty() => {
                node::await_partitions(&disk, &promised, PARTITIONS).map(drop)
            }
            _ => node::partitions(&disk)
                .iter()
                .try_for_each(|partition| node::ensure_block(&partition.node, partition.dev).map(drop)),
        };
        if let Err(error) = made {
            warn(&format!(
                "{}: warning: {}",
                path.display(),
                crate::failure::without_errno(&error.to_string())
            ));
        }
    }
}

/// Bytes at the end that no sector holds cannot be seen on the device.
fn complain_of_size(file: &OsStr, settings: &Settings) {
    let shown = file.display();
    let offset = settings.offset.unwrap_or(0);
    let size = match settings.size_limit {
        Some(limit) if limit > 0 => limit,
        _ => match std::fs::metadata(file) {
            Ok(data) if data.file_type().is_block_device() => return,
            Ok(data) if offset > data.len() => {
                return warn(&format!(
                    "{shown}: Warning: the device is empty: the offset is past the end of the file"
                ));
            }
            Ok(data) => data.len() - offset,
            Err(_) => return,
        },
    };
    if size < 512 {
        warn(&format!("{shown}: Warning: file is smaller than 512 bytes: the device has no sector of it"));
    } else if size % 512 != 0 {
        let rest = size % 512;
        warn(&format!(
            "{shown}: Warning: file does not end on a 512-byte sector boundary: its last {rest} bytes are left out"
        ));
    }
}
