//! What a request needs next: its next piece by the map, which goes to the target of a source.
//! Queues nothing, and knows neither kinds of sources nor how results are reported.

use becket_image::{Encoded, Extent, Place};
use io_uring::squeue;
use rustix::io::Errno;

use super::{change::first_slot, fill::Copied, loads::memory_of, state::Core};
use crate::{
    Data, Op, Request,
    ring::Transfer,
    slot::{MAX_OPERATION, NO_SOURCE, Step, Way},
    target::{Piece, Straight, Target as _},
};

impl Core {
    /// What a request needs next.
    pub(crate) fn next_operation(&mut self, tag: u16) -> Result<Step, Errno> {
        if self.slab[usize::from(tag)].request.op == Op::Flush {
            return self.next_sync(tag);
        }
        let flushes_after = self.flushes_after(self.slab[usize::from(tag)].request.op);
        loop {
            let slot = &mut self.slab[usize::from(tag)];
            let left = slot.request.len - slot.done;
            if left == 0
                && slot.request.op == (Op::Write { durable: true })
                && (self.serving.growing().is_some() || flushes_after || slot.file.is_cached())
            {
                // Its bytes are on the disk; what says where they are is so only after a sync.
                slot.ends_in_flush();
                return self.next_sync(tag);
            }
            if left == 0 {
                return Ok(Step::Whole);
            }
            if slot.staged > 0 {
                return self.deliver_staged(tag);
            }
            let pos = slot.request.offset + slot.done;
            let (extent, own) = self.extent_of(tag, pos, left).ok_or(Errno::IO)?;
            let slot = &mut self.slab[usize::from(tag)];
            slot.asked = left.min(extent.len).min(MAX_OPERATION);
            let needs_place = match slot.request.op {
                Op::Write { .. } => !own,
                // What is zeroes stays so without a place.
                Op::Discard | Op::WriteZeroes { .. } => !own && extent.place != Place::Zero,
                _ => false,
            };
            if needs_place {
                let writes = matches!(slot.request.op, Op::Write { .. });
                let growing = self.serving.growing();
                let zeroed =
                    !writes && growing.is_some_and(|growing| growing.is_whole(pos, left, self.map.len()));
                self.await_place(tag, pos, zeroed);
                return Ok(Step::Waits);
            }
            match extent.place {
                Place::Data { source, offset } => {
                    return self.operate(tag, source, offset);
                }
                // Holes read as zeroes, and a hole stays one when it is zeroed.
                Place::Zero => match (slot.request.op, slot.request.data) {
                    (Op::Read, Data::Buffer) => {
                        let (from, len) = (slot.done as usize, slot.asked as usize);
                        slot.done += slot.asked;
                        let memory = memory_of(self.loads.as_deref_mut(), self.buffers.as_mut(), tag);
                        memory.get_mut(from..from + len).ok_or(Errno::IO)?.fill(0);
                    }
                    (Op::Read, Data::Registered) => return self.deliver_zeroes(tag),
                    (Op::Read, Data::Guest(_) | Data::Ranges(_)) => {
                        let (from, len) = (slot.done, slot.asked);
                        slot.done += slot.asked;
                        self.guest.as_ref().ok_or(Errno::IO)?.zero(tag, from, len);
                    }
                    (Op::Discard | Op::WriteZeroes { .. }, _) => slot.done += slot.asked,
                    _ => return Err(Errno::IO),
                },
                Place::Encoded { layer, offset } => {
                    if let Copied::Waits = self.decoded(tag, layer, offset)? {
                        return Ok(Step::Waits);
                    }
                }
            }
        }
    }

    /// Where the next bytes of a request are, of which `left` are wanted; with whether they may be written
    /// there.
    pub(crate) fn extent_of(&self, tag: u16, pos: u64, left: u64) -> Option<(Extent, bool)> {
        let below = self.loads.as_ref().and_then(|loads| loads.layer_of(tag)).map(Encoded::below);
        match (below, self.serving.growing()) {
            (None, Some(growing)) => growing.lookup(&self.map, pos, left),
            _ => Some((below.unwrap_or(&self.map).lookup(pos)?, true)),
        }
    }

    fn next_sync(&mut self, tag: u16) -> Result<Step, Errno> {
        let slot = &mut self.slab[usize::from(tag)];
        let Some((source, target, covers)) = self.serving.next_to_sync(slot.source)? else {
            return Ok(Step::Whole);
        };
        (slot.source, slot.covers, slot.way) = (source, covers, Way::Free);
        if !target.syncs().takes_turn() {
            return Ok(slot.pauses());
        }
        // With the turn: what a sync goes through can change with the end of another one.
        let step = target.sync(first_slot(self.slots, source));
        if let Step::Operate(_) = step {
            slot.way = Way::Syncing;
        } else {
            target.syncs().ends_turn();
        }
        Ok(step)
    }

    /// Has the target of `source` carry the next piece of a request, which begins at its byte `offset`.
    fn operate(&mut self, tag: u16, source: u32, offset: u64) -> Result<Step, Errno> {
        let stored =
            self.loads.as_deref_mut().and_then(|loads| loads.memory(tag)).map(|memory| memory.address());
        let slot = &mut self.slab[usize::from(tag)];
        slot.source = source;
        let (request, done) = (slot.request, slot.done);
        let target = self.serving.target(source).ok_or(Errno::IO)?;
        let (mut ranges, mut memory) = (0, done);
        let carrier = match (stored, request.data) {
            (Some(memory), _) => Transfer { address: memory + done, ..Transfer::default() },
            (None, Data::Ranges(_)) if matches!(request.op, Op::Read | Op::Write { .. }) => {
                // What shortens an operation knows no lists.
                let one = !target.takes_lists() || self.intercepted.is_some();
                let guest = self.guest.as_mut().ok_or(Errno::IO)?;
                let vector = guest.vector(tag, done, slot.asked, one).ok_or(Errno::IO)?;
                (slot.asked, ranges, memory) = (vector.len, vector.count, vector.odd);
                Transfer { address: vector.address, ..self.carrier(tag, &request, done) }
            }
            (None, _) => self.carrier(tag, &request, done),
        };
        let (direct_io, slots) = (self.serving.direct, first_slot(self.slots, source));
        let unit = self.serving.unit;
        let piece =
            Piece { offset, carrier, ranges, memory, stored: stored.is_some(), direct_io, unit, slots };
        let slot = &mut self.slab[usize::from(tag)];
        let step = target.operate(&piece, slot, &mut self.governor)?;
        // A queue that is held has no straight way: new requests must not begin. Nor has one whose operations
        // are looked at, or whose map is not the last word.
        let may = self.held.is_none() && self.intercepted.is_none() && self.serving.growing().is_none();
        if may
            && !piece.stored
            && let Some(way) = target.straight(&piece, slot)
        {
            self.straight = self.straight_over(&request, done, way);
        }
        if let Step::Waits = step {
            if self.closing {
                return Err(Errno::IO);
            }
            self.await_note(tag);
            self.tally.waits();
            let (len, waiter) = (self.slab[usize::from(tag)].asked, self.waiter(tag));
            if let Some(target) = self.serving.target(source) {
                target.awaits(offset, len, waiter);
            }
        }
        Ok(step)
    }

    /// This way over the extent of a request's next byte.
    fn straight_over(&self, request: &Request, done: u64, way: Straight) -> Straight {
        match self.map.extent_at(request.offset + done) {
            Some(&Extent { start, len, place: Place::Data { source, offset } }) => {
                let writes = way.writes && !self.serving.read_only;
                // As far as the extent goes and the target says so.
                let from = offset.max(way.offset);
                let end = offset.saturating_add(len).min(way.offset.saturating_add(way.len));
                let (start, len) = (start + (from - offset), end.saturating_sub(from));
                Straight { start, len, offset: from, source, writes, ..way }
            }
            _ => Straight::NOWHERE,
        }
    }

    /// Has the unit of byte `pos` placed, which may read as zeroes then where it is `zeroed`; a note about it
    /// takes the request further.
    #[inline(never)]
    fn await_place(&mut self, tag: u16, pos: u64, zeroed: bool) {
        if let Some(growing) = self.serving.growing() {
            growing.ask(pos, zeroed, self.waiter(tag));
            self.await_note(tag);
        }
    }

    /// Brings zeroes to what a request asks for next.
    fn deliver_zeroes(&mut self, tag: u16) -> Result<Step, Errno> {
        let target = self.memory_files.as_ref().ok_or(Errno::IO)?.zeroes;
        let len = self.slab[usize::from(tag)].asked;
        Ok(Step::Deliver(self.deliver(tag, target, 0, len)))
    }

    /// Brings it what was decoded for it.
    fn deliver_staged(&mut self, tag: u16) -> Result<Step, Errno> {
        let decoded = self.memory_files.as_ref().and_then(|files| files.decoded.as_ref());
        let (buffers, target) = decoded.ok_or(Errno::IO)?;
        let (target, offset) = (*target, u64::from(tag) * buffers.size() as u64);
        let len = self.slab[usize::from(tag)].staged;
        Ok(Step::Deliver(self.deliver(tag, target, offset, len)))
    }

    /// The operation that fills the next `len` bytes of a request's pages from a file of memory. It waits for
    /// nothing.
    fn deliver(&mut self, tag: u16, target: u32, offset: u64, len: u64) -> squeue::Entry {
        let slot = &mut self.slab[usize::from(tag)];
        (slot.asked, slot.staged, slot.way, slot.source) = (len, 0, Way::Free, NO_SOURCE);
        let (request, done) = (slot.request, slot.done);
        // No longer than an operation, and that fits.
        Transfer { target, offset, len: len as u32, ..self.carrier(tag, &request, done) }.entry()
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
