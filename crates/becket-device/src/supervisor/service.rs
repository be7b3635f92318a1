//! The calls of clients: devices are made, listed, changed and taken away.
//! Each is a step or two of the other files; nothing here knows how they are done.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use becket_engine::Summary;
use tracing::{error, info};

use super::change::{Length, Wish, take_image};
use super::devices::{Busy, Supervisor, unsupported};
use super::make::Made;
use super::manager;
use super::owned::Owned;
use super::workers::Worker;
use crate::contract::messages::{
    Attach, Count, Detach, Foresee, Pulse, Reach, Refresh, ServerStatus, Set, Stat,
};
use crate::contract::{DeviceInfo, Error, ErrorKind};
use crate::control::health;
use crate::control::server::Service;
use crate::system::process::ProcessId;
use crate::system::sync::lock;

impl Supervisor {
    /// A device of ours; one that we are just making is waited for.
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

    fn foresee(&self, request: &Foresee) -> Result<(), Error> {
        self.may_take(&request.image, &request.portion)
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

    fn reach(&self, request: &Reach) -> Result<(), Error> {
        self.answers(&request.name)
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
