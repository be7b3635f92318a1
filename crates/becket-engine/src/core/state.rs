//! A queue without its port: the slab of its requests, its buffers, its places in the ring's tables.
//! Knows no order of steps: what happens to a request is in `flow`.

use std::{
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    sync::Arc,
};

use becket_image::Map;
use io_uring::{opcode, squeue, types::Fd};
use rustix::io::Errno;

use super::{
    change::{Hold, Next, register, unregister},
    intercepted::Intercepted,
    lines::{Linked, lines_of},
    loads::Loads,
    memory_files::{MemoryFiles, NewMemoryFiles},
    stream::Stream,
};
use crate::{
    Data, Error, Op, QueueStats, Request, Serving,
    decode::{Mailbox, Waiter},
    governor::Governor,
    memory::{Buffers, GuestMemory, GuestRanges},
    request::InGuest,
    ring::{Ring, Transfer, fixed},
    slot::{MAX_OPERATION, Slot, Way},
    stats::Tally,
    target::{AnyTarget, Straight, Target as _},
};

/// How the requests of a queue carry their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Each in a buffer of the queue, of this many bytes.
    Buffers(usize),
    /// The same, each with so many bytes before it that are the port's: see
    /// [`Io::receive`](crate::Io::receive).
    Framed {
        /// Bytes before each buffer.
        head: usize,
        /// Bytes of each buffer.
        size: usize,
    },
    /// The same for a port whose descriptor is a stream socket: it receives into a staging buffer and into
    /// frames, and sends many frames at once. See [`Io::send`](crate::Io::send).
    Stream {
        /// Bytes before each buffer.
        head: usize,
        /// Bytes of each buffer.
        size: usize,
        /// Bytes of the staging buffer.
        staging: usize,
    },
    /// In the requester's pages, registered with the ring for the time of the request.
    Registered,
    /// In the port's [memory](crate::Port::memory), each in at most this many ranges.
    Guest(u16),
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
    pub(crate) bell: Option<BorrowedFd<'a>>,
    pub(crate) guest: Option<Arc<GuestMemory>>,
    pub(crate) depth: u16,
    pub(crate) number: usize,
    pub(crate) serving: &'a Arc<Serving>,
    pub(crate) memory: Memory,
    pub(crate) batch: Option<Batch>,
    pub(crate) stats: &'a Arc<QueueStats>,
    pub(crate) mailbox: &'a Arc<Mailbox>,
}

/// Requests that have finished, with their results.
pub(crate) type Finished = Vec<(u16, Result<u64, Errno>)>;

/// A queue without its port, so that the port can be called with it.
pub(crate) struct Core {
    pub(crate) index: u32,
    pub(super) number: usize,
    /// Requests of the port; those of the queue's own come behind them.
    pub(super) depth: u16,
    pub(crate) serving: Arc<Serving>,
    pub(crate) map: Arc<Map>,
    pub(crate) slab: Box<[Slot]>,
    pub(crate) buffers: Option<Buffers>,
    /// Which frames the kernel has; without frames there are none.
    pub(crate) lent: Box<[bool]>,
    /// Where the bytes are of requests in a virtual machine's memory.
    pub(super) guest: Option<Box<GuestRanges>>,
    /// The slot of the port's bell, and whether writing to it never blocks.
    pub(super) bell: Option<(u32, bool)>,
    /// What comes from its descriptor, if that is an event.
    pub(super) event_word: Box<u64>,
    /// What a port over a stream socket needs besides.
    pub(super) stream: Option<Box<Stream>>,
    /// For commands that carry many elements.
    pub(super) lists: Option<Buffers>,
    /// Bytes that no file below holds, for requests whose pages are registered.
    pub(super) memory_files: Option<MemoryFiles>,
    /// First of the ring's buffer indexes that belong to this queue.
    pub(crate) registered: Option<u32>,
    /// The slot in the ring's table with the port's descriptor.
    ///
    /// The kernel empties the table of a ring whose process died only when nothing of that ring is in flight.
    /// So a transport that waits for the last copy of its descriptor to be closed knows that no operation of
    /// ours is going to reach the backing any more. A later server relies on it: a write of the old one must
    /// not land after its own.
    pub(super) port: u32,
    /// Behind it is its tether's, where it has one, and then that of what is made up.
    pub(super) port_count: usize,
    /// First of the slots of the sources: see [`register`].
    pub(crate) slots: u32,
    /// The port's descriptor, where its commands must not use the table.
    pub(super) unregistered_port: Option<RawFd>,
    /// Operations and commands that the kernel has not completed.
    pub(crate) in_flight: usize,
    /// Requests whose result is known but not yet reported to the port.
    pub(super) finished: Finished,
    /// The same list while it is being reported; both keep their capacity.
    pub(super) telling: Finished,
    /// Bounds the operations that can block.
    pub(crate) governor: Governor,
    pub(super) tally: Tally,
    /// Where the last request went that could go straight.
    pub(crate) straight: Straight,
    /// How this queue's requests carry their bytes, and how many at most.
    pub(super) carried: (Data, u64),
    /// Operations are looked at, and perhaps spoiled, before they go to the backing.
    pub(crate) intercepted: Option<Box<Intercepted>>,
    /// Blocks are decoded for requests.
    pub(crate) loads: Option<Box<Loads>>,
    /// The lines to sources that are exports of NBD servers.
    pub(super) lines: Box<[Linked]>,
    /// Where notes for this queue arrive.
    pub(crate) mailbox: Arc<Mailbox>,
    /// Nothing begins: see [`Core::hold`].
    pub(crate) held: Option<Hold>,
    /// What may take the place of `backing`.
    pub(crate) next: Option<Next>,
    pub(super) closing: bool,
}

impl Core {
    pub(crate) fn new(ring: &mut Ring, index: u32, new: &Parts<'_>) -> Result<Core, Error> {
        let buffers = match new.memory {
            Memory::Buffers(size) => Some(Buffers::new(new.depth.into(), size)?),
            Memory::Framed { head, size } | Memory::Stream { head, size, .. } => {
                Some(Buffers::framed(new.depth.into(), head, size)?)
            }
            Memory::Registered | Memory::Guest(_) => None,
        };
        let guest = match (new.memory, &new.guest) {
            (Memory::Guest(most), Some(memory)) => {
                Some(Box::new(GuestRanges::new(Arc::clone(memory), new.depth, most)))
            }
            _ => None,
        };
        let stream = match new.memory {
            Memory::Stream { staging, .. } => Some(Box::new(Stream::new(new.depth, staging)?)),
            _ => None,
        };
        let loads = Loads::new(new.serving, new.depth)?;
        let registers = new.memory == Memory::Registered;
        let staged = registers.then(|| NewMemoryFiles::new(ring, new.depth, loads.is_some())).transpose()?;
        // The queue's own requests behind those of the port.
        let requests = new.depth + loads.as_ref().map_or(0, |loads| loads.count());
        let lines = lines_of(new.serving, requests)?;
        if new.guest.is_some() && !lines.is_empty() {
            let why = "a virtual machine's memory is not for an image on an NBD server";
            return Err(Error::Start { source: std::io::Error::other(why) });
        }
        let interceptor = new.serving.interceptor.clone();
        let intercepted = interceptor.map(|interceptor| Intercepted::new(interceptor, requests));
        let lists = new.batch.map(|batch| {
            ring.provide()?;
            Buffers::small(batch.lists.into(), batch.list_size)
        });
        let lists = lists.transpose()?;
        // The port's descriptor is in the table even where its commands do not use it: see `Core::port`.
        let staging = staged.as_ref().and_then(NewMemoryFiles::file);
        let ports = std::iter::once(new.descriptor).chain(new.tether).chain(new.bell).chain(staging);
        let ports: Vec<RawFd> = ports.map(|fd| fd.as_raw_fd()).collect();
        let unregistered_port = (!ring.releases_at_once()).then_some(new.descriptor.as_raw_fd());
        let port = match new.memory {
            Memory::Framed { .. } => ring.register_unwaiting(new.descriptor, &ports)?,
            _ => ring.register_files(&ports)?,
        };
        let slots = match register(ring, new.serving) {
            Ok(slots) => slots,
            Err(error) => {
                ring.unregister_files(port, ports.len())?;
                return Err(error);
            }
        };
        let rest = ring.may_block(requests).and_then(|()| match new.memory {
            Memory::Buffers(_) | Memory::Framed { .. } | Memory::Stream { .. } | Memory::Guest(_) => Ok(None),
            Memory::Registered => {
                ring.take_buffers(new.depth).map(Some).inspect_err(|_| ring.blocks_no_more(requests))
            }
        });
        let registered = match rest {
            Ok(registered) => registered,
            Err(error) => {
                unregister(ring, slots, new.serving)?;
                ring.unregister_files(port, ports.len())?;
                return Err(error);
            }
        };
        Ok(Core {
            index,
            number: new.number,
            serving: Arc::clone(new.serving),
            map: Arc::clone(&new.serving.map),
            slab: vec![Slot::IDLE; requests.into()].into_boxed_slice(),
            buffers,
            lent: match new.memory {
                Memory::Framed { .. } | Memory::Stream { .. } => {
                    vec![false; new.depth.into()].into_boxed_slice()
                }
                _ => Box::default(),
            },
            guest,
            bell: new.bell.map(|bell| (port + 1 + u32::from(new.tether.is_some()), never_blocks(bell))),
            event_word: Box::new(0),
            stream,
            lists,
            memory_files: staged.map(|staged| staged.done(port + ports.len() as u32 - 1)),
            registered,
            port,
            port_count: ports.len(),
            slots,
            unregistered_port,
            in_flight: 0,
            finished: Vec::with_capacity(new.depth.into()),
            telling: Vec::with_capacity(new.depth.into()),
            governor: Governor::new(requests),
            tally: Tally::new(Arc::clone(new.stats)),
            straight: Straight::NOWHERE,
            carried: match new.memory {
                Memory::Buffers(size) | Memory::Framed { size, .. } | Memory::Stream { size, .. } => {
                    (Data::Buffer, size as u64)
                }
                Memory::Registered => (Data::Registered, MAX_OPERATION),
                Memory::Guest(_) => (Data::Guest(InGuest::CHECKED), MAX_OPERATION),
            },
            intercepted,
            loads,
            lines,
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

    /// What the port's descriptor is in an entry that may stay with the kernel for long: see
    /// [`Ring::releases_at_once`].
    pub(crate) fn unregistered_port(&self) -> Option<Fd> {
        self.unregistered_port.map(Fd)
    }

    /// Something that [`Core::push`] had counted has come back for the last time.
    #[inline]
    pub(crate) fn landed(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// The port has closed and nothing is in flight.
    pub(crate) fn has_ended(&self) -> bool {
        self.closing && self.in_flight == 0 && self.held.is_none()
    }

    /// Some requests have finished and were not yet reported.
    pub(crate) fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// The requests that have finished and were not yet reported. The list must come back.
    pub(crate) fn take_finished(&mut self) -> Finished {
        std::mem::replace(&mut self.finished, std::mem::take(&mut self.telling))
    }

    /// Takes the list back and empties it, so that its memory is used again.
    pub(crate) fn give_list_back(&mut self, mut list: Finished) {
        list.clear();
        self.telling = list;
    }

    pub(crate) fn close(&mut self) {
        self.closing = true;
        // What may never come is not waited for any more.
        let cancel = |target: &AnyTarget| target.cancel(self.index, &self.mailbox, &|_| true);
        self.serving.targets().iter().for_each(cancel);
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

    /// Gives the ring's slots back; nothing is in flight any more.
    pub(crate) fn give_back(&mut self, ring: &mut Ring) -> Result<(), Error> {
        if let Some(first) = self.registered {
            ring.give_buffers(first, self.depth);
        }
        ring.blocks_no_more(self.slab.len() as u16);
        let next = self.next.take().map_or(Ok(()), |next| next.give_back(ring));
        let sources = unregister(ring, self.slots, &self.serving);
        ring.unregister_files(self.port, self.port_count).and(sources).and(next)
    }

    /// A transfer of a request's bytes, of which `done` are done: where they are, which way they go, and the
    /// `RWF_*` flags that the request itself needs.
    ///
    /// The request has been held against the size of its buffer.
    #[inline]
    pub(crate) fn carrier(&self, tag: u16, request: &Request, done: u64) -> Transfer {
        let (address, buffer) = match request.data {
            // A registered request's address is its offset in the request.
            Data::Registered => (done, Some(self.registered_index(tag))),
            Data::Guest(_) => (self.guest_address(tag).wrapping_add(done), None),
            _ => (self.buffer_address(tag).wrapping_add(done), None),
        };
        let flags = if request.op == (Op::Write { durable: true }) { libc::RWF_DSYNC } else { 0 };
        Transfer { write: request.op != Op::Read, address, buffer, flags, ..Transfer::default() }
    }

    #[inline]
    fn guest_address(&self, tag: u16) -> u64 {
        self.guest.as_ref().map_or(0, |guest| guest.address(tag))
    }

    /// Where a note for the request of `tag` goes.
    pub(super) fn waiter(&self, tag: u16) -> Waiter {
        Waiter { mailbox: Arc::clone(&self.mailbox), whom: (self.index, tag) }
    }

    /// The request of `tag` waits for a note, which takes it further; the queue does not end before.
    pub(super) fn await_note(&mut self, tag: u16) {
        self.slab[usize::from(tag)].way = Way::Waiting;
        self.in_flight += 1;
    }

    /// Keeps the request of `tag`, which has not begun, for later, if the queue is held.
    pub(crate) fn holds_back(&mut self, tag: u16) -> bool {
        if self.held.is_none() {
            return false;
        }
        self.slab[usize::from(tag)].way = Way::Held;
        self.governor.hold_back(tag);
        true
    }

    /// Reports to the thread that holds the queue when no request is in flight any more.
    #[inline]
    pub(crate) fn tell_if_drained(&mut self) {
        if let Some(hold) = &mut self.held
            && hold.drained.is_some()
            && !self.slab.iter().any(|slot| slot.busy && slot.way != Way::Held)
            && let Some(drained) = hold.drained.take()
        {
            // The receiver has room for the answer, or is gone.
            let _ = drained.try_send(true);
        }
    }
}

/// Whether an event of another process does not block.
fn never_blocks(event: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_getfl(event).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
}

/// Whether the kernel has a frame.
#[inline]
pub(super) fn is_lent(lent: &[bool], tag: u16) -> bool {
    lent.get(usize::from(tag)).is_some_and(|lent| *lent)
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
            let serving = Arc::new(Serving::new(Map::contiguous(0, 0, 4096), Vec::new(), false, 1));
            let parts = Parts {
                descriptor: std::os::fd::AsFd::as_fd(&writer),
                tether: None,
                bell: None,
                guest: None,
                depth: 1,
                number: 0,
                serving: &serving,
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
