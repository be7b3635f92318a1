//! How a device is offered to the kernel's users: one folder per transport behind one trait.
//! Knows nothing of formats: an image arrives here as a map and descriptors.
#![forbid(unsafe_code)]

pub mod dm;
mod error;
pub mod fuse;
pub mod loop_;
mod module;
pub mod node;
pub mod serve;
pub mod sysfs;
pub mod ublk;

pub use becket_engine::aside;
pub use error::{Error, ErrorKind};

use std::{fmt, str::FromStr};

use becket_engine::Geometry;
use becket_image::Opened;
use serde::{Deserialize, Serialize};

/// The ways a device can be offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A user-space block device (`/dev/ublkbN`), served by becket.
    Ublk,
    /// The kernel's loop driver (`/dev/loopN`), no server.
    Loop,
    /// A device-mapper linear table, no server.
    Dm,
    /// A file in a FUSE mount.
    Fuse,
}

impl Kind {
    /// The word used on the command line and in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Kind::Ublk => "ublk",
            Kind::Loop => "loop",
            Kind::Dm => "dm",
            Kind::Fuse => "fuse",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A word that names no transport.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no transport called '{0}'; there are ublk, loop, dm and fuse")]
pub struct UnknownKind(pub String);

impl FromStr for Kind {
    type Err = UnknownKind;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        [Kind::Ublk, Kind::Loop, Kind::Dm, Kind::Fuse]
            .into_iter()
            .find(|kind| kind.as_str() == word)
            .ok_or_else(|| UnknownKind(word.to_owned()))
    }
}

/// Whether a transport works on this machine, and if not what would fix it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// A device could be attached with it now.
    pub works: bool,
    /// Why, in one sentence.
    pub reason: String,
    /// The command that would make it work, where there is one.
    pub fix: Option<String>,
    /// Facts worth showing, as name and value.
    pub details: Vec<(String, String)>,
}

/// A way to offer a device, as the planner sees it. Attaching itself differs too much to hide behind one signature:
/// each folder has its own.
pub trait Transport: Sync {
    /// Which one it is.
    fn kind(&self) -> Kind;

    /// Whether it works on this machine, for this user.
    fn probe(&self) -> Probe;

    /// Whether it can offer this image.
    ///
    /// # Errors
    /// Why it cannot, in one sentence.
    fn fits(&self, opened: &Opened) -> Result<(), String>;
}

/// What a device over this image looks like; `max_io` bytes is the longest request that the transport takes.
pub fn geometry(opened: &Opened, max_io: u32) -> Geometry {
    let facts = || opened.files.iter().map(|file| &file.facts);
    let block = opened.block_size;
    let largest = |of: fn(&becket_image::Facts) -> u32| facts().map(of).max().unwrap_or(0);
    let dma_align = facts().filter_map(|facts| facts.direct).map(|direct| direct.memory).max().unwrap_or(1);
    let discard = !opened.read_only && facts().filter(|facts| facts.writable).all(|facts| facts.discard);
    Geometry {
        size: opened.map.len() / u64::from(block.max(1)) * u64::from(block),
        logical_block: block,
        physical_block: largest(|facts| facts.physical_block_size).max(block),
        io_min: largest(|facts| facts.io_min).max(block),
        io_opt: largest(|facts| facts.io_opt),
        dma_align: dma_align.next_power_of_two(),
        read_only: opened.read_only,
        rotational: facts().any(|facts| facts.rotational),
        discard,
        discard_granularity: if discard { largest(|facts| facts.discard_granularity).max(block) } else { 0 },
        // Zeroing falls back to writing zeroes, so it always works where writing does.
        write_zeroes: !opened.read_only,
        max_io,
    }
}
