//! Shows what the governor makes of a real file: random reads of 4 KiB through the page cache, 64 at a time.
//! Never writes, and asks nothing of the file but that it can be read.
//!
//! `cargo run --release -p becket-engine --example governor -- FILE [SECONDS]` prints, for each quarter of a
//! second, the reads and the kernel threads of the ring that carried them out. `fio --ioengine=io_uring
//! --iodepth=64 --rw=randread --bs=4k` on the same file is the same load without a bound.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use std::{
    fs::File,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc::channel,
    },
    time::Duration,
};

use becket_engine::{
    Answer, Data, Io, IoThreads, Memory, NewQueue, Op, Port, QueueStats, Request, Serving, Token,
};
use becket_image::{DirectIo, FileSource, OpenOptions, Source};
use rustix::io::Errno;

const DEPTH: u16 = 64;
const LEN: u64 = 4096;

/// Keeps every tag busy with reads until it is stopped.
struct Reader {
    descriptor: OwnedFd,
    blocks: u64,
    random: u64,
    under_way: u16,
    done: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Reader {
    fn next(&mut self, io: &mut Io<'_>, tag: u16) {
        self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let offset = (self.random >> 20) % self.blocks * LEN;
        io.begin(tag, Request { op: Op::Read, offset, len: LEN, data: Data::Buffer });
    }
}

impl Port for Reader {
    fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    fn start(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        (0..DEPTH).for_each(|tag| self.next(io, tag));
        self.under_way = DEPTH;
        Ok(())
    }

    fn completed(&mut self, _: &mut Io<'_>, _: Token, _: Answer) {}

    fn finished(&mut self, io: &mut Io<'_>, tag: u16, result: Result<u64, Errno>) {
        result.expect("the file can be read");
        self.done.store(self.done.load(Relaxed) + 1, Relaxed);
        if !self.stop.load(Relaxed) {
            return self.next(io, tag);
        }
        self.under_way -= 1;
        if self.under_way == 0 {
            io.close();
        }
    }
}

/// Kernel threads that io_uring has given this process.
fn workers() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    tasks
        .filter(|task| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.starts_with("iou-wrk"))
        })
        .count()
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().expect("usage: governor FILE [SECONDS]");
    let seconds: u64 = arguments.next().map_or(5, |text| text.parse().expect("a number of seconds"));
    let options =
        OpenOptions { read_only: true, direct_io: DirectIo::Off, shared: true, ..OpenOptions::default() };
    let opened = becket_image::open(path.as_ref(), &options).unwrap();
    let [Source::File(FileSource { facts, .. }), ..] = opened.sources.as_slice() else { return };
    println!("nowait {}, uncached {}, {} bytes", facts.nowait, facts.uncached, facts.size);
    let (done, stop) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
    let blocks = opened.map.len() / LEN;
    let threads = IoThreads::start(1).unwrap();
    let (closed, is_closed) = channel();
    let reader = Reader {
        descriptor: File::open("/dev/null").unwrap().into(),
        blocks,
        random: 1,
        under_way: 0,
        done: Arc::clone(&done),
        stop: Arc::clone(&stop),
    };
    let queue = NewQueue {
        port: Box::new(reader),
        depth: DEPTH,
        number: 0,
        serving: Arc::new(Serving::new(opened.map, opened.sources, true, 1)),
        memory: Memory::Buffers(LEN as usize),
        batch: None,
        stats: Arc::new(QueueStats::default()),
        on_closed: Box::new(move || closed.send(()).unwrap()),
    };
    threads.add(0, queue).unwrap();
    let mut before = 0;
    for quarter in 1..=4 * seconds {
        std::thread::sleep(Duration::from_millis(250));
        let now = done.load(Relaxed);
        println!("{:5} ms {:8} reads/s {:3} threads", 250 * quarter, 4 * (now - before), workers());
        before = now;
    }
    stop.store(true, Relaxed);
    is_closed.recv_timeout(Duration::from_secs(60)).expect("the queue ends");
}
