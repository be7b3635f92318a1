//! Signals that end a command early: read instead of delivered, so that what was begun can be ended in order.
//! Never reacts to a signal that the caller has this program ignore (`nohup`).

use crate::{failure::Failure, ui::Ui};
use becket_uapi::signal::{self, SignalFd};
use rustix::{
    event::{PollFd, PollFlags, poll},
    process::Signal,
};
use std::{
    sync::{Arc, OnceLock},
    thread,
};

/// What ends a command early.
const SIGNALS: [Signal; 3] = [Signal::INT, Signal::TERM, Signal::HUP];

/// These signals, blocked in all threads that are started from now on.
pub(super) struct Interrupts {
    signals: SignalFd,
    blocked: Vec<Signal>,
}

/// Whether the first of them has come.
pub(super) struct Watched(Arc<OnceLock<Signal>>);

impl Interrupts {
    /// Call it before other threads start.
    pub(super) fn block() -> Result<Self, Failure> {
        let blocked: Vec<_> = SIGNALS.into_iter().filter(|signal| !signal::is_ignored(*signal)).collect();
        let signals = SignalFd::block(&blocked).map_err(failed)?;
        Ok(Self { signals, blocked })
    }

    /// The next one that has come.
    pub(super) fn take(&self) -> Option<Signal> {
        self.signals.take().ok().flatten().map(|came| came.signal)
    }

    /// Has a thread wait for the first, which is noted, and said; the second one ends this process at once.
    pub(super) fn watch(self, ui: Ui) -> Result<Watched, Failure> {
        let came = Arc::new(OnceLock::new());
        let watched = Watched(Arc::clone(&came));
        let wait = move || {
            let first = loop {
                match poll(&mut [PollFd::new(&self.signals, PollFlags::IN)], None) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(_) => return,
                }
                if let Some(signal) = self.take() {
                    break signal;
                }
            };
            let _ = came.set(first);
            // All other threads block it, so it comes here, where nothing else is done any more.
            let _ = signal::unblock(&self.blocked);
            ui.note("interrupted: what is under way is ended in order; a second signal ends becket at once");
            loop {
                thread::park();
            }
        };
        thread::Builder::new().spawn(wait).map_err(failed)?;
        Ok(watched)
    }
}

impl Watched {
    /// The first that came.
    pub(super) fn came(&self) -> Option<Signal> {
        self.0.get().copied()
    }
}

/// That a command did not do all because of a signal.
pub(super) fn failure(message: impl Into<String>, signal: Signal) -> Failure {
    let number = u8::try_from(signal.as_raw()).unwrap_or(0);
    Failure::new("interrupted", message).status(128 + number)
}

fn failed(error: std::io::Error) -> Failure {
    Failure::io("cannot wait for signals", &error)
}
