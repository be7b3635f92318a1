//! Locks an image as QEMU does, and locks parts of one image against each other, so that two programs never
//! write the same bytes.
//! It never takes a lock that would let QEMU write beside it, and never waits longer than a moment.
//!
//! # The bytes that QEMU knows
//! QEMU's raw-posix driver speaks through shared (read) locks on single bytes of the image. The bytes need
//! not exist; their contents mean nothing. For each permission *p* there are two:
//!
//! | byte | locked means |
//! | --- | --- |
//! | 100 + *p* | a process uses permission *p* |
//! | 200 + *p* | a process does not share permission *p* with others |
//!
//! *p* is 0 for reading, 1 for writing, 2 for writing what is there already, 3 for resizing (4 was given up).
//! An opener first takes its own bytes, then asks whether an exclusive lock *would* conflict on 200 + *p* for
//! each *p* that it uses and on 100 + *p* for each that it does not share. Shared locks never exclude each
//! other, so that question is the whole protocol. Because every opener announces itself before it asks, at
//! most one of two simultaneous openers goes on.
//!
//! becket uses reading, and writing if the image is writable; it shares neither writing nor resizing. So for
//! QEMU a file may have many readers or one writer. With `shared`, becket announces what it uses, forbids
//! nothing and asks nothing: a process that does not share writing still sees the announcement and is
//! refused.
//!
//! # The bytes that becket knows
//! Two partitions of one disk are two devices that share no bytes. The question above cannot distinguish them
//! from two writers of the same bytes, so becket asks a second one, far behind the end of any file:
//!
//! | byte | locked means |
//! | --- | --- |
//! | 2^62 - 3 | shared: a writer with `shared`, which no rule here binds |
//! | 2^62 - 2 | shared: a writer that was let in |
//! | 2^62 - 1 | the gate: exclusive while a writer is let in, shared while a reader is |
//! | 2^62 + *n* | byte *n* of the file is written (exclusive) or read (shared) by one that was let in |
//!
//! An opener holds the gate while it announces itself to QEMU. If a writer is inside already, the opener
//! skips QEMU's question, because becket's own locks would answer it: nothing else got in beside that writer,
//! and since the writer was still there at the announcement, nothing has come since. (A writer with `shared`
//! may have; it has its byte.) If no writer is inside, the opener asks QEMU's question as usual.
//! Then it locks its range, which excludes every opener of an overlapping range, and, if it writes, locks the
//! byte of a writer inside. An opener that is inside has asked QEMU's question or found one there that had.
//! So the gate serves one purpose only: two simultaneous openers do not take each other for strangers.
//!
//! A range is widened to whole pages: a write through the page cache beside a direct one could otherwise
//! write back old bytes of its neighbour. An image that is not one range of the file is locked as the
//! innermost range around it, or as the whole file.
//!
//! A partition of a block device that is opened by its own node has locks of its own. The bytes of it that
//! are used are locked on the whole disk, too, by a second descriptor (`outer`): just their range, exactly.
//!
//! One limit: with readers inside and no writer, the locks do not show whether all readers are becket's. So a
//! part that is read keeps writers of other parts out; but a reader of one part is let in beside a writer of
//! another.
//!
//! # How long
//! The locks belong to the open file description (`F_OFD_SETLK`): they go wherever the descriptor is passed,
//! and last until its last copy is closed, in the supervisor, a worker or the kernel's loop driver.
//!
//! # The moment
//! The last copy may outlive its owner by a moment: a process that is being spawned holds copies of all
//! descriptors until it executes its program, and the kernel closes the file of a loop device after the
//! device is gone. A ring releases a file of its table late, before Linux 6.13 up to a second later. That is
//! too long, so the process that knows that a device has ended [gives its locks
//! up](crate::Source::unlock). A conflict counts only after a few retries ([`a_moment`]), so that
//! detaching and attaching again does not fail by accident. The holder of the gate is at work, so the wait
//! for the gate is a little longer.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use becket_uapi::lock::{LockKind, ofd_lock, ofd_test, ofd_unlock};
use rustix::io::Errno;

const USED_BASE: u64 = 100;
const UNSHARED_BASE: u64 = 200;
/// From the first byte of any permission on, enough for all of both kinds.
const LOCKED_LEN: u64 = 200;

/// Behind the end of any file.
const FAR: u64 = 1 << 62;
const UNBOUND: u64 = FAR - 3;
const INSIDE: u64 = FAR - 2;
const GATE: u64 = FAR - 1;

/// How often the gate is tried, a millisecond apart.
const GATE_TRIES: u32 = 2000;

/// All of a file, however long it becomes.
pub(crate) const WHOLE: Range<u64> = 0..u64::MAX;

/// The use of a file that an opener asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) write: bool,
    /// Exclude no other user, and ignore the locks of others.
    pub(crate) shared: bool,
    /// With which of its bytes.
    pub(crate) range: Range<u64>,
}

impl Claim {
    /// A file that is used by others as they like.
    pub(crate) fn of_all(write: bool, shared: bool) -> Claim {
        Claim { write, shared, range: WHOLE }
    }

    /// First byte and length of its lock; a length of 0 reaches as far as there are bytes.
    fn place(&self) -> (u64, u64) {
        let (start, end) = self.pages();
        (FAR + start, end.map_or(0, |end| end.saturating_sub(start).max(1)))
    }

    /// The range in whole pages; without an end it is all that follows.
    fn pages(&self) -> (u64, Option<u64>) {
        let page = rustix::param::page_size() as u64;
        let start = (self.range.start / page * page).min(FAR - 1);
        (start, self.range.end.checked_next_multiple_of(page).filter(|end| *end < FAR))
    }

    /// Whether only readers keep a writer away: as a reader it would be let in.
    pub(crate) fn only_read(&self, fd: BorrowedFd<'_>) -> bool {
        let written = |place| ofd_test(fd, LockKind::Exclusive, place, 1).unwrap_or(true);
        self.write && !written(Permission::Write.used()) && may_be_read(fd, &self.range)
    }

    /// Whether another user's bytes, from `start` to `end`, share a page with the range.
    pub(crate) fn meets(&self, start: u64, end: u64) -> bool {
        let (ours, our_end) = self.pages();
        start < our_end.unwrap_or(u64::MAX) && ours < end
    }
}

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
    /// Another use excludes this one; a description of it, for people.
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

/// Announces the use of the image on `fd`, which must be readable (and writable by a writer), and checks that
/// it is compatible with all other uses.
///
/// After a clash all locks of this description are given up; `wait` then says whether to try again.
pub(crate) fn take(
    fd: BorrowedFd<'_>,
    claim: &Claim,
    mut wait: impl FnMut(u32) -> bool,
) -> Result<(), Refused> {
    let mut attempt = 0;
    loop {
        let entered = enter(fd, claim);
        let again = entered.is_ok();
        match entered.and_then(|()| try_take(fd, claim)) {
            Err(Refused::Clash(clash)) => {
                ofd_unlock(fd, USED_BASE, LOCKED_LEN)?;
                ofd_unlock(fd, UNBOUND, 0)?;
                if !again || !wait(attempt) {
                    return Err(Refused::Clash(clash));
                }
                attempt += 1;
            }
            Ok(()) => return ofd_unlock(fd, GATE, 1).map_err(Refused::from),
            failed => return failed,
        }
    }
}

/// Takes the gate, which others hold only for the time of a few system calls.
fn enter(fd: BorrowedFd<'_>, claim: &Claim) -> Result<(), Refused> {
    // A process that locks the whole file is not at the gate: this byte detects it, without waiting.
    announce(fd, Permission::Read.used())?;
    let kind = if claim.write { LockKind::Exclusive } else { LockKind::Shared };
    for _ in 0..GATE_TRIES {
        if claim.shared || ofd_lock(fd, kind, GATE, 1)? {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(Refused::Clash(format!("another process holds the lock for attaching it (lock byte {GATE})")))
}

/// Takes a shared lock on a byte; a program that keeps to the rules never excludes it.
fn announce(fd: BorrowedFd<'_>, byte: u64) -> Result<(), Refused> {
    match ofd_lock(fd, LockKind::Shared, byte, 1)? {
        true => Ok(()),
        false => Err(Refused::Clash(format!("it holds byte {byte} exclusively"))),
    }
}

fn try_take(fd: BorrowedFd<'_>, claim: &Claim) -> Result<(), Refused> {
    let uses: &[Permission] =
        if claim.write { &[Permission::Read, Permission::Write] } else { &[Permission::Read] };
    let unshares: &[Permission] = if claim.shared { &[] } else { &[Permission::Write, Permission::Resize] };

    // That it reads was announced before the gate.
    let own = uses.iter().skip(1).map(|p| p.used()).chain(unshares.iter().map(|p| p.unshared()));
    for byte in own {
        announce(fd, byte)?;
    }
    if claim.shared {
        return if claim.write { announce(fd, UNBOUND) } else { Ok(()) };
    }
    if !ofd_test(fd, LockKind::Exclusive, INSIDE, 1)? {
        suits_qemu(fd, uses, unshares)?;
    } else if ofd_test(fd, LockKind::Exclusive, UNBOUND, 1)? {
        return Err(Refused::Clash("it writes to it with --shared".to_owned()));
    }
    let (start, len) = claim.place();
    let kind = if claim.write { LockKind::Exclusive } else { LockKind::Shared };
    if !ofd_lock(fd, kind, start, len)? {
        return Err(Refused::Clash(same_bytes(fd, start, len)?));
    }
    if claim.write {
        announce(fd, INSIDE)?;
    }
    // It may have been attached with `shared` first.
    ofd_unlock(fd, UNBOUND, 1)?;
    Ok(())
}

/// Locks the range of a disk that a partition is: it excludes who claims bytes of it by way of the disk, and
/// nobody else, so neighbours that share a page are no clash. QEMU hears of the partition only.
pub(crate) fn take_range(
    fd: BorrowedFd<'_>,
    write: bool,
    range: &Range<u64>,
    mut wait: impl FnMut(u32) -> bool,
) -> Result<(), Refused> {
    let (start, len) = exactly(range);
    let kind = if write { LockKind::Exclusive } else { LockKind::Shared };
    let mut attempt = 0;
    while !ofd_lock(fd, kind, start, len)? {
        if !wait(attempt) {
            return Err(Refused::Clash(same_bytes(fd, start, len)?));
        }
        attempt += 1;
    }
    Ok(())
}

/// Whether nobody who keeps to becket's locks writes to the range.
pub(crate) fn may_be_read(fd: BorrowedFd<'_>, range: &Range<u64>) -> bool {
    let (start, len) = exactly(range);
    ofd_test(fd, LockKind::Shared, start, len).is_ok_and(|clash| !clash)
}

/// First byte and length of the lock on a range and on no byte beside it.
fn exactly(range: &Range<u64>) -> (u64, u64) {
    let end = range.end.min(FAR - 1);
    let start = range.start.min(end.saturating_sub(1));
    (FAR + start, end - start)
}

fn same_bytes(fd: BorrowedFd<'_>, start: u64, len: u64) -> Result<String, Refused> {
    let what = if ofd_test(fd, LockKind::Shared, start, len)? { "writes to" } else { "reads" };
    Ok(format!("another becket device {what} the same bytes of it"))
}

/// QEMU's question.
fn suits_qemu(fd: BorrowedFd<'_>, uses: &[Permission], unshares: &[Permission]) -> Result<(), Refused> {
    // Most files have no other user at all, which one query shows.
    if !ofd_test(fd, LockKind::Exclusive, USED_BASE, LOCKED_LEN)? {
        return Ok(());
    }
    for p in uses {
        if ofd_test(fd, LockKind::Exclusive, p.unshared(), 1)? {
            return Err(Refused::Clash(format!("it {} (lock byte {})", p.forbidding(), p.unshared())));
        }
    }
    for p in unshares {
        if ofd_test(fd, LockKind::Exclusive, p.used(), 1)? {
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
        let open = || File::options().read(true).write(true).open(named.path()).unwrap();
        let [ours, theirs] = [open(), open()];
        take(theirs.as_fd(), &Claim::of_all(true, false), |_| false).unwrap();

        let mut looks = 0;
        let refused = take(ours.as_fd(), &Claim::of_all(true, false), |attempt| {
            assert_eq!(attempt, looks);
            looks += 1;
            let free = |byte| !ofd_test(theirs.as_fd(), LockKind::Exclusive, byte, 1).unwrap();
            let bytes = (0..512).chain(UNBOUND..FAR + 2);
            assert!(bytes.into_iter().all(free), "nobody is kept out while this one waits");
            looks < 3
        });
        assert!(matches!(refused, Err(Refused::Clash(_))));
        assert_eq!(looks, 3);

        let mut theirs = Some(theirs);
        take(ours.as_fd(), &Claim::of_all(true, false), |_| theirs.take().is_some()).unwrap();
    }

    #[test]
    fn the_moment_ends() {
        assert_eq!((0..).take_while(|attempt| a_moment(*attempt)).count(), 5);
    }

    #[test]
    fn a_file_system_without_locks_is_not_one_that_fails() {
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
