//! Where a queue asks its governor: which way an operation goes, whether it may begin, who comes after it.
//! Nothing here is on the way of a direct operation that does not block.

use becket_image::{DirectIo, Facts};
use rustix::io::Errno;

use super::{Class, Governor, work};
use crate::{
    core::Core,
    request::{Slot, Way, errno_of},
    ring::Ring,
};

/// `RWF_DONTCACHE` of the kernel's `fs.h` (Linux 6.14).
const RWF_DONTCACHE: i32 = 0x80;

/// Shorter writes stay in the page cache: each that does not is written back by itself at once (4 KiB at random: 23
/// MB/s against 177 on ext4, 12 against 260 on xfs, Linux 6.18). Those that stand beside direct ones must go all the
/// same; see [`super::hold`].
const UNCACHED_WRITE: u64 = 128 << 10;

impl Governor {
    /// Chooses the way of the read or write that a slot is about to begin, and its flags.
    ///
    /// `wanted` is what the queue goes past the page cache with; what goes through it may stay there where `stays` says so.
    pub(crate) fn way_of(&mut self, slot: &mut Slot, facts: &Facts, wanted: DirectIo, stays: bool) -> i32 {
        if slot.direct && facts.nowait && !(facts.sparse && slot.request.op.modifies()) {
            slot.way = Way::Free;
            return 0;
        }
        let past = wanted != DirectIo::Off && facts.direct.is_some();
        let leaves = !stays && (!slot.request.op.modifies() || slot.asked >= UNCACHED_WRITE || past);
        let uncached = if leaves && facts.uncached && !slot.direct && !slot.bare { RWF_DONTCACHE } else { 0 };
        let tries = facts.nowait && !slot.blocks && !slot.bare && self.tries(Class::of(slot.request.op));
        if tries {
            slot.way = Way::Trying;
            return uncached | libc::RWF_NOWAIT;
        }
        slot.way = Way::Governed;
        uncached
    }
}

impl Core {
    /// Whether the governed operation of `tag` may begin now; if not, it is begun when its turn has come.
    pub(crate) fn admit(&mut self, now: u64, tag: u16) -> bool {
        let slot = &mut self.slab[usize::from(tag)];
        let admitted = self.governor.admit(Class::of(slot.request.op), now, tag);
        if !admitted {
            // Whoever waits in line for a place takes it when it comes, and tries nothing else.
            slot.blocks = true;
            slot.way = Way::Waiting;
        }
        admitted
    }

    /// The operation of `tag` has no place any more, if it had one.
    pub(crate) fn left(&mut self, now: u64, tag: u16, moved: u64) {
        let slot = &self.slab[usize::from(tag)];
        if slot.way == Way::Governed {
            let class = Class::of(slot.request.op);
            self.governor.ended(class, now, work(class, moved));
        }
    }

    /// Takes in the completion of an operation that was tried, or had a place.
    pub(crate) fn operated_with_care(&mut self, ring: &mut Ring, tag: u16, result: i32) {
        let slot = &mut self.slab[usize::from(tag)];
        let class = Class::of(slot.request.op);
        let way = slot.way;
        let refused = (result < 0 && class != Class::Space).then(|| errno_of(result));
        let flags_refused = refused == Some(Errno::OPNOTSUPP) && !slot.bare;
        let would_block = way == Way::Trying && refused == Some(Errno::AGAIN);
        if way == Way::Trying {
            self.governor.tried(class, flags_refused || would_block);
        } else if way == Way::Governed {
            self.left(ring.now(), tag, u64::from(result.max(0).unsigned_abs()));
        }
        let slot = &mut self.slab[usize::from(tag)];
        if flags_refused || would_block {
            // Some file systems say EOPNOTSUPP where they mean EAGAIN; that the flags are to blame shows when it has
            // a thread to itself and is refused again.
            slot.bare = flags_refused && slot.blocks;
            slot.blocks = true;
            self.advance(ring, tag);
        } else {
            slot.blocks = false;
            self.absorb(ring, tag, result);
        }
        if way == Way::Governed {
            while let Some(next) = self.governor.next(class) {
                self.advance(ring, next);
            }
        }
    }
}
