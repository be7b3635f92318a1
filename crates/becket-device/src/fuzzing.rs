//! Doors for fuzzers: any bytes to whatever decodes what another process says.
//! It never exists in a becket that is used: only `--features fuzzing` builds it.
//!
//! Each tells whether the bytes made sense.

use std::os::fd::OwnedFd;

use becket_engine::Summary;
use rustix::fs::MemfdFlags;
use serde_json::from_slice;

use crate::contract::messages::{Attach, Detach, Foresee, Reach, Refresh, ServerStatus, Set, Stat};
use crate::contract::protocol::{Order, Report};
use crate::contract::versions::Speech;
use crate::contract::{DeviceInfo, Error, sealed, table};
use crate::control::frames::Frames;
use crate::control::server;
use crate::control::server::Service;
use crate::record::store;

/// A call to the supervisor, as it is on the wire.
pub fn control(bytes: &[u8]) -> bool {
    from_slice(bytes).is_ok_and(|message| server::is_understood(&Nobody, message))
}

/// What a stream of calls yields, read in pieces. The first byte chooses how long they are.
pub fn frames(bytes: &[u8]) -> bool {
    let (Some(first), mut frames) = (bytes.first(), Frames::new()) else { return false };
    let mut understood = 0;
    for piece in bytes.get(1..).unwrap_or_default().chunks(usize::from(*first) + 1) {
        if frames.add(piece, vec![()]).is_err() {
            return false;
        }
        while let Some((message, _)) = frames.take() {
            understood += usize::from(control(&message));
        }
    }
    understood > 0
}

/// A packet between supervisor and worker.
pub fn worker(bytes: &[u8]) -> bool {
    let order = from_slice::<Order>(bytes).is_ok();
    let report = from_slice::<Report>(bytes).is_ok();
    order || report || from_slice::<Speech>(bytes).is_ok()
}

/// A table of encoded blocks.
pub fn blocks(bytes: &[u8]) -> bool {
    let file = || -> std::io::Result<OwnedFd> {
        let file = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::io::write(&file, bytes)?;
        rustix::fs::fcntl_add_seals(&file, sealed::seals())?;
        Ok(file)
    };
    let Ok(layers) = file().and_then(|file| table::unpack(&file)) else { return false };
    layers.iter().all(|layer| {
        let mut blocks = layer.blocks().iter().enumerate();
        blocks.all(|(index, block)| layer.block_at(block.start) == Some((index, block)))
    })
}

/// The record of a device.
pub fn record(bytes: &[u8]) -> bool {
    from_slice::<store::Record>(bytes).is_ok()
}

/// Takes every call and does nothing.
struct Nobody;

fn nothing() -> Error {
    Error::Server { what: "nobody is here".to_owned(), log: None }
}

impl Service for Nobody {
    fn attach(&self, _: Attach, _: Vec<OwnedFd>) -> Result<DeviceInfo, Error> {
        Err(nothing())
    }
    fn foresee(&self, _: &Foresee) -> Result<(), Error> {
        Err(nothing())
    }
    fn detach(&self, _: &Detach) -> Result<DeviceInfo, Error> {
        Err(nothing())
    }
    fn list(&self) -> Vec<DeviceInfo> {
        Vec::new()
    }
    fn refresh(&self, _: &Refresh) -> Result<DeviceInfo, Error> {
        Err(nothing())
    }
    fn reach(&self, _: &Reach) -> Result<(), Error> {
        Err(nothing())
    }
    fn set(&self, _: Set, _: Vec<OwnedFd>) -> Result<DeviceInfo, Error> {
        Err(nothing())
    }
    fn stat(&self, _: &Stat) -> Result<Summary, Error> {
        Err(nothing())
    }
    fn status(&self) -> ServerStatus {
        ServerStatus {
            version: String::new(),
            pid: 0,
            worker_pid: None,
            devices: 0,
            fetchers: None,
            stopping: false,
            notes: Vec::new(),
        }
    }
    fn hand_over(&self) -> Result<(), Error> {
        Err(nothing())
    }
}
