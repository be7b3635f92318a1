//! Devices that go with their last user, or with the one who keeps them.
//! Nothing is ever taken away from a user.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use becket_transport::Kind;
use rustix::event::{PollFd, PollFlags, poll};

use super::devices::Supervisor;
use super::driver::id_of;
use super::make::closed;
use super::owned::{Owned, Owning};
use super::uses::Uses;
use crate::judge::disk_of;
use crate::register::forget;
use crate::sync::{lock, spawn};
use crate::{DeviceState, Error, log, users};

/// How often it is looked whether others have ended a connection behind our back.
const CONNECTION_LOOK: Duration = Duration::from_secs(1);

impl Supervisor {
    /// Takes a device away, unless somebody uses it.
    pub(super) fn take_away(&self, owned: &Arc<Owned>, state: &mut Owning) -> Result<(), Error> {
        if state.gone {
            return Ok(());
        }
        let driver = self.driver(state.device.info.transport)?;
        let id = id_of(&state.device.info);
        if driver.info(id)?.is_some_and(|info| info.ublksrv_flags == state.device.mark) {
            if !state.hopeful() {
                driver.stop(id)?;
            } else if !driver.stop_unused(id)? {
                return Err(Error::Busy { device: state.device.info.device.clone(), users: Vec::new() });
            }
            closed(&*state.server, id)?;
            driver.del(id)?;
        }
        // Before anybody can learn that the device is gone: with these go the image's locks.
        state.kept.files.clear();
        state.kept.keepsakes = Default::default();
        forget(&self.store, &state.device);
        state.gone = true;
        log::warn(format_args!("{} detached", state.name()));
        if state.kept.serve.isolated {
            state.server.dismiss();
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
        if std::mem::replace(&mut state.leaving, true) {
            return;
        }
        let Some(supervisor) = self.myself.upgrade() else { return };
        let owned = Arc::clone(owned);
        spawn(move || supervisor.watch(&owned, now));
    }

    /// Says in its record that somebody told the device to go.
    pub(super) fn say_leaving(&self, state: &mut Owning) {
        self.note(state, |device| device.info.state = DeviceState::Detaching);
    }

    /// Looks at a device whenever one of its users may have gone, until it could be taken away. Without `now` it first waits
    /// for a user.
    fn watch(&self, owned: &Arc<Owned>, mut now: bool) {
        let mut complaint = String::new();
        let uses = {
            let info = &lock(&owned.state).device.info;
            Uses::of(std::iter::once(&info.device).chain(info.partitions.iter().map(|part| &part.device)))
        };
        while !self.look_once(owned, &mut now, &mut complaint) {
            now |= uses.wait(now);
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
            let disk = disk_of(&state.device.info);
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
                let text = format!("{} stays: {error}", state.name());
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
    pub(super) fn watch_lease(&self, owned: &Arc<Owned>, lease: OwnedFd) {
        let Some(supervisor) = self.myself.upgrade() else { return };
        let owned = Arc::clone(owned);
        spawn(move || {
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

    /// Takes note of a file system that has gone without us: somebody has unmounted it, or detached its loop device.
    fn watch_connection(&self, owned: &Arc<Owned>) {
        let Some(supervisor) = self.myself.upgrade() else { return };
        if lock(&owned.state).device.info.transport != Kind::Fuse {
            return;
        }
        let owned = Arc::clone(owned);
        spawn(move || {
            loop {
                std::thread::sleep(CONNECTION_LOOK);
                let mut state = lock(&owned.state);
                if state.gone {
                    return;
                }
                let driver = supervisor.driver(Kind::Fuse);
                let there = driver.and_then(|driver| driver.info(id_of(&state.device.info)));
                if matches!(there, Ok(None)) && state.device.info.state != DeviceState::Lost {
                    log::warn(format_args!("{}: somebody else has ended it", state.name()));
                    if let Err(error) = supervisor.take_away(&owned, &mut state) {
                        log::warn(format_args!("{} stays: {error}", state.name()));
                    }
                }
            }
        });
    }

    /// Sees to it that a device that has just been made or taken over goes when it is to.
    pub(super) fn watch_over(&self, owned: &Arc<Owned>) {
        let (autoclear, told) = {
            let state = lock(&owned.state);
            (state.device.info.autoclear, state.device.info.state == DeviceState::Detaching)
        };
        self.watch_connection(owned);
        if told {
            self.let_go(owned, &mut lock(&owned.state), true);
        } else if let Some(lease) = owned.lease() {
            self.watch_lease(owned, lease);
        } else if autoclear {
            self.let_go(owned, &mut lock(&owned.state), false);
        }
    }
}
