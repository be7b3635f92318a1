//! `becket storage-provider`: images as volumes for systemd's tools.
//! Attaches what is asked for, for as long as it is used, and parses no message.

use super::{common, fetched, glob::Glob};
use crate::{
    args::{self, DeviceOptions},
    failure::Failure,
    ui::Ui,
};
use becket_device::{DeviceInfo, Error, ErrorKind, Unavailable, Volume, Volumes};
use std::{
    fs::File,
    path::{Path, PathBuf},
};

pub(crate) fn run(ui: &Ui, args: &args::StorageProvider) -> Result<u8, Failure> {
    let ready = |address: &str| ui.note(format!("hands out volumes at {address}"));
    becket_device::provide(&args.listen, ready, &Images)
        .map_err(|error| Failure::device("hand out volumes at", &args.listen, &error))?;
    Ok(0)
}

/// All that becket has or can attach.
struct Images;

impl Volumes for Images {
    fn acquire(&self, name: &str, read_only: Option<bool>) -> Result<Volume, Unavailable> {
        // The directory of this process means nothing to its callers.
        if !name.contains('/') {
            let info = becket_device::find(name).map_err(unavailable)?;
            return open(&info, read_only);
        }
        let path = PathBuf::from(name);
        if !path.is_absolute() && !becket_fetch::is_remote(path.as_os_str()) {
            return Err(Unavailable::Missing);
        }
        let read_only = match read_only {
            // The image itself says what is possible.
            None => match attached(&path, false) {
                Err(Unavailable::Failed(error)) if error.kind() == ErrorKind::Permission => Some(true),
                attached => return attached,
            },
            wanted => wanted,
        };
        let volume = attached(&path, read_only == Some(true))?;
        if volume.read_only && read_only == Some(false) {
            return Err(Unavailable::ReadOnly);
        }
        Ok(volume)
    }

    fn list(&self) -> Result<Vec<DeviceInfo>, Error> {
        let mut devices = becket_device::list()?;
        devices.retain(|device| device.spec.export.is_none());
        Ok(devices)
    }

    fn matches(&self, pattern: &str, name: &str) -> bool {
        Glob::of(pattern.as_bytes()).map_or(pattern == name, |glob| glob.matches(name.as_bytes()))
    }
}

/// Attaches an image for as long as its device is open.
fn attached(path: &Path, read_only: bool) -> Result<Volume, Unavailable> {
    let asked = DeviceOptions { read_only, ..DeviceOptions::default() };
    let options = common::options(&asked);
    let (path, options, _decoded) =
        fetched::for_device(path, &options, &asked.image.store, &asked.image.trace).map_err(failed)?;
    let (info, lease) = becket_device::attach_leased(&path, &options).map_err(unavailable)?;
    let volume = open(&info, Some(info.spec.read_only));
    drop(lease);
    volume
}

fn open(info: &DeviceInfo, read_only: Option<bool>) -> Result<Volume, Unavailable> {
    if info.spec.read_only && read_only == Some(false) {
        return Err(Unavailable::ReadOnly);
    }
    let read_only = read_only.unwrap_or(info.spec.read_only);
    let opened = File::options().read(true).write(!read_only).open(&info.device);
    let device = opened.map_err(|source| {
        Unavailable::Failed(Error::Io { what: "open", path: info.device.clone(), source })
    })?;
    Ok(Volume { device, read_only })
}

fn unavailable(error: Error) -> Unavailable {
    match error.kind() {
        ErrorKind::NotFound => Unavailable::Missing,
        _ => Unavailable::Failed(error),
    }
}

fn failed(failure: Failure) -> Unavailable {
    let Failure { message, hint, .. } = failure;
    Unavailable::Failed(Error::Failed { kind: ErrorKind::Io, message, hint })
}
