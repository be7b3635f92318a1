//! Orders that take long are carried out beside those that follow.
//! None is lost: where no thread can be had, the others wait for it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, Scope};

use tracing::warn;

use crate::system::sync::lock;

/// Orders that are carried out beside others at the same time.
const MOST_ERRANDS: usize = 8;
/// Bytes of the stack of a thread that does so; it is locked in memory as a whole.
const STACK: usize = 256 << 10;

/// Does something on another thread; on this one, if too many are busy already or no thread can be had.
pub(super) fn aside<'scope, W: FnOnce() + Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    errands: &'scope AtomicUsize,
    work: W,
) {
    if errands.fetch_add(1, Ordering::Relaxed) >= MOST_ERRANDS {
        errands.fetch_sub(1, Ordering::Relaxed);
        return work();
    }
    // Where it can be taken back from.
    let work = Arc::new(Mutex::new(Some(work)));
    let run = move |work: &Mutex<Option<W>>| {
        let work = lock(work).take();
        if let Some(work) = work {
            work();
        }
        errands.fetch_sub(1, Ordering::Relaxed);
    };
    let theirs = Arc::clone(&work);
    let thread = thread::Builder::new().name("becket-errand".to_owned()).stack_size(STACK);
    if let Err(error) = thread.spawn_scoped(scope, move || run(&theirs)) {
        warn!("an order keeps others waiting: {error}");
        run(&work);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_takes_long_keeps_nobody_waiting_and_has_ended_with_the_orders() {
        let (errands, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            let mut waiting = Vec::new();
            for _ in 0..MOST_ERRANDS {
                let (sender, receiver) = std::sync::mpsc::channel::<()>();
                waiting.push(sender);
                let ended = &ended;
                aside(scope, &errands, move || {
                    receiver.recv_timeout(Duration::from_secs(60)).unwrap();
                    ended.fetch_add(1, Ordering::Relaxed);
                });
            }
            let (here, mut there) = (thread::current().id(), None);
            thread::scope(|inner| {
                let errands = &errands;
                let there = &mut there;
                aside(inner, errands, move || *there = Some(thread::current().id()));
            });
            assert_eq!(there, Some(here), "more than so many are not done at once");
            waiting.iter().for_each(|sender| sender.send(()).unwrap());
        });
        assert_eq!((ended.into_inner(), errands.into_inner()), (MOST_ERRANDS, 0));
    }
}
