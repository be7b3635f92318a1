//! Leases of files: being told before somebody opens a file for writing or truncates it by name.
//! It never waits, and knows nothing of what is done under a lease.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::process::Signal;

/// Of the kernel's `fcntl.h`; the libc crate does not have it everywhere.
const F_SETSIG: libc::c_int = 10;

/// What tells of a lease's break. By default it is ignored, where the kernel's choice (`SIGIO`) ends the process: the
/// taker is told until somebody else says [`hear_of_breaks`].
pub const BREAK_SIGNAL: Signal = Signal::URG;

/// Takes a read lease for this open file description; whoever opens the file for writing then waits for its end.
///
/// It ends when the description's last descriptor is closed, or when a break has waited for `fs.lease-break-time`.
///
/// # Errors
/// `EAGAIN`: somebody has the file open for writing. `EACCES`: the file is another user's and `CAP_LEASE` is missing.
/// `EINVAL`: no leases on this file system, or none at all on this system.
pub fn take_read_lease(file: BorrowedFd<'_>) -> io::Result<()> {
    // Before there is a lease that could break.
    fcntl(file, F_SETSIG, BREAK_SIGNAL.as_raw())?;
    fcntl(file, libc::F_SETLEASE, libc::F_RDLCK).map(drop)
}

/// Whether the description has a lease that nobody wants to break.
///
/// # Errors
/// That of fcntl(2).
pub fn has_read_lease(file: BorrowedFd<'_>) -> io::Result<bool> {
    fcntl(file, libc::F_GETLEASE, 0).map(|kind| kind == libc::F_RDLCK)
}

/// Has this process get [`BREAK_SIGNAL`] when somebody wants to break the description's lease.
///
/// # Errors
/// That of fcntl(2).
pub fn hear_of_breaks(file: BorrowedFd<'_>) -> io::Result<()> {
    // A process that leads no thread group has no such number: it always fits.
    let me = libc::c_int::try_from(std::process::id()).map_err(io::Error::other)?;
    fcntl(file, libc::F_SETOWN, me).map(drop)
}

fn fcntl(file: BorrowedFd<'_>, command: libc::c_int, argument: libc::c_int) -> io::Result<libc::c_int> {
    // SAFETY: each of these commands takes an integer or nothing, and touches no memory.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, argument) } {
        -1 => Err(io::Error::last_os_error()),
        answer => Ok(answer),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;

    #[test]
    fn a_lease_is_refused_beside_a_writer_and_breaks_for_the_next() -> io::Result<()> {
        let path = std::env::temp_dir().join(format!("becket-lease-{}", std::process::id()));
        let writer = File::create(&path)?;
        let file = File::open(&path)?;
        let refused = take_read_lease(file.as_fd()).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EAGAIN), "{refused}");
        drop(writer);
        // Another test may just be starting a process, which holds the descriptor until it becomes its program.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while take_read_lease(file.as_fd()).is_err() {
            assert!(std::time::Instant::now() < end);
            std::thread::yield_now();
        }
        assert!(has_read_lease(file.as_fd())?);
        File::open(&path)?;
        assert!(has_read_lease(file.as_fd())?, "a reader breaks nothing");

        // The signal that this sends us is ignored.
        let opened = File::options().write(true).custom_flags(libc::O_NONBLOCK).open(&path);
        assert_eq!(opened.unwrap_err().raw_os_error(), Some(libc::EWOULDBLOCK));
        assert!(!has_read_lease(file.as_fd())?, "what is being broken does not count");
        drop(file);
        File::options().write(true).open(&path)?;
        std::fs::remove_file(&path)
    }
}
