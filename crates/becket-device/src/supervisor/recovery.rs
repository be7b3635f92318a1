//! Workers begin, and what happens to the devices of one that died: another one gets them, and their requests
//! go on.
//! No request fails meanwhile, and no device is held up by more than its own recovery.
//!
//! The kernel keeps the disk and the requests that the dead worker had (`Abilities::RECOVERS`): new ones
//! wait, those are issued again to the next worker. It begins with that only when the last copy of the dead
//! worker's ublkcN is closed. Each of its rings had one in its table, which is emptied when nothing of the
//! ring is in flight any more, so no late write of the dead worker meets one of its successor.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tracing::{error, info, warn};

use super::devices::Supervisor;
use super::driver::Driver;
use super::make::with_char_device;
use super::owned::{Owned, Owning};
use super::workers::{OnDeath, Worker};
use crate::contract::kept::Kept;
use crate::contract::{DeviceState, Error};
use crate::system::process::ProcessId;
use crate::system::sync::lock;

/// How long the kernel may hold a dead worker's device before that counts as a failure. What the worker had
/// in flight must end first; before Linux 6.15 the kernel also looks at some requests only every second
/// (`Driver::watchful`).
const RELEASE: Duration = Duration::from_secs(60);
/// The shortest and the longest time between two looks whether it does.
const NAPS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// What came of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    Recovered,
    /// The kernel has not let go of the dead worker yet.
    NotYet,
}

/// Hands a device whose worker is gone to another one.
pub(super) fn recover(driver: &dyn Driver, worker: &dyn Worker, kept: &mut Kept) -> Result<Attempt, Error> {
    let id = kept.serve.id;
    if !driver.start_recovery(id.number)? {
        return Ok(Attempt::NotYet);
    }
    kept.serve.first =
        with_char_device(driver, id.number, kept, |fds| worker.serve(kept.serve.clone(), fds))?;
    driver.end_recovery(id.number, std::process::id())?;
    Ok(Attempt::Recovered)
}

impl Supervisor {
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

    /// A worker for one device, in the group of that `cgroup.procs` where one is given.
    pub(super) fn own_worker(&self, cgroup: Option<BorrowedFd<'_>>) -> Result<Arc<dyn Worker>, Error> {
        let started = self.workers.start(cgroup, self.on_death())?;
        self.know(&started);
        for note in started.notes() {
            warn!("worker {}: {note}", started.id().pid);
        }
        Ok(started)
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

    /// Recovers the devices of a worker that died. Returns when each of them has another worker, or is gone.
    pub(super) fn mourn(&self, dead: ProcessId) {
        let mut release = Release::new(Instant::now());
        loop {
            let left = self.bereaved(dead);
            if left.is_empty() {
                break;
            }
            let pause = left.iter().map(|owned| self.pause(owned)).max().unwrap_or_default();
            if !pause.is_zero() {
                self.workers.rest(pause);
            }
            let mut waits = false;
            for owned in &left {
                waits |= self.recover_one(owned, dead, &mut release);
            }
            if waits {
                self.workers.rest(release.nap());
            }
        }
        (self.wake)();
    }

    /// The devices that a dead worker still stands for.
    fn bereaved(&self, dead: ProcessId) -> Vec<Arc<Owned>> {
        let devices: Vec<Arc<Owned>> = lock(&self.devices).values().cloned().collect();
        let mut left = devices;
        // Tables are read before an image that grows can be served, which may take long: the others come
        // first.
        left.sort_by_key(|owned| lock(&owned.state).kept.serve.backing.grows);
        left.retain(|owned| {
            let mut state = lock(&owned.state);
            if state.gone || state.worker.id() != dead {
                return false;
            }
            if state.mourned.replace(dead) != Some(dead) {
                state.restarts.failed(Instant::now());
                let name = state.name();
                if state.recoverable() {
                    warn!(event = "worker_died", device = name, "its worker died; its requests wait");
                } else {
                    error!(event = "lost", device = name, "its worker died; it is lost");
                    self.note(&mut state, |device| device.info.state = DeviceState::Lost);
                    if let Ok(driver) = self.driver(state.device.info.transport) {
                        driver.abandon(state.kept.serve.id.number);
                    }
                }
            }
            state.recoverable()
        });
        left
    }

    /// How long a device has to wait, since its workers die again and again. It is said in its record.
    fn pause(&self, owned: &Owned) -> Duration {
        let mut state = lock(&owned.state);
        let pause = state.restarts.take_pause();
        if !pause.is_zero() && !state.gone {
            warn!(
                event = "failing",
                device = state.name(),
                "its workers die at once; tried again in {} s",
                pause.as_secs()
            );
            if state.device.info.state != DeviceState::Failing {
                self.note(&mut state, |device| device.info.state = DeviceState::Failing);
            }
        }
        pause
    }

    /// Tries to recover a device; `true` when it has to wait for the kernel.
    fn recover_one(&self, owned: &Owned, dead: ProcessId, release: &mut Release) -> bool {
        let mut state = lock(&owned.state);
        if state.gone || state.worker.id() != dead {
            return false;
        }
        match self.attempt(&mut state) {
            Ok(Attempt::Recovered) => false,
            Ok(Attempt::NotYet) if !release.overdue(Instant::now()) => true,
            Ok(Attempt::NotYet) => {
                warn!(device = state.name(), "the kernel does not let go of its dead worker");
                state.restarts.failed(Instant::now());
                true
            }
            Err(error) => {
                error!(event = "recovery_failed", device = state.name(), "could not be recovered: {error}");
                state.restarts.failed(Instant::now());
                // It may have the device half: what it has ends with it.
                if let Some(next) = state.next.take() {
                    next.kill();
                }
                false
            }
        }
    }

    /// One attempt, with a worker that is started if necessary while the kernel still holds the dead one's
    /// device.
    fn attempt(&self, state: &mut Owning) -> Result<Attempt, Error> {
        let worker = self.next_worker(state)?;
        self.give(state, worker)
    }

    /// Gives a device without a worker to one, and says so in its record. With the device go the clients that
    /// the last worker has left.
    pub(super) fn give(&self, state: &mut Owning, worker: Arc<dyn Worker>) -> Result<Attempt, Error> {
        let outcome = recover(&*self.driver(state.device.info.transport)?, &*worker, &mut state.kept)?;
        if outcome == Attempt::Recovered {
            let id = worker.id();
            let left = state.worker.take_left(state.kept.serve.id);
            state.worker = worker;
            state.next = None;
            self.driver(state.device.info.transport)?.welcome(
                state.kept.serve.id.number,
                &state.worker,
                left,
            );
            state.restarts.began(Instant::now());
            self.keep(state);
            let asked_to_go = state.leaving && state.device.info.state == DeviceState::Detaching;
            self.note(state, |device| {
                device.worker = Some(id);
                device.info.worker_pid = Some(id.pid);
                device.info.recoveries += 1;
                // The lease for that went with the dead worker: this one reads through the file.
                device.info.state = if asked_to_go { DeviceState::Detaching } else { DeviceState::Live };
            });
            info!(event = "recovered", device = state.name(), "recovered by worker {}", id.pid);
        }
        Ok(outcome)
    }

    /// Who shall serve the device next.
    pub(super) fn next_worker(&self, state: &mut Owning) -> Result<Arc<dyn Worker>, Error> {
        if !state.kept.serve.isolated {
            return self.shared_worker();
        }
        if let Some(next) = state.next.as_ref().filter(|next| next.alive()) {
            return Ok(Arc::clone(next));
        }
        let cgroup = state.kept.keepsakes.cgroup.as_ref();
        let next = self.own_worker(cgroup.map(|group| group.as_fd()))?;
        state.next = Some(Arc::clone(&next));
        Ok(next)
    }
}

/// How long the kernel has been waited for.
struct Release {
    since: Instant,
    nap: Duration,
}

impl Release {
    fn new(now: Instant) -> Release {
        Release { since: now, nap: NAPS.0 }
    }

    /// How long to sleep before the next look.
    fn nap(&mut self) -> Duration {
        let nap = self.nap;
        self.nap = (nap * 2).min(NAPS.1);
        nap
    }

    /// Whether it has been too long; the time then runs anew.
    fn overdue(&mut self, now: Instant) -> bool {
        let overdue = now.saturating_duration_since(self.since) >= RELEASE;
        if overdue {
            self.since = now;
        }
        overdue
    }
}

#[cfg(test)]
#[path = "recovery_tests.rs"]
mod tests;
