//! Control commands (`/dev/ublk-control`), feature flags and device states.
//! It never sends anything; [`ControlRing`](super::ControlRing) does.

use super::number::{read, read_write};

/// Reads a device's [`DevInfo`] into the buffer.
pub const UBLK_U_CMD_GET_DEV_INFO: u32 = read::<CtrlCmd>(b'u', 0x02);
/// Adds a device described by the [`DevInfo`] in the buffer, which the kernel updates.
pub const UBLK_U_CMD_ADD_DEV: u32 = read_write::<CtrlCmd>(b'u', 0x04);
/// Deletes a device and waits until its number is free again.
pub const UBLK_U_CMD_DEL_DEV: u32 = read_write::<CtrlCmd>(b'u', 0x05);
/// Makes the disk appear; blocks until every tag is fetched. `data` is the server's pid.
pub const UBLK_U_CMD_START_DEV: u32 = read_write::<CtrlCmd>(b'u', 0x06);
/// Removes the disk, in use or not.
pub const UBLK_U_CMD_STOP_DEV: u32 = read_write::<CtrlCmd>(b'u', 0x07);
/// Sets the [`Params`](super::Params) in the buffer, before the device is started.
pub const UBLK_U_CMD_SET_PARAMS: u32 = read_write::<CtrlCmd>(b'u', 0x08);
/// Reads the [`Params`](super::Params) into the buffer, whose `len` must be set.
pub const UBLK_U_CMD_GET_PARAMS: u32 = read::<CtrlCmd>(b'u', 0x09);
/// Begins to take over a device whose server died.
pub const UBLK_U_CMD_START_USER_RECOVERY: u32 = read_write::<CtrlCmd>(b'u', 0x10);
/// Completes the take-over once every tag is fetched. `data` is the new server's pid.
pub const UBLK_U_CMD_END_USER_RECOVERY: u32 = read_write::<CtrlCmd>(b'u', 0x11);
/// Like [`UBLK_U_CMD_GET_DEV_INFO`], with the char device's path before the answer: for unprivileged devices.
pub const UBLK_U_CMD_GET_DEV_INFO2: u32 = read::<CtrlCmd>(b'u', 0x12);
/// Reads the driver's feature flags (a `u64`) into the buffer. Linux 6.5.
pub const UBLK_U_CMD_GET_FEATURES: u32 = read::<CtrlCmd>(b'u', 0x13);
/// Deletes a device without waiting. Linux 6.9.
pub const UBLK_U_CMD_DEL_DEV_ASYNC: u32 = read::<CtrlCmd>(b'u', 0x14);
/// Resizes a live device: `data` is its length in sectors. [`UBLK_F_UPDATE_SIZE`].
pub const UBLK_U_CMD_UPDATE_SIZE: u32 = read_write::<CtrlCmd>(b'u', 0x15);
/// Parks a live device for its server's replacement: `data` is the time-out in ms. [`UBLK_F_QUIESCE`].
pub const UBLK_U_CMD_QUIESCE_DEV: u32 = read_write::<CtrlCmd>(b'u', 0x16);
/// Removes the disk unless it is open. [`UBLK_F_SAFE_STOP_DEV`].
pub const UBLK_U_CMD_TRY_STOP_DEV: u32 = read_write::<CtrlCmd>(b'u', 0x17);

/// Request pages can be registered as fixed buffers of a ring.
pub const UBLK_F_SUPPORT_ZERO_COPY: u64 = 1 << 0;
/// Requests are always delivered through `io_uring_cmd_complete_in_task`.
pub const UBLK_F_URING_CMD_COMP_IN_TASK: u64 = 1 << 1;
/// A write's data is fetched by a second command.
pub const UBLK_F_NEED_GET_DATA: u64 = 1 << 2;
/// The disk outlives its server; requests in flight fail.
pub const UBLK_F_USER_RECOVERY: u64 = 1 << 3;
/// With [`UBLK_F_USER_RECOVERY`]: requests in flight are issued again instead.
pub const UBLK_F_USER_RECOVERY_REISSUE: u64 = 1 << 4;
/// The device belongs to a user without privileges.
pub const UBLK_F_UNPRIVILEGED_DEV: u64 = 1 << 5;
/// Commands are encoded as ioctl numbers.
pub const UBLK_F_CMD_IOCTL_ENCODE: u64 = 1 << 6;
/// Data is copied by pread and pwrite on the char device.
pub const UBLK_F_USER_COPY: u64 = 1 << 7;
/// The device is zoned.
pub const UBLK_F_ZONED: u64 = 1 << 8;
/// With [`UBLK_F_USER_RECOVERY`]: requests fail while there is no server, instead of waiting.
pub const UBLK_F_USER_RECOVERY_FAIL_IO: u64 = 1 << 9;
/// The size can be changed while the device is live.
pub const UBLK_F_UPDATE_SIZE: u64 = 1 << 10;
/// A request's buffer is registered with the ring before the request is delivered.
pub const UBLK_F_AUTO_BUF_REG: u64 = 1 << 11;
/// The device can be parked while its server is replaced.
pub const UBLK_F_QUIESCE: u64 = 1 << 12;
/// Every tag may be served by a thread of its own.
pub const UBLK_F_PER_IO_DAEMON: u64 = 1 << 13;
/// Buffers may be registered by any task.
pub const UBLK_F_BUF_REG_OFF_DAEMON: u64 = 1 << 14;
/// Requests are fetched and committed in batches; the per-tag commands are off.
pub const UBLK_F_BATCH_IO: u64 = 1 << 15;
/// Requests may carry integrity data.
pub const UBLK_F_INTEGRITY: u64 = 1 << 16;
/// [`UBLK_U_CMD_TRY_STOP_DEV`] is there.
pub const UBLK_F_SAFE_STOP_DEV: u64 = 1 << 17;
/// The kernel does not scan the disk for partitions when it starts.
pub const UBLK_F_NO_AUTO_PART_SCAN: u64 = 1 << 18;
/// Shared memory of the client can be used without copying.
pub const UBLK_F_SHMEM_ZC: u64 = 1 << 19;
/// [`DevInfo::io_desc_size`] says how large an I/O descriptor is.
pub const UBLK_F_IO_DESC_SIZE: u64 = 1 << 20;

/// The device has no disk: not started, or stopped.
pub const UBLK_S_DEV_DEAD: u16 = 0;

/// Most requests that one queue can have.
pub const UBLK_MAX_QUEUE_DEPTH: u16 = 4096;

/// A control command's argument, `struct ublksrv_ctrl_cmd`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CtrlCmd {
    /// The device; `u32::MAX` lets ADD_DEV choose one.
    pub dev_id: u32,
    /// The queue; `u16::MAX` when the command is not about one.
    pub queue_id: u16,
    /// Bytes of the buffer.
    pub len: u16,
    /// Address of the buffer.
    pub addr: u64,
    /// The command's inline argument.
    pub data: u64,
    /// Bytes of the device path at the start of the buffer, its NUL included; 0 when there is none.
    pub dev_path_len: u16,
    /// Zero.
    pub pad: u16,
    /// Zero.
    pub reserved: u32,
}

/// What a device is, `struct ublksrv_ctrl_dev_info`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DevInfo {
    /// Number of queues.
    pub nr_hw_queues: u16,
    /// Requests of each queue.
    pub queue_depth: u16,
    /// [`UBLK_S_DEV_DEAD`], or a state in which there is a disk.
    pub state: u16,
    /// Bytes of an I/O descriptor, with [`UBLK_F_IO_DESC_SIZE`].
    pub io_desc_size: u16,
    /// Longest request, in bytes.
    pub max_io_buf_bytes: u32,
    /// The device's number.
    pub dev_id: u32,
    /// What the last of START_DEV and END_USER_RECOVERY named as its server, alive or not; -1 before and when
    /// it was stopped. Which PID namespace counts depends on the kernel.
    pub ublksrv_pid: i32,
    /// Zero.
    pub pad1: u32,
    /// `UBLK_F_*`.
    pub flags: u64,
    /// For the server's own use; the kernel keeps and returns it.
    pub ublksrv_flags: u64,
    /// Who added it; set by the kernel.
    pub owner_uid: u32,
    /// Who added it; set by the kernel.
    pub owner_gid: u32,
    /// Zero.
    pub reserved1: u64,
    /// Zero.
    pub reserved2: u64,
}

impl DevInfo {
    /// Whether the device has no disk: none yet, or none any more.
    pub fn is_dead(&self) -> bool {
        self.state == UBLK_S_DEV_DEAD
    }
}
