//! What a process that serves block devices must set about itself, and what it must give up.
//! It never restores anything: what is dropped is gone.

use std::io;

use rustix::process::DumpableBehavior;
use rustix::thread::{CapabilitySet, CapabilitySets};

/// Marks the calling thread, and those it starts, as one that block I/O depends on: its memory allocations never
/// wait for that I/O. Needs CAP_SYS_RESOURCE (`EPERM`). Read it back with [`io_flusher`].
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

/// What [`drop_capabilities`] could not do because the process had no right to; the rest is done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kept {
    /// The bounding set is as before (CAP_SETPCAP was missing). `no_new_privs` makes it harmless.
    pub bounding: bool,
}

/// Gives up all capabilities of the calling thread and the ways back: ambient and bounding set, `no_new_privs`.
/// Threads that run already are not affected; call it before there are any.
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
