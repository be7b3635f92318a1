//! VHD, the disks of Virtual PC, Hyper-V and Azure: fixed and dynamic ones.
//! It never reads a disk that lies over another one: that is refused.
//!
//! A fixed one is the disk with a footer behind it. A dynamic one begins with a copy of its footer; a table
//! says of each block where its bitmap lies, and the data behind that. The bitmaps matter to disks that lie
//! over others; here a sector that was never written is zeroes anyway.
//! The length is the footer's current size, as for Hyper-V. QEMU takes some images for shorter, by their
//! geometry.
//!
//! Followed: Microsoft's Virtual Hard Disk Image Format Specification 1.0.

use super::blocks::{Disk, entries};
use super::ends::{Ends, LOOK};
use crate::bytes::{be32_at, be64_at, field, part, uuid};
use crate::image::{Image, Layout};
use crate::layer::foreign::VHD;
use crate::layer::{About, LayerError, corrupt};

const FIXED: u32 = 2;
const DYNAMIC: u32 = 3;
const DIFFERENCING: u32 = 4;
/// Length of the header of a dynamic disk, in bytes.
const HEADER: usize = 1024;
const SECTOR: u64 = 512;
/// The entry of a block without a place.
const FREE: u32 = !0;

/// Whether an image has a footer whose checksum is correct.
pub(super) fn is(ends: &Ends) -> bool {
    is_footer(&ends.head) || is_footer(&ends.tail)
}

fn is_footer(bytes: &[u8; LOOK]) -> bool {
    bytes.starts_with(b"conectix") && field(bytes, 12) == [0, 1, 0, 0] && is_summed(bytes, 64)
}

/// Whether the checksum at `at` is that of the other bytes.
fn is_summed(bytes: &[u8], at: usize) -> bool {
    let sum = |bytes: &[u8]| bytes.iter().fold(0_u32, |sum, byte| sum.wrapping_add(u32::from(*byte)));
    !sum(bytes).wrapping_sub(sum(part(bytes, at, 4))) == be32_at(bytes, at)
}

/// The disk in an image that is a VHD.
pub(super) fn unpack(image: &Image) -> Result<Option<Image>, LayerError> {
    let Some(ends) = Ends::of(image)? else { return Ok(None) };
    // Where both are there, the one at the end is newer.
    let footers = [&ends.tail, &ends.head];
    let Some(footer) = footers.into_iter().find(|footer| is_footer(footer)) else { return Ok(None) };
    let (len, kind) = (be64_at(footer, 48), be32_at(footer, 60));
    let (disk, notes) = match kind {
        FIXED => {
            if len > image.len().saturating_sub(SECTOR) {
                return corrupt(format!("a disk of {len} bytes in a file of {}", image.len()));
            }
            let mut layout = Layout::of(image)?;
            layout.data(0, len)?;
            (image.compose(layout)?, vec!["fixed".to_owned()])
        }
        DYNAMIC => {
            let (disk, block) = dynamic(image, be64_at(footer, 16), len)?;
            (disk, vec!["dynamic".to_owned(), format!("blocks of {block}")])
        }
        DIFFERENCING => {
            let why = Some("it is a differencing disk over another one".to_owned());
            return Err(LayerError::Foreign { format: &VHD, why });
        }
        other => return corrupt(format!("a VHD of type {other}")),
    };
    let uuid = uuid(part(footer, 68, 16));
    Ok(Some(disk.stored_as(About { format: "vhd", uuid, notes, ..About::default() })))
}

/// A dynamic disk, whose header is at byte `header`; and the length of its blocks.
fn dynamic(image: &Image, header: u64, len: u64) -> Result<(Image, u64), LayerError> {
    let header = image.read_vec(header, HEADER)?;
    if !header.starts_with(b"cxsparse") || !is_summed(&header, 36) {
        return corrupt("the header of a dynamic VHD is wrong");
    }
    let (table, count, block) =
        (be64_at(&header, 16), u64::from(be32_at(&header, 28)), u64::from(be32_at(&header, 32)));
    if !block.is_power_of_two() || block < SECTOR {
        return corrupt(format!("a VHD with blocks of {block} bytes"));
    }
    let mut disk = Disk::new(image, len, block)?;
    if disk.blocks() > count {
        return corrupt(format!("a disk of {len} bytes in {count} blocks of {block}"));
    }
    // One bit for each sector, in whole sectors.
    let bitmap = (block / SECTOR).div_ceil(8).next_multiple_of(SECTOR);
    entries(image, table, disk.blocks(), &mut |_, entry: [u8; 4]| match u32::from_be_bytes(entry) {
        FREE => disk.zero(1),
        entry => disk.data(u64::from(entry) * SECTOR + bitmap),
    })?;
    Ok((disk.finish()?, block))
}
