//! Work on many things at once, reported in the order in which they were given.
//! Never more threads than the machine has use for, and never one that outlives the call.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

/// Twice as many as CPUs: attaching and detaching wait for the kernel about as long as they compute.
const THREADS_FOR_EACH_CPU: usize = 2;

/// Does the work on each item, and reports the outcomes in the order of the items, each as soon as it is its
/// turn.
///
/// `done` is called with each outcome when it is there. If it returns `false`, no new work is begun; what was
/// begun is still reported. The thread that did the work makes these calls, so no other has to be woken.
pub(super) fn in_order<T: Sync, R: Send>(
    items: &[T],
    work: impl Fn(&T) -> R + Sync,
    mut done: impl FnMut(&R) -> bool + Send,
    mut tell: impl FnMut(&T, R) + Send,
) {
    if let [item] = items {
        // A thread for one would cost more than it could bring.
        let outcome = work(item);
        done(&outcome);
        return tell(item, outcome);
    }
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let threads = (THREADS_FOR_EACH_CPU * cpus).min(items.len());
    let next = AtomicUsize::new(0);
    let goes_on = AtomicBool::new(true);
    let waiting: Vec<Option<R>> = items.iter().map(|_| None).collect();
    let turns = Mutex::new((waiting, 0, done, &mut tell));
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while goes_on.load(Ordering::Relaxed) {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else { return };
                    let outcome = work(item);
                    let mut turns = turns.lock().unwrap_or_else(PoisonError::into_inner);
                    let (waiting, turn, done, tell) = &mut *turns;
                    if !done(&outcome) {
                        goes_on.store(false, Ordering::Relaxed);
                    }
                    if let Some(place) = waiting.get_mut(index) {
                        *place = Some(outcome);
                    }
                    while let Some((item, outcome)) =
                        items.get(*turn).zip(waiting.get_mut(*turn).and_then(Option::take))
                    {
                        tell(item, outcome);
                        *turn += 1;
                    }
                }
            });
        }
    });
    let (waiting, ..) = turns.into_inner().unwrap_or_else(PoisonError::into_inner);
    // Where it was broken off, some before these were not begun.
    for (item, outcome) in items.iter().zip(waiting) {
        if let Some(outcome) = outcome {
            tell(item, outcome);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_reported_once_and_in_order() {
        let items: Vec<usize> = (0..1000).collect();
        let mut reported = Vec::new();
        in_order(&items, |item| item * 2, |_| true, |item, twice| reported.push((*item, twice)));
        assert_eq!(reported, items.iter().map(|item| (*item, item * 2)).collect::<Vec<_>>());
    }

    #[test]
    fn one_is_done_here() {
        let here = thread::current().id();
        let (mut heard, mut reported) = (0, Vec::new());
        let done = |_: &_| {
            heard += 1;
            true
        };
        in_order(
            &[7],
            |item| (*item, thread::current().id()),
            done,
            |item, outcome| reported.push((*item, outcome)),
        );
        assert_eq!((heard, reported), (1, vec![(7, (7, here))]));
    }

    #[test]
    fn nothing_new_is_begun_after_no() {
        let items: Vec<usize> = (0..1000).collect();
        let begun = AtomicUsize::new(0);
        let mut reported = Vec::new();
        let work = |item: &usize| {
            begun.fetch_add(1, Ordering::Relaxed);
            // The others wait until the first was reported.
            thread::sleep(std::time::Duration::from_millis(if *item == 0 { 0 } else { 20 }));
            *item
        };
        in_order(&items, work, |_| false, |item, _| reported.push(*item));
        assert_eq!(reported.len(), begun.load(Ordering::Relaxed), "what was begun is reported");
        assert!(reported.len() < items.len() && reported.is_sorted(), "{reported:?}");
    }
}
