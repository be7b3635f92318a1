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
    /// traced stops at each of its system calls for a moment, which does not count: it is looked at again.
    pub(crate) fn stopped(self) -> bool {
        (0..LOOKS).all(|look| {
            if look > 0 {
                std::thread::sleep(BETWEEN_LOOKS);
            }
            let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
            let state = stat.rsplit_once(')').map_or("", |(_, rest)| rest.trim_start());
            state.starts_with(['T', 't']) && parse_stat(&stat).is_some_and(|(start, _)| start == self.start)
        })
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
        let mut tracer = std::process::Command::new("strace")
            .args(["-qq", "-o", "/dev/null", "dd", "if=/dev/zero", "of=/dev/null", "bs=1"])
            .spawn()
            .unwrap();
        let of_tracer = format!("/proc/{0}/task/{0}/children", tracer.id());
        let traced = || {
            let children = fs::read_to_string(&of_tracer).unwrap_or_default();
            children.split_whitespace().next().and_then(|pid| ProcessId::of(pid.parse().ok()?))
        };
        assert!(wait_until(Duration::from_secs(10), || traced().is_some()));
        let traced = traced().unwrap();
        assert!((0..100).all(|_| !traced.stopped()));
        // The tracer ends with it; the other way round it would go on for ever.
        let pid = rustix::process::Pid::from_raw(traced.pid.cast_signed()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        tracer.wait().unwrap();
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
