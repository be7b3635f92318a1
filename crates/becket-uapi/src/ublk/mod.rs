//! ublk, the block device served by a user space program: `include/uapi/linux/ublk_cmd.h` of Linux 7.3.
//! It never holds the state of a device; structures, numbers, and one way to send a control command.
//!
//! Constants keep the kernel's names so that they can be searched for in its documentation; structures have
//! Rust names and say which C structure they are. All of them are plain data in the machine's byte order.

mod command;
mod io;
mod params;
mod ring;
#[cfg(test)]
mod tests;

pub use command::*;
pub use io::*;
pub use params::*;
pub use ring::{ControlRing, Plain};

/// The number of a command that writes a `T`, as a ring's entry carries it: rustix has a wider type under
/// Miri.
const fn read<T>(group: u8, number: u8) -> u32 {
    rustix::ioctl::opcode::read::<T>(group, number) as u32
}

/// The same for one that reads and writes a `T`.
const fn read_write<T>(group: u8, number: u8) -> u32 {
    rustix::ioctl::opcode::read_write::<T>(group, number) as u32
}
