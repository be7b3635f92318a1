//! Partitions of a device that lives: what its table says now, and what the kernel has.
//! The table is read from the device and by the client, as the user who calls; the supervisor parses none.

use becket_image::{Format, OpenOptions, Partition};
use becket_transport::node::{self, KernelPartition};
use becket_transport::ublk::privileged;
use becket_transport::{Kind, dm};

use crate::contract::messages::{OneDevice, Refresh};
use crate::contract::{DeviceInfo, DeviceState, Error, PartitionInfo};
use crate::control::client;
use crate::control::health::Concerns;
use crate::record::judge::disk_of;
use crate::record::store::{Device, Store};
use crate::record::{links, nodes};
use crate::system::describe::partitions_as;

/// How long partitions that the kernel has been given may take to appear.
const APPEAR: std::time::Duration = std::time::Duration::from_secs(5);

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
    let done = match info.transport {
        Kind::Ublk | Kind::Fuse => {
            let partitions = Some(table.iter().cloned().map(Into::into).collect());
            let request = Refresh { name: info.name.clone(), partitions };
            let concerns = Concerns::Worker(info.worker_pid);
            let reply: OneDevice = client::call(store.runtime(), "Refresh", &request, &[], concerns)?;
            new.info = reply.device;
            Ok(())
        }
        Kind::Dm => {
            let done = dm::repartition(device.mark, &table);
            new.info.partitions = partitions_as(dm_partitions(info, &table), &table);
            done
        }
        Kind::Loop => {
            let disk = disk_of(info);
            let done = node::drop_partitions(&disk, &table)
                .and_then(|()| node::await_partitions(&disk, &table, APPEAR));
            let done = done.map(|made| {
                if made.by_hand {
                    new.nodes_in = nodes::namespace();
                }
            });
            new.info.partitions = partitions_as(node::partitions(&disk), &table);
            done
        }
    };
    if !info.transport.is_served() {
        store.update(&device, &new)?;
    }
    links::remove(store.runtime(), &device.info);
    let missing = links::make(store.runtime(), &new.info);
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
        block_size: Some(info.block_size),
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
    match info.transport {
        Kind::Dm => dm_partitions(info, &[]),
        _ => node::partitions(&disk_of(info)),
    }
}

/// Those of device-mapper are disks of their own: their starts are in the table, or else in the record.
fn dm_partitions(info: &DeviceInfo, table: &[Partition]) -> Vec<KernelPartition> {
    let starts = |number| {
        let entry = table.iter().find(|entry| entry.number == number).map(|entry| entry.start);
        entry.or_else(|| info.partitions.iter().find(|part| part.number == number).map(|part| part.start))
    };
    let found = dm::partitions(&disk_of(info)).into_iter();
    found.filter_map(|(number, name)| dm::partition(number, &name, starts(number).unwrap_or(0))).collect()
}

/// What the kernel has by now, for `list`, with the record's names where it describes the same partition.
pub(crate) fn as_they_are(info: &DeviceInfo) -> Vec<PartitionInfo> {
    if info.is_file() || info.state == DeviceState::Lost {
        return info.partitions.clone();
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
