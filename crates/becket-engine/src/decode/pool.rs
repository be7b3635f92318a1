//! The threads that decode.
//! They know no device and no ring: a job has all that it takes, and says who waits.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};

use becket_image::{
    Encoded,
    codec::{Codec, Decode},
};
use rustix::io::Errno;

use super::{
    block::{Key, Staging},
    cache::{Cache, Waiter},
    frames::{Decoded, Frame, Frames},
    mailbox::Note,
};
use crate::Error;

/// A block to be decoded.
pub(crate) struct Job {
    pub(crate) key: Key,
    /// The layers of its image, and which one it is of.
    pub(crate) encoded: Arc<[Encoded]>,
    pub(crate) layer: u32,
    /// The stored bytes are in it, from `from` on.
    pub(crate) staging: Staging,
    pub(crate) from: usize,
    /// Who gets the memory back.
    pub(crate) loader: Waiter,
}

pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    arrived: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    ends: bool,
}

impl Pool {
    pub(crate) fn start(count: usize, cache: &Arc<Cache>, frames: &Arc<Frames>) -> Result<Pool, Error> {
        let shared = Arc::new(Shared { queue: Mutex::default(), arrived: Condvar::new() });
        let mut pool = Pool { shared: Arc::clone(&shared), threads: Vec::with_capacity(count) };
        for index in 0..count {
            let (shared, cache, frames) = (Arc::clone(&shared), Arc::clone(cache), Arc::clone(frames));
            let handle = std::thread::Builder::new()
                .name(format!("becket-decode/{index}"))
                .spawn(move || work(&shared, &cache, &frames))
                .map_err(|source| Error::Spawn { thread: index, source })?;
            pool.threads.push(handle);
        }
        Ok(pool)
    }

    /// Takes jobs over; one ring of the bell for one, and for more of them all threads hear it.
    pub(crate) fn submit(&self, jobs: &mut Vec<Job>) {
        let many = jobs.len() > 1;
        self.shared.queue().jobs.extend(jobs.drain(..));
        match many {
            true => self.shared.arrived.notify_all(),
            false => self.shared.arrived.notify_one(),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.queue().ends = true;
        self.shared.arrived.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn next(&self) -> Option<Job> {
        let idle = |queue: &mut Queue| queue.jobs.is_empty() && !queue.ends;
        let queue = self.queue();
        let mut queue = self.arrived.wait_while(queue, idle).unwrap_or_else(PoisonError::into_inner);
        queue.jobs.pop_front()
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread's decoders, one for each codec that it has met.
type Decoders = Vec<(Codec, Box<dyn Decode>)>;

fn work(shared: &Shared, cache: &Cache, frames: &Arc<Frames>) {
    let mut decoders = Decoders::new();
    while let Some(mut job) = shared.next() {
        let result = decode(&mut job, &mut decoders, cache, frames);
        let Job { key, staging, loader, .. } = job;
        let yielded = result.as_ref().ok().map(|block| block.bytes().len() as u32);
        cache.finish(key, result);
        // What is cached can be evicted.
        frames.changed();
        loader.mailbox.leave(loader.whom, Note::Loaded { staging, yielded });
    }
}

/// Decodes a block. What is wrong with it is its own: each error is EIO for those who wait for this block.
fn decode(
    job: &mut Job,
    decoders: &mut Decoders,
    cache: &Cache,
    frames: &Arc<Frames>,
) -> Result<Decoded, Errno> {
    let encoded = job.encoded.get(job.layer as usize).ok_or(Errno::IO)?;
    let block = encoded.blocks().get(job.key.block as usize).ok_or(Errno::IO)?;
    let (yields, from, len) = (block.yields as usize, block.skip as usize, block.len as usize);
    let input = job.staging.bytes().get(job.from..).and_then(|rest| rest.get(..block.input_len as usize));
    let input = input.ok_or(Errno::IO)?;
    let mut frame = room_for(yields, cache, frames);
    let codec = encoded.codec();
    let index = decoders.iter().position(|(known, _)| *known == codec).unwrap_or_else(|| {
        decoders.push((codec, codec.decoder()));
        decoders.len() - 1
    });
    let output = frame.bytes().get_mut(..yields).ok_or(Errno::IO)?;
    let decoder = &mut decoders.get_mut(index).ok_or(Errno::IO)?.1;
    // A decoder that panics on what somebody has made up must not take other devices with it.
    match catch_unwind(AssertUnwindSafe(|| decoder.decode(input, output))) {
        Ok(Ok(got)) if got >= from + len => Ok(frame.filled(from, len)),
        Ok(_) => Err(Errno::IO),
        Err(_) => {
            decoders.swap_remove(index);
            Err(Errno::IO)
        }
    }
}

/// Memory for a block; cached ones make way for it.
///
/// It waits only for what must come: a change since the last time that there was memory missing and nothing evicted yet. What
/// was evicted may be taken by another thread at once, and that be done with it before we look again.
fn room_for(size: usize, cache: &Cache, frames: &Arc<Frames>) -> Frame {
    // No block of a checked layer is larger than what is always allowed.
    let mut evicted = 0;
    let mut before = None;
    loop {
        let none = match frames.take(size) {
            Ok(frame) => return frame,
            Err(none) => none,
        };
        // What was evicted may still be in somebody's hands; more than is needed need not go for that.
        match (evicted < size).then(|| cache.evict()).flatten() {
            Some(more) => {
                evicted += more;
                before.get_or_insert(none);
            }
            None => {
                frames.wait(before.take().unwrap_or(none));
                evicted = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each evicts what another may take, and be done with, before it looks again.
    #[test]
    fn threads_that_take_each_others_room_all_go_on() {
        const SIZE: usize = 64;
        let (frames, cache) = (Frames::new(2 * SIZE), Cache::new(2 * SIZE));
        std::thread::scope(|scope| {
            for layer in 0..4 {
                let (frames, cache) = (&frames, &cache);
                scope.spawn(move || {
                    for block in 0..20_000 {
                        let frame = room_for(SIZE, cache, frames);
                        cache.finish(Key { layer, block }, Ok(frame.filled(0, SIZE)));
                        frames.changed();
                    }
                });
            }
        });
        assert_eq!(frames.total(), 2 * SIZE);
    }
}
