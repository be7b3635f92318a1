//! A slot of a queue's slab: how far a request has come, and what it needs next.
//! Owns no memory and makes no system call.

use io_uring::{opcode, squeue, types::Timespec};
use rustix::io::Errno;

use crate::{
    Data, Op, Request,
    target::{FileState, link::Ask},
};

/// Longest single operation, in bytes (the kernel cuts at 2 GiB less a page).
pub(crate) const MAX_OPERATION: u64 = 1 << 30;

/// The source of what is in none.
pub(crate) const NO_SOURCE: u32 = u32::MAX;

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
    /// The source of the operation in flight; [`NO_SOURCE`] where its bytes are in none.
    pub(crate) source: u32,
    /// What a file's target remembers of the request.
    pub(crate) file: FileState,
    /// How often in a row the kernel asked to try again.
    pub(crate) retries: u8,
    /// What the sync in flight will cover (see `crate::target`).
    pub(crate) covers: u64,
    /// How the operation in flight was begun.
    pub(crate) way: Way,
    /// For [`Way::Checked`]: how often chunks had left the memory that the operation reads.
    pub(crate) departures: u32,
    /// The next operation may block: trying it without was refused.
    pub(crate) blocks: bool,
    /// The slot holds a request that has not finished.
    pub(crate) busy: bool,
}

/// What a request needs next.
pub(crate) enum Step {
    /// An operation on a source.
    Operate(squeue::Entry),
    /// A question to a server: its answer takes the request further.
    Ask(Ask),
    /// An operation that brings what is in no source to the requester's pages.
    Deliver(squeue::Entry),
    /// Its turn, or a note about what is not there yet.
    Waits,
    /// Nothing.
    Whole,
}

/// How an operation goes to the kernel; see [`crate::governor`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// As it is: it does not block, or must not wait.
    Free,
    /// The same, and its target looks at its completion.
    Checked,
    /// If it need not block.
    Trying,
    /// With a place in the window of its class.
    Governed,
    /// As it is: a sync that has its source's [turn](crate::target::Syncs::takes_turn).
    Syncing,
    /// Not at all yet: it pauses until what is under way has ended.
    Paused,
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

/// How long requests pause, by how often in a row they have.
static PAUSES: [Timespec; 6] = [micros(50), micros(100), micros(200), micros(400), micros(800), micros(1600)];

const fn micros(micros: u32) -> Timespec {
    Timespec::new().nsec(micros * 1000)
}

/// So many pauses count among a request's attempts: some are left for what is interrupted.
const PAUSED: u8 = MAX_RETRIES / 2;

impl Slot {
    pub(crate) const IDLE: Slot = Slot {
        request: Request { op: Op::Flush, offset: 0, len: 0, data: Data::None },
        began: 0,
        done: 0,
        asked: 0,
        staged: 0,
        source: 0,
        file: FileState::FRESH,
        retries: 0,
        covers: 0,
        way: Way::Free,
        departures: 0,
        blocks: false,
        busy: false,
    };

    /// A slot that has just been given a request.
    #[inline]
    pub(crate) fn begin(request: Request, now: u64) -> Slot {
        Slot { request, began: now, busy: true, ..Slot::IDLE }
    }

    /// A pause in place of an operation that may not begin yet; it is tried again then.
    pub(crate) fn pauses(&mut self) -> Step {
        let pause = PAUSES.get(usize::from(self.retries)).unwrap_or(&PAUSES[PAUSES.len() - 1]);
        self.way = Way::Paused;
        self.retries = self.retries.max(PAUSED.min(self.retries.saturating_add(1)));
        Step::Deliver(opcode::Timeout::new(pause).build())
    }

    /// Has a request whose bytes are moved end as a flush does.
    pub(crate) fn ends_in_flush(&mut self) {
        self.request.op = Op::Flush;
        self.source = 0;
    }

    /// What was asked for. A flush has no bytes: one that has is the end of a durable write.
    pub(crate) fn asked_for(&self) -> Op {
        match self.request {
            Request { op: Op::Flush, len: 1.., .. } => Op::Write { durable: true },
            Request { op, .. } => op,
        }
    }

    /// Takes in the result of an operation that moves bytes: a count or a negative errno.
    ///
    /// `Ok(())` means that the request goes on (or is whole); an error finishes it.
    pub(crate) fn absorb(&mut self, result: i32) -> Result<(), Errno> {
        match u32::try_from(result) {
            Ok(moved) => self.moved(moved.into()),
            Err(_) => self.failed(errno_of(result)),
        }
    }

    /// The operation in flight has moved or zeroed so many bytes.
    pub(crate) fn moved(&mut self, bytes: u64) -> Result<(), Errno> {
        self.retries = 0;
        match bytes {
            // The source ended before the image did: it was truncated behind our back.
            0 => Err(Errno::IO),
            bytes if bytes > self.asked => Err(Errno::IO),
            bytes => {
                self.done += bytes;
                Ok(())
            }
        }
    }

    /// It has failed: the kernel may ask to try again, a number of times.
    pub(crate) fn failed(&mut self, errno: Errno) -> Result<(), Errno> {
        match errno {
            Errno::INTR | Errno::AGAIN if self.retries < MAX_RETRIES => {
                self.retries += 1;
                Ok(())
            }
            Errno::INTR | Errno::AGAIN | Errno::CANCELED => Err(Errno::IO),
            errno => Err(errno),
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
}
