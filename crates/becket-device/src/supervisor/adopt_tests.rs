use super::*;
use becket_image::Source;

use crate::contract::DeviceInfo;
use crate::contract::messages::Detach;
use crate::control::server::Service;
use crate::supervisor::doubles::{ALL, FakeWorker, Fate, Stage};
use crate::system::sync::lock;
use becket_transport::{Abilities, Kind};
use std::fs;
use std::sync::atomic::Ordering;

/// The stage of a supervisor whose predecessor attached `names` and died; with the worker that serves them.
fn after_a_death(names: &[&str], abilities: Abilities) -> (Stage, Arc<FakeWorker>) {
    let stage = Stage::with(abilities);
    for name in names {
        let request = stage.bench.request(Some(name));
        stage.supervisor.attach(request, vec![stage.bench.fd(true, 0)]).unwrap();
    }
    let kept: Vec<Kept> = {
        // Forgotten, and not detached: that is what death does.
        let devices = std::mem::take(&mut *lock(&stage.supervisor.devices));
        let take = |owned: &Arc<Owned>| {
            let state = lock(&owned.state);
            Kept::new(state.kept.serve.clone(), vec![stage.bench.fd(true, 0)]).unwrap()
        };
        devices.values().map(take).collect()
    };
    let worker = stage.worker(0);
    // The records are the predecessor's.
    for name in names {
        let record = stage.bench.store.device(name).unwrap().unwrap();
        let theirs = Device { server: Some(ProcessId { pid: u32::MAX, start: 1 }), ..record.clone() };
        assert!(stage.bench.store.update(&record, &theirs).unwrap());
    }
    lock(&stage.workers.orphans).push(Orphan { worker: Arc::clone(&worker) as Arc<dyn Worker>, held: kept });
    stage.done();
    (stage, worker)
}

fn names(infos: &[DeviceInfo]) -> Vec<&str> {
    infos.iter().map(|info| info.name.as_str()).collect()
}

#[test]
fn a_successor_owns_what_its_predecessor_owned() {
    let (stage, worker) = after_a_death(&["one", "two"], ALL);
    assert_eq!(stage.supervisor.adopt().len(), 1);
    assert_eq!(names(&stage.supervisor.list()), ["one", "two"]);
    let record = stage.bench.store.device("one").unwrap().unwrap();
    assert_eq!(record.server, Some(ProcessId::own()));
    assert_eq!(stage.done(), Vec::<String>::new(), "nothing was done to the devices");
    // New devices go to the same worker, and its death is mourned.
    let request = stage.bench.request(Some("three"));
    stage.supervisor.attach(request, vec![stage.bench.fd(true, 0)]).unwrap();
    assert!(stage.done().contains(&"serve 900003 by 0".to_owned()));
    worker.die();
    assert!(stage.supervisor.list().iter().all(|info| info.recoveries == 1));
    stage.supervisor.detach(&Detach { name: "two".to_owned(), lazy: false, force: None }).unwrap();
    assert_eq!(names(&stage.supervisor.list()), ["one", "three"]);
}

#[test]
fn a_growth_that_death_cut_short_is_finished() {
    for refused in [0, 1] {
        let (stage, _) = after_a_death(&["one", "two"], ALL);
        stage.driver.refuse.store(refused, Ordering::SeqCst);
        // The worker has the whole of it, and the kernel does not know.
        lock(&stage.driver.sizes).insert(900_001, 4096);
        stage.supervisor.adopt();
        let reported = ["show 8192 bytes of 900001", "refuse 8192 bytes of 900001"];
        assert_eq!(stage.done(), [reported[refused as usize]], "the other one is left alone");
        assert_eq!(stage.supervisor.list().len(), 2, "owned whatever came of it");
    }
}

#[test]
fn links_that_death_kept_from_being_made_are_made() {
    let (stage, _) = after_a_death(&["one", "two"], ALL);
    let link = |name: &str| stage.bench.store.runtime().links().join(name);
    let node = fs::read_link(link("one")).unwrap();
    fs::remove_file(link("one")).unwrap();
    stage.supervisor.adopt();
    assert_eq!(fs::read_link(link("one")).unwrap(), node);
    assert!(link("two").is_symlink());
}

#[test]
fn records_that_cannot_be_trusted_are_set_aside_and_others_are_not_disturbed() {
    let (stage, _) = after_a_death(&["good", "corrupt", "foreign", "lied"], ALL);
    let records = stage.bench.store.runtime().records();
    let path = |name: &str| records.join(format!("{name}.json"));
    fs::write(path("corrupt"), b"{\"version\":1,").unwrap();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let foreign = fs::read_to_string(path("foreign")).unwrap();
    fs::write(path("foreign"), foreign.replace(boot.trim(), "00000000-0000-0000-0000-000000000000")).unwrap();
    // A record that means another program's device: the mark is another one.
    let record = stage.bench.store.device("lied").unwrap().unwrap();
    let lied = Device { mark: record.mark ^ 1, ..record.clone() };
    assert!(stage.bench.store.update(&record, &lied).unwrap());

    stage.supervisor.adopt();
    // What the worker holds is believed, and goes by the kernel's names now.
    let anew = ["ublkb900002", "ublkb900003", "ublkb900004"];
    assert_eq!(names(&stage.supervisor.list()), [&["good"], &anew[..]].concat());
    assert!(
        stage.supervisor.list().iter().all(|info| info.spec.image == stage.bench.image && info.size == 8192)
    );
    assert_eq!(stage.done(), Vec::<String>::new(), "no device is touched for the sake of such a record");
    assert!(path("corrupt").with_extension("json.corrupt").exists() && !path("corrupt").exists());
    assert!(path("foreign").with_extension("json.foreign").exists() && !path("foreign").exists());
    assert!(!path("lied").exists());
    stage.supervisor.detach(&Detach { name: anew[0].to_owned(), lazy: false, force: None }).unwrap();
    assert_eq!(stage.done(), ["stop unused 900002", "delete 900002"]);
}

#[test]
fn what_was_half_made_or_half_gone_is_removed() {
    let (stage, _) = after_a_death(&["half", "dead", "gone"], ALL);
    let record = stage.bench.store.device("half").unwrap().unwrap();
    assert!(stage.bench.store.update(&record, &Device { starting: true, ..record.clone() }).unwrap());
    let numbers =
        ["half", "dead", "gone"].map(|name| stage.bench.store.device(name).unwrap().unwrap().info.number);
    lock(&stage.driver.devices).get_mut(&numbers[1]).unwrap().stopped = true;
    lock(&stage.driver.devices).remove(&numbers[2]);
    stage.supervisor.adopt();
    assert!(stage.supervisor.idle());
    let [half, dead, _] = numbers;
    let mut done = stage.done();
    done.sort();
    let mut expected = [half, dead].map(|id| [format!("delete {id}"), format!("stop {id}")]).concat();
    expected.sort();
    assert_eq!(done, expected);
    assert_eq!(stage.bench.left_behind(), Vec::<String>::new());
}

#[test]
fn a_device_without_its_worker_is_lost_and_can_still_be_detached() {
    let (stage, worker) = after_a_death(&["one"], ALL);
    lock(&stage.workers.orphans).clear();
    worker.vanish();
    stage.supervisor.adopt();
    assert!(stage.supervisor.idle(), "nobody can serve it");
    assert_eq!(stage.done(), ["stop 900001"], "its users wait no longer");
    stage.supervisor.adopt();
    let record = stage.bench.store.device("one").unwrap().unwrap();
    assert_eq!(record.info.state, DeviceState::Lost, "it is listed until it is detached");
    stage.done();
    stage.supervisor.detach(&Detach { name: "one".to_owned(), lazy: false, force: None }).unwrap();
    assert_eq!(stage.done(), ["stop 900001", "delete 900001"]);
}

#[test]
fn what_the_worker_holds_counts_for_more_than_the_record() {
    let (stage, _) = after_a_death(&["one"], ALL);
    let other = stage.bench.image.with_file_name("other");
    fs::write(&other, [0; 8192]).unwrap();
    let file = fs::File::options().read(true).write(true).open(&other).unwrap();
    // The predecessor died when the worker had another image and the record did not say so yet.
    {
        let held = &mut lock(&stage.workers.orphans)[0].held[0];
        let Source::File(source) = &mut held.sources[0] else { panic!() };
        source.buffered = file.into();
        (held.serve.geometry.read_only, held.serve.geometry.size) = (true, 4096);
        held.serve.map = becket_image::Map::contiguous(0, 0, 4096);
    }
    stage.supervisor.adopt();
    let record = stage.bench.store.device("one").unwrap().unwrap();
    assert_eq!((&record.info.spec.image, record.info.spec.read_only, record.info.size), (&other, true, 4096));
    assert_eq!(record.image.ino, std::os::unix::fs::MetadataExt::ino(&fs::metadata(&other).unwrap()));
    assert_eq!(names(&stage.supervisor.list()), ["one"]);
}

#[test]
fn an_upgrade_moves_devices_between_two_requests() {
    let (stage, old) = after_a_death(&["one"], ALL);
    let workers = stage.supervisor.adopt();
    // Two tags were in use when it was first asked.
    old.slow.store(2, Ordering::SeqCst);
    stage.driver.held.store(1, Ordering::SeqCst);
    workers.iter().for_each(|worker| stage.supervisor.unshare(worker));
    stage.supervisor.renew(workers);
    let steps = [
        "start by 1",
        "quiesce 900001",
        "quiesce 900001",
        "quiesce 900001",
        "wait for 900001",
        "recover 900001",
        "open 900001",
        "serve 900001 by 1",
        "end 900001",
        "dismissed by 0",
    ];
    assert_eq!(stage.done(), steps);
    assert_eq!(*lock(&old.served), *lock(&stage.worker(1).served), "as it was");
    assert_eq!(stage.supervisor.list()[0].state, DeviceState::Live);
}

#[test]
fn where_requests_cannot_be_held_back_the_old_worker_ends() {
    for abilities in [ALL.without(Abilities::QUIESCES), ALL.with(Abilities::BATCH)] {
        let (stage, old) = after_a_death(&["one"], abilities);
        let workers = stage.supervisor.adopt();
        workers.iter().for_each(|worker| stage.supervisor.unshare(worker));
        stage.supervisor.renew(workers);
        assert_eq!(stage.done(), ["killed by 0"]);
        old.die();
        assert!(stage.done().contains(&"serve 900001 by 1".to_owned()));
        assert_eq!(stage.supervisor.list()[0].state, DeviceState::Live);
    }
}

/// Another worker that says that it serves the devices of the first, as `change` has them.
fn a_liar(stage: &Stage, change: impl Fn(&mut Kept)) -> Arc<FakeWorker> {
    let liar = FakeWorker::new(&stage.journal, 77, Fate::Serves, Box::new(|_| {}));
    let claim = |kept: &Kept| {
        let mut claimed = Kept::new(kept.serve.clone(), vec![stage.bench.fd(true, 0)]).unwrap();
        change(&mut claimed);
        claimed
    };
    let mut orphans = lock(&stage.workers.orphans);
    let held = orphans[0].held.iter().map(claim).collect();
    orphans.push(Orphan { worker: Arc::clone(&liar) as Arc<dyn Worker>, held });
    liar
}

#[test]
fn a_worker_that_claims_what_another_serves_is_not_believed() {
    let (stage, worker) = after_a_death(&["one"], ALL);
    let liar = a_liar(&stage, |_| {});
    stage.supervisor.adopt();
    // It has no device, so nothing comes of its death; the other one's is mourned.
    liar.die();
    assert_eq!(stage.done(), Vec::<String>::new());
    worker.die();
    assert_eq!(stage.supervisor.list()[0].recoveries, 1);
}

#[test]
fn a_dead_workers_device_is_believed_of_one_successor_only() {
    for (liars, believed) in [(1, 1), (2, 0)] {
        let (stage, _) = after_a_death(&["one"], ALL);
        let record = stage.bench.store.device("one").unwrap().unwrap();
        // Its supervisor died before it could write down who came after the first worker.
        let dead = Some(ProcessId { pid: u32::MAX - 1, start: 1 });
        assert!(stage.bench.store.update(&record, &Device { worker: dead, ..record.clone() }).unwrap());
        (1..liars).for_each(|_| drop(a_liar(&stage, |_| {})));
        stage.supervisor.adopt();
        assert_eq!(stage.supervisor.list().len(), believed);
    }
}

#[test]
fn an_isolated_worker_gets_no_second_device() {
    let (stage, worker) = after_a_death(&["mine", "other"], ALL);
    let [mine, other] = ["mine", "other"].map(|name| stage.bench.store.device(name).unwrap().unwrap());
    let mut isolated = mine.clone();
    isolated.info.isolated = true;
    assert!(stage.bench.store.update(&mine, &isolated).unwrap());
    let dead = Some(ProcessId { pid: u32::MAX - 1, start: 1 });
    assert!(stage.bench.store.update(&other, &Device { worker: dead, ..other.clone() }).unwrap());
    for kept in &mut lock(&stage.workers.orphans)[0].held {
        kept.serve.isolated = kept.serve.mark == mine.mark;
    }
    stage.supervisor.unshare(&(worker as Arc<dyn Worker>));
    stage.supervisor.adopt();
    assert_eq!(names(&stage.supervisor.list()), ["mine"]);
    stage.done();
    stage.supervisor.attach(stage.bench.request(Some("new")), vec![stage.bench.fd(true, 0)]).unwrap();
    assert!(stage.done().contains(&"start by 1".to_owned()), "nor a new one");
}

#[test]
fn what_a_worker_says_must_fit_the_record_and_its_descriptors() {
    let lies: [fn(&mut Kept); 9] = [
        |kept| kept.serve.id.number += 1,
        |kept| kept.serve.kind = Kind::Fuse,
        |kept| kept.serve.queues = u16::MAX,
        |kept| kept.serve.depth = u16::MAX,
        |kept| kept.serve.isolated = true,
        |kept| kept.serve.geometry.size *= 2,
        |kept| kept.serve.map = becket_image::Map::contiguous(9, 0, kept.serve.map.len()),
        |kept| {
            let Source::File(file) = &mut kept.sources[0] else { panic!() };
            file.buffered = rustix::pipe::pipe().unwrap().1;
        },
        |kept| kept.keepsakes.cgroup = Some(fs::File::open("/dev/null").unwrap().into()),
    ];
    for (number, lie) in lies.into_iter().enumerate() {
        let (stage, _) = after_a_death(&["one"], ALL);
        lie(&mut lock(&stage.workers.orphans)[0].held[0]);
        stage.supervisor.adopt();
        assert!(stage.supervisor.idle(), "lie {number} is believed");
        // No such worker runs, so it is lost; had it one, not even this would be done to it.
        assert_eq!(stage.done(), ["stop 900001"]);
    }
}

#[test]
fn a_worker_that_lives_is_not_said_to_be_dead() {
    let (stage, _) = after_a_death(&["one"], ALL);
    let record = stage.bench.store.device("one").unwrap().unwrap();
    let of = |worker| unserved(&Device { worker, ..record.clone() });
    assert!(of(Some(ProcessId::own())).unwrap_err().to_string().contains("goes on without a server"));
    assert!(of(Some(ProcessId { pid: u32::MAX - 1, start: 1 })).is_ok() && of(None).is_ok());
}
