//! What a record is worth: whether the kernel still has its device, and in which state.
//! It only asks and changes nothing, neither records nor devices.

use becket_transport::Kind;

use crate::kernel::Kernel;
use crate::state::Device;
use crate::{DeviceInfo, DeviceState};

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
    disk_name(info.transport, info.number)
}

/// The same of a number that has no record yet.
pub(crate) fn disk_name(kind: Kind, number: u32) -> String {
    match kind {
        Kind::Ublk => format!("ublkb{number}"),
        Kind::Dm => format!("dm-{number}"),
        kind => format!("{kind}{number}"),
    }
}

#[cfg(test)]
#[path = "judge_tests.rs"]
mod tests;
