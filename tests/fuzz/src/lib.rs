//! All readers of bytes from outside, each behind a function that takes any bytes: for fuzzers and for the
//! smoke test.
//! It never checks what is read, only that reading ends: without a panic, in little time and memory. The one
//! exception is a qcow2 that is written, which must hold what was written.
//!
//! `cargo xtask fuzz` drives these with libFuzzer; `tests/smoke.rs` with the corpora and seeded mutations of
//! them.
#![forbid(unsafe_code)]

mod checksums;
mod grow;
mod image;

/// A reader: its name, which is also that of its corpus, and the function that feeds it, which returns
/// whether the bytes were valid.
pub type Target = (&'static str, fn(&[u8]) -> bool);

/// All readers.
pub const TARGETS: &[Target] = &[
    ("partitions", image::partitions),
    ("iso9660", image::iso9660),
    ("squashfs", image::squashfs),
    ("ext", image::ext),
    ("xfs", image::xfs),
    ("btrfs", image::btrfs),
    ("fat", image::fat),
    ("exfat", image::exfat),
    ("ntfs", image::ntfs),
    ("erofs", image::erofs),
    ("lvm2", image::lvm2),
    ("packed", image::packed),
    ("qcow2", image::qcow2),
    ("qcow2-written", grow::qcow2_written),
    ("disks", image::disks),
    ("vmdk", becket_image::is_vmdk_descriptor),
    ("foreign", image::foreign),
    ("inspect", image::anything),
    ("codecs", image::codecs),
    ("control", becket_device::fuzzing::control),
    ("frames", becket_device::fuzzing::frames),
    ("worker", becket_device::fuzzing::worker),
    ("blocks", becket_device::fuzzing::blocks),
    ("vhost-user", becket_transport::vhost_user::fuzzing::messages),
    ("vring", becket_transport::vhost_user::fuzzing::rings),
    ("nbd-handshake", becket_transport::nbd::fuzzing::handshake),
    ("nbd-requests", becket_transport::nbd::fuzzing::requests),
    ("nbd-client", becket_image::link::fuzzing::server),
    ("nbd-states", becket_image::link::fuzzing::states),
    ("record", becket_device::fuzzing::record),
    ("losetup", becket::fuzzing::losetup),
    ("beckettab", becket::fuzzing::table),
    ("from", becket::fuzzing::from),
    ("mounts", becket::fuzzing::mounts),
];

/// The reader of that name.
pub fn target(name: &str) -> Option<Target> {
    TARGETS.iter().copied().find(|(known, _)| *known == name)
}
