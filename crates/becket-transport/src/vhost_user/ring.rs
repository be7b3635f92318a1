//! A vring of either layout.

use std::sync::Arc;

use becket_engine::{Area, GuestMemory};

use super::chain::{Broken, Chain};
use super::message::VringAddress;
use super::packed::Packed;
use super::split::Split;

/// How the driver lays out its rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Three tables: descriptors, what is available, what is used.
    Split,
    /// One table for all three.
    Packed,
}

/// One ring.
#[derive(Debug)]
pub(super) enum Ring {
    Split(Split),
    Packed(Packed),
}

impl Ring {
    /// A ring of `count` descriptors that goes on at `base`, as `VHOST_USER_SET_VRING_BASE` has it; with
    /// `events` by `VIRTIO_F_EVENT_IDX`. What is noted in `inflight` comes first.
    ///
    /// # Errors
    /// Its tables are not in the memory, or it cannot be of that size or go on there.
    pub(super) fn new(
        layout: Layout,
        memory: Arc<GuestMemory>,
        (count, address): (u16, &VringAddress),
        base: u32,
        events: bool,
        inflight: Option<Area>,
    ) -> Result<Ring, Broken> {
        Ok(match layout {
            Layout::Split => {
                let base = u16::try_from(base).map_err(|_| Broken("a split ring has no such index"))?;
                Ring::Split(Split::new(memory, (count, address), base, events, inflight)?)
            }
            Layout::Packed => Ring::Packed(Packed::new(memory, (count, address), base, events, inflight)?),
        })
    }

    /// Where it goes on, as `VHOST_USER_GET_VRING_BASE` has it.
    pub(super) fn base(&self) -> u32 {
        match self {
            Ring::Split(ring) => ring.base().into(),
            Ring::Packed(ring) => ring.base(),
        }
    }

    /// How many descriptors it has.
    pub(super) fn count(&self) -> u16 {
        match self {
            Ring::Split(ring) => ring.count(),
            Ring::Packed(ring) => ring.count(),
        }
    }

    /// Takes the next request; `false` when there is none.
    ///
    /// # Errors
    /// The driver has broken the rules.
    #[inline]
    pub(super) fn take(&mut self, chain: &mut Chain) -> Result<bool, Broken> {
        match self {
            Ring::Split(ring) => ring.take(chain),
            Ring::Packed(ring) => ring.take(chain),
        }
    }

    /// Gives a request back with the number of bytes that were written to it. The driver may see it only
    /// after [`Ring::publish`].
    #[inline]
    pub(super) fn give(&mut self, head: u16, written: u32) {
        match self {
            Ring::Split(ring) => ring.give(head, written),
            Ring::Packed(ring) => ring.give(head, written),
        }
    }

    /// Lets the driver see what was given back; whether it wants to be notified.
    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        match self {
            Ring::Split(ring) => ring.publish(),
            Ring::Packed(ring) => ring.publish(),
        }
    }

    /// Has the driver notify of the next request; whether one has come meanwhile.
    #[inline]
    pub(super) fn listen(&self) -> bool {
        match self {
            Ring::Split(ring) => ring.listen(),
            Ring::Packed(ring) => ring.listen(),
        }
    }
}
