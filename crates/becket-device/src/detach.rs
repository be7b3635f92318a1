//! The end of a device, and what changes while it lives.
//! It never takes a device away from its users, and never touches one that is not becket's.

use std::time::{Duration, Instant};

use becket_transport::Kind;
use becket_transport::loop_::{self, Cleared};

use crate::attach::forget;
use crate::control::{Detach, OneDevice, Refresh, client};
use crate::kernel::System;
use crate::list::{disk_of, lives, resolve};
use crate::runtime::Runtime;
use crate::state::{Device, Store};
use crate::{DetachOptions, DeviceInfo, DeviceState, Error, users};

/// Detaches the device that goes by a NAME, a path under /dev, or the path of its image, and waits until
/// it is really gone. With `lazy` a device in use is told to go with its last user; its state then is
/// [`DeviceState::Detaching`].
///
/// # Errors
/// There is no such device, it is in use, or it does not go in time.
pub fn detach(target: &str, options: &DetachOptions) -> Result<DeviceInfo, Error> {
    let store = Store::open(Runtime::open()?)?;
    let device = resolve(&store, target)?;
    if !options.lazy {
        let users = users::of(&disk_of(&device.info));
        if !users.is_empty() {
            return Err(Error::Busy { device: device.info.device, users });
        }
    }
    match device.info.transport {
        Kind::Ublk => detach_ublk(&store, device, options),
        _ => detach_loop(&store, device, options),
    }
}

fn detach_loop(store: &Store, device: Device, options: &DetachOptions) -> Result<DeviceInfo, Error> {
    let info = &device.info;
    let wait = if options.lazy { Duration::ZERO } else { options.timeout };
    match loop_::detach(info.number, info.diskseq, Some(wait)) {
        Ok(Cleared::Gone) => {}
        Ok(Cleared::WhenUnused) if options.lazy => {
            return Ok(DeviceInfo { state: DeviceState::Detaching, ..device.info });
        }
        // Opened between our look and the kernel's.
        Ok(Cleared::WhenUnused) => {
            let users = users::of(&disk_of(info));
            return Err(match users.is_empty() {
                true => Error::Timeout { device: info.device.clone(), seconds: options.timeout.as_secs() },
                false => Error::Busy { device: info.device.clone(), users },
            });
        }
        // Gone, and its number taken by somebody else since we looked.
        Err(becket_transport::Error::OtherDevice { .. }) => {}
        Err(error) => return Err(Error::Device(error)),
    }
    forget(store, &device);
    Ok(device.info)
}

fn detach_ublk(store: &Store, device: Device, options: &DetachOptions) -> Result<DeviceInfo, Error> {
    let request = Detach { name: device.info.name.clone(), lazy: options.lazy };
    let reply: OneDevice = match client::call(store.runtime(), "Detach", &request, &[]) {
        Ok(reply) => reply,
        // The kernel knows more than we saw, or somebody was faster.
        Err(Error::Busy { device: node, .. }) => {
            return Err(Error::Busy { device: node, users: users::of(&disk_of(&device.info)) });
        }
        Err(error) => return Err(error),
    };
    if options.lazy && reply.device.state == DeviceState::Detaching {
        return Ok(reply.device);
    }
    let deadline = Instant::now() + options.timeout;
    while lives(&System, &device) {
        if Instant::now() >= deadline {
            let seconds = options.timeout.as_secs();
            return Err(Error::Timeout { device: device.info.device, seconds });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(reply.device)
}

/// Takes over a changed size of the image of the device that goes by `target`.
///
/// # Errors
/// There is no such device, or its transport cannot.
pub fn refresh(target: &str) -> Result<DeviceInfo, Error> {
    let store = Store::open(Runtime::open()?)?;
    let device = resolve(&store, target)?;
    match device.info.transport {
        Kind::Ublk => {
            let request = Refresh { name: device.info.name };
            let reply: OneDevice = client::call(store.runtime(), "Refresh", &request, &[])?;
            Ok(reply.device)
        }
        _ => {
            let size = loop_::refresh(device.info.number).map_err(Error::Device)?;
            let mut new = device.clone();
            new.info.size = size;
            store.update(&device, new.clone())?;
            Ok(new.info)
        }
    }
}

/// What the supervisor says of itself, when one runs.
///
/// # Errors
/// One runs and cannot be talked to.
pub fn server_status() -> Result<Option<crate::ServerStatus>, Error> {
    let runtime = Runtime::open()?;
    client::call_running(&runtime, "Status", &crate::control::Nothing {})
}
