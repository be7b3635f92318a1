//! The blocks that are decoded, and those that somebody is about to decode.
//! It never holds a block twice, and never has two load the same one.
//!
//! # Which block goes when there is no room
//!
//! S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi: *FIFO queues are all you need for cache eviction*, SOSP 2023). A new block
//! enters a small queue (a tenth of the memory). At its end it goes, unless it was used again meanwhile: then it enters
//! the main queue, where one that was used goes round once more. Whose name is still among the ghosts, who left the
//! small queue not long ago, enters the main queue at once. So a scan passes through a tenth of the memory and
//! the rest stays. LRU gives a scan everything. 2Q and ARC resist as this does, but move a block in a list at every
//! hit; here a hit only raises a counter, so the one lock is held for a look-up and no longer.
//!
//! A block of 128 KiB is read in pieces. Whoever reads it page by page has used it once, not 32 times: uses count
//! only when the small queue has been renewed by a quarter since the last one.

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

/// Somebody who waits for a block.
#[derive(Clone)]
pub(crate) struct Waiter {
    pub(crate) mailbox: Arc<Mailbox>,
    pub(crate) whom: Addressee,
}

/// What there is of a block.
pub(crate) enum Found {
    /// All of it.
    Here(Arc<Decoded>),
    /// Somebody loads it, and will leave word.
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
    /// What the small queue may have.
    small_share: usize,
    entries: HashMap<Key, Entry>,
    small: Fifo,
    main: Fifo,
    ghosts: Ghosts,
    /// Bytes that have entered the small queue since the beginning.
    clock: u64,
    /// Lists of waiters whose memory is used again.
    spare: Vec<Vec<Waiter>>,
}

enum Entry {
    Loading(Vec<Waiter>),
    Ready { block: Arc<Decoded>, uses: u8, counted: u64 },
}

#[derive(Default)]
struct Fifo {
    keys: VecDeque<Key>,
    bytes: usize,
}

#[derive(Default)]
struct Ghosts {
    keys: VecDeque<Key>,
    known: HashSet<Key>,
}

impl Cache {
    /// For so many bytes of blocks.
    pub(crate) fn new(bytes: usize) -> Cache {
        Cache { state: Mutex::new(State { small_share: bytes / SMALL, ..State::default() }) }
    }

    /// For so many bytes from now on; evicting is the caller's.
    pub(crate) fn resize(&self, bytes: usize) {
        self.state().small_share = bytes / SMALL;
    }

    /// Looks for a block. `waiter` is told when it is [`Coming`](Found::Coming) or [`Yours`](Found::Yours).
    pub(crate) fn look(&self, key: Key, waiter: Option<&Waiter>, may_load: bool) -> Found {
        let mut guard = self.state();
        let state = &mut *guard;
        match state.entries.get_mut(&key) {
            Some(Entry::Ready { block, uses, counted }) => {
                if waiter.is_some() && state.clock - *counted >= state.small_share as u64 / 4 {
                    (*uses, *counted) = ((*uses + 1).min(MOST_USES), state.clock);
                }
                Found::Here(Arc::clone(block))
            }
            Some(Entry::Loading(waiters)) => {
                waiters.extend(waiter.cloned());
                Found::Coming
            }
            None if !may_load => Found::Absent,
            None => {
                let mut waiters = state.spare.pop().unwrap_or_default();
                waiters.extend(waiter.cloned());
                state.entries.insert(key, Entry::Loading(waiters));
                Found::Yours
            }
        }
    }

    /// A load has ended: the block is there for everybody, or its waiters hear that it cannot be had; the bell of `own` does
    /// not ring.
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

    /// Lets the block go that is least worth keeping, and says how much memory that is, which comes back with the block's
    /// last user; `None`: there is no block.
    pub(crate) fn evict(&self) -> Option<usize> {
        let gone = self.state().evict();
        gone.map(|block| block.size())
    }

    /// Lets all blocks of some layers go, of which nobody loads one any more.
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
                if self.ghosts.known.remove(&key) {
                    self.main.push(key, size);
                } else {
                    self.clock += size as u64;
                    self.small.push(key, size);
                }
                let ready = Entry::Ready { block: Arc::clone(block), uses: 0, counted: self.clock };
                self.entries.insert(key, ready)
            }
        };
        match before {
            Some(Entry::Loading(waiters)) => waiters,
            // Nobody finishes what nobody loads.
            _ => Vec::new(),
        }
    }

    fn evict(&mut self) -> Option<Arc<Decoded>> {
        loop {
            let from_small = self.small.bytes > self.small_share || self.main.keys.is_empty();
            let queue = if from_small { &mut self.small } else { &mut self.main };
            let key = queue.keys.pop_front()?;
            let Some(Entry::Ready { block, uses, .. }) = self.entries.get_mut(&key) else { continue };
            let size = block.size();
            queue.bytes -= size;
            if *uses > 0 {
                *uses = if from_small { 0 } else { *uses - 1 };
                self.main.push(key, size);
                continue;
            }
            if from_small {
                let most = self.entries.len().max(FEWEST_GHOSTS);
                self.ghosts.remember(key, most);
            }
            match self.entries.remove(&key) {
                Some(Entry::Ready { block, .. }) => return Some(block),
                _ => continue,
            }
        }
    }

    fn forget(&mut self, layers: &Range<u64>) -> Vec<Arc<Decoded>> {
        let mut gone = Vec::new();
        let State { entries, small, main, ghosts, .. } = self;
        for queue in [small, main] {
            queue.keys.retain(|key| {
                let goes = layers.contains(&key.layer);
                if goes && let Some(Entry::Ready { block, .. }) = entries.remove(key) {
                    queue.bytes -= block.size();
                    gone.push(block);
                }
                !goes
            });
        }
        ghosts.keys.retain(|key| !layers.contains(&key.layer));
        ghosts.known.retain(|key| !layers.contains(&key.layer));
        gone
    }
}

impl Fifo {
    fn push(&mut self, key: Key, size: usize) {
        self.keys.push_back(key);
        self.bytes += size;
    }
}

impl Ghosts {
    fn remember(&mut self, key: Key, most: usize) {
        // One that came back is no ghost any more, but its name stands in the queue still.
        if self.known.insert(key) {
            self.keys.push_back(key);
        }
        while self.keys.len() > most
            && let Some(oldest) = self.keys.pop_front()
        {
            self.known.remove(&oldest);
        }
    }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
