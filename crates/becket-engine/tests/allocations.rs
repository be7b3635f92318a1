//! The steady state allocates nothing: counted by an allocator, on the I/O thread itself.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    fs::File,
    io::Write,
    os::fd::OwnedFd,
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    time::Duration,
};

use becket_engine::{
    Answer, Data, Io, IoThreads, Memory, NewQueue, Op, Port, QueueStats, Request, Serving, Token,
};
use becket_image::filled::{FilledSource, Lent, Presence, Where};
use becket_image::{Facts, FileKind, FileSource, Grow, Map, Wanted};
use rustix::io::Errno;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting its calls on each thread.
struct Counting;

// SAFETY: every call is passed on unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.with(|calls| calls.set(calls.get() + 1));
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        CALLS.with(|calls| calls.set(calls.get() + 1));
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const WARM_UP: u64 = 1_000;
const COUNTED: u64 = 10_000;
const DEPTH: u16 = 32;

/// Keeps every tag busy with all kinds of requests and counts the allocator's calls after the warm-up.
struct BusyPort {
    descriptor: OwnedFd,
    finished: u64,
    begun: u64,
    before: u64,
    calls: Sender<u64>,
    reads_only: bool,
}

impl BusyPort {
    fn next(&mut self, io: &mut Io<'_>, tag: u16) {
        let place = u64::from(tag) * 4096;
        let (op, len, data) = match self.begun % 8 {
            _ if self.reads_only => (Op::Read, 4096, Data::Buffer),
            0 => (Op::Flush, 0, Data::None),
            1 => (Op::Discard, 4096, Data::None),
            2 => (Op::WriteZeroes { keep_allocated: true }, 4096, Data::None),
            3 | 4 => (Op::Write { durable: false }, 4096, Data::Buffer),
            _ => (Op::Read, 4096, Data::Buffer),
        };
        self.begun += 1;
        io.begin(tag, Request { op, offset: place, len, data });
    }
}

impl Port for BusyPort {
    fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    fn start(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        (0..DEPTH).for_each(|tag| self.next(io, tag));
        Ok(())
    }

    fn completed(&mut self, _: &mut Io<'_>, _: Token, _: Answer) {}

    fn finished(&mut self, io: &mut Io<'_>, tag: u16, result: Result<u64, Errno>) {
        assert!(result.is_ok());
        self.finished += 1;
        match self.finished {
            WARM_UP => self.before = CALLS.with(Cell::get),
            count if count == WARM_UP + COUNTED => {
                let calls = CALLS.with(Cell::get) - self.before;
                self.calls.send(calls).unwrap();
            }
            _ => {}
        }
        if self.finished < WARM_UP + COUNTED {
            self.next(io, tag);
        } else if self.finished == self.begun {
            io.close();
        }
    }
}

/// Cargo's own place for files of tests, on a disk; the system's where the tests run without cargo.
fn place() -> std::path::PathBuf {
    let cargos = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    if cargos.is_dir() { cargos } else { std::env::temp_dir() }
}

#[test]
fn ten_thousand_requests_call_the_allocator_not_once() {
    count(Image::Plain);
}

#[test]
fn what_is_there_of_a_file_that_is_filled_does_not() {
    count(Image::Filled);
}

#[test]
fn what_has_its_place_in_an_image_that_grows_does_not() {
    count(Image::Grows);
}

#[derive(PartialEq, Eq)]
enum Image {
    Plain,
    Grows,
    Filled,
}

/// Every unit has its place, each behind the one that follows it.
#[derive(Debug)]
struct Placed;

impl Grow for Placed {
    fn unit(&self) -> u64 {
        4096
    }
    fn placed(&mut self, tell: &mut dyn FnMut(u64, u64)) -> std::io::Result<()> {
        (0..u64::from(DEPTH)).for_each(|unit| tell(unit, (u64::from(DEPTH) - 1 - unit) * 4096));
        Ok(())
    }
    fn place(&mut self, units: &[Wanted]) -> std::io::Result<Vec<u64>> {
        panic!("{units:?} have their places")
    }
    fn has_lost(&self) -> bool {
        false
    }
    fn close(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn count(image: Image) {
    let threads = IoThreads::start(1).unwrap();
    let mut file = tempfile::tempfile_in(place()).unwrap();
    file.write_all(&vec![1; usize::from(DEPTH) * 4096]).unwrap();
    let facts = Facts {
        discard: true,
        discard_granularity: 4096,
        write_zeroes: true,
        nowait: true,
        sparse: true,
        ..Facts::unasked(FileKind::Regular, u64::from(DEPTH) * 4096, true)
    };
    let source = FileSource::of(file.into(), None, facts);
    let map = Map::contiguous(0, 0, u64::from(DEPTH) * 4096);
    let null = || OwnedFd::from(File::open("/dev/null").unwrap());
    let source = match image {
        // Each request is of a chunk of its own, and none goes the straight way.
        Image::Filled => {
            let presence = Presence::new(u64::from(DEPTH) * 4096, 4096).unwrap();
            // Every other one is in memory.
            let place = |chunk| if chunk % 2 == 0 { Where::File } else { Where::Memory };
            (0..u64::from(DEPTH)).for_each(|chunk| presence.put(chunk, place(chunk)));
            let lent = Lent { presence, table: null(), order: null(), packed: Vec::new() };
            FilledSource::new(source, lent).unwrap().into()
        }
        _ => source.into(),
    };
    let reads_only = image == Image::Filled;
    let serving = Serving::new(map, vec![source], reads_only, 1);
    let serving = match image {
        Image::Grows => serving.growing_by(Box::new(Placed), Box::new(())).unwrap(),
        _ => serving,
    };
    let (sent, calls) = channel();
    let descriptor = File::open("/dev/null").unwrap().into();
    let queue = NewQueue {
        port: Box::new(BusyPort { descriptor, finished: 0, begun: 0, before: 0, calls: sent, reads_only }),
        depth: DEPTH,
        number: 0,
        serving: Arc::new(serving),
        memory: Memory::Buffers(4096),
        batch: None,
        stats: Arc::new(QueueStats::default()),
        on_closed: Box::new(|| {}),
    };
    threads.add(0, queue).unwrap();
    let calls = calls.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(calls, 0, "allocator calls for {COUNTED} requests in the steady state");
}
