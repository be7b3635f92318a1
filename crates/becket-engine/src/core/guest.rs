//! Requests whose bytes are in a virtual machine's memory: operations go there without a copy.
//! Its ranges are looked up by `memory`; nothing here has an address of its own.

use rustix::io::Errno;

use super::state::{Core, is_lent};
use crate::{Data, GuestRange, Op, Request, request::InGuest, ring::Ring};

impl Core {
    /// Begins a request whose bytes are in these ranges of the virtual machine's memory.
    #[inline]
    pub(crate) fn begin_in_guest(
        &mut self,
        ring: &mut Ring,
        tag: u16,
        (op, offset): (Op, u64),
        ranges: &[GuestRange],
    ) -> Result<(), Errno> {
        let busy = self.slab.get(usize::from(tag)).is_none_or(|slot| slot.busy) || tag >= self.depth;
        let guest = self.guest.as_mut().filter(|_| !busy && !is_lent(&self.lent, tag)).ok_or(Errno::INVAL)?;
        let data = match guest.set(tag, ranges)? {
            true => Data::Guest(InGuest::CHECKED),
            false => Data::Ranges(InGuest::CHECKED),
        };
        let len = guest.bytes(tag);
        self.begin(ring, tag, Request { op, offset, len, data });
        Ok(())
    }
}
