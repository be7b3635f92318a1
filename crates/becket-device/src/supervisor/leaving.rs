//! Devices that go with their last user, or with the one who keeps them.
//! Nothing is ever taken away from a user.

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use becket_image::Source;
use becket_transport::aside;
use tracing::{info, warn};

use super::devices::Supervisor;
use super::make::{CLOSING, closed};
use super::owned::{Owned, Owning};
use super::watch::{Watched, Why};
use crate::contract::{DeviceId, DeviceState, Error};
use crate::record::judge::disk_of;
use crate::record::register::forget;
use crate::system::sync::lock;
use crate::system::users;

impl Supervisor {
    /// Takes a device away, unless it is in use.
    pub(super) fn take_away(&self, owned: &Arc<Owned>, state: &mut Owning) -> Result<(), Error> {
        if state.gone {
            return Ok(());
        }
        state.responds()?;
        let driver = self.driver(state.device.info.transport)?;
        let id = DeviceId::of(&state.device.info);
        let mut has_let_go = false;
        if let Some(added) = driver.info(id.number)?.filter(|added| added.mark == state.device.mark) {
            // The worker did not let go of it in time: the kernel says that there is nothing to stop.
            let stopped = added.stopped;
            if !stopped && !state.hopeful() {
                driver.stop(id.number)?;
            } else if !stopped && !driver.stop_unused(id.number)? {
                return Err(Error::Busy { device: state.device.info.device.clone(), users: Vec::new() });
            }
            if driver.leaves_when_asked() {
                // One that is dead has left. What it still had of clients ends here.
                let _ = state.worker.leave(id);
            }
            let patience = if stopped { Duration::ZERO } else { CLOSING };
            closed(&*state.worker, id, patience).inspect_err(|_| {
                // It goes by itself when the worker can.
                self.say_leaving(state);
                self.let_go(owned, state, true);
            })?;
            drop(state.worker.take_left(id));
            has_let_go = state.worker.alive();
            driver.del(id.number)?;
        }
        // Before anyone can learn that the device is gone: with these go the image's locks. The table of a
        // worker's ring may hold for a while what the worker has released; a dead worker may still write, so
        // there the last copy must be waited for. Closing a file of a network file system may wait for its
        // server, and this thread holds the device.
        let (sources, keepsakes) = (mem::take(&mut state.kept.sources), mem::take(&mut state.kept.keepsakes));
        aside::close(move || {
            if has_let_go {
                sources.iter().for_each(Source::unlock);
            }
            drop((sources, keepsakes));
        });
        self.guard.forget(state.device.mark);
        forget(&self.store, &state.device);
        state.gone = true;
        if let Some(mut connector) = state.connector.take() {
            connector.stays(false);
        }
        info!(device = state.name(), "detached");
        if state.kept.serve.isolated {
            state.worker.dismiss();
            state.next.take().inspect(|next| next.dismiss());
        }
        let mut devices = lock(&self.devices);
        if devices.get(state.name()).is_some_and(|other| Arc::ptr_eq(owned, other)) {
            devices.remove(state.name());
        }
        drop(devices);
        (self.wake)();
        Ok(())
    }

    /// Sees to it that the device goes with its last user; one that had none yet is waited for, unless `now`.
    pub(super) fn let_go(&self, owned: &Arc<Owned>, state: &mut Owning, now: bool) {
        if mem::replace(&mut state.leaving, true) {
            return;
        }
        let info = &state.device.info;
        let partitions = info.partitions.iter().map(|part| &part.device);
        let nodes = std::iter::once(&info.device).chain(partitions).cloned().collect();
        self.watch(owned, Why::LastUser { nodes, used: now });
    }

    /// Says in its record that the device was asked to go.
    pub(super) fn say_leaving(&self, state: &mut Owning) {
        self.note(state, |device| device.info.state = DeviceState::Detaching);
    }

    fn watch(&self, owned: &Arc<Owned>, why: Why) {
        let Some(supervisor) = self.myself.upgrade() else { return };
        self.watch.over(Watched::new(owned, why), || Arc::new(move |watched| supervisor.look(watched)));
    }

    /// Looks at a device that may have to go; it comes back while it must be watched further.
    fn look(&self, mut watched: Watched) -> Option<Watched> {
        let owned = Arc::clone(&watched.owned);
        let mut state = lock(&owned.state);
        if state.gone {
            return None;
        }
        match &mut watched.why {
            Why::LastUser { used, .. } => {
                *used |= state.device.info.state == DeviceState::Detaching;
                if !*used {
                    let disk = disk_of(&state.device.info);
                    // Not under the lock: it walks over /proc.
                    drop(state);
                    *used = users::any(&disk);
                    return Some(watched);
                }
            }
            Why::Lease(_) => return Some(watched),
            // One that is in use then, as a mounted one is by design, lives on as any autoclear device does.
            Why::Kept => {
                self.let_go(&owned, &mut state, true);
                return None;
            }
            Why::EndedByOthers => {
                let driver = self.driver(state.device.info.transport);
                let there = driver.and_then(|driver| driver.info(state.device.info.number));
                if !matches!(there, Ok(None)) || state.device.info.state == DeviceState::Lost {
                    return Some(watched);
                }
                if watched.complaint.is_empty() {
                    warn!(device = state.name(), "another program has ended it");
                }
            }
        }
        match self.take_away(&owned, &mut state) {
            Ok(()) => return None,
            Err(Error::Busy { .. }) => {}
            Err(error) => {
                // Tried again all the same, but said once.
                let text = format!("{} stays: {error}", state.name());
                if watched.complaint != text {
                    info!("{text}");
                    watched.complaint = text;
                }
            }
        }
        Some(watched)
    }

    /// Sees to it that a device that has just been made or taken over goes when it is to.
    pub(super) fn watch_over(&self, owned: &Arc<Owned>) {
        let lease = owned.lease();
        let mut state = lock(&owned.state);
        let info = &state.device.info;
        let (autoclear, asked_to_go) = (info.spec.autoclear, info.state == DeviceState::Detaching);
        // FUSE: a user may unmount its file system, or detach its loop device.
        if self.drivers.offer(info.transport).is_ok_and(|offer| offer.ended_by_others) {
            self.watch(owned, Why::EndedByOthers);
        }
        match lease {
            Some(lease) if !asked_to_go => self.watch(owned, Why::Lease(lease)),
            _ if asked_to_go || autoclear => self.let_go(owned, &mut state, asked_to_go),
            _ => {}
        }
    }
}
