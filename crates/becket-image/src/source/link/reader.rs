//! An export as an image's bytes: what a process reads that may wait for the server.
//! After a break it connects once more, and never goes on with an export that has become another.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::channel;
use super::conn::{Connection, Failure};
use super::dial::{Dialed, dial};
use super::error::DialError;
use super::handshake::{Agreed, Wanted};
use super::pool::{self, Pool, SHORT};
use super::tls::Trust;
use super::uri::{Endpoint, Server};
use crate::{Reach, ReadAt};

/// The longest read at once, in bytes.
const PIECE: u64 = 4 << 20;
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
        let unit = u64::from(self.agreed.smallest);
        let most = u64::from(u32::MAX) - u64::from(u32::MAX) % unit;
        let asked = len.min(most).min(self.agreed.size.saturating_sub(offset));
        if self.agreed.allocation.is_none()
            || asked == 0
            || !offset.is_multiple_of(unit)
            || !asked.is_multiple_of(unit)
        {
            return (len, true);
        }
        // What cannot be learned has bytes everywhere.
        let Ok(found) = self.with(|connection| connection.status(offset, asked)) else { return (len, true) };
        let Some((_, stored)) = found.first() else { return (len, true) };
        let alike = found.iter().take_while(|(_, other)| other == stored).map(|(len, _)| *len);
        (alike.fold(0, u64::saturating_add).min(asked), *stored)
    }
}
