//! The read lease under which blocks of a file may be read without it, and the proof that it still means so.
//! It never waits for another program, and is never taken a second time.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use becket_uapi::lease;
use rustix::fs::Stat;
use serde::{Deserialize, Serialize};

/// How old a time of change must be: far more than the clock that it was taken from takes for a step (1 to 10 ms).
const OLD_ENOUGH: Duration = Duration::from_millis(100);

/// What an inode shows as long as nobody has changed anything about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Untouched {
    /// Length in bytes.
    pub size: i64,
    /// Time of the last change, in whole seconds and nanoseconds.
    pub changed: (i64, u64),
}

impl Untouched {
    fn of(stat: &Stat) -> Untouched {
        Untouched { size: stat.st_size, changed: (stat.st_ctime, stat.st_ctime_nsec as _) }
    }

    /// How long ago the change was; `None` when that is yet to come.
    fn age(&self) -> Option<Duration> {
        let (seconds, nanoseconds) = self.changed;
        let since_epoch = Duration::new(u64::try_from(seconds).ok()?, u32::try_from(nanoseconds).ok()?);
        SystemTime::now().duration_since(UNIX_EPOCH.checked_add(since_epoch)?).ok()
    }
}

/// A read lease on a file, on a description of its own; it goes with this value.
#[derive(Debug)]
pub struct ReadLease {
    file: OwnedFd,
    untouched: Untouched,
}

impl ReadLease {
    /// Takes a lease for a description that is open for reading.
    ///
    /// # Errors
    /// Why there is none, in one sentence.
    pub fn take(file: OwnedFd) -> Result<ReadLease, String> {
        lease::take_read_lease(file.as_fd()).map_err(|error| match error.raw_os_error() {
            Some(libc::EAGAIN) => "somebody has it open for writing".to_owned(),
            Some(libc::EACCES) => "it is another user's: only its owner or root may take a lease".to_owned(),
            _ => format!("no lease is to be had on it: {error}"),
        })?;
        // The next change must not get the same time of change as the last one.
        for _ in 0..10 {
            let stat = rustix::fs::fstat(&file).map_err(|errno| format!("its inode: {errno}"))?;
            let untouched = Untouched::of(&stat);
            match untouched.age() {
                None => return Err("its time of change lies in the future".to_owned()),
                Some(age) if age >= OLD_ENOUGH => return Ok(ReadLease { file, untouched }),
                Some(age) => std::thread::sleep(OLD_ENOUGH.saturating_sub(age)),
            }
        }
        Err("it is being changed all the time".to_owned())
    }

    /// A lease that another process has taken, with what it saw then.
    pub fn handed_over(file: OwnedFd, untouched: Untouched) -> ReadLease {
        ReadLease { file, untouched }
    }

    /// What the inode showed when the lease was taken.
    pub fn untouched(&self) -> Untouched {
        self.untouched
    }

    /// Whether everything that was read below until now is the file's: two system calls, neither of which waits.
    ///
    /// In this order: see the design note of this module's parent.
    pub fn holds(&self) -> bool {
        let same = rustix::fs::fstat(&self.file).is_ok_and(|stat| Untouched::of(&stat) == self.untouched);
        same && lease::has_read_lease(self.file.as_fd()).unwrap_or(false)
    }

    /// Has this process get [`lease::BREAK_SIGNAL`] when somebody waits for the lease to end.
    ///
    /// One that began to wait before is not told of: ask [`ReadLease::holds`] afterwards.
    ///
    /// # Errors
    /// That of fcntl(2).
    pub fn hear_of_breaks(&self) -> std::io::Result<()> {
        lease::hear_of_breaks(self.file.as_fd())
    }
}

impl From<ReadLease> for OwnedFd {
    fn from(lease: ReadLease) -> OwnedFd {
        lease.file
    }
}

impl AsFd for ReadLease {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
