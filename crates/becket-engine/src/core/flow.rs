//! The way of a request: it begins, its operations complete one after another, it finishes.
//! Most reads and writes are one direct operation: what is not needed for these is not done for these.

use std::sync::Arc;

use io_uring::squeue;
use rustix::io::Errno;

use super::{
    intercept::After,
    state::{Core, is_lent},
};
use crate::{
    Data, Op, Request, Serving,
    decode::{Decoded, Key, Quick},
    governor::{Class, work},
    growing::Growing,
    ring::{Ring, Transfer},
    slot::{MAX_RETRIES, Slot, Step, Way, errno_of},
    target::{AnyTarget, Completed, Straight, Target as _},
    user_data::{Source, user_data},
};

impl Core {
    /// Begins a request. Most reads and writes lie in the extent of the one before and need one direct
    /// operation: what is not needed for these is not done for these.
    #[inline]
    pub(crate) fn begin(&mut self, ring: &mut Ring, tag: u16, request: Request) {
        // A busy slot: the port broke its word, and its tag's request is still under way and will finish.
        let Some(slot) = self.slab.get_mut(usize::from(tag)).filter(|slot| !slot.busy) else { return };
        debug_assert!(!is_lent(&self.lent, tag), "the kernel has this frame");
        self.tally.began();
        let moves = match request.op {
            Op::Read => true,
            Op::Write { .. } => self.straight.writes,
            _ => false,
        };
        let fits = moves && request.data == self.carried.0 && request.len <= self.carried.1;
        *slot = Slot::begin(request, ring.now());
        match offset_of(&self.straight, &request) {
            Some(offset) if fits => {
                let Straight { source, target, .. } = self.straight;
                (slot.asked, slot.source) = (request.len, source);
                let carrier = self.carrier(tag, &request, 0);
                let entry = Transfer { target, offset, len: request.len as u32, ..carrier }.entry();
                self.submit(ring, tag, Source::Serving { tag }, entry);
            }
            _ => self.begin_otherwise(ring, tag, &request),
        }
    }

    #[inline(never)]
    pub(super) fn begin_otherwise(&mut self, ring: &mut Ring, tag: u16, request: &Request) {
        if self.holds_back(tag) {
            return;
        }
        self.go_on(ring, tag, self.check(request));
    }

    /// Refuses what must never reach the backing.
    fn check(&self, request: &Request) -> Result<(), Errno> {
        if request.op.modifies() && self.serving.read_only {
            return Err(Errno::ROFS);
        }
        let end = request.offset.checked_add(request.len).ok_or(Errno::INVAL)?;
        if request.op != Op::Flush && (request.len == 0 || end > self.map.len()) {
            return Err(Errno::INVAL);
        }
        let moves = matches!(request.op, Op::Read | Op::Write { .. });
        match request.data {
            Data::None if moves => Err(Errno::INVAL),
            Data::Buffer if moves => match &self.buffers {
                Some(buffers) if request.len <= buffers.size() as u64 => Ok(()),
                _ => Err(Errno::INVAL),
            },
            Data::Registered if self.registered.is_none() => Err(Errno::INVAL),
            _ => Ok(()),
        }
    }

    /// Takes a request further after what has come of its last step.
    fn go_on(&mut self, ring: &mut Ring, tag: u16, outcome: Result<(), Errno>) {
        match outcome {
            Ok(()) => self.advance(ring, tag),
            Err(errno) => self.finish(ring.now(), tag, Err(errno)),
        }
    }

    /// Takes a request one operation further, or finishes it.
    pub(super) fn advance(&mut self, ring: &mut Ring, tag: u16) {
        match self.next_operation(tag) {
            Ok(Step::Operate(entry)) => {
                let governed = self.slab[usize::from(tag)].way == Way::Governed;
                if !governed || self.admit(ring.now(), tag) {
                    match self.intercepted {
                        None => self.submit(ring, tag, Source::Serving { tag }, entry),
                        Some(_) => self.submit_intercepted(ring, tag, entry, false),
                    }
                }
            }
            Ok(Step::Ask(ask)) => {
                let source = self.slab[usize::from(tag)].source;
                self.ask(tag, source, ask);
            }
            // It is nothing of a source's, and does not block.
            Ok(Step::Deliver(entry)) => self.submit(ring, tag, Source::Serving { tag }, entry),
            // Its turn, or a note about what it waits for, takes it further.
            Ok(Step::Waits) => {}
            Ok(Step::Whole) => {
                let len = self.slab[usize::from(tag)].request.len;
                self.finish(ring.now(), tag, Ok(len));
            }
            Err(errno) => self.finish(ring.now(), tag, Err(errno)),
        }
    }

    /// Queues an operation of a request on a source, or what stands for it.
    #[inline]
    fn submit(&mut self, ring: &mut Ring, tag: u16, source: Source, entry: squeue::Entry) {
        let entry = entry.user_data(user_data(self.index, source));
        if let Err(errno) = self.push(ring, &entry) {
            self.left(ring.now(), tag, 0);
            let slot = &mut self.slab[usize::from(tag)];
            if let Some(target) = self.serving.target(slot.source) {
                target.lets_go(slot);
            }
            self.finish(ring.now(), tag, Err(errno));
        }
    }

    /// Submits an operation as the interceptor decides.
    #[cold]
    fn submit_intercepted(&mut self, ring: &mut Ring, tag: u16, entry: squeue::Entry, waited: bool) {
        if let Some(entry) = self.spoiled(tag, entry, waited) {
            self.submit(ring, tag, Source::Intercepted { tag }, entry);
        }
    }

    /// Takes in the completion of an operation on a source.
    #[inline]
    pub(crate) fn operated(&mut self, ring: &mut Ring, tag: u16, result: i32) {
        self.landed();
        let Some(slot) = self.slab.get_mut(usize::from(tag)).filter(|slot| slot.busy) else { return };
        let moved = u64::from(result.max(0).unsigned_abs());
        // Never so for a flush, whose length is 0, nor for a fallocate, whose result is.
        let whole = moved > 0 && moved <= slot.asked && slot.done + moved == slot.request.len;
        if !whole || slot.way != Way::Free || slot.request.op == (Op::Write { durable: true }) {
            return self.operated_otherwise(ring, tag, result);
        }
        if slot.request.op.modifies()
            && let Some(target) = self.serving.target(slot.source)
        {
            target.syncs().wrote(self.number);
        }
        let len = slot.request.len;
        self.finish(ring.now(), tag, Ok(len));
    }

    /// The same for what does not simply make its request whole: a part of it, a failure, a result that is no
    /// count, and all that the governor limits.
    #[inline(never)]
    fn operated_otherwise(&mut self, ring: &mut Ring, tag: u16, result: i32) {
        let slot = &mut self.slab[usize::from(tag)];
        let (class, way) = (Class::of(slot.request.op), slot.way);
        let completed = completed(&self.serving, slot, self.number, result);
        let refused = completed == Ok(Completed::Refused);
        slot.blocks = refused;
        match way {
            Way::Trying => self.governor.tried(class, refused),
            _ => self.left(ring.now(), tag, u64::from(result.max(0).unsigned_abs())),
        }
        self.go_on(ring, tag, completed.map(drop));
        if way == Way::Governed {
            while let Some(next) = self.governor.next(class) {
                self.advance(ring, next);
            }
        }
    }

    /// Takes in the completion of an operation that was intercepted, or of what stood for it.
    #[cold]
    pub(crate) fn intercepted(&mut self, ring: &mut Ring, tag: u16, result: i32) {
        match self.after_interception(tag, result) {
            After::Waited(entry) => {
                self.landed();
                self.submit_intercepted(ring, tag, entry, true);
            }
            After::Landed => self.landed(),
            After::Operated(result) => self.operated(ring, tag, result),
            After::Nothing => {}
        }
    }

    #[inline]
    pub(super) fn finish(&mut self, now: u64, tag: u16, result: Result<u64, Errno>) {
        if tag >= self.depth {
            return self.load_read(tag, result);
        }
        if let Some(slot) = self.slab.get_mut(usize::from(tag)) {
            slot.busy = false;
            let nanos = now.saturating_sub(slot.began);
            match result {
                Ok(bytes) => self.tally.succeeded(slot.asked_for(), bytes, nanos),
                Err(_) => self.tally.failed(slot.asked_for(), nanos),
            }
        }
        self.finished.push((tag, result));
    }

    /// Whether the governed operation of `tag` may begin now; if not, it is begun when its turn has come.
    fn admit(&mut self, now: u64, tag: u16) -> bool {
        let slot = &mut self.slab[usize::from(tag)];
        let admitted = self.governor.admit(Class::of(slot.request.op), now, tag);
        if !admitted {
            // A request that waits in line for a place takes it when it comes, and tries nothing else.
            slot.blocks = true;
            slot.way = Way::Waiting;
        }
        admitted
    }

    /// The operation of `tag` has no place any more, if it had one.
    fn left(&mut self, now: u64, tag: u16, moved: u64) {
        let slot = &self.slab[usize::from(tag)];
        match slot.way {
            Way::Governed => {
                let class = Class::of(slot.request.op);
                self.governor.ended(class, now, work(class, moved));
            }
            Way::Syncing => {
                if let Some(target) = self.serving.target(slot.source) {
                    target.syncs().ends_turn();
                }
            }
            _ => {}
        }
    }

    /// The block that a request waits for is there, or cannot be had.
    pub(super) fn block_came(
        &mut self,
        ring: &mut Ring,
        tag: u16,
        key: Key,
        result: Result<Arc<Decoded>, Errno>,
    ) {
        self.landed();
        if self.waits(tag) {
            let outcome = result.and_then(|block| self.copy(tag, key, &block));
            self.go_on(ring, tag, outcome);
        }
    }

    /// What else a request waits for is there, or cannot be had.
    pub(super) fn room_came(&mut self, ring: &mut Ring, tag: u16, result: Result<(), Errno>) {
        self.landed();
        if self.waits(tag) {
            let outcome = result.inspect_err(|_| self.note_lost_writes());
            self.go_on(ring, tag, outcome);
        }
    }

    fn waits(&self, tag: u16) -> bool {
        self.slab.get(usize::from(tag)).is_some_and(|slot| slot.busy && slot.way == Way::Waiting)
    }

    /// What makes room in source 0 has seen a sync fail: one of ours may not get that error again.
    fn note_lost_writes(&self) {
        if self.serving.growing().is_some_and(Growing::has_lost)
            && let Some(target) = self.serving.target(0)
        {
            target.syncs().fail(Errno::IO);
        }
    }

    /// Begins loads that have a place, and continues requests that waited for one. Says whether there was
    /// any.
    #[inline]
    pub(crate) fn serve_loads(&mut self, ring: &mut Ring) -> bool {
        self.loads.is_some() && self.serve_some_loads(ring)
    }

    #[inline(never)]
    fn serve_some_loads(&mut self, ring: &mut Ring) -> bool {
        let mut any = false;
        while let Some(loads) = self.loads.as_deref_mut() {
            if let Some(tag) = loads.begun.pop() {
                match loads.request(tag, &self.serving) {
                    Some(request) => {
                        self.slab[usize::from(tag)] = Slot::begin(request, ring.now());
                        self.advance(ring, tag);
                    }
                    None => self.load_read(tag, Err(Errno::IO)),
                }
            } else if let Some(tag) = loads.next_in_line() {
                self.advance(ring, tag);
            } else {
                break;
            }
            any = true;
        }
        any
    }

    /// What has happened in this turn may be read by others. With a block that the thread is to decode
    /// itself, if there is one that it should and it `may`.
    pub(crate) fn turn_ended(&mut self, may: bool) -> Option<Quick> {
        let own = self.send_jobs(may);
        self.tally.turn_ended(self.governor.windows());
        self.tell_if_drained();
        own
    }
}

/// Where in its source a request begins that lies in this extent as a whole and is aligned for it.
#[inline]
fn offset_of(straight: &Straight, request: &Request) -> Option<u64> {
    let from = request.offset.wrapping_sub(straight.start);
    // In this order nothing can overflow.
    let inside = from < straight.len && request.len <= straight.len - from && request.len > 0;
    let place = straight.offset.wrapping_add(from);
    (inside && (place | request.len) & straight.odd == 0).then_some(place)
}

/// Takes in the result of an operation of a request, on a source or on what is in none.
fn completed(serving: &Serving, slot: &mut Slot, queue: usize, result: i32) -> Result<Completed, Errno> {
    if slot.way == Way::Paused {
        slot.way = Way::Free;
        return Ok(Completed::GoesOn);
    }
    let Some(target) = serving.target(slot.source) else {
        return slot.absorb(result).map(|()| Completed::GoesOn);
    };
    if slot.request.op == Op::Flush {
        return synced(target, slot, result).map(|()| Completed::GoesOn);
    }
    let completed = target.completed(slot, result);
    if slot.request.op.modifies() && completed != Ok(Completed::Refused) {
        target.syncs().wrote(queue);
    }
    completed
}

/// Takes in the result of a sync.
fn synced(target: &AnyTarget, slot: &mut Slot, result: i32) -> Result<(), Errno> {
    let outcome = if result < 0 { Err(errno_of(result)) } else { Ok(()) };
    let again = outcome == Err(Errno::INTR) && slot.retries < MAX_RETRIES;
    let worth = if again {
        slot.retries += 1;
        Ok(())
    } else {
        slot.source += 1;
        target.syncs().synced(slot.covers, outcome)
    };
    if std::mem::replace(&mut slot.way, Way::Free) == Way::Syncing {
        target.syncs().ends_turn();
    }
    worth
}
