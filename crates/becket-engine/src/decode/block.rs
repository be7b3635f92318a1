//! What is passed around of a block: its name, and the memory for its stored bytes.
//! Decides nothing.

use crate::{Error, memory::Buffers};

/// Names a block for as long as the process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    /// The layer, by a number that no other gets.
    pub(crate) layer: u64,
    /// Which of the layer's blocks.
    pub(crate) block: u32,
}

/// Memory for a block's stored bytes, which the kernel fills.
pub(crate) struct Staging(Buffers);

impl Staging {
    /// Of `size` bytes, a multiple of the page size.
    pub(crate) fn new(size: usize) -> Result<Staging, Error> {
        Ok(Staging(Buffers::new(1, size)?))
    }

    pub(crate) fn address(&self) -> u64 {
        self.0.address(0) as u64
    }

    /// Its bytes. The kernel must not be writing to them: a load has no operation under way when it asks.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        self.0.slice(0)
    }
}
