//! Partitions of a disk of device-mapper's after its partition table was changed: each is a device of its
//! own.
//! It never removes one that is in use.

use std::os::fd::AsFd;
use std::path::PathBuf;

use becket_image::Partition;
use becket_uapi::dm as uapi;

use super::attach::create;
use super::control::{name, open_control, uuid, uuid_of_partition};
use super::detach::Disk;
use super::status::is_leaving;
use super::table;
use crate::node::KernelPartition;
use crate::{Error, node, sysfs};

/// Makes the partitions of the disk with this mark those of a table: new ones, fewer, or with another length.
///
/// # Errors
/// A partition is in use that must go or move (the others are done all the same), the disk goes with its last
/// user, or the kernel refuses.
pub fn repartition(mark: u64, promised: &[Partition]) -> Result<(), Error> {
    let control = open_control()?;
    let Some(disk) = Disk::find(&control, mark)? else {
        return Err(Error::NotAttached { device: PathBuf::from(uuid(mark)) });
    };
    let own = name(disk.number);
    let (dev, size) = (sysfs::dev(&own), sysfs::number::<u64>(&own, "size"));
    let io = |doing| Error::io(doing, sysfs::node(&own));
    let (Some(dev), Some(sectors)) = (dev, size) else {
        return Err(Error::NotAttached { device: sysfs::node(&own) });
    };
    let size = sectors.saturating_mul(512);
    let read_only = sysfs::flag(&own, "ro").unwrap_or(false);
    let wanted = |entry: &Partition| table::linear(dev, entry.start, entry.len.min(size - entry.start));
    let promised: Vec<&Partition> = promised.iter().filter(|entry| entry.start < size).collect();

    let mut kept = Ok(());
    let mut there = Vec::new();
    for known in &disk.partitions {
        let entry = promised.iter().find(|entry| uuid_of_partition(mark, entry.number) == known.uuid);
        let begins = |table: &[uapi::Target]| table::single(table).map(|(_, start, _)| start);
        let done = match entry {
            Some(entry) if wanted(entry) == known.table => Ok(()),
            // Its bytes stay where they are: that may happen below a mounted file system.
            Some(entry) if begins(&known.table) == Some(entry.start) => {
                uapi::load(control.as_fd(), &known.uuid, read_only, &wanted(entry))
                    .and_then(|_| uapi::resume(control.as_fd(), &known.uuid, true))
                    .map(drop)
                    .map_err(io("resize a partition of"))
            }
            _ => match uapi::remove(control.as_fd(), &known.uuid) {
                Ok(()) => {
                    let _ = node::remove_stale(&known.node());
                    continue;
                }
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    Err(Error::PartitionInUse { node: known.node() })
                }
                Err(error) => Err(io("remove a partition of")(error)),
            },
        };
        there.push(known.uuid.clone());
        kept = kept.and(done);
    }
    let new: Vec<_> =
        promised.iter().filter(|entry| !there.contains(&uuid_of_partition(mark, entry.number))).collect();
    if !new.is_empty() && is_leaving(mark) {
        // They would keep it, and nothing would remove them.
        let why = "it goes with its last user, so it gets no new partitions";
        return Err(Error::Fixed { device: sysfs::node(&own), why });
    }
    for entry in new {
        let uuid = uuid_of_partition(mark, entry.number);
        let (major, minor) = create(&control, &uuid, None, &wanted(entry), read_only)
            .map_err(|refused| refused.into_error(&sysfs::node(&own)))?;
        uapi::resume(control.as_fd(), &uuid, true).map_err(io("start a partition of"))?;
        node::ensure_block(&sysfs::node(&name(minor)), rustix::fs::makedev(major, minor))?;
    }
    kept
}

/// A partition, by its name in sysfs and the byte where it starts.
pub fn partition(number: u32, name: &str, start: u64) -> Option<KernelPartition> {
    let len = sysfs::number::<u64>(name, "size")?.checked_mul(512)?;
    Some(KernelPartition { number, start, len, node: sysfs::node(name), dev: sysfs::dev(name)? })
}
