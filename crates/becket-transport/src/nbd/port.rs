//! A connection's front: receives requests into a staging buffer, makes the engine carry them out, and sends
//! many replies at once.
//! Runs in the worker; it makes no system call, allocates nothing after its start, opens nothing and knows no
//! format.
//!
//! A request takes one tag for each piece of its data. A piece's data lie in the tag's buffer, and the
//! head of its reply just before them. While there is no tag, no request is taken in: a client that sends
//! much, or reads nothing, keeps only itself waiting.

mod replies;
mod state;

use std::os::fd::OwnedFd;

use becket_engine::{Answer, Io, Op, Port, Token};
use becket_uapi::nbd as uapi;
use rustix::io::Errno;

pub(super) use self::state::NbdPort;
use self::state::{Asked, Inward, Piece};
use super::requests::{Action, HEAD, PIECE, STAGING, kind_of, payload, piece};

/// Kinds of tokens: a piece of a write has come; something was cancelled.
const RECEIVED: u8 = 0;
const CANCEL: u8 = 1;
/// The most bytes of a request that is refused which are passed over; a client that sends more is ended.
const MOST_PASSED_OVER: u64 = 64 << 20;
/// Data of a write of which so many bytes are missing are not received into the staging buffer.
const STRAIGHT: u64 = 16 << 10;

impl NbdPort {
    /// Takes in what is in the staging buffer, as far as there are tags.
    fn take_in(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        loop {
            let there = self.to - self.from;
            match self.inward {
                Inward::Nothing | Inward::Receiving => return Ok(()),
                Inward::Drain { asked, tag, left } => {
                    let some = there.min(usize::try_from(left).unwrap_or(usize::MAX));
                    self.from += some;
                    let left = left - some as u64;
                    self.inward = Inward::Drain { asked, tag, left };
                    if left > 0 {
                        return Ok(());
                    }
                    self.inward = Inward::Head;
                    let error = self.asked(asked).and_then(|asked| asked.error).unwrap_or(Errno::INVAL);
                    self.answer(io, tag, asked, Err(error))?;
                }
                Inward::Head => {
                    let size = uapi::Request::size(self.style.extended);
                    // Long reads that wait for their turn have no tag.
                    let full = self.free.is_empty() || self.free_asked.is_empty();
                    if there < size || full || self.leaving {
                        return Ok(());
                    }
                    let head = io.staging().get(self.from..self.from + size).ok_or(Errno::IO)?;
                    // A stream of which the place is lost is of no use.
                    let request = uapi::Request::read(head, self.style.extended).ok_or(Errno::PROTO)?;
                    self.from += size;
                    self.ask(io, &request)?;
                }
                Inward::Data { asked } => {
                    let left = self.asked(asked).map_or(0, |asked| asked.len - asked.begun);
                    // A short write is received together with what follows it.
                    if self.free.is_empty() || self.staging || (there == 0 && left < STRAIGHT) {
                        return Ok(());
                    }
                    self.take_data(io, asked)?;
                }
            }
        }
    }

    /// Takes in a header. There is a free tag, and a place for what is asked.
    fn ask(&mut self, io: &mut Io<'_>, request: &uapi::Request) -> Result<(), Errno> {
        let follow = payload(request, self.style.extended);
        if follow > MOST_PASSED_OVER {
            return Err(Errno::MSGSIZE);
        }
        let whole = self.style.structured && request.flags & uapi::CMD_FLAG_DF != 0;
        let kind = match kind_of(request, io.length(), self.allocation, self.punches) {
            // It must come in one chunk, and there is none that is so long.
            Ok(Action::Read) if whole && request.len > PIECE as u64 => Err(Errno::OVERFLOW),
            kind => kind,
        };
        if kind == Ok(Action::Disconnect) {
            self.inward = Inward::Nothing;
            return Ok(());
        }
        let index = self.free_asked.pop().ok_or(Errno::IO)?;
        let uapi::Request { cookie, offset, len, .. } = *request;
        let len = match kind {
            // A hint: what is asked for first is worth it.
            Ok(Action::Cache) => len.min(PIECE as u64),
            Ok(Action::Other { op: Op::Flush, .. }) => 0,
            _ => len,
        };
        let asked = Asked {
            kind: kind.unwrap_or(Action::Cache),
            cookie,
            offset,
            len,
            begun: 0,
            pieces: 0,
            error: kind.err(),
            flushed: false,
        };
        self.asked[usize::from(index)] = Some(asked);
        if let Err(errno) = kind {
            let tag = self.free.pop().ok_or(Errno::IO)?;
            // Not of a long read, between whose pieces nothing else may be sent.
            self.pieces[usize::from(tag)] = Piece { asked: index, offset, len: 0 };
            if follow > 0 {
                self.inward = Inward::Drain { asked: index, tag, left: follow };
                return Ok(());
            }
            return self.answer(io, tag, index, Err(errno));
        }
        match asked.kind {
            Action::Write { .. } => self.inward = Inward::Data { asked: index },
            Action::Status { one } => {
                let tag = self.free.pop().ok_or(Errno::IO)?;
                return self.status(io, index, tag, one);
            }
            Action::Read if !self.style.structured && len > PIECE as u64 => {
                self.longs.push_back(index);
                self.begin_long(io);
            }
            Action::Read => self.begin_pieces(io, index),
            Action::Cache | Action::Other { .. } => {
                let tag = self.free.pop().ok_or(Errno::IO)?;
                match asked.kind {
                    Action::Other { op: Op::Flush, .. } => self.begin(io, tag, index, 0, 0),
                    _ => self.begin(io, tag, index, offset, asked.len),
                }
            }
            Action::Disconnect => {}
        }
        Ok(())
    }

    /// Takes some of the data of a write into a tag of its own. There is a free one.
    fn take_data(&mut self, io: &mut Io<'_>, index: u16) -> Result<(), Errno> {
        let Some(asked) = self.asked(index) else { return Err(Errno::IO) };
        let (offset, left) = (asked.offset + asked.begun, asked.len - asked.begun);
        let len = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
        asked.begun += len as u64;
        asked.pieces += 1;
        let whole = asked.begun == asked.len;
        let tag = self.free.pop().ok_or(Errno::IO)?;
        self.pieces[usize::from(tag)] = Piece { asked: index, offset, len: len as u32 };
        let have = len.min(self.to - self.from);
        if have > 0 {
            io.unstage(tag, self.from, HEAD, have)?;
            self.from += have;
        }
        if have < len {
            io.receive_into(Token { kind: RECEIVED, tag }, HEAD + have, len - have)?;
            (self.inward, self.missing, self.receiving) = (Inward::Receiving, len - have, tag);
            return Ok(());
        }
        self.inward = if whole { Inward::Head } else { Inward::Data { asked: index } };
        self.begin_taken(io, tag);
        Ok(())
    }

    /// Begins a piece of a write that is there.
    fn begin_taken(&mut self, io: &mut Io<'_>, tag: u16) {
        let Piece { asked, offset, len } = self.pieces[usize::from(tag)];
        if let Some(kind) = self.asked(asked).map(|asked| asked.kind) {
            io.begin(tag, piece(kind, offset, len.into()));
        }
    }

    /// Begins one piece.
    fn begin(&mut self, io: &mut Io<'_>, tag: u16, index: u16, offset: u64, len: u64) {
        let Some(asked) = self.asked(index) else { return };
        asked.begun += len;
        asked.pieces += 1;
        let request = piece(asked.kind, offset, len);
        self.pieces[usize::from(tag)] =
            Piece { asked: index, offset, len: u32::try_from(len).unwrap_or(u32::MAX) };
        io.begin(tag, request);
    }

    /// Begins as many pieces of a read as there are tags. One has a tag at least.
    fn begin_pieces(&mut self, io: &mut Io<'_>, index: u16) {
        while let Some(asked) = self.asked(index).copied().filter(|asked| asked.begun < asked.len) {
            let Some(tag) = self.free.pop() else {
                // It goes on when a tag is free.
                if !self.longs.contains(&index) {
                    self.longs.push_back(index);
                }
                return;
            };
            let len = (asked.len - asked.begun).min(PIECE as u64);
            self.begin(io, tag, index, asked.offset + asked.begun, len);
        }
    }

    /// Goes on with requests that are longer than there was room for.
    fn begin_long(&mut self, io: &mut Io<'_>) {
        if self.style.structured {
            while let Some(index) = self.longs.front().copied().filter(|_| !self.free.is_empty()) {
                self.longs.pop_front();
                self.begin_pieces(io, index);
            }
            return;
        }
        // Of those with simple replies one at a time, and of that one piece at a time.
        if self.long.is_none() {
            self.long = self.longs.pop_front();
        }
        let Some(index) = self.long else { return };
        // Behind the reply that says that it has failed comes none of its data.
        let goes_on = |asked: &Asked| asked.pieces == 0 && !asked.flushed;
        let Some(asked) = self.asked(index).copied().filter(goes_on) else { return };
        if asked.begun < asked.len
            && let Some(tag) = self.free.pop()
        {
            let len = (asked.len - asked.begun).min(PIECE as u64);
            self.begin(io, tag, index, asked.offset + asked.begun, len);
        }
    }

    /// Receives more, if what is there does not suffice.
    fn receive(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        // What is passed over has its tag.
        let waits = match self.inward {
            Inward::Head | Inward::Data { .. } => !self.free.is_empty(),
            Inward::Drain { .. } => true,
            Inward::Receiving | Inward::Nothing => false,
        };
        let leaves = self.leaving && self.inward == Inward::Head;
        if self.staging || !waits || leaves {
            return Ok(());
        }
        if self.from > 0 {
            io.staging().copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        // A header that is there as a whole waits for a tag.
        if self.inward == Inward::Head && self.to >= uapi::Request::size(self.style.extended) {
            return Ok(());
        }
        io.receive_staged(self.to)?;
        self.staging = true;
        Ok(())
    }

    /// Ends without waiting for the client: it may neither send nor read.
    fn give_up(&mut self, io: &mut Io<'_>) {
        io.close();
        if std::mem::replace(&mut self.given_up, true) {
            return;
        }
        let mut waits = [None; 3];
        waits[0] = self.staging.then_some(Token::STAGED);
        waits[1] = (!self.sending.is_empty()).then_some(Token::SENT);
        if self.inward == Inward::Receiving {
            waits[2] = Some(Token { kind: RECEIVED, tag: self.receiving });
        }
        for token in waits.into_iter().flatten() {
            // Otherwise it ends when the client's connection does.
            let _ = io.cancel(token, CANCEL);
        }
    }

    /// Nothing of the client is under way.
    fn idle(&self) -> bool {
        let none = self.free.len() == self.pieces.len() && self.free_asked.len() == self.asked.len();
        none && !self.waits()
    }

    /// Something is under way that the client ends, by sending or by taking what is sent.
    fn waits(&self) -> bool {
        self.staging || !self.sending.is_empty() || self.inward == Inward::Receiving
    }

    fn pass_on(&mut self, io: &mut Io<'_>) {
        if !self.broken {
            self.finish_long();
            self.begin_long(io);
            let outcome = self.take_in(io).and_then(|()| self.send(io)).and_then(|()| self.receive(io));
            self.broken |= outcome.is_err();
        }
        if self.broken {
            return self.give_up(io);
        }
        if !self.idle() {
            return;
        }
        if self.inward == Inward::Nothing {
            io.close();
        } else if self.leaving {
            let unread = io.staging().get(self.from..self.to).unwrap_or_default().to_vec();
            // In the middle of a write its header is gone: such a one is received as a whole before.
            if matches!(self.inward, Inward::Head) {
                self.parting.put(unread);
            }
            io.close();
        }
    }
}

impl Port for NbdPort {
    fn descriptor(&self) -> &OwnedFd {
        &self.socket
    }

    fn tether(&self) -> Option<&OwnedFd> {
        Some(&self.tether)
    }

    fn start(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        let unread = std::mem::take(&mut self.unread);
        if unread.len() > STAGING {
            return Err(Errno::MSGSIZE);
        }
        io.staging().get_mut(..unread.len()).ok_or(Errno::IO)?.copy_from_slice(&unread);
        self.to = unread.len();
        self.take_in(io)?;
        self.receive(io)
    }

    fn completed(&mut self, io: &mut Io<'_>, token: Token, answer: Answer) {
        let result = answer.result;
        if self.leaving {
            self.parting.moved();
        }
        if token == Token::STAGED {
            self.staging = false;
            match usize::try_from(result) {
                // In the middle of a write nothing can be made of it.
                Ok(0) if matches!(self.inward, Inward::Data { .. } | Inward::Drain { .. }) => {
                    self.broken = true;
                }
                Ok(0) => self.inward = Inward::Nothing,
                Ok(len) => self.to += len,
                Err(_) if self.leaving && result == -libc::ECANCELED => {}
                Err(_) => self.broken = true,
            }
        } else if token == Token::SENT {
            self.broken |= usize::try_from(result) != Ok(self.sent);
            self.free.extend(self.sending.drain(..).map(|(tag, ..)| tag));
        } else if token.kind == RECEIVED {
            let tag = token.tag;
            let index = self.pieces[usize::from(tag)].asked;
            let all = usize::try_from(result) == Ok(self.missing);
            let Some(asked) = self.asked(index).filter(|_| all) else {
                // The stream has ended in the middle of a write.
                self.broken = true;
                return;
            };
            let whole = asked.begun == asked.len;
            self.inward = if whole { Inward::Head } else { Inward::Data { asked: index } };
            self.begin_taken(io, tag);
        }
    }

    fn finished(&mut self, io: &mut Io<'_>, tag: u16, result: Result<u64, Errno>) {
        self.broken |= self.ended(io, tag, result).is_err();
    }

    fn all_finished(&mut self, io: &mut Io<'_>, finished: &[(u16, Result<u64, Errno>)]) {
        for (tag, result) in finished {
            self.finished(io, *tag, *result);
        }
        // What has been begun at the end of a turn may have finished at once: no other turn may follow.
        self.broken |= self.send(io).is_err();
        if self.broken {
            self.give_up(io);
        }
    }

    fn leave(&mut self, io: &mut Io<'_>) {
        if self.leaving || self.broken {
            return;
        }
        self.leaving = true;
        // In the middle of a write its data are received first.
        if self.staging && self.inward == Inward::Head {
            self.broken |= io.cancel(Token::STAGED, CANCEL).is_err();
        }
    }

    fn turn_ended(&mut self, io: &mut Io<'_>) {
        self.pass_on(io);
        if self.leaving {
            self.parting.waits(self.waits());
        }
    }
}
