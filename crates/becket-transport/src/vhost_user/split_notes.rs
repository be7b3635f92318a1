//! Which requests of a split vring are under way, in memory that the front-end keeps for the next back-end.
//! Its contents are only what a back-end wrote, but the front-end holds the file: each field is checked.
//!
//! Source: QEMU, docs/interop/vhost-user.rst, "Inflight I/O tracking".

use std::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use std::sync::atomic::{compiler_fence, fence};

use becket_engine::Area;

/// `struct queue_region_split`: features, version, number of descriptors, head of the last batch, used index.
const VERSION_AT: usize = 8;
const COUNT_AT: usize = 10;
const BATCH_AT: usize = 12;
const USED_AT: usize = 14;
const HEAD: usize = 16;
/// `struct desc_state_split`: whether it is under way, the next of the batch, when it came.
const STATE: usize = 16;
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;

/// The version that this is.
const VERSION: u16 = 1;

/// Bytes of the region of a vring of so many descriptors.
pub(super) fn size(descriptors: u16) -> usize {
    HEAD + usize::from(descriptors) * STATE
}

/// The notes of one vring.
#[derive(Debug)]
pub(super) struct Notes {
    area: Area,
    count: u16,
    counter: u64,
}

impl Notes {
    /// Of a vring of `count` descriptors, whose used index in the ring is `used`. With the heads that were
    /// under way when the last back-end ended, in the order in which they came; `None` when no back-end has
    /// used it before.
    pub(super) fn open(area: Area, count: u16, used: u16) -> (Notes, Option<Vec<u16>>) {
        let mut notes = Notes { area, count, counter: 0 };
        let before = notes.area.u16(VERSION_AT, Relaxed);
        if before != VERSION || notes.area.u16(COUNT_AT, Relaxed) != count {
            for head in 0..count {
                notes.mark(head, false);
            }
            notes.area.set_u16(COUNT_AT, count, Relaxed);
            notes.area.set_u16(BATCH_AT, 0, Relaxed);
            notes.area.set_u16(USED_AT, used, Relaxed);
            notes.area.set_u16(VERSION_AT, VERSION, Release);
            return (notes, None);
        }
        notes.end_batch(used);
        let mut heads: Vec<(u64, u16)> = (0..count)
            .filter(|head| notes.is_marked(*head))
            .map(|head| (notes.area.u64(notes.at(head) + COUNTER_AT, Relaxed), head))
            .collect();
        heads.sort_unstable();
        notes.counter = heads.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        (notes, Some(heads.into_iter().map(|(_, head)| head).collect()))
    }

    /// The last back-end may have ended between giving requests back and noting that.
    fn end_batch(&mut self, used: u16) {
        let given_back = used.wrapping_sub(self.area.u16(USED_AT, Relaxed));
        let mut head = self.area.u16(BATCH_AT, Relaxed);
        for _ in 0..given_back.min(self.count) {
            self.mark(head, false);
            head = self.area.u16(self.at(head) + NEXT_AT, Relaxed);
        }
        self.area.set_u16(USED_AT, used, Relaxed);
    }

    fn at(&self, head: u16) -> usize {
        HEAD + usize::from(head) * STATE
    }

    fn is_marked(&self, head: u16) -> bool {
        self.area.u16(self.at(head), Relaxed) & 0xff != 0
    }

    fn mark(&self, head: u16, on: bool) {
        // The byte behind it is padding.
        self.area.set_u16(self.at(head), on.into(), Relaxed);
    }

    /// A request has been taken.
    pub(super) fn took(&mut self, head: u16) {
        self.area.set_u64(self.at(head) + COUNTER_AT, self.counter, Relaxed);
        self.counter = self.counter.wrapping_add(1);
        // Other processes read this only when this one is dead: what it has stored is then there, in the
        // order of its program.
        compiler_fence(SeqCst);
        self.mark(head, true);
    }

    /// A request will be given back in this batch.
    pub(super) fn gives_back(&self, head: u16) {
        let last = self.area.u16(BATCH_AT, Relaxed);
        self.area.set_u16(self.at(head) + NEXT_AT, last, Relaxed);
        compiler_fence(SeqCst);
        self.area.set_u16(BATCH_AT, head, Relaxed);
    }

    /// The batch is given back: the ring's used index is `used`.
    pub(super) fn gave_back(&self, heads: &[u16], used: u16) {
        fence(Release);
        for head in heads {
            self.mark(*head, false);
        }
        compiler_fence(SeqCst);
        self.area.set_u16(USED_AT, used, Release);
    }
}
