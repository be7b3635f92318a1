//! A device with random writes, beside the bytes that it must then hold, and a worker that dies on the way.
//! Never looks at an image: what is written is known.

use becket_testkit::{Scratch, image, tool};
use std::{fs::File, os::unix::fs::FileExt as _, path::Path, process::Command};

/// Writes, zeroes and discards through a device and in the bytes that it holds, which are synced at the end;
/// `between` is called after each round.
#[track_caller]
pub(crate) fn scribble(device: &Path, expected: &mut [u8], rounds: u64, mut between: impl FnMut(u64)) {
    let file = File::options().read(true).write(true).open(device).unwrap();
    for round in 0..rounds {
        let numbers = image::random_bytes(16, round);
        let number = |at: usize| u64::from(u32::from_le_bytes(numbers[at..at + 4].try_into().unwrap()));
        let from = number(0) % (expected.len() as u64 / 512) * 512;
        let len = ((1 + number(4) % 400) * 512).min(expected.len() as u64 - from);
        let range = from as usize..(from + len) as usize;
        if round % 5 == 4 {
            file.sync_all().unwrap();
            let zeroout = if round % 2 == 0 { &["--zeroout"][..] } else { &[] };
            let (offset, length) = (format!("--offset={from}"), format!("--length={len}"));
            tool(Command::new("blkdiscard").args(zeroout).args([&offset, &length]).arg(device));
            expected[range].fill(0);
        } else {
            let bytes = image::random_bytes(len as usize, round + 1000);
            file.write_all_at(&bytes, from).unwrap();
            expected[range].copy_from_slice(&bytes);
            if round % 3 == 0 {
                file.sync_all().unwrap();
            }
        }
        between(round);
    }
    file.sync_all().unwrap();
}

/// Kills the process that serves the first device, and all others that are not isolated.
#[track_caller]
pub(crate) fn kill_worker(place: &Scratch) {
    let worker = place.devices()[0]["worker_pid"].as_u64().unwrap();
    let pid = rustix::process::Pid::from_raw(i32::try_from(worker).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}
