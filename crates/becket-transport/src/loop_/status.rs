//! What the kernel knows of a loop device.
//! It never holds a device open longer than one question: an open descriptor keeps a device that should go.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use becket_uapi::{block, loop_ as uapi};

use super::device::{name, open_device, path};
use crate::{Error, aside, sysfs};

/// Longest that a file system may think about one file of its own.
const ANSWER: Duration = Duration::from_secs(10);

/// A bound loop device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoopStatus {
    /// The kernel's number of the device.
    pub number: u32,
    /// Its node.
    pub path: PathBuf,
    /// The backing file as the kernel names it (` (deleted)` at its end if it is); cut to 63 bytes without
    /// sysfs.
    pub backing: PathBuf,
    /// Device number of the backing file's file system.
    pub dev: u64,
    /// Inode number of the backing file.
    pub ino: u64,
    /// Device number of the backing block device; 0 for a file.
    pub rdev: u64,
    /// First byte of the backing file.
    pub offset: u64,
    /// Most bytes of the device; 0 for all there are.
    pub size_limit: u64,
    /// Length of the device in bytes.
    pub size: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// The backing is read and written past the page cache.
    pub direct_io: bool,
    /// It is cleared when its last user closes it.
    pub autoclear: bool,
    /// It is scanned for partitions.
    pub partitions: bool,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Its disk sequence number; `None` before Linux 5.15.
    pub diskseq: Option<u64>,
}

/// The numbers of all bound devices, ascending.
pub fn numbers() -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/sys/block") else { return Vec::new() };
    let mut numbers: Vec<u32> = entries
        .flatten()
        .filter(|entry| entry.path().join("loop").exists())
        .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("loop")?.parse().ok())
        .collect();
    numbers.sort_unstable();
    numbers
}

/// The number and the sequence number of the device with that mark, where the kernel has sequence numbers.
/// Only devices over the file at `backing`, as the kernel calls it, are asked: others may have one that does
/// not answer.
///
/// # Errors
/// Such a device cannot be opened, or the file system of its image does not answer.
pub fn marked(mark: u64, backing: &Path) -> Result<Option<(u32, u64)>, Error> {
    let deleted = [backing.as_os_str().as_bytes(), b" (deleted)"].concat();
    let is_over = |number: &u32| {
        let found = backing_of(&name(*number), &uapi::LoopInfo64::default());
        found == backing || found.as_os_str().as_bytes() == deleted
    };
    for number in numbers().into_iter().filter(is_over) {
        let device = open_device(number, false)?;
        match reported(number, &device) {
            Ok(info) if info.mark() == mark => {
                return Ok(block::diskseq(device.as_fd()).ok().map(|diskseq| (number, diskseq)));
            }
            Ok(_) | Err(Error::NotAttached { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// What the kernel knows of device `number`; `None` when it is not bound or not there.
///
/// # Errors
/// The device cannot be opened, or the file system of its image does not answer.
pub fn status(number: u32) -> Result<Option<LoopStatus>, Error> {
    let name = name(number);
    // Without sysfs only the ioctl knows.
    if sysfs::is_there() && !sysfs::directory(&name).join("loop").exists() {
        return Ok(None);
    }
    let device = match open_device(number, false) {
        Ok(device) => device,
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)) => return Ok(None),
        Err(error) => return Err(error),
    };
    let info = match reported(number, &device) {
        Ok(info) => info,
        Err(Error::NotAttached { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    let device = device.as_fd();
    let ask = || Error::io("ask for the geometry of", path(number));
    Ok(Some(LoopStatus {
        number,
        path: path(number),
        backing: backing_of(&name, &info),
        dev: uapi::decode_dev(info.lo_device),
        ino: info.lo_inode,
        rdev: uapi::decode_dev(info.lo_rdevice),
        offset: info.lo_offset,
        size_limit: info.lo_sizelimit,
        size: block::size64(device).map_err(ask())?,
        read_only: info.lo_flags & uapi::LO_FLAGS_READ_ONLY != 0,
        direct_io: does_direct_io(&name, &info),
        autoclear: info.lo_flags & uapi::LO_FLAGS_AUTOCLEAR != 0,
        partitions: info.lo_flags & uapi::LO_FLAGS_PARTSCAN != 0,
        block_size: block::logical_block_size(device).map_err(ask())?,
        diskseq: block::diskseq(device).ok(),
    }))
}

/// What the driver says of a bound device. For the file's number it asks the file system, with nothing
/// locked. For the file's length it asks while it holds the device, and sometimes all of them: a caller that
/// is about to make it do that must have this answered before.
///
/// # Errors
/// [`Error::NotAttached`], or [`Error::Silent`] after ten seconds.
pub(super) fn reported(number: u32, device: &File) -> Result<uapi::LoopInfo64, Error> {
    let io = || Error::io("ask for the state of", path(number));
    let device = device.try_clone().map_err(io())?;
    let answer = aside::within(ANSWER, move || uapi::get_status64(device.as_fd()));
    answer.ok_or_else(|| Error::Silent { device: path(number) })?.map_err(|error| {
        match error.raw_os_error() {
            Some(libc::ENXIO) => Error::NotAttached { device: path(number) },
            _ => io()(error),
        }
    })
}

/// The same as far as the driver itself knows it, so that no file system is asked; `None` when the device is
/// not bound. It has the file's path where another name may have been set in the driver.
pub(super) fn known(number: u32) -> Option<uapi::LoopInfo64> {
    let name = name(number);
    let mut info = uapi::LoopInfo64 {
        lo_offset: sysfs::number(&name, "loop/offset")?,
        lo_sizelimit: sysfs::number(&name, "loop/sizelimit")?,
        ..uapi::LoopInfo64::default()
    };
    for (attribute, flag) in
        [("loop/autoclear", uapi::LO_FLAGS_AUTOCLEAR), ("loop/partscan", uapi::LO_FLAGS_PARTSCAN)]
    {
        if sysfs::flag(&name, attribute)? {
            info.lo_flags |= flag;
        }
    }
    let backing = backing_of(&name, &info);
    info.set_file_name(backing.as_os_str().as_bytes());
    Some(info)
}

/// Whether the driver really does direct I/O: it drops the request silently. sysfs has the truth on all
/// kernels, the flag only on newer ones.
fn does_direct_io(name: &str, info: &uapi::LoopInfo64) -> bool {
    sysfs::flag(name, "loop/dio").unwrap_or(info.lo_flags & uapi::LO_FLAGS_DIRECT_IO != 0)
}

fn backing_of(name: &str, info: &uapi::LoopInfo64) -> PathBuf {
    let bytes = fs::read(sysfs::directory(name).join("loop/backing_file")).unwrap_or_default();
    let bytes = match bytes.strip_suffix(b"\n") {
        Some(line) if !line.is_empty() => line.to_vec(),
        _ => info.lo_file_name.iter().copied().take_while(|&byte| byte != 0).collect(),
    };
    OsString::from_vec(bytes).into()
}
