//! The configuration that a queue may change to, and the slots of files in the ring's table.
//! Decides nothing: see `hold`.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, mpsc::SyncSender};

use crate::{Error, Serving, ring::Ring};

/// A queue is held.
#[derive(Debug)]
pub(crate) struct Hold {
    /// Gets `true` when nothing is in flight any more.
    pub(super) drained: Option<SyncSender<bool>>,
}

/// What a queue may serve by next, with its descriptors in the ring's table already: changing to it cannot
/// fail.
#[derive(Debug)]
pub(crate) struct Next {
    pub(super) serving: Arc<Serving>,
    /// The first slot of its files; nothing when they are those that the queue has.
    pub(super) files: Option<u32>,
}

impl Next {
    /// Takes its files out of the ring's table again.
    pub(super) fn give_back(self, ring: &mut Ring) -> Result<(), Error> {
        self.files.map_or(Ok(()), |first| unregister(ring, first, &self.serving))
    }
}

/// Puts the descriptors of backing files into the ring's table and returns the first slot.
pub(super) fn register(ring: &mut Ring, serving: &Serving) -> Result<u32, Error> {
    let descriptors: Vec<RawFd> = serving
        .files()
        .flat_map(|file| [file.buffered.as_raw_fd(), file.direct.as_ref().map_or(-1, |fd| fd.as_raw_fd())])
        .collect();
    ring.register_files(&descriptors)
}

/// Takes them out again.
pub(super) fn unregister(ring: &mut Ring, first: u32, serving: &Serving) -> Result<(), Error> {
    ring.unregister_files(first, 2 * serving.files().len())
}
