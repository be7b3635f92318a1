//! The numbers of commands, as `include/uapi/asm-generic/ioctl.h` makes them.

/// The number of a command that writes a `T`, as a ring's entry carries it: rustix has a wider type under
/// Miri.
pub(super) const fn read<T>(group: u8, number: u8) -> u32 {
    rustix::ioctl::opcode::read::<T>(group, number) as u32
}

/// The same for one that reads and writes a `T`.
pub(super) const fn read_write<T>(group: u8, number: u8) -> u32 {
    rustix::ioctl::opcode::read_write::<T>(group, number) as u32
}
