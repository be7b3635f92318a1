//! An upgrade under load: devices move from the workers of an older version to one of this one.
//! No request fails. Over FUSE the old worker finishes what it has read, and the rest waits in the kernel; of
//! ublk's devices the kernel holds requests back where it can, and elsewhere the old worker dies and they go
//! on.

use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::{info, warn};

use super::devices::Supervisor;
use super::owned::{Owned, Owning};
use super::recovery::Attempt;
use super::workers::Worker;
use crate::contract::Error;
use crate::system::sync::lock;

/// How long a worker may take to end its requests and let go of a device. It waits for a client of an export
/// less long ([`becket_transport::nbd::STILL`]).
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two orders to hold requests back: a tag that was in use is asked for again when its request
/// has ended, and only another order ends that.
const BETWEEN: Duration = Duration::from_millis(5);

impl Supervisor {
    /// Replaces workers that a predecessor has started, and that get no new devices any more. What is left
    /// when another supervisor takes over, that one replaces.
    pub(crate) fn renew(&self, old: Vec<Arc<dyn Worker>>) {
        for worker in old {
            self.replace(&worker);
        }
    }

    fn replace(&self, old: &Arc<dyn Worker>) {
        let devices: Vec<Arc<Owned>> = lock(&self.devices).values().cloned().collect();
        for owned in devices {
            if self.stepping_down() {
                return;
            }
            let mut state = lock(&owned.state);
            if state.gone || state.worker.id() != old.id() {
                continue;
            }
            if let Err(error) = self.move_over(&mut state) {
                if old.withholds() {
                    // Its end would be that of devices which only a later becket can give to another worker.
                    let (name, pid) = (state.name(), old.id().pid);
                    return warn!(device = name, "{error}; worker {pid} stays");
                }
                // From here recovery as after a worker's death is the safe way, for this device and the
                // others.
                warn!(device = state.name(), "{error}; worker {} is ended", old.id().pid);
                drop(state);
                return old.kill();
            }
        }
        info!(event = "worker_replaced", "worker {} has been replaced", old.id().pid);
        old.dismiss();
    }

    /// Gives a device that is served to another worker, without its users noticing.
    fn move_over(&self, state: &mut Owning) -> Result<(), Error> {
        let driver = self.driver(state.device.info.transport)?;
        if !driver.quiesces(state.kept.serve.abilities) {
            return Err(Error::Worker { what: "has devices that can only be moved by its end".to_owned() });
        }
        // First, so that the pause is without it.
        let next = self.next_worker(state)?;
        let id = state.kept.serve.id;
        let deadline = Instant::now() + PATIENCE;
        if state.needs_last_flush() {
            // It may have been asked to go, and was in use. One that does not know of ends expects none.
            let _ = state.worker.expect(id, false);
        }
        let late = |what: &str| Error::Worker { what: format!("{what} {}", id) };
        loop {
            let held_back = driver.quiesce(id.number, &|| state.worker.leave(id));
            if state.worker.await_closed(id, BETWEEN) {
                break;
            }
            if Instant::now() >= deadline {
                return held_back.and(Err(late("does not let go of")));
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
