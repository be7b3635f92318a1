//! What a request needs next: the operation on a backing file that takes it one step further.
//! Decides and builds; queues nothing, and knows nothing of how results are reported.

use std::sync::Arc;

use becket_image::{DirectIo, Encoded, Extent, Place};
use io_uring::{opcode, squeue, types::FsyncFlags};
use rustix::io::Errno;

use super::{fill::Copied, loads::memory_of, state::Core};
use crate::{
    Data, Op,
    decode::Waiter,
    ring::{Transfer, fixed},
    slot::{Step, Way, Zeroing},
    straight::{MAX_OPERATION, Straight},
};

/// Zeroes for backings that cannot zero a range themselves.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

impl Core {
    /// What a request needs next.
    pub(crate) fn next_operation(&mut self, tag: u16) -> Result<Step, Errno> {
        if self.slab[usize::from(tag)].request.op == Op::Flush {
            return self.next_sync(tag);
        }
        loop {
            let slot = &mut self.slab[usize::from(tag)];
            let left = slot.request.len - slot.done;
            if left == 0
                && slot.request.op == (Op::Write { durable: true })
                && self.serving.growing().is_some()
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
                    return self.operate(tag, source, offset).map(Step::Operate);
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
        let Some((file, target)) = self.serving.next_to_sync(slot.file)? else { return Ok(Step::Whole) };
        slot.file = file;
        slot.sync_target = target;
        slot.way = Way::Free;
        let target = fixed(self.files + 2 * file);
        Ok(Step::Operate(opcode::Fsync::new(target).flags(FsyncFlags::DATASYNC).build()))
    }

    /// The operation that moves or zeroes `asked` bytes at `offset` of a backing file.
    fn operate(&mut self, tag: u16, file: u32, offset: u64) -> Result<squeue::Entry, Errno> {
        let open = self.serving.file(file).ok_or(Errno::IO)?;
        let slot = &mut self.slab[usize::from(tag)];
        slot.file = file;
        let buffered = fixed(self.files + 2 * file);
        let mode = match (slot.request.op, slot.zeroing) {
            (Op::Discard, _) | (Op::WriteZeroes { .. }, Zeroing::Punch) => {
                Some(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
            }
            (Op::WriteZeroes { .. }, Zeroing::Range) => {
                Some(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE)
            }
            _ => None,
        };
        if let Some(mode) = mode {
            slot.direct = false;
            slot.way = Way::Governed;
            return Ok(opcode::Fallocate::new(buffered, slot.asked).offset(offset).mode(mode).build());
        }
        if matches!(slot.request.op, Op::WriteZeroes { .. }) {
            slot.direct = false;
            slot.way = Way::Governed;
            slot.asked = slot.asked.min(ZEROES.len() as u64);
            let entry = opcode::Write::new(buffered, ZEROES.as_ptr(), slot.asked as u32);
            return Ok(entry.offset(offset).build());
        }
        let memory =
            self.loads.as_deref_mut().and_then(|loads| loads.memory(tag)).map(|memory| memory.address());
        let wanted = self.serving.direct;
        // What is to leave the page cache takes along what was read ahead around it.
        let stays = memory.is_some() && open.facts.caches_stored(wanted);
        slot.direct = !slot.buffered_only
            && !stays
            && wanted != DirectIo::Off
            && open.direct.is_some()
            && open.facts.direct.is_some_and(|align| {
                let unit = u64::from(align.offset.max(1)) - 1;
                let memory = u64::from(align.memory.max(1)) - 1;
                (offset | slot.asked) & unit == 0 && slot.done & memory == 0
            });
        let flags = self.governor.way_of(slot, &open.facts, wanted, stays);
        let target = self.files + 2 * file + u32::from(slot.direct);
        // A queue that is held has no straight way: new requests must not begin. Nor has one whose operations
        // are looked at, or whose map is not the last word.
        let straight = self.held.is_none() && self.intercepted.is_none() && self.serving.growing().is_none();
        if slot.direct && memory.is_none() && straight {
            self.straight = self.straight_at(tag, target);
        }
        let slot = &self.slab[usize::from(tag)];
        if let Some(memory) = memory {
            let (address, len) = (memory + slot.done, slot.asked as u32);
            return Ok(Transfer { target, offset, len, address, flags, ..Transfer::default() }.entry());
        }
        let way = Transfer { target, offset, len: slot.asked as u32, flags, ..Transfer::default() };
        Ok(self.transfer(tag, &slot.request, slot.done, way))
    }

    /// The extent of a request's next byte, which is read and written by direct I/O.
    fn straight_at(&self, tag: u16, target: u32) -> Straight {
        let slot = &self.slab[usize::from(tag)];
        let extent = self.map.extent_at(slot.request.offset + slot.done);
        let facts = self.serving.file(slot.file).map(|file| &file.facts);
        let facts = facts.filter(|facts| facts.nowait);
        match (extent, facts.and_then(|facts| Some((facts.sparse, facts.direct?)))) {
            (Some(Extent { start, len, place: Place::Data { source, offset } }), Some((sparse, align))) => {
                let odd = u64::from(align.offset.max(1)) - 1;
                let writes = !sparse && !self.serving.read_only;
                Straight { start: *start, len: *len, offset: *offset, odd, file: *source, target, writes }
            }
            _ => Straight::NOWHERE,
        }
    }

    /// Has the unit of byte `pos` placed, which may read as zeroes then where it is `zeroed`; a note about it
    /// takes the request further.
    #[inline(never)]
    fn await_place(&mut self, tag: u16, pos: u64, zeroed: bool) {
        if let (Some(growing), Some(slot)) = (self.serving.growing(), self.slab.get_mut(usize::from(tag))) {
            slot.way = Way::Waiting;
            self.in_flight += 1;
            growing.ask(pos, zeroed, Waiter { mailbox: Arc::clone(&self.mailbox), whom: (self.index, tag) });
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
        (slot.asked, slot.staged, slot.way, slot.direct) = (len, 0, Way::Free, false);
        let (request, done) = (slot.request, slot.done);
        // No longer than an operation, and that fits.
        let way = Transfer { target, offset, len: len as u32, ..Transfer::default() };
        self.transfer(tag, &request, done, way)
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
