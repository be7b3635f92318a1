//! The NBD protocol (`doc/proto.md` of the NBD project): numbers, and the headers of requests and replies.
//! It never decides anything. Both sides of becket use it: exports answer, links ask.
//!
//! All numbers are in network byte order. Lengths and offsets are bytes.

/// The server's first word.
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Its second word, and the first of each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The first word of each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// The port of NBD, by IANA.
pub const PORT: u16 = 10809;

/// Flag of the greeting, and of the client's answer: fixed newstyle negotiation.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
/// The same: no zeroes follow the answer to [`OPT_EXPORT_NAME`].
pub const FLAG_NO_ZEROES: u16 = 1 << 1;

/// Choose an export, without a reply that can fail.
pub const OPT_EXPORT_NAME: u32 = 1;
/// End the negotiation.
pub const OPT_ABORT: u32 = 2;
/// List the exports.
pub const OPT_LIST: u32 = 3;
/// Go on over TLS.
pub const OPT_STARTTLS: u32 = 5;
/// Describe an export.
pub const OPT_INFO: u32 = 6;
/// Describe it, and begin the transmission.
pub const OPT_GO: u32 = 7;
/// Use structured replies.
pub const OPT_STRUCTURED_REPLY: u32 = 8;
/// List the metadata contexts of an export.
pub const OPT_LIST_META_CONTEXT: u32 = 9;
/// Choose metadata contexts.
pub const OPT_SET_META_CONTEXT: u32 = 10;
/// Use extended headers.
pub const OPT_EXTENDED_HEADERS: u32 = 11;

/// Reply to an option: done.
pub const REP_ACK: u32 = 1;
/// One export of a list.
pub const REP_SERVER: u32 = 2;
/// One piece of information about an export.
pub const REP_INFO: u32 = 3;
/// One metadata context.
pub const REP_META_CONTEXT: u32 = 4;
/// Replies with this bit are errors.
pub const REP_ERROR: u32 = 1 << 31;
/// The option is not known.
pub const REP_ERR_UNSUP: u32 = REP_ERROR | 1;
/// The server does not allow it.
pub const REP_ERR_POLICY: u32 = REP_ERROR | 2;
/// The option makes no sense.
pub const REP_ERR_INVALID: u32 = REP_ERROR | 3;
/// Not possible on this platform.
pub const REP_ERR_PLATFORM: u32 = REP_ERROR | 4;
/// TLS must be started first.
pub const REP_ERR_TLS_REQD: u32 = REP_ERROR | 5;
/// There is no such export.
pub const REP_ERR_UNKNOWN: u32 = REP_ERROR | 6;
/// The server is shutting down.
pub const REP_ERR_SHUTDOWN: u32 = REP_ERROR | 7;
/// The client must ask for the block size.
pub const REP_ERR_BLOCK_SIZE_REQD: u32 = REP_ERROR | 8;
/// The option is too long.
pub const REP_ERR_TOO_BIG: u32 = REP_ERROR | 9;
/// Extended headers must be chosen first.
pub const REP_ERR_EXT_HEADER_REQD: u32 = REP_ERROR | 10;

/// Information: size and transmission flags.
pub const INFO_EXPORT: u16 = 0;
/// Information: the export's name.
pub const INFO_NAME: u16 = 1;
/// Information: a description for people.
pub const INFO_DESCRIPTION: u16 = 2;
/// Information: the smallest, the best and the largest length of a request.
pub const INFO_BLOCK_SIZE: u16 = 3;

/// Transmission flag: the others mean something.
pub const HAS_FLAGS: u16 = 1 << 0;
/// The export cannot be written.
pub const READ_ONLY: u16 = 1 << 1;
/// [`CMD_FLUSH`] is known.
pub const SEND_FLUSH: u16 = 1 << 2;
/// [`CMD_FLAG_FUA`] is known.
pub const SEND_FUA: u16 = 1 << 3;
/// The export is on a disk that rotates.
pub const ROTATIONAL: u16 = 1 << 4;
/// [`CMD_TRIM`] is known.
pub const SEND_TRIM: u16 = 1 << 5;
/// [`CMD_WRITE_ZEROES`] is known.
pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
/// [`CMD_FLAG_DF`] is known.
pub const SEND_DF: u16 = 1 << 7;
/// A flush on one connection covers the finished writes of all.
pub const CAN_MULTI_CONN: u16 = 1 << 8;
/// [`CMD_CACHE`] is known.
pub const SEND_CACHE: u16 = 1 << 10;
/// [`CMD_FLAG_FAST_ZERO`] is known.
pub const SEND_FAST_ZERO: u16 = 1 << 11;

/// Read bytes.
pub const CMD_READ: u16 = 0;
/// Write bytes.
pub const CMD_WRITE: u16 = 1;
/// End the connection once all requests are answered.
pub const CMD_DISC: u16 = 2;
/// Make finished writes durable.
pub const CMD_FLUSH: u16 = 3;
/// The range's contents are no longer wanted.
pub const CMD_TRIM: u16 = 4;
/// Read a range into the server's cache.
pub const CMD_CACHE: u16 = 5;
/// The range reads as zeroes afterwards.
pub const CMD_WRITE_ZEROES: u16 = 6;
/// Describe a range by the chosen metadata contexts.
pub const CMD_BLOCK_STATUS: u16 = 7;

/// The write is durable before it is answered.
pub const CMD_FLAG_FUA: u16 = 1 << 0;
/// The zeroes stay allocated.
pub const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
/// The data come in one chunk.
pub const CMD_FLAG_DF: u16 = 1 << 2;
/// One extent of each metadata context is enough.
pub const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
/// Fail rather than write zeroes byte by byte.
pub const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;
/// The request's length is that of its payload (extended headers).
pub const CMD_FLAG_PAYLOAD_LEN: u16 = 1 << 5;

/// Flag of a chunk: the last of its reply.
pub const CHUNK_DONE: u16 = 1 << 0;
/// A chunk without payload.
pub const CHUNK_NONE: u16 = 0;
/// An offset of 8 bytes, and data.
pub const CHUNK_OFFSET_DATA: u16 = 1;
/// An offset of 8 bytes, and the length of a hole in 4.
pub const CHUNK_OFFSET_HOLE: u16 = 2;
/// Extents of a metadata context.
pub const CHUNK_BLOCK_STATUS: u16 = 5;
/// The same with lengths of 8 bytes.
pub const CHUNK_BLOCK_STATUS_EXT: u16 = 6;
/// Chunk types with this bit are errors.
pub const CHUNK_IS_ERROR: u16 = 1 << 15;
/// An error number of 4 bytes, and a message with its length of 2 bytes before it.
pub const CHUNK_ERROR: u16 = CHUNK_IS_ERROR | 1;
/// The same, and the offset of 8 bytes that it concerns.
pub const CHUNK_ERROR_OFFSET: u16 = CHUNK_IS_ERROR | 2;

/// The metadata context of what is allocated.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// Of [`BASE_ALLOCATION`]: nothing is allocated.
pub const STATE_HOLE: u32 = 1 << 0;
/// Of [`BASE_ALLOCATION`]: the range reads as zeroes.
pub const STATE_ZERO: u32 = 1 << 1;

/// Error numbers of replies; they are Linux's.
pub const ERRORS: [u32; 8] = [1, 5, 12, 22, 28, 75, 95, 108];

/// Longest name of an export, in bytes of UTF-8.
pub const LONGEST_NAME: usize = 4096;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
const SIMPLE_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;
const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;

/// A request's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Request {
    /// `CMD_FLAG_*`.
    pub flags: u16,
    /// `CMD_*`.
    pub command: u16,
    /// Comes back with the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Number of bytes; without extended headers 32 bits.
    pub len: u64,
}

impl Request {
    /// Bytes of a header.
    pub const SIZE: usize = 28;
    /// Bytes of an extended one.
    pub const EXTENDED_SIZE: usize = 32;

    /// Bytes of a header.
    pub const fn size(extended: bool) -> usize {
        if extended { Request::EXTENDED_SIZE } else { Request::SIZE }
    }

    /// Reads a header; `None` when it does not begin as one, or is cut short.
    #[inline]
    pub fn read(bytes: &[u8], extended: bool) -> Option<Request> {
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        if u32_at(bytes, 0)? != magic {
            return None;
        }
        let len = if extended { u64_at(bytes, 24)? } else { u64::from(u32_at(bytes, 24)?) };
        Some(Request {
            flags: u16_at(bytes, 4)?,
            command: u16_at(bytes, 6)?,
            cookie: u64_at(bytes, 8)?,
            offset: u64_at(bytes, 16)?,
            len,
        })
    }

    /// Writes a header; returns its length, or `None` without room for it or for its length in 32 bits.
    #[inline]
    pub fn write(&self, bytes: &mut [u8], extended: bool) -> Option<usize> {
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        put(bytes, 0, &magic.to_be_bytes())?;
        put(bytes, 4, &self.flags.to_be_bytes())?;
        put(bytes, 6, &self.command.to_be_bytes())?;
        put(bytes, 8, &self.cookie.to_be_bytes())?;
        put(bytes, 16, &self.offset.to_be_bytes())?;
        match extended {
            true => put(bytes, 24, &self.len.to_be_bytes())?,
            false => put(bytes, 24, &u32::try_from(self.len).ok()?.to_be_bytes())?,
        }
        Some(Request::size(extended))
    }
}

/// The header of a reply, or of one chunk of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// All of a reply, but for the data of a read that follow it.
    Simple {
        /// 0, or an error number.
        error: u32,
        /// The request's.
        cookie: u64,
    },
    /// One chunk of it, with its payload behind it.
    Chunk {
        /// `CHUNK_DONE`.
        flags: u16,
        /// `CHUNK_*`.
        kind: u16,
        /// The request's.
        cookie: u64,
        /// With extended headers: the request's offset, else 0.
        offset: u64,
        /// Bytes of the payload; without extended headers 32 bits.
        len: u64,
    },
}

impl Reply {
    /// Bytes of a simple reply's header, and the least that any header has.
    pub const SIMPLE_SIZE: usize = 16;
    /// Bytes of a chunk's header.
    pub const CHUNK_SIZE: usize = 20;
    /// Bytes of an extended one, the longest.
    pub const EXTENDED_SIZE: usize = 32;

    /// How long the header is that begins with these four bytes; `None` when none does.
    #[inline]
    pub fn size(bytes: &[u8]) -> Option<usize> {
        match u32_at(bytes, 0)? {
            SIMPLE_MAGIC => Some(Reply::SIMPLE_SIZE),
            CHUNK_MAGIC => Some(Reply::CHUNK_SIZE),
            EXTENDED_CHUNK_MAGIC => Some(Reply::EXTENDED_SIZE),
            _ => None,
        }
    }

    /// Reads a header; `None` when it does not begin as one, or is cut short.
    #[inline]
    pub fn read(bytes: &[u8]) -> Option<Reply> {
        let magic = u32_at(bytes, 0)?;
        if magic == SIMPLE_MAGIC {
            return Some(Reply::Simple { error: u32_at(bytes, 4)?, cookie: u64_at(bytes, 8)? });
        }
        let (flags, kind, cookie) = (u16_at(bytes, 4)?, u16_at(bytes, 6)?, u64_at(bytes, 8)?);
        match magic {
            CHUNK_MAGIC => {
                Some(Reply::Chunk { flags, kind, cookie, offset: 0, len: u32_at(bytes, 16)?.into() })
            }
            EXTENDED_CHUNK_MAGIC => {
                let (offset, len) = (u64_at(bytes, 16)?, u64_at(bytes, 24)?);
                Some(Reply::Chunk { flags, kind, cookie, offset, len })
            }
            _ => None,
        }
    }

    /// Writes a header, a chunk's extended or not; returns its length, or `None` without room for it or for
    /// its length in 32 bits.
    #[inline]
    pub fn write(&self, bytes: &mut [u8], extended: bool) -> Option<usize> {
        match *self {
            Reply::Simple { error, cookie } => {
                put(bytes, 0, &SIMPLE_MAGIC.to_be_bytes())?;
                put(bytes, 4, &error.to_be_bytes())?;
                put(bytes, 8, &cookie.to_be_bytes())?;
                Some(Reply::SIMPLE_SIZE)
            }
            Reply::Chunk { flags, kind, cookie, offset, len } => {
                let magic = if extended { EXTENDED_CHUNK_MAGIC } else { CHUNK_MAGIC };
                put(bytes, 0, &magic.to_be_bytes())?;
                put(bytes, 4, &flags.to_be_bytes())?;
                put(bytes, 6, &kind.to_be_bytes())?;
                put(bytes, 8, &cookie.to_be_bytes())?;
                if extended {
                    put(bytes, 16, &offset.to_be_bytes())?;
                    put(bytes, 24, &len.to_be_bytes())?;
                    return Some(Reply::EXTENDED_SIZE);
                }
                put(bytes, 16, &u32::try_from(len).ok()?.to_be_bytes())?;
                Some(Reply::CHUNK_SIZE)
            }
        }
    }
}

/// The error number of a reply for one of Linux: the protocol knows only [`ERRORS`].
pub fn error_number(errno: i32) -> u32 {
    match u32::try_from(errno) {
        Ok(errno) if ERRORS.contains(&errno) => errno,
        // EROFS is what EPERM is in the protocol, EDQUOT and EFBIG what ENOSPC is.
        Ok(30) => 1,
        Ok(122 | 27) => 28,
        _ => 5,
    }
}

/// The big-endian number at a place; `None` when it is cut short.
#[inline]
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The big-endian number at a place; `None` when it is cut short.
#[inline]
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The big-endian number at a place; `None` when it is cut short.
#[inline]
pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[inline]
fn put(bytes: &mut [u8], at: usize, what: &[u8]) -> Option<()> {
    bytes.get_mut(at..)?.get_mut(..what.len())?.copy_from_slice(what);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_lie_as_the_protocol_says() {
        let request = Request { flags: 1, command: 2, cookie: 3, offset: 4, len: 5 };
        let mut bytes = [0xff; 32];
        assert_eq!(request.write(&mut bytes, false), Some(28));
        let compact: [&[u8]; 6] = [
            &[0x25, 0x60, 0x95, 0x13],
            &[0, 1],
            &[0, 2],
            &3u64.to_be_bytes(),
            &4u64.to_be_bytes(),
            &[0, 0, 0, 5],
        ];
        assert_eq!(bytes[..28], compact.concat());
        assert_eq!(Request::read(&bytes, false), Some(request));
        assert_eq!(Request::read(&bytes, true), None, "another magic number");
        assert_eq!(Request::read(&bytes[..27], false), None);

        let long = Request { len: 1 << 40, ..request };
        assert_eq!(long.write(&mut bytes, false), None, "32 bits");
        assert_eq!(long.write(&mut bytes, true), Some(32));
        assert_eq!(
            (&bytes[..4], &bytes[24..]),
            (&[0x21, 0xe4, 0x1c, 0x71][..], &(1u64 << 40).to_be_bytes()[..])
        );
        assert_eq!(Request::read(&bytes, true), Some(long));
        assert_eq!(long.write(&mut bytes[..31], true), None);
    }

    #[test]
    fn replies_come_back_as_they_went() {
        let mut bytes = [0; 32];
        let chunk = |offset, len| Reply::Chunk { flags: 1, kind: 2, cookie: 3, offset, len };
        for (reply, extended, size) in [
            (Reply::Simple { error: 5, cookie: 7 }, false, 16),
            (chunk(0, 9), false, 20),
            (chunk(1 << 50, 1 << 40), true, 32),
        ] {
            assert_eq!(reply.write(&mut bytes, extended), Some(size));
            assert_eq!((Reply::size(&bytes), Reply::read(&bytes)), (Some(size), Some(reply)));
            assert_eq!(Reply::read(&bytes[..size - 1]), None);
            assert_eq!(reply.write(&mut [0; 15], extended), None);
        }
        assert_eq!((Reply::size(&[0; 32]), Reply::read(&[0; 32])), (None, None));
        assert_eq!(chunk(0, 1 << 32).write(&mut bytes, false), None);
    }

    #[test]
    fn the_protocol_has_few_errors() {
        let numbers =
            [libc::EROFS, libc::EDQUOT, libc::ENOSPC, libc::EOPNOTSUPP, libc::EUCLEAN, -5].map(error_number);
        assert_eq!(numbers, [1, 28, 28, 95, 5, 5]);
    }
}
