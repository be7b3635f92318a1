//! The threads that decode.
//! They know no device and no ring: a job has all that it takes, and says who waits.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::JoinHandle,
};

use super::{
    cache::Cache,
    frames::{Frame, Frames},
    hand::{Hand, Job},
};
use crate::Error;

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
    pub(crate) fn submit(&self, jobs: impl ExactSizeIterator<Item = Job>) {
        let many = jobs.len() > 1;
        self.shared.queue().jobs.extend(jobs);
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

fn work(shared: &Shared, cache: &Cache, frames: &Arc<Frames>) {
    let mut hand = Hand::default();
    while let Some(job) = shared.next() {
        let room = room_for(job.room(), cache, frames);
        hand.decode(job, room, cache, None);
        // What is cached can be evicted.
        frames.changed();
    }
}

/// Memory for a block that is there at once, or as soon as others are evicted.
pub(super) fn room_at_once(size: usize, cache: &Cache, frames: &Arc<Frames>) -> Option<Frame> {
    let mut evicted = 0;
    loop {
        if let Ok(frame) = frames.take(size) {
            return Some(frame);
        }
        evicted += (evicted < size).then(|| cache.evict()).flatten()?;
    }
}

/// Memory for a block; cached ones make way for it.
///
/// It waits only for what must come: a change since the last time that there was memory missing and nothing
/// evicted yet. What was evicted may be taken by another thread at once, and that be done with it before we
/// look again.
fn room_for(size: usize, cache: &Cache, frames: &Arc<Frames>) -> Frame {
    // No block of a checked layer is larger than what is always allowed.
    let mut evicted = 0;
    let mut before = None;
    loop {
        let none = match frames.take(size) {
            Ok(frame) => return frame,
            Err(none) => none,
        };
        // What was evicted may still be in use; no more than is needed is evicted for that.
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
    use crate::decode::Key;

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
                        cache.finish(Key { layer, block }, Ok(frame.filled(0, SIZE)), None);
                        frames.changed();
                    }
                });
            }
        });
        assert_eq!(frames.total(), 2 * SIZE);
    }
}
