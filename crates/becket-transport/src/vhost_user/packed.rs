//! A packed vring: one table in which a driver makes requests available and the device writes over them
//! which are used. The driver is a stranger: each word is read once and then checked, and no more descriptors
//! are under way than the ring has.
//!
//! Source: Virtual I/O Device (VIRTIO) Version 1.3, 2.8 Packed Virtqueues.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use becket_engine::{Area, GuestMemory};

use super::chain::{Broken, Chain, DESCRIPTOR, Descriptor, INDIRECT, NEXT, WRITE};
use super::message::VringAddress;
use super::packed_notes::{Notes, Saved};
use super::place::{AVAILABLE, FLAGS_AT, Place, USED};

/// Where a descriptor's words are.
const REST_AT: usize = 8;
const ID_AT: usize = 12;
/// Events: a place in the ring, then when the other side is to be notified.
const EVENT: usize = 4;
const WHEN_AT: usize = 2;
const NEVER: u16 = 1;
const AT_PLACE: u16 = 2;

/// One ring.
#[derive(Debug)]
pub(super) struct Packed {
    memory: Arc<GuestMemory>,
    descriptors: Area,
    /// When the driver wants to be notified, and the device.
    driver: Area,
    device: Area,
    count: u16,
    events: bool,
    /// Where the next request is taken, and where the next one is given back.
    available: Place,
    used: Place,
    /// Descriptors that were given back since the driver was last asked whether it wants to be notified.
    unheard: u32,
    /// What is under way: a request is known by the first entry of as many as it has descriptors.
    entries: Box<[Saved]>,
    free: Vec<u16>,
    notes: Option<Notes>,
    /// Requests that the last back-end had taken, the first of them last.
    again: Vec<u16>,
}

impl Packed {
    /// See [`super::ring::Ring::new`].
    pub(super) fn new(
        memory: Arc<GuestMemory>,
        (count, address): (u16, &VringAddress),
        base: u32,
        events: bool,
        notes: Option<Area>,
    ) -> Result<Packed, Broken> {
        let outside = Broken("a table of a ring is not in the memory, or not aligned");
        let area = |at: u64, len: usize, align: usize| memory.area(at, len, align, false).ok_or(outside);
        let descriptors = area(address.descriptors, DESCRIPTOR * usize::from(count), 16)?;
        let driver = area(address.available, EVENT, 4)?;
        let device = area(address.used, EVENT, 4)?;
        let [available, used] = [Place(base as u16), Place((base >> 16) as u16)];
        if available.index() >= count || used.index() >= count {
            return Err(Broken("a packed ring has no such place"));
        }
        let mut ring = Packed {
            descriptors,
            driver,
            device,
            count,
            events,
            available,
            used,
            unheard: 0,
            entries: vec![Saved::default(); count.into()].into_boxed_slice(),
            free: Vec::with_capacity(count.into()),
            notes: None,
            again: Vec::with_capacity(count.into()),
            memory,
        };
        let mut is_taken = vec![false; count.into()];
        if let Some(area) = notes {
            let (mut notes, used) = Notes::open(area, count, ring.used, &ring.descriptors);
            is_taken = notes.restore(&mut ring.entries, &mut ring.again)?;
            let taken = is_taken.iter().filter(|taken| **taken).count();
            // The front-end of a back-end that died does not know what was taken.
            (ring.used, ring.available) = (used, used.on(taken as u16, count));
            ring.notes = Some(notes);
        }
        ring.free.extend((0..count).rev().filter(|entry| !is_taken[usize::from(*entry)]));
        Ok(ring)
    }

    /// Where the next request is taken, and in the upper half where the next one is given back.
    pub(super) fn base(&self) -> u32 {
        u32::from(self.available.0) | u32::from(self.used.0) << 16
    }

    pub(super) fn count(&self) -> u16 {
        self.count
    }

    /// The entries of a request.
    fn each(&self, head: u16, mut with: impl FnMut(u16)) {
        let mut entry = head;
        for _ in 0..self.entries[usize::from(head)].count {
            with(entry);
            entry = self.entries[usize::from(entry)].next;
        }
    }

    /// Takes the next request; `false` when there is none.
    pub(super) fn take(&mut self, chain: &mut Chain) -> Result<bool, Broken> {
        chain.clear();
        if let Some(head) = self.again.pop() {
            chain.head = head;
            return self.walk_notes(chain).map(|()| true);
        }
        if !self.has_request() {
            return Ok(false);
        }
        self.walk(chain)?;
        Ok(true)
    }

    #[inline]
    fn has_request(&self) -> bool {
        let at = DESCRIPTOR * usize::from(self.available.index());
        self.available.is_available(self.descriptors.u16(at + FLAGS_AT, Acquire))
    }

    /// Walks a chain whose first descriptor is available, and takes it.
    #[inline]
    fn walk(&mut self, chain: &mut Chain) -> Result<(), Broken> {
        let (mut place, mut last, mut count) = (self.available, None::<u16>, 0);
        let id = loop {
            let at = DESCRIPTOR * usize::from(place.index());
            let (address, rest) =
                (self.descriptors.u64(at, Relaxed), self.descriptors.u64(at + REST_AT, Relaxed));
            let Some(entry) = self.free.pop() else {
                return Err(Broken("more descriptors are under way than the ring has"));
            };
            match last {
                Some(last) => self.entries[usize::from(last)].next = entry,
                None => chain.head = entry,
            }
            if let Some(notes) = &self.notes {
                notes.save(last, entry, (address, rest));
            }
            (last, count) = (Some(entry), count + 1);
            place = place.on(1, self.count);
            let descriptor = Descriptor::of_packed(address, rest);
            if !self.add(chain, descriptor)? {
                break descriptor.word;
            }
        };
        let first = &mut self.entries[usize::from(chain.head)];
        (first.count, first.id) = (count, id);
        self.available = place;
        if let Some(notes) = &mut self.notes {
            notes.took(chain.head, count, id);
        }
        Ok(())
    }

    /// Walks a chain that the last back-end has noted: in the ring it may be written over.
    #[cold]
    fn walk_notes(&self, chain: &mut Chain) -> Result<(), Broken> {
        let mut more = Ok(true);
        self.each(chain.head, |entry| {
            let Some((address, rest)) = self.notes.as_ref().map(|notes| notes.saved(entry)) else { return };
            if more == Ok(true) {
                more = self.add(chain, Descriptor::of_packed(address, rest));
            }
        });
        more.map(|_| ())
    }

    /// Adds what a descriptor describes; whether another one follows.
    #[inline]
    fn add(&self, chain: &mut Chain, descriptor: Descriptor) -> Result<bool, Broken> {
        if descriptor.flags & INDIRECT == 0 {
            chain.add(descriptor)?;
            return Ok(descriptor.flags & NEXT != 0);
        }
        // A table is used as a whole. No request has more ranges than a chain takes, so this ends before it.
        for index in 0..descriptor.entries()? {
            let (address, rest) = descriptor.read_entry(&self.memory, index)?;
            let entry = Descriptor::of_packed(address, rest);
            if entry.flags & INDIRECT != 0 {
                return Err(Broken("a table of descriptors in another one"));
            }
            chain.add(entry)?;
        }
        Ok(false)
    }

    /// Gives a request back with the number of bytes that were written to it. The driver sees it at once.
    #[inline]
    pub(super) fn give(&mut self, head: u16, written: u32) {
        let Saved { count, id, .. } = self.entries[usize::from(head)];
        if let Some(notes) = &self.notes {
            notes.gives_back(head, self.used);
        }
        self.write_used(id, written);
        self.used = self.used.on(count, self.count);
        if let Some(notes) = &self.notes {
            notes.gave_back(head, self.used);
        }
        self.unheard = self.unheard.saturating_add(count.into());
        let mut entry = head;
        for _ in 0..count {
            self.free.push(entry);
            entry = self.entries[usize::from(entry)].next;
        }
    }

    #[inline]
    fn write_used(&self, id: u16, written: u32) {
        let at = DESCRIPTOR * usize::from(self.used.index());
        self.descriptors.set_u32(at + REST_AT, written, Relaxed);
        self.descriptors.set_u16(at + ID_AT, id, Relaxed);
        let wrap = if self.used.wraps() { AVAILABLE | USED } else { 0 };
        self.descriptors.set_u16(at + FLAGS_AT, wrap | WRITE, Release);
    }

    /// Whether the driver wants to be notified of what was given back.
    pub(super) fn publish(&mut self) -> bool {
        let unheard = std::mem::take(&mut self.unheard);
        if unheard == 0 {
            return false;
        }
        // The driver writes what it wants to hear and then looks whether there is something.
        fence(SeqCst);
        match self.driver.u16(WHEN_AT, Acquire) & 3 {
            NEVER => false,
            AT_PLACE if self.events => {
                let event = Place(self.driver.u16(0, Relaxed));
                let lap = if event.wraps() == self.used.wraps() { 0 } else { u32::from(self.count) };
                let behind = (u32::from(self.used.index()) + lap).checked_sub(event.index().into());
                behind.is_some_and(|behind| (1..=unheard).contains(&behind))
            }
            _ => true,
        }
    }

    /// Has the driver notify of the next request; whether one has come meanwhile.
    pub(super) fn listen(&self) -> bool {
        if !self.events {
            return false;
        }
        self.device.set_u16(0, self.available.0, Relaxed);
        self.device.set_u16(WHEN_AT, AT_PLACE, Release);
        fence(SeqCst);
        self.has_request()
    }
}

#[cfg(test)]
#[path = "packed_tests.rs"]
mod tests;
