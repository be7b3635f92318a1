//! What decodes for all queues of a process: the cache, its memory, and the threads.
//! Never reads an image.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use becket_image::encoded::BLOCK_MAX;

use super::{
    cache::Cache,
    frames::Frames,
    hand::{Hand, Job},
    mailbox::Mailbox,
    pool::{Pool, room_at_once},
};
use crate::Error;

/// The least memory for decoded blocks, in bytes. The longest of them has room in it.
pub const LEAST_CACHE: u64 = 16 << 20;
const _: () = assert!(LEAST_CACHE >= BLOCK_MAX as u64);
/// The most that is taken without being asked for, in bytes. A live system in 620 MiB fits: a block that is
/// decoded a second time costs more than the memory that would have kept it.
const USUAL_CACHE: u64 = 1 << 30;

/// The memory for decoded blocks in bytes, unless a number is given: a sixteenth of the machine's, within
/// bounds.
fn usual_cache(memory: u64) -> u64 {
    (memory / 16).clamp(LEAST_CACHE, USUAL_CACHE)
}

/// Decodes for all queues of a process.
pub struct Decoding {
    cache: Arc<Cache>,
    pub(super) frames: Arc<Frames>,
    pool: Pool,
    /// The number of the next layer.
    next: AtomicU64,
}

impl Decoding {
    /// Starts `threads` threads (at least one), which inherit privileges and memory settings of the caller,
    /// and allows `cache` bytes for decoded blocks, of which none is taken yet.
    ///
    /// # Errors
    /// A thread cannot be had.
    pub fn start(threads: usize, cache: u64) -> Result<Arc<Decoding>, Error> {
        let bytes = bounded(cache);
        let (frames, cache) = (Frames::new(bytes), Arc::new(Cache::new(bytes)));
        let pool = Pool::start(threads.max(1), &cache, &frames)?;
        Ok(Arc::new(Decoding { cache, frames, pool, next: AtomicU64::new(0) }))
    }

    /// The same with the usual number of bytes for a machine with `memory` bytes: a sixteenth, within bounds.
    ///
    /// # Errors
    /// A thread cannot be had.
    pub fn usual(threads: usize, memory: u64) -> Result<Arc<Decoding>, Error> {
        Decoding::start(threads, usual_cache(memory))
    }

    /// Allows another number of bytes for decoded blocks. What is above it is freed at once, unless it is in
    /// use.
    pub fn resize(&self, cache: u64) {
        let bytes = bounded(cache);
        self.frames.allow(bytes);
        self.cache.resize(bytes);
        while self.frames.total() > bytes && self.cache.evict().is_some() {}
    }

    /// Bytes allowed for decoded blocks.
    pub fn cache_size(&self) -> u64 {
        self.frames.allowed() as u64
    }

    /// Numbers for so many layers, of which this is the first.
    pub(super) fn number(&self, layers: usize) -> u64 {
        self.next.fetch_add(layers as u64, Ordering::Relaxed)
    }

    pub(crate) fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Has blocks decoded whose stored bytes are there; the list is left empty.
    pub(crate) fn submit(&self, jobs: &mut Vec<Job>) {
        self.pool.submit(jobs.drain(..));
    }
}

/// A quick block, which the I/O thread decodes that has read it.
pub(crate) struct Quick {
    pub(crate) job: Job,
    pub(crate) decoding: Arc<Decoding>,
}

impl Quick {
    /// Decodes it on the calling thread, unless there is no memory for it at once: then the pool does.
    /// `own` is the mailbox that the thread looks into right afterwards.
    pub(crate) fn decode(self, hand: &mut Hand, own: &Arc<Mailbox>) {
        let Quick { job, decoding } = self;
        match room_at_once(job.room(), &decoding.cache, &decoding.frames) {
            Some(room) => {
                hand.decode(job, room, &decoding.cache, Some(own));
                decoding.frames.changed();
            }
            None => decoding.pool.submit(std::iter::once(job)),
        }
    }
}

impl std::fmt::Debug for Decoding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decoding").field("cache_size", &self.cache_size()).finish_non_exhaustive()
    }
}

fn bounded(cache: u64) -> usize {
    usize::try_from(cache.max(LEAST_CACHE)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_a_sixteenth_of_memory_within_bounds() {
        assert_eq!(usual_cache(1 << 30), 64 << 20);
        assert_eq!(usual_cache(64 << 30), 1 << 30);
        assert_eq!(usual_cache(0), LEAST_CACHE);
        let decoding = Decoding::start(1, 0).unwrap();
        assert_eq!(decoding.cache_size(), LEAST_CACHE);
        decoding.resize(1 << 30);
        assert_eq!(decoding.cache_size(), 1 << 30);
    }
}
