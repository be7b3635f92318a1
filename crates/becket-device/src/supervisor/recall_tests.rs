use std::fs;
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;

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
    use becket_uapi::lock::{LockKind, ofd_lock, ofd_test};
    use std::os::fd::AsFd as _;
    for alive in [true, false] {
        // Without recovery no other worker takes its place.
        let stage = Stage::with(ALL.without(Abilities::RECOVERS));
        let fd = stage.bench.fd(true, 0);
        assert!(ofd_lock(fd.as_fd(), LockKind::Shared, 101, 1).unwrap());
        // As the table of a ring does for a while, or a dead worker's for as long as it still writes.
        let held = fd.try_clone().unwrap();
        stage.supervisor.attach(stage.bench.request(Some("one")), vec![fd]).unwrap();
        if !alive {
            stage.worker(0).die();
        }
        detach(&stage, "one");
        let other = stage.bench.fd(true, 0);
        let locked = ofd_test(other.as_fd(), LockKind::Exclusive, 101, 1).unwrap();
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

/// A process with these words, which waits until it is ended.
struct Process(Child);

impl Process {
    fn of(words: &[&str]) -> Process {
        let mut command = Command::new("sh");
        // Its first line says that it has these words: a fork has its parent's until then.
        command.arg0("becket").args(["-c", "echo; read x"]).args(words);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        Process(child)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A stage whose only device has no record, and whose supervisor owns nothing: it was begun in a new runtime
/// directory. The kernel knows the device's server by that number.
fn of_another_server(pid: u32) -> Stage {
    let stage = with_a_spoilt_record();
    lock(&stage.supervisor.devices).clear();
    lock(&stage.driver.devices).get_mut(&900_001).unwrap().stopped = false;
    stage.driver.server.store(pid, Ordering::SeqCst);
    stage
}

/// How many devices and records there are.
fn there(stage: &Stage) -> (usize, usize) {
    (lock(&stage.driver.devices).len(), names(stage).len())
}

#[test]
fn the_devices_of_a_server_that_lives_are_left_to_it() {
    let server = Process::of(&["serve"]);
    let stage = of_another_server(server.0.id());
    stage.supervisor.adopt();
    stage.supervisor.list();
    assert_eq!((there(&stage), stage.done()), ((1, 0), Vec::new()));
    drop(server);
    stage.supervisor.adopt();
    assert_eq!(there(&stage), (1, 1), "nobody will serve it");
}

#[test]
fn a_device_that_another_server_makes_is_left_to_it() {
    let stage = of_another_server(0);
    lock(&stage.driver.devices).get_mut(&900_001).unwrap().stopped = true;
    stage.driver.served.store(true, Ordering::SeqCst);
    stage.supervisor.adopt();
    assert_eq!((there(&stage), stage.done()), ((1, 0), Vec::new()));
    stage.driver.served.store(false, Ordering::SeqCst);
    stage.supervisor.adopt();
    assert_eq!(there(&stage), (0, 0), "nobody makes it");
}

#[test]
fn a_number_that_is_used_again_is_no_server() {
    let other = Process::of(&["run"]);
    // In another container, both servers may well have the same number.
    for pid in [other.0.id(), std::process::id()] {
        let stage = of_another_server(pid);
        stage.supervisor.adopt();
        assert_eq!(names(&stage), ["ublkb900001"]);
        detach(&stage, "ublkb900001");
    }
}

/// The same, where a process has the device open that this supervisor does not know.
fn of_an_unknown_worker() -> Stage {
    let stage = of_another_server(0);
    stage.driver.served.store(true, Ordering::SeqCst);
    stage.supervisor.adopt();
    assert_eq!(names(&stage), ["ublkb900001"]);
    stage
}

#[test]
fn a_device_of_an_unknown_worker_is_not_taken_from_its_users() {
    let stage = of_an_unknown_worker();
    stage.driver.used.store(true, Ordering::SeqCst);
    for lazy in [false, true] {
        let request = Detach { name: "ublkb900001".to_owned(), lazy, force: None };
        let detached = stage.supervisor.detach(&request);
        assert_eq!(stage.done(), ["refuse to stop 900001"]);
        assert_eq!(matches!(detached.unwrap_err(), Error::Busy { .. }), !lazy);
    }
    stage.driver.used.store(false, Ordering::SeqCst);
    detach(&stage, "ublkb900001");
    assert_eq!(stage.done(), ["stop unused 900001", "delete 900001"]);
}

#[test]
fn a_device_of_an_unknown_worker_is_not_stopped_by_the_next_server() {
    let stage = of_an_unknown_worker();
    stage.supervisor.adopt();
    assert_eq!(stage.done(), Vec::<String>::new());
    let device = stage.bench.store.device("ublkb900001").unwrap().unwrap();
    assert!(device.info.warnings.iter().any(|warning| warning.contains("serves it")));
}

#[test]
fn users_of_a_device_that_nobody_serves_get_errors_from_the_next_server() {
    let stage = of_another_server(0);
    stage.driver.used.store(true, Ordering::SeqCst);
    stage.supervisor.adopt();
    assert_eq!(stage.done(), Vec::<String>::new());
    stage.supervisor.adopt();
    assert_eq!(stage.done(), ["stop 900001"]);
    // Without a disk it has no users that could lose it.
    detach(&stage, "ublkb900001");
    assert_eq!(stage.done(), ["stop 900001", "delete 900001"]);
}

#[test]
fn what_another_server_has_recorded_of_an_owned_device_goes() {
    let stage = Stage::new();
    stage.supervisor.attach(stage.bench.request(Some("one")), vec![stage.bench.fd(true, 0)]).unwrap();
    let one = stage.bench.store.device("one").unwrap().unwrap();
    let mut twin = one.clone();
    (twin.server, twin.worker) = (None, None);
    let mut other = Device { mark: one.mark ^ 1, ..twin.clone() };
    for (device, name) in [(&mut twin, "ublkb900001"), (&mut other, "other")] {
        name.clone_into(&mut device.info.name);
        stage.bench.store.enter(device, |_| false).unwrap();
        links::make(&stage.bench.store, &device.info);
    }
    stage.supervisor.reappear();
    stage.supervisor.forget_twins();
    assert_eq!(names(&stage), ["one", "other"]);
    let link = |name: &str| stage.bench.store.runtime().links().join(name).is_symlink();
    assert_eq!(["one", "other", "ublkb900001"].map(link), [true, true, false]);
    assert_eq!(stage.bench.store.device("one").unwrap(), Some(one));
}
