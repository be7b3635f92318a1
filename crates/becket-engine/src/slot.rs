//! A slot of a queue's slab: how far a request has come, and what it needs next.
//! Owns no memory and makes no system call.

use io_uring::squeue;
use rustix::io::Errno;

use crate::{Data, Op, Request};

/// The means by which a range is zeroed, from the cheapest to the surest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zeroing {
    /// `fallocate` with a hole.
    Punch,
    /// `fallocate` with `ZERO_RANGE`.
    Range,
    /// Writing zeroes.
    Write,
}

/// A request in its slot of the slab.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    pub(crate) request: Request,
    /// When it arrived, by the ring's clock.
    pub(crate) began: u64,
    /// Bytes that are done.
    pub(crate) done: u64,
    /// Bytes that the operation in flight was asked for.
    pub(crate) asked: u64,
    /// Bytes that are staged in a file of memory and not yet in the requester's pages.
    pub(crate) staged: u64,
    /// The backing file of the operation in flight.
    pub(crate) file: u32,
    /// The operation in flight bypasses the page cache.
    pub(crate) direct: bool,
    /// The rest of the request goes through the page cache, since direct I/O was refused.
    pub(crate) buffered_only: bool,
    pub(crate) zeroing: Zeroing,
    /// How often in a row the kernel asked to try again.
    pub(crate) retries: u8,
    /// What a running fdatasync will have made durable.
    pub(crate) sync_target: u64,
    /// How the operation in flight was begun.
    pub(crate) way: Way,
    /// The next operation may block: trying it without was refused.
    pub(crate) blocks: bool,
    /// The file system refused an operation's flags: the rest of the request does without.
    pub(crate) bare: bool,
    /// The slot holds a request that has not finished.
    pub(crate) busy: bool,
}

/// What a request needs next.
pub(crate) enum Step {
    /// An operation on a backing file.
    Operate(squeue::Entry),
    /// An operation that brings what no file holds to the requester's pages.
    Deliver(squeue::Entry),
    /// Word about a block that is being decoded.
    Waits,
    /// Nothing.
    Whole,
}

/// How an operation goes to the kernel; see [`crate::governor`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// As it is: it does not block, or must not wait.
    Free,
    /// If it need not block.
    Trying,
    /// With a place in the window of its class.
    Governed,
    /// Not at all yet: it stands in line for a place.
    Waiting,
    /// Not at all yet: the request has not begun, for its queue is held.
    Held,
}

/// The error that a negative result of an operation stands for; EIO for numbers that are none.
///
/// Block devices know no quota, and the kernel makes EIO of what they do not know: one that is exhausted is
/// no room.
pub(crate) fn errno_of(result: i32) -> Errno {
    match result.checked_neg() {
        Some(libc::EDQUOT) => Errno::NOSPC,
        Some(errno @ 1..=4095) => Errno::from_raw_os_error(errno),
        _ => Errno::IO,
    }
}

/// How often in a row EINTR and EAGAIN are taken before the request fails.
pub(crate) const MAX_RETRIES: u8 = 64;

impl Slot {
    pub(crate) const IDLE: Slot = Slot {
        request: Request { op: Op::Flush, offset: 0, len: 0, data: Data::None },
        began: 0,
        done: 0,
        asked: 0,
        staged: 0,
        file: 0,
        direct: false,
        buffered_only: false,
        zeroing: Zeroing::Punch,
        retries: 0,
        sync_target: 0,
        way: Way::Free,
        blocks: false,
        bare: false,
        busy: false,
    };

    /// A slot that has just been given a request.
    #[inline]
    pub(crate) fn begin(request: Request, now: u64) -> Slot {
        let zeroing = match request.op {
            Op::WriteZeroes { keep_allocated: true } => Zeroing::Range,
            _ => Zeroing::Punch,
        };
        Slot { request, began: now, zeroing, busy: true, ..Slot::IDLE }
    }

    /// Has a request whose bytes are moved end as a flush does.
    pub(crate) fn ends_in_flush(&mut self) {
        self.request.op = Op::Flush;
        self.file = 0;
    }

    /// What was asked for. A flush has no bytes: one that has is the end of a durable write.
    pub(crate) fn asked_for(&self) -> Op {
        match self.request {
            Request { op: Op::Flush, len: 1.., .. } => Op::Write { durable: true },
            Request { op, .. } => op,
        }
    }

    /// Takes in the result of an operation that moves or zeroes bytes.
    ///
    /// `Ok(())` means that the request goes on (or is whole); an error finishes it.
    pub(crate) fn absorb(&mut self, result: i32) -> Result<(), Errno> {
        if result >= 0 {
            self.retries = 0;
            let moved = if self.zeroes_by_fallocate() { self.asked } else { result.unsigned_abs().into() };
            return match moved {
                // The file ended before the image did: it was truncated behind our back.
                0 => Err(Errno::IO),
                moved if moved > self.asked => Err(Errno::IO),
                moved => {
                    self.done += moved;
                    Ok(())
                }
            };
        }
        let errno = errno_of(result);
        match errno {
            Errno::INTR | Errno::AGAIN if self.retries < MAX_RETRIES => {
                self.retries += 1;
                Ok(())
            }
            // Facts that were asked when the image was opened may change (a file may be set to be
            // compressed).
            Errno::INVAL if self.direct && !self.buffered_only => {
                self.buffered_only = true;
                Ok(())
            }
            Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL if self.zeroes_by_fallocate() => {
                self.zeroing = match (self.request.op, self.zeroing) {
                    (Op::WriteZeroes { keep_allocated: false }, Zeroing::Punch) => Zeroing::Range,
                    (Op::WriteZeroes { .. }, Zeroing::Range) => Zeroing::Write,
                    _ => return Err(Errno::OPNOTSUPP),
                };
                Ok(())
            }
            Errno::INTR | Errno::AGAIN | Errno::CANCELED => Err(Errno::IO),
            errno => Err(errno),
        }
    }

    /// This failure of an operation may be the kernel's only word about pages that earlier writes have lost.
    ///
    /// A durable write through the page cache syncs, and what a sync finds lost is reported once for each
    /// open file. An error that only the write itself can have met says nothing of others.
    pub(crate) fn may_have_lost_pages(&self, errno: Errno) -> bool {
        self.request.op == Op::Write { durable: true } && !self.direct && errno == Errno::IO
    }

    /// The operation in flight is a `fallocate`, whose success is 0 and not a count.
    pub(crate) fn zeroes_by_fallocate(&self) -> bool {
        match self.request.op {
            Op::Discard => true,
            Op::WriteZeroes { .. } => self.zeroing != Zeroing::Write,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(op: Op, len: u64) -> Slot {
        Slot { asked: len, ..Slot::begin(Request { op, offset: 0, len, data: Data::Buffer }, 0) }
    }

    #[test]
    fn short_results_continue_until_whole() {
        let mut slot = slot(Op::Read, 4096);
        assert_eq!(slot.absorb(512), Ok(()));
        assert_eq!(slot.done, 512);
        slot.asked = 3584;
        assert_eq!(slot.absorb(3584), Ok(()));
        assert_eq!(slot.done, 4096);
    }

    #[test]
    fn nothing_read_or_too_much_is_an_error() {
        assert_eq!(slot(Op::Read, 4096).absorb(0), Err(Errno::IO));
        assert_eq!(slot(Op::Write { durable: false }, 4096).absorb(0), Err(Errno::IO));
        assert_eq!(slot(Op::Read, 4096).absorb(8192), Err(Errno::IO));
    }

    #[test]
    fn errors_keep_their_number() {
        let absorb = |errno: Errno| slot(Op::Write { durable: true }, 512).absorb(-errno.raw_os_error());
        for errno in [Errno::NOSPC, Errno::IO, Errno::FBIG] {
            assert_eq!(absorb(errno), Err(errno));
        }
        assert_eq!(absorb(Errno::DQUOT), Err(Errno::NOSPC), "what a block device can say of a quota");
        assert_eq!(slot(Op::Read, 512).absorb(i32::MIN), Err(Errno::IO));
    }

    #[test]
    fn interruptions_are_bounded() {
        let mut slot = slot(Op::Read, 512);
        for _ in 0..MAX_RETRIES {
            assert_eq!(slot.absorb(-Errno::AGAIN.raw_os_error()), Ok(()));
        }
        assert_eq!(slot.absorb(-Errno::AGAIN.raw_os_error()), Err(Errno::IO));
    }

    #[test]
    fn a_refused_direct_operation_is_repeated_through_the_page_cache_once() {
        let mut slot = slot(Op::Read, 512);
        slot.direct = true;
        assert_eq!(slot.absorb(-Errno::INVAL.raw_os_error()), Ok(()));
        assert!(slot.buffered_only);
        slot.direct = false;
        assert_eq!(slot.absorb(-Errno::INVAL.raw_os_error()), Err(Errno::INVAL));
    }

    #[test]
    fn zeroing_falls_back_to_writing_but_discard_does_not() {
        let unsupported = -Errno::OPNOTSUPP.raw_os_error();
        let mut zero = slot(Op::WriteZeroes { keep_allocated: false }, 512);
        assert_eq!(zero.zeroing, Zeroing::Punch);
        assert_eq!(zero.absorb(unsupported), Ok(()));
        assert_eq!(zero.zeroing, Zeroing::Range);
        assert_eq!(zero.absorb(unsupported), Ok(()));
        assert_eq!(zero.zeroing, Zeroing::Write);
        assert_eq!(zero.absorb(unsupported), Err(Errno::OPNOTSUPP));
        let mut keep = slot(Op::WriteZeroes { keep_allocated: true }, 512);
        assert_eq!(keep.zeroing, Zeroing::Range);
        assert_eq!(keep.absorb(unsupported), Ok(()));
        assert_eq!(keep.zeroing, Zeroing::Write);
        assert_eq!(slot(Op::Discard, 512).absorb(unsupported), Err(Errno::OPNOTSUPP));
    }

    #[test]
    fn fallocate_success_is_the_whole_range() {
        let mut slot = slot(Op::Discard, 1 << 30);
        assert_eq!(slot.absorb(0), Ok(()));
        assert_eq!(slot.done, 1 << 30);
    }
}
