//! The kernel's loop driver: `include/uapi/linux/loop.h`.
//! It never retries: `EBUSY` and `EAGAIN` are answers for the caller.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::ioctl::{IntegerSetter, NoArg, Opcode, Setter, Updater, ioctl};

const LOOP_CLR_FD: Opcode = 0x4C01;
const LOOP_SET_STATUS64: Opcode = 0x4C04;
const LOOP_GET_STATUS64: Opcode = 0x4C05;
const LOOP_CHANGE_FD: Opcode = 0x4C06;
const LOOP_SET_CAPACITY: Opcode = 0x4C07;
const LOOP_SET_DIRECT_IO: Opcode = 0x4C08;
const LOOP_SET_BLOCK_SIZE: Opcode = 0x4C09;
const LOOP_CONFIGURE: Opcode = 0x4C0A;
const LOOP_CTL_ADD: Opcode = 0x4C80;
const LOOP_CTL_REMOVE: Opcode = 0x4C81;
const LOOP_CTL_GET_FREE: Opcode = 0x4C82;

/// Major number of loop devices.
pub const LOOP_MAJOR: u32 = 7;
/// Major and minor number of `/dev/loop-control`.
pub const LOOP_CONTROL: (u32, u32) = (10, 237);
/// Bytes of the names in [`LoopInfo64`].
pub const LO_NAME_SIZE: usize = 64;
/// Where in a file name its mark is: the kernel keeps all bytes but the last.
const MARK: std::ops::Range<usize> = LO_NAME_SIZE - 1 - size_of::<u64>()..LO_NAME_SIZE - 1;

/// Writes are refused.
pub const LO_FLAGS_READ_ONLY: u32 = 1;
/// The device is cleared when its last user closes it.
pub const LO_FLAGS_AUTOCLEAR: u32 = 4;
/// The device is scanned for partitions.
pub const LO_FLAGS_PARTSCAN: u32 = 8;
/// The backing file is read and written past the page cache.
pub const LO_FLAGS_DIRECT_IO: u32 = 16;

/// A device's configuration, `struct loop_info64`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoopInfo64 {
    /// Device number of the backing file's file system, in the kernel's "huge" encoding. Read only.
    pub lo_device: u64,
    /// Inode number of the backing file. Read only.
    pub lo_inode: u64,
    /// Device number of a backing block device. Read only.
    pub lo_rdevice: u64,
    /// First byte of the backing file.
    pub lo_offset: u64,
    /// Most bytes of the device; 0 for all there are.
    pub lo_sizelimit: u64,
    /// The device's number. Read only.
    pub lo_number: u32,
    /// Obsolete.
    pub lo_encrypt_type: u32,
    /// Obsolete.
    pub lo_encrypt_key_size: u32,
    /// `LO_FLAGS_*`.
    pub lo_flags: u32,
    /// The backing file's path for people, NUL-terminated, cut to fit.
    pub lo_file_name: [u8; LO_NAME_SIZE],
    /// Obsolete.
    pub lo_crypt_name: [u8; LO_NAME_SIZE],
    /// Obsolete.
    pub lo_encrypt_key: [u8; 32],
    /// Obsolete.
    pub lo_init: [u64; 2],
}

impl Default for LoopInfo64 {
    fn default() -> LoopInfo64 {
        LoopInfo64 {
            lo_device: 0,
            lo_inode: 0,
            lo_rdevice: 0,
            lo_offset: 0,
            lo_sizelimit: 0,
            lo_number: 0,
            lo_encrypt_type: 0,
            lo_encrypt_key_size: 0,
            lo_flags: 0,
            lo_file_name: [0; LO_NAME_SIZE],
            lo_crypt_name: [0; LO_NAME_SIZE],
            lo_encrypt_key: [0; 32],
            lo_init: [0; 2],
        }
    }
}

/// A device number from the encoding of [`LoopInfo64`]: 12 bits of major between the minor's halves.
pub fn decode_dev(encoded: u64) -> u64 {
    let major = (encoded >> 8) & 0xfff;
    let minor = (encoded & 0xff) | ((encoded >> 12) & 0xf_ff00);
    rustix::fs::makedev(major as u32, minor as u32)
}

impl LoopInfo64 {
    /// Sets the file name, cut so that a NUL follows it.
    pub fn set_file_name(&mut self, name: &[u8]) {
        let length = name.len().min(LO_NAME_SIZE - 1);
        self.lo_file_name = [0; LO_NAME_SIZE];
        self.lo_file_name[..length].copy_from_slice(&name[..length]);
    }

    /// Puts a number behind the file name's NUL, where no reader of names sees it. A longer name is cut.
    pub fn set_mark(&mut self, mark: u64) {
        self.lo_file_name[MARK.start - 1] = 0;
        self.lo_file_name[MARK].copy_from_slice(&mark.to_le_bytes());
    }

    /// What is in the place of a mark: that, or a part of a long name.
    pub fn mark(&self) -> u64 {
        let mut bytes = [0; size_of::<u64>()];
        bytes.copy_from_slice(&self.lo_file_name[MARK]);
        u64::from_le_bytes(bytes)
    }
}

/// Everything of a new device, `struct loop_config`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoopConfig {
    /// Descriptor of the backing file; the kernel keeps a reference to its open file description.
    pub fd: u32,
    /// Logical block size in bytes; 0 for 512, or the backing's with direct I/O.
    pub block_size: u32,
    /// The configuration.
    pub info: LoopInfo64,
    /// Zero.
    pub reserved: [u64; 8],
}

/// Number of a device that is not bound, made when there is none. `control` is `/dev/loop-control`.
/// Another program may take it first.
pub fn ctl_get_free(control: BorrowedFd<'_>) -> io::Result<u32> {
    control_command(control, LOOP_CTL_GET_FREE, 0)
}

/// Makes device `number`; `EEXIST` when it is there.
pub fn ctl_add(control: BorrowedFd<'_>, number: u32) -> io::Result<u32> {
    control_command(control, LOOP_CTL_ADD, number)
}

/// Removes device `number`; `EBUSY` when it is bound or open.
pub fn ctl_remove(control: BorrowedFd<'_>, number: u32) -> io::Result<()> {
    control_command(control, LOOP_CTL_REMOVE, number).map(drop)
}

/// These answer with the device's number as the call's result, which rustix's patterns drop.
fn control_command(control: BorrowedFd<'_>, command: Opcode, number: u32) -> io::Result<u32> {
    // SAFETY: the loop-control commands take an integer and touch no memory.
    let answer = unsafe { libc::ioctl(control.as_raw_fd(), command as _, libc::c_ulong::from(number)) };
    u32::try_from(answer).map_err(|_| io::Error::last_os_error())
}

/// Binds a device and configures it in one step. `EBUSY` when it is bound already.
pub fn configure(device: BorrowedFd<'_>, config: &LoopConfig) -> io::Result<()> {
    // SAFETY: LOOP_CONFIGURE reads a `loop_config`.
    Ok(unsafe { ioctl(device, Setter::<LOOP_CONFIGURE, LoopConfig>::new(*config)) }?)
}

/// Unbinds a device; when others have it open the driver only marks it to be cleared on their last close.
/// `ENXIO` when it is not bound.
pub fn clr_fd(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: LOOP_CLR_FD takes no argument.
    Ok(unsafe { ioctl(device, NoArg::<LOOP_CLR_FD>::new()) }?)
}

/// The device's configuration. `ENXIO` when it is not bound.
pub fn get_status64(device: BorrowedFd<'_>) -> io::Result<LoopInfo64> {
    let mut info = LoopInfo64::default();
    // SAFETY: LOOP_GET_STATUS64 writes a `loop_info64`.
    unsafe { ioctl(device, Updater::<LOOP_GET_STATUS64, LoopInfo64>::new(&mut info)) }?;
    Ok(info)
}

/// Changes what can be changed of a bound device: offset, limit, name, autoclear, partition scanning.
pub fn set_status64(device: BorrowedFd<'_>, info: &LoopInfo64) -> io::Result<()> {
    // SAFETY: LOOP_SET_STATUS64 reads a `loop_info64`.
    Ok(unsafe { ioctl(device, Setter::<LOOP_SET_STATUS64, LoopInfo64>::new(*info)) }?)
}

/// Takes over the backing file's present size.
pub fn set_capacity(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: LOOP_SET_CAPACITY takes no argument.
    Ok(unsafe { ioctl(device, NoArg::<LOOP_SET_CAPACITY>::new()) }?)
}

/// Switches direct I/O. `EINVAL` when the backing file cannot.
pub fn set_direct_io(device: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    // SAFETY: LOOP_SET_DIRECT_IO takes an integer.
    Ok(unsafe { ioctl(device, IntegerSetter::<LOOP_SET_DIRECT_IO>::new_usize(usize::from(on))) }?)
}

/// Sets the logical block size in bytes. `EAGAIN` when dirty pages stand in the way.
pub fn set_block_size(device: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    // SAFETY: LOOP_SET_BLOCK_SIZE takes an integer.
    Ok(unsafe { ioctl(device, IntegerSetter::<LOOP_SET_BLOCK_SIZE>::new_usize(bytes as usize)) }?)
}

/// Replaces the backing file of a read-only device by another of the same size.
pub fn change_fd(device: BorrowedFd<'_>, backing: BorrowedFd<'_>) -> io::Result<()> {
    let backing = usize::try_from(backing.as_raw_fd()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: LOOP_CHANGE_FD takes a descriptor as an integer.
    Ok(unsafe { ioctl(device, IntegerSetter::<LOOP_CHANGE_FD>::new_usize(backing)) }?)
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    #[test]
    fn structures_are_laid_out_as_in_c() {
        assert_eq!(size_of::<LoopInfo64>(), 232);
        assert_eq!(offset_of!(LoopInfo64, lo_offset), 24);
        assert_eq!(offset_of!(LoopInfo64, lo_sizelimit), 32);
        assert_eq!(offset_of!(LoopInfo64, lo_number), 40);
        assert_eq!(offset_of!(LoopInfo64, lo_flags), 52);
        assert_eq!(offset_of!(LoopInfo64, lo_file_name), 56);
        assert_eq!(offset_of!(LoopInfo64, lo_crypt_name), 120);
        assert_eq!(offset_of!(LoopInfo64, lo_init), 216);
        assert_eq!(size_of::<LoopConfig>(), 304);
        assert_eq!(offset_of!(LoopConfig, info), 8);
        assert_eq!(offset_of!(LoopConfig, reserved), 240);
    }

    #[test]
    fn device_numbers_are_decoded() {
        assert_eq!(decode_dev(0x0801), rustix::fs::makedev(8, 1));
        assert_eq!(decode_dev(0x103 << 8 | 0x05), rustix::fs::makedev(0x103, 5));
        assert_eq!(decode_dev(0x1230_0745), rustix::fs::makedev(7, 0x12345));
    }

    #[test]
    fn a_long_file_name_keeps_its_nul() {
        let mut info = LoopInfo64::default();
        info.set_file_name(&[b'x'; 100]);
        assert_eq!(info.lo_file_name[62..], [b'x', 0]);
        info.set_file_name(b"ab");
        assert_eq!(info.lo_file_name[..4], [b'a', b'b', 0, 0], "nothing of the old name is left");
        info.set_file_name(&[b'x'; 100]);
        info.set_mark(0x1234_5678_9abc_def0);
        assert_eq!((info.mark(), &info.lo_file_name[53..55]), (0x1234_5678_9abc_def0, &[b'x', 0][..]));
    }

    #[test]
    fn errors_are_the_kernels_own() -> io::Result<()> {
        use std::os::fd::AsFd;
        let null = std::fs::File::open("/dev/null")?;
        assert_eq!(ctl_get_free(null.as_fd()).map_err(|e| e.raw_os_error()), Err(Some(libc::ENOTTY)));
        assert_eq!(get_status64(null.as_fd()).map_err(|e| e.raw_os_error()), Err(Some(libc::ENOTTY)));
        Ok(())
    }
}
