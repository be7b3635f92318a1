//! What becket's processes hold, to find leaks; and how times are shown.
//! It only looks.

use std::{fs, path::Path};

use serde_json::{Value, json};

use crate::common::disturb::{SUPERVISOR, WORKER};

/// Descriptors, threads and KiB of memory of the supervisor and of the worker.
pub(crate) type Held = [[u64; 3]; 2];

/// Tolerated growth of each between two counts: a recovery or a thread may be under way, and each worker is
/// another one, with other blocks in its cache.
const NO_LEAK: Held = [[3, 3, 16 << 10], [3, 3, 64 << 10]];

/// What those who serve a device hold.
pub(crate) fn held(device: &Value) -> Held {
    [of(&device[SUPERVISOR]), of(&device[WORKER])]
}

/// Threads of a process's rings come and go by the kernel's will, and do not count.
fn of(pid: &Value) -> [u64; 3] {
    let entries = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).into_iter().flatten().flatten();
    let is_ours = |entry: &fs::DirEntry| {
        fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| !name.starts_with("iou-"))
    };
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let memory =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().split(' ').next()?.parse().ok());
    [entries("fd").count() as u64, entries("task").filter(is_ours).count() as u64, memory.unwrap_or(0)]
}

/// Whether there is so little more than at first that nothing has leaked.
pub(crate) fn no_leak(first: &Held, now: &Held) -> bool {
    let all = first.iter().flatten().zip(now.iter().flatten()).zip(NO_LEAK.iter().flatten());
    all.into_iter().all(|((first, now), more)| *now <= first + more)
}

/// Becket's processes that keep their things in a directory: their numbers, and how they were started.
pub(crate) fn processes(runtime: &Path) -> Vec<String> {
    let mark = format!("BECKET_RUNTIME_DIR={}", runtime.display());
    let marked = |pid: &String| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|word| word == mark.as_bytes())
    };
    let all = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name().into_string().unwrap());
    let started = |pid: String| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        format!("{pid} {}", String::from_utf8_lossy(&words).replace('\0', " "))
    };
    all.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).filter(marked).map(started).collect()
}

/// Pauses in milliseconds, in a few numbers.
pub(crate) fn times(pauses: &mut [u64]) -> Value {
    pauses.sort_unstable();
    let percentile =
        |p: usize| pauses.get((pauses.len() * p).div_ceil(100).saturating_sub(1)).copied().unwrap_or(0);
    json!({ "cases": pauses.len(), "p50_ms": percentile(50), "p99_ms": percentile(99), "max_ms": pauses.last() })
}

#[test]
fn a_leak_is_seen() {
    let first = [[20, 3, 5000], [24, 8, 90_000]];
    assert!(no_leak(&first, &first));
    for who in 0..2 {
        for what in 0..3 {
            let mut now = first;
            now[who][what] += NO_LEAK[who][what];
            assert!(no_leak(&first, &now));
            now[who][what] += 1;
            assert!(!no_leak(&first, &now), "{who} {what}");
        }
    }
}
