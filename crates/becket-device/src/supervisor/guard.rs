//! Who comes after a supervisor that died: a process that waits for that, and meanwhile keeps what a
//! successor needs. It never takes the place of one that ended in peace, nor of one that a service manager
//! looks after.
//!
//! The guard is a child of the supervisor, started with its first device, and is the successor itself:
//! `becket serve` that reads a socket before it begins. The socket's end without a word says that the
//! supervisor is dead. So the successor needs no one to start it, its program is the one that ran (also
//! where the file has been replaced), and nothing of it can go wrong before it has its own process. One
//! that dies is replaced at once (`Guard::watch`).
//!
//! It has a copy of all that it takes to serve each device again: so devices survive the death of
//! supervisor and worker at the same time. [`keeper`] has that side, and how another
//! supervisor than the guard gets it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::Weak;
use std::time::{Duration, Instant};
use tracing::{error, warn};

use super::keeper;
use super::restarts::Restarts;
use crate::contract::kept::Kept;
use crate::contract::protocol;
use crate::contract::{DIR_VARIABLE, LINKS_VARIABLE};
use crate::record::store::Store;
use crate::supervisor::manager;
use crate::system::helper;
use crate::system::process::ProcessId;
use crate::system::sync::{LAST, Ranked, lock, spawn};
use crate::system::{isolate, origin};

/// How long a guard may take to let go of a device. One that takes longer is ended and replaced: it holds
/// locks of an image that should be free.
const PATIENCE: Duration = Duration::from_secs(3);
/// The pause before another attempt to start one.
const PAUSE: Duration = Duration::from_secs(5);

/// Whose devices a guard keeps.
pub(super) trait Guarded: Send + Sync {
    fn guard(&self) -> &Guard;
    /// Gives a new guard all devices.
    fn keep_all(&self);
}

/// The supervisor's side.
#[derive(Debug, Default)]
pub(crate) struct Guard {
    standing: Ranked<LAST, Standing>,
    /// What a guard before this process, or this process as a guard, has kept.
    inherited: Ranked<LAST, BTreeMap<u64, Kept>>,
    cache_size: Option<u64>,
}

#[derive(Debug, Default)]
struct Standing {
    /// To the one that stands.
    guarding: Option<Guarding>,
    /// One has been started, and is replaced when it dies.
    begun: bool,
    /// No guard is wanted any more.
    over: bool,
}

#[derive(Debug)]
struct Guarding {
    socket: OwnedFd,
    id: Option<ProcessId>,
}

impl Guard {
    /// One whose workers keep so many bytes of decoded blocks, as ours do.
    pub(super) fn new(cache_size: Option<u64>) -> Guard {
        Guard { cache_size, ..Guard::default() }
    }

    /// Has what a dead supervisor's guard kept taken over.
    pub(super) fn inherit(&self, kept: BTreeMap<u64, Kept>) {
        *lock(&self.inherited) = kept;
    }

    /// What was inherited; once.
    pub(super) fn inherited(&self) -> BTreeMap<u64, Kept> {
        std::mem::take(&mut *lock(&self.inherited))
    }

    /// Makes sure that a guard runs, from the first device on.
    pub(super) fn stand(&self, store: &Store, supervisor: &Weak<impl Guarded + 'static>) {
        if cfg!(test) {
            return;
        }
        let mut standing = lock(&self.standing);
        if standing.begun || standing.over {
            return;
        }
        standing.begun = true;
        // Not by the one that watches: a device is not announced before the guard keeps it.
        let child = self.started(&mut standing, store);
        drop(standing);
        let (store, supervisor) = (store.clone(), Weak::clone(supervisor));
        spawn(move || watch(child, &store, &supervisor));
    }

    /// Whether a guard runs.
    pub(super) fn stands(&self) -> bool {
        lock(&self.standing).guarding.is_some()
    }

    fn started(&self, standing: &mut Standing, store: &Store) -> Option<Child> {
        let (child, socket) =
            start(store, self.cache_size).inspect_err(|error| error!("nobody stands guard: {error}")).ok()?;
        standing.guarding = Some(Guarding { socket, id: ProcessId::of(child.id()) });
        Some(child)
    }

    /// Has the guard keep a device, in the place of what it had of it. `link` is what the driver adds to it.
    pub(super) fn keep(&self, kept: &Kept, link: &[OwnedFd]) {
        let mut fds = kept.descriptors();
        fds.extend(link.iter().map(|fd| fd.as_fd()));
        self.tell(|guarding| keeper::keep(&guarding.socket, &kept.serve, &fds, PATIENCE));
    }

    /// Has the guard close all that it has of a device; returns when it has.
    pub(super) fn forget(&self, mark: u64) {
        self.tell(|guarding| keeper::forget(&guarding.socket, mark, PATIENCE));
    }

    fn tell(&self, what: impl FnOnce(&Guarding) -> io::Result<()>) {
        let mut standing = lock(&self.standing);
        let Some(guarding) = &standing.guarding else { return };
        let Err(error) = what(guarding) else { return };
        // One that has just died is replaced, and the next one is given all devices.
        if error.kind() == io::ErrorKind::TimedOut {
            warn!("its guard does not answer: ended, another one follows");
        }
        if let Some(id) = guarding.id {
            helper::end(id, "guard");
        }
        standing.guarding = None;
    }

    /// All is well: no successor is wanted.
    pub(super) fn dismiss(&self) {
        let mut standing = lock(&self.standing);
        standing.over = true;
        if let Some(guarding) = standing.guarding.take() {
            // One that is dead needs no telling.
            let _ = keeper::dismiss(&guarding.socket, PATIENCE);
        }
    }

    /// No other guard is wanted, and a successor is there already, which asks this one for what it keeps.
    pub(super) fn awaits_successor(&self) {
        let mut standing = lock(&self.standing);
        standing.over = true;
        if let Some(guarding) = &standing.guarding
            && let Err(error) = keeper::stay(&guarding.socket)
        {
            warn!("its guard does not answer: {error}");
        }
    }

    /// No other guard is wanted; the one that stands becomes the successor when this process ends.
    pub(super) fn last(&self) {
        lock(&self.standing).over = true;
    }
}

/// Waits for a guard's death, and replaces it at once.
fn watch(mut child: Option<Child>, store: &Store, supervisor: &Weak<impl Guarded>) {
    let mut restarts = Restarts::new(Instant::now());
    loop {
        let pause = match child.take() {
            Some(mut child) => {
                // How it ended says nothing that counts.
                let _ = child.wait();
                // It could not remove that itself.
                let _ = fs::remove_file(keeper::place(store.runtime(), child.id()));
                restarts.failed(Instant::now());
                restarts.take_pause()
            }
            None => PAUSE,
        };
        std::thread::sleep(pause);
        let Some(supervisor) = supervisor.upgrade() else { return };
        let mut standing = lock(&supervisor.guard().standing);
        if standing.over {
            return;
        }
        warn!("its guard is dead: another one stands guard");
        child = supervisor.guard().started(&mut standing, store);
        drop(standing);
        restarts.began(Instant::now());
        supervisor.keep_all();
    }
}

fn start(store: &Store, cache_size: Option<u64>) -> io::Result<(Child, OwnedFd)> {
    let (ours, theirs) = protocol::pair()?;
    let runtime = store.runtime();
    let child = origin::environment(&mut Command::new("/proc/self/exe"))
        .arg0("becket")
        .args(["serve", "--after-fd", "0"])
        .args(cache_size.map(|size| format!("--cache-size={size}")))
        .env(DIR_VARIABLE, runtime.dir())
        .env(LINKS_VARIABLE, runtime.links())
        .current_dir(isolate::root())
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .process_group(0)
        .spawn()?;
    if manager::looks_after_us() {
        keeper::stay(&ours)?;
    }
    Ok((child, ours))
}
