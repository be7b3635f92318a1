//! What a process that serves block devices must set about itself, and what it must give up.
//! Rights that are dropped are never restored. The `default_*` functions undo what a parent set.

use std::io;

use rustix::process::DumpableBehavior;
use rustix::thread::{CapabilitySet, CapabilitySets};

/// Marks the calling thread, and those it starts, as one that block I/O depends on: its memory allocations
/// never wait for that I/O. Needs CAP_SYS_RESOURCE (`EPERM`). Read it back with [`io_flusher`].
pub fn set_io_flusher(on: bool) -> io::Result<()> {
    Ok(rustix::process::configure_io_flusher_behavior(on)?)
}

/// Whether the calling thread is marked. Needs CAP_SYS_RESOURCE as well.
pub fn io_flusher() -> io::Result<bool> {
    Ok(rustix::process::is_io_flusher()?)
}

/// Whether the process may be traced by its user and leaves core dumps.
pub fn set_dumpable(on: bool) -> io::Result<()> {
    let behaviour = if on { DumpableBehavior::Dumpable } else { DumpableBehavior::NotDumpable };
    Ok(rustix::process::set_dumpable_behavior(behaviour)?)
}

/// Gives the calling thread the scheduling of a process that init started: the ordinary policy, nice 0, no
/// reset on fork, no utilization clamps.
///
/// # Errors
/// `EPERM`: the parent lowered the priority and this process may not raise it.
pub fn default_scheduling() -> io::Result<()> {
    let mut plain =
        SchedAttr { size: u32::try_from(size_of::<SchedAttr>()).unwrap_or(0), ..SchedAttr::default() };
    set_scheduling(&plain)?;
    plain.sched_flags = UTIL_CLAMP_MIN | UTIL_CLAMP_MAX;
    (plain.sched_util_min, plain.sched_util_max) = (u32::MAX, u32::MAX);
    // Kernels without clamps refuse this; then there is nothing to undo.
    let _ = set_scheduling(&plain);
    Ok(())
}

/// `struct sched_attr` of the kernel's `sched/types.h`, its second version (Linux 5.3).
#[repr(C)]
#[derive(Default)]
struct SchedAttr {
    size: u32,
    sched_policy: u32,
    sched_flags: u64,
    sched_nice: i32,
    sched_priority: u32,
    sched_runtime: u64,
    sched_deadline: u64,
    sched_period: u64,
    sched_util_min: u32,
    sched_util_max: u32,
}

/// `SCHED_FLAG_UTIL_CLAMP_MIN` and its like; the value -1 removes a clamp (Linux 5.11).
const UTIL_CLAMP_MIN: u64 = 0x20;
const UTIL_CLAMP_MAX: u64 = 0x40;

fn set_scheduling(attr: &SchedAttr) -> io::Result<()> {
    // SAFETY: `attr` is a structure of the size that its first field says, valid for the call.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, std::ptr::from_ref(attr), 0) };
    checked(result)
}

/// Gives the calling thread no I/O priority of its own: it follows the nice value.
///
/// # Errors
/// That of ioprio_set(2).
pub fn default_io_priority() -> io::Result<()> {
    // IOPRIO_WHO_PROCESS, this thread, IOPRIO_CLASS_NONE.
    // SAFETY: three numbers.
    checked(unsafe { libc::syscall(libc::SYS_ioprio_set, 1, 0, 0) })
}

/// Lets the memory of the calling thread come from any NUMA node, the nearest first.
///
/// # Errors
/// That of set_mempolicy(2); `ENOSYS` where the kernel has no NUMA.
pub fn default_memory_policy() -> io::Result<()> {
    // SAFETY: MPOL_DEFAULT takes no set of nodes.
    checked(unsafe { libc::syscall(libc::SYS_set_mempolicy, 0, std::ptr::null::<libc::c_ulong>(), 0) })
}

/// Gives the process the personality of Linux, with a randomised layout for the programs that it executes.
///
/// # Errors
/// That of personality(2).
pub fn default_personality() -> io::Result<()> {
    // SAFETY: one number.
    checked(unsafe { libc::personality(0) }.into())
}

/// Gives the process a new session keyring instead of its parent's.
///
/// # Errors
/// `ENOSYS` where the kernel has no keys, `EDQUOT` where the user has too many.
pub fn new_session_keyring() -> io::Result<()> {
    // KEYCTL_JOIN_SESSION_KEYRING, without a name.
    // SAFETY: no name is passed, so no memory is read.
    checked(unsafe { libc::syscall(libc::SYS_keyctl, 1, std::ptr::null::<libc::c_char>()) })
}

/// Undoes the attributes of memory, timers and scheduling that prctl(2) sets and children inherit. What this
/// kernel does not know nobody has set, so errors are not reported.
pub fn default_attributes() {
    /// Nanoseconds that timers may be late: the kernel's own default. Zero would mean the parent's value.
    const TIMER_SLACK: libc::c_ulong = 50_000;
    for (option, value) in [
        (libc::PR_SET_TIMERSLACK, TIMER_SLACK),
        (libc::PR_SET_THP_DISABLE, 0),
        (PR_SET_MEMORY_MERGE, 0),
        // PR_MCE_KILL_CLEAR.
        (libc::PR_MCE_KILL, 0),
    ] {
        // SAFETY: none of these takes a pointer.
        unsafe { libc::prctl(option, value, 0, 0, 0) };
    }
    // PR_SCHED_CORE_SHARE_FROM init, which has no cookie: the only way to lose one.
    // SAFETY: numbers only.
    unsafe { libc::prctl(libc::PR_SCHED_CORE, 3, 1, 0, 0) };
}

/// `PR_SET_MEMORY_MERGE` (Linux 6.4).
const PR_SET_MEMORY_MERGE: libc::c_int = 67;

fn checked(result: libc::c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// What [`drop_capabilities`] could not do because the process had no right to; the rest is done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kept {
    /// The bounding set is as before (CAP_SETPCAP was missing). `no_new_privs` makes it harmless.
    pub bounding: bool,
}

/// Gives up all capabilities of the calling thread and the ways back: ambient and bounding set,
/// `no_new_privs`. Threads that run already are not affected; call it before there are any.
pub fn drop_capabilities() -> io::Result<Kept> {
    let mut kept = Kept::default();
    // First, so that nothing below can be undone by running a program if a later step fails.
    rustix::thread::set_no_new_privs(true)?;
    rustix::thread::clear_ambient_capability_set()?;
    for bit in 0..64 {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        match rustix::thread::capability_is_in_bounding_set(one) {
            Ok(true) => {}
            Ok(false) => continue,
            // The kernel knows no more of them.
            Err(rustix::io::Errno::INVAL) => break,
            Err(error) => return Err(error.into()),
        }
        match rustix::thread::remove_capability_from_bounding_set(one) {
            Ok(()) => {}
            Err(rustix::io::Errno::PERM) => {
                kept.bounding = true;
                break;
            }
            Err(error) => return Err(error.into()),
        }
    }
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none)?;
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Capabilities belong to threads: one of its own loses them, the test's thread does not.
    #[test]
    fn nothing_is_left_after_dropping() {
        let before = rustix::thread::capabilities(None).map_err(|e| e.raw_os_error());
        let status = std::thread::spawn(|| {
            let kept = drop_capabilities()?;
            std::fs::read_to_string("/proc/thread-self/status").map(|status| (kept, status))
        });
        let (kept, status) = match status.join() {
            Ok(Ok(pair)) => pair,
            other => unreachable!("{other:?}"),
        };
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|value| u64::from_str_radix(value.trim(), 16).ok())
        };
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
            assert_eq!(field(set), Some(0), "{set}");
        }
        assert_eq!(field("CapBnd:") == Some(0), !kept.bounding);
        assert_eq!(field("NoNewPrivs:"), Some(1));
        assert_eq!(rustix::thread::capabilities(None).map_err(|e| e.raw_os_error()), before);
    }

    #[test]
    fn an_io_flusher_reads_back_or_lacks_the_right() {
        match set_io_flusher(true) {
            Ok(()) => assert_eq!(io_flusher().ok(), Some(true)),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EPERM)),
        }
    }
}
