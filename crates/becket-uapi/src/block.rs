//! What any block device answers to: sizes, limits, identity, partitions.
//! It never opens a device and never waits for one.

use std::ffi::c_int;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::ioctl::opcode::{none, read};
use rustix::ioctl::{Getter, NoArg, Opcode, Setter, ioctl};

const BLKROSET: Opcode = none(0x12, 93);
const BLKROGET: Opcode = none(0x12, 94);
const BLKFLSBUF: Opcode = none(0x12, 97);
const BLKPG: Opcode = none(0x12, 105);
const BLKGETSIZE64: Opcode = read::<usize>(0x12, 114);
const BLKIOMIN: Opcode = none(0x12, 120);
const BLKIOOPT: Opcode = none(0x12, 121);
const BLKROTATIONAL: Opcode = none(0x12, 126);
const BLKGETDISKSEQ: Opcode = read::<u64>(0x12, 128);

/// Its number, which all architectures share. Linux 6.5.
const SYS_CACHESTAT: libc::c_long = 451;

const BLKPG_ADD_PARTITION: c_int = 1;
const BLKPG_DEL_PARTITION: c_int = 2;
const BLKPG_RESIZE_PARTITION: c_int = 3;

macro_rules! getter {
    ($(#[$doc:meta])* $name:ident, $opcode:ident, $raw:ty => $out:ty, $convert:expr) => {
        $(#[$doc])*
        pub fn $name(device: BorrowedFd<'_>) -> io::Result<$out> {
            // SAFETY: this request writes one integer of this type.
            let value: $raw = unsafe { ioctl(device, Getter::<$opcode, $raw>::new()) }?;
            Ok($convert(value))
        }
    };
}

getter!(/// Length of the device in bytes.
    size64, BLKGETSIZE64, u64 => u64, std::convert::identity);
getter!(/// Preferred smallest request in bytes.
    io_min, BLKIOMIN, u32 => u32, std::convert::identity);
getter!(/// Preferred large request in bytes; 0 when none is named.
    io_opt, BLKIOOPT, u32 => u32, std::convert::identity);
getter!(/// Writes are refused.
    read_only, BLKROGET, c_int => bool, |value| value != 0);
getter!(/// The device has a seek time.
    rotational, BLKROTATIONAL, u16 => bool, |value| value != 0);
getter!(/// A number that no other disk of this boot ever had or will have, whatever its name. Linux 5.15.
    diskseq, BLKGETDISKSEQ, u64 => u64, std::convert::identity);

/// Logical block size in bytes.
pub fn logical_block_size(device: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(rustix::fs::ioctl_blksszget(device)?)
}

/// Physical block size in bytes.
pub fn physical_block_size(device: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(rustix::fs::ioctl_blkpbszget(device)?)
}

/// `struct cachestat`: pages.
#[repr(C)]
#[derive(Default)]
struct CacheStat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Whether the page cache of the device has what has not reached the device. Linux 6.5.
pub fn is_dirty(device: BorrowedFd<'_>) -> io::Result<bool> {
    // `struct cachestat_range`: from the start to the end.
    let range = [0_u64; 2];
    let mut found = CacheStat::default();
    // SAFETY: the kernel reads two integers from `range` and writes a `struct cachestat` to `found`.
    let result = unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            device.as_raw_fd(),
            std::ptr::from_ref(&range),
            std::ptr::from_mut(&mut found),
            0,
        )
    };
    match result {
        0 => Ok(found.dirty > 0 || found.writeback > 0),
        _ => Err(io::Error::last_os_error()),
    }
}

/// `struct blkpg_partition`.
#[repr(C)]
#[derive(Clone, Copy)]
struct BlkpgPartition {
    start: i64,
    length: i64,
    pno: c_int,
    devname: [u8; 64],
    volname: [u8; 64],
}

/// `struct blkpg_ioctl_arg`.
#[repr(C)]
struct BlkpgArg {
    op: c_int,
    flags: c_int,
    datalen: c_int,
    data: *mut BlkpgPartition,
}

/// Adds partition `number` (from 1) to the whole disk, at a range in bytes. `EBUSY`: it overlaps another or
/// exists.
pub fn partition_add(disk: BorrowedFd<'_>, number: u32, start_bytes: u64, len_bytes: u64) -> io::Result<()> {
    partition_change(disk, BLKPG_ADD_PARTITION, number, start_bytes, len_bytes)
}

/// Removes partition `number` of the whole disk. `EBUSY` when it is open, `ENXIO` when there is none.
pub fn partition_del(disk: BorrowedFd<'_>, number: u32) -> io::Result<()> {
    partition_change(disk, BLKPG_DEL_PARTITION, number, 0, 0)
}

/// Gives partition `number` another length in bytes, also while it is in use. `EBUSY` when it would meet
/// another.
pub fn partition_resize(
    disk: BorrowedFd<'_>,
    number: u32,
    start_bytes: u64,
    len_bytes: u64,
) -> io::Result<()> {
    partition_change(disk, BLKPG_RESIZE_PARTITION, number, start_bytes, len_bytes)
}

fn partition_change(disk: BorrowedFd<'_>, op: c_int, number: u32, start: u64, length: u64) -> io::Result<()> {
    let too_large = |_| io::Error::from_raw_os_error(libc::EOVERFLOW);
    let mut partition = BlkpgPartition {
        start: start.try_into().map_err(too_large)?,
        length: length.try_into().map_err(too_large)?,
        pno: number.try_into().map_err(too_large)?,
        devname: [0; 64],
        volname: [0; 64],
    };
    let arg =
        BlkpgArg { op, flags: 0, datalen: size_of::<BlkpgPartition>() as c_int, data: &raw mut partition };
    // SAFETY: BLKPG reads a `blkpg_ioctl_arg` and the `blkpg_partition` it points to, which outlives the
    // call.
    Ok(unsafe { ioctl(disk, Setter::<BLKPG, BlkpgArg>::new(arg)) }?)
}

/// Says whether writes are refused; of a whole disk, for its partitions too.
pub fn set_read_only(device: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    // SAFETY: BLKROSET reads an int.
    Ok(unsafe { ioctl(device, Setter::<BLKROSET, c_int>::new(c_int::from(on))) }?)
}

/// Writes the device's page cache back and drops it.
pub fn flush_buffers(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: BLKFLSBUF takes no argument.
    Ok(unsafe { ioctl(device, NoArg::<BLKFLSBUF>::new()) }?)
}

/// Takes the error of an earlier write-back that `device` has not reported yet, and waits for write-back in
/// flight. Writes nothing.
pub fn await_write_back(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the call takes no pointer.
    match unsafe { libc::sync_file_range(device.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WAIT_BEFORE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn numbers_and_structures_are_those_of_c() {
        assert_eq!(size_of::<BlkpgArg>(), 24);
        assert_eq!(offset_of!(BlkpgArg, data), 16);
        assert_eq!(size_of::<BlkpgPartition>(), 152);
        assert_eq!(offset_of!(BlkpgPartition, pno), 16);
        if cfg!(target_arch = "x86_64") {
            assert_eq!([BLKGETSIZE64, BLKGETDISKSEQ, BLKROGET], [0x8008_1272, 0x8008_1280, 0x125e]);
            assert_eq!([BLKROTATIONAL, BLKPG], [0x127e, 0x1269]);
            assert_eq!([BLKFLSBUF, BLKIOMIN, BLKIOOPT], [0x1261, 0x1278, 0x1279]);
            assert_eq!(BLKROSET, 0x125d);
        }
    }

    #[test]
    fn errors_are_the_kernels_own() -> io::Result<()> {
        let null = std::fs::File::open("/dev/null")?;
        assert_eq!(size64(null.as_fd()).map_err(|e| e.raw_os_error()), Err(Some(libc::ENOTTY)));
        let overflow = partition_add(null.as_fd(), 1, u64::MAX, 512);
        assert_eq!(overflow.map_err(|e| e.raw_os_error()), Err(Some(libc::EOVERFLOW)));
        Ok(())
    }
}
