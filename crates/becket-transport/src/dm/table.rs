//! From an image's map to device-mapper's table.
//! It never rounds: what does not lie on the blocks of the devices below does not fit.

use std::os::fd::AsFd;

use becket_image::{Extent, FileKind, Map, Opened, Place, Source};
use becket_uapi::block;
use becket_uapi::dm::Target;
use rustix::fs::{major, minor};

/// Tables stay short: with more extents than this a server that looks them up does as well.
const MOST: usize = 256;
/// In what tables count.
pub(super) const SECTOR: u64 = 512;

/// A block device below, as the table needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Below {
    /// Its number.
    pub(super) dev: u64,
    /// Its logical block size in bytes.
    pub(super) block: u32,
}

/// The table of an image, or why there is none.
pub(super) fn of(opened: &Opened) -> Result<Vec<Target>, String> {
    let below: Result<Vec<_>, _> = opened.sources.iter().map(look).collect();
    lines(&opened.map, &below?, opened.block_size, opened.read_only)
}

fn look(source: &Source) -> Result<Below, String> {
    let Some(file) = source.file().filter(|file| file.facts.kind == FileKind::Block) else {
        let where_ = if source.link().is_some() { "is on a server" } else { "lies in a file" };
        return Err(format!("the image {where_}, and device-mapper needs a block device"));
    };
    let unknown = |error: std::io::Error| format!("the block device below does not answer: {error}");
    let stat = rustix::fs::fstat(&file.buffered).map_err(|errno| unknown(errno.into()))?;
    let block = block::logical_block_size(file.buffered.as_fd()).map_err(unknown)?;
    Ok(Below { dev: stat.st_rdev, block: block.max(512) })
}

/// The lines for a map over the devices `below`, for a device with blocks of `block` bytes.
pub(super) fn lines(map: &Map, below: &[Below], block: u32, read_only: bool) -> Result<Vec<Target>, String> {
    let extents = map.extents();
    if extents.len() > MOST {
        return Err(format!("the image lies in {} pieces, more than the {MOST} of a table", extents.len()));
    }
    let inherited = below.iter().map(|below| below.block).max().unwrap_or(512);
    if block != inherited {
        return Err(format!(
            "a device of device-mapper has the blocks of the device below, {inherited} bytes, not {block}"
        ));
    }
    extents.iter().map(|extent| line(extent, below, inherited, read_only)).collect()
}

fn line(extent: &Extent, below: &[Below], block: u32, read_only: bool) -> Result<Target, String> {
    let block = u64::from(block);
    let on_blocks = |bytes: u64| bytes.is_multiple_of(block);
    let (kind, params, offset) = match extent.place {
        Place::Data { source, offset } => {
            let below = usize::try_from(source).ok().and_then(|source| below.get(source));
            let dev = below.ok_or("the map speaks of a device that is not there")?.dev;
            ("linear", format!("{}:{} {}", major(dev), minor(dev), offset / SECTOR), offset)
        }
        Place::Zero if read_only => ("zero", String::new(), 0),
        Place::Zero => {
            return Err(
                "the image has holes, and device-mapper would forget what is written to them".to_owned()
            );
        }
        Place::Encoded { .. } => return Err("the image's bytes must be computed".to_owned()),
    };
    if ![extent.start, extent.len, offset].into_iter().all(on_blocks) {
        return Err(format!(
            "{} bytes at byte {offset} do not lie on the blocks of {block} bytes of the device below",
            extent.len
        ));
    }
    Ok(Target { start: extent.start / SECTOR, len: extent.len / SECTOR, kind: kind.to_owned(), params })
}

/// One range of the device `dev`, as a table of one line.
pub(super) fn linear(dev: u64, start: u64, len: u64) -> Vec<Target> {
    vec![Target {
        start: 0,
        len: len / SECTOR,
        kind: "linear".to_owned(),
        params: format!("{}:{} {}", major(dev), minor(dev), start / SECTOR),
    }]
}

/// The range that a table of one linear line shows: device, first byte, length in bytes.
pub(super) fn single(table: &[Target]) -> Option<(u64, u64, u64)> {
    let [Target { start: 0, len, kind, params }] = table else { return None };
    let (dev, sector) = params.split_once(' ').filter(|_| kind == "linear")?;
    let (major, minor) = dev.split_once(':')?;
    let dev = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
    Some((dev, sector.parse::<u64>().ok()?.checked_mul(SECTOR)?, len.checked_mul(SECTOR)?))
}
