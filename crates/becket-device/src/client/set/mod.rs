//! Live changes of a device, whatever its transport.
//! What a transport cannot change live is refused with the way to do it; nothing is half done.

mod changes;
mod compare;
mod guard;
mod kernel;
mod served;

use std::fmt::Display;
use std::path::Path;

use becket_image::OpenOptions;
use serde::Serialize;

use crate::client::list::resolve;
use crate::client::{attach, kernel_drivers};
use crate::contract::{DeviceInfo, DeviceState, Error, ErrorKind};
use crate::control::health;
use crate::record::device::Device;
use crate::record::runtime::Runtime;
use crate::record::store::Store;

use changes::unsupported;

pub use changes::Changes;
pub use compare::Progress;

/// How a change was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum How {
    /// Between two requests, by becket.
    Live,
    /// By the kernel, which held requests back until those under way had ended.
    Drained,
    /// It was so before.
    Unchanged,
}

/// One change of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Changed {
    /// The option's name with underscores.
    pub what: &'static str,
    /// What was.
    pub from: String,
    /// What is.
    pub to: String,
    /// How it came to be.
    pub how: How,
}

/// A device with what was changed of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChangedDevice {
    /// As it is now.
    #[serde(flatten)]
    pub device: DeviceInfo,
    /// What was asked for, each.
    pub changes: Vec<Changed>,
}

/// Changes the device that goes by `target` (node, name or image) between two of its requests.
///
/// # Errors
/// There is no such device, it cannot be changed so, or a user would lose a file system or partition.
pub fn set(
    target: impl AsRef<Path>,
    changes: &Changes,
    progress: &mut Progress<'_>,
) -> Result<ChangedDevice, Error> {
    let store = Store::open(Runtime::open()?)?;
    let device = resolve(&store, target.as_ref())?;
    if device.info.state == DeviceState::Lost {
        return Err(Error::unserved(&device.info.name));
    }
    if device.info.transport.is_served() {
        // Before anything is read from the device: that would wait for as long as there is no response.
        health::responding(store.runtime(), &device)?;
    }
    check_block_size(&device.info, changes.block_size)?;
    check_limit(&device.info, changes.size_limit.flatten())?;
    may_grow(&store, &device, changes)?;
    let (after, how) = match kernel_drivers::of(device.info.transport) {
        None => (served::set(&store, &device, changes, progress)?, How::Live),
        Some(driver) if driver.is_fixed() => (kernel::set_fixed(&store, &device, changes)?, How::Drained),
        Some(_) => (kernel::set(&store, &device, changes, progress)?, How::Drained),
    };
    let changes = reported(&device.info, &after, changes, how);
    Ok(ChangedDevice { device: after, changes })
}

fn check_block_size(info: &DeviceInfo, wanted: Option<u32>) -> Result<(), Error> {
    match wanted {
        Some(wanted) if wanted != info.spec.block_size => {
            let hint = info.anew(&format!("--block-size {wanted} "), &info.spec.image);
            let message = format!("the block size of {} is fixed: a new device is needed", info.name);
            Err(unsupported(message, hint))
        }
        _ => Ok(()),
    }
}

/// A server takes a limit of no bytes for none.
fn check_limit(info: &DeviceInfo, limit: Option<u64>) -> Result<(), Error> {
    let block = u64::from(info.spec.block_size.max(1));
    if limit.is_none_or(|limit| limit >= block) {
        return Ok(());
    }
    Err(Error::Failed {
        kind: ErrorKind::InvalidOption,
        message: format!("{} would have no block left", info.name),
        hint: Some(format!("the shortest is one block, {block} bytes; no limit is --size-limit none")),
    })
}

/// Behind the end of an image inside another lie its neighbour's bytes, which no transport knows of.
fn may_grow(store: &Store, device: &Device, changes: &Changes) -> Result<(), Error> {
    let info = &device.info;
    let Some(limit) = changes.size_limit.map(|limit| limit.unwrap_or(u64::MAX)) else { return Ok(()) };
    // A device on a server takes no other limit, as becket's own server says. The image's server need not be
    // asked for that, which may take long.
    if limit <= info.size || info.spec.size_limit.is_none() || becket_image::is_remote(&info.spec.image) {
        return Ok(());
    }
    if let Some(cow) = &info.spec.cow {
        let message = format!("{} is as long as its overlay says, {} bytes", info.name, info.size);
        let longer = format!("qemu-img resize -f qcow2 {} {limit}", cow.display());
        let (name, again) = (&info.name, info.making().command);
        return Err(unsupported(message, format!("becket detach {name}; {longer}; {again} it again")));
    }
    let how = OpenOptions {
        read_only: true,
        partitions: true,
        shared: true,
        offset: info.spec.offset,
        format: changes.format_for(device),
        no_limits: changes.no_limits,
        ..OpenOptions::default()
    };
    let opened = attach::open(store, &info.spec.image, &how)?;
    if opened.identity != device.image {
        let message = format!("{} is not the image of {} any more", info.spec.image.display(), info.name);
        return Err(unsupported(message, info.again("")));
    }
    let longest = opened.map.len();
    if opened.nested && limit > longest {
        let image = info.spec.image.display();
        // A path that goes on inside an image is not a file. A file is nested where a format like qcow2 holds
        // the disk.
        if !info.spec.image.is_file() {
            let message = format!(
                "{image} is part of another image, {longest} bytes of it; what lies behind belongs to others"
            );
            return Err(unsupported(message, format!("--size-limit {longest} is the longest")));
        }
        let hint = format!(
            "to make a qcow2 longer: becket detach {}; qemu-img resize {image} SIZE; {}",
            info.name,
            info.made("", &info.spec.image)
        );
        return Err(unsupported(format!("the disk in {image} is {longest} bytes long"), hint));
    }
    Ok(())
}

/// What has become of each change that was asked for.
fn reported(before: &DeviceInfo, after: &DeviceInfo, asked: &Changes, how: How) -> Vec<Changed> {
    let one = |what, asked: bool, from: &dyn Display, to: &dyn Display| {
        let (from, to) = (from.to_string(), to.to_string());
        let how = if from == to { How::Unchanged } else { how };
        asked.then_some(Changed { what, from, to, how })
    };
    let limit =
        |info: &DeviceInfo| info.spec.size_limit.map_or_else(|| "none".to_owned(), |limit| limit.to_string());
    let on = |on: bool| if on { "on" } else { "off" };
    [
        one("image", asked.image.is_some(), &before.spec.image.display(), &after.spec.image.display()),
        one("size_limit", asked.size_limit.is_some(), &limit(before), &limit(after)),
        one("size", asked.size_limit.is_some() || asked.image.is_some(), &before.size, &after.size),
        one("read_only", asked.read_only.is_some(), &on(before.spec.read_only), &on(after.spec.read_only)),
        one("direct_io", asked.direct_io.is_some(), &on(before.direct_io), &on(after.direct_io)),
        one("block_size", asked.block_size.is_some(), &before.spec.block_size, &after.spec.block_size),
    ]
    .into_iter()
    .flatten()
    .collect()
}

#[cfg(test)]
mod tests {
    use becket_image::DirectIo;

    use super::*;
    use crate::contract::Spec;
    use crate::record::store::tests::device;

    #[test]
    fn each_change_that_was_asked_for_is_reported_and_nothing_else() {
        let before = device("one", 1).info;
        let spec = Spec { read_only: true, ..before.spec.clone() };
        let after = DeviceInfo { spec, size: before.size * 2, ..before.clone() };
        let asked = Changes { read_only: Some(true), direct_io: Some(DirectIo::Auto), ..Changes::default() };
        let reported = reported(&before, &after, &asked, How::Drained);
        let words: Vec<_> =
            reported.iter().map(|one| (one.what, one.from.as_str(), one.to.as_str(), one.how)).collect();
        let direct = if before.direct_io { "on" } else { "off" };
        assert_eq!(
            words,
            [("read_only", "off", "on", How::Drained), ("direct_io", direct, direct, How::Unchanged)]
        );
    }

    #[test]
    fn another_block_size_is_refused_with_the_way_to_it() {
        let info = device("one", 1).info;
        check_block_size(&info, Some(info.spec.block_size)).unwrap();
        let error = check_block_size(&info, Some(info.spec.block_size * 2)).unwrap_err();
        assert!(error.to_string().contains("a new device is needed"), "{error}");
        let hint = error.hint().unwrap();
        assert!(hint.contains("becket detach one") && hint.contains("--block-size"), "{hint}");
    }
}
