//! Locks of byte ranges that belong to an open file description (OFD), as QEMU takes them on images.
//! It knows nothing of what the bytes stand for, and blocks only where its name says so.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// What a lock shares its range with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// Other shared locks; the descriptor must be readable.
    Shared,
    /// Nothing; the descriptor must be writable.
    Exclusive,
}

impl LockKind {
    const fn raw(self) -> libc::c_int {
        match self {
            LockKind::Shared => libc::F_RDLCK,
            LockKind::Exclusive => libc::F_WRLCK,
        }
    }
}

/// Takes a lock on `len` bytes (0: to the end of the file, wherever that is) from `start`, or changes the
/// kind of one that this description has. `false` when another description's lock is in the way. It lives
/// until it is unlocked or the last descriptor of this description is closed, in any process.
pub fn ofd_lock(fd: BorrowedFd<'_>, kind: LockKind, start: u64, len: u64) -> io::Result<bool> {
    match fcntl(fd, libc::F_OFD_SETLK, kind.raw(), start, len) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The same, once no other description's lock is in the way.
pub fn ofd_lock_wait(fd: BorrowedFd<'_>, kind: LockKind, start: u64, len: u64) -> io::Result<()> {
    loop {
        match fcntl(fd, libc::F_OFD_SETLKW, kind.raw(), start, len) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other.map(drop),
        }
    }
}

/// Whether another description holds a lock that such a lock would conflict with. Takes nothing.
pub fn ofd_test(fd: BorrowedFd<'_>, kind: LockKind, start: u64, len: u64) -> io::Result<bool> {
    fcntl(fd, libc::F_OFD_GETLK, kind.raw(), start, len).map(|found| found != libc::F_UNLCK)
}

/// Gives this description's locks of a range up.
pub fn ofd_unlock(fd: BorrowedFd<'_>, start: u64, len: u64) -> io::Result<()> {
    fcntl(fd, libc::F_OFD_SETLK, libc::F_UNLCK, start, len).map(drop)
}

/// One fcntl with a `struct flock`; the answer is the `l_type` that it leaves.
fn fcntl(
    fd: BorrowedFd<'_>,
    command: libc::c_int,
    kind: libc::c_int,
    start: u64,
    len: u64,
) -> io::Result<libc::c_int> {
    let too_large = |_| io::Error::from_raw_os_error(libc::EOVERFLOW);
    // SAFETY: `flock` is integers only, for which zero is a value (some targets have padding fields).
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = start.try_into().map_err(too_large)?;
    lock.l_len = len.try_into().map_err(too_large)?;
    // SAFETY: all of these commands read and write one `flock`, which outlives the call.
    match unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw mut lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(libc::c_int::from(lock.l_type)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    /// An unnamed file, opened twice: two descriptions of one inode.
    fn twice() -> io::Result<(File, File)> {
        let path = std::env::temp_dir().join(format!(
            "becket-lock-{}-{:?}",
            std::process::id(),
            std::thread::current().id()
        ));
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let pair = (options.open(&path)?, options.open(&path)?);
        std::fs::remove_file(&path)?;
        Ok(pair)
    }

    #[test]
    fn locks_belong_to_descriptions_not_to_processes() -> io::Result<()> {
        let (one, two) = twice()?;
        assert!(ofd_lock(one.as_fd(), LockKind::Exclusive, 100, 1)?);
        assert!(
            !ofd_test(one.as_fd(), LockKind::Exclusive, 100, 1)?,
            "a lock of one's own is not a conflict"
        );
        assert!(ofd_test(two.as_fd(), LockKind::Shared, 100, 1)?);
        assert!(!ofd_lock(two.as_fd(), LockKind::Shared, 100, 1)?);
        assert!(ofd_lock(two.as_fd(), LockKind::Shared, 101, 1)?, "only that byte is locked");

        let copy = one.try_clone()?;
        drop(one);
        assert!(ofd_test(two.as_fd(), LockKind::Shared, 100, 1)?, "a duplicate keeps the lock");
        drop(copy);
        // A process that another test is starting holds a duplicate of everything until it becomes its
        // program.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(5);
        while ofd_test(two.as_fd(), LockKind::Shared, 100, 1)? {
            assert!(std::time::Instant::now() < end, "the last close gives it up");
            std::thread::yield_now();
        }
        Ok(())
    }

    #[test]
    fn who_waits_for_a_lock_gets_it_when_it_is_free() -> io::Result<()> {
        let (one, two) = twice()?;
        assert!(ofd_lock(one.as_fd(), LockKind::Exclusive, 7, 1)?);
        ofd_lock_wait(two.as_fd(), LockKind::Exclusive, 8, 1)?;
        let freed = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                ofd_lock_wait(two.as_fd(), LockKind::Exclusive, 7, 1)
                    .map(|()| freed.load(std::sync::atomic::Ordering::SeqCst))
            });
            std::thread::sleep(std::time::Duration::from_millis(20));
            freed.store(true, std::sync::atomic::Ordering::SeqCst);
            ofd_unlock(one.as_fd(), 7, 1)?;
            assert!(waiter.join().map_err(|_| io::Error::other("it panicked"))??, "not before it was free");
            Ok(())
        })
    }

    #[test]
    fn shared_locks_coexist_and_unlocking_frees() -> io::Result<()> {
        let (one, two) = twice()?;
        assert!(ofd_lock(one.as_fd(), LockKind::Shared, 0, 0)?);
        assert!(ofd_lock(two.as_fd(), LockKind::Shared, 0, 0)?);
        assert!(!ofd_lock(two.as_fd(), LockKind::Exclusive, 7, 1)?);
        ofd_unlock(one.as_fd(), 0, 0)?;
        assert!(ofd_lock(two.as_fd(), LockKind::Exclusive, 7, 1)?);
        Ok(())
    }
}
