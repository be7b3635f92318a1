//! What NBD requests want of the engine, and the bytes of their replies.
//! It makes no system call and allocates nothing.

use becket_engine::{Data, Op, Request};
use becket_uapi::nbd as uapi;
use rustix::io::Errno;

use super::handshake::LARGEST;

/// Bytes of a tag's buffer: longer requests are carried out in pieces of that.
pub(super) const PIECE: usize = 256 << 10;
/// Bytes of the staging buffer, and the most that may be unread when a connection is handed over.
pub(super) const STAGING: usize = 64 << 10;
/// Bytes before a tag's buffer: the longest header of a reply, an offset, and what aligns the buffer.
pub(super) const HEAD: usize = 64;

/// What a request is to the port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Data for the client.
    Read,
    /// Data from the client, which follow the header.
    Write { durable: bool },
    /// The backing is read, and nothing is sent.
    Cache,
    /// One operation of the engine without data, and a flush after it if it is to be durable.
    Other { op: Op, durable: bool },
    /// What the map says of the range.
    Status { one: bool },
    /// No more requests follow.
    Disconnect,
}

/// What a header asks for. For an error the number of bytes that follow it and must be passed over is known
/// by [`payload`].
/// The backing `punches` holes: only that zeroes a range fast for certain.
pub(super) fn kind_of(
    request: &uapi::Request,
    size: u64,
    allocation: bool,
    punches: bool,
) -> Result<Action, Errno> {
    let known = match request.command {
        uapi::CMD_READ => uapi::CMD_FLAG_DF,
        uapi::CMD_WRITE => uapi::CMD_FLAG_PAYLOAD_LEN,
        uapi::CMD_WRITE_ZEROES => uapi::CMD_FLAG_NO_HOLE | uapi::CMD_FLAG_FAST_ZERO,
        uapi::CMD_BLOCK_STATUS => uapi::CMD_FLAG_REQ_ONE,
        _ => 0,
    };
    // A client may ask for durability with every command.
    if request.flags & !(known | uapi::CMD_FLAG_FUA) != 0 {
        return Err(Errno::INVAL);
    }
    let durable = request.flags & uapi::CMD_FLAG_FUA != 0;
    let mut slow = false;
    let kind = match request.command {
        uapi::CMD_DISC => return Ok(Action::Disconnect),
        uapi::CMD_FLUSH => return Ok(Action::Other { op: Op::Flush, durable: false }),
        uapi::CMD_READ => Action::Read,
        uapi::CMD_WRITE => Action::Write { durable },
        uapi::CMD_CACHE => Action::Cache,
        uapi::CMD_TRIM => Action::Other { op: Op::Discard, durable },
        uapi::CMD_WRITE_ZEROES => {
            let keep_allocated = request.flags & uapi::CMD_FLAG_NO_HOLE != 0;
            slow = request.flags & uapi::CMD_FLAG_FAST_ZERO != 0 && (keep_allocated || !punches);
            Action::Other { op: Op::WriteZeroes { keep_allocated }, durable }
        }
        uapi::CMD_BLOCK_STATUS if allocation => {
            Action::Status { one: request.flags & uapi::CMD_FLAG_REQ_ONE != 0 }
        }
        _ => return Err(Errno::INVAL),
    };
    let inside = request.offset.checked_add(request.len).is_some_and(|end| end <= size);
    let moves = matches!(kind, Action::Read | Action::Write { .. });
    match kind {
        _ if request.len == 0 => Err(Errno::INVAL),
        Action::Write { .. } | Action::Other { op: Op::WriteZeroes { .. }, .. } if !inside => {
            Err(Errno::NOSPC)
        }
        _ if !inside => Err(Errno::INVAL),
        _ if slow => Err(Errno::OPNOTSUPP),
        _ if moves && request.len > u64::from(LARGEST) => Err(Errno::OVERFLOW),
        kind => Ok(kind),
    }
}

/// How many bytes follow a header.
pub(super) fn payload(request: &uapi::Request, extended: bool) -> u64 {
    match request.command {
        uapi::CMD_WRITE => request.len,
        // No other command has any that we know of.
        _ if extended && request.flags & uapi::CMD_FLAG_PAYLOAD_LEN != 0 => request.len,
        _ => 0,
    }
}

/// The engine's request for a piece of one of a client.
pub(super) fn piece(kind: Action, offset: u64, len: u64) -> Request {
    let (op, data) = match kind {
        Action::Write { durable } => (Op::Write { durable }, Data::Buffer),
        Action::Other { op, .. } => (op, Data::None),
        _ => (Op::Read, Data::Buffer),
    };
    Request { op, offset, len, data }
}

/// How replies are written for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Style {
    pub(super) structured: bool,
    pub(super) extended: bool,
}

/// The part of a frame that is a reply: its first byte and its length.
pub(super) type Part = (usize, usize);

impl Style {
    /// A reply without data, or an error's. It is written at the beginning of a frame.
    pub(super) fn plain(self, frame: &mut [u8], cookie: u64, offset: u64, error: u32) -> Option<Part> {
        if !self.structured {
            return Some((0, uapi::Reply::Simple { error, cookie }.write(frame, false)?));
        }
        let (kind, len) = if error == 0 { (uapi::CHUNK_NONE, 0) } else { (uapi::CHUNK_ERROR, 6) };
        let head = uapi::Reply::Chunk { flags: uapi::CHUNK_DONE, kind, cookie, offset, len };
        let head = head.write(frame, self.extended)?;
        if error == 0 {
            return Some((0, head));
        }
        // The number, and the length of a message, which there is none of.
        let body = frame.get_mut(head..)?.first_chunk_mut::<6>()?;
        *body = [0; 6];
        body[..4].copy_from_slice(&error.to_be_bytes());
        Some((0, head + 6))
    }

    /// The head of a piece of a read, written so that the data follow it. `offset` is the piece's own,
    /// `start` the request's; `first` and `last` piece of the request.
    pub(super) fn data(
        self,
        frame: &mut [u8],
        cookie: u64,
        (start, offset): (u64, u64),
        len: usize,
        (first, last): (bool, bool),
    ) -> Option<Part> {
        if !self.structured {
            if !first {
                return Some((HEAD, len));
            }
            let from = HEAD - uapi::Reply::SIMPLE_SIZE;
            uapi::Reply::Simple { error: 0, cookie }.write(frame.get_mut(from..)?, false)?;
            return Some((from, uapi::Reply::SIMPLE_SIZE + len));
        }
        let size = if self.extended { uapi::Reply::EXTENDED_SIZE } else { uapi::Reply::CHUNK_SIZE };
        let from = HEAD - 8 - size;
        let chunk = uapi::Reply::Chunk {
            flags: if last { uapi::CHUNK_DONE } else { 0 },
            kind: uapi::CHUNK_OFFSET_DATA,
            cookie,
            offset: start,
            len: 8 + len as u64,
        };
        chunk.write(frame.get_mut(from..)?, self.extended)?;
        frame.get_mut(HEAD - 8..)?.get_mut(..8)?.copy_from_slice(&offset.to_be_bytes());
        Some((from, size + 8 + len))
    }

    /// A piece of a read that has failed.
    pub(super) fn failed(
        self,
        frame: &mut [u8],
        cookie: u64,
        (start, offset): (u64, u64),
        error: u32,
        last: bool,
    ) -> Option<Part> {
        let flags = if last { uapi::CHUNK_DONE } else { 0 };
        let chunk =
            uapi::Reply::Chunk { flags, kind: uapi::CHUNK_ERROR_OFFSET, cookie, offset: start, len: 14 };
        let head = chunk.write(frame, self.extended)?;
        let body = frame.get_mut(head..)?.get_mut(..14)?;
        body[..4].copy_from_slice(&error.to_be_bytes());
        body[4..6].fill(0);
        body[6..].copy_from_slice(&offset.to_be_bytes());
        Some((0, head + 14))
    }

    /// The beginning of a reply about the state of ranges, behind which are so many bytes of descriptors; how
    /// long one of these is.
    pub(super) fn status_head(
        self,
        frame: &mut [u8],
        cookie: u64,
        start: u64,
        extents: usize,
        context: u32,
    ) -> Option<usize> {
        let each = self.extent_size();
        let (kind, before) =
            if self.extended { (uapi::CHUNK_BLOCK_STATUS_EXT, 8) } else { (uapi::CHUNK_BLOCK_STATUS, 4) };
        let len = (before + extents * each) as u64;
        let chunk = uapi::Reply::Chunk { flags: uapi::CHUNK_DONE, kind, cookie, offset: start, len };
        let head = chunk.write(frame, self.extended)?;
        let rest = frame.get_mut(head..)?;
        rest.get_mut(..4)?.copy_from_slice(&context.to_be_bytes());
        if self.extended {
            rest.get_mut(4..8)?.copy_from_slice(&(extents as u32).to_be_bytes());
        }
        Some(head + before)
    }

    /// Bytes of the description of one range.
    pub(super) fn extent_size(self) -> usize {
        if self.extended { 16 } else { 8 }
    }

    /// Writes that of a range.
    pub(super) fn extent(self, place: &mut [u8], len: u64, state: u32) -> Option<()> {
        if self.extended {
            place.get_mut(..8)?.copy_from_slice(&len.to_be_bytes());
            place.get_mut(8..16)?.copy_from_slice(&u64::from(state).to_be_bytes());
        } else {
            place.get_mut(..4)?.copy_from_slice(&u32::try_from(len).ok()?.to_be_bytes());
            place.get_mut(4..8)?.copy_from_slice(&state.to_be_bytes());
        }
        Some(())
    }
}
