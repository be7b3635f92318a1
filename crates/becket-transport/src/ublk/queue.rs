//! The data side of a ublk device: one [`Port`] for each of its queues.
//! Runs in the worker; it makes no control command, opens nothing and knows no format.
//!
//! A tag's life: FETCH waits in the kernel until a request arrives; its descriptor is read from the shared
//! mapping; the engine carries it out; COMMIT_AND_FETCH reports the result and waits for the next. A tag
//! whose command comes back with an error is dead; when all of a queue's tags are dead, the queue closes.
//!
//! Source: Documentation/block/ublk.rst and include/uapi/linux/ublk_cmd.h of the kernel.

use std::{os::fd::OwnedFd, sync::Arc};

use becket_engine::{Answer, Data, Io, IoThreads, Memory, Op, Port, Request, SharedWords, Token};
use becket_uapi::ublk as uapi;
use rustix::io::Errno;

use super::DataMode;
use super::batch::{self, Batch};
use crate::serve::{Finally, ServeError, Served, Setup, thread_of};

/// Serves the queues of a device that has been added and configured but not started: `flags` are `UBLK_F_*`
/// as the kernel returned them, and its kernel side lives from `char_device`, its `/dev/ublkcN`.
///
/// Returns when every queue has handed all its fetches to the kernel, so that the device can be started.
/// `on_closed` runs once the last queue has ended and every descriptor of the device is closed.
///
/// # Errors
/// [`ServeError::Full`]: nothing was begun. Otherwise a queue could not be set up; those that were begin to
/// end as soon as the device is deleted; `on_closed` still runs after that.
pub fn serve(
    threads: &IoThreads,
    mut setup: Setup,
    flags: u64,
    char_device: OwnedFd,
    on_closed: Box<dyn FnOnce() + Send>,
) -> Result<Served, ServeError> {
    // Declared first, dropped last: after our own shares of the descriptors.
    let finally = Finally::new(on_closed);
    let mode = DataMode::of(flags);
    let char_device = Arc::new(char_device);
    let depth = setup.depth;
    let memory = if mode.is_zero_copy() {
        setup.first = place(threads, setup.id, setup.first, setup.queues, depth)?;
        Memory::Registered
    } else {
        Memory::Buffers(setup.geometry.max_io as usize)
    };
    let batch = mode.is_batch().then(|| Batch::memory(depth, !mode.is_zero_copy()));
    let unit = setup.geometry.logical_block;
    setup.serve(threads, (memory, batch), unit, finally, |number| {
        Ok(Box::new(UblkPort::new(number, depth, mode, Arc::clone(&char_device))?))
    })
}

/// Where the queues of one more device that copies nothing find room: at `wanted` or the next place behind
/// it. The room lasts until the next queue is added.
fn place(threads: &IoThreads, id: u32, wanted: u32, queues: u16, depth: u16) -> Result<u32, ServeError> {
    let mut most = 0;
    for step in 0..u32::try_from(threads.count()).unwrap_or(u32::MAX) {
        let first = wanted.wrapping_add(step);
        let room = room(threads, first, queues, depth).map_err(|source| ServeError::Engine { id, source })?;
        if room >= depth {
            return Ok(first);
        }
        most = most.max(room);
    }
    Err(ServeError::Full { id, depth, room: most })
}

/// How deep the queues of a device that copies nothing can be from `first`; more than is wanted is a guess.
fn room(threads: &IoThreads, first: u32, queues: u16, wanted: u16) -> Result<u16, becket_engine::Error> {
    let mut least = u16::MAX;
    for thread in 0..threads.count() {
        let here = (0..queues).filter(|number| thread_of(first, *number, threads) == thread).count();
        if here == 0 {
            continue;
        }
        let room = match u32::try_from(here).unwrap_or(u32::MAX) {
            1 => threads.room_for(thread, wanted)?,
            here => threads.room(thread, here)?,
        };
        least = least.min(u16::try_from(room).unwrap_or(u16::MAX));
    }
    Ok(least)
}

/// The command that a tag has with the kernel.
const FETCH: u8 = 0;
/// The registration of a request's pages that the kernel could not do by itself.
const REGISTER: u8 = 1;
/// Its end.
const UNREGISTER: u8 = 2;

/// What is known of a tag between its commands.
#[derive(Debug, Clone, Copy, Default)]
struct Tag {
    /// We registered the request's pages ourselves and must end that before the commit; the port counts such
    /// tags.
    registered: bool,
    /// The result that waits for it.
    result: i32,
    /// The kernel will hand over no more requests under this tag.
    dead: bool,
}

/// One queue of a device.
struct UblkPort {
    number: u16,
    depth: u16,
    mode: DataMode,
    char_device: Arc<OwnedFd>,
    descriptors: SharedWords,
    tags: Box<[Tag]>,
    /// Tags whose pages we registered ourselves.
    registered: u16,
    alive: u16,
    /// Commands of the whole queue, in the modes that have them; `alive` then says nothing.
    batch: Option<Batch>,
}

impl UblkPort {
    fn new(
        number: u16,
        depth: u16,
        mode: DataMode,
        char_device: Arc<OwnedFd>,
    ) -> Result<UblkPort, becket_engine::Error> {
        let size = size_of::<uapi::IoDesc>();
        let page = rustix::param::page_size();
        let stride = (usize::from(uapi::UBLK_MAX_QUEUE_DEPTH) * size).next_multiple_of(page);
        let offset = uapi::UBLKSRV_CMD_BUF_OFFSET + (usize::from(number) * stride) as u64;
        let len = (usize::from(depth) * size).next_multiple_of(page);
        let descriptors = SharedWords::map(&*char_device, offset, len)?;
        let tags = vec![Tag::default(); depth.into()].into_boxed_slice();
        let batch = mode.is_batch().then(|| Batch::new(number, depth, !mode.is_zero_copy()));
        Ok(UblkPort {
            number,
            depth,
            mode,
            char_device,
            descriptors,
            tags,
            registered: 0,
            alive: depth,
            batch,
        })
    }

    /// The descriptor of the request that has arrived under a tag.
    #[inline]
    fn descriptor_of(&self, tag: u16) -> Option<uapi::IoDesc> {
        self.descriptors.words(usize::from(tag) * size_of::<uapi::IoDesc>()).map(uapi::IoDesc::from_words)
    }

    /// Hands a tag back to the kernel, with a result if it had a request.
    fn fetch(&mut self, io: &mut Io<'_>, tag: u16, result: Option<i32>) -> Result<(), Errno> {
        let index = io.registered_index(tag);
        let (addr, sqe_addr) = if self.mode.is_zero_copy() {
            let register = uapi::AutoBufReg {
                index,
                flags: uapi::UBLK_AUTO_BUF_REG_FALLBACK,
                reserved0: 0,
                reserved1: 0,
            };
            (0, Some(register.to_sqe_addr()))
        } else {
            (io.buffer_address(tag), None)
        };
        let op = match result {
            None => uapi::UBLK_U_IO_FETCH_REQ,
            Some(_) => uapi::UBLK_U_IO_COMMIT_AND_FETCH_REQ,
        };
        let command = uapi::IoCmd { q_id: self.number, tag, result: result.unwrap_or(-1), addr };
        io.command(Token { kind: FETCH, tag }, op, command.to_bytes(), sqe_addr)
    }

    /// Registers or unregisters a request's pages by hand.
    fn register(&mut self, io: &mut Io<'_>, tag: u16, kind: u8) -> Result<(), Errno> {
        let op = match kind {
            REGISTER => uapi::UBLK_U_IO_REGISTER_IO_BUF,
            _ => uapi::UBLK_U_IO_UNREGISTER_IO_BUF,
        };
        let index = io.registered_index(tag);
        let command = uapi::IoCmd { q_id: self.number, tag, result: 0, addr: index.into() };
        io.command(Token { kind, tag }, op, command.to_bytes(), None)
    }

    /// Tells the kernel a request's result.
    #[inline]
    fn commit(&mut self, io: &mut Io<'_>, tag: u16, result: i32) {
        if let Some(batch) = &mut self.batch {
            return batch.push(tag, result);
        }
        if self.fetch(io, tag, Some(result)).is_err() {
            self.bury(io, tag);
        }
    }

    /// No more requests come under this tag.
    fn bury(&mut self, io: &mut Io<'_>, tag: u16) {
        if let Some(state) = self.tags.get_mut(usize::from(tag))
            && !state.dead
        {
            state.dead = true;
            self.alive -= 1;
            if self.alive == 0 {
                io.close();
            }
        }
    }

    /// Begins the request that has arrived under a tag.
    #[inline]
    fn arrived(&mut self, io: &mut Io<'_>, tag: u16) {
        let Some(descriptor) = self.descriptor_of(tag) else {
            return self.commit(io, tag, -Errno::IO.raw_os_error());
        };
        if self.mode.is_zero_copy() && descriptor.flags() & uapi::UBLK_IO_F_NEED_REG_BUF != 0 {
            if self.register(io, tag, REGISTER).is_err() {
                self.commit(io, tag, -Errno::IO.raw_os_error());
            }
            return;
        }
        self.begin(io, tag, &descriptor);
    }

    #[inline(always)]
    fn begin(&mut self, io: &mut Io<'_>, tag: u16, descriptor: &uapi::IoDesc) {
        match request_of(descriptor, self.mode) {
            Some(request) => io.begin(tag, request),
            None => self.end(io, tag, -Errno::OPNOTSUPP.raw_os_error()),
        }
    }

    /// A request is done: ends our own registration of its pages, if there is one, and commits.
    #[inline]
    fn end(&mut self, io: &mut Io<'_>, tag: u16, result: i32) {
        if self.registered == 0 || !self.unregister(io, tag, result) {
            self.commit(io, tag, result);
        }
    }

    /// Ends our own registration of a request's pages; `false`: there is none, or it cannot be ended.
    #[cold]
    fn unregister(&mut self, io: &mut Io<'_>, tag: u16, result: i32) -> bool {
        let Some(state) = self.tags.get_mut(usize::from(tag)).filter(|state| state.registered) else {
            return false;
        };
        (state.registered, state.result) = (false, result);
        self.registered -= 1;
        self.register(io, tag, UNREGISTER).is_ok()
    }
}

/// What a descriptor asks for; `None` for operations that we never announce.
#[inline]
fn request_of(descriptor: &uapi::IoDesc, mode: DataMode) -> Option<Request> {
    let flags = descriptor.flags();
    let carried = if mode.is_zero_copy() { Data::Registered } else { Data::Buffer };
    let (op, data) = match descriptor.op() {
        uapi::UBLK_IO_OP_READ => (Op::Read, carried),
        uapi::UBLK_IO_OP_WRITE => (Op::Write { durable: flags & uapi::UBLK_IO_F_FUA != 0 }, carried),
        uapi::UBLK_IO_OP_FLUSH => (Op::Flush, Data::None),
        uapi::UBLK_IO_OP_DISCARD => (Op::Discard, Data::None),
        uapi::UBLK_IO_OP_WRITE_ZEROES => {
            (Op::WriteZeroes { keep_allocated: flags & uapi::UBLK_IO_F_NOUNMAP != 0 }, Data::None)
        }
        _ => return None,
    };
    if op == Op::Flush {
        // Its sector means nothing, and the kernel says -1.
        return Some(Request { op, offset: 0, len: 0, data });
    }
    let offset = descriptor.start_sector.checked_mul(512)?;
    Some(Request { op, offset, len: u64::from(descriptor.nr_sectors) * 512, data })
}

impl Port for UblkPort {
    fn descriptor(&self) -> &OwnedFd {
        &self.char_device
    }

    fn start(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        if let Some(batch) = &mut self.batch {
            return batch.start(io);
        }
        for tag in 0..self.depth {
            if let Err(errno) = self.fetch(io, tag, None) {
                // Tags that were never fetched will not come back.
                self.alive = tag;
                return Err(errno);
            }
        }
        Ok(())
    }

    fn completed(&mut self, io: &mut Io<'_>, token: Token, answer: Answer) {
        let (tag, result) = (token.tag, answer.result);
        match token.kind {
            batch::PICK => {
                let mut tags = Batch::no_tags();
                let count = self.batch.as_mut().map_or(0, |batch| batch.arrived(io, answer, &mut tags));
                for tag in tags[..count].as_chunks().0 {
                    self.arrived(io, u16::from_ne_bytes(*tag));
                }
            }
            batch::PREP | batch::COMMIT => {
                if let Some(batch) = &mut self.batch {
                    batch.returned(io, token, result);
                }
            }
            FETCH if result == uapi::UBLK_IO_RES_OK => self.arrived(io, tag),
            FETCH => self.bury(io, tag),
            REGISTER if result >= 0 => {
                if let Some(state) = self.tags.get_mut(usize::from(tag)) {
                    state.registered = true;
                    self.registered += 1;
                }
                match self.descriptor_of(tag) {
                    Some(descriptor) => self.begin(io, tag, &descriptor),
                    None => self.end(io, tag, -Errno::IO.raw_os_error()),
                }
            }
            REGISTER => self.commit(io, tag, -Errno::IO.raw_os_error()),
            _ => {
                let result = self.tags.get(usize::from(tag)).map_or(0, |state| state.result);
                self.commit(io, tag, result);
            }
        }
    }

    #[inline]
    fn finished(&mut self, io: &mut Io<'_>, tag: u16, result: Result<u64, Errno>) {
        let result = match result {
            // A request is at most `max_io` bytes when it carries any; the others' count is not looked at.
            Ok(bytes) => i32::try_from(bytes).unwrap_or(0),
            Err(errno) => -errno.raw_os_error(),
        };
        self.end(io, tag, result);
    }

    fn turn_ended(&mut self, io: &mut Io<'_>) {
        if let Some(batch) = &mut self.batch {
            batch.turn_ended(io);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(op: u8, flags: u32, sector: u64, sectors: u32) -> uapi::IoDesc {
        uapi::IoDesc { op_flags: u32::from(op) | flags, nr_sectors: sectors, start_sector: sector, addr: 0 }
    }

    #[test]
    fn descriptors_become_requests() {
        let write =
            request_of(&descriptor(uapi::UBLK_IO_OP_WRITE, uapi::UBLK_IO_F_FUA, 8, 2), DataMode::Copy);
        let wanted = Request { op: Op::Write { durable: true }, offset: 4096, len: 1024, data: Data::Buffer };
        assert_eq!(write, Some(wanted));
        let flush =
            request_of(&descriptor(uapi::UBLK_IO_OP_FLUSH, 0, u64::MAX, 99), DataMode::ZeroCopy).unwrap();
        assert_eq!((flush.op, flush.len, flush.data), (Op::Flush, 0, Data::None));
        let zero = descriptor(uapi::UBLK_IO_OP_WRITE_ZEROES, uapi::UBLK_IO_F_NOUNMAP, 0, u32::MAX);
        let zero = request_of(&zero, DataMode::ZeroCopy).unwrap();
        assert_eq!(zero.op, Op::WriteZeroes { keep_allocated: true });
        assert_eq!(zero.len, u64::from(u32::MAX) * 512);
    }

    #[test]
    fn unknown_operations_and_absurd_sectors_are_refused() {
        assert_eq!(request_of(&descriptor(uapi::UBLK_IO_OP_ZONE_OPEN, 0, 0, 1), DataMode::Copy), None);
        assert_eq!(request_of(&descriptor(uapi::UBLK_IO_OP_READ, 0, u64::MAX, 1), DataMode::Copy), None);
    }

    #[test]
    fn the_last_share_runs_the_closure_once() {
        let (sent, closed) = std::sync::mpsc::channel();
        let first = Arc::new(Finally::new(Box::new(move || sent.send(()).unwrap())));
        let second = Arc::clone(&first);
        drop(first);
        assert!(closed.try_recv().is_err());
        drop(second);
        assert_eq!(closed.iter().count(), 1);
    }
}
