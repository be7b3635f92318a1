//! Looks at what a client says of the way below its image's file system.
//! It believes nothing that can be looked at, and keeps neither of the descriptors.

use std::os::fd::OwnedFd;

use becket_image::{Backing, Below, Identity, Map, Place};
use rustix::fs::{FileType, OFlags};

use crate::control::BelowFacts;

/// Takes the two descriptors off the end of `fds`, if they are what they are said to be.
pub(super) fn take(facts: BelowFacts, fds: &mut Vec<OwnedFd>, image: &Map) -> Result<Below, &'static str> {
    let below = facts.with(fds).map_err(|_| "a descriptor of the way below is missing")?;
    if below.map.len() != image.len() {
        return Err("the map below is not as long as the image");
    }
    Ok(below)
}

/// The lease must be on the image's file, the device must be the one below it, and both must be for reading.
pub(super) fn check(
    below: &Below,
    files: &[Backing],
    read_only: bool,
    image: Identity,
) -> Result<(), &'static str> {
    if !read_only || files.len() != 1 {
        return Err("only one read-only file has a way below");
    }
    if below.map.extents().iter().any(|extent| !matches!(extent.place, Place::Data { file: 0 | 1, .. })) {
        return Err("the map below names a file that is not there");
    }
    let unseen = |_| "a descriptor cannot be looked at";
    let disk = rustix::fs::fstat(&below.disk).map_err(unseen)?;
    if FileType::from_raw_mode(disk.st_mode) != FileType::BlockDevice || disk.st_rdev != image.dev {
        return Err("the device below is not that of the image's file system");
    }
    let flags = rustix::fs::fcntl_getfl(&below.disk).map_err(unseen)?;
    if flags & OFlags::RWMODE != OFlags::RDONLY || !flags.contains(OFlags::DIRECT) {
        return Err("the device below is not open for direct reading");
    }
    let leased = rustix::fs::fstat(&below.lease).map_err(unseen)?;
    let flags = rustix::fs::fcntl_getfl(&below.lease).map_err(unseen)?;
    if (leased.st_dev, leased.st_ino) != (image.dev, image.ino) || flags.contains(OFlags::PATH) {
        return Err("the lease is not on the image");
    }
    Ok(())
}
