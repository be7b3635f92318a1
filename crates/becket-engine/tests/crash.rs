//! What a power cut may leave: after each event of a run, each state that the disk could be in holds what was promised.
//!
//! A recorder between the engine and its files keeps every write and sync, and the port every request's beginning and end, in
//! one order. A write is *safe* from the end of a sync that began after the write had ended, or from its own end when it
//! was durable (FUA). What is not safe may be on the disk or not, sector by sector. A write was *promised* once it was
//! acknowledged as durable, or a flush was acknowledged that was asked for after the write's acknowledgement.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod script;

use std::{
    collections::BTreeMap,
    fs::File,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex,
        mpsc::{Sender, channel},
    },
};

use becket_engine::fault::{Fate, Faults, Interceptor, Kind, Operation, Rule, Struck};
use becket_engine::{Answer, Backing, Data, Io, IoThreads, Memory, NewQueue, Op, Port, Request, Token};
use becket_image::Map;
use proptest::prelude::*;
use rustix::io::Errno;
use script::{PATIENCE, backing_of, file_of};

const SECTOR: usize = 512;
const LANES: u64 = 4;
/// Bytes of the image that one lane has to itself.
const LANE: u64 = 16 << 10;

/// What happened, in the order in which it did: all of it on one I/O thread.
#[derive(Debug, Clone, PartialEq)]
enum Event {
    /// The client asks for something, under a tag.
    Asked(u16, Op, u64, Vec<u8>),
    /// It is told what came of that.
    Told(u16, bool),
    /// A write goes to the file: whether it is durable, where, and what.
    Writes(u16, bool, u64, Vec<u8>),
    /// A sync goes to the file.
    Syncs(u16),
    /// What had gone to the file under that tag has ended: well, or not.
    Ended(u16, bool),
}

type Log = Arc<Mutex<Vec<Event>>>;

/// Writes down what goes to the file, after somebody else's faults.
#[derive(Debug)]
struct Recorder<F> {
    log: Log,
    faults: F,
}

impl<F: Interceptor> Interceptor for Recorder<F> {
    fn fate(&self, operation: &Operation<'_>) -> Fate {
        let fate = self.faults.fate(operation);
        let len = match fate {
            Fate::Pass => operation.len,
            Fate::Short(len) | Fate::Torn(len, _) => len,
            _ => return fate,
        };
        let event = match operation.op {
            Op::Write { durable } => Event::Writes(
                operation.tag,
                durable,
                operation.offset,
                operation.bytes[..len as usize].to_vec(),
            ),
            Op::Flush => Event::Syncs(operation.tag),
            _ => return fate,
        };
        self.log.lock().unwrap().push(event);
        fate
    }

    fn ended(&self, operation: &Operation<'_>, result: i32) {
        if matches!(operation.op, Op::Write { .. } | Op::Flush) {
            self.log.lock().unwrap().push(Event::Ended(operation.tag, result >= 0));
        }
    }
}

/// Carries out a list of writes and flushes under each tag.
struct Client {
    descriptor: OwnedFd,
    todo: Vec<Vec<(Op, u64, Vec<u8>)>>,
    left: usize,
    log: Log,
    ended: Sender<()>,
}

impl Client {
    fn next(&mut self, io: &mut Io<'_>, tag: u16) {
        let Some((op, offset, bytes)) = self.todo[usize::from(tag)].pop() else { return };
        io.buffer(tag)[..bytes.len()].copy_from_slice(&bytes);
        let data = if op == Op::Flush { Data::None } else { Data::Buffer };
        let len = bytes.len() as u64;
        self.log.lock().unwrap().push(Event::Asked(tag, op, offset, bytes));
        io.begin(tag, Request { op, offset, len, data });
    }
}

impl Port for Client {
    fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    fn start(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        (0..self.todo.len()).for_each(|tag| self.next(io, tag as u16));
        Ok(())
    }

    fn completed(&mut self, _: &mut Io<'_>, _: Token, _: Answer) {}

    fn finished(&mut self, io: &mut Io<'_>, tag: u16, result: Result<u64, Errno>) {
        self.log.lock().unwrap().push(Event::Told(tag, result.is_ok()));
        self.left -= 1;
        self.next(io, tag);
        if self.left == 0 {
            self.ended.send(()).unwrap();
            io.close();
        }
    }
}

/// Serves the lists by the engine, and returns what happened.
fn recorded(threads: &IoThreads, lists: &[Vec<Step>], faults: Faults, direct: bool) -> Vec<Event> {
    let log = Log::default();
    let file = file_of(&vec![0; (LANES * LANE) as usize]);
    let mut backing = backing_of(&file, direct);
    backing.facts.sparse = false;
    let recorder = Recorder { log: Arc::clone(&log), faults: faults.of_queues(1).unwrap() };
    let backing = Backing::new(Map::contiguous(0, 0, LANES * LANE), vec![backing], false, 1);
    let mut version = 0u64;
    let mut todo = Vec::new();
    for (lane, steps) in (0..LANES).zip(lists) {
        let mut list = Vec::new();
        for step in steps {
            list.push(match *step {
                Step::Flush => (Op::Flush, 0, Vec::new()),
                Step::Write { at, sectors, durable } => {
                    version += 1;
                    let at = lane * LANE + at * SECTOR as u64;
                    let bytes: Vec<u8> = version.to_le_bytes().repeat(sectors * SECTOR / 8);
                    (Op::Write { durable }, at, bytes)
                }
            });
        }
        list.reverse();
        todo.push(list);
    }
    let (ended, has_ended) = channel();
    let (closed, is_closed) = channel();
    let left = todo.iter().map(Vec::len).sum();
    let descriptor = File::open("/dev/null").unwrap().into();
    let queue = NewQueue {
        port: Box::new(Client { descriptor, todo, left, log: Arc::clone(&log), ended }),
        depth: LANES as u16,
        number: 0,
        backing: Arc::new(backing.intercepted_by(Arc::new(recorder))),
        memory: Memory::Buffers(LANE as usize),
        batch: None,
        below: None,
        merge: false,
        stats: Arc::default(),
        on_closed: Box::new(move || closed.send(()).unwrap()),
    };
    threads.add(0, queue).unwrap();
    has_ended.recv_timeout(PATIENCE).expect("every request ends");
    is_closed.recv_timeout(PATIENCE).expect("the queue ends");
    let log = log.lock().unwrap();
    log.clone()
}

/// A write on its way to the disk.
#[derive(Debug, Clone)]
struct Written {
    at: u64,
    bytes: Vec<u8>,
    ended: bool,
    safe: bool,
}

/// What is asked for; for a flush, with the sectors and versions that it promises.
struct Asking {
    op: Op,
    at: u64,
    bytes: Vec<u8>,
    promises: Vec<(u64, u64)>,
}

/// The disk, and the client's rights to what is on it.
#[derive(Default)]
struct World {
    written: Vec<Written>,
    /// By tag: the write, or the writes that a sync makes safe.
    at_file: BTreeMap<u16, (Vec<usize>, bool)>,
    /// By tag.
    asked: BTreeMap<u16, Asking>,
    /// Acknowledged: sector and version.
    acknowledged: Vec<(u64, u64)>,
    /// By sector: the oldest version that may be there.
    promised: BTreeMap<u64, u64>,
}

fn sectors(at: u64, bytes: &[u8]) -> impl Iterator<Item = (u64, u64)> {
    let version = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    (at / SECTOR as u64..(at + bytes.len() as u64) / SECTOR as u64).map(move |sector| (sector, version))
}

impl World {
    fn take(&mut self, event: &Event) {
        match event {
            Event::Asked(tag, op, at, bytes) => {
                let promises = if *op == Op::Flush { self.acknowledged.clone() } else { Vec::new() };
                self.asked.insert(*tag, Asking { op: *op, at: *at, bytes: bytes.clone(), promises });
            }
            Event::Told(tag, well) => {
                let Asking { op, at, bytes, promises } = self.asked.remove(tag).unwrap();
                let promises = match op {
                    _ if !well => return,
                    Op::Flush => promises,
                    Op::Write { durable } => {
                        self.acknowledged.extend(sectors(at, &bytes));
                        if durable { sectors(at, &bytes).collect() } else { return }
                    }
                    _ => return,
                };
                for (sector, version) in promises {
                    let oldest = self.promised.entry(sector).or_default();
                    *oldest = version.max(*oldest);
                }
            }
            Event::Writes(tag, durable, at, bytes) => {
                self.at_file.insert(*tag, (vec![self.written.len()], *durable));
                self.written.push(Written { at: *at, bytes: bytes.clone(), ended: false, safe: false });
            }
            Event::Syncs(tag) => {
                let ended = (0..self.written.len()).filter(|index| self.written[*index].ended);
                self.at_file.insert(*tag, (ended.collect(), true));
            }
            Event::Ended(tag, well) => {
                let (writes, safe) = self.at_file.remove(tag).unwrap();
                for index in writes {
                    let written = &mut self.written[index];
                    written.ended = true;
                    written.safe |= safe && *well;
                }
            }
        }
    }

    /// A state that a power cut could leave now. `keeps` says of each sector that is not safe whether it is there.
    fn state(&self, mut keeps: impl FnMut() -> bool) -> Vec<u8> {
        let mut disk = vec![0; (LANES * LANE) as usize];
        for written in &self.written {
            for (index, bytes) in written.bytes.chunks(SECTOR).enumerate() {
                if written.safe || keeps() {
                    let at = written.at as usize + index * SECTOR;
                    disk[at..at + bytes.len()].copy_from_slice(bytes);
                }
            }
        }
        disk
    }

    /// What is missing of what was promised.
    fn missing(&self, disk: &[u8]) -> Option<String> {
        self.promised.iter().find_map(|(sector, oldest)| {
            let at = *sector as usize * SECTOR;
            let version = u64::from_le_bytes(disk[at..at + 8].try_into().unwrap());
            let lost = version < *oldest;
            lost.then(|| format!("sector {sector} holds write {version}, and {oldest} was promised"))
        })
    }
}

/// Looks at the states after each event: without all that is not safe, with all of it, and some at random. Returns what was lost,
/// and how many states were looked at.
fn losses(events: &[Event], seed: u64) -> (Option<String>, usize) {
    let mut world = World::default();
    let mut random = script::Random(seed);
    let mut states = 0;
    for (number, event) in events.iter().enumerate() {
        world.take(event);
        for how in 0..4 {
            let disk = world.state(|| match how {
                0 => false,
                1 => true,
                _ => random.below(2) == 0,
            });
            states += 1;
            if let Some(lost) = world.missing(&disk) {
                return (Some(format!("after event {number}, {event:?}: {lost}")), states);
            }
        }
    }
    (None, states)
}

#[derive(Debug, Clone)]
enum Step {
    Write { at: u64, sectors: usize, durable: bool },
    Flush,
}

fn step() -> impl Strategy<Value = Step> {
    let most = LANE / SECTOR as u64;
    let write = (0..most, 1..most, prop::bool::weighted(0.2)).prop_map(move |(at, sectors, durable)| {
        Step::Write { at, sectors: sectors.min(most - at) as usize, durable }
    });
    prop_oneof![3 => write, 1 => Just(Step::Flush)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_power_cut_takes_nothing_that_was_promised(
        lists in prop::collection::vec(prop::collection::vec(step(), 1..24), LANES as usize),
        direct: bool,
        seed: u64,
        faulty: bool,
    ) {
        let threads = IoThreads::start(1).unwrap();
        let errors = |kind, errno| Rule { kind, struck: Struck::Error(errno), chance: 100_000, range: None };
        let faults = match faulty {
            // Interrupted, short, torn and failed writes, and syncs that fail.
            true => Faults {
                rules: vec![errors(Kind::All, 4), errors(Kind::Write, 5), errors(Kind::Flush, 5)],
                torn: 100_000,
                short: 200_000,
                seed,
                ..Faults::default()
            },
            false => Faults::default(),
        };
        let events = recorded(&threads, &lists, faults, direct);
        let (lost, _) = losses(&events, seed);
        prop_assert!(lost.is_none(), "{}", lost.unwrap());
    }
}

/// The checker itself: without what makes writes safe it must find what is lost.
#[test]
fn a_lie_about_safety_is_found() {
    let threads = IoThreads::start(1).unwrap();
    let write = |durable| Step::Write { at: 0, sectors: 8, durable };
    let flushed = vec![vec![write(false), Step::Flush]; LANES as usize];
    let durable = vec![vec![write(true), write(true)]; LANES as usize];
    for (lists, lie) in [(flushed, true), (durable, false)] {
        let honest = recorded(&threads, &lists, Faults::default(), true);
        assert_eq!(losses(&honest, 1).0, None);
        let mut lying = honest.clone();
        if lie {
            // Whoever says that a flush is done without a sync.
            let syncs: Vec<u16> = lying
                .iter()
                .filter_map(|event| if let Event::Syncs(tag) = event { Some(*tag) } else { None })
                .collect();
            assert!(!syncs.is_empty());
            let mut skip = Vec::new();
            lying.retain(|event| match event {
                Event::Syncs(tag) => {
                    skip.push(*tag);
                    false
                }
                Event::Ended(tag, _) if skip.contains(tag) => {
                    skip.retain(|other| other != tag);
                    false
                }
                _ => true,
            });
        } else {
            // Whoever forgets FUA on the way to the file.
            for event in &mut lying {
                if let Event::Writes(_, durable, ..) = event {
                    *durable = false;
                }
            }
        }
        assert!(losses(&lying, 1).0.is_some(), "nobody noticed");
    }
}

/// A sync that began before a write had ended says nothing of that write.
#[test]
fn an_early_sync_is_no_proof() {
    let bytes = 7u64.to_le_bytes().repeat(SECTOR / 8);
    let write = Op::Write { durable: false };
    let events = [
        Event::Asked(0, write, 0, bytes.clone()),
        Event::Writes(0, false, 0, bytes),
        Event::Syncs(1),
        Event::Ended(0, true),
        Event::Told(0, true),
        Event::Asked(1, Op::Flush, 0, Vec::new()),
        Event::Ended(1, true),
        Event::Told(1, true),
    ];
    assert!(losses(&events, 1).0.is_some_and(|lost| lost.contains("after event 7")));
}
