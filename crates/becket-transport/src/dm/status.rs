//! What the kernel shows of becket's devices of device-mapper.
//! It never opens one: an open descriptor keeps a device that should go.

use std::fs;
use std::os::fd::AsFd;

use becket_image::{FileKind, Opened, Source};
use becket_uapi::dm as uapi;

use super::control::{name, open_control, parse_uuid, uuid};
use crate::sysfs;

/// The mark of device-mapper's device `number`, where it is one of becket's disks.
pub fn mark_of(number: u32) -> Option<u64> {
    match parse_uuid(&sysfs::text(&name(number), "dm/uuid")?)? {
        (mark, None) => Some(mark),
        (_, Some(_)) => None,
    }
}

/// Whether the disk with this mark goes when its last user closes it. `false` for a user who may not ask.
pub fn is_leaving(mark: u64) -> bool {
    let Ok(control) = open_control() else { return false };
    uapi::status(control.as_fd(), &uuid(mark)).is_ok_and(|status| status.deferred_remove)
}

/// The partitions of becket's disk `dm-N` by the name of the disk in sysfs: their numbers, ascending, and
/// their own names there. None for every other disk.
pub fn partitions(disk: &str) -> Vec<(u32, String)> {
    let Some((mark, None)) = sysfs::text(disk, "dm/uuid").as_deref().and_then(parse_uuid) else {
        return Vec::new();
    };
    let holders = fs::read_dir(sysfs::directory(disk).join("holders"));
    let mut found: Vec<_> = holders
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|holder| {
            let holder = holder.file_name().into_string().ok()?;
            let (of, number) = parse_uuid(&sysfs::text(&holder, "dm/uuid")?)?;
            Some((number.filter(|_| of == mark)?, holder))
        })
        .collect();
    found.sort_unstable();
    found
}

/// Describes the device of becket's that writes to a block device on which `opened` lies. Its locks have
/// ended with the command that attached it, and a reader asks for no claim: so readers ask here.
pub fn writer_over(opened: &Opened) -> Option<String> {
    let blocks = opened.sources.iter().filter_map(Source::file);
    let blocks = blocks.filter(|file| file.facts.kind == FileKind::Block);
    blocks.into_iter().find_map(|file| {
        let dev = rustix::fs::fstat(&file.buffered).ok()?.st_rdev;
        let (major, minor) = (rustix::fs::major(dev), rustix::fs::minor(dev));
        let holders = fs::read_dir(format!("/sys/dev/block/{major}:{minor}/holders")).ok()?;
        holders.flatten().find_map(|holder| {
            let holder = holder.file_name().into_string().ok()?;
            parse_uuid(&sysfs::text(&holder, "dm/uuid")?)?;
            (sysfs::flag(&holder, "ro") == Some(false)).then(|| format!("becket's {holder} writes to it"))
        })
    })
}
