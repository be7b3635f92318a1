//! User-space block devices of the kernel's `ublk_drv`.
//! Knows nothing of image formats: it serves a map and the descriptors it was given.

mod batch;
pub mod control;
mod mode;
mod params;
mod probe;
mod queue;
mod switch;

pub use mode::{DataMode, flags_for};
pub use probe::UblkTransport;
pub use queue::{Served, Setup, serve};

/// What can go wrong while a device's queues are set up.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The kernel or the image does not allow the wanted way of carrying data.
    #[error("mode {mode} is not possible: {why}")]
    NoMode {
        /// The wanted mode.
        mode: DataMode,
        /// Why it cannot be.
        why: String,
    },
    /// The engine could not take a queue.
    #[error("cannot serve ublk device {id}: {source}")]
    Engine {
        /// The kernel's number of the device.
        id: u32,
        /// What the engine said.
        source: becket_engine::Error,
    },
    /// The rings' tables of registered buffers have no room for the device as it was added.
    #[error(
        "the I/O threads have room for {room} requests in each queue of ublk device {id}, not for {depth}"
    )]
    Full {
        /// The kernel's number of the device.
        id: u32,
        /// How deep its queues are.
        depth: u16,
        /// How deep they could be; 0 when it must copy.
        room: u16,
    },
    /// Something under way on its backing does not end.
    #[error("operations of ublk device {id} on its backing do not end; it goes on as before")]
    Busy {
        /// The kernel's number of the device.
        id: u32,
    },
}
