//! A client that has not agreed on an export yet: its socket, what it has said, and how long it may take.
//! It holds a bounded number of bytes, and ends at its deadline whatever it sends.

use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use becket_transport::nbd::STRANGER;
use rustix::event::PollFlags;
use rustls::{ServerConfig, ServerConnection};
use tracing::warn;

use super::certificate;
use super::talk::{Talk, Turn};
use crate::contract::export::Shown;

/// How long a client may take until it has agreed on an export.
const PATIENCE: Duration = Duration::from_secs(15);
/// The most bytes that a client may send until then. Names and queries are short; certificates are not.
const MOST_SENT: usize = 256 << 10;
/// The most bytes of answers that wait for a client: one that does not read them is not heard any more.
const MOST_WAITING: usize = 64 << 10;

/// See the head of this module.
pub(super) struct Guest {
    socket: UnixStream,
    talk: Talk,
    tls: Option<Box<ServerConnection>>,
    /// Bytes for the socket.
    waiting: Vec<u8>,
    sent: usize,
    deadline: Instant,
}

/// What became of a client.
pub(super) enum Fate {
    /// It is still talked with.
    Stays(Guest),
    /// It wants that export.
    Agreed(Box<Party>),
    /// It has gone, or is sent away for that reason.
    Gone(String),
}

/// A client that has agreed on an export.
pub(super) struct Party {
    pub(super) number: u32,
    pub(super) terms: serde_json::Value,
    /// What it has sent since.
    pub(super) unread: Vec<u8>,
    pub(super) socket: UnixStream,
    pub(super) tls: Option<Box<ServerConnection>>,
}

/// How all clients of an address are treated.
pub(super) struct Manners<'a> {
    pub(super) shown: &'a [Shown],
    pub(super) tls: Option<&'a Arc<ServerConfig>>,
    /// Names of which a certificate must have one; all are allowed when there is none.
    pub(super) allow: &'a [String],
}

impl Guest {
    /// One that has just connected. Its socket must not block.
    pub(super) fn new(socket: UnixStream, manners: &Manners<'_>, now: Instant) -> Guest {
        let mut talk = Talk::new(manners.shown, manners.tls.is_some());
        let waiting = talk.take_output();
        Guest { socket, talk, tls: None, waiting, sent: 0, deadline: now + PATIENCE }
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// What it is waited for.
    pub(super) fn events(&self) -> PollFlags {
        let tls_waits = self.tls.as_ref().is_some_and(|tls| tls.wants_write());
        let mut events = PollFlags::empty();
        events.set(PollFlags::OUT, tls_waits || !self.waiting.is_empty());
        events.set(PollFlags::IN, self.waiting.len() < MOST_WAITING);
        events
    }

    /// Goes on with it, when something has happened or time is up.
    pub(super) fn go_on(mut self, manners: &Manners<'_>, now: Instant) -> Fate {
        if now >= self.deadline {
            return Fate::Gone("it took too long".to_owned());
        }
        match self.turn(manners) {
            Ok(Turn::More | Turn::StartTls) => Fate::Stays(self),
            Ok(Turn::Agreed { number, terms }) => {
                if !self.flushed() {
                    // It goes when it has read the answer.
                    return Fate::Stays(self);
                }
                let Guest { socket, talk, tls, .. } = self;
                Fate::Agreed(Box::new(Party { number, terms, unread: talk.into_unread(), socket, tls }))
            }
            Ok(Turn::Ended(why)) => {
                // The last answer says why, where the client reads it.
                let _ = self.flush();
                Fate::Gone(why)
            }
            Err(error) => {
                let _ = self.flush();
                Fate::Gone(error.to_string())
            }
        }
    }

    fn turn(&mut self, manners: &Manners<'_>) -> io::Result<Turn> {
        loop {
            self.flush()?;
            let turn = self.talk.turn();
            self.answer()?;
            match turn {
                Turn::More => {}
                Turn::StartTls => {
                    self.flush()?;
                    if !self.waiting.is_empty() {
                        return Ok(Turn::More);
                    }
                    self.start_tls(manners)?;
                    continue;
                }
                done => {
                    self.flush()?;
                    return Ok(done);
                }
            }
            if self.waiting.len() >= MOST_WAITING || !self.hear(manners)? {
                self.flush()?;
                return Ok(Turn::More);
            }
        }
    }

    /// Takes in what has come; `false` where that was nothing.
    fn hear(&mut self, manners: &Manners<'_>) -> io::Result<bool> {
        let mut buffer = [0; 4096];
        let len = match self.socket.read(&mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(true),
            Err(error) => return Err(error),
        };
        self.sent += len;
        if self.sent > MOST_SENT {
            return Err(io::Error::other("it says too much before it chooses an export"));
        }
        let heard = buffer.get(..len).unwrap_or_default();
        match self.tls.is_some() {
            true => self.hear_tls(heard, manners)?,
            false => self.talk.hear(heard),
        }
        Ok(true)
    }

    /// The rest of what has come is TLS: what was put before it would be neither secret nor the client's.
    fn start_tls(&mut self, manners: &Manners<'_>) -> io::Result<()> {
        let config = manners.tls.ok_or_else(|| io::Error::other("it asks for TLS, which there is not"))?;
        let tls = ServerConnection::new(Arc::clone(config)).map_err(io::Error::other)?;
        self.tls = Some(Box::new(tls));
        let heard = self.talk.secured();
        self.hear_tls(&heard, manners)
    }

    fn hear_tls(&mut self, mut heard: &[u8], manners: &Manners<'_>) -> io::Result<()> {
        let Some(tls) = &mut self.tls else { return Ok(()) };
        while !heard.is_empty() {
            tls.read_tls(&mut heard)?;
            let state = match tls.process_new_packets() {
                Ok(state) => state,
                Err(error) => {
                    // The alert says what is wrong, if the client still reads.
                    let _ = tls.write_tls(&mut self.socket);
                    return Err(io::Error::other(error));
                }
            };
            let len = state.plaintext_bytes_to_read();
            if len > 0 && !manners.allow.is_empty() {
                let first = tls.peer_certificates().and_then(|chain| chain.first());
                if !first.is_some_and(|first| certificate::has_name(first, manners.allow))
                    && self.talk.refuse_stranger()
                {
                    let name = first.and_then(|first| certificate::first_name(first)).unwrap_or_default();
                    warn!("a client is refused: {STRANGER}; its name is {name:?}");
                }
            }
            let mut plain = vec![0; len];
            tls.reader().read_exact(&mut plain)?;
            self.talk.hear(&plain);
        }
        Ok(())
    }

    /// Takes the answers to where they are sent from.
    fn answer(&mut self) -> io::Result<()> {
        let answers = self.talk.take_output();
        match &mut self.tls {
            Some(tls) => tls.writer().write_all(&answers),
            None => {
                self.waiting.extend_from_slice(&answers);
                Ok(())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        let later = |error: &io::Error| {
            matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
        };
        while !self.waiting.is_empty() {
            match self.socket.write(&self.waiting) {
                Ok(len) => drop(self.waiting.drain(..len)),
                Err(error) if later(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        while let Some(tls) = self.tls.as_mut().filter(|tls| tls.wants_write()) {
            match tls.write_tls(&mut self.socket) {
                Ok(_) => {}
                Err(error) if later(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn flushed(&self) -> bool {
        self.waiting.is_empty() && !self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }
}

impl AsFd for Guest {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
