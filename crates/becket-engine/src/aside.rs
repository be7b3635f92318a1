//! Calls that a foreign file system may never answer (questions, syncs, closing), on a thread of its own.
//! It never ends such a thread: that waits in the kernel until there is an answer, or until the process ends.

use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

/// Little: a worker's memory is locked.
const STACK: usize = 256 << 10;
/// Longest that closing a file is waited for.
const CLOSING: Duration = Duration::from_secs(2);

/// Has something done aside; what comes of it.
pub fn begun<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (done, answer) = channel();
    // Where no thread can be had nothing is done, and its end of the channel is gone.
    let _ = thread::Builder::new().stack_size(STACK).spawn(move || {
        // Who waited may have given up.
        let _ = done.send(work());
    });
    answer
}

/// What comes of it, if it comes in that time.
pub fn within<T: Send + 'static>(time: Duration, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    begun(work).recv_timeout(time).ok()
}

/// Closes files on a thread of its own, and waits no more than two seconds for that: closing a file of a
/// network file system waits for its server, which may never answer. Most files, and their locks, are gone
/// when this returns.
pub fn close(closing: impl FnOnce() + Send + 'static) {
    let _ = within(CLOSING, closing);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_waited_for_and_silence_is_not() {
        assert_eq!(within(Duration::from_secs(600), || 7), Some(7));
        let (_keep, never) = channel::<()>();
        assert_eq!(within(Duration::from_millis(1), move || never.recv()), None);
    }
}
