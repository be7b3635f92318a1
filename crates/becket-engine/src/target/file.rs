//! The target of a regular file or block device: reads and writes past the page cache or through it,
//! `fallocate` and what stands for it where the file system has none, `fdatasync`.
//! Has three slots in a ring's table: the buffered descriptor, the direct one, and one to sync through after
//! a sync was interrupted.

mod mix;
mod state;
mod way;

use std::os::fd::{AsFd as _, BorrowedFd};

use becket_image::{DirectIo, FileKind, FileSource, zeroes::ZEROES};
use io_uring::{opcode, types::FsyncFlags};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

pub(crate) use state::FileState;

use self::mix::Mix;
use self::state::Zeroing;
use super::{
    contract::{Completed, Piece, SLOTS, Target},
    straight::Straight,
    syncs::Syncs,
};
use crate::{
    Op,
    governor::{Class, Governor},
    ring::fixed,
    slot::{Slot, Step, Way, errno_of},
};

/// The slot of what is asked after a sync was interrupted.
const ASKS: u32 = 2;

/// A file or block device of this host.
#[derive(Debug)]
pub(crate) struct FileTarget {
    file: FileSource,
    syncs: Syncs,
    mix: Mix,
}

impl FileTarget {
    pub(super) fn new(mut file: FileSource, queues: usize) -> FileTarget {
        let syncs = Syncs::new(queues, file.heard.take());
        FileTarget { file, syncs, mix: Mix::default() }
    }

    /// Whether writes of a device may be direct, and others not.
    fn mixes(&self, piece: &Piece) -> bool {
        let align = self.file.facts.direct.filter(|_| self.file.direct.is_some());
        piece.direct_io != DirectIo::Off && align.is_some_and(|align| piece.unit < align.offset.max(1))
    }

    /// The operation that reads or writes a piece.
    fn transfer(&self, piece: &Piece, slot: &mut Slot, governor: &mut Governor) -> Step {
        let facts = &self.file.facts;
        let wanted = piece.direct_io;
        // What is to leave the page cache takes along what was read ahead around it.
        let stays = piece.stored && facts.caches_stored(wanted);
        let mut direct = !slot.file.buffered_only
            && !stays
            && wanted != DirectIo::Off
            && self.file.direct.is_some()
            && facts.direct.is_some_and(|align| {
                let unit = u64::from(align.offset.max(1)) - 1;
                let memory = u64::from(align.memory.max(1)) - 1;
                (piece.offset | slot.asked) & unit == 0 && piece.memory & memory == 0
            });
        if slot.request.op.modifies() && self.mixes(piece) && !slot.file.counted {
            direct = direct && self.mix.begins();
            slot.file.counted = direct;
            if !direct && !self.mix.begins_cached() {
                return slot.pauses();
            }
        }
        slot.file.buffered = !direct;
        let durable = slot.request.op == Op::Write { durable: true };
        slot.file.cached |= durable && !direct;
        let flags = way::way_of(governor, slot, facts, wanted, stays);
        if slot.file.counted && slot.way == Way::Free {
            slot.way = Way::Checked;
        }
        // Where a write would sync through the page cache it would hear of pages that earlier writes have
        // lost, and no sync after it: so a sync follows it.
        let own = if direct { piece.carrier.flags } else { piece.carrier.flags & !libc::RWF_DSYNC };
        Step::Operate(piece.transfer(direct.into(), piece.offset, slot.asked, own | flags))
    }

    /// The operation that zeroes a piece.
    fn zero(&self, piece: &Piece, slot: &mut Slot, how: Zeroing) -> Step {
        slot.file.buffered = true;
        slot.way = Way::Governed;
        let (file, offset) = (fixed(piece.slots), piece.offset);
        let mode = match how {
            Zeroing::Punch => libc::FALLOC_FL_PUNCH_HOLE,
            Zeroing::Range => libc::FALLOC_FL_ZERO_RANGE,
            Zeroing::Write if self.mixes(piece) && !self.mix.begins_cached() => return slot.pauses(),
            Zeroing::Write => {
                slot.asked = slot.asked.min(ZEROES.len() as u64);
                let write = opcode::Write::new(file, ZEROES.as_ptr(), slot.asked as u32);
                return Step::Operate(write.offset(offset).build());
            }
        };
        let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
        Step::Operate(opcode::Fallocate::new(file, slot.asked).offset(offset).mode(mode).build())
    }
}

/// How the next range of a request is zeroed; `None` for one that moves bytes.
fn zeroing(slot: &Slot) -> Option<Zeroing> {
    match (slot.request.op, slot.file.zeroing) {
        (Op::Discard, _) => Some(Zeroing::Punch),
        (Op::WriteZeroes { keep_allocated: true }, Zeroing::Punch) => Some(Zeroing::Range),
        (Op::WriteZeroes { .. }, how) => Some(how),
        _ => None,
    }
}

/// Takes in the result of an operation that moves or zeroes bytes.
fn absorb(slot: &mut Slot, result: i32) -> Result<(), Errno> {
    // The success of a `fallocate` is 0 and not a count.
    let fallocate = zeroing(slot).filter(|how| *how != Zeroing::Write);
    match (result, fallocate) {
        (0.., Some(_)) => slot.moved(slot.asked),
        (0.., None) => slot.absorb(result),
        (..0, _) => match (errno_of(result), fallocate) {
            // Facts that were asked when the image was opened may change (a file may be set to be
            // compressed).
            (Errno::INVAL, _) if !slot.file.buffered && !slot.file.buffered_only => {
                slot.file.buffered_only = true;
                Ok(())
            }
            (Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL, Some(how)) => {
                slot.file.zeroing = match (slot.request.op, how) {
                    (Op::WriteZeroes { .. }, Zeroing::Punch) => Zeroing::Range,
                    (Op::WriteZeroes { .. }, _) => Zeroing::Write,
                    _ => return Err(Errno::OPNOTSUPP),
                };
                Ok(())
            }
            (errno, _) => slot.failed(errno),
        },
    }
}

/// Whether an operation was refused for how it was tried.
fn is_refused(slot: &mut Slot, result: i32) -> bool {
    if result >= 0 || slot.way == Way::Free || Class::of(slot.request.op) == Class::Space {
        return false;
    }
    let errno = errno_of(result);
    // Some file systems say EOPNOTSUPP where they mean EAGAIN; that the flags are to blame shows when the
    // operation has a thread to itself and is refused again.
    let flags = errno == Errno::OPNOTSUPP && !slot.file.bare;
    let refused = flags || (slot.way == Way::Trying && errno == Errno::AGAIN);
    if refused {
        slot.file.bare = flags && slot.blocks;
    }
    refused
}

impl Target for FileTarget {
    fn descriptors(&self) -> [Option<BorrowedFd<'_>>; SLOTS] {
        let direct = self.file.direct.as_ref().map(|fd| fd.as_fd());
        [Some(self.file.buffered.as_fd()), direct, self.syncs.asks()]
    }

    fn crossing(&self) -> Vec<BorrowedFd<'_>> {
        let own = [&self.file.buffered].into_iter().chain(&self.file.direct).map(|fd| fd.as_fd());
        own.chain(self.syncs.heard().into_iter().flat_map(|heard| heard.descriptors())).collect()
    }

    fn is_writable(&self) -> bool {
        self.file.facts.writable
    }

    fn hole(&self, offset: u64, len: u64) -> (u64, bool) {
        if self.file.facts.kind != FileKind::Regular {
            return (len, false);
        }
        let file = &self.file.buffered;
        match seek(file, SeekFrom::Data(offset)) {
            Ok(data) if data > offset => ((data - offset).min(len), true),
            Ok(_) => match seek(file, SeekFrom::Hole(offset)) {
                Ok(hole) if hole > offset => ((hole - offset).min(len), false),
                _ => (len, false),
            },
            // Nothing but a hole up to the end.
            Err(Errno::NXIO) => (len, true),
            Err(_) => (len, false),
        }
    }

    fn operate(&self, piece: &Piece, slot: &mut Slot, governor: &mut Governor) -> Result<Step, Errno> {
        Ok(match zeroing(slot) {
            Some(how) => self.zero(piece, slot, how),
            None => self.transfer(piece, slot, governor),
        })
    }

    fn lets_go(&self, slot: &mut Slot) {
        if std::mem::take(&mut slot.file.counted) {
            self.mix.ended();
        }
    }

    fn completed(&self, slot: &mut Slot, result: i32) -> Result<Completed, Errno> {
        self.lets_go(slot);
        if is_refused(slot, result) {
            return Ok(Completed::Refused);
        }
        absorb(slot, result).map(|()| Completed::GoesOn)
    }

    fn straight(&self, piece: &Piece, slot: &Slot) -> Option<Straight> {
        let facts = &self.file.facts;
        let align = facts.direct.filter(|_| facts.nowait && !slot.file.buffered)?;
        let odd = u64::from(align.offset.max(1)) - 1;
        let writes = !facts.sparse && !self.mixes(piece);
        Some(Straight { odd, target: piece.slots + 1, writes, ..Straight::ALL })
    }

    fn syncs(&self) -> &Syncs {
        &self.syncs
    }

    fn sync(&self, slots: u32) -> Step {
        let slot = if self.syncs.asks().is_some() { slots + ASKS } else { slots };
        Step::Operate(opcode::Fsync::new(fixed(slot)).flags(FsyncFlags::DATASYNC).build())
    }

    fn sync_now(&self) -> Result<(), Errno> {
        let through = self.syncs.asks().unwrap_or_else(|| self.file.buffered.as_fd());
        rustix::io::retry_on_intr(|| rustix::fs::fdatasync(through))
    }

    fn read_unit(&self, direct_io: DirectIo) -> Option<u64> {
        let facts = &self.file.facts;
        let align = facts.direct.filter(|_| !facts.caches_stored(direct_io))?;
        Some(u64::from(align.offset.max(align.memory).max(1)))
    }

    fn takes_lists(&self) -> bool {
        true
    }

    fn unit(&self, slot: &Slot) -> u64 {
        let direct = self.file.facts.direct.filter(|_| !slot.file.buffered);
        direct.map_or(1, |align| align.offset.max(align.memory).max(1).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Data, Request};

    fn slot(op: Op, len: u64) -> Slot {
        Slot { asked: len, ..Slot::begin(Request { op, offset: 0, len, data: Data::Buffer }, 0) }
    }

    #[test]
    fn a_refused_direct_operation_is_repeated_through_the_page_cache_once() {
        let mut slot = slot(Op::Read, 512);
        assert_eq!(absorb(&mut slot, -Errno::INVAL.raw_os_error()), Ok(()));
        assert!(slot.file.buffered_only);
        slot.file.buffered = true;
        assert_eq!(absorb(&mut slot, -Errno::INVAL.raw_os_error()), Err(Errno::INVAL));
    }

    #[test]
    fn zeroing_falls_back_to_writing_but_discard_does_not() {
        let unsupported = -Errno::OPNOTSUPP.raw_os_error();
        // As after `operate`, which zeroes through the page cache.
        let buffered = |op| {
            let mut slot = slot(op, 512);
            slot.file.buffered = true;
            slot
        };
        let mut zero = buffered(Op::WriteZeroes { keep_allocated: false });
        assert_eq!(zeroing(&zero), Some(Zeroing::Punch));
        assert_eq!(absorb(&mut zero, unsupported), Ok(()));
        assert_eq!(zeroing(&zero), Some(Zeroing::Range));
        assert_eq!(absorb(&mut zero, unsupported), Ok(()));
        assert_eq!(zeroing(&zero), Some(Zeroing::Write));
        assert_eq!(absorb(&mut zero, unsupported), Err(Errno::OPNOTSUPP));
        let mut keep = buffered(Op::WriteZeroes { keep_allocated: true });
        assert_eq!(zeroing(&keep), Some(Zeroing::Range));
        assert_eq!(absorb(&mut keep, unsupported), Ok(()));
        assert_eq!(zeroing(&keep), Some(Zeroing::Write));
        assert_eq!(absorb(&mut buffered(Op::Discard), unsupported), Err(Errno::OPNOTSUPP));
    }

    #[test]
    fn fallocate_success_is_the_whole_range() {
        let mut slot = slot(Op::Discard, 1 << 30);
        assert_eq!(absorb(&mut slot, 0), Ok(()));
        assert_eq!(slot.done, 1 << 30);
    }
}
