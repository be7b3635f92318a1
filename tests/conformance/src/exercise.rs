//! Random I/O held against a model in memory.
//! Must never let two threads touch the same 4096 bytes: which of two racing writes wins is not defined.

use std::fmt;
use std::fs::File;
use std::ops::AddAssign;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;

use anyhow::{Context, Result, anyhow};
use rustix::fs::FallocateFlags;

use crate::bench::{Access, Device, open, verify};
use crate::bytes::{Buffer, Random, compare, fill};
use crate::ioctl;
use crate::sysfs::Sysfs;

/// The largest operation in bytes.
const LARGEST: u64 = 1 << 20;

/// What to do to a device.
#[derive(Debug, Clone)]
pub(crate) struct Exercise {
    /// Logical block size in bytes.
    pub(crate) block: u64,
    /// Memory alignment that direct I/O needs, in bytes.
    pub(crate) memory: u64,
    /// How many operations, over all threads.
    pub(crate) ops: u64,
    /// Decides all of them.
    pub(crate) seed: u64,
    /// How many threads, each on a region of its own.
    pub(crate) threads: u64,
    /// Whether the device takes discards.
    pub(crate) discard: bool,
}

/// How many operations of each kind were done.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    reads: u64,
    writes: u64,
    durable: u64,
    discards: u64,
    zeroes: u64,
    flushes: u64,
    bytes: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.durable += other.durable;
        self.discards += other.discards;
        self.zeroes += other.zeroes;
        self.flushes += other.flushes;
        self.bytes += other.bytes;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { reads, writes, durable, discards, zeroes, flushes, bytes } = self;
        write!(
            f,
            "{reads} reads, {writes} writes, {durable} FUA, {discards} discards, {zeroes} write-zeroes, \
             {flushes} flushes, {} MiB",
            bytes >> 20
        )
    }
}

/// One kind of operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read(Access),
    Write(Access),
    Discard,
    ZeroOut,
    /// Write-zeroes that may free the space (fallocate on the device).
    Punch,
    Flush,
}

impl Exercise {
    /// What fits this device: its block size, its alignment, its discards.
    pub(crate) fn of(device: &Path, ops: u64, seed: u64) -> Result<Self> {
        let disk = Sysfs::of(device)?;
        // Kernels before 6.0 do not say, and then want one sector.
        let memory = disk.number("queue/dma_alignment").map_or(512, |mask| mask + 1);
        Ok(Self {
            block: disk.number("queue/logical_block_size")?,
            memory,
            ops,
            seed,
            threads: 1,
            discard: disk.number("queue/discard_max_bytes")? != 0,
        })
    }

    /// Does the operations and keeps `model` equal to what the device should hold.
    pub(crate) fn run(&self, device: &Path, model: &mut [u8]) -> Result<Tally> {
        let region = model.len().div_ceil(self.threads.max(1) as usize).next_multiple_of(4096);
        let mut total = Tally::default();
        thread::scope(|scope| {
            let mut threads = Vec::new();
            for (index, model) in model.chunks_mut(region).enumerate() {
                let seed = self.seed.wrapping_add(index as u64);
                let mut share = Region {
                    exercise: self,
                    base: (index * region) as u64,
                    model,
                    random: Random::new(seed),
                    buffer: Buffer::new(LARGEST as usize + 4096),
                    tally: Tally::default(),
                };
                threads.push(scope.spawn(move || share.run(device).map(|()| share.tally)));
            }
            for (index, thread) in threads.into_iter().enumerate() {
                let tally = thread.join().unwrap_or_else(|_| Err(anyhow!("panicked")));
                total += tally.with_context(|| format!("thread {index}"))?;
            }
            Ok(total)
        })
    }
}

/// The whole device against the model, without the page cache in between.
pub(crate) fn verify_device(device: &Device, model: &[u8]) -> Result<()> {
    let file = device.open(Access::Buffered)?;
    file.sync_all()?;
    let context = || format!("{}: the device differs from the model", device.path().display());
    verify(&device.open(Access::ReadDirect)?, 0, model).with_context(context)
}

/// A range of the backing file against the model; only after the device was flushed.
pub(crate) fn verify_backing(image: &Path, offset: u64, model: &[u8]) -> Result<()> {
    let context = || format!("{}: the backing file differs from the model", image.display());
    verify(&open(image, Access::Read)?, offset, model).with_context(context)
}

/// One thread's part of the device.
struct Region<'a> {
    exercise: &'a Exercise,
    base: u64,
    model: &'a mut [u8],
    random: Random,
    buffer: Buffer,
    tally: Tally,
}

impl Region<'_> {
    fn run(&mut self, device: &Path) -> Result<()> {
        let buffered = open(device, Access::Buffered)?;
        let direct = open(device, Access::Direct)?;
        let durable = open(device, Access::Durable)?;
        for number in 0..self.exercise.ops / self.exercise.threads.max(1) {
            let kind = self.pick();
            let bytewise = matches!(kind, Kind::Read(Access::Buffered) | Kind::Write(Access::Buffered));
            let (at, len) = self.range(bytewise);
            let file = match kind {
                Kind::Read(Access::Direct) | Kind::Write(Access::Direct) => &direct,
                Kind::Write(Access::Durable) => &durable,
                _ => &buffered,
            };
            self.step(kind, file, at, len).with_context(|| {
                format!("operation {number}: {kind:?} of {len} bytes at {}", self.base + at)
            })?;
            self.tally.bytes += len;
        }
        Ok(())
    }

    fn pick(&mut self) -> Kind {
        let access = if self.random.one_in(2) { Access::Direct } else { Access::Buffered };
        match self.random.below(100) {
            0..38 => Kind::Read(access),
            38..76 => Kind::Write(access),
            76..84 => Kind::Write(Access::Durable),
            84..90 if self.exercise.discard => Kind::Discard,
            // A device that cannot punch refuses only after the kernel has dropped the range from its page
            // cache, unwritten bytes included: the contents are undefined then.
            90..93 if self.exercise.discard => Kind::Punch,
            84..96 => Kind::ZeroOut,
            _ => Kind::Flush,
        }
    }

    /// A range of this region: whole blocks, or now and then any bytes where the page cache allows it.
    fn range(&mut self, bytewise: bool) -> (u64, u64) {
        let unit = if bytewise && self.random.one_in(4) { 1 } else { self.exercise.block };
        let room = self.model.len() as u64;
        let len = self.random.log_uniform(unit.max(512), LARGEST) / unit * unit;
        let len = len.min(room / unit * unit);
        let slack = (room - len) / unit;
        // The ends of a region are where off-by-one errors live.
        let at = match self.random.below(16) {
            0 => 0,
            1 => slack,
            _ => self.random.below(slack + 1),
        };
        (at * unit, len)
    }

    fn step(&mut self, kind: Kind, file: &File, at: u64, len: u64) -> Result<()> {
        let position = self.base + at;
        let range = position..position + len;
        let model = &mut self.model[at as usize..(at + len) as usize];
        // Direct I/O from any address that the device's alignment allows.
        let skew = self.random.below(4096 / self.exercise.memory.clamp(1, 4096)) * self.exercise.memory;
        let buffer = &mut self.buffer.as_mut()[skew as usize..(skew + len) as usize];
        match kind {
            Kind::Read(_) => {
                // A read that delivers nothing must not find the right bytes of an earlier one.
                fill(&mut buffer[..512.min(len as usize)], self.random.next());
                file.read_exact_at(buffer, position)?;
                compare(buffer, model, position)?;
                self.tally.reads += 1;
            }
            Kind::Write(access) => {
                fill(buffer, self.random.next());
                file.write_all_at(buffer, position)?;
                model.copy_from_slice(buffer);
                let count =
                    if access == Access::Durable { &mut self.tally.durable } else { &mut self.tally.writes };
                *count += 1;
            }
            Kind::Discard => {
                ioctl::discard(file, range)?;
                model.fill(0);
                self.tally.discards += 1;
            }
            Kind::ZeroOut => {
                ioctl::zero_out(file, range)?;
                model.fill(0);
                self.tally.zeroes += 1;
            }
            Kind::Punch => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(file, flags, position, len)?;
                model.fill(0);
                self.tally.zeroes += 1;
            }
            Kind::Flush => {
                file.sync_data()?;
                self.tally.flushes += 1;
            }
        }
        Ok(())
    }
}
