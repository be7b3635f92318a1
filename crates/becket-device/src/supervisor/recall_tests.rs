use std::fs;

use super::*;
use crate::contract::messages::Detach;
use crate::control::server::Service;
use crate::supervisor::doubles::{ALL, Stage};

/// A stage with one device, whose record says no sense any more.
fn with_a_spoilt_record() -> Stage {
    let stage = Stage::new();
    stage.supervisor.attach(stage.bench.request(Some("one")), vec![stage.bench.fd(true, 0)]).unwrap();
    fs::write(stage.bench.store.runtime().records().join("one.json"), b"{\"version\":1,").unwrap();
    assert!(stage.bench.store.entries().unwrap().is_empty(), "it is set aside");
    stage.done();
    stage
}

fn names(stage: &Stage) -> Vec<String> {
    stage.bench.store.entries().unwrap().into_iter().map(|(name, _)| name).collect()
}

fn detach(stage: &Stage, name: &str) {
    stage.supervisor.detach(&Detach { name: name.to_owned(), lazy: false, force: None }).unwrap();
    assert!(lock(&stage.driver.devices).is_empty() && names(stage).is_empty());
}

#[test]
fn a_device_that_is_owned_gets_its_record_again() {
    let stage = with_a_spoilt_record();
    assert_eq!(stage.supervisor.list().len(), 1);
    assert_eq!(names(&stage), ["one"]);
    assert_eq!(stage.bench.store.device("one").unwrap().unwrap().info, stage.supervisor.list()[0]);
    detach(&stage, "one");
}

#[test]
fn an_image_is_free_once_its_worker_has_let_go_of_it() {
    use becket_transport::Abilities;
    use becket_uapi::lock::{Kind, ofd_lock, ofd_test};
    use std::os::fd::AsFd as _;
    for alive in [true, false] {
        // Without recovery no other worker takes its place.
        let stage = Stage::with(ALL.without(Abilities::RECOVERS));
        let fd = stage.bench.fd(true, 0);
        assert!(ofd_lock(fd.as_fd(), Kind::Shared, 101, 1).unwrap());
        // As the table of a ring does for a while, or a dead worker's for as long as it still writes.
        let held = fd.try_clone().unwrap();
        stage.supervisor.attach(stage.bench.request(Some("one")), vec![fd]).unwrap();
        if !alive {
            stage.worker(0).die();
        }
        detach(&stage, "one");
        let other = stage.bench.fd(true, 0);
        let locked = ofd_test(other.as_fd(), Kind::Exclusive, 101, 1).unwrap();
        assert_eq!(locked, !alive);
        drop(held);
    }
}

#[test]
fn a_device_that_nobody_serves_is_listed_as_lost_and_can_be_detached() {
    let stage = with_a_spoilt_record();
    // As if supervisor and worker had died.
    lock(&stage.supervisor.devices).clear();
    stage.supervisor.adopt();
    assert_eq!(names(&stage), ["ublkb900001"]);
    let device = stage.bench.store.device("ublkb900001").unwrap().unwrap();
    assert_eq!((device.info.state, device.info.number), (DeviceState::Lost, 900_001));
    stage.supervisor.list();
    assert_eq!(names(&stage), ["ublkb900001"], "once is enough");
    assert_eq!(stage.done(), Vec::<String>::new(), "nothing was done to it");
    detach(&stage, "ublkb900001");
}

#[test]
fn what_has_neither_record_nor_disk_goes_when_a_server_begins_and_at_no_other_time() {
    let stage = with_a_spoilt_record();
    lock(&stage.supervisor.devices).clear();
    lock(&stage.driver.devices).get_mut(&900_001).unwrap().stopped = true;
    stage.supervisor.list();
    assert_eq!(lock(&stage.driver.devices).len(), 1, "another process may be making it");
    stage.supervisor.adopt();
    assert!(lock(&stage.driver.devices).is_empty() && names(&stage).is_empty());
}

#[test]
fn devices_of_others_are_left_alone() {
    let stage = with_a_spoilt_record();
    lock(&stage.supervisor.devices).clear();
    for stopped in [true, false] {
        let mut devices = lock(&stage.driver.devices);
        let theirs = devices.get_mut(&900_001).unwrap();
        (theirs.stopped, theirs.mark) = (stopped, 2);
        drop(devices);
        stage.supervisor.adopt();
        stage.supervisor.list();
        assert_eq!((lock(&stage.driver.devices).len(), names(&stage).len()), (1, 0));
    }
    assert_eq!(stage.done(), Vec::<String>::new());
}
