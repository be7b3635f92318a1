//! Queues that write and flush over connections of their own to a server that is replaced at any moment, in
//! random order: a model of `core::linked` over the real [`Group`] and [`Syncs`].

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::target::syncs::Syncs;

const QUEUES: usize = 3;

#[derive(Debug, Clone, Copy)]
enum Step {
    /// The server is replaced by another one: its unflushed bytes are gone.
    Replaced,
    Write(usize),
    Flush(usize),
    /// The queue looks at what has become of the others' connections.
    Heeds(usize),
    /// The kernel has nothing of a queue's broken connection any more.
    Settles(usize),
    /// A queue asks for a connection, or gets the one that it has asked for.
    Connects(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let queue = || 0..QUEUES;
    prop_oneof![
        1 => Just(Step::Replaced),
        6 => queue().prop_map(Step::Write),
        6 => queue().prop_map(Step::Flush),
        6 => queue().prop_map(Step::Heeds),
        4 => queue().prop_map(Step::Settles),
        6 => queue().prop_map(Step::Connects),
    ]
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Link {
    Down,
    /// Asked for after so many breaks, and made to that server.
    Asked(u32, usize),
    Up(usize),
    Broken,
}

#[derive(Debug, Clone, Copy)]
struct Queue {
    link: Link,
    holds: bool,
    /// A flush under way: what it covers, and the first write that was not finished when it began.
    flush: Option<(u64, usize)>,
}

struct Model {
    syncs: Syncs,
    group: Group,
    queues: [Queue; QUEUES],
    /// Number of the server that is there.
    server: usize,
    cached: BTreeSet<usize>,
    stored: BTreeSet<usize>,
    /// Writes that have finished.
    written: usize,
    /// Those before this one are reported as perhaps lost.
    reported: usize,
    failures: usize,
    /// Deaths with unflushed bytes.
    deaths: usize,
}

impl Model {
    fn new() -> Model {
        let queue = Queue { link: Link::Down, holds: false, flush: None };
        let syncs = Syncs::new(QUEUES, None);
        syncs.begins();
        Model {
            syncs,
            group: Group::new(QUEUES),
            queues: [queue; QUEUES],
            server: 0,
            cached: BTreeSet::new(),
            stored: BTreeSet::new(),
            written: 0,
            reported: 0,
            failures: 0,
            deaths: 0,
        }
    }

    fn leaves(&mut self, queue: usize) {
        if self.group.leaves(queue) {
            if self.syncs.is_at_risk() {
                self.syncs.lose_once(queue);
            }
            self.group.ended();
        }
    }

    fn breaks(&mut self, queue: usize) {
        self.queues[queue].link = Link::Broken;
        let _ = self.group.broke();
    }

    fn fails(&mut self, before: usize) {
        self.failures += 1;
        self.reported = self.reported.max(before);
    }

    /// What a queue looks at whenever it takes a turn.
    fn heeds(&mut self, queue: usize) {
        self.queues[queue].holds = self.group.doubts_others(queue);
        if !self.group.is_whole() {
            if let Link::Up(_) = self.queues[queue].link {
                self.queues[queue].link = Link::Broken;
            }
            return;
        }
        if let (Some(doubt), Link::Up(server)) = (self.group.doubt(queue), self.queues[queue].link) {
            // The probe of a connection to a server that is gone breaks it.
            match server == self.server {
                true => _ = self.group.settles(queue, doubt),
                false => return self.breaks(queue),
            }
        }
        if let Some((covers, before)) = self.queues[queue].flush
            && self.syncs.loses(covers)
        {
            self.queues[queue].flush = None;
            self.syncs.reports(covers);
            self.fails(before);
        }
    }

    fn flush_goes_on(&mut self, queue: usize) {
        let Some((covers, before)) = self.queues[queue].flush else { return };
        let Link::Up(server) = self.queues[queue].link else { return };
        if self.queues[queue].holds {
            return;
        }
        if server != self.server {
            return self.breaks(queue);
        }
        self.stored.append(&mut self.cached);
        self.queues[queue].flush = None;
        self.syncs.synced(covers, Ok(())).unwrap();
        let lost: Vec<usize> = (self.reported..before).filter(|write| !self.stored.contains(write)).collect();
        assert!(lost.is_empty(), "a flush succeeds though {lost:?} are lost");
    }

    fn takes(&mut self, step: Step) {
        match step {
            Step::Replaced => {
                self.deaths += usize::from(!self.cached.is_empty());
                self.cached.clear();
                self.server += 1;
            }
            Step::Write(queue) => {
                self.heeds(queue);
                match self.queues[queue].link {
                    Link::Up(server) if server == self.server => {
                        self.cached.insert(self.written);
                        self.written += 1;
                        self.syncs.wrote(queue);
                    }
                    Link::Up(_) => self.breaks(queue),
                    _ => {}
                }
            }
            Step::Flush(queue) => {
                self.heeds(queue);
                if self.queues[queue].flush.is_none() {
                    match self.syncs.due() {
                        Ok(Some(covers)) => self.queues[queue].flush = Some((covers, self.written)),
                        Ok(None) => {}
                        Err(_) => self.fails(self.written),
                    }
                }
                self.flush_goes_on(queue);
            }
            Step::Heeds(queue) => self.heeds(queue),
            Step::Settles(queue) => {
                if self.queues[queue].link == Link::Broken {
                    self.queues[queue].link = Link::Down;
                    self.leaves(queue);
                    self.heeds(queue);
                }
            }
            Step::Connects(queue) => {
                self.heeds(queue);
                match self.queues[queue].link {
                    Link::Down if self.group.is_whole() => {
                        self.queues[queue].link = Link::Asked(self.group.breaks(), self.server);
                    }
                    Link::Asked(breaks, server) => {
                        self.queues[queue].link = Link::Up(server);
                        if !self.group.joins(queue, breaks) {
                            self.queues[queue].link = Link::Down;
                            self.leaves(queue);
                        }
                        self.heeds(queue);
                    }
                    _ => {}
                }
            }
        }
    }

    /// Everything settles, and each queue flushes.
    fn ends(&mut self) {
        for _ in 0..8 {
            for queue in 0..QUEUES {
                let all =
                    [Step::Settles(queue), Step::Connects(queue), Step::Connects(queue), Step::Flush(queue)];
                all.into_iter().for_each(|step| self.takes(step));
            }
        }
        for (number, queue) in self.queues.iter().enumerate() {
            assert!(matches!(queue.link, Link::Up(_)) && queue.flush.is_none(), "{number} waits: {queue:?}");
        }
        let known = |write: &usize| self.stored.contains(write) || *write < self.reported;
        assert!((0..self.written).all(|write| known(&write)), "bytes are lost that no flush has reported");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]

    /// No flush succeeds over bytes that a dead server had, unless one has failed for them, and nobody waits
    /// for ever.
    #[test]
    fn a_flush_that_succeeds_has_lost_nothing(steps in prop::collection::vec(step(), 1..120)) {
        let mut model = Model::new();
        steps.into_iter().for_each(|step| model.takes(step));
        model.ends();
    }
}

/// Every queue has a connection, and has written; then the server dies, and each queue goes on.
#[test]
fn a_death_fails_one_flush_whoever_notices_it_first() {
    for first in 0..QUEUES {
        let mut model = Model::new();
        for queue in 0..QUEUES {
            [Step::Connects(queue), Step::Connects(queue)].into_iter().for_each(|step| model.takes(step));
        }
        for _ in 0..2 {
            (0..QUEUES).for_each(|queue| model.takes(Step::Write(queue)));
        }
        model.takes(Step::Replaced);
        model.takes(Step::Write(first));
        for round in 0..5 {
            for queue in (0..QUEUES).map(|queue| (queue + first) % QUEUES) {
                let all =
                    [Step::Heeds(queue), Step::Settles(queue), Step::Connects(queue), Step::Write(queue)];
                all.into_iter().for_each(|step| model.takes(step));
                if round > 0 {
                    model.takes(Step::Flush(queue));
                }
            }
        }
        model.ends();
        assert_eq!((model.failures, model.deaths), (1, 1), "{first} noticed it first");
    }
}

/// A queue without a connection flushes over its first one, which leads to another server than the one that
/// has the bytes.
#[test]
fn a_new_connection_vouches_for_no_older_one() {
    let mut model = Model::new();
    let all = [Step::Connects(0), Step::Connects(0), Step::Write(0), Step::Replaced];
    all.into_iter().for_each(|step| model.takes(step));
    let all = [Step::Connects(1), Step::Connects(1), Step::Flush(1)];
    all.into_iter().for_each(|step| model.takes(step));
    assert!(model.queues[1].flush.is_some(), "it waits for the older one");
    let all = [Step::Heeds(0), Step::Heeds(1), Step::Settles(0), Step::Settles(1), Step::Heeds(1)];
    all.into_iter().for_each(|step| model.takes(step));
    assert!(model.queues[1].flush.is_none() && model.failures == 1, "and fails with it");
    model.ends();
    assert_eq!(model.failures, 1);
}
