//! Runs whose every step is recorded: what the client asks, what it is answered, and what goes to the file.
//! It never judges the result.

use std::{
    fs::File,
    io,
    os::{fd::OwnedFd, unix::fs::FileExt as _},
    sync::{
        Arc, Mutex,
        mpsc::{Sender, channel},
    },
};

use becket_engine::fault::{Affected, Fate, Faults, Interceptor, Operation, Rule, Struck};
use becket_engine::{Answer, Data, Io, IoThreads, Memory, NewQueue, Op, Port, Request, Serving, Token};
use becket_image::{ReadAt, Storage};
use proptest::prelude::*;
use rustix::io::Errno;

use crate::script::PATIENCE;
use crate::{LANE, LANES, SECTOR};

/// What happened, in the order in which it did. What is not a write is named by its operation: it writes
/// zeroes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Event {
    /// The client asks for something, under a tag; a place in its lanes, and the bytes.
    Asked(u16, Op, u64, Vec<u8>),
    /// The result that it gets.
    Answered(u16, bool),
    /// A write goes to the file: who writes, whether it is durable, where, and what.
    Writes(u16, bool, u64, Vec<u8>),
    /// The file gets another length.
    Lengthens(u16, u64),
    /// A sync goes to the file.
    Syncs(u16),
    /// What had gone to the file from there has ended: well, or not.
    Ended(u16, bool),
}

impl Event {
    /// Without the bytes.
    pub(crate) fn brief(&self) -> String {
        match self {
            Event::Asked(tag, op, at, bytes) => {
                format!("{tag} asks for {op:?} at {at}, {} bytes", bytes.len())
            }
            Event::Writes(who, durable, at, bytes) => {
                format!("{who} writes at {at}, {} bytes, durable: {durable}", bytes.len())
            }
            event => format!("{event:?}"),
        }
    }
}

/// All that has happened, with what the kernel has still to tell.
#[derive(Debug, Default)]
pub(crate) struct Record {
    pub(crate) events: Vec<Event>,
    /// Syncs of the engine that are under way.
    syncing: usize,
    /// A sync of the grower has failed: the engine's next sync must fail too, because it has opened the file
    /// itself.
    unreported: bool,
}

pub(crate) type Log = Arc<Mutex<Record>>;

/// Writes down what the engine does to the file, after the injected faults.
#[derive(Debug)]
struct Recorder<F> {
    log: Log,
    faults: F,
}

impl<F: Interceptor> Interceptor for Recorder<F> {
    fn fate(&self, operation: &Operation<'_>) -> Fate {
        let mut record = self.log.lock().unwrap();
        if operation.op == Op::Flush && std::mem::take(&mut record.unreported) {
            return Fate::Fail(Errno::IO);
        }
        let fate = self.faults.fate(operation);
        let len = match fate {
            Fate::Pass => operation.len,
            Fate::Short(len) | Fate::Torn(len, _) => len,
            _ => return fate,
        } as usize;
        let event = match operation.op {
            Op::Write { durable } => {
                Event::Writes(operation.tag, durable, operation.offset, operation.bytes[..len].to_vec())
            }
            // Of what has no bytes nothing is done in part.
            Op::WriteZeroes { .. } => {
                Event::Writes(operation.tag, false, operation.offset, vec![0; operation.len as usize])
            }
            Op::Flush => Event::Syncs(operation.tag),
            _ => return fate,
        };
        record.syncing += usize::from(operation.op == Op::Flush);
        record.events.push(event);
        fate
    }

    fn ended(&self, operation: &Operation<'_>, result: i32) {
        if matches!(operation.op, Op::Write { .. } | Op::WriteZeroes { .. } | Op::Flush) {
            let mut record = self.log.lock().unwrap();
            record.syncing -= usize::from(operation.op == Op::Flush);
            record.events.push(Event::Ended(operation.tag, result >= 0));
        }
    }
}

/// The grower, which allocates room in the file, writes under this number.
pub(crate) const GROWER: u16 = u16::MAX;

/// Records what the grower does to a file.
#[derive(Debug)]
pub(crate) struct Watched {
    pub(crate) log: Log,
    pub(crate) file: File,
    /// How often in a million operations one fails without having been begun.
    pub(crate) failing: u64,
    pub(crate) random: Mutex<crate::script::Random>,
}

impl Watched {
    fn recorded(&self, event: Event, act: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let fails = self.random.lock().unwrap().below(1_000_000) < self.failing;
        let mut record = self.log.lock().unwrap();
        let lost = match event {
            // The kernel has tried, and forgets what it could not write. (A concurrent sync would fail as
            // well.)
            Event::Syncs(_) if fails && record.syncing == 0 => {
                record.unreported = true;
                true
            }
            Event::Syncs(_) => false,
            _ if fails => return Err(Errno::NOSPC.into()),
            _ => false,
        };
        record.events.push(event);
        drop(record);
        let result = if lost { Err(Errno::IO.into()) } else { act() };
        self.log.lock().unwrap().events.push(Event::Ended(GROWER, result.is_ok()));
        result
    }
}

impl ReadAt for Watched {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }
}

impl Storage for Watched {
    fn size(&self) -> io::Result<u64> {
        Storage::size(&self.file)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.recorded(Event::Lengthens(GROWER, len), || self.file.set_len(len))
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let event = Event::Writes(GROWER, false, offset, bytes.to_vec());
        self.recorded(event, || self.file.write_all_at(bytes, offset))
    }

    fn sync(&self) -> io::Result<()> {
        // What a sync is worth is for the record to say; this disk need not hear of it.
        self.recorded(Event::Syncs(GROWER), || Ok(()))
    }
}

/// What a client does, one after another.
pub(crate) type List = Vec<(Op, u64, Vec<u8>)>;

/// Carries out a list under each tag.
struct Client {
    descriptor: OwnedFd,
    todo: Vec<List>,
    /// Where the lanes begin on the device.
    base: u64,
    left: usize,
    log: Log,
    ended: Sender<()>,
}

impl Client {
    fn next(&mut self, io: &mut Io<'_>, tag: u16) {
        let Some((op, offset, bytes)) = self.todo[usize::from(tag)].pop() else { return };
        let data = if matches!(op, Op::Write { .. }) { Data::Buffer } else { Data::None };
        if data == Data::Buffer {
            io.buffer(tag)[..bytes.len()].copy_from_slice(&bytes);
        }
        let len = bytes.len() as u64;
        self.log.lock().unwrap().events.push(Event::Asked(tag, op, offset, bytes));
        io.begin(
            tag,
            Request { op, offset: if op == Op::Flush { 0 } else { self.base + offset }, len, data },
        );
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
        self.log.lock().unwrap().events.push(Event::Answered(tag, result.is_ok()));
        self.left -= 1;
        self.next(io, tag);
        if self.left == 0 {
            self.ended.send(()).unwrap();
            io.close();
        }
    }
}

/// Serves the lists by the engine over `backing`, on which the lanes begin at `base`. What happens is then in
/// `log`.
pub(crate) fn serve(serving: Serving, base: u64, lists: Vec<List>, faults: Faults, log: &Log) {
    let threads = IoThreads::start(1).unwrap();
    let recorder = Recorder { log: Arc::clone(log), faults: faults.of_queues(1).unwrap() };
    let left = lists.iter().map(Vec::len).sum();
    let todo = lists.into_iter().map(|list| list.into_iter().rev().collect()).collect();
    let (ended, has_ended) = channel();
    let (closed, is_closed) = channel();
    let descriptor = File::open("/dev/null").unwrap().into();
    let queue = NewQueue {
        port: Box::new(Client { descriptor, todo, base, left, log: Arc::clone(log), ended }),
        depth: LANES as u16,
        number: 0,
        serving: Arc::new(serving.intercepted_by(Arc::new(recorder))),
        memory: Memory::Buffers(LANE as usize),
        batch: None,
        stats: Arc::default(),
        on_closed: Box::new(move || closed.send(()).unwrap()),
    };
    threads.add(0, queue).unwrap();
    has_ended.recv_timeout(PATIENCE).expect("every request ends");
    is_closed.recv_timeout(PATIENCE).expect("the queue ends");
}

/// What a lane is to do; places are sectors of the lane.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Write { at: u64, sectors: usize, durable: bool },
    Zero { at: u64, sectors: usize },
    Flush,
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let most = LANE / SECTOR as u64;
    let range = move || (0..most, 1..most).prop_map(move |(at, len)| (at, len.min(most - at) as usize));
    let write = (range(), prop::bool::weighted(0.2)).prop_map(|((at, sectors), durable)| Step::Write {
        at,
        sectors,
        durable,
    });
    let zero = range().prop_map(|(at, sectors)| Step::Zero { at, sectors });
    prop_oneof![6 => write, 1 => zero, 2 => Just(Step::Flush)]
}

/// What lanes are to do.
pub(crate) fn steps() -> impl Strategy<Value = Vec<Vec<Step>>> {
    prop::collection::vec(prop::collection::vec(step(), 1..24), LANES as usize)
}

/// The lists for these steps. Each write has a number of its own, from `version` on, in each of its words.
pub(crate) fn lists(lanes: &[Vec<Step>], mut version: u64) -> Vec<List> {
    let mut list = |(lane, steps): (u64, &Vec<Step>)| {
        let place = |at: u64| lane * LANE + at * SECTOR as u64;
        let each = steps.iter().map(|step| match *step {
            Step::Flush => (Op::Flush, 0, Vec::new()),
            Step::Zero { at, sectors } => {
                (Op::WriteZeroes { keep_allocated: false }, place(at), vec![0; sectors * SECTOR])
            }
            Step::Write { at, sectors, durable } => {
                version += 1;
                (Op::Write { durable }, place(at), version.to_le_bytes().repeat(sectors * SECTOR / 8))
            }
        });
        each.collect()
    };
    (0..LANES).zip(lanes).map(&mut list).collect()
}

/// Interrupted, short, torn and failed writes, and syncs that fail.
pub(crate) fn all_faults(seed: u64) -> Faults {
    let errors = |kind, errno| Rule { kind, struck: Struck::Error(errno), chance: 100_000, range: None };
    Faults {
        rules: vec![errors(Affected::All, 4), errors(Affected::Write, 5), errors(Affected::Flush, 5)],
        torn: 100_000,
        short: 200_000,
        seed,
        ..Faults::default()
    }
}

/// A run without those syncs that this is true of.
pub(crate) fn without_syncs(events: &[Event], mut which: impl FnMut(u16) -> bool) -> Vec<Event> {
    let mut skip = Vec::new();
    let mut lying = events.to_vec();
    lying.retain(|event| match event {
        Event::Syncs(who) if which(*who) => {
            skip.push(*who);
            false
        }
        Event::Ended(who, _) if skip.contains(who) => {
            skip.retain(|other| other != who);
            false
        }
        _ => true,
    });
    assert!(lying.len() < events.len(), "there was none");
    lying
}
