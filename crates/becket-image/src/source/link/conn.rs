//! One connection whose user waits for each answer: reads, writes, and questions about what is allocated.
//! It believes no length of a server's that it did not ask for, and is of no use after an error.

use std::io::{self, IoSlice, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use becket_uapi::nbd::{self, Reply, Request, u32_at, u64_at};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use super::handshake::Agreed;
use super::helper;

/// Longest description of what is allocated, in bytes.
const LONGEST_STATUS: u64 = 1 << 20;
/// Longest message of an error.
const LONGEST_ERROR: u64 = 4 << 10;

/// A server that brings less than this, in bytes, while it is waited for brings nothing: it may not drip.
const PROGRESS: usize = 16 << 10;

/// A length in bytes, and its state (`becket_uapi::nbd::STATE_*`).
pub type State = (u32, u32);

/// A connection.
#[derive(Debug)]
pub struct Connection {
    stream: Steady,
    agreed: Agreed,
    cookie: u64,
    /// Another process goes on with it.
    passed_on: bool,
}

/// What the server answers, or why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// The server says so; the connection goes on.
    Said(io::Error),
    /// The connection is of no use any more.
    Broken(io::Error),
    /// There is no connection.
    Unmade(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Broken(match error.kind() {
            io::ErrorKind::WouldBlock => {
                io::Error::new(io::ErrorKind::TimedOut, "the NBD server does not answer")
            }
            io::ErrorKind::UnexpectedEof => {
                io::Error::new(io::ErrorKind::ConnectionReset, "the NBD server ended the connection")
            }
            _ => error,
        })
    }
}

fn lie(why: &'static str) -> Failure {
    Failure::Broken(io::Error::new(io::ErrorKind::InvalidData, why))
}

/// One piece of an answer.
enum Chunk {
    /// The data of a read follow as a whole: a simple reply.
    Whole,
    /// Payload of this kind and length.
    Of { kind: u16, len: u64, last: bool },
}

/// A socket whose other end has to go on at some pace.
#[derive(Debug)]
struct Steady {
    stream: UnixStream,
    patience: Option<Duration>,
    /// Since when it is waited for.
    since: Instant,
    /// How much went through since then.
    came: usize,
}

impl Steady {
    /// A request begins.
    fn begin(&mut self) {
        (self.since, self.came) = (Instant::now(), 0);
    }

    fn check(&self) -> io::Result<()> {
        let drips = self.patience.is_some_and(|patience| self.since.elapsed() > patience);
        if drips { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    }

    fn moved(&mut self, count: usize) -> usize {
        self.came += count;
        if self.came >= PROGRESS {
            self.begin();
        }
        count
    }

    fn send_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.check()?;
            match send(&self.stream, bytes, SendFlags::empty()) {
                Ok(done) => bytes = bytes.get(self.moved(done)..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Read for Steady {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.check()?;
        let count = self.stream.read(buf)?;
        Ok(self.moved(count))
    }
}

impl Connection {
    /// Over a connected socket, with which that was agreed on. A request fails while which the server is
    /// silent for that time, or drips.
    ///
    /// # Errors
    /// The socket takes no deadlines.
    pub fn new(socket: OwnedFd, agreed: Agreed, patience: Option<Duration>) -> io::Result<Connection> {
        let stream = UnixStream::from(socket);
        stream.set_read_timeout(patience)?;
        stream.set_write_timeout(patience)?;
        let stream = Steady { stream, patience, since: Instant::now(), came: 0 };
        Ok(Connection { stream, agreed, cookie: 0, passed_on: false })
    }

    /// The socket, as it was before. Every answer was waited for.
    pub(super) fn into_socket(mut self) -> io::Result<OwnedFd> {
        let socket = self.stream.stream.try_clone()?;
        socket.set_read_timeout(None)?;
        socket.set_write_timeout(None)?;
        self.passed_on = true;
        Ok(socket.into())
    }

    /// What was agreed on.
    pub fn agreed(&self) -> &Agreed {
        &self.agreed
    }

    /// Fills `buf` with the bytes from `offset` on. Both are multiples of [`Agreed::smallest`], and it is no
    /// longer than [`Agreed::largest`].
    pub(super) fn read(&mut self, buf: &mut [u8], offset: u64) -> Result<(), Failure> {
        let len = buf.len() as u64;
        self.ask(nbd::CMD_READ, 0, offset, len)?;
        // What a hole was read into before.
        buf.fill(0);
        let mut covered = 0;
        loop {
            let (kind, payload, last) = match self.chunk()? {
                Chunk::Whole => {
                    self.stream.read_exact(buf)?;
                    return Ok(());
                }
                Chunk::Of { kind, len, last } => (kind, len, last),
            };
            let mut head = [0; 12];
            match kind {
                nbd::CHUNK_OFFSET_DATA if payload > 8 => {
                    self.stream.read_exact(&mut head[..8])?;
                    let at = u64_at(&head, 0).and_then(|at| at.checked_sub(offset));
                    let part = at.and_then(|at| range_of(at, payload - 8, len));
                    let part = part.and_then(|part| buf.get_mut(part));
                    self.stream.read_exact(
                        part.ok_or_else(|| lie("the NBD server sent other bytes than it was asked for"))?,
                    )?;
                    covered += payload - 8;
                }
                nbd::CHUNK_OFFSET_HOLE if payload == 12 => {
                    self.stream.read_exact(&mut head)?;
                    let at = u64_at(&head, 0).and_then(|at| at.checked_sub(offset));
                    let hole = u64::from(u32_at(&head, 8).unwrap_or(0));
                    at.and_then(|at| range_of(at, hole, len))
                        .filter(|hole| !hole.is_empty())
                        .ok_or_else(|| lie("the NBD server sent other bytes than it was asked for"))?;
                    covered += hole;
                }
                // It may only end an answer, so that each chunk brings it nearer to its end.
                nbd::CHUNK_NONE if payload == 0 && last => {}
                _ => return Err(self.other(kind, payload, last)?),
            }
            if covered > len {
                return Err(lie("the NBD server sent some bytes twice"));
            }
            if last {
                return if covered == len { Ok(()) } else { Err(lie("the NBD server left bytes out")) };
            }
        }
    }

    /// What is allocated from `offset` on: lengths, each with its state (`STATE_*`), of which the last may
    /// reach beyond `len` bytes. Both are multiples of [`Agreed::smallest`], and there is a context for it.
    pub(super) fn status(&mut self, offset: u64, len: u64) -> Result<Vec<State>, Failure> {
        self.ask(nbd::CMD_BLOCK_STATUS, 0, offset, len)?;
        let mut found = Vec::new();
        loop {
            let Chunk::Of { kind, len: payload, last } = self.chunk()? else {
                return Err(lie("the NBD server answers a question with nothing"));
            };
            match kind {
                // There is one context, and so one such chunk.
                nbd::CHUNK_BLOCK_STATUS
                    if (12..=LONGEST_STATUS).contains(&payload) && payload % 8 == 4 && found.is_empty() =>
                {
                    let mut bytes = vec![0; usize::try_from(payload).unwrap_or(0)];
                    self.stream.read_exact(&mut bytes)?;
                    if u32_at(&bytes, 0) != self.agreed.allocation {
                        return Err(lie("the NBD server describes what it was not asked for"));
                    }
                    let extents = bytes.get(4..).unwrap_or_default().chunks_exact(8);
                    found.extend(extents.filter_map(|extent| Some((u32_at(extent, 0)?, u32_at(extent, 4)?))));
                }
                nbd::CHUNK_NONE if payload == 0 && last => {}
                _ => return Err(self.other(kind, payload, last)?),
            }
            if last {
                let fits = found.iter().all(|(len, _)| *len > 0);
                return if fits {
                    Ok(found)
                } else {
                    Err(lie("the NBD server describes ranges without bytes"))
                };
            }
        }
    }

    /// Writes bytes; see [`Connection::read`].
    pub(super) fn write(&mut self, bytes: &[u8], offset: u64) -> Result<(), Failure> {
        self.ask(nbd::CMD_WRITE, 0, offset, bytes.len() as u64)?;
        self.stream.send_all(bytes)?;
        self.done()
    }

    /// Has a range read as zeroes, which the server may leave without a place on its disk.
    pub(super) fn zero(&mut self, offset: u64, len: u64) -> Result<(), Failure> {
        self.ask(nbd::CMD_WRITE_ZEROES, 0, offset, len)?;
        self.done()
    }

    /// Brings what was written to the server's disk.
    pub(super) fn flush(&mut self) -> Result<(), Failure> {
        self.ask(nbd::CMD_FLUSH, 0, 0, 0)?;
        self.done()
    }

    /// Gives the image that was made for this connection its name: see [`helper`].
    pub(super) fn name(&mut self) -> Result<(), Failure> {
        self.ask(helper::CMD_NAME, 0, 0, 0)?;
        self.done()
    }

    /// Waits for an answer without data.
    fn done(&mut self) -> Result<(), Failure> {
        match self.chunk()? {
            Chunk::Whole | Chunk::Of { kind: nbd::CHUNK_NONE, len: 0, last: true } => Ok(()),
            Chunk::Of { kind, len, last } => Err(self.other(kind, len, last)?),
        }
    }

    fn ask(&mut self, command: u16, flags: u16, offset: u64, len: u64) -> Result<(), Failure> {
        self.cookie += 1;
        let request = Request { flags, command, cookie: self.cookie, offset, len };
        let mut bytes = [0; Request::SIZE];
        request.write(&mut bytes, false).ok_or_else(|| lie("a request is too long"))?;
        self.stream.begin();
        Ok(self.stream.send_all(&bytes)?)
    }

    /// The next header of the answer.
    fn chunk(&mut self) -> Result<Chunk, Failure> {
        let mut bytes = [0; Reply::CHUNK_SIZE];
        self.stream.read_exact(&mut bytes[..Reply::SIMPLE_SIZE])?;
        if Reply::size(&bytes) == Some(Reply::CHUNK_SIZE) {
            self.stream.read_exact(&mut bytes[Reply::SIMPLE_SIZE..])?;
        }
        let reply = Reply::read(&bytes).ok_or_else(|| lie("the NBD server does not speak its protocol"))?;
        let (Reply::Simple { cookie, .. } | Reply::Chunk { cookie, .. }) = reply;
        if cookie != self.cookie {
            return Err(lie("the NBD server answers what it was not asked"));
        }
        match reply {
            Reply::Simple { error: 0, .. } => Ok(Chunk::Whole),
            Reply::Simple { error, .. } => Err(Failure::Said(said(error))),
            Reply::Chunk { flags, kind, len, .. } => {
                Ok(Chunk::Of { kind, len, last: flags & nbd::CHUNK_DONE != 0 })
            }
        }
    }

    /// Reads a chunk that is not an answer: an error, where the server keeps to the protocol.
    fn other(&mut self, kind: u16, len: u64, mut last: bool) -> Result<Failure, Failure> {
        if kind & nbd::CHUNK_IS_ERROR == 0 || !(4..=LONGEST_ERROR).contains(&len) {
            return Err(lie("the NBD server sent a chunk that nobody asked for"));
        }
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        self.stream.read_exact(&mut bytes)?;
        let error = said(u32_at(&bytes, 0).unwrap_or(0));
        if !last {
            // What else there is of the answer would have to be read to go on.
            last = matches!(self.chunk()?, Chunk::Of { kind: nbd::CHUNK_NONE, len: 0, last: true });
        }
        Ok(if last { Failure::Said(error) } else { Failure::Broken(error) })
    }
}

/// Sends some of the bytes, by the call that a worker may make too.
fn send(stream: &UnixStream, bytes: &[u8], flags: SendFlags) -> io::Result<usize> {
    let flags = SendFlags::NOSIGNAL | flags;
    Ok(sendmsg(stream, &[IoSlice::new(bytes)], &mut SendAncillaryBuffer::default(), flags)?)
}

/// A range of a buffer of `all` bytes.
fn range_of(at: u64, len: u64, all: u64) -> Option<std::ops::Range<usize>> {
    let end = at.checked_add(len).filter(|end| *end <= all)?;
    Some(usize::try_from(at).ok()?..usize::try_from(end).ok()?)
}

/// The error that a number of the protocol stands for.
fn said(number: u32) -> io::Error {
    match i32::try_from(number) {
        // What a name that is taken gets: see `Connection::name`.
        Ok(libc::EEXIST) => io::Error::from_raw_os_error(libc::EEXIST),
        Ok(number) if nbd::ERRORS.contains(&number.unsigned_abs()) => io::Error::from_raw_os_error(number),
        _ => io::Error::from_raw_os_error(libc::EIO),
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Best effort: a server that hears it need not log a broken connection.
        let mut bytes = [0; Request::SIZE];
        let request = Request { command: nbd::CMD_DISC, ..Request::default() };
        if !self.passed_on && request.write(&mut bytes, false).is_some() {
            let _ = send(&self.stream.stream, &bytes, SendFlags::DONTWAIT);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// A server that says the same chunk again and again, whatever it is asked, until nobody listens.
    fn endless(chunk: &[u8]) -> Connection {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let agreed = Agreed { structured: true, allocation: Some(1), ..Agreed::default() };
        let chunk = chunk.to_vec();
        std::thread::spawn(move || while theirs.write_all(&chunk).is_ok() {});
        Connection::new(ours.into(), agreed, Some(Duration::from_secs(10))).unwrap()
    }

    #[test]
    fn a_server_that_drips_is_given_up() {
        let patience = Duration::from_millis(200);
        for reads in [true, false] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            std::thread::spawn(move || {
                let mut theirs = theirs;
                let mut drop = || if reads { theirs.write_all(&[0]) } else { theirs.read_exact(&mut [0]) };
                while drop().is_ok() {
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            let mut connection = Connection::new(ours.into(), Agreed::default(), Some(patience)).unwrap();
            connection.stream.begin();
            let began = Instant::now();
            let failed = match reads {
                true => connection.stream.read_exact(&mut vec![0; 4096]),
                false => connection.stream.send_all(&vec![0; 64 << 20]),
            };
            let failed = failed.unwrap_err();
            assert_eq!(failed.kind(), io::ErrorKind::WouldBlock, "{failed:?}");
            assert!(began.elapsed() < 5 * patience, "{:?}", began.elapsed());
        }
    }

    fn chunk(kind: u16, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; Reply::CHUNK_SIZE];
        let len = payload.len() as u64;
        Reply::Chunk { flags: 0, kind, cookie: 1, offset: 0, len }.write(&mut bytes, false).unwrap();
        bytes.extend(payload);
        bytes
    }

    #[test]
    fn an_answer_without_an_end_is_none() {
        let hole = [&0u64.to_be_bytes()[..], &0u32.to_be_bytes()].concat();
        let status = [1u32, 512, 0].map(u32::to_be_bytes).concat();
        let other = [2u32, 512, 0].map(u32::to_be_bytes).concat();
        let none = chunk(nbd::CHUNK_NONE, &[]);
        for words in [&none, &chunk(nbd::CHUNK_OFFSET_HOLE, &hole)] {
            let failed = endless(words).read(&mut [0; 4096], 0);
            assert!(matches!(failed, Err(Failure::Broken(_))), "{failed:?}");
        }
        for words in
            [&none, &chunk(nbd::CHUNK_BLOCK_STATUS, &status), &chunk(nbd::CHUNK_BLOCK_STATUS, &other)]
        {
            let failed = endless(words).status(0, 4096);
            assert!(matches!(failed, Err(Failure::Broken(_))), "{failed:?}");
        }
    }
}
