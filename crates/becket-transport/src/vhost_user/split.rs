//! A split vring: which requests a driver has made available, and which are used.
//! The driver is a stranger: each word is read once and then checked, and no chain is longer than the ring.
//!
//! Source: Virtual I/O Device (VIRTIO) Version 1.3, 2.7 Split Virtqueues.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use becket_engine::{Area, GuestMemory};

use super::chain::{Broken, Chain, DESCRIPTOR, Descriptor, INDIRECT, NEXT};
use super::message::VringAddress;
use super::split_notes::Notes;

const NO_INTERRUPT: u16 = 1;

/// One ring.
#[derive(Debug)]
pub(super) struct Split {
    memory: Arc<GuestMemory>,
    descriptors: Area,
    available: Area,
    used: Area,
    count: u16,
    events: bool,
    /// Requests that were taken, and that were given back.
    taken: u16,
    given: u16,
    /// As the driver sees it.
    published: u16,
    batch: Vec<u16>,
    notes: Option<Notes>,
    /// Heads that the last back-end had taken, the first of them last.
    again: Vec<u16>,
}

impl Split {
    /// A ring of `count` descriptors, whose next available request is the one of index `base`; with `events`
    /// by `VIRTIO_F_EVENT_IDX`. What is noted comes first.
    ///
    /// # Errors
    /// Its tables are not in the memory, or `count` is not a power of two.
    pub(super) fn new(
        memory: Arc<GuestMemory>,
        (count, address): (u16, &VringAddress),
        base: u16,
        events: bool,
        notes: Option<Area>,
    ) -> Result<Split, Broken> {
        if !count.is_power_of_two() {
            return Err(Broken("the size of a split ring is not a power of two"));
        }
        let outside = Broken("a table of a ring is not in the memory, or not aligned");
        let entries = usize::from(count);
        let area = |at: u64, len: usize, align: usize| memory.area(at, len, align, false).ok_or(outside);
        let descriptors = area(address.descriptors, entries * DESCRIPTOR, 16)?;
        let available = area(address.available, 6 + 2 * entries, 2)?;
        let used = area(address.used, 6 + 8 * entries, 4)?;
        let given = used.u16(2, Acquire);
        let mut split = Split {
            descriptors,
            available,
            used,
            count,
            events,
            taken: base,
            given,
            published: given,
            batch: Vec::with_capacity(entries),
            notes: None,
            again: Vec::new(),
            memory,
        };
        if let Some(area) = notes {
            let (notes, heads) = Notes::open(area, count, given);
            split.notes = Some(notes);
            if let Some(mut heads) = heads {
                // The front-end of a back-end that died does not know what was taken.
                split.taken = given.wrapping_add(heads.len() as u16);
                heads.reverse();
                split.again = heads;
            }
        }
        Ok(split)
    }

    /// The index of the next request to be taken.
    pub(super) fn base(&self) -> u16 {
        self.taken
    }

    pub(super) fn count(&self) -> u16 {
        self.count
    }

    /// Takes the next request; `false` when there is none.
    pub(super) fn take(&mut self, chain: &mut Chain) -> Result<bool, Broken> {
        chain.clear();
        let again = self.again.pop();
        let head = match again {
            Some(head) => head,
            None => {
                let waiting = self.available.u16(2, Acquire).wrapping_sub(self.taken);
                if waiting == 0 {
                    return Ok(false);
                }
                if waiting > self.count {
                    return Err(Broken("more requests are available than the ring has room for"));
                }
                self.available.u16(4 + 2 * usize::from(self.taken & (self.count - 1)), Relaxed)
            }
        };
        if head >= self.count {
            return Err(Broken("a descriptor's number is beyond the ring"));
        }
        chain.head = head;
        self.walk(chain)?;
        if again.is_none() {
            self.taken = self.taken.wrapping_add(1);
            if let Some(notes) = &mut self.notes {
                notes.took(head);
            }
        }
        Ok(true)
    }

    fn walk(&self, chain: &mut Chain) -> Result<(), Broken> {
        let mut next = chain.head;
        for _ in 0..self.count {
            let at = usize::from(next) * DESCRIPTOR;
            let descriptor = Descriptor::of_split(
                self.descriptors.u64(at, Relaxed),
                self.descriptors.u64(at + 8, Relaxed),
            );
            if descriptor.flags & INDIRECT != 0 {
                return self.walk_table(chain, &descriptor);
            }
            chain.add(descriptor)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            next = descriptor.word;
            if next >= self.count {
                return Err(Broken("a descriptor's number is beyond the ring"));
            }
        }
        Err(Broken("a chain of descriptors goes in circles"))
    }

    fn walk_table(&self, chain: &mut Chain, table: &Descriptor) -> Result<(), Broken> {
        let entries = table.entries()?;
        let mut next = 0;
        // No request has more ranges than a chain takes, so this ends before the table does.
        for _ in 0..entries {
            let (address, rest) = table.read_entry(&self.memory, next)?;
            let descriptor = Descriptor::of_split(address, rest);
            if descriptor.flags & INDIRECT != 0 {
                return Err(Broken("a table of descriptors in another one"));
            }
            chain.add(descriptor)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            next = descriptor.word.into();
            if next >= entries {
                return Err(Broken("a descriptor's number is beyond its table"));
            }
        }
        Err(Broken("a chain of descriptors goes in circles"))
    }

    /// Gives a request back with the number of bytes that were written to it. The driver sees it by
    /// [`Split::publish`].
    pub(super) fn give(&mut self, head: u16, written: u32) {
        let at = 4 + 8 * usize::from(self.given & (self.count - 1));
        self.used.set_u32(at, head.into(), Relaxed);
        self.used.set_u32(at + 4, written, Relaxed);
        self.given = self.given.wrapping_add(1);
        if let Some(notes) = &self.notes {
            notes.gives_back(head);
            self.batch.push(head);
        }
    }

    /// Lets the driver see what was given back; whether it wants to be notified.
    pub(super) fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.given);
        if old == new {
            return false;
        }
        self.used.set_u16(2, new, Release);
        self.published = new;
        if let Some(notes) = &self.notes {
            notes.gave_back(&self.batch, new);
            self.batch.clear();
        }
        // The driver writes what it wants to hear and then looks whether there is something.
        fence(SeqCst);
        if !self.events {
            return self.available.u16(0, Relaxed) & NO_INTERRUPT == 0;
        }
        let event = self.available.u16(4 + 2 * usize::from(self.count), Relaxed);
        new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
    }

    /// Has the driver notify of the next request; whether one has come meanwhile.
    pub(super) fn listen(&self) -> bool {
        if !self.events {
            return false;
        }
        self.used.set_u16(4 + 8 * usize::from(self.count), self.taken, Relaxed);
        fence(SeqCst);
        self.available.u16(2, Acquire) != self.taken
    }
}
