//! Requests whose pieces go to an NBD server: each queue has a line to it (`target::link::line`), which is
//! driven here at the end of each turn, and whose answers take requests further.
//! Never waits for a server: what it does not answer stays in flight.

use std::sync::mpsc::SyncSender;

use becket_image::link::channel::Given;
use io_uring::opcode;
use rustix::io::Errno;

use super::{lines::Linked, loads::memory_of, state::Core};
use crate::{
    Op,
    decode::Waiter,
    ring::Ring,
    slot::Slot,
    target::{
        AnyTarget, Syncs, Target as _,
        link::{Ask, Line, LineWay, LinkTarget, Why},
    },
    user_data::{NOBODY, Source, user_data},
};

impl Core {
    /// Takes in the completion of an operation of a line.
    #[inline(never)]
    pub(crate) fn linked(&mut self, ring: &mut Ring, number: u16, way: LineWay, result: i32) {
        self.landed();
        let number = usize::from(number);
        let outcome = match way {
            LineWay::Sent => self.line_sent(ring, number, result),
            LineWay::Received => self.line_received(ring, number, result),
            LineWay::Answered => {
                self.status_answered(ring, number, result);
                Ok(())
            }
        };
        if let Err(why) = outcome {
            self.line_breaks(ring, number, why);
        }
    }

    fn line_sent(&mut self, ring: &mut Ring, number: usize, result: i32) -> Result<(), Why> {
        let Some(line) = self.line(number) else { return Ok(()) };
        let outcome = line.sent(result);
        if let Ok(Some(rest)) = outcome {
            return self.push_of_line(ring, number, LineWay::Sent, rest);
        }
        while let Some((tag, result)) = self.line(number).and_then(Line::after_sending) {
            self.answered(ring, number, tag, result);
        }
        outcome.map(drop)
    }

    fn line_received(&mut self, ring: &mut Ring, number: usize, result: i32) -> Result<(), Why> {
        self.line(number).map_or(Ok(()), |line| line.received(result))?;
        loop {
            let Core { lines, loads, buffers, .. } = self;
            let Some(linked) = lines.get_mut(number) else { return Ok(()) };
            let mut copy = |tag, from: u64, bytes: &[u8]| {
                let memory = memory_of(loads.as_deref_mut(), buffers.as_mut(), tag);
                let place = memory.get_mut(from as usize..).and_then(|rest| rest.get_mut(..bytes.len()));
                place.ok_or(Errno::IO)?.copy_from_slice(bytes);
                Ok(())
            };
            match linked.line.answered(&mut copy)? {
                Some((tag, result)) => self.answered(ring, number, tag, result),
                None => return Ok(()),
            }
        }
    }

    /// A piece is answered.
    fn answered(&mut self, ring: &mut Ring, number: usize, tag: u16, result: i32) {
        let Some(line) = self.line(number) else { return };
        let (flush, probe) = (line.own_tag(), line.probe_tag());
        if tag < flush {
            return self.operated(ring, tag, result);
        }
        self.landed();
        if tag == probe {
            return self.probed(ring, number);
        }
        let outcome = if result < 0 { Err(crate::slot::errno_of(result)) } else { Ok(()) };
        self.tell_flushed(number, outcome);
    }

    fn tell_flushed(&mut self, number: usize, outcome: Result<(), Errno>) {
        if let Some(flushed) = self.line(number).and_then(|line| line.flushed.take()) {
            // It has room for one answer, or nobody waits any more.
            let _ = flushed.try_send(outcome);
        }
    }

    #[cold]
    fn line_breaks(&mut self, ring: &mut Ring, number: usize, why: Why) {
        if let Some(ways) = self.line(number).and_then(|line| line.breaks(why)) {
            self.cancels(ring, number, ways);
            if let Some(target) = self.link_target(number) {
                target.broke();
            }
            match why {
                Why::Silent => tracing::warn!("an NBD server does not answer: another connection is tried"),
                Why::Ended => tracing::warn!("the connection to an NBD server broke"),
                Why::Unwanted => tracing::info!("a connection ends, and with it reads that nobody waits for"),
                Why::Lies(what) => tracing::warn!("an NBD server breaks the protocol: {what}"),
            }
        }
    }

    /// Sends what has gathered, receives what is due and asks for connections. Says whether requests have
    /// finished by that, which the port has not heard of.
    #[inline]
    pub(crate) fn drive_lines(&mut self, ring: &mut Ring) -> bool {
        let mut finished = false;
        for number in 0..self.lines.len() {
            finished |= self.drive(ring, number);
        }
        finished
    }

    fn drive(&mut self, ring: &mut Ring, number: usize) -> bool {
        let mut finished = false;
        if let Some(target) = self.link_target(number) {
            target.looks();
        }
        if self.closing {
            self.lets_go(ring, number);
        }
        finished |= self.heeds(ring, number);
        if let Some(parted) = self.line(number).and_then(Line::settles) {
            if self.closing {
                let ending = self.serving.ending().is_expected();
                if let Some(target) = self.link_target(number) {
                    target.parts(parted, ending);
                }
            } else {
                drop(parted);
                finished |= self.after_break(ring, number);
                finished |= self.heeds(ring, number);
            }
        }
        if self.closing {
            finished |= self.abandon(ring, number);
        }
        let holds = self.lines.get(number).is_some_and(|linked| linked.seen.holds);
        if let Some(entry) = self.line(number).and_then(|line| line.next_send(holds))
            && let Err(why) = self.push_of_line(ring, number, LineWay::Sent, entry)
        {
            self.line_breaks(ring, number, why);
        }
        if let Some(entry) = self.line(number).and_then(Line::next_receive)
            && let Err(why) = self.push_of_line(ring, number, LineWay::Received, entry)
        {
            self.line_breaks(ring, number, why);
        }
        if self.line(number).is_some_and(|line| line.lacks()) {
            self.ask_for_connection(number);
        }
        if self.lines.get(number).is_some_and(|linked| linked.questions.is_some()) {
            finished |= self.drive_questions(ring, number);
        }
        finished
    }

    /// Unless others still have one that is to be given up.
    #[cold]
    fn ask_for_connection(&mut self, number: usize) {
        let waiter = self.waiter_of(number);
        let Core { lines, serving, .. } = self;
        let Some(linked) = lines.get_mut(number) else { return };
        let Some(target) = serving.target(linked.source).and_then(|target| target.link()) else { return };
        // In this order: a break after it is seen when the connection comes.
        linked.seen.breaks = target.group().breaks();
        if target.group().is_whole() {
            target.dialer().ask(waiter, linked.line.asks());
            self.in_flight += 1;
        }
    }

    /// Looks at what has become of the other queues' connections, if anything has.
    #[inline]
    fn heeds(&mut self, ring: &mut Ring, number: usize) -> bool {
        let seen = self.lines.get(number).map(|linked| linked.seen.events);
        let events = self.link_target(number).map(|target| target.group().events());
        seen != events && self.heeds_others(ring, number)
    }

    #[cold]
    fn heeds_others(&mut self, ring: &mut Ring, number: usize) -> bool {
        let queue = self.number;
        let Core { lines, serving, .. } = self;
        let Some(linked) = lines.get_mut(number) else { return false };
        let Some(target) = serving.target(linked.source).and_then(|target| target.link()) else {
            return false;
        };
        let (group, seen, line) = (target.group(), &mut linked.seen, &mut linked.line);
        seen.events = group.events();
        seen.holds = group.doubts_others(queue);
        if !group.is_whole() {
            let ways = line.breaks(Why::Ended);
            self.cancels(ring, number, ways.unwrap_or_default());
            return false;
        }
        if let Some(doubt) = group.doubt(queue)
            && seen.probed.is_none()
        {
            if line.is_idle() && !target.is_at_risk() {
                target.settles(queue, doubt);
            } else {
                seen.probed = Some(doubt);
                line.queue(line.probe_tag(), target.probe());
                self.in_flight += 1;
            }
        }
        self.fail_flushes(ring, number)
    }

    /// The server has answered a probe: the connection leads to it.
    #[cold]
    fn probed(&mut self, ring: &mut Ring, number: usize) {
        let queue = self.number;
        let doubt = self.lines.get_mut(number).and_then(|linked| linked.seen.probed.take());
        if let (Some(doubt), Some(target)) = (doubt, self.link_target(number)) {
            target.settles(queue, doubt);
        }
        // There may be another doubt since.
        self.heeds_others(ring, number);
    }

    /// The queue ends. The server must not: a connection that it has ended is one that nobody can vouch for.
    /// Who made it hears that it is not used any more.
    #[cold]
    fn lets_go(&mut self, ring: &mut Ring, number: usize) {
        let waiter = self.waiter_of(number);
        let ways = self.line(number).map(Line::lets_go).unwrap_or_default();
        if let Some(target) = self.link_target(number) {
            target.dialer().forget(&waiter);
            target.goes(self.number, self.serving.ending().is_expected());
        }
        self.cancels(ring, number, ways);
    }

    /// Has the kernel end operations on a connection that was given up.
    fn cancels(&mut self, ring: &mut Ring, number: usize, ways: [Option<LineWay>; 2]) {
        for way in ways.into_iter().flatten() {
            let word = user_data(self.index, Source::Link { line: number as u16, way });
            let entry = opcode::AsyncCancel::new(word).build().user_data(NOBODY);
            if ring.push(&entry).is_err()
                && let Some(line) = self.line(number)
            {
                line.shuts();
            }
        }
    }

    /// Looks whether the server says anything, for [`crate::target::link::Line::is_silent`].
    #[cold]
    pub(super) fn look(&mut self, ring: &mut Ring, number: u16) {
        let number = usize::from(number);
        if self.line(number).is_some_and(Line::is_silent) {
            self.line_breaks(ring, number, Why::Silent);
        }
    }

    /// Where a note about a line goes.
    fn waiter_of(&self, number: usize) -> Waiter {
        // There are few sources.
        self.waiter(number as u16)
    }

    /// A connection is gone, and the kernel has no operation on it any more.
    #[cold]
    fn after_break(&mut self, ring: &mut Ring, number: usize) -> bool {
        if let Some(linked) = self.lines.get_mut(number)
            && linked.seen.probed.take().is_some()
        {
            let probe = linked.line.probe_tag();
            if linked.line.take_back(|_, tag| tag == probe).is_some() {
                self.landed();
            }
        }
        if let Some(target) = self.link_target(number) {
            target.leaves(self.number);
        }
        let given_up = self.lines.get_mut(number).and_then(|linked| linked.given_up.take());
        let failed = given_up.is_some_and(|when| self.fail_reads(ring, number, when));
        (self.line(number).is_some_and(|line| line.is_doomed()) && self.fail_all(ring, number)) || failed
    }

    /// Flushes fail of which what they were to cover may be lost.
    #[cold]
    fn fail_flushes(&mut self, ring: &mut Ring, number: usize) -> bool {
        let lost = self.take_flushes(number, |syncs, covers| match covers {
            Some(covers) => syncs.loses(covers),
            None => syncs.owes(),
        });
        lost.iter().for_each(|tag| self.fail(ring, number, *tag));
        !lost.is_empty()
    }

    /// Flushes are done that were asked before it was known that nothing was written: no server is to be
    /// waited for.
    #[cold]
    fn spare_flushes(&mut self, ring: &mut Ring, number: usize) {
        let needless = |syncs: &Syncs, covers: Option<u64>| covers.is_some_and(|it| syncs.has_synced(it));
        for tag in self.take_flushes(number, needless) {
            self.operated(ring, tag, 0);
        }
    }

    /// Takes back the flushes that are not with the kernel and of which `is` says so, by how many writes
    /// they were to cover: one that belongs to no request does not say.
    fn take_flushes(&mut self, number: usize, is: impl Fn(&Syncs, Option<u64>) -> bool) -> Vec<u16> {
        let Core { lines, serving, slab, .. } = self;
        let Some(Linked { source, line, .. }) = lines.get_mut(number) else { return Vec::new() };
        let Some(target) = serving.target(*source) else { return Vec::new() };
        // The line's own tags are behind those of all slots.
        let covers = |tag: u16| slab.get(usize::from(tag)).map(|slot| slot.covers);
        let wanted = |ask: &Ask, tag: u16| Line::is_flush(ask, tag) && is(target.syncs(), covers(tag));
        std::iter::from_fn(|| line.take_back(wanted)).collect()
    }

    /// The queue ends: nobody waits for an answer any more.
    #[cold]
    fn abandon(&mut self, ring: &mut Ring, number: usize) -> bool {
        if self.line(number).is_some_and(|line| line.is_asked()) {
            let waiter = self.waiter_of(number);
            if let Some(target) = self.link_target(number) {
                target.dialer().cancel(&waiter);
            }
        }
        self.fail_all(ring, number)
    }

    /// Has the reads fail that have waited for the server of a source since before `when`, by the ring's
    /// clock. What waits to be written goes on waiting. Reads that the server has and does not answer fail
    /// when their connection has ended: it is given up, unless bytes could be lost with it.
    #[cold]
    pub(crate) fn give_up_reads(&mut self, ring: &mut Ring, when: u64) {
        let reads = |tag| is_read_since(&self.slab, tag, when);
        let cancel = |target: &AnyTarget| target.cancel(self.index, &self.mailbox, &reads);
        self.serving.targets().iter().for_each(cancel);
        for number in 0..self.lines.len() {
            self.fail_reads(ring, number, when);
            let Core { lines, slab, .. } = self;
            let Some(linked) = lines.get_mut(number) else { return };
            if !linked.line.has_sent(|tag| is_read_since(slab, tag, when)) {
                continue;
            }
            linked.given_up = Some(when);
            if self.link_target(number).is_some_and(|target| !target.is_at_risk()) {
                self.line_breaks(ring, number, Why::Unwanted);
            }
        }
    }

    /// Reads fail that began before `when` and are not with a server.
    fn fail_reads(&mut self, ring: &mut Ring, number: usize, when: u64) -> bool {
        let Core { lines, slab, .. } = self;
        let Some(linked) = lines.get_mut(number) else { return false };
        let reads = std::iter::from_fn(|| linked.line.take_back(|_, tag| is_read_since(slab, tag, when)));
        let reads: Vec<u16> = reads.collect();
        reads.iter().for_each(|tag| self.fail(ring, number, *tag));
        !reads.is_empty()
    }

    fn fail_all(&mut self, ring: &mut Ring, number: usize) -> bool {
        let mut failed = false;
        while let Some(tag) = self.line(number).and_then(|line| line.take_back(|_, _| true)) {
            self.fail(ring, number, tag);
            failed = true;
        }
        failed
    }

    fn fail(&mut self, ring: &mut Ring, number: usize, tag: u16) {
        self.landed();
        if self.line(number).is_some_and(|line| line.own_tag() == tag) {
            return self.tell_flushed(number, Err(Errno::NOTCONN));
        }
        if let Some(slot) = self.slab.get(usize::from(tag))
            && let Some(target) = self.link_target(number)
        {
            match slot.request.op {
                Op::Flush => _ = target.syncs().reports(slot.covers),
                op if op.modifies() => target.syncs().wrote(self.number),
                _ => {}
            }
        }
        self.finish(ring.now(), tag, Err(Errno::IO));
    }

    /// A connection is there, or cannot be had.
    pub(super) fn link_came(&mut self, ring: &mut Ring, number: u16, given: Result<Given, Errno>) {
        self.landed();
        let number = usize::from(number);
        match given {
            Ok(Given { socket, earlier, patience }) => {
                let (queue, Core { lines, serving, .. }) = (self.number, &mut *self);
                let Some(linked) = lines.get_mut(number) else { return };
                let Some(target) = serving.target(linked.source).and_then(|target| target.link()) else {
                    return;
                };
                target.judge(queue, earlier);
                if target.joins(queue, linked.seen.breaks) {
                    linked.line.connected(socket, patience);
                    self.spare_flushes(ring, number);
                } else {
                    // It may lead to a server that is gone: the next one is asked for after the break.
                    let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
                    linked.line.refused();
                }
            }
            Err(_) => {
                if let Some(line) = self.line(number) {
                    line.refused();
                }
                self.fail_all(ring, number);
            }
        }
    }

    /// Has the server flush, for a thread that waits for it.
    pub(super) fn flush_asked(&mut self, number: u16, reply: SyncSender<Result<(), Errno>>) {
        let number = usize::from(number);
        let ask = self.link_target(number).and_then(LinkTarget::flush);
        if let (Some(line), Some(ask)) = (self.line(number), ask)
            && line.flushed.is_none()
        {
            line.flushed = Some(reply);
            line.queue(line.own_tag(), ask);
            self.in_flight += 1;
        }
    }
}

/// Whether a request is a read that began before `when`.
fn is_read_since(slab: &[Slot], tag: u16, when: u64) -> bool {
    slab.get(usize::from(tag)).is_some_and(|slot| slot.request.op == Op::Read && slot.began < when)
}
