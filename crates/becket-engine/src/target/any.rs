//! The kinds of targets. A call goes to one of them by a match that the compiler sees through: no table of
//! methods, and nothing at all where there is one kind.

use std::{os::fd::BorrowedFd, sync::Arc};

use becket_image::{DirectIo, Source};
use rustix::io::Errno;

#[cfg(test)]
use super::double::Double;
use super::{
    contract::{Completed, Piece, SLOTS, Target},
    file::FileTarget,
    filled::FilledTarget,
    link::LinkTarget,
    straight::Straight,
    syncs::Syncs,
};
use crate::{
    decode::{Mailbox, Waiter},
    governor::Governor,
    slot::{Slot, Step},
};

/// A target of any kind.
#[derive(Debug)]
pub(crate) enum AnyTarget {
    File(FileTarget),
    Link(LinkTarget),
    Filled(FilledTarget),
    #[cfg(test)]
    Double(Double),
}

/// Calls the target of whichever kind it is.
macro_rules! each {
    ($any:expr, $target:ident => $call:expr) => {
        match $any {
            AnyTarget::File($target) => $call,
            AnyTarget::Link($target) => $call,
            AnyTarget::Filled($target) => $call,
            #[cfg(test)]
            AnyTarget::Double($target) => $call,
        }
    };
}

impl AnyTarget {
    /// The target of a source, for a device of so many queues.
    pub(crate) fn of(source: Source, queues: usize) -> AnyTarget {
        match source {
            Source::File(file) => AnyTarget::File(FileTarget::new(file, queues)),
            Source::Link(link) => AnyTarget::Link(LinkTarget::new(link, queues)),
            Source::Filled(filled) => AnyTarget::Filled(FilledTarget::new(filled, queues)),
        }
    }
}

impl AnyTarget {
    /// The target, where it is of an export.
    #[inline]
    pub(crate) fn link(&self) -> Option<&LinkTarget> {
        match self {
            AnyTarget::Link(link) => Some(link),
            _ => None,
        }
    }

    /// Whether its bytes are on another host, and another process brings or connects.
    pub(crate) fn is_remote(&self) -> bool {
        matches!(self, AnyTarget::Link(_) | AnyTarget::Filled(_))
    }
}

impl Target for AnyTarget {
    fn descriptors(&self) -> [Option<BorrowedFd<'_>>; SLOTS] {
        each!(self, target => target.descriptors())
    }

    fn crossing(&self) -> Vec<BorrowedFd<'_>> {
        each!(self, target => target.crossing())
    }

    fn is_writable(&self) -> bool {
        each!(self, target => target.is_writable())
    }

    fn operate(&self, piece: &Piece, slot: &mut Slot, governor: &mut Governor) -> Result<Step, Errno> {
        each!(self, target => target.operate(piece, slot, governor))
    }

    fn awaits(&self, offset: u64, len: u64, waiter: Waiter) {
        each!(self, target => target.awaits(offset, len, waiter));
    }

    fn cancel(&self, queue: u32, mailbox: &Arc<Mailbox>, those: &dyn Fn(u16) -> bool) {
        each!(self, target => target.cancel(queue, mailbox, those));
    }

    fn completed(&self, slot: &mut Slot, result: i32) -> Result<Completed, Errno> {
        each!(self, target => target.completed(slot, result))
    }

    fn lets_go(&self, slot: &mut Slot) {
        each!(self, target => target.lets_go(slot))
    }

    fn straight(&self, piece: &Piece, slot: &Slot) -> Option<Straight> {
        each!(self, target => target.straight(piece, slot))
    }

    #[inline]
    fn syncs(&self) -> &Syncs {
        each!(self, target => target.syncs())
    }

    fn sync(&self, slots: u32) -> Step {
        each!(self, target => target.sync(slots))
    }

    fn sync_now(&self) -> Result<(), Errno> {
        each!(self, target => target.sync_now())
    }

    fn farewell(&self) -> Result<(), String> {
        each!(self, target => target.farewell())
    }

    fn hole(&self, offset: u64, len: u64) -> (u64, bool) {
        each!(self, target => target.hole(offset, len))
    }

    fn read_unit(&self, direct_io: DirectIo) -> Option<u64> {
        each!(self, target => target.read_unit(direct_io))
    }

    fn takes_lists(&self) -> bool {
        each!(self, target => target.takes_lists())
    }

    fn unit(&self, slot: &Slot) -> u64 {
        each!(self, target => target.unit(slot))
    }
}
