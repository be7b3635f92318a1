//! User-space block devices of the kernel's `ublk_drv`.
//! Knows nothing of image formats: it serves a map and the descriptors it was given.

mod access;
mod batch;
pub mod control;
mod mode;
mod params;
mod probe;
mod queue;

pub use access::privileged;
/// Most requests of a queue.
pub use becket_uapi::ublk::UBLK_MAX_QUEUE_DEPTH as MOST_DEPTH;
pub use mode::{DataMode, flags_for};
pub use probe::UblkTransport;
pub use queue::serve;
