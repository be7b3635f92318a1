//! One queue's connection to an NBD server: what is to be sent, and what the bytes that come mean.
//! Makes no system call but for ending a connection, allocates nothing once it is made, and believes no
//! answer to what was not asked.
//!
//! Requests that gather in a turn go out by one operation. What comes is received into a staging buffer,
//! which holds many small answers; the rest of a long read goes straight to its request's memory. Answers
//! are simple replies: the data of a read lie behind its header.
//!
//! A request that is answered while it is still being sent is finished when that has ended: until then the
//! kernel reads its header and its memory.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

use becket_uapi::nbd::{self, Reply, Request};
use io_uring::{opcode, squeue, types::Fd};
use rustix::io::Errno;

use crate::{
    Error,
    memory::{Buffers, Vectors},
};

/// Bytes of the staging buffer.
const STAGING: usize = 128 << 10;
/// What is left of a read at least that goes straight to its memory, in bytes.
const DIRECT: u32 = 16 << 10;
/// The most requests that one operation sends.
const BATCH: usize = 64;
/// Bytes of a header's place.
const HEAD: usize = 32;
/// How often in a row a server may break the protocol before requests fail.
const LIES: u8 = 3;
/// How long is waited between two looks whether a server says anything.
pub(super) const LOOK: Duration = Duration::from_secs(5);
/// How long a server may say nothing while reads wait for it. No read takes so long; a flush may.
const SILENCE: Duration = Duration::from_secs(60);

/// A piece of a request as the server is asked for it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Ask {
    pub(crate) command: u16,
    pub(crate) flags: u16,
    /// First byte in the export.
    pub(crate) offset: u64,
    /// Number of bytes; 0 for a flush.
    pub(crate) len: u32,
    /// Bytes of the request before it.
    pub(crate) from: u64,
    /// Where its bytes are, or go to.
    pub(crate) address: u64,
}

/// How far a piece is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// There is none.
    Idle,
    /// It is to be sent.
    Queued,
    /// The kernel sends it.
    Sending,
    /// It was sent and is not answered.
    Sent,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    ask: Ask,
    stage: Stage,
    /// Counts what was asked under this tag.
    serial: u16,
    /// Its answer, while it is still being sent.
    answer: Option<i32>,
}

impl Piece {
    /// Whether the server has it, or gets it just now.
    fn is_sent(&self) -> bool {
        matches!(self.stage, Stage::Sending | Stage::Sent)
    }
}

/// What the kernel receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Receiving {
    Nothing,
    Staged,
    /// The rest of a read, into its memory.
    Direct(u32),
}

/// The connection.
#[derive(Debug)]
enum Link {
    /// None, and none was asked for.
    Down,
    /// One was asked for.
    Asked,
    Up(OwnedFd),
    /// It is of no use any more, but the kernel still has operations on it.
    Broken {
        socket: OwnedFd,
    },
}

/// A connection that its queue has left, and how long the user lets its server be away.
#[derive(Debug)]
pub(crate) struct Parted {
    pub(crate) socket: OwnedFd,
    pub(crate) patience: Option<Duration>,
    /// Nothing is unanswered over it.
    pub(crate) idle: bool,
}

/// Which of its operations has completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Sent,
    Received,
    /// Not over its connection: see `questions`.
    Answered,
}

/// Takes bytes of a read: its tag, their place in the request, and the bytes.
pub(crate) type Copy<'a> = dyn FnMut(u16, u64, &[u8]) -> Result<(), Errno> + 'a;

/// Why a connection is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// It ended or failed.
    Ended,
    /// It says nothing.
    Silent,
    /// Nobody waits any more for reads that it does not answer.
    Unwanted,
    /// The server does not keep to the protocol.
    Lies(&'static str),
}

/// See the module.
pub(crate) struct Line {
    link: Link,
    /// It never asked for a connection.
    fresh: bool,
    generation: u32,
    pieces: Box<[Piece]>,
    queue: VecDeque<u16>,
    /// Pieces that are not idle.
    busy: usize,
    heads: Buffers,
    vectors: Vectors,
    /// Tags that are being sent, and the bytes of them that are left.
    batch: Vec<u16>,
    sending: usize,
    /// Parts of the message that is being sent.
    parts: usize,
    staging: Buffers,
    /// Bytes in the staging buffer that were not looked at.
    start: usize,
    end: usize,
    receiving: Receiving,
    /// The read whose data come next, and how many bytes are left of them.
    payload: Option<(u16, u32)>,
    lies: u8,
    /// How long the user lets the server be away.
    patience: Option<Duration>,
    /// Bytes have moved since the last look, and the number of looks since they last did.
    moved: bool,
    quiet: u32,
    /// Who waits for a flush that belongs to no request.
    pub(crate) flushed: Option<std::sync::mpsc::SyncSender<Result<(), Errno>>>,
}

impl Line {
    /// For a queue of so many requests.
    pub(crate) fn new(requests: u16) -> Result<Line, Error> {
        // A flush and a probe belong to none of them.
        let count = usize::from(requests) + 2;
        let idle = Piece { ask: Ask::default(), stage: Stage::Idle, serial: 0, answer: None };
        Ok(Line {
            link: Link::Down,
            fresh: true,
            generation: 0,
            pieces: vec![idle; count].into_boxed_slice(),
            queue: VecDeque::with_capacity(count),
            busy: 0,
            heads: Buffers::small(count, HEAD)?,
            vectors: Vectors::new(2 * BATCH),
            batch: Vec::with_capacity(BATCH),
            sending: 0,
            parts: 0,
            staging: Buffers::small(1, STAGING)?,
            start: 0,
            end: 0,
            receiving: Receiving::Nothing,
            payload: None,
            lies: 0,
            patience: None,
            moved: false,
            quiet: 0,
            flushed: None,
        })
    }

    /// The tag of a flush that belongs to no request.
    pub(crate) fn own_tag(&self) -> u16 {
        // One behind those of requests.
        (self.pieces.len() - 2) as u16
    }

    /// The tag of a read that shows whether the server is there; its bytes are thrown away.
    pub(crate) fn probe_tag(&self) -> u16 {
        (self.pieces.len() - 1) as u16
    }

    /// Whether nothing is to be sent or answered.
    pub(crate) fn is_idle(&self) -> bool {
        self.busy == 0
    }

    /// Has a piece sent with the next operation; each tag has at most one.
    pub(crate) fn queue(&mut self, tag: u16, ask: Ask) {
        let Some(piece) = self.pieces.get_mut(usize::from(tag)) else { return };
        if piece.stage == Stage::Idle {
            self.busy += 1;
            *piece = Piece { ask, stage: Stage::Queued, serial: piece.serial.wrapping_add(1), answer: None };
            self.queue.push_back(tag);
        }
    }

    /// Whether a connection is to be asked for.
    #[inline]
    pub(crate) fn lacks(&self) -> bool {
        matches!(self.link, Link::Down) && self.busy > 0
    }

    /// One is asked for. Says whether it is the first.
    pub(crate) fn asks(&mut self) -> bool {
        self.link = Link::Asked;
        std::mem::take(&mut self.fresh)
    }

    pub(crate) fn is_asked(&self) -> bool {
        matches!(self.link, Link::Asked)
    }

    /// There is a connection, to a server that may be away as long as `patience`.
    pub(crate) fn connected(&mut self, socket: OwnedFd, patience: Option<Duration>) {
        self.link = Link::Up(socket);
        (self.patience, self.quiet) = (patience, 0);
        self.generation = self.generation.wrapping_add(1);
        (self.start, self.end, self.payload) = (0, 0, None);
    }

    /// There will be none for now.
    pub(crate) fn refused(&mut self) {
        self.link = Link::Down;
    }

    /// The operation that sends what has gathered, if one may begin now; `holds` keeps flushes back.
    pub(crate) fn next_send(&mut self, holds: bool) -> Option<squeue::Entry> {
        let Link::Up(socket) = &self.link else { return None };
        if self.sending > 0 || self.queue.is_empty() {
            return None;
        }
        let socket = Fd(socket.as_raw_fd());
        let mut parts = 0;
        for _ in 0..self.queue.len() {
            if self.batch.len() == BATCH {
                break;
            }
            let Some(tag) = self.queue.pop_front() else { break };
            let index = usize::from(tag);
            let Some(piece) = self.pieces.get_mut(index) else { continue };
            let Ask { command, flags, offset, len, address, .. } = piece.ask;
            if holds && command == nbd::CMD_FLUSH {
                self.queue.push_back(tag);
                continue;
            }
            let cookie = cookie(self.generation, piece.serial, tag);
            let request = Request { flags, command, cookie, offset, len: len.into() };
            let Some(size) = request.write(self.heads.slice(index), false) else { continue };
            piece.stage = Stage::Sending;
            self.batch.push(tag);
            self.vectors.set(parts, self.heads.address(index), size as u32);
            parts += 1;
            self.sending += size;
            if command == nbd::CMD_WRITE {
                self.vectors.set(parts, address as *mut u8, len);
                parts += 1;
                self.sending += len as usize;
            }
        }
        self.parts = parts;
        (parts > 0).then(|| send(socket, &mut self.vectors, parts))
    }

    /// A part of what is sent has gone, or none will; what is left is sent by another operation.
    pub(crate) fn sent(&mut self, result: i32) -> Result<Option<squeue::Entry>, Why> {
        let done = usize::try_from(result).unwrap_or(0);
        if done == 0 || done > self.sending {
            self.sending = 0;
            return Err(Why::Ended);
        }
        self.sending -= done;
        self.moved = true;
        if self.sending == 0 {
            return Ok(None);
        }
        let Link::Up(socket) = &self.link else {
            self.sending = 0;
            return Err(Why::Ended);
        };
        let socket = Fd(socket.as_raw_fd());
        self.parts = self.vectors.advance(done, self.parts);
        Ok(Some(send(socket, &mut self.vectors, self.parts)))
    }

    /// Finishes the sending of a batch: the next of its tags that was answered meanwhile, with the answer.
    pub(crate) fn after_sending(&mut self) -> Option<(u16, i32)> {
        if self.sending > 0 {
            return None;
        }
        while let Some(tag) = self.batch.pop() {
            let Some(piece) = self.pieces.get_mut(usize::from(tag)) else { continue };
            piece.stage = Stage::Sent;
            if let Some(answer) = piece.answer.take() {
                self.idle(tag);
                return Some((tag, answer));
            }
        }
        None
    }

    /// The operation that receives what comes next, if one is due.
    pub(crate) fn next_receive(&mut self) -> Option<squeue::Entry> {
        let Link::Up(socket) = &self.link else { return None };
        // What is only queued is not answered yet.
        if self.receiving != Receiving::Nothing || self.busy == self.queue.len() {
            return None;
        }
        let socket = Fd(socket.as_raw_fd());
        if let Some((tag, left)) = self.payload
            && left >= DIRECT
            && tag != self.probe_tag()
            && let Some(piece) = self.pieces.get(usize::from(tag))
        {
            self.receiving = Receiving::Direct(left);
            let address = piece.ask.address + u64::from(piece.ask.len - left);
            let receive = opcode::Recv::new(socket, address as *mut u8, left);
            return Some(receive.flags(libc::MSG_WAITALL).build());
        }
        // A header is never cut: what there is of one is moved to the beginning.
        self.staging.slice(0).copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let (address, len) = self.staging.part(0, self.end, STAGING - self.end)?;
        self.receiving = Receiving::Staged;
        Some(opcode::Recv::new(socket, address, len).build())
    }

    /// What was to be received has come, or never will.
    pub(crate) fn received(&mut self, result: i32) -> Result<(), Why> {
        let receiving = std::mem::replace(&mut self.receiving, Receiving::Nothing);
        let done = u32::try_from(result).unwrap_or(0);
        if done == 0 {
            return Err(Why::Ended);
        }
        self.moved = true;
        match (receiving, &mut self.payload) {
            (Receiving::Direct(wanted), Some((_, left))) if done <= wanted => *left -= done,
            (Receiving::Staged, _) if self.end + done as usize <= STAGING => self.end += done as usize,
            _ => return Err(Why::Ended),
        }
        Ok(())
    }

    /// The next request that is answered, with its result: the bytes that were moved, or a negative errno.
    pub(crate) fn answered(&mut self, copy: &mut Copy<'_>) -> Result<Option<(u16, i32)>, Why> {
        // What is behind the rest of a read comes once that is there.
        while self.receiving == Receiving::Nothing {
            if let Some((tag, left)) = self.payload {
                let there = (self.end - self.start).min(left as usize);
                let piece = self.pieces.get(usize::from(tag)).ok_or(Why::Lies("it answers nobody"))?;
                if there > 0 && tag == self.probe_tag() {
                    self.start += there;
                } else if there > 0 {
                    let from = piece.ask.from + u64::from(piece.ask.len - left);
                    let bytes = self.staging.slice(0).get(self.start..self.start + there);
                    copy(tag, from, bytes.unwrap_or_default())
                        .map_err(|_| Why::Lies("its data have no place"))?;
                    self.start += there;
                }
                let left = left - there as u32;
                self.payload = Some((tag, left));
                if left > 0 {
                    return Ok(None);
                }
                self.payload = None;
                if let Some(answer) = self.finished(tag, 0) {
                    return Ok(Some(answer));
                }
                continue;
            }
            let (start, end) = (self.start, self.end);
            let bytes = self.staging.slice(0).get(start..end).unwrap_or_default();
            if bytes.len() < Reply::SIMPLE_SIZE {
                return Ok(None);
            }
            let Some(Reply::Simple { error, cookie }) = Reply::read(bytes) else {
                return Err(Why::Lies("it does not answer by simple replies"));
            };
            self.start += Reply::SIMPLE_SIZE;
            let tag = cookie as u16;
            let known = self.pieces.get(usize::from(tag)).filter(|piece| {
                cookie == self::cookie(self.generation, piece.serial, tag)
                    && piece.is_sent()
                    && piece.answer.is_none()
            });
            let piece = known.ok_or(Why::Lies("it answers what it was not asked"))?;
            match (error, piece.ask.command) {
                (0, nbd::CMD_READ) => self.payload = Some((tag, piece.ask.len)),
                // It shuts down: another one may do better.
                (108, _) => return Err(Why::Ended),
                _ => {
                    if let Some(answer) = self.finished(tag, error) {
                        return Ok(Some(answer));
                    }
                }
            }
        }
        Ok(None)
    }

    /// A request is answered: with what, unless it is still being sent.
    fn finished(&mut self, tag: u16, error: u32) -> Option<(u16, i32)> {
        self.lies = 0;
        let piece = self.pieces.get_mut(usize::from(tag))?;
        let result = match i32::try_from(error) {
            Ok(0) => piece.ask.len as i32,
            Ok(error @ 1..=4095) => -error,
            _ => -libc::EIO,
        };
        if piece.stage == Stage::Sending {
            piece.answer = Some(result);
            return None;
        }
        self.idle(tag);
        Some((tag, result))
    }

    fn idle(&mut self, tag: u16) {
        if let Some(piece) = self.pieces.get_mut(usize::from(tag)) {
            piece.stage = Stage::Idle;
            self.busy -= 1;
        }
    }

    /// Gives the connection up, if there is one: the operations that the kernel has on it, which are to be
    /// canceled. The server hears that nothing follows. It carries out what it has, and who made the
    /// connection waits for its end before there is another one: no request is sent again that may still
    /// land afterwards.
    pub(crate) fn breaks(&mut self, why: Why) -> Option<[Option<Way>; 2]> {
        if !matches!(self.link, Link::Up(_)) {
            return None;
        }
        let ways = self.lets_go();
        if let Link::Broken { socket } = &self.link {
            // Nothing can go wrong with a socket of ours.
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Write);
        }
        if let Why::Lies(_) = why {
            self.lies = self.lies.saturating_add(1);
        }
        Some(ways)
    }

    /// Gives the connection up without ending it, for others may have it, too: the operations that the
    /// kernel has on it, which are to be canceled.
    pub(crate) fn lets_go(&mut self) -> [Option<Way>; 2] {
        let Link::Up(_) = &self.link else { return [None; 2] };
        if let Link::Up(socket) = std::mem::replace(&mut self.link, Link::Down) {
            self.link = Link::Broken { socket };
        }
        let receives = self.receiving != Receiving::Nothing;
        [(self.sending > 0).then_some(Way::Sent), receives.then_some(Way::Received)]
    }

    /// Has the kernel end the operations on a connection that was given up, where they cannot be canceled.
    pub(crate) fn shuts(&self) {
        if let Link::Broken { socket } = &self.link {
            // Nothing can go wrong with a socket of ours; one that is not connected any more has no
            // operations.
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
        }
    }

    /// Is called every [`LOOK`]: whether the server has said nothing for so long that another connection
    /// is to be tried. Where the user has set no time, only reads are held against it.
    pub(crate) fn is_silent(&mut self) -> bool {
        let waits = matches!(self.link, Link::Up(_)) && self.busy > self.queue.len();
        if std::mem::take(&mut self.moved) || !waits {
            self.quiet = 0;
            return false;
        }
        self.quiet = self.quiet.saturating_add(1);
        let limit = self.patience.unwrap_or(SILENCE).min(SILENCE);
        let is_read = |piece: &Piece| piece.ask.command == nbd::CMD_READ;
        // What it waits for may have been asked just before the first of these looks.
        LOOK * self.quiet.saturating_sub(1) >= limit
            && (self.patience.is_some() || self.pieces.iter().filter(|piece| piece.is_sent()).all(is_read))
    }

    /// Whether the server has a piece that it has not answered and of whose tag `is` says so.
    pub(crate) fn has_sent(&self, is: impl Fn(u16) -> bool) -> bool {
        (0..).zip(&self.pieces).any(|(tag, piece)| piece.is_sent() && is(tag))
    }

    /// Whether no connection does any good: the server has broken the protocol on each, several times.
    pub(crate) fn is_doomed(&mut self) -> bool {
        let doomed = self.lies >= LIES;
        if doomed {
            self.lies = 0;
        }
        doomed
    }

    /// The connection that was given up, once the kernel has nothing of it any more. What was not answered is
    /// queued then, to be sent again.
    pub(crate) fn settles(&mut self) -> Option<Parted> {
        let quiet = self.sending == 0 && self.batch.is_empty() && self.receiving == Receiving::Nothing;
        if !quiet || !matches!(self.link, Link::Broken { .. }) {
            return None;
        }
        let Link::Broken { socket } = std::mem::replace(&mut self.link, Link::Down) else { return None };
        // Nothing is with the server that it has not answered, and no part of an answer is here.
        let idle = self.busy == self.queue.len() && self.payload.is_none() && self.start == self.end;
        self.payload = None;
        for tag in 0..self.pieces.len() {
            if let Some(piece) = self.pieces.get_mut(tag).filter(|piece| piece.stage == Stage::Sent) {
                piece.stage = Stage::Queued;
                self.queue.push_back(tag as u16);
            }
        }
        Some(Parted { socket, patience: self.patience, idle })
    }

    /// Takes back the next request that is not with the kernel and of which `is` says so.
    pub(crate) fn take_back(&mut self, is: impl Fn(&Ask, u16) -> bool) -> Option<u16> {
        let is = |tag: &u16| self.pieces.get(usize::from(*tag)).is_some_and(|piece| is(&piece.ask, *tag));
        let at = self.queue.iter().position(is)?;
        let tag = self.queue.remove(at)?;
        self.idle(tag);
        Some(tag)
    }
}

impl Line {
    /// For [`Line::take_back`].
    pub(crate) fn is_flush(ask: &Ask, _: u16) -> bool {
        ask.command == nbd::CMD_FLUSH
    }
}

/// What comes back with an answer. Answers of an earlier connection have another one.
fn cookie(generation: u32, serial: u16, tag: u16) -> u64 {
    u64::from(generation) << 32 | u64::from(serial) << 16 | u64::from(tag)
}

fn send(socket: Fd, vectors: &mut Vectors, parts: usize) -> squeue::Entry {
    // A broken connection is an error and no signal.
    let flags = (libc::MSG_WAITALL | libc::MSG_NOSIGNAL).cast_unsigned();
    opcode::SendMsg::new(socket, vectors.message(parts)).flags(flags).build()
}

#[cfg(test)]
#[path = "line_tests.rs"]
mod tests;
