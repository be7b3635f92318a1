//! Where requests under way are noted, in memory that the front-end keeps for the next back-end.
//!
//! Source: QEMU, docs/interop/vhost-user.rst, "Inflight I/O tracking".

use std::sync::Arc;

use becket_engine::{Area, GuestMemory};

use super::message::InflightPlace;
use super::ring::Layout;
use super::{packed_notes, split_notes};

/// Bytes of the region of one vring, which begins a cache line.
fn region(layout: Layout, descriptors: u16) -> usize {
    let size = match layout {
        Layout::Split => split_notes::size(descriptors),
        Layout::Packed => packed_notes::size(descriptors),
    };
    size.next_multiple_of(64)
}

/// How large the regions of so many vrings are together; `None` for none.
pub(super) fn place_of(layout: Layout, queues: u16, descriptors: u16) -> Option<InflightPlace> {
    let size = region(layout, descriptors).checked_mul(queues.into());
    let size = size.filter(|size| *size > 0 && descriptors > 0)?;
    Some(InflightPlace { size: size as u64, offset: 0, queues, descriptors })
}

/// The region of a vring; `None` if the memory has no room for it.
pub(super) fn area_of(
    layout: Layout,
    memory: &Arc<GuestMemory>,
    place: &InflightPlace,
    vring: u16,
) -> Option<Area> {
    let size = region(layout, place.descriptors);
    memory.area((usize::from(vring) * size) as u64, size, 8, false).filter(|_| vring < place.queues)
}
