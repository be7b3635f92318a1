//! Which process is meant, beyond its number: numbers are used again.
//! It only looks; it never signals.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::sync::OnceLock;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A process of this boot: its number and when it started, in the kernel's ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    pub(crate) pid: u32,
    pub(crate) start: u64,
}

impl ProcessId {
    /// The calling process.
    pub(crate) fn own() -> ProcessId {
        static OWN: OnceLock<ProcessId> = OnceLock::new();
        *OWN.get_or_init(|| {
            let pid = std::process::id();
            ProcessId { pid, start: start_of(pid).map_or(0, |(start, _)| start) }
        })
    }

    /// A process by its number, when it lives.
    pub(crate) fn of(pid: u32) -> Option<ProcessId> {
        let (start, dead) = start_of(pid)?;
        (!dead).then_some(ProcessId { pid, start })
    }

    /// Whether it runs the very file that we run; an upgrade puts another one in its place.
    pub(crate) fn runs_our_program(self) -> bool {
        let file = |pid: &str| fs::metadata(format!("/proc/{pid}/exe")).map(|meta| (meta.dev(), meta.ino()));
        match (file(&self.pid.to_string()), file("self")) {
            (Ok(its), Ok(ours)) => its == ours,
            // What cannot be known is no reason to replace it.
            _ => true,
        }
    }

    /// Whether it still runs. A zombie does not.
    pub(crate) fn alive(self) -> bool {
        ProcessId::of(self.pid) == Some(self)
    }
}

/// So often a process is looked at before it is taken for stopped.
const LOOKS: u32 = 5;
const BETWEEN_LOOKS: Duration = Duration::from_millis(10);

impl ProcessId {
    /// Whether it is stopped, by a signal or by a debugger: it lives and does nothing. A program that is
    /// traced stops at each of its system calls for a moment, which does not count: it is looked at again,
    /// and has run meanwhile.
    pub(crate) fn stopped(self) -> bool {
        let Some(halts) = self.halts() else { return false };
        (1..LOOKS).all(|_| {
            std::thread::sleep(BETWEEN_LOOKS);
            self.halts() == Some(halts)
        })
    }

    /// How often it has given up its CPU, if it is stopped just now.
    fn halts(self) -> Option<u64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).ok()?;
        let (_, state) = stat.rsplit_once(')')?;
        let stopped = state.trim_start().starts_with(['T', 't']);
        if !stopped || parse_stat(&stat)?.0 != self.start {
            return None;
        }
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let counts = status.lines().filter_map(|line| line.split_once("ctxt_switches:"));
        Some(counts.filter_map(|(_, count)| count.trim().parse::<u64>().ok()).sum())
    }
}

impl ProcessId {
    /// Whether it is a server of becket's by its command line, or the guard of one, of whatever version.
    /// This tells servers from processes that have the number of a dead server by now.
    pub(crate) fn is_server(self) -> bool {
        self.alive() && fs::read(format!("/proc/{}/cmdline", self.pid)).is_ok_and(|line| is_serving(&line))
    }
}

fn is_serving(command_line: &[u8]) -> bool {
    command_line.split(|&byte| byte == 0).skip(1).any(|word| word == b"serve")
}

/// When the process started, and whether it is only waiting to be reaped.
fn start_of(pid: u32) -> Option<(u64, bool)> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// See proc_pid_stat(5): the command is in parentheses and may itself hold spaces and parentheses.
fn parse_stat(stat: &str) -> Option<(u64, bool)> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    // The state is field 3, the start time field 22.
    let start = fields.nth(18)?.parse().ok()?;
    Some((start, matches!(state, "Z" | "X" | "x")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_cannot_forge_its_start_time() {
        let rest = "1 1 1 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 777 1 1";
        assert_eq!(parse_stat(&format!("5 (a) b (c) S {rest}")), Some((777, false)));
        assert_eq!(parse_stat(&format!("5 (x) Z {rest}")), Some((777, true)));
        assert_eq!(parse_stat("5 (x) S 1"), None);
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn a_server_is_known_by_its_words() {
        assert!(is_serving(b"becket\0serve\0--ready-fd\x001\0"));
        assert!(is_serving(b"/usr/bin/becket\0--json\0serve\0"));
        for other in [&b""[..], b"serve\0", b"becket\0worker\0", b"becket serve\0", b"becket\0server\0"] {
            assert!(!is_serving(other), "{other:?}");
        }
        assert!(!ProcessId::own().is_server());
    }

    #[test]
    fn a_stopped_process_is_not_one_that_goes_on() {
        use becket_testkit::wait_until;
        // In a group of its own: all of a group with a stopped process can get SIGHUP.
        let mut sleep = std::process::Command::new("sleep");
        let sleep = std::os::unix::process::CommandExt::process_group(sleep.arg("60"), 0);
        let mut child = sleep.spawn().unwrap();
        let id = ProcessId::of(child.id()).unwrap();
        let send = |signal| {
            let pid = rustix::process::Pid::from_child(&child);
            rustix::process::kill_process(pid, signal).unwrap();
        };
        assert!(!id.stopped());
        send(rustix::process::Signal::STOP);
        assert!(wait_until(Duration::from_secs(10), || id.stopped()) && id.alive());
        assert!(!ProcessId { start: id.start + 1, ..id }.stopped());
        send(rustix::process::Signal::CONT);
        assert!(wait_until(Duration::from_secs(10), || !id.stopped()));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_that_is_traced_is_not_stopped() {
        use becket_testkit::{require_plain_machine, wait_until};
        let name = "system::process::tests::a_process_that_is_traced_is_not_stopped";
        if !require_plain_machine(name, &["strace"]) {
            return;
        }
        let mut strace = std::process::Command::new("strace");
        strace.args(["-qq", "-o", "/dev/null", "dd", "if=/dev/zero", "of=/dev/null", "bs=1"]);
        let pair = Traced(std::os::unix::process::CommandExt::process_group(&mut strace, 0).spawn().unwrap());
        assert!(wait_until(Duration::from_secs(30), || pair.traced().is_some()), "strace traces no dd");
        let traced = pair.traced().unwrap();
        assert!((0..100).all(|_| !traced.stopped()));
    }

    /// strace and the `dd` that it traces, in a process group of their own: `dd` would go on for ever.
    struct Traced(std::process::Child);

    impl Traced {
        /// What is traced, once it is `dd`: before, strace has children that show what it can trace, and end.
        fn traced(&self) -> Option<ProcessId> {
            let tracer = self.0.id();
            let children = fs::read_to_string(format!("/proc/{tracer}/task/{tracer}/children")).ok()?;
            let of_tracer = format!("\nTracerPid:\t{tracer}\n");
            let is_traced = |pid: &u32| {
                let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
                status.starts_with("Name:\tdd\n") && status.contains(&of_tracer)
            };
            children
                .split_whitespace()
                .filter_map(|pid| pid.parse().ok())
                .find(is_traced)
                .and_then(ProcessId::of)
        }
    }

    impl Drop for Traced {
        fn drop(&mut self) {
            // All of the group at once: strace alone would let its children go.
            let group = rustix::process::Pid::from_child(&self.0);
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
            let _ = self.0.wait();
        }
    }

    #[test]
    fn only_the_same_process_is_alive() {
        let own = ProcessId::own();
        assert!(own.alive());
        assert!(!ProcessId { start: own.start + 1, ..own }.alive(), "same number, other process");

        assert!(own.runs_our_program());

        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        // A parent goes on a moment before its child has the new program.
        let id = ProcessId::of(child.id()).unwrap();
        assert!(becket_testkit::wait_until(std::time::Duration::from_secs(10), || !id.runs_our_program()));
        child.kill().unwrap();
        let pid = child.id();
        let id = ProcessId::of(pid);
        child.wait().unwrap();
        assert_eq!(ProcessId::of(pid), None);
        if let Some(id) = id {
            assert!(!id.alive());
        }
    }
}
