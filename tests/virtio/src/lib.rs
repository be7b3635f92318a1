//! A virtio block driver with split or packed rings that speaks vhost-user as the front-end: the virtual
//! machine and its hypervisor in one process, for tests and benchmarks. It keeps to the rules unless a test
//! writes into its memory; it never looks at what a back-end does besides.
//!
//! Sources: Virtual I/O Device (VIRTIO) Version 1.3; QEMU, docs/interop/vhost-user.rst.
#![forbid(unsafe_code)]

mod front;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::fence;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use becket_engine::{Area, GuestMemory, GuestPart};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

pub use front::{Front, Inflight};

/// Where the memory begins, for the machine and for its hypervisor.
pub const BASE: u64 = 1 << 30;
/// The same as the hypervisor has it.
pub const USER: u64 = 1 << 40;
/// Features: flush, discard, write zeroes, cache mode, multi-queue, indirect descriptors, event index,
/// version 1, packed rings.
pub const FLUSH: u64 = 1 << 9;
/// See [`FLUSH`].
pub const DISCARD: u64 = 1 << 13;
/// See [`FLUSH`].
pub const WRITE_ZEROES: u64 = 1 << 14;
/// See [`FLUSH`].
pub const INDIRECT: u64 = 1 << 28;
/// See [`FLUSH`].
pub const EVENT_IDX: u64 = 1 << 29;
/// See [`FLUSH`].
pub const VERSION_1: u64 = 1 << 32;
/// See [`FLUSH`].
pub const PACKED: u64 = 1 << 34;
/// Requests that move bytes.
pub const IN: u32 = 0;
/// See [`IN`].
pub const OUT: u32 = 1;
/// Requests about ranges.
pub const OP_FLUSH: u32 = 4;
/// See [`OP_FLUSH`].
pub const OP_ID: u32 = 8;
/// See [`OP_FLUSH`].
pub const OP_DISCARD: u32 = 11;
/// See [`OP_FLUSH`].
pub const OP_WRITE_ZEROES: u32 = 13;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const TABLE: u16 = 4;
/// Of a packed ring: the wrap counters of who made a descriptor available, and of who has used it.
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// A side of a packed ring is to be notified at a place.
const AT_PLACE: u16 = 2;
/// Bytes of a request's header, status and table of descriptors.
const HEAD: u64 = 4096;

/// What a driver is like.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Number of vrings.
    pub queues: u16,
    /// Descriptors of each, a power of two.
    pub count: u16,
    /// Requests of each under way at most.
    pub depth: u16,
    /// Bytes of a request's buffer, a multiple of 4096.
    pub buffer: u32,
    /// Features that it wants beside those that it cannot do without.
    pub features: u64,
}

/// A driver with its memory. The memory and the notes outlive a back-end.
#[derive(Debug)]
pub struct Driver {
    /// What it is like.
    pub shape: Shape,
    /// The connection, and what was agreed on.
    pub front: Front,
    file: OwnedFd,
    memory: Arc<GuestMemory>,
    /// Where the back-end notes requests.
    pub inflight: Option<Inflight>,
    /// The rings.
    pub queues: Vec<Queue>,
}

/// A vring.
#[derive(Debug)]
pub struct Queue {
    number: u16,
    shape: Shape,
    /// The driver's address of the first byte of its memory.
    start: u64,
    memory: Arc<GuestMemory>,
    descriptors: Area,
    /// What is available, or when the driver of a packed ring is to be notified.
    available: Area,
    /// What is used, or when the device of a packed ring is to be notified.
    used: Area,
    /// Requests that were made available, announced and seen to have ended; descriptors in a packed ring.
    next: u16,
    announced: u16,
    seen: u16,
    free: Vec<u16>,
    /// How many descriptors each request has.
    lengths: Vec<u16>,
    /// The driver notifies the device, and the device the driver.
    pub kick: OwnedFd,
    /// See `kick`.
    pub call: OwnedFd,
}

/// A request that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Under which number it was submitted.
    pub slot: u16,
    /// What the device says: 0 is success, 1 failure, 2 not supported.
    pub status: u8,
    /// Bytes that were written to memory.
    pub written: u32,
}

impl Driver {
    /// Makes memory and rings and has a back-end serve them.
    ///
    /// # Errors
    /// The connection breaks, or the back-end lacks a feature.
    pub fn start(socket: OwnedFd, shape: Shape) -> Result<Driver> {
        let size = Queue::bytes(&shape) * u64::from(shape.queues);
        let file = memfd_create("machine", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, size)?;
        let part = GuestPart { guest: BASE, user: USER, len: size, offset: 0 };
        let memory = Arc::new(GuestMemory::map(&[(part, &file)])?);
        let queues =
            (0..shape.queues).map(|number| Queue::new(number, shape, &memory)).collect::<Result<_>>()?;
        let front = Front::connect(socket, shape.features)?;
        let inflight = front.new_inflight(shape.queues, shape.count)?;
        let mut driver = Driver { shape, front, file, memory, inflight, queues };
        driver.begin()?;
        Ok(driver)
    }

    /// Has another back-end, or the next one, serve the same rings; what was under way goes on.
    ///
    /// # Errors
    /// As [`Driver::start`].
    pub fn reconnect(&mut self, socket: OwnedFd) -> Result<()> {
        self.front = Front::connect(socket, self.shape.features)?;
        self.begin()
    }

    fn begin(&mut self) -> Result<()> {
        let size = Queue::bytes(&self.shape) * u64::from(self.shape.queues);
        let part = GuestPart { guest: BASE, user: USER, len: size, offset: 0 };
        self.front.set_memory(&[(part, self.file.as_fd())])?;
        if let Some(inflight) = &self.inflight {
            self.front.set_inflight(inflight)?;
        }
        for queue in &self.queues {
            let number = u32::from(queue.number);
            self.front.set_vring(number, queue.shape.count, queue.addresses(), queue.base())?;
            self.front.set_events(number, queue.kick.as_fd(), queue.call.as_fd())?;
            self.front.enable(number, true)?;
        }
        Ok(())
    }

    /// The machine's memory, for tests that write what they like into it.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// The file that it is in.
    pub fn file(&self) -> &OwnedFd {
        &self.file
    }
}

impl Queue {
    /// Bytes of memory of a queue: tables, then a page for each request, then their buffers.
    fn bytes(shape: &Shape) -> u64 {
        let tables = u64::from(shape.count) * 28 + 8192;
        (tables + u64::from(shape.depth) * (HEAD + u64::from(shape.buffer))).next_multiple_of(4096)
    }

    fn new(number: u16, shape: Shape, memory: &Arc<GuestMemory>) -> Result<Queue> {
        let start = Queue::bytes(&shape) * u64::from(number);
        let count = usize::from(shape.count);
        let [first, second, third] = Queue::tables(&shape);
        let area = |at: u64, len: usize| {
            memory.area(BASE + start + at, len, 8, true).context("the driver's own memory")
        };
        Ok(Queue {
            number,
            shape,
            start,
            memory: Arc::clone(memory),
            descriptors: area(first, 16 * count)?,
            available: area(second, 6 + 2 * count)?,
            used: area(third, 6 + 8 * count)?,
            next: 0,
            announced: 0,
            seen: 0,
            free: (0..shape.depth).rev().collect(),
            lengths: vec![0; shape.depth.into()],
            kick: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            call: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    fn tables(shape: &Shape) -> [u64; 3] {
        let available = (u64::from(shape.count) * 16).next_multiple_of(4096);
        let used = available + (6 + u64::from(shape.count) * 2).next_multiple_of(2048);
        [0, available, used]
    }

    fn addresses(&self) -> [u64; 3] {
        Queue::tables(&self.shape).map(|at| USER + self.start + at)
    }

    fn is_packed(&self) -> bool {
        self.shape.features & PACKED != 0
    }

    /// Where a packed ring is after so many descriptors: the index, and the wrap counter above it.
    fn place(&self, descriptors: u16) -> u16 {
        let lap = descriptors / self.shape.count;
        descriptors & (self.shape.count - 1) | if lap & 1 == 0 { 1 << 15 } else { 0 }
    }

    /// Where a back-end begins, if nothing is noted that it must go on with.
    fn base(&self) -> u32 {
        match self.is_packed() {
            false => self.used.u16(2, Acquire).into(),
            true => u32::from(self.place(self.seen)) * 0x1_0001,
        }
    }

    /// Where the page of a request is, in the machine.
    fn page(&self, slot: u16) -> u64 {
        let end = BASE + self.start + Queue::bytes(&self.shape);
        let each = HEAD + u64::from(self.shape.buffer);
        end - u64::from(self.shape.depth) * each + u64::from(slot) * HEAD
    }

    /// Where its buffer is.
    pub fn buffer(&self, slot: u16) -> u64 {
        let end = BASE + self.start + Queue::bytes(&self.shape);
        end - u64::from(self.shape.depth - slot) * u64::from(self.shape.buffer)
    }

    /// Whether a request can be submitted.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Requests under way.
    pub fn under_way(&self) -> u16 {
        self.shape.depth - self.free.len() as u16
    }

    /// Submits a read or write of `len` bytes of the request's buffer, in ranges that end at `cuts` (none:
    /// in one); `fill` puts a write's bytes into the buffer. Under which slot it is. [`Queue::announce`]
    /// notifies the device.
    pub fn submit(&mut self, op: u32, offset: u64, len: u32, cuts: &[u32], fill: &[u8]) -> Option<u16> {
        let slot = self.free.pop()?;
        let buffer = self.buffer(slot);
        let _ = self.memory.write(buffer, fill);
        let flags = if op == OUT { 0 } else { WRITE };
        let mut ranges = Vec::with_capacity(cuts.len() + 1);
        let mut from = 0;
        for to in cuts.iter().copied().chain([len]).filter(|to| *to <= len) {
            if to > from {
                ranges.push((buffer + u64::from(from), to - from, flags));
                from = to;
            }
        }
        self.post(slot, op, offset / 512, &ranges);
        Some(slot)
    }

    /// Submits a request about a range of the device.
    pub fn submit_range(&mut self, op: u32, offset: u64, len: u64, flags: u32) -> Option<u16> {
        let slot = self.free.pop()?;
        let buffer = self.buffer(slot);
        let bytes =
            [&(offset / 512).to_le_bytes()[..], &((len / 512) as u32).to_le_bytes(), &flags.to_le_bytes()]
                .concat();
        let _ = self.memory.write(buffer, &bytes);
        let ranges = [(buffer, 16, 0)];
        self.post(slot, op, 0, if op == OP_FLUSH { &[] } else { &ranges });
        Some(slot)
    }

    /// Makes a chain of header, ranges and status, or a table of them.
    fn post(&mut self, slot: u16, op: u32, sector: u64, ranges: &[(u64, u32, u16)]) {
        let page = self.page(slot);
        let header = [&op.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        let _ = self.memory.write(page, &header);
        let _ = self.memory.write(page + 16, &[0xff]);
        let chain = [(page, 16, 0)].into_iter().chain(ranges.iter().copied()).chain([(page + 16, 1, WRITE)]);
        if self.is_packed() {
            return self.post_packed(slot, page, &chain.collect::<Vec<_>>());
        }
        let last = ranges.len() + 1;
        // Without tables each request has three descriptors of the ring.
        let (table, first) = match self.shape.features & INDIRECT {
            0 => (None, slot * 3),
            _ => (Some(page + 64), slot),
        };
        for (index, (address, len, flags)) in chain.enumerate() {
            let flags = if index < last { flags | NEXT } else { flags };
            let next = if table.is_some() { index as u16 + 1 } else { first + index as u16 + 1 };
            let rest = u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48;
            match table {
                Some(table) => {
                    let bytes = [address.to_le_bytes(), rest.to_le_bytes()].concat();
                    let _ = self.memory.write(table + 16 * index as u64, &bytes);
                }
                None => self.describe(first + index as u16, address, rest),
            }
        }
        if let Some(table) = table {
            let len = 16 * (last as u64 + 1);
            self.describe(first, table, len | u64::from(TABLE) << 32);
        }
        self.make_available(first);
    }

    /// The same in a packed ring, where the first descriptor is written last.
    fn post_packed(&mut self, slot: u16, page: u64, chain: &[(u64, u32, u16)]) {
        let rest = |len: u32, flags: u16| u64::from(len) | u64::from(slot) << 32 | u64::from(flags) << 48;
        let table: Vec<u8> = chain
            .iter()
            .flat_map(|(address, len, flags)| [address.to_le_bytes(), rest(*len, *flags).to_le_bytes()])
            .flatten()
            .collect();
        let whole = [(page + 64, table.len() as u32, TABLE)];
        let chain = match self.shape.features & INDIRECT {
            0 => chain,
            _ => {
                let _ = self.memory.write(page + 64, &table);
                &whole
            }
        };
        for (index, (address, len, flags)) in chain.iter().enumerate().rev() {
            let place = self.place(self.next.wrapping_add(index as u16));
            let more = if index + 1 < chain.len() { NEXT } else { 0 };
            let turn = if place >> 15 == 1 { AVAILABLE } else { USED };
            let at = 16 * usize::from(place & (self.shape.count - 1));
            self.descriptors.set_u64(at, *address, Relaxed);
            self.descriptors.set_u64(at + 8, rest(*len, flags | more | turn), Release);
        }
        self.lengths[usize::from(slot)] = chain.len() as u16;
        self.next = self.next.wrapping_add(chain.len() as u16);
    }

    /// Writes a descriptor of the ring, as a split one has it; of the first lap of a packed one.
    pub fn describe(&self, index: u16, address: u64, rest: u64) {
        let (len, flags, next) = (rest & 0xffff_ffff, rest >> 32 & 0xffff, rest >> 48);
        let packed = len | next << 32 | (flags | u64::from(AVAILABLE)) << 48;
        self.descriptors.set_u64(16 * usize::from(index), address, Relaxed);
        let rest = if self.is_packed() { packed } else { rest };
        self.descriptors.set_u64(16 * usize::from(index) + 8, rest, Release);
    }

    /// Puts a head into the ring; [`Queue::announce`] notifies the device.
    pub fn make_available(&mut self, head: u16) {
        if self.is_packed() {
            return;
        }
        let place = usize::from(self.next & (self.shape.count - 1));
        self.available.set_u16(4 + 2 * place, head, Relaxed);
        self.next = self.next.wrapping_add(1);
        // As Linux does: the device may take it from now on, and is notified once for many.
        self.available.set_u16(2, self.next, Release);
    }

    /// Notifies the device of all that was submitted, if it wants that.
    pub fn announce(&mut self) {
        self.announce_as(self.next);
    }

    /// The same with any index.
    pub fn announce_as(&mut self, index: u16) {
        let old = self.announced;
        if !self.is_packed() {
            self.available.set_u16(2, index, Release);
        }
        self.announced = index;
        fence(SeqCst);
        let wanted = if self.is_packed() {
            match self.used.u16(2, Acquire) {
                0 => true,
                AT_PLACE => {
                    let (event, place) = (self.used.u16(0, Relaxed), self.place(index));
                    let lap = if event >> 15 == place >> 15 { 0 } else { i32::from(self.shape.count) };
                    let behind = i32::from(place & 0x7fff) + lap - i32::from(event & 0x7fff);
                    (1..=i32::from(index.wrapping_sub(old))).contains(&behind)
                }
                _ => false,
            }
        } else if self.shape.features & EVENT_IDX == 0 {
            self.used.u16(0, Relaxed) & 1 == 0
        } else {
            let event = self.used.u16(4 + 8 * usize::from(self.shape.count), Relaxed);
            index.wrapping_sub(event).wrapping_sub(1) < index.wrapping_sub(old)
        };
        if wanted && index != old {
            self.kick();
        }
    }

    /// Notifies the device.
    pub fn kick(&self) {
        // A full counter notifies as well.
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
    }

    /// A request that has ended, if there is one.
    pub fn ended(&mut self) -> Option<Ended> {
        if !self.has_ended() {
            return None;
        }
        let index = usize::from(self.seen & (self.shape.count - 1));
        let (slot, written) = if self.is_packed() {
            let slot = self.descriptors.u16(16 * index + 12, Relaxed);
            self.seen = self.seen.wrapping_add(self.lengths[usize::from(slot)]);
            (slot, self.descriptors.u32(16 * index + 8, Relaxed))
        } else {
            let head = self.used.u32(4 + 8 * index, Relaxed) as u16;
            self.seen = self.seen.wrapping_add(1);
            let slot = if self.shape.features & INDIRECT == 0 { head / 3 } else { head };
            (slot, self.used.u32(8 + 8 * index, Relaxed))
        };
        let mut status = [0xff];
        let _ = self.memory.read(self.page(slot) + 16, &mut status);
        self.free.push(slot);
        Some(Ended { slot, status: status[0], written })
    }

    fn has_ended(&self) -> bool {
        if !self.is_packed() {
            return self.used.u16(2, Acquire) != self.seen;
        }
        let place = self.place(self.seen);
        let flags = self.descriptors.u16(16 * usize::from(place & (self.shape.count - 1)) + 14, Acquire);
        flags & (AVAILABLE | USED) == if place >> 15 == 1 { AVAILABLE | USED } else { 0 }
    }

    /// Waits until the device notifies; `false` when it does not in that time.
    ///
    /// # Errors
    /// What `poll` says.
    pub fn wait(&mut self, patience: Duration) -> Result<bool> {
        if self.shape.features & EVENT_IDX != 0 {
            if self.is_packed() {
                self.available.set_u16(0, self.place(self.seen), Relaxed);
                self.available.set_u16(2, AT_PLACE, Release);
            } else {
                self.available.set_u16(4 + 2 * usize::from(self.shape.count), self.seen, Relaxed);
            }
            fence(SeqCst);
        }
        if self.has_ended() {
            return Ok(true);
        }
        let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
        let time = Timespec::try_from(patience).context("so long")?;
        let rang = poll(&mut fds, Some(&time))? > 0;
        if rang {
            let _ = rustix::io::read(&self.call, &mut [0u8; 8]);
        }
        Ok(rang)
    }

    /// The next request that ends, within that time.
    ///
    /// # Errors
    /// None does.
    pub fn next_ended(&mut self, patience: Duration) -> Result<Ended> {
        let began = std::time::Instant::now();
        loop {
            if let Some(ended) = self.ended() {
                return Ok(ended);
            }
            let left = patience.saturating_sub(began.elapsed());
            if left.is_zero() || !self.wait(left)? {
                bail!("no request has ended in {patience:?}; {} are under way", self.under_way());
            }
        }
    }

    /// Bytes of a request's buffer.
    pub fn bytes_of(&self, slot: u16, into: &mut [u8]) {
        let _ = self.memory.read(self.buffer(slot), into);
    }
}
