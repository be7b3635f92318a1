//! An upgrade under load: devices change from the workers of an older version to one of this one.
//! No request fails. Over FUSE the old worker finishes what it has read, and the rest waits in the kernel; of ublk's
//! devices the kernel holds requests back where it can, and elsewhere the old worker dies and they go on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use becket_transport::Kind;
use becket_uapi::ublk::{UBLK_F_BATCH_IO, UBLK_F_QUIESCE};

use super::devices::Supervisor;
use super::driver::called;
use super::owned::{Owned, Owning};
use super::recovery::Attempt;
use super::workers::Server;
use crate::sync::lock;
use crate::{Error, log};

/// How long a worker may take to end its requests and let go of a device.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long it is waited for between two orders to hold requests back: a tag that was in use is asked for again when its
/// request has ended, and only another order ends that.
const BETWEEN: Duration = Duration::from_millis(5);

impl Supervisor {
    /// Replaces workers that a predecessor has started.
    pub(crate) fn renew(&self, old: Vec<Arc<dyn Server>>) {
        for server in &old {
            // Before any device moves: it must not go to one that is about to end.
            self.unshare(server);
        }
        for server in old {
            self.replace(&server);
        }
    }

    fn replace(&self, old: &Arc<dyn Server>) {
        let devices: Vec<Arc<Owned>> = lock(&self.devices).values().cloned().collect();
        for owned in devices {
            let mut state = lock(&owned.state);
            if state.gone || state.server.id() != old.id() {
                continue;
            }
            if let Err(error) = self.move_over(&mut state) {
                // From here the way of those whose worker died is the sure one, for this device and the others.
                log::warn(format_args!("{}: {error}; worker {} is ended", state.name(), old.id().pid));
                drop(state);
                return old.kill();
            }
        }
        log::warn(format_args!("server: worker {} has been replaced", old.id().pid));
        old.dismiss();
    }

    /// Gives a device that is served to another worker, without its users noticing.
    fn move_over(&self, state: &mut Owning) -> Result<(), Error> {
        let by_worker = state.device.info.transport == Kind::Fuse;
        // Of a device with batch commands, Linux 7.0 to 7.3 at least fail the requests that come after QUIESCE_DEV
        // (it sets `force_abort`, as for a device that is stopped).
        if !by_worker && state.kept.serve.flags & (UBLK_F_QUIESCE | UBLK_F_BATCH_IO) != UBLK_F_QUIESCE {
            return Err(Error::Worker { what: "has devices that can only be moved by its end".to_owned() });
        }
        // First, so that the pause is without it.
        let next = self.next_worker(state)?;
        let id = state.kept.serve.id;
        let deadline = Instant::now() + PATIENCE;
        let late = |what: &str| Error::Worker { what: format!("{what} {}", called(id)) };
        let driver = self.driver(state.device.info.transport)?;
        let mut told = if by_worker { state.server.leave(id) } else { driver.quiesce(id) };
        while !state.server.await_closed(id, BETWEEN) {
            if Instant::now() >= deadline {
                return told.and(Err(late("does not let go of")));
            }
            if !by_worker {
                told = driver.quiesce(id);
            }
        }
        while self.give(state, Arc::clone(&next))? == Attempt::NotYet {
            if Instant::now() >= deadline {
                return Err(late("still has, for the kernel,"));
            }
            self.workers.rest(Duration::from_millis(1));
        }
        Ok(())
    }
}
