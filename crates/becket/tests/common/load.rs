//! A load on a device that notices each wrong byte and each error: what a program would notice, and no more.
//! Writes that were acknowledged are in its model, flushed or not; it never looks at anything but the device.

use std::{
    os::unix::fs::FileExt as _,
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use becket_testkit::wait_until;

use super::page::direct;

/// Length of the device, divided among the threads.
pub(crate) const SIZE: usize = 32 << 20;
pub(crate) const THREADS: usize = 4;
pub(crate) const BLOCK: usize = 4096;
/// The longest operation.
pub(crate) const LARGEST: usize = 64 << 10;

/// Numbers that look random, and are the same for the same seed.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        // xorshift64: any sequence that repeats late will do, and any start but 0.
        Random((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 as usize % end
    }
}

/// What the load has seen.
#[derive(Default)]
pub(crate) struct Seen {
    /// Other operations.
    pub(crate) seed: u64,
    pub(crate) stop: AtomicBool,
    pub(crate) operations: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) wrong_bytes: AtomicU64,
    /// The longest operation since it was last asked for, in microseconds.
    pub(crate) longest: AtomicU64,
    pub(crate) first: Mutex<Option<String>>,
}

impl Seen {
    pub(crate) fn went_wrong(&self, what: String) {
        self.first.lock().unwrap().get_or_insert(what);
    }

    /// Compares what was read with what must be there; what is behind that is undefined.
    pub(crate) fn compare(&self, bytes: &[u8], expected: &[u8], position: u64) {
        // As a whole first: tests are compiled without optimisation.
        if bytes.get(..expected.len()) == Some(expected) {
            return;
        }
        let differ = bytes.iter().zip(expected).filter(|(is, must)| is != must).count();
        let wrong = differ + expected.len().saturating_sub(bytes.len());
        if wrong > 0 {
            self.wrong_bytes.fetch_add(wrong as u64, Ordering::Relaxed);
            self.went_wrong(format!("{wrong} of {} bytes at {position} are wrong", bytes.len()));
        }
    }

    /// Counts an operation that began then.
    pub(crate) fn done(&self, begun: Instant) {
        let took = u64::try_from(begun.elapsed().as_micros()).unwrap();
        self.longest.fetch_max(took, Ordering::Relaxed);
        self.operations.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether each thread comes to the end of another operation.
    pub(crate) fn goes_on(&self, patience: Duration) -> bool {
        let before = self.operations.load(Ordering::Relaxed);
        wait_until(patience, || self.operations.load(Ordering::Relaxed) >= before + 2 * THREADS as u64)
    }

    /// Whether nothing was seen that must not be.
    pub(crate) fn nothing_wrong(&self) -> bool {
        self.errors.load(Ordering::Relaxed) == 0 && self.wrong_bytes.load(Ordering::Relaxed) == 0
    }
}

/// Bytes at an address that direct I/O takes.
pub(crate) struct Aligned(Vec<u8>, usize);

impl Aligned {
    pub(crate) fn new(len: usize) -> Aligned {
        let bytes = vec![0; len + BLOCK];
        let skew = bytes.as_ptr().align_offset(BLOCK);
        Aligned(bytes, skew)
    }

    pub(crate) fn slice(&mut self, len: usize) -> &mut [u8] {
        &mut self.0[self.1..self.1 + len]
    }
}

/// Bytes that are those of no other write nearby.
pub(crate) fn fill(bytes: &mut [u8], random: &mut Random) {
    let salt = random.below(256) as u8;
    bytes.chunks_mut(7).enumerate().for_each(|(i, chunk)| chunk.fill(salt.wrapping_add(i as u8)));
}

/// Where the next operation on a part of that length goes: its first byte, and how many, in whole blocks.
pub(crate) fn somewhere(room: usize, random: &mut Random) -> (usize, usize) {
    let len = (random.below(LARGEST / BLOCK) + 1) * BLOCK;
    (random.below((room - len) / BLOCK + 1) * BLOCK, len)
}

/// Runs something while all threads load the device; returns its result, and what must be on the device.
pub(crate) fn under_load<T>(device: &Path, seen: &Seen, body: impl FnOnce() -> T) -> (T, Vec<u8>) {
    thread::scope(|scope| {
        let loads: Vec<_> = (0..THREADS).map(|part| scope.spawn(move || load(device, part, seen))).collect();
        let stop = Stop(seen);
        let outcome = body();
        drop(stop);
        let models: Vec<_> = loads.into_iter().map(|load| load.join().unwrap()).collect();
        (outcome, models.concat())
    })
}

/// Writes and reads one part of the device, past the page cache, until stopped; returns what must be there.
fn load(device: &Path, part: usize, seen: &Seen) -> Vec<u8> {
    let file = direct(device);
    let room = SIZE / THREADS;
    let base = part * room;
    let mut model = vec![0u8; room];
    let mut buffer = Aligned::new(LARGEST);
    let mut random = Random::new(seen.seed + part as u64);
    while !seen.stop.load(Ordering::Relaxed) {
        let (at, len) = somewhere(room, &mut random);
        let position = (base + at) as u64;
        let (kind, bytes) = (random.below(16), buffer.slice(len));
        let begun = Instant::now();
        let outcome = match kind {
            0..8 => {
                fill(bytes, &mut random);
                // What a write that fails leaves behind is undefined; here none may fail.
                file.write_all_at(bytes, position).map(|()| model[at..at + len].copy_from_slice(bytes))
            }
            8..15 => file
                .read_exact_at(bytes, position)
                .map(|()| seen.compare(bytes, &model[at..at + len], position)),
            _ => file.sync_data(),
        };
        seen.done(begun);
        if let Err(error) = outcome {
            seen.errors.fetch_add(1, Ordering::Relaxed);
            seen.went_wrong(format!("operation {kind} of {len} bytes at {position}: {error}"));
        }
    }
    model
}

/// Ends the load, also when the test has failed.
struct Stop<'a>(&'a Seen);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}
