//! The last events of this process, and readers that wait for the next one.
//! A reader never holds up what happens: what it has not taken in time is forgotten, and it learns how much.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use crate::contract::Happened;
use crate::contract::event::Batch;
use crate::system::sync::lock;

/// How many events are remembered. One has some hundred bytes.
const REMEMBERED: usize = 1024;
/// Bytes of a message that are kept. Most have a hundred; an error of the system may quote a path.
const LONGEST: usize = 4096;

/// The events of a process.
pub(crate) struct Events {
    kept: Mutex<Kept>,
    rung: Condvar,
}

#[derive(Default)]
struct Kept {
    events: VecDeque<Happened>,
    /// The number of the last one.
    last: u64,
}

/// Those of this process.
pub(crate) static EVENTS: Events = Events::new();

impl Events {
    const fn new() -> Events {
        Events { kept: Mutex::new(Kept { events: VecDeque::new(), last: 0 }), rung: Condvar::new() }
    }

    /// Adds an event, whose number is made here.
    pub(crate) fn add(&self, mut event: Happened) {
        if event.message.len() > LONGEST {
            let end = (0..=LONGEST).rev().find(|at| event.message.is_char_boundary(*at)).unwrap_or(0);
            event.message.truncate(end);
        }
        let mut kept = lock(&self.kept);
        kept.last += 1;
        event.number = kept.last;
        if kept.events.len() == REMEMBERED {
            kept.events.pop_front();
        }
        kept.events.push_back(event);
        drop(kept);
        self.rung.notify_all();
    }

    /// The number of the last event.
    pub(crate) fn last(&self) -> u64 {
        lock(&self.kept).last
    }

    /// The events behind the one with that number; none if none comes in time.
    pub(crate) fn behind(&self, number: u64, patience: Duration) -> Batch {
        let kept = lock(&self.kept);
        let nothing = |kept: &mut Kept| kept.last <= number;
        let waited = self.rung.wait_timeout_while(kept, patience, nothing);
        let (kept, _) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        let events: Vec<Happened> =
            kept.events.iter().filter(|event| event.number > number).cloned().collect();
        let lost = kept.last.saturating_sub(number).saturating_sub(events.len() as u64);
        Batch { events, last: kept.last, lost, server: std::process::id() }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn event(message: &str) -> Happened {
        let text = str::to_owned;
        Happened {
            number: 0,
            at: String::new(),
            event: text("attached"),
            level: text("info"),
            device: None,
            message: text(message),
        }
    }

    fn numbers(batch: &Batch) -> Vec<u64> {
        batch.events.iter().map(|event| event.number).collect()
    }

    #[test]
    fn a_reader_gets_what_is_behind_the_last_one_that_it_had() {
        let events = Events::new();
        assert_eq!(events.behind(0, Duration::ZERO).events, []);
        ["a", "b", "c"].iter().for_each(|word| events.add(event(word)));
        let batch = events.behind(1, Duration::ZERO);
        assert_eq!((numbers(&batch), batch.last, batch.lost), (vec![2, 3], 3, 0));
        assert!(numbers(&events.behind(3, Duration::ZERO)).is_empty());
    }

    #[test]
    fn a_reader_that_sleeps_holds_up_nothing_and_learns_what_it_has_missed() {
        let events = Events::new();
        let many = REMEMBERED as u64 + 500;
        (0..many).for_each(|number| events.add(event(&number.to_string())));
        let batch = events.behind(10, Duration::ZERO);
        assert_eq!((batch.events.len(), batch.lost), (REMEMBERED, 490));
        assert_eq!((numbers(&batch)[0], batch.last), (501, many));
        assert_eq!(lock(&events.kept).events.len(), REMEMBERED, "no more are kept for anybody");
    }

    #[test]
    fn a_reader_that_waits_is_woken() {
        let events = Events::new();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| events.behind(0, Duration::from_secs(60)));
            std::thread::sleep(Duration::from_millis(20));
            let begun = Instant::now();
            events.add(event("now"));
            assert_eq!(waits.join().unwrap().events[0].message, "now");
            assert!(begun.elapsed() < Duration::from_secs(10));
        });
    }

    #[test]
    fn a_message_without_end_is_cut_between_two_letters() {
        let events = Events::new();
        events.add(event(&"ü".repeat(LONGEST)));
        let message = events.behind(0, Duration::ZERO).events.remove(0).message;
        assert_eq!(message, "ü".repeat(LONGEST / 2));
    }
}
