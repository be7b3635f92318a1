//! A queue's front towards a vring: takes requests from it, has the engine carry them out on the driver's
//! own memory, and gives them back. Runs in the worker; it makes no system call and allocates nothing after
//! its start. A driver that breaks the rules is not served any more, and nobody else notices.
//!
//! A tag's life: it is free; a chain is taken under it; the engine carries it out, and flushes if need be;
//! the chain is given back with its status, and the tag is free again. The driver is notified once for all
//! that end in one turn.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use becket_engine::{Answer, Data, GuestMemory, Io, Op, Port, Request, Token};
use rustix::io::Errno;
use tracing::warn;

use super::chain::{Broken, Chain};
use super::request::{self, FAILED, OK, Wanted};
use super::ring::Ring;

/// Kinds of tokens: the driver has made requests available, its event was read, it was notified, the end
/// of one that waits, another turn.
const KICKED: u8 = 0;
const TAKEN_BACK: u8 = 1;
const CALLED: u8 = 2;
const CANCEL: u8 = 3;
const RETURNED: u8 = 4;

/// What is known of a request that the engine carries out.
#[derive(Debug, Clone, Copy, Default)]
struct Tag {
    head: u16,
    /// Bytes of the driver's memory that it fills.
    fills: u32,
    status: u64,
    /// A flush must follow before it ends.
    durable: bool,
}

/// One vring.
pub(super) struct VringPort {
    kick: Arc<OwnedFd>,
    call: Option<Arc<OwnedFd>>,
    tether: Arc<OwnedFd>,
    memory: Arc<GuestMemory>,
    ring: Ring,
    chain: Chain,
    tags: Box<[Tag]>,
    free: Vec<u16>,
    serial: [u8; request::SERIAL],
    /// What changes bytes is on stable storage before it ends.
    durable: bool,
    again: bool,
    /// It is being notified, and must be once more.
    calling: bool,
    calls_again: bool,
    /// Requests may be waiting for a tag.
    starved: bool,
    /// How many requests may still be taken in this turn. Those that end at once need no tag for long, so
    /// that tags alone bound nothing.
    left: u16,
    /// Another turn is sure to follow.
    returning: bool,
    leaving: bool,
    broken: bool,
    /// Where the place of the next request is left for the front-end.
    base: Arc<AtomicU32>,
}

/// What a vring's port is made of.
pub(super) struct Parts {
    pub(super) kick: Arc<OwnedFd>,
    pub(super) call: Option<Arc<OwnedFd>>,
    pub(super) tether: Arc<OwnedFd>,
    pub(super) memory: Arc<GuestMemory>,
    pub(super) ring: Ring,
    pub(super) depth: u16,
    /// Most ranges of a request's data.
    pub(super) ranges: u16,
    pub(super) serial: [u8; request::SERIAL],
    pub(super) durable: bool,
    /// Another worker may have published what ended and notified nobody.
    pub(super) again: bool,
    pub(super) base: Arc<AtomicU32>,
}

impl VringPort {
    pub(super) fn new(parts: Parts) -> VringPort {
        let Parts { kick, call, tether, memory, ring, depth, ranges, serial, durable, again, base } = parts;
        let left = ring.count();
        VringPort {
            kick,
            call,
            tether,
            memory,
            ring,
            // And the header, and the status.
            chain: Chain::with_room(usize::from(ranges) + 2),
            tags: vec![Tag::default(); depth.into()].into_boxed_slice(),
            free: (0..depth).rev().collect(),
            serial,
            durable,
            again,
            calling: false,
            calls_again: false,
            starved: false,
            left,
            returning: false,
            leaving: false,
            broken: false,
            base,
        }
    }

    /// Takes the requests that there are, as long as tags are free: in one turn no more than the ring has
    /// room for. A driver that makes requests available as fast as they end keeps nobody else waiting.
    fn take(&mut self, io: &mut Io<'_>) {
        self.starved = false;
        while !self.leaving && !self.broken {
            let Some(tag) = self.free.last().copied() else {
                self.starved = true;
                return;
            };
            if self.left == 0 {
                return self.come_back(io);
            }
            // A request that is announced and then not there counts, too.
            self.left -= 1;
            match self.ring.take(&mut self.chain) {
                Ok(true) => {}
                Ok(false) if self.ring.listen() => continue,
                Ok(false) => return,
                Err(why) => return self.breaks(why),
            }
            if self.memory.is_lost() {
                return self.breaks(Broken("its memory was taken away"));
            }
            self.begin(io, tag);
        }
    }

    /// Has another turn follow, although nothing may come: the rest is taken then.
    #[cold]
    fn come_back(&mut self, io: &mut Io<'_>) {
        if std::mem::replace(&mut self.returning, true) {
            return;
        }
        // Nothing waits by this token, so only the answer to this comes, at once.
        let nothing = Token { kind: RETURNED, tag: Token::NO_TAG };
        self.broken |= io.cancel(nothing, RETURNED).is_err();
    }

    /// Begins the request of the chain under a free tag, or ends it.
    #[inline]
    fn begin(&mut self, io: &mut Io<'_>, tag: u16) {
        let head = self.chain.head;
        let Some((wanted, status)) = request::read(&self.memory, &mut self.chain, self.durable) else {
            return self.breaks(Broken("a request has no place for its status"));
        };
        let (fills, durable, begun) = match wanted {
            Wanted::Move { op, offset } => {
                let reads = op == Op::Read;
                let ranges = if reads { &self.chain.writable } else { &self.chain.readable };
                let fills =
                    if reads { ranges.iter().map(|range| range.len).fold(0, u32::saturating_add) } else { 0 };
                // A write is durable by itself.
                (fills, false, io.begin_in_guest(tag, op, offset, ranges))
            }
            Wanted::Range { op, offset, len, durable } => {
                io.begin(tag, Request { op, offset, len, data: Data::None });
                (0, durable, Ok(()))
            }
            Wanted::Serial => {
                let filled = request::put(&self.memory, &self.chain.writable, &self.serial);
                return self.end(Tag { head, fills: filled as u32, status, durable: false }, OK);
            }
            Wanted::Ends(with) => return self.end(Tag { head, fills: 0, status, durable: false }, with),
        };
        let request = Tag { head, fills, status, durable };
        match begun {
            Ok(()) => {
                self.free.pop();
                self.tags[usize::from(tag)] = request;
            }
            Err(_) => self.end(Tag { fills: 0, ..request }, FAILED),
        }
    }

    /// Flushes what a request has changed; it ends by what comes of that.
    #[cold]
    fn flush(&mut self, io: &mut Io<'_>, tag: u16) {
        self.tags[usize::from(tag)].durable = false;
        io.begin(tag, Request { op: Op::Flush, offset: 0, len: 0, data: Data::None });
    }

    /// Gives a request back.
    #[inline]
    fn end(&mut self, request: Tag, status: u8) {
        if !self.memory.write(request.status, &[status]) {
            return self.breaks(Broken("a request's status is not in the memory"));
        }
        let filled = if status == OK { request.fills } else { 0 };
        self.ring.give(request.head, filled.saturating_add(1));
    }

    /// Lets the driver see what has ended.
    fn publish(&mut self, io: &mut Io<'_>) {
        if self.ring.publish() {
            self.call(io);
        }
    }

    /// Notifies the driver, once at a time.
    fn call(&mut self, io: &mut Io<'_>) {
        if self.calling {
            self.calls_again = true;
            return;
        }
        match io.ring_bell(CALLED) {
            Ok(follows) => self.calling = follows,
            Err(_) => self.broken = true,
        }
    }

    #[cold]
    fn breaks(&mut self, why: Broken) {
        if !self.broken {
            warn!("a virtual machine's driver is not served any more: {why}");
        }
        self.broken = true;
    }

    fn close_if_idle(&self, io: &mut Io<'_>) {
        if self.leaving && self.free.len() == self.tags.len() {
            io.close();
        }
    }
}

impl Drop for VringPort {
    fn drop(&mut self) {
        self.base.store(self.ring.base(), Ordering::Release);
    }
}

impl Port for VringPort {
    fn descriptor(&self) -> &OwnedFd {
        &self.kick
    }

    fn tether(&self) -> Option<&OwnedFd> {
        Some(&self.tether)
    }

    fn bell(&self) -> Option<&OwnedFd> {
        self.call.as_deref()
    }

    fn memory(&self) -> Option<Arc<GuestMemory>> {
        Some(Arc::clone(&self.memory))
    }

    fn start(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        if std::mem::take(&mut self.again) {
            self.call(io);
        }
        // What is available already is taken at the end of this turn.
        io.await_events(KICKED)
    }

    fn completed(&mut self, io: &mut Io<'_>, token: Token, answer: Answer) {
        match token.kind {
            // The event is not read: each write to it is a token, whatever its count.
            KICKED if !answer.more && !self.leaving => self.broken |= io.await_events(KICKED).is_err(),
            CALLED => {
                self.calling = false;
                if std::mem::take(&mut self.calls_again) {
                    self.call(io);
                }
            }
            RETURNED => self.returning = false,
            _ => {}
        }
    }

    fn finished(&mut self, io: &mut Io<'_>, tag: u16, result: Result<u64, Errno>) {
        self.all_finished(io, &[(tag, result)]);
    }

    fn all_finished(&mut self, io: &mut Io<'_>, finished: &[(u16, Result<u64, Errno>)]) {
        for (tag, result) in finished {
            let request = self.tags.get(usize::from(*tag)).copied().unwrap_or_default();
            if request.durable && result.is_ok() {
                self.flush(io, *tag);
                continue;
            }
            let status = match result {
                Ok(_) => OK,
                Err(Errno::OPNOTSUPP) => request::UNSUPPORTED,
                Err(_) => FAILED,
            };
            self.end(request, status);
            self.free.push(*tag);
        }
        self.publish(io);
        if self.starved {
            self.take(io);
            self.publish(io);
        }
        self.close_if_idle(io);
    }

    fn leave(&mut self, io: &mut Io<'_>) {
        if self.leaving {
            return;
        }
        self.leaving = true;
        // A front-end that looks at the event finds what came from now on.
        let waits = |kind| Token { kind, tag: Token::NO_TAG };
        // If nothing was written to it, reading waits, whether it blocks or not.
        let ended = io
            .take_events(TAKEN_BACK)
            .and_then(|()| io.cancel(waits(TAKEN_BACK), CANCEL))
            .and_then(|()| io.cancel(waits(KICKED), CANCEL));
        self.broken |= ended.is_err();
        self.close_if_idle(io);
    }

    fn turn_ended(&mut self, io: &mut Io<'_>) {
        self.take(io);
        self.publish(io);
        // What is taken from now on, for tags that come free at once, counts for the next turn.
        self.left = self.ring.count();
    }
}
