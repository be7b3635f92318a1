//! Which devices there are: the records, each held against the kernel.
//! It asks about the devices it has records of and about no others.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use becket_transport::{Kind, sysfs};

use crate::attach::{forget, size_of};
use crate::kernel::{Kernel, System};
use crate::runtime::Runtime;
use crate::state::{Device, Entry, Store};
use crate::{DeviceInfo, DeviceState, Error, links, log, users};

/// All devices, sorted by name. Records of devices that are gone are dropped on the way.
///
/// # Errors
/// The records cannot be read.
pub fn list() -> Result<Vec<DeviceInfo>, Error> {
    let store = Store::open(Runtime::open()?)?;
    Ok(devices(&store)?.into_iter().map(|device| device.info).collect())
}

/// The device that goes by a NAME, a path under /dev, or the path of its image.
///
/// # Errors
/// There is none, or more than one.
pub fn find(target: impl AsRef<Path>) -> Result<DeviceInfo, Error> {
    let store = Store::open(Runtime::open()?)?;
    Ok(resolve(&store, target.as_ref())?.info)
}

/// The records that stand for devices, brought up to date.
pub(crate) fn devices(store: &Store) -> Result<Vec<Device>, Error> {
    let mut devices = Vec::new();
    for (name, entry) in store.entries()? {
        match entry {
            Entry::Device(device) => devices.extend(current(store, &System, *device)),
            Entry::Claim { claimant, .. } if claimant.alive() => {}
            claim @ Entry::Claim { .. } => {
                if let Err(error) = store.remove_claim(&name, &claim) {
                    log::warn(format_args!("the name {name} stays claimed: {error}"));
                }
            }
        }
    }
    Ok(devices)
}

/// A record as it stands now; `None` when its device is gone and it was dropped.
fn current(store: &Store, kernel: &impl Kernel, mut device: Device) -> Option<Device> {
    match judge(kernel, &device) {
        Verdict::Gone => {
            forget(store, &device);
            None
        }
        Verdict::NotYet => None,
        Verdict::There(state) => {
            device.info.state = state;
            if state != DeviceState::Lost
                && let Some(size) = size_of(&disk_of(&device.info)).filter(|&size| size > 0)
            {
                device.info.size = size;
            }
            Some(device)
        }
    }
}

/// What a record is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Its device is gone, or its number belongs to another one.
    Gone,
    /// Its server is about to start it.
    NotYet,
    /// It is there.
    There(DeviceState),
}

/// Whether the device of a record still exists in any way, so that its name is taken.
pub(crate) fn lives(kernel: &impl Kernel, device: &Device) -> bool {
    judge(kernel, device) != Verdict::Gone
}

fn judge(kernel: &impl Kernel, device: &Device) -> Verdict {
    match device.info.transport {
        Kind::Loop => judge_loop(kernel, device),
        Kind::Ublk => judge_ublk(kernel, device),
        Kind::Dm => judge_dm(kernel, device),
        // No version of becket writes such records for this boot.
        Kind::Fuse => Verdict::Gone,
    }
}

/// Its mark is in the device's UUID, which nobody can change and no other device ever has.
fn judge_dm(kernel: &impl Kernel, device: &Device) -> Verdict {
    if kernel.dm_mark(device.info.number) != Some(device.mark) {
        // A disk that is being removed loses its UUID first and its node last.
        let goes =
            device.info.diskseq.is_some() && kernel.diskseq(&disk_of(&device.info)) == device.info.diskseq;
        return if goes { Verdict::There(DeviceState::Detaching) } else { Verdict::Gone };
    }
    let leaving = !device.info.autoclear && kernel.dm_leaves(device.mark);
    Verdict::There(if leaving { DeviceState::Detaching } else { DeviceState::Live })
}

fn judge_loop(kernel: &impl Kernel, device: &Device) -> Verdict {
    let number = device.info.number;
    let same = match (device.info.diskseq, kernel.diskseq(&disk_of(&device.info))) {
        (Some(ours), Some(present)) => ours == present && kernel.loop_bound(number),
        // Before Linux 5.15, or without sysfs: the same file on the same number is taken for the same use.
        _ => kernel.loop_backing(number) == Some((device.image.dev, device.image.ino)),
    };
    if !same {
        return Verdict::Gone;
    }
    let leaving = kernel.loop_autoclear(number) && !device.info.autoclear;
    Verdict::There(if leaving { DeviceState::Detaching } else { DeviceState::Live })
}

fn judge_ublk(kernel: &impl Kernel, device: &Device) -> Verdict {
    if !kernel.ublk(device.info.number) {
        return Verdict::Gone;
    }
    let disk = disk_of(&device.info);
    let alive = |process: Option<_>| process.is_some_and(|process| kernel.alive(process));
    let (served, supervised) = (alive(device.worker), alive(device.server));
    if device.starting {
        return if supervised { Verdict::NotYet } else { Verdict::There(DeviceState::Lost) };
    }
    let same = match (device.info.diskseq, kernel.diskseq(&disk)) {
        (Some(ours), Some(present)) => ours == present,
        // Without a disk, a device of that number is left over from a server that died; whether it is the one
        // we know is asked again, of the driver, before anything is done to it.
        (_, None) => !kernel.disk(&disk),
        (None, Some(_)) => true,
    };
    match (same, served, supervised) {
        (false, ..) => Verdict::Gone,
        (true, true, true) if !kernel.disk(&disk) => Verdict::There(DeviceState::Detaching),
        (true, true, true) => Verdict::There(match device.info.state {
            DeviceState::Detaching => DeviceState::Detaching,
            _ => DeviceState::Live,
        }),
        (true, true, false) => Verdict::There(DeviceState::Orphaned),
        // What the supervisor knows of such a device is in its record.
        (true, false, true) => Verdict::There(match device.info.state {
            state @ (DeviceState::Failing | DeviceState::Lost) => state,
            _ => DeviceState::Recovering,
        }),
        (true, false, false) => Verdict::There(DeviceState::Lost),
    }
}

/// The name of a device's disk in sysfs.
pub(crate) fn disk_of(info: &DeviceInfo) -> String {
    match info.transport {
        Kind::Ublk => format!("ublkb{}", info.number),
        Kind::Dm => format!("dm-{}", info.number),
        kind => format!("{kind}{}", info.number),
    }
}

/// The device of ours that has the image.
pub(crate) fn holder_of(store: &Store, image: &Path) -> Result<Option<DeviceInfo>, Error> {
    let id = fs::metadata(image).map_err(Error::io("look at", image))?;
    let same = |device: &Device| (device.image.dev, device.image.ino) == (id.dev(), id.ino());
    Ok(devices(store)?.into_iter().find(same).map(|device| device.info))
}

/// Finds a device by what a person calls it.
pub(crate) fn resolve(store: &Store, path: &Path) -> Result<Device, Error> {
    // A name is never a path, and a name that is also a file here means the name.
    if let Some(name) = path.to_str()
        && let Some(device) = named(store, name)?
    {
        return Ok(device);
    }
    let is_path = |device: &Device| {
        device.info.device == path || links::path(store.runtime(), &device.info.name) == path
    };
    // Most devices go by the name of their node: then no other record need be looked at.
    if let Some(name) = path.file_name().and_then(|name| name.to_str())
        && let Some(device) = named(store, name)?.filter(is_path)
    {
        return Ok(device);
    }
    let devices = devices(store)?;
    let number = users::number_of(path);
    let is_node = |device: &Device| {
        let node = number.is_some() && sysfs_number(&disk_of(&device.info)) == number;
        // The node of a lost device may be gone; its paths still name it.
        node || is_path(device)
    };
    let found: Vec<Device> = devices.iter().filter(|device| is_node(device)).cloned().collect();
    if !found.is_empty() {
        return one(found, path);
    }
    let id = fs::metadata(path).ok().map(|id| (id.dev(), id.ino()));
    let is_image = |device: &&Device| id == Some((device.image.dev, device.image.ino));
    let found: Vec<Device> = devices.iter().filter(is_image).cloned().collect();
    if !found.is_empty() {
        return one(found, path);
    }
    // An image that was removed or replaced under its device is still known by its path.
    let real = real(path);
    one(devices.into_iter().filter(|device| device.info.image == real).collect(), path)
}

/// The path without links, also of a file that is gone from its directory.
fn real(path: &Path) -> PathBuf {
    let gone = || {
        let absolute = std::path::absolute(path).ok()?;
        Some(fs::canonicalize(absolute.parent()?).ok()?.join(absolute.file_name()?))
    };
    fs::canonicalize(path).ok().or_else(gone).unwrap_or_else(|| path.to_owned())
}

/// The device of that name.
fn named(store: &Store, name: &str) -> Result<Option<Device>, Error> {
    Ok(store.device(name)?.and_then(|device| current(store, &System, device)))
}

fn one(mut found: Vec<Device>, target: &Path) -> Result<Device, Error> {
    if found.len() > 1 {
        let names = found.into_iter().map(|device| device.info.name).collect();
        return Err(Error::Ambiguous { target: target.display().to_string(), names });
    }
    found.pop().ok_or_else(|| nothing(target))
}

fn nothing(target: &Path) -> Error {
    Error::NoDevice { target: target.display().to_string() }
}

fn sysfs_number(disk: &str) -> Option<String> {
    sysfs::text(disk, "dev")
}

#[cfg(test)]
#[path = "list_tests.rs"]
mod tests;
