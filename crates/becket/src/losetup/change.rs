//! What becomes of devices that are there: detached, removed, resized, switched.
//! Never stops at the first of several that fails.

use super::device::{self, Loop, patiently};
use super::devices::{Device, no_device};
use super::trouble::{Trouble, explained, still_used};
use becket_uapi::loop_ as uapi;
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::thread;
use std::time::{Duration, Instant};

/// How long a detached device is waited for before its users are looked for.
const PASSING: Duration = Duration::from_millis(100);

/// Detaches each; says whether all went.
pub(super) fn detach(words: &[OsString]) -> bool {
    let mut well = true;
    for word in words {
        well &= reported(Device::named(word).and_then(|device| detach_one(&device)));
    }
    well
}

/// Detaches everything in use; says whether all went.
pub(super) fn detach_all() -> bool {
    match Device::in_use() {
        Ok(devices) => devices.iter().fold(true, |well, device| well & reported(detach_one(device))),
        Err(trouble) => reported(Err(trouble)),
    }
}

/// Removes the nodes of unused devices; says whether all went.
pub(super) fn remove(words: &[OsString]) -> bool {
    words.iter().fold(true, |well, word| well & reported(remove_one(word)))
}

fn reported(outcome: Result<(), Trouble>) -> bool {
    outcome.inspect_err(Trouble::tell).is_ok()
}

fn detach_one(device: &Device) -> Result<(), Trouble> {
    match device {
        Device::Loop(device) => detach_loop(device),
        Device::Served(served) => served.detach(),
    }
}

fn detach_loop(device: &Loop) -> Result<(), Trouble> {
    let before = device.sequence();
    on(device, "detach failed", |opened| uapi::clr_fd(opened.as_fd()))?;
    // A device in use goes with its last user, and is the same device until then. Programs that list all
    // devices hold each open for a moment.
    let stays = || before.is_some() && device.sequence() == before && device.is_bound();
    let until = Instant::now() + PASSING;
    while stays() && Instant::now() < until {
        thread::sleep(Duration::from_millis(1));
    }
    if stays() {
        if let Some(name) = &device.name {
            still_used(&device.path.display().to_string(), &becket_device::users(name));
        }
    } else {
        // becket's own records follow, where there are any.
        becket_device::tidy();
    }
    Ok(())
}

fn remove_one(word: &OsStr) -> Result<(), Trouble> {
    // The device is found by its node's device number, whatever the node is called. A device that the kernel
    // does not have has no name.
    let device = Loop::named(word).ok_or_else(|| no_device(word))?;
    let name = device.name.as_deref().ok_or_else(|| no_device(word))?;
    let number = device::number(name.as_bytes()).ok_or_else(|| no_device(word))?;
    let refused =
        |error: &io::Error| Trouble::because(&format!("{}: remove failed", device.path.display()), error);
    let control = File::options().read(true).write(true).open("/dev/loop-control");
    control.and_then(|control| uapi::ctl_remove(control.as_fd(), number)).map_err(|error| refused(&error))
}

/// Opens a device for one question or order.
fn on(device: &Loop, what: &str, order: impl FnOnce(&File) -> io::Result<()>) -> Result<(), Trouble> {
    let failed = |error: &io::Error| Trouble::because(&format!("{}: {what}", device.path.display()), error);
    let opened =
        device.open(false).map_err(|error| explained(&device.path, false, failed(&error), &error))?;
    order(&opened).map_err(|error| failed(&error))
}

/// Takes over a changed size of the file.
pub(super) fn set_capacity(word: &OsStr) -> Result<(), Trouble> {
    match Device::named(word)? {
        Device::Loop(device) => {
            on(&device, "set capacity failed", |opened| uapi::set_capacity(opened.as_fd()))
        }
        Device::Served(served) => served.refresh(),
    }
}

/// Switches direct I/O of a live device.
pub(super) fn set_direct_io(word: &OsStr, wanted: bool) -> Result<(), Trouble> {
    match Device::named(word)? {
        Device::Loop(device) => {
            on(&device, "set direct io failed", |opened| uapi::set_direct_io(opened.as_fd(), wanted))
        }
        Device::Served(served) => served.set_direct_io(wanted),
    }
}

/// Changes the logical sector size of a live device.
pub(super) fn set_sector_size(word: &OsStr, bytes: u64) -> Result<(), Trouble> {
    let what = "set logical block size failed";
    match Device::named(word)? {
        Device::Loop(device) => on(&device, what, |opened| {
            let bytes = u32::try_from(bytes).map_err(|_| Errno::INVAL)?;
            patiently(|| uapi::set_block_size(opened.as_fd(), bytes))
        }),
        Device::Served(_) => {
            let path = device::path_of(word);
            let why = Errno::OPNOTSUPP.into();
            Err(Trouble::because(&format!("{}: {what}", path.display()), &why).more(
                "ublk fixes it when the device is made: detach, and attach with --sector-size".to_owned(),
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_fails_is_not_the_last_that_is_tried() {
        let words = ["/dev/null", "/nowhere"].map(OsString::from);
        assert!(!detach(&words) && !remove(&words));
        assert!(detach(&[]));
    }
}
