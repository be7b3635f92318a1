//! The steps that every attach and detach has in common: taking a name, and forgetting what is gone.
//! It never takes a name from a device that lives.

use std::path::Path;

use tracing::warn;

use crate::contract::{Error, ErrorKind};
use crate::record::device::Device;
use crate::record::judge::lives;
use crate::record::store::{Claim, Store, Written};
use crate::record::{links, nodes};
use crate::system::kernel::System;

/// Takes the name that was asked for, of a device with partitions of these numbers.
pub(crate) fn claim(
    store: &Store,
    name: Option<&str>,
    image: &Path,
    partitions: impl IntoIterator<Item = u32>,
) -> Result<Option<Claim>, Error> {
    let Some(name) = name else { return Ok(None) };
    let claim = store.claim(name, image, |device| lives(&System, device))?;
    // Only now: of two that want the same link at once, one sees the other's claim.
    links::are_free(store, name, partitions)?;
    Ok(Some(claim))
}

/// Records a device under the name that was claimed for it, or else under the kernel's name, or that with a
/// number appended: a user may have chosen this very name for another device.
pub(crate) fn record(
    store: &Store,
    claimed: Option<Claim>,
    kernels: &str,
    device: &mut Device,
) -> Result<Written, Error> {
    if let Some(claim) = claimed {
        claim.name().clone_into(&mut device.info.name);
        return claim.fill(device);
    }
    let mut enter = |name: &str| {
        name.clone_into(&mut device.info.name);
        links::are_free(store, name, device.info.partitions.iter().map(|partition| partition.number))?;
        store.enter(device, |device| lives(&System, device))
    };
    let mut tried = enter(kernels);
    for number in 2..100 {
        match tried {
            Err(error) if error.kind() == ErrorKind::NameInUse => {
                tried = enter(&format!("{kernels}.{number}"));
            }
            other => return other,
        }
    }
    tried
}

/// Removes what is known of a device that is gone.
pub(crate) fn forget(store: &Store, device: &Device) {
    links::remove(store.runtime(), &device.info);
    nodes::remove(device);
    if let Err(error) = store.remove(device) {
        warn!("the record of {} stays: {error}", device.info.name);
    }
}
