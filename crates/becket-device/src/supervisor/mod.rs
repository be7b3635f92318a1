//! The supervisor: the small privileged process that owns the devices that need a server.
//! It parses no image, moves no byte, and ends when it owns nothing.

mod adopt;
mod attempts;
mod away;
mod change;
mod claims;
mod devices;
#[cfg(test)]
mod doubles;
mod driver;
#[cfg(test)]
mod ending_tests;
mod exports;
mod guard;
mod introduction;
mod isolation;
mod joining;
mod keeper;
mod leaving;
mod left;
mod links;
mod make;
mod manager;
mod offers;
mod orphans;
mod owned;
mod place;
mod process;
mod processes;
mod recall;
mod recovery;
mod renew;
mod restarts;
mod service;
mod smaller;
#[cfg(test)]
mod turns_tests;
mod uses;
mod watch;
mod workers;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use becket_uapi::handover::close_inherited;
use becket_uapi::signal::SignalFd;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::FlockOperation;
use rustix::process::Signal;
use tracing::{error, warn};

use crate::contract::Error;
use crate::contract::RUNS_ALREADY;
use crate::contract::messages::{Nothing, ServerStatus};
use crate::control::health::Concerns;
use crate::control::{client, server};
use crate::record::runtime::{Runtime, lock_file};
use crate::record::store::Store;
use crate::system::{isolate, log, origin};
use devices::Supervisor;
use guard::Guard;
use offers::{Drivers, OFFERS};
use place::Place;
use processes::Processes;

/// How long it stays with nothing to do: the client that started it connects in this time, and a script that
/// attaches one image after the other need not start one each time.
const LINGER: Duration = Duration::from_secs(2);
/// How long a second one waits for the first to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections at once, each with a thread; more wait at the door. Commands that stay (`run`) keep theirs.
const MOST_CONNECTIONS: usize = 4096;
/// How often it is looked whether the log has become too long.
const GLANCE: Duration = Duration::from_secs(60);
/// How often it is tried to make a runtime directory again that was removed.
const AGAIN: Duration = Duration::from_millis(250);
/// Its role in the log.
const SUPERVISOR: &str = "supervisor";
/// The last to be killed when memory is short: writes would be lost and their writers stuck.
const OOM_SCORE_ADJ: &str = "-900";

/// How the supervisor runs.
#[derive(Debug, Default)]
pub struct ServeOptions {
    /// Go on when the last device is gone.
    pub stay: bool,
    /// One byte is written to this when clients can connect. The process then belongs to no terminal and no
    /// session but its own.
    pub ready_fd: Option<OwnedFd>,
    /// Take over from the supervisor that runs, and replace its workers.
    pub takeover: bool,
    /// Be the guard of the supervisor at the other end of this socket: keep its devices, and serve when it
    /// has died.
    pub after_fd: Option<OwnedFd>,
    /// Bytes of decoded blocks that each worker may keep until a device says otherwise; it chooses when not
    /// given.
    pub cache_size: Option<u64>,
    /// What it says in its log, and its guard and workers in theirs; when not given, what `BECKET_LOG`
    /// names, or [`LogLevel::INFO`](crate::LogLevel).
    pub log_level: Option<tracing::Level>,
}

/// The supervisor's main: returns when the last device is gone, or when it was asked to end.
///
/// Call it before the process has other threads: they would keep the old mount namespace.
///
/// # Errors
/// Another one runs (an error only for one that is not waited for), or the runtime directory cannot be used.
pub fn serve(options: ServeOptions) -> Result<(), Error> {
    log::of_server(if options.after_fd.is_some() { "guard" } else { SUPERVISOR }, options.log_level);
    let listener = manager::listener();
    // A descriptor of the caller would keep its file, and a lock on that, as long as there is a device.
    close_inherited()
        .map_err(Error::io("close the descriptors that were handed to", "the server".as_ref()))?;
    let succeeds = options.after_fd.is_some();
    isolate::keep_root(succeeds).map_err(Error::io("open the root directory of", "the server".as_ref()))?;
    let guard = options.after_fd.map(|socket| keeper::wait(&socket));
    if matches!(guard, Some(None)) {
        return Ok(());
    }
    let runtime = Runtime::open()?;
    // One that a person or a service manager starts is as they wish.
    let begun = options.ready_fd.is_some() || succeeds;
    let mut notes = if begun { origin::begin() } else { Vec::new() };
    // Before the first thread, which inherits the mask.
    let signals = SignalFd::block(&[Signal::INT, Signal::TERM])
        .map_err(Error::io("block signals of", "the server".as_ref()))?;
    let won = match guard.flatten() {
        // Where a command was faster, that has everything now.
        Some(keeper) => match keeper.succeed(&runtime)? {
            Some((lock, kept)) => Some((lock, Some(kept))),
            None => return Ok(()),
        },
        None => only_one(&runtime, options.takeover, listener.is_some())?.map(|lock| (lock, None)),
    };
    let Some((lock, kept)) = won else {
        return match options.ready_fd {
            Some(ready) => announce(ready),
            None => Err(Error::Server { what: RUNS_ALREADY.to_owned(), log: None }),
        };
    };
    log::becomes(SUPERVISOR);
    log::keep_short(runtime.log());
    isolate::limits();
    notes.extend(isolate::mounts(runtime.dir()));
    if let Err(error) = fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ) {
        if begun {
            // The caller's own may be high. Where it may not be lowered, it stays.
            let _ = fs::write("/proc/self/oom_score_adj", "0");
        }
        notes.push(format!("oom_score_adj: this environment does not allow it ({error})"));
    }
    for note in &notes {
        warn!("{note}");
    }
    let mut place = Place::new(listener, &runtime)?;
    if let Some(ready) = options.ready_fd {
        announce(ready)?;
    }
    let room = Room::new(&runtime, notes, options.stay, options.cache_size)?;
    room.supervisor.inherit(kept.unwrap_or_else(|| keeper::inherited(&runtime)));
    let predecessors = room.supervisor.adopt();
    let old = |worker: &Arc<dyn workers::Worker>| options.takeover || !worker.id().runs_our_program();
    // A manager starts us anew after an upgrade, too.
    let renews = options.takeover || manager::looks_after_us();
    let old: Vec<_> = predecessors.into_iter().filter(|worker| renews && old(worker)).collect();
    let supervisor = Arc::clone(&room.supervisor);
    // Before a call is heard: no device may go to one that is about to end.
    old.iter().for_each(|worker| supervisor.unshare(worker));
    let result = std::thread::scope(|scope| {
        // Beside the calls: they need not wait until a device can move.
        scope.spawn(|| {
            supervisor.renew(old);
            manager::tell("READY=1");
        });
        room.run(&mut place, &signals)
    });
    manager::tell("STOPPING=1");
    if place.ours {
        // Unlinked while the lock is held, so that no successor's socket is meant.
        let _ = fs::remove_file(runtime.socket());
    }
    if result.is_ok() {
        supervisor.ends_in_peace();
    }
    drop(lock);
    result
}

/// Takes the lock that only one supervisor has; `None` when another one has it and answers. With `takeover`
/// that one is asked to end. A supervisor that was `handed` the socket cannot call the other at it: a call
/// there reaches itself.
fn only_one(runtime: &Runtime, takeover: bool, handed: bool) -> Result<Option<File>, Error> {
    let path = runtime.lock();
    let file = lock_file(&path)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::io("lock", &path)(error)),
        }
        // It may be starting, and it may be ending.
        let runs = if handed {
            false
        } else if takeover {
            // It ends once the calls under way are done. If a command starts another one then, that one is
            // asked.
            client::call_running::<_, Nothing>(runtime, "HandOver", &Nothing {}, Concerns::Server)?;
            false
        } else {
            // An answer, since one that is dying can still be connected to.
            client::call_running::<_, ServerStatus>(runtime, "Status", &Nothing {}, Concerns::Server)?
                .is_some()
        };
        if runs {
            return Ok(None);
        }
        if Instant::now() >= deadline {
            let what = match handed {
                true => {
                    "runs already, and the service manager did not start it: detach its devices, then it ends"
                }
                false => "holds its lock and does not answer",
            };
            return Err(Error::Server { what: what.to_owned(), log: None });
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Says that clients can connect, and lets go of the pipe, also where it is standard output.
fn announce(ready: OwnedFd) -> Result<(), Error> {
    // The process that waited may have given up; that is no reason to end.
    let _ = File::from(ready).write_all(b"\n");
    let null = "/dev/null".as_ref();
    let file = OpenOptions::new().write(true).open(null).map_err(Error::io("open", null))?;
    rustix::stdio::dup2_stdout(&file).map_err(Error::io("redirect output to", null))
}

/// Where clients are received.
struct Room {
    supervisor: Arc<Supervisor>,
    wake: Arc<OwnedFd>,
    connections: Arc<AtomicUsize>,
    stay: bool,
    uid: u32,
}

/// Why the poll returned.
#[derive(Debug, Default)]
struct Events {
    client: bool,
    signal: bool,
}

impl Room {
    fn new(
        runtime: &Runtime,
        notes: Vec<String>,
        stay: bool,
        cache_size: Option<u64>,
    ) -> Result<Room, Error> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(Error::io("make an event for", "the server".as_ref()))?;
        let wake = Arc::new(wake);
        let waker = Arc::clone(&wake);
        let workers = Box::new(Processes::new(runtime, cache_size));
        let store = Store::open(runtime.clone())?;
        let supervisor = Supervisor::new(
            store,
            notes,
            workers,
            Guard::new(cache_size),
            Drivers::new(&OFFERS),
            move || ring(waker.as_fd()),
        );
        let uid = rustix::process::geteuid().as_raw();
        Ok(Room { supervisor, wake, connections: Arc::default(), stay, uid })
    }

    fn run(mut self, place: &mut Place, signals: &SignalFd) -> Result<(), Error> {
        let mut idle_since = Some(Instant::now());
        let mut asked = 0;
        let mut owned = None;
        loop {
            let owns = self.supervisor.owns();
            if owned != Some(owns) {
                manager::tell(&format!("STATUS=devices: {owns}"));
                owned = Some(owns);
            }
            let left = idle_since.map(|since| LINGER.saturating_sub(since.elapsed()));
            let left = left.filter(|_| !self.stay);
            let glance = if place.is_lost() { AGAIN } else { GLANCE };
            let events = self.wait(place, signals, Some(left.map_or(glance, |left| left.min(glance))))?;
            log::shorten();
            // One without devices ends soon.
            if self.stay || self.supervisor.owns() > 0 {
                place.keep(&self.supervisor);
            }
            let full = self.connections.load(Ordering::SeqCst) >= MOST_CONNECTIONS;
            if events.client && !full && !self.supervisor.stepping_down() {
                self.receive(&place.socket);
            } else if events.client {
                // It is for the next server; what we still do ends in a moment. Or one of the others hangs
                // up.
                std::thread::sleep(Duration::from_millis(10));
            }
            while events.signal && signals.take().map_err(Error::io("read", "signals".as_ref()))?.is_some() {
                asked += 1;
                if self.asked_to_end(asked) {
                    return Ok(());
                }
            }
            if self.supervisor.yields() {
                return Ok(());
            }
            let idle = self.supervisor.idle() && self.connections.load(Ordering::SeqCst) == 0;
            idle_since = idle.then(|| idle_since.unwrap_or_else(Instant::now));
            let over = idle_since.is_some_and(|since| !self.stay && since.elapsed() >= LINGER);
            if over || (asked > 0 && idle) {
                return Ok(());
            }
        }
    }

    /// Whether to end at once.
    fn asked_to_end(&mut self, times: u32) -> bool {
        if manager::looks_after_us() && times == 1 {
            self.supervisor.step_down("asked to end; its devices stay with their workers");
            return false;
        }
        if times > 1 {
            warn!("ends with devices in use; their worker goes on");
            return true;
        }
        let left = self.supervisor.drain();
        if left > 0 {
            warn!("{left} devices are in use; ends when they are gone, or at once when asked again");
        }
        left == 0
    }

    fn wait(&self, place: &Place, signals: &SignalFd, timeout: Option<Duration>) -> Result<Events, Error> {
        let failed = |error: io::Error| Error::io("wait for", "clients".as_ref())(error);
        let timeout = timeout.map(Timespec::try_from).transpose();
        let timeout = timeout.map_err(|error| failed(io::Error::other(error)))?;
        let mut fds = [
            PollFd::new(&place.socket, PollFlags::IN),
            PollFd::new(signals, PollFlags::IN),
            PollFd::new(&*self.wake, PollFlags::IN),
            // Only has to wake us.
            PollFd::from_borrowed_fd(
                place.watch.as_ref().map_or(self.wake.as_fd(), AsFd::as_fd),
                PollFlags::IN,
            ),
        ];
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(failed(error.into())),
        }
        let [client, signal, wake, _] = fds.map(|fd| !fd.revents().is_empty());
        if wake {
            // Only that it rang matters, not how often.
            let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
        }
        Ok(Events { client, signal })
    }

    fn receive(&self, listener: &UnixListener) {
        match listener.accept() {
            Ok((stream, _)) => self.converse(stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                error!("cannot accept: {error}");
                // Out of descriptors, most likely: not a reason to spin.
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }

    fn converse(&self, stream: UnixStream) {
        // Counted here and not in the thread: the loop must not see itself idle before that begins.
        self.connections.fetch_add(1, Ordering::SeqCst);
        let (connections, wake) = (Arc::clone(&self.connections), Arc::clone(&self.wake));
        let left = Leaving { connections, wake, counted: AtomicBool::new(true) };
        let (supervisor, uid) = (Arc::clone(&self.supervisor), self.uid);
        let thread = std::thread::Builder::new().spawn(move || {
            server::converse(&*supervisor, stream, uid, &|| left.leave());
            drop(left);
        });
        if let Err(error) = thread {
            error!("no thread for a client, which is hung up on: {error}");
        }
    }
}

/// A connection, as far as it keeps the supervisor from ending.
struct Leaving {
    connections: Arc<AtomicUsize>,
    wake: Arc<OwnedFd>,
    counted: AtomicBool,
}

impl Leaving {
    /// From here on the supervisor need not live for it.
    fn leave(&self) {
        if self.counted.swap(false, Ordering::SeqCst) {
            self.connections.fetch_sub(1, Ordering::SeqCst);
            ring(self.wake.as_fd());
        }
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.leave();
    }
}

fn ring(event: std::os::fd::BorrowedFd<'_>) {
    // Full means that it rings already.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}
