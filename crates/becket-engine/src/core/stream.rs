//! What a queue has besides if its port's descriptor is a stream socket: the staging buffer, and the frames
//! that are being sent.
//! Touches no memory that the kernel has: `streamed` asks before.

use crate::{
    Error,
    memory::{Buffers, Vectors},
};

/// The stream's own memory.
pub(crate) struct Stream {
    /// One buffer, for bytes whose place is not known before they are looked at.
    pub(super) staging: Buffers,
    /// The kernel receives into it.
    pub(super) receiving: bool,
    /// The parts of frames that are being sent.
    pub(super) vectors: Vectors,
    /// Their tags. The kernel sends them while there are any.
    pub(super) sending: Vec<u16>,
}

impl Stream {
    /// For a queue of so many requests, and `staging` bytes.
    pub(super) fn new(depth: u16, staging: usize) -> Result<Stream, Error> {
        Ok(Stream {
            staging: Buffers::small(1, staging)?,
            receiving: false,
            vectors: Vectors::new(depth.into()),
            sending: Vec::with_capacity(depth.into()),
        })
    }
}
