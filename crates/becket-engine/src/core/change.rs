//! The configuration that a queue may change to, and the slots of sources in the ring's table.
//! Decides nothing: see `hold`.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, mpsc::SyncSender};

use crate::{Error, Serving, ring::Ring, target::SLOTS};

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
    /// The first slot of its sources; nothing when they are those that the queue has.
    pub(super) slots: Option<u32>,
}

impl Next {
    /// Takes its descriptors out of the ring's table again.
    pub(super) fn give_back(self, ring: &mut Ring) -> Result<(), Error> {
        self.slots.map_or(Ok(()), |first| unregister(ring, first, &self.serving))
    }
}

/// The first of a source's slots, behind the first of all.
#[inline]
pub(super) fn first_slot(slots: u32, source: u32) -> u32 {
    slots + SLOTS as u32 * source
}

/// Puts the descriptors of sources into the ring's table and returns the first slot; each source has
/// [`SLOTS`] of them.
pub(super) fn register(ring: &mut Ring, serving: &Serving) -> Result<u32, Error> {
    let slots = serving.descriptors().flatten();
    let slots: Vec<RawFd> = slots.map(|fd| fd.map_or(-1, |fd| fd.as_raw_fd())).collect();
    ring.register_files(&slots)
}

/// Takes them out again.
pub(super) fn unregister(ring: &mut Ring, first: u32, serving: &Serving) -> Result<(), Error> {
    ring.unregister_files(first, SLOTS * serving.targets().len())
}
