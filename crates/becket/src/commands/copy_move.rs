//! Moves the bytes of an image with several threads: what is compressed is decoded by all of them.
//! Never reads a hole, or what the image knows to be zeroes.

use super::bytes::{CHUNK, readers};
use becket_image::{
    Filler, Fillers, Image, Opened, Place, Reach, ReadAt, Source, encoded::end_of_block, zeroes,
};
use rustix::fs::SeekFrom;
use std::{
    fs::File,
    io,
    os::fd::{AsFd as _, OwnedFd},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// Bytes of a block that is compared with zeroes.
pub(super) const BLOCK: usize = 4096;
/// How many threads wait for a server, and for how many bytes each at most.
const FETCHERS: usize = 8;
const FETCHED: u64 = 16 << 20;

/// An image that is open.
pub(super) struct Origin {
    image: Image,
    parts: Vec<Part>,
    /// Bytes of it that are copied.
    pub(super) len: u64,
}

/// A part of an image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunk {
    /// How many come before it.
    pub(super) number: u64,
    pub(super) start: u64,
    pub(super) len: u64,
    /// Whether something is stored of it; else it is zeroes.
    pub(super) stored: bool,
}

/// What takes the bytes, from several threads.
pub(super) trait Taker: Sync {
    /// Takes what a chunk holds: `None` for zeroes.
    fn take(&self, chunk: Chunk, bytes: Option<&[u8]>) -> io::Result<()>;

    /// Takes bytes of a file of the host as they are, if it can do so without their being read here.
    fn copy(&self, _at: u64, _file: &OwnedFd, _offset: u64, _len: u64) -> io::Result<bool> {
        Ok(false)
    }

    /// How many threads make it faster, because each waits for an answer.
    fn threads(&self) -> usize {
        1
    }

    /// No chunk that is missing will come any more.
    fn stop(&self) {}
}

/// What failed, with the reason.
#[derive(Debug)]
pub(super) enum Failed {
    Read(io::Error),
    Write(io::Error),
    Stopped,
}

impl Origin {
    /// `fillers` bring the bytes of files that are not complete.
    pub(super) fn of(opened: &Opened, fillers: &Fillers) -> io::Result<Self> {
        let part = |source: &Source| {
            let filler = source.identity().and_then(|file| fillers.of(file));
            let file = source.file().map(|file| file.buffered.try_clone()).transpose()?;
            let reader = match &filler {
                Some(filler) => Arc::clone(filler) as Arc<dyn ReadAt>,
                None => source.reader()?,
            };
            Ok(Part { reader, file, filler })
        };
        let parts = opened.sources.iter().map(part).collect::<io::Result<Vec<Part>>>()?;
        let readers = parts.iter().map(|part| Arc::clone(&part.reader)).collect();
        let image = Image::assembled(opened.map.clone(), readers, opened.encoded.clone());
        let image = image.ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { image, parts, len: opened.map.len() })
    }

    /// Whether reading it waits for a server.
    fn is_far(&self) -> bool {
        self.is_fetched() || self.parts.iter().any(|part| part.reader.reach() == Reach::Far)
    }

    /// Whether bytes of it come into the store first.
    fn is_fetched(&self) -> bool {
        self.parts.iter().any(|part| part.filler.is_some())
    }

    /// How many bytes of the file on the host from `offset` on are stored, or else are none, up to `len`.
    fn stored(&self, source: u32, offset: u64, len: u64) -> (u64, bool) {
        let whole = (len, true);
        let part = usize::try_from(source).ok().and_then(|source| self.parts.get(source));
        let Some(part) = part else { return whole };
        // What is a hole in a file that is being filled has not come yet.
        let Some(file) = part.file.as_ref().filter(|_| part.filler.is_none()) else {
            return part.reader.stored(offset, len);
        };
        // Block devices, and file systems that know nothing of holes, have data everywhere.
        match rustix::fs::seek(file, SeekFrom::Data(offset)) {
            Ok(data) if data > offset => ((data - offset).min(len), false),
            Ok(_) => match rustix::fs::seek(file, SeekFrom::Hole(offset)) {
                Ok(hole) if hole > offset => ((hole - offset).min(len), true),
                _ => whole,
            },
            // Nothing but a hole up to the end, where it is not shorter than it was.
            Err(rustix::io::Errno::NXIO) => (len, !self.reaches(file, offset + len)),
            Err(_) => whole,
        }
    }

    fn reaches(&self, file: &OwnedFd, end: u64) -> bool {
        rustix::fs::fstat(file).is_ok_and(|stat| u64::try_from(stat.st_size).is_ok_and(|size| size >= end))
    }
}

/// A source, as all threads read it.
struct Part {
    reader: Arc<dyn ReadAt>,
    /// The file, where it is one: that knows of holes.
    file: Option<OwnedFd>,
    /// What brings the file's bytes.
    filler: Option<Arc<dyn Filler>>,
}

/// The chunks of an image, in order. All but the last begin and end at multiples of `align`.
struct Chunks<'a> {
    origin: &'a Origin,
    align: u64,
    at: u64,
    number: u64,
    /// The range that is being cut: its end, and whether it is stored.
    range: (u64, bool),
    /// From where on nothing was looked at.
    ahead: u64,
}

impl Chunks<'_> {
    /// The next range that is stored, or is not, as it is without alignment.
    fn piece(&mut self) -> Option<(u64, bool)> {
        let extent = self.origin.image.map().lookup(self.ahead).filter(|_| self.ahead < self.origin.len)?;
        let (len, stored) = match extent.place {
            Place::Zero => (extent.len, false),
            Place::Data { source, offset } => self.origin.stored(source, offset, extent.len),
            Place::Encoded { .. } => (extent.len, true),
        };
        self.ahead = (self.ahead + len).min(self.origin.len);
        Some((self.ahead, stored))
    }

    /// The end of the range from `at` on, and whether it is stored. From `at` to `ahead` there is less than a
    /// unit of zeroes, which shares its unit with what comes next.
    fn next_range(&mut self) -> Option<(u64, bool)> {
        let end = self.origin.len;
        self.ahead = self.ahead.max(self.at);
        while self.at < end {
            let (piece, stored) = self.piece().unwrap_or((end, false));
            let whole = if piece >= end { end } else { piece - piece % self.align };
            if stored {
                return Some((piece.next_multiple_of(self.align).min(end), true));
            }
            if whole > self.at {
                return Some((whole, false));
            }
        }
        None
    }
}

impl Iterator for Chunks<'_> {
    type Item = Chunk;

    fn next(&mut self) -> Option<Chunk> {
        if self.at >= self.range.0 {
            self.range = self.next_range()?;
        }
        let (end, stored) = self.range;
        let start = self.at;
        let mut to = end;
        let most = if self.origin.is_fetched() { FETCHED } else { CHUNK as u64 };
        if stored && end - start > most {
            to = start + most;
            let image = &self.origin.image;
            to = end_of_block(image.map(), image.encoded(), to - 1)
                .unwrap_or(to)
                .next_multiple_of(self.align)
                .min(end);
        }
        self.at = to;
        self.number += 1;
        Some(Chunk { number: self.number - 1, start, len: to - start, stored })
    }
}

/// What the threads share.
struct Shared<'a, T> {
    origin: &'a Origin,
    taker: &'a T,
    chunks: Mutex<Chunks<'a>>,
    done: AtomicU64,
    stop: AtomicBool,
    failed: Mutex<Option<Failed>>,
    running: Mutex<usize>,
    ended: Condvar,
}

/// Moves all bytes; `watch` is called now and then with how many were moved, and may stop it.
pub(super) fn run<T: Taker>(
    origin: &Origin,
    taker: &T,
    align: u64,
    watch: &mut dyn FnMut(u64) -> bool,
) -> Result<(), Failed> {
    let encoded =
        origin.image.map().extents().iter().any(|extent| matches!(extent.place, Place::Encoded { .. }));
    // One thread keeps a disk busy whose bytes are copied as they are. A server may be far away.
    let waits = if origin.is_far() { FETCHERS } else { 1 }.max(taker.threads());
    let count = if encoded { readers().max(waits) } else { waits };
    let chunks = Chunks { origin, align, at: 0, number: 0, range: (0, false), ahead: 0 };
    let shared = Shared {
        origin,
        taker,
        chunks: Mutex::new(chunks),
        done: AtomicU64::new(0),
        stop: AtomicBool::new(false),
        failed: Mutex::new(None),
        running: Mutex::new(count),
        ended: Condvar::new(),
    };
    thread::scope(|scope| {
        for _ in 0..count {
            scope.spawn(|| shared.thread());
        }
        let lock = || shared.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut running = lock();
        while *running > 0 {
            let waited = shared.ended.wait_timeout(running, Duration::from_millis(100));
            running = waited.unwrap_or_else(PoisonError::into_inner).0;
            if !watch(shared.done.load(Ordering::Relaxed)) {
                shared.fail(Failed::Stopped);
            }
        }
    });
    shared.failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// A thread that has not ended: it is counted, whether it returns or panics.
struct Running<'a, 'b, T: Taker>(&'a Shared<'b, T>);

impl<T: Taker> Drop for Running<'_, '_, T> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.end();
        }
        *self.0.running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.ended.notify_all();
    }
}

impl<T: Taker> Shared<'_, T> {
    fn thread(&self) {
        let _running = Running(self);
        if let Err(failed) = self.work() {
            self.fail(failed);
        }
    }

    fn fail(&self, failed: Failed) {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failed);
        self.end();
    }

    /// Has all threads end. What failed is recorded before: the others fail because of it.
    fn end(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.taker.stop();
    }

    fn work(&self) -> Result<(), Failed> {
        let mut buffer = Vec::new();
        while !self.stop.load(Ordering::Relaxed) {
            let next = self.chunks.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(chunk) = next else { return Ok(()) };
            self.one(chunk, &mut buffer)?;
            self.done.fetch_add(chunk.len, Ordering::Relaxed);
        }
        Ok(())
    }

    fn one(&self, chunk: Chunk, buffer: &mut Vec<u8>) -> Result<(), Failed> {
        if !chunk.stored {
            return self.taker.take(chunk, None).map_err(Failed::Write);
        }
        if self.copied(chunk)? {
            return Ok(());
        }
        let len = usize::try_from(chunk.len).unwrap_or(usize::MAX);
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        let bytes = buffer.get_mut(..len).unwrap_or_default();
        self.origin.image.read_at(bytes, chunk.start).map_err(Failed::Read)?;
        self.taker.take(chunk, Some(bytes)).map_err(Failed::Write)
    }

    /// Has a chunk copied that lies in a file as it is; whether that was possible.
    fn copied(&self, chunk: Chunk) -> Result<bool, Failed> {
        let Some(extent) = self.origin.image.map().lookup(chunk.start) else { return Ok(false) };
        let Place::Data { source, offset } = extent.place else { return Ok(false) };
        let part = usize::try_from(source).ok().and_then(|source| self.origin.parts.get(source));
        let Some(Part { file: Some(file), filler, .. }) = part.filter(|_| extent.len >= chunk.len) else {
            return Ok(false);
        };
        if let Some(filler) = filler
            && !filler.bring(offset..offset + chunk.len).map_err(Failed::Read)?
        {
            return Ok(false);
        }
        self.taker.copy(chunk.start, file, offset, chunk.len).map_err(Failed::Write)
    }
}

/// Parts of `bytes` that are not zeroes, in units of `block` bytes: first byte and bytes.
pub(super) fn without_zeroes(bytes: &[u8], block: usize) -> impl Iterator<Item = (usize, &[u8])> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let is_zero = |at: usize| {
            let rest = bytes.get(at..).unwrap_or_default();
            zeroes::is_all(rest.get(..block).unwrap_or(rest))
        };
        while at < bytes.len() && is_zero(at) {
            at += block;
        }
        let start = at.min(bytes.len());
        while at < bytes.len() && !is_zero(at) {
            at += block;
        }
        at = at.min(bytes.len());
        (start < at).then(|| (start, bytes.get(start..at).unwrap_or_default()))
    })
}

/// A stream, which takes chunks in their order.
pub(super) struct Stream {
    file: File,
    turn: Mutex<Turn>,
    changed: Condvar,
}

struct Turn {
    number: u64,
    broken: bool,
}

impl Stream {
    pub(super) fn new(file: File) -> Self {
        Self { file, turn: Mutex::new(Turn { number: 0, broken: false }), changed: Condvar::new() }
    }

    fn write(&self, chunk: Chunk, bytes: Option<&[u8]>) -> io::Result<()> {
        use std::io::Write as _;
        let mut file = &self.file;
        let Some(bytes) = bytes else {
            return zeroes::write(&mut file, chunk.len);
        };
        file.write_all(bytes)
    }
}

impl Taker for Stream {
    fn take(&self, chunk: Chunk, bytes: Option<&[u8]>) -> io::Result<()> {
        let lock = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |turn: &mut Turn| turn.number != chunk.number && !turn.broken;
        let mut turn = self.changed.wait_while(lock, waits).unwrap_or_else(PoisonError::into_inner);
        if turn.broken {
            // The failure that broke it was reported first.
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        // After a failure no turn comes: the others wait until it is recorded, and this is stopped.
        self.write(chunk, bytes)?;
        turn.number += 1;
        self.changed.notify_all();
        Ok(())
    }

    fn stop(&self) {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner).broken = true;
        self.changed.notify_all();
    }
}

/// A copy within the kernel, which may share the bytes on the disk; `false` if it cannot be had.
pub(super) fn copy_range(from: &OwnedFd, offset: u64, to: &File, at: u64, len: u64) -> io::Result<bool> {
    let (mut from_at, mut to_at, end) = (offset, at, at + len);
    while to_at < end {
        let left = usize::try_from(end - to_at).unwrap_or(usize::MAX);
        match rustix::fs::copy_file_range(from, Some(&mut from_at), to.as_fd(), Some(&mut to_at), left) {
            // The file became shorter, or is one that only reading shows.
            Ok(0) => return Ok(false),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) if errno == rustix::io::Errno::NOSPC || errno == rustix::io::Errno::DQUOT => {
                return Err(errno.into());
            }
            Err(_) => return Ok(false),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use becket_image::{Extent, Map};
    use std::{panic, sync::mpsc};

    /// What it returns, unless it does not within 10 seconds.
    fn in_time<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (send, receive) = mpsc::channel();
        thread::spawn(move || send.send(run()));
        receive.recv_timeout(Duration::from_secs(10)).ok()
    }

    fn chunk(number: u64) -> Chunk {
        Chunk { number, start: number * 4096, len: 4096, stored: false }
    }

    #[test]
    fn who_waits_for_a_stream_is_not_the_first_to_fail() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let stream = Arc::new(Stream::new(full));
        let (send, ended) = mpsc::channel();
        let waiting = Arc::clone(&stream);
        thread::spawn(move || send.send(waiting.take(chunk(1), None)));
        let failed = stream.take(chunk(0), None).unwrap_err();
        assert_eq!(failed.kind(), io::ErrorKind::StorageFull);
        assert!(ended.recv_timeout(Duration::from_millis(100)).is_err(), "the failure is not recorded yet");
        stream.stop();
        ended.recv_timeout(Duration::from_secs(10)).unwrap().unwrap_err();
    }

    struct Panics;

    impl Taker for Panics {
        fn take(&self, _chunk: Chunk, _bytes: Option<&[u8]>) -> io::Result<()> {
            panic!("as the test wants it");
        }
    }

    #[test]
    fn a_thread_that_panics_is_not_waited_for() {
        let extent = Extent { start: 0, len: 4096, place: Place::Zero };
        let map = Map::from_extents(vec![extent]).unwrap();
        let image = Image::assembled(map, Vec::new(), Vec::new()).unwrap();
        let origin = Origin { image, parts: Vec::new(), len: 4096 };
        let run = move || {
            panic::catch_unwind(panic::AssertUnwindSafe(|| run(&origin, &Panics, 1, &mut |_| true))).is_err()
        };
        assert_eq!(in_time(run), Some(true));
    }
}
