//! How a server begins: as init would begin it, whichever command needed a server first.
//!
//! That server outlives the command and serves every later one. So it keeps nothing that the command's shell,
//! session or service set for its own processes. `tests/processes/origin.rs` lists every attribute that a
//! process inherits, and what becomes of it here. What cannot be undone is returned as a note, which `becket
//! doctor` shows.
//!
//! A server that a person or a service manager starts (`becket serve`) is left as they set it up.

use std::fs;
use std::io;
use std::process::Command;

use becket_uapi::{process, signal};
use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::contract::versions;
use crate::contract::{DIR_VARIABLE, LINKS_VARIABLE};
use crate::system::{control_group, isolate, log};

/// The variables that a server, its guard and its workers get. Everything else in the caller's environment is
/// its own affair.
const ENVIRONMENT: [&str; 13] = [
    DIR_VARIABLE,
    LINKS_VARIABLE,
    // Where fusermount3 and busctl are.
    "PATH",
    // Where the user's service manager listens.
    "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS",
    // By which a process knows that its standard error is the journal.
    "JOURNAL_STREAM",
    // For developers.
    "RUST_BACKTRACE",
    "LLVM_PROFILE_FILE",
    "ASAN_OPTIONS",
    "LSAN_OPTIONS",
    "TSAN_OPTIONS",
    "UBSAN_OPTIONS",
    "MSAN_OPTIONS",
];

/// A resource, its soft and its hard limit (`None` is "no limit"), and for people what is worth a note where
/// it cannot be lifted.
type Limit = (Resource, Option<u64>, Option<u64>, Option<&'static str>);

const NONE: Option<u64> = None;
/// What a process of init's may have as its stack, and with it the layout of the programs that it executes.
const STACK: Option<u64> = Some(8 << 20);

/// Limits that a process has which init starts. Open files are for [`isolate::limits`]. No usual session sets
/// those with a note.
const LIMITS: [Limit; 13] = [
    (Resource::As, NONE, NONE, Some("address space (ulimit -v)")),
    (Resource::Data, NONE, NONE, Some("data (ulimit -d)")),
    (Resource::Fsize, NONE, NONE, Some("file size (ulimit -f)")),
    (Resource::Cpu, NONE, NONE, Some("CPU time (ulimit -t)")),
    (Resource::Rss, NONE, NONE, None),
    (Resource::Locks, NONE, NONE, None),
    (Resource::Nproc, NONE, NONE, None),
    (Resource::Memlock, NONE, NONE, None),
    (Resource::Sigpending, NONE, NONE, None),
    (Resource::Rttime, NONE, NONE, None),
    (Resource::Stack, STACK, NONE, None),
    (Resource::Core, Some(0), NONE, None),
    (Resource::Msgqueue, Some(819_200), Some(819_200), None),
];

/// Gives a command that starts a server, a guard or a worker their environment.
pub(crate) fn environment(command: &mut Command) -> &mut Command {
    command.env_clear();
    for name in ENVIRONMENT.iter().chain(versions::TEST_VARIABLES) {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    log::level_for(command);
    command
}

/// Makes the calling process what init would have made it; returns what could not be undone.
///
/// Call it before other threads start, and before signals are blocked or descriptors without close-on-exec
/// are opened.
pub(crate) fn begin() -> Vec<String> {
    let mut notes = Vec::new();
    // Fails only for the leader of a process group, which is not a child of a command. With it goes the
    // terminal.
    let _ = rustix::process::setsid();
    let mut failed = |what: &str, result: io::Result<()>| {
        if let Err(error) = result {
            notes.push(format!("keeps {what} of the command that started it: {error}"));
        }
    };
    failed("the blocked signals", signal::restore_defaults());
    failed("the working directory", rustix::process::chdir("/").map_err(Into::into));
    rustix::process::umask(Mode::from_raw_mode(0o022));
    failed("the nice value and scheduling policy", process::default_scheduling());
    failed("the I/O priority", process::default_io_priority());
    failed("the CPU mask", default_affinity());
    // Where the kernel has neither, there is nothing to undo.
    let _ = process::default_memory_policy();
    let _ = process::new_session_keyring();
    failed("the personality", process::default_personality());
    process::default_attributes();
    // Anonymous memory and ELF headers, as the kernel begins.
    let _ = fs::write("/proc/self/coredump_filter", "0x33");
    if rustix::process::geteuid().is_root() {
        // In a user namespace this may be refused, and then there are no groups to lose.
        let _ = rustix::thread::set_thread_groups(&[]);
    }
    notes.extend(limits());
    notes.extend(confined());
    if let Err(why) = control_group::leave() {
        notes.push(format!(
            "stays in the control group of the command that started it, and ends with it: {why}"
        ));
    }
    notes
}

/// The CPUs that init has: an administrator may have set some aside.
fn default_affinity() -> io::Result<()> {
    let all = || {
        let mut all = CpuSet::new();
        (0..CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
        all
    };
    let cpus = sched_getaffinity(Some(rustix::process::Pid::INIT)).unwrap_or_else(|_| all());
    Ok(sched_setaffinity(None, &cpus)?)
}

fn limits() -> Vec<String> {
    let mut notes = Vec::new();
    for (resource, current, maximum, said) in LIMITS {
        let now = getrlimit(resource);
        // For root alone, or where it is no more than there may be already.
        if setrlimit(resource, Rlimit { current, maximum }).is_ok() {
            continue;
        }
        let most = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
        let current = if most(current) < most(now.maximum) { current } else { now.maximum };
        // Always allowed. Should it fail, the limit is what it was.
        let _ = setrlimit(resource, Rlimit { current, ..now });
        if let (Some(what), Some(limit)) = (said, now.maximum) {
            notes.push(format!("keeps a limit of the command that started it: {what}, {limit}"));
        }
    }
    isolate::limits();
    notes
}

/// What the kernel never takes back: a set-user-ID program such as fusermount3 has no effect below it.
fn confined() -> Vec<String> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = |field: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        value.is_some_and(|value| value.trim() != "0")
    };
    [("NoNewPrivs", "no_new_privs"), ("Seccomp", "a filter of system calls")]
        .into_iter()
        .filter(|(field, _)| set(field))
        .map(|(_, what)| format!("keeps {what} of the command that started it: the kernel cannot undo that"))
        .collect()
}
