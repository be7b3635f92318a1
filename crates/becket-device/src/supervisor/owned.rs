//! A device that a supervisor owns: what is known of it, who serves it, and how it ends.
//! What takes time happens under the lock of that one device.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use becket_engine::Summary;
use becket_image::Source;
use becket_transport::Abilities;
use tracing::error;

use super::links::Connector;
use super::restarts::Restarts;
use super::workers::Worker;
use crate::contract::kept::Kept;
use crate::contract::{DeviceId, DeviceInfo, DeviceState, Error};
use crate::control::health;
use crate::record::device::Device;
use crate::system::process::ProcessId;
use crate::system::sync::{DEVICE, Ranked, lock};

/// A device of ours.
pub(super) struct Owned {
    pub(super) state: Ranked<DEVICE, Owning>,
}

pub(super) struct Owning {
    pub(super) device: Device,
    /// With it a later worker goes on; the image's locks are among it.
    pub(super) kept: Kept,
    /// Who serves it, or did.
    pub(super) worker: Arc<dyn Worker>,
    /// The isolated worker that shall have it next.
    pub(super) next: Option<Arc<dyn Worker>>,
    pub(super) restarts: Restarts,
    /// The worker whose death has been counted.
    pub(super) mourned: Option<ProcessId>,
    /// What connects to the server of its image, where that is on one.
    pub(super) connector: Option<Connector>,
    /// Since when that server is away.
    pub(super) away_since: Option<String>,
    /// The length of its image in bytes of which was said that the device cannot follow it.
    pub(super) unfollowed: Option<u64>,
    /// A thread sees to it that the device goes with its last user.
    pub(super) leaving: bool,
    pub(super) gone: bool,
}

impl Owned {
    pub(super) fn new(device: Device, kept: Kept, worker: Arc<dyn Worker>) -> Arc<Owned> {
        let state = Owning {
            device,
            kept,
            worker,
            next: None,
            restarts: Restarts::new(Instant::now()),
            mourned: None,
            connector: None,
            away_since: None,
            unfollowed: None,
            leaving: false,
            gone: false,
        };
        Arc::new(Owned { state: Ranked::new(state) })
    }

    /// A copy of the lease's pipe, where there is one.
    pub(super) fn lease(&self) -> Option<OwnedFd> {
        let state = lock(&self.state);
        let copy = state.kept.keepsakes.lease.as_ref()?.try_clone();
        copy.inspect_err(|error| error!(device = state.name(), "its lease is lost: {error}")).ok()
    }
}

impl Owning {
    /// Whether the end of the device may lose what a server has not flushed.
    pub(super) fn needs_last_flush(&self) -> bool {
        self.kept.sources.iter().any(Source::needs_last_flush)
    }

    pub(super) fn name(&self) -> &str {
        &self.device.info.name
    }

    /// An error if its worker is stopped: it is given no order, which it would carry out at an unexpected
    /// time later.
    pub(super) fn responds(&self) -> Result<(), Error> {
        let worker = self.worker.id();
        let kind = self.device.info.transport;
        if self.worker.alive() && worker.stopped() { Err(health::stopped(worker, kind)) } else { Ok(()) }
    }

    /// What it has done, and what the store has of its image.
    pub(super) fn counted(&self) -> Result<Summary, Error> {
        self.responds()?;
        let stats = self.worker.stats(DeviceId::of(&self.device.info))?;
        let waits = stats.fetched.unwrap_or_default().waits;
        let fetched = self.connector.as_ref().and_then(|connector| connector.fetched(waits));
        Ok(Summary { fetched, ..stats })
    }

    /// What is shown of it.
    pub(super) fn info(&self) -> DeviceInfo {
        let mut info = self.device.info.clone();
        if !self.worker.alive() && info.state != DeviceState::Failing {
            info.state = if self.recoverable() { DeviceState::Recovering } else { DeviceState::Lost };
        }
        info
    }

    /// Whether the kernel keeps the disk without a worker.
    pub(super) fn recoverable(&self) -> bool {
        self.kept.serve.abilities.has(Abilities::RECOVERS)
    }

    /// Whether it is likely to be served again soon. If not, no user has to be spared: their requests are
    /// never carried out.
    pub(super) fn hopeful(&self) -> bool {
        self.worker.alive() || (self.recoverable() && self.device.info.state != DeviceState::Failing)
    }
}
