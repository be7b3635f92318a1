//! The doorman's one loop: it lets clients in, goes on with each, and passes on those that have agreed.
//! No client keeps another waiting: each has a deadline, and the oldest goes when there are too many.

use std::collections::VecDeque;
use std::mem;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use becket_image::link;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SocketFlags, accept_with, sockopt};
use rustls::ServerConfig;
use tracing::{debug, info, warn};

use super::guest::{Fate, Guest, Manners, Party};
use crate::contract::Error;
use crate::contract::export::{DoorOrder, DoorReport, Shown};
use crate::contract::protocol;

/// The most clients that are talked with at once. Each takes some 50 KiB with TLS.
const MOST_GUESTS: usize = 128;
/// The most that have agreed and wait for their turn.
const MOST_WAITING: usize = 128;
/// How long to wait when nobody can be accepted: out of descriptors, most likely.
const PAUSE: Duration = Duration::from_millis(100);

/// What holds for the address.
pub(super) struct Rules {
    /// The most connections.
    pub(super) max: u32,
    pub(super) tls: Option<Arc<ServerConfig>>,
    pub(super) allow: Vec<String>,
}

pub(super) struct Hall {
    listener: OwnedFd,
    shown: Vec<Shown>,
    rules: Rules,
    /// Connections as the supervisor has counted them, when it had seen so many of ours.
    open: u32,
    seen: u64,
    /// How many have been passed on.
    passed: u64,
    guests: Vec<Guest>,
    /// Those that have agreed, while there are too many connections.
    lobby: VecDeque<Box<Party>>,
    relays: Vec<std::thread::JoinHandle<()>>,
    /// When accepting is tried again.
    paused: Option<Instant>,
}

/// What has happened.
#[derive(Default)]
struct Events {
    control: bool,
    door: bool,
    /// By the guests' places.
    guests: Vec<bool>,
}

impl Hall {
    pub(super) fn new(listener: OwnedFd, shown: Vec<Shown>, rules: Rules, open: u32) -> Hall {
        Hall {
            listener,
            shown,
            rules,
            open,
            seen: 0,
            passed: 0,
            guests: Vec::new(),
            lobby: VecDeque::new(),
            relays: Vec::new(),
            paused: None,
        }
    }

    /// Attends to clients until the supervisor is gone, and relays until the last client over TLS is gone.
    pub(super) fn run(mut self, control: OwnedFd) -> Result<(), Error> {
        loop {
            let events = self.wait(&control)?;
            if events.control && !self.obey(&control)? {
                break;
            }
            self.go_on(&events.guests);
            if events.door {
                self.let_in();
            }
            if !self.pass_on(&control) {
                break;
            }
            self.relays.retain(|relay| !relay.is_finished());
        }
        // Another doorman attends to the door from now on.
        let relays = mem::take(&mut self.relays);
        drop((self, control));
        for relay in relays {
            // One that has panicked has ended as well.
            let _ = relay.join();
        }
        Ok(())
    }

    fn connections(&self) -> u64 {
        u64::from(self.open) + self.passed.saturating_sub(self.seen)
    }

    fn full(&self) -> bool {
        self.connections() >= u64::from(self.rules.max)
    }

    fn wait(&mut self, control: &OwnedFd) -> Result<Events, Error> {
        let now = Instant::now();
        self.paused.take_if(|until| *until <= now);
        let accepts = !self.full() && self.paused.is_none();
        let deadline = self.guests.iter().map(|guest| guest.deadline()).chain(self.paused).min();
        let patience = deadline.map(|deadline| deadline.saturating_duration_since(now));
        // A moment later, so that the deadline has come then.
        let patience = patience.map(|patience| patience + Duration::from_millis(1));
        let patience = patience.and_then(|patience| Timespec::try_from(patience).ok());
        let door = if accepts { PollFlags::IN } else { PollFlags::empty() };
        let mut fds = vec![PollFd::new(control, PollFlags::IN), PollFd::new(&self.listener, door)];
        fds.extend(self.guests.iter().map(|guest| PollFd::from_borrowed_fd(guest.as_fd(), guest.events())));
        match poll(&mut fds, patience.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::Worker { what: format!("cannot wait for clients: {error}") }),
        }
        let mut happened = fds.iter().map(|fd| !fd.revents().is_empty());
        let (control, door) = (happened.next().unwrap_or(false), happened.next().unwrap_or(false));
        Ok(Events { control, door: door && accepts, guests: happened.collect() })
    }

    /// Carries an order out; `false` when the supervisor is gone.
    fn obey(&mut self, control: &OwnedFd) -> Result<bool, Error> {
        match protocol::receive::<DoorOrder>(control) {
            Ok(Some((DoorOrder::Show { shown }, _))) => self.shown = shown,
            Ok(Some((DoorOrder::Open { open, seen }, _))) => (self.open, self.seen) = (open, seen),
            Ok(Some((DoorOrder::Attend { .. }, _))) => warn!("an order to attend came twice"),
            Ok(None) => return Ok(false),
            Err(error) => return Err(Error::Worker { what: format!("cannot hear its server: {error}") }),
        }
        Ok(true)
    }

    fn go_on(&mut self, happened: &[bool]) {
        let now = Instant::now();
        let manners = Manners { shown: &self.shown, tls: self.rules.tls.as_ref(), allow: &self.rules.allow };
        let mut stay = Vec::with_capacity(self.guests.len());
        for (at, guest) in mem::take(&mut self.guests).into_iter().enumerate() {
            let due = happened.get(at).copied().unwrap_or(true) || guest.deadline() <= now;
            match if due { guest.go_on(&manners, now) } else { Fate::Stays(guest) } {
                Fate::Stays(guest) => stay.push(guest),
                Fate::Agreed(party) if self.lobby.len() < MOST_WAITING => self.lobby.push_back(party),
                Fate::Agreed(_) => info!("a client is sent away: too many wait"),
                Fate::Gone(why) => debug!("a client is gone: {why}"),
            }
        }
        self.guests = stay;
    }

    fn let_in(&mut self) {
        let now = Instant::now();
        // Some at a time, so that the others are gone on with.
        for _ in 0..16 {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match accept_with(&self.listener, flags) {
                Ok(socket) => socket,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {
                    return;
                }
                Err(error) => {
                    warn!("no client can be let in: {error}");
                    self.paused = Some(now + PAUSE);
                    return;
                }
            };
            // Only TCP has it. Replies are sent whole.
            let _ = sockopt::set_tcp_nodelay(&socket, true);
            if self.guests.len() >= MOST_GUESTS {
                // They are in the order in which they came.
                drop(self.guests.remove(0));
                debug!("the client that has been talked with longest is sent away: too many come");
            }
            let manners =
                Manners { shown: &self.shown, tls: self.rules.tls.as_ref(), allow: &self.rules.allow };
            let guest = Guest::new(UnixStream::from(socket), &manners, now);
            match guest.go_on(&manners, now) {
                Fate::Stays(guest) => self.guests.push(guest),
                Fate::Agreed(party) => self.lobby.push_back(party),
                Fate::Gone(why) => debug!("a client is gone: {why}"),
            }
        }
    }

    /// Passes on those that have agreed, as far as there is room; `false` when the supervisor is gone.
    fn pass_on(&mut self, control: &OwnedFd) -> bool {
        while !self.full() {
            let Some(party) = self.lobby.pop_front() else { break };
            match self.pass(control, *party) {
                Ok(()) => self.passed += 1,
                Err(error)
                    if matches!(
                        error.kind(),
                        std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset
                    ) =>
                {
                    return false;
                }
                Err(error) => warn!("a client cannot be passed on: {error}"),
            }
        }
        true
    }

    fn pass(&mut self, control: &OwnedFd, party: Party) -> std::io::Result<()> {
        let Party { number, terms, unread, socket, tls } = party;
        let report = DoorReport::Agreed { number, terms, unread };
        let Some(tls) = tls else {
            // The rings of the worker wait by themselves.
            socket.set_nonblocking(false)?;
            return protocol::send(control, &report, &[socket.as_fd()]);
        };
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let thread = std::thread::Builder::new().name("becket-relay".to_owned()).stack_size(link::STACK);
        protocol::send(control, &report, &[theirs.as_fd()])?;
        self.relays.push(thread.spawn(move || {
            if let Err(error) = link::relay((*tls).into(), socket, ours) {
                debug!("a client's connection over TLS ends: {error}");
            }
        })?);
        Ok(())
    }
}
