//! Locks an image the way QEMU does, so that two programs never write one image.
//! It never takes a lock that QEMU would not understand, and never waits longer than a moment.
//!
//! # The bytes
//! QEMU's raw-posix driver speaks through shared (read) locks on single bytes of the image. The bytes need
//! not exist; their contents mean nothing. For each permission *p* there are two:
//!
//! | byte | locked means |
//! | --- | --- |
//! | 100 + *p* | somebody uses permission *p* |
//! | 200 + *p* | somebody does not want others to use permission *p* |
//!
//! *p* is 0 for reading, 1 for writing, 2 for writing what is there already, 3 for resizing (4 was given up).
//! An opener first takes its own bytes, then asks whether an exclusive lock *would* conflict on 200 + *p* for
//! each *p* that it uses and on 100 + *p* for each that it does not share. Shared locks never exclude each
//! other, so that question is the whole protocol; and because everybody announces before asking, of two who
//! come at once at most one goes on.
//!
//! becket uses reading, and writing where the image is writable; it shares neither writing nor resizing.
//! So there may be many readers or one writer. With `shared` it announces what it uses, forbids nothing and
//! asks nothing: whoever does not share writing still sees it and is refused.
//!
//! The locks belong to the open file description (`F_OFD_SETLK`): they go wherever the descriptor is passed,
//! and last until its last copy is closed, in the supervisor, a worker or the kernel's loop driver.
//!
//! # The moment
//! That last copy may outlive its owner by a moment: a process that is being spawned holds copies of
//! everything until it executes its program, and the kernel closes the file of a loop device after the device
//! is gone. So that detaching and attaching again does not fail by accident, a clash is looked at again a few
//! times ([`a_moment`]) before it counts.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use becket_uapi::lock::{Kind, ofd_lock, ofd_test, ofd_unlock};
use rustix::io::Errno;

const USED_BASE: u64 = 100;
const UNSHARED_BASE: u64 = 200;
/// From the first byte of any permission on, enough for all of both kinds.
const LOCKED_LEN: u64 = 200;

/// What can be done with an image, numbered as QEMU does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Permission {
    Read = 0,
    Write = 1,
    Resize = 3,
}

impl Permission {
    fn used(self) -> u64 {
        USED_BASE + self as u64
    }

    fn unshared(self) -> u64 {
        UNSHARED_BASE + self as u64
    }

    fn doing(self) -> &'static str {
        match self {
            Permission::Read => "reads it",
            Permission::Write => "writes to it",
            Permission::Resize => "resizes it",
        }
    }

    fn forbidding(self) -> &'static str {
        match self {
            Permission::Read => "allows nobody else to read it",
            Permission::Write => "allows nobody else to write to it",
            Permission::Resize => "allows nobody else to resize it",
        }
    }
}

/// Why the locks were not taken.
#[derive(Debug)]
pub(crate) enum Refused {
    /// Somebody else's use excludes this one; what they do, for people.
    Clash(String),
    /// The file system knows no such locks.
    Unsupported(io::Error),
    /// The system failed.
    Io(io::Error),
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Refused {
        match Errno::from_io_error(&error) {
            Some(Errno::INVAL | Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS) => {
                Refused::Unsupported(error)
            }
            _ => Refused::Io(error),
        }
    }
}

/// Waits before a clash is looked at for the `attempt`-th time again (from 0); `false` when that was enough.
pub(crate) fn a_moment(attempt: u32) -> bool {
    let go_on = attempt < 5;
    if go_on {
        std::thread::sleep(Duration::from_millis(2 << attempt));
    }
    go_on
}

/// Announces the use of the image on `fd`, which must be readable, and checks that it suits everybody else.
///
/// After a clash all locks of this description are given up; `wait` then says whether to try again.
pub(crate) fn take(
    fd: BorrowedFd<'_>,
    write: bool,
    shared: bool,
    mut wait: impl FnMut(u32) -> bool,
) -> Result<(), Refused> {
    let mut attempt = 0;
    loop {
        match try_take(fd, write, shared) {
            Err(Refused::Clash(clash)) => {
                ofd_unlock(fd, USED_BASE, LOCKED_LEN)?;
                if !wait(attempt) {
                    return Err(Refused::Clash(clash));
                }
                attempt += 1;
            }
            result => return result,
        }
    }
}

fn try_take(fd: BorrowedFd<'_>, write: bool, shared: bool) -> Result<(), Refused> {
    let uses: &[Permission] =
        if write { &[Permission::Read, Permission::Write] } else { &[Permission::Read] };
    let unshares: &[Permission] = if shared { &[] } else { &[Permission::Write, Permission::Resize] };

    let own = uses.iter().map(|p| p.used()).chain(unshares.iter().map(|p| p.unshared()));
    for byte in own {
        if !ofd_lock(fd, Kind::Shared, byte, 1)? {
            return Err(Refused::Clash(format!("it holds byte {byte} exclusively")));
        }
    }
    if shared {
        return Ok(());
    }
    for p in uses {
        if ofd_test(fd, Kind::Exclusive, p.unshared(), 1)? {
            return Err(Refused::Clash(format!("it {} (lock byte {})", p.forbidding(), p.unshared())));
        }
    }
    for p in unshares {
        if ofd_test(fd, Kind::Exclusive, p.used(), 1)? {
            return Err(Refused::Clash(format!("it {} (lock byte {})", p.doing(), p.used())));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_lock_that_is_just_being_given_up_is_no_clash() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let [ours, theirs] = [(); 2].map(|()| File::open(named.path()).unwrap());
        take(theirs.as_fd(), true, false, |_| false).unwrap();

        let mut looks = 0;
        let refused = take(ours.as_fd(), true, false, |attempt| {
            assert_eq!(attempt, looks);
            looks += 1;
            let free = |byte| !ofd_test(theirs.as_fd(), Kind::Exclusive, byte, 1).unwrap();
            assert!((0..512).all(free), "nobody is kept out while this one waits");
            looks < 3
        });
        assert!(matches!(refused, Err(Refused::Clash(_))));
        assert_eq!(looks, 3);

        let mut theirs = Some(theirs);
        take(ours.as_fd(), true, false, |_| theirs.take().is_some()).unwrap();
    }

    #[test]
    fn the_moment_ends() {
        assert_eq!((0..).take_while(|attempt| a_moment(*attempt)).count(), 5);
    }

    #[test]
    fn a_file_system_without_locks_is_told_from_one_that_fails() {
        for (errno, unsupported) in [
            (Errno::NOLCK, true),
            (Errno::INVAL, true),
            (Errno::OPNOTSUPP, true),
            (Errno::NOSYS, true),
            (Errno::IO, false),
            (Errno::BADF, false),
        ] {
            let refused = Refused::from(io::Error::from(errno));
            assert_eq!(matches!(refused, Refused::Unsupported(_)), unsupported, "{errno}");
        }
    }
}
