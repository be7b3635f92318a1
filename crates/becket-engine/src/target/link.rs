//! The target of an export of an NBD server. Nothing carries its pieces yet: transports refuse such images.

use std::os::fd::BorrowedFd;

use becket_image::{DirectIo, link::LinkSource};
use io_uring::{opcode, squeue};
use rustix::io::Errno;

use super::{
    contract::{Completed, Piece, SLOTS, Target},
    straight::Straight,
    syncs::Syncs,
};
use crate::{
    governor::Governor,
    slot::{Slot, Step},
};

#[derive(Debug)]
pub(crate) struct LinkTarget {
    _source: LinkSource,
    syncs: Syncs,
}

impl LinkTarget {
    pub(super) fn new(source: LinkSource, queues: usize) -> LinkTarget {
        LinkTarget { _source: source, syncs: Syncs::new(queues) }
    }
}

impl Target for LinkTarget {
    fn descriptors(&self) -> [Option<BorrowedFd<'_>>; SLOTS] {
        [None; SLOTS]
    }

    fn is_writable(&self) -> bool {
        false
    }

    fn operate(&self, _: &Piece, _: &mut Slot, _: &mut Governor) -> Result<Step, Errno> {
        Err(Errno::IO)
    }

    fn completed(&self, _: &mut Slot, _: i32) -> Result<Completed, Errno> {
        Err(Errno::IO)
    }

    fn straight(&self, _: &Piece, _: &Slot) -> Option<Straight> {
        None
    }

    fn syncs(&self) -> &Syncs {
        &self.syncs
    }

    fn sync(&self, _: u32) -> squeue::Entry {
        opcode::Nop::new().build()
    }

    fn sync_now(&self) -> Result<(), Errno> {
        Err(Errno::IO)
    }

    fn read_unit(&self, _: DirectIo) -> Option<u64> {
        None
    }

    fn unit(&self, _: &Slot) -> u64 {
        1
    }
}
