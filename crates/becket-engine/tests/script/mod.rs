//! What tests of the engine share: a port that plays the transport's part by a script, and files for it to
//! work on.
//! It never judges an outcome: that is the test's.
#![allow(dead_code, reason = "every test file uses its own part")]

use std::{
    fs::File,
    io::{Seek, Write},
    os::fd::OwnedFd,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    time::Duration,
};

use becket_engine::{
    Answer, Data, Io, IoThreads, Memory, NewQueue, Op, Port, QueueId, QueueStats, Request, Serving, Token,
};
use becket_image::{Alignment, Facts, FileKind, FileSource};
use rustix::io::Errno;

/// What the port is to do under a tag, with the bytes of a write.
pub(crate) type Step = (Request, Vec<u8>);
/// What came of it, with the bytes of a read.
pub(crate) type Outcome = (u16, Result<u64, Errno>, Vec<u8>);

/// Carries out a script for each tag, one step after another, and reports each outcome.
struct ScriptPort {
    descriptor: OwnedFd,
    scripts: Vec<Vec<Step>>,
    current: Vec<Option<Step>>,
    outcomes: Sender<Outcome>,
}

impl ScriptPort {
    fn next(&mut self, io: &mut Io<'_>, tag: u16) {
        let lane = usize::from(tag);
        self.current[lane] = self.scripts[lane].pop();
        match &self.current[lane] {
            Some((request, bytes)) => {
                io.buffer(tag)[..bytes.len()].copy_from_slice(bytes);
                io.begin(tag, *request);
            }
            None if self.current.iter().all(Option::is_none) => io.close(),
            None => {}
        }
    }
}

impl Port for ScriptPort {
    fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    fn start(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        for tag in 0..self.scripts.len() {
            self.next(io, tag as u16);
        }
        Ok(())
    }

    fn completed(&mut self, _: &mut Io<'_>, _: Token, _: Answer) {}

    fn finished(&mut self, io: &mut Io<'_>, tag: u16, result: Result<u64, Errno>) {
        let request = self.current[usize::from(tag)].as_ref().unwrap().0;
        let read = request.op == Op::Read && result.is_ok();
        let bytes = if read { io.buffer(tag)[..request.len as usize].to_vec() } else { Vec::new() };
        self.outcomes.send((tag, result, bytes)).unwrap();
        self.next(io, tag);
    }
}

pub(crate) const BUFFER: usize = 256 << 10;
/// Longer than anything here takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn facts(direct: Option<u32>) -> Facts {
    Facts {
        direct: direct.map(|offset| Alignment { memory: 512, offset }),
        physical_block_size: 4096,
        discard: true,
        discard_granularity: 4096,
        write_zeroes: true,
        nowait: true,
        sparse: true,
        ..Facts::unasked(FileKind::Regular, 0, true)
    }
}

pub(crate) fn source_of(file: &File, direct: bool) -> FileSource {
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(file));
    let direct = direct.then(|| {
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::DIRECT | rustix::fs::OFlags::CLOEXEC;
        rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).unwrap()
    });
    let facts = facts(direct.as_ref().map(|_| 4096));
    FileSource::of(file.try_clone().unwrap().into(), direct, facts)
}

/// Cargo's own place for files of tests, on a disk; the system's where the tests run without cargo.
pub(crate) fn place() -> std::path::PathBuf {
    let cargos = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    if cargos.is_dir() { cargos } else { std::env::temp_dir() }
}

/// A file on a file system that can do direct I/O, if the temporary directory has one.
pub(crate) fn file_of(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile_in(place()).unwrap();
    file.write_all(bytes).unwrap();
    file.rewind().unwrap();
    file
}

/// Runs scripts (each in order) and returns the outcomes in the order in which they came.
pub(crate) fn run(
    threads: &IoThreads,
    thread: usize,
    serving: &Arc<Serving>,
    scripts: Vec<Vec<Step>>,
) -> Vec<Outcome> {
    run_counted(threads, thread, serving, scripts, &Arc::default())
}

/// The same, counting into `stats`.
pub(crate) fn run_counted(
    threads: &IoThreads,
    thread: usize,
    serving: &Arc<Serving>,
    scripts: Vec<Vec<Step>>,
    stats: &Arc<QueueStats>,
) -> Vec<Outcome> {
    let expected: usize = scripts.iter().map(Vec::len).sum();
    let (_, seen, is_closed) = begin(threads, thread, serving, scripts, stats);
    is_closed.recv_timeout(Duration::from_secs(60)).expect("the queue ends when its script does");
    let outcomes: Vec<Outcome> = seen.iter().collect();
    assert_eq!(outcomes.len(), expected, "every request finishes exactly once");
    outcomes
}

/// Begins to run scripts; outcomes come as they happen, then word that the queue has ended.
pub(crate) fn begin(
    threads: &IoThreads,
    thread: usize,
    serving: &Arc<Serving>,
    scripts: Vec<Vec<Step>>,
    stats: &Arc<QueueStats>,
) -> (QueueId, Receiver<Outcome>, Receiver<()>) {
    let (outcomes, seen): (_, Receiver<Outcome>) = channel();
    let (closed, is_closed) = channel();
    let depth = scripts.len() as u16;
    let scripts: Vec<Vec<Step>> =
        scripts.into_iter().map(|steps| steps.into_iter().rev().collect()).collect();
    let current = vec![None; scripts.len()];
    let descriptor = File::open("/dev/null").unwrap().into();
    let queue = NewQueue {
        port: Box::new(ScriptPort { descriptor, scripts, current, outcomes }),
        depth,
        number: 0,
        serving: Arc::clone(serving),
        memory: Memory::Buffers(BUFFER),
        batch: None,
        stats: Arc::clone(stats),
        on_closed: Box::new(move || closed.send(()).unwrap()),
    };
    let id = threads.add(thread, queue).unwrap();
    (id, seen, is_closed)
}

pub(crate) fn step(op: Op, offset: u64, len: u64) -> Step {
    let data = if matches!(op, Op::Read | Op::Write { .. }) { Data::Buffer } else { Data::None };
    (Request { op, offset, len, data }, Vec::new())
}

pub(crate) fn write(offset: u64, bytes: &[u8], durable: bool) -> Step {
    let (request, _) = step(Op::Write { durable }, offset, bytes.len() as u64);
    (request, bytes.to_vec())
}

/// A small generator that repeats from its seed.
#[derive(Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % end
    }
}
