//! How a process reads an object that it fills itself: what is missing is brought first, and what will be
//! read next with it. It never fetches itself: see [`crate::object`].

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use becket_image::filled::{Lent, Where};
use becket_image::{Filler, Reach, ReadAt};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

use crate::Error;
use crate::chunks::Chunk;
use crate::object::{Object, RUN, Supply, UNIT, lock};
use crate::order::{Order, PackedAt, Unpack};
use crate::place::{short_digest, shown_source};
use crate::steps::Steps;
use crate::table::index;
use crate::trace;

/// How far a sequential reader is fetched ahead at most, in bytes.
const AHEAD: u64 = 1 << 20;
/// How many requests are in flight where many bytes are needed.
const LINES: usize = 4;

impl Object {
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
        reader.1 = if goes_on { (reader.1 * 2).clamp(UNIT, AHEAD) } else { 0 };
        reader.0 = end;
        // Two reads in a row are no sequence yet.
        if reader.1 > UNIT { reader.1 } else { 0 }
    }

    /// Reads bytes whose chunks were brought. Chunks evicted from memory meanwhile are brought again.
    fn read_brought(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while let Some(rest) = buf.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let (at, left) = (offset + done as u64, rest.len() as u64);
            let read = self.presence.read_start(&self.held.data, rest, at)?;
            if read == 0 {
                let chunks = self.chunks_of(&(at..at + left));
                self.forget_gone(&chunks);
                self.ensure(chunks)?;
            }
            done += read;
        }
        Ok(())
    }

    /// What another process needs to go on with it, and the files that it is decoded from.
    pub(crate) fn order(&self) -> io::Result<(Order, Vec<OwnedFd>)> {
        let meta = &self.held.meta;
        let foreseen = trace::in_chunks(&self.foreseen, meta.chunk, meta.size);
        let (access, unpack, packed, asked) = match &self.supply {
            Supply::Server(client) => {
                let asked = (client.rights(), self.record, self.memory_only, self.limit.asked(), &foreseen);
                (Some(client.access()), None, Vec::new(), serde_json::to_string(&asked)?)
            }
            Supply::Stream(Steps { stream, .. }) => {
                let (from, packed) = stream.packed.lend()?;
                let (packing, called) = (stream.packing, stream.called.clone());
                let rights = if let PackedAt::Object(order) = &from { &order.sharing } else { "" };
                let asked = serde_json::to_string(&(rights, stream.limit))?;
                let unpack = Unpack { packing, called, len: stream.len, limit: stream.limit, from };
                (None, Some(unpack), packed, asked)
            }
        };
        let order = Order {
            meta: meta.clone(),
            access,
            sharing: short_digest(&asked),
            unpack,
            boot: self.held.table.parts().1,
            record: self.record,
            memory_only: self.memory_only,
            limit: self.limit.of_one(meta.size, meta.stored(&self.held.table)),
            foreseen,
        };
        Ok((order, packed))
    }

    /// The files of an object that another process brings: its bytes, and its table.
    pub(crate) fn envelopes(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(vec![envelope(&self.held.data)?, envelope(self.held.table.parts().0)?])
    }

    /// Reads a part of a request that is brought by one request to the server.
    fn read_part(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset + buf.len() as u64;
        let ahead = self.ahead(offset, end);
        let mut chunks = self.chunks_of(&(offset..end));
        let missing = !self.chunks.are_good(&chunks);
        if missing && !self.wanted(&chunks) && ahead > 0 {
            // One request brings what is behind it, too.
            chunks.end = self.chunks_of(&(offset..end.saturating_add(ahead))).end;
        }
        self.ensure(chunks)?;
        self.read_brought(buf, offset)
    }

    /// Notes which chunks were evicted by another process, to which the table was lent.
    fn forget_gone(&self, chunks: &Range<u64>) {
        let mut known = self.chunks.lock();
        for chunk in chunks.clone() {
            if let Some(state) = known.get_mut(index(chunk)).filter(|state| **state == Chunk::Good)
                && self.presence.place(chunk).is_none()
            {
                *state = Chunk::Unknown;
            }
        }
    }

    /// Makes all chunks of these ranges good, by several requests at a time.
    pub(crate) fn bring_all(&self, ranges: &[Range<u64>]) -> Result<(), Error> {
        let runs = self.runs(ranges);
        runs.iter().for_each(|run| _ = self.wanted(run));
        self.bring_runs(&runs)
    }

    pub(crate) fn bring_runs(&self, runs: &[Range<u64>]) -> Result<(), Error> {
        let len = |run: &Range<u64>| run.clone().map(|chunk| self.held.part(chunk).1).sum::<u64>();
        let total: u64 = runs.iter().map(len).sum();
        let (next, done) = (AtomicU64::new(0), AtomicU64::new(0));
        let failed = Mutex::new(None);
        let work = || {
            while lock(&failed).is_none()
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
    fn reach(&self) -> Reach {
        if self.steps().is_some() { Reach::InOrder } else { Reach::Far }
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).filter(|end| *end <= self.held.meta.size);
        end.ok_or(io::ErrorKind::UnexpectedEof)?;
        // The chunks of a longer part may not all fit into memory at once.
        let parts = (offset..).step_by(index(RUN)).zip(buf.chunks_mut(index(RUN)));
        parts.into_iter().try_for_each(|(at, part)| self.read_part(part, at))
    }
}

/// A descriptor of a file that a process without rights to it can hold, and not read.
fn envelope(file: &File) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

impl Filler for Object {
    fn name(&self) -> String {
        shown_source(&self.held.meta.url)
    }

    fn bring(&self, range: Range<u64>) -> io::Result<bool> {
        let chunks = self.chunks_of(&range);
        self.wanted(&chunks);
        self.ensure(chunks.clone())?;
        Ok(chunks.into_iter().all(|chunk| self.presence.place(chunk) == Some(Where::File)))
    }

    fn lend(&self) -> io::Result<Lent> {
        let (order, packed) = self.order()?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("becket-order", flags)?);
        serde_json::to_writer(&file, &order)?;
        let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        self.memory.lend();
        let (presence, (table, _)) = (self.presence.again()?, self.held.table.parts());
        Ok(Lent { presence, table: envelope(table)?, order: envelope(&file)?, packed })
    }
}
