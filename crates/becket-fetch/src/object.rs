//! An object of the store that is filled while it is read.
//! It never hands out a byte of a chunk before the chunk's checksum was compared, or made.
//!
//! A chunk is read once ([`crate::chunks`]). The order of writes is: the bytes, the entry of this boot,
//! `fdatasync`, the entry that outlives a power cut. Where the store is full the chunk is kept in memory
//! ([`crate::memory`]), from which it can go again: then it is unknown.

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use becket_image::filled::{Presence, Where};
use becket_image::zeroes;
use rustix::fs::{FallocateFlags, fallocate};

use crate::Error;
use crate::chunks::{Chunk, Chunks};
use crate::client::Client;
use crate::digest;
use crate::error::is_full;
use crate::limit::Limit;
use crate::memory::InMemory;
use crate::place::shown;
use crate::steps::{Room, Steps};
use crate::store::{Held, checksum};
use crate::stream::Stream;
use crate::table::index;
use crate::trace;
use crate::version::Known;

/// How many bytes one request asks for at most, where they are known to be needed. With 4 MiB, eight requests
/// at a time spent most of their time on waiting for a server 20 ms away.
pub(crate) const RUN: u64 = 16 << 20;
/// What is fetched together around a chunk that is wanted, in bytes.
pub(crate) const UNIT: u64 = 64 << 10;
/// After so many bytes they are synced.
const SYNC_EVERY: u64 = 64 << 20;

/// Where the bytes of an object come from that are not in the store.
pub(crate) enum Supply {
    /// A server has them.
    Server(Client),
    /// They are decoded, in their order only.
    Stream(Steps),
}

pub(crate) struct Object {
    pub(crate) held: Held,
    pub(crate) supply: Supply,
    known: Known,
    pub(crate) chunks: Chunks,
    pub(crate) fetched: AtomicU64,
    /// Chunks that are in the file and maybe not yet on the disk: the first of a run, and their checksums.
    fresh: Mutex<Vec<(u64, Vec<u32>)>>,
    /// Where the last read ended, and how far the next is fetched ahead if it begins there.
    pub(crate) reader: Mutex<(u64, u64)>,
    pub(crate) progress: Option<Arc<dyn Fn(u64, u64) + Send + Sync>>,
    /// Where readers in other processes see which chunks are there.
    pub(crate) presence: Presence,
    pub(crate) memory: InMemory,
    /// Nothing is written into the store.
    pub(crate) memory_only: bool,
    /// How much the store may have of it, and whether there is room.
    pub(crate) limit: Limit,
    /// What the store has no room for is an error.
    pub(crate) must_keep: bool,
    /// All chunks may be there that a digest names.
    grown: AtomicBool,
    /// Held while they are compared with it.
    comparing: Mutex<()>,
    /// See [`crate::Options`].
    pub(crate) record: bool,
    /// Only chunks that are wanted are fetched, and not what is beside them: a trace says what is needed, or
    /// is being made.
    pub(crate) exact: bool,
    pub(crate) foreseen: Vec<Range<u64>>,
}

impl std::fmt::Debug for Object {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Object").field("meta", &self.held.meta).finish_non_exhaustive()
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Chunks that one thread looks at; what it has not found good is unknown again afterwards.
struct Busy<'a> {
    object: &'a Object,
    run: Range<u64>,
    /// Nobody waits for them: they are not kept in memory.
    later: bool,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.object.chunks.mark(self.run.clone(), Chunk::Unknown);
    }
}

impl Busy<'_> {
    /// The first chunks of the run, up to `end`, are good, and there.
    fn good(&mut self, end: u64, place: Where) {
        let run = self.run.start..end.clamp(self.run.start, self.run.end);
        self.run.start = run.end;
        if !run.is_empty() {
            run.clone().for_each(|chunk| self.object.presence.put(chunk, place));
            self.object.chunks.mark(run, Chunk::Good);
            self.object.presence.tell();
        }
    }
}

/// A run of chunks while it comes.
struct Coming {
    /// The next byte, and the chunk that it is of.
    at: u64,
    chunk: u64,
    /// Of what has come of that chunk.
    hash: crc32fast::Hasher,
    place: Where,
    /// Memory was taken for that chunk.
    taken: bool,
}

impl Object {
    /// One whose table nobody else has, or else that of one that a `predecessor` may still use.
    pub(crate) fn new(
        held: Held,
        supply: Supply,
        known: Known,
        presence: Presence,
        predecessor: bool,
    ) -> Object {
        let memory = InMemory::of(&presence, predecessor);
        let chunks = Chunks::new(held.meta.chunks(), &memory.chunks());
        let grown = AtomicBool::new(held.meta.has_digest());
        Object {
            held,
            supply,
            known,
            chunks,
            fetched: AtomicU64::new(0),
            fresh: Mutex::default(),
            reader: Mutex::new((u64::MAX, 0)),
            progress: None,
            presence,
            memory,
            memory_only: false,
            limit: Limit::default(),
            must_keep: false,
            grown,
            comparing: Mutex::default(),
            record: false,
            exact: false,
            foreseen: Vec::new(),
        }
    }

    /// Takes chunks that nobody looks at yet, from the next one that is asked for on: that and those behind
    /// it that are `wanted`, too. They are for [`Object::bring_run`].
    pub(crate) fn claim(
        &self,
        from: u64,
        later: bool,
        most: u64,
        wanted: &dyn Fn(u64) -> bool,
    ) -> Option<Range<u64>> {
        let mut chunks = self.chunks.lock();
        let is_free = |chunks: &[Chunk], at| match chunks.get(index(at)) {
            Some(Chunk::Unknown) => self.can_be_had(at),
            // A predecessor has evicted it.
            Some(Chunk::Good) => !self.presence.has(at),
            _ => false,
        };
        let first = self.presence.next_wanted(from, later, &mut |at| is_free(&chunks, at))?;
        let mut end = first + 1;
        while end - first < most && is_free(&chunks, end) && wanted(end) {
            end += 1;
        }
        chunks.get_mut(index(first)..index(end)).unwrap_or_default().fill(Chunk::Busy);
        Some(first..end)
    }

    /// Whether a chunk can be had when it is wanted: one that is to be decoded comes when its turn has come.
    fn can_be_had(&self, chunk: u64) -> bool {
        self.steps().is_none() || self.held.table.get(chunk).is_some()
    }

    /// What decodes it, if that is how its bytes come.
    pub(crate) fn steps(&self) -> Option<&Steps> {
        if let Supply::Stream(steps) = &self.supply { Some(steps) } else { None }
    }

    /// Takes what is beside a run that the caller has taken, and is fetched with it.
    pub(crate) fn widen(&self, run: Range<u64>) -> Range<u64> {
        let unit = (UNIT / self.held.meta.chunk).max(1);
        if self.exact || self.steps().is_some() {
            return run;
        }
        let (first, end) = (run.start / unit * unit, run.end.next_multiple_of(unit));
        let start = self.chunks.take_down_to(first, run.start);
        start..self.chunks.take_up_to(run.end, end.min(self.held.meta.chunks()))
    }

    /// Notes that chunks are wanted, if that is recorded. Says whether it is: then nothing is fetched ahead,
    /// which nobody may want.
    pub(crate) fn wanted(&self, chunks: &Range<u64>) -> bool {
        if self.record && !chunks.is_empty() {
            // A trace that lacks something is still a trace.
            let _ = trace::note(self.held.table.parts().0, chunks.clone());
        }
        self.record
    }

    /// Makes the chunks of a run good that the caller has taken; `later`: if the store has room for them.
    pub(crate) fn bring_run(&self, run: Range<u64>, later: bool) -> Result<(), Error> {
        self.fill(Busy { object: self, run, later })
    }

    /// Whether one of these chunks is not in the store.
    pub(crate) fn lacks(&self, run: &Range<u64>) -> bool {
        self.held.table.sums(run.clone()).any(|sum| sum.is_none())
    }

    /// Whether chunks are there which a power cut would take.
    pub(crate) fn has_unsynced(&self) -> bool {
        !lock(&self.fresh).is_empty()
    }

    /// Chunks that were in memory are not there any more.
    fn depart(&self, gone: &[u64]) -> Result<(), Error> {
        if gone.is_empty() {
            return Ok(());
        }
        let mut chunks = self.chunks.lock();
        // A busy one is being fetched once more; one that a predecessor has brought is unknown here.
        let goes = |chunk: &u64| match chunks.get(index(*chunk)) {
            Some(Chunk::Good) => true,
            Some(Chunk::Unknown) => self.presence.place(*chunk) == Some(Where::Memory),
            _ => false,
        };
        let gone: Vec<u64> = gone.iter().copied().filter(goes).collect();
        let set = |chunks: &mut [Chunk], state| {
            for chunk in &gone {
                if let Some(chunk) = chunks.get_mut(index(*chunk)) {
                    *chunk = state;
                }
            }
        };
        // A busy chunk is not fetched, so no other thread writes into the memory that is being freed.
        set(&mut chunks, Chunk::Busy);
        drop(chunks);
        let freed = InMemory::free(&self.presence, &gone);
        set(&mut self.chunks.lock(), Chunk::Unknown);
        self.chunks.tell();
        // A reader may have asked for one of them while it was busy.
        self.presence.look_again();
        freed.map_err(self.failed("memory cannot be freed"))
    }

    pub(crate) fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> Error {
        Error::store(&self.held.path, what)
    }

    /// Keeps the bytes that came with the first answer, where they are whole chunks.
    pub(crate) fn take_head(&self, head: &[u8]) -> Result<(), Error> {
        let (meta, len) = (&self.held.meta, head.len() as u64);
        self.fetched.fetch_add(len, Ordering::Relaxed);
        let whole = if len == meta.size { meta.chunks() } else { len / meta.chunk };
        if whole > 0 && self.held.table.sums(0..whole).all(|sum| sum.is_none()) {
            let mut busy = Busy { object: self, run: 0..whole, later: false };
            let mut coming = self.coming(0);
            self.came(&mut busy, &mut coming, head.get(..index(whole * meta.chunk)).unwrap_or(head))?;
        }
        Ok(())
    }

    /// Writes into the store; says whether there was room.
    fn write(&self, bytes: &[u8], at: u64) -> Result<bool, Error> {
        if !self.limit.take(bytes.len() as u64) {
            return Ok(false);
        }
        match self.held.data.write_all_at(bytes, at) {
            Err(error) if !is_full(&error) => Err(self.failed("the store file cannot be written")(error)),
            written => {
                self.limit.had_room(written.is_ok());
                Ok(written.is_ok())
            }
        }
    }

    /// Chunks are in the file, from `first` on and with these checksums.
    fn there(&self, first: u64, mut sums: Vec<u32>) -> Result<(), Error> {
        if self.held.meta.has_digest() {
            self.held.table.set_whole(false).map_err(self.failed("its table cannot be written"))?;
            self.grown.store(true, Ordering::Relaxed);
        }
        match self.held.table.set(first, &sums, false) {
            // Without their entries the chunks are there as long as these processes know them.
            Err(error) if is_full(&error) && !self.must_keep => return Ok(()),
            Err(error) if is_full(&error) => return Err(self.no_room()),
            set => set.map_err(self.failed("its table cannot be written"))?,
        }
        let mut fresh = lock(&self.fresh);
        match fresh.last_mut().filter(|(start, last)| start + last.len() as u64 == first) {
            Some((_, last)) => last.append(&mut sums),
            None => fresh.push((first, sums)),
        }
        let count: u64 = fresh.iter().map(|(_, sums)| sums.len() as u64).sum();
        // What is decoded can be decoded again, and is synced when all is there.
        let due = self.steps().is_none() && count * self.held.meta.chunk >= SYNC_EVERY;
        drop(fresh);
        if due { self.sync() } else { Ok(()) }
    }

    /// Makes what is there outlive a power cut.
    pub(crate) fn sync(&self) -> Result<(), Error> {
        let fresh = std::mem::take(&mut *lock(&self.fresh));
        if fresh.is_empty() {
            return Ok(());
        }
        let write = || {
            self.held.data.sync_data()?;
            fresh.iter().try_for_each(|(first, sums)| self.held.table.set(*first, sums, true))?;
            self.held.table.sync()
        };
        write().map_err(self.failed("it cannot be synced"))
    }

    /// Makes all chunks of a range good. Threads that need the same chunk wait for the first.
    pub(crate) fn ensure(&self, wanted: Range<u64>) -> Result<(), Error> {
        let most = (RUN / self.held.meta.chunk).max(1);
        loop {
            let mut chunks = self.chunks.lock();
            let state = |chunks: &[Chunk], at| chunks.get(index(at)).copied().unwrap_or(Chunk::Good);
            let Some(first) = wanted.clone().find(|at| state(&chunks, *at) != Chunk::Good) else {
                return Ok(());
            };
            if state(&chunks, first) == Chunk::Busy {
                self.chunks.wait(chunks);
                continue;
            }
            if !self.can_be_had(first) {
                drop(chunks);
                self.decode(&wanted)?;
                continue;
            }
            let goes_on = |at| state(&chunks, at) == Chunk::Unknown && self.can_be_had(at);
            let mut end = first + 1;
            while end < wanted.end && end - first < most && goes_on(end) {
                end += 1;
            }
            chunks.get_mut(index(first)..index(end)).unwrap_or_default().fill(Chunk::Busy);
            drop(chunks);
            self.fill(Busy { object: self, run: self.widen(first..end), later: false })?;
        }
    }

    /// Compares the chunks of a run that are there with their checksums, and fetches the others.
    fn fill(&self, mut busy: Busy<'_>) -> Result<(), Error> {
        let mut buffer = Vec::new();
        let first = busy.run.start;
        let sums: Vec<Option<u32>> = self.held.table.sums(busy.run.clone()).collect();
        while busy.run.start < busy.run.end {
            let chunk = busy.run.start;
            let known = sums.get(index(chunk - first)..).unwrap_or_default();
            if let Some(Some(sum)) = known.first().copied() {
                // A fetcher that has followed another compares once more.
                if !self.presence.has(chunk) {
                    self.presence.checked();
                }
                buffer.resize(128 << 10, 0);
                let (start, len) = self.held.part(chunk);
                let found = checksum(&self.held.data, start, len, &mut buffer);
                if found.map_err(self.failed("the store file cannot be read"))? == sum {
                    busy.good(chunk + 1, Where::File);
                    continue;
                }
                let clear = self.held.table.clear(chunk..chunk + 1);
                clear.map_err(self.failed("its table cannot be written"))?;
            }
            // One that is to be decoded was damaged in the store. Its turn comes, and that of the rest.
            let Supply::Server(client) = &self.supply else { return Ok(()) };
            let more = known.iter().skip(1).take_while(|sum| sum.is_none()).count() as u64;
            self.fetch(client, &mut busy, chunk..chunk + 1 + more)?;
        }
        self.check_whole()
    }

    /// Compares all bytes with the digest that names them, if this process has seen all of them.
    fn check_whole(&self) -> Result<(), Error> {
        if self.chunks.counted_good() < self.held.meta.chunks() { Ok(()) } else { self.compare_whole() }
    }

    /// Whether all chunks may be there which a digest names: some have come since
    /// [`Object::take_may_be_whole`].
    pub(crate) fn may_be_whole(&self) -> bool {
        self.grown.load(Ordering::Relaxed)
    }

    /// The same, once.
    pub(crate) fn take_may_be_whole(&self) -> bool {
        self.grown.swap(false, Ordering::Relaxed)
    }

    /// Compares all bytes with the digest that names them, if all are in the store, by whatever process,
    /// and nobody has. If they are others, none of them counts.
    pub(crate) fn compare_whole(&self) -> Result<(), Error> {
        let _alone = lock(&self.comparing);
        if !digest::is_due(&self.held) {
            return Ok(());
        }
        if digest::is_right(&self.held).map_err(self.failed("the store file cannot be read"))? {
            self.sync()?;
            return digest::note(&self.held).map_err(self.failed("its table cannot be written"));
        }
        let count = self.held.meta.chunks();
        lock(&self.fresh).clear();
        self.held.table.clear(0..count).map_err(self.failed("its table cannot be written"))?;
        self.presence.withdraw();
        self.chunks.count_anew();
        self.chunks.mark(0..count, Chunk::Unknown);
        Err(Error::Digest { url: shown(&self.held.meta.url) })
    }

    /// Decodes the next chunk, if that is how its bytes come.
    pub(crate) fn step(&self) -> Result<(), Error> {
        let Some(steps) = self.steps() else { return Ok(()) };
        let (data, path) = (&self.held.data, self.held.path.as_path());
        let room = Room { data, path, size: self.held.meta.size, chunk: self.held.meta.chunk };
        steps.step(&room, &mut |chunk, bytes| self.decoded(&steps.stream, chunk, bytes))
    }

    /// Decodes until the chunks of a range are there, and then takes its progress off the screen.
    fn decode(&self, wanted: &Range<u64>) -> Result<(), Error> {
        let Some(Steps { stream, .. }) = self.steps() else { return Ok(()) };
        let mut decoded = Ok(());
        while decoded.is_ok() && !self.chunks.are_good(wanted) {
            decoded = self.step();
        }
        if let Some(progress) = &stream.progress {
            progress(stream.len, stream.len);
        }
        decoded
    }

    /// Takes chunks for good that a predecessor has brought into the file.
    pub(crate) fn take_over(&self) {
        let there = |chunk: &u64| self.presence.place(*chunk) == Some(Where::File);
        (0..self.presence.chunks())
            .filter(there)
            .for_each(|chunk| self.chunks.mark(chunk..chunk + 1, Chunk::Good));
    }

    /// Keeps a chunk that was decoded, unless it is there.
    fn decoded(&self, stream: &Stream, chunk: u64, bytes: &[u8]) -> Result<(), Error> {
        let mut chunks = self.chunks.lock();
        match chunks.get_mut(index(chunk)) {
            // Another thread looks at it, and will ask again if it is damaged.
            None | Some(Chunk::Good | Chunk::Busy) => return Ok(()),
            Some(state) => *state = Chunk::Busy,
        }
        drop(chunks);
        let mut busy = Busy { object: self, run: chunk..chunk + 1, later: false };
        self.put(stream, bytes, self.held.part(chunk).0)?;
        self.there(chunk, vec![crc32fast::hash(bytes)])?;
        busy.good(chunk + 1, Where::File);
        Ok(())
    }

    /// Writes what was decoded, or a hole.
    fn put(&self, stream: &Stream, bytes: &[u8], at: u64) -> Result<(), Error> {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if zeroes::is_all(bytes) && fallocate(&self.held.data, how, at, bytes.len() as u64).is_ok() {
            return Ok(());
        }
        if self.write(bytes, at)? { Ok(()) } else { Err(stream.no_room(at, 0)) }
    }

    fn fetch(&self, client: &Client, busy: &mut Busy<'_>, run: Range<u64>) -> Result<(), Error> {
        let (start, _) = self.held.part(run.start);
        let (last, len) = self.held.part(run.end - 1);
        let mut coming = self.coming(run.start);
        let got = client.get(start..last + len, &self.known, &mut |bytes| {
            self.fetched.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            self.came(busy, &mut coming, bytes)
        });
        if coming.taken {
            self.memory.give_back(self.held.meta.chunk);
            // It is not whole. One that has been there all the time stays as it was.
            if !self.presence.has(coming.chunk) {
                let (start, len) = (coming.chunk * self.held.meta.chunk, self.held.meta.chunk);
                self.presence.memory().free(start, len).map_err(self.failed("memory cannot be freed"))?;
            }
        }
        got
    }

    fn coming(&self, chunk: u64) -> Coming {
        let place = if self.memory_only { Where::Memory } else { Where::File };
        Coming { at: self.held.part(chunk).0, chunk, hash: crc32fast::Hasher::new(), place, taken: false }
    }

    /// The next bytes of a run. From the chunk on for which the store has no room, they are kept in memory.
    fn came(&self, busy: &mut Busy<'_>, coming: &mut Coming, mut bytes: &[u8]) -> Result<(), Error> {
        if coming.place == Where::File && !self.write(bytes, coming.at)? {
            if self.must_keep || busy.later {
                return Err(self.no_room());
            }
            coming.place = Where::Memory;
            self.move_start(coming)?;
        }
        let (first, mut sums) = (coming.chunk, Vec::new());
        while !bytes.is_empty() {
            let (first, size) = self.held.part(coming.chunk);
            let (now, rest) = bytes.split_at(bytes.len().min(index(first + size - coming.at)));
            if coming.place == Where::Memory {
                self.remember(coming, now)?;
            }
            coming.hash.update(now);
            coming.at += now.len() as u64;
            bytes = rest;
            if coming.at == first + size {
                sums.push(std::mem::take(&mut coming.hash).finalize());
                if coming.place == Where::Memory {
                    busy.good(coming.chunk + 1, coming.place);
                }
                if std::mem::take(&mut coming.taken) {
                    // From now on it can go.
                    self.memory.is_whole(coming.chunk);
                }
                coming.chunk += 1;
            }
        }
        if coming.place == Where::File && !sums.is_empty() {
            self.there(first, sums)?;
            busy.good(coming.chunk, coming.place);
        }
        Ok(())
    }

    fn no_room(&self) -> Error {
        let Held { meta, table, .. } = &self.held;
        let (url, stored) = (shown(&meta.url), meta.stored(table));
        match self.limit.reached() {
            Some(limit) => Error::Limit { url, stored, limit },
            None => Error::Full { url, stored },
        }
    }

    /// Keeps the next bytes in memory, where they are of one chunk.
    fn remember(&self, coming: &mut Coming, bytes: &[u8]) -> Result<(), Error> {
        if !coming.taken {
            let gone = self.memory.take(&self.presence);
            let gone = gone.map_err(self.failed("the store file cannot be written"))?;
            coming.taken = true;
            self.depart(&gone)?;
        }
        self.presence.memory().write(bytes, coming.at).map_err(self.failed("there is no memory for it"))
    }

    /// Brings what has come of a chunk from the file into memory.
    fn move_start(&self, coming: &mut Coming) -> Result<(), Error> {
        let end = std::mem::replace(&mut coming.at, self.held.part(coming.chunk).0);
        let mut buffer = vec![0; 64 << 10];
        while coming.at < end {
            let len = buffer.len().min(index(end - coming.at));
            let part = buffer.get_mut(..len).unwrap_or_default();
            self.held
                .data
                .read_exact_at(part, coming.at)
                .map_err(self.failed("the store file cannot be read"))?;
            self.remember(coming, part)?;
            coming.at += part.len() as u64;
        }
        Ok(())
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // Chunks that are not synced are fetched again after a power cut, and only then.
        if self.steps().is_none() {
            let _ = self.sync();
        }
    }
}

#[cfg(test)]
#[path = "object_tests.rs"]
mod tests;
