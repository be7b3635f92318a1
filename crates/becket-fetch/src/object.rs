//! An object of the store that is filled while it is read.
//! It never hands out a byte of a chunk before the chunk's checksum was compared, or made.
//!
//! A chunk is *unknown* until this process has read it once, *busy* while one thread looks at it or fetches
//! it, for which other threads wait, and then *good*. The order of writes is: the bytes, the entry of this
//! boot, `fdatasync`, the entry that outlives a power cut.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use becket_image::filled::{Lent, Presence};
use becket_image::{Filler, Fillers, Identity, ReadAt};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

use crate::Error;
use crate::access::Access;
use crate::client::{Client, Waiting};
use crate::digest;
use crate::order::Order;
use crate::place::{Place, shown};
use crate::store::{Held, Store, checksum};
use crate::trace;
use crate::version::{Known, Version};

/// How many bytes the first request asks for.
const FIRST: u64 = 64 << 10;
/// How many bytes one request asks for at most, where they are known to be needed.
const RUN: u64 = 4 << 20;
/// How far a sequential reader is fetched ahead at most, in bytes.
const AHEAD: u64 = 1 << 20;
/// How many requests are in flight where many bytes are needed.
const LINES: usize = 4;
/// After so many bytes they are synced.
const SYNC_EVERY: u64 = 64 << 20;

/// How to open an object.
#[derive(Clone, Default)]
pub struct Options {
    /// The store; that of the user if none is named.
    pub store: Option<PathBuf>,
    /// How many bytes the store may keep of objects that nobody uses.
    pub limit: Option<u64>,
    /// How long a server may not answer.
    pub patience: Duration,
    /// Hears how many bytes of how many are there, while many are brought.
    pub progress: Option<Arc<dyn Fn(u64, u64) + Send + Sync>>,
    /// Hears why a server is asked again, when the first second has passed without an answer.
    pub waiting: Option<Waiting>,
    /// Note which bytes are needed and when, and fetch no others ahead.
    pub record: bool,
    /// What a device will need, by a trace: fetched in this order, behind what is waited for.
    pub foreseen: Vec<Range<u64>>,
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("store", &self.store)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

/// An image on another host that is open.
#[derive(Debug, Clone)]
pub struct Remote {
    /// The image's path on this host: the file in the store, and the way inside it.
    pub path: PathBuf,
    /// The file in the store.
    pub file: PathBuf,
    /// What brings its bytes.
    pub fillers: Fillers,
    object: Arc<Object>,
}

/// Opens the object that a URL names. One request shows which version the server has and brings its first
/// bytes; what the store has of that version is not fetched again.
///
/// # Errors
/// The URL, the server's answer or the store cannot be used.
pub fn open(place: &Place, options: &Options) -> Result<Remote, Error> {
    let store = Store::open(options.store.as_deref())?;
    let mut client = Client::new(&place.url, &Access::of_user(&place.url)?, options.patience)?;
    client.waiting = options.waiting.clone();
    let mut head = Vec::new();
    let known = client.first(FIRST, &mut |bytes| {
        head.extend_from_slice(bytes);
        Ok(())
    })?;
    let held = store.hold(place, &known)?;
    if let Some(limit) = options.limit {
        // This object is held, so it stays.
        store.shrink(limit)?;
    }
    let file = held.path.clone();
    let meta = held.data.metadata().map_err(Error::store(&file, "its status cannot be read"))?;
    let mut object = Object::new(held, client, known);
    object.progress = options.progress.clone();
    object.record = options.record;
    object.foreseen.clone_from(&options.foreseen);
    let object = Arc::new(object);
    object.take_head(&head)?;
    let mut fillers = Fillers::default();
    fillers.add(Identity { dev: meta.dev(), ino: meta.ino() }, object.clone());
    let path = if place.inside.is_empty() { file.clone() } else { file.join(Path::new(&place.inside)) };
    Ok(Remote { path, file, fillers, object })
}

impl Remote {
    /// Length of the object in bytes.
    pub fn size(&self) -> u64 {
        self.object.held.meta.size
    }

    /// The URL, with its query.
    pub(crate) fn url(&self) -> &str {
        &self.object.held.meta.url
    }

    pub(crate) fn version(&self) -> &Version {
        &self.object.held.meta.version
    }

    /// As [`Remote::bring_all`], until it is to stop.
    pub(crate) fn bring_until(&self, stop: &AtomicBool) -> Result<(), Error> {
        self.object.bring_until(std::slice::from_ref(&(0..self.size())), Some(stop))
    }

    /// Fetches all that the store does not have of it.
    ///
    /// # Errors
    /// The server or the store fails.
    pub fn bring_all(&self) -> Result<(), Error> {
        self.object.bring_all(std::slice::from_ref(&(0..self.size())))
    }

    /// Fetches what the store does not have of some ranges, in their order.
    ///
    /// # Errors
    /// The server or the store fails.
    pub fn bring_in_order(&self, ranges: &[Range<u64>]) -> Result<(), Error> {
        let meta = &self.object.held.meta;
        let most = (RUN / meta.chunk).max(1);
        let mut runs = Vec::new();
        for run in trace::in_chunks(ranges, meta.chunk, meta.size) {
            let starts = run.clone().step_by(index(most));
            runs.extend(starts.map(|start| start..run.end.min(start + most)));
        }
        self.object.bring_runs(&runs, None)
    }

    /// How many bytes were fetched from the server since the object was opened.
    pub fn fetched(&self) -> u64 {
        self.object.fetched.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chunk {
    Unknown,
    Busy,
    Good,
}

pub(crate) struct Object {
    held: Held,
    client: Client,
    known: Known,
    chunks: Mutex<Vec<Chunk>>,
    /// How many of them are good.
    good: AtomicU64,
    changed: Condvar,
    fetched: AtomicU64,
    /// Chunks that are in the file and maybe not yet on the disk, with their checksums.
    fresh: Mutex<Vec<(u64, u32)>>,
    /// Where the last read ended, and how far the next is fetched ahead if it begins there.
    reader: Mutex<(u64, u64)>,
    progress: Option<Arc<dyn Fn(u64, u64) + Send + Sync>>,
    /// Where readers in other processes see which chunks are there.
    presence: Option<Presence>,
    /// See [`Options`].
    record: bool,
    foreseen: Vec<Range<u64>>,
}

impl std::fmt::Debug for Object {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Object").field("meta", &self.held.meta).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Chunks that one thread looks at; what it has not found good is unknown again afterwards.
struct Busy<'a> {
    object: &'a Object,
    run: Range<u64>,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.object.mark(self.run.clone(), Chunk::Unknown);
    }
}

impl Busy<'_> {
    /// The first chunks of the run, up to `end`, are good.
    fn good(&mut self, end: u64) {
        let end = end.clamp(self.run.start, self.run.end);
        self.object.mark(self.run.start..end, Chunk::Good);
        self.run.start = end;
    }
}

impl Object {
    fn new(held: Held, client: Client, known: Known) -> Object {
        let count = usize::try_from(held.meta.chunks()).unwrap_or(0);
        Object {
            held,
            client,
            known,
            chunks: Mutex::new(vec![Chunk::Unknown; count]),
            good: AtomicU64::new(0),
            changed: Condvar::new(),
            fetched: AtomicU64::new(0),
            fresh: Mutex::default(),
            reader: Mutex::new((u64::MAX, 0)),
            progress: None,
            presence: None,
            record: false,
            foreseen: Vec::new(),
        }
    }

    /// One whose chunks readers in other processes see.
    pub(crate) fn filling(
        held: Held,
        client: Client,
        known: Known,
        presence: Presence,
        record: bool,
    ) -> Object {
        let mut object = Object::new(held, client, known);
        object.presence = Some(presence);
        object.record = record;
        object
    }

    /// Takes chunks that nobody looks at yet, from the next one that is asked for on: that and those behind
    /// it that are `wanted`, too. They are for [`Object::bring_run`].
    pub(crate) fn claim(
        &self,
        presence: &Presence,
        from: u64,
        later: bool,
        most: u64,
        wanted: &dyn Fn(u64) -> bool,
    ) -> Option<Range<u64>> {
        let mut chunks = lock(&self.chunks);
        let is_free = |chunks: &[Chunk], at| chunks.get(index(at)) == Some(&Chunk::Unknown);
        let (mut at, mut first_seen) = (from, None);
        let first = loop {
            let found = presence.next_wanted(at, later)?;
            if first_seen == Some(found) {
                return None;
            }
            first_seen.get_or_insert(found);
            if is_free(&chunks, found) {
                break found;
            }
            at = found + 1;
        };
        let mut end = first + 1;
        while end - first < most && is_free(&chunks, end) && wanted(end) {
            end += 1;
        }
        chunks.get_mut(index(first)..index(end)).unwrap_or_default().fill(Chunk::Busy);
        Some(first..end)
    }

    /// Takes chunks from `from` on as far as nobody looks at them yet, up to `end`; returns where that ends.
    pub(crate) fn claim_more(&self, from: u64, end: u64) -> u64 {
        let mut chunks = lock(&self.chunks);
        let run = chunks.get_mut(index(from)..index(end)).unwrap_or_default();
        let free = run.iter_mut().take_while(|chunk| **chunk == Chunk::Unknown);
        from + free.map(|chunk| *chunk = Chunk::Busy).count() as u64
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

    /// Makes the chunks of a run good that the caller has taken.
    pub(crate) fn bring_run(&self, run: Range<u64>) -> Result<(), Error> {
        self.fill(Busy { object: self, run })
    }

    /// Whether chunks are there which a power cut would take.
    pub(crate) fn has_unsynced(&self) -> bool {
        !lock(&self.fresh).is_empty()
    }

    fn mark(&self, run: Range<u64>, state: Chunk) {
        let mut chunks = lock(&self.chunks);
        let range = index(run.start)..index(run.end);
        let part = chunks.get_mut(range).unwrap_or_default();
        if state == Chunk::Good {
            let more = part.iter().filter(|chunk| **chunk != Chunk::Good).count();
            self.good.fetch_add(more as u64, Ordering::Relaxed);
        }
        part.fill(state);
        drop(chunks);
        if let Some(presence) = self.presence.as_ref().filter(|_| state == Chunk::Good && !run.is_empty()) {
            run.for_each(|chunk| presence.put(chunk));
            presence.tell();
        }
        self.changed.notify_all();
    }

    fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> Error {
        Error::store(&self.held.path, what)
    }

    /// Keeps the bytes that came with the first answer, where they are a whole chunk.
    fn take_head(&self, head: &[u8]) -> Result<(), Error> {
        self.fetched.fetch_add(head.len() as u64, Ordering::Relaxed);
        let (_, len) = self.held.part(0);
        if head.len() as u64 >= len && self.held.table.get(0).is_none() {
            let first = head.get(..index(len)).unwrap_or_default();
            self.write(first, 0)?;
            self.there(0, crc32fast::hash(first))?;
            self.mark(0..1, Chunk::Good);
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<(), Error> {
        self.held.data.write_all_at(bytes, at).map_err(self.failed("the store file cannot be written"))
    }

    /// A chunk is in the file.
    fn there(&self, chunk: u64, sum: u32) -> Result<(), Error> {
        self.held.table.set(chunk, sum, false).map_err(self.failed("its table cannot be written"))?;
        let mut fresh = lock(&self.fresh);
        fresh.push((chunk, sum));
        let due = fresh.len() as u64 * self.held.meta.chunk >= SYNC_EVERY;
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
            fresh.iter().try_for_each(|(chunk, sum)| self.held.table.set(*chunk, *sum, true))?;
            self.held.table.sync()
        };
        write().map_err(self.failed("it cannot be synced"))
    }

    fn are_good(&self, run: &Range<u64>) -> bool {
        let chunks = lock(&self.chunks);
        let run = chunks.get(index(run.start)..index(run.end)).unwrap_or_default();
        run.iter().all(|chunk| *chunk == Chunk::Good)
    }

    /// Makes all chunks of a range good. Threads that need the same chunk wait for the first.
    fn ensure(&self, wanted: Range<u64>) -> Result<(), Error> {
        let most = (RUN / self.held.meta.chunk).max(1);
        loop {
            let mut chunks = lock(&self.chunks);
            let state = |chunks: &[Chunk], at| chunks.get(index(at)).copied().unwrap_or(Chunk::Good);
            let Some(first) = wanted.clone().find(|at| state(&chunks, *at) != Chunk::Good) else {
                return Ok(());
            };
            if state(&chunks, first) == Chunk::Busy {
                drop(self.changed.wait(chunks).unwrap_or_else(PoisonError::into_inner));
                continue;
            }
            let mut end = first + 1;
            while end < wanted.end && end - first < most && state(&chunks, end) == Chunk::Unknown {
                end += 1;
            }
            chunks.get_mut(index(first)..index(end)).unwrap_or_default().fill(Chunk::Busy);
            drop(chunks);
            self.fill(Busy { object: self, run: first..end })?;
        }
    }

    /// Compares the chunks of a run that are there with their checksums, and fetches the others.
    fn fill(&self, mut busy: Busy<'_>) -> Result<(), Error> {
        let mut buffer = Vec::new();
        while busy.run.start < busy.run.end {
            let chunk = busy.run.start;
            if let Some(sum) = self.held.table.get(chunk) {
                buffer.resize(128 << 10, 0);
                let (start, len) = self.held.part(chunk);
                let found = checksum(&self.held.data, start, len, &mut buffer);
                if found.map_err(self.failed("the store file cannot be read"))? == sum {
                    busy.good(chunk + 1);
                    continue;
                }
                let clear = self.held.table.clear(chunk).and_then(|()| digest::forget(&self.held));
                clear.map_err(self.failed("its table cannot be written"))?;
            }
            let missing = |at: &u64| self.held.table.get(*at).is_none();
            let end = (chunk + 1..busy.run.end).take_while(missing).last().map_or(chunk + 1, |last| last + 1);
            self.fetch(&mut busy, chunk..end)?;
        }
        self.check_whole()
    }

    /// Compares all bytes with the digest that names them, if this process has seen all of them. If they are
    /// others, none of them counts.
    fn check_whole(&self) -> Result<(), Error> {
        let count = self.held.meta.chunks();
        if self.good.load(Ordering::Relaxed) < count
            || digest::is_right(&self.held).map_err(self.failed("the store file cannot be read"))?
        {
            return Ok(());
        }
        self.good.store(0, Ordering::Relaxed);
        self.mark(0..count, Chunk::Unknown);
        lock(&self.fresh).clear();
        let clear = (0..count).try_for_each(|chunk| self.held.table.clear(chunk));
        clear.map_err(self.failed("its table cannot be written"))?;
        let why = "its bytes are not those of its digest".to_owned();
        Err(Error::Changed { url: shown(&self.held.meta.url), why })
    }

    fn fetch(&self, busy: &mut Busy<'_>, run: Range<u64>) -> Result<(), Error> {
        let (start, _) = self.held.part(run.start);
        let (last, len) = self.held.part(run.end - 1);
        let (mut at, mut chunk) = (start, run.start);
        let mut hash = crc32fast::Hasher::new();
        self.client.get(start..last + len, &self.known, &mut |mut bytes| {
            self.write(bytes, at)?;
            self.fetched.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            at += bytes.len() as u64;
            while !bytes.is_empty() {
                let (first, size) = self.held.part(chunk);
                // What was written before this call belongs to the checksum already.
                let begun = (at - bytes.len() as u64).saturating_sub(first);
                let take = bytes.len().min(index(size.saturating_sub(begun)));
                let (now, rest) = bytes.split_at(take);
                hash.update(now);
                bytes = rest;
                if begun + now.len() as u64 == size {
                    self.there(chunk, std::mem::take(&mut hash).finalize())?;
                    chunk += 1;
                    busy.good(chunk);
                }
            }
            Ok(())
        })
    }

    /// The chunks that hold a range of bytes.
    fn chunks_of(&self, range: &Range<u64>) -> Range<u64> {
        let end = range.end.min(self.held.meta.size);
        range.start.min(end) / self.held.meta.chunk..end.div_ceil(self.held.meta.chunk)
    }

    /// How far a read that begins at `start` is fetched ahead: twice as far each time that they
    /// go on where the last read ended.
    fn ahead(&self, start: u64, end: u64) -> u64 {
        let mut reader = lock(&self.reader);
        let goes_on = start == reader.0;
        reader.1 = if goes_on { (reader.1 * 2).clamp(self.held.meta.chunk, AHEAD) } else { 0 };
        reader.0 = end;
        // Two reads in a row are no sequence yet.
        if reader.1 > self.held.meta.chunk { reader.1 } else { 0 }
    }

    /// Makes all chunks of these ranges good, by several requests at a time.
    fn bring_all(&self, ranges: &[Range<u64>]) -> Result<(), Error> {
        self.bring_until(ranges, None)
    }

    /// The same, until it is to stop.
    fn bring_until(&self, ranges: &[Range<u64>], stop: Option<&AtomicBool>) -> Result<(), Error> {
        let runs = self.runs(ranges);
        runs.iter().for_each(|run| _ = self.wanted(run));
        self.bring_runs(&runs, stop)
    }

    fn bring_runs(&self, runs: &[Range<u64>], stop: Option<&AtomicBool>) -> Result<(), Error> {
        let stops = || stop.is_some_and(|stop| stop.load(Ordering::Relaxed));
        let len = |run: &Range<u64>| run.clone().map(|chunk| self.held.part(chunk).1).sum::<u64>();
        let total: u64 = runs.iter().map(len).sum();
        let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
        let failed = Mutex::new(None);
        let work = || {
            while !stops()
                && lock(&failed).is_none()
                && let Some(run) = runs.get(index(next.fetch_add(1, Ordering::Relaxed)))
            {
                if let Err(error) = self.ensure(run.clone()) {
                    lock(&failed).get_or_insert(error);
                    return;
                }
                let reached = done.fetch_add(len(run), Ordering::Relaxed) + len(run);
                if let Some(progress) = &self.progress {
                    progress(reached, total);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..LINES.min(runs.len()) {
                scope.spawn(work);
            }
            work();
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)?;
        self.sync()
    }

    /// The chunks of some ranges in pieces of one request each, without those that another range has, too.
    fn runs(&self, ranges: &[Range<u64>]) -> Vec<Range<u64>> {
        let most = (RUN / self.held.meta.chunk).max(1);
        let (mut runs, mut reached): (Vec<Range<u64>>, u64) = (Vec::new(), 0);
        for range in ranges {
            let mut chunks = self.chunks_of(range);
            chunks.start = chunks.start.max(reached);
            while chunks.start < chunks.end {
                match runs.last_mut().filter(|last| last.end == chunks.start && last.end - last.start < most)
                {
                    Some(last) => last.end = chunks.end.min(last.start + most),
                    None => runs.push(chunks.start..chunks.end.min(chunks.start + most)),
                }
                reached = runs.last().map_or(reached, |last| last.end);
                chunks.start = reached;
            }
        }
        runs
    }
}

impl ReadAt for Object {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).filter(|end| *end <= self.held.meta.size);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        if !buf.is_empty() {
            let ahead = self.ahead(offset, end);
            let mut chunks = self.chunks_of(&(offset..end));
            let missing = !self.are_good(&chunks);
            if missing && !self.wanted(&chunks) && ahead > 0 {
                // One request brings what is behind it, too.
                chunks.end = self.chunks_of(&(offset..end.saturating_add(ahead))).end;
            }
            self.ensure(chunks)?;
        }
        read(&self.held.data, buf, offset)
    }
}

/// A descriptor of a file that a process without rights to it can hold, and not read.
fn envelope(file: &File) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

fn read(file: &File, buf: &mut [u8], offset: u64) -> io::Result<()> {
    file.read_exact_at(buf, offset)
}

impl Filler for Object {
    fn name(&self) -> String {
        shown(&self.held.meta.url)
    }

    fn bring(&self, ranges: &[Range<u64>]) -> io::Result<()> {
        Ok(self.bring_all(ranges)?)
    }

    fn lend(&self) -> io::Result<Lent> {
        let (table, boot) = self.held.table.parts();
        let meta = &self.held.meta;
        let foreseen = trace::in_chunks(&self.foreseen, meta.chunk, meta.size);
        let order = Order {
            meta: self.held.meta.clone(),
            access: self.client.access(),
            boot,
            record: self.record,
            foreseen,
        };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("becket-order", flags)?);
        serde_json::to_writer(&file, &order)?;
        let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let chunks = lock(&self.chunks);
        let good = (0..).zip(chunks.iter()).filter(|(_, chunk)| **chunk == Chunk::Good);
        let good = good.map(|(chunk, _)| chunk).collect();
        let chunk = self.held.meta.chunk;
        Ok(Lent { chunk, table: envelope(table)?, order: envelope(&file)?, good })
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // Chunks that are not synced are fetched again after a power cut, and only then.
        let _ = self.sync();
    }
}

/// An index into memory; numbers of chunks always fit.
fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
