//! Requests that wait for chunks of a store file, and the thread that looks what has come for them.
//! An I/O thread leaves its name here and goes on; this thread fetches nothing.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use becket_image::filled::Presence;
use rustix::io::Errno;

use crate::decode::{Mailbox, Note, Waiter};

/// Little: a worker's memory is locked.
const STACK: usize = 128 << 10;

/// The requests of a device that wait.
#[derive(Debug)]
pub(super) struct Waits(Arc<Shared>);

struct Shared {
    presence: Arc<Presence>,
    line: Mutex<Waiters>,
    arrived: Condvar,
}

#[derive(Default)]
struct Waiters {
    waiting: Vec<Waiting>,
    started: bool,
    ends: bool,
}

/// A range of bytes, and the request that waits until it can go on.
struct Waiting {
    offset: u64,
    len: u64,
    waiter: Waiter,
    /// How often chunks had gone from memory when it was asked for.
    departures: u32,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waits").finish_non_exhaustive()
    }
}

impl Waiting {
    fn ends(self, how: Result<(), Errno>) {
        self.waiter.mailbox.leave(self.waiter.whom, Note::There(how), None);
    }

    /// Asks once more for what came and went before the rest was there.
    fn ask_again(&mut self, presence: &Presence) {
        let departures = presence.departures();
        if std::mem::replace(&mut self.departures, departures) != departures {
            presence.ask(self.offset, self.len);
        }
    }
}

impl Waits {
    pub(super) fn new(presence: Arc<Presence>) -> Waits {
        Waits(Arc::new(Shared { presence, line: Mutex::default(), arrived: Condvar::new() }))
    }

    /// Asks for what is missing of a range; the waiter hears when it can go on, or never will.
    pub(super) fn add(&self, offset: u64, len: u64, waiter: Waiter) {
        let (mut line, departures) = (self.0.line(), self.0.presence.departures());
        let waiting = Waiting { offset, len, waiter, departures };
        if !line.started {
            let shared = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().name("becket-filled".to_owned()).stack_size(STACK);
            if thread.spawn(move || shared.work()).is_err() {
                drop(line);
                return waiting.ends(Err(Errno::NOMEM));
            }
            line.started = true;
        }
        line.waiting.push(waiting);
        drop(line);
        self.0.arrived.notify_one();
        let presence = &self.0.presence;
        presence.ask(offset, len);
        // It may have come after the request looked and before the thread could know of it.
        if presence.is_ready(offset, len) || presence.fails() {
            presence.tell();
        }
    }

    /// `those` of the requests of a queue wait no longer.
    pub(super) fn cancel(&self, queue: u32, mailbox: &Arc<Mailbox>, those: &dyn Fn(u16) -> bool) {
        let theirs = |one: &mut Waiting| {
            let (of, tag) = one.waiter.whom;
            of == queue && Arc::ptr_eq(&one.waiter.mailbox, mailbox) && those(tag)
        };
        let gone: Vec<Waiting> = self.0.line().waiting.extract_if(.., theirs).collect();
        gone.into_iter().for_each(|one| one.ends(Err(Errno::IO)));
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.line().ends = true;
        self.0.arrived.notify_one();
        self.0.presence.tell();
    }
}

impl Shared {
    fn line(&self) -> MutexGuard<'_, Waiters> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            let idle = |line: &mut Waiters| line.waiting.is_empty() && !line.ends;
            drop(self.arrived.wait_while(self.line(), idle).unwrap_or_else(PoisonError::into_inner));
            // Before the look: what comes after it ends the waiting below.
            let news = self.presence.news();
            let fails = self.presence.fails();
            let mut line = self.line();
            let ends = line.ends;
            let over = |one: &mut Waiting| ends || fails || self.presence.is_ready(one.offset, one.len);
            let ended: Vec<Waiting> = line.waiting.extract_if(.., over).collect();
            line.waiting.iter_mut().for_each(|one| one.ask_again(&self.presence));
            drop(line);
            let all = ended.is_empty();
            for one in ended {
                // One that was ready and is not any more waits once more.
                let goes_on = !ends && (!fails || self.presence.is_ready(one.offset, one.len));
                one.ends(if goes_on { Ok(()) } else { Err(Errno::IO) });
            }
            if ends {
                return;
            }
            if all {
                self.presence.await_news(news);
            }
        }
    }
}
