//! The supervisor's own locks under many orders of events: no thread deadlocks, and what is left makes sense.
//! The threads are shuttle's, which gives turns to them at each lock; kernel and workers are doubles.

use std::collections::BTreeSet;
use std::sync::Arc;

use shuttle::thread::spawn;

use super::doubles::{ALL, Stage};
use crate::contract::messages::{Detach, Set};
use crate::control::server::Service;
use crate::system::sync::lock;
use crate::system::sync::tests::shuffle;

fn attach(stage: &Stage, name: &str) -> bool {
    let request = stage.bench.request(Some(name));
    stage.supervisor.attach(request, vec![stage.bench.fd(true, 0)]).is_ok()
}

fn detach(stage: &Stage, name: &str) -> bool {
    stage.supervisor.detach(&Detach { name: name.to_owned(), lazy: false, force: None }).is_ok()
}

/// Waits until each device has a worker, and answers with their names.
fn settled(stage: &Stage) -> BTreeSet<String> {
    loop {
        let devices: Vec<_> = lock(&stage.supervisor.devices).values().cloned().collect();
        let served = |owned: &Arc<super::owned::Owned>| lock(&owned.state).worker.alive();
        if devices.iter().all(served) {
            return devices.iter().map(|owned| lock(&owned.state).name().to_owned()).collect();
        }
        shuttle::thread::yield_now();
    }
}

/// Supervisor, records and kernel know the same devices.
fn agree(stage: &Stage, names: &BTreeSet<String>) {
    let records: BTreeSet<String> =
        stage.bench.store.entries().unwrap().into_iter().map(|(name, _)| name).collect();
    assert_eq!(&records, names);
    assert_eq!(lock(&stage.driver.devices).len(), names.len());
}

#[test]
fn devices_come_and_go_while_their_worker_dies() {
    shuffle(60, || {
        let stage = Arc::new(Stage::with(ALL));
        assert!(attach(&stage, "zero"));
        let with = |work: fn(&Stage) -> bool| {
            let stage = Arc::clone(&stage);
            spawn(move || work(&stage))
        };
        let threads = [
            with(|stage| attach(stage, "one") && detach(stage, "one")),
            with(|stage| attach(stage, "two")),
            with(|stage| detach(stage, "zero")),
            with(|stage| {
                stage.worker(0).die();
                true
            }),
            with(|stage| {
                let all = stage.supervisor.list();
                all.len() <= 3 && stage.supervisor.status().devices <= 3
            }),
        ];
        let [one, two, zero, death, looks] = threads.map(|thread| thread.join().unwrap());
        assert!(death && looks && zero);
        let left = settled(&stage);
        agree(&stage, &left);
        // An attach fails only with the worker that died of it.
        assert_eq!(left.contains("two"), two);
        assert!(!one || !left.contains("one"));
    });
}

fn set_read_only(stage: &Stage, name: &str, on: bool) -> bool {
    let change = Set { name: name.to_owned(), read_only: Some(on), ..Set::default() };
    stage.supervisor.set(change, Vec::new()).is_ok()
}

#[test]
fn a_device_becomes_writable_again_while_its_worker_dies_and_others_go() {
    shuffle(60, || {
        let stage = Arc::new(Stage::with(ALL));
        assert!(attach(&stage, "zero") && attach(&stage, "one"));
        assert!(set_read_only(&stage, "zero", true));
        let with = |work: fn(&Stage) -> bool| {
            let stage = Arc::clone(&stage);
            spawn(move || work(&stage))
        };
        let threads = [
            with(|stage| set_read_only(stage, "zero", false)),
            with(|stage| detach(stage, "one")),
            with(|stage| {
                stage.worker(0).die();
                true
            }),
            with(|stage| stage.supervisor.list().len() <= 2),
        ];
        let [set, gone, death, looks] = threads.map(|thread| thread.join().unwrap());
        assert!(gone && death && looks);
        let left = settled(&stage);
        agree(&stage, &left);
        assert_eq!(left, BTreeSet::from(["zero".to_owned()]));
        // Whatever became of the change, all say the same.
        let owned = Arc::clone(&lock(&stage.supervisor.devices)["zero"]);
        let state = lock(&owned.state);
        let record = stage.bench.store.device("zero").unwrap().unwrap();
        let served = state.kept.serve.geometry.read_only;
        assert_eq!((state.device.info.spec.read_only, record.info.spec.read_only), (served, served));
        assert!(!set || !served, "where the flag says writable, writes pass");
    });
}

#[test]
fn of_two_who_detach_one_device_both_end() {
    shuffle(60, || {
        let stage = Arc::new(Stage::with(ALL));
        assert!(attach(&stage, "zero") && attach(&stage, "one"));
        let other = Arc::clone(&stage);
        let other = spawn(move || detach(&other, "zero"));
        let here = detach(&stage, "zero");
        assert!(other.join().unwrap() || here, "one of them has done it");
        agree(&stage, &settled(&stage));
        assert_eq!(settled(&stage), BTreeSet::from(["one".to_owned()]));
    });
}

#[test]
fn a_server_that_must_end_takes_no_device_half() {
    shuffle(60, || {
        let stage = Arc::new(Stage::with(ALL));
        assert!(attach(&stage, "zero"));
        let other = Arc::clone(&stage);
        let coming = spawn(move || attach(&other, "one"));
        stage.supervisor.drain();
        let came = coming.join().unwrap();
        let left = settled(&stage);
        agree(&stage, &left);
        assert!(!left.contains("zero") && (came || !left.contains("one")));
    });
}
