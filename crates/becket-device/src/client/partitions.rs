//! Partitions of a device that lives: what its table says now, and what the kernel has.
//! The table is read from the device and by the client, as the user who calls; the supervisor parses none.

use std::collections::HashSet;

use becket_image::{Format, OpenOptions, Partition};
use becket_transport::node::{self, KernelPartition};
use becket_transport::ublk::privileged;

use crate::client::kernel_drivers;
use crate::contract::messages::{OneDevice, Refresh};
use crate::contract::shape;
use crate::contract::{DeviceInfo, DeviceState, Error, PartitionInfo};
use crate::control::client;
use crate::control::health::Concerns;
use crate::record::device::Device;
use crate::record::judge::disk_of;
use crate::record::links;
use crate::record::store::Store;
use crate::system::describe::partitions_as;

/// Brings kernel, nodes, links and record of a device to what its partition table says now.
///
/// # Errors
/// The table cannot be read, or a partition is in use that the table no longer has. All others are done.
pub(crate) fn refresh(store: &Store, device: Device) -> Result<DeviceInfo, Error> {
    let info = &device.info;
    // The files of a rootless device are fixed while it lives, and a user's own device has no partitions.
    if device.whole || info.is_file() || !privileged() {
        return Ok(device.info);
    }
    let table = read(info)?;
    if is_there(info, &table) {
        return Ok(device.info);
    }
    let mut new = device.clone();
    let done = match kernel_drivers::of(info.transport) {
        None => {
            let partitions = Some(table.iter().cloned().map(Into::into).collect());
            let request = Refresh { name: info.name.clone(), partitions };
            let concerns = Concerns::Worker(info.worker_pid);
            let reply: OneDevice = client::call(store.runtime(), "Refresh", &request, &[], concerns)?;
            new.info = reply.device;
            Ok(())
        }
        Some(driver) => driver.repartition(&mut new, &table),
    };
    if !info.transport.is_served() {
        store.update(&device, &new)?;
    }
    links::remove(store.runtime(), &device.info);
    let missing = links::make(store, &new.info);
    new.info.warnings.extend(missing);
    done.map_err(Error::Device)?;
    // Of a served device the kernel's refusal has become a warning.
    let extra =
        new.info.partitions.iter().find(|part| !table.iter().any(|entry| entry.number == part.number));
    match extra {
        Some(part) => {
            Err(Error::Device(becket_transport::Error::PartitionInUse { node: part.device.clone() }))
        }
        None => Ok(new.info),
    }
}

/// What the table on a device says. What was written to the device is read back through the same page cache.
fn read(info: &DeviceInfo) -> Result<Vec<Partition>, Error> {
    let how = OpenOptions {
        read_only: true,
        shared: true,
        partitions: true,
        format: Format::Raw,
        block_size: Some(info.spec.block_size),
        ..OpenOptions::default()
    };
    Ok(becket_image::open_partly(&info.device, &how)?.partitions)
}

/// Whether kernel and record have what the table says.
fn is_there(info: &DeviceInfo, table: &[Partition]) -> bool {
    let known = partitions_as(present(info), table);
    known == info.partitions
        && known.len() == table.len()
        && table.iter().zip(&known).all(|(entry, part)| {
            (entry.number, entry.start, entry.len) == (part.number, part.start, part.size)
        })
}

/// The partitions that the kernel has of a device.
fn present(info: &DeviceInfo) -> Vec<KernelPartition> {
    match kernel_drivers::of(info.transport) {
        Some(driver) => driver.partitions(info, &[]),
        None => node::partitions(&disk_of(info)),
    }
}

/// What the kernel has by now, for `list`, with the record's names where it describes the same partition.
/// `partitioned` are the disks that have some below them.
pub(crate) fn as_they_are(info: &DeviceInfo, partitioned: &HashSet<String>) -> Vec<PartitionInfo> {
    if info.is_file() || info.state == DeviceState::Lost {
        return info.partitions.clone();
    }
    if !shape::of(info.transport).partitions_are_disks && !partitioned.contains(&disk_of(info)) {
        return Vec::new();
    }
    let mut parts = partitions_as(present(info), &[]);
    for part in &mut parts {
        let same = |known: &&PartitionInfo| (known.number, known.start) == (part.number, part.start);
        if let Some(known) = info.partitions.iter().find(same) {
            (part.label, part.uuid) = (known.label.clone(), known.uuid.clone());
        }
    }
    parts
}

/// A name that sorts as people count: `loop2` before `loop10`.
pub(crate) fn counted(name: &str) -> Vec<(u64, &str)> {
    let mut rest = name;
    let mut pieces = Vec::new();
    while !rest.is_empty() {
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, behind) = rest.split_at(digits);
        let text = behind.find(|c: char| c.is_ascii_digit()).unwrap_or(behind.len());
        let (text, behind) = behind.split_at(text);
        pieces.push((number.parse().unwrap_or(if digits == 0 { 0 } else { u64::MAX }), text));
        rest = behind;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_as_people_count() {
        let mut names =
            ["loop10", "a", "loop2", "loop2p10", "loop2p9", "10", "9", "", "loop99999999999999999999999"];
        names.sort_by_key(|name| counted(name));
        assert_eq!(
            names,
            ["", "a", "loop2", "loop2p9", "loop2p10", "loop10", "loop99999999999999999999999", "9", "10"]
        );
    }
}
