//! Devices of device-mapper: ranges of block devices as linear tables, without a server and without a copy.
//! It never touches a device that is not becket's, which it knows by its UUID alone.
//!
//! # Who keeps others away
//! No process holds the image's open file description once the client has ended, so the locks that
//! [`becket_image::open`] took end with it. What stays is device-mapper's own claim on each device below (the
//! kernel's `FMODE_EXCL` holder): neither it nor a partition of it can be mounted, used as swap, formatted or
//! made part of a RAID. Programs that open it without `O_EXCL` are not excluded, and neither are other tables
//! of device-mapper, which all claim as one; becket itself asks for that claim before it writes to a block
//! device, and before it reads one for [`writer_over`].
//!
//! # Partitions
//! The kernel reads no partition table on a disk of device-mapper. Each partition is a linear table of its
//! own *on the disk's*: while one is used the disk is open, so the two go together.
//!
//! # Holes
//! A hole is a `zero` target, which reads as zeroes and silently discards what is written to it. It is used
//! for devices that refuse writes, and never for others.

mod attach;
mod control;
mod detach;
mod repartition;
mod status;
mod table;
#[cfg(test)]
mod tests;

pub use attach::{DmDevice, DmOptions, attach};
pub use detach::{detach_lazily, detach_unused, refresh};
pub use repartition::{partition, repartition};
pub use status::{is_leaving, mark_of, partitions, writer_over};

use std::fs::File;
use std::os::fd::AsFd;

use becket_image::Opened;
use becket_uapi::dm as uapi;

use crate::{Error, Kind, Probe, Transport};
use control::{CONTROL, PREFIX, open_control};

/// The interface that every device-mapper of the last twenty years speaks.
const INTERFACE: u32 = 4;

/// The kernel's device-mapper.
#[derive(Debug, Clone, Copy)]
pub struct DmTransport;

impl Transport for DmTransport {
    fn kind(&self) -> Kind {
        Kind::Dm
    }

    fn probe(&self) -> Probe {
        judge(ask().map(|_| Vec::new()))
    }

    fn fits(&self, opened: &Opened) -> Result<(), String> {
        if opened.grows {
            return Err("the image grows while it is written".to_owned());
        }
        table::of(opened).map(drop)
    }
}

/// The probe for people, which also counts.
pub fn examine() -> Probe {
    judge(ask().and_then(|(control, [major, minor, patch])| {
        let io = |what| Error::io(what, CONTROL);
        let kinds = uapi::target_kinds(control.as_fd()).map_err(io("ask for the targets of"))?;
        let devices = uapi::device_names(control.as_fd()).map_err(io("ask for the devices of"))?;
        let ours = devices.iter().filter(|name| name.starts_with(PREFIX) && !name.contains("-part")).count();
        Ok(vec![
            ("interface".to_owned(), format!("{major}.{minor}.{patch}")),
            ("targets loaded".to_owned(), kinds.join(", ")),
            ("devices attached".to_owned(), ours.to_string()),
        ])
    }))
}

fn judge(tried: Result<Vec<(String, String)>, Error>) -> Probe {
    let (reason, fix) = match tried {
        Ok(details) => {
            let reason = "device-mapper is there".to_owned();
            return Probe { works: true, reason, fix: None, details };
        }
        Err(Error::Unavailable { reason, fix, .. }) => (reason, fix),
        Err(other) => (other.to_string(), other.hint()),
    };
    Probe { works: false, reason, fix, details: Vec::new() }
}

/// Whether this user may command a device-mapper that we know how to command.
fn ask() -> Result<(File, [u32; 3]), Error> {
    let control = open_control()?;
    let version = uapi::version(control.as_fd()).map_err(Error::io("command device-mapper by", CONTROL))?;
    if version[0] != INTERFACE {
        let reason = format!("its interface is {}, becket speaks {INTERFACE}", version[0]);
        return Err(Error::Unavailable { kind: Kind::Dm, reason, fix: None });
    }
    Ok((control, version))
}
