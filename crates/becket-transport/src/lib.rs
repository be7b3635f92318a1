//! How a device is offered to the kernel's users: one folder per transport behind one trait.
//! Knows nothing of formats: an image arrives here as a map and descriptors.
#![forbid(unsafe_code)]

mod abilities;
pub mod dm;
mod error;
pub mod fuse;
mod kind;
pub mod loop_;
mod module;
pub mod nbd;
pub mod node;
pub mod serve;
pub mod sysfs;
pub mod ublk;
pub mod vhost_user;

pub use abilities::Abilities;
pub use becket_engine::aside;
pub use error::{Error, ErrorKind};
pub use kind::{Kind, UnknownKind};
pub use module::has_driver;

use becket_engine::Geometry;
use becket_image::{Map, Opened, Source};
use serde::{Deserialize, Serialize};

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

/// A way to offer a device, as the planner sees it. Attaching itself differs too much to hide behind one
/// signature: each folder has its own.
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

/// The marks that the kernel keeps with live devices, other than those `known` by kind and number. Only ublk
/// lists its devices and their marks.
pub fn live_marks(known: &dyn Fn(Kind, u32) -> bool) -> Vec<u64> {
    ublk::control::marks(|number| known(Kind::Ublk, number))
}

/// What a device looks like whose bytes are where the map says, with logical blocks of `block` bytes;
/// `max_io` bytes is the longest request that the transport takes.
pub fn geometry(map: &Map, sources: &[Source], block: u32, read_only: bool, max_io: u32) -> Geometry {
    let facts = || sources.iter().map(Source::facts);
    let largest = |of: fn(&becket_image::Facts) -> u32| facts().map(of).max().unwrap_or(0);
    let dma_align = facts().filter_map(|facts| facts.direct).map(|direct| direct.memory).max().unwrap_or(1);
    let discard = !read_only && facts().filter(|facts| facts.writable).all(|facts| facts.discard);
    Geometry {
        size: map.len() / u64::from(block.max(1)) * u64::from(block),
        logical_block: block,
        physical_block: largest(|facts| facts.physical_block_size).max(block),
        io_min: largest(|facts| facts.io_min).max(block),
        io_opt: largest(|facts| facts.io_opt),
        dma_align: dma_align.next_power_of_two(),
        read_only,
        rotational: facts().any(|facts| facts.rotational),
        discard,
        discard_granularity: if discard { largest(|facts| facts.discard_granularity).max(block) } else { 0 },
        // Zeroing falls back to writing zeroes, so it always works where writing does.
        write_zeroes: !read_only,
        max_io,
    }
}
