//! The same done to each of many things, by all CPUs.
//! The order of the results is that of the things, and one thread is enough where no other can be had.

use std::sync::{Mutex, PoisonError};
use std::thread;

/// From so many things on a second thread costs less than it saves.
const MANY: usize = 128;
/// So many are taken at once.
const BATCH: usize = 16;

/// What `work` makes of each of `items`.
pub(crate) fn each<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    if items.len() < MANY {
        return items.into_iter().map(work).collect();
    }
    let (left, done) = (Mutex::new(items.into_iter().enumerate()), Mutex::new(Vec::new()));
    let take = || -> Vec<(usize, T)> {
        left.lock().unwrap_or_else(PoisonError::into_inner).by_ref().take(BATCH).collect()
    };
    let run = || {
        let mut mine = Vec::new();
        loop {
            let batch = take();
            if batch.is_empty() {
                break;
            }
            mine.extend(batch.into_iter().map(|(index, item)| (index, work(item))));
        }
        done.lock().unwrap_or_else(PoisonError::into_inner).append(&mut mine);
    };
    thread::scope(|scope| {
        for _ in 1..thread::available_parallelism().map_or(1, usize::from) {
            // Those that run do what is left.
            let _ = thread::Builder::new().spawn_scoped(scope, run);
        }
        run();
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_done_once_and_stays_in_its_place() {
        for count in [0, 1, MANY - 1, MANY, 5000] {
            let found = each((0..count).collect(), |number| number * 2);
            assert!(found.iter().copied().eq((0..count).map(|number| number * 2)), "{count}");
        }
    }
}
