//! Which requests of a packed vring are under way, in memory that the front-end keeps for the next back-end.
//! Their descriptors are kept, too: in the ring, what is used is written over them. The contents are only
//! what a back-end wrote, but the front-end holds the file: each field is checked.
//!
//! The layout is ours, under a version of its own. That of QEMU's docs/interop/vhost-user.rst gives requests
//! back in batches and takes back one that was not finished, which leaves descriptors in the ring that look
//! used. Here each request is given back by itself: noted as leaving, written to the ring, noted as gone.

use std::sync::atomic::Ordering::{Relaxed, Release, SeqCst};
use std::sync::atomic::compiler_fence;

use becket_engine::Area;

use super::chain::Broken;
use super::place::Place;

/// What the region begins with: version, number of descriptors, then in one word which request is being
/// given back and where.
const VERSION_AT: usize = 8;
const COUNT_AT: usize = 10;
const LEAVING_AT: usize = 12;
const HEAD: usize = 16;
/// An entry: whether a request under way begins here, its next entry, how many it has, its number, when it
/// came; then the descriptor.
const ENTRY: usize = 32;
const NEXT_AT: usize = 2;
const ENTRIES_AT: usize = 4;
const ID_AT: usize = 6;
const COUNTER_AT: usize = 8;
const ADDRESS_AT: usize = 16;
const REST_AT: usize = 24;

/// The version that this is.
const VERSION: u16 = 0xb001;
/// No request is being given back.
const NONE: u16 = u16::MAX;

/// Bytes of the region of a vring of so many descriptors.
pub(super) fn size(descriptors: u16) -> usize {
    HEAD + usize::from(descriptors) * ENTRY
}

/// An entry, as a ring knows it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Saved {
    /// The next entry of the same request.
    pub(super) next: u16,
    /// Of a request's first entry: how many it has, and the request's number.
    pub(super) count: u16,
    pub(super) id: u16,
}

/// The notes of one vring.
#[derive(Debug)]
pub(super) struct Notes {
    area: Area,
    count: u16,
    counter: u64,
}

impl Notes {
    /// Of a vring of `count` descriptors that would give the next request back at `used`; where it does so.
    pub(super) fn open(area: Area, count: u16, used: Place, ring: &Area) -> (Notes, Place) {
        let notes = Notes { area, count, counter: 0 };
        let word = notes.area.u32(LEAVING_AT, Relaxed);
        let (leaving, before) = (word as u16, Place((word >> 16) as u16));
        let is_ours = notes.area.u16(VERSION_AT, Relaxed) == VERSION;
        if !is_ours || notes.area.u16(COUNT_AT, Relaxed) != count || before.index() >= count {
            for entry in 0..count {
                notes.mark(entry, false);
            }
            notes.area.set_u16(COUNT_AT, count, Relaxed);
            notes.says_leaving(NONE, used);
            notes.area.set_u16(VERSION_AT, VERSION, Release);
            return (notes, used);
        }
        // The last back-end may have ended between giving a request back and noting that.
        if leaving < count && before.is_used(ring) {
            let entries = notes.area.u16(notes.at(leaving) + ENTRIES_AT, Relaxed).min(count);
            let used = before.on(entries, count);
            notes.gave_back(leaving, used);
            return (notes, used);
        }
        notes.says_leaving(NONE, before);
        (notes, before)
    }

    /// Finds the requests under way, the first that came last, and says of each entry whether one has it.
    ///
    /// # Errors
    /// The notes make no sense.
    pub(super) fn restore(
        &mut self,
        entries: &mut [Saved],
        heads: &mut Vec<u16>,
    ) -> Result<Vec<bool>, Broken> {
        let wrong = Broken("what is noted of its requests makes no sense");
        let mut came: Vec<(u64, u16)> = Vec::new();
        let mut is_taken = vec![false; self.count.into()];
        for head in (0..self.count).filter(|head| self.is_marked(*head)) {
            let word = |at: usize| self.area.u16(self.at(head) + at, Relaxed);
            let (count, id) = (word(ENTRIES_AT), word(ID_AT));
            if count == 0 || count > self.count {
                return Err(wrong);
            }
            let mut entry = head;
            for _ in 0..count {
                let taken = is_taken.get_mut(usize::from(entry)).ok_or(wrong)?;
                if std::mem::replace(taken, true) {
                    return Err(wrong);
                }
                let next = self.area.u16(self.at(entry) + NEXT_AT, Relaxed);
                entries[usize::from(entry)].next = next;
                entry = next;
            }
            let first = &mut entries[usize::from(head)];
            (first.count, first.id) = (count, id);
            came.push((self.area.u64(self.at(head) + COUNTER_AT, Relaxed), head));
        }
        came.sort_unstable();
        self.counter = came.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        heads.extend(came.into_iter().rev().map(|(_, head)| head));
        Ok(is_taken)
    }

    fn at(&self, entry: u16) -> usize {
        HEAD + usize::from(entry) * ENTRY
    }

    fn is_marked(&self, head: u16) -> bool {
        self.area.u16(self.at(head), Relaxed) != 0
    }

    pub(super) fn mark(&self, head: u16, on: bool) {
        self.area.set_u16(self.at(head), on.into(), Relaxed);
    }

    fn says_leaving(&self, head: u16, used: Place) {
        self.area.set_u32(LEAVING_AT, u32::from(head) | u32::from(used.0) << 16, Relaxed);
    }

    /// A descriptor of a request that is being taken, behind the one in the entry `last`.
    #[inline]
    pub(super) fn save(&self, last: Option<u16>, entry: u16, (address, rest): (u64, u64)) {
        if let Some(last) = last {
            self.area.set_u16(self.at(last) + NEXT_AT, entry, Relaxed);
        }
        self.area.set_u64(self.at(entry) + ADDRESS_AT, address, Relaxed);
        self.area.set_u64(self.at(entry) + REST_AT, rest, Relaxed);
    }

    /// The two words of a descriptor that was saved.
    pub(super) fn saved(&self, entry: u16) -> (u64, u64) {
        let word = |at: usize| self.area.u64(self.at(entry) + at, Relaxed);
        (word(ADDRESS_AT), word(REST_AT))
    }

    /// A request whose descriptors are saved has been taken.
    #[inline]
    pub(super) fn took(&mut self, head: u16, entries: u16, id: u16) {
        self.area.set_u16(self.at(head) + ENTRIES_AT, entries, Relaxed);
        self.area.set_u16(self.at(head) + ID_AT, id, Relaxed);
        self.area.set_u64(self.at(head) + COUNTER_AT, self.counter, Relaxed);
        self.counter = self.counter.wrapping_add(1);
        // Other processes read this only when this one is dead: what it has stored is then there, in the
        // order of its program.
        compiler_fence(SeqCst);
        self.mark(head, true);
    }

    /// A request will be given back at `used`.
    #[inline]
    pub(super) fn gives_back(&self, head: u16, used: Place) {
        self.says_leaving(head, used);
        compiler_fence(SeqCst);
    }

    /// It is given back; the next one will be at `used`.
    #[inline]
    pub(super) fn gave_back(&self, head: u16, used: Place) {
        compiler_fence(SeqCst);
        self.mark(head, false);
        compiler_fence(SeqCst);
        self.says_leaving(NONE, used);
    }
}
