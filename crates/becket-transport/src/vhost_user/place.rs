//! Places in a packed ring, and what the flags of a descriptor mean there.
//!
//! Source: Virtual I/O Device (VIRTIO) Version 1.3, 2.8.1 Driver and Device Ring Wrap Counters.

use std::sync::atomic::Ordering::Acquire;

use becket_engine::Area;

use super::chain::DESCRIPTOR;

/// Flags of a descriptor: the wrap counters of who made it available, and of who has used it.
pub(super) const AVAILABLE: u16 = 1 << 7;
/// See [`AVAILABLE`].
pub(super) const USED: u16 = 1 << 15;
/// Where a descriptor's flags are.
pub(super) const FLAGS_AT: usize = 14;

/// A place in a ring: the index of a descriptor, and above it the wrap counter, as events and the protocol
/// have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place(pub(super) u16);

impl Place {
    pub(super) const WRAP: u16 = 1 << 15;

    pub(super) fn index(self) -> u16 {
        self.0 & !Place::WRAP
    }

    pub(super) fn wraps(self) -> bool {
        self.0 & Place::WRAP != 0
    }

    /// So many descriptors further, at most `count`, in a ring of that size.
    pub(super) fn on(self, by: u16, count: u16) -> Place {
        let index = self.index() + by;
        if index < count { Place(self.0 + by) } else { Place((index - count) | (!self.0 & Place::WRAP)) }
    }

    /// Whether the descriptor at this place, with such flags, is made available.
    pub(super) fn is_available(self, flags: u16) -> bool {
        (flags & AVAILABLE != 0) == self.wraps() && (flags & USED != 0) != self.wraps()
    }

    /// Whether the device has used the descriptor at this place, of which it was available before.
    pub(super) fn is_used(self, descriptors: &Area) -> bool {
        let flags = descriptors.u16(DESCRIPTOR * usize::from(self.index()) + FLAGS_AT, Acquire);
        (flags & USED != 0) == self.wraps()
    }
}
