//! Devices whose image is on a server: what connects to it, and what is shown while it is away.
//! Connects to nothing itself.

use std::sync::Arc;

use becket_image::Source;
use tracing::{info, warn};

use super::devices::Supervisor;
use super::links::Connector;
use super::owned::Owned;
use crate::contract::Error;
use crate::contract::spec::Spec;
use crate::system::log;
use crate::system::sync::lock;

impl Supervisor {
    /// Starts what connects to the server of an image, where that is on one.
    pub(super) fn connector(
        &self,
        spec: &Spec,
        sources: &[Source],
        mark: u64,
        again: bool,
    ) -> Result<Option<Connector>, Error> {
        let myself = self.myself.clone();
        let on_change = move |why: Option<String>| {
            if let Some(supervisor) = myself.upgrade() {
                supervisor.server_is_away(mark, why);
            }
        };
        Connector::start(spec, sources, again, Box::new(on_change))
    }

    /// Notes whether the server of a device's image is away.
    fn server_is_away(&self, mark: u64, why: Option<String>) {
        let devices: Vec<Arc<Owned>> = lock(&self.devices).values().cloned().collect();
        for owned in devices {
            let mut state = lock(&owned.state);
            if state.device.mark != mark || state.gone {
                continue;
            }
            let name = state.name().to_owned();
            match &why {
                Some(why) => warn!(device = name, "its server cannot be reached: {why}"),
                None if state.device.info.away.is_none() => return,
                None => info!(device = name, "its server is there again"),
            }
            let since = state.away_since.get_or_insert_with(log::now).clone();
            if why.is_none() {
                state.away_since = None;
            }
            self.note(&mut state, |device| {
                device.info.away = why.map(|why| format!("reconnecting since {since}: {why}"));
            });
            return;
        }
    }
}
