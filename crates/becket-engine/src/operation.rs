//! What a request needs next: the operation on a backing file that takes it one step further.
//! Decides and builds; queues nothing, and knows nothing of how results are told.

use becket_image::Place;
use io_uring::{opcode, squeue, types::FsyncFlags};
use rustix::io::Errno;

use crate::{
    Backing, Data, Op,
    core::Core,
    request::{MAX_RETRIES, Slot, Way, Zeroing, errno_of},
    ring::fixed,
};

/// Longest single operation on a backing file, in bytes (the kernel cuts at 2 GiB less a page).
const MAX_OPERATION: u64 = 1 << 30;
/// Zeroes for backings that cannot zero a range themselves.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

impl Core {
    /// The next operation on a backing file that a request needs, or `None` when it is whole.
    pub(crate) fn next_operation(&mut self, tag: u16) -> Result<Option<squeue::Entry>, Errno> {
        if self.slab[usize::from(tag)].request.op == Op::Flush {
            return self.next_sync(tag);
        }
        loop {
            let slot = &mut self.slab[usize::from(tag)];
            let left = slot.request.len - slot.done;
            if left == 0 {
                return Ok(None);
            }
            let extent = self.map.lookup(slot.request.offset + slot.done).ok_or(Errno::IO)?;
            slot.asked = left.min(extent.len).min(MAX_OPERATION);
            match extent.place {
                Place::Data { file, offset } => return self.operate(tag, file, offset).map(Some),
                // Holes read as zeroes, and a hole stays one when it is zeroed.
                Place::Zero => match (slot.request.op, slot.request.data) {
                    (Op::Read, Data::Buffer) => {
                        let (from, len) = (slot.done as usize, slot.asked as usize);
                        slot.done += slot.asked;
                        let buffers = self.buffers.as_mut().ok_or(Errno::IO)?;
                        buffers.slice(tag.into()).get_mut(from..from + len).ok_or(Errno::IO)?.fill(0);
                    }
                    (Op::Discard | Op::WriteZeroes { .. }, _) => slot.done += slot.asked,
                    _ => return Err(Errno::IO),
                },
                Place::Encoded { .. } => return Err(Errno::IO),
            }
        }
    }

    fn next_sync(&mut self, tag: u16) -> Result<Option<squeue::Entry>, Errno> {
        let slot = &mut self.slab[usize::from(tag)];
        let Some((file, target)) = self.backing.next_to_sync(slot.file)? else { return Ok(None) };
        slot.file = file;
        slot.sync_target = target;
        slot.way = Way::Free;
        let target = fixed(self.files + 1 + 2 * file);
        Ok(Some(opcode::Fsync::new(target).flags(FsyncFlags::DATASYNC).build()))
    }

    /// The operation that moves or zeroes `asked` bytes at `offset` of a backing file.
    fn operate(&mut self, tag: u16, file: u32, offset: u64) -> Result<squeue::Entry, Errno> {
        let backing = self.backing.files.get(file as usize).ok_or(Errno::IO)?;
        let slot = &mut self.slab[usize::from(tag)];
        slot.file = file;
        let buffered = fixed(self.files + 1 + 2 * file);
        let mode = match (slot.request.op, slot.zeroing) {
            (Op::Discard, _) | (Op::WriteZeroes { .. }, Zeroing::Punch) => {
                Some(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
            }
            (Op::WriteZeroes { .. }, Zeroing::Range) => {
                Some(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE)
            }
            _ => None,
        };
        if let Some(mode) = mode {
            slot.direct = false;
            slot.way = Way::Governed;
            return Ok(opcode::Fallocate::new(buffered, slot.asked).offset(offset).mode(mode).build());
        }
        if matches!(slot.request.op, Op::WriteZeroes { .. }) {
            slot.direct = false;
            slot.way = Way::Governed;
            slot.asked = slot.asked.min(ZEROES.len() as u64);
            let entry = opcode::Write::new(buffered, ZEROES.as_ptr(), slot.asked as u32);
            return Ok(entry.offset(offset).build());
        }
        slot.direct = !slot.buffered_only
            && backing.direct.is_some()
            && backing.facts.direct.is_some_and(|align| {
                let unit = u64::from(align.offset.max(1)) - 1;
                let memory = u64::from(align.memory.max(1)) - 1;
                (offset | slot.asked) & unit == 0 && slot.done & memory == 0
            });
        let target = if slot.direct { fixed(self.files + 2 + 2 * file) } else { buffered };
        let len = slot.asked as u32;
        let durable = match slot.request.op {
            Op::Write { durable: true } => libc::RWF_DSYNC,
            _ => 0,
        };
        let flags = if slot.direct && !self.watched {
            slot.way = Way::Free;
            durable
        } else {
            durable | self.governor.way_of(slot, &backing.facts)
        };
        match slot.request.data {
            Data::Buffer => {
                let buffers = self.buffers.as_ref().ok_or(Errno::IO)?;
                // In bounds: `check` held the request's length against the buffer's size.
                let address = buffers.address(tag.into()).wrapping_add(slot.done as usize);
                Ok(match slot.request.op {
                    Op::Read => {
                        opcode::Read::new(target, address, len).offset(offset).rw_flags(flags).build()
                    }
                    _ => opcode::Write::new(target, address, len).offset(offset).rw_flags(flags).build(),
                })
            }
            Data::Registered => {
                let index = (self.registered.unwrap_or(0) + u32::from(tag)) as u16;
                // A registered request's address is its offset in the request.
                let address = slot.done as usize;
                Ok(match slot.request.op {
                    Op::Read => opcode::ReadFixed::new(target, address as *mut u8, len, index)
                        .offset(offset)
                        .rw_flags(flags)
                        .build(),
                    _ => opcode::WriteFixed::new(target, address as *const u8, len, index)
                        .offset(offset)
                        .rw_flags(flags)
                        .build(),
                })
            }
            Data::None => Err(Errno::INVAL),
        }
    }

    /// Takes in the result of a sync.
    pub(crate) fn synced(backing: &Backing, slot: &mut Slot, result: i32) -> Result<(), Errno> {
        let sync = backing.sync(slot.file).ok_or(Errno::IO)?;
        let outcome = if result < 0 { Err(errno_of(result)) } else { Ok(()) };
        if outcome == Err(Errno::INTR) && slot.retries < MAX_RETRIES {
            slot.retries += 1;
            return Ok(());
        }
        slot.file += 1;
        sync.synced(slot.sync_target, outcome)
    }
}
