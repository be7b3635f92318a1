//! What a partition table says, and the bounds that hold for every kind of one.
//! It never lets a partition reach beyond its image.

use serde::{Deserialize, Serialize};

/// The kernel's `DISK_MAX_PARTS`: numbers go from 1 to one less.
pub(super) const NUMBERS_END: u32 = 256;

/// A partition that a table names; it lies within its image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// As the kernel counts: a GPT entry's place in the array, MBR 1 to 4, logical ones from 5 on.
    pub number: u32,
    /// First byte, counted from the start of the image.
    pub start: u64,
    /// Length in bytes, never 0.
    pub len: u64,
    /// The name in a GPT entry.
    pub label: Option<String>,
    /// GPT: the entry's own UUID; MBR: disk signature and number, as in `/dev/disk/by-partuuid`.
    pub uuid: Option<String>,
    /// GPT: the type's UUID; MBR: the type byte as `0x83`.
    pub type_: String,
}

impl Partition {
    /// Whether it is the container of an MBR's logical partitions.
    pub fn is_extended(&self) -> bool {
        matches!(self.type_.as_str(), "0x05" | "0x0f" | "0x85")
    }
}

/// What a table says.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Sorted by number.
    pub partitions: Vec<Partition>,
    /// The sector size in bytes that the table counts in, where it says so (GPT).
    pub sector: Option<u32>,
    /// What is wrong with it, for people.
    pub warnings: Vec<String>,
}

/// Why a range of sectors is not a partition of an image of `len` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum RangeError {
    #[error("its end lies before its start")]
    Backwards,
    #[error("it reaches beyond the end of the image")]
    BeyondEnd,
}

/// Start and length in bytes of `count` sectors from `first` on, when they lie within `len` bytes.
pub(super) fn byte_range(first: u64, count: u64, sector: u32, len: u64) -> Result<(u64, u64), RangeError> {
    let start = first.checked_mul(sector.into());
    let size = count.checked_mul(sector.into());
    match (start, size) {
        (Some(start), Some(size)) if start.checked_add(size).is_some_and(|end| end <= len) => {
            Ok((start, size))
        }
        _ => Err(RangeError::BeyondEnd),
    }
}
