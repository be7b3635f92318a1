//! The front-ends of an export, one after another: a thread that hears them, and starts and stops rings.
//! It serves no request: the I/O threads do. A front-end that talks nonsense loses its connection.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use becket_engine::{Geometry, IoThreads, Memory, QueueId};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown,
};
use tracing::{info, warn};

use super::config::{EVENT_IDX, MOST_RANGES};
use super::message::{HEAD, Head, MOST_FDS, Wanted, config_changed};
use super::port::{Parts, VringPort};
use super::request::SERIAL;
use super::ring::Ring;
use super::session::{Rings, Session};
use crate::serve::{Finally, ServeError, Served, Setup};

/// Bytes of the stack of the thread, which is locked in memory as a whole.
const STACK: usize = 256 << 10;

/// A front-end that was left between two of its messages.
#[derive(Debug)]
pub struct Departure {
    /// Its connection.
    pub socket: OwnedFd,
    /// What was agreed on with it; empty when it is a new one.
    pub agreed: Vec<u8>,
    /// The descriptors of that: the machine's memory, its events.
    pub fds: Vec<OwnedFd>,
}

impl Departure {
    /// A front-end that has just come.
    pub fn new(socket: OwnedFd) -> Departure {
        Departure { socket, agreed: Vec::new(), fds: Vec::new() }
    }
}

/// What hears of a front-end.
pub struct Hooks {
    /// Called with what the next worker needs if this one dies from now on, and with `None` before anything
    /// is said on the connection that the next one would have to know.
    pub keep: Box<dyn Fn(Option<Departure>) + Send>,
    /// Called at the end of its connection, or with it when it was [left](VhostUser::leave).
    pub ended: Box<dyn FnOnce(Option<Departure>) + Send>,
}

/// A front-end, and what hears of it.
type Visit = (Departure, Hooks);

/// An image that is exported to one virtual machine at a time.
#[derive(Debug)]
pub struct VhostUser {
    served: Arc<Served>,
    line: Arc<Steering>,
}

/// What the thread and those who steer it share.
#[derive(Debug)]
struct Steering {
    state: Mutex<State>,
    /// What the device looks like at present.
    device: Mutex<Geometry>,
    /// Rings for the thread when it is left, or shall say again what it keeps.
    bell: OwnedFd,
}

#[derive(Debug, Default)]
struct State {
    /// `None` once it is left.
    visits: Option<Sender<Visit>>,
    /// The connection on which a message is being taken in.
    busy: Option<Arc<OwnedFd>>,
    /// The back-end's own channel to its front-end.
    channel: Option<Arc<OwnedFd>>,
}

impl VhostUser {
    /// Makes an image ready for front-ends, without one. `serial` is what a driver gets for the disk's serial
    /// number; `tether` stays open as long as anything may still reach the backing (see
    /// [`becket_engine::Port::tether`]). `on_closed` runs once it is [left](VhostUser::leave) and the last
    /// queue has ended.
    ///
    /// # Errors
    /// The image cannot be served, or no thread can be had; `on_closed` still runs.
    pub fn serve(
        threads: &Arc<IoThreads>,
        setup: Setup,
        serial: &str,
        tether: OwnedFd,
        on_closed: Box<dyn FnOnce() + Send>,
    ) -> Result<VhostUser, ServeError> {
        let (id, count, depth, geometry) = (setup.id, setup.queues, setup.depth, setup.geometry.clone());
        let served = Arc::new(setup.serve_none(geometry.logical_block, Finally::new(on_closed))?);
        let (sender, visits) = channel();
        let state = Mutex::new(State { visits: Some(sender), ..State::default() });
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = match bell {
            Ok(bell) => bell,
            Err(errno) => {
                let _ = served.leave(threads);
                return Err(ServeError::Engine { id, source: spawn_error(errno.into()) });
            }
        };
        let line = Arc::new(Steering { state, device: Mutex::new(geometry), bell });
        let mut number = [0; SERIAL];
        number.iter_mut().zip(serial.bytes()).for_each(|(to, from)| *to = from);
        let queues = Queues {
            threads: Arc::clone(threads),
            served: Arc::clone(&served),
            line: Arc::clone(&line),
            tether: Arc::new(tether),
            depth,
            serial: number,
            running: BTreeMap::new(),
        };
        let spawned = std::thread::Builder::new()
            .name(format!("becket-vm/{id}"))
            .stack_size(STACK)
            .spawn(move || queues.hear_all(&visits, count));
        if let Err(source) = spawned {
            // Without a thread nobody connects: it ends.
            let _ = served.leave(threads);
            return Err(ServeError::Engine { id, source: spawn_error(source) });
        }
        Ok(VhostUser { served, line })
    }

    /// What is served.
    pub fn served(&self) -> &Arc<Served> {
        &self.served
    }

    /// Serves a front-end once those before it are gone, from where another worker has left it if it has.
    /// One that comes too late is given back at once.
    pub fn connect(&self, front: Departure, hooks: Hooks) {
        let visits = self.line.state().visits.clone();
        let left = match visits {
            Some(visits) => visits.send((front, hooks)).err().map(|error| error.0),
            None => Some((front, hooks)),
        };
        if let Some((front, hooks)) = left {
            (hooks.ended)(Some(front));
        }
    }

    /// Has the present front-end's [`Hooks::keep`] called again, if anything is kept.
    pub fn say(&self) {
        self.line.ring();
    }

    /// The device was [changed](Served::change): it looks like this now. Its front-end is notified.
    pub fn changed(&self, geometry: Geometry) {
        *self.line.device.lock().unwrap_or_else(PoisonError::into_inner) = geometry;
        let channel = self.line.state().channel.clone();
        // One that does not listen asks again when it wants to.
        if let Some(channel) = channel
            && let Err(errno) = send(&channel, &config_changed(), None)
        {
            warn!("a front-end cannot be notified that its disk has changed: {errno}");
        }
    }

    /// Finishes the requests that were taken, gives the front-end back, and ends; returns before that. One
    /// that is in the middle of a message loses its connection.
    pub fn leave(&self) {
        let mut state = self.line.state();
        state.visits = None;
        if let Some(socket) = &state.busy {
            // Fails only when it has ended already.
            let _ = rustix::net::shutdown(&**socket, Shutdown::Both);
        }
        drop(state);
        self.line.ring();
    }
}

impl Drop for VhostUser {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Steering {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        // Full means that it rings already.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Whether it is left. If it is not, a message of this connection is taken in from now on.
    fn is_left(&self, busy: Option<&Arc<OwnedFd>>) -> bool {
        let mut state = self.state();
        state.busy = busy.filter(|_| state.visits.is_some()).cloned();
        state.visits.is_none()
    }
}

fn spawn_error(source: std::io::Error) -> becket_engine::Error {
    becket_engine::Error::Spawn { thread: 0, source }
}

/// The rings of the thread's front-end.
struct Queues {
    threads: Arc<IoThreads>,
    served: Arc<Served>,
    line: Arc<Steering>,
    tether: Arc<OwnedFd>,
    depth: u16,
    serial: [u8; SERIAL],
    running: BTreeMap<usize, Running>,
}

/// What a thread has waited for.
enum Event {
    Message,
    Bell,
    Nothing,
}

/// A ring that is served.
struct Running {
    queue: QueueId,
    ended: Receiver<()>,
    base: Arc<AtomicU32>,
}

impl Rings for Queues {
    fn stop(&mut self, vring: usize) -> Option<u32> {
        let Running { queue, ended, base } = self.running.remove(&vring)?;
        // An I/O thread that has ended has ended the process.
        let _ = self.served.remove(&self.threads, queue);
        let _ = ended.recv();
        Some(base.load(Ordering::Acquire))
    }

    fn device(&self) -> (u64, Geometry) {
        let geometry = self.line.device.lock().unwrap_or_else(PoisonError::into_inner).clone();
        (geometry.size, geometry)
    }
}

impl Queues {
    /// Hears one front-end after another, until it is left.
    fn hear_all(mut self, visits: &Receiver<Visit>, queues: u16) {
        while let Ok((front, Hooks { keep, ended })) = visits.recv() {
            if self.line.is_left(None) {
                ended(Some(front));
                continue;
            }
            let socket = Arc::new(front.socket);
            let mut session = Session::new(queues);
            info!("a front-end has come");
            let heard = self
                .go_on(&mut session, &front.agreed, front.fds)
                .and_then(|()| self.hear(&socket, &mut session, &keep));
            self.line.is_left(None);
            session.stop_all(&mut self);
            self.line.state().channel = None;
            let left = match heard {
                Ok(true) => departure(&socket, &session),
                Ok(false) => {
                    info!("a front-end has gone");
                    None
                }
                Err(why) => {
                    warn!("a front-end's connection is ended: {why}");
                    None
                }
            };
            // Its memory, its events and its connection, before the next one.
            drop(session);
            drop(socket);
            ended(left);
        }
        let Queues { threads, served, tether, .. } = self;
        drop(tether);
        if let Err(error) = served.leave(&threads) {
            warn!("cannot leave: {error}");
        }
    }

    /// Goes on where another worker has left a front-end; what ended there without a word to its driver is
    /// notified of now.
    fn go_on(&mut self, session: &mut Session, agreed: &[u8], fds: Vec<OwnedFd>) -> Result<(), String> {
        session.hear_again(self, agreed, fds).map_err(|why| why.to_string())?;
        self.line.state().channel = session.channel.clone();
        self.start_all(session, !agreed.is_empty())
    }

    /// Takes in what a front-end says until it goes, or until it is left, which is `true`.
    fn hear(
        &mut self,
        socket: &Arc<OwnedFd>,
        session: &mut Session,
        keep: &dyn Fn(Option<Departure>),
    ) -> Result<bool, String> {
        let mut payload = Vec::new();
        let mut kept = false;
        loop {
            if self.line.is_left(None) {
                return Ok(true);
            }
            match self.wait(socket, kept).map_err(|errno| errno.to_string())? {
                Event::Message => {}
                Event::Bell => {
                    kept = false;
                    continue;
                }
                Event::Nothing => {
                    keep(departure(socket, session).filter(|_| session.is_noted()));
                    kept = true;
                    continue;
                }
            }
            // What is said now nobody else would know.
            if std::mem::take(&mut kept) {
                keep(None);
            }
            if self.line.is_left(Some(socket)) {
                return Ok(true);
            }
            let mut head = [0; HEAD];
            let mut fds = Vec::new();
            if !receive(socket, &mut head, &mut fds).map_err(|errno| errno.to_string())? {
                return Ok(false);
            }
            let head = Head::read(head).ok_or("a message's header makes no sense")?;
            payload.clear();
            payload.resize(head.size, 0);
            let whole = receive(socket, &mut payload, &mut fds).map_err(|errno| errno.to_string())?;
            if !whole {
                return Err("it ended in the middle of a message".to_owned());
            }
            let wanted = Wanted::read(&head, &payload);
            let answer = session.take(self, &head, wanted, fds).map_err(|why| why.to_string())?;
            self.line.state().channel = session.channel.clone();
            self.start_all(session, false)?;
            if let Some((bytes, fd)) = answer {
                send(socket, &bytes, fd.as_ref()).map_err(|errno| errno.to_string())?;
            }
        }
    }

    /// Waits until a front-end says something or the bell rings; with nothing kept, it only looks.
    fn wait(&self, socket: &OwnedFd, kept: bool) -> Result<Event, Errno> {
        let mut fds = [PollFd::new(socket, PollFlags::IN), PollFd::new(&self.line.bell, PollFlags::IN)];
        let look = Timespec { tv_sec: 0, tv_nsec: 0 };
        match poll(&mut fds, (!kept).then_some(&look)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        let [message, bell] = [0, 1].map(|index| !fds[index].revents().is_empty());
        if bell {
            // Only that it rang matters.
            let _ = rustix::io::read(&self.line.bell, &mut [0; 8]);
        }
        Ok(match (message, bell) {
            (true, _) => Event::Message,
            (false, true) => Event::Bell,
            (false, false) => Event::Nothing,
        })
    }

    /// Starts each ring that does not run and has all that it needs. `again`: its driver may have missed what
    /// ended.
    fn start_all(&mut self, session: &Session, again: bool) -> Result<(), String> {
        for vring in 0..session.vrings.len() {
            if !self.running.contains_key(&vring) {
                self.start(session, vring, again)?;
            }
        }
        Ok(())
    }

    fn start(&mut self, session: &Session, vring: usize, again: bool) -> Result<(), String> {
        let Some(ready) = session.ready(vring) else { return Ok(()) };
        let number = u16::try_from(vring).map_err(|error| error.to_string())?;
        let count = ready.vring.count;
        let events = session.has(EVENT_IDX);
        let memory = Arc::clone(ready.memory);
        let (tables, base) = ((count, ready.address), ready.vring.base);
        let ring = Ring::new(session.layout(), memory, tables, base, events, session.notes(number));
        let ring = ring.map_err(|why| why.to_string())?;
        let base = Arc::new(AtomicU32::new(ring.base()));
        let depth = self.depth.clamp(1, count);
        let ranges = MOST_RANGES as u16;
        let parts = Parts {
            kick: Arc::clone(ready.kick),
            call: ready.vring.call.clone(),
            tether: Arc::clone(&self.tether),
            memory: Arc::clone(ready.memory),
            ring,
            depth,
            ranges,
            serial: self.serial,
            durable: session.is_durable(),
            again,
            base: Arc::clone(&base),
        };
        let (sender, ended) = channel();
        let end = Box::new(move || drop(sender));
        let port = Box::new(VringPort::new(parts));
        let queue = self
            .served
            .add(&self.threads, number, (depth, Memory::Guest(ranges)), port, end)
            .map_err(|error| error.to_string())?;
        self.running.insert(vring, Running { queue, ended, base });
        Ok(())
    }
}

/// What another worker needs to go on with a front-end.
fn departure(socket: &OwnedFd, session: &Session) -> Option<Departure> {
    let messages = session.messages();
    let copy = || -> std::io::Result<Departure> {
        let fds = messages.fds.iter().map(BorrowedFd::try_clone_to_owned).collect::<std::io::Result<_>>()?;
        Ok(Departure { socket: socket.try_clone()?, agreed: messages.bytes.clone(), fds })
    };
    copy().inspect_err(|error| warn!("a front-end cannot be kept: {error}")).ok()
}

/// Fills a buffer from a socket; descriptors are added to those that there are. `false` if the stream has
/// ended before the first byte.
fn receive(socket: &OwnedFd, into: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<bool, Errno> {
    let mut filled = 0;
    while filled < into.len() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut into[filled..])];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = match rustix::net::recvmsg(socket, &mut parts, &mut control, flags) {
            Ok(got) => got.bytes,
            Err(Errno::INTR) => continue,
            Err(Errno::CONNRESET) => 0,
            Err(errno) => return Err(errno),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = message {
                fds.extend(passed);
            }
        }
        if fds.len() > MOST_FDS {
            return Err(Errno::TOOBIG);
        }
        if got == 0 {
            return if filled == 0 { Ok(false) } else { Err(Errno::CONNRESET) };
        }
        filled += got;
    }
    Ok(true)
}

fn send(socket: &OwnedFd, mut bytes: &[u8], fd: Option<&OwnedFd>) -> Result<(), Errno> {
    let mut fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
    while !bytes.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        match rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno),
        }
        fds.clear();
    }
    Ok(())
}
