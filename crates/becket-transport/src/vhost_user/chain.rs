//! What a driver's descriptors say, whatever the layout of their ring: each is read once and then checked.
//!
//! Source: Virtual I/O Device (VIRTIO) Version 1.3, 2.7.5 and 2.8.

use becket_engine::{GuestMemory, GuestRange};

/// Most descriptors of a ring.
pub(super) const LARGEST: u32 = 1024;

/// Bytes of a descriptor.
pub(super) const DESCRIPTOR: usize = 16;
/// Its flags: another one follows, the device writes there, it describes a table of descriptors.
pub(super) const NEXT: u16 = 1;
/// See [`NEXT`].
pub(super) const WRITE: u16 = 2;
/// See [`NEXT`].
pub(super) const INDIRECT: u16 = 4;

/// The driver has broken the ring's rules: nothing that it says can be relied upon any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Broken(pub(super) &'static str);

/// The memory of a request, in the order of its chain. It is as large as a request may be and does not grow.
#[derive(Debug)]
pub(super) struct Chain {
    /// By what its ring knows the request.
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

    pub(super) fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
    }

    pub(super) fn add(&mut self, descriptor: Descriptor) -> Result<(), Broken> {
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

/// A range of the driver's memory, or a table of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Descriptor {
    pub(super) address: u64,
    pub(super) len: u32,
    pub(super) flags: u16,
    /// The number of the next one in a split ring; the request's number in a packed one.
    pub(super) word: u16,
}

impl Descriptor {
    /// Of a split ring's two words.
    pub(super) fn of_split(address: u64, rest: u64) -> Descriptor {
        Descriptor { address, len: rest as u32, flags: (rest >> 32) as u16, word: (rest >> 48) as u16 }
    }

    /// Of a packed ring's two words.
    pub(super) fn of_packed(address: u64, rest: u64) -> Descriptor {
        Descriptor { address, len: rest as u32, flags: (rest >> 48) as u16, word: (rest >> 32) as u16 }
    }

    /// How many descriptors the table has that this one describes.
    pub(super) fn entries(&self) -> Result<u32, Broken> {
        if self.flags & NEXT != 0 {
            return Err(Broken("a table of descriptors has a successor"));
        }
        if self.len == 0 || !self.len.is_multiple_of(DESCRIPTOR as u32) {
            return Err(Broken("a table of descriptors has no whole number of them"));
        }
        Ok(self.len / DESCRIPTOR as u32)
    }

    /// The two words of a descriptor in its table.
    pub(super) fn read_entry(&self, memory: &GuestMemory, index: u32) -> Result<(u64, u64), Broken> {
        let mut bytes = [0; DESCRIPTOR];
        let place = self.address.checked_add(u64::from(index) * DESCRIPTOR as u64);
        if !place.is_some_and(|place| memory.read(place, &mut bytes)) {
            return Err(Broken("a table of descriptors is not in the memory"));
        }
        let word = u128::from_le_bytes(bytes);
        Ok((word as u64, (word >> 64) as u64))
    }
}
