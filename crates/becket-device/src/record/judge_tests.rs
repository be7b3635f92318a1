use std::path::Path;

use super::*;
use crate::record::store::tests::device;
use crate::system::process::ProcessId;

/// A kernel with at most one loop and one ublk device.
#[derive(Default)]
struct Double {
    diskseq: Option<u64>,
    bound: bool,
    backing: Option<(u64, u64)>,
    autoclear: bool,
    disk: bool,
    ublk: bool,
    dm: Option<u64>,
    dm_leaves: bool,
    place: bool,
    alive: Vec<u32>,
}

impl Kernel for Double {
    fn diskseq(&self, _: &str) -> Option<u64> {
        self.diskseq
    }
    fn loop_backing(&self, _: u32) -> Option<(u64, u64)> {
        self.backing
    }
    fn loop_autoclear(&self, _: u32) -> Option<bool> {
        self.bound.then_some(self.autoclear)
    }
    fn disk(&self, _: &str) -> bool {
        self.disk
    }
    fn ublk(&self, _: u32) -> bool {
        self.ublk
    }
    fn dm_mark(&self, _: u32) -> Option<u64> {
        self.dm
    }
    fn dm_leaves(&self, _: u64) -> bool {
        self.dm_leaves
    }
    fn place(&self, _: &Path) -> bool {
        self.place
    }
    fn alive(&self, process: ProcessId) -> bool {
        self.alive.contains(&process.pid)
    }
}

const LIVE: Verdict = Verdict::There(DeviceState::Live);
const LOST: Verdict = Verdict::There(DeviceState::Lost);
const ORPHANED: Verdict = Verdict::There(DeviceState::Orphaned);
const DETACHING: Verdict = Verdict::There(DeviceState::Detaching);

#[test]
fn a_loop_record_holds_as_long_as_the_same_use_of_the_number() {
    let ours = device("one", 3);
    let bound = || Double { diskseq: Some(7), bound: true, ..Double::default() };
    assert_eq!(judge(&bound(), &ours), LIVE);
    assert_eq!(judge(&Double { bound: false, ..bound() }, &ours), Verdict::Gone);
    assert_eq!(judge(&Double { diskseq: Some(8), ..bound() }, &ours), Verdict::Gone, "another's use");
    assert_eq!(judge(&Double { autoclear: true, ..bound() }, &ours), DETACHING);
    let mut leased = ours.clone();
    leased.info.spec.autoclear = true;
    assert_eq!(judge(&Double { autoclear: true, ..bound() }, &leased), LIVE);
}

#[test]
fn without_sequence_numbers_the_backing_decides() {
    let mut ours = device("one", 3);
    ours.info.diskseq = None;
    assert_eq!(judge(&Double { backing: Some((1, 2)), ..Double::default() }, &ours), LIVE);
    assert_eq!(judge(&Double { backing: Some((1, 3)), ..Double::default() }, &ours), Verdict::Gone);
    assert_eq!(judge(&Double::default(), &ours), Verdict::Gone);
}

#[test]
fn a_dm_record_holds_as_long_as_its_mark_is_on_its_number() {
    let mut ours = device("d", 4);
    ours.info.transport = Kind::Dm;
    ours.mark = 9;
    let there = || Double { dm: Some(9), diskseq: Some(7), ..Double::default() };
    assert_eq!(judge(&there(), &ours), LIVE);
    let others = Double { dm: Some(8), diskseq: Some(8), ..Double::default() };
    assert_eq!(judge(&others, &ours), Verdict::Gone, "another's use");
    assert_eq!(judge(&Double::default(), &ours), Verdict::Gone);
    assert_eq!(judge(&Double { dm: None, ..there() }, &ours), DETACHING, "its node is still there");
    assert_eq!(judge(&Double { dm_leaves: true, ..there() }, &ours), DETACHING);
    ours.info.spec.autoclear = true;
    assert_eq!(judge(&Double { dm_leaves: true, ..there() }, &ours), LIVE, "it always leaves with its users");
    assert_eq!(disk_of(&ours.info), "dm-4");
}

fn ublk() -> Device {
    let mut device = device("u", 5);
    device.info.transport = Kind::Ublk;
    device.server = Some(ProcessId { pid: 10, start: 1 });
    device.worker = Some(ProcessId { pid: 11, start: 1 });
    device
}

#[test]
fn a_file_is_there_as_long_as_its_directory() {
    let mut ours = ublk();
    ours.info.transport = Kind::Fuse;
    ours.info.device = "/run/user/1000/becket/fuse/fuse0/image".into();
    let there = |alive: &[u32]| Double { place: true, alive: alive.to_vec(), ..Double::default() };
    assert_eq!(judge(&there(&[10, 11]), &ours), LIVE);
    assert_eq!(judge(&there(&[]), &ours), LOST);
    let gone = |alive: &[u32]| Double { place: false, ..there(alive) };
    assert_eq!(judge(&gone(&[11]), &ours), Verdict::Gone);
    assert_eq!(judge(&gone(&[10, 11]), &ours), DETACHING, "its supervisor has not let go of the image");
}

#[test]
fn a_ublk_record_tells_who_died() {
    let ours = ublk();
    let there = |alive: &[u32]| Double {
        diskseq: Some(7),
        disk: true,
        ublk: true,
        alive: alive.to_vec(),
        ..Double::default()
    };
    assert_eq!(judge(&there(&[10, 11]), &ours), LIVE);
    assert_eq!(judge(&there(&[11]), &ours), ORPHANED);
    assert_eq!(judge(&there(&[10]), &ours), Verdict::There(DeviceState::Recovering));
    for state in [DeviceState::Failing, DeviceState::Lost] {
        let mut given_up = ours.clone();
        given_up.info.state = state;
        assert_eq!(judge(&there(&[10]), &given_up), Verdict::There(state), "its supervisor knows");
    }
    assert_eq!(judge(&there(&[]), &ours), LOST);
    // On kernels that do not keep it the disk goes with the worker; the number stays until it is deleted.
    let bare = |alive: &[u32]| Double { disk: false, diskseq: None, ..there(alive) };
    assert_eq!(judge(&bare(&[]), &ours), LOST);
    assert_eq!(judge(&bare(&[10, 11]), &ours), DETACHING);
    for gone in [|it| Double { ublk: false, ..it }, |it| Double { diskseq: Some(8), ..it }] {
        assert_eq!(judge(&gone(there(&[11])), &ours), Verdict::Gone);
        assert_eq!(judge(&gone(there(&[10, 11])), &ours), DETACHING, "its supervisor still has the image");
    }
}

#[test]
fn a_device_that_was_never_started_is_hidden_or_lost() {
    let mut ours = ublk();
    ours.starting = true;
    ours.info.diskseq = None;
    let added = |alive: &[u32]| Double { ublk: true, alive: alive.to_vec(), ..Double::default() };
    assert_eq!(judge(&added(&[10]), &ours), Verdict::NotYet);
    assert_eq!(judge(&added(&[11]), &ours), LOST);
    assert_eq!(judge(&Double::default(), &ours), Verdict::Gone);
    let undone = Double { ublk: false, ..added(&[10]) };
    assert_eq!(judge(&undone, &ours), Verdict::NotYet, "its supervisor undoes it");
    ours.info.transport = Kind::Fuse;
    assert_eq!(judge(&added(&[10]), &ours), Verdict::NotYet);
    assert_eq!(judge(&added(&[11]), &ours), LOST, "its worker may have it");
    assert_eq!(judge(&added(&[]), &ours), Verdict::Gone);
}
