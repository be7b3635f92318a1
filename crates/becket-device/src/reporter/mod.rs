//! The reporter: the process that answers HTTP requests for metrics.
//! It holds a socket that listens and its connection to the collecting command: no image, no device, no way
//! to becket's server. It parses what strangers send, and starts nothing.

mod request;

use std::io::{self, Read as _};
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, SocketFlags, accept_with, recv, send};
use tracing::{debug, warn};

use self::request::{Asked, Request};
use crate::contract::Error;
use crate::contract::protocol;
use crate::contract::report::{ReportOrder, Reported};
use crate::contract::sealed;
use crate::system::role::{self, Begun, Role};
use crate::system::{confine, harden};

/// The most clients at once; the oldest goes when another one comes.
const MOST_CLIENTS: usize = 32;
/// How long a client may take from its connection to the last byte of its answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long to wait when nobody can be accepted: out of descriptors, most likely.
const PAUSE: Duration = Duration::from_millis(100);

/// The reporter's main. Standard input is its connection to the command that collects; it returns when that
/// is gone.
///
/// # Errors
/// It was not started by such a command, or a precaution failed that could have worked.
pub fn reporter_main() -> Result<(), Error> {
    let Begun { control, _signals } = role::begin(Role::Reporter)?;
    let prepared = harden::harden(Role::Reporter).and_then(|mut notes| {
        notes.extend(confine::shut(Role::Reporter)?);
        notes.extend(confine::filter(Role::Reporter)?);
        Ok(notes)
    });
    let failed = |what: &'static str| move |error| Error::Worker { what: format!("{what}: {error}") };
    let notes = prepared.inspect_err(|error| {
        // When even this cannot be said, the closed connection says it.
        let _ = protocol::send(&control, &Reported::Refused { why: error.to_string() }, &[]);
    })?;
    protocol::send(&control, &Reported::Started { notes }, &[]).map_err(failed("cannot report"))?;
    match protocol::receive::<ReportOrder>(&control).map_err(failed("cannot hear its command"))? {
        Some((ReportOrder::Listen, fds)) => {
            let [listener] = <[OwnedFd; 1]>::try_from(fds)
                .map_err(|_| Error::Worker { what: "was given no socket".to_owned() })?;
            rustix::io::ioctl_fionbio(&listener, true).map_err(|error| failed("its socket")(error.into()))?;
            Reporter { control, listener, clients: Vec::new(), paused: None }.run();
            Ok(())
        }
        Some((ReportOrder::Text, _)) => Err(Error::Worker { what: "was given no socket".to_owned() }),
        None => Ok(()),
    }
}

struct Reporter {
    control: OwnedFd,
    listener: OwnedFd,
    clients: Vec<Client>,
    /// When accepting is tried again.
    paused: Option<Instant>,
}

struct Client {
    socket: OwnedFd,
    request: Request,
    deadline: Instant,
    state: State,
}

enum State {
    Asking,
    /// Wants the metrics; whether their text follows, or only what a HEAD asks for.
    Waiting {
        head: bool,
    },
    Answering {
        head: Vec<u8>,
        body: Arc<[u8]>,
        sent: usize,
    },
}

/// The collecting command is gone, or nothing can be waited for any more.
struct Gone;

impl Reporter {
    fn run(mut self) {
        while self.turn().is_ok() {}
    }

    fn turn(&mut self) -> Result<(), Gone> {
        let (gone, door, happened) = self.wait()?;
        if gone {
            return Err(Gone);
        }
        let now = Instant::now();
        let clients = mem::take(&mut self.clients).into_iter().enumerate();
        self.clients = clients
            .filter_map(|(at, client)| {
                let due = happened.get(at).copied().unwrap_or(true);
                client.go_on(due, now)
            })
            .collect();
        if door {
            self.let_in(now);
        }
        self.answer()
    }

    /// Whether the command is gone, whether a client waits at the door, and which clients can go on.
    fn wait(&mut self) -> Result<(bool, bool, Vec<bool>), Gone> {
        let now = Instant::now();
        self.paused.take_if(|until| *until <= now);
        let deadline = self.clients.iter().map(|client| client.deadline).chain(self.paused).min();
        let patience = deadline
            .map(|deadline| deadline.saturating_duration_since(now) + Duration::from_millis(1))
            .and_then(|patience| Timespec::try_from(patience).ok());
        let door = if self.paused.is_none() { PollFlags::IN } else { PollFlags::empty() };
        // Nothing comes unasked from the command but its end.
        let mut fds = vec![PollFd::new(&self.control, PollFlags::IN), PollFd::new(&self.listener, door)];
        fds.extend(
            self.clients.iter().map(|client| PollFd::from_borrowed_fd(client.as_fd(), client.events())),
        );
        match poll(&mut fds, patience.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                warn!("cannot wait for clients: {error}");
                return Err(Gone);
            }
        }
        let mut happened = fds.iter().map(|fd| !fd.revents().is_empty());
        let (gone, door) = (happened.next().unwrap_or(true), happened.next().unwrap_or(false));
        Ok((gone, door && self.paused.is_none(), happened.collect()))
    }

    fn let_in(&mut self, now: Instant) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // Some at a time, so that the others are gone on with.
        for _ in 0..MOST_CLIENTS {
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
            if self.clients.len() >= MOST_CLIENTS {
                drop(self.clients.remove(0));
                debug!("the client that came first is sent away: too many come");
            }
            let client =
                Client { socket, request: Request::new(), deadline: now + PATIENCE, state: State::Asking };
            self.clients.extend(client.go_on(true, now));
        }
    }

    /// All that wait for the metrics get the same text: one question to the command, however many they are.
    fn answer(&mut self) -> Result<(), Gone> {
        if !self.clients.iter().any(|client| matches!(client.state, State::Waiting { .. })) {
            return Ok(());
        }
        let body: Arc<[u8]> = match self.ask() {
            Ok(Some(text)) => text.into(),
            Ok(None) => return Err(Gone),
            Err(error) => {
                warn!("there is no text: {error}");
                return Err(Gone);
            }
        };
        let now = Instant::now();
        let clients = mem::take(&mut self.clients).into_iter();
        self.clients = clients
            .filter_map(|mut client| {
                if let State::Waiting { head } = client.state {
                    let length = body.len();
                    let body = if head { Arc::default() } else { Arc::clone(&body) };
                    client.state =
                        State::Answering { head: request::head(Asked::Metrics, length), body, sent: 0 };
                }
                client.go_on(true, now)
            })
            .collect();
        Ok(())
    }

    /// `None` when the command is gone.
    fn ask(&self) -> io::Result<Option<Vec<u8>>> {
        match protocol::send(&self.control, &Reported::Wanted, &[]) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(None),
            sent => sent?,
        }
        match protocol::receive::<ReportOrder>(&self.control)? {
            Some((ReportOrder::Text, fds)) => {
                let file = fds.first().ok_or_else(|| io::Error::other("the text is missing"))?;
                let mut text = Vec::new();
                sealed::read(file)?.read_to_end(&mut text)?;
                Ok(Some(text))
            }
            Some((ReportOrder::Listen, _)) => Err(io::Error::other("another socket instead")),
            None => Ok(None),
        }
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Client {
    fn events(&self) -> PollFlags {
        match self.state {
            State::Asking => PollFlags::IN,
            State::Waiting { .. } => PollFlags::empty(),
            State::Answering { .. } => PollFlags::OUT,
        }
    }

    /// Reads or writes as far as that goes; `None` when it is done with.
    fn go_on(mut self, happened: bool, now: Instant) -> Option<Client> {
        if now >= self.deadline {
            return None;
        }
        if !happened {
            return Some(self);
        }
        if matches!(self.state, State::Asking) {
            self.state = self.hear()?;
        }
        match &mut self.state {
            State::Answering { head, body, sent } => {
                let more = say(&self.socket, head, body, sent)?;
                more.then_some(self)
            }
            State::Asking | State::Waiting { .. } => Some(self),
        }
    }

    /// What it wants, as far as it has said it; `None` when it is gone.
    fn hear(&mut self) -> Option<State> {
        loop {
            let room = self.request.room();
            match recv(&self.socket, room, RecvFlags::empty()) {
                Ok((0, _)) => return None,
                Ok((read, _)) => match self.request.heard(read) {
                    None => {}
                    Some((Asked::Metrics, head)) => return Some(State::Waiting { head }),
                    Some((asked, head)) => {
                        let body = request::body(asked).as_bytes();
                        let text = request::head(asked, body.len());
                        let body = if head { Arc::default() } else { body.into() };
                        return Some(State::Answering { head: text, body, sent: 0 });
                    }
                },
                Err(rustix::io::Errno::AGAIN) => return Some(State::Asking),
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return None,
            }
        }
    }
}

/// Sends what is left of an answer: whether there is more; `None` when the client is gone.
fn say(socket: &OwnedFd, head: &[u8], body: &[u8], sent: &mut usize) -> Option<bool> {
    loop {
        let left = match head.get(*sent..) {
            Some(left) if !left.is_empty() => left,
            _ => body.get(sent.saturating_sub(head.len())..).unwrap_or_default(),
        };
        if left.is_empty() {
            return Some(false);
        }
        match send(socket, left, SendFlags::NOSIGNAL) {
            Ok(more) => *sent += more,
            Err(rustix::io::Errno::AGAIN) => return Some(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}
