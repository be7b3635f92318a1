//! A queue whose operations are seen, and perhaps spoiled, on their way to the backing (`engine::fault` says
//! by whom). A queue without an interceptor has none of this; one with it never goes the straight way, so
//! that all operations come here.

use std::mem;

use becket_image::Place;
use io_uring::{
    opcode, squeue,
    types::{Fd, Timespec},
};
use rustix::io::Errno;

use super::{
    intercepted::{Intercepted, Stage},
    loads::memory_of,
    state::Core,
};
use crate::{
    Op,
    fault::{Fate, Operation},
    ring::shortened,
    slot::Way,
    target::Target as _,
};

/// What the completion of an intercepted operation means.
pub(super) enum After {
    /// It has waited: the interceptor is asked about it again.
    Waited(squeue::Entry),
    /// It has waited for nothing.
    Landed,
    /// It has ended, with this result.
    Operated(i32),
    /// Nothing: no operation was under way.
    Nothing,
}

impl Core {
    /// What goes to the ring for an operation, as the interceptor decides; `None` where there is no
    /// interceptor.
    #[cold]
    pub(super) fn spoiled(&mut self, tag: u16, entry: squeue::Entry, waited: bool) -> Option<squeue::Entry> {
        // Taken out while it is asked, since the operation that it sees borrows the queue.
        let mut intercepted = self.intercepted.take()?;
        let Intercepted { interceptor, under_way } = &mut *intercepted;
        let under_way = under_way.get_mut(usize::from(tag))?;
        let fate = match mem::take(&mut under_way.again) {
            true => under_way.fate,
            false => interceptor.fate(&self.operation_of(tag, waited)),
        };
        let slot = &self.slab[usize::from(tag)];
        let moves = matches!(slot.request.op, Op::Read | Op::Write { .. });
        // A part that is none, or all of it, and a part of what has no parts, is no part.
        let part = |len: u64| Some(len as u32).filter(|_| moves && (1..slot.asked).contains(&len));
        let (entry, stage) = match fate {
            Fate::Pass => (entry, Stage::Begun(None)),
            Fate::Short(len) => match part(len) {
                Some(len) => (shortened(entry, len), Stage::Begun(None)),
                None => (entry, Stage::Begun(None)),
            },
            Fate::Torn(len, errno) => match part(len) {
                Some(len) => (shortened(entry, len), Stage::Begun(Some(errno))),
                None => (opcode::Nop::new().build(), Stage::Failed(errno)),
            },
            Fate::Fail(errno) => (opcode::Nop::new().build(), Stage::Failed(errno)),
            Fate::Wait(time) => {
                under_way.entry = Some(entry);
                under_way.time = Timespec::from(time);
                (opcode::Timeout::new(&under_way.time).build(), Stage::Waiting)
            }
            Fate::Until(descriptor) => {
                under_way.entry = Some(entry);
                (opcode::PollAdd::new(Fd(descriptor), libc::POLLIN as u32).build(), Stage::Waiting)
            }
        };
        under_way.fate = fate;
        under_way.stage = stage;
        self.intercepted = Some(intercepted);
        Some(entry)
    }

    /// What the completion of an operation, or of what stood for it, means.
    #[cold]
    pub(super) fn after_interception(&mut self, tag: u16, result: i32) -> After {
        let Some(mut intercepted) = self.intercepted.take() else { return After::Nothing };
        let Some(under_way) = intercepted.under_way.get_mut(usize::from(tag)) else { return After::Nothing };
        let after = match mem::replace(&mut under_way.stage, Stage::Idle) {
            Stage::Waiting => under_way.entry.take().map_or(After::Landed, After::Waited),
            Stage::Begun(torn) => {
                // What was only tried, and would block, is the same operation when it may, and has not ended.
                under_way.again = self.slab[usize::from(tag)].way == Way::Trying
                    && [Errno::AGAIN, Errno::OPNOTSUPP].map(|errno| -errno.raw_os_error()).contains(&result);
                if !under_way.again {
                    intercepted.interceptor.ended(&self.operation_of(tag, false), result);
                }
                let result = torn.filter(|_| result > 0).map_or(result, |errno| -errno.raw_os_error());
                After::Operated(result)
            }
            Stage::Failed(errno) => After::Operated(-errno.raw_os_error()),
            Stage::Idle => After::Nothing,
        };
        self.intercepted = Some(intercepted);
        after
    }

    /// The operation that a tag's request needs at present.
    fn operation_of(&mut self, tag: u16, waited: bool) -> Operation<'_> {
        let slot = &self.slab[usize::from(tag)];
        let (request, file, done) = (slot.request, slot.source, slot.done);
        let unit = |slot| self.serving.target(file).map_or(1, |target| target.unit(slot));
        let (at, len, unit) = match request.op {
            Op::Flush => (0, 0, 1),
            _ => (request.offset + done, slot.asked, unit(slot)),
        };
        let offset = match self.extent_of(tag, at, len).map(|(extent, _)| extent.place) {
            Some(Place::Data { offset, .. }) if request.op != Op::Flush => offset,
            _ => 0,
        };
        let bytes = match request.op {
            Op::Write { .. } => memory_of(self.loads.as_deref_mut(), self.buffers.as_mut(), tag),
            _ => &mut [],
        };
        let bytes = bytes.get(done as usize..).and_then(|rest| rest.get(..len as usize)).unwrap_or_default();
        Operation { queue: self.number, tag, op: request.op, at, len, file, offset, unit, bytes, waited }
    }
}
