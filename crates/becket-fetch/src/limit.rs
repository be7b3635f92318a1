//! How much of an object the store may take up, while it is fetched. Other objects make way first.
//! It never removes what is in use, and looks at the store again only when what it found is used up.

use std::fs::File;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::store::Store;

/// How much room is made at once at most, in bytes: a look reads all tables.
const AT_ONCE: u64 = 16 << 20;
/// For how long a store that has no room for more is taken for one.
const FULL: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Limit {
    bound: Bound,
    left: Mutex<Left>,
    /// When there was no room for what was to be written, if nothing was since.
    full: Mutex<Option<Instant>>,
}

#[derive(Debug, Default)]
enum Bound {
    #[default]
    None,
    /// So many bytes of all objects of a store.
    Store(Store, u64),
    /// So many bytes of this object: this process does not see the others.
    Object,
}

#[derive(Debug, Default)]
struct Left {
    bytes: u64,
    /// When nothing could be removed any more.
    last: Option<Instant>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Limit {
    /// Of all objects of a store.
    pub(crate) fn of_store(store: Store, most: u64) -> Limit {
        Limit { bound: Bound::Store(store, most), ..Limit::default() }
    }

    /// Of one object, of which `stored` bytes are there.
    pub(crate) fn of_object(most: u64, stored: u64) -> Limit {
        let left = Left { bytes: most.saturating_sub(stored), last: None };
        Limit { bound: Bound::Object, left: Mutex::new(left), full: Mutex::default() }
    }

    /// How many bytes of all objects the user allows.
    pub(crate) fn asked(&self) -> Option<u64> {
        if let Bound::Store(_, most) = &self.bound { Some(*most) } else { None }
    }

    /// Whether so many bytes more may be stored; they are, then.
    pub(crate) fn take(&self, bytes: u64) -> bool {
        let mut left = lock(&self.left);
        match &self.bound {
            Bound::None => return true,
            Bound::Store(store, most)
                if left.bytes < bytes && left.last.is_none_or(|last| last.elapsed() > FULL) =>
            {
                let room = (most / 8).clamp(bytes.min(AT_ONCE), AT_ONCE);
                left.bytes = most.saturating_sub(after_removal(store, *most, room));
                left.last = (left.bytes < bytes).then(Instant::now);
            }
            _ => {}
        }
        let rest = left.bytes.checked_sub(bytes);
        // What is left then is too little for anybody.
        left.bytes = rest.unwrap_or(0);
        if rest.is_none() {
            self.had_room(false);
        }
        rest.is_some()
    }

    /// Notes whether there was room for what was to be written.
    pub(crate) fn had_room(&self, had: bool) {
        *lock(&self.full) = (!had).then(Instant::now);
    }

    /// Whether there was no room when something was to be written last, and that was a moment ago, or there
    /// is none now for so many bytes more in the file system of `file`.
    pub(crate) fn is_full(&self, file: &File, bytes: u64) -> bool {
        let free = |room: rustix::fs::StatVfs| room.f_bavail.saturating_mul(room.f_frsize);
        let last = *lock(&self.full);
        last.is_some_and(|last| last.elapsed() < FULL || (self.is_bound() && lock(&self.left).bytes < bytes))
            || (last.is_some() && rustix::fs::fstatvfs(file).is_ok_and(|room| free(room) < bytes))
    }

    fn is_bound(&self) -> bool {
        !matches!(self.bound, Bound::None)
    }

    /// How many bytes of all objects may be stored, where that is known to be all used.
    pub(crate) fn reached(&self) -> Option<u64> {
        match &self.bound {
            Bound::Store(_, most) => {
                let left = lock(&self.left);
                left.last.map(|_| *most)
            }
            _ => None,
        }
    }

    /// How many bytes an object may have for a process that does not see the others, which go now for that:
    /// it has `size` bytes, of which `stored` are there.
    pub(crate) fn of_one(&self, size: u64, stored: u64) -> Option<u64> {
        let Bound::Store(store, most) = &self.bound else { return None };
        let more = size.saturating_sub(stored);
        Some(most.saturating_sub(after_removal(store, *most, more).saturating_sub(stored)))
    }
}

/// Removes what is not in use until a store of `most` bytes has room for `more`, as far as that goes, and
/// returns how many it has then.
fn after_removal(store: &Store, most: u64, more: u64) -> u64 {
    store.shrink_to(most.saturating_sub(more)).map_or(most, |(_, total)| total)
}
