//! Holding a queue: nothing new begins until it is let go, so that how it reads and writes can change in between.
//! Costs a running queue nothing: what is under way is looked at when the order comes, not before.
//!
//! # Why direct and buffered operations must not overlap
//!
//! The kernel keeps a direct operation in order with what the page cache holds *of the same range*: before it begins it
//! writes dirty pages back, and a write drops them, before and after. So operations one after another agree, whatever
//! their ways. Two at once need not, even where their ranges do not overlap: the page cache works in pages and
//! whole blocks. A buffered write of sector 0 reads the page with sector 1 in it, a direct write of sector 1 lands on the
//! disk meanwhile, and the page takes the old sector 1 back there. Hence a device switches only when nothing of it is
//! under way, in all its queues: the first order holds them, the second, when all have answered, lets them go.
//! Pages that are dirty then stay so; the kernel writes each before a direct operation touches its range, and a flush
//! covers them all the same, since it is `fdatasync` of the same inode.
//!
//! Requests that are not aligned go through the page cache of a device that is otherwise direct. There a direct
//! operation covers whole blocks of the alignment, and both file system and cache keep track of those blocks, so a
//! buffered write beside it brings back nothing old: it writes only blocks that it changed itself. `RWF_DONTCACHE` has
//! its pages written and dropped at once. What is left: an unaligned read that overlaps in time both an unaligned
//! and a direct write within one large folio may leave that folio with the direct write's old block, clean, until the
//! unaligned write has reached the disk and the folio goes. Direct reads never see it. No request of such a mixture
//! comes from a file system that uses the device's physical block size, which is the alignment.

use std::sync::mpsc::SyncSender;

use crate::{core::Core, request::Way, ring::Ring, straight::Straight};

/// What a queue waits for that is held.
#[derive(Debug)]
pub(crate) struct Hold {
    /// Operations on backing files that are still under way.
    under_way: usize,
    /// Who is told when there are none left.
    drained: Option<SyncSender<bool>>,
}

impl Core {
    /// Begins no operation from now on, and tells `drained` when those under way have ended.
    pub(crate) fn hold(&mut self, drained: SyncSender<bool>) {
        let mut under_way = 0;
        for slot in self.slab.iter_mut().filter(|slot| slot.busy && slot.way != Way::Waiting) {
            under_way += 1;
            if slot.way == Way::Free {
                slot.way = Way::Draining;
            }
        }
        self.straight = Straight::NOWHERE;
        self.held = Some(Hold { under_way, drained: Some(drained) });
        self.tell_if_drained();
    }

    /// Goes on, past the page cache where that is possible or always through it. Says whether it was held.
    pub(crate) fn let_go(&mut self, ring: &mut Ring, direct: bool) -> bool {
        let was_held = self.held.take().is_some();
        self.buffered = !direct;
        while let Some(tag) = self.governor.next_held() {
            self.advance(ring, tag);
        }
        was_held
    }

    /// Keeps the request of `tag` for later, if the queue is held.
    pub(crate) fn holds_back(&mut self, tag: u16) -> bool {
        if self.held.is_none() {
            return false;
        }
        self.slab[usize::from(tag)].way = Way::Waiting;
        self.governor.hold_back(tag);
        true
    }

    /// One operation of those that were under way has ended.
    pub(crate) fn drained_by_one(&mut self) {
        if let Some(hold) = &mut self.held {
            hold.under_way = hold.under_way.saturating_sub(1);
            self.tell_if_drained();
        }
    }

    fn tell_if_drained(&mut self) {
        if let Some(hold) = &mut self.held
            && hold.under_way == 0
            && let Some(drained) = hold.drained.take()
        {
            // Whoever asked has room for the answer, or no longer wants it.
            let _ = drained.try_send(true);
        }
    }
}
