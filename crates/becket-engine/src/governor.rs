//! Bounds the operations of a queue that can block, by measuring whether more of them at once help ([`law`]).
//! Never holds back the last one, never waits for another queue, never allocates after it was made.
//!
//! # Which operations those are
//!
//! io_uring tries each operation without blocking first and gives a kernel thread to what would block:
//! without a bound, one for each request. What it tries, and what can be had, differs:
//!
//! | operation | what the kernel does |
//! | --- | --- |
//! | direct read or write of blocks that exist | never blocks on ext4, xfs, btrfs, block devices |
//! | buffered read that hits | done at once, except where the file system knows no trying (overlayfs, FUSE) |
//! | buffered read that misses | asynchronous on ext4, xfs, btrfs, block devices; elsewhere a thread |
//! | buffered write | tried on xfs, btrfs, block devices; on ext4 and others always a thread, one per file |
//! | direct write into a hole or behind the end | allocates blocks: a thread |
//! | `fallocate`, `fdatasync` | always a thread |
//!
//! So an operation of a file that can be tried goes with `RWF_NOWAIT` first: done, or refused at once. What
//! was refused, and what cannot be tried, takes a place in the window of its class (reads, writes, space) or
//! waits in line for one. Trying is given up by and by where it is always refused, and taken up again once in
//! a while. Direct operations on a file without holes take none of this.
//!
//! A flush has no window: the block layer sends one at a time for each of its queues, and what waits for one
//! must not wait for the writes of others.
//!
//! # No deadlock
//!
//! An image may lie on another device of the same ring, so an operation may wait for an operation of another
//! queue. It never waits for a *place* of another queue: each queue has its own windows, of at least one, and
//! the ring may use as many kernel threads as requests may be under way (`Ring::may_block`). Within a queue a
//! waiting operation waits for one in flight of its own class, which has a thread already. Hence no circle,
//! whatever lies on what.

mod law;

use law::Law;

use crate::Op;

/// Counts as so many bytes beside those that an operation moves: what an operation costs by itself.
const OPERATION: u64 = 16 << 10;
/// No tag.
const NONE: u16 = u16::MAX;
/// Attempts in a row that were refused, as a power of two, after which no more are left out at a time.
const MOST_LEFT_OUT: u8 = 6;

/// Operations that wait for each other at most: a read need not wait for a hole being punched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Read,
    Write,
    /// Gives space back or zeroes it.
    Space,
}

impl Class {
    /// The class of an operation; a flush is never governed.
    pub(crate) fn of(op: Op) -> Class {
        match op {
            Op::Read => Class::Read,
            Op::Write { .. } | Op::Flush => Class::Write,
            Op::Discard | Op::WriteZeroes { .. } => Class::Space,
        }
    }
}

/// What an operation's end is worth to the law.
pub(crate) fn work(class: Class, moved: u64) -> u64 {
    match class {
        // Freeing a range costs the same whatever its length.
        Class::Space => OPERATION,
        Class::Read | Class::Write => OPERATION + moved,
    }
}

/// The windows of a queue and the tags that wait for a place in them.
#[derive(Debug)]
pub(crate) struct Governor {
    limits: [Limit; 3],
    line: Followers,
    /// The tags that the queue holds back, whatever their class.
    held: Waiting,
}

impl Governor {
    pub(crate) fn new(depth: u16) -> Governor {
        Governor {
            limits: std::array::from_fn(|_| Limit::new(depth)),
            line: Followers { next: vec![NONE; depth.into()].into_boxed_slice() },
            held: Waiting { first: NONE, last: NONE },
        }
    }

    /// How many operations of each class may be under way, in the order of [`Class`]; 0 where none has asked
    /// yet.
    pub(crate) fn windows(&self) -> [u16; 3] {
        self.limits.each_ref().map(|limit| if limit.asked { limit.law.window() } else { 0 })
    }

    /// Whether the operation of `tag` may begin; if not, it waits in line.
    pub(crate) fn admit(&mut self, class: Class, now: u64, tag: u16) -> bool {
        let limit = &mut self.limits[class as usize];
        limit.asked = true;
        limit.law.turn(now, limit.in_flight);
        // The window may have grown just now: the tags that wait go first.
        let called = std::mem::replace(&mut limit.called, NONE) == tag;
        if called || (limit.waiting.first == NONE && limit.in_flight < limit.law.window()) {
            limit.in_flight += 1;
            return true;
        }
        self.line.append(&mut limit.waiting, tag);
        false
    }

    /// An operation that was admitted has ended, with so much [`work`] done.
    pub(crate) fn ended(&mut self, class: Class, now: u64, work: u64) {
        let limit = &mut self.limits[class as usize];
        limit.law.turn(now, limit.in_flight);
        limit.law.completed(work);
        limit.in_flight = limit.in_flight.saturating_sub(1);
    }

    /// The next in line, if there is a place for it: it must ask to be admitted before any other does.
    pub(crate) fn next(&mut self, class: Class) -> Option<u16> {
        let limit = &mut self.limits[class as usize];
        if limit.in_flight >= limit.law.window() {
            return None;
        }
        let called = self.line.take_first(&mut limit.waiting)?;
        limit.called = called;
        Some(called)
    }

    /// Puts a tag into the line of those who are held back.
    pub(crate) fn hold_back(&mut self, tag: u16) {
        self.line.append(&mut self.held, tag);
    }

    /// The first of those who are held back.
    pub(crate) fn next_held(&mut self) -> Option<u16> {
        self.line.take_first(&mut self.held)
    }

    /// Whether to try an operation without blocking first.
    pub(crate) fn tries(&mut self, class: Class) -> bool {
        let limit = &mut self.limits[class as usize];
        limit.leave_out = limit.leave_out.saturating_sub(1);
        limit.leave_out == 0
    }

    /// An attempt was refused, or not.
    pub(crate) fn tried(&mut self, class: Class, refused: bool) {
        let limit = &mut self.limits[class as usize];
        limit.refused = if refused { (limit.refused + 1).min(MOST_LEFT_OUT) } else { 0 };
        limit.leave_out = 1 << limit.refused;
    }
}

/// The window of one class.
#[derive(Debug)]
struct Limit {
    law: Law,
    in_flight: u16,
    waiting: Waiting,
    /// The tag that [`Governor::next`] has named.
    called: u16,
    /// Attempts that were refused in a row, and how many operations are not tried for it.
    refused: u8,
    leave_out: u16,
    /// An operation has asked for a place.
    asked: bool,
}

impl Limit {
    fn new(depth: u16) -> Limit {
        let waiting = Waiting { first: NONE, last: NONE };
        Limit {
            law: Law::new(depth),
            in_flight: 0,
            waiting,
            called: NONE,
            refused: 0,
            leave_out: 0,
            asked: false,
        }
    }
}

/// The ends of a line of tags.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    first: u16,
    last: u16,
}

/// Which tag is behind which; a tag stands in one line at most.
#[derive(Debug)]
struct Followers {
    next: Box<[u16]>,
}

impl Followers {
    fn append(&mut self, waiting: &mut Waiting, tag: u16) {
        self.next[usize::from(tag)] = NONE;
        match self.next.get_mut(usize::from(waiting.last)) {
            Some(next) => *next = tag,
            None => waiting.first = tag,
        }
        waiting.last = tag;
    }

    fn take_first(&mut self, waiting: &mut Waiting) -> Option<u16> {
        let first = waiting.first;
        waiting.first = *self.next.get(usize::from(first))?;
        if waiting.first == NONE {
            waiting.last = NONE;
        }
        Some(first)
    }
}

#[cfg(test)]
mod tests;
