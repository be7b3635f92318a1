//! How far a command is, on a terminal, when it takes long.
//! Never writes where no person looks, and leaves no trace on the screen.

use crate::units::format_size;
use std::{
    cell::RefCell,
    io::{self, IsTerminal as _, Write as _},
    time::{Duration, Instant},
};

/// What is over sooner needs no word.
const PATIENCE: Duration = Duration::from_secs(1);
/// Often enough to see it move.
const PAUSE: Duration = Duration::from_millis(100);

const MIB: usize = 1 << 20;
/// A total that nobody knows.
const UNKNOWN: usize = usize::MAX;

/// A line on standard error that counts.
#[derive(Debug)]
pub(crate) struct Progress {
    wanted: bool,
    done: usize,
    total: usize,
    next: Instant,
    shown: bool,
    /// How numbers are written.
    unit: fn(usize) -> String,
}

impl Progress {
    pub(crate) fn new(total: usize) -> Self {
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let wanted = total > 1 && !dumb && io::stderr().is_terminal();
        let unit = |number: usize| number.to_string();
        Self { wanted, done: 0, total, next: Instant::now() + PATIENCE, shown: false, unit }
    }

    /// One that counts bytes.
    pub(crate) fn of_bytes(total: usize) -> Self {
        // Whole MiB are enough to see it move.
        let unit = |bytes: usize| format_size(if bytes < MIB { bytes } else { bytes - bytes % MIB } as u64);
        Self { unit, ..Self::new(total) }
    }

    /// One more is done.
    pub(crate) fn step(&mut self) {
        self.reach(self.done + 1);
    }

    /// So much is done.
    pub(crate) fn reach(&mut self, done: usize) {
        self.done = done;
        if let Some(text) = self.due(Instant::now()) {
            self.shown = true;
            // Nothing depends on it.
            let _ = write!(io::stderr(), "\r{text}\x1b[K");
        }
    }

    fn due(&mut self, now: Instant) -> Option<String> {
        if !self.wanted || now < self.next || self.done >= self.total {
            return None;
        }
        self.next = now + PAUSE;
        let done = (self.unit)(self.done);
        Some(match self.total {
            UNKNOWN => format!("becket: {done} so far"),
            total => format!("becket: {done} of {}", (self.unit)(total)),
        })
    }

    /// Takes the line away, before something else is written or at the end.
    pub(crate) fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

thread_local! {
    /// What this thread moves, while a [`Moving`] lasts.
    static MOVING: RefCell<Option<Progress>> = const { RefCell::new(None) };
}

/// As long as it lasts, a line counts the bytes that this thread moves.
#[derive(Debug)]
pub(crate) struct Moving(());

impl Moving {
    /// From now on; how much there will be is not known.
    pub(crate) fn begin() -> Moving {
        MOVING.set(Some(Progress::of_bytes(UNKNOWN)));
        Moving(())
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        silence();
        MOVING.set(None);
    }
}

/// So many bytes more have been moved.
pub(crate) fn moved(bytes: usize) {
    MOVING.with_borrow_mut(|progress| {
        if let Some(progress) = progress {
            progress.reach(progress.done + bytes);
        }
    });
}

/// Takes away the line of what is moved, before something else is written.
pub(crate) fn silence() {
    MOVING.with_borrow_mut(|progress| progress.iter_mut().for_each(Progress::clear));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_speaks_after_a_second_and_not_too_often() {
        let start = Instant::now();
        let mut progress = Progress { wanted: true, done: 3, next: start + PATIENCE, ..Progress::new(9) };
        assert_eq!(progress.due(start), None);
        assert_eq!(progress.due(start + PATIENCE).as_deref(), Some("becket: 3 of 9"));
        assert_eq!(progress.due(start + PATIENCE), None);
        assert!(progress.due(start + PATIENCE + PAUSE).is_some());
        progress.done = 9;
        assert_eq!(progress.due(start + 2 * PATIENCE), None, "nothing is left to wait for");
        let mut open =
            Progress { done: (5 << 20) + 17, next: start, wanted: true, ..Progress::of_bytes(UNKNOWN) };
        assert_eq!(open.due(start).as_deref(), Some("becket: 5M so far"));
        progress = Progress { wanted: false, done: 3, ..progress };
        assert_eq!(progress.due(start + 2 * PATIENCE), None);
    }
}
