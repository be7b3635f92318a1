//! A queue's front towards a FUSE connection: reads requests, makes the engine carry them out, writes the
//! answers.
//! Runs in the worker; it makes no system call, allocates nothing after its start, opens nothing and knows no
//! format.
//!
//! A tag's life: it is free; a read brings a request into its frame; the engine, or the [`Tree`], makes the
//! answer there; a write hands that over; it is free again. A request's header is as long as a WRITE's, so
//! the data of a WRITE lie in the aligned buffer behind it, from where they go to the backing as they are.
//!
//! The connection's requests are one line for all its descriptors. A read of an empty line comes back at once
//! (the engine ensures that), so one poll waits for the line to fill, and then as many reads are queued as
//! were of use the last time, with the next poll behind them: the kernel carries them out in that order, in
//! one system call.
//!
//! Source: Documentation/filesystems/fuse/fuse.rst and include/uapi/linux/fuse.h of the kernel.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use becket_engine::{Answer, Data, Io, Op, Port, Request, Token};
use becket_uapi::fuse as uapi;
use rustix::io::Errno;
use uapi::Wire;

use super::tree::Tree;

/// Kinds of tokens: a poll, a read of a request, a write of an answer, the end of one that waits.
const POLL: u8 = 0;
const RECEIVE: u8 = 1;
const REPLY: u8 = 2;
const CANCEL: u8 = 3;

/// Bytes before a tag's buffer.
pub(super) const HEAD: usize = uapi::WRITE_HEAD;
/// Where an answer begins, so that its data lie in the buffer.
const ANSWER: usize = HEAD - uapi::OutHeader::SIZE;
/// The kernel takes no larger one for an error.
const LARGEST_ERRNO: i32 = 511;

/// What is known of a request that the engine carries out.
#[derive(Debug, Clone, Copy, Default)]
struct Tag {
    unique: u64,
    opcode: u32,
}

/// One queue of a connection.
pub(super) struct FusePort {
    device: Arc<OwnedFd>,
    tether: Arc<OwnedFd>,
    tree: Arc<Tree>,
    /// The backing can give ranges back.
    discards: bool,
    tags: Box<[Tag]>,
    free: Vec<u16>,
    line: Incoming,
    /// No more requests are read.
    leaving: bool,
    ended: bool,
}

/// What is known of the line of requests.
#[derive(Debug, Default)]
struct Incoming {
    /// There is something in it.
    filled: bool,
    /// A poll is with the kernel.
    polled: bool,
    /// Reads that are with the kernel, and that were queued together with them.
    reading: u16,
    asked: u16,
    /// How many of these have brought a request.
    brought: u16,
    /// How many to queue next time.
    next: u16,
}

impl Incoming {
    /// A read has come back.
    fn read(&mut self, brought: bool) {
        self.reading = self.reading.saturating_sub(1);
        self.brought += u16::from(brought);
        if self.reading == 0 {
            let all = self.brought == self.asked;
            self.next = if all { self.asked.saturating_mul(2) } else { self.brought.max(1) };
        }
    }
}

impl FusePort {
    pub(super) fn new(
        device: Arc<OwnedFd>,
        tether: Arc<OwnedFd>,
        tree: Arc<Tree>,
        depth: u16,
        discards: bool,
    ) -> FusePort {
        FusePort {
            device,
            tether,
            tree,
            discards,
            tags: vec![Tag::default(); depth.into()].into_boxed_slice(),
            free: (0..depth).rev().collect(),
            line: Incoming { next: 1, ..Incoming::default() },
            leaving: false,
            ended: false,
        }
    }

    /// Queues reads when there is something to read, and the poll that waits for more.
    fn go_on(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        if self.line.reading > 0 {
            return Ok(());
        }
        if self.line.filled {
            let count = self.line.next.min(u16::try_from(self.free.len()).unwrap_or(u16::MAX));
            if count == 0 {
                // Goes on when a tag is free again.
                return Ok(());
            }
            self.line = Incoming { filled: false, asked: count, brought: 0, reading: 0, ..self.line };
            for _ in 0..count {
                let Some(tag) = self.free.pop() else { break };
                io.receive(Token { kind: RECEIVE, tag })?;
                self.line.reading += 1;
            }
        }
        if !self.line.polled {
            io.await_readable(POLL)?;
            self.line.polled = true;
        }
        Ok(())
    }

    /// Takes in what a read has brought.
    fn received(&mut self, io: &mut Io<'_>, tag: u16, result: i32) {
        self.line.read(result > 0);
        match result.saturating_neg() {
            ..0 => return self.begin(io, tag, result.unsigned_abs() as usize),
            // Another server took it, or the requester has given up already; or no request is waited for any
            // more.
            libc::EAGAIN | libc::ECANCELED => {}
            libc::ENOENT | libc::EINTR | libc::EIO => self.line.filled = true,
            // The connection is gone.
            _ => self.ended = true,
        }
        self.free.push(tag);
    }

    /// Begins the request in a tag's frame, or answers it.
    fn begin(&mut self, io: &mut Io<'_>, tag: u16, len: usize) {
        let message = io.frame(tag).get(..len.min(HEAD)).unwrap_or_default();
        let Some(header) = uapi::InHeader::read(message) else { return self.free.push(tag) };
        let mut body = [0; HEAD - uapi::InHeader::SIZE];
        let rest = &message[uapi::InHeader::SIZE..];
        body[..rest.len()].copy_from_slice(rest);
        let body = &body[..rest.len()];
        self.tags[usize::from(tag)] = Tag { unique: header.unique, opcode: header.opcode };
        if matches!(header.opcode, uapi::FUSE_FORGET | uapi::FUSE_BATCH_FORGET) {
            return self.free.push(tag);
        }
        let (length, read_only) = (io.length(), io.is_read_only());
        match request_of(&header, body, &self.tree, length, self.discards) {
            Some(Ok(Wanted::Request(request))) => io.begin(tag, request),
            Some(Ok(Wanted::Nothing)) => self.finished(io, tag, Ok(0)),
            Some(Err(errno)) => self.reply(io, tag, Err(errno)),
            None => {
                let room = io.frame(tag).get_mut(HEAD..).unwrap_or_default();
                let answer = self.tree.answer(&header, body, (length, read_only), room);
                self.reply(io, tag, answer);
            }
        }
    }

    /// Answers a tag's request, with so many bytes of its buffer.
    fn reply(&mut self, io: &mut Io<'_>, tag: u16, answer: Result<usize, Errno>) {
        let unique = self.tags.get(usize::from(tag)).map_or(0, |tag| tag.unique);
        let (error, data) = match answer {
            Ok(data) => (0, data),
            Err(errno) if (1..=LARGEST_ERRNO).contains(&errno.raw_os_error()) => (-errno.raw_os_error(), 0),
            Err(_) => (-Errno::IO.raw_os_error(), 0),
        };
        let len = uapi::OutHeader::SIZE + data;
        let header = uapi::OutHeader { len: u32::try_from(len).unwrap_or(0), error, unique };
        let place = io.frame(tag).get_mut(ANSWER..).unwrap_or_default();
        let written = header.write(place).ok_or(Errno::IO);
        if written.and_then(|()| io.reply(Token { kind: REPLY, tag }, ANSWER, len)).is_err() {
            self.free.push(tag);
        }
    }

    fn pass_on(&mut self, io: &mut Io<'_>) {
        if self.leaving {
            // Each tag is free: what was read is answered, and no read is with the kernel.
            self.ended |= self.free.len() == self.tags.len();
        } else if !self.ended && self.go_on(io).is_err() {
            self.ended = true;
        }
        if self.ended {
            io.close();
        }
    }
}

/// What a request wants of the engine.
#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    Request(Request),
    /// It has no byte to move.
    Nothing,
}

/// `None` for a request that is not about the image's bytes.
fn request_of(
    header: &uapi::InHeader,
    body: &[u8],
    tree: &Tree,
    length: u64,
    discards: bool,
) -> Option<Result<Wanted, Errno>> {
    let parsed = match header.opcode {
        uapi::FUSE_READ | uapi::FUSE_WRITE => transfer(header, body, tree, length),
        uapi::FUSE_FSYNC => {
            Ok(Wanted::Request(Request { op: Op::Flush, offset: 0, len: 0, data: Data::None }))
        }
        uapi::FUSE_FALLOCATE => fallocate(header, body, tree, length, discards),
        _ => return None,
    };
    Some(parsed)
}

fn transfer(header: &uapi::InHeader, body: &[u8], tree: &Tree, length: u64) -> Result<Wanted, Errno> {
    let range = tree.range(header.nodeid, length).ok_or(Errno::NOENT)?;
    let asked = uapi::TransferIn::read(body).ok_or(Errno::INVAL)?;
    let left = range.len.saturating_sub(asked.offset);
    let write = header.opcode == uapi::FUSE_WRITE;
    let len = u64::from(asked.size);
    if write && len > left {
        // A file that cannot become longer.
        return Err(Errno::NOSPC);
    }
    let len = len.min(left);
    if len == 0 {
        return Ok(Wanted::Nothing);
    }
    let durable = asked.flags & libc::O_DSYNC.cast_unsigned() != 0;
    let op = if write { Op::Write { durable } } else { Op::Read };
    Ok(Wanted::Request(Request { op, offset: range.start + asked.offset, len, data: Data::Buffer }))
}

/// A hole reads as zeroes, so punching one zeroes. If the backing cannot punch holes this is refused, because
/// it is not meant for writing zeroes: a program that needs them gets the error and writes them.
fn fallocate(
    header: &uapi::InHeader,
    body: &[u8],
    tree: &Tree,
    length: u64,
    discards: bool,
) -> Result<Wanted, Errno> {
    const KEEP: u32 = libc::FALLOC_FL_KEEP_SIZE.cast_unsigned();
    const PUNCH: u32 = libc::FALLOC_FL_PUNCH_HOLE.cast_unsigned() | KEEP;
    const ZERO: u32 = libc::FALLOC_FL_ZERO_RANGE.cast_unsigned();
    let range = tree.range(header.nodeid, length).ok_or(Errno::NOENT)?;
    let asked = uapi::FallocateIn::read(body).ok_or(Errno::INVAL)?;
    let left = range.len.saturating_sub(asked.offset);
    let keep_allocated = match asked.mode {
        PUNCH if discards => false,
        mode if mode & !KEEP == ZERO => true,
        _ => return Err(Errno::OPNOTSUPP),
    };
    if asked.length > left && asked.mode & KEEP == 0 {
        return Err(Errno::NOSPC);
    }
    let len = asked.length.min(left);
    if len == 0 {
        return Ok(Wanted::Nothing);
    }
    let op = Op::WriteZeroes { keep_allocated };
    Ok(Wanted::Request(Request { op, offset: range.start + asked.offset, len, data: Data::None }))
}

impl Port for FusePort {
    fn descriptor(&self) -> &OwnedFd {
        &self.device
    }

    fn tether(&self) -> Option<&OwnedFd> {
        Some(&self.tether)
    }

    fn start(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        self.go_on(io)
    }

    fn completed(&mut self, io: &mut Io<'_>, token: Token, answer: Answer) {
        match token.kind {
            POLL => {
                self.line.polled = false;
                let events = i32::from(libc::POLLIN);
                if answer.result > 0 && answer.result & events != 0 {
                    self.line.filled = true;
                } else if answer.result != -libc::ECANCELED {
                    self.ended = true;
                }
            }
            RECEIVE => self.received(io, token.tag, answer.result),
            CANCEL => {}
            // An answer that is not waited for any more does not matter, and the kernel has dealt with one
            // that it rejects.
            _ => self.free.push(token.tag),
        }
    }

    fn finished(&mut self, io: &mut Io<'_>, tag: u16, result: Result<u64, Errno>) {
        let opcode = self.tags.get(usize::from(tag)).map_or(0, |tag| tag.opcode);
        let answer = result.and_then(|bytes| match opcode {
            uapi::FUSE_READ => usize::try_from(bytes).map_err(|_| Errno::IO),
            uapi::FUSE_WRITE => {
                let size = u32::try_from(bytes).map_err(|_| Errno::IO)?;
                let place = io.frame(tag).get_mut(HEAD..).ok_or(Errno::IO)?;
                uapi::WriteOut { size, padding: 0 }.write(place).ok_or(Errno::IO)?;
                Ok(uapi::WriteOut::SIZE)
            }
            _ => Ok(0),
        });
        self.reply(io, tag, answer);
    }

    fn leave(&mut self, io: &mut Io<'_>) {
        if self.leaving || self.ended {
            return;
        }
        self.leaving = true;
        // Tags that carry a request are not found, and go on.
        let reads = (0..).zip(&self.tags).map(|(tag, _)| Token { kind: RECEIVE, tag });
        let poll = Token { kind: POLL, tag: Token::NO_TAG };
        let cancelled = reads.chain([poll]).try_for_each(|token| io.cancel(token, CANCEL));
        self.ended |= cancelled.is_err();
    }

    fn turn_ended(&mut self, io: &mut Io<'_>) {
        self.pass_on(io);
    }
}

#[cfg(test)]
#[path = "port_tests.rs"]
mod tests;
