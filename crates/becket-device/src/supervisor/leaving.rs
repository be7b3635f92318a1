//! Devices that go with their last user, or with the one who keeps them.
//! Nothing is ever taken away from a user, but an export by its owner's word.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use becket_engine::FAREWELL;
use becket_image::Source;
use becket_transport::{aside, sysfs};
use tracing::{info, warn};

use super::devices::Supervisor;
use super::make::{CLOSING, closed};
use super::owned::{Owned, Owning};
use super::watch::{Watched, Why};
use super::workers::Worker;
use crate::contract::{DeviceId, DeviceInfo, DeviceState, Error};
use crate::record::judge::disk_of;
use crate::record::register::forget;
use crate::system::moment;
use crate::system::sync::lock;
use crate::system::users;

/// How long the clients of an export that is taken from them may keep its worker waiting.
const FORCED: Duration = Duration::from_secs(2);

/// Seconds between two looks for the readers of a device whose server is away.
const LONGEST_PAUSE: u32 = 16;

/// Has reads fail that wait for the server of an image, where no process and no mount is left that could want
/// their bytes. The kernel keeps a disk locked until they end, and with it each program that opens the disk,
/// lists all loop devices or syncs all file systems. What waits to be written goes on waiting.
fn give_up_dead_reads(info: &DeviceInfo, worker: &dyn Worker) {
    let (disk, before) = (disk_of(info), moment::now());
    if sysfs::in_flight(&disk).is_some_and(|(reads, others)| reads > 0 && others == 0)
        && !users::any_alive(&disk)
    {
        warn!(event = "reads_given_up", device = info.name, "nobody is left who waits for what it reads");
        // A program that has opened it since then is not among those that were looked at.
        worker.give_up_reads(DeviceId::of(info), before);
    }
}

impl Supervisor {
    /// Watches for readers that die while the server of a device is away.
    pub(super) fn watch_dead_reads(&self, owned: &Arc<Owned>) {
        self.watch(owned, Why::Away { left: 0, pause: 1 });
    }

    /// Takes a device away, unless it is in use.
    pub(super) fn take_away(&self, owned: &Arc<Owned>, state: &mut Owning) -> Result<(), Error> {
        self.take(owned, state, false)
    }

    /// Takes an export away from its clients, each between two replies. One that keeps its worker waiting is
    /// ended with the worker; then the export goes with the next one.
    pub(super) fn take_by_force(&self, owned: &Arc<Owned>, state: &mut Owning) -> Result<(), Error> {
        let taken = self.take(owned, state, true);
        if taken.is_err() && state.leaving && state.kept.serve.isolated {
            warn!(device = state.name(), "a client does not let go, and its worker is ended");
            state.worker.kill();
            return Ok(());
        }
        taken
    }

    fn take(&self, owned: &Arc<Owned>, state: &mut Owning, force: bool) -> Result<(), Error> {
        if state.gone {
            return Ok(());
        }
        state.responds()?;
        let driver = self.driver(state.device.info.transport)?;
        let id = DeviceId::of(&state.device.info);
        let (mut has_let_go, mut unsaved) = (false, None);
        let flushes = state.needs_last_flush();
        if let Some(added) = driver.info(id.number)?.filter(|added| added.mark == state.device.mark) {
            // The worker did not let go of it in time: the kernel says that there is nothing to stop.
            let stopped = added.stopped;
            if !stopped {
                // Before: a queue ends as soon as its device is stopped. It is not taken back where the
                // device is in use: that may go with its last user before it is asked again.
                let unasked = if flushes { state.worker.expect(id, true).err() } else { None };
                unsaved = unasked.map(|error| format!("its server could not be asked to flush: {error}"));
                let gone = match force || !state.hopeful() {
                    true => driver.stop(id.number).map(|()| true),
                    false => driver.stop_unused(id.number),
                };
                if !gone? {
                    give_up_dead_reads(&state.device.info, &*state.worker);
                    return Err(Error::Busy { device: state.device.info.device.clone(), users: Vec::new() });
                }
            }
            if driver.leaves_when_asked() {
                // One that is dead has left. What it still had of clients ends here.
                let _ = state.worker.leave(id);
            }
            let patience = match (stopped, force) {
                (true, _) => Duration::ZERO,
                (false, true) if flushes => FORCED + FAREWELL,
                (false, true) => FORCED,
                (false, false) => CLOSING,
            };
            closed(&*state.worker, id, patience).inspect_err(|_| {
                // It goes by itself when the worker can.
                self.say_leaving(state);
                self.let_go(owned, state, true);
            })?;
            drop(state.worker.take_left(id));
            unsaved = state.worker.take_unsaved(id).or(unsaved);
            has_let_go = state.worker.alive();
            driver.del(id.number)?;
        } else if flushes && state.worker.await_closed(id, FAREWELL) {
            // It went with its last user.
            unsaved = state.worker.take_unsaved(id);
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
        if let Some(mut connector) = state.connector.take() {
            connector.stays(false);
        }
        self.guard.forget(state.device.mark);
        forget(&self.store, &state.device);
        state.gone = true;
        info!(event = "detached", device = state.name(), "detached");
        if let Some(why) = unsaved {
            warn!(event = "unsaved", device = state.name(), "written bytes may be lost: {why}");
            state.device.info.loses(why);
        }
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
        info!(event = "detaching", device = state.name(), "goes when its last user closes it");
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
            Why::Away { .. } if state.device.info.away.is_none() => return None,
            Why::Away { left: left @ 1.., .. } => {
                *left -= 1;
                return Some(watched);
            }
            Why::Away { left, pause } => {
                (*left, *pause) = (*pause, (*pause * 2).min(LONGEST_PAUSE));
                let (info, worker) = (state.device.info.clone(), Arc::clone(&state.worker));
                // Not under the lock: it walks over /proc.
                drop(state);
                give_up_dead_reads(&info, &*worker);
                return Some(watched);
            }
            Why::EndedByOthers => {
                let driver = self.driver(state.device.info.transport);
                let there = driver.and_then(|driver| driver.info(state.device.info.number));
                if !matches!(there, Ok(None)) || state.device.info.state == DeviceState::Lost {
                    return Some(watched);
                }
                if watched.complaint.is_empty() {
                    warn!(event = "ended", device = state.name(), "another program has ended it");
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
        if info.away.is_some() {
            self.watch_dead_reads(owned);
        }
        match lease {
            Some(lease) if !asked_to_go => self.watch(owned, Why::Lease(lease)),
            _ if asked_to_go || autoclear => self.let_go(owned, &mut state, asked_to_go),
            _ => {}
        }
    }
}
