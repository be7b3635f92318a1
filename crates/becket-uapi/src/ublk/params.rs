//! A device's parameters: `struct ublk_params` and its blocks.
//! It never chooses a value; the transport does.

/// The device is read-only.
pub const UBLK_ATTR_READ_ONLY: u32 = 1 << 0;
/// Seeks cost time.
pub const UBLK_ATTR_ROTATIONAL: u32 = 1 << 1;
/// Completed writes are durable only after a flush.
pub const UBLK_ATTR_VOLATILE_CACHE: u32 = 1 << 2;
/// Single writes can be made durable; only with [`UBLK_ATTR_VOLATILE_CACHE`].
pub const UBLK_ATTR_FUA: u32 = 1 << 3;

/// [`Params::basic`] is given.
pub const UBLK_PARAM_TYPE_BASIC: u32 = 1 << 0;
/// [`Params::discard`] is given.
pub const UBLK_PARAM_TYPE_DISCARD: u32 = 1 << 1;
/// [`Params::devt`] is given (by the kernel only).
pub const UBLK_PARAM_TYPE_DEVT: u32 = 1 << 2;
/// [`Params::zoned`] is given.
pub const UBLK_PARAM_TYPE_ZONED: u32 = 1 << 3;
/// [`Params::dma`] is given.
pub const UBLK_PARAM_TYPE_DMA_ALIGN: u32 = 1 << 4;
/// [`Params::seg`] is given.
pub const UBLK_PARAM_TYPE_SEGMENT: u32 = 1 << 5;
/// [`Params::integrity`] is given.
pub const UBLK_PARAM_TYPE_INTEGRITY: u32 = 1 << 6;

/// Sizes and attributes, `struct ublk_param_basic`. Shifts are powers of two of bytes, lengths are sectors.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ParamBasic {
    /// `UBLK_ATTR_*`.
    pub attrs: u32,
    /// Logical block size: 9 to the page size's.
    pub logical_bs_shift: u8,
    /// Physical block size.
    pub physical_bs_shift: u8,
    /// Optimal I/O size.
    pub io_opt_shift: u8,
    /// Minimal I/O size.
    pub io_min_shift: u8,
    /// Longest request; at most the device's `max_io_buf_bytes`.
    pub max_sectors: u32,
    /// Boundary that requests do not cross, or 0.
    pub chunk_sectors: u32,
    /// Length of the device.
    pub dev_sectors: u64,
    /// Gaps between a request's segments are allowed only at this mask; 0 for none.
    pub virt_boundary_mask: u64,
}

/// Discard and write-zeroes, `struct ublk_param_discard`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ParamDiscard {
    /// Offset of the first discard unit, in bytes.
    pub discard_alignment: u32,
    /// Discard unit, in bytes; not 0.
    pub discard_granularity: u32,
    /// Longest discard, in sectors; 0 for no discard.
    pub max_discard_sectors: u32,
    /// Longest write-zeroes, in sectors; 0 for none.
    pub max_write_zeroes_sectors: u32,
    /// Ranges of one discard; 1 is the only value the driver takes.
    pub max_discard_segments: u16,
    /// Zero.
    pub reserved0: u16,
}

/// Device numbers, `struct ublk_param_devt`; filled by the kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ParamDevt {
    /// Major number of `/dev/ublkcN`.
    pub char_major: u32,
    /// Minor number of `/dev/ublkcN`.
    pub char_minor: u32,
    /// Major number of `/dev/ublkbN`; 0 before it was started.
    pub disk_major: u32,
    /// Minor number of `/dev/ublkbN`.
    pub disk_minor: u32,
}

/// Limits of a zoned device, `struct ublk_param_zoned`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ParamZoned {
    /// Most open zones.
    pub max_open_zones: u32,
    /// Most active zones.
    pub max_active_zones: u32,
    /// Longest append, in sectors.
    pub max_zone_append_sectors: u32,
    /// Zero.
    pub reserved: [u8; 20],
}

/// Memory alignment of requests, `struct ublk_param_dma_align`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ParamDmaAlign {
    /// The alignment in bytes, a power of two, minus 1: a mask below the page size.
    pub alignment: u32,
    /// Zero.
    pub pad: [u8; 4],
}

/// Limits of a request's segments, `struct ublk_param_segment`; none of them may be 0.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ParamSegment {
    /// Boundary that a segment does not cross, minus 1.
    pub seg_boundary_mask: u64,
    /// Longest segment in bytes.
    pub max_segment_size: u32,
    /// Most segments.
    pub max_segments: u16,
    /// Zero.
    pub pad: [u8; 2],
}

/// Integrity data, `struct ublk_param_integrity`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ParamIntegrity {
    /// `LBMD_PI_CAP_*`.
    pub flags: u32,
    /// Most segments; 0 for no limit.
    pub max_integrity_segments: u16,
    /// Power of two of the bytes that one piece of metadata covers.
    pub interval_exp: u8,
    /// Bytes of metadata for each interval.
    pub metadata_size: u8,
    /// Where the protection information starts in it.
    pub pi_offset: u8,
    /// `LBMD_PI_CSUM_*`.
    pub csum_type: u8,
    /// Bytes of the application's tag.
    pub tag_size: u8,
    /// Zero.
    pub pad: [u8; 5],
}

/// All parameters, `struct ublk_params`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Params {
    /// Bytes of this structure; the kernel lowers it to what it knows.
    pub len: u32,
    /// Which blocks are given: `UBLK_PARAM_TYPE_*`.
    pub types: u32,
    /// Sizes and attributes.
    pub basic: ParamBasic,
    /// Discard and write-zeroes.
    pub discard: ParamDiscard,
    /// Device numbers.
    pub devt: ParamDevt,
    /// Zones.
    pub zoned: ParamZoned,
    /// Memory alignment.
    pub dma: ParamDmaAlign,
    /// The C structure's gap before `seg`.
    pub gap: u32,
    /// Segment limits.
    pub seg: ParamSegment,
    /// Integrity data.
    pub integrity: ParamIntegrity,
}
