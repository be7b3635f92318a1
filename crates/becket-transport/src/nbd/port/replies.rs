//! What a connection sends: the reply of each request or piece of one, in an order that its client can
//! follow. It receives nothing.

use becket_engine::{Io, Op};
use becket_uapi::nbd as uapi;
use rustix::io::Errno;

use super::state::{Asked, NbdPort, Piece};
use crate::nbd::requests::{Action, HEAD, PIECE, Part, piece};

/// The number of `base:allocation`.
const CONTEXT: u32 = 1;
/// The most ranges of one reply about the state of ranges.
const MOST_EXTENTS: usize = 1024;

impl NbdPort {
    /// Describes the ranges of a request by what the map says of them, and their server, which is asked once:
    /// what it has not said then is for the client's next request.
    pub(super) fn status(&mut self, io: &mut Io<'_>, index: u16, tag: u16, one: bool) -> Result<(), Errno> {
        let Some(Asked { cookie, offset, len, flushed: mut asked, .. }) = self.asked(index).copied() else {
            return Ok(());
        };
        let (style, each) = (self.style, self.style.extent_size());
        // Ranges are a multiple of nothing; one of 4 GiB does not fit 32 bits.
        let longest = if style.extended { u64::MAX } else { u64::from(u32::MAX) & !0xfff };
        let most = if one { 1 } else { MOST_EXTENTS };
        let (mut at, mut count) = (0, 0);
        while at < len && count < most {
            let (run, state) = io.status(tag, asked, offset + at, len - at);
            if state.is_none() && count > 0 {
                break;
            }
            if state.is_none() && !asked && self.asking < self.pieces.len() / 2 {
                return self.ask_status(io, index, tag);
            }
            // Where many wait already, there is none, either.
            asked |= state.is_none();
            let (hole, zero) = state.unwrap_or_default();
            let run = run.clamp(1, len - at).min(longest);
            let state = if hole { uapi::STATE_HOLE } else { 0 } | if zero { uapi::STATE_ZERO } else { 0 };
            let place = io.frame(tag).get_mut(HEAD + count * each..).ok_or(Errno::IO)?;
            style.extent(place, run, state).ok_or(Errno::IO)?;
            at += run;
            count += 1;
        }
        let mut head = [0; HEAD];
        let size = style.status_head(&mut head, cookie, offset, count, CONTEXT).ok_or(Errno::IO)?;
        let from = HEAD - size;
        io.frame(tag).get_mut(from..HEAD).ok_or(Errno::IO)?.copy_from_slice(&head[..size]);
        self.done(index);
        self.ready.push_back((tag, from, size + count * each));
        Ok(())
    }

    /// Has the server asked. Some tags are left for requests that do not wait for that.
    fn ask_status(&mut self, io: &mut Io<'_>, index: u16, tag: u16) -> Result<(), Errno> {
        let asked = self.asked(index).ok_or(Errno::IO)?;
        (asked.flushed, asked.pieces, asked.begun) = (true, 1, asked.len);
        let (offset, len) = (asked.offset, asked.len);
        self.pieces[usize::from(tag)] = Piece { asked: index, offset, len: 0 };
        self.asking += 1;
        io.ask_status(tag, offset, len);
        Ok(())
    }

    /// A piece has come to its end.
    pub(super) fn ended(
        &mut self,
        io: &mut Io<'_>,
        tag: u16,
        result: Result<u64, Errno>,
    ) -> Result<(), Errno> {
        let Piece { asked: index, offset, len } = self.pieces[usize::from(tag)];
        let Some(asked) = self.asked(index) else { return Err(Errno::IO) };
        asked.pieces = asked.pieces.saturating_sub(1);
        if let Err(errno) = result {
            asked.error.get_or_insert(errno);
        }
        let whole = asked.pieces == 0 && asked.begun == asked.len;
        let Asked { kind, cookie, offset: start, error, flushed, .. } = *asked;
        match kind {
            Action::Read => {
                let first = offset == start;
                let last = whole || (!self.style.structured && error.is_some());
                let ends = (first, last);
                let frame = io.frame(tag);
                let style = self.style;
                let part = match (result, style.structured) {
                    (Ok(_), _) => style.data(frame, cookie, (start, offset), len as usize, ends),
                    (Err(errno), true) => {
                        let error = uapi::error_number(errno.raw_os_error());
                        style.failed(frame, cookie, (start, offset), error, last)
                    }
                    (Err(errno), false) if first => {
                        style.plain(frame, cookie, start, uapi::error_number(errno.raw_os_error()))
                    }
                    // What has been sent cannot be taken back.
                    (Err(errno), false) => return Err(errno),
                };
                if last && self.long == Some(index) {
                    // It keeps its place until its last piece is being sent.
                    if let Some(asked) = self.asked(index) {
                        asked.flushed = true;
                    }
                } else if last {
                    self.done(index);
                }
                self.queue(tag, part)
            }
            Action::Status { one } => {
                self.asking = self.asking.saturating_sub(1);
                self.status(io, index, tag, one)
            }
            Action::Other { durable: true, .. } if error.is_none() && !flushed => {
                let Some(asked) = self.asked(index) else { return Err(Errno::IO) };
                (asked.flushed, asked.pieces) = (true, 1);
                io.begin(tag, piece(Action::Other { op: Op::Flush, durable: false }, 0, 0));
                Ok(())
            }
            _ if whole => self.answer(io, tag, index, error.map_or(Ok(()), Err)),
            _ => {
                self.free.push(tag);
                Ok(())
            }
        }
    }

    /// The last that is said of a request without data.
    pub(super) fn answer(
        &mut self,
        io: &mut Io<'_>,
        tag: u16,
        index: u16,
        result: Result<(), Errno>,
    ) -> Result<(), Errno> {
        let Some(Asked { cookie, offset, .. }) = self.asked(index).copied() else { return Err(Errno::IO) };
        let error = result.err().map_or(0, |errno| uapi::error_number(errno.raw_os_error()));
        let part = self.style.plain(io.frame(tag), cookie, offset, error);
        self.done(index);
        self.queue(tag, part)
    }

    /// A request has come to its end. One of which a piece is under way keeps its place: the piece's end must
    /// not be taken for that of another request's.
    fn done(&mut self, index: u16) {
        let ended = |asked: &mut Asked| asked.pieces == 0;
        if self.asked[usize::from(index)].take_if(ended).is_some() {
            self.free_asked.push(index);
        }
    }

    fn queue(&mut self, tag: u16, part: Option<Part>) -> Result<(), Errno> {
        let (from, len) = part.ok_or(Errno::IO)?;
        self.ready.push_back((tag, from, len));
        Ok(())
    }

    /// Sends what is ready, if nothing is being sent.
    pub(super) fn send(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        self.finish_long();
        if !self.sending.is_empty() || self.ready.is_empty() {
            return Ok(());
        }
        match self.long {
            None => self.sending.extend(self.ready.drain(..)),
            Some(long) => self.send_long(long),
        }
        if self.sending.is_empty() {
            return Ok(());
        }
        self.sent = self.sending.iter().map(|(_, _, len)| len).sum();
        io.send(&self.sending)
    }

    /// Takes what may be sent while a long read is answered: between its pieces nothing else.
    fn send_long(&mut self, long: u16) {
        let its = |(tag, ..): &(u16, usize, usize)| self.pieces[usize::from(*tag)].asked == long;
        if let Some(at) = self.ready.iter().position(its) {
            self.sending.extend(self.ready.remove(at));
            return;
        }
        let asked = self.asked.get(usize::from(long)).and_then(Option::as_ref);
        let begun =
            asked.is_some_and(|asked| asked.begun > 0 && (asked.begun > PIECE as u64 || asked.pieces == 0));
        if !begun {
            self.sending.extend(self.ready.drain(..));
        }
    }

    /// Once the last piece of a long read has been sent, the next one may begin.
    pub(super) fn finish_long(&mut self) {
        let Some(long) = self.long else { return };
        let asked = self.asked.get(usize::from(long)).and_then(Option::as_ref);
        let its = |(tag, ..): &(u16, usize, usize)| self.pieces[usize::from(*tag)].asked == long;
        let sent = !self.ready.iter().chain(&self.sending).any(its);
        if asked.is_none_or(|asked| asked.flushed && asked.pieces == 0) && sent {
            self.done(long);
            self.long = None;
        }
    }
}
