//! What is asked of an NBD server: pieces of requests wait in the line to it (`target::link::line`) until
//! that is driven.
//! Drives no line, and takes in no answer: `linked` does, which may end requests by it.

use io_uring::squeue;

use super::state::Core;
use crate::{
    Op,
    ring::Ring,
    target::link::{Ask, Line, LineWay, LinkTarget, Why},
    user_data::{Source, user_data},
};

impl Core {
    /// Has a piece of a request go to its server; the answer takes the request further.
    #[inline(never)]
    pub(super) fn ask(&mut self, tag: u16, source: u32, ask: Ask) {
        if let Some(linked) = self.lines.iter_mut().find(|linked| linked.source == source) {
            linked.line.queue(tag, ask);
            self.in_flight += 1;
        }
    }

    pub(super) fn line(&mut self, number: usize) -> Option<&mut Line> {
        self.lines.get_mut(number).map(|linked| &mut linked.line)
    }

    pub(super) fn link_target(&self, number: usize) -> Option<&LinkTarget> {
        self.serving.target(self.lines.get(number)?.source)?.link()
    }

    /// Whether a durable write needs a flush behind it, because its server has no other.
    pub(super) fn flushes_after(&self, op: Op) -> bool {
        op == Op::Write { durable: true }
            && !self.lines.is_empty()
            && (0..self.lines.len())
                .any(|number| self.link_target(number).is_some_and(LinkTarget::lacks_durable_writes))
    }

    /// Queues an operation of a line.
    pub(super) fn push_of_line(
        &mut self,
        ring: &mut Ring,
        number: usize,
        way: LineWay,
        entry: squeue::Entry,
    ) -> Result<(), Why> {
        let word = user_data(self.index, Source::Link { line: number as u16, way });
        self.push(ring, &entry.user_data(word)).map_err(|_| Why::Ended)
    }
}
