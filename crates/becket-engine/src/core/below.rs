//! Results that were read below the image's file and are not told before they are proven.
//! It never tells one that is not, and never goes below again once it has returned to the file.
//!
//! Why this is safe is written at the head of `becket_image`'s `below` room. Here is only the rule: results are told at
//! the end of the turn that brought them; before that there is one proof for all; what fails it is read again through the
//! file. What finishes while results are being told was not read at all: no completion is taken in meanwhile.

use std::sync::Arc;

use becket_image::{Map, ReadLease};

use super::Core;
use crate::{
    request::{Slot, Way},
    ring::Ring,
    straight::Straight,
};

/// A second map for reading, true as long as its lease holds.
#[derive(Debug, Clone)]
pub struct Below {
    /// Speaks of the backing's files too; of those below, their page cache must never be used.
    pub map: Arc<Map>,
    /// Each queue drops its share when it returns to the file.
    pub lease: Arc<ReadLease>,
}

/// What a queue must know while it reads below, or while something that it began there is under way.
pub(super) struct Unproven {
    /// Gone once the queue has returned to the file.
    lease: Option<Arc<ReadLease>>,
    /// By tag: the request had begun when the lease went, and must be carried out again.
    again: Box<[bool]>,
    /// How many of these there are.
    left: usize,
}

impl Unproven {
    pub(super) fn new(lease: Arc<ReadLease>, depth: u16) -> Box<Unproven> {
        Box::new(Unproven {
            lease: Some(lease),
            again: vec![false; depth.into()].into_boxed_slice(),
            left: 0,
        })
    }

    fn repeat(&mut self, tag: u16) {
        if let Some(again) = self.again.get_mut(usize::from(tag)) {
            self.left += usize::from(!std::mem::replace(again, true));
        }
    }

    /// Whether the request under `tag` must be carried out again; says so once.
    fn take_repeat(&mut self, tag: u16) -> bool {
        let again = self.again.get_mut(usize::from(tag)).is_some_and(std::mem::take);
        self.left -= usize::from(again);
        again
    }
}

impl Core {
    /// Proves what has finished in this turn, before it is told; what cannot be proven is carried out again.
    #[inline]
    pub(crate) fn prove(&mut self, ring: &mut Ring) {
        if self.unproven.is_some() && !self.finished.is_empty() {
            self.prove_finished(ring);
        }
    }

    /// Two system calls for all that has finished. A failure below is the file's to tell: it does not count as proven.
    #[inline(never)]
    fn prove_finished(&mut self, ring: &mut Ring) {
        let lease = self.unproven.as_ref().and_then(|unproven| unproven.lease.as_deref());
        if lease
            .is_some_and(|lease| self.finished.iter().any(|(_, result)| result.is_err()) || !lease.holds())
        {
            self.return_to_file();
        }
        let mut finished = self.take_finished();
        for (tag, result) in finished.drain(..) {
            if self.unproven.as_mut().is_some_and(|unproven| unproven.take_repeat(tag)) {
                self.repeat(ring, tag);
            } else {
                self.finished.push((tag, result));
            }
        }
        self.give_list_back(finished);
        // Once nothing of before is under way any more, the queue is as if it had never been below.
        if self.unproven.as_ref().is_some_and(|unproven| unproven.lease.is_none() && unproven.left == 0) {
            self.unproven = None;
        }
    }

    /// Reads through the file from now on. The queue's share of the lease goes; whatever has begun and was not told yet
    /// is carried out again when it ends.
    pub(crate) fn return_to_file(&mut self) {
        let Some(unproven) = &mut self.unproven else { return };
        if unproven.lease.take().is_none() {
            return;
        }
        self.map = Arc::clone(&self.backing.map);
        self.straight = Straight::NOWHERE;
        // Those who are held back have not begun.
        let began = |slot: &Slot| slot.busy && slot.way != Way::Held;
        let under_way = (0..).zip(&self.slab).filter(|(_, slot)| began(slot)).map(|(tag, _)| tag);
        for tag in under_way.chain(self.finished.iter().map(|(tag, _)| *tag)) {
            unproven.repeat(tag);
        }
    }

    /// Carries a finished request out again from its beginning, as one more that is counted.
    fn repeat(&mut self, ring: &mut Ring, tag: u16) {
        let Some(slot) = self.slab.get_mut(usize::from(tag)) else { return };
        let request = slot.request;
        *slot = Slot::begin(request, slot.began);
        self.tally.began();
        self.begin_otherwise(ring, tag, &request);
    }
}
