//! A queue on its I/O thread: a port and a core, and what each reports to the other.
//! Makes no system call for a request, and calls no port while that one is calling it.

use std::{
    os::fd::AsFd,
    sync::{Arc, mpsc::SyncSender},
};

use io_uring::cqueue;

use crate::{
    Answer, Batch, Error, Memory, Port, QueueStats, Serving, aside,
    core::{Core, Parts},
    decode::{Mailbox, Note, Quick},
    ring::{Completion, Ring},
    user_data::Source,
};

/// What a queue is made of.
pub struct NewQueue {
    /// Its front.
    pub port: Box<dyn Port>,
    /// Number of requests that may be under way.
    pub depth: u16,
    /// Which queue of its device it is; counts from 0.
    pub number: usize,
    /// Where the bytes are.
    pub serving: Arc<Serving>,
    /// How requests carry their bytes.
    pub memory: Memory,
    /// Memory for commands that carry many elements, for a port that uses such.
    pub batch: Option<Batch>,
    /// Where it counts; no other queue may be given the same.
    pub stats: Arc<QueueStats>,
    /// Runs when the queue has ended and has let go of everything else, on the I/O thread or on one that has
    /// closed the files.
    pub on_closed: Box<dyn FnOnce() + Send>,
}

/// A queue on its I/O thread.
pub(crate) struct Queue {
    core: Core,
    port: Box<dyn Port>,
    on_closed: Box<dyn FnOnce() + Send>,
    /// Something of this queue has completed in this turn, so its end will be reported.
    in_turn: bool,
}

impl Queue {
    /// Makes the queue and lets its port queue the first commands; they are submitted by the caller.
    ///
    /// With the queue comes whether its port could begin. Where not, it closes, but some commands may already
    /// be on their way: it stays until they have come back.
    pub(crate) fn start(
        ring: &mut Ring,
        index: u32,
        new: NewQueue,
        mailbox: &Arc<Mailbox>,
    ) -> Result<(Queue, Result<(), Error>), Error> {
        let parts = Parts {
            descriptor: new.port.descriptor().as_fd(),
            tether: new.port.tether().map(AsFd::as_fd),
            bell: new.port.bell().map(AsFd::as_fd),
            guest: new.port.memory(),
            depth: new.depth,
            number: new.number,
            serving: &new.serving,
            memory: new.memory,
            batch: new.batch,
            stats: &new.stats,
            mailbox,
        };
        let mut core = Core::new(ring, index, &parts)?;
        let NewQueue { mut port, on_closed, .. } = new;
        let started = port.start(&mut crate::Io { ring, core: &mut core });
        if started.is_err() {
            core.close();
        }
        let started = started.map_err(|errno| Error::Start { source: errno.into() });
        Ok((Queue { core, port, on_closed, in_turn: false }, started))
    }

    /// See [`Core::prepare`].
    pub(crate) fn prepare(&mut self, ring: &mut Ring, serving: Arc<Serving>) -> Result<(), Error> {
        self.core.prepare(ring, serving)
    }

    /// See [`Core::hold`].
    pub(crate) fn hold(&mut self, drained: SyncSender<bool>) {
        self.core.hold(drained);
    }

    /// See [`Core::let_go`].
    pub(crate) fn let_go(&mut self, ring: &mut Ring, change: bool) -> Result<bool, Error> {
        let was_held = self.core.let_go(ring, change);
        self.tell(ring);
        self.end_turn(ring, false);
        was_held
    }

    /// Takes no more requests and ends once those that it has are finished.
    pub(crate) fn leave(&mut self, ring: &mut Ring) {
        self.port.leave(&mut crate::Io { ring, core: &mut self.core });
        self.end_turn(ring, false);
    }

    /// See [`Core::give_up_reads`].
    pub(crate) fn give_up_reads(&mut self, ring: &mut Ring, when: u64) {
        self.core.give_up_reads(ring, when);
        self.tell(ring);
        self.end_turn(ring, false);
    }

    /// Takes in one completion.
    #[inline]
    pub(crate) fn complete(&mut self, ring: &mut Ring, source: Source, completion: Completion) {
        match source {
            Source::Serving { tag } => self.core.operated(ring, tag, completion.result),
            Source::Intercepted { tag } => self.core.intercepted(ring, tag, completion.result),
            Source::Link { line, way } => self.core.linked(ring, line, way, completion.result),
            Source::Port(token) => {
                let answer = Answer {
                    result: completion.result,
                    more: cqueue::more(completion.flags),
                    buffer: cqueue::buffer_select(completion.flags),
                };
                if !answer.more {
                    self.core.landed();
                    self.core.returned(token);
                }
                self.port.completed(&mut crate::Io { ring, core: &mut self.core }, token, answer);
            }
        }
    }

    /// Takes in a note about a block or a unit.
    pub(crate) fn note_came(&mut self, ring: &mut Ring, tag: u16, note: Note) {
        self.core.note_came(ring, tag, note);
    }

    /// Whether this is the queue's first completion in the turn.
    pub(crate) fn turns(&mut self) -> bool {
        !std::mem::replace(&mut self.in_turn, true)
    }

    /// Reports to the port what has finished in this turn, and lets it queue what it has gathered.
    /// Returns a block that the thread is to decode itself, where it `may`.
    pub(crate) fn end_turn(&mut self, ring: &mut Ring, may: bool) -> Option<Quick> {
        self.in_turn = false;
        self.settle(ring);
        loop {
            self.port.turn_ended(&mut crate::Io { ring, core: &mut self.core });
            self.settle(ring);
            if !self.core.drive_lines(ring) {
                break;
            }
            self.settle(ring);
        }
        self.core.turn_ended(may)
    }

    /// Reports to the port what has finished and begins loads, until neither is left.
    fn settle(&mut self, ring: &mut Ring) {
        self.tell(ring);
        while self.core.serve_loads(ring) {
            self.tell(ring);
        }
    }

    /// Reports to the port what has finished, until nothing is left: what it begins then may fail at once.
    fn tell(&mut self, ring: &mut Ring) {
        while self.core.has_finished() {
            let finished = self.core.take_finished();
            self.port.all_finished(&mut crate::Io { ring, core: &mut self.core }, &finished);
            self.core.give_list_back(finished);
        }
    }

    /// The port has closed and nothing is in flight.
    pub(crate) fn has_ended(&self) -> bool {
        self.core.has_ended()
    }

    /// Gives the ring's slots back, drops everything, then says that the queue is closed. The last queue of a
    /// device has a thread close the files: on a network file system that waits for its server, and other
    /// devices must not.
    pub(crate) fn release(self, ring: &mut Ring) -> Result<(), Error> {
        let Queue { mut core, port, on_closed, .. } = self;
        let result = core.give_back(ring);
        let serving = Arc::clone(&core.serving);
        drop(port);
        drop(core);
        let Some(last) = Arc::into_inner(serving) else {
            on_closed();
            return result;
        };
        // Where no thread can be had both are dropped here, which says the same.
        drop(aside::begun(move || {
            drop(last);
            on_closed();
        }));
        result
    }
}
