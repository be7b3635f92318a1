//! The loop device over the image's file of a connection.
//! It waits for answers of the connection, so that must have a server.

use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::Path;

use becket_engine::Geometry;
use becket_image::{Alignment, DirectIo, Facts, FileKind, FileSource, Identity, Map, Opened, Partition};
use rustix::fs::{Mode, OFlags};

use super::tree::IMAGE_NAME;
use crate::loop_::{self, LoopDevice, LoopOptions};
use crate::{Error, sysfs};

/// Alignment of any direct I/O to the file, in bytes: the server bounces requests for what its own backing
/// needs.
const UNIT: u32 = 512;

/// Puts a loop device over the image's file, which bypasses that file's page cache: the server decides
/// whether the image's own is used. With it the root is released, so the device alone keeps the file system.
/// `rereads` as in [`LoopOptions`].
///
/// # Errors
/// As [`loop_::attach`]; nothing stays attached then.
pub fn attach_disk(
    root: OwnedFd,
    image: &Path,
    geometry: &Geometry,
    partitions: &[Partition],
    rereads: bool,
) -> Result<LoopDevice, Error> {
    let access = if geometry.read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let file = rustix::fs::openat(&root, IMAGE_NAME, access | OFlags::CLOEXEC, Mode::empty());
    let file = file.map_err(Error::io("open becket's file of", image))?;
    drop(root);
    let direct = Some(Alignment { offset: UNIT, memory: UNIT });
    let mut facts = Facts::unasked(FileKind::Regular, geometry.size, !geometry.read_only);
    facts.direct = direct;
    let opened = Opened {
        outer: Vec::new(),
        grows: false,
        path: image.to_owned(),
        map: Map::contiguous(0, 0, geometry.size),
        sources: vec![FileSource::of(file, None, facts).into()],
        encoded: Vec::new(),
        nested: false,
        read_only: geometry.read_only,
        read_only_reason: None,
        block_size: geometry.logical_block,
        identity: Identity { dev: 0, ino: 0 },
        partitions: partitions.to_vec(),
        overlay: None,
        range: None,
        below: None,
        warnings: Vec::new(),
    };
    let options = LoopOptions {
        partitions: !partitions.is_empty(),
        rereads,
        direct_io: DirectIo::Auto,
        ..LoopOptions::default()
    };
    loop_::attach(&opened, &options)
}

/// The number of the loop device over a connection's file, for when its maker cannot say it any more.
/// `device` is one of the connection's descriptors. `None`: there is none, or this kernel does not say whose
/// descriptor it is.
///
/// It opens such devices, and waits when they are held by a process that waits for their server.
pub fn find_disk(device: impl AsFd) -> Option<u32> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", device.as_fd().as_raw_fd())).ok()?;
    // The device number of its file system, which has no major one.
    let of_connection: u64 =
        info.lines().find_map(|line| line.strip_prefix("fuse_connection:")?.trim().parse().ok())?;
    let over_it = |number: &u32| {
        // Foreign ones are not opened: their users, too, may make us wait.
        let backing = sysfs::text(&format!("loop{number}"), "loop/backing_file");
        backing.is_some_and(|backing| Path::new(&backing).ends_with(IMAGE_NAME))
            && matches!(loop_::status(*number), Ok(Some(status)) if status.dev == of_connection)
    };
    loop_::numbers().into_iter().find(over_it)
}
