//! Holding a queue: nothing new begins until it is let go, so that how it serves can change in between.
//! Costs a running queue nothing: what is under way is looked at while it is held, and not before.
//!
//! # Which request sees which configuration
//!
//! A queue serves by its [`Serving`], which never changes; a change is another one. Requests that have begun
//! when the queue is held end under the old one, all their operations and attempts, also those that still
//! wait for a place. Requests that come while it is held begin under the new one. A device's queues are held
//! until nothing of *any* of them is under way, and only then let go
//! ([`IoThreads::change`](crate::IoThreads::change)): no request of the new configuration overlaps in time
//! one of the old. So after the end of a request no later one sees an earlier state, on
//! whichever queue, and a write is either wholly in the old image or wholly in the new one.
//!
//! # Why direct and buffered operations must not overlap
//!
//! The kernel keeps a direct operation in order with what the page cache holds *of the same range*: before it
//! begins it writes dirty pages back, and a write drops them, before and after. So operations one after
//! another agree, whatever their ways. Two at once need not, even where their ranges do not overlap: the page
//! cache works in pages and whole blocks. A buffered write of sector 0 reads the page with sector 1 in it, a
//! direct write of sector 1 lands on the disk meanwhile, and the page takes the old sector 1 back there.
//! Hence a device switches only when nothing of it is under way, in all its queues: the first order holds
//! them, the second, when all have answered, lets them go. Pages that are dirty then stay so; the kernel
//! writes each before a direct operation touches its range, and a flush covers them all the same, since it is
//! `fdatasync` of the same inode.
//!
//! Requests that are not aligned go through the page cache of a device that is otherwise direct: clients of
//! exports and users of a file may write at any byte. From the first such write on, all writes of the device
//! go through the cache (`target::file::mix`). `RWF_DONTCACHE` has their pages written and dropped at once.
//! What is left: an unaligned read that overlaps in time a direct write within one large folio may leave that
//! folio with the direct write's old block, clean, until the folio goes. Direct reads never see it.

use std::sync::{Arc, mpsc::SyncSender};

use super::{
    change::{Hold, Next, register, unregister},
    state::Core,
};
use crate::{Error, Serving, ring::Ring, slot::Way, target::Straight};

impl Core {
    /// Makes ready for another backing. The queue goes on with the one that it has.
    pub(crate) fn prepare(&mut self, ring: &mut Ring, serving: Arc<Serving>) -> Result<(), Error> {
        self.drop_next(ring)?;
        let known = serving.has_sources_of(&self.serving);
        if !known && (serving.layers().is_some() || self.serving.layers().is_some()) {
            let why =
                "an image with encoded layers is neither replaced nor put in another's place".to_owned();
            return Err(Error::Layers { why });
        }
        if !known && (serving.growing().is_some() || self.serving.growing().is_some()) {
            let why = "an image that grows is neither replaced nor put in another's place";
            return Err(Error::Grow { source: std::io::Error::other(why) });
        }
        let linked = |serving: &Serving| serving.targets().iter().any(|target| target.is_remote());
        if !known && (linked(&serving) || linked(&self.serving)) {
            let why = "an image on a server is neither replaced nor put in another's place";
            return Err(Error::Unsynced { source: std::io::Error::other(why) });
        }
        let slots = if known { None } else { Some(register(ring, &serving)?) };
        self.next = Some(Next { serving, slots });
        Ok(())
    }

    /// Begins no request from now on, and tells `drained` when those under way have ended.
    pub(crate) fn hold(&mut self, drained: SyncSender<bool>) {
        self.straight = Straight::NOWHERE;
        self.held = Some(Hold { drained: Some(drained) });
        self.tell_if_drained();
    }

    /// Goes on, by what was prepared or as before. Says whether it was held.
    pub(crate) fn let_go(&mut self, ring: &mut Ring, change: bool) -> Result<bool, Error> {
        let was_held = self.held.take().is_some();
        let outcome = if was_held && change { self.take_next(ring) } else { self.drop_next(ring) };
        while let Some(tag) = self.governor.next_held() {
            let slot = &mut self.slab[usize::from(tag)];
            slot.way = Way::Free;
            let request = slot.request;
            self.begin_otherwise(ring, tag, &request);
        }
        outcome.map(|()| was_held)
    }

    /// Serves by what was prepared. Nothing is under way, so the old sources' slots are not in use any more.
    fn take_next(&mut self, ring: &mut Ring) -> Result<(), Error> {
        let Some(Next { serving, slots }) = self.next.take() else { return Ok(()) };
        let gone = slots.map_or(Ok(()), |new| {
            let old = std::mem::replace(&mut self.slots, new);
            unregister(ring, old, &self.serving)
        });
        self.map = Arc::clone(&serving.map);
        self.straight = Straight::NOWHERE;
        self.serving = serving;
        gone
    }

    /// Forgets what was prepared.
    fn drop_next(&mut self, ring: &mut Ring) -> Result<(), Error> {
        self.next.take().map_or(Ok(()), |next| next.give_back(ring))
    }
}

#[cfg(test)]
mod tests;
