//! The block-device ioctls that the tests use, as safe functions.
//! Must never grow anything else: it is the only place of this crate where `unsafe` is allowed.
#![allow(unsafe_code)]

use std::fs::File;
use std::ops::Range;

use rustix::io::Result;
use rustix::ioctl::{Getter, NoArg, Opcode, Setter, ioctl};

const BLKROSET: Opcode = 0x125d;
const BLKROGET: Opcode = 0x125e;
const BLKFLSBUF: Opcode = 0x1261;
const BLKSSZGET: Opcode = 0x1268;
const BLKDISCARD: Opcode = 0x1277;
const BLKPBSZGET: Opcode = 0x127b;
const BLKZEROOUT: Opcode = 0x127f;
const BLKGETSIZE64: Opcode = rustix::ioctl::opcode::read::<usize>(0x12, 114);

/// A range of bytes as the kernel wants it: start and length.
fn start_and_length(range: Range<u64>) -> [u64; 2] {
    [range.start, range.end.saturating_sub(range.start)]
}

/// The device's size in bytes.
pub(crate) fn size(device: &File) -> Result<u64> {
    // SAFETY: BLKGETSIZE64 writes one u64 through its pointer.
    unsafe { ioctl(device, Getter::<BLKGETSIZE64, u64>::new()) }
}

/// The logical block size in bytes.
pub(crate) fn logical_block(device: &File) -> Result<u32> {
    // SAFETY: BLKSSZGET writes one int through its pointer; sizes of blocks are positive.
    unsafe { ioctl(device, Getter::<BLKSSZGET, u32>::new()) }
}

/// The physical block size in bytes.
pub(crate) fn physical_block(device: &File) -> Result<u32> {
    // SAFETY: BLKPBSZGET writes one unsigned int through its pointer.
    unsafe { ioctl(device, Getter::<BLKPBSZGET, u32>::new()) }
}

/// Whether the kernel refuses writes.
pub(crate) fn read_only(device: &File) -> Result<bool> {
    // SAFETY: BLKROGET writes one int through its pointer.
    unsafe { ioctl(device, Getter::<BLKROGET, i32>::new()) }.map(|value| value != 0)
}

/// Asks the kernel to refuse or to allow writes (`blockdev --setro`, `--setrw`).
pub(crate) fn set_read_only(device: &File, value: bool) -> Result<()> {
    // SAFETY: BLKROSET reads one int through its pointer.
    unsafe { ioctl(device, Setter::<BLKROSET, i32>::new(i32::from(value))) }
}

/// Writes back and forgets what the page cache holds of the device.
pub(crate) fn flush_buffers(device: &File) -> Result<()> {
    // SAFETY: BLKFLSBUF takes no argument.
    unsafe { ioctl(device, NoArg::<BLKFLSBUF>::new()) }
}

/// Discards a range of bytes.
pub(crate) fn discard(device: &File, range: Range<u64>) -> Result<()> {
    // SAFETY: BLKDISCARD reads two u64 through its pointer.
    unsafe { ioctl(device, Setter::<BLKDISCARD, [u64; 2]>::new(start_and_length(range))) }
}

/// Zeroes a range of bytes; the space stays allocated.
pub(crate) fn zero_out(device: &File, range: Range<u64>) -> Result<()> {
    // SAFETY: BLKZEROOUT reads two u64 through its pointer.
    unsafe { ioctl(device, Setter::<BLKZEROOUT, [u64; 2]>::new(start_and_length(range))) }
}
