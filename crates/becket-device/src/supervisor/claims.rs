//! What a worker without a supervisor says that it serves, compared with what its last supervisor has
//! recorded.
//! The author of an image may have taken over a worker: no worker is given a device that was not its own.
//!
//! It is trusted for what only it can know and could do to its own device anyway: how long the device is by
//! now, which file its bytes go to, whether it refuses writes. It is not trusted for whose device it is, how
//! much memory a later worker needs for it, and what its descriptors are.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use tracing::warn;

use super::driver::Offer;
use super::isolation::is_member_list;
use super::make::{check_map, check_sources};
use super::workers::{Orphan, Worker};
use crate::contract::DeviceId;
use crate::contract::kept::Kept;
use crate::contract::sealed::is_sealed;
use crate::record::device::Device;
use crate::system::inode::is_pipe;
use crate::system::process::ProcessId;

/// A device and who serves it.
pub(super) type Claim = (Kept, Arc<dyn Worker>);

/// All that workers claim.
pub(super) struct Claims {
    left: Vec<Claim>,
}

impl Claims {
    pub(super) fn new(orphans: Vec<Orphan>) -> Claims {
        let all = |Orphan { worker, held }: Orphan| {
            held.into_iter().map(move |kept| (kept, Arc::clone(&worker))).collect::<Vec<_>>()
        };
        Claims { left: orphans.into_iter().flat_map(all).collect() }
    }

    /// The one claim to a device of this offer that can be believed. `alive` tells of processes that records
    /// name.
    pub(super) fn take(
        &mut self,
        offer: &Offer,
        record: &Device,
        records: &[Device],
        alive: impl Fn(ProcessId) -> bool,
    ) -> Option<Claim> {
        let of_it = |(kept, _): &mut Claim| kept.serve.mark == record.mark;
        let mut believed: Vec<Claim> = Vec::new();
        for (kept, worker) in self.left.extract_if(.., of_it) {
            let id = worker.id();
            let checked =
                may_hold(id, record, records, &alive).and_then(|()| makes_sense(offer, &kept, record));
            match checked {
                Ok(()) => believed.push((kept, worker)),
                Err(why) => {
                    warn!("worker {} is not believed that it serves {}: {why}", id.pid, record.info.name)
                }
            }
        }
        if let Some(named) = believed.iter().position(|(_, worker)| record.worker == Some(worker.id())) {
            return Some(believed.swap_remove(named));
        }
        let one = believed.pop();
        if !believed.is_empty() {
            warn!(device = record.info.name, "more than one worker claims it: none is believed");
            return None;
        }
        one
    }

    /// Those that no record speaks of, each claimed by one worker only.
    pub(super) fn others(self) -> impl Iterator<Item = Claim> {
        let marks: Vec<u64> = self.left.iter().map(|(kept, _)| kept.serve.mark).collect();
        let once = move |mark: u64| marks.iter().filter(|other| **other == mark).count() == 1;
        self.left.into_iter().filter(move |(kept, _)| once(kept.serve.mark))
    }
}

/// Whether a device can be that worker's. The record says whose it is, unless the worker that it names is
/// dead: then another one may have been given it just before their supervisor died.
fn may_hold(
    worker: ProcessId,
    record: &Device,
    records: &[Device],
    alive: impl Fn(ProcessId) -> bool,
) -> Result<(), &'static str> {
    match record.worker {
        Some(named) if named == worker => return Ok(()),
        Some(named) if alive(named) => return Err("it is another worker's"),
        _ => {}
    }
    // A worker that exists for one device never gets a second, and no other worker gets a device that needs
    // its own.
    let mut its = records.iter().filter(|other| other.worker == Some(worker));
    match its.any(|other| other.info.isolated || record.info.isolated) {
        true => Err("one of the two devices is isolated"),
        false => Ok(()),
    }
}

/// Whether what is said of a device fits its record, and its descriptors what is said of them.
pub(super) fn makes_sense(offer: &Offer, kept: &Kept, record: &Device) -> Result<(), &'static str> {
    let Kept { serve, sources, keepsakes, link } = kept;
    let info = &record.info;
    if serve.kind != info.transport || serve.id != DeviceId::of(info) {
        return Err("it is another device");
    }
    if (Some(serve.queues), Some(serve.depth)) != (info.spec.queues, info.spec.depth) {
        return Err("it has other queues");
    }
    if serve.isolated != info.isolated || serve.geometry.logical_block != info.spec.block_size {
        return Err("it is another kind of device");
    }
    if serve.geometry.size != serve.map.len() {
        return Err("its map is not as long as the device");
    }
    let read_only = serve.geometry.read_only;
    check_sources(sources, serve.backing.grows, read_only)?;
    check_map(
        &serve.map,
        sources,
        info.spec.block_size,
        keepsakes.table.is_some() && (read_only || serve.backing.grows),
    )?;
    let is = |fd: &Option<OwnedFd>, what: fn(&OwnedFd) -> bool| fd.as_ref().is_none_or(what);
    if !is(&keepsakes.lease, is_pipe) || !is(&keepsakes.cgroup, is_member_list) {
        return Err("what ends it, or pays for it, is none");
    }
    if !is(&keepsakes.table, is_sealed) {
        return Err("its table of encoded blocks can be changed");
    }
    if !(offer.is_link)(link) {
        return Err("its connection is none");
    }
    Ok(())
}
