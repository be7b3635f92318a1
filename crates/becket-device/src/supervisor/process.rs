//! The worker as the supervisor sees it: started, given devices, and noticed when it dies.
//! It never waits for a dead worker.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use becket_engine::Summary;
use rustix::net::SendFlags;
use tracing::{info, warn};

use super::introduction::{About, introduction, notes_of, quoted};
use super::workers::{Arrival, Hook, OnDeath, Worker};
use crate::contract::export::{Visitor, Visits};
use crate::contract::kept::Kept;
use crate::contract::protocol::{self, Change, Order, Report, Serve};
use crate::contract::rendezvous;
use crate::contract::versions;
use crate::contract::{DeviceId, Error};
use crate::system::helper;
use crate::system::process::ProcessId;
use crate::system::role::Role;
use crate::system::sync::lock;

/// How long a worker may take until it is ready for orders, and for a question.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long an order may take. A change waits for the requests under way and writes back what its files hold.
/// Long orders are carried out side by side; those of the same device never come at the same time.
const ORDER: Duration = Duration::from_secs(120);

/// The most clients of an export that a worker can be believed to have left.
const MOST_LEFT: usize = 1 << 16;

/// A worker of a predecessor, and what it serves.
pub(super) type Adopted = (Arc<WorkerProcess>, Vec<Kept>);

/// A worker process.
#[derive(Debug)]
pub(super) struct WorkerProcess {
    id: ProcessId,
    socket: OwnedFd,
    /// Where a successor of ours finds it.
    place: PathBuf,
    about: About,
    state: Mutex<State>,
    /// Sharded by device number, so a change wakes only the threads that wait for that device.
    changed: [Condvar; 16],
}

#[derive(Default)]
struct State {
    dead: bool,
    /// It did not answer in time and is being ended. What it may still say is not heard.
    given_up: bool,
    /// The devices that it was ever given. Of others it can say nothing.
    given: HashSet<DeviceId>,
    /// What came of the orders that are waited for: where the device's queues begin.
    answers: HashMap<DeviceId, Result<u32, Error>>,
    /// What it said of devices that were asked about.
    counted: HashMap<DeviceId, Option<Box<Summary>>>,
    /// How often it has answered that it responds.
    pongs: u64,
    closed: HashSet<DeviceId>,
    /// The clients of exports, and who wants to know of them.
    visits: HashMap<DeviceId, Visits>,
    hooks: HashMap<DeviceId, Hook>,
    left: HashMap<DeviceId, Vec<Arrival>>,
    unsaved: HashMap<DeviceId, String>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("dead", &self.dead).field("given", &self.given).finish_non_exhaustive()
    }
}

impl WorkerProcess {
    /// Starts a worker and waits until it has given up its rights. `on_death` is called once, when it ended.
    pub(super) fn start(
        place: PathBuf,
        cache_size: Option<u64>,
        cgroup: Option<BorrowedFd<'_>>,
        on_death: OnDeath,
    ) -> Result<Arc<WorkerProcess>, Error> {
        let words: Vec<String> = cache_size.map(|size| format!("--cache-size={size}")).into_iter().collect();
        let failed = |error| Error::Worker { what: format!("could not be started: {error}") };
        let (mut started, ours) = helper::start(Role::Worker, &words, cgroup).map_err(failed)?;
        let mut notes = first_words(&ours)?;
        notes.extend(started.note.take());
        let id = started.id().ok_or_else(|| Error::Worker { what: "died at once".to_owned() })?;
        let announced = rendezvous::open(&place)
            .and_then(|socket| protocol::send(&ours, &Order::Await, &[socket.as_fd()]));
        if let Err(error) = announced {
            notes.push(format!("no later server will find it at {}: {error}", place.display()));
        }
        let worker = WorkerProcess::new(id, ours, place, About::ours(notes));
        worker.watch(started.keep(), on_death);
        Ok(worker)
    }

    /// Takes over the worker that waits at `place`, with what it serves. An error comes with the worker that
    /// it is about.
    pub(super) fn adopt(
        place: PathBuf,
        on_death: OnDeath,
    ) -> Result<Adopted, (Option<ProcessId>, io::Error)> {
        let (socket, pid) = rendezvous::call(&place).map_err(|error| (None, error))?;
        let id = ProcessId::of(pid).ok_or_else(|| (None, io::Error::other("it is dying")))?;
        if id.stopped() {
            return Err((Some(id), io::Error::new(io::ErrorKind::TimedOut, "it is stopped")));
        }
        let (about, held) = introduction(&socket, PATIENCE).map_err(|error| (Some(id), error))?;
        let worker = WorkerProcess::new(id, socket, place, about);
        worker.state().given = held.iter().map(|kept| kept.serve.id).collect();
        worker.watch(None, on_death);
        Ok((worker, held))
    }

    fn new(id: ProcessId, socket: OwnedFd, place: PathBuf, about: About) -> Arc<WorkerProcess> {
        let (state, changed) = (Mutex::default(), std::array::from_fn(|_| Condvar::new()));
        Arc::new(WorkerProcess { id, socket, place, about, state, changed })
    }

    /// Hears its reports until it dies.
    fn watch(self: &Arc<Self>, child: Option<helper::Kept>, on_death: OnDeath) {
        let worker = Arc::clone(self);
        std::thread::spawn(move || {
            if let Err(error) = worker.listen() {
                // Whatever it is, it is not a worker any more.
                warn!("worker {}: {error}: ended", worker.id.pid);
                worker.kill();
            }
            if !worker.about.withholds || !worker.id.alive() {
                remove(&worker.place);
            }
            let pid = worker.id.pid;
            match child.map(helper::Kept::wait) {
                Some(Ok(status)) => info!(event = "worker_ended", "worker {pid} ended: {status}"),
                _ => info!(event = "worker_ended", "worker {pid} ended"),
            }
            on_death(worker.id);
        });
    }

    /// Hears its reports until it is gone, or says what makes no sense.
    fn listen(&self) -> io::Result<()> {
        let outcome = loop {
            match protocol::receive::<Report>(&self.socket) {
                Ok(Some((report, fds))) => self.hear(report, fds),
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        self.state().dead = true;
        self.changed.iter().for_each(Condvar::notify_all);
        outcome
    }

    /// Keeps what it says of devices that it was given, as far as it may be asked for.
    fn hear(&self, report: Report, fds: Vec<OwnedFd>) {
        let Some(id) = report.device() else { return };
        let mut hook = None;
        let mut state = self.state();
        if !state.given.contains(&id) && id != DeviceId::NONE {
            return;
        }
        let answer = match report {
            Report::Ready { first, .. } => Some(Ok(first)),
            Report::Failed { why, .. } => Some(Err(refused(id, &quoted(&why)))),
            Report::Full { why, room, .. } => {
                Some(Err(Error::Full { what: format!("is full: {}", quoted(&why)), room }))
            }
            Report::Counted { id: DeviceId::NONE, .. } => {
                state.pongs += 1;
                None
            }
            Report::Counted { stats, .. } => {
                state.counted.insert(id, stats);
                None
            }
            Report::Unsaved { why, .. } => state.unsaved.insert(id, quoted(&why)).and(None),
            Report::Closed { .. } => {
                state.closed.insert(id);
                None
            }
            Report::Visits { visits, .. } => {
                state.visits.insert(id, visits);
                hook = state.hooks.get(&id).cloned().map(|hook| (hook, visits));
                None
            }
            Report::Left { visitor, .. } => {
                let left = state.left.entry(id).or_default();
                // It comes before those who wait for their turn.
                let first = is_again(&visitor);
                if first {
                    left.retain(|(other, _)| !is_again(other));
                }
                left.insert(if first { 0 } else { left.len() }, (visitor, fds));
                left.truncate(MOST_LEFT);
                None
            }
            Report::Stays { .. } => {
                state.left.entry(id).or_default().retain(|(other, _)| !is_again(other));
                None
            }
            Report::Started { .. } | Report::Refused { .. } | Report::Held(_) | Report::Handed(_) => None,
        };
        if let Some(answer) = answer {
            state.answers.insert(id, answer);
        }
        drop(state);
        self.condition_of(id).notify_all();
        if let Some((hook, visits)) = hook {
            hook(visits);
        }
    }

    /// Gives an order about a device and waits for the answer.
    ///
    /// A worker that does not answer in time counts as dead and is ended: it could carry the order out
    /// unexpectedly later, and its late answer would be taken for that to another order.
    fn order(
        &self,
        id: DeviceId,
        order: &Order,
        fds: &[BorrowedFd<'_>],
        patience: Duration,
    ) -> Result<u32, Error> {
        if !self.alive() {
            return Err(refused(id, "died"));
        }
        let mut state = self.state();
        state.given.insert(id);
        state.answers.remove(&id);
        drop(state);
        self.tell(order, fds)?;
        let mut answer = None;
        // Time in which it is stopped does not count: who stopped it lets it go on, or ends it.
        while answer.is_none() {
            answer = self.wait(id, patience, |state| {
                state.answers.remove(&id).or_else(|| state.dead.then(|| Err(refused(id, "died"))))
            });
            if !self.id.stopped() {
                break;
            }
        }
        answer.unwrap_or_else(|| {
            warn!("worker {} does not answer about {}: ended", self.id.pid, id);
            self.state().given_up = true;
            self.kill();
            Err(Error::Worker { what: format!("does not answer about {}", id) })
        })
    }

    fn tell(&self, order: &Order, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        protocol::send(&self.socket, order, fds)
            .map_err(|error| Error::Worker { what: format!("does not receive a device: {error}") })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Where one waits for news of a device.
    fn condition_of(&self, id: DeviceId) -> &Condvar {
        let [first, ..] = &self.changed;
        self.changed.get(id.number as usize % self.changed.len()).unwrap_or(first)
    }

    /// Waits until `done` answers to news of a device, or time is up.
    fn wait<T>(&self, id: DeviceId, timeout: Duration, done: impl Fn(&mut State) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + timeout;
        let mut state = self.state();
        loop {
            if let Some(answer) = done(&mut state) {
                return Some(answer);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            let place = self.condition_of(id);
            state = place.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Worker for WorkerProcess {
    fn id(&self) -> ProcessId {
        self.id
    }

    fn notes(&self) -> &[String] {
        &self.about.notes
    }

    fn alive(&self) -> bool {
        matches!(&*self.state(), State { dead: false, given_up: false, .. })
    }

    fn died(&self) -> bool {
        matches!(&*self.state(), State { dead: true, given_up: false, .. })
    }

    /// The question is one that workers of all versions answer: the counters of a device that does not exist.
    fn responds(&self, patience: Duration) -> bool {
        if self.id.stopped() {
            return false;
        }
        let before = self.state().pongs;
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let asked = serde_json::to_vec(&Order::Stat { id: DeviceId::NONE })
            .map_err(io::Error::from)
            .and_then(|packet| protocol::send_packet(&self.socket, &packet, &[], flags));
        if asked.is_err() {
            // It has not read its earlier orders, or it is dead, which is found out elsewhere.
            return !self.alive();
        }
        let heard = |state: &mut State| (state.dead || state.pongs > before).then_some(());
        self.wait(DeviceId::NONE, patience, heard).is_some()
    }

    fn serve(&self, serve: Serve, fds: &[BorrowedFd<'_>]) -> Result<u32, Error> {
        let id = serve.id;
        if !versions::all_known(&serve.needs, &self.about.features) {
            let why = "is of an older version, which `becket serve --takeover` replaces";
            return Err(Error::Worker { what: format!("{why}; it cannot serve {}", id) });
        }
        let mut state = self.state();
        // The number may have belonged to another device before.
        state.closed.remove(&id);
        state.visits.remove(&id);
        state.hooks.remove(&id);
        state.left.remove(&id);
        state.unsaved.remove(&id);
        drop(state);
        self.order(id, &Order::Serve(Box::new(serve)), fds, ORDER)
    }

    fn change(&self, change: Change, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        self.order(change.id, &Order::Change(Box::new(change)), fds, ORDER).map(drop)
    }

    fn stats(&self, id: DeviceId) -> Result<Summary, Error> {
        self.state().counted.remove(&id);
        self.tell(&Order::Stat { id }, &[])?;
        let answer = self.wait(id, PATIENCE, |state| match state.counted.remove(&id) {
            Some(stats) => Some(stats.ok_or("does not serve")),
            None => state.dead.then_some(Err("died with")),
        });
        match answer.unwrap_or(Err("does not answer about")) {
            Ok(stats) => Ok(*stats),
            Err(what) => Err(Error::Worker { what: format!("{what} {}", id) }),
        }
    }

    fn leave(&self, id: DeviceId) -> Result<(), Error> {
        self.tell(&Order::Leave { id }, &[])
    }

    fn expect(&self, id: DeviceId, end: bool) -> Result<(), Error> {
        if !self.about.features.iter().any(|known| known == versions::FEATURE_ENDS) {
            return Err(Error::Worker { what: "is of an older version, which does not know how".to_owned() });
        }
        self.order(id, &Order::Expect { id, end }, &[], ORDER).map(drop)
    }

    fn take_unsaved(&self, id: DeviceId) -> Option<String> {
        self.state().unsaved.remove(&id)
    }

    fn give_up_reads(&self, id: DeviceId, before: u64) {
        // One that cannot be asked has none.
        let _ = self.tell(&Order::GiveUpReads { id, before }, &[]);
    }

    fn connect(&self, id: DeviceId, visitor: &Visitor, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        self.tell(&Order::Connect { id, visitor: visitor.clone() }, fds)
    }

    fn follow(&self, id: DeviceId, hook: Hook) {
        let mut state = self.state();
        let now = state.visits.get(&id).copied().unwrap_or_default();
        state.hooks.insert(id, Arc::clone(&hook));
        drop(state);
        hook(now);
    }

    fn take_left(&self, id: DeviceId) -> Vec<Arrival> {
        self.state().left.remove(&id).unwrap_or_default()
    }

    fn await_closed(&self, id: DeviceId, timeout: Duration) -> bool {
        self.wait(id, timeout, |state| (state.dead || state.closed.remove(&id)).then_some(())).is_some()
    }

    fn withholds(&self) -> bool {
        self.about.withholds
    }

    fn announce(&self) -> io::Result<()> {
        let socket = rendezvous::open(&self.place)?;
        protocol::send(&self.socket, &Order::Await, &[socket.as_fd()])
    }

    fn dismiss(&self) {
        // Now, since we may be about to end. A later becket comes for what such a worker keeps to itself.
        if !self.about.withholds {
            remove(&self.place);
        }
        // Fails only when it is gone already.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    fn kill(&self) {
        helper::end(self.id, "worker");
    }
}

/// Whether it is the front-end that a worker has, of which each report replaces the one before.
fn is_again(visitor: &Visitor) -> bool {
    matches!(visitor, Visitor::VhostUserAgain { .. })
}

/// Removes a worker's socket.
pub(super) fn remove(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            warn!("{} stays: {error}", path.display());
        }
        _ => {}
    }
}

fn refused(id: DeviceId, why: &str) -> Error {
    Error::Worker { what: format!("cannot serve {}: {why}", id) }
}

/// The first report, before which it is not a worker yet.
fn first_words(socket: &OwnedFd) -> Result<Vec<String>, Error> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    let failed = |error: std::io::Error| Error::Worker { what: format!("does not start: {error}") };
    set_socket_timeout(socket, Timeout::Recv, Some(PATIENCE)).map_err(|error| failed(error.into()))?;
    let report = protocol::receive::<Report>(socket).map_err(failed)?;
    set_socket_timeout(socket, Timeout::Recv, None).map_err(|error| failed(error.into()))?;
    match report {
        Some((Report::Started { notes, .. }, _)) => Ok(notes_of(&notes)),
        Some((Report::Refused { why }, _)) => {
            Err(Error::Worker { what: format!("refused: {}", quoted(&why)) })
        }
        Some(_) => Err(Error::Worker { what: "speaks before it has started".to_owned() }),
        None => Err(Error::Worker { what: "ended before it was ready".to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Command;

    use super::super::introduction::LONGEST;
    use super::*;

    #[test]
    fn an_order_does_not_wait_for_the_answer_to_another() {
        let (ours, theirs) = protocol::pair().unwrap();
        let worker = WorkerProcess::new(ProcessId::own(), ours, PathBuf::new(), About::ours(Vec::new()));
        std::thread::scope(|scope| {
            scope.spawn(|| worker.listen());
            let orders = [1.into(), 2.into()].map(|id| {
                let worker = &worker;
                scope.spawn(move || worker.order(id, &Order::Stat { id }, &[], PATIENCE))
            });
            let mut known: Vec<DeviceId> = Vec::new();
            for _ in 0..2 {
                let Some((Order::Stat { id }, _)) = protocol::receive::<Order>(&theirs).unwrap() else {
                    panic!("another order");
                };
                known.push(id);
            }
            // Both are there before one of them is answered; the first is answered last.
            for id in known.into_iter().rev() {
                protocol::send(&theirs, &Report::Ready { id, first: 0 }, &[]).unwrap();
            }
            assert!(orders.into_iter().all(|order| order.join().unwrap().is_ok()));
            drop(theirs);
        });
    }

    #[test]
    fn one_that_does_not_answer_in_time_is_ended_and_never_asked_again() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let (ours, theirs) = protocol::pair().unwrap();
        let id = ProcessId::of(child.id()).unwrap();
        let worker = WorkerProcess::new(id, ours, PathBuf::new(), About::ours(Vec::new()));
        let order = || worker.order(7.into(), &Order::Stat { id: 7.into() }, &[], Duration::ZERO);
        assert!(worker.alive());
        let error = order().unwrap_err().to_string();
        assert!(error.contains("does not answer"), "{error}");
        assert!(!worker.alive());
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        // Its answer comes late, and is none to the next order.
        worker.state().answers.insert(7.into(), Ok(0));
        order().unwrap_err();
        protocol::receive::<Order>(&theirs).unwrap().unwrap();
        drop(worker);
        assert!(protocol::receive::<Order>(&theirs).unwrap().is_none(), "it was not even given the next");
    }

    #[test]
    fn what_is_said_of_devices_that_it_never_had_is_not_kept() {
        let (ours, _theirs) = protocol::pair().unwrap();
        let worker = WorkerProcess::new(ProcessId::own(), ours, PathBuf::new(), About::ours(Vec::new()));
        worker.state().given.insert(7.into());
        for id in [7.into(), 8.into()] {
            let why = "x\u{1b}[2J\n".repeat(LONGEST);
            worker.hear(Report::Failed { id, why }, Vec::new());
            worker.hear(Report::Closed { id }, Vec::new());
            worker.hear(Report::Counted { id, stats: None }, Vec::new());
        }
        let mut state = worker.state();
        assert_eq!((state.answers.len(), state.closed.len(), state.counted.len()), (1, 1, 1));
        let shown = state.answers.remove(&7.into()).unwrap().unwrap_err().to_string();
        assert!(!shown.contains(char::is_control) && shown.chars().count() < LONGEST + 100, "{shown:?}");
    }

    #[test]
    fn one_that_talks_nonsense_is_ended_and_mourned() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let (ours, theirs) = protocol::pair().unwrap();
        let id = ProcessId::of(child.id()).unwrap();
        let worker = WorkerProcess::new(id, ours, PathBuf::new(), About::ours(Vec::new()));
        let (tell, died) = std::sync::mpsc::channel();
        worker.watch(None, Box::new(move |id| tell.send(id).unwrap()));
        rustix::net::send(&theirs, b"{\"ready\":{\"id\":", rustix::net::SendFlags::empty()).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        assert_eq!(died.recv().unwrap(), id);
    }
}
