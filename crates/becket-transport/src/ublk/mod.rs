//! User-space block devices of the kernel's `ublk_drv`.
//! Knows nothing of image formats: it serves a map and the descriptors it was given.

mod batch;
pub mod control;
mod mode;
mod params;
mod probe;
mod queue;

pub use mode::{DataMode, flags_for};
pub use probe::UblkTransport;
pub use queue::{Setup, serve};

/// Whether the kernel lets this process have devices with all that ublk can do. Others have devices of their own, where udev
/// gives them the nodes (`dist/91-becket-users.rules`): copied, without recovery, and without partitions.
pub fn privileged() -> bool {
    let ours = rustix::thread::capabilities(None);
    ours.is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::SYS_ADMIN))
}
