//! The geometry of a device: which part of the image it has, its block size and its partitions.
//! It never refuses an image because the partition table is missing: an image may be attached just to rescue
//! the rest.

use std::path::Path;

use crate::image::Role;
use crate::partition::{self, Table};
use crate::{Error, Image, OpenOptions, Partition, Tail};

/// The part of an image that the device has, and in which units.
pub(crate) struct Geometry {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Zeroes behind that.
    pub(crate) padding: u64,
    pub(crate) block_size: u32,
    pub(crate) partitions: Vec<Partition>,
}

/// First byte and length of what was asked for of `size` bytes, without regard to blocks.
pub(crate) fn window(path: &Path, size: u64, wanted: &OpenOptions) -> Result<(u64, u64), Error> {
    let offset = wanted.offset.min(size);
    match (size - offset).min(wanted.size_limit.unwrap_or(u64::MAX)) {
        0 => Err(nothing_left(path, wanted, size, wanted.block_size.unwrap_or(512))),
        room => Ok((offset, room)),
    }
}

/// Chooses block size and length of what is offered of `image`, on a backing with blocks of `natural` bytes.
pub(crate) fn choose(
    path: &Path,
    image: &Image,
    natural: u32,
    wanted: &OpenOptions,
    warnings: &mut Vec<String>,
) -> Result<Geometry, Error> {
    let size = image.len();
    let (offset, room) = window(path, size, wanted)?;
    // An image whose first sectors cannot be read may be attached just to rescue the rest.
    let table = match image.role() {
        Role::Extended => Ok(Table::default()),
        _ => image
            .slice(offset, room)
            .map_err(std::io::Error::other)
            .and_then(|window| partition::read(&window, room, wanted.block_size.unwrap_or(natural))),
    };
    let table = table.unwrap_or_else(|error| {
        let warning = format!("its partition table cannot be read: {error}");
        Table { warnings: vec![warning], ..Table::default() }
    });
    let spoken = table.sector.filter(|sector| *sector <= largest_block_size()).unwrap_or(512);
    let block_size = wanted.block_size.unwrap_or(natural.max(spoken));
    let tail = room % u64::from(block_size);
    let (len, padding) = match (tail, wanted.tail) {
        (0, _) | (_, Tail::Keep) => (room, 0),
        (tail, Tail::Pad) => (room, u64::from(block_size) - tail),
        (tail, Tail::Cut) => (room - tail, 0),
    };
    if len == 0 {
        return Err(nothing_left(path, wanted, size, block_size));
    }
    if padding > 0 {
        warnings.push(format!(
            "{padding} bytes of zeroes follow its {room}: these do not fill a block of {block_size}"
        ));
    } else if len < room {
        warnings.push(format!(
            "the last {tail} of {room} bytes are left out: they do not fill a block of {block_size}; \
             with --read-only they are shown, by ublk, fuse and exports"
        ));
    }
    let partitions = match wanted.partitions {
        true => usable_partitions(table, len + padding, block_size, warnings),
        false => Vec::new(),
    };
    Ok(Geometry { offset, len, padding, block_size, partitions })
}

/// The largest logical block that a device can have: the page size.
pub(crate) fn largest_block_size() -> u32 {
    u32::try_from(rustix::param::page_size()).unwrap_or(4096)
}

pub(crate) fn check_block_size(wanted: Option<u32>) -> Result<(), Error> {
    let largest = largest_block_size();
    match wanted {
        Some(size) if !size.is_power_of_two() || !(512..=largest).contains(&size) => {
            Err(Error::BlockSize { block_size: size, largest })
        }
        _ => Ok(()),
    }
}

/// The error for an image without a single block.
fn nothing_left(path: &Path, wanted: &OpenOptions, size: u64, block_size: u32) -> Error {
    match wanted.size_limit {
        Some(limit) if limit < block_size.into() => Error::SizeLimit { limit, block_size },
        _ => Error::NothingLeft { path: path.to_owned(), size, offset: wanted.offset, block_size },
    }
}

/// The partitions that a device of `len` bytes in blocks of `block_size` can have.
fn usable_partitions(table: Table, len: u64, block_size: u32, warnings: &mut Vec<String>) -> Vec<Partition> {
    warnings.extend(table.warnings);
    if let Some(sector) = table.sector.filter(|sector| *sector != block_size) {
        warnings.push(format!(
            "the partition table counts in sectors of {sector} bytes, the device has blocks of {block_size}: \
             others may not see the partitions; --block-size {sector} would fit"
        ));
    }
    let block = u64::from(block_size);
    let (usable, left_out): (Vec<_>, Vec<_>) = table.partitions.into_iter().partition(|partition| {
        let end = partition.start.saturating_add(partition.len);
        partition.start % block == 0 && partition.len % block == 0 && end <= len
    });
    warnings.extend(left_out.iter().map(|partition| {
        format!("partition {} is left out: it does not lie on blocks of {block_size} bytes", partition.number)
    }));
    usable
}
