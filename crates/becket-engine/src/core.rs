//! What a queue is without its front: the slab of its requests and their way through the map to the backing files.
//! Allocates everything when it is made and nothing afterwards; takes no lock; makes no system call.

mod frames;
mod intercept;
mod loads;
mod made;

use std::{
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    sync::Arc,
};

use becket_image::Map;
use io_uring::{opcode, squeue, types::Fd};
use rustix::io::Errno;

use crate::{
    Backing, Data, Error, Op, QueueStats, Request,
    decode::{Job, Mailbox},
    governor::{Governor, Hold, Next},
    memory::Buffers,
    request::{Slot, Step, Way},
    ring::{Ring, Transfer, fixed},
    stats::Tally,
    straight::{MAX_OPERATION, Straight},
    user_data::{Source, user_data},
};

use frames::is_lent;
use intercept::Intercepted;
use loads::Loads;
pub(crate) use loads::{Copied, memory_of};
use made::{Made, Making};

/// How the requests of a queue carry their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Each in a buffer of the queue, of this many bytes.
    Buffers(usize),
    /// The same, each with so many bytes before it that are the port's: see [`Io::receive`](crate::Io::receive).
    Framed {
        /// Bytes before each buffer.
        head: usize,
        /// Bytes of each buffer.
        size: usize,
    },
    /// In the requester's pages, registered with the ring for the time of the request.
    Registered,
}

/// Memory for commands that carry many elements. Sizes are bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Number of lists that go to the kernel.
    pub lists: u16,
    /// Size of each list.
    pub list_size: usize,
}

/// What a core is made of.
pub(crate) struct Parts<'a> {
    pub(crate) descriptor: BorrowedFd<'a>,
    pub(crate) tether: Option<BorrowedFd<'a>>,
    pub(crate) depth: u16,
    pub(crate) number: usize,
    pub(crate) backing: &'a Arc<Backing>,
    pub(crate) memory: Memory,
    pub(crate) batch: Option<Batch>,
    pub(crate) stats: &'a Arc<QueueStats>,
    pub(crate) mailbox: &'a Arc<Mailbox>,
}

/// Requests that have finished, with their results.
pub(crate) type Finished = Vec<(u16, Result<u64, Errno>)>;

/// A queue without its front, so that the front can be called with it.
pub(crate) struct Core {
    pub(crate) index: u32,
    number: usize,
    /// Requests of the port; those of the queue's own come behind them.
    depth: u16,
    pub(crate) backing: Arc<Backing>,
    pub(crate) map: Arc<Map>,
    pub(crate) slab: Box<[Slot]>,
    pub(crate) buffers: Option<Buffers>,
    /// Which frames the kernel has; without frames there are none.
    pub(crate) lent: Box<[bool]>,
    /// For commands that carry many elements.
    lists: Option<Buffers>,
    /// What no file holds, for requests whose pages are registered.
    made: Option<Made>,
    /// First of the ring's buffer indexes that belong to this queue.
    pub(crate) registered: Option<u32>,
    /// The slot in the ring's table with the port's descriptor.
    ///
    /// The kernel empties the table of a ring whose process died only when nothing of that ring is in flight. So a
    /// front that waits for the last copy of its descriptor to be closed knows that no operation of ours is going to
    /// reach the backing any more. A later server relies on it: a write of the old one must not land after its own.
    port: u32,
    /// Behind it is its tether's, where it has one, and then that of what is made up.
    port_count: usize,
    /// First of the slots of the backing files: buffered and direct of each.
    pub(crate) files: u32,
    /// The port's descriptor, where its commands must not use the table.
    unregistered_port: Option<RawFd>,
    /// Operations and commands that the kernel has not completed.
    pub(crate) in_flight: usize,
    /// Requests whose result is known but not yet told to the port.
    finished: Finished,
    /// The same list while it is being told; both keep their capacity.
    telling: Finished,
    /// Bounds the operations that can block.
    pub(crate) governor: Governor,
    tally: Tally,
    /// Where the last request went that could go straight.
    pub(crate) straight: Straight,
    /// How this queue's requests carry their bytes, and how many at most.
    carried: (Data, u64),
    /// Operations are looked at, and perhaps spoiled, before they go to the backing.
    pub(crate) intercepted: Option<Box<Intercepted>>,
    /// Blocks are decoded for requests.
    pub(crate) loads: Option<Box<Loads>>,
    /// Where word for this queue is left.
    pub(crate) mailbox: Arc<Mailbox>,
    /// Nothing begins: see [`Core::hold`].
    pub(crate) held: Option<Hold>,
    /// What may take the place of `backing`.
    pub(crate) next: Option<Next>,
    closing: bool,
}

impl Core {
    pub(crate) fn new(ring: &mut Ring, index: u32, new: &Parts<'_>) -> Result<Core, Error> {
        let buffers = match new.memory {
            Memory::Buffers(size) => Some(Buffers::new(new.depth.into(), size)?),
            Memory::Framed { head, size } => Some(Buffers::framed(new.depth.into(), head, size)?),
            Memory::Registered => None,
        };
        let loads = Loads::new(new.backing, new.depth, new.mailbox)?;
        let registers = new.memory == Memory::Registered;
        let made = registers.then(|| Making::new(ring, new.depth, loads.is_some())).transpose()?;
        // The queue's own requests behind those of the port.
        let requests = new.depth + loads.as_ref().map_or(0, |loads| loads.count());
        let interceptor = new.backing.interceptor.clone();
        let intercepted = interceptor.map(|interceptor| Intercepted::new(interceptor, requests));
        let lists = new.batch.map(|batch| {
            ring.provide()?;
            Buffers::small(batch.lists.into(), batch.list_size)
        });
        let lists = lists.transpose()?;
        // The port's descriptor is in the table even where its commands do not use it: see `Core::port`.
        let making = made.as_ref().and_then(Making::file);
        let ports = std::iter::once(new.descriptor).chain(new.tether).chain(making);
        let ports: Vec<RawFd> = ports.map(|fd| fd.as_raw_fd()).collect();
        let unregistered_port = (!ring.releases_at_once()).then_some(new.descriptor.as_raw_fd());
        let port = match new.memory {
            Memory::Framed { .. } => ring.register_unwaiting(new.descriptor, &ports)?,
            _ => ring.register_files(&ports)?,
        };
        let files = match register(ring, new.backing) {
            Ok(files) => files,
            Err(error) => {
                ring.unregister_files(port, ports.len())?;
                return Err(error);
            }
        };
        let rest = ring.may_block(requests).and_then(|()| match new.memory {
            Memory::Buffers(_) | Memory::Framed { .. } => Ok(None),
            Memory::Registered => {
                ring.take_buffers(new.depth).map(Some).inspect_err(|_| ring.blocks_no_more(requests))
            }
        });
        let registered = match rest {
            Ok(registered) => registered,
            Err(error) => {
                unregister(ring, files, new.backing)?;
                ring.unregister_files(port, ports.len())?;
                return Err(error);
            }
        };
        Ok(Core {
            index,
            number: new.number,
            backing: Arc::clone(new.backing),
            map: Arc::clone(&new.backing.map),
            slab: vec![Slot::IDLE; requests.into()].into_boxed_slice(),
            buffers,
            lent: match new.memory {
                Memory::Framed { .. } => vec![false; new.depth.into()].into_boxed_slice(),
                _ => Box::default(),
            },
            lists,
            made: made.map(|making| making.done(port + ports.len() as u32 - 1)),
            registered,
            port,
            port_count: ports.len(),
            files,
            unregistered_port,
            in_flight: 0,
            finished: Vec::with_capacity(new.depth.into()),
            telling: Vec::with_capacity(new.depth.into()),
            governor: Governor::new(requests),
            tally: Tally::new(Arc::clone(new.stats)),
            straight: Straight::NOWHERE,
            carried: match new.memory {
                Memory::Buffers(size) | Memory::Framed { size, .. } => (Data::Buffer, size as u64),
                Memory::Registered => (Data::Registered, MAX_OPERATION),
            },
            intercepted,
            loads,
            mailbox: Arc::clone(new.mailbox),
            depth: new.depth,
            held: None,
            next: None,
            closing: false,
        })
    }

    /// The entry for a command to the port's descriptor.
    pub(crate) fn port_command(&self, op: u32, payload: [u8; 16], addr: Option<u64>) -> squeue::Entry {
        match self.unregistered_port {
            Some(descriptor) => opcode::UringCmd16::new(Fd(descriptor), op).cmd(payload).addr(addr).build(),
            None => opcode::UringCmd16::new(fixed(self.port), op).cmd(payload).addr(addr).build(),
        }
    }

    #[inline]
    pub(crate) fn buffer_address(&self, tag: u16) -> u64 {
        self.buffers.as_ref().map_or(0, |buffers| buffers.address(tag.into()) as u64)
    }

    #[inline]
    pub(crate) fn buffer_size(&self) -> u64 {
        self.buffers.as_ref().map_or(0, |buffers| buffers.size() as u64)
    }

    pub(crate) fn buffer(&mut self, tag: u16) -> &mut [u8] {
        match (&mut self.buffers, self.slab.get(usize::from(tag))) {
            (Some(buffers), Some(slot)) if !slot.busy && !is_lent(&self.lent, tag) => {
                buffers.slice(tag.into())
            }
            _ => &mut [],
        }
    }

    #[inline]
    pub(crate) fn registered_index(&self, tag: u16) -> u16 {
        // A ring has at most 16,384 registered buffers.
        (self.registered.unwrap_or(0) + u32::from(tag)) as u16
    }

    pub(crate) fn list_address(&self, list: u16) -> Option<u64> {
        let address = self.lists.as_ref()?.address(list.into()) as u64;
        (address != 0).then_some(address)
    }

    pub(crate) fn list(&mut self, list: u16) -> &mut [u8] {
        self.lists.as_mut().map_or(&mut [], |lists| lists.slice(list.into()))
    }

    /// What has happened in this turn may be read by others. With a block that the thread is to decode itself, if there is
    /// one that it should and it `may`.
    pub(crate) fn turn_ended(&mut self, may: bool) -> Option<Job> {
        let own = self.send_jobs(may);
        self.tally.turn_ended(self.governor.windows());
        self.tell_if_drained();
        own
    }

    /// What the port's descriptor is in an entry that may stay with the kernel for long: see
    /// [`Ring::releases_at_once`].
    pub(crate) fn unregistered_port(&self) -> Option<Fd> {
        self.unregistered_port.map(Fd)
    }

    /// Something that [`Core::push`] had counted has come back for the last time.
    pub(crate) fn landed(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// The port has closed and nothing is in flight.
    pub(crate) fn has_ended(&self) -> bool {
        self.closing && self.in_flight == 0 && self.held.is_none()
    }

    /// Some requests have finished and were not told of.
    pub(crate) fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// The requests that have finished and were not told of. The list must come back.
    pub(crate) fn take_finished(&mut self) -> Finished {
        std::mem::replace(&mut self.finished, std::mem::take(&mut self.telling))
    }

    /// Takes the list back and empties it, so that its memory is used again.
    pub(crate) fn give_list_back(&mut self, mut list: Finished) {
        list.clear();
        self.telling = list;
    }

    /// Gives the ring's slots back; nothing is in flight any more.
    pub(crate) fn give_back(&mut self, ring: &mut Ring) -> Result<(), Error> {
        if let Some(first) = self.registered {
            ring.give_buffers(first, self.depth);
        }
        ring.blocks_no_more(self.slab.len() as u16);
        let next = self.drop_next(ring);
        let files = unregister(ring, self.files, &self.backing);
        ring.unregister_files(self.port, self.port_count).and(files).and(next)
    }

    pub(crate) fn close(&mut self) {
        self.closing = true;
    }

    /// Queues an entry of this queue.
    #[inline]
    pub(crate) fn push(&mut self, ring: &mut Ring, entry: &squeue::Entry) -> Result<(), Errno> {
        match ring.push(entry) {
            Ok(()) => {
                self.in_flight += 1;
                Ok(())
            }
            Err(error) => Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
        }
    }

    /// Begins a request. Most reads and writes lie in the extent of the one before and need one direct operation:
    /// what is not needed for these is not done for these.
    #[inline]
    pub(crate) fn begin(&mut self, ring: &mut Ring, tag: u16, request: Request) {
        // A busy slot: the port broke its word, and its tag's request is still under way and will finish.
        let Some(slot) = self.slab.get_mut(usize::from(tag)).filter(|slot| !slot.busy) else { return };
        debug_assert!(!is_lent(&self.lent, tag), "the kernel has this frame");
        self.tally.began();
        let moves = match request.op {
            Op::Read => true,
            Op::Write { .. } => self.straight.writes,
            _ => false,
        };
        let fits = moves && request.data == self.carried.0 && request.len <= self.carried.1;
        let begun = Slot::begin(request, ring.now());
        match self.straight.place_of(&request) {
            Some(offset) if fits => {
                let Straight { file, target, .. } = self.straight;
                *slot = Slot { asked: request.len, file, direct: true, ..begun };
                let way = Transfer { target, offset, len: request.len as u32, ..Transfer::default() };
                let entry = self.transfer(tag, &request, 0, way);
                self.submit(ring, tag, Source::Backing { tag }, entry);
            }
            _ => {
                *slot = begun;
                self.begin_otherwise(ring, tag, &request);
            }
        }
    }

    #[inline(never)]
    pub(crate) fn begin_otherwise(&mut self, ring: &mut Ring, tag: u16, request: &Request) {
        if self.holds_back(tag) {
            return;
        }
        match self.check(request) {
            Ok(()) => self.advance(ring, tag),
            Err(errno) => self.finish(ring.now(), tag, Err(errno)),
        }
    }

    /// Refuses what must never reach the backing.
    fn check(&self, request: &Request) -> Result<(), Errno> {
        if request.op.modifies() && self.backing.read_only {
            return Err(Errno::ROFS);
        }
        let end = request.offset.checked_add(request.len).ok_or(Errno::INVAL)?;
        if request.op != Op::Flush && (request.len == 0 || end > self.map.len()) {
            return Err(Errno::INVAL);
        }
        let moves = matches!(request.op, Op::Read | Op::Write { .. });
        match request.data {
            Data::None if moves => Err(Errno::INVAL),
            Data::Buffer if moves => match &self.buffers {
                Some(buffers) if request.len <= buffers.size() as u64 => Ok(()),
                _ => Err(Errno::INVAL),
            },
            Data::Registered if self.registered.is_none() => Err(Errno::INVAL),
            _ => Ok(()),
        }
    }

    #[inline]
    fn finish(&mut self, now: u64, tag: u16, result: Result<u64, Errno>) {
        if tag >= self.depth {
            return self.load_read(tag, result);
        }
        if let Some(slot) = self.slab.get_mut(usize::from(tag)) {
            slot.busy = false;
            let nanos = now.saturating_sub(slot.began);
            match result {
                Ok(bytes) => self.tally.succeeded(slot.asked_for(), bytes, nanos),
                Err(_) => self.tally.failed(slot.asked_for(), nanos),
            }
        }
        self.finished.push((tag, result));
    }

    /// Queues an operation of a request on a backing file, or what stands for it.
    #[inline]
    fn submit(&mut self, ring: &mut Ring, tag: u16, source: Source, entry: squeue::Entry) {
        let entry = entry.user_data(user_data(self.index, source));
        if let Err(errno) = self.push(ring, &entry) {
            self.left(ring.now(), tag, 0);
            self.finish(ring.now(), tag, Err(errno));
        }
    }

    /// Takes a request one operation further, or finishes it.
    pub(crate) fn advance(&mut self, ring: &mut Ring, tag: u16) {
        match self.next_operation(tag) {
            Ok(Step::Operate(entry)) => {
                let governed = self.slab[usize::from(tag)].way == Way::Governed;
                if !governed || self.admit(ring.now(), tag) {
                    match self.intercepted {
                        None => self.submit(ring, tag, Source::Backing { tag }, entry),
                        Some(_) => self.submit_intercepted(ring, tag, entry, false),
                    }
                }
            }
            // It is nothing of the backing's, and does not block.
            Ok(Step::Deliver(entry)) => self.submit(ring, tag, Source::Backing { tag }, entry),
            // Word about what it waits for takes it further.
            Ok(Step::Waits) => {}
            Ok(Step::Whole) => {
                let len = self.slab[usize::from(tag)].request.len;
                self.finish(ring.now(), tag, Ok(len));
            }
            Err(errno) => self.finish(ring.now(), tag, Err(errno)),
        }
    }

    /// Takes in the completion of an operation on a backing file.
    #[inline]
    pub(crate) fn operated(&mut self, ring: &mut Ring, tag: u16, result: i32) {
        self.landed();
        let Some(slot) = self.slab.get_mut(usize::from(tag)).filter(|slot| slot.busy) else { return };
        let moved = u64::from(result.max(0).unsigned_abs());
        // Never so for a flush, whose length is 0, nor for a fallocate, whose result is.
        let whole = moved > 0 && moved <= slot.asked && slot.done + moved == slot.request.len;
        if !whole || slot.way != Way::Free || slot.request.op == (Op::Write { durable: true }) {
            return self.operated_otherwise(ring, tag, result);
        }
        if slot.request.op.modifies()
            && let Some(sync) = self.backing.sync(slot.file)
        {
            sync.wrote(self.number);
        }
        let len = slot.request.len;
        self.finish(ring.now(), tag, Ok(len));
    }

    /// The same for what does not simply make its request whole: a part of it, a failure, a result that is no count,
    /// and all that the governor has a word in.
    #[inline(never)]
    fn operated_otherwise(&mut self, ring: &mut Ring, tag: u16, result: i32) {
        if self.slab[usize::from(tag)].way == Way::Free {
            self.absorb(ring, tag, result);
        } else {
            self.operated_with_care(ring, tag, result);
        }
    }

    /// Takes the result of an operation and goes on with its request.
    pub(crate) fn absorb(&mut self, ring: &mut Ring, tag: u16, result: i32) {
        let slot = &mut self.slab[usize::from(tag)];
        let outcome = if slot.request.op == Op::Flush {
            Self::synced(&self.backing, slot, result)
        } else {
            if slot.request.op.modifies()
                && let Some(sync) = self.backing.sync(slot.file)
            {
                sync.wrote(self.number);
            }
            let outcome = slot.absorb(result);
            if let (Err(errno), Some(sync)) = (outcome, self.backing.sync(slot.file))
                && slot.may_have_lost_pages(errno)
            {
                sync.fail(errno);
            }
            outcome
        };
        match outcome {
            Ok(()) => self.advance(ring, tag),
            Err(errno) => self.finish(ring.now(), tag, Err(errno)),
        }
    }
}

/// Puts the descriptors of backing files into the ring's table and returns the first slot.
pub(crate) fn register(ring: &mut Ring, backing: &Backing) -> Result<u32, Error> {
    let descriptors: Vec<RawFd> = backing
        .files()
        .iter()
        .flat_map(|file| [file.buffered.as_raw_fd(), file.direct.as_ref().map_or(-1, |fd| fd.as_raw_fd())])
        .collect();
    ring.register_files(&descriptors)
}

/// Takes them out again.
pub(crate) fn unregister(ring: &mut Ring, first: u32, backing: &Backing) -> Result<(), Error> {
    ring.unregister_files(first, 2 * backing.files().len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_holds_the_port_s_descriptor_whatever_the_kernel() {
        for late in [false, true] {
            let mut ring = Ring::new(0).unwrap();
            if late {
                ring.releases_late();
            }
            let (reader, writer) = rustix::pipe::pipe().unwrap();
            rustix::io::ioctl_fionbio(&reader, true).unwrap();
            let backing = Arc::new(Backing::new(Map::contiguous(0, 0, 4096), Vec::new(), false, 1));
            let parts = Parts {
                descriptor: std::os::fd::AsFd::as_fd(&writer),
                tether: None,
                depth: 1,
                number: 0,
                backing: &backing,
                memory: Memory::Buffers(4096),
                batch: None,
                stats: &Arc::default(),
                mailbox: &crate::decode::unheard(),
            };
            let mut core = Core::new(&mut ring, 0, &parts).unwrap();
            drop(writer);
            let gone = || rustix::io::read(&reader, &mut [0u8; 1]);
            assert_eq!(gone(), Err(Errno::AGAIN), "the ring's table holds it");
            core.give_back(&mut ring).unwrap();
            rustix::io::ioctl_fionbio(&reader, false).unwrap();
            assert_eq!(gone(), Ok(0), "and lets it go with the queue");
        }
    }
}
