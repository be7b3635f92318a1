//! An export as an image's bytes: what a process reads that may wait for the server.
//! After a break it connects once more, and never goes on with an export that has become another.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use becket_uapi::nbd;

use super::channel;
use super::conn::{Connection, Failure, State};
use super::dial::{Dialed, dial};
use super::error::DialError;
use super::handshake::{Agreed, Wanted};
use super::pool::{self, Pool, SHORT};
use super::tls::Trust;
use super::uri::{Endpoint, Server};
use crate::{Reach, ReadAt};

/// The longest read at once, in bytes.
const PIECE: u64 = 4 << 20;
/// What is asked about begins and ends with blocks of this, in bytes, or with the export.
const BLOCK: u64 = 4096;
/// How often a read is begun again on another connection.
const ATTEMPTS: u32 = 3;

/// Where connections come from.
#[derive(Debug)]
pub(super) enum From {
    /// It makes them itself, to a server that may take that long for an answer.
    Server(Endpoint, Option<Trust>, Duration),
    /// Another process makes them: see [`channel`].
    Channel(OwnedFd),
}

/// Reads one export, for all who share it.
#[derive(Debug)]
pub(super) struct LinkReader {
    from: From,
    agreed: Agreed,
    connections: Pool,
}

impl LinkReader {
    /// Connects to an export.
    pub(super) fn connect(
        endpoint: &Endpoint,
        wanted: Wanted,
        trust: Option<&Trust>,
        patience: Duration,
    ) -> Result<LinkReader, DialError> {
        let (first, agreed, _) = pool::first(endpoint, wanted, trust, patience)?;
        let connections = Pool::of(first, pool::most(endpoint, &agreed));
        let from = From::Server(endpoint.clone(), trust.cloned(), patience);
        Ok(LinkReader { from, agreed, connections })
    }

    /// One that asks another process for its connections, the first of them when it is used.
    pub(super) fn of_channel(channel: OwnedFd, agreed: Agreed) -> LinkReader {
        LinkReader { from: From::Channel(channel), agreed, connections: Pool::of(Vec::new(), 1) }
    }

    pub(super) fn agreed(&self) -> &Agreed {
        &self.agreed
    }

    /// Ends the use of its connection: a server may take one client. What another process can go on with is
    /// returned: one of workers' kind, which no relay of this process is part of.
    pub(super) fn let_go(&self) -> Option<OwnedFd> {
        let connection = self.connections.let_go()?;
        match &self.from {
            From::Server(Endpoint { server: Server::Tcp { .. } | Server::Unix(_), tls: None, .. }, ..)
                if !self.agreed.structured =>
            {
                connection.into_socket().ok()
            }
            _ => None,
        }
    }

    /// Makes another connection; `only`: there is none.
    fn again(&self, only: bool) -> io::Result<Connection> {
        match &self.from {
            From::Server(endpoint, trust, patience) => {
                let wanted = Wanted { structured: self.agreed.structured, ..Wanted::default() };
                let within = if only { *patience } else { SHORT.min(*patience) };
                let dialed = dial(endpoint, wanted, trust.as_ref(), within);
                let Dialed { socket, agreed, .. } = dialed.map_err(|error| match error {
                    DialError::Io(error) => error,
                    error => io::Error::other(error),
                })?;
                if agreed != self.agreed {
                    return Err(io::Error::other("the export has become another meanwhile"));
                }
                Connection::new(socket, agreed, Some(*patience))
            }
            From::Channel(channel) => {
                let socket = channel::ask(channel, false, None)?.socket;
                Connection::new(socket, self.agreed, None)
            }
        }
    }

    /// Has something done over a connection, or over another one where that is broken.
    fn with<T>(&self, mut what: impl FnMut(&mut Connection) -> Result<T, Failure>) -> io::Result<T> {
        let mut last = io::Error::from_raw_os_error(libc::EIO);
        for _ in 0..ATTEMPTS {
            match self.connections.with(|only| self.again(only), &mut what) {
                Ok(done) => return Ok(done),
                Err(Failure::Said(error) | Failure::Unmade(error)) => return Err(error),
                // One that lies, or does not answer, does so again.
                Err(Failure::Broken(error))
                    if matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::TimedOut) =>
                {
                    return Err(error);
                }
                Err(Failure::Broken(error)) => last = error,
            }
        }
        Err(last)
    }

    /// What the server says of a range, or of its beginning: lengths of at most `len` bytes together, each
    /// with its state. Nothing where it says no such thing.
    ///
    /// # Errors
    /// It cannot be asked, or says nonsense.
    pub(super) fn states(&self, offset: u64, len: u64) -> io::Result<Vec<State>> {
        // Whole blocks are asked about: there are servers that end if a range begins within one.
        let unit = BLOCK.max(self.agreed.smallest.into());
        let (before, rest) = (offset % unit, self.agreed.size.saturating_sub(offset));
        if self.agreed.allocation.is_none() || rest == 0 || len == 0 {
            return Ok(Vec::new());
        }
        let longest = u64::from(u32::MAX) / unit * unit;
        let whole = len.min(longest).saturating_add(before).next_multiple_of(unit);
        let whole = whole.min(longest).min(before + rest);
        let mut found = self.with(|connection| connection.status(offset - before, whole))?;
        let (mut before, mut left) = (before, len.min(whole - before));
        found.retain_mut(|(range, _)| {
            let passed = before.min((*range).into());
            let inside = (u64::from(*range) - passed).min(left);
            (before, left) = (before - passed, left - inside);
            // No more than 32 bits: it is a part of it.
            *range = inside as u32;
            inside > 0
        });
        Ok(found)
    }

    /// Reads whole units of the server's.
    fn read_units(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let longest = PIECE.min(self.agreed.largest.into()).max(self.agreed.smallest.into());
        let longest =
            usize::try_from(longest - longest % u64::from(self.agreed.smallest)).unwrap_or(usize::MAX);
        let mut at = offset;
        for piece in buf.chunks_mut(longest.max(1)) {
            self.with(|connection| connection.read(piece, at))?;
            at += piece.len() as u64;
        }
        Ok(())
    }
}

impl ReadAt for LinkReader {
    fn reach(&self) -> Reach {
        Reach::Far
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let len = buf.len() as u64;
        let end = offset.checked_add(len).filter(|end| *end <= self.agreed.size);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        let unit = u64::from(self.agreed.smallest);
        if len == 0 {
            return Ok(());
        }
        if offset.is_multiple_of(unit) && len.is_multiple_of(unit) {
            return self.read_units(buf, offset);
        }
        // No export ends inside of a unit, but for one that lies.
        let (from, to) = (offset - offset % unit, end.next_multiple_of(unit).min(self.agreed.size));
        let mut whole = vec![0; usize::try_from(to - from).map_err(io::Error::other)?];
        self.read_units(&mut whole, from)?;
        let start = usize::try_from(offset - from).map_err(io::Error::other)?;
        let part = whole.get(start..).and_then(|rest| rest.get(..buf.len()));
        buf.copy_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn stored(&self, offset: u64, len: u64) -> (u64, bool) {
        // What cannot be learned has bytes everywhere.
        let Ok(found) = self.states(offset, len) else { return (len, true) };
        let is_stored = |state: u32| state & nbd::STATE_ZERO == 0;
        let Some(stored) = found.first().map(|(_, state)| is_stored(*state)) else { return (len, true) };
        let alike = found.iter().take_while(|(_, state)| is_stored(*state) == stored);
        (alike.map(|(len, _)| u64::from(*len)).sum(), stored)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use becket_uapi::nbd::{Reply, Request};
    use proptest::prelude::*;

    use super::*;

    const SIZE: u64 = 1 << 20;

    /// What is made of a server that says this of any range, and which range it was asked about.
    fn said(extents: Vec<State>, (offset, len): (u64, u64)) -> (io::Result<Vec<State>>, Option<(u64, u64)>) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || {
            let mut head = [0; Request::SIZE];
            theirs.read_exact(&mut head).ok()?;
            let Request { cookie, offset, len, .. } = Request::read(&head, false)?;
            let words = extents.iter().flat_map(|(len, state)| [*len, *state]);
            let payload: Vec<u8> = [1].into_iter().chain(words).flat_map(u32::to_be_bytes).collect();
            let (flags, kind) = (nbd::CHUNK_DONE, nbd::CHUNK_BLOCK_STATUS);
            let reply = Reply::Chunk { flags, kind, cookie, offset: 0, len: payload.len() as u64 };
            let mut head = [0; Reply::CHUNK_SIZE];
            reply.write(&mut head, false)?;
            theirs.write_all(&[&head[..], &payload].concat()).ok()?;
            Some((offset, len))
        });
        let agreed = Agreed {
            size: SIZE,
            structured: true,
            allocation: Some(1),
            smallest: 512,
            largest: 1 << 20,
            ..Agreed::default()
        };
        let (channel, _) = channel::pair().unwrap();
        let connection = Connection::new(ours.into(), agreed, Some(Duration::from_secs(5))).unwrap();
        let connections = Pool::of(vec![connection], 1);
        let reader = LinkReader { from: From::Channel(channel), agreed, connections };
        let states = reader.states(offset, len);
        drop(reader);
        (states, server.join().unwrap())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_server_s_words_are_taken_for_what_was_asked_and_no_byte_beyond(
            extents in prop::collection::vec(
                (prop_oneof![1u32..20_000, 0u32..2, Just(u32::MAX)], any::<u32>()), 1..12),
            offset in 0..SIZE,
            len in prop_oneof![1u64..100_000, Just(u64::MAX)],
        ) {
            let lies = extents.iter().any(|(len, _)| *len == 0);
            let (found, asked) = said(extents.clone(), (offset, len));
            let (from, whole) = asked.unwrap();
            prop_assert!(from.is_multiple_of(4096) && from <= offset && from + whole <= SIZE);
            prop_assert!((from + whole).is_multiple_of(4096) && from + whole > offset);
            let Ok(found) = found else {
                prop_assert!(lies);
                return Ok(());
            };
            prop_assert!(!lies);
            let all: u64 = found.iter().map(|(len, _)| u64::from(*len)).sum();
            prop_assert!(all <= len.min(SIZE - offset));
            // The state of each byte is the one that the server has said.
            let state_of = |ranges: &[State], at: u64| {
                let mut end = 0;
                ranges.iter().find(|(len, _)| { end += u64::from(*len); at < end }).map(|(_, state)| *state)
            };
            let mut at = 0;
            for (len, state) in &found {
                for byte in [at, at + u64::from(*len) - 1] {
                    prop_assert_eq!(state_of(&extents, offset - from + byte), Some(*state));
                }
                at += u64::from(*len);
            }
        }
    }

    #[test]
    fn nothing_is_asked_about_what_is_behind_the_end() {
        for range in [(SIZE, 1), (u64::MAX, u64::MAX), (0, 0)] {
            assert_eq!(said(vec![(512, 3)], range).0.unwrap(), []);
        }
    }
}
