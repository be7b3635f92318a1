//! What a supervisor finds when it starts: records, devices of the kernel, and workers that serve them
//! without a supervisor. Each device gets its supervisor again, or is reported as lost.
//!
//! A record alone is not trusted: the kernel has to know the device by its mark, and a worker has to hold it.
//! Nor is a worker alone: see [`super::claims`].

use std::os::fd::AsRawFd;
use std::sync::Arc;

use becket_image::DirectIo;
use tracing::{error, info, warn};

use super::claims::{Claim, Claims};
use super::devices::Supervisor;
use super::driver::{Driver, Offer};
use super::left::Left;
use super::owned::Owned;
use super::recall::unnamed_server;
use super::workers::{Orphan, Worker};
use crate::contract::kept::Kept;
use crate::contract::{DeviceInfo, DeviceState, Error};
use crate::record::device::Device;
use crate::record::judge::lives;
use crate::record::links;
use crate::record::register::forget;
use crate::record::store::Entry;
use crate::system::kernel::{Kernel, System};
use crate::system::process::ProcessId;

impl Supervisor {
    /// Takes over what a predecessor has left; answers with its workers.
    pub(crate) fn adopt(&self) -> Vec<Arc<dyn Worker>> {
        self.store.sweep();
        let entries = self.store.entries().unwrap_or_else(|error| {
            warn!("cannot look for devices: {error}");
            Vec::new()
        });
        let unknown: Vec<Option<u64>> = entries.iter().filter_map(|(_, entry)| unknown_mark(entry)).collect();
        self.reserve(&entries);
        let records: Vec<Device> = entries.into_iter().filter_map(|(_, entry)| of_ours(entry)).collect();
        let orphans = self.workers.orphans(&|| self.on_death());
        let workers: Vec<_> = orphans.iter().map(|Orphan { worker, .. }| Arc::clone(worker)).collect();
        workers.iter().for_each(|worker| self.know(worker));
        let mut claims = Claims::new(orphans);
        let mut left = Left::new(self.guard.inherited(), self.workers.strangers());
        for record in &records {
            let took = self.drivers.offer(record.info.transport).and_then(|offer| {
                let found = claims.take(offer, record, &records, |worker| System.alive(worker));
                self.take_over(offer, record, found, &mut left)
            });
            if let Err(error) = took {
                error!(device = record.info.name, "cannot be taken over: {error}");
            }
        }
        // What another version has recorded has a record, though we cannot read it.
        let recorded = |mark| unknown.iter().any(|known| known.is_none_or(|known| known == mark));
        for (kept, worker) in claims.others().filter(|(kept, _)| !recorded(kept.serve.mark)) {
            let (id, pid) = (kept.serve.id, worker.id().pid);
            if let Err(error) = self.adopt_unrecorded(kept, worker) {
                error!(device = %id, "has no record and stays with worker {pid}: {error}");
            }
        }
        self.recall(true);
        workers
    }

    /// Keeps the numbers of devices that stay with others from being given to new ones.
    fn reserve(&self, entries: &[(String, Entry)]) {
        let infos = || {
            entries.iter().filter_map(|(_, entry)| match entry {
                Entry::Device(device) => Some(&device.info),
                Entry::Unknown(unknown) if !unknown.is_claim => Some(&unknown.info),
                Entry::Unknown(_) | Entry::Claim { .. } => None,
            })
        };
        for offer in self.drivers.offers().filter(|offer| offer.numbered_here) {
            let its = |info: &&DeviceInfo| info.transport == offer.kind || info.number == u32::MAX;
            let numbers = infos().filter(its).map(|info| info.number).collect();
            match self.driver(offer.kind) {
                Ok(driver) => driver.reserve(numbers),
                Err(error) => warn!("{} cannot be used: {error}", offer.kind),
            }
        }
    }

    /// One record, with the worker that holds its device.
    fn take_over(
        &self,
        offer: &Offer,
        record: &Device,
        found: Option<Claim>,
        left: &mut Left,
    ) -> Result<(), Error> {
        let driver = self.driver(record.info.transport)?;
        let id = record.info.number;
        let mut found = found.or_else(|| left.take(offer, record));
        if let Some((kept, _)) = &mut found {
            left.complete(offer, record, kept);
            driver.take_over(record, kept);
        }
        if let Some(why) = left.stranger(record).filter(|_| found.is_none()) {
            self.store.note_unspoken(record, why)?;
            return Err(Error::Worker { what: format!("goes on without a server: {why}") });
        }
        let Some(added) = driver.info(id)?.filter(|added| added.mark == record.mark) else {
            // What its driver does not know any more may still be there (FUSE: a connection ends with its
            // last server, its loop device does not). One that was only begun has no owner if no worker has
            // it.
            match offer.end_left.is_some() && !record.starting && lives(&System, record) {
                true => {
                    unserved(record)?;
                    say_lost(record);
                }
                false => forget(&self.store, record),
            }
            return Ok(());
        };
        if record.starting || (added.stopped && record.info.state != DeviceState::Lost) {
            // Our predecessor was making it, or taking it away.
            driver.stop(id)?;
            driver.del(id)?;
            forget(&self.store, record);
            warn!(device = record.info.name, "had no disk yet, or none any more: removed");
            return Ok(());
        }
        let Some((kept, worker)) = found else {
            unserved(record)?;
            if record.worker.is_none()
                && let Some(who) = unnamed_server(&*driver, id)
            {
                return Err(Error::Server { what: format!("does not own it: {who} serves it"), log: None });
            }
            // Nothing will ever carry out these requests. They get errors; the record stays until the device
            // is detached.
            driver.stop(id)?;
            let mut lost = record.clone();
            lost.info.state = DeviceState::Lost;
            self.store.update(record, &lost)?;
            say_lost(record);
            return Ok(());
        };
        let mut device = record.clone();
        as_served(&mut device, &kept);
        device.server = Some(ProcessId::own());
        device.info.server_pid = Some(std::process::id());
        device.unspoken = None;
        device.worker = Some(worker.id());
        device.info.worker_pid = Some(worker.id().pid);
        if device.info.state != DeviceState::Detaching {
            device.info.state = DeviceState::Live;
        }
        match self.store.update(record, &device) {
            Ok(true) => {}
            Ok(false) => return Err(Error::NoDevice { target: record.info.name.clone() }),
            // Its users need a server more than `list` needs that server's number.
            Err(error) => warn!(device = record.info.name, "{error}"),
        }
        info!(event = "taken_over", device = device.info.name, "taken over from a server that is gone");
        if worker.alive() {
            finish_resizing(&*driver, &device.info);
        }
        links::restore(&self.store, &device.info);
        if !device.info.isolated && worker.alive() {
            // By the record: one that is there for one device gets no other, whatever it says.
            self.share(Arc::clone(&worker));
        }
        self.own(&Owned::new(device, kept, worker));
        Ok(())
    }
}

fn say_lost(record: &Device) {
    let name = &record.info.name;
    let why = "its worker died with its server, and nobody kept what another needs";
    error!(event = "lost", device = name, "lost: {why}; `becket detach` removes it");
}

/// An error where the worker of a device that was not taken over lives.
fn unserved(record: &Device) -> Result<(), Error> {
    match record.worker.is_some_and(|worker| System.alive(worker)) {
        true => {
            let what = "its worker cannot be talked to and goes on without a server".to_owned();
            Err(Error::Worker { what })
        }
        false => Ok(()),
    }
}

/// The mark of a device that another version has recorded, where that could be read.
fn unknown_mark(entry: &Entry) -> Option<Option<u64>> {
    match entry {
        Entry::Unknown(unknown) => Some(unknown.mark),
        _ => None,
    }
}

fn of_ours(entry: Entry) -> Option<Device> {
    match entry {
        Entry::Device(device) if device.info.transport.is_served() && device.mark != 0 => Some(*device),
        _ => None,
    }
}

/// The worker's state counts: our predecessor may have died when it had changed the device and not yet its
/// record.
fn as_served(device: &mut Device, kept: &Kept) {
    let Device { info, image, format, .. } = device;
    info.size = kept.serve.geometry.size;
    info.spec.read_only = kept.serve.geometry.read_only;
    info.direct_io = kept.serve.backing.direct_io != DirectIo::Off;
    let Some(source) = kept.sources.first() else { return };
    let Some(held) = source.identity() else { return };
    if *image == held {
        return;
    }
    warn!(device = info.name, "its worker holds another image than was recorded");
    *image = held;
    *format = None;
    let descriptors = source.descriptors();
    let path = descriptors.first().map(|fd| std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())));
    if let Some(Ok(path)) = path {
        info.spec.image = path;
    }
}

/// Has users see as much as the worker serves: our predecessor may have died between the two.
fn finish_resizing(driver: &dyn Driver, info: &DeviceInfo) {
    let (id, DeviceInfo { name, size, .. }) = (info.number, info);
    let Some(seen) = driver.size(id).filter(|seen| seen != size) else { return };
    match driver.update_size(id, *size) {
        Ok(()) => info!(device = name, "had {seen} bytes for its users, and has {size} now"),
        Err(error) => warn!(device = name, "keeps {seen} bytes for its users: {error}"),
    }
}

#[cfg(test)]
#[path = "adopt_tests.rs"]
mod tests;
