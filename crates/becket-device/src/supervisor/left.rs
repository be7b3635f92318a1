//! What a predecessor's guard kept of devices whose worker has died, and which workers cannot be spoken with.
//! A device is taken from here only when its worker is dead: a living one knows better how it is served.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use becket_engine::Summary;
use tracing::warn;

use super::claims::{Claim, makes_sense};
use super::driver::Offer;
use super::workers::Worker;
use crate::contract::kept::Kept;
use crate::contract::protocol::{Change, Serve};
use crate::contract::{DeviceId, Error, shape};
use crate::record::device::Device;
use crate::system::process::ProcessId;

/// How long a worker that does not speak may take to die: one that was killed together with its supervisor.
const DYING: Duration = Duration::from_secs(3);

/// Devices by their mark, and workers.
pub(super) struct Left {
    kept: BTreeMap<u64, Kept>,
    strangers: Vec<(ProcessId, String)>,
    /// When a worker that still lives is taken to go on living.
    deadline: Instant,
}

impl Left {
    pub(super) fn new(kept: BTreeMap<u64, Kept>, strangers: Vec<(ProcessId, String)>) -> Left {
        Left { kept, strangers, deadline: Instant::now() + DYING }
    }

    /// Why nothing can be spoken with the worker of a device, where that is due to its version.
    pub(super) fn stranger(&self, record: &Device) -> Option<&String> {
        let its = |(worker, _): &&(ProcessId, String)| record.worker == Some(*worker);
        self.strangers.iter().find(its).map(|(_, why)| why)
    }

    /// Adds to what a worker has of a device what only the guard has.
    pub(super) fn complete(&mut self, offer: &Offer, record: &Device, kept: &mut Kept) {
        let missing = shape::of(offer.kind).kept_descriptors;
        let link = kept.serve.link_descriptors();
        if missing == 0 || kept.link.len() != link {
            return;
        }
        let Some(mut its) = self.kept.remove(&record.mark) else { return };
        match makes_sense(offer, &its, record) {
            Ok(()) if its.link.len() == link + missing => kept.link.extend(its.link.split_off(link)),
            Ok(()) => {}
            Err(why) => warn!(device = record.info.name, "what was kept of it is not used: {why}"),
        }
    }

    /// A device whose worker is dead, as the guard has kept it.
    pub(super) fn take(&mut self, offer: &Offer, record: &Device) -> Option<Claim> {
        if !self.kept.contains_key(&record.mark) || self.stranger(record).is_some() {
            return None;
        }
        let worker = record.worker.unwrap_or(ProcessId { pid: 0, start: 0 });
        while worker.alive() {
            if Instant::now() >= self.deadline {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let kept = self.kept.remove(&record.mark)?;
        match makes_sense(offer, &kept, record) {
            Ok(()) => Some((kept, Arc::new(Fallen(worker)))),
            Err(why) => {
                warn!(device = record.info.name, "what was kept of it is not used: {why}");
                None
            }
        }
    }
}

/// A worker that is dead.
struct Fallen(ProcessId);

fn dead() -> Error {
    Error::Worker { what: "died".to_owned() }
}

impl Worker for Fallen {
    fn id(&self) -> ProcessId {
        self.0
    }

    fn notes(&self) -> &[String] {
        &[]
    }

    fn alive(&self) -> bool {
        false
    }

    fn serve(&self, _: Serve, _: &[BorrowedFd<'_>]) -> Result<u32, Error> {
        Err(dead())
    }

    fn change(&self, _: Change, _: &[BorrowedFd<'_>]) -> Result<(), Error> {
        Err(dead())
    }

    fn stats(&self, _: DeviceId) -> Result<Summary, Error> {
        Err(dead())
    }

    fn leave(&self, _: DeviceId) -> Result<(), Error> {
        Err(dead())
    }

    fn await_closed(&self, _: DeviceId, _: Duration) -> bool {
        true
    }

    fn dismiss(&self) {}

    fn kill(&self) {}
}
