//! What happens on `/dev/ublkcN`: I/O commands, descriptors, results, offsets for mapping.
//! It never touches the char device; the engine does.

use super::number::read_write;

/// Fetches the first request of a tag.
pub const UBLK_U_IO_FETCH_REQ: u32 = read_write::<IoCmd>(b'u', 0x20);
/// Completes a tag's request and fetches its next one.
pub const UBLK_U_IO_COMMIT_AND_FETCH_REQ: u32 = read_write::<IoCmd>(b'u', 0x21);
/// Registers a request's pages as the ring's fixed buffer number [`IoCmd::addr`].
pub const UBLK_U_IO_REGISTER_IO_BUF: u32 = read_write::<IoCmd>(b'u', 0x23);
/// Unregisters the fixed buffer number [`IoCmd::addr`].
pub const UBLK_U_IO_UNREGISTER_IO_BUF: u32 = read_write::<IoCmd>(b'u', 0x24);
/// Prepares many tags. [`UBLK_F_BATCH_IO`](super::UBLK_F_BATCH_IO).
pub const UBLK_U_IO_PREP_IO_CMDS: u32 = read_write::<BatchIo>(b'u', 0x25);
/// Completes many requests; the answer is the number of bytes of elements that were taken.
pub const UBLK_U_IO_COMMIT_IO_CMDS: u32 = read_write::<BatchIo>(b'u', 0x26);
/// Fetches tags (`u16` each) into provided buffers, multishot.
pub const UBLK_U_IO_FETCH_IO_CMDS: u32 = read_write::<BatchIo>(b'u', 0x27);

/// A request was delivered.
pub const UBLK_IO_RES_OK: i32 = 0;

/// Offset of the descriptor arrays for mmap.
pub const UBLKSRV_CMD_BUF_OFFSET: u64 = 0;

/// Read.
pub const UBLK_IO_OP_READ: u8 = 0;
/// Write.
pub const UBLK_IO_OP_WRITE: u8 = 1;
/// Make all completed writes durable.
pub const UBLK_IO_OP_FLUSH: u8 = 2;
/// The range's contents no longer matter.
pub const UBLK_IO_OP_DISCARD: u8 = 3;
/// Make the range read as zeroes.
pub const UBLK_IO_OP_WRITE_ZEROES: u8 = 5;
/// Open a zone; becket has no zoned devices.
pub const UBLK_IO_OP_ZONE_OPEN: u8 = 10;

/// The write is durable when it completes.
pub const UBLK_IO_F_FUA: u32 = 1 << 13;
/// Zeroes must be allocated, not punched.
pub const UBLK_IO_F_NOUNMAP: u32 = 1 << 15;
/// Registering the buffer failed; the server must do it.
pub const UBLK_IO_F_NEED_REG_BUF: u32 = 1 << 17;

/// One request, `struct ublksrv_io_desc`, in the memory mapped from the char device.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoDesc {
    /// The operation in bits 0 to 7, `UBLK_IO_F_*` above.
    pub op_flags: u32,
    /// Length in sectors of 512 bytes; zones for REPORT_ZONES.
    pub nr_sectors: u32,
    /// First sector.
    pub start_sector: u64,
    /// Address of the data in the server, as it gave it.
    pub addr: u64,
}

impl IoDesc {
    /// From the 64-bit words in which it lies in the mapping.
    #[must_use]
    #[inline]
    pub const fn from_words(words: [u64; 3]) -> IoDesc {
        let [a, b, c, d, e, f, g, h] = words[0].to_ne_bytes();
        IoDesc {
            op_flags: u32::from_ne_bytes([a, b, c, d]),
            nr_sectors: u32::from_ne_bytes([e, f, g, h]),
            start_sector: words[1],
            addr: words[2],
        }
    }

    /// One of `UBLK_IO_OP_*`.
    #[must_use]
    #[inline]
    pub const fn op(&self) -> u8 {
        self.op_flags as u8
    }

    /// `UBLK_IO_F_*`, at the bit positions of those constants.
    #[must_use]
    #[inline]
    pub const fn flags(&self) -> u32 {
        self.op_flags & !0xff
    }
}

/// Fall back to delivering the request with [`UBLK_IO_F_NEED_REG_BUF`] when its buffer cannot be registered.
pub const UBLK_AUTO_BUF_REG_FALLBACK: u8 = 1 << 0;

/// Where a tag's buffer is registered, `struct ublk_auto_buf_reg`; it travels in the SQE's `addr`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AutoBufReg {
    /// Index in the ring's buffer table.
    pub index: u16,
    /// [`UBLK_AUTO_BUF_REG_FALLBACK`] or 0.
    pub flags: u8,
    /// Zero.
    pub reserved0: u8,
    /// Zero.
    pub reserved1: u32,
}

impl AutoBufReg {
    /// The value for the SQE's `addr`.
    #[must_use]
    pub const fn to_sqe_addr(self) -> u64 {
        self.index as u64
            | (self.flags as u64) << 16
            | (self.reserved0 as u64) << 24
            | (self.reserved1 as u64) << 32
    }
}

/// An I/O command's argument, `struct ublksrv_io_cmd`: the 16 inline bytes of the SQE.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoCmd {
    /// The queue.
    pub q_id: u16,
    /// The tag.
    pub tag: u16,
    /// Of COMMIT: bytes done, or a negative errno.
    pub result: i32,
    /// Of FETCH: address of the tag's buffer; of REGISTER: index in the ring's table; of a zone append: its
    /// LBA.
    pub addr: u64,
}

impl IoCmd {
    /// The command as the inline bytes of an SQE.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 16] {
        let (q, t, r, a) = (
            self.q_id.to_ne_bytes(),
            self.tag.to_ne_bytes(),
            self.result.to_ne_bytes(),
            self.addr.to_ne_bytes(),
        );
        [q[0], q[1], t[0], t[1], r[0], r[1], r[2], r[3], a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]]
    }
}

/// Elements carry a buffer's address.
pub const UBLK_BATCH_F_HAS_BUF_ADDR: u16 = 1 << 1;
/// As [`UBLK_AUTO_BUF_REG_FALLBACK`], for all elements.
pub const UBLK_BATCH_F_AUTO_BUF_REG_FALLBACK: u16 = 1 << 2;

/// A batch command's argument, `struct ublk_batch_io`: the 16 inline bytes of the SQE.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BatchIo {
    /// The queue.
    pub q_id: u16,
    /// `UBLK_BATCH_F_*`.
    pub flags: u16,
    /// Number of elements in the buffer.
    pub nr_elem: u16,
    /// Bytes of each: 8 for the header, 8 for each optional field.
    pub elem_bytes: u8,
    /// Zero.
    pub reserved: u8,
    /// Zero.
    pub reserved2: u64,
}

impl BatchIo {
    /// The command as the inline bytes of an SQE.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 16] {
        let (q, f, n, z) = (
            self.q_id.to_ne_bytes(),
            self.flags.to_ne_bytes(),
            self.nr_elem.to_ne_bytes(),
            self.reserved2.to_ne_bytes(),
        );
        let (e, r) = (self.elem_bytes, self.reserved);
        [q[0], q[1], f[0], f[1], n[0], n[1], e, r, z[0], z[1], z[2], z[3], z[4], z[5], z[6], z[7]]
    }
}

/// The head of a batch's element, `struct ublk_elem_header`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ElemHeader {
    /// The tag.
    pub tag: u16,
    /// Index in the ring's buffer table for the tag's next request, with AUTO_BUF_REG.
    pub buf_index: u16,
    /// Of COMMIT: bytes done, or a negative errno.
    pub result: i32,
}

impl ElemHeader {
    /// The bytes that stand in a list for the kernel.
    #[inline]
    pub const fn to_bytes(self) -> [u8; 8] {
        let [a, b] = self.tag.to_ne_bytes();
        let [c, d] = self.buf_index.to_ne_bytes();
        let [e, f, g, h] = self.result.to_ne_bytes();
        [a, b, c, d, e, f, g, h]
    }
}
