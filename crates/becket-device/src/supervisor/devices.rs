//! The devices that a supervisor owns: made, watched, taken away.
//! The map of them is locked for moments only; what takes time happens under the lock of one device.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use becket_engine::Summary;
use becket_image::{Backing, Map};
use becket_transport::Kind;
use becket_transport::ublk::control::Control;
use rustix::event::{PollFd, PollFlags, poll};

use super::driver::{Driver, disk};
use super::make::{Made, closed, make};
use super::process::{Server, WorkerProcess};
use super::resize::resize;
use super::set::switch;
use crate::attach::forget;
use crate::control::server::Service;
use crate::control::{Attach, Detach, Refresh, ServerStatus, Set, Stat};
use crate::kernel::{Kernel, System};
use crate::process::ProcessId;
use crate::state::{Device, Store};
use crate::{DeviceInfo, DeviceState, Error, ErrorKind, log, users};

/// How often a device that is to go with its last user is looked at.
const LOOK: Duration = Duration::from_millis(200);

/// Everything that a supervisor owns.
pub(crate) struct Supervisor {
    store: Store,
    /// Precautions that the environment did not allow.
    notes: Vec<String>,
    devices: Mutex<BTreeMap<String, Arc<Owned>>>,
    /// Opened when the first device needs it.
    driver: Mutex<Option<Arc<dyn Driver>>>,
    /// The worker that gets new devices.
    worker: Mutex<Option<Arc<WorkerProcess>>>,
    /// Number of attaches under way: they keep the supervisor from ending.
    busy: Mutex<usize>,
    stopping: AtomicBool,
    wake: Box<dyn Fn() + Send + Sync>,
    myself: Weak<Supervisor>,
}

/// A device of ours.
struct Owned {
    server: Arc<dyn Server>,
    state: Mutex<Owning>,
}

struct Owning {
    device: Device,
    /// They carry the image's locks; a later worker gets them too.
    files: Vec<Backing>,
    /// Where its bytes are, in terms of `files`.
    map: Map,
    /// A thread sees to it that the device goes with its last user.
    leaving: bool,
    gone: bool,
}

impl Supervisor {
    /// `wake` is called when the supervisor may have become idle.
    pub(crate) fn new(
        store: Store,
        notes: Vec<String>,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Arc<Supervisor> {
        Arc::new_cyclic(|myself| Supervisor {
            store,
            notes,
            devices: Mutex::default(),
            driver: Mutex::default(),
            worker: Mutex::default(),
            busy: Mutex::default(),
            stopping: AtomicBool::new(false),
            wake: Box::new(wake),
            myself: myself.clone(),
        })
    }

    /// Whether it owns nothing and makes nothing.
    pub(crate) fn idle(&self) -> bool {
        *lock(&self.busy) == 0 && lock(&self.devices).is_empty()
    }

    /// Takes no more devices, and takes away those that nobody uses; returns how many are left.
    pub(crate) fn drain(&self) -> usize {
        self.stopping.store(true, Ordering::SeqCst);
        let devices: Vec<Arc<Owned>> = lock(&self.devices).values().cloned().collect();
        for owned in devices {
            let mut state = lock(&owned.state);
            match self.take_away(&owned, &mut state) {
                Ok(()) | Err(Error::Busy { .. }) => {}
                Err(error) => log::warn(format_args!("{} stays: {error}", state.device.info.name)),
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

    fn driver(&self) -> Result<Arc<dyn Driver>, Error> {
        let mut driver = lock(&self.driver);
        if let Some(driver) = &*driver {
            return Ok(Arc::clone(driver));
        }
        let opened: Arc<dyn Driver> = Arc::new(Control::open().map_err(Error::Device)?);
        *driver = Some(Arc::clone(&opened));
        Ok(opened)
    }

    /// The shared worker; a new one when there is none or it died.
    pub(crate) fn worker(&self) -> Result<Arc<WorkerProcess>, Error> {
        let mut worker = lock(&self.worker);
        if let Some(worker) = worker.as_ref().filter(|worker| worker.alive()) {
            return Ok(Arc::clone(worker));
        }
        let myself = self.myself.clone();
        let started = WorkerProcess::start(move || {
            if let Some(supervisor) = myself.upgrade() {
                supervisor.mourn();
            }
        })?;
        for note in started.notes() {
            log::warn(format_args!("worker {}: {note}", started.id().pid));
        }
        *worker = Some(Arc::clone(&started));
        Ok(started)
    }

    /// Says of each device whose worker died that it is lost.
    fn mourn(&self) {
        let devices: Vec<Arc<Owned>> = lock(&self.devices).values().cloned().collect();
        for owned in devices.iter().filter(|owned| !owned.server.alive()) {
            let state = lock(&owned.state);
            if !state.gone {
                log::warn(format_args!("{} is lost: its worker died", state.device.info.name));
            }
        }
        (self.wake)();
    }

    /// Takes a device away, unless somebody uses it.
    fn take_away(&self, owned: &Arc<Owned>, state: &mut Owning) -> Result<(), Error> {
        if state.gone {
            return Ok(());
        }
        let driver = self.driver()?;
        let id = state.device.info.number;
        if driver.info(id)?.is_some_and(|info| info.ublksrv_flags == state.device.mark) {
            // Without a worker its disk fails every request and is being removed by the kernel itself.
            if !owned.server.alive() {
                driver.stop(id)?;
            } else if !driver.stop_unused(id)? {
                return Err(Error::Busy { device: state.device.info.device.clone(), users: Vec::new() });
            }
            closed(&*owned.server, id)?;
            driver.del(id)?;
        }
        // Before anybody can learn that the device is gone: with these go the image's locks.
        state.files.clear();
        forget(&self.store, &state.device);
        state.gone = true;
        log::warn(format_args!("{} detached", state.device.info.name));
        lock(&self.devices).retain(|_, other| !Arc::ptr_eq(owned, other));
        (self.wake)();
        Ok(())
    }

    /// Sees to it that the device goes with its last user; one that had none yet is waited for, unless `now`.
    fn let_go(&self, owned: &Arc<Owned>, state: &mut Owning, now: bool) {
        if std::mem::replace(&mut state.leaving, true) {
            return;
        }
        let Some(supervisor) = self.myself.upgrade() else { return };
        let owned = Arc::clone(owned);
        std::thread::spawn(move || supervisor.watch(&owned, now));
    }

    /// Says in its record that somebody told the device to go.
    fn say_leaving(&self, state: &mut Owning) {
        let mut leaving = state.device.clone();
        leaving.info.state = DeviceState::Detaching;
        match self.store.update(&state.device, leaving.clone()) {
            Ok(_) => state.device = leaving,
            Err(error) => log::warn(format_args!("{}: {error}", state.device.info.name)),
        }
    }

    /// Looks at a device again and again until it could be taken away. Without `now` it first waits for a user.
    fn watch(&self, owned: &Arc<Owned>, mut now: bool) {
        let mut complaint = String::new();
        while !self.look_once(owned, &mut now, &mut complaint) {
            std::thread::sleep(LOOK);
        }
    }

    /// Whether the device is gone.
    fn look_once(&self, owned: &Arc<Owned>, now: &mut bool, complaint: &mut String) -> bool {
        let mut state = lock(&owned.state);
        if state.gone {
            return true;
        }
        *now |= state.device.info.state == DeviceState::Detaching;
        if !*now {
            let disk = disk(state.device.info.number);
            // Not under the lock: it walks over /proc.
            drop(state);
            *now = users::any(&disk);
            return false;
        }
        match self.take_away(owned, &mut state) {
            Ok(()) => true,
            Err(Error::Busy { .. }) => false,
            Err(error) => {
                // Tried again all the same, but said once.
                let text = format!("{} stays: {error}", state.device.info.name);
                if *complaint != text {
                    log::warn(format_args!("{text}"));
                    *complaint = text;
                }
                false
            }
        }
    }

    /// Takes the device away when the lease's other end is closed. One that is in use then, as a mounted one is by
    /// design, lives on as any autoclear device does.
    fn watch_lease(&self, owned: &Arc<Owned>, lease: OwnedFd) {
        let Some(supervisor) = self.myself.upgrade() else { return };
        let owned = Arc::clone(owned);
        std::thread::spawn(move || {
            while !lock(&owned.state).gone {
                let mut fds = [PollFd::from_borrowed_fd(lease.as_fd(), PollFlags::empty())];
                // Awake now and then: the device may go for another reason.
                let second = rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 };
                if poll(&mut fds, Some(&second)).is_ok_and(|ready| ready > 0) {
                    return supervisor.let_go(&owned, &mut lock(&owned.state), true);
                }
            }
        });
    }

    /// A device that a supervisor before us made, known by its record alone.
    fn detach_orphan(&self, name: &str, lazy: bool) -> Result<DeviceInfo, Error> {
        let none = || Error::NoDevice { target: name.to_owned() };
        let device = self.store.device(name)?.ok_or_else(none)?;
        if device.info.transport != Kind::Ublk {
            return Err(none());
        }
        if device.server.is_some_and(|server| server.pid != std::process::id() && server.alive()) {
            let what = format!("is not the one that owns {name}");
            return Err(Error::Server { what, log: None });
        }
        let driver = self.driver()?;
        let id = device.info.number;
        match driver.info(id)? {
            Some(info) if device.mark != 0 && info.ublksrv_flags == device.mark => {
                let served = device.worker.is_some_and(|worker| System.alive(worker));
                if !served {
                    driver.stop(id)?;
                } else if !driver.stop_unused(id)? {
                    let hint = "end its users first; it cannot be detached lazily, since its server died";
                    return Err(match lazy {
                        true => unsupported(format!("{name} is in use and orphaned"), hint),
                        false => Error::Busy { device: device.info.device, users: Vec::new() },
                    });
                }
                driver.del(id)?;
            }
            // Its number is free, or belongs to somebody else by now.
            Some(_) | None => {}
        }
        forget(&self.store, &device);
        log::warn(format_args!("{name} detached; its server had died"));
        Ok(device.info)
    }

    fn owned(&self, name: &str) -> Option<Arc<Owned>> {
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
            std::thread::sleep(Duration::from_millis(20));
        }
        // Nobody is making it any more: its making failed and could not be undone.
        Ok(None)
    }

    fn info_of(&self, owned: &Owned) -> DeviceInfo {
        let state = lock(&owned.state);
        let mut info = state.device.info.clone();
        if !owned.server.alive() {
            info.state = DeviceState::Lost;
        }
        info
    }
}

impl Service for Supervisor {
    fn attach(&self, request: Attach, fds: Vec<OwnedFd>) -> Result<DeviceInfo, Error> {
        let _busy = Busy::begin(self);
        if self.stopping.load(Ordering::SeqCst) {
            return Err(Error::Remote {
                kind: ErrorKind::Server,
                message: "becket's server was told to end and takes no more devices".to_owned(),
                hint: Some(
                    "detach those that are in use (becket list): the next attach starts a new one".to_owned(),
                ),
            });
        }
        let driver = self.driver()?;
        let worker = self.worker()?;
        let autoclear = request.autoclear;
        let Made { device, map, files, lease } = make(&self.store, &*driver, &*worker, request, fds)?;
        let info = device.info.clone();
        log::warn(format_args!("{} attached as {}", info.image.display(), info.name));
        let state = Owning { device, files, map, leaving: false, gone: false };
        let owned = Arc::new(Owned { server: worker, state: Mutex::new(state) });
        lock(&self.devices).insert(info.name.clone(), Arc::clone(&owned));
        match lease {
            Some(lease) => self.watch_lease(&owned, lease),
            None if autoclear => self.let_go(&owned, &mut lock(&owned.state), false),
            None => {}
        }
        Ok(info)
    }

    fn detach(&self, request: &Detach) -> Result<DeviceInfo, Error> {
        let Some(owned) = self.await_owned(&request.name)? else {
            return self.detach_orphan(&request.name, request.lazy);
        };
        let mut state = lock(&owned.state);
        match self.take_away(&owned, &mut state) {
            Err(Error::Busy { .. }) if request.lazy => {
                self.say_leaving(&mut state);
                self.let_go(&owned, &mut state, true);
                Ok(state.device.info.clone())
            }
            other => other.map(|()| state.device.info.clone()),
        }
    }

    fn list(&self) -> Vec<DeviceInfo> {
        let devices: Vec<Arc<Owned>> = lock(&self.devices).values().cloned().collect();
        devices.iter().map(|owned| self.info_of(owned)).collect()
    }

    fn refresh(&self, request: &Refresh) -> Result<DeviceInfo, Error> {
        let Some(owned) = self.owned(&request.name) else {
            return Err(Error::unserved(&request.name));
        };
        let mut state = lock(&owned.state);
        let none = || Error::NoDevice { target: request.name.clone() };
        if state.gone {
            return Err(none());
        }
        let driver = self.driver()?;
        let resized = resize(&*driver, &*owned.server, &state.device.info, &state.map, &state.files)?;
        if let Some(map) = resized {
            let mut new = state.device.clone();
            new.info.size = map.len();
            state.map = map;
            if !self.store.update(&state.device, new.clone())? {
                return Err(none());
            }
            state.device = new;
        }
        Ok(state.device.info.clone())
    }

    fn set(&self, request: &Set) -> Result<DeviceInfo, Error> {
        let owned = self.owned(&request.name).ok_or_else(|| Error::unserved(&request.name))?;
        let mut state = lock(&owned.state);
        let none = || Error::NoDevice { target: request.name.clone() };
        if state.gone {
            return Err(none());
        }
        let mut new = state.device.clone();
        if let Some(wanted) = request.direct_io {
            switch(&*owned.server, &mut new.info, &state.files, wanted)?;
        }
        if !self.store.update(&state.device, new.clone())? {
            return Err(none());
        }
        state.device = new;
        Ok(state.device.info.clone())
    }

    fn stat(&self, request: &Stat) -> Result<Summary, Error> {
        let owned = self.owned(&request.name).ok_or_else(|| Error::unserved(&request.name))?;
        let state = lock(&owned.state);
        if state.gone {
            return Err(Error::NoDevice { target: request.name.clone() });
        }
        owned.server.stats(state.device.info.number)
    }

    fn status(&self) -> ServerStatus {
        let worker = lock(&self.worker).clone().filter(|worker| worker.alive());
        let of_worker = worker.iter().flat_map(|worker| worker.notes()).map(|note| format!("worker: {note}"));
        ServerStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            worker_pid: worker.as_ref().map(|worker| worker.id().pid),
            devices: u32::try_from(lock(&self.devices).len()).unwrap_or(u32::MAX),
            stopping: self.stopping.load(Ordering::SeqCst),
            notes: self.notes.iter().cloned().chain(of_worker).collect(),
        }
    }
}

/// Counts an attach that is under way.
struct Busy<'a>(&'a Supervisor);

impl<'a> Busy<'a> {
    fn begin(supervisor: &'a Supervisor) -> Busy<'a> {
        *lock(&supervisor.busy) += 1;
        Busy(supervisor)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let mut busy = lock(&self.0.busy);
        *busy = busy.saturating_sub(1);
        drop(busy);
        (self.0.wake)();
    }
}

fn unsupported(message: String, hint: &str) -> Error {
    Error::Remote { kind: ErrorKind::Unsupported, message, hint: Some(hint.to_owned()) }
}

/// A panic elsewhere must not take the devices of all others along.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
