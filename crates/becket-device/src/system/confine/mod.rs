//! What a process of a role may still ask of the kernel once it runs: to move bytes between descriptors that
//! it holds, and what else the role needs ([`calls`]).
//! It never opens a way back, and adds only one lookup for each turn of a ring to the hot path.
//!
//! Three fences, each behind the other, against an attacker who gets hold of such a process (decoders and
//! parsers of protocols read untrusted data):
//!
//! - **Landlock** ([`shut`]), before the first thread, because threads inherit it. No path is allowed but
//!   those that the role needs to resolve names. It also covers io_uring, whose operations run with the
//!   rights of the thread that submits them.
//! - **The rings** of a worker carry out a dozen operations and no others (`becket_engine`'s `ring`): a
//!   filter of system calls does not see what a ring is asked for.
//! - **A filter of system calls** ([`filter`]), after the rings are made: no other ring can be made, which
//!   would be unrestricted. Each role has its own list.
//!
//! **What is refused fails with EPERM.** A process that is killed for one call that a newer C library makes,
//! or that was forgotten here, takes all its devices down, and the next worker as well; refused, most such
//! calls have another way. For keeping an attacker in, both are the same. Only what no mistake of ours can be
//! (running programs, reaching into other processes, calls of another architecture) ends the worker, which
//! the kernel logs: its devices get another.
//!
//! **The user stays root's**, though without capabilities. Block allocation of ext4 and XFS keeps a reserve
//! for user 0: an image on a full file system would fail earlier than with the kernel's loop driver. No other
//! number is becket's to take without an administrator having set it aside, and processes of a shared one
//! such as nobody's may signal each other.

mod calls;

use std::io;

use becket_uapi::landlock;
use becket_uapi::seccomp::Filter;

use crate::contract::Error;
use crate::system::role::Role;

/// Takes every path that the role does not need from the calling thread and those it starts; answers with a
/// note if the kernel cannot.
pub(crate) fn shut(role: Role) -> Result<Option<String>, Error> {
    // What this and the clock know of the machine may come from a file; their first use of it does not expect
    // failure.
    let _ = rustix::param::page_size();
    match landlock::allow_only(calls::left(role)) {
        Ok(_) => Ok(None),
        Err(error) if lacking(&error) => Ok(Some(format!("Landlock: this kernel has none ({error})"))),
        Err(error) => Err(refused("give up its paths", &error)),
    }
}

/// Puts all threads under the role's filter; answers with a note where the kernel cannot.
pub(crate) fn filter(role: Role) -> Result<Option<String>, Error> {
    let installed = calls::rules(role, std::process::id()).and_then(Filter::install);
    match installed {
        Ok(()) => Ok(None),
        Err(error) if lacking(&error) || error.kind() == io::ErrorKind::InvalidInput => {
            Ok(Some(format!("system calls are not filtered: {error}")))
        }
        Err(error) => Err(refused("filter its system calls", &error)),
    }
}

fn lacking(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported
        || matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EOPNOTSUPP))
}

fn refused(what: &str, error: &io::Error) -> Error {
    Error::Worker { what: format!("will not serve: it could not {what}: {error}") }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
