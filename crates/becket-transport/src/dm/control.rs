//! The control device of device-mapper, and the names by which becket knows its own devices.
//! Never creates, changes or removes a device.

use std::fs::File;
use std::path::Path;

use becket_uapi::dm as uapi;

use crate::{Error, Kind, module, node};

/// What all of becket's names and UUIDs begin with.
pub(super) const PREFIX: &str = "becket-";
/// The control device.
pub(super) const CONTROL: &str = "/dev/mapper/control";

/// Opens the control device, also where it has no node.
pub(super) fn open_control() -> Result<File, Error> {
    let (major, minor) = uapi::DM_CONTROL;
    match node::open_control(Kind::Dm, Path::new(CONTROL), Some(rustix::fs::makedev(major, minor))) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENODEV | libc::ENXIO)) => {
            Err(module::missing(Kind::Dm, "dm-mod", "CONFIG_BLK_DEV_DM"))
        }
        other => other.map(File::from),
    }
}

/// The name in sysfs of device-mapper's device `number`.
pub(super) fn name(number: u32) -> String {
    format!("dm-{number}")
}

/// The UUID, and the name, of the device that bears a mark.
pub(super) fn uuid(mark: u64) -> String {
    format!("{PREFIX}{mark:016x}")
}

/// The same of a partition of it.
pub(super) fn uuid_of_partition(mark: u64, partition: u32) -> String {
    format!("{}-part{partition}", uuid(mark))
}

/// What a UUID says: the mark, and the partition's number where it is one's.
pub(super) fn parse_uuid(uuid: &str) -> Option<(u64, Option<u32>)> {
    let rest = uuid.strip_prefix(PREFIX)?;
    let (mark, partition) = match rest.split_once("-part") {
        Some((mark, number)) => (mark, Some(number.parse().ok()?)),
        None => (rest, None),
    };
    let mark = u64::from_str_radix(mark, 16).ok()?;
    // Only what `uuid` itself would write: neither signs nor other widths.
    let written = match partition {
        Some(number) => uuid_of_partition(mark, number),
        None => self::uuid(mark),
    };
    (written == uuid).then_some((mark, partition))
}
