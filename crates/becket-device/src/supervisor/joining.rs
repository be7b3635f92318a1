//! A device becomes the supervisor's: one that was made, or that a predecessor has left.
//! From here on it is watched, and goes on when its worker dies.

use std::sync::Arc;

use tracing::warn;

use super::devices::Supervisor;
use super::owned::Owned;
use crate::contract::kept::Kept;
use crate::system::sync::{lock, spawn};

impl Supervisor {
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
}
