//! Devices of the kernel's loop driver: no server, one contiguous range of one file or block device each.
//! It never keeps state: a device's life is the kernel's, and everything about it is read from there.

mod attach;
mod change;
mod detach;
mod device;
mod direct;
mod range;
mod status;
#[cfg(test)]
mod tests;

pub use attach::{LoopDevice, LoopOptions, attach};
pub use change::{change_image, set_size_limit};
pub use detach::{Cleared, detach, detach_unused, refresh, thaw};
pub use direct::set_direct_io;
pub use status::{LoopStatus, marked, numbers, status};

use std::fs::File;

use becket_image::Opened;

use crate::{Error, Kind, Probe, Transport};
use device::{control, dev, open_control, path};

/// The kernel's loop driver.
#[derive(Debug, Clone, Copy)]
pub struct LoopTransport;

impl Transport for LoopTransport {
    fn kind(&self) -> Kind {
        Kind::Loop
    }

    fn probe(&self) -> Probe {
        judge(control().map(drop))
    }

    fn fits(&self, opened: &Opened) -> Result<(), String> {
        match range::range_of(opened) {
            Ok(_) if !opened.grows => Ok(()),
            _ => Err(range::not_one(opened)),
        }
    }
}

/// The probe for display: slower, because it also tries a device and counts those attached. Every attach uses
/// the quick one, which leaves other users' devices alone.
pub fn examine() -> Probe {
    let attached = ("devices attached".to_owned(), numbers().len().to_string());
    Probe { details: vec![attached], ..judge(open_control().and_then(|_| probe_node())) }
}

fn judge(tried: Result<(), Error>) -> Probe {
    let (reason, fix) = match tried {
        Ok(()) => {
            let reason = "the kernel's loop driver is there".to_owned();
            return Probe { works: true, reason, fix: None, details: Vec::new() };
        }
        Err(Error::Unavailable { reason, fix, .. }) => (reason, fix),
        Err(other) => (other.to_string(), other.hint()),
    };
    Probe { works: false, reason, fix, details: Vec::new() }
}

/// A container may allow the control node and forbid the devices. A missing device or node is not made.
fn probe_node() -> Result<(), Error> {
    let path = path(0);
    if dev(0).is_none() || !path.exists() {
        return Ok(());
    }
    File::open(&path).map(drop).map_err(Error::io("open", path))
}
