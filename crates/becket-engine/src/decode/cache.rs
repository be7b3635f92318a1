//! The blocks that are decoded, and those that are being loaded.
//! It never holds a block twice, and never has two load the same one.
//!
//! # Which block goes when there is no room
//!
//! S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi: *FIFO queues are all you need for cache eviction*, SOSP 2023). A
//! new block enters a small queue (a tenth of the memory). At its end it goes, unless it was used again
//! meanwhile: then it enters the main queue, where one that was used goes round once more. Whose name is
//! still among the ghosts, who left the small queue not long ago, enters the main queue at once. So a scan
//! passes through a tenth of the memory and the rest stays. LRU gives a scan everything. 2Q and ARC resist as
//! this does, but move a block in a list at every hit; here a hit only raises a counter, so the one lock is
//! held for a look-up and no longer.
//!
//! A block of 128 KiB is read in pieces. A reader that goes page by page has used it once, not 32 times: uses
//! count only when the small queue has been renewed by a quarter since the last one.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::io::Errno;

use super::{
    block::Key,
    frames::Decoded,
    mailbox::{Addressee, Mailbox, Note},
};

/// The small queue's share of all bytes is one of so many.
const SMALL: usize = 10;
/// Uses that count.
const MOST_USES: u8 = 3;
/// Names of blocks that have gone which are remembered, beside as many as there are blocks.
const FEWEST_GHOSTS: usize = 64;

/// A request or a load that waits for a block.
#[derive(Clone)]
pub(crate) struct Waiter {
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) whom: Addressee,
}

impl Waiter {
    /// Whether notes to both go to the same place.
    pub(crate) fn is(&self, other: &Waiter) -> bool {
        self.whom == other.whom && Arc::ptr_eq(&self.mailbox, &other.mailbox)
    }
}

/// What there is of a block.
pub(crate) enum Lookup {
    /// All of it.
    Here(Arc<Decoded>),
    /// It is being loaded, and a note will come.
    Coming,
    /// Nothing, and from now on it is the caller who loads it: [`Cache::finish`] must follow.
    Yours,
    /// Nothing, and the caller cannot load it now.
    Absent,
}

pub(crate) struct Cache {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Bytes that the small queue may have.
    small_share: usize,
    entries: HashMap<Key, Entry>,
    small: Fifo,
    main: Fifo,
    ghosts: Ghosts,
    /// The last entry's stamp.
    stamp: u64,
    /// Bytes that have entered the small queue since the beginning.
    clock: u64,
    /// Lists of waiters whose memory is used again.
    spare: Vec<Vec<Waiter>>,
}

enum Entry {
    Loading(Vec<Waiter>),
    Ready(Ready),
}

/// A block that is there.
struct Ready {
    block: Arc<Decoded>,
    uses: u8,
    /// The clock at the last use that counted.
    counted: u64,
    /// What no other entry has: names in queues may be of an earlier one.
    stamp: u64,
    in_main: bool,
}

/// Names with the stamps of their entries; some of them have gone since.
#[derive(Default)]
struct Fifo {
    keys: VecDeque<(Key, u64)>,
    bytes: usize,
}

/// Names of blocks that have gone, for a while.
#[derive(Default)]
struct Ghosts {
    keys: VecDeque<Key>,
    known: HashSet<Key>,
}

impl Cache {
    /// For so many bytes of blocks.
    pub(crate) fn new(bytes: usize) -> Cache {
        let state = State { small_share: bytes / SMALL, ..State::default() };
        Cache { state: Mutex::new(state) }
    }

    /// For so many bytes from now on; evicting is the caller's.
    pub(crate) fn resize(&self, bytes: usize) {
        self.state().small_share = bytes / SMALL;
    }

    /// Looks for a block. `waiter` gets a note when it is [`Coming`](Lookup::Coming) or
    /// [`Yours`](Lookup::Yours).
    pub(crate) fn look(&self, key: Key, waiter: Option<&Waiter>, may_load: bool) -> Lookup {
        let mut guard = self.state();
        let state = &mut *guard;
        match state.entries.get_mut(&key) {
            Some(Entry::Ready(ready)) => {
                if waiter.is_some() && state.clock - ready.counted >= state.small_share as u64 / 4 {
                    (ready.uses, ready.counted) = ((ready.uses + 1).min(MOST_USES), state.clock);
                }
                Lookup::Here(Arc::clone(&ready.block))
            }
            Some(Entry::Loading(waiters)) => {
                waiters.extend(waiter.cloned());
                Lookup::Coming
            }
            None if !may_load => Lookup::Absent,
            None => {
                let mut waiters = state.spare.pop().unwrap_or_default();
                waiters.extend(waiter.cloned());
                state.entries.insert(key, Entry::Loading(waiters));
                Lookup::Yours
            }
        }
    }

    /// A load has ended: the block is available to all, or its waiters hear that it cannot be had; the
    /// bell of `own` does not ring.
    pub(crate) fn finish(&self, key: Key, result: Result<Decoded, Errno>, own: Option<&Arc<Mailbox>>) {
        let result = result.map(Arc::new);
        let mut waiters = self.state().finish(key, &result);
        for Waiter { mailbox, whom } in waiters.drain(..) {
            mailbox.leave(whom, Note::Block { key, result: result.clone() }, own);
        }
        let mut state = self.state();
        if state.spare.len() < FEWEST_GHOSTS {
            state.spare.push(waiters);
        }
    }

    /// Lets the block go that is least worth keeping, and says how much memory that is, which comes back with
    /// the block's last user; `None`: there is no block.
    pub(crate) fn evict(&self) -> Option<usize> {
        let gone = self.state().evict();
        gone.map(|block| block.size())
    }

    /// Removes all blocks of some layers, of which none is being loaded.
    pub(crate) fn forget(&self, layers: &Range<u64>) {
        let gone = self.state().forget(layers);
        drop(gone);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn finish(&mut self, key: Key, result: &Result<Arc<Decoded>, Errno>) -> Vec<Waiter> {
        let before = match result {
            Err(_) => self.entries.remove(&key),
            Ok(block) => {
                let size = block.size();
                self.stamp += 1;
                let stamp = self.stamp;
                let in_main = self.ghosts.laid(&key);
                if !in_main {
                    self.clock += size as u64;
                }
                self.queue(in_main).push(key, stamp, size);
                self.tidy();
                let (block, counted) = (Arc::clone(block), self.clock);
                self.entries.insert(key, Entry::Ready(Ready { block, uses: 0, counted, stamp, in_main }))
            }
        };
        match before {
            Some(Entry::Loading(waiters)) => waiters,
            // A block that is not being loaded has no waiters.
            _ => Vec::new(),
        }
    }

    fn evict(&mut self) -> Option<Arc<Decoded>> {
        loop {
            let from_small = self.small.bytes > self.small_share || self.main.keys.is_empty();
            let (key, stamp) = self.queue(!from_small).keys.pop_front()?;
            let Some(ready) = self.ready(&key, stamp) else { continue };
            let size = ready.block.size();
            if ready.uses > 0 {
                ready.uses = if from_small { 0 } else { ready.uses - 1 };
                ready.in_main = true;
                self.queue(!from_small).bytes -= size;
                self.main.push(key, stamp, size);
                continue;
            }
            if from_small {
                let most = self.entries.len().max(FEWEST_GHOSTS);
                self.ghosts.remember(key, most);
            }
            return self.remove(&key);
        }
    }

    fn queue(&mut self, main: bool) -> &mut Fifo {
        if main { &mut self.main } else { &mut self.small }
    }

    /// The block that a name with this stamp speaks of.
    fn ready(&mut self, key: &Key, stamp: u64) -> Option<&mut Ready> {
        match self.entries.get_mut(key) {
            Some(Entry::Ready(ready)) if ready.stamp == stamp => Some(ready),
            _ => None,
        }
    }

    /// Takes a block out; its name stays in its queue for the while.
    fn remove(&mut self, key: &Key) -> Option<Arc<Decoded>> {
        let Some(Entry::Ready(ready)) = self.entries.remove(key) else { return None };
        self.queue(ready.in_main).bytes -= ready.block.size();
        Some(ready.block)
    }

    /// Names of what has gone do not pile up: queues that have more of them than of others lose them.
    fn tidy(&mut self) {
        let State { entries, small, main, .. } = self;
        let most = 2 * entries.len() + FEWEST_GHOSTS;
        let is =
            |key: &Key, stamp| matches!(entries.get(key), Some(Entry::Ready(ready)) if ready.stamp == stamp);
        for queue in [small, main].into_iter().filter(|queue| queue.keys.len() > most) {
            queue.keys.retain(|(key, stamp)| is(key, *stamp));
        }
    }

    fn forget(&mut self, layers: &Range<u64>) -> Vec<Arc<Decoded>> {
        let goes = |key: &Key| layers.contains(&key.layer);
        let keys: Vec<Key> = self.entries.keys().copied().filter(goes).collect();
        let gone = keys.iter().filter_map(|key| self.remove(key)).collect();
        for queue in [&mut self.small, &mut self.main] {
            queue.keys.retain(|(key, _)| !goes(key));
        }
        self.ghosts.forget(goes);
        gone
    }
}

impl Fifo {
    fn push(&mut self, key: Key, stamp: u64, size: usize) {
        self.keys.push_back((key, stamp));
        self.bytes += size;
    }
}

impl Ghosts {
    fn remember(&mut self, key: Key, most: usize) {
        // One that came back is not a ghost any more, but its name stands in the queue still.
        if self.known.insert(key) {
            self.keys.push_back(key);
        }
        while self.keys.len() > most
            && let Some(oldest) = self.keys.pop_front()
        {
            self.known.remove(&oldest);
        }
    }

    /// One comes back; whether it was there.
    fn laid(&mut self, key: &Key) -> bool {
        self.known.remove(key)
    }

    fn forget(&mut self, goes: impl Fn(&Key) -> bool) {
        self.keys.retain(|key| !goes(key));
        self.known.retain(|key| !goes(key));
    }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
