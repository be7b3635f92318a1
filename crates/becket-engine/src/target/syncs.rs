//! Which finished writes a completed sync covers: the rule of every flush, whatever the target.
//! Syncs nothing itself.

use std::{
    os::fd::BorrowedFd,
    sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering, fence},
};

use becket_image::heard::{Before, Heard};
use rustix::io::Errno;

/// Counts writes and syncs of one source, without a lock.
///
/// A flush may only be skipped when a sync that *began after* the last finished write has *finished*. So a
/// sync takes the number of finished writes before it starts and publishes it when it has succeeded; a flush
/// that sees a larger number of writes than was published syncs again, even while another sync runs.
#[derive(Debug)]
pub(crate) struct Syncs {
    /// Finished writes, one counter for each queue, each written by its own thread only.
    writes: Box<[Counter]>,
    synced: AtomicU64,
    failed: AtomicI32,
    /// Of how many finished writes a flush has to report that they may be lost.
    lost: AtomicU64,
    /// Of how many finished writes one has.
    reported: AtomicU64,
    /// A sync has its turn.
    turn: AtomicBool,
    /// What syncs have heard, for those who serve the source next.
    heard: Option<Heard>,
    /// Which of its descriptions the next sync has to go through; [`NONE`] of them as long as none was
    /// interrupted.
    asks: AtomicUsize,
}

const NONE: usize = usize::MAX;

/// A counter that shares its cache line with no other.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counter(AtomicU64);

impl Syncs {
    /// For a device of so many queues, and what the syncs of those have heard who served the source before.
    pub(crate) fn new(queues: usize, heard: Option<Heard>) -> Syncs {
        let writes: Box<[Counter]> = (0..queues.max(1)).map(|_| Counter::default()).collect();
        // A server before us may have written without syncing: the first flush always syncs.
        writes[0].0.store(1, Ordering::Release);
        let before = heard.as_ref().map_or(Before::Well, Heard::before);
        let (failed, lost, asks) = match before {
            Before::Well => (0, 0, NONE),
            Before::Failed(errno) => (errno, 0, NONE),
            Before::Ask(number) => (0, 0, number),
            Before::Unknown => (0, 1, NONE),
        };
        match before {
            Before::Well => {}
            Before::Failed(errno) => {
                let error = Errno::from_raw_os_error(errno);
                tracing::warn!("an earlier worker could not sync a file: all flushes fail ({error})");
            }
            Before::Ask(_) => {
                tracing::info!("an earlier worker died during a sync: the first flush asks for it")
            }
            Before::Unknown => {
                tracing::warn!("what earlier workers heard during syncs is not known: one flush fails");
            }
        }
        Syncs {
            writes,
            synced: AtomicU64::new(0),
            failed: AtomicI32::new(failed),
            lost: AtomicU64::new(lost),
            reported: AtomicU64::new(0),
            turn: AtomicBool::new(false),
            heard,
            asks: AtomicUsize::new(asks),
        }
    }

    /// What syncs have heard.
    pub(crate) fn heard(&self) -> Option<&Heard> {
        self.heard.as_ref()
    }

    /// The description that a sync has to go through which begins now, where it is not the source's own.
    pub(crate) fn asks(&self) -> Option<BorrowedFd<'_>> {
        self.heard.as_ref()?.unused(self.asks.load(Ordering::Acquire))
    }

    /// A write has finished, whether well or not; only the queue's own thread may call this for `queue`.
    pub(crate) fn wrote(&self, queue: usize) {
        if let Some(counter) = self.writes.get(queue) {
            counter.0.store(counter.0.load(Ordering::Relaxed) + 1, Ordering::Release);
        }
    }

    /// What a sync that begins now will cover, where anything needs one.
    ///
    /// # Errors
    /// An earlier sync failed. That stays: the pages it was about are gone from the cache, and a later sync
    /// that succeeds would say nothing about them.
    pub(crate) fn due(&self) -> Result<Option<u64>, Errno> {
        if self.owes() && self.reports(self.written()) {
            return Err(Errno::IO);
        }
        self.failed().map_or_else(|| Ok(self.pending()), Err)
    }

    /// No server before us has written anything.
    pub(crate) fn begins(&self) {
        self.synced.fetch_max(1, Ordering::AcqRel);
    }

    /// Finished writes may be lost, and those who flush next do not lose theirs: one flush fails. Only the
    /// queue's own thread may call this for `queue`.
    pub(crate) fn lose_once(&self, queue: usize) {
        self.lost.fetch_max(self.written(), Ordering::AcqRel);
        // A flush that begins from here on covers more.
        self.wrote(queue);
    }

    /// Whether a flush that was to cover so many writes may have lost some of them.
    pub(crate) fn loses(&self, covers: u64) -> bool {
        let lost = self.lost.load(Ordering::Acquire);
        lost > 0 && covers <= lost
    }

    /// Whether a flush is still to report what may be lost.
    pub(crate) fn owes(&self) -> bool {
        self.lost.load(Ordering::Acquire) > self.reported.load(Ordering::Acquire)
    }

    /// Whether a write has finished that no sync covers, and that no flush has reported as perhaps lost.
    pub(crate) fn is_at_risk(&self) -> bool {
        self.lacks(self.written())
    }

    /// A flush fails that was to cover so many writes: that reports what may be lost of them. Says whether
    /// anything was to be reported.
    pub(crate) fn reports(&self, covers: u64) -> bool {
        self.reported.fetch_max(covers, Ordering::AcqRel) < self.lost.load(Ordering::Acquire)
    }

    /// Whether a sync that has succeeded began after so many writes had finished.
    pub(crate) fn has_synced(&self, covers: u64) -> bool {
        covers <= self.synced.load(Ordering::Acquire)
    }

    fn pending(&self) -> Option<u64> {
        let writes = self.written();
        (!self.has_synced(writes)).then_some(writes)
    }

    /// Whether of so many finished writes some were neither covered by a sync, nor reported as perhaps lost.
    pub(crate) fn lacks(&self, writes: u64) -> bool {
        !self.has_synced(writes) && writes > self.reported.load(Ordering::Acquire)
    }

    /// How many writes have finished.
    pub(crate) fn written(&self) -> u64 {
        // Two sums may be equal though each counts a write that the other lacks. With the fences the sync of
        // the one then began after the other's writes had ended; without, memory may be weak enough that it
        // did not (Miri shows it).
        let mut writes: u64 = 0;
        for counter in &self.writes {
            fence(Ordering::SeqCst);
            writes += counter.0.load(Ordering::Acquire);
        }
        fence(Ordering::SeqCst);
        writes
    }

    /// What a sync has failed with.
    pub(crate) fn failed(&self) -> Option<Errno> {
        match self.failed.load(Ordering::Acquire) {
            0 => None,
            errno => Some(Errno::from_raw_os_error(errno)),
        }
    }

    /// Pages are lost: no flush succeeds any more, in this process or in the next one that serves the source.
    pub(crate) fn fail(&self, errno: Errno) {
        self.failed.store(errno.raw_os_error(), Ordering::Release);
        if let Some(heard) = &self.heard {
            heard.failed(errno.raw_os_error());
        }
    }

    /// Whether a sync may begin now; it [ends its turn](Syncs::ends_turn) after what it is worth is known.
    ///
    /// The kernel tells of lost pages once for each open file: of two syncs side by side only one would hear
    /// it, and the success of the other may be seen first.
    #[must_use]
    pub(crate) fn takes_turn(&self) -> bool {
        let has_turn = !self.turn.swap(true, Ordering::AcqRel);
        if has_turn && let Some(heard) = &self.heard {
            let number = self.asks.load(Ordering::Acquire);
            heard.begins((number != NONE).then_some(number));
        }
        has_turn
    }

    /// The sync that had its turn has ended.
    pub(crate) fn ends_turn(&self) {
        if let Some(heard) = &self.heard {
            heard.ended();
        }
        self.turn.store(false, Ordering::Release);
    }

    /// A sync that had taken `target` has ended; returns what it is worth.
    pub(crate) fn synced(&self, target: u64, result: Result<(), Errno>) -> Result<(), Errno> {
        match result.and(self.failed().map_or(Ok(()), Err)) {
            Ok(()) => {
                if let Some(heard) = &self.heard {
                    self.asks.store(NONE, Ordering::Release);
                    heard.answered();
                }
                self.synced.fetch_max(target, Ordering::AcqRel);
                Ok(())
            }
            Err(errno) => {
                self.fail(errno);
                Err(errno)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use becket_image::Source;

    use super::*;

    #[test]
    fn the_first_flush_syncs_and_an_idle_one_does_not() {
        let sync = Syncs::new(2, None);
        let target = sync.pending().unwrap();
        sync.synced(target, Ok(())).unwrap();
        assert_eq!(sync.pending(), None);
    }

    #[test]
    fn a_write_that_ends_during_a_sync_is_synced_again() {
        let sync = Syncs::new(2, None);
        let target = sync.pending().unwrap();
        sync.wrote(1);
        sync.synced(target, Ok(())).unwrap();
        assert!(sync.pending().is_some());
    }

    #[test]
    fn a_flush_during_a_sync_does_not_rely_on_it() {
        let sync = Syncs::new(1, None);
        sync.wrote(0);
        let first = sync.pending().unwrap();
        assert_eq!(sync.pending(), Some(first), "the running sync has proven nothing yet");
    }

    #[test]
    fn a_failure_stays() {
        let sync = Syncs::new(1, None);
        let target = sync.pending().unwrap();
        sync.synced(target, Err(Errno::IO)).unwrap_err();
        sync.synced(target, Ok(())).unwrap_err();
        assert_eq!(sync.failed(), Some(Errno::IO));
    }

    #[test]
    fn syncs_have_their_turns() {
        let sync = Syncs::new(2, None);
        let target = sync.pending().unwrap();
        assert!(sync.takes_turn() && !sync.takes_turn());
        assert_eq!(sync.synced(target, Err(Errno::IO)), Err(Errno::IO));
        sync.ends_turn();
        assert!(sync.takes_turn());
        assert_eq!(
            sync.synced(target, Ok(())),
            Err(Errno::IO),
            "only the sync before heard it from the kernel"
        );
    }

    #[test]
    fn what_may_be_lost_is_reported_by_one_flush() {
        let sync = Syncs::new(1, None);
        sync.begins();
        assert!(!sync.is_at_risk(), "nobody has written");
        sync.wrote(0);
        assert!(sync.is_at_risk());
        sync.lose_once(0);
        assert_eq!(sync.due(), Err(Errno::IO));
        assert!(!sync.is_at_risk(), "all of it is reported");
        let covers = sync.due().unwrap().unwrap();
        sync.wrote(0);
        assert!(sync.is_at_risk(), "it was written since");
        sync.synced(covers, Ok(())).unwrap();
        assert!(sync.due().unwrap().is_some(), "no sync has covered it");
    }

    /// What the next worker gets of a file.
    fn next(source: &Source) -> Syncs {
        let fds: Vec<_> = source.descriptors().iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
        let Some(Source::File(file)) = source.described().join(&mut fds.into_iter()) else { panic!() };
        assert!(file.heard.is_some());
        Syncs::new(1, file.heard)
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri maps no files")]
    fn an_interrupted_sync_is_asked_about_and_costs_no_flush() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4096).unwrap();
        let opened = becket_image::open(file.path(), &becket_image::OpenOptions::default()).unwrap();
        let source = &opened.sources[0];
        let first = next(source);
        assert!(first.asks().is_none() && first.takes_turn());
        for _ in 0..10 {
            let next = next(source);
            let covers = next.due().unwrap().unwrap();
            assert!(next.asks().is_some() && next.takes_turn());
            next.synced(covers, Ok(())).unwrap();
            next.ends_turn();
            assert!(next.asks().is_none() && next.takes_turn(), "its own is interrupted, too");
        }
        // Nobody hears what these were answered.
        while next(source).asks().is_some() {
            assert!(next(source).takes_turn());
        }
        let last = next(source);
        assert_eq!(last.due(), Err(Errno::IO), "bytes may be lost");
        let covers = last.due().unwrap().unwrap();
        assert!(last.takes_turn());
        last.synced(covers, Ok(())).unwrap();
        last.ends_turn();
        assert!(last.takes_turn(), "one more is interrupted");
        let last = next(source);
        let covers = last.due().unwrap().unwrap();
        assert!(last.asks().is_some() && last.takes_turn());
        assert_eq!(last.synced(covers, Err(Errno::NOSPC)), Err(Errno::NOSPC));
        last.ends_turn();
        assert_eq!(next(source).due(), Err(Errno::NOSPC));
    }

    /// Queues that write and flush beside each other, over a page cache that the threads share without any
    /// order: whatever had ended before a flush began is on the disk when that ends. Miri tries it with
    /// memory as weak as the language allows (`cargo xtask sanitize miri`).
    #[test]
    fn a_flush_holds_what_had_ended_before_it_began() {
        (0..20).for_each(|_| queues_write_and_flush());
    }

    fn queues_write_and_flush() {
        const WRITES: u64 = 3;
        let sync = Syncs::new(2, None);
        let new = || [const { AtomicU64::new(0) }; 2];
        let (cached, disk, ended) = (new(), new(), new());
        let flush = || {
            let before = [0, 1].map(|queue: usize| ended[queue].load(Ordering::Acquire));
            if let Some(target) = sync.pending() {
                for (page, stored) in cached.iter().zip(&disk) {
                    stored.fetch_max(page.load(Ordering::Relaxed), Ordering::Relaxed);
                }
                sync.synced(target, Ok(())).unwrap();
            }
            for (stored, least) in disk.iter().zip(before) {
                assert!(stored.load(Ordering::Relaxed) >= least);
            }
        };
        std::thread::scope(|scope| {
            for queue in [0, 1] {
                let (sync, cached, ended, flush) = (&sync, &cached, &ended, &flush);
                scope.spawn(move || {
                    for write in 1..=WRITES {
                        cached[queue].store(write, Ordering::Relaxed);
                        sync.wrote(queue);
                        ended[queue].store(write, Ordering::Release);
                        if queue == 1 {
                            flush();
                        }
                    }
                });
            }
            scope.spawn(|| (0..WRITES).for_each(|_| flush()));
        });
        flush();
    }
}
