//! ublk, the block device served by a user space program: `include/uapi/linux/ublk_cmd.h` of Linux 7.3.
//! It never holds the state of a device; structures, numbers, and one way to send a control command.
//!
//! Constants keep the kernel's names so that they can be searched for in its documentation; structures have
//! Rust names and say which C structure they are. All of them are plain data in the machine's byte order.

mod command;
mod io;
mod number;
mod params;
mod ring;
#[cfg(test)]
mod tests;

pub use command::*;
pub use io::*;
pub use params::*;
pub use ring::{ControlRing, Plain};
