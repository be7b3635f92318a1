//! Devices of ours without a record: it was removed, or set aside since it made no sense. They get one again,
//! so that they are listed and can be detached.
//! It never touches a device whose mark is not of this becket, nor one whose server lives (that makes the
//! records itself when its runtime directory was removed), and believes no record that was set aside.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;

use becket_image::{DirectIo, Identity};
use becket_transport::{node, sysfs};
use tracing::{info, warn};

use super::claims::makes_sense;
use super::devices::Supervisor;
use super::driver::{Added, Driver, Offer};
use super::make::direct_io;
use super::owned::Owned;
use super::workers::Worker;
use crate::contract::kept::Kept;
use crate::contract::{DeviceId, DeviceInfo, DeviceState, Error, Spec};
use crate::record::device::Device;
use crate::record::judge::disk_name;
use crate::record::store::Entry;
use crate::record::{links, mark, register};
use crate::system::describe::{partitions_as, size_of};
use crate::system::process::ProcessId;
use crate::system::sync::lock;

/// What stands where a device's image would.
const UNKNOWN: &str = "(unknown)";

impl Supervisor {
    /// Writes the records of all devices again, and makes the workers listen again, after the runtime
    /// directory was removed.
    pub(super) fn reappear(&self) {
        let devices: Vec<Arc<Owned>> = lock(&self.devices).values().cloned().collect();
        let mut announced = Vec::new();
        for owned in devices {
            let state = lock(&owned.state);
            if state.gone {
                continue;
            }
            if let Err(error) = self.store.enter(&state.device, |_| false) {
                warn!(device = state.name(), "{error}");
            }
            let worker = state.worker.id();
            if announced.contains(&worker) {
                continue;
            }
            announced.push(worker);
            match state.worker.announce() {
                // It is there still: the directory was not removed as a whole.
                Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {}
                Err(error) => warn!("worker {}: {error}", worker.pid),
                Ok(()) => {}
            }
        }
    }

    /// Gives a record to each device without one that we own or that has no server any more. `at_first`: no
    /// device is being made, so what has no disk either is left over and is removed.
    pub(super) fn recall(&self, at_first: bool) {
        let owned: Vec<_> = lock(&self.devices).values().cloned().collect();
        let mine: BTreeSet<DeviceId> = owned.iter().filter_map(|owned| self.record_again(owned)).collect();
        for offer in self.drivers.offers() {
            self.recall_of(offer, &mine, at_first);
        }
    }

    fn recall_of(&self, offer: &Offer, mine: &BTreeSet<DeviceId>, at_first: bool) {
        if !self.drivers.is_open(offer.kind) && (offer.present)().is_empty() {
            return;
        }
        let Ok(driver) = self.driver(offer.kind) else { return };
        let id_of = |number| DeviceId { kind: offer.kind, number };
        let unserved = driver.numbers().into_iter().filter(|number| !mine.contains(&id_of(*number)));
        let ours = |added: &Added| mark::is_of(self.store.runtime(), added.mark);
        let all: Vec<Added> =
            unserved.filter_map(|number| driver.info(number).ok().flatten().filter(ours)).collect();
        if all.is_empty() {
            return;
        }
        // Looked at only now: a device has its record before it has a disk.
        let Ok(entries) = self.store.entries() else { return };
        // Whose device such a record speaks of is not known: it may be any of them.
        let unread = |(_, entry): &(_, Entry)| matches!(entry, Entry::Unknown(one) if one.mark.is_none());
        if entries.iter().any(unread) {
            return;
        }
        let recorded: BTreeSet<u64> = entries.iter().filter_map(|(_, entry)| mark::recorded(entry)).collect();
        for added in all.iter().filter(|added| !recorded.contains(&added.mark)) {
            let id = id_of(added.number);
            if let Err(error) = self.recall_unserved(&*driver, id, added, at_first) {
                warn!(device = %id, "has no record, and gets none: {error}");
            }
        }
    }

    /// Answers with the device's number.
    fn record_again(&self, owned: &Owned) -> Option<DeviceId> {
        let state = lock(&owned.state);
        if !state.gone && matches!(self.store.device(state.name()), Ok(None)) {
            match self.store.enter(&state.device, |_| true) {
                Ok(_) => info!("the record of {} was gone and is made again", state.name()),
                Err(error) => warn!(device = state.name(), "has no record: {error}"),
            }
        }
        Some(DeviceId::of(&state.device.info))
    }

    fn recall_unserved(
        &self,
        driver: &dyn Driver,
        id: DeviceId,
        added: &Added,
        at_first: bool,
    ) -> Result<(), Error> {
        if let Some(pid) = server_of(driver, id.number) {
            if at_first {
                warn!(device = %id, "has no record here, and is left to its server: process {pid}");
            }
            return Ok(());
        }
        match (added.stopped, at_first) {
            // Another server makes it: the kernel knows none before it is started.
            (true, true) if driver.is_held(id.number) => return Ok(()),
            (true, true) => {
                driver.del(id.number)?;
                warn!(device = %id, "had neither record nor disk: removed");
                return Ok(());
            }
            (true, false) => return Ok(()),
            (false, _) => {}
        }
        let mut device = described(driver, id, added);
        let held = driver.is_held(id.number);
        if held {
            device.info.warnings.push("a process that this server does not know serves it".to_owned());
        }
        register::record(&self.store, None, &driver.default_name(id.number), &mut device)?;
        links::make(&self.store, &device.info);
        let name = &device.info.name;
        let who = if held { "a process that is not known serves it" } else { "nobody serves it" };
        warn!(device = name, "had no record and {who}; `becket detach` removes it once it is unused");
        Ok(())
    }

    /// Removes what another server has recorded of our devices while our records were away: a device with two
    /// records could be taken for a lost one by the second.
    pub(super) fn forget_twins(&self) {
        let owned: Vec<_> = lock(&self.devices).values().cloned().collect();
        let ours: BTreeMap<u64, DeviceInfo> = owned
            .iter()
            .map(|owned| {
                let state = lock(&owned.state);
                (state.device.mark, state.device.info.clone())
            })
            .collect();
        for (name, entry) in self.store.entries().unwrap_or_default() {
            let Entry::Device(twin) = entry else { continue };
            let Some(info) = ours.get(&twin.mark).filter(|info| info.name != name) else { continue };
            links::remove(self.store.runtime(), &twin.info);
            if let Err(error) = self.store.remove(&twin) {
                warn!("the record {name} of {} stays: {error}", info.name);
            }
            links::restore(&self.store, info);
        }
    }
}

/// The server of a device by its number, where it lives and is not this one. In another PID namespace, its
/// number names nobody here, or a process that is no server.
fn server_of(driver: &dyn Driver, number: u32) -> Option<u32> {
    let server = ProcessId::of(driver.server(number)?)?;
    (server != ProcessId::own() && server.is_server()).then_some(server.pid)
}

/// The process that serves a device whose record names no worker, if there is one.
pub(super) fn unnamed_server(driver: &dyn Driver, number: u32) -> Option<String> {
    match server_of(driver, number) {
        Some(pid) => Some(format!("process {pid}")),
        None => driver.is_held(number).then(|| "a process that is not known".to_owned()),
    }
}

impl Supervisor {
    /// Owns a device that a worker of our predecessor's serves and no record speaks of.
    pub(super) fn adopt_unrecorded(&self, kept: Kept, worker: Arc<dyn Worker>) -> Result<(), Error> {
        let id = kept.serve.id;
        let (offer, driver) = (self.drivers.offer(id.kind)?, self.driver(id.kind)?);
        let listed = driver.numbers().contains(&id.number);
        let added = driver.info(id.number)?.filter(|added| added.mark == kept.serve.mark);
        let Some(added) = added.filter(|added| listed && !added.stopped) else {
            let what = format!("serves {}, which the kernel does not have", id);
            return Err(Error::Worker { what });
        };
        let mut device = described(&*driver, id, &added);
        device.info.state = DeviceState::Live;
        // That is recorded nowhere; all else the kernel knows, too.
        device.info.isolated = kept.serve.isolated;
        makes_sense(offer, &kept, &device)
            .map_err(|why| Error::Worker { what: format!("is not believed that it serves {}: {why}", id) })?;
        (device.server, device.worker) = (Some(ProcessId::own()), Some(worker.id()));
        (device.info.server_pid, device.info.worker_pid) = (Some(std::process::id()), Some(worker.id().pid));
        as_kept(&mut device, &kept);
        register::record(&self.store, None, &driver.default_name(id.number), &mut device)?;
        links::make(&self.store, &device.info);
        info!(
            event = "taken_over",
            device = device.info.name,
            "had no record and is taken over by what its worker holds"
        );
        self.own(&Owned::new(device, kept, worker));
        Ok(())
    }
}

/// A device as the kernel alone knows it.
fn described(driver: &dyn Driver, id: DeviceId, added: &Added) -> Device {
    let disk = disk_name(id.kind, id.number);
    let block = sysfs::number(&disk, "queue/logical_block_size").unwrap_or(512);
    let bare = DeviceInfo::bare(String::new(), driver.node(id.number), id.kind, id.number);
    let known = DeviceInfo {
        spec: Spec {
            image: PathBuf::from(UNKNOWN),
            read_only: sysfs::flag(&disk, "ro").unwrap_or_default(),
            block_size: block,
            queues: Some(added.queues),
            depth: Some(added.depth),
            mode: Some(added.abilities.data_mode()),
            reason: "found without a record".to_owned(),
            ..Spec::default()
        },
        size: size_of(&disk).unwrap_or_default(),
        physical_block_size: sysfs::number(&disk, "queue/physical_block_size").unwrap_or(block),
        state: DeviceState::Lost,
        partitions: partitions_as(node::partitions(&disk), &[]),
        diskseq: node::diskseq(&disk),
        warnings: vec!["its record was lost: its name and what was said of it are forgotten".to_owned()],
        ..bare
    };
    Device::bare(known, Identity { dev: 0, ino: 0 }, added.mark)
}

/// What its worker holds says more.
fn as_kept(device: &mut Device, kept: &Kept) {
    let Device { info, image, .. } = device;
    let (direct, reason) =
        direct_io(&kept.sources, kept.serve.backing.direct_io, kept.serve.backing.encoded.is_some());
    (info.direct_io, info.direct_io_reason) = (direct != DirectIo::Off, reason);
    (info.size, info.spec.read_only) = (kept.serve.geometry.size, kept.serve.geometry.read_only);
    (info.isolated, info.spec.faults) = (kept.serve.isolated, kept.serve.faults.clone());
    // With a lease it goes by itself, as it was to.
    info.spec.autoclear = kept.serve.backing.lease;
    let Some(source) = kept.sources.first() else { return };
    if let Some(held) = source.identity() {
        *image = held;
    }
    let descriptors = source.descriptors();
    let path = descriptors.first().map(|fd| std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())));
    if let Some(Ok(path)) = path {
        info.spec.image = path;
    }
}

#[cfg(test)]
#[path = "recall_tests.rs"]
mod tests;
