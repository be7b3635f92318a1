//! Leases of files, as a question: does another process have this file open?
//! It never waits, and keeps no lease.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Of the kernel's `fcntl.h`; the libc crate does not have it everywhere.
const F_SETSIG: libc::c_int = 10;

/// Whether no other process has it open: for `write` in any way, else for writing. The description must have
/// been opened for writing exactly when `write` is set.
///
/// It asks by a lease that it gives up at once. A program that opens the file in that moment waits for its
/// end, or fails with `EWOULDBLOCK` if it asked not to wait.
///
/// # Errors
/// `EACCES`: the file is another user's and `CAP_LEASE` is missing. `EINVAL`: no leases on this file system,
/// or none at all on this system.
pub fn is_sole_opener(file: BorrowedFd<'_>, write: bool) -> io::Result<bool> {
    // The kernel's own choice (`SIGIO`) ends a process that does not expect it; this one is ignored by
    // default.
    fcntl(file, F_SETSIG, libc::SIGURG)?;
    match fcntl(file, libc::F_SETLEASE, if write { libc::F_WRLCK } else { libc::F_RDLCK }) {
        Ok(()) => {
            // It can only fail if the lease is gone already.
            let _ = fcntl(file, libc::F_SETLEASE, libc::F_UNLCK);
            Ok(true)
        }
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(false),
        Err(error) => Err(error),
    }
}

fn fcntl(file: BorrowedFd<'_>, command: libc::c_int, argument: libc::c_int) -> io::Result<()> {
    // SAFETY: each of these commands takes an integer, and touches no memory.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, argument) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn every_other_opener_is_seen() -> io::Result<()> {
        let path = std::env::temp_dir().join(format!("becket-sole-{}", std::process::id()));
        let open = |write| File::options().read(true).write(write).open(&path);
        std::fs::write(&path, "x")?;
        // Another test may just be starting a process, which holds copies of all descriptors for a moment.
        let sole = |file: &File, write| {
            (0..500).any(|_| {
                std::thread::sleep(std::time::Duration::from_millis(1));
                is_sole_opener(file.as_fd(), write).unwrap()
            })
        };
        let writer = open(true)?;
        assert!(sole(&writer, true) && sole(&writer, true), "the question leaves nothing behind");
        let reader = open(false)?;
        assert!(!is_sole_opener(writer.as_fd(), true)? && !is_sole_opener(reader.as_fd(), false)?);
        drop(writer);
        let other = open(false)?;
        assert!(sole(&reader, false), "readers are no matter to a reader");
        drop(other);
        std::fs::remove_file(&path)
    }
}
