//! Merging: requests that go on where each other end, and that begin in one turn, become one operation on the backing.
//! It never changes what a request gets: unless the operation moved all bytes, each is carried out again by itself.
//!
//! A request joins the run that is being gathered when it goes the straight way (see [`Core::begin`]), the same one,
//! to the same descriptor, and begins where the run ends. Anything else sends the run and begins the next; the turn's
//! end sends what is left. A run of one is an operation like any other. What is not gathered may overtake what is: nobody
//! orders requests that are under way together. FUA writes are never gathered, since they wait for the disk.
//!
//! Only for requests with buffers of ours. The pages of a zero-copy request are a registered buffer, and an operation
//! names one such buffer.
//!
//! The members of a run are under way like all others: each has its slot, is waited for by a hold, and finishes by
//! itself. The kernel knows only the first; from there a list leads on. The I/O vectors of a run belong to its first tag
//! until the operation has completed, as its buffer does, so nothing depends on when the ring is submitted.
//!
//! # What it brings
//!
//! I/Os per 10^9 instructions, 4 KiB through libaio at depth 64, mode `batch-copy`, ext4 on null_blk (Linux 7.3, in the
//! emulator with `--icount`, one run of 250 ms each):
//!
//! | submitted | load | request here | alone | merged | ratio |
//! | --- | --- | --- | --- | --- | --- |
//! | one by one | sequential read | 4 KiB | 36,330 | 45,936 | 1.26 |
//! | one by one | sequential write | 4 KiB | 35,796 | 43,952 | 1.23 |
//! | one by one | random read | 4 KiB | 37,055 | 37,266 | 1.01 |
//! | in batches of 32 | sequential read | 128 KiB | 59,027 | 59,266 | 1.00 |
//! | in batches of 32 | sequential write | 128 KiB | 56,733 | 57,115 | 1.01 |
//! | in batches of 32 | random read | 4 KiB | 40,414 | 40,000 | 0.99 |
//!
//! A batch arrives as one request already: the block layer's plug has merged it. What is left are programs that submit
//! small neighbours one by one past the page cache, on kernels that copy. Zero copy, the default where the kernel has it,
//! cannot take part. So it is off unless asked for (`attach --merge`, hidden).

use io_uring::{opcode, squeue};

use super::Core;
use crate::{
    Op, Request,
    memory::Vectors,
    request::Slot,
    ring::{Ring, Transfer, fixed},
    user_data::{Source, user_data},
};

/// Most requests of a run, and the most bytes of a run that has more than one.
pub(crate) const MOST: usize = 32;
const MOST_BYTES: u64 = 1 << 20;

/// No tag: a queue has fewer.
const NONE: u16 = u16::MAX;

/// What a queue needs to gather runs.
pub(super) struct Runs {
    /// The run that grows.
    growing: Option<Run>,
    /// By tag: the next member of the same run.
    next: Box<[u16]>,
    vectors: Vectors,
}

/// Neighbouring requests that were not handed to the ring yet.
#[derive(Debug, Clone, Copy)]
struct Run {
    first: u16,
    last: u16,
    members: usize,
    write: bool,
    /// The descriptor's slot in the ring's table.
    target: u32,
    /// In the file, in bytes.
    start: u64,
    end: u64,
}

impl Run {
    /// Whether an operation goes on where this run ends, and may be part of it.
    fn takes(&self, way: &Transfer) -> bool {
        way.offset == self.end
            && (way.write, way.target) == (self.write, self.target)
            && self.members < MOST
            && self.end - self.start + u64::from(way.len) <= MOST_BYTES
    }
}

impl Runs {
    pub(super) fn new(depth: u16) -> Result<Box<Runs>, crate::Error> {
        let next = vec![NONE; depth.into()].into_boxed_slice();
        Ok(Box::new(Runs { growing: None, next, vectors: Vectors::new(depth.into(), MOST)? }))
    }

    /// The first of more than one.
    #[inline]
    pub(super) fn leads(&self, tag: u16) -> bool {
        self.next.get(usize::from(tag)).is_some_and(|next| *next != NONE)
    }

    /// Takes the member that follows off the list of `tag`.
    fn take_next(&mut self, tag: u16) -> Option<u16> {
        let next = std::mem::replace(self.next.get_mut(usize::from(tag))?, NONE);
        (next != NONE).then_some(next)
    }
}

impl Core {
    /// Puts a request that goes straight into a run. False: it does not take part, and goes at once.
    #[inline(never)]
    pub(super) fn gather(&mut self, ring: &mut Ring, tag: u16, request: &Request, way: Transfer) -> bool {
        if request.op == (Op::Write { durable: true }) {
            return false;
        }
        let way = Transfer { write: request.op != Op::Read, ..way };
        let address = self.buffer_address(tag);
        if !self.runs.as_ref().and_then(|runs| runs.growing).is_some_and(|run| run.takes(&way)) {
            self.send_run(ring);
        }
        let Some(runs) = &mut self.runs else { return false };
        let end = way.offset + u64::from(way.len);
        match &mut runs.growing {
            Some(run) => {
                runs.vectors.set(run.first.into(), run.members, address, way.len);
                runs.next[usize::from(run.last)] = tag;
                (run.last, run.end, run.members) = (tag, end, run.members + 1);
            }
            empty => {
                runs.vectors.set(tag.into(), 0, address, way.len);
                let Transfer { write, target, offset: start, .. } = way;
                *empty = Some(Run { first: tag, last: tag, members: 1, write, target, start, end });
            }
        }
        true
    }

    /// Queues the run that was gathered. Says whether there was one.
    #[inline]
    pub(crate) fn send_run(&mut self, ring: &mut Ring) -> bool {
        let run = self.runs.as_mut().and_then(|runs| runs.growing.take());
        if let Some(run) = run {
            self.send(ring, run);
        }
        run.is_some()
    }

    fn send(&mut self, ring: &mut Ring, run: Run) {
        let entry = self.entry_of(&run).user_data(user_data(self.index, Source::Backing { tag: run.first }));
        if let Err(errno) = self.push(ring, &entry) {
            self.each_of_run(run.first, |core, tag| {
                core.finish(ring.now(), tag, Err(errno));
            });
        }
    }

    fn entry_of(&self, run: &Run) -> squeue::Entry {
        let Run { first, members, write, target, start, end, .. } = *run;
        match &self.runs {
            Some(runs) if members > 1 => {
                let (vectors, count) = (runs.vectors.address(first.into()), members as u32);
                match write {
                    false => opcode::Readv::new(fixed(target), vectors, count).offset(start).build(),
                    true => opcode::Writev::new(fixed(target), vectors, count).offset(start).build(),
                }
            }
            _ => {
                let way =
                    Transfer { target, offset: start, len: (end - start) as u32, ..Transfer::default() };
                self.transfer(first, &self.slab[usize::from(first)].request, 0, way)
            }
        }
    }

    /// Takes in the completion of an operation that more than one request shares.
    #[inline(never)]
    pub(super) fn run_operated(&mut self, ring: &mut Ring, first: u16, result: i32) {
        let mut asked = 0;
        let mut tag = first;
        while let Some(runs) = &self.runs {
            asked += self.slab[usize::from(tag)].asked;
            tag = match runs.next[usize::from(tag)] {
                NONE => break,
                next => next,
            };
        }
        if u64::try_from(result) == Ok(asked) {
            self.each_of_run(first, |core, tag| {
                // A run has at most MOST_BYTES.
                let moved = core.slab[usize::from(tag)].asked as i32;
                core.arrived(ring, tag, moved);
            });
        } else {
            self.each_of_run(first, |core, tag| core.again(ring, tag));
        }
    }

    /// Carries a member of a run out by itself, from its beginning.
    fn again(&mut self, ring: &mut Ring, tag: u16) {
        let slot = &mut self.slab[usize::from(tag)];
        *slot = Slot::begin(slot.request, slot.began);
        self.advance(ring, tag);
    }

    /// Takes a run apart.
    fn each_of_run(&mut self, first: u16, mut what: impl FnMut(&mut Core, u16)) {
        let mut member = Some(first);
        while let Some(tag) = member {
            member = self.runs.as_mut().and_then(|runs| runs.take_next(tag));
            what(self, tag);
        }
    }
}

#[cfg(test)]
mod tests;
