//! The end of a device of device-mapper with all its partitions, and its resizing.
//! It never takes a device away from its users: the kernel refuses, and what went before is put back.

use std::fs::File;
use std::os::fd::AsFd;

use becket_uapi::dm as uapi;

use super::attach::{create, node_of};
use super::control::{name, open_control, uuid, uuid_of_partition};
use super::status::partitions;
use super::table;
use crate::{Error, node, sysfs};

/// A partition's device, with all that makes it again.
pub(super) struct Partition {
    pub(super) uuid: String,
    number: u32,
    open_count: u32,
    pub(super) table: Vec<uapi::Target>,
    read_only: bool,
}

impl Partition {
    pub(super) fn node(&self) -> std::path::PathBuf {
        node_of(self.number)
    }
}

/// Detaches the disk with this mark and its partitions if all are unused; returns whether they are gone.
///
/// The partitions must go first. One of them, or the disk, may be opened after it was seen to be unused: then
/// those that are gone already are made again under their numbers.
///
/// # Errors
/// The kernel refuses.
pub fn detach_unused(mark: u64) -> Result<bool, Error> {
    let control = open_control()?;
    let Some(disk) = Disk::find(&control, mark)? else { return Ok(true) };
    // Each partition has the disk open once.
    if disk.open_count as usize > disk.partitions.len()
        || disk.partitions.iter().any(|one| one.open_count > 0)
    {
        return Ok(false);
    }
    for (gone, partition) in disk.partitions.iter().enumerate() {
        match uapi::remove(control.as_fd(), &partition.uuid) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {}
            Err(error) => {
                restore(&control, disk.partitions.get(..gone).unwrap_or_default())?;
                return busy(error, partition.number);
            }
        }
    }
    match uapi::remove(control.as_fd(), &uuid(mark)) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(true),
        Err(error) => {
            restore(&control, &disk.partitions)?;
            busy(error, disk.number)
        }
    }
}

/// Makes the kernel remove the disk with this mark and its partitions, each when its last user closes it;
/// returns whether the disk is gone already. It stays as long as a partition is used.
///
/// # Errors
/// The kernel refuses.
pub fn detach_lazily(mark: u64) -> Result<bool, Error> {
    let control = open_control()?;
    let Some(disk) = Disk::find(&control, mark)? else { return Ok(true) };
    let uuids = disk.partitions.into_iter().map(|partition| partition.uuid).chain([uuid(mark)]);
    let mut gone = true;
    for uuid in uuids {
        gone = match uapi::remove_deferred(control.as_fd(), &uuid) {
            Ok(gone) => gone,
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => true,
            Err(error) => return Err(Error::io("remove", node_of(disk.number))(error)),
        };
    }
    Ok(gone)
}

/// Takes over the present size of the device below, up to `limit`, for the disk with this mark, and returns
/// its new size in bytes. The kernel lets requests under way end and holds later ones back meanwhile.
///
/// # Errors
/// It is not attached, lies in several pieces (whose sizes do not say which of them has grown), or the kernel
/// refuses.
pub fn refresh(mark: u64, limit: Option<u64>) -> Result<u64, Error> {
    let control = open_control()?;
    let uuid = uuid(mark);
    let status = uapi::status(control.as_fd(), &uuid).map_err(|error| match error.raw_os_error() {
        Some(libc::ENXIO) => Error::NotAttached { device: uuid.clone().into() },
        _ => Error::io("ask for the state of", &uuid)(error),
    })?;
    let number = status.dev.1;
    let path = node_of(number);
    let io = |doing| Error::io(doing, &path);
    let lines = uapi::table(control.as_fd(), &uuid).map_err(io("ask for the table of"))?;
    let Some((below, start, len)) = table::single(&lines) else {
        let len = lines.iter().map(|line| line.len * table::SECTOR).sum();
        return match limit.is_none_or(|limit| limit == len) {
            true => Ok(len),
            false => Err(Error::Fixed { device: path, why: "it lies in more than one piece" }),
        };
    };
    let (major, minor) = (rustix::fs::major(below), rustix::fs::minor(below));
    let below_size = sysfs::size_at(major, minor).ok_or_else(|| Error::Fixed {
        device: path.clone(),
        why: "the size of the device below cannot be seen: sysfs is not there",
    })?;
    let block: u64 = sysfs::number(&name(number), "queue/logical_block_size").unwrap_or(512).max(512);
    let room = below_size.saturating_sub(start).min(limit.unwrap_or(u64::MAX));
    let new = room - room % block;
    if new == 0 {
        return Err(Error::Fixed { device: path.clone(), why: "nothing of it is left on the device below" });
    }
    if new != len {
        let lines = table::linear(below, start, new);
        uapi::load(control.as_fd(), &uuid, status.read_only, &lines).map_err(io("load the new table of"))?;
        // The places of its bytes stay: a file system on it need not be frozen for the change.
        uapi::resume(control.as_fd(), &uuid, true).map_err(io("resize"))?;
    }
    Ok(new)
}

/// A disk of becket's with its partitions.
pub(super) struct Disk {
    pub(super) number: u32,
    open_count: u32,
    pub(super) partitions: Vec<Partition>,
}

impl Disk {
    /// `None` when there is none.
    pub(super) fn find(control: &File, mark: u64) -> Result<Option<Disk>, Error> {
        let status = match uapi::status(control.as_fd(), &uuid(mark)) {
            Ok(status) => status,
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => return Ok(None),
            Err(error) => return Err(Error::io("ask for the state of", uuid(mark))(error)),
        };
        let number = status.dev.1;
        let mut found = Vec::new();
        for (partition, name) in partitions(&name(number)) {
            let uuid = uuid_of_partition(mark, partition);
            let ask = || -> std::io::Result<_> {
                let uapi::Status { dev: (_, number), open_count, read_only, .. } =
                    uapi::status(control.as_fd(), &uuid)?;
                let table = uapi::table(control.as_fd(), &uuid)?;
                Ok(Partition { uuid: uuid.clone(), number, open_count, table, read_only })
            };
            match ask() {
                Ok(partition) => found.push(partition),
                // It was about to go.
                Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {}
                Err(error) => return Err(Error::io("ask for the table of", sysfs::node(&name))(error)),
            }
        }
        Ok(Some(Disk { number, open_count: status.open_count, partitions: found }))
    }
}

/// Makes partitions again that were removed a moment ago.
fn restore(control: &File, partitions: &[Partition]) -> Result<(), Error> {
    for Partition { uuid, number, table, read_only, .. } in partitions {
        let path = node_of(*number);
        let (major, minor) = create(control, uuid, Some(*number), table, *read_only)
            // Another device has taken the number since: links still lead there.
            .or_else(|_| create(control, uuid, None, table, *read_only))
            .map_err(|error| error.into_error(&path))?;
        uapi::resume(control.as_fd(), uuid, true).map_err(Error::io("start again", &path))?;
        node::ensure_block(&node_of(minor), rustix::fs::makedev(major, minor))?;
    }
    Ok(())
}

/// What happens to the partitions of a disk that is seen to be used only when they are gone.
#[cfg(test)]
pub(super) fn remove_and_restore(mark: u64) -> Result<(), Error> {
    let control = open_control()?;
    let partitions = Disk::find(&control, mark)?.map(|disk| disk.partitions).unwrap_or_default();
    for partition in &partitions {
        uapi::remove(control.as_fd(), &partition.uuid).map_err(Error::io("remove", &partition.uuid))?;
    }
    restore(&control, &partitions)
}

fn busy(error: std::io::Error, number: u32) -> Result<bool, Error> {
    match error.raw_os_error() {
        Some(libc::EBUSY) => Ok(false),
        _ => Err(Error::io("remove", node_of(number))(error)),
    }
}
