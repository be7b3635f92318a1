//! Whether bytes of a file are attached already: what `--nooverlap` asks, of both kinds of devices.
//! Never attaches anything, and changes nothing but that a device which is taken again stays.

use super::device::{Loop, patiently};
use super::devices::{Device, Wanted};
use super::options::Settings;
use super::trouble::Trouble;
use becket_uapi::loop_::{self as uapi};
use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

/// How two attachments of a file meet.
enum Overlap {
    Nothing,
    Some,
    /// The same bytes: this device.
    Same(Device),
}

fn overlap(file: &OsStr, settings: &Settings) -> Result<Overlap, Trouble> {
    let (offset, limit) = (settings.offset.unwrap_or(0), settings.size_limit.unwrap_or(0));
    let end = |offset: u64, limit: u64| if limit == 0 { u64::MAX } else { offset.saturating_add(limit) };
    let wanted = Wanted::new(file, None);
    let mut found = Overlap::Nothing;
    for device in Device::in_use()? {
        if !wanted.is(&device) {
            continue;
        }
        // What is going away meanwhile overlaps nothing.
        let Some((other, others)) = device.offset().zip(device.size_limit()) else { continue };
        if (other, others) == (offset, limit) {
            return Ok(Overlap::Same(device));
        }
        if offset < end(other, others) && other < end(offset, limit) {
            found = Overlap::Some;
        }
    }
    Ok(found)
}

fn in_the_way(file: &OsStr) -> Trouble {
    Trouble::new(format!("{}: overlapping loop device exists", file.display()))
}

/// A device of one's own choice can have nothing that another one has.
pub(super) fn refuse(file: &OsStr, settings: &Settings) -> Result<(), Trouble> {
    match overlap(file, settings)? {
        Overlap::Nothing => Ok(()),
        Overlap::Some | Overlap::Same(_) => Err(in_the_way(file)),
    }
}

/// A device with exactly these bytes is kept and reused; one that shares only some of them is a conflict.
pub(super) fn reuse(file: &OsStr, settings: &Settings) -> Result<Option<PathBuf>, Trouble> {
    let device = match overlap(file, settings)? {
        Overlap::Nothing => return Ok(None),
        Overlap::Some => return Err(in_the_way(file)),
        Overlap::Same(device) => device,
    };
    let shown = file.display();
    if device.is_read_only() && !settings.read_only {
        return Err(Trouble::new(format!("{shown}: overlapping read-only loop device exists")));
    }
    match device {
        Device::Loop(device) => {
            stay(&device).map_err(|error| {
                Trouble::because(&format!("{shown}: failed to re-use loop device"), &error)
            })?;
            Ok(Some(device.path))
        }
        Device::Served(served) => Ok(Some(served.info.device)),
    }
}

fn stay(device: &Loop) -> io::Result<()> {
    let opened = device.open(false)?;
    let mut info = uapi::get_status64(opened.as_fd())?;
    info.lo_flags &= !uapi::LO_FLAGS_AUTOCLEAR;
    patiently(|| uapi::set_status64(opened.as_fd(), &info))
}
