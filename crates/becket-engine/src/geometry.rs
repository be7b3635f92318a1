//! What a device looks like to its users: sizes, alignments, abilities.
//! It never says where bytes live (that is the map) nor how they travel (the transport).

use serde::{Deserialize, Serialize};

/// The properties a transport announces to the kernel, all in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Geometry {
    /// Length of the device; a multiple of `logical_block`.
    pub size: u64,
    /// Smallest unit of addressing; a power of two from 512 to the page size.
    pub logical_block: u32,
    /// Smallest unit the backing writes without reading first; a power of two, at least `logical_block`.
    pub physical_block: u32,
    /// Preferred smallest request.
    pub io_min: u32,
    /// Preferred large request, or 0 when the backing names none.
    pub io_opt: u32,
    /// Alignment that memory must have for direct I/O to the backing; a power of two.
    pub dma_align: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// The backing has a seek time.
    pub rotational: bool,
    /// Discards are passed on to the backing.
    pub discard: bool,
    /// Unit of discards; 0 when there are none.
    pub discard_granularity: u32,
    /// Write-zeroes requests are passed on to the backing.
    pub write_zeroes: bool,
    /// Longest single read or write that the transport may hand over.
    pub max_io: u32,
}
