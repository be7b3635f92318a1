//! Where a file's bytes lie on its file system's device, and the few facts of XFS that bear on it.
//! It never interprets: numbers and flags come as the kernel said them.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use rustix::ioctl::opcode::{read, read_write};
use rustix::ioctl::{Getter, Opcode, Updater, ioctl};

/// The range that was asked for ends with this extent, or the file does.
pub const FIEMAP_EXTENT_LAST: u32 = 0x1;
/// Allocated and never written: it reads as zeroes, whatever is on the device.
pub const FIEMAP_EXTENT_UNWRITTEN: u32 = 0x800;
/// Several neighbouring extents of a file system without extents in one.
pub const FIEMAP_EXTENT_MERGED: u32 = 0x1000;
/// Write what is dirty before answering.
const FIEMAP_FLAG_SYNC: u32 = 0x1;

/// How many extents one call brings.
const AT_ONCE: usize = 128;

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct FileExtent {
    /// First byte in the file.
    pub logical: u64,
    /// First byte on the device.
    pub physical: u64,
    /// Number of bytes.
    pub length: u64,
    reserved64: [u64; 2],
    /// `FIEMAP_EXTENT_*`.
    pub flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap` with room for extents.
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
    extents: [FileExtent; AT_ONCE],
}

/// The size that counts for the request's number is that without extents.
const FS_IOC_FIEMAP: Opcode = read_write::<[u64; 4]>(b'f', 11);

/// The first extents (at most 128) of a range of a file, after what is dirty in it was written.
///
/// # Errors
/// The file system does not tell, or writing failed.
pub fn file_extents(file: BorrowedFd<'_>, start: u64, length: u64) -> io::Result<Vec<FileExtent>> {
    let mut map = Fiemap {
        start,
        length,
        flags: FIEMAP_FLAG_SYNC,
        mapped_extents: 0,
        extent_count: AT_ONCE as u32,
        reserved: 0,
        extents: [FileExtent::default(); AT_ONCE],
    };
    // SAFETY: this request reads and writes a `struct fiemap` with as many extents behind it as it says.
    unsafe { ioctl(file, Updater::<FS_IOC_FIEMAP, Fiemap>::new(&mut map)) }?;
    let mapped = usize::try_from(map.mapped_extents).unwrap_or(AT_ONCE).min(AT_ONCE);
    Ok(map.extents[..mapped].to_vec())
}

/// `struct fsxattr`.
#[repr(C)]
struct FsXattr {
    xflags: u32,
    rest: [u32; 4],
    pad: [u8; 8],
}

const FS_IOC_FSGETXATTR: Opcode = read::<FsXattr>(b'X', 31);
const FS_XFLAG_REALTIME: u32 = 0x1;

/// Whether the file's bytes lie on the real-time device of an XFS.
///
/// # Errors
/// The file system has no such flags.
pub fn is_realtime(file: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: this request writes a `struct fsxattr`.
    let attributes = unsafe { ioctl(file, Getter::<FS_IOC_FSGETXATTR, FsXattr>::new()) }?;
    Ok(attributes.xflags & FS_XFLAG_REALTIME != 0)
}

/// `struct xfs_fsop_geom`, as far as it is looked at.
#[repr(C)]
struct XfsGeometry {
    sizes: [u32; 8],
    data_blocks: u64,
    realtime_blocks: u64,
    realtime_extents: u64,
    log_start: u64,
    uuid: [u8; 16],
    stripes: [u32; 2],
    version: i32,
    flags: u32,
    rest: MaybeUninit<[u64; 20]>,
}

const XFS_IOC_FSGEOMETRY: Opcode = read::<XfsGeometry>(b'X', 126);
const XFS_FSOP_GEOM_FLAGS_REFLINK: u32 = 1 << 20;

/// What an XFS is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct XfsFacts {
    /// Files can share blocks.
    pub reflink: bool,
    /// It has a real-time section.
    pub realtime: bool,
}

/// Asks the XFS that a file lies on.
///
/// # Errors
/// The file lies on none.
pub fn xfs_facts(file: BorrowedFd<'_>) -> io::Result<XfsFacts> {
    // SAFETY: this request writes a `struct xfs_fsop_geom`.
    let geometry = unsafe { ioctl(file, Getter::<XFS_IOC_FSGEOMETRY, XfsGeometry>::new()) }?;
    Ok(XfsFacts {
        reflink: geometry.flags & XFS_FSOP_GEOM_FLAGS_REFLINK != 0,
        realtime: geometry.realtime_blocks != 0,
    })
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    /// Sizes, offsets and numbers as the kernel's headers give them on x86-64 (`FS_IOC_FIEMAP` and the like).
    #[test]
    fn layouts_are_the_kernels() {
        assert_eq!(size_of::<FileExtent>(), 56);
        assert_eq!(offset_of!(FileExtent, flags), 40);
        assert_eq!(offset_of!(Fiemap, extents), 32);
        assert_eq!(size_of::<FsXattr>(), 28);
        assert_eq!(size_of::<XfsGeometry>(), 256);
        assert_eq!(offset_of!(XfsGeometry, realtime_blocks), 40);
        assert_eq!(offset_of!(XfsGeometry, flags), 92);
        if cfg!(target_arch = "x86_64") {
            assert_eq!(FS_IOC_FIEMAP, 0xc020_660b);
            assert_eq!(FS_IOC_FSGETXATTR, 0x801c_581f);
            assert_eq!(XFS_IOC_FSGEOMETRY, 0x8100_587e);
        }
    }
}
