//! A device's life: planned, attached, listed, detached; the supervisor and its worker; the control protocol.
//! It parses no image and moves no byte: those are the rooms below.
//!
//! A `loop` device is made by the calling process and needs no server; a `ublk` device is made by the
//! supervisor (`becket serve`), which the first attach starts, and served by its worker.
#![forbid(unsafe_code)]

mod attach;
mod control;
mod detach;
mod error;
mod isolate;
mod kernel;
mod links;
mod list;
mod log;
mod planner;
mod process;
mod runtime;
mod state;
mod types;
mod users;
mod worker;

use std::os::fd::OwnedFd;

pub use attach::{Lease, attach, attach_leased};
pub use becket_uapi::handover::inherited_fd;
pub use control::ServerStatus;
pub use detach::{detach, refresh, server_status};
pub use error::{Error, ErrorKind, User};
pub use list::{find, list};
pub use planner::{doctor, plan};
pub use types::{
    AttachOptions, DataMode, DetachOptions, DeviceInfo, DeviceState, PartitionInfo, Partitions, Plan,
    TransportReport, Via,
};
pub use worker::worker_main;

/// How the supervisor runs.
#[derive(Debug, Default)]
pub struct ServeOptions {
    /// Go on when the last device is gone.
    pub stay: bool,
    /// One byte is written to this when clients can connect. The process then becomes a session of its
    /// own and writes to its log instead of standard error.
    pub ready_fd: Option<OwnedFd>,
}

fn soon<T>() -> Result<T, Error> {
    Err(Error::Server { what: "is not built yet".to_owned(), log: None })
}
/// The supervisor's main.
pub fn serve(_options: ServeOptions) -> Result<(), Error> {
    soon()
}
