//! A load on a device that notices each wrong byte and each error: what a program would notice, and no more.
//! Writes that were acknowledged are in its model, flushed or not; it never looks at anything but the device.

use std::{
    fs::OpenOptions,
    os::unix::fs::{FileExt as _, OpenOptionsExt as _},
    path::Path,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

/// Length of the device, divided among the threads.
pub(crate) const SIZE: usize = 32 << 20;
pub(crate) const THREADS: usize = 4;
const BLOCK: usize = 4096;

/// What the load has seen.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) stop: AtomicBool,
    pub(crate) operations: AtomicU64,
    pub(crate) errors: AtomicU64,
    pub(crate) wrong_bytes: AtomicU64,
    /// The longest operation since it was last asked for, in microseconds.
    pub(crate) longest: AtomicU64,
    pub(crate) first: Mutex<Option<String>>,
}

impl Seen {
    fn went_wrong(&self, what: String) {
        self.first.lock().unwrap().get_or_insert(what);
    }
}

/// Bytes at an address that direct I/O takes.
struct Aligned(Vec<u8>, usize);

impl Aligned {
    fn new(len: usize) -> Aligned {
        let bytes = vec![0; len + BLOCK];
        let skew = bytes.as_ptr().align_offset(BLOCK);
        Aligned(bytes, skew)
    }

    fn slice(&mut self, len: usize) -> &mut [u8] {
        &mut self.0[self.1..self.1 + len]
    }
}

/// Writes and reads one part of the device, past the page cache, until told to stop; returns what must be there.
pub(crate) fn load(device: &Path, part: usize, seen: &Seen) -> Vec<u8> {
    const LARGEST: usize = 64 << 10;
    let flags = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).unwrap();
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(device).unwrap();
    let room = SIZE / THREADS;
    let base = part * room;
    let mut model = vec![0u8; room];
    let mut buffer = Aligned::new(LARGEST);
    let mut state = part as u64 + 1;
    let mut next = move || {
        // xorshift64: any sequence that repeats late will do.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize
    };
    while !seen.stop.load(Ordering::Relaxed) {
        let len = (next() % (LARGEST / BLOCK) + 1) * BLOCK;
        let at = next() % ((room - len) / BLOCK + 1) * BLOCK;
        let position = (base + at) as u64;
        let (kind, bytes) = (next() % 16, buffer.slice(len));
        let begun = Instant::now();
        let outcome = match kind {
            0..8 => {
                let salt = next() as u8;
                bytes.iter_mut().enumerate().for_each(|(i, byte)| *byte = salt.wrapping_add((i / 7) as u8));
                // What a write that fails leaves behind is nobody's promise; here none may fail.
                file.write_all_at(bytes, position).map(|()| model[at..at + len].copy_from_slice(bytes))
            }
            8..15 => file.read_exact_at(bytes, position).map(|()| {
                let wrong = bytes.iter().zip(&model[at..at + len]).filter(|(is, must)| is != must).count();
                if wrong > 0 {
                    seen.wrong_bytes.fetch_add(wrong as u64, Ordering::Relaxed);
                    seen.went_wrong(format!("{wrong} of {len} bytes at {position} are wrong"));
                }
            }),
            _ => file.sync_data(),
        };
        let took = u64::try_from(begun.elapsed().as_micros()).unwrap();
        seen.longest.fetch_max(took, Ordering::Relaxed);
        seen.operations.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = outcome {
            seen.errors.fetch_add(1, Ordering::Relaxed);
            seen.went_wrong(format!("operation {kind} of {len} bytes at {position}: {error}"));
        }
    }
    model
}

/// Ends the load, also when the test has failed.
pub(crate) struct Stop<'a>(pub(crate) &'a Seen);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}
