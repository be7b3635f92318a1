//! VDI, VirtualBox's disks: dynamic and static ones.
//! It never reads a disk that lies over another one: that is refused.
//!
//! One table says of each block where it lies behind the table, or that it is zeroes.
//!
//! Followed: VirtualBox's src/VBox/Storage/VDICore.h and QEMU's block/vdi.c.

use super::blocks::{Disk, entries};
use crate::bytes::{field, u32_at, u64_at};
use crate::image::Image;
use crate::layer::foreign::VDI;
use crate::layer::{About, LayerError, corrupt};

/// Bytes of the header that are used.
const HEADER: usize = 512;
const VERSION: u32 = 0x1_0001;
const DYNAMIC: u32 = 1;
const STATIC: u32 = 2;
/// Entries of blocks that have no place: never written, and discarded.
const FREE: u32 = 0xffff_fffe;

/// The disk in an image that begins like a VDI.
pub(super) fn unpack(image: &Image) -> Result<Option<Image>, LayerError> {
    let header = image.read_vec(0, HEADER)?;
    let number = |at| u32_at(&header, at);
    let foreign = |why: String| Err(LayerError::Foreign { format: &VDI, why: Some(why) });
    let (version, kind) = (number(0x44), number(0x4c));
    if version != VERSION {
        return foreign(format!("its version is {}.{}", version >> 16, version & 0xffff));
    }
    // The UUIDs of the snapshot and of the image below.
    let alone = [0x1a8, 0x1b8].iter().all(|at| field::<16>(&header, *at) == [0; 16]);
    if !matches!(kind, DYNAMIC | STATIC) || !alone {
        return foreign("it is a snapshot over another disk".to_owned());
    }
    let (table, data) = (u64::from(number(0x154)), u64::from(number(0x158)));
    let (len, block, extra) = (u64_at(&header, 0x170), u64::from(number(0x178)), number(0x17c));
    let count = u64::from(number(0x180));
    if extra != 0 {
        return foreign(format!("its blocks have {extra} bytes beside the disk's"));
    }
    if !block.is_power_of_two() || block < 512 {
        return corrupt(format!("a VDI with blocks of {block} bytes"));
    }
    let mut disk = Disk::new(image, len, block)?;
    if disk.blocks() > count {
        return corrupt(format!("a disk of {len} bytes in {count} blocks of {block}"));
    }
    entries(image, table, disk.blocks(), &mut |_, entry: [u8; 4]| match u32::from_le_bytes(entry) {
        FREE.. => disk.zero(1),
        entry => disk.data(data + u64::from(entry) * block),
    })?;
    let how = if kind == STATIC { "static" } else { "dynamic" };
    let notes = vec![how.to_owned(), format!("blocks of {block}")];
    Ok(Some(disk.finish()?.stored_as(About { format: "vdi", notes, ..About::default() })))
}
