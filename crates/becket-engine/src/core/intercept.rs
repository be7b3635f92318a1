//! A queue whose operations are seen, and perhaps spoiled, on their way to the backing (`engine::fault` says by whom).
//! A queue without an interceptor has none of this; one with it never goes the straight way, so that all operations come here.

use std::{mem, sync::Arc};

use becket_image::Place;
use io_uring::{
    opcode, squeue,
    types::{Fd, Timespec},
};
use rustix::io::Errno;

use super::{Core, memory_of};
use crate::{
    Op,
    fault::{Fate, Interceptor, Operation},
    request::Way,
    ring::{Ring, shortened},
    user_data::Source,
};

/// What a queue keeps for its interceptor.
pub(crate) struct Intercepted {
    interceptor: Arc<dyn Interceptor>,
    /// By tag.
    under_way: Box<[UnderWay]>,
}

/// Where the operation of a tag is.
struct UnderWay {
    stage: Stage,
    /// The operation, while it waits.
    entry: Option<squeue::Entry>,
    /// For how long; the kernel reads it when the timeout is submitted.
    time: Timespec,
    /// What was said of the operation, for when it goes to its file once more.
    fate: Fate,
    again: bool,
}

#[derive(Debug, Clone, Copy)]
enum Stage {
    Idle,
    /// It waits, and will be asked about again.
    Waiting,
    /// It was not begun.
    Failed(Errno),
    /// It is at its file; where it is torn, it fails afterwards.
    Begun(Option<Errno>),
}

impl Intercepted {
    pub(crate) fn new(interceptor: Arc<dyn Interceptor>, requests: u16) -> Box<Intercepted> {
        let idle = || UnderWay {
            stage: Stage::Idle,
            entry: None,
            time: Timespec::new(),
            fate: Fate::Pass,
            again: false,
        };
        Box::new(Intercepted { interceptor, under_way: (0..requests).map(|_| idle()).collect() })
    }
}

impl Core {
    /// Submits an operation as the interceptor wills.
    #[cold]
    pub(super) fn submit_intercepted(
        &mut self,
        ring: &mut Ring,
        tag: u16,
        entry: squeue::Entry,
        waited: bool,
    ) {
        // Taken out while it is asked, since the operation that it is told of is the queue's.
        let Some(mut intercepted) = self.intercepted.take() else { return };
        let Intercepted { interceptor, under_way } = &mut *intercepted;
        let Some(under_way) = under_way.get_mut(usize::from(tag)) else { return };
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
        self.submit(ring, tag, Source::Intercepted { tag }, entry);
    }

    /// Takes in the completion of an operation, or of what stood for it.
    #[cold]
    pub(crate) fn intercepted(&mut self, ring: &mut Ring, tag: u16, result: i32) {
        let Some(mut intercepted) = self.intercepted.take() else { return };
        let Some(under_way) = intercepted.under_way.get_mut(usize::from(tag)) else { return };
        match mem::replace(&mut under_way.stage, Stage::Idle) {
            Stage::Waiting => {
                let entry = under_way.entry.take();
                self.intercepted = Some(intercepted);
                self.landed();
                if let Some(entry) = entry {
                    self.submit_intercepted(ring, tag, entry, true);
                }
            }
            Stage::Begun(torn) => {
                // What was only tried, and would block, is the same operation when it may, and has not ended.
                under_way.again = self.slab[usize::from(tag)].way == Way::Trying
                    && [Errno::AGAIN, Errno::OPNOTSUPP].map(|errno| -errno.raw_os_error()).contains(&result);
                if !under_way.again {
                    intercepted.interceptor.ended(&self.operation_of(tag, false), result);
                }
                let result = torn.filter(|_| result > 0).map_or(result, |errno| -errno.raw_os_error());
                self.intercepted = Some(intercepted);
                self.operated(ring, tag, result);
            }
            Stage::Failed(errno) => {
                self.intercepted = Some(intercepted);
                self.operated(ring, tag, -errno.raw_os_error());
            }
            Stage::Idle => self.intercepted = Some(intercepted),
        }
    }

    /// The operation that a tag's request needs at present.
    fn operation_of(&mut self, tag: u16, waited: bool) -> Operation<'_> {
        let slot = &self.slab[usize::from(tag)];
        let (request, file, done) = (slot.request, slot.file, slot.done);
        let (at, len) = match request.op {
            Op::Flush => (0, 0),
            _ => (request.offset + done, slot.asked),
        };
        let facts = self.backing.files().get(file as usize).map(|backing| &backing.facts);
        let unit = match facts.and_then(|facts| facts.direct).filter(|_| slot.direct) {
            Some(align) => align.offset.max(align.memory).max(1).into(),
            None => 1,
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
