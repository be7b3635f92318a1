//! Holds every structure and number against what a C compiler says of Linux 7.3's header.

use std::mem::{offset_of, size_of};

use super::*;

macro_rules! layout {
    ($type:ty, $size:expr $(, $($field:ident).+ = $offset:expr)* $(,)?) => {
        assert_eq!(size_of::<$type>(), $size, "size of {}", stringify!($type));
        $(assert_eq!(offset_of!($type, $($field).+), $offset, "{}", stringify!($type::$($field).+));)*
    };
}

#[test]
fn structures_are_laid_out_as_in_c() {
    layout!(CtrlCmd, 32, queue_id = 4, len = 6, addr = 8, data = 16, dev_path_len = 24, reserved = 28);
    layout!(
        DevInfo,
        64,
        state = 4,
        io_desc_size = 6,
        max_io_buf_bytes = 8,
        dev_id = 12,
        ublksrv_pid = 16,
        flags = 24,
        ublksrv_flags = 32,
        owner_uid = 40,
        reserved1 = 48,
        reserved2 = 56,
    );
    layout!(IoDesc, 24, nr_sectors = 4, start_sector = 8, addr = 16);
    layout!(AutoBufReg, 8, flags = 2, reserved1 = 4);
    layout!(IoCmd, 16, tag = 2, result = 4, addr = 8);
    layout!(ElemHeader, 8, buf_index = 2, result = 4);
    layout!(BatchIo, 16, flags = 2, nr_elem = 4, elem_bytes = 6, reserved2 = 8);
    layout!(
        ParamBasic,
        32,
        logical_bs_shift = 4,
        physical_bs_shift = 5,
        io_opt_shift = 6,
        io_min_shift = 7,
        max_sectors = 8,
        chunk_sectors = 12,
        dev_sectors = 16,
        virt_boundary_mask = 24,
    );
    layout!(
        ParamDiscard,
        20,
        discard_granularity = 4,
        max_discard_sectors = 8,
        max_write_zeroes_sectors = 12,
        max_discard_segments = 16,
    );
    layout!(ParamDevt, 16, char_minor = 4, disk_major = 8, disk_minor = 12);
    layout!(ParamZoned, 32, max_zone_append_sectors = 8, reserved = 12);
    layout!(ParamDmaAlign, 8, pad = 4);
    layout!(ParamSegment, 16, max_segment_size = 8, max_segments = 12);
    layout!(ParamIntegrity, 16, max_integrity_segments = 4, interval_exp = 6, pi_offset = 8, tag_size = 10);
    layout!(
        Params,
        152,
        types = 4,
        basic = 8,
        discard = 40,
        devt = 60,
        zoned = 76,
        dma = 108,
        seg = 120,
        integrity = 136,
    );
}

#[test]
fn plain_structures_have_no_gaps() {
    assert_eq!(4 + 2 + 2 + 8 + 8 + 2 + 2 + 4, size_of::<CtrlCmd>());
    assert_eq!(4 * 2 + 4 * 2 + 4 * 2 + 8 * 2 + 4 * 2 + 8 * 2, size_of::<DevInfo>());
    assert_eq!(4 + 4 + 32 + 20 + 16 + 32 + 8 + 4 + 16 + 16, size_of::<Params>());
}

#[test]
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64", target_arch = "s390x"))]
fn numbers_are_those_of_c() {
    let control = [
        (UBLK_U_CMD_GET_DEV_INFO, 0x8020_7502),
        (UBLK_U_CMD_ADD_DEV, 0xc020_7504),
        (UBLK_U_CMD_DEL_DEV, 0xc020_7505),
        (UBLK_U_CMD_START_DEV, 0xc020_7506),
        (UBLK_U_CMD_STOP_DEV, 0xc020_7507),
        (UBLK_U_CMD_SET_PARAMS, 0xc020_7508),
        (UBLK_U_CMD_GET_PARAMS, 0x8020_7509),
        (UBLK_U_CMD_START_USER_RECOVERY, 0xc020_7510),
        (UBLK_U_CMD_END_USER_RECOVERY, 0xc020_7511),
        (UBLK_U_CMD_GET_DEV_INFO2, 0x8020_7512),
        (UBLK_U_CMD_GET_FEATURES, 0x8020_7513),
        (UBLK_U_CMD_DEL_DEV_ASYNC, 0x8020_7514),
        (UBLK_U_CMD_UPDATE_SIZE, 0xc020_7515),
        (UBLK_U_CMD_QUIESCE_DEV, 0xc020_7516),
        (UBLK_U_CMD_TRY_STOP_DEV, 0xc020_7517),
        (UBLK_U_IO_FETCH_REQ, 0xc010_7520),
        (UBLK_U_IO_COMMIT_AND_FETCH_REQ, 0xc010_7521),
        (UBLK_U_IO_REGISTER_IO_BUF, 0xc010_7523),
        (UBLK_U_IO_UNREGISTER_IO_BUF, 0xc010_7524),
        (UBLK_U_IO_PREP_IO_CMDS, 0xc010_7525),
        (UBLK_U_IO_COMMIT_IO_CMDS, 0xc010_7526),
        (UBLK_U_IO_FETCH_IO_CMDS, 0xc010_7527),
    ];
    for (ours, theirs) in control {
        assert_eq!(ours, theirs, "{ours:#x} should be {theirs:#x}");
    }
}

#[test]
fn inline_bytes_equal_the_structures_memory() {
    let command = IoCmd { q_id: 0x0102, tag: 0x0304, result: -5, addr: 0x0506_0708_090a_0b0c };
    // SAFETY: both are 16 bytes without padding.
    let memory: [u8; 16] = unsafe { std::mem::transmute(command) };
    assert_eq!(command.to_bytes(), memory);

    let batch = BatchIo { q_id: 1, flags: 2, nr_elem: 0x1234, elem_bytes: 16, reserved: 0, reserved2: 0 };
    // SAFETY: both are 16 bytes without padding.
    let memory: [u8; 16] = unsafe { std::mem::transmute(batch) };
    assert_eq!(batch.to_bytes(), memory);
}

#[test]
fn descriptors_split_operation_and_flags() {
    let request = IoDesc { op_flags: u32::from(UBLK_IO_OP_WRITE) | UBLK_IO_F_FUA, ..IoDesc::default() };
    assert_eq!((request.op(), request.flags()), (UBLK_IO_OP_WRITE, UBLK_IO_F_FUA));
    let buffer = AutoBufReg { index: 0x0203, flags: UBLK_AUTO_BUF_REG_FALLBACK, ..AutoBufReg::default() };
    assert_eq!(buffer.to_sqe_addr(), 0x0001_0203);
}

#[test]
fn the_ring_refuses_what_is_no_control_command_and_reports_errno() -> std::io::Result<()> {
    use std::os::fd::AsFd;
    let mut ring = match ControlRing::new() {
        Ok(ring) => ring,
        Err(error) => {
            becket_testkit::skip("uapi_control_ring", &format!("io_uring is not allowed here: {error}"));
            return Ok(());
        }
    };
    let file = std::fs::File::open("/dev/null")?;
    let mut buffer = 0u64;
    for number in [0xc020_7518, UBLK_U_IO_FETCH_REQ, 0x8020_4e02, 1] {
        let refused = ring.send(file.as_fd(), number, CtrlCmd::default(), &[], Some(&mut buffer), None);
        assert_eq!(refused.map_err(|e| e.kind()), Err(std::io::ErrorKind::InvalidInput));
    }
    // /dev/null takes every command, and answers 0 without touching the buffer.
    let full = std::fs::File::open("/dev/zero")?;
    let refused =
        ring.send(full.as_fd(), UBLK_U_CMD_GET_FEATURES, CtrlCmd::default(), &[], Some(&mut buffer), None);
    assert_eq!(refused.map_err(|e| e.raw_os_error()), Err(Some(libc::EOPNOTSUPP)));
    let taken =
        ring.send(file.as_fd(), UBLK_U_CMD_GET_FEATURES, CtrlCmd::default(), &[], Some(&mut buffer), None)?;
    assert_eq!((taken, buffer), (0, 0), "and the ring is usable after an error");
    Ok(())
}
