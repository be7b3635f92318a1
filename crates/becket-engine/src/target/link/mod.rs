//! The target of an export of an NBD server: what a piece of a request is in the protocol, and what of
//! finished writes the server may have lost.
//! Each queue has a connection of its own ([`mod@line`]), which `core::linked`
//! drives and the [`dialer`] replaces when it breaks.
//!
//! **After a break** reads and writes without an answer are sent again. Written bytes that no flush has
//! covered may be lost with the server that had them, so one flush then fails, and only one: the bytes that
//! are written afterwards are none of its business (docs/decisions/0136). The connections of all queues break
//! together ([`group`], docs/decisions/0179).

mod dialer;
mod farewell;
mod group;
mod line;
mod questions;

use std::os::fd::BorrowedFd;
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};
use std::time::Instant;

use becket_image::{
    DirectIo,
    link::{LinkSource, channel::Earlier},
    zeroes::ZEROES,
};
use becket_uapi::nbd;
use io_uring::{opcode, squeue};
use rustix::io::Errno;

use self::dialer::Dialer;
pub use self::farewell::FAREWELL;
use self::farewell::Parking;
use self::group::Group;
pub(crate) use self::line::{Ask, Line, Parted, Way as LineWay, Why};
pub(crate) use self::questions::Questions;
use super::{
    contract::{Completed, Piece, SLOTS, Target},
    straight::Straight,
    syncs::Syncs,
};
use crate::{
    Op,
    governor::Governor,
    slot::{Slot, Step, Way},
};

/// An export of an NBD server.
#[derive(Debug)]
pub(crate) struct LinkTarget {
    source: Arc<LinkSource>,
    syncs: Syncs,
    dialer: Dialer,
    group: Arc<Group>,
    /// After how many breaks it was last said that all is reported that may be lost with them.
    reported: AtomicU32,
    /// What became of earlier workers' bytes is known.
    judged: AtomicBool,
    /// How many writes had finished when a queue ended whose connection had some that no flush has covered.
    /// Only who made it sees whether its server has ended since.
    unwatched: AtomicU64,
    parking: Parking,
    /// How many writes had finished when a queue ended over whose connection nothing can be flushed.
    adrift: AtomicU64,
}

impl LinkTarget {
    pub(super) fn new(source: LinkSource, queues: usize) -> LinkTarget {
        let source = Arc::new(source);
        let group = Arc::new(Group::new(queues));
        let dialer = Dialer::new(Arc::clone(&source), Arc::clone(&group));
        let (reported, judged) = (AtomicU32::new(u32::MAX), AtomicBool::new(false));
        let (unwatched, adrift) = (AtomicU64::new(0), AtomicU64::new(0));
        let (syncs, parking) = (Syncs::new(queues, None), Parking::default());
        LinkTarget { source, syncs, dialer, group, reported, judged, unwatched, parking, adrift }
    }

    pub(crate) fn dialer(&self) -> &Dialer {
        &self.dialer
    }

    pub(crate) fn group(&self) -> &Group {
        &self.group
    }

    /// A queue has a connection that it asked for after so many breaks. Says whether it may use it.
    #[must_use]
    pub(crate) fn joins(&self, queue: usize, breaks: u32) -> bool {
        let joins = self.group.joins(queue, breaks);
        if joins {
            self.dialer.rouse()
        } else {
            self.leaves(queue)
        }
        joins
    }

    /// A connection has broken: all queues give theirs up.
    pub(crate) fn broke(&self) {
        if self.group.broke() {
            self.dialer.rouse();
        }
    }

    /// A queue has no connection any more. If that was the last one of a break, one flush fails where
    /// written bytes may be lost: one that was under way, or else the next.
    pub(crate) fn leaves(&self, queue: usize) {
        if !self.group.leaves(queue) {
            return;
        }
        if self.is_at_risk() {
            self.syncs.lose_once(queue);
            tracing::warn!("written bytes that were not flushed may be lost with it: one flush fails");
        }
        self.group.ended();
        self.dialer.rouse();
    }

    /// A queue ends, and leaves its connection to its server.
    pub(crate) fn goes(&self, queue: usize, ending: bool) {
        if self.is_at_risk() {
            self.unwatched.fetch_max(self.syncs.written(), Ordering::AcqRel);
            // Of a device that ends each connection is asked itself.
            if !ending && self.group.doubt(queue).is_some() {
                self.adrift();
            }
        }
        self.leaves(queue);
    }

    /// A queue has ended and does not use its connection any more. It is kept where the last flush may need
    /// it; of a device that does not end now the latest one, which leads to the server that has the bytes of
    /// all before it, or else who makes connections finds out. Of others who made them hears.
    pub(crate) fn parts(&self, parted: Parted, ending: bool) {
        let needless = if !self.is_at_risk() {
            vec![parted]
        } else if parted.idle {
            let before = if ending { Vec::new() } else { self.parking.take() };
            self.parking.add(parted);
            before
        } else {
            self.adrift();
            vec![parted]
        };
        needless.into_iter().for_each(|parted| self.dialer.left(parted.socket));
    }

    /// No connection that is left to us can flush what has finished by now.
    fn adrift(&self) {
        self.adrift.fetch_max(self.syncs.written(), Ordering::AcqRel);
    }

    /// The last flush, where one is needed.
    fn flush_at_last(&self) -> Result<(), String> {
        if self.flush().is_none() || !self.is_at_risk() {
            return Ok(());
        }
        let until = Instant::now() + FAREWELL;
        let mut parked = self.parking.take();
        if !self.judged.load(Ordering::Acquire) {
            // No queue had a connection. A server before us may have written; who connects knows.
            let given = farewell::given(&self.source, until);
            let given = given.map_err(|why| format!("its server could not be asked to flush: {why}"))?;
            self.judge(0, given.earlier);
            parked.push(Parted { socket: given.socket, patience: given.patience, idle: true });
            if !self.is_at_risk() {
                return Ok(());
            }
        }
        if parked.is_empty() || self.syncs.lacks(self.adrift.load(Ordering::Acquire)) {
            return Err("no connection to its server was left to flush over".to_owned());
        }
        let covers = self.syncs.written();
        let failed = farewell::flush(&parked, until);
        let failed = failed.map_err(|error| format!("its server did not flush: {error}"))?;
        // What has failed is said by who asked for this.
        let _ = self.syncs.synced(covers, failed.map_or(Ok(()), Err));
        Ok(())
    }

    /// Is called in each turn of a queue: has the connector hear it when all is reported that may be lost.
    /// Until then it tells a successor of this worker that bytes may be lost.
    #[inline]
    pub(crate) fn looks(&self) {
        let breaks = self.group.breaks();
        if self.reported.load(Ordering::Relaxed) != breaks {
            self.reports(breaks);
        }
    }

    #[cold]
    fn reports(&self, breaks: u32) {
        // A connection that is there was made after the last break.
        if self.group.is_whole()
            && self.group.has_members()
            && self.judged.load(Ordering::Acquire)
            && !self.syncs.owes()
            && self.reported.swap(breaks, Ordering::Relaxed) != breaks
        {
            self.dialer.report(breaks);
        }
    }

    /// A queue's connection was in that doubt, and leads to a server that answers.
    pub(crate) fn settles(&self, queue: usize, doubt: u32) {
        if self.group.settles(queue, doubt) {
            self.dialer.rouse();
        }
    }

    fn has(&self, flag: u16) -> bool {
        self.source.agreed().has(flag)
    }

    /// Whether what it holds may be asked for, over a connection more.
    pub(crate) fn answers_questions(&self) -> bool {
        self.source.is_multi_conn()
    }

    /// Whether a durable write needs a flush behind it.
    pub(crate) fn lacks_durable_writes(&self) -> bool {
        !self.has(nbd::SEND_FUA) && self.has(nbd::SEND_FLUSH)
    }

    /// Takes in what a new connection's maker says of bytes that workers before this one have written.
    pub(crate) fn judge(&self, queue: usize, earlier: Earlier) {
        if self.judged.load(Ordering::Acquire) {
            let unwatched = self.unwatched.load(Ordering::Acquire);
            if earlier == Earlier::Unknown && self.is_writable() && self.syncs.lacks(unwatched) {
                tracing::warn!("what a client has written and not flushed may be lost: one flush fails");
                self.syncs.lose_once(queue);
            }
            return;
        }
        match earlier {
            Earlier::None => self.syncs.begins(),
            Earlier::Kept => {}
            Earlier::Unknown if self.is_writable() => self.syncs.lose_once(queue),
            Earlier::Unknown => {}
        }
        // Now there is something to report, or there is not. Queues that come here together say the same.
        self.judged.store(true, Ordering::Release);
    }

    /// Whether bytes would be lost with the server that were written and not flushed.
    pub(crate) fn is_at_risk(&self) -> bool {
        self.is_writable() && !self.source.is_durable() && self.syncs.is_at_risk()
    }

    /// The least that can be read of it, which shows that it is there.
    pub(crate) fn probe(&self) -> Ask {
        Ask { command: nbd::CMD_READ, len: self.source.agreed().smallest, ..Ask::default() }
    }

    /// Bytes of a transfer of so many, in units that the server takes.
    fn most(&self, len: u64) -> u64 {
        len.min(self.source.agreed().largest.into())
    }

    fn ask(&self, piece: &Piece, slot: &mut Slot) -> Result<Ask, Errno> {
        // The kernel's pages are not for a socket.
        if piece.carrier.buffer.is_some() {
            return Err(Errno::IO);
        }
        let mut ask =
            Ask { offset: piece.offset, from: slot.done, address: piece.carrier.address, ..Ask::default() };
        match slot.request.op {
            Op::Read => {
                slot.asked = self.most(slot.asked);
                ask.command = nbd::CMD_READ;
            }
            Op::Write { durable } => {
                slot.asked = self.most(slot.asked);
                ask.command = nbd::CMD_WRITE;
                ask.flags = if durable && self.has(nbd::SEND_FUA) { nbd::CMD_FLAG_FUA } else { 0 };
            }
            Op::Discard if self.has(nbd::SEND_TRIM) => ask.command = nbd::CMD_TRIM,
            Op::WriteZeroes { keep_allocated } if self.has(nbd::SEND_WRITE_ZEROES) => {
                ask.command = nbd::CMD_WRITE_ZEROES;
                ask.flags = if keep_allocated { nbd::CMD_FLAG_NO_HOLE } else { 0 };
            }
            Op::Discard | Op::WriteZeroes { .. } => {
                slot.asked = self.most(slot.asked).min(ZEROES.len() as u64);
                ask.command = nbd::CMD_WRITE;
                ask.address = ZEROES.as_ptr() as u64;
            }
            Op::Flush => return Err(Errno::INVAL),
        }
        // No longer than an operation, and that fits.
        ask.len = slot.asked as u32;
        Ok(ask)
    }

    /// What makes all finished writes durable; nothing where the server has no such thing.
    pub(crate) fn flush(&self) -> Option<Ask> {
        self.has(nbd::SEND_FLUSH).then(|| Ask { command: nbd::CMD_FLUSH, ..Ask::default() })
    }
}

impl Target for LinkTarget {
    /// The ends of the channel: no operation uses them, but they cross to the next server.
    fn descriptors(&self) -> [Option<BorrowedFd<'_>>; SLOTS] {
        [Some(self.source.asks()), Some(self.source.answers()), None]
    }

    fn crossing(&self) -> Vec<BorrowedFd<'_>> {
        [self.source.asks(), self.source.answers()].into_iter().chain(self.source.envelope()).collect()
    }

    fn is_writable(&self) -> bool {
        self.source.may_write()
    }

    fn operate(&self, piece: &Piece, slot: &mut Slot, _: &mut Governor) -> Result<Step, Errno> {
        slot.way = Way::Free;
        self.ask(piece, slot).map(Step::Ask)
    }

    fn completed(&self, slot: &mut Slot, result: i32) -> Result<Completed, Errno> {
        slot.absorb(result).map(|()| Completed::GoesOn)
    }

    fn straight(&self, _: &Piece, _: &Slot) -> Option<Straight> {
        None
    }

    fn syncs(&self) -> &Syncs {
        &self.syncs
    }

    fn sync(&self, _: u32) -> Step {
        self.flush().map_or_else(|| Step::Operate(nothing()), Step::Ask)
    }

    fn sync_now(&self) -> Result<(), Errno> {
        if self.flush().is_some() { self.dialer.flush() } else { Ok(()) }
    }

    fn farewell(&self) -> Result<(), String> {
        let flushed = self.flush_at_last();
        if self.syncs.owes() {
            let why = "its server, or who was connected to it, has ended since, and no flush has reported it";
            return Err(why.to_owned());
        }
        match self.syncs.failed() {
            Some(errno) => Err(format!("its server failed to flush: {errno}")),
            None => flushed,
        }
    }

    fn read_unit(&self, _: DirectIo) -> Option<u64> {
        Some(self.source.agreed().smallest.into()).filter(|unit| *unit > 1)
    }

    fn unit(&self, _: &Slot) -> u64 {
        self.source.agreed().smallest.into()
    }
}

fn nothing() -> squeue::Entry {
    opcode::Nop::new().build()
}
