//! Which way an operation on a file goes: as it is, tried without blocking, or with a place in the window
//! of its class.
//! Nothing here is on the way of a direct operation that does not block.

use becket_image::{DirectIo, Facts};

use crate::{
    governor::{Class, Governor},
    slot::{Slot, Way},
};

/// `RWF_DONTCACHE` of the kernel's `fs.h` (Linux 6.14).
const RWF_DONTCACHE: i32 = 0x80;

/// Shorter writes stay in the page cache: each that does not is written back by itself at once (4 KiB at
/// random: 23 MB/s against 177 on ext4, 12 against 260 on xfs, Linux 6.18). Those that stand beside direct
/// ones must go all the same; see `core::hold`.
const UNCACHED_WRITE: u64 = 128 << 10;

/// Chooses the way of the read or write that a slot is about to begin, and its flags.
///
/// `wanted` is what the device goes past the page cache with; what goes through it may stay there where
/// `stays` says so.
pub(super) fn way_of(
    governor: &mut Governor,
    slot: &mut Slot,
    facts: &Facts,
    wanted: DirectIo,
    stays: bool,
) -> i32 {
    let direct = !slot.file.buffered;
    if direct && facts.nowait && !(facts.sparse && slot.request.op.modifies()) {
        slot.way = Way::Free;
        return 0;
    }
    let past = wanted != DirectIo::Off && facts.direct.is_some();
    let leaves = !stays && (!slot.request.op.modifies() || slot.asked >= UNCACHED_WRITE || past);
    let uncached = if leaves && facts.uncached && !direct && !slot.file.bare { RWF_DONTCACHE } else { 0 };
    let tries = facts.nowait && !slot.blocks && !slot.file.bare && governor.tries(Class::of(slot.request.op));
    if tries {
        slot.way = Way::Trying;
        return uncached | libc::RWF_NOWAIT;
    }
    slot.way = Way::Governed;
    uncached
}
