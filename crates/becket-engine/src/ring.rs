//! One io_uring with its tables of registered descriptors and buffers.
//! Knows nothing of requests; it never allocates and enters the kernel once per batch.
//!
//! The only room where submission entries are pushed. What an entry points to must live until its completion:
//! the queue guarantees it by giving up buffers, descriptors and slots only when nothing of it is in flight.

use std::{
    io,
    os::fd::{BorrowedFd, RawFd},
    time::Instant,
};

use io_uring::{IoUring, cqueue, opcode, register::Restriction, squeue};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::{Answer, Error, provided::Provided, ranges::Ranges};

mod entry;

#[cfg(test)]
pub(crate) use entry::words_of;
pub(crate) use entry::{Transfer, fixed, listed, multishot_into, shortened, unanswered};

/// Submission entries of each ring; a longer batch is submitted in pieces.
const ENTRIES: u32 = 1024;
/// The same where little memory may be locked: since Linux 6.14 the rings of processes without CAP_IPC_LOCK
/// count against that limit, those of all of a user's processes together, and each worker has some.
const FEW_ENTRIES: u32 = 256;
/// What is little, in bytes: rings are shorter then.
pub const LITTLE: u64 = 64 << 20;
/// Completions taken from the ring at once.
pub(crate) const BATCH: usize = 256;
/// Slots for registered descriptors of each ring, if the limit on open files allows.
const FILES: u32 = 8192;
/// The kernel's limit on registered buffers.
const BUFFERS: u32 = 16384;
/// Kernel threads that a ring may use at least for operations that block, of files and disks and of all else.
const FEWEST_WORKERS: u32 = 8;

/// All that a ring carries out; the kernel refuses the rest. A filter of system calls does not see what is
/// submitted to a ring, so a process that may open nothing needs rings that open nothing.
const OPERATIONS: [u8; 15] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::ReadFixed::CODE,
    opcode::WriteFixed::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::UringCmd16::CODE,
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
    // On sockets that the process was given: exports and links.
    opcode::Recv::CODE,
    opcode::SendMsg::CODE,
    // What stands for an operation that waits or fails on purpose.
    opcode::Nop::CODE,
    opcode::Timeout::CODE,
];
/// All that can be changed about a ring once it runs (`enum io_uring_register_op`): slots of descriptors, the
/// table of buffers, the number of kernel threads, buffers to pick from.
const REGISTRATIONS: [u8; 4] = [6, 15, 19, 22];

/// A completion: whose it is and what came out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Completion {
    pub(crate) user_data: u64,
    pub(crate) result: i32,
    pub(crate) flags: u32,
}

/// The ring of one I/O thread.
pub(crate) struct Ring {
    // Dropped before what the kernel may still write to.
    uring: IoUring,
    /// From which the kernel picks for its answers, once there are queues that want such.
    picks: Option<Provided>,
    thread: usize,
    batch: [Completion; BATCH],
    /// When the ring was made.
    epoch: Instant,
    /// See [`Ring::now`].
    now: u64,
    files: Ranges,
    buffers: Ranges,
    /// See [`Ring::may_block`].
    may_block: u32,
    /// See [`Ring::releases_at_once`].
    releases_at_once: bool,
    /// See [`Ring::register_unwaiting`].
    asks_first: bool,
    /// The slot of a file of zeroes, once a queue needs it.
    pub(crate) zeroes: Option<u32>,
}

/// How many submission entries a ring has, by the limit on locked memory.
fn entries(limit: Option<u64>) -> u32 {
    if limit.is_some_and(|limit| limit < LITTLE) { FEW_ENTRIES } else { ENTRIES }
}

/// Makes a ring as an I/O thread does, and closes it.
///
/// # Errors
/// This process can have none: `ENOSYS` without io_uring, `EPERM` where it is forbidden, `ENOMEM` where too
/// little memory may be locked, `EINVAL` on a kernel that is too old.
pub fn try_ring() -> io::Result<()> {
    match Ring::new(0) {
        Ok(_) => Ok(()),
        Err(Error::Ring { source, .. }) => Err(source),
        Err(other) => Err(io::Error::other(other)),
    }
}

impl Ring {
    /// A ring for the calling thread, the only one that may ever use it.
    pub(crate) fn new(thread: usize) -> Result<Ring, Error> {
        let ring = |source| Error::Ring { thread, source };
        let entries = entries(getrlimit(Resource::Memlock).current);
        let mut builder = IoUring::builder();
        builder.setup_single_issuer().setup_defer_taskrun().setup_submit_all().setup_cqsize(4 * entries);
        // It runs once it is restricted.
        builder.setup_r_disabled();
        // Entries are submitted in the order in which they stand; kernels before 6.6 want that said for each.
        let uring = match builder.clone().setup_no_sqarray().build(entries) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => builder.build(entries),
            other => other,
        };
        let uring = uring.map_err(ring)?;
        let submitter = uring.submitter();
        let open_files = getrlimit(Resource::Nofile).current;
        let files = open_files.map_or(FILES, |limit| FILES.min(u32::try_from(limit).unwrap_or(FILES)));
        submitter.register_files_sparse(files).map_err(ring)?;
        submitter.register_iowq_max_workers(&mut [FEWEST_WORKERS; 2]).map_err(ring)?;
        submitter.register_restrictions(&mut restrictions()).map_err(ring)?;
        submitter.register_enable_rings().map_err(ring)?;
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        Ok(Ring {
            uring,
            picks: None,
            thread,
            batch: [Completion { user_data: 0, result: 0, flags: 0 }; BATCH],
            epoch: Instant::now(),
            now: 0,
            files: Ranges::new(files),
            buffers: Ranges::new(0),
            may_block: 0,
            releases_at_once: kernel_is_at_least(&release, 6, 13),
            asks_first: kernel_is_at_least(&release, 6, 12),
            zeroes: None,
        })
    }

    /// Whether a descriptor that was taken out of the table is closed as soon as its own operations have
    /// ended.
    ///
    /// Before Linux 6.13 it stays open until every operation that was begun earlier on *any* registered
    /// descriptor of the ring has ended. Commands that wait for long (a FETCH waits for the next request)
    /// must not use the table there: they would keep the descriptors of devices open that are long gone.
    pub(crate) fn releases_at_once(&self) -> bool {
        self.releases_at_once
    }

    /// The ring behaves as one of an older kernel.
    #[cfg(test)]
    pub(crate) fn releases_late(&mut self) {
        self.releases_at_once = false;
    }

    /// Lets `requests` more operations block at the same time, each on a kernel thread of its own.
    ///
    /// No fixed number is enough: an image may lie on another device of this ring, and an operation on the
    /// one that blocks until the other has written would wait for ever if such operations held all threads.
    /// The kernel starts them only when they are needed.
    pub(crate) fn may_block(&mut self, requests: u16) -> Result<(), Error> {
        let wanted = self.may_block.saturating_add(requests.into());
        self.limit_workers(wanted).map_err(|source| Error::Register { what: "kernel threads", source })?;
        self.may_block = wanted;
        Ok(())
    }

    /// Takes back what [`Ring::may_block`] allowed.
    pub(crate) fn blocks_no_more(&mut self, requests: u16) {
        self.may_block = self.may_block.saturating_sub(requests.into());
        // A limit that stays too high does no harm.
        let _ = self.limit_workers(self.may_block);
    }

    fn limit_workers(&self, wanted: u32) -> io::Result<()> {
        // Zero leaves the second limit, of what are neither files nor disks, as it is.
        self.uring.submitter().register_iowq_max_workers(&mut [wanted.max(FEWEST_WORKERS), 0])
    }

    /// Puts descriptors into neighbouring slots of the ring's table and returns the first.
    pub(crate) fn register_files(&mut self, descriptors: &[RawFd]) -> Result<u32, Error> {
        if descriptors.is_empty() {
            return Ok(0);
        }
        let first = self.take_range(descriptors.len(), "descriptors")?;
        let source = match self.uring.submitter().register_files_update(first, descriptors) {
            Ok(done) if done == descriptors.len() => return Ok(first),
            // The kernel stops at the first that it cannot take and tells how many it took, not why it
            // stopped.
            Ok(done) => {
                self.unregister_files(first, done)?;
                self.files.give(first + done as u32, (descriptors.len() - done) as u32);
                io::Error::other("the kernel did not take all of them")
            }
            Err(source) => {
                self.files.give(first, descriptors.len() as u32);
                source
            }
        };
        Err(Error::Register { what: "descriptors", source })
    }

    /// The same, the operations of one of them, `never`, being never to wait in the ring; afterwards it does
    /// not block.
    ///
    /// The kernel notes here what a descriptor can do. Of one that does not block it believes that it may
    /// wait for it in the ring, each operation for itself, and has all of them try again whenever there is
    /// something to read. Of one that blocks it asks first whether there is something, and when it does not
    /// block after all there is an answer at once. Linux 6.1 does not ask, and would never read from such a
    /// one: seen there, and not on 6.12. So before that they wait. Source: `io_file_get_flags`,
    /// `io_rw_init_file` and `io_file_supports_nowait` of the kernel's io_uring.
    pub(crate) fn register_unwaiting(
        &mut self,
        never: BorrowedFd<'_>,
        descriptors: &[RawFd],
    ) -> Result<u32, Error> {
        if !self.asks_first {
            return self.register_files(descriptors);
        }
        let set = |unwaiting| {
            let failed = |errno: Errno| Error::Register { what: "descriptors", source: errno.into() };
            rustix::io::ioctl_fionbio(never, unwaiting).map_err(failed)
        };
        set(false)?;
        let first = self.register_files(descriptors);
        set(true).and(first)
    }

    fn take_range(&mut self, wanted: usize, what: &'static str) -> Result<u32, Error> {
        let ranges = if what == "buffers" { &mut self.buffers } else { &mut self.files };
        u32::try_from(wanted).ok().and_then(|wanted| ranges.take(wanted)).ok_or(Error::Full {
            thread: self.thread,
            what,
            wanted,
        })
    }

    /// Empties slots that [`Ring::register_files`] filled; nothing in flight may use them.
    pub(crate) fn unregister_files(&mut self, first: u32, count: usize) -> Result<(), Error> {
        if count == 0 {
            return Ok(());
        }
        let none = [-1; 16];
        for start in (0..count).step_by(none.len()) {
            let some = none.len().min(count - start);
            self.uring
                .submitter()
                .register_files_update(first + start as u32, &none[..some])
                .map_err(|source| Error::Register { what: "descriptors", source })?;
        }
        self.files.give(first, count as u32);
        Ok(())
    }

    /// Sets neighbouring slots of the buffer table aside and returns the first; a transport fills them.
    pub(crate) fn take_buffers(&mut self, count: u16) -> Result<u32, Error> {
        if self.buffers.size() == 0 {
            self.uring
                .submitter()
                .register_buffers_sparse(BUFFERS)
                .map_err(|source| Error::Register { what: "buffers", source })?;
            self.buffers = Ranges::new(BUFFERS);
        }
        self.take_range(count.into(), "buffers")
    }

    /// How many slots each of `queues` more queues could set aside.
    pub(crate) fn room(&self, queues: u32) -> u32 {
        // Until the first queue needs the table there is none.
        if self.buffers.size() == 0 { BUFFERS / queues.max(1) } else { self.buffers.widest(queues) }
    }

    /// Gives slots back that [`Ring::take_buffers`] had set aside.
    pub(crate) fn give_buffers(&mut self, first: u32, count: u16) {
        self.buffers.give(first, count.into());
    }

    /// Has buffers ready from which the kernel picks for the answers of all queues.
    pub(crate) fn provide(&mut self) -> Result<(), Error> {
        if self.picks.is_some() {
            return Ok(());
        }
        let provided = Provided::of_a_ring()?;
        let (address, count, group) = (provided.address(), provided.count(), provided.group());
        // SAFETY: they stay until the ring is closed.
        unsafe { self.uring.submitter().register_buf_ring_with_flags(address, count, group, 0) }
            .map_err(|source| Error::Register { what: "buffers to pick from", source })?;
        self.picks = Some(provided);
        Ok(())
    }

    /// The group of these, once there are any.
    pub(crate) fn picks_group(&self) -> Option<u16> {
        self.picks.as_ref().map(Provided::group)
    }

    /// Copies what the kernel put into a picked buffer and gives the buffer back; returns the number of
    /// bytes.
    pub(crate) fn picked(&mut self, answer: Answer, into: &mut [u8]) -> usize {
        self.picks.as_mut().map_or(0, |picks| picks.take(answer, into))
    }

    /// Queues an entry; when the queue is full, what is in it goes to the kernel first.
    #[inline]
    pub(crate) fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        debug_assert!(OPERATIONS.contains(&code_of(entry)), "the ring will refuse this operation");
        // SAFETY: see the head of this module: callers keep alive what the entry points to.
        if unsafe { self.uring.submission().push(entry) }.is_ok() {
            return Ok(());
        }
        self.push_into_full(entry)
    }

    #[cold]
    fn push_into_full(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            match self.uring.submit() {
                Ok(_) => {}
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
            // SAFETY: as in `push`.
            if unsafe { self.uring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
        }
    }

    /// Hands what is queued to the kernel without waiting.
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        loop {
            match self.uring.submit() {
                Ok(_) => return Ok(()),
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Hands what is queued to the kernel, waits for a completion, and takes as many as there are into the
    /// batch.
    pub(crate) fn wait(&mut self) -> io::Result<usize> {
        match self.uring.submit_and_wait(1) {
            Ok(_) => {}
            // EBUSY: completions overflowed and must be taken first. EAGAIN: the kernel is short of memory.
            Err(error) if is_passing(&error) => {}
            Err(error) => return Err(error),
        }
        // Five centuries of nanoseconds fit.
        self.now = self.epoch.elapsed().as_nanos() as u64;
        let mut taken = 0;
        for (slot, entry) in self.batch.iter_mut().zip(self.uring.completion()) {
            let entry: cqueue::Entry = entry;
            *slot = Completion { user_data: entry.user_data(), result: entry.result(), flags: entry.flags() };
            taken += 1;
        }
        Ok(taken)
    }

    /// When [`Ring::wait`] last returned, in nanoseconds since the ring was made: the clock is read once for
    /// each turn.
    pub(crate) fn now(&self) -> u64 {
        self.now
    }

    /// A moment by that clock.
    pub(crate) fn time_of(&self, moment: std::time::Instant) -> u64 {
        moment.saturating_duration_since(self.epoch).as_nanos() as u64
    }

    /// A completion of the batch that [`Ring::wait`] took.
    pub(crate) fn taken(&self, index: usize) -> Completion {
        self.batch[index]
    }
}

/// The restrictions of a ring. Flags: descriptors from the table, buffers from a group, no answer.
fn restrictions() -> Vec<Restriction> {
    let flags = squeue::Flags::FIXED_FILE | squeue::Flags::BUFFER_SELECT | squeue::Flags::SKIP_SUCCESS;
    let operations = OPERATIONS.map(Restriction::sqe_op);
    let registrations = REGISTRATIONS.map(Restriction::register_op);
    operations
        .into_iter()
        .chain(registrations)
        .chain([Restriction::sqe_flags_allowed(flags.bits())])
        .collect()
}

/// An entry's operation, its first byte.
fn code_of(entry: &squeue::Entry) -> u8 {
    // SAFETY: an entry is the kernel's `struct io_uring_sqe`: 64 bytes without padding.
    unsafe { std::ptr::from_ref(entry).cast::<u8>().read() }
}

/// EINTR, EAGAIN and EBUSY say that the same call may work next time.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

/// Whether a release such as `6.12.95+deb12-cloud-amd64` is of this version or a later one; no when in doubt.
fn kernel_is_at_least(release: &str, major: u32, minor: u32) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(first)), Some(Ok(second))) => (first, second) >= (major, minor),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_number() {
        for (release, newer) in [
            ("6.13.0", true),
            ("6.12.95+deb12-cloud-amd64", false),
            ("7.3.4+deb13-cloud-amd64", true),
            ("6.9", false),
            ("6.100-rc1", true),
            ("six", false),
            ("", false),
        ] {
            assert_eq!(kernel_is_at_least(release, 6, 13), newer, "{release}");
        }
    }

    #[test]
    fn a_ring_registers_and_forgets_descriptors() {
        use std::os::fd::AsRawFd;
        let mut ring = Ring::new(0).unwrap();
        let file = tempfile::tempfile().unwrap();
        let many: Vec<_> = std::iter::repeat_n(file.as_raw_fd(), 40).collect();
        let first = ring.register_files(&many).unwrap();
        let second = ring.register_files(&many).unwrap();
        assert_ne!(first, second);
        ring.unregister_files(first, 40).unwrap();
        ring.unregister_files(second, 40).unwrap();
        assert_eq!(ring.files.free().len(), 1);
        assert!(ring.register_files(&[-7]).is_err());
        assert_eq!(ring.files.free().len(), 1, "a refused registration gives its slots back");
    }

    #[test]
    fn rings_are_small_where_little_memory_may_be_locked() {
        assert_eq!((entries(Some(8 << 20)), entries(Some(64 << 20)), entries(None)), (256, 1024, 1024));
    }

    /// Of a descriptor like `/dev/fuse`: it can be waited for, and its reads cannot be made not to wait.
    #[test]
    fn reads_of_what_is_not_to_wait_come_back_at_once() {
        use std::os::fd::{AsFd, AsRawFd};
        let flags = rustix::fs::inotify::CreateFlags::NONBLOCK;
        let silent = rustix::fs::inotify::init(flags).unwrap();
        let mut buffer = [0; 64];
        for (unwaiting, came) in [(false, libc::ETIME), (true, libc::EAGAIN)] {
            let mut ring = Ring::new(0).unwrap();
            let raw = [silent.as_raw_fd()];
            let slot = match unwaiting {
                true => ring.register_unwaiting(silent.as_fd(), &raw).unwrap(),
                false => ring.register_files(&raw).unwrap(),
            };
            let read = opcode::Read::new(fixed(slot), buffer.as_mut_ptr(), buffer.len() as u32);
            ring.push(&read.build()).unwrap();
            let soon = io_uring::types::Timespec::new().nsec(100_000_000);
            ring.push(&opcode::Timeout::new(&raw const soon).build()).unwrap();
            assert!(ring.wait().unwrap() > 0);
            assert_eq!(ring.taken(0).result, -came);
            assert!(rustix::fs::fcntl_getfl(&silent).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
        }
    }

    #[test]
    fn a_ring_carries_out_nothing_else() {
        use std::os::fd::AsRawFd;
        let mut ring = Ring::new(0).unwrap();
        let file = tempfile::tempfile().unwrap();
        let fd = io_uring::types::Fd(file.as_raw_fd());
        let path = c"/etc/passwd".as_ptr();
        let refused = [
            opcode::OpenAt::new(io_uring::types::Fd(libc::AT_FDCWD), path).build(),
            opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build(),
            opcode::UnlinkAt::new(io_uring::types::Fd(libc::AT_FDCWD), path).build(),
            opcode::Close::new(fd).build(),
            opcode::Read::new(fd, std::ptr::null_mut(), 0).build().flags(squeue::Flags::ASYNC),
            opcode::Read::new(fd, std::ptr::null_mut(), 0).build().personality(1),
        ];
        for entry in refused {
            // Not by `push`, which asserts that we never ask for it.
            // SAFETY: the path is static, and nothing else is pointed to.
            unsafe { ring.uring.submission().push(&entry) }.unwrap();
            assert_eq!(ring.wait().unwrap(), 1);
            let result = ring.taken(0).result;
            assert!([-libc::EACCES, -libc::EINVAL].contains(&result), "{entry:?}: {result}");
        }
        let entry = opcode::Read::new(fd, std::ptr::null_mut(), 0).build();
        ring.push(&entry).unwrap();
        assert_eq!((ring.wait().unwrap(), ring.taken(0).result), (1, 0));

        let submitter = ring.uring.submitter();
        for refused in [
            submitter.register_personality().map(drop),
            submitter.register_eventfd(file.as_raw_fd()),
            submitter.register_restrictions(&mut restrictions()),
            submitter.unregister_files(),
        ] {
            assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EACCES));
        }
    }

    #[test]
    fn a_registration_that_the_kernel_broke_off_is_refused_and_leaves_nothing() {
        use std::os::fd::AsRawFd;
        let mut ring = Ring::new(0).unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        assert!(ring.register_files(&[writer.as_raw_fd(), -7]).is_err());
        assert_eq!(ring.files.free().len(), 1);
        drop(writer);
        assert_eq!(rustix::io::read(&reader, &mut [0u8; 1]), Ok(0), "the table still holds the writing end");
    }

    #[test]
    fn every_request_that_may_be_under_way_may_block() {
        let mut ring = Ring::new(0).unwrap();
        let limit = |ring: &Ring| {
            let mut now = [0, 0];
            ring.uring.submitter().register_iowq_max_workers(&mut now).unwrap();
            now[0]
        };
        ring.may_block(64).unwrap();
        ring.may_block(128).unwrap();
        assert_eq!(limit(&ring), 192);
        ring.blocks_no_more(128);
        assert_eq!(limit(&ring), 64);
        ring.blocks_no_more(64);
        assert_eq!(limit(&ring), FEWEST_WORKERS);
    }
}
