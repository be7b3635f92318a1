//! What a target does for the core. All of it runs on the I/O thread, except [`Target::sync_now`]: it never
//! waits, allocates or locks.

use std::{os::fd::BorrowedFd, sync::Arc};

use becket_image::DirectIo;
use io_uring::squeue;
use rustix::io::Errno;

use super::{straight::Straight, syncs::Syncs};
use crate::{
    decode::{Mailbox, Waiter},
    governor::Governor,
    ring::{Transfer, listed},
    slot::{Slot, Step},
};

/// Slots of a ring's table that each source has.
pub(crate) const SLOTS: usize = 3;

/// The part of a request that its target is to carry next: [`Slot::asked`] bytes in one source.
#[derive(Debug)]
pub(crate) struct Piece {
    /// The first of them in the source.
    pub(crate) offset: u64,
    /// A transfer of their memory: its direction and what the request itself needs of flags. Length,
    /// descriptor and offset are the target's to add.
    pub(crate) carrier: Transfer,
    /// In how many ranges that memory is: the transfer's address is that of their list then. 0 where it is in
    /// one. Only for a target that [takes lists](Target::takes_lists).
    pub(crate) ranges: u32,
    /// The bits of its address and, of ranges, of their lengths, as far as a page's beginning does not have
    /// them.
    pub(crate) memory: u64,
    /// They are stored bytes of an encoded block, and go to memory of ours.
    pub(crate) stored: bool,
    /// What of the device is to go past the page cache.
    pub(crate) direct_io: DirectIo,
    /// What offsets and lengths of the device's requests are multiples of, in bytes.
    pub(crate) unit: u32,
    /// The first of the source's slots in the ring's table.
    pub(crate) slots: u32,
}

impl Piece {
    /// The operation that moves `len` bytes of it, by the source's slot of that number, at that place of its
    /// descriptor, with these flags.
    pub(crate) fn transfer(&self, slot: u32, offset: u64, len: u64, flags: i32) -> squeue::Entry {
        let (target, len) = (self.slots + slot, len as u32);
        let entry = Transfer { target, offset, len, flags, ..self.carrier }.entry();
        if self.ranges > 0 { listed(entry, self.ranges) } else { entry }
    }
}

/// What the completion of an operation that did not fail means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Completed {
    /// The request goes on: bytes were moved ([`Slot::done`] counts them), or the same are tried again.
    GoesOn,
    /// It was tried without blocking, or with flags, and that was refused: it changed nothing, and the next
    /// attempt may block.
    Refused,
}

/// Carries pieces of requests to one source, for all queues of a device.
pub(crate) trait Target {
    /// Its descriptors for the tables of rings.
    fn descriptors(&self) -> [Option<BorrowedFd<'_>>; SLOTS];

    /// The descriptors that cross to another process which is to serve it, in their order.
    fn crossing(&self) -> Vec<BorrowedFd<'_>> {
        self.descriptors().into_iter().flatten().collect()
    }

    /// Whether anything may be written to it. What may not is never synced.
    fn is_writable(&self) -> bool;

    /// The operation that takes a request's piece further, or [`Step::Waits`] where the piece is not there:
    /// a note takes the request further then. Sets how the operation goes ([`Slot::way`]), and lessens
    /// [`Slot::asked`] where it carries less.
    ///
    /// # Errors
    /// What the request fails with.
    fn operate(&self, piece: &Piece, slot: &mut Slot, governor: &mut Governor) -> Result<Step, Errno>;

    /// A piece of a request that [`Target::operate`] had wait: the waiter gets a note when these bytes are
    /// there, or cannot be had. May take a lock, as long as no other thread holds it while it waits.
    fn awaits(&self, _offset: u64, _len: u64, _waiter: Waiter) {}

    /// The requests of a queue that wait, and are of `those` by their tag, get their notes now, whose answer
    /// is an error.
    fn cancel(&self, _queue: u32, _mailbox: &Arc<Mailbox>, _those: &dyn Fn(u16) -> bool) {}

    /// Such an operation has ended, or could not begin.
    fn lets_go(&self, _slot: &mut Slot) {}

    /// Takes in the result of such an operation: a count, 0 or a negative errno. Not called for one of
    /// [`Way::Free`](crate::slot::Way::Free) whose result is all the bytes that its request still lacked,
    /// unless that is a durable write.
    ///
    /// # Errors
    /// What the request fails with. An error that says that finished writes may be lost must have made
    /// [`Target::syncs`] fail before it is returned.
    fn completed(&self, slot: &mut Slot, result: i32) -> Result<Completed, Errno>;

    /// The way of requests that lie in the same extent as the piece that was just begun, where they need no
    /// plan, and the range of the source where that is so. The core fills in the extent.
    fn straight(&self, piece: &Piece, slot: &Slot) -> Option<Straight>;

    /// What of finished writes a completed sync covers. The core counts in it: a target only has it, so that
    /// it outlives queues and changes.
    fn syncs(&self) -> &Syncs;

    /// What makes all finished writes durable. Its result is 0 or a negative errno.
    fn sync(&self, slots: u32) -> Step;

    /// The same at once, for a thread that may wait.
    ///
    /// # Errors
    /// Some may not be durable.
    fn sync_now(&self) -> Result<(), Errno>;

    /// The device has ended for good, and no queue is left: has finished writes made durable that nothing
    /// on this host would make so without us. What is in its page cache the kernel writes. For a thread that
    /// may wait; takes at most [`FAREWELL`](super::FAREWELL).
    ///
    /// # Errors
    /// Why some of them may be lost.
    fn farewell(&self) -> Result<(), String> {
        Ok(())
    }

    /// How far the bytes from byte `offset` of the source on are alike, up to `len`, and whether they are a
    /// hole, which reads as zeroes. Without knowledge all are data.
    fn hole(&self, _offset: u64, len: u64) -> (u64, bool) {
        (len, false)
    }

    /// The unit in bytes in which stored bytes of encoded blocks are read; `None` where any range may be.
    fn read_unit(&self, direct_io: DirectIo) -> Option<u64>;

    /// Whether a piece's memory may be in several ranges.
    fn takes_lists(&self) -> bool {
        false
    }

    /// What a shorter operation in place of the one in flight would have to be a multiple of, in bytes.
    fn unit(&self, slot: &Slot) -> u64;
}
