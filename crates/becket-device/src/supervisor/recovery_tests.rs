use super::*;
use crate::contract::DeviceInfo;
use crate::contract::messages::{Attach, Detach};
use crate::control::server::Service;
use crate::supervisor::doubles::{ALL, Fate, Stage, with};
use becket_transport::Abilities;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, mpsc};
use std::time::Duration;

const ID: u32 = 900_001;

impl Stage {
    fn attach(&self, change: impl FnOnce(Attach) -> Attach) -> DeviceInfo {
        let request = change(self.bench.request(Some("one")));
        let info = self.supervisor.attach(request, vec![self.bench.fd(true, 0)]).unwrap();
        self.done();
        info
    }

    /// What the record says.
    fn recorded(&self, name: &str) -> DeviceInfo {
        self.bench.store.device(name).unwrap().unwrap().info
    }
}

#[test]
fn a_device_goes_on_with_another_worker() {
    let stage = Stage::new();
    stage.attach(|request| request);
    stage.driver.held.store(2, Ordering::SeqCst);
    stage.worker(0).die();
    // The worker is started once, while the kernel still holds the dead one's device.
    let steps = ["start by 1", "wait for", "wait for", "recover", "open", "serve 900001 by 1", "end"];
    let done: Vec<String> = stage.done().iter().map(|step| step.replace(" 900001", "")).collect();
    assert_eq!(done, steps.map(|step| step.replace(" 900001", "")));
    let (before, after) = (stage.worker(0), stage.worker(1));
    assert_eq!(*lock(&before.served), *lock(&after.served), "the same flags, depth, queues, map and files");
    let info = stage.recorded("one");
    assert_eq!((info.state, info.recoveries), (DeviceState::Live, 1));
    assert_eq!(stage.bench.store.device("one").unwrap().unwrap().worker, Some(after.id()));
    assert_eq!(stage.supervisor.list()[0].state, DeviceState::Live);
    // Again, and the new one is watched as the old one was.
    after.die();
    assert_eq!(stage.recorded("one").recoveries, 2);
    assert_eq!(lock(&stage.worker(2).served).len(), 1);
}

#[test]
fn a_worker_that_dies_before_it_is_ready_is_followed_by_another() {
    let stage = Stage::new();
    stage.attach(|request| request);
    lock(&stage.workers.fates).extend([Some(Fate::Dies), None, Some(Fate::Serves)]);
    stage.worker(0).die();
    assert_eq!(
        stage.done(),
        [
            "start by 1",
            "recover 900001",
            "open 900001",
            "die of 900001 by 1",
            // The next could not be started at all.
            "start by 2",
            "recover 900001",
            "open 900001",
            "serve 900001 by 2",
            "end 900001"
        ]
    );
    assert_eq!(stage.recorded("one").recoveries, 1);
}

#[test]
fn a_device_whose_worker_dies_while_it_is_made_is_made_once_more() {
    let stage = Stage::new();
    lock(&stage.workers.fates).extend([Some(Fate::Dies), Some(Fate::Serves)]);
    let info = stage.attach(|request| request);
    assert_eq!((info.name.as_str(), stage.recorded("one").recoveries), ("one", 0));
    assert_eq!(lock(&stage.worker(1).served).len(), 1);

    // Workers that die of the device itself.
    let stage = Stage::new();
    lock(&stage.workers.fates).extend([Some(Fate::Dies)]);
    let request = stage.bench.request(Some("one"));
    let refused = stage.supervisor.attach(request, vec![stage.bench.fd(true, 0)]).unwrap_err();
    assert!(matches!(refused, Error::Worker { .. }), "{refused}");
    assert_eq!(lock(&stage.workers.started).len(), 2, "twice, and no more");
    assert!(stage.bench.store.device("one").unwrap().is_none());

    // One that says no has not died.
    let stage = Stage::new();
    lock(&stage.workers.fates).extend([Some(Fate::Refuses)]);
    let request = stage.bench.request(Some("one"));
    stage.supervisor.attach(request, vec![stage.bench.fd(true, 0)]).unwrap_err();
    assert_eq!(lock(&stage.workers.started).len(), 1);
}

#[test]
fn a_recovery_that_breaks_off_begins_anew() {
    let stage = Stage::new();
    stage.attach(|request| request);
    stage.driver.refuse.store(1, Ordering::SeqCst);
    stage.worker(0).die();
    let done = stage.done();
    let ends: Vec<&str> = done.iter().map(String::as_str).filter(|step| step.contains("end ")).collect();
    assert_eq!(ends, ["fail to end 900001", "end 900001"]);
    assert_eq!(done.iter().filter(|step| step.starts_with("recover")).count(), 2);
    assert_eq!(stage.recorded("one").state, DeviceState::Live);
}

#[test]
fn a_device_whose_workers_die_at_once_is_tried_ever_more_rarely_and_can_be_ended() {
    let stage = Stage::new();
    stage.attach(|request| request);
    lock(&stage.workers.fates).extend([Some(Fate::Dies)]);
    stage.driver.used.store(true, Ordering::SeqCst);
    let (sent, pauses) = mpsc::channel();
    let supervisor = Arc::clone(&stage.supervisor);
    let store = stage.bench.store.clone();
    *lock(&stage.workers.meanwhile) = Some(Box::new(move |pause| {
        let state = store.device("one").unwrap().unwrap().info.state;
        sent.send((pause.as_secs(), state)).unwrap();
        if pause.as_secs() == 16 {
            // Its users wait for what never happens: they are not spared.
            supervisor.detach(&Detach { name: "one".to_owned(), lazy: false, force: None }).unwrap();
        }
    }));
    stage.worker(0).die();
    let pauses: Vec<(u64, DeviceState)> = pauses.try_iter().collect();
    assert_eq!(pauses, [1, 2, 4, 8, 16].map(|pause| (pause, DeviceState::Failing)));
    let done = stage.done();
    assert!(done.ends_with(&["stop 900001".to_owned(), "delete 900001".to_owned()]), "{done:?}");
    assert!(stage.supervisor.idle());
}

#[test]
fn a_device_in_use_is_not_taken_away_while_it_recovers() {
    let stage = Stage::new();
    stage.attach(|request| request);
    stage.driver.held.store(u32::MAX, Ordering::SeqCst);
    stage.driver.used.store(true, Ordering::SeqCst);
    let (supervisor, driver) = (Arc::clone(&stage.supervisor), Arc::clone(&stage.driver));
    *lock(&stage.workers.meanwhile) = Some(Box::new(move |_| {
        assert_eq!(supervisor.list()[0].state, DeviceState::Recovering);
        let detach = Detach { name: "one".to_owned(), lazy: false, force: None };
        let refused = supervisor.detach(&detach).unwrap_err();
        assert!(matches!(refused, Error::Busy { .. }), "{refused}");
        // Unused, it goes, and is not recovered any more.
        driver.used.store(false, Ordering::SeqCst);
        supervisor.detach(&detach).unwrap();
    }));
    stage.worker(0).die();
    let steps =
        ["start by 1", "wait for 900001", "refuse to stop 900001", "stop unused 900001", "delete 900001"];
    assert_eq!(stage.done(), steps);
    assert!(stage.supervisor.idle());
    assert_eq!(stage.bench.left_behind(), Vec::<String>::new());
}

/// A file system that does not answer keeps the worker from closing the image's file.
#[test]
fn what_is_not_let_go_of_in_time_goes_later() {
    let stage = Stage::new();
    stage.attach(|request| request);
    stage.worker(0).slow.store(2, Ordering::SeqCst);
    let late =
        stage.supervisor.detach(&Detach { name: "one".to_owned(), lazy: false, force: None }).unwrap_err();
    assert!(late.to_string().contains("may not answer"), "{late}");
    assert_eq!(stage.recorded("one").state, DeviceState::Detaching);
    // There is no retry, and the kernel, which has no disk any more, is not asked to stop it again.
    while !stage.supervisor.idle() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let done = stage.done();
    assert_eq!(done[done.len() - 2..], ["stop unused 900001", "delete 900001"]);
    assert_eq!(stage.bench.left_behind(), Vec::<String>::new());
}

#[test]
fn a_worker_of_its_own_dies_alone() {
    let stage = Stage::new();
    stage.attach(|request| Attach { isolate: true, ..request });
    let other = Attach { name: Some("two".to_owned()), ..stage.bench.request(None) };
    stage.supervisor.attach(other, vec![stage.bench.fd(true, 0)]).unwrap();
    stage.done();
    let (own, shared) = (stage.worker(0), stage.worker(1));
    assert!(stage.recorded("one").isolated && !stage.recorded("two").isolated);
    own.die();
    let again = stage.worker(2);
    assert_eq!(lock(&again.served)[0].id.number, ID);
    assert_eq!((stage.recorded("one").recoveries, stage.recorded("two").recoveries), (1, 0));
    shared.die();
    assert_eq!(lock(&stage.worker(3).served)[0].id.number, ID + 1);
    assert_eq!((stage.recorded("one").recoveries, stage.recorded("two").recoveries), (1, 1));
    stage.done();
    // It goes with its device.
    stage.supervisor.detach(&Detach { name: "one".to_owned(), lazy: false, force: None }).unwrap();
    assert!(stage.done().contains(&"dismissed by 2".to_owned()));
}

#[test]
fn a_control_group_is_taken_only_as_what_it_is() {
    let stage = Stage::new();
    let image = || stage.bench.fd(true, 0);
    let request = |isolate| {
        let request = Attach { isolate, ..stage.bench.request(Some("one")) };
        with(request, |it| it.backing.cgroup = true)
    };
    let cases: [(Attach, Vec<OwnedFd>); 3] =
        [(request(true), vec![image(), image()]), (request(true), vec![]), (request(false), vec![image()])];
    for (request, fds) in cases {
        let error = stage.supervisor.attach(request, fds).unwrap_err();
        assert_eq!(error.kind(), crate::contract::ErrorKind::InvalidOption, "{error}");
    }
    assert_eq!(stage.done(), Vec::<String>::new());
}

#[test]
fn a_worker_that_died_before_its_device_was_known_is_noticed() {
    let stage = Stage::new();
    stage.attach(|request| request);
    let first = stage.worker(0);
    let state = {
        let owned = lock(&stage.supervisor.devices).remove("one").unwrap();
        first.vanish();
        owned
    };
    stage.supervisor.own(&state);
    let recovered = || stage.recorded("one").recoveries == 1;
    assert!(becket_testkit::wait_until(Duration::from_secs(20), recovered));
}

#[test]
fn without_the_kernel_s_help_a_device_is_lost() {
    let stage = Stage::with(Abilities::SERVED);
    stage.attach(|request| request);
    stage.worker(0).die();
    assert_eq!(stage.done(), Vec::<String>::new());
    assert_eq!(stage.recorded("one").state, DeviceState::Lost);
    assert_eq!(stage.supervisor.list()[0].state, DeviceState::Lost);
    stage.supervisor.detach(&Detach { name: "one".to_owned(), lazy: false, force: None }).unwrap();
    assert_eq!(stage.done(), ["stop 900001", "delete 900001"]);
}

#[test]
fn an_old_kernel_must_look_for_dead_workers() {
    let stage = Stage::with(ALL.without(Abilities::QUIESCES));
    let request = stage.bench.request(Some("one"));
    stage.supervisor.attach(request, vec![stage.bench.fd(true, 0)]).unwrap();
    assert!(stage.done().contains(&"watch 900001".to_owned()));
}

#[test]
fn many_attaches_and_deaths_at_once_lose_no_device() {
    let stage = Stage::new();
    // For its sake each death starts another worker.
    stage.attach(|request| request);
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for number in 0..8 {
            let (stage, failures) = (&stage, &failures);
            scope.spawn(move || {
                let request = stage.bench.request(Some(&format!("d{number}")));
                if let Err(error) = stage.supervisor.attach(request, vec![stage.bench.fd(true, 0)]) {
                    lock(failures).push(error.to_string());
                }
            });
        }
        scope.spawn(|| {
            for death in 0..3 {
                let there = || lock(&stage.workers.started).len() > death;
                assert!(becket_testkit::wait_until(Duration::from_secs(20), there));
                stage.worker(death).die();
            }
        });
    });
    // An attach may meet a worker that dies; then it fails and leaves nothing.
    let names: Vec<String> = stage.supervisor.list().into_iter().map(|info| info.name).collect();
    assert_eq!(names.len() + lock(&failures).len(), 9);
    let served = |name: &String| stage.recorded(name).state == DeviceState::Live;
    let all_served = || {
        stage.supervisor.list().iter().all(|info| info.state == DeviceState::Live) && names.iter().all(served)
    };
    assert!(becket_testkit::wait_until(Duration::from_secs(20), all_served));
}
