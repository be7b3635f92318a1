//! What is shown of a device, in the words that all transports share.
//! It only looks: at sysfs and at what the image's opening has found.

use becket_transport::{node, sysfs};

use crate::contract::{AttachOptions, PartitionInfo, Partitions};

/// The note about a device that is read-only although that was not asked for.
pub(crate) fn unasked_read_only(reason: Option<&str>, options: &AttachOptions) -> Option<String> {
    reason.filter(|_| !options.open.read_only).map(|reason| format!("attached read-only: {reason}"))
}

/// The length of a disk by sysfs, in bytes.
pub(crate) fn size_of(disk: &str) -> Option<u64> {
    sysfs::number::<u64>(disk, "size")?.checked_mul(512)
}

/// The kernel's partitions of a disk, with what the image's table says of them.
pub(crate) fn partitions_of(
    disk: &str,
    promised: &[becket_image::Partition],
    wanted: Partitions,
) -> Vec<PartitionInfo> {
    // Without a table the kernel was not asked to look for partitions.
    if wanted == Partitions::Off || promised.is_empty() {
        return Vec::new();
    }
    partitions_as(node::partitions(disk), promised)
}

/// Partitions that are there, with what the image's table says of them.
pub(crate) fn partitions_as(
    found: Vec<node::KernelPartition>,
    promised: &[becket_image::Partition],
) -> Vec<PartitionInfo> {
    let named = |number| promised.iter().find(|promise| promise.number == number);
    found
        .into_iter()
        .map(|found| PartitionInfo {
            number: found.number,
            device: found.node,
            start: found.start,
            size: found.len,
            label: named(found.number).and_then(|promise| promise.label.clone()),
            uuid: named(found.number).and_then(|promise| promise.uuid.clone()),
        })
        .collect()
}
