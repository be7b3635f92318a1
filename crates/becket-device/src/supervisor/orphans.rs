//! Devices whose server has died, and which this supervisor does not own: they can be detached.
//! It never takes a device away from a server that lives.

use tracing::info;

use super::devices::{Supervisor, unsupported};
use crate::contract::{DeviceInfo, Error};
use crate::record::register::forget;
use crate::system::kernel::{Kernel as _, System};

impl Supervisor {
    /// A device that a supervisor before us made, known by its record alone.
    pub(super) fn detach_orphan(&self, name: &str, lazy: bool) -> Result<DeviceInfo, Error> {
        let none = || Error::NoDevice { target: name.to_owned() };
        let device = self.store.device(name)?.ok_or_else(none)?;
        if !device.info.transport.is_served() {
            return Err(none());
        }
        if device.server.is_some_and(|server| server.pid != std::process::id() && server.alive()) {
            let what = format!("is not the one that owns {name}");
            return Err(Error::Server { what, log: None });
        }
        if let Some(end_left) = self.drivers.offer(device.info.transport)?.end_left {
            if !end_left(&device)? && !lazy {
                return Err(Error::Busy { device: device.info.device, users: Vec::new() });
            }
            forget(&self.store, &device);
            info!(event = "detached", device = name, "detached; its server had died");
            return Ok(device.info);
        }
        let driver = self.driver(device.info.transport)?;
        let id = device.info.number;
        match driver.info(id)? {
            Some(added) if device.mark != 0 && added.mark == device.mark => {
                // A worker that the record does not name may serve it.
                let served = device.worker.is_none_or(|worker| System.alive(worker));
                // What has no disk any more has no users either.
                if !served || added.stopped {
                    driver.stop(id)?;
                } else if !driver.stop_unused(id)? {
                    let hint = "end its users first; it cannot be detached lazily, since its server died";
                    return Err(match lazy {
                        true => unsupported(format!("{name} is in use and orphaned"), hint),
                        false => Error::Busy { device: device.info.device, users: Vec::new() },
                    });
                }
                driver.del(id)?;
            }
            // Its number is free, or belongs to another device by now.
            Some(_) | None => {}
        }
        forget(&self.store, &device);
        info!(event = "detached", device = name, "detached; its server had died");
        Ok(device.info)
    }
}
