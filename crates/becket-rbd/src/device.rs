//! The program as the connector of a device: it opens the image, takes its lock where the device writes, and
//! gives workers the connections that it serves itself.
//! No connection is given out before it is certain that no earlier program and no earlier worker of the
//! device can still write.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use becket_device::helper::{Describes, Failure, Left, Maker, News, Task, ToSupervisor, helper_main};
use becket_image::link::channel::Earlier;
use becket_image::link::rbd::Rbd;

use crate::cluster::{self, Prepared, Refusal};
use crate::library::Image;
use crate::lock::{self, NoLock};
use crate::serve::{self, Connection, Count, ENDING, Progress};

/// How long a cluster is waited for until that is reported.
const SILENCE: Duration = Duration::from_secs(5);
/// How often is looked whether it answers, and whether the lock is still there.
const LOOK: Duration = Duration::from_secs(1);
/// Why no request is carried out any more.
const TAKEN: &str = "another client has taken its lock, or its pool is gone";

/// Serves a device until its supervisor is gone.
pub(crate) fn main() -> Result<(), String> {
    helper_main(prepare, begin).map_err(|error| error.to_string())?;
    // What librbd still does in threads of its own ends with the process.
    std::process::exit(0)
}

/// What only a process with all its rights can read, or why that cannot be had.
type Key = Result<Prepared, Refusal>;
type Opened = Result<(Image, u64), Failure>;

fn prepare(task: &Task) -> Result<Key, String> {
    Ok(cluster::prepare(Rbd::parse(&task.uri)?))
}

fn begin(task: Task, prepared: Key, line: ToSupervisor) -> Box<dyn Maker> {
    let fresh = !task.again;
    let state = State::Closed(Some(prepared));
    Box::new(Device { task, line, state, connections: Vec::new(), session: None, fresh })
}

enum State {
    /// What was prepared with all rights.
    Closed(Option<Key>),
    Opening(Receiver<Opened>),
    Open(Open),
    /// It could not be opened, and this process can read neither configuration nor key again.
    Failed(Failure),
}

struct Open {
    image: Arc<Image>,
    progress: Arc<Progress>,
}

struct Device {
    task: Task,
    line: ToSupervisor,
    state: State,
    /// Each with its session.
    connections: Vec<(u64, Arc<Connection>)>,
    session: Option<u64>,
    /// No worker has written anything yet.
    fresh: bool,
}

impl Device {
    /// Begins to open the image, by a thread that may wait.
    fn open(&self, prepared: Key) -> Receiver<Opened> {
        let (sender, receiver) = sync_channel(1);
        let (task, line) = (self.task.clone(), self.line.clone());
        std::thread::spawn(move || sender.send(opened(&task, prepared, &line)));
        receiver
    }

    fn attend(&mut self) -> Result<&Open, Failure> {
        if let State::Closed(prepared) = &mut self.state
            && let Some(prepared) = prepared.take()
        {
            self.state = State::Opening(self.open(prepared));
        }
        if let State::Opening(receiver) = &self.state {
            let outcome = receiver.recv_timeout(SILENCE);
            self.state = match outcome {
                Err(RecvTimeoutError::Timeout) => {
                    return Err(Failure::Away("the cluster does not answer".to_owned()));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    State::Failed(Failure::Spent("it could not be opened".to_owned()))
                }
                Ok(Ok((image, size))) => {
                    let open = Open { image: Arc::new(image), progress: Progress::of(size) };
                    watch(&open, &self.task, &self.line);
                    State::Open(open)
                }
                Ok(Err(failure)) => State::Failed(failure),
            };
        }
        match &self.state {
            State::Open(open) if open.progress.fenced.load(Ordering::Acquire) => {
                Err(Failure::Over(TAKEN.to_owned()))
            }
            State::Open(open) => Ok(open),
            State::Failed(failure) => Err(failure.clone()),
            _ => Err(Failure::Away("the cluster cannot be reached".to_owned())),
        }
    }
}

/// Connects, opens the image, and takes its lock.
fn opened(task: &Task, prepared: Key, line: &ToSupervisor) -> Opened {
    let refused = |refusal: Refusal| Failure::Spent(refusal.why);
    let cluster = prepared.and_then(Prepared::connect).map_err(refused)?;
    let image = cluster.open(!task.writes).map_err(refused)?;
    let failed = |errno| Failure::Spent(cluster::said(errno));
    // Before the lock: that of another image is none of this device's business.
    if task.agreed.image.is_some() && cluster.number(&image).map_err(failed)? != task.agreed.image {
        return Err(Failure::Replaced("another image has its name now".to_owned()));
    }
    if task.writes {
        let address = image.cluster().address().map_err(failed)?;
        let begins = || line.tell(News::Client(lock::about_to(&address)));
        lock::take(&image, task.again, &task.clients, begins).map_err(|no| match no {
            NoLock::Not(refusal) => refused(refusal),
            NoLock::Lost(why) => Failure::Over(why),
        })?;
        line.tell(News::Client(address));
    }
    let size = image.size().map_err(failed)?;
    line.tell(News::Size(size));
    Ok((image, size))
}

/// Two threads that look after an open image: one says when the cluster does not answer, the other one when
/// the lock is gone. The second may have to wait for the cluster itself.
fn watch(open: &Open, task: &Task, line: &ToSupervisor) {
    let (progress, image, said) = (Arc::clone(&open.progress), Arc::downgrade(&open.image), line.clone());
    let pool = Rbd::parse(&task.uri).map(|rbd| rbd.pool).unwrap_or_default();
    std::thread::spawn(move || {
        let (mut reads, mut writes) = (Silence::new(), Silence::new());
        let mut away = false;
        loop {
            std::thread::sleep(LOOK);
            let (no_read, no_write) = (reads.is_long(&progress.reads), writes.is_long(&progress.writes));
            if !no_read && !no_write {
                if std::mem::take(&mut away) {
                    said.tell(News::Here);
                }
            } else if !std::mem::replace(&mut away, true) {
                said.tell(News::Away("the cluster does not answer".to_owned()));
                let full = image.upgrade().filter(|_| !no_read);
                if let Some(pool) = full.and_then(|image| cluster::full_pool(image.cluster(), &pool)) {
                    said.tell(News::Away(format!("its pool {pool:?} is full: writes wait until it is not")));
                }
            }
        }
    });
    let (image, progress, line) = (Arc::downgrade(&open.image), Arc::clone(&open.progress), line.clone());
    let writes = task.writes;
    let told = AtomicBool::new(false);
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(LOOK);
            let Some(image) = image.upgrade() else { return };
            if let Ok(size) = image.size()
                && progress.size.swap(size, Ordering::Relaxed) != size
            {
                line.tell(News::Size(size));
            }
            let gone = writes && matches!(image.has_lock(), Ok(false) | Err(libc::ESHUTDOWN | libc::EROFS));
            if gone {
                progress.fenced.store(true, Ordering::Release);
            }
            if progress.fenced.load(Ordering::Acquire) && !told.swap(true, Ordering::AcqRel) {
                line.tell(News::Lost(TAKEN.to_owned()));
            }
        }
    });
}

/// How long requests of a kind were under way of which none has finished.
struct Silence {
    finished: Option<u64>,
    since: Instant,
}

impl Silence {
    fn new() -> Silence {
        Silence { finished: None, since: Instant::now() }
    }

    /// Whether that is longer than [`SILENCE`].
    fn is_long(&mut self, count: &Count) -> bool {
        let finished = count.finished();
        if finished.is_none() || finished != self.finished {
            *self = Silence { finished, since: Instant::now() };
        }
        self.since.elapsed() >= SILENCE
    }
}

impl Maker for Device {
    fn prepares(&mut self, session: u64) -> bool {
        if self.session.is_some_and(|known| known != session) {
            // Their worker is dead. What it has sent whole is carried out, and nothing else of theirs.
            self.connections.iter().for_each(|(_, connection)| connection.end());
        }
        false
    }

    fn describes(&self) -> Option<Describes> {
        let State::Open(open) = &self.state else { return None };
        let (image, progress) = (Arc::downgrade(&open.image), Arc::clone(&open.progress));
        Some(Box::new(move |offset, len| {
            let size = progress.size.load(Ordering::Relaxed);
            image.upgrade().and_then(|image| serve::states(&image, size, offset, len)).unwrap_or_default()
        }))
    }

    fn attempt(&mut self, session: u64) -> Result<(OwnedFd, Earlier), Failure> {
        self.attend()?;
        self.connections.retain(|(_, connection)| !connection.is_done());
        // A late write must not meet one that was issued again.
        let left = |(its, connection): &(u64, Arc<Connection>)| *its != session || connection.has_ended();
        if self.connections.iter().any(left) {
            return Err(Failure::Away("earlier requests are not finished".to_owned()));
        }
        let earlier = if self.fresh { Earlier::None } else { Earlier::Kept };
        let broken = |error: std::io::Error| Failure::Away(error.to_string());
        let (ours, theirs) = UnixStream::pair().map_err(broken)?;
        let read_only = !self.task.writes;
        let open = self.attend()?;
        let connection = Connection::start(theirs.into(), &open.image, &open.progress, read_only, None);
        self.connections.push((session, connection.map_err(broken)?));
        if self.session.replace(session).is_some_and(|known| known != session) {
            self.fresh = false;
        }
        let earlier = if self.fresh { earlier } else { Earlier::Kept };
        Ok((ours.into(), earlier))
    }

    fn look(&mut self) -> Result<(), Failure> {
        self.attend().map(drop)
    }

    fn ends(mut self: Box<Self>, over: bool) -> Left {
        if !over {
            // To close the image would give the lock back, and others could come in between.
            std::mem::forget(self);
            return Left::default();
        }
        // One that is not open yet is opened, for the lock may be that of a program before.
        if self.attend().is_ok()
            && let State::Open(Open { image, .. }) = self.state
        {
            // The lock goes, so that the next host has not to wait until this one counts as dead.
            self.connections.iter().for_each(|(_, connection)| connection.end());
            drop(self.connections);
            let (done, ended) = sync_channel(1);
            std::thread::spawn(move || {
                let _ = image.unlock();
                serve::close(image);
                done.send(())
            });
            let _ = ended.recv_timeout(ENDING);
        }
        // Its connections end with it.
        Left::default()
    }
}

const _: () = assert!(serve::LARGEST <= 32 << 20);
