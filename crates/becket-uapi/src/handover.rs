//! What a process takes over from the one that started it, and what it stops sharing with it.
//! It never takes a descriptor that this process opened by itself.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use rustix::thread::UnshareFlags;

/// Takes over a descriptor that was handed to this program by its number. It is close-on-exec from then on,
/// so it can be taken once; of 0, 1 and 2, which stay the standard streams, a copy is returned.
///
/// # Errors
/// `EBADF`: there is no such descriptor, or it was not handed over.
pub fn inherited_fd(number: RawFd) -> io::Result<OwnedFd> {
    match number {
        ..0 => return Err(io::Error::from_raw_os_error(libc::EBADF)),
        0 => return io::stdin().as_fd().try_clone_to_owned(),
        1 => return io::stdout().as_fd().try_clone_to_owned(),
        2 => return io::stderr().as_fd().try_clone_to_owned(),
        3.. => {}
    }
    // SAFETY: only asked for its flags; a number without a descriptor is answered with an error.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    // Everything that std and this workspace open is close-on-exec, so a descriptor without that mark came
    // through exec and nothing here owns it. The mark is set before it is owned: a second call fails.
    if fcntl_getfd(borrowed)?.contains(FdFlags::CLOEXEC) {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    fcntl_setfd(borrowed, FdFlags::CLOEXEC)?;
    // SAFETY: it is open, and by the mark just tested nothing in this process owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Closes what came through exec besides the standard streams and was not taken over; returns how many.
///
/// A descriptor that a parent forgot to mark would keep a file, its locks and its device alive.
///
/// # Errors
/// `/proc` is not there to say which descriptors there are.
pub fn close_inherited() -> io::Result<usize> {
    let numbers: Vec<RawFd> = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|number| *number > 2)
        .collect();
    // Those of our own are marked, and those that are gone by now (the directory's) are no descriptors: both
    // err.
    Ok(numbers.into_iter().filter_map(|number| inherited_fd(number).ok()).count())
}

/// Gives the calling thread a mount namespace of its own, a copy of the present one. Call it before other
/// threads start, which then share the new one.
///
/// # Errors
/// `EPERM` without CAP_SYS_ADMIN.
pub fn unshare_mounts() -> io::Result<()> {
    // SAFETY: without `FILES` in the flags no descriptor table is affected.
    Ok(unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsRawFd, IntoRawFd};

    use super::*;

    /// In a process of its own: other tests make unmarked descriptors too.
    #[test]
    fn what_nobody_took_over_is_closed() {
        const CHILD: &str = "BECKET_TEST_CLOSE_INHERITED";
        if std::env::var_os(CHILD).is_some() {
            // At least the one below; the caller of the tests may hand over more.
            assert!(std::fs::exists("/proc/self/fd/9").unwrap());
            assert!(close_inherited().unwrap() >= 1);
            assert!(!std::fs::exists("/proc/self/fd/9").unwrap());
            assert_eq!(close_inherited().unwrap(), 0);
            return;
        }
        let script = "exec 9</dev/null; exec \"$0\" what_nobody_took_over_is_closed";
        let test = std::env::current_exe().unwrap();
        let child =
            std::process::Command::new("sh").args(["-c", script]).arg(test).env(CHILD, "1").output().unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    fn only_what_was_handed_over_is_taken_and_only_once() {
        let own = File::open("/dev/null").unwrap();
        let error = inherited_fd(own.as_raw_fd()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));

        // As it is after exec: open, unmarked, without an owner.
        fcntl_setfd(&own, FdFlags::empty()).unwrap();
        let number = own.into_raw_fd();
        let taken = inherited_fd(number).unwrap();
        assert_eq!(taken.as_raw_fd(), number);
        assert!(inherited_fd(number).is_err());
        assert!(inherited_fd(-1).is_err());
        assert!(inherited_fd(1_000_000).is_err());
        assert!(inherited_fd(1).unwrap().as_raw_fd() > 2);
    }
}
