//! Showing devices: a plain line each, or a list with columns.
//! Never changes anything, and opens a device only for what the driver alone knows.

use super::columns::Column;
use super::device;
use super::devices::{Device, Wanted};
use super::options::Settings;
use super::table::{self, Value};
use super::trouble::Trouble;
use std::ffi::OsStr;
use std::io::Write as _;

/// All devices in use, or those of `file`.
pub(super) fn show(file: Option<&OsStr>, settings: &Settings, utf8: bool) -> Result<Vec<u8>, Trouble> {
    let mut devices = Device::in_use()?;
    if let Some(file) = file {
        let wanted = Wanted::new(file, settings.offset);
        devices.retain(|device| wanted.is(device));
    }
    if let Some(columns) = &settings.columns {
        return Ok(listed(columns, &devices, settings, utf8));
    }
    let mut out = Vec::new();
    for device in &devices {
        // One that went away meanwhile is not listed.
        let _ = plain(&mut out, device);
    }
    Ok(out)
}

/// One device, in use or not; only a list shows one that is not.
pub(super) fn show_one(word: &OsStr, settings: &Settings, utf8: bool) -> Result<Vec<u8>, Trouble> {
    let device = Device::named(word)?;
    if let Some(columns) = &settings.columns {
        return Ok(listed(columns, &[device], settings, utf8));
    }
    let mut out = Vec::new();
    let unused =
        || Trouble::because(&device::path_of(word).display().to_string(), &rustix::io::Errno::NOENT.into());
    plain(&mut out, &device).ok_or_else(unused)?;
    Ok(out)
}

fn listed(columns: &[Column], devices: &[Device], settings: &Settings, utf8: bool) -> Vec<u8> {
    let row = |device: &Device| columns.iter().map(|&column| device.cell(column)).collect();
    let rows: Vec<table::Row> = devices.iter().map(row).collect();
    table::render(columns, &rows, settings.style, !settings.no_headings, utf8)
}

/// The line of `-a`; nothing for a device without a file.
fn plain(out: &mut Vec<u8>, device: &Device) -> Option<()> {
    let text = |column| match device.cell(column)? {
        Value::Text(text) => Some(text),
        _ => None,
    };
    let number = |column| match device.cell(column) {
        Some(Value::Number(number)) => number,
        _ => 0,
    };
    let (name, file) = (text(Column::Name)?, text(Column::BackFile)?);
    out.extend(name);
    // Writing to memory cannot fail.
    let _ = match device.identity() {
        Some((dev, ino)) => write!(out, ": [{dev:04}]:{ino} ("),
        None => write!(out, ": []: ("),
    };
    out.extend(file);
    out.push(b')');
    for (word, column) in [("offset", Column::Offset), ("sizelimit", Column::SizeLimit)] {
        let bytes = number(column);
        if bytes != 0 {
            let _ = write!(out, ", {word} {bytes}");
        }
    }
    out.push(b'\n');
    Some(())
}
