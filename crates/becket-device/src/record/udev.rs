//! What udev gets to know of a device: its name, so that systemd has `/dev/becket/NAME` as a device of its
//! own and units can wait for it. It makes no link and never waits; where no udev runs it does nothing.
//!
//! Each thing has one writer. Links are becket's ([`crate::record::links`]): they are there when `attach`
//! returns, and the process that removes them knows what they point to. Were they udev's, the late end of an
//! old device would remove the link of a new one. udev finds the name (`dist/90-becket.rules`) in a file that
//! is called by the disk's sequence number, which no other disk of this boot has: an event that comes late
//! finds nothing rather than the name of another device. The event that announced the disk may have come
//! before that file, so one more is asked for.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use becket_transport::{node, sysfs};
use tracing::warn;

use crate::contract::{DeviceInfo, shape};
use crate::record::judge::disk_of;
use crate::record::runtime::Runtime;

/// There while udev's daemon runs.
const DAEMON: &str = "/run/udev/control";

/// Tells the names of a device and of its partitions, whose links have been made.
pub(crate) fn tell(runtime: &Runtime, info: &DeviceInfo) {
    if !listens(runtime) {
        return;
    }
    for (disk, name) in named(info) {
        // A partition has no number of its own, and learns its name from its disk's.
        if let Some(diskseq) = node::diskseq(&disk)
            && let Err(error) = write(&runtime.udev(), diskseq, &name)
        {
            warn!(device = name, "udev does not learn its name: {error}");
        }
        // Should it be refused, the device lacks a unit and nothing else.
        let _ = fs::write(sysfs::directory(&disk).join("uevent"), "change");
    }
}

/// Whether udev has the name of a device, or does not run.
pub(crate) fn knows(runtime: &Runtime, info: &DeviceInfo) -> bool {
    let reported = |diskseq: u64| runtime.udev().join(diskseq.to_string()).exists();
    !listens(runtime) || info.diskseq.is_none_or(reported)
}

/// Links elsewhere are no business of the machine's.
fn listens(runtime: &Runtime) -> bool {
    runtime.links().starts_with("/dev") && Path::new(DAEMON).exists()
}

/// Removes what udev got to know of a device.
pub(crate) fn forget(runtime: &Runtime, info: &DeviceInfo) {
    let dir = runtime.udev();
    if let Some(diskseq) = info.diskseq {
        // Most have none.
        let _ = fs::remove_file(dir.join(diskseq.to_string()));
    }
    if shape::of(info.transport).partitions_are_disks && !info.partitions.is_empty() {
        // Its partitions were disks whose numbers went with them.
        let names: Vec<String> = named(info).into_iter().map(|(_, name)| property(&name)).collect();
        for item in fs::read_dir(dir).into_iter().flatten().flatten() {
            if fs::read_to_string(item.path()).is_ok_and(|text| names.contains(&text)) {
                let _ = fs::remove_file(item.path());
            }
        }
    }
}

/// The disk and its partitions by their names in sysfs, with their names below /dev/becket.
fn named(info: &DeviceInfo) -> Vec<(String, String)> {
    let partitions = info.partitions.iter().filter_map(|partition| {
        let node = partition.device.file_name()?.to_str()?;
        Some((node.to_owned(), of_partition(&info.name, partition.number)))
    });
    std::iter::once((disk_of(info), info.name.clone())).chain(partitions).collect()
}

/// Whole or not at all: an event may come at any time.
fn write(dir: &Path, diskseq: u64, name: &str) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let new = dir.join(format!(".{diskseq}.new"));
    fs::write(&new, property(name))?;
    fs::rename(&new, dir.join(diskseq.to_string()))
}

/// A line as udev's `IMPORT{file}` reads it. Names hold nothing that would have to be quoted.
fn property(name: &str) -> String {
    format!("BECKET_NAME={name}\n")
}

/// What the link of a device's partition is called.
pub(crate) fn of_partition(name: &str, number: u32) -> String {
    format!("{name}p{number}")
}

#[cfg(test)]
mod tests {
    use becket_transport::Kind;

    use super::*;
    use crate::contract::PartitionInfo;
    use crate::record::store::tests::device;

    #[test]
    fn what_was_announced_is_forgotten_with_the_device_and_nothing_else_is() {
        let temp = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(temp.path().join("run"), temp.path().join("links")).unwrap();
        let dir = runtime.udev();
        let mut info = device("disk", 3).info;
        info.transport = Kind::Dm;
        info.diskseq = Some(7);
        info.partitions = vec![PartitionInfo {
            number: 2,
            device: "/dev/dm-9".into(),
            start: 0,
            size: 512,
            label: None,
            uuid: None,
        }];
        assert_eq!(named(&info), [("dm-3", "disk"), ("dm-9", "diskp2")].map(|(a, b)| (a.into(), b.into())));
        for (diskseq, name) in [(7, "disk"), (8, "diskp2"), (9, "other")] {
            write(&dir, diskseq, name).unwrap();
        }
        assert_eq!(fs::read_to_string(dir.join("8")).unwrap(), "BECKET_NAME=diskp2\n");
        forget(&runtime, &info);
        let left: Vec<_> = fs::read_dir(&dir).unwrap().map(|item| item.unwrap().file_name()).collect();
        assert_eq!(left, ["9"]);
        // udev gets nothing of a device whose links are elsewhere.
        tell(&runtime, &info);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
    }
}
