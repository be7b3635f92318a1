//! Control commands against the kernel's driver, as root: what can be seen without a server.

use std::sync::atomic::{AtomicU64, Ordering};

use becket_testkit as testkit;
use becket_uapi::ublk as uapi;

use super::*;
use crate::ErrorKind;

/// A device that goes with the test, also when it fails.
struct Added<'a>(&'a Control, DevInfo);

impl Drop for Added<'_> {
    fn drop(&mut self) {
        let _ = self.0.del(self.1.dev_id);
    }
}

fn control(name: &str) -> Option<Control> {
    if access::misc_dev("ublk-control").is_none() && !Path::new(CONTROL).exists() {
        testkit::skip(name, "this kernel has no ublk, or it is not loaded");
        return None;
    }
    testkit::require_root(name).then(|| Control::open().unwrap())
}

/// The mark of a device that is unlike all others.
fn request() -> AddRequest {
    static MARK: AtomicU64 = AtomicU64::new(7);
    AddRequest {
        id: None,
        queues: 1,
        depth: 8,
        flags: uapi::UBLK_F_CMD_IOCTL_ENCODE,
        max_io: 256 << 10,
        mark: MARK.fetch_add(1, Ordering::Relaxed),
    }
}

fn geometry() -> Geometry {
    Geometry {
        size: 8 << 20,
        logical_block: 512,
        physical_block: 4096,
        io_min: 4096,
        io_opt: 0,
        dma_align: 512,
        read_only: false,
        rotational: false,
        discard: true,
        discard_granularity: 4096,
        write_zeroes: true,
        max_io: 256 << 10,
    }
}

/// Longer than any command takes whose server is there.
const PATIENCE: Duration = Duration::from_secs(30);

fn errno<T>(result: Result<T, Error>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

#[test]
fn a_device_is_added_described_and_deleted() {
    let Some(control) = control("ublk_control_life") else { return };
    let features = control.features().unwrap();
    assert_ne!(features & uapi::UBLK_F_CMD_IOCTL_ENCODE, 0, "{features:#x}");

    let request = request();
    let mark = request.mark;
    let added = Added(&control, control.add(request).unwrap());
    let info = added.1;
    assert_ne!(info.dev_id, u32::MAX, "the kernel has chosen a number");
    assert_eq!((info.nr_hw_queues, info.queue_depth, info.max_io_buf_bytes), (1, 8, 256 << 10));
    let again = control.info(info.dev_id).unwrap().unwrap();
    assert_eq!((again.dev_id, again.ublksrv_flags), (info.dev_id, mark), "the mark is kept");

    control.set_params(info.dev_id, &geometry()).unwrap();
    let params = control.params(info.dev_id).unwrap();
    assert_eq!((params.basic.dev_sectors, params.basic.max_sectors), (16384, 512));
    assert_eq!(params.discard.discard_granularity, 4096);
    assert_ne!(params.types & uapi::UBLK_PARAM_TYPE_DEVT, 0, "the kernel adds the device numbers");
    // Linux 6.15 brought the memory alignment; a kernel with AUTO_BUF_REG (6.16) has it.
    if features & uapi::UBLK_F_AUTO_BUF_REG != 0 {
        assert_eq!(params.dma.alignment, 511);
        assert_ne!(params.types & uapi::UBLK_PARAM_TYPE_DMA_ALIGN, 0);
    }

    let char_device = open_char(info.dev_id).unwrap();
    assert_eq!(errno(open_char(info.dev_id)), Some(libc::EBUSY), "one opener at a time");
    drop(char_device);

    let id = info.dev_id;
    drop(added);
    // A test beside this one may have been given the number meanwhile.
    let others = control.info(id).unwrap().is_none_or(|info| info.ublksrv_flags != mark);
    assert!(others, "it is gone");
    assert!(!sysfs::directory(&format!("ublkb{id}")).exists());
}

#[test]
fn a_start_that_nobody_fetches_for_gives_up() {
    let Some(control) = control("ublk_control_patience") else { return };
    let added = Added(&control, control.add(request()).unwrap());
    control.set_params(added.1.dev_id, &geometry()).unwrap();
    let _char_device = open_char(added.1.dev_id).unwrap();
    let error = control.start(added.1.dev_id, std::process::id(), Duration::from_millis(100)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    // The command was broken off and holds nothing: the device can still be deleted.
}

#[test]
fn numbers_are_unique_and_can_be_chosen() {
    let Some(control) = control("ublk_control_numbers") else { return };
    let added = Added(&control, control.add(request()).unwrap());
    let again = control.add(AddRequest { id: Some(added.1.dev_id), ..request() });
    assert_eq!(errno(again), Some(libc::EEXIST));
}

#[test]
fn what_root_has_added_is_given_to_nobody() {
    use std::os::unix::fs::MetadataExt as _;
    let Some(control) = control("ublk_control_give") else { return };
    assert!(!control.is_unprivileged());
    assert_eq!(control.granted().unwrap(), control.features().unwrap());
    let added = Added(&control, control.add(request()).unwrap());
    drop(open_char(added.1.dev_id).unwrap());
    assert!(!control.give_to_owner(added.1.dev_id).unwrap());
    let node = std::fs::metadata(char_node(added.1.dev_id)).unwrap();
    assert_eq!((node.uid(), node.mode() & 0o007), (0, 0));
    assert!(!control.give_to_owner(60_000).unwrap(), "of what is not there nothing is given");
}

#[test]
fn flags_that_the_kernel_does_not_know_are_dropped() {
    let Some(control) = control("ublk_control_flags") else { return };
    let wanted = AddRequest { flags: 1 << 60 | uapi::UBLK_F_CMD_IOCTL_ENCODE, ..request() };
    let added = Added(&control, control.add(wanted).unwrap());
    assert_eq!(added.1.flags & 1 << 60, 0);
    assert_ne!(added.1.flags & uapi::UBLK_F_CMD_IOCTL_ENCODE, 0);
}

#[test]
fn a_device_that_is_not_there_is_an_error_of_its_own() {
    let Some(control) = control("ublk_control_absent") else { return };
    // Below the driver's limit and above what is added here.
    let absent = 60_000;
    assert_eq!(control.info(absent).unwrap(), None);
    for result in [
        control.stop(absent),
        control.del(absent),
        control.params(absent).map(drop),
        control.set_params(absent, &geometry()),
        control.start(absent, std::process::id(), PATIENCE),
        control.end_recovery(absent, std::process::id(), PATIENCE),
    ] {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(error.to_string().contains("60000"), "{error}");
    }
    assert_eq!(open_char(absent).map_err(|error| error.kind()).err(), Some(ErrorKind::NotFound));
}
