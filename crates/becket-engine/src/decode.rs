//! Decodes blocks for all queues of a process: threads that do nothing else, I/O threads where that is quicker, and one cache.
//! It never reads an image, and never makes an I/O thread wait for another.
//!
//! # The way of a block
//!
//! A queue that needs a byte of an [encoded](becket_image::Place::Encoded) extent looks for its block in the
//! [cache]. If it is there, it is copied from and the request goes on. If somebody loads it, the request waits for word.
//! Otherwise the queue itself loads it: it reads the stored bytes as a request of its own (`core::loads`), at any
//! depth, and hands them to the [pool]. What comes out goes to the cache and, with one ring of the bell for
//! all that has gathered, to each I/O thread with requests that wait for it. Nobody decodes what somebody decodes.
//!
//! A quick block is decoded by the I/O thread that has loaded it ([`hand`]), which saves waking another and being woken.
//! It is one of each turn in which the thread had to do with a single queue, and none that would keep those who come
//! meanwhile waiting for long.
//!
//! # What is bounded
//!
//! Threads: one for each CPU, at normal priority. Memory for decoded blocks: [`frames`], never more than was allowed,
//! whether cached, in use or being decoded into. Loads under way: a few for each queue and layer, with memory that was
//! taken when the queue was made; this is the governor's window for decoding, in which more than the CPUs can take
//! at once brings nothing. Blocks: what [`becket_image::Encoded`] checked, at most 2 MiB before and after.
//!
//! # No deadlock
//!
//! An I/O thread waits for nothing. A decoding thread waits for memory only, which comes from blocks that are cached
//! (evicted at once) or in the hands of requests that are about to copy from them. A load waits for loads of lower layers
//! only ([`Layers::new`] sees to that), and each layer has places of its own for loads. No memory that
//! it takes needs block I/O to be had: the process is an I/O flusher.

mod block;
mod cache;
mod frames;
mod hand;
mod layers;
mod mailbox;
mod pool;
mod spent;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use becket_image::encoded::BLOCK_MAX;

pub(crate) use block::{Key, Staging};
use cache::Cache;
pub(crate) use cache::{Found, Waiter};
pub(crate) use frames::{Decoded, Frames};
pub(crate) use hand::{Hand, Job};
pub(crate) use layers::Layers;
#[cfg(test)]
pub(crate) use mailbox::tests::unheard;
pub(crate) use mailbox::{Addressee, Mailbox, Note};
use pool::{Pool, room_at_once};

use crate::Error;

/// The most layers of encoded blocks that an image may have below each other.
pub const MOST_LAYERS: usize = 8;
/// The least memory for decoded blocks, in bytes: some of the largest.
pub const LEAST_CACHE: u64 = 8 * BLOCK_MAX as u64;
/// The most that is taken without being asked for, in bytes.
/// A live system in 620 MiB fits: a block that is decoded a second time costs more than the memory that would have kept it.
const USUAL_CACHE: u64 = 1 << 30;

/// The memory for decoded blocks in bytes, unless somebody says otherwise: a sixteenth of the machine's, within bounds.
fn usual_cache(memory: u64) -> u64 {
    (memory / 16).clamp(LEAST_CACHE, USUAL_CACHE)
}

/// Decodes for all queues of a process.
pub struct Decoding {
    cache: Arc<Cache>,
    frames: Arc<Frames>,
    pool: Pool,
    /// The number of the next layer.
    next: AtomicU64,
}

impl Decoding {
    /// Starts `threads` threads (at least one), which inherit privileges and memory settings of the caller, and
    /// allows `cache` bytes for decoded blocks, of which none is taken yet. Somebody wants so many kept: none goes before they are taken.
    ///
    /// # Errors
    /// A thread cannot be had.
    pub fn start(threads: usize, cache: u64) -> Result<Arc<Decoding>, Error> {
        Decoding::new(threads, cache, false)
    }

    /// The same where nobody has said how many, on a machine with so many bytes of memory: a sixteenth, within bounds, and
    /// blocks all of which has been given out go before so many are taken.
    ///
    /// # Errors
    /// A thread cannot be had.
    pub fn usual(threads: usize, memory: u64) -> Result<Arc<Decoding>, Error> {
        Decoding::new(threads, usual_cache(memory), true)
    }

    fn new(threads: usize, cache: u64, thrifty: bool) -> Result<Arc<Decoding>, Error> {
        let bytes = bounded(cache);
        let (frames, cache) = (Frames::new(bytes), Arc::new(Cache::new(bytes, thrifty)));
        let pool = Pool::start(threads.max(1), &cache, &frames)?;
        Ok(Arc::new(Decoding { cache, frames, pool, next: AtomicU64::new(0) }))
    }

    /// Allows another number of bytes for decoded blocks, which somebody wants kept; what is above it goes at once, as far as
    /// nobody uses it.
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
    fn number(&self, layers: usize) -> u64 {
        self.next.fetch_add(layers as u64, Ordering::Relaxed)
    }

    pub(crate) fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Has blocks decoded whose stored bytes are there; the list is left empty.
    pub(crate) fn submit(&self, jobs: &mut Vec<Job>) {
        self.pool.submit(jobs.drain(..));
    }

    /// Decodes a block with the calling thread's own hand, unless there is no memory for it at once.
    fn decode_here(&self, job: Job, hand: &mut Hand, own: &Arc<Mailbox>) {
        match room_at_once(job.room(), &self.cache, &self.frames) {
            Some(room) => {
                hand.decode(job, room, &self.cache, Some(own));
                self.frames.changed();
            }
            None => self.pool.submit(std::iter::once(job)),
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
