//! What a helper makes sure of before its work begins: memory that is there, and rights that are gone.
//! It never goes on when a precaution failed that could have worked here.

use std::io;
use std::path::Path;

use becket_uapi::process;
use rustix::mm::MlockAllFlags;
use rustix::process::{Resource, Rlimit};
use rustix::thread::CapabilitySet;

use crate::contract::Error;
use crate::system::isolate;
use crate::system::role::Role;

/// Takes all precautions; answers with those that the environment forbids.
///
/// Call it before any other thread starts: they inherit it.
pub(crate) fn harden(role: Role) -> Result<Vec<String>, Error> {
    isolate::limits();
    let mut steps = Steps { notes: isolate::mounts(Path::new("/proc")), had: capabilities()? };
    if role.reaches_servers() {
        steps.take("chroot", CapabilitySet::SYS_CHROOT, isolate::go_out())?;
    }
    rustix::process::chdir("/").map_err(failed("leave its working directory"))?;
    if role.serves_block_io() {
        lock_memory(role, &mut steps)?;
    }
    let kept = process::drop_capabilities().map_err(failed("give up its capabilities"))?;
    if kept.bounding {
        steps.notes.push("bounding set: this process may not change it".to_owned());
    }
    process::set_dumpable(false).map_err(failed("forbid core dumps"))?;
    verify()?;
    Ok(steps.notes)
}

/// Sees to it that block I/O never waits for this process's memory.
fn lock_memory(role: Role, steps: &mut Steps) -> Result<(), Error> {
    // Allocations for block I/O must not wait for that very block I/O.
    steps.take("IO_FLUSHER", CapabilitySet::SYS_RESOURCE, flusher())?;
    let unlimited = steps.take("RLIMIT_MEMLOCK", CapabilitySet::SYS_RESOURCE, unlimit_memory())?;
    // Future memory is only locked where that cannot make an allocation fail once the rights are gone.
    let flags =
        if unlimited { MlockAllFlags::CURRENT | MlockAllFlags::FUTURE } else { MlockAllFlags::CURRENT };
    // A library's threads have large stacks that they never use.
    let flags = if role == Role::Helper { flags | MlockAllFlags::ONFAULT } else { flags };
    // What a sanitizer has mapped for itself is larger than any machine.
    if !cfg!(sanitized) {
        steps.take("mlockall", CapabilitySet::IPC_LOCK, rustix::mm::mlockall(flags).map_err(Into::into))?;
    }
    Ok(())
}

struct Steps {
    notes: Vec<String>,
    had: CapabilitySet,
}

impl Steps {
    /// Whether a precaution worked. One that fails where the right to it was there ends the worker.
    fn take(&mut self, what: &str, needs: CapabilitySet, result: io::Result<()>) -> Result<bool, Error> {
        match result {
            Ok(()) => Ok(true),
            Err(error) if !self.had.contains(needs) => {
                self.notes.push(format!("{what}: this environment does not allow it ({error})"));
                Ok(false)
            }
            Err(error) => Err(Error::Worker { what: format!("will not serve: {what} failed: {error}") }),
        }
    }
}

fn flusher() -> io::Result<()> {
    process::set_io_flusher(true)?;
    if process::io_flusher()? {
        return Ok(());
    }
    Err(io::Error::other("the kernel took it and does not have it"))
}

fn unlimit_memory() -> io::Result<()> {
    let now = rustix::process::getrlimit(Resource::Memlock);
    if now.current.is_none() {
        return Ok(());
    }
    Ok(rustix::process::setrlimit(Resource::Memlock, Rlimit { current: None, maximum: None })?)
}

fn capabilities() -> Result<CapabilitySet, Error> {
    match rustix::thread::capabilities(None) {
        Ok(sets) => Ok(sets.effective),
        Err(error) => Err(failed("ask for its capabilities")(error)),
    }
}

/// Nothing is believed about rights that the kernel does not confirm.
fn verify() -> Result<(), Error> {
    let sets = rustix::thread::capabilities(None).map_err(failed("ask for its capabilities"))?;
    let left = sets.effective | sets.permitted | sets.inheritable;
    let no_new = rustix::thread::no_new_privs().map_err(failed("ask for no_new_privs"))?;
    if left.is_empty() && no_new {
        return Ok(());
    }
    Err(Error::Worker { what: "will not serve: it still has capabilities".to_owned() })
}

fn failed<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> Error {
    move |error| Error::Worker { what: format!("could not {what}: {}", error.into()) }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_failure_counts_only_where_it_could_have_worked() {
        let denied = || Err(Errno::PERM.into());
        let mut without = Steps { notes: Vec::new(), had: CapabilitySet::empty() };
        assert!(!without.take("x", CapabilitySet::SYS_RESOURCE, denied()).unwrap());
        assert_eq!(without.notes.len(), 1);
        assert!(without.take("y", CapabilitySet::SYS_RESOURCE, Ok(())).unwrap());
        assert_eq!(without.notes.len(), 1);

        let mut with = Steps { notes: Vec::new(), had: CapabilitySet::all() };
        let error = with.take("x", CapabilitySet::SYS_RESOURCE, denied()).unwrap_err();
        assert!(error.to_string().contains("x failed"), "{error}");
    }
}
