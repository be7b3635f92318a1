//! The kernel's FUSE protocol: `include/uapi/linux/fuse.h`, as far as a tree of a few fixed files needs it.
//! It never decides anything: structures to and from bytes, numbers, and the one ioctl that a connection
//! needs.
//!
//! A message is a header and the operation's own data, one behind the other; all numbers are in native byte
//! order.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::ioctl::{Opcode, Setter, ioctl};

/// The protocol's major version, which both sides must have.
pub const FUSE_KERNEL_VERSION: u32 = 7;
/// The newest minor version whose structures are these.
pub const FUSE_KERNEL_MINOR_VERSION: u32 = 41;
/// The least minor version that knows [`FUSE_MAX_PAGES`] (Linux 4.20).
pub const FUSE_LEAST_MINOR_VERSION: u32 = 28;
/// The node of the tree's root.
pub const FUSE_ROOT_ID: u64 = 1;
/// No read of a connection may ask for less, in bytes.
pub const FUSE_MIN_READ_BUFFER: usize = 8192;
/// Major and minor number of `/dev/fuse`.
pub const FUSE_DEVICE: (u32, u32) = (10, 229);

/// Reads may be under way side by side.
pub const FUSE_ASYNC_READ: u64 = 1 << 0;
/// Writes longer than a page.
pub const FUSE_BIG_WRITES: u64 = 1 << 5;
/// Asynchronous direct I/O stays asynchronous.
pub const FUSE_ASYNC_DIO: u64 = 1 << 15;
/// Names are looked up side by side.
pub const FUSE_PARALLEL_DIROPS: u64 = 1 << 18;
/// [`InitOut::max_pages`] means something.
pub const FUSE_MAX_PAGES: u64 = 1 << 22;
/// `ENOSYS` to OPENDIR means that directories need no opening.
pub const FUSE_NO_OPENDIR_SUPPORT: u64 = 1 << 24;
/// There is a second word of flags.
pub const FUSE_INIT_EXT: u64 = 1 << 30;
/// Files of [`FOPEN_DIRECT_IO`] can be mapped and shared (Linux 6.6).
pub const FUSE_DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
/// The kernel knows [`FUSE_NOTIFY_RESEND`] (Linux 6.9).
pub const FUSE_HAS_RESEND: u64 = 1 << 39;

/// Find a name in a directory.
pub const FUSE_LOOKUP: u32 = 1;
/// A node is not known to the kernel any more; without an answer.
pub const FUSE_FORGET: u32 = 2;
/// Tell a node's attributes.
pub const FUSE_GETATTR: u32 = 3;
/// Change them.
pub const FUSE_SETATTR: u32 = 4;
/// Open a file.
pub const FUSE_OPEN: u32 = 14;
/// Read of one.
pub const FUSE_READ: u32 = 15;
/// Write to one.
pub const FUSE_WRITE: u32 = 16;
/// Tell about the file system.
pub const FUSE_STATFS: u32 = 17;
/// A file was closed for the last time.
pub const FUSE_RELEASE: u32 = 18;
/// Make a file durable.
pub const FUSE_FSYNC: u32 = 20;
/// The first message.
pub const FUSE_INIT: u32 = 26;
/// Open a directory.
pub const FUSE_OPENDIR: u32 = 27;
/// Tell a directory's entries.
pub const FUSE_READDIR: u32 = 28;
/// A directory was closed.
pub const FUSE_RELEASEDIR: u32 = 29;
/// The file system is going.
pub const FUSE_DESTROY: u32 = 38;
/// Several FORGETs.
pub const FUSE_BATCH_FORGET: u32 = 42;
/// Allocate, punch or zero a range.
pub const FUSE_FALLOCATE: u32 = 43;

/// Reads and writes of the file go past the page cache.
pub const FOPEN_DIRECT_IO: u32 = 1 << 0;
/// Closing a descriptor of the file asks the server for nothing (Linux 5.16).
pub const FOPEN_NOFLUSH: u32 = 1 << 5;
/// Such writes may be under way side by side (Linux 6.2).
pub const FOPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;

/// [`SetattrIn::size`] must be set.
pub const FATTR_SIZE: u32 = 1 << 3;
/// Times of access and of change, and whose call it is: what a truncation brings along.
pub const FATTR_HARMLESS: u32 = 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 11;

/// In a header without [`OutHeader::unique`]: these bytes of a file are known; [`StoreOut`] and they follow.
pub const FUSE_NOTIFY_STORE: i32 = 4;
/// In a header without [`OutHeader::unique`]: send again what was read and not answered.
pub const FUSE_NOTIFY_RESEND: i32 = 7;

/// A structure that goes over a connection as it lies in memory, and has no padding.
pub trait Wire: Sized {
    /// Its length in bytes.
    const SIZE: usize;
    /// Takes it from the beginning of `bytes`; `None` when they are too few.
    fn read(bytes: &[u8]) -> Option<Self>;
    /// Puts it at the beginning of `bytes`; `None` when they are too few.
    fn write(&self, bytes: &mut [u8]) -> Option<()>;
}

macro_rules! number {
    ($($type:ty)*) => {$(
        impl Wire for $type {
            const SIZE: usize = size_of::<$type>();
            #[inline]
            fn read(bytes: &[u8]) -> Option<$type> {
                Some(<$type>::from_ne_bytes(*bytes.first_chunk()?))
            }
            #[inline]
            fn write(&self, bytes: &mut [u8]) -> Option<()> {
                *bytes.first_chunk_mut()? = self.to_ne_bytes();
                Some(())
            }
        }
    )*};
}
number!(u16 u32 i32 u64);

impl<T: Wire + Copy + Default, const N: usize> Wire for [T; N] {
    const SIZE: usize = N * T::SIZE;

    fn read(bytes: &[u8]) -> Option<[T; N]> {
        let mut all = [T::default(); N];
        for (one, bytes) in all.iter_mut().zip(bytes.get(..Self::SIZE)?.chunks_exact(T::SIZE)) {
            *one = T::read(bytes)?;
        }
        Some(all)
    }

    fn write(&self, bytes: &mut [u8]) -> Option<()> {
        let places = bytes.get_mut(..Self::SIZE)?.chunks_exact_mut(T::SIZE);
        self.iter().zip(places).try_for_each(|(one, bytes)| one.write(bytes))
    }
}

macro_rules! wire {
    ($(#[$doc:meta])* $name:ident { $($(#[$about:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct $name {
            $($(#[$about])* pub $field: $type,)*
        }

        // What is written field by field is what lies in memory only when nothing is between the fields.
        const _: () = assert!(size_of::<$name>() == <$name as Wire>::SIZE);

        impl Wire for $name {
            const SIZE: usize = 0 $(+ <$type as Wire>::SIZE)*;
            #[inline]
            fn read(bytes: &[u8]) -> Option<$name> {
                let mut rest = bytes;
                $(
                    let $field = <$type as Wire>::read(rest)?;
                    rest = &rest[<$type as Wire>::SIZE..];
                )*
                let _ = rest;
                Some($name { $($field,)* })
            }
            #[inline]
            fn write(&self, bytes: &mut [u8]) -> Option<()> {
                let mut rest = bytes;
                $(
                    self.$field.write(rest)?;
                    rest = &mut rest[<$type as Wire>::SIZE..];
                )*
                let _ = rest;
                Some(())
            }
        }
    };
}

wire! {
    /// Before every request, `struct fuse_in_header`.
    InHeader {
        /// Length of the message, this included, in bytes.
        len: u32,
        /// `FUSE_*` operation.
        opcode: u32,
        /// The request, for its answer.
        unique: u64,
        /// The node that it is about.
        nodeid: u64,
        /// Whose request it is.
        uid: u32,
        /// Whose request it is.
        gid: u32,
        /// Whose request it is; 0 for the kernel's own.
        pid: u32,
        /// Length of extensions behind it, in units of 8 bytes.
        total_extlen: u16,
        /// Unused.
        padding: u16,
    }
}

wire! {
    /// Before every answer, `struct fuse_out_header`.
    OutHeader {
        /// Length of the message, this included, in bytes.
        len: u32,
        /// 0, or an errno as a negative number.
        error: i32,
        /// The request that is answered; 0 for a notification, whose code then is in `error`.
        unique: u64,
    }
}

wire! {
    /// What the kernel can do, the first sixteen bytes of `struct fuse_init_in`.
    InitIn {
        /// Version.
        major: u32,
        /// Version.
        minor: u32,
        /// Longest read ahead, in bytes.
        max_readahead: u32,
        /// The lower half of the flags.
        flags: u32,
    }
}

wire! {
    /// What is wanted of it, `struct fuse_init_out`.
    InitOut {
        /// Version.
        major: u32,
        /// Version.
        minor: u32,
        /// Longest read ahead, in bytes.
        max_readahead: u32,
        /// The lower half of the flags.
        flags: u32,
        /// Most asynchronous requests under way.
        max_background: u16,
        /// From so many on the kernel holds its own read-ahead and write-back back.
        congestion_threshold: u16,
        /// Longest write, in bytes.
        max_write: u32,
        /// Unit of times, in nanoseconds.
        time_gran: u32,
        /// Most pages of a request.
        max_pages: u16,
        /// Unused here.
        map_alignment: u16,
        /// The upper half of the flags.
        flags2: u32,
        /// Unused here.
        max_stack_depth: u32,
        /// Unused here.
        request_timeout: u16,
        /// Unused.
        unused: [u16; 11],
    }
}

wire! {
    /// `struct fuse_attr`.
    Attr {
        /// Number of the inode.
        ino: u64,
        /// Length in bytes.
        size: u64,
        /// Length in units of 512 bytes.
        blocks: u64,
        /// Seconds since 1970.
        atime: u64,
        /// Seconds since 1970.
        mtime: u64,
        /// Seconds since 1970.
        ctime: u64,
        /// Nanoseconds.
        atimensec: u32,
        /// Nanoseconds.
        mtimensec: u32,
        /// Nanoseconds.
        ctimensec: u32,
        /// Type and rights.
        mode: u32,
        /// Number of names.
        nlink: u32,
        /// Owner.
        uid: u32,
        /// Group.
        gid: u32,
        /// Unused here.
        rdev: u32,
        /// Preferred length of requests.
        blksize: u32,
        /// Unused here.
        flags: u32,
    }
}

wire! {
    /// The answer to a LOOKUP, `struct fuse_entry_out`.
    EntryOut {
        /// The node.
        nodeid: u64,
        /// Which use of that number it is.
        generation: u64,
        /// How long name and attributes are valid, in seconds.
        valid: [u64; 2],
        /// Nanoseconds of that, for both.
        valid_nsec: u64,
        /// The attributes.
        attr: Attr,
    }
}

wire! {
    /// The answer to a GETATTR or SETATTR, `struct fuse_attr_out`.
    AttrOut {
        /// How long they are valid, in seconds.
        attr_valid: u64,
        /// Nanoseconds of that.
        attr_valid_nsec: u32,
        /// Unused.
        dummy: u32,
        /// The attributes.
        attr: Attr,
    }
}

wire! {
    /// The beginning of `struct fuse_setattr_in`.
    SetattrIn {
        /// `FATTR_*`: what is to change.
        valid: u32,
        /// Unused.
        padding: u32,
        /// The open file.
        fh: u64,
        /// The length that is wanted.
        size: u64,
    }
}

wire! {
    /// The answer to an OPEN, `struct fuse_open_out`.
    OpenOut {
        /// What the kernel calls the open file.
        fh: u64,
        /// `FOPEN_*`.
        open_flags: u32,
        /// Unused here.
        backing_id: i32,
    }
}

wire! {
    /// A READ, READDIR or WRITE: `struct fuse_read_in` and `struct fuse_write_in`, which are alike.
    TransferIn {
        /// The open file.
        fh: u64,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        size: u32,
        /// About the request.
        transfer_flags: u32,
        /// Unused here.
        lock_owner: u64,
        /// The flags of the open file (`O_*`).
        flags: u32,
        /// Unused.
        padding: u32,
    }
}

wire! {
    /// The answer to a WRITE, `struct fuse_write_out`.
    WriteOut {
        /// Number of bytes that were written.
        size: u32,
        /// Unused.
        padding: u32,
    }
}

wire! {
    /// `struct fuse_fallocate_in`.
    FallocateIn {
        /// The open file.
        fh: u64,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        length: u64,
        /// `FALLOC_FL_*`.
        mode: u32,
        /// Unused.
        padding: u32,
    }
}

wire! {
    /// Before the bytes of a [`FUSE_NOTIFY_STORE`], `struct fuse_notify_store_out`.
    StoreOut {
        /// The node of the file.
        nodeid: u64,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        size: u32,
        /// Unused.
        padding: u32,
    }
}

wire! {
    /// The answer to a STATFS, `struct fuse_kstatfs`.
    Statfs {
        /// Length in units of `frsize`.
        blocks: u64,
        /// Of these free.
        bfree: u64,
        /// And for all.
        bavail: u64,
        /// Number of files.
        files: u64,
        /// How many more there could be.
        ffree: u64,
        /// Preferred length of requests, in bytes.
        bsize: u32,
        /// Longest name.
        namelen: u32,
        /// The unit, in bytes.
        frsize: u32,
        /// Unused.
        padding: u32,
        /// Unused.
        spare: [u32; 6],
    }
}

wire! {
    /// Before every name in the answer to a READDIR, `struct fuse_dirent`; names are padded to units of 8
    /// bytes.
    Dirent {
        /// Number of the inode.
        ino: u64,
        /// Where the next entry begins.
        off: u64,
        /// Length of the name, in bytes.
        namelen: u32,
        /// Type, as in the upper bits of a mode.
        kind: u32,
    }
}

/// What is before the data of a WRITE.
pub const WRITE_HEAD: usize = InHeader::SIZE + TransferIn::SIZE;

const FUSE_DEV_IOC_CLONE: Opcode = 0x8004_e500;

/// Makes `fresh`, a `/dev/fuse` that was just opened, another descriptor of the connection of `device`.
///
/// Requests that were read from one must be answered through the same.
///
/// # Errors
/// The kernel's: `EINVAL` when one of them is not what it must be.
pub fn clone_device(fresh: BorrowedFd<'_>, device: BorrowedFd<'_>) -> io::Result<()> {
    let device = device.as_fd().as_raw_fd().unsigned_abs();
    // SAFETY: FUSE_DEV_IOC_CLONE reads a u32, which is what it is given.
    Ok(unsafe { ioctl(fresh, Setter::<FUSE_DEV_IOC_CLONE, u32>::new(device)) }?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn structures_are_as_long_as_the_kernels() {
        let sizes = [
            ("fuse_in_header", InHeader::SIZE, 40),
            ("fuse_out_header", OutHeader::SIZE, 16),
            ("fuse_init_in, its beginning", InitIn::SIZE, 16),
            ("fuse_init_out", InitOut::SIZE, 64),
            ("fuse_attr", Attr::SIZE, 88),
            ("fuse_entry_out", EntryOut::SIZE, 128),
            ("fuse_attr_out", AttrOut::SIZE, 104),
            ("fuse_setattr_in, its beginning", SetattrIn::SIZE, 24),
            ("fuse_open_out", OpenOut::SIZE, 16),
            ("fuse_read_in", TransferIn::SIZE, 40),
            ("fuse_write_out", WriteOut::SIZE, 8),
            ("fuse_fallocate_in", FallocateIn::SIZE, 32),
            ("fuse_notify_store_out", StoreOut::SIZE, 24),
            ("fuse_kstatfs", Statfs::SIZE, 80),
            ("fuse_dirent without its name", Dirent::SIZE, 24),
        ];
        for (name, ours, theirs) in sizes {
            assert_eq!(ours, theirs, "{name}");
        }
        assert_eq!(WRITE_HEAD, 80);
    }

    #[test]
    fn fields_are_where_the_kernel_has_them() {
        assert_eq!([offset_of!(InHeader, unique), offset_of!(InHeader, pid)], [8, 32]);
        assert_eq!([offset_of!(InitOut, max_background), offset_of!(InitOut, max_write)], [16, 20]);
        assert_eq!([offset_of!(InitOut, max_pages), offset_of!(InitOut, flags2)], [28, 32]);
        assert_eq!([offset_of!(Attr, mode), offset_of!(Attr, blksize)], [60, 80]);
        assert_eq!([offset_of!(EntryOut, valid_nsec), offset_of!(EntryOut, attr)], [32, 40]);
        assert_eq!(offset_of!(AttrOut, attr), 16);
        assert_eq!([offset_of!(TransferIn, size), offset_of!(TransferIn, flags)], [16, 32]);
        assert_eq!([offset_of!(FallocateIn, length), offset_of!(FallocateIn, mode)], [16, 24]);
        assert_eq!([offset_of!(Statfs, bsize), offset_of!(Statfs, frsize)], [40, 48]);
    }

    #[test]
    fn what_was_written_is_read_again_and_never_half() {
        let header =
            InHeader { len: 80, opcode: FUSE_READ, unique: 1 << 63, nodeid: 2, ..InHeader::default() };
        let mut bytes = [0xff; 41];
        header.write(&mut bytes).unwrap();
        assert_eq!(InHeader::read(&bytes), Some(header));
        assert_eq!(bytes[40], 0xff, "nothing behind it is touched");
        assert_eq!(InHeader::read(&bytes[..39]), None);
        assert_eq!(header.write(&mut bytes[..39]), None);
    }

    #[test]
    fn the_ioctls_number_is_that_of_an_ior() {
        // _IOR('fuse magic' 229, 0, uint32_t)
        assert_eq!(FUSE_DEV_IOC_CLONE, 2 << 30 | 4 << 16 | 229 << 8);
        let null = File::open("/dev/null").unwrap();
        assert!(clone_device(null.as_fd(), null.as_fd()).is_err());
    }
}
