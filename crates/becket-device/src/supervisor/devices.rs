//! What a supervisor has: its devices, its workers, its drivers; and what is noted of a device.
//! The map of devices is locked for moments only; what takes time happens under the lock of one device.
//! Knows none of the steps by which devices come, change and go: see `service` for the way to each.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use becket_transport::Kind;
use tracing::warn;

use super::driver::Driver;
use super::exports::Exports;
use super::guard::{Guard, Guarded};
use super::links::Fetchers;
use super::manager;
use super::offers::Drivers;
use super::owned::{Owned, Owning};
use super::watch::Watch;
use super::workers::{Worker, Workers};
use crate::contract::kept::Kept;
use crate::contract::shape;
use crate::contract::{Error, ErrorKind};
use crate::record::device::Device;
use crate::record::store::Store;
use crate::record::unknown;
use crate::system::process::ProcessId;
use crate::system::sync::{DEVICES, LAST, Ranked, SHARED, lock};

/// Everything that a supervisor owns.
pub(crate) struct Supervisor {
    pub(super) store: Store,
    /// Precautions that the environment did not allow.
    pub(super) notes: Vec<String>,
    pub(super) devices: Ranked<DEVICES, BTreeMap<String, Arc<Owned>>>,
    pub(super) drivers: Drivers,
    pub(super) workers: Box<dyn Workers>,
    /// The worker that gets new devices.
    pub(super) shared: Ranked<SHARED, Option<Arc<dyn Worker>>>,
    /// The number of that worker's process, for those who may not wait; 0 where there is none.
    pub(super) shares: AtomicU32,
    /// All workers.
    pub(super) known: Ranked<LAST, Vec<Weak<dyn Worker>>>,
    /// Calls under way that change something: they keep the supervisor from ending.
    busy: Ranked<LAST, usize>,
    pub(super) stopping: AtomicBool,
    /// A successor waits for our end.
    yielding: AtomicBool,
    pub(super) guard: Guard,
    pub(super) fetchers: Fetchers,
    pub(super) exports: Exports,
    pub(super) watch: Watch,
    pub(super) wake: Box<dyn Fn() + Send + Sync>,
    pub(super) myself: Weak<Supervisor>,
}

impl Supervisor {
    /// `wake` is called when the supervisor may have become idle.
    pub(crate) fn new(
        store: Store,
        notes: Vec<String>,
        workers: Box<dyn Workers>,
        guard: Guard,
        drivers: Drivers,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Arc<Supervisor> {
        Arc::new_cyclic(|myself| Supervisor {
            store,
            notes,
            devices: Ranked::default(),
            drivers,
            workers,
            shared: Ranked::default(),
            shares: AtomicU32::new(0),
            known: Ranked::default(),
            busy: Ranked::default(),
            stopping: AtomicBool::new(false),
            yielding: AtomicBool::new(false),
            guard,
            fetchers: Fetchers::default(),
            exports: Exports::default(),
            watch: Watch::default(),
            wake: Box::new(wake),
            myself: myself.clone(),
        })
    }

    /// Whether it owns nothing and makes nothing.
    pub(crate) fn idle(&self) -> bool {
        let busy = *lock(&self.busy);
        busy == 0 && lock(&self.devices).is_empty()
    }

    /// Whether a successor waits, nothing is being changed and every call is answered: its devices stay with
    /// their workers.
    pub(crate) fn yields(&self) -> bool {
        self.stepping_down() && *lock(&self.busy) == 0
    }

    /// Whether it was asked to leave its devices to another server.
    pub(crate) fn stepping_down(&self) -> bool {
        self.yielding.load(Ordering::SeqCst)
    }

    /// Ends once nothing is being changed any more; the devices stay with their workers.
    pub(crate) fn step_down(&self, why: &str) {
        self.stopping.store(true, Ordering::SeqCst);
        if !self.yielding.swap(true, Ordering::SeqCst) {
            warn!("{why}");
        }
        (self.wake)();
    }

    /// Has devices taken over whose worker and supervisor are dead.
    pub(crate) fn inherit(&self, kept: BTreeMap<u64, Kept>) {
        self.guard.inherit(kept);
    }

    /// How many devices it owns.
    pub(crate) fn owns(&self) -> usize {
        lock(&self.devices).len()
    }

    /// Tells the guard, which would come after our sudden death, that this is no such thing.
    pub(crate) fn ends_in_peace(&self) {
        let devices: Vec<Arc<Owned>> = lock(&self.devices).values().cloned().collect();
        // What a device needs that has no worker at this moment, the guard alone has.
        let needs_guard = |owned: &Arc<Owned>| {
            let state = lock(&owned.state);
            !state.worker.alive() || shape::of(state.device.info.transport).kept_descriptors > 0
        };
        match devices.iter().any(needs_guard) {
            false => self.guard.dismiss(),
            // It would only be in the way of the one that waits.
            true if self.stepping_down() => self.guard.awaits_successor(),
            true => self.guard.last(),
        }
        if lock(&self.devices).is_empty() {
            lock(&self.shared).take().inspect(|worker| worker.dismiss());
        }
    }

    /// The driver of devices of that kind.
    pub(super) fn driver(&self, kind: Kind) -> Result<Arc<dyn Driver>, Error> {
        self.drivers.driver(kind, self.store.runtime())
    }

    /// New devices go to this worker.
    pub(super) fn share(&self, worker: Arc<dyn Worker>) {
        self.shares.store(worker.id().pid, Ordering::Relaxed);
        *lock(&self.shared) = Some(worker);
    }

    /// New devices do not go to this worker any more.
    pub(super) fn unshare(&self, worker: &Arc<dyn Worker>) {
        lock(&self.shared).take_if(|shared| shared.id() == worker.id());
    }

    /// Asks this worker, too, whether it responds.
    pub(super) fn know(&self, worker: &Arc<dyn Worker>) {
        let mut known = lock(&self.known);
        known.retain(|worker| worker.strong_count() > 0);
        known.push(Arc::downgrade(worker));
    }

    /// Gives the guard a copy of what it takes to serve a device again, in the place of an earlier one.
    pub(super) fn keep(&self, state: &Owning) {
        if state.gone || !self.guard.stands() {
            return;
        }
        let link = self.driver(state.device.info.transport).and_then(|driver| {
            driver
                .link(state.device.info.number)
                .map_err(Error::io("duplicate the connection of", &state.device.info.device))
        });
        match link {
            Ok(link) => self.guard.keep(&state.kept, &link),
            Err(error) => warn!(device = state.name(), "the guard does not have it: {error}"),
        }
    }

    /// Changes what is recorded of a device. What cannot be recorded is not believed either.
    pub(super) fn note(&self, state: &mut Owning, change: impl FnOnce(&mut Device)) {
        let mut changed = state.device.clone();
        change(&mut changed);
        match self.store.update(&state.device, &changed) {
            Ok(true) => state.device = changed,
            Ok(false) => warn!("the record of {} is gone", state.name()),
            Err(error) => warn!(device = state.name(), "{error}"),
        }
    }

    /// Why a device that has a record is none of ours.
    pub(super) fn not_owned(&self, name: &str) -> Error {
        match self.store.device(name) {
            Ok(Some(device)) => unknown::not_owned(&device, device.worker.is_some_and(ProcessId::alive)),
            _ => Error::unserved(name),
        }
    }

    pub(super) fn owned(&self, name: &str) -> Option<Arc<Owned>> {
        lock(&self.devices).get(name).cloned()
    }
}

impl Guarded for Supervisor {
    fn guard(&self) -> &Guard {
        &self.guard
    }

    fn keep_all(&self) {
        let devices: Vec<Arc<Owned>> = lock(&self.devices).values().cloned().collect();
        for owned in devices {
            self.keep(&lock(&owned.state));
        }
    }
}

/// Counts a call, or a change, that is under way.
pub(super) struct Busy<'a>(&'a Supervisor);

impl<'a> Busy<'a> {
    pub(super) fn begin(supervisor: &'a Supervisor) -> Busy<'a> {
        *lock(&supervisor.busy) += 1;
        Busy(supervisor)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let supervisor = self.0;
        let mut busy = lock(&supervisor.busy);
        *busy = busy.saturating_sub(1);
        let last = *busy == 0;
        drop(busy);
        // With devices it does not become idle by this, and no other waiter needs each notice.
        if last && (supervisor.owns() == 0 || supervisor.stepping_down() || manager::hears_us()) {
            (supervisor.wake)();
        }
    }
}

pub(super) fn unsupported(message: String, hint: &str) -> Error {
    Error::Failed { kind: ErrorKind::Unsupported, message, hint: Some(hint.to_owned()) }
}
