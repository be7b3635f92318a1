//! Doubles for tests of the supervisor: a kernel, workers, and a place with an image.
//! Everything happens in the thread that asks for it, so that tests are the same each time.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use becket_engine::{Geometry, Summary};
use becket_image::{Facts, FileKind, Map, Partition};
use becket_transport::{Abilities, Kind};

use super::devices::Supervisor;
use super::driver::{Added, Driver, NewDevice, Settled};
use super::guard::Guard;
use super::offers::{Drivers, OFFERS};
use super::workers::{OnDeath, Orphan, Worker, Workers};
use crate::contract::messages::Attach;
use crate::contract::protocol::{Change, Serve};
use crate::contract::spec::{Backing, Spec};
use crate::contract::{DeviceId, Error};
use crate::record::runtime::Runtime;
use crate::record::store::Store;
use crate::system::process::ProcessId;
use crate::system::sync::lock;
use crate::system::sync::tests::shuffled;
use becket_image::FileFacts;

/// What the newest kernel can.
pub(super) const ALL: Abilities =
    Abilities::SERVED.with(Abilities::RECOVERS).with(Abilities::QUIESCES).with(Abilities::RESIZES);
/// Numbers that no device of this machine has.
const FIRST: u32 = 900_001;

/// Something done, by whom it was done to: `serve 900001 by 3`.
pub(super) type Journal = Arc<Mutex<Vec<String>>>;

/// A driver that keeps a journal.
pub(super) struct FakeDriver {
    pub(super) journal: Journal,
    pub(super) abilities: Abilities,
    pub(super) devices: Mutex<BTreeMap<u32, Added>>,
    /// What users see of each disk.
    pub(super) sizes: Mutex<BTreeMap<u32, u64>>,
    /// How often START_USER_RECOVERY still finds the old worker's device open.
    pub(super) held: AtomicU32,
    /// Each disk is in use.
    pub(super) used: AtomicBool,
    /// How often END_USER_RECOVERY and UPDATE_SIZE fail.
    pub(super) refuse: AtomicU32,
    /// Its disks ask their workers how long they are.
    pub(super) follows: AtomicBool,
    /// The process that each device is known to be served by; 0 where there is none.
    pub(super) server: AtomicU32,
    /// A process has each device open to serve it.
    pub(super) served: AtomicBool,
}

impl FakeDriver {
    fn new(journal: &Journal) -> FakeDriver {
        FakeDriver {
            journal: Arc::clone(journal),
            abilities: ALL,
            devices: Mutex::default(),
            sizes: Mutex::default(),
            held: AtomicU32::new(0),
            used: AtomicBool::new(false),
            refuse: AtomicU32::new(0),
            follows: AtomicBool::new(false),
            server: AtomicU32::new(0),
            served: AtomicBool::new(false),
        }
    }

    fn did(&self, what: &str, id: u32) {
        lock(&*self.journal).push(format!("{what} {id}"));
    }

    /// Counts one down; whether there was one.
    fn one_of(counter: &AtomicU32) -> bool {
        counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
    }

    fn set_stopped(&self, id: u32, stopped: bool) {
        if let Some(added) = lock(&self.devices).get_mut(&id) {
            added.stopped = stopped;
        }
    }
}

/// All that was wished for.
pub(super) fn granted(number: u32, wanted: NewDevice) -> Added {
    let NewDevice { queues, depth, abilities, mark, .. } = wanted;
    Added { number, queues, depth, abilities, mark, stopped: true }
}

impl Driver for FakeDriver {
    fn abilities(&self) -> Result<Abilities, Error> {
        Ok(self.abilities)
    }
    fn add(&self, wanted: NewDevice) -> Result<Added, Error> {
        let mut devices = lock(&self.devices);
        let number = devices.keys().next_back().map_or(FIRST, |last| last + 1);
        let added = granted(number, wanted);
        devices.insert(number, added);
        Ok(added)
    }
    fn default_name(&self, id: u32) -> String {
        format!("ublkb{id}")
    }
    fn node(&self, id: u32) -> PathBuf {
        format!("/dev/ublkb{id}").into()
    }
    fn set_params(&self, id: u32, geometry: &Geometry) -> Result<(), Error> {
        lock(&self.sizes).insert(id, geometry.size);
        Ok(())
    }
    fn open(&self, id: u32) -> Result<Vec<OwnedFd>, Error> {
        self.did("open", id);
        Ok(vec![File::open("/dev/null").unwrap().into()])
    }
    fn start(&self, id: u32, _: u32) -> Result<(), Error> {
        self.set_stopped(id, false);
        Ok(())
    }
    fn settle(&self, _: u32, _: &[Partition]) -> Result<Settled, Error> {
        Ok(Settled::default())
    }
    fn stop(&self, id: u32) -> Result<(), Error> {
        self.did("stop", id);
        self.set_stopped(id, true);
        Ok(())
    }
    fn stop_unused(&self, id: u32) -> Result<bool, Error> {
        let used = self.used.load(Ordering::SeqCst);
        self.did(if used { "refuse to stop" } else { "stop unused" }, id);
        if !used {
            self.set_stopped(id, true);
        }
        Ok(!used)
    }
    fn del(&self, id: u32) -> Result<(), Error> {
        self.did("delete", id);
        lock(&self.devices).remove(&id);
        Ok(())
    }
    fn info(&self, id: u32) -> Result<Option<Added>, Error> {
        Ok(lock(&self.devices).get(&id).copied())
    }
    fn numbers(&self) -> Vec<u32> {
        lock(&self.devices).keys().copied().collect()
    }
    fn server(&self, _: u32) -> Option<u32> {
        Some(self.server.load(Ordering::SeqCst)).filter(|pid| *pid > 0)
    }
    fn is_held(&self, _: u32) -> bool {
        self.served.load(Ordering::SeqCst)
    }
    fn start_recovery(&self, id: u32) -> Result<bool, Error> {
        let held = Self::one_of(&self.held);
        self.did(if held { "wait for" } else { "recover" }, id);
        Ok(!held)
    }
    fn end_recovery(&self, id: u32, pid: u32) -> Result<(), Error> {
        assert_eq!(pid, std::process::id());
        if Self::one_of(&self.refuse) {
            self.did("fail to end", id);
            return Err(Error::Worker { what: "has to fail".to_owned() });
        }
        self.did("end", id);
        Ok(())
    }
    fn quiesce(&self, id: u32, _: &dyn Fn() -> Result<(), Error>) -> Result<(), Error> {
        self.did("quiesce", id);
        Ok(())
    }
    fn watchful(&self, id: u32) {
        self.did("watch", id);
    }
    fn size(&self, id: u32) -> Option<u64> {
        lock(&self.sizes).get(&id).copied()
    }
    fn update_size(&self, id: u32, bytes: u64) -> Result<(), Error> {
        let refused = Self::one_of(&self.refuse);
        if !refused {
            lock(&self.sizes).insert(id, bytes);
        }
        self.did(&format!("{} {bytes} bytes of", if refused { "refuse" } else { "show" }), id);
        if refused { Err(Error::Worker { what: "has to fail".to_owned() }) } else { Ok(()) }
    }
    fn follows_worker(&self) -> bool {
        self.follows.load(Ordering::SeqCst)
    }
    fn set_read_only(&self, id: u32, on: bool) -> Result<(), Error> {
        self.did(if on { "freeze" } else { "thaw" }, id);
        Ok(())
    }
    fn repartition(&self, id: u32, _: &[Partition]) -> Result<(), Error> {
        self.did("partition", id);
        Ok(())
    }
}

/// What a worker does with a device that it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Serves,
    /// It dies before it is ready.
    Dies,
    /// It says no and goes on.
    Refuses,
}

/// A worker that does as the test says, and dies when the test says so.
pub(super) struct FakeWorker {
    id: ProcessId,
    journal: Journal,
    alive: AtomicBool,
    fate: Fate,
    /// How often it is asked before it has closed a device.
    pub(super) slow: AtomicU32,
    pub(super) served: Mutex<Vec<Serve>>,
    /// What becomes of the next changes; those after them are made.
    pub(super) changes: Mutex<VecDeque<Fate>>,
    on_death: Mutex<Option<OnDeath>>,
}

impl FakeWorker {
    pub(super) fn new(journal: &Journal, number: u64, fate: Fate, on_death: OnDeath) -> Arc<FakeWorker> {
        Arc::new(FakeWorker {
            id: ProcessId { pid: u32::MAX, start: number },
            journal: Arc::clone(journal),
            alive: AtomicBool::new(true),
            fate,
            slow: AtomicU32::new(0),
            served: Mutex::default(),
            changes: Mutex::default(),
            on_death: Mutex::new(Some(on_death)),
        })
    }

    /// Dies, and returns when the supervisor has done about it what it can.
    pub(super) fn die(&self) {
        self.alive.store(false, Ordering::SeqCst);
        if let Some(on_death) = lock(&self.on_death).take() {
            on_death(self.id);
        }
    }

    /// Dies without a report.
    pub(super) fn vanish(&self) {
        self.alive.store(false, Ordering::SeqCst);
    }

    fn did(&self, what: &str) {
        lock(&*self.journal).push(format!("{what} by {}", self.id.start));
    }
}

impl Worker for FakeWorker {
    fn id(&self) -> ProcessId {
        self.id
    }
    fn notes(&self) -> &[String] {
        &[]
    }
    fn alive(&self) -> bool {
        self.alive.load(Ordering::SeqCst)
    }
    fn serve(&self, serve: Serve, fds: &[BorrowedFd<'_>]) -> Result<u32, Error> {
        let kept = usize::from(serve.backing.lease)
            + usize::from(serve.backing.cgroup)
            + usize::from(serve.backing.encoded.is_some());
        assert_eq!(fds.len(), 1 + serve.backing.files.len() + kept);
        if !self.alive() || self.fate == Fate::Dies {
            self.did(&format!("die of {}", serve.id.number));
            self.vanish();
            return Err(Error::Worker { what: "died".to_owned() });
        }
        if self.fate == Fate::Refuses {
            return Err(Error::Worker { what: "has to refuse".to_owned() });
        }
        self.did(&format!("serve {}", serve.id.number));
        let first = serve.first;
        lock(&self.served).push(serve);
        Ok(first)
    }
    fn change(&self, change: Change, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        assert_eq!(fds.len(), change.files.as_ref().map_or(0, Vec::len));
        let fate = lock(&self.changes).pop_front().unwrap_or(Fate::Serves);
        let Change { id, map, read_only, files, .. } = &change;
        let rights = if *read_only { "reading" } else { "writing" };
        let whose = if files.is_some() { " of another image" } else { "" };
        let verb = if fate == Fate::Serves { "" } else { "not " };
        self.did(&format!("{verb}change {} to {} bytes{whose} for {rights}", id.number, map.len()));
        match fate {
            Fate::Serves => Ok(()),
            Fate::Dies => {
                self.vanish();
                Err(Error::Worker { what: "died".to_owned() })
            }
            Fate::Refuses => Err(Error::Worker { what: "has to refuse".to_owned() }),
        }
    }
    fn stats(&self, _: DeviceId) -> Result<Summary, Error> {
        unreachable!()
    }
    fn leave(&self, id: DeviceId) -> Result<(), Error> {
        self.did(&format!("leave {}", id.number));
        Ok(())
    }
    fn await_closed(&self, _: DeviceId, _: Duration) -> bool {
        !FakeDriver::one_of(&self.slow)
    }
    fn dismiss(&self) {
        self.did("dismissed");
        self.vanish();
    }
    fn kill(&self) {
        self.did("killed");
        self.vanish();
    }
}

/// What is done while the supervisor waits.
type Meanwhile = Box<dyn FnMut(Duration) + Send>;

/// Starts such workers, each with the next fate; all later ones have the last fate.
#[derive(Default)]
pub(super) struct FakeWorkers {
    journal: Journal,
    pub(super) fates: Mutex<VecDeque<Option<Fate>>>,
    pub(super) started: Mutex<Vec<Arc<FakeWorker>>>,
    pub(super) orphans: Mutex<Vec<Orphan>>,
    pub(super) meanwhile: Mutex<Option<Meanwhile>>,
}

impl Workers for Arc<FakeWorkers> {
    fn start(&self, cgroup: Option<BorrowedFd<'_>>, on_death: OnDeath) -> Result<Arc<dyn Worker>, Error> {
        let fate = match &mut *lock(&self.fates) {
            fates if fates.len() > 1 => fates.pop_front().flatten(),
            fates => fates.front().copied().unwrap_or(Some(Fate::Serves)),
        };
        let fate = fate.ok_or_else(|| Error::Worker { what: "must not start".to_owned() })?;
        let mut started = lock(&self.started);
        let worker = FakeWorker::new(&self.journal, started.len() as u64, fate, on_death);
        worker.did(if cgroup.is_some() { "start in a group" } else { "start" });
        started.push(Arc::clone(&worker));
        Ok(worker)
    }

    fn orphans(&self, _: &dyn Fn() -> OnDeath) -> Vec<Orphan> {
        std::mem::take(&mut lock(&self.orphans))
    }

    fn rest(&self, time: Duration) {
        if let Some(meanwhile) = &mut *lock(&self.meanwhile) {
            meanwhile(time);
        }
        if shuffled() {
            shuttle::thread::yield_now();
        }
    }
}

/// A supervisor among doubles.
pub(super) struct Stage {
    pub(super) bench: Bench,
    pub(super) journal: Journal,
    pub(super) driver: Arc<FakeDriver>,
    pub(super) workers: Arc<FakeWorkers>,
    pub(super) supervisor: Arc<Supervisor>,
}

impl Stage {
    pub(super) fn new() -> Stage {
        Stage::with(ALL)
    }

    pub(super) fn with(abilities: Abilities) -> Stage {
        Stage::waking(abilities, || {})
    }

    /// `wake` is the supervisor's.
    pub(super) fn waking(abilities: Abilities, wake: impl Fn() + Send + Sync + 'static) -> Stage {
        let bench = Bench::new();
        let journal = Journal::default();
        let driver = Arc::new(FakeDriver { abilities, ..FakeDriver::new(&journal) });
        let workers = Arc::new(FakeWorkers { journal: Arc::clone(&journal), ..FakeWorkers::default() });
        let supervisor = Supervisor::new(
            bench.store.clone(),
            Vec::new(),
            Box::new(Arc::clone(&workers)),
            Guard::default(),
            Drivers::new(&OFFERS),
            wake,
        );
        supervisor.drivers.set(Kind::Ublk, Arc::clone(&driver) as Arc<dyn Driver>);
        Stage { bench, journal, driver, workers, supervisor }
    }

    /// What was done since the last question.
    pub(super) fn done(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&*self.journal))
    }

    pub(super) fn worker(&self, number: usize) -> Arc<FakeWorker> {
        Arc::clone(&lock(&self.workers.started)[number])
    }
}

/// A place with records and an image.
pub(super) struct Bench {
    _temp: tempfile::TempDir,
    pub(super) store: Store,
    pub(super) image: PathBuf,
}

impl Bench {
    pub(super) fn new() -> Bench {
        let temp = tempfile::tempdir().unwrap();
        let runtime = Runtime::at(temp.path().join("run"), temp.path().join("links")).unwrap();
        let image = temp.path().join("image");
        fs::write(&image, [0; 8192]).unwrap();
        Bench { store: Store::open(runtime).unwrap(), _temp: temp, image }
    }

    pub(super) fn fd(&self, write: bool, flags: i32) -> OwnedFd {
        File::options().read(true).write(write).custom_flags(flags).open(&self.image).unwrap().into()
    }

    pub(super) fn request(&self, name: Option<&str>) -> Attach {
        Attach {
            below: Default::default(),
            name: name.map(str::to_owned),
            spec: Spec {
                image: self.image.clone(),
                block_size: 512,
                queues: Some(1),
                reason: "test".into(),
                ..Spec::default()
            },
            format: None,
            map: Map::contiguous(0, 0, 8192),
            map_aside: false,
            backing: Backing {
                files: vec![FileFacts { facts: facts(), direct: false, heard: false }.into()],
                ..Backing::default()
            },
            add_partitions: true,
            partitions: vec![crate::contract::messages::TableEntry {
                number: 1,
                start: 512,
                len: 512,
                label: None,
                uuid: None,
            }],
            isolate: false,
            alone: None,
            transport: Kind::Ublk,
            warnings: Vec::new(),
        }
    }

    pub(super) fn left_behind(&self) -> Vec<String> {
        let runtime = self.store.runtime();
        let dirs = [runtime.records(), runtime.links().to_owned()];
        dirs.iter()
            .flat_map(|dir| fs::read_dir(dir).into_iter().flatten().flatten())
            .map(|item| item.file_name().into_string().unwrap())
            .filter(|name| name != ".lock")
            .collect()
    }
}

/// A value with something changed in it.
pub(super) fn with<T>(mut value: T, change: impl FnOnce(&mut T)) -> T {
    change(&mut value);
    value
}

pub(super) fn facts() -> Facts {
    Facts { direct_reason: "off".into(), nowait: true, ..Facts::unasked(FileKind::Regular, 8192, true) }
}
