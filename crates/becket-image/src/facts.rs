//! What a backing can do, found by asking it: direct I/O, discard, block sizes.
//! It never guesses from a file system's name and never changes a byte of the backing.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Whether the backing is to be accessed past the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DirectIo {
    /// Where the backing can.
    #[default]
    Auto,
    /// Yes, or the attach fails.
    On,
    /// No.
    Off,
}

impl fmt::Display for DirectIo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DirectIo::Auto => "auto",
            DirectIo::On => "on",
            DirectIo::Off => "off",
        })
    }
}

impl FromStr for DirectIo {
    type Err = String;

    fn from_str(text: &str) -> Result<DirectIo, String> {
        match text {
            "auto" => Ok(DirectIo::Auto),
            "on" => Ok(DirectIo::On),
            "off" => Ok(DirectIo::Off),
            _ => Err(format!("{text:?} is none of auto, on, off")),
        }
    }
}

/// What kind of file a backing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackingKind {
    /// A regular file.
    Regular,
    /// A block device.
    Block,
}

/// What direct I/O demands, in bytes; both are powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alignment {
    /// Of the address of the memory.
    pub memory: u32,
    /// Of the offset in the backing and of the length.
    pub offset: u32,
}

/// What a backing is and can do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// File or device.
    pub kind: BackingKind,
    /// Length in bytes when it was opened.
    pub size: u64,
    /// Whether the descriptors can write.
    pub writable: bool,
    /// What direct I/O demands; `None` when it is not used.
    pub direct: Option<Alignment>,
    /// Why direct I/O is used or not, for people.
    pub direct_reason: String,
    /// Smallest unit in bytes that is written without reading first; a power of two.
    pub physical_block_size: u32,
    /// Preferred smallest request in bytes.
    pub io_min: u32,
    /// Preferred large request in bytes, or 0 when none is named.
    pub io_opt: u32,
    /// Whether there is a seek time.
    pub rotational: bool,
    /// Whether ranges can be given back.
    pub discard: bool,
    /// Unit of discards in bytes, 0 when there are none.
    pub discard_granularity: u32,
    /// Whether ranges can be zeroed without writing them.
    pub write_zeroes: bool,
}
