//! A door: a socket that listens, for the exports that are reached there, and who lets their clients in.
//! It never waits for a doorman, and never reads what clients send.
//!
//! NBD has a *doorman*, a process of its own that talks with clients until they have agreed on an export. One
//! that dies is replaced; only clients that it was still talking with, and those that it relays for, notice.
//! The front-end of a virtual machine goes to the worker at once: a process that may open the socket owns the
//! machine.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{SendFlags, SocketFlags, accept_with};
use tracing::{info, warn};

use crate::contract::export::{DoorOrder, DoorReport, Export, Shown, Visitor};
use crate::contract::protocol;
use crate::contract::{Error, ErrorKind};
use crate::supervisor::introduction::{notes_of, quoted};
use crate::supervisor::restarts::Restarts;
use crate::system::helper;
use crate::system::process::ProcessId;
use crate::system::role::Role;
use crate::system::sync::{lock, spawn};

/// How long a doorman may take until it is ready.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long to wait when nobody can be accepted: out of descriptors, most likely.
const PAUSE: Duration = Duration::from_millis(100);

/// Who lets clients in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attendance {
    /// A process that talks with them first.
    Doorman,
    /// Each goes to the worker of the export at once.
    Direct,
}

/// The exports behind doors.
pub(super) trait House: Send + Sync {
    /// A client has come to that door that wants an export. It gets no export of another door, whatever a
    /// doorman says.
    fn visit(&self, door: u64, number: u32, visitor: Visitor, fds: Vec<OwnedFd>);
    /// What a door shows, and how many connections there are of it.
    fn at(&self, door: u64) -> (Vec<Shown>, u32);
}

/// The descriptors that an export is reached by.
pub(super) struct Hall {
    pub(super) listener: OwnedFd,
    /// The sealed [`crate::contract::export::DoorWords`].
    pub(super) words: OwnedFd,
    /// The directory of the socket's file.
    pub(super) dir: OwnedFd,
}

impl Hall {
    pub(super) fn of(fds: Vec<OwnedFd>) -> Option<Hall> {
        let [listener, words, dir] = <[OwnedFd; 3]>::try_from(fds).ok()?;
        Some(Hall { listener, words, dir })
    }

    pub(super) fn try_clone(&self) -> io::Result<Hall> {
        let Hall { listener, words, dir } = self;
        Ok(Hall { listener: listener.try_clone()?, words: words.try_clone()?, dir: dir.try_clone()? })
    }
}

/// See the head of this module.
pub(super) struct Door {
    key: u64,
    hall: Hall,
    /// What concerns the address; its name is the first export's.
    export: Export,
    exports: Weak<dyn House>,
    state: Mutex<State>,
    /// Held while something is said to the doorman, so that the last word is about what is.
    saying: Mutex<()>,
}

#[derive(Default)]
struct State {
    attended: bool,
    closed: bool,
    /// To the doorman that there is, and how many visitors it has sent.
    line: Option<(Arc<OwnedFd>, ProcessId)>,
    seen: u64,
    /// Rings for who accepts here.
    bell: Option<Arc<OwnedFd>>,
}

impl Door {
    pub(super) fn new(key: u64, hall: Hall, export: &Export, exports: Weak<dyn House>) -> Arc<Door> {
        Arc::new(Door {
            key,
            hall,
            export: export.clone(),
            exports,
            state: Mutex::default(),
            saying: Mutex::default(),
        })
    }

    pub(super) fn key(&self) -> u64 {
        self.key
    }

    pub(super) fn hall(&self) -> &Hall {
        &self.hall
    }

    /// Lets clients in from now on, and shows all exports of this door.
    ///
    /// # Errors
    /// The first doorman could not be started. Later ones are tried again.
    pub(super) fn attend(self: &Arc<Self>, attendance: Attendance) -> Result<(), Error> {
        if std::mem::replace(&mut lock(&self.state).attended, true) {
            self.show();
            return Ok(());
        }
        let door = Arc::clone(self);
        let failed = |error: io::Error| Error::io("listen for", "clients".as_ref())(error);
        match attendance {
            Attendance::Doorman => {
                let first = self.begin().inspect_err(|_| lock(&self.state).attended = false)?;
                spawn(move || door.keep_attended(first));
            }
            Attendance::Direct => {
                rustix::io::ioctl_fionbio(&self.hall.listener, true).map_err(|error| failed(error.into()))?;
                let bell = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
                let bell = Arc::new(bell);
                lock(&self.state).bell = Some(Arc::clone(&bell));
                spawn(move || door.accept_all(&bell));
            }
        }
        Ok(())
    }

    /// No more clients are let in.
    pub(super) fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        if let Some((line, _)) = state.line.take() {
            // Fails only when it is gone already.
            let _ = rustix::net::shutdown(&*line, rustix::net::Shutdown::Both);
        }
        if let Some(bell) = state.bell.take() {
            let _ = rustix::io::write(&*bell, &1u64.to_ne_bytes());
        }
    }

    /// Has the doorman show what there is.
    pub(super) fn show(&self) {
        self.say(|door| {
            let (shown, _) = door.exports.upgrade()?.at(door.key);
            Some(DoorOrder::Show { shown })
        });
    }

    /// Has the doorman know how many connections there are.
    pub(super) fn count(&self) {
        self.say(|door| {
            let exports = door.exports.upgrade()?;
            let seen = lock(&door.state).seen;
            let (_, open) = exports.at(door.key);
            Some(DoorOrder::Open { open, seen })
        });
    }

    fn say(&self, order: impl FnOnce(&Door) -> Option<DoorOrder>) {
        let _saying = lock(&self.saying);
        let Some((line, doorman)) = lock(&self.state).line.clone() else { return };
        let sent = order(self).map(|order| -> io::Result<()> {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            protocol::send_packet(&*line, &serde_json::to_vec(&order)?, &[], flags).map(drop)
        });
        match sent {
            Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                warn!("doorman {} does not hear: it is ended, and another one follows", doorman.pid);
                helper::end(doorman, "doorman");
            }
            // One that is dead is replaced.
            _ => {}
        }
    }

    fn closed(&self) -> bool {
        lock(&self.state).closed
    }

    /// Starts a doorman that attends to this door.
    fn begin(&self) -> Result<Attended, Error> {
        let failed = |what: &str| Error::Server { what: format!("has no doorman: {what}"), log: None };
        let (started, line) =
            helper::start(Role::Doorman, &[], None).map_err(|error| failed(&error.to_string()))?;
        let notes = first_words(&line).map_err(|error| failed(&error.to_string()))?;
        let id = started.id().ok_or_else(|| failed("it died at once"))?;
        for note in notes {
            warn!("doorman {}: {note}", id.pid);
        }
        let exports = self.exports.upgrade().ok_or_else(|| failed("the server ends"))?;
        // From here on changes are said to this one.
        let _saying = lock(&self.saying);
        let (shown, open) = exports.at(self.key);
        let Export { max_connections, verify, allow, .. } = self.export.clone();
        let order = DoorOrder::Attend { shown, max_connections, verify, allow, open };
        let fds = [self.hall.listener.as_fd(), self.hall.words.as_fd()];
        protocol::send(&line, &order, &fds).map_err(|error| failed(&error.to_string()))?;
        // Its certificate may be of no use, which only the doorman finds.
        match hear_one(&line).map_err(|error| failed(&error.to_string()))? {
            DoorReport::Attends => {}
            DoorReport::Refused { why } => {
                let (kind, message) = (ErrorKind::InvalidOption, quoted(&why));
                return Err(Error::Failed { kind, message, hint: None });
            }
            _ => return Err(failed("it speaks before it has started")),
        }
        let line = Arc::new(line);
        let mut state = lock(&self.state);
        if state.closed {
            return Err(failed("it was detached"));
        }
        (state.line, state.seen) = (Some((Arc::clone(&line), id)), 0);
        Ok(Attended { child: started.keep(), line })
    }

    /// Hears a doorman, and replaces it when it dies.
    fn keep_attended(&self, first: Attended) {
        let mut restarts = Restarts::new(Instant::now());
        let mut next = Some(first);
        while !self.closed() {
            match next.take().map_or_else(|| self.begin(), Ok) {
                Ok(attended) => {
                    restarts.began(Instant::now());
                    self.hear(attended);
                }
                Err(error) => warn!("{error}"),
            }
            if self.closed() || self.exports.upgrade().is_none() {
                return;
            }
            restarts.failed(Instant::now());
            std::thread::sleep(restarts.take_pause());
        }
    }

    fn hear(&self, Attended { child, line }: Attended) {
        loop {
            match protocol::receive::<DoorReport>(&*line) {
                Ok(Some((DoorReport::Agreed { number, terms, unread }, fds))) => {
                    lock(&self.state).seen += 1;
                    let (Some(exports), Some(socket)) = (self.exports.upgrade(), fds.into_iter().next())
                    else {
                        continue;
                    };
                    exports.visit(self.key, number, Visitor::Nbd { terms, unread }, vec![socket]);
                    self.count();
                }
                Ok(Some((DoorReport::Refused { why }, _))) => {
                    warn!("the doorman of {}: {}", self.export.address, quoted(&why));
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => {
                    warn!("the doorman of {}: {error}: ended", self.export.address);
                    if let Some((_, id)) = lock(&self.state).line.clone() {
                        helper::end(id, "doorman");
                    }
                    break;
                }
            }
        }
        lock(&self.state).line = None;
        // It ends when it has nothing to relay any more, which may take as long as a client stays.
        spawn(move || match child.map(helper::Kept::wait) {
            Some(Ok(status)) => info!("a doorman ended: {status}"),
            _ => info!("a doorman ended"),
        });
    }

    /// Passes each client on to the worker of the only export here.
    fn accept_all(&self, bell: &OwnedFd) {
        while !self.closed() {
            let listener = &self.hall.listener;
            let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(bell, PollFlags::IN)];
            // Woken for nothing it looks again.
            let _ = poll(&mut fds, None);
            match accept_with(listener, SocketFlags::CLOEXEC) {
                Ok(socket) if !self.closed() => {
                    let Some(exports) = self.exports.upgrade() else { return };
                    let number = exports.at(self.key).0.first().map(|shown| shown.number);
                    if let Some(number) = number {
                        exports.visit(self.key, number, Visitor::VhostUser, vec![socket]);
                    }
                }
                Ok(_) => return,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                Err(error) => {
                    warn!("no client can be let in: {error}");
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }
}

/// A doorman at work.
struct Attended {
    child: Option<helper::Kept>,
    line: Arc<OwnedFd>,
}

/// The first report, before which it is not a doorman yet.
fn first_words(line: &OwnedFd) -> io::Result<Vec<String>> {
    match hear_one(line)? {
        DoorReport::Started { notes } => Ok(notes_of(&notes)),
        DoorReport::Refused { why } => Err(io::Error::other(quoted(&why))),
        _ => Err(io::Error::other("it speaks before it has started")),
    }
}

/// One report, in a bounded time.
fn hear_one(line: &OwnedFd) -> io::Result<DoorReport> {
    set_socket_timeout(line, Timeout::Recv, Some(PATIENCE))?;
    let report = protocol::receive::<DoorReport>(line)?;
    set_socket_timeout(line, Timeout::Recv, None)?;
    report.map(|(report, _)| report).ok_or_else(|| io::Error::other("it ended before it was ready"))
}
