//! What the connections of one target have in common: they end together, and a new one puts the older ones
//! in doubt. Holds no connection and wakes nobody.
//!
//! **A break.** With the server that has ended one connection, bytes may be lost that were written over any
//! of them. So all connections are given up. Only when the kernel has no operation on any of them is it
//! decided whether bytes may be lost, and only then are new ones asked for: what the next server is given
//! never counts as lost with the one before.
//!
//! **A new connection** may lead to another server than older ones that were idle while the server was
//! replaced. A flush over it would then cover bytes that this server never had. So it waits until each of
//! the older ones has heard from its server, or has broken.

use std::sync::atomic::{
    AtomicU8, AtomicU32,
    Ordering::{Acquire, Relaxed, Release, SeqCst},
};

/// See the module. Connections are numbered by queue.
#[derive(Debug)]
pub(crate) struct Group {
    /// Counts changes that other queues have to look at.
    events: AtomicU32,
    /// [`APART`], [`JOINED`], or more: in doubt, by a number that each newer connection changes.
    members: Box<[AtomicU32]>,
    phase: AtomicU8,
    breaks: AtomicU32,
}

/// The queue has no connection.
const APART: u32 = 0;
/// It has one.
const JOINED: u32 = 1;

/// Nothing has broken that was not dealt with.
const WHOLE: u8 = 0;
/// A connection has broken, and there still are some.
const BREAKING: u8 = 1;
/// There are none any more, and it is decided what that means.
const DECIDING: u8 = 2;

impl Group {
    pub(super) fn new(queues: usize) -> Group {
        Group {
            events: AtomicU32::new(0),
            members: (0..queues.max(1)).map(|_| AtomicU32::new(APART)).collect(),
            phase: AtomicU8::new(WHOLE),
            breaks: AtomicU32::new(0),
        }
    }

    /// A number that changes with everything that a queue has to look at.
    #[inline]
    pub(crate) fn events(&self) -> u32 {
        self.events.load(Acquire)
    }

    /// How often connections have broken; for [`Group::joins`].
    pub(crate) fn breaks(&self) -> u32 {
        self.breaks.load(SeqCst)
    }

    /// Whether connections may be asked for, and used.
    pub(crate) fn is_whole(&self) -> bool {
        self.phase.load(SeqCst) == WHOLE
    }

    /// A queue has a connection that it asked for after so many [`breaks`](Group::breaks). Says whether it
    /// may use it; if not, it has to leave.
    #[must_use]
    pub(super) fn joins(&self, queue: usize, breaks: u32) -> bool {
        let Some(member) = self.members.get(queue) else { return false };
        member.store(JOINED, SeqCst);
        // In this order either a break sees the member, or the member sees the break.
        if !self.is_whole() || self.breaks() != breaks {
            return false;
        }
        let doubted = |value: u32| (value >= JOINED).then(|| value.wrapping_add(1).max(JOINED + 1));
        for (_, other) in self.others(queue) {
            // Nothing to do where there is no connection.
            let _ = other.fetch_update(SeqCst, SeqCst, doubted);
        }
        self.happens();
        true
    }

    /// A connection has broken: all have to leave. Says whether it is the first to do so.
    #[must_use]
    pub(super) fn broke(&self) -> bool {
        let first = self.phase.compare_exchange(WHOLE, BREAKING, SeqCst, SeqCst).is_ok();
        if first {
            self.breaks.fetch_add(1, SeqCst);
            self.happens();
        }
        first
    }

    /// Whether any queue has a connection.
    pub(super) fn has_members(&self) -> bool {
        self.members.iter().any(|member| member.load(SeqCst) != APART)
    }

    /// A queue has no connection any more, and the kernel no operation on it. Says whether that ends a
    /// break: the caller decides then whether bytes may be lost, for [`Group::ended`].
    #[must_use]
    pub(super) fn leaves(&self, queue: usize) -> bool {
        if let Some(member) = self.members.get(queue) {
            member.store(APART, SeqCst);
        }
        !self.has_members() && self.phase.compare_exchange(BREAKING, DECIDING, SeqCst, SeqCst).is_ok()
    }

    /// A break is over.
    pub(super) fn ended(&self) {
        self.phase.store(WHOLE, SeqCst);
        self.happens();
    }

    /// The number of the doubt in which a queue's connection is, if it is in one.
    pub(crate) fn doubt(&self, queue: usize) -> Option<u32> {
        Some(self.members.get(queue)?.load(SeqCst)).filter(|value| *value > JOINED)
    }

    /// A queue has heard from its server what it asked after it had seen that doubt. Says whether there is
    /// none any more: a newer one stays.
    #[must_use]
    pub(super) fn settles(&self, queue: usize, doubt: u32) -> bool {
        let settled = |member: &AtomicU32| member.compare_exchange(doubt, JOINED, SeqCst, Relaxed).is_ok();
        let settled = self.members.get(queue).is_some_and(settled);
        if settled {
            self.happens();
        }
        settled
    }

    /// Whether any other queue's connection is in doubt: no flush may cover what was written over it.
    pub(crate) fn doubts_others(&self, queue: usize) -> bool {
        self.others(queue).any(|(_, member)| member.load(SeqCst) > JOINED)
    }

    fn others(&self, queue: usize) -> impl Iterator<Item = (usize, &AtomicU32)> {
        self.members.iter().enumerate().filter(move |(number, _)| *number != queue)
    }

    fn happens(&self) {
        self.events.fetch_add(1, Release);
    }
}

#[cfg(test)]
#[path = "group_tests.rs"]
mod tests;
