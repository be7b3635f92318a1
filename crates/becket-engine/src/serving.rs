//! How a device is served: the sources of its bytes, shared by its queues, and what of them is not yet on
//! stable storage.
//! Never opens or closes a path; descriptors come from outside and go when the last queue lets go.

use std::sync::{
    Arc,
    atomic::{AtomicI32, AtomicU64, Ordering, fence},
};

use becket_image::{DirectIo, Encoded, FileSource, Grow, Map, Source};
use rustix::io::Errno;

use crate::growing::{Growing, Handle};
use crate::{Decoding, Error, Interceptor, decode::Layers};

/// How requests of a device are served: the map of its image, the sources that it speaks of, and what may be
/// done with them.
///
/// It never changes. A device whose serving changes gets another one; see
/// [`IoThreads::change`](crate::IoThreads::change).
#[derive(Debug)]
pub struct Serving {
    pub(crate) map: Arc<Map>,
    pub(crate) read_only: bool,
    /// What goes past the page cache, where it can.
    pub(crate) direct: DirectIo,
    files: Arc<Files>,
    pub(crate) interceptor: Option<Arc<dyn Interceptor>>,
}

/// Files, with what of them still has to reach stable storage: that outlives a change of everything else.
#[derive(Debug)]
struct Files {
    sources: Vec<Source>,
    sync: Vec<FileSync>,
    /// The layers of encoded blocks that the map speaks of.
    layers: Option<Arc<Layers>>,
    /// What makes room in file 0.
    growing: Option<Handle>,
}

impl Serving {
    /// For `queues` queues, which go past the page cache where they can and it serves
    /// ([`DirectIo::Auto`]).
    pub fn new(map: Map, sources: Vec<Source>, read_only: bool, queues: usize) -> Serving {
        let sync = sources.iter().map(|_| FileSync::new(queues)).collect();
        let files = Arc::new(Files { sources, sync, layers: None, growing: None });
        Serving { map: Arc::new(map), read_only, direct: DirectIo::Auto, files, interceptor: None }
    }

    /// The same with another choice of what goes past the page cache: nothing, or also the stored bytes of
    /// encoded blocks, which otherwise go through it where that [serves](becket_image::Facts::caches_stored).
    #[must_use]
    pub fn with_direct_io(self, direct: DirectIo) -> Serving {
        Serving { direct, ..self }
    }

    /// The same with an interceptor, which sees each operation on its way to the files. Whether there is one
    /// is settled when a queue is made: those of [`IoThreads::change`](crate::IoThreads::change) that come
    /// later have no say.
    #[must_use]
    pub fn intercepted_by(self, interceptor: Arc<dyn Interceptor>) -> Serving {
        Serving { interceptor: Some(interceptor), ..self }
    }

    /// The same with the interceptor of another one.
    #[must_use]
    pub fn intercepted_as(self, other: &Serving) -> Serving {
        Serving { interceptor: other.interceptor.clone(), ..self }
    }

    /// The same with a map whose encoded extents are of these layers, which `decoding` decodes.
    ///
    /// # Errors
    /// [`Error::Layers`] with what is wrong with them.
    pub fn decoded_by(self, decoding: &Arc<Decoding>, encoded: Vec<Encoded>) -> Result<Serving, Error> {
        let layers = Some(Layers::new(encoded, self.sources().len(), Arc::clone(decoding))?);
        match Arc::try_unwrap(self.files) {
            Ok(files) => Ok(Serving { files: Arc::new(Files { layers, ..files }), ..self }),
            Err(_) => {
                Err(Error::Layers { why: "they come too late: the files are served already".to_owned() })
            }
        }
    }

    /// The same where units that have no place of their own get one when they are written; `keep` is dropped
    /// once the image is closed, after the last queue has ended.
    ///
    /// # Errors
    /// [`Error::Grow`], or no thread can be had.
    pub fn growing_by(
        self,
        grow: Box<dyn Grow>,
        keep: Box<dyn std::any::Any + Send>,
    ) -> Result<Serving, Error> {
        let late = || Error::Grow { source: std::io::Error::other("its files are served already") };
        let growing = Some(Handle::start(grow, self.map.len(), keep)?);
        let files = Arc::try_unwrap(self.files).map_err(|_| late())?;
        Ok(Serving { files: Arc::new(Files { growing, ..files }), ..self })
    }

    #[inline]
    pub(crate) fn growing(&self) -> Option<&Growing> {
        self.files.growing.as_deref()
    }

    pub(crate) fn layers(&self) -> Option<&Arc<Layers>> {
        self.files.layers.as_ref()
    }

    /// The same files otherwise: `map` may only speak of these.
    #[must_use]
    pub fn otherwise(&self, map: Map, read_only: bool, direct: DirectIo) -> Serving {
        let (files, interceptor) = (Arc::clone(&self.files), self.interceptor.clone());
        Serving { map: Arc::new(map), read_only, direct, files, interceptor }
    }

    /// The sources, in the order in which maps speak of them.
    pub fn sources(&self) -> &[Source] {
        &self.files.sources
    }

    /// The files among them.
    pub(crate) fn files(&self) -> impl ExactSizeIterator<Item = &FileSource> {
        self.sources().iter().map(|Source::File(file)| file)
    }

    pub(crate) fn file(&self, source: u32) -> Option<&FileSource> {
        self.files().nth(source as usize)
    }

    pub(crate) fn has_files_of(&self, other: &Serving) -> bool {
        Arc::ptr_eq(&self.files, &other.files)
    }

    /// Syncs what was written and is not known to be on stable storage. The caller waits for it.
    pub(crate) fn sync_now(&self) -> Result<(), Errno> {
        let mut from = 0;
        while let Some((file, target)) = self.next_to_sync(from)? {
            let (Some(open), Some(sync)) = (self.file(file), self.sync(file)) else {
                break;
            };
            let outcome = rustix::io::retry_on_intr(|| rustix::fs::fdatasync(&open.buffered));
            sync.synced(target, outcome)?;
            from = file + 1;
        }
        Ok(())
    }

    /// The record of what is not yet on stable storage of one file.
    pub(crate) fn sync(&self, file: u32) -> Option<&FileSync> {
        self.files.sync.get(file as usize)
    }

    /// The backing file that a flush has to sync next, from `file` on, with what the sync will cover.
    ///
    /// An earlier failure of a sync stays: the pages it was about are gone from the cache, and a later sync
    /// that succeeds would say nothing about them.
    pub(crate) fn next_to_sync(&self, mut file: u32) -> Result<Option<(u32, u64)>, Errno> {
        while let Some(sync) = self.sync(file) {
            let writable = self.file(file).is_some_and(|file| file.facts.writable);
            if writable && !self.read_only {
                if let Some(errno) = sync.failed() {
                    return Err(errno);
                }
                if let Some(target) = sync.pending() {
                    return Ok(Some((file, target)));
                }
            }
            file += 1;
        }
        Ok(None)
    }
}

/// Counts writes and syncs of one file, without a lock.
///
/// A flush may only be skipped when a sync that *began after* the last finished write has *finished*. So a
/// sync takes the number of finished writes before it starts and publishes it when it has succeeded; a flush
/// that sees a larger number of writes than was published syncs again, even while another sync runs.
#[derive(Debug)]
pub(crate) struct FileSync {
    /// Finished writes, one counter for each queue, each written by its own thread only.
    writes: Box<[Counter]>,
    synced: AtomicU64,
    failed: AtomicI32,
}

/// A counter that shares its cache line with no other.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Counter(AtomicU64);

impl FileSync {
    fn new(queues: usize) -> FileSync {
        let writes: Box<[Counter]> = (0..queues.max(1)).map(|_| Counter::default()).collect();
        // A server before us may have written without syncing: the first flush always syncs.
        writes[0].0.store(1, Ordering::Release);
        FileSync { writes, synced: AtomicU64::new(0), failed: AtomicI32::new(0) }
    }

    /// A write has finished, whether well or not; only the queue's own thread may call this for `queue`.
    pub(crate) fn wrote(&self, queue: usize) {
        if let Some(counter) = self.writes.get(queue) {
            counter.0.store(counter.0.load(Ordering::Relaxed) + 1, Ordering::Release);
        }
    }

    fn pending(&self) -> Option<u64> {
        // Two sums may be equal though each counts a write that the other lacks. With the fences the sync of
        // the one then began after the other's writes had ended; without, memory may be weak enough that it
        // did not (Miri shows it).
        let mut writes: u64 = 0;
        for counter in &self.writes {
            fence(Ordering::SeqCst);
            writes += counter.0.load(Ordering::Acquire);
        }
        fence(Ordering::SeqCst);
        (writes > self.synced.load(Ordering::Acquire)).then_some(writes)
    }

    fn failed(&self) -> Option<Errno> {
        match self.failed.load(Ordering::Acquire) {
            0 => None,
            errno => Some(Errno::from_raw_os_error(errno)),
        }
    }

    /// Pages are lost: no flush succeeds any more.
    pub(crate) fn fail(&self, errno: Errno) {
        self.failed.store(errno.raw_os_error(), Ordering::Release);
    }

    /// A sync that had taken `target` has ended; returns what it is worth.
    ///
    /// The kernel tells of lost pages once for each open file: of two syncs that run side by side only one
    /// hears it.
    pub(crate) fn synced(&self, target: u64, result: Result<(), Errno>) -> Result<(), Errno> {
        match result.and(self.failed().map_or(Ok(()), Err)) {
            Ok(()) => {
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
    use super::*;

    #[test]
    fn the_first_flush_syncs_and_an_idle_one_does_not() {
        let sync = FileSync::new(2);
        let target = sync.pending().unwrap();
        sync.synced(target, Ok(())).unwrap();
        assert_eq!(sync.pending(), None);
    }

    #[test]
    fn a_write_that_ends_during_a_sync_is_synced_again() {
        let sync = FileSync::new(2);
        let target = sync.pending().unwrap();
        sync.wrote(1);
        sync.synced(target, Ok(())).unwrap();
        assert!(sync.pending().is_some());
    }

    #[test]
    fn a_flush_during_a_sync_does_not_rely_on_it() {
        let sync = FileSync::new(1);
        sync.wrote(0);
        let first = sync.pending().unwrap();
        assert_eq!(sync.pending(), Some(first), "the running sync has proven nothing yet");
    }

    #[test]
    fn a_failure_stays() {
        let sync = FileSync::new(1);
        let target = sync.pending().unwrap();
        sync.synced(target, Err(Errno::IO)).unwrap_err();
        sync.synced(target, Ok(())).unwrap_err();
        assert_eq!(sync.failed(), Some(Errno::IO));
    }

    #[test]
    fn a_sync_beside_one_that_failed_proves_nothing() {
        let sync = FileSync::new(2);
        let target = sync.pending().unwrap();
        assert_eq!(sync.synced(target, Err(Errno::IO)), Err(Errno::IO));
        assert_eq!(
            sync.synced(target, Ok(())),
            Err(Errno::IO),
            "the kernel reported it to the other one alone"
        );
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
        let sync = FileSync::new(2);
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
