//! Drivers that make a request available again as soon as it has ended: the ring is never empty.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};

use becket_engine::Area;

use super::*;

const COUNT: u16 = 1024;
/// How long others may have to wait for the thread that serves such a ring.
const SOON: Duration = Duration::from_secs(10);

const NEXT: u64 = 1;
const WRITE: u64 = 2;
const TABLE: u64 = 4;

/// The tables of a driver's first ring, and where its request is described.
struct Flood {
    descriptors: Area,
    available: Area,
    used: Area,
    kick: OwnedFd,
    packed: bool,
    table: (u64, u32),
}

impl Flood {
    /// With a request of so many ranges that the device needs longer for it than the driver for the next.
    fn new(driver: &Driver, op: u32) -> Flood {
        let packed = driver.shape.features & PACKED != 0;
        let memory = driver.memory();
        let area = |at: u64, len: usize| memory.area(BASE + at, len, 8, true).unwrap();
        let available = 16 * u64::from(COUNT);
        let used = available + (6 + 2 * u64::from(COUNT)).next_multiple_of(2048);
        let [table, header, data, status] = [0, 4096, 8192, 12288].map(|at| driver.queues[0].buffer(0) + at);
        // Where a request that moves bytes is refused: beyond the end.
        let sector = SIZE as u64 / 512;
        let bytes = [&op.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        assert!(memory.write(header, &bytes));
        let ranges = (0..16).map(|at| (header + at, 1, 0));
        let ranges = ranges.chain((0..100).map(|_| (data, 512, WRITE)));
        let ranges: Vec<_> = ranges.chain([(status, 1, WRITE)]).collect();
        for (index, (address, len, flags)) in (0u64..).zip(&ranges) {
            let rest = match packed {
                true => len | flags << 48,
                false if index + 1 == ranges.len() as u64 => len | flags << 32,
                false => len | (flags | NEXT) << 32 | (index + 1) << 48,
            };
            assert!(queue_write(driver, table + 16 * index, *address, rest));
        }
        Flood {
            descriptors: area(0, 16 * usize::from(COUNT)),
            available: area(available, 6 + 2 * usize::from(COUNT)),
            used: area(used, 6 + 8 * usize::from(COUNT)),
            kick: driver.queues[0].kick.try_clone().unwrap(),
            packed,
            table: (table, 16 * ranges.len() as u32),
        }
    }

    /// Makes the request of a number available, in the place of the one that came a lap before it.
    fn offer(&self, number: u64) {
        let index = (number % u64::from(COUNT)) as usize;
        let (address, len) = (self.table.0, u64::from(self.table.1));
        self.descriptors.set_u64(16 * index, address, Relaxed);
        if self.packed {
            let turn = if (number / u64::from(COUNT)).is_multiple_of(2) { 1 << 7 } else { 1 << 15 };
            self.descriptors.set_u64(16 * index + 8, len | (TABLE | turn) << 48, Release);
        } else {
            self.descriptors.set_u64(16 * index + 8, len | TABLE << 32, Relaxed);
            self.used.set_u32(4 + 8 * index, u32::MAX, Relaxed);
            self.available.set_u16(4 + 2 * index, index as u16, Relaxed);
            self.available.set_u16(2, (number + 1) as u16, Release);
        }
        if number % 256 == 255 {
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// Whether the request of a number has ended. Of a split ring that is seen before it is published.
    fn has_ended(&self, number: u64) -> bool {
        let index = (number % u64::from(COUNT)) as usize;
        if !self.packed {
            return self.used.u32(4 + 8 * index, Acquire) != u32::MAX;
        }
        let used = if (number / u64::from(COUNT)).is_multiple_of(2) { 1 << 7 | 1 << 15 } else { 0 };
        self.descriptors.u16(16 * index + 14, Acquire) & (1 << 7 | 1 << 15) == used
    }

    /// Until it is stopped, or the ring is; counts the requests.
    fn run(&self, stop: &AtomicBool, ended: &AtomicU64) {
        for number in 0.. {
            while number >= u64::from(COUNT) && !self.has_ended(number - u64::from(COUNT)) {
                if stop.load(Relaxed) {
                    return;
                }
                std::hint::spin_loop();
            }
            if stop.load(Relaxed) {
                return;
            }
            self.offer(number);
            ended.store(number.saturating_sub(COUNT.into()), Relaxed);
        }
    }
}

/// Has a ring flooded, and then the thread that serves it do something else.
fn flood(op: u32, layout: u64) {
    let bench = Bench::new(4, DirectIo::Off);
    let features = INDIRECT | EVENT_IDX | layout;
    let shape = Shape { queues: 4, count: COUNT, depth: 4, buffer: 64 << 10, features };
    let mut driver = bench.driver(shape);
    let flood = Flood::new(&driver, op);
    let (stop, ended) = &(AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(move || flood.run(stop, ended));
        let began = std::time::Instant::now();
        while ended.load(Relaxed) < 10_000 && began.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Other rings, of which one is served by the same thread.
        let mut others = Vec::new();
        for queue in &mut driver.queues[1..] {
            queue.submit(OUT, 4096, 4096, &[], &[1; 4096]).unwrap();
            queue.announce();
            others.push(queue.next_ended(SOON).map(|ended| ended.status).ok());
        }
        let before = ended.load(Relaxed);
        let (sender, stopped) = channel();
        let front = &driver.front;
        scope.spawn(move || sender.send(front.stop(0)));
        let is_stopped = stopped.recv_timeout(SOON).is_ok_and(|answer| answer.is_ok());
        stop.store(true, Relaxed);
        assert!(before >= 10_000, "only {before} requests have ended");
        let wanted = (vec![Some(0); 3], true);
        assert_eq!((others, is_stopped), wanted, "other rings, and the end of this one, after {before}");
    });
    assert_eq!(one(&mut bench_again(&bench, driver), IN, 4096, 4096, &[]), (0, vec![1; 4096]));
}

/// The next driver, once the one before it has gone.
fn bench_again(bench: &Bench, driver: Driver) -> Driver {
    drop(driver);
    bench.gone.recv_timeout(PATIENCE).unwrap();
    bench.driver(SHAPE)
}

#[test]
fn a_packed_ring_that_is_never_empty_keeps_nobody_waiting() {
    flood(OP_ID, PACKED);
}

#[test]
fn a_split_ring_that_is_never_empty_keeps_nobody_waiting() {
    flood(OP_ID, 0);
}

#[test]
fn requests_that_are_refused_at_once_keep_nobody_waiting() {
    flood(IN, PACKED);
    flood(IN, 0);
}
