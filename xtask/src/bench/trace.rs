//! The system calls of a server, counted by the guest's kernel while fio does a known number of I/Os.
//! Never counts the load generator's: a call counts when the thread that made it belongs to the server.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::fio::COUNTED;

/// The number of `futex` on x86-64.
const FUTEX: u64 = 202;

/// What a server called during one counted run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Calls {
    pub(crate) entrant: String,
    pub(crate) workload: String,
    /// The server's threads, by name; empty when the kernel alone serves.
    pub(crate) server: String,
    pub(crate) ios: u64,
    /// Every system call, io_uring_enter among them.
    pub(crate) all: u64,
    pub(crate) futex: u64,
}

impl Calls {
    /// From a histogram of raw_syscalls:sys_enter with the keys `common_pid.execname` and `id`. `server` is the
    /// beginning of the names of the server's threads, or `-`.
    pub(crate) fn read(entrant: &str, workload: &str, server: &str, histogram: &str) -> Result<Calls> {
        let server = if server == "-" { "" } else { server };
        let (mut all, mut futex, mut lines) = (0, 0, 0);
        for line in histogram.lines().filter(|line| line.starts_with('{')) {
            let (thread, id, hits) = entry(line).with_context(|| format!("a strange count: {line}"))?;
            lines += 1;
            if !server.is_empty() && thread.starts_with(server) {
                all += hits;
                futex += if id == FUTEX { hits } else { 0 };
            }
        }
        (lines > 0).then_some(()).context("nothing was counted")?;
        Ok(Calls {
            entrant: entrant.to_owned(),
            workload: workload.to_owned(),
            server: server.to_owned(),
            ios: COUNTED.into(),
            all,
            futex,
        })
    }

    /// For one I/O.
    pub(crate) fn each(&self) -> f64 {
        self.all as f64 / self.ios.max(1) as f64
    }
}

/// `{ common_pid: becket-io/0 [  123], id: 426 } hitcount: 7`.
fn entry(line: &str) -> Option<(&str, u64, u64)> {
    let (_, rest) = line.split_once("common_pid:")?;
    let (thread, rest) = rest.split_once('[')?;
    let (_, rest) = rest.split_once("id:")?;
    let (id, rest) = rest.split_once('}')?;
    let (_, hits) = rest.split_once("hitcount:")?;
    Some((thread.trim(), id.trim().parse().ok()?, hits.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HISTOGRAM: &str = "# event histogram\n#\n# trigger info: hist:keys=common_pid.execname,id:vals=hitcount:size=2048 [active]\n#\n\n\
        { common_pid: fio             [       391], id:        209 } hitcount:       5000\n\
        { common_pid: becket-io/0     [       371], id:        426 } hitcount:        512\n\
        { common_pid: becket-io/1     [       372], id:        202 } hitcount:          2\n\
        { common_pid: bash            [       300], id:        202 } hitcount:         90\n\n\
        Totals:\n    Hits: 5604\n    Entries: 4\n    Dropped: 0\n";

    #[test]
    fn only_the_servers_calls_count() {
        let calls = Calls::read("becket", "w", "becket", HISTOGRAM).unwrap();
        assert_eq!((calls.all, calls.futex, calls.ios), (514, 2, u64::from(COUNTED)));
        assert_eq!(Calls::read("loop-direct", "w", "-", HISTOGRAM).unwrap().all, 0);
    }

    #[test]
    fn an_empty_or_strange_histogram_is_an_error() {
        assert!(Calls::read("a", "w", "a", "# nothing\n").is_err());
        assert!(Calls::read("a", "w", "a", "{ id: 3 } hitcount: 1\n").is_err());
    }
}
