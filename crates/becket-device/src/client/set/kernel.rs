//! Changes of devices that the kernel serves alone: the drivers make the changes that they can make live, and
//! hold requests back meanwhile. All others are refused before anything is done.

use std::os::fd::AsFd;

use becket_image::{DirectIo, Opened, Source};
use becket_transport::{dm, loop_, node};

use super::changes::{Changes, open, unsupported};
use super::compare::Progress;
use super::guard::{self, Use};
use crate::contract::{DeviceInfo, Error, ErrorKind};
use crate::record::device::Device;
use crate::record::judge::{disk_of, lives};
use crate::record::store::Store;
use crate::system::kernel::System;

/// Writes through the page cache of the kernel's loop device are refused, and no file system may have it for
/// writing: the driver itself refuses nothing.
pub(super) fn set(
    store: &Store,
    device: &Device,
    changes: &Changes,
    progress: &mut Progress<'_>,
) -> Result<DeviceInfo, Error> {
    let info = &device.info;
    let number = info.number;
    let status = loop_::status(number).map_err(Error::Device)?;
    let status = status.ok_or_else(|| Error::NoDevice { target: info.name.clone() })?;
    let again = |options: &str| format!("becket detach {}; becket attach {options}", info.name);
    if changes.read_only == Some(false) && status.read_only {
        let message = format!("{} was attached read-only, and the loop driver keeps it so", info.name);
        return Err(unsupported(message, again(&info.spec.image.display().to_string())));
    }
    // It comes in the length that the device has; a new limit follows by itself.
    let as_it_is = Changes { size_limit: None, ..changes.clone() };
    let opened = changes.image.as_deref().map(|path| open(store, device, path, &as_it_is)).transpose()?;
    let len = info.size.min(changes.size_limit.flatten().unwrap_or(u64::MAX));
    let freezes = changes.read_only == Some(true) && !info.spec.read_only;
    let using = Use::allowing(info, changes, opened.is_some(), len)?;
    let held = using.as_ref().is_some_and(Use::is_held);
    if let (Some(opened), Some(path)) = (&opened, &changes.image) {
        if !status.read_only {
            let message =
                format!("the loop driver replaces the image of {} only when it is read-only", info.name);
            return Err(unsupported(
                message,
                again(&format!("--read-only {}, or --via ublk", path.display())),
            ));
        }
        // The driver looks for it where the old one lies, whatever the map says.
        let place = opened.map.single_range().map(|(_, offset, len)| (offset, len));
        if place != Some((status.offset, info.size)) {
            let message = format!(
                "the loop driver takes only an image in the place of the old one: {} bytes at byte {}",
                info.size, status.offset
            );
            return Err(unsupported(message, again(&format!("--read-only {}", path.display()))));
        }
        guard::may_get(store, info, held, opened, changes.force, progress)?;
    }

    let mut new = device.clone();
    let mut known = device.clone();
    // After each step: what is done stays done when a later one fails.
    let mut keep = |new: &Device| {
        let old = std::mem::replace(&mut known, new.clone());
        record(store, &old, new)
    };
    if let Some(opened) = opened {
        replace(&mut new, &opened)?;
        new.format = changes.format.chosen();
        keep(&new)?;
    }
    if let Some(limit) = changes.size_limit {
        let block = u64::from(info.spec.block_size.max(1));
        let rounded = limit.map(|limit| limit / block * block);
        new.info.size = loop_::set_size_limit(number, rounded).map_err(Error::Device)?;
        new.info.spec.size_limit = limit;
        keep(&new)?;
    }
    if let Some(wanted) = changes.direct_io {
        let (on, reason) = loop_::set_direct_io(number, wanted).map_err(Error::Device)?;
        (new.info.direct_io, new.info.direct_io_reason) = (on, reason);
        keep(&new)?;
    }
    if let Some(read_only) = changes.read_only {
        match freezes {
            true => guard::freeze(info, &mut None)?,
            false => node::set_read_only(&disk_of(info), read_only).map_err(Error::Device)?,
        }
        new.info.spec.read_only = read_only;
        keep(&new)?;
    }
    Ok(new.info)
}

fn replace(device: &mut Device, opened: &Opened) -> Result<(), Error> {
    let info = &mut device.info;
    let refused = |error: becket_transport::Error| match error.raw_os_error() {
        Some(errno) if errno == rustix::io::Errno::INVAL.raw_os_error() => Error::Failed {
            kind: ErrorKind::Unsupported,
            message: format!("the loop driver takes only an image as long as that of {}: {error}", info.name),
            hint: Some("detach it and attach the new one".to_owned()),
        },
        _ => Error::Device(error),
    };
    let none = || Error::NoDevice { target: info.name.clone() };
    let file = opened.sources.first().and_then(Source::file).ok_or_else(none)?;
    loop_::change_image(info.number, file.buffered.as_fd()).map_err(refused)?;
    info.spec.image = opened.path.clone();
    info.spec.cow = None;
    // To the kernel it is another medium.
    info.diskseq = node::diskseq(&disk_of(info));
    device.image = opened.identity;
    guard::forget_cached(&device.info)
}

/// A process that has looked at the record meanwhile may have found that its medium is gone, and dropped it.
fn record(store: &Store, old: &Device, new: &Device) -> Result<(), Error> {
    if !store.update(old, new)? {
        store.enter(new, |device| lives(&System, device))?;
    }
    Ok(())
}

/// A device-mapper table has no page cache between device and image, so there is nothing to switch.
pub(super) fn set_fixed(store: &Store, device: &Device, changes: &Changes) -> Result<DeviceInfo, Error> {
    let info = &device.info;
    if changes.direct_io == Some(DirectIo::Off) {
        let message =
            format!("{} has no page cache to go through: device-mapper passes requests on", info.name);
        return Err(unsupported(message, "attach it with --via ublk or --via loop"));
    }
    if changes.read_only.is_some_and(|read_only| read_only != info.spec.read_only) || changes.image.is_some()
    {
        let message =
            format!("{} is a table of device-mapper: its image and its rights are fixed", info.name);
        let hint =
            format!("becket detach {}, and attach it as it is to be; --via ublk can change", info.name);
        return Err(unsupported(message, hint));
    }
    let mut new = device.clone();
    if let Some(limit) = changes.size_limit {
        let len = info.size.min(limit.unwrap_or(u64::MAX));
        let using = if len < info.size { Some(Use::of(info)?) } else { None };
        guard::may_shrink(info, using.is_some_and(|using| using.is_held()), len, changes.force)?;
        new.info.size = dm::refresh(device.mark, limit).map_err(Error::Device)?;
        new.info.spec.size_limit = limit;
        store.update(device, &new)?;
    }
    Ok(new.info)
}
