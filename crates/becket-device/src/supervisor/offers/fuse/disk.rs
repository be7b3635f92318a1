//! The loop device over the file of a FUSE device, and what is left of it when all that served it are dead.
//! What waits for the worker is for the caller to bound.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use becket_transport::aside::within;
use becket_transport::fuse;
use becket_transport::loop_;
use becket_transport::{node, sysfs};

use crate::contract::Error;
use crate::record::device::Device;

/// Sets the read-only flag of a loop device. Its number keeps the flag for the next device that has it, so
/// it is taken back before a device goes.
pub(super) fn set_read_only(number: u32, on: bool) -> Result<(), Error> {
    node::set_read_only(&format!("loop{number}"), on).map_err(Error::Device)
}

/// Detaches an unused loop device, and clears its read-only flag.
pub(super) fn detach_unused(number: u32, diskseq: Option<u64>) -> Result<bool, becket_transport::Error> {
    let disk = format!("loop{number}");
    // One with requests under way is in use, and to open it may take as long as they take.
    let waits = sysfs::in_flight(&disk).is_some_and(|under_way| under_way != (0, 0));
    let frozen = !waits && sysfs::flag(&disk, "ro").unwrap_or(false);
    if frozen {
        node::set_read_only(&disk, false)?;
    }
    let gone = loop_::detach_unused(number, diskseq);
    if frozen && matches!(gone, Ok(false)) {
        node::set_read_only(&disk, true)?;
    }
    gone
}

/// The loop device that a connection has, where the kernel says so in time.
pub(super) fn find_disk(device: &OwnedFd) -> Option<u32> {
    let device = device.try_clone().ok()?;
    within(Duration::from_secs(5), || fuse::find_disk(device)).flatten()
}

/// The number of a loop device by its node.
pub(super) fn loop_number(node: &Path) -> Option<u32> {
    node.strip_prefix("/dev").ok()?.to_str()?.strip_prefix("loop")?.parse().ok()
}

/// Ends what is left of a device whose server and supervisor are both dead; `false` when it is in use.
pub(super) fn end_left(record: &Device) -> Result<bool, Error> {
    let ended = match loop_number(&record.info.device) {
        // It is not answered any more, so to its users it is lost already.
        Some(number) => match loop_::detach(number, record.info.diskseq, Some(Duration::from_secs(1))) {
            Ok(cleared) => Ok(cleared == loop_::Cleared::Gone),
            Err(error) => Err(error),
        },
        None => match record.info.device.parent() {
            Some(place) => fuse::unmount(place, true).inspect(|_| drop(fs::remove_dir(place))),
            None => Ok(true),
        },
    };
    ended.map_err(Error::Device)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_tell_their_numbers() {
        assert_eq!(loop_number(Path::new("/dev/loop17")), Some(17));
        for other in ["/dev/loop17p1", "/dev/ublkb3", "/run/user/1000/becket/fuse/fuse0/image", "loop3"] {
            assert_eq!(loop_number(Path::new(other)), None, "{other}");
        }
    }
}
