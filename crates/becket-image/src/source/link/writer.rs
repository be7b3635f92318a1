//! An export that a copy is written to: every request is answered before the next one over its connection.
//! It never connects again: what was written and not flushed may have gone with the connection that broke.

use std::io;
use std::time::Duration;

use becket_uapi::nbd;

use super::conn::{Connection, Failure};
use super::dial::{Dialed, dial};
use super::error::DialError;
use super::handshake::{Agreed, Wanted};
use super::pool::{self, PATIENCE, Pool, SHORT};
use super::tls::Trust;
use super::uri::{Endpoint, Server};
use crate::zeroes;

/// Longest range that is zeroed at once, in bytes.
const ZEROED: u64 = 64 << 20;

/// An export that is written. Threads may share it.
#[derive(Debug)]
pub struct LinkWriter {
    connections: Pool,
    agreed: Agreed,
    /// It was made for this, and has no name yet.
    new: bool,
}

impl LinkWriter {
    /// Connects to an export, to write `len` bytes to it, and gives the server up that brings no answer
    /// within `patience`; 30 s without one. An image of Ceph that does not exist is made; it has its name
    /// once [`LinkWriter::finish`] has succeeded.
    ///
    /// # Errors
    /// See [`dial()`]; `ReadOnlyFilesystem` where the server exports it read-only.
    pub fn connect(
        endpoint: &Endpoint,
        len: u64,
        patience: Option<Duration>,
    ) -> Result<LinkWriter, DialError> {
        let patience = patience.unwrap_or(PATIENCE);
        let trust = endpoint.tls.as_ref().map(Trust::of).transpose()?;
        let wanted = Wanted { writes: true, copies: Some(len), ..Wanted::default() };
        let (mut connections, agreed, new) = pool::first(endpoint, wanted, trust.as_ref(), patience)?;
        if agreed.has(nbd::READ_ONLY) {
            let why = match &endpoint.server {
                Server::Rbd(rbd) if rbd.snapshot.is_some() => "a snapshot is only read",
                _ => "the server exports it read-only",
            };
            return Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, why).into());
        }
        // A flush over one covers the writes of all.
        while connections.len() < pool::most(endpoint, &agreed) {
            match dial(endpoint, wanted, trust.as_ref(), SHORT.min(patience)) {
                Ok(Dialed { socket, agreed: other, .. }) if other == agreed => {
                    connections.push(Connection::new(socket, agreed, Some(patience))?);
                }
                _ => break,
            }
        }
        let count = connections.len();
        Ok(LinkWriter { connections: Pool::of(connections, count), agreed, new })
    }

    /// Whether it did not exist before.
    pub fn is_new(&self) -> bool {
        self.new
    }

    /// Length of the export in bytes.
    pub fn size(&self) -> u64 {
        self.agreed.size
    }

    /// What requests should be multiples of, in bytes.
    pub fn unit(&self) -> u64 {
        self.agreed.smallest.into()
    }

    /// How many threads can use it at once.
    pub fn threads(&self) -> usize {
        self.connections.count()
    }

    /// Writes bytes from the start of a unit on. An end inside of a unit costs a read.
    ///
    /// # Errors
    /// What the server says, or that the connection is broken.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let unit = self.unit();
        let whole = bytes.len() - usize::try_from(bytes.len() as u64 % unit).map_err(io::Error::other)?;
        if !offset.is_multiple_of(unit) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it begins inside of a unit"));
        }
        let (whole, tail) = bytes.split_at(whole);
        let longest = usize::try_from(self.agreed.largest).map_err(io::Error::other)?;
        let mut at = offset;
        for piece in whole.chunks(longest.max(1)) {
            self.with(|connection| connection.write(piece, at))?;
            at += piece.len() as u64;
        }
        if !tail.is_empty() {
            let mut last = vec![0; usize::try_from(unit).map_err(io::Error::other)?];
            self.with(|connection| connection.read(&mut last, at))?;
            last.get_mut(..tail.len()).ok_or(io::ErrorKind::InvalidData)?.copy_from_slice(tail);
            self.with(|connection| connection.write(&last, at))?;
        }
        Ok(())
    }

    /// Has a range read as zeroes, without sending them where the server can do that.
    ///
    /// # Errors
    /// See [`LinkWriter::write_at`].
    pub fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        if self.new {
            // It has nothing else there: a copy writes each range once.
            return Ok(());
        }
        let (mut at, end) = (offset, offset + len);
        let can = self.agreed.has(nbd::SEND_WRITE_ZEROES);
        while at < end {
            // What ends inside of a unit is written.
            let (units, unit) = (ZEROED.min(end - at), self.unit());
            let piece = units - units % unit;
            let done = if can && piece > 0 {
                self.with(|connection| connection.zero(at, piece))?;
                piece
            } else {
                let bytes = zeroes::some(end - at);
                self.write_at(bytes, at)?;
                bytes.len() as u64
            };
            at += done;
        }
        Ok(())
    }

    /// Brings all that was written to the server's disk, and gives a new image its name. A server that knows
    /// no flush does as it likes.
    ///
    /// # Errors
    /// See [`LinkWriter::write_at`]; `AlreadyExists` where another one has that name by now.
    pub fn finish(&self) -> io::Result<()> {
        if self.agreed.has(nbd::SEND_FLUSH) {
            self.with(Connection::flush)?;
        }
        if self.new {
            self.with(Connection::name)?;
        }
        Ok(())
    }

    /// Has something done over a connection that is free, or will be. What was written over one that broke
    /// may be lost, so no other one is made.
    fn with<T>(&self, what: impl FnOnce(&mut Connection) -> Result<T, Failure>) -> io::Result<T> {
        let done = self.connections.with(|_| Err(io::ErrorKind::NotConnected.into()), what);
        done.map_err(|(Failure::Said(error) | Failure::Broken(error) | Failure::Unmade(error))| error)
    }
}
