//! Where a block device lies: a partition on its disk.
//! It reads sysfs, and opens no device.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use rustix::fs::{major, makedev, minor};

use super::locks;

const SECTOR: u64 = 512;

/// Where a block device lies on its disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    /// The number of the disk.
    pub(super) disk: u64,
    /// Its bytes there; of a whole disk all.
    pub(super) range: Range<u64>,
}

impl Place {
    /// What the kernel says of the device with this number.
    pub(super) fn of(number: u64) -> Place {
        let whole = Place { disk: number, range: locks::WHOLE };
        part(&sysfs(number)).unwrap_or(whole)
    }

    /// Where a range of the device is on the disk.
    pub(super) fn inner(&self, range: &Range<u64>) -> Range<u64> {
        let on_disk = |at: u64| self.range.start.saturating_add(at).min(self.range.end);
        on_disk(range.start)..on_disk(range.end)
    }
}

/// The number of the disk that a block device is, or is a partition of.
pub fn disk_of(number: u64) -> u64 {
    Place::of(number).disk
}

pub(super) fn sysfs(number: u64) -> PathBuf {
    format!("/sys/dev/block/{}:{}", major(number), minor(number)).into()
}

/// The place of a partition, by its directory in sysfs; `None` if that is no partition's.
pub(super) fn part(dir: &Path) -> Option<Place> {
    let text = |name: &str| fs::read_to_string(dir.join(name)).ok();
    let sectors = |name| text(name)?.trim().parse::<u64>().ok()?.checked_mul(SECTOR);
    text("partition")?;
    let (start, len) = (sectors("start")?, sectors("size")?);
    let (major, minor) =
        text("../dev")?.trim().split_once(':').map(|(major, minor)| (major.parse(), minor.parse()))?;
    let disk = makedev(major.ok()?, minor.ok()?);
    Some(Place { disk, range: start..start.saturating_add(len) })
}
