//! The kernel's structures and ioctl numbers for becket: ublk, loop, device-mapper, FUSE, block devices,
//! process state.
//! It never decides anything: no policy, no retries, no paths; every error is the kernel's raw errno.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod block;
mod close;
pub mod dm;
pub mod fuse;
pub mod handover;
pub mod landlock;
pub mod lease;
pub mod lock;
pub mod loop_;
pub mod nbd;
pub mod peer;
pub mod process;
pub mod seccomp;
pub mod shared;
pub mod signal;
mod socket_option;
pub mod ublk;
pub mod unsent;

pub use close::close;
