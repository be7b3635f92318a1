//! A split vring: which requests a driver has made available, and which are used.
//! The driver is a stranger: each word is read once and then checked, and no chain is longer than the ring.
//!
//! Source: Virtual I/O Device (VIRTIO) Version 1.3, 2.7 Split Virtqueues.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;

use becket_engine::{Area, GuestMemory, GuestRange};

use super::inflight::Inflight;
use super::message::VringAddress;

/// Most descriptors of a ring.
pub(super) const LARGEST: u32 = 1024;

const DESCRIPTOR: usize = 16;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const NO_INTERRUPT: u16 = 1;

/// The driver has broken the ring's rules: nothing that it says can be relied upon any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Broken(pub(super) &'static str);

/// The memory of a request, in the order of its chain. It is as large as a request may be and does not grow.
#[derive(Debug)]
pub(super) struct Chain {
    pub(super) head: u16,
    /// What the device reads.
    pub(super) readable: Vec<GuestRange>,
    /// What it writes.
    pub(super) writable: Vec<GuestRange>,
}

impl Chain {
    /// For requests of at most so many ranges of each kind.
    pub(super) fn with_room(ranges: usize) -> Chain {
        Chain { head: 0, readable: Vec::with_capacity(ranges), writable: Vec::with_capacity(ranges) }
    }

    fn add(&mut self, descriptor: Descriptor) -> Result<(), Broken> {
        let list = match descriptor.flags & WRITE {
            0 if !self.writable.is_empty() => return Err(Broken("a readable range behind a writable one")),
            0 => &mut self.readable,
            _ => &mut self.writable,
        };
        if list.len() == list.capacity() {
            return Err(Broken("a request has too many ranges"));
        }
        list.push(GuestRange { address: descriptor.address, len: descriptor.len });
        Ok(())
    }
}

#[derive(Debug, Clone, Copy)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    fn of(address: u64, rest: u64) -> Descriptor {
        Descriptor { address, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
    }
}

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
    inflight: Option<Inflight>,
    /// Heads that the last back-end had taken, the first of them last.
    again: Vec<u16>,
}

impl Split {
    /// A ring of `count` descriptors, a power of two, whose next available request is the one of index
    /// `base`; with `events` by `VIRTIO_F_EVENT_IDX`. What is noted in `inflight` comes first.
    ///
    /// # Errors
    /// Its tables are not in the memory.
    pub(super) fn new(
        memory: Arc<GuestMemory>,
        (count, address): (u16, &VringAddress),
        base: u16,
        events: bool,
        inflight: Option<Area>,
    ) -> Result<Split, Broken> {
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
            inflight: None,
            again: Vec::new(),
            memory,
        };
        if let Some(area) = inflight {
            let (inflight, heads) = Inflight::open(area, count, given);
            split.inflight = Some(inflight);
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

    /// Takes the next request; `false` when there is none.
    pub(super) fn take(&mut self, chain: &mut Chain) -> Result<bool, Broken> {
        chain.readable.clear();
        chain.writable.clear();
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
            if let Some(inflight) = &mut self.inflight {
                inflight.took(head);
            }
        }
        Ok(true)
    }

    fn walk(&self, chain: &mut Chain) -> Result<(), Broken> {
        let mut next = chain.head;
        for _ in 0..self.count {
            let at = usize::from(next) * DESCRIPTOR;
            let descriptor =
                Descriptor::of(self.descriptors.u64(at, Relaxed), self.descriptors.u64(at + 8, Relaxed));
            if descriptor.flags & INDIRECT != 0 {
                if descriptor.flags & NEXT != 0 {
                    return Err(Broken("a table of descriptors has a successor"));
                }
                return self.walk_table(chain, &descriptor);
            }
            chain.add(descriptor)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            next = descriptor.next;
            if next >= self.count {
                return Err(Broken("a descriptor's number is beyond the ring"));
            }
        }
        Err(Broken("a chain of descriptors goes in circles"))
    }

    fn walk_table(&self, chain: &mut Chain, table: &Descriptor) -> Result<(), Broken> {
        let entries = table.len / DESCRIPTOR as u32;
        if entries == 0 || !table.len.is_multiple_of(DESCRIPTOR as u32) {
            return Err(Broken("a table of descriptors has no whole number of them"));
        }
        let mut next = 0;
        // No request has more ranges than a chain takes, so this ends before the table does.
        for _ in 0..entries {
            let mut bytes = [0; DESCRIPTOR];
            let place = table.address.checked_add(u64::from(next) * DESCRIPTOR as u64);
            if !place.is_some_and(|place| self.memory.read(place, &mut bytes)) {
                return Err(Broken("a table of descriptors is not in the memory"));
            }
            let word = u128::from_le_bytes(bytes);
            let descriptor = Descriptor::of(word as u64, (word >> 64) as u64);
            if descriptor.flags & INDIRECT != 0 {
                return Err(Broken("a table of descriptors in another one"));
            }
            chain.add(descriptor)?;
            if descriptor.flags & NEXT == 0 {
                return Ok(());
            }
            next = descriptor.next.into();
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
        if let Some(inflight) = &self.inflight {
            inflight.gives_back(head);
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
        if let Some(inflight) = &self.inflight {
            inflight.gave_back(&self.batch, new);
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
