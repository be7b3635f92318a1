//! A device's life: planned, attached, listed, detached; the supervisor and its worker; the control protocol.
//! It parses no image and moves no byte: those are the rooms below.
//!
//! A `loop` device is made by the calling process and needs no server; a `ublk` device is made by the
//! supervisor (`becket serve`), which the first attach starts, and served by its worker.
#![forbid(unsafe_code)]

mod error;
mod links;
mod log;
mod process;
mod runtime;
mod state;
mod types;
mod users;

use std::path::Path;

use std::os::fd::OwnedFd;

pub use error::{Error, ErrorKind, User};
pub use types::{
    AttachOptions, DataMode, DetachOptions, DeviceInfo, DeviceState, PartitionInfo, Partitions, Plan,
    TransportReport, Via,
};

/// Keeps a device: it goes when this is dropped or when its process dies.
#[derive(Debug)]
pub struct Lease {
    _held: OwnedFd,
}

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
/// Attaches the image at a path.
pub fn attach(_image: &Path, _options: &AttachOptions) -> Result<DeviceInfo, Error> {
    soon()
}
/// Attaches the image at a path for as long as the lease lives.
pub fn attach_leased(_image: &Path, _options: &AttachOptions) -> Result<(DeviceInfo, Lease), Error> {
    soon()
}
/// Detaches the device named by its NAME, a path under /dev, or its image.
pub fn detach(_target: &str, _options: &DetachOptions) -> Result<DeviceInfo, Error> {
    soon()
}
/// All devices, sorted by name.
pub fn list() -> Result<Vec<DeviceInfo>, Error> {
    soon()
}
/// One device.
pub fn find(_target: &str) -> Result<DeviceInfo, Error> {
    soon()
}
/// Takes over a changed size of the backing file.
pub fn refresh(_target: &str) -> Result<DeviceInfo, Error> {
    soon()
}
/// What works here.
pub fn doctor() -> Vec<TransportReport> {
    Vec::new()
}
/// Picks the transport for an open image.
pub fn plan(_opened: &becket_image::Opened, _options: &AttachOptions) -> Result<Plan, Error> {
    soon()
}
/// The supervisor's main.
pub fn serve(_options: ServeOptions) -> Result<(), Error> {
    soon()
}
/// The worker's main; its control socket is standard input.
pub fn worker_main() -> Result<(), Error> {
    soon()
}
/// A descriptor that was handed to this process by number.
pub fn inherited_fd(_number: i32) -> std::io::Result<OwnedFd> {
    Err(std::io::ErrorKind::Unsupported.into())
}
