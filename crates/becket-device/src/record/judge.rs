//! What a record is worth: whether the kernel still has its device, and in which state.
//! It only asks and changes nothing, neither records nor devices.

use becket_transport::Kind;

use crate::contract::shape::{self, Disk, Life};
use crate::contract::{DeviceInfo, DeviceState};
use crate::record::device::Device;
use crate::system::kernel::Kernel;

/// What a record is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
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

pub(crate) fn judge(kernel: &impl Kernel, device: &Device) -> Verdict {
    let verdict = match shape::of(device.info.transport).life {
        Life::Bound => return judge_bound(kernel, device),
        Life::Marked => return judge_marked(kernel, device),
        Life::Numbered => judge_numbered(kernel, device),
        Life::Shown => judge_shown(kernel, device),
        Life::Recorded => return judge_recorded(kernel, device),
    };
    // The kernel loses the disk first. Then the supervisor gives up the image's locks, and the record last:
    // only without a record can the next program open the image.
    match verdict {
        Verdict::Gone if !kept(kernel, device).1 => Verdict::Gone,
        Verdict::Gone if device.starting => Verdict::NotYet,
        Verdict::Gone => Verdict::There(DeviceState::Detaching),
        other => other,
    }
}

/// Its mark is in the device's UUID, which cannot be changed and no other device ever has.
fn judge_marked(kernel: &impl Kernel, device: &Device) -> Verdict {
    if kernel.dm_mark(device.info.number) != Some(device.mark) {
        // A disk that is being removed loses its UUID first and its node last.
        let goes =
            device.info.diskseq.is_some() && kernel.diskseq(&disk_of(&device.info)) == device.info.diskseq;
        return if goes { Verdict::There(DeviceState::Detaching) } else { Verdict::Gone };
    }
    let leaving = !device.info.spec.autoclear && kernel.dm_leaves(device.mark);
    Verdict::There(if leaving { DeviceState::Detaching } else { DeviceState::Live })
}

fn judge_bound(kernel: &impl Kernel, device: &Device) -> Verdict {
    let number = device.info.number;
    let autoclear = kernel.loop_autoclear(number);
    let same = match (device.info.diskseq, kernel.diskseq(&disk_of(&device.info))) {
        (Some(ours), Some(present)) => ours == present && autoclear.is_some(),
        // Before Linux 5.15, or without sysfs: the same file on the same number is taken for the same use.
        _ => kernel.loop_backing(number) == Some((device.image.dev, device.image.ino)),
    };
    if !same {
        return Verdict::Gone;
    }
    let leaving = autoclear == Some(true) && !device.info.spec.autoclear;
    Verdict::There(if leaving { DeviceState::Detaching } else { DeviceState::Live })
}

/// A loop device exists as long as its use lasts, served or not. A file exists as long as its directory,
/// which is what is left of one that has no server and has to be cleaned up.
fn judge_shown(kernel: &impl Kernel, device: &Device) -> Verdict {
    let (served, supervised) = kept(kernel, device);
    if device.starting {
        return match (supervised, served) {
            (true, _) => Verdict::NotYet,
            // It may have a loop device already: the next supervisor finds that by the worker.
            (false, true) => Verdict::There(DeviceState::Lost),
            (false, false) => Verdict::Gone,
        };
    }
    if device.info.is_file() {
        let there = device.info.device.parent().is_some_and(|place| kernel.place(place));
        return if there { state_of(device, served, supervised) } else { Verdict::Gone };
    }
    let disk = disk_of(&device.info);
    if device.info.diskseq.is_none() || kernel.diskseq(&disk) != device.info.diskseq {
        return Verdict::Gone;
    }
    let number = disk.strip_prefix("loop").and_then(|number| number.parse().ok());
    if number.is_some_and(|number| kernel.loop_autoclear(number).is_none()) {
        return Verdict::Gone;
    }
    state_of(device, served, supervised)
}

/// The kernel says nothing of an export. Its supervisor removes the record when all else is done.
fn judge_recorded(kernel: &impl Kernel, device: &Device) -> Verdict {
    let (served, supervised) = kept(kernel, device);
    match (device.starting, supervised) {
        (true, true) => Verdict::NotYet,
        (true, false) => Verdict::Gone,
        (false, _) => state_of(device, served, supervised),
    }
}

/// Whether the worker and the supervisor of a device live.
fn kept(kernel: &impl Kernel, device: &Device) -> (bool, bool) {
    let alive = |process: Option<_>| process.is_some_and(|process| kernel.alive(process));
    (alive(device.worker), alive(device.server))
}

fn judge_numbered(kernel: &impl Kernel, device: &Device) -> Verdict {
    if !kernel.ublk(device.info.number) {
        return Verdict::Gone;
    }
    let disk = disk_of(&device.info);
    let (served, supervised) = kept(kernel, device);
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
    if !same {
        return Verdict::Gone;
    }
    if served && supervised && !kernel.disk(&disk) {
        return Verdict::There(DeviceState::Detaching);
    }
    state_of(device, served, supervised)
}

/// What a device is doing that is there.
fn state_of(device: &Device, served: bool, supervised: bool) -> Verdict {
    let known = device.info.state;
    Verdict::There(match (served, supervised) {
        (true, true) if known == DeviceState::Detaching => known,
        (true, true) => DeviceState::Live,
        (true, false) if device.unspoken.is_some() => DeviceState::UnknownVersion,
        (true, false) => DeviceState::Orphaned,
        // What the supervisor knows of such a device is in its record.
        (false, true) if matches!(known, DeviceState::Failing | DeviceState::Lost) => known,
        (false, true) => DeviceState::Recovering,
        (false, false) => DeviceState::Lost,
    })
}

/// The name of a device's disk in sysfs.
pub(crate) fn disk_of(info: &DeviceInfo) -> String {
    match shape::of(info.transport).disk {
        Disk::Numbered(word) => format!("{word}{}", info.number),
        Disk::OfNode if info.is_file() => no_disk(info.transport, info.number),
        // FUSE: the loop device over its file.
        Disk::OfNode => info.device.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        Disk::None => no_disk(info.transport, info.number),
    }
}

/// A name that no disk of the kernel can have.
fn no_disk(kind: Kind, number: u32) -> String {
    format!("becket-export/{kind}{number}")
}

/// The same of a number that has no record yet.
pub(crate) fn disk_name(kind: Kind, number: u32) -> String {
    match shape::of(kind).disk {
        Disk::Numbered(word) => format!("{word}{number}"),
        Disk::OfNode => format!("{kind}{number}"),
        Disk::None => no_disk(kind, number),
    }
}

#[cfg(test)]
#[path = "judge_tests.rs"]
mod tests;
