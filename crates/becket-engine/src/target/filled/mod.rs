//! The target of a store file that is filled while it is read: a file where the chunks of a piece are there.
//! A piece of which a chunk is missing waits ([`waits`]), and asks for it in the table that this process
//! shares with the fetcher. What is there costs no lock, no allocation and no system call.
//!
//! Chunks for which the file has no room are in memory, from which they can go while they are read: then they
//! are read again. Has a third slot in a ring's table for that memory.

mod waits;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use becket_image::{
    DirectIo,
    filled::{Envelopes, FilledSource, Presence, Where},
};
use rustix::io::Errno;

use self::waits::Waits;
use super::{
    contract::{Completed, Piece, SLOTS, Target},
    file::FileTarget,
    straight::Straight,
    syncs::Syncs,
};
use crate::{
    decode::{Mailbox, Waiter},
    governor::Governor,
    slot::{Slot, Step, Way},
};

/// How many chunks around one that is there are looked at for the straight way, to each side.
const AROUND: u64 = 256;
/// The slot of the memory, behind those of the file.
const MEMORY: u32 = 2;

/// A store file.
#[derive(Debug)]
pub(crate) struct FilledTarget {
    file: FileTarget,
    presence: Arc<Presence>,
    waits: Waits,
    /// For the successor of the process that serves this, which cannot look into them.
    envelopes: Envelopes,
}

impl FilledTarget {
    pub(super) fn new(source: FilledSource, queues: usize) -> FilledTarget {
        let (file, presence, envelopes) = source.into_parts();
        let waits = Waits::new(Arc::clone(&presence));
        FilledTarget { file: FileTarget::new(file, queues), presence, waits, envelopes }
    }

    /// What a piece does that cannot be read yet.
    fn missing(&self) -> Result<Step, Errno> {
        if self.presence.fails() { Err(Errno::IO) } else { Ok(Step::Waits) }
    }

    /// The operation that reads a piece from memory.
    fn remembered(&self, piece: &Piece, slot: &mut Slot, departures: u32) -> Step {
        let (_, start) = self.presence.memory().parts();
        (slot.way, slot.departures) = (Way::Checked, departures);
        Step::Operate(piece.transfer(MEMORY, start + piece.offset, slot.asked, piece.carrier.flags))
    }
}

impl Target for FilledTarget {
    fn descriptors(&self) -> [Option<BorrowedFd<'_>>; SLOTS] {
        let [buffered, direct, _] = self.file.descriptors();
        [buffered, direct, Some(self.presence.fd())]
    }

    fn crossing(&self) -> Vec<BorrowedFd<'_>> {
        let mut all = self.file.crossing();
        all.push(self.presence.fd());
        all.extend(self.envelopes.descriptors());
        all
    }

    fn is_writable(&self) -> bool {
        false
    }

    fn operate(&self, piece: &Piece, slot: &mut Slot, governor: &mut Governor) -> Result<Step, Errno> {
        if slot.request.op.modifies() {
            return Err(Errno::ROFS);
        }
        // The count is read before the table: a later departure changes it.
        let departures = self.presence.departures();
        match self.presence.start_of(piece.offset, slot.asked) {
            // In a file, chunks stay: the piece waits for all of them.
            Some((_, len)) if len < slot.asked && !self.presence.uses_memory() => self.missing(),
            // A list cannot be shortened. The piece is planned again, and not as a list.
            Some((_, len)) if len < slot.asked && piece.ranges > 0 => Ok(Step::Waits),
            Some((place, len)) => {
                slot.asked = len;
                match place {
                    Where::File => self.file.operate(piece, slot, governor),
                    Where::Memory => Ok(self.remembered(piece, slot, departures)),
                }
            }
            None => self.missing(),
        }
    }

    fn awaits(&self, offset: u64, len: u64, waiter: Waiter) {
        self.waits.add(offset, len, waiter);
    }

    fn cancel(&self, queue: u32, mailbox: &Arc<Mailbox>, those: &dyn Fn(u16) -> bool) {
        self.waits.cancel(queue, mailbox, those);
    }

    fn completed(&self, slot: &mut Slot, result: i32) -> Result<Completed, Errno> {
        if slot.way != Way::Checked {
            return self.file.completed(slot, result);
        }
        // After a departure the piece is read again, from wherever its chunks are now.
        match slot.departures == self.presence.departures() {
            true => slot.absorb(result).map(|()| Completed::GoesOn),
            false => Ok(Completed::Refused),
        }
    }

    fn straight(&self, piece: &Piece, slot: &Slot) -> Option<Straight> {
        let chunk = self.presence.chunks_of(piece.offset, 1).next()?;
        let in_file = self.presence.place(chunk) == Some(Where::File);
        let way = self.file.straight(piece, slot).filter(|_| in_file)?;
        let there = self.presence.around(chunk, AROUND);
        Some(Straight { offset: there.start, len: there.end - there.start, writes: false, ..way })
    }

    fn syncs(&self) -> &Syncs {
        self.file.syncs()
    }

    fn sync(&self, slots: u32) -> Step {
        self.file.sync(slots)
    }

    fn sync_now(&self) -> Result<(), Errno> {
        Ok(())
    }

    fn read_unit(&self, direct_io: DirectIo) -> Option<u64> {
        self.file.read_unit(direct_io)
    }

    fn takes_lists(&self) -> bool {
        self.file.takes_lists() && !self.presence.uses_memory()
    }

    fn unit(&self, slot: &Slot) -> u64 {
        self.file.unit(slot)
    }
}
