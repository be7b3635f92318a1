use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Mutex;
use std::time::Duration;

use becket_engine::Geometry;
use becket_image::{Facts, Partition};
use becket_transport::Kind;
use becket_transport::ublk::control::{AddRequest, DevInfo};

use super::*;
use crate::DeviceState;
use crate::process::ProcessId;
use crate::worker::protocol::Serve;

/// Whom was told which size, in order.
type Journal = Vec<(&'static str, u64)>;

/// Keeps a journal of what it is told about sizes; can refuse the kernel's part.
#[derive(Default)]
struct Double {
    journal: Mutex<Journal>,
    flags: u64,
    refuse: bool,
}

impl Driver for Double {
    fn features(&self) -> Result<u64, Error> {
        unreachable!()
    }
    fn add(&self, _: AddRequest) -> Result<DevInfo, Error> {
        unreachable!()
    }
    fn set_params(&self, _: u32, _: &Geometry) -> Result<(), Error> {
        unreachable!()
    }
    fn open_char(&self, _: u32) -> Result<OwnedFd, Error> {
        unreachable!()
    }
    fn start(&self, _: u32, _: u32) -> Result<(), Error> {
        unreachable!()
    }
    fn settle(&self, _: u32, _: &[Partition]) -> Result<(), Error> {
        unreachable!()
    }
    fn stop(&self, _: u32) -> Result<(), Error> {
        unreachable!()
    }
    fn stop_unused(&self, _: u32) -> Result<bool, Error> {
        unreachable!()
    }
    fn del(&self, _: u32) -> Result<(), Error> {
        unreachable!()
    }
    fn info(&self, id: u32) -> Result<Option<DevInfo>, Error> {
        Ok(Some(DevInfo { dev_id: id, flags: self.flags, ..DevInfo::default() }))
    }
    fn start_recovery(&self, _: u32) -> Result<bool, Error> {
        unreachable!()
    }
    fn end_recovery(&self, _: u32, _: u32) -> Result<(), Error> {
        unreachable!()
    }
    fn quiesce(&self, _: u32) -> Result<(), Error> {
        unreachable!()
    }
    fn watchful(&self, _: u32) {
        unreachable!()
    }
    fn update_size(&self, _: u32, bytes: u64) -> Result<(), Error> {
        self.journal.lock().unwrap().push(("kernel", bytes));
        if self.refuse { Err(Error::Worker { what: "refused".to_owned() }) } else { Ok(()) }
    }
}

impl Server for Double {
    fn id(&self) -> ProcessId {
        unreachable!()
    }
    fn notes(&self) -> &[String] {
        &[]
    }
    fn alive(&self) -> bool {
        true
    }
    fn dismiss(&self) {
        unreachable!()
    }
    fn kill(&self) {
        unreachable!()
    }
    fn serve(&self, _: Serve, _: &[BorrowedFd<'_>]) -> Result<(), Error> {
        unreachable!()
    }
    fn remap(&self, _: u32, map: Map) -> Result<(), Error> {
        self.journal.lock().unwrap().push(("worker", map.len()));
        Ok(())
    }
    fn direct_io(&self, _: u32, _: bool) -> Result<(), Error> {
        unreachable!()
    }
    fn stats(&self, _: u32) -> Result<becket_engine::Summary, Error> {
        unreachable!()
    }
    fn await_closed(&self, _: u32, _: Duration) -> bool {
        unreachable!()
    }
}

fn info(offset: u64, size_limit: Option<u64>) -> DeviceInfo {
    DeviceInfo {
        name: "disk".to_owned(),
        device: "/dev/ublkb5".into(),
        transport: Kind::Ublk,
        reason: String::new(),
        size: 8192,
        read_only: false,
        direct_io: false,
        direct_io_reason: String::new(),
        below: None,
        block_size: 512,
        physical_block_size: 512,
        state: DeviceState::Live,
        image: "/image".into(),
        offset,
        size_limit,
        autoclear: false,
        partitions: Vec::new(),
        queues: Some(1),
        depth: Some(1),
        mode: None,
        number: 5,
        diskseq: None,
        server_pid: None,
        worker_pid: None,
        isolated: false,
        recoveries: 0,
        warnings: Vec::new(),
    }
}

fn file(len: u64) -> Vec<Backing> {
    let file = tempfile::tempfile().unwrap();
    File::set_len(&file, len).unwrap();
    let facts = Facts { nowait: true, ..Facts::unasked(BackingKind::Regular, 8192, true) };
    vec![Backing { buffered: file.into(), direct: None, facts }]
}

/// Resizes a device of 8,192 bytes to what its image has become, and returns what was told to whom.
fn run(double: &Double, info: &DeviceInfo, len: u64) -> (Result<Option<u64>, Error>, Journal) {
    let map = Map::contiguous(0, info.offset, 8192);
    let outcome = resize(double, double, info, &map, &file(len)).map(|map| map.map(|map| map.len()));
    (outcome, double.journal.lock().unwrap().clone())
}

fn able() -> Double {
    Double { flags: UBLK_F_UPDATE_SIZE, ..Double::default() }
}

#[test]
fn growing_tells_the_worker_first_and_shrinking_the_kernel() {
    let (outcome, journal) = run(&able(), &info(0, None), 16384 + 511);
    assert_eq!(outcome.unwrap(), Some(16384));
    assert_eq!(journal, [("worker", 16384), ("kernel", 16384)]);
    let (outcome, journal) = run(&able(), &info(0, None), 4096);
    assert_eq!(outcome.unwrap(), Some(4096));
    assert_eq!(journal, [("kernel", 4096), ("worker", 4096)]);
}

#[test]
fn offset_and_limit_hold() {
    let (outcome, journal) = run(&able(), &info(4096, None), 16384);
    assert_eq!(outcome.unwrap(), Some(12288));
    assert_eq!(journal, [("worker", 12288), ("kernel", 12288)]);
    let (outcome, journal) = run(&able(), &info(0, Some(8192)), 1 << 20);
    assert_eq!(outcome.unwrap(), None);
    assert!(journal.is_empty());
}

#[test]
fn a_kernel_that_refuses_leaves_the_old_map() {
    let double = Double { refuse: true, ..able() };
    let (outcome, journal) = run(&double, &info(0, None), 16384);
    assert!(outcome.is_err());
    assert_eq!(journal, [("worker", 16384), ("kernel", 16384), ("worker", 8192)]);
    let double = Double { refuse: true, ..able() };
    let (outcome, journal) = run(&double, &info(0, None), 512);
    assert!(outcome.is_err());
    assert_eq!(journal, [("kernel", 512)]);
}

#[test]
fn an_old_kernel_and_an_empty_image_are_refused_with_a_way_out() {
    for (double, len) in [(Double::default(), 16384), (able(), 100)] {
        let (outcome, journal) = run(&double, &info(0, None), len);
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.hint().is_some());
        assert!(journal.is_empty());
    }
}
