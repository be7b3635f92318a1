//! A load on a device under faults, which knows for each request whether it has to fail, and with what.
//! It never takes an error for granted: a missing one that is due is as wrong as one that was not ordered.

use std::{io, os::unix::fs::FileExt as _, sync::atomic::Ordering, time::Instant};

use becket_testkit::image;

use super::Soak;
use crate::common::load::{Aligned, BLOCK, LARGEST, Random, fill, somewhere};
use crate::common::page::direct;

const NAME: &str = "faulty";
const SIZE: usize = 16 << 20;
/// Behind it all may fail, by chance; before it nothing does but what is said here.
const CHANCY: usize = 8 << 20;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const FAULTS: &str = "error=read:EIO@1M+4K,error=write:ENOSPC@3M+64K,error=all:EIO@5M+8K,\
    error=read:EIO:0.02@8M+8M,error=write:EIO:0.02@8M+8M,delay=all:3ms:0.02,short=0.2";

/// Ranges that are bad for reads, for writes, with which error.
const BAD: [(usize, usize, bool, bool, i32); 3] = [
    (1 << 20, 4 << 10, true, false, EIO),
    (3 << 20, 64 << 10, false, true, ENOSPC),
    (5 << 20, 8 << 10, true, true, EIO),
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Due {
    Success,
    Error(i32),
    Either(i32),
}

/// What a read or write has to come to.
fn due(at: usize, len: usize, write: bool) -> Due {
    let touches = |start: usize, end: usize| at < end && start < at + len;
    let bad = |(start, length, reads, writes, errno): &(usize, usize, bool, bool, i32)| {
        (if write { *writes } else { *reads } && touches(*start, start + length)).then_some(*errno)
    };
    match BAD.iter().find_map(bad) {
        Some(errno) => Due::Error(errno),
        None if touches(CHANCY, SIZE) => Due::Either(EIO),
        None => Due::Success,
    }
}

/// What must be on the device; unknown for a block of a failed write.
struct Model {
    bytes: Vec<u8>,
    known: Vec<bool>,
}

impl Model {
    fn blocks(at: usize, len: usize) -> std::ops::Range<usize> {
        at / BLOCK..(at + len) / BLOCK
    }

    fn compare(&self, soak: &Soak<'_>, at: usize, bytes: &[u8]) {
        for block in Self::blocks(at, bytes.len()).filter(|block| self.known[*block]) {
            let (here, there) = (block * BLOCK - at, block * BLOCK);
            soak.faulty.compare(&bytes[here..here + BLOCK], &self.bytes[there..there + BLOCK], there as u64);
        }
    }
}

pub(super) fn load(soak: &Soak<'_>) {
    let path = soak.place.path(NAME);
    let bytes = image::random_bytes(SIZE, soak.seed);
    std::fs::write(&path, &bytes).unwrap();
    let faults = format!("{FAULTS},seed={}", soak.seed);
    soak.attach(&["--via", soak.via, "--fault", &faults, NAME], NAME);
    let file = direct(&soak.place.links().join(NAME));
    let mut model = Model { bytes, known: vec![true; SIZE / BLOCK] };
    let mut random = Random::new(soak.seed + 1000);
    let mut buffer = Aligned::new(LARGEST);
    while !soak.stopped() {
        let (at, len) = somewhere(SIZE, &mut random);
        let (kind, buffer) = (random.below(16), buffer.slice(len));
        let begun = Instant::now();
        let (came, due) = match kind {
            0..8 => {
                fill(buffer, &mut random);
                let came = file.write_all_at(buffer, at as u64);
                model.bytes[at..at + len].copy_from_slice(buffer);
                model.known[Model::blocks(at, len)].fill(came.is_ok());
                (came, due(at, len, true))
            }
            8..15 => {
                let came = file.read_exact_at(buffer, at as u64);
                if came.is_ok() {
                    model.compare(soak, at, buffer);
                }
                (came, due(at, len, false))
            }
            _ => (file.sync_data(), Due::Success),
        };
        soak.faulty.done(begun);
        judge(soak, &came, due, &format!("operation {kind} of {len} bytes at {at}"));
    }
    drop(file);
    soak.detach(NAME);
    model.compare(soak, 0, &std::fs::read(path).unwrap());
}

fn judge(soak: &Soak<'_>, came: &io::Result<()>, due: Due, what: &str) {
    let came = came.as_ref().map_err(|error| error.raw_os_error().unwrap_or(0));
    match (came, due) {
        (Ok(()), Due::Success | Due::Either(_)) => {}
        (Err(errno), Due::Error(wanted) | Due::Either(wanted)) if errno == wanted => {
            soak.count("errors on purpose");
        }
        _ => {
            soak.faulty.errors.fetch_add(1, Ordering::Relaxed);
            soak.faulty.went_wrong(format!("{what}: {came:?}, but {due:?} is due"));
        }
    }
}

#[test]
fn what_is_due_is_what_is_ordered() {
    assert_eq!(due((1 << 20) - BLOCK, BLOCK, false), Due::Success);
    assert_eq!(due((1 << 20) - BLOCK, 2 * BLOCK, false), Due::Error(EIO));
    assert_eq!(due((1 << 20) - BLOCK, 2 * BLOCK, true), Due::Success);
    assert_eq!(due((3 << 20) + 60 * 1024, BLOCK, true), Due::Error(ENOSPC));
    assert_eq!(due((3 << 20) + 64 * 1024, BLOCK, true), Due::Success);
    assert_eq!(due(CHANCY - BLOCK, LARGEST, true), Due::Either(EIO));
    for (start, length, ..) in BAD {
        let ordered = format!("@{}M+{}K", start >> 20, length >> 10);
        assert!(FAULTS.contains(&ordered), "{ordered}");
    }
}
