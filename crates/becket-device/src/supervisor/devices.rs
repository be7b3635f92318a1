//! The devices that a supervisor owns: made, watched, taken away.
//! The map of them is locked for moments only; what takes time happens under the lock of one device.

use std::collections::BTreeMap;
use std::mem;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use becket_engine::Summary;
use becket_transport::{Kind, aside};
use tracing::{error, info, warn};

use super::change::{Length, Target, Wish, apply, plan, say_change, take_image};
use super::driver::Driver;
use super::exports::Exports;
use super::guard::{Guard, Guarded};
use super::links::Fetchers;
use super::make::Made;
use super::manager;
use super::offers::Drivers;
use super::owned::{Owned, Owning};
use super::watch::Watch;
use super::workers::{OnDeath, Worker, Workers};
use crate::contract::kept::Kept;
use crate::contract::messages::{Attach, Count, Detach, Pulse, Refresh, ServerStatus, Set, Stat};
use crate::contract::shape;
use crate::contract::{DeviceInfo, Error, ErrorKind};
use crate::control::health;
use crate::control::server::Service;
use crate::record::device::Device;
use crate::record::judge::disk_of;
use crate::record::store::Store;
use crate::record::unknown;
use crate::system::describe::partitions_as;
use crate::system::process::ProcessId;
use crate::system::sync::{DEVICES, LAST, Ranked, SHARED, lock, spawn};

/// Everything that a supervisor owns.
pub(crate) struct Supervisor {
    pub(super) store: Store,
    /// Precautions that the environment did not allow.
    notes: Vec<String>,
    pub(super) devices: Ranked<DEVICES, BTreeMap<String, Arc<Owned>>>,
    pub(super) drivers: Drivers,
    pub(super) workers: Box<dyn Workers>,
    /// The worker that gets new devices.
    shared: Ranked<SHARED, Option<Arc<dyn Worker>>>,
    /// The number of that worker's process, for those who may not wait; 0 where there is none.
    shares: AtomicU32,
    /// All workers.
    known: Ranked<LAST, Vec<Weak<dyn Worker>>>,
    /// Calls under way that change something: they keep the supervisor from ending.
    busy: Ranked<LAST, usize>,
    stopping: AtomicBool,
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

    /// Writes the records of all devices again, and makes the workers listen again, after the runtime
    /// directory was removed.
    pub(super) fn reappear(&self) {
        let devices: Vec<Arc<Owned>> = lock(&self.devices).values().cloned().collect();
        let mut announced = Vec::new();
        for owned in devices {
            let state = lock(&owned.state);
            if state.gone {
                continue;
            }
            if let Err(error) = self.store.enter(&state.device, |_| false) {
                warn!(device = state.name(), "{error}");
            }
            let worker = state.worker.id();
            if announced.contains(&worker) {
                continue;
            }
            announced.push(worker);
            match state.worker.announce() {
                // It is there still: the directory was not removed as a whole.
                Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {}
                Err(error) => warn!("worker {}: {error}", worker.pid),
                Ok(()) => {}
            }
        }
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

    /// Takes no more devices, and removes the unused ones; returns how many are left.
    pub(crate) fn drain(&self) -> usize {
        self.stopping.store(true, Ordering::SeqCst);
        let devices: Vec<Arc<Owned>> = lock(&self.devices).values().cloned().collect();
        for owned in devices {
            let mut state = lock(&owned.state);
            match self.take_away(&owned, &mut state) {
                Ok(()) | Err(Error::Busy { .. }) => {}
                Err(error) => warn!(device = state.name(), "stays: {error}"),
            }
        }
        let left: Vec<Arc<Owned>> = lock(&self.devices).values().cloned().collect();
        for owned in &left {
            // It goes later, with its last user.
            let mut state = lock(&owned.state);
            self.say_leaving(&mut state);
            self.let_go(owned, &mut state, true);
        }
        left.len()
    }

    /// The driver of devices of that kind.
    pub(super) fn driver(&self, kind: Kind) -> Result<Arc<dyn Driver>, Error> {
        self.drivers.driver(kind, self.store.runtime())
    }

    /// The shared worker; a new one when there is none or it died.
    pub(super) fn shared_worker(&self) -> Result<Arc<dyn Worker>, Error> {
        let mut shared = lock(&self.shared);
        // One that is stopped keeps its devices, and gets no more.
        if let Some(worker) = shared.as_ref().filter(|worker| worker.alive() && !worker.id().stopped()) {
            return Ok(Arc::clone(worker));
        }
        let started = self.own_worker(None)?;
        self.shares.store(started.id().pid, Ordering::Relaxed);
        *shared = Some(Arc::clone(&started));
        Ok(started)
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

    /// A worker for one device, in the group of that `cgroup.procs` where one is given.
    pub(super) fn own_worker(&self, cgroup: Option<BorrowedFd<'_>>) -> Result<Arc<dyn Worker>, Error> {
        let started = self.workers.start(cgroup, self.on_death())?;
        self.know(&started);
        for note in started.notes() {
            warn!("worker {}: {note}", started.id().pid);
        }
        Ok(started)
    }

    /// Asks this worker, too, whether it responds.
    pub(super) fn know(&self, worker: &Arc<dyn Worker>) {
        let mut known = lock(&self.known);
        known.retain(|worker| worker.strong_count() > 0);
        known.push(Arc::downgrade(worker));
    }

    /// What is to happen when a worker dies.
    pub(super) fn on_death(&self) -> OnDeath {
        let myself = self.myself.clone();
        Box::new(move |dead| {
            if let Some(supervisor) = myself.upgrade() {
                supervisor.mourn(dead);
            }
        })
    }

    /// Owns a device from now on.
    pub(super) fn own(&self, owned: &Arc<Owned>) {
        let (name, worker) = {
            let mut state = lock(&owned.state);
            if state.connector.is_none() {
                // One that we made has it; a predecessor's ended with that.
                let (spec, mark) = (state.device.info.spec.clone(), state.device.mark);
                let clients = state.device.clients.clone();
                let Kept { sources, serve, .. } = &mut state.kept;
                let connector = self.connector(&spec, (sources, &serve.map), mark, false, Some(&clients));
                match connector {
                    Ok(connector) => state.connector = connector,
                    Err(error) => warn!(device = state.name(), "{error}"),
                }
            }
            if let Some(connector) = &mut state.connector {
                connector.stays(true);
            }
            (state.name().to_owned(), Arc::clone(&state.worker))
        };
        lock(&self.devices).insert(name, Arc::clone(owned));
        self.catch_up(owned);
        self.guard.stand(&self.store, &self.myself);
        {
            let state = lock(&owned.state);
            if let Ok(driver) = self.driver(state.device.info.transport) {
                driver.welcome(state.kept.serve.id.number, &state.worker, Vec::new());
            }
            self.keep(&state);
        }
        self.watch_over(owned);
        if !worker.alive()
            && let Some(supervisor) = self.myself.upgrade()
        {
            // It died before it could be known that this device is among those it leaves.
            spawn(move || supervisor.mourn(worker.id()));
        }
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

    /// Changes a device that lives. The record says what is, so nothing is written there before it is done.
    fn change(
        &self,
        name: &str,
        wish: impl FnOnce(&DeviceInfo) -> Result<Wish, Error>,
    ) -> Result<DeviceInfo, Error> {
        let owned = self.owned(name).ok_or_else(|| self.not_owned(name))?;
        let mut state = lock(&owned.state);
        if state.gone {
            return Err(Error::NoDevice { target: name.to_owned() });
        }
        state.responds()?;
        let target = plan(&state, wish(&state.device.info)?)?;
        self.carry_out(&mut state, target)
    }

    /// Has a device follow the length that its image is said to have now.
    pub(super) fn follow(&self, state: &mut Owning, size: u64) -> Result<(), Error> {
        let _busy = Busy::begin(self);
        let target = plan(state, Wish { length: Some(Length::Served(size)), ..Wish::default() })?;
        if target.device.info.size == state.device.info.size {
            return Ok(());
        }
        state.responds()?;
        self.carry_out(state, target).map(drop)
    }

    fn carry_out(&self, state: &mut Owning, target: Target) -> Result<DeviceInfo, Error> {
        let driver = self.driver(state.device.info.transport)?;
        apply(&*driver, &*state.worker, &state.kept, &target)?;
        let Target { mut device, change, sources, partitions, .. } = target;
        change.apply(&mut state.kept.serve);
        if let Some(sources) = sources {
            // With the old ones go the locks of the old image.
            let old = mem::replace(&mut state.kept.sources, sources);
            aside::close(move || drop(old));
            self.guard.forget(state.device.mark);
        }
        self.keep(state);
        if let Some(promised) = partitions {
            const STALE: &str = "its partitions are not those of its image";
            device.info.warnings.retain(|warning| !warning.starts_with(STALE));
            if let Err(error) = driver.repartition(state.kept.serve.id.number, &promised) {
                device.info.warnings.push(format!("{STALE}: {error}"));
            }
            device.info.partitions =
                partitions_as(becket_transport::node::partitions(&disk_of(&device.info)), &promised);
        }
        let unrecorded = match self.store.update(&state.device, &device) {
            Ok(true) => None,
            Ok(false) => Some("its record is gone".to_owned()),
            Err(error) => Some(error.to_string()),
        };
        // Kernel and worker have changed, and a successor trusts the worker: an outdated record undoes
        // nothing.
        say_change(&state.device.info, &device.info);
        state.device = device;
        let mut info = state.device.info.clone();
        if let Some(why) = unrecorded {
            let warning = format!("{} is changed, but that could not be recorded: {why}", info.name);
            warn!("{warning}");
            info.warnings.push(warning);
        }
        Ok(info)
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

    /// The same, but a device that we are just making is waited for.
    fn await_owned(&self, name: &str) -> Result<Option<Arc<Owned>>, Error> {
        for _ in 0..100 {
            if let Some(owned) = self.owned(name) {
                return Ok(Some(owned));
            }
            if self.store.device(name)?.is_none_or(|device| device.server != Some(ProcessId::own())) {
                return Ok(None);
            }
            self.workers.rest(Duration::from_millis(20));
        }
        // It is not being made any more: its making failed and could not be undone.
        Ok(None)
    }
}

impl Service for Supervisor {
    fn begins(&self) -> Box<dyn Send + '_> {
        Box::new(Busy::begin(self))
    }

    fn attach(&self, request: Attach, fds: Vec<OwnedFd>) -> Result<DeviceInfo, Error> {
        if self.stopping.load(Ordering::SeqCst) {
            return Err(Error::Failed {
                kind: ErrorKind::Server,
                message: "becket's server is ending and takes no more devices".to_owned(),
                hint: Some(
                    "detach those that are in use (becket list): the next attach starts a new one".to_owned(),
                ),
            });
        }
        let name = request.name.clone().unwrap_or_default();
        let (made, worker) = self.make(request, fds).inspect_err(|error| {
            error!(event = "attach_failed", device = name, "could not be attached: {error}");
        })?;
        let Made { device, kept, connector } = made;
        let info = device.info.clone();
        let image = info.spec.url.clone().unwrap_or_else(|| info.spec.image.display().to_string());
        info!(event = "attached", device = info.name, "attached as {}: {image}", info.device.display());
        let owned = Owned::new(device, kept, worker);
        lock(&owned.state).connector = connector;
        self.own(&owned);
        Ok(info)
    }

    fn detach(&self, request: &Detach) -> Result<DeviceInfo, Error> {
        let Some(owned) = self.await_owned(&request.name)? else {
            return self.detach_orphan(&request.name, request.lazy);
        };
        let mut state = lock(&owned.state);
        let by_force = request.force == Some(true) && !self.driver(state.device.info.transport)?.has_disk();
        let taken = match by_force {
            true => self.take_by_force(&owned, &mut state),
            false => self.take_away(&owned, &mut state),
        };
        match taken {
            Err(Error::Busy { .. }) if request.lazy => {
                self.say_leaving(&mut state);
                self.let_go(&owned, &mut state, true);
                Ok(state.device.info.clone())
            }
            other => other.map(|()| state.device.info.clone()),
        }
    }

    fn list(&self) -> Vec<DeviceInfo> {
        self.recall(false);
        let devices: Vec<Arc<Owned>> = lock(&self.devices).values().cloned().collect();
        devices.iter().map(|owned| lock(&owned.state).info()).collect()
    }

    fn refresh(&self, request: &Refresh) -> Result<DeviceInfo, Error> {
        let partitions = request.partitions.as_deref();
        let partitions = partitions.map(|table| table.iter().cloned().map(Into::into).collect());
        // Its length has been asked for before, and that of a qcow2, for example, is no file's.
        let length = match partitions {
            None => Some(self.length_now(&request.name)?),
            Some(_) => None,
        };
        self.change(&request.name, |_| Ok(Wish { length, partitions, ..Wish::default() }))
    }

    fn set(&self, request: Set, fds: Vec<OwnedFd>) -> Result<DeviceInfo, Error> {
        let Set { name, direct_io, read_only, size_limit, shortest, image } = request;
        self.change(&name, |info| {
            let read_only_then = read_only.unwrap_or(info.spec.read_only);
            let image = image
                .map(|image| take_image(image, fds, info.spec.block_size, read_only_then))
                .transpose()?;
            let length = size_limit.map(|limit| Length::Limit(Some(limit).filter(|limit| *limit > 0)));
            Ok(Wish { direct_io, read_only, length, shortest, image, partitions: None })
        })
    }

    fn stat(&self, request: &Stat) -> Result<Summary, Error> {
        let owned = self.owned(&request.name).ok_or_else(|| self.not_owned(&request.name))?;
        let state = lock(&owned.state);
        if state.gone {
            return Err(Error::NoDevice { target: request.name.clone() });
        }
        state.counted()
    }

    fn hand_over(&self) -> Result<(), Error> {
        if manager::looks_after_us() {
            let message = "a service manager looks after becket's server, and starts the next one itself";
            let hint =
                "systemctl restart becket: it takes over, and replaces the processes of an older becket";
            return Err(unsupported(message.to_owned(), hint));
        }
        self.step_down("a successor takes over");
        Ok(())
    }

    fn ping(&self) -> Pulse {
        let workers: Vec<Arc<dyn Worker>> = lock(&self.known).iter().filter_map(Weak::upgrade).collect();
        let shared = Some(self.shares.load(Ordering::Relaxed)).filter(|pid| *pid > 0);
        let ask = |worker: &Arc<dyn Worker>| {
            let silent = worker.alive() && !worker.responds(health::WORKER) && worker.alive();
            silent.then(|| worker.id().pid)
        };
        // Side by side, so that it takes no longer than one.
        let unresponsive = match workers.as_slice() {
            [] => Vec::new(),
            [one] => ask(one).into_iter().collect(),
            all => std::thread::scope(|scope| {
                let asked: Vec<_> = all.iter().map(|worker| scope.spawn(move || ask(worker))).collect();
                asked.into_iter().filter_map(|asked| asked.join().ok().flatten()).collect()
            }),
        };
        let drivers = self.drivers.offers().filter(|offer| self.drivers.is_open(offer.kind));
        let drivers = drivers.filter_map(|offer| self.driver(offer.kind).ok());
        let connections = drivers
            .flat_map(|driver| driver.visitors())
            .map(|(export, clients)| Count { export, clients })
            .collect();
        Pulse { unresponsive, shared, connections, stored: self.fetchers.stored() }
    }

    fn status(&self) -> ServerStatus {
        let worker = lock(&self.shared).clone().filter(|worker| worker.alive());
        let of_worker = worker.iter().flat_map(|worker| worker.notes()).map(|note| format!("worker: {note}"));
        ServerStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            worker_pid: worker.as_ref().map(|worker| worker.id().pid),
            devices: u32::try_from(self.owns()).unwrap_or(u32::MAX),
            fetchers: u32::try_from(self.fetchers.count()).ok(),
            stopping: self.stopping.load(Ordering::SeqCst),
            notes: self.notes.iter().cloned().chain(of_worker).collect(),
        }
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
struct Busy<'a>(&'a Supervisor);

impl<'a> Busy<'a> {
    fn begin(supervisor: &'a Supervisor) -> Busy<'a> {
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
