//! The steps that every attach and detach has in common: taking a name, and forgetting what is gone.
//! It never takes a name from a device that lives.

use std::path::Path;

use becket_image::Opened;

use crate::describe::speakable;
use crate::judge::lives;
use crate::kernel::System;
use crate::state::{Claim, Device, Store};
use crate::{Error, links, log};

/// Takes the name that was asked for.
pub(crate) fn claim(store: &Store, name: Option<&str>, opened: &Opened) -> Result<Option<Claim>, Error> {
    name.map(|name| store.claim(name, &speakable(&opened.path), |device| lives(&System, device))).transpose()
}

/// Takes the kernel's name of a device, or that with a number behind it: somebody may have chosen this
/// very name for another device.
pub(crate) fn claim_default(store: &Store, name: &str, image: &Path) -> Result<Claim, Error> {
    by_default(name, |name| store.claim(name, &speakable(image), |device| lives(&System, device)))
}

/// The same for a device that is there already: records it under that name.
pub(crate) fn enter_default(store: &Store, name: &str, device: &mut Device) -> Result<(), Error> {
    by_default(name, |name| {
        name.clone_into(&mut device.info.name);
        store.enter(device, |device| lives(&System, device))
    })
}

fn by_default<T>(name: &str, mut take: impl FnMut(&str) -> Result<T, Error>) -> Result<T, Error> {
    let mut tried = take(name);
    for number in 2..100 {
        match tried {
            Err(Error::NameInUse { .. }) => tried = take(&format!("{name}.{number}")),
            other => return other,
        }
    }
    tried
}

/// Removes what is known of a device that is gone.
pub(crate) fn forget(store: &Store, device: &Device) {
    links::remove(store.runtime(), &device.info);
    if let Err(error) = store.remove(device) {
        log::warn(format_args!("the record of {} stays: {error}", device.info.name));
    }
}
