//! A connection: requests of NBD's transmission phase in, librbd's answers out.
//! It holds no more bytes in flight than [`MOST`], and answers each request once.
//!
//! A thread reads requests and hands them to librbd. The thread of librbd that finishes one sends its reply,
//! with those that others have left meanwhile.

use std::collections::VecDeque;
use std::io::{self, IoSlice, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use becket_image::link::Agreed;
use becket_image::link::helper::CMD_NAME;
use becket_image::link::states::State;
use becket_uapi::nbd::{self, Reply, Request};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

use crate::cluster::Made;
use crate::library::{Errno, Image, Work};

/// The longest payload of a request, in bytes.
pub(crate) const LARGEST: u32 = 4 << 20;
/// The most bytes of requests that were taken and not answered.
const MOST: u64 = 64 << 20;
/// What a request without a payload counts as.
const LEAST: u64 = 4 << 10;
/// Bytes that are read at once.
const STAGING: usize = 128 << 10;
/// The most replies of one message.
const BATCH: usize = 32;
/// The number of the context of what is allocated.
pub(crate) const ALLOCATION: u32 = 1;
/// How long the end of an image may take.
pub(crate) const ENDING: Duration = Duration::from_secs(5);
/// The longest range that is looked at for one.
const LONGEST: u64 = u32::MAX as u64;
/// The most ranges of one answer to what is allocated.
const RANGES: usize = 4096;

/// Requests that librbd was given, and those that it has finished.
#[derive(Debug, Default)]
pub(crate) struct Count {
    begun: AtomicU64,
    finished: AtomicU64,
}

impl Count {
    /// How many are finished; `None` when all are.
    pub(crate) fn finished(&self) -> Option<u64> {
        let finished = self.finished.load(Ordering::Relaxed);
        (self.begun.load(Ordering::Relaxed) != finished).then_some(finished)
    }
}

/// What is counted over all connections.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Reads.
    pub(crate) reads: Count,
    /// Everything else: a cluster that is full still answers reads.
    pub(crate) writes: Count,
    /// The cluster has told that it accepts nothing of this client any more.
    pub(crate) fenced: AtomicBool,
    /// How long the image is now, in bytes.
    pub(crate) size: AtomicU64,
}

impl Progress {
    /// Nothing yet, of an image of so many bytes.
    pub(crate) fn of(size: u64) -> Arc<Progress> {
        Arc::new(Progress { size: size.into(), ..Progress::default() })
    }

    fn of_kind(&self, reads: bool) -> &Count {
        if reads { &self.reads } else { &self.writes }
    }
}

/// What each connection offers.
pub(crate) fn agreed(size: u64, read_only: bool, image: Option<u64>) -> Agreed {
    let rights = match read_only {
        true => nbd::READ_ONLY,
        false => nbd::SEND_FLUSH | nbd::SEND_FUA | nbd::SEND_TRIM | nbd::SEND_WRITE_ZEROES,
    };
    Agreed {
        size,
        flags: nbd::HAS_FLAGS | nbd::CAN_MULTI_CONN | rights,
        structured: true,
        allocation: Some(ALLOCATION),
        smallest: 1,
        preferred: 4096,
        largest: LARGEST,
        image,
    }
}

struct Answer {
    head: Vec<u8>,
    data: Vec<u8>,
    /// What it counts of [`MOST`].
    weight: u64,
}

#[derive(Default)]
struct Out {
    answers: VecDeque<Answer>,
    /// A thread sends.
    sending: bool,
    /// Nobody hears any more.
    broken: bool,
    /// Bytes in flight, and requests.
    weight: u64,
    requests: u64,
    /// No further request comes.
    ended: bool,
}

/// One connection.
pub(crate) struct Connection {
    stream: UnixStream,
    image: Arc<Image>,
    progress: Arc<Progress>,
    out: Mutex<Out>,
    changed: Condvar,
    read_only: bool,
    /// The image was made for this connection, which gives it its name.
    made: Option<Arc<Made>>,
}

impl Connection {
    /// Serves a socket, by a thread of its own.
    pub(crate) fn start(
        socket: OwnedFd,
        image: &Arc<Image>,
        progress: &Arc<Progress>,
        read_only: bool,
        made: Option<Arc<Made>>,
    ) -> io::Result<Arc<Connection>> {
        let (out, changed) = Default::default();
        let (image, progress) = (Arc::clone(image), Arc::clone(progress));
        let stream = UnixStream::from(socket);
        let connection = Arc::new(Connection { stream, image, progress, out, changed, read_only, made });
        let theirs = Arc::clone(&connection);
        std::thread::Builder::new().name("becket-conn".to_owned()).stack_size(256 << 10).spawn(
            move || {
                theirs.read();
                theirs.out().ended = true;
                theirs.changed.notify_all();
            },
        )?;
        Ok(connection)
    }

    fn out(&self) -> MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It takes no more requests.
    pub(crate) fn end(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Read);
    }

    /// Whether the other side has ended it, or it was ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.out().ended
    }

    /// Whether all that came over it is finished.
    pub(crate) fn is_done(&self) -> bool {
        let out = self.out();
        out.ended && out.requests == 0
    }

    /// Waits until all is finished.
    pub(crate) fn join(&self) {
        let out = self.out();
        let _out = self
            .changed
            .wait_while(out, |out| !out.ended || out.requests > 0)
            .unwrap_or_else(PoisonError::into_inner);
    }

    /// Reads requests until there are no more.
    fn read(self: &Arc<Connection>) {
        let mut staged = Staged { stream: &self.stream, bytes: vec![0; STAGING], start: 0, end: 0 };
        let mut head = [0; Request::SIZE];
        while staged.fill(&mut head).is_ok() {
            let Some(request) = Request::read(&head, false) else { return };
            let mut payload = Vec::new();
            if request.command == nbd::CMD_WRITE {
                if request.len > u64::from(LARGEST) {
                    return;
                }
                payload = vec![0; request.len as usize];
                if staged.fill(&mut payload).is_err() {
                    return;
                }
            }
            if request.command == nbd::CMD_DISC {
                return;
            }
            self.take(&request, payload);
        }
    }

    fn take(self: &Arc<Connection>, request: &Request, payload: Vec<u8>) {
        let Request { command, cookie, offset, len, flags } = *request;
        let bytes = if matches!(command, nbd::CMD_READ | nbd::CMD_WRITE) { len } else { 0 };
        let weight = bytes.max(LEAST);
        {
            let full = |out: &mut Out| out.requests > 0 && out.weight + weight > MOST && !out.broken;
            let mut out = self.changed.wait_while(self.out(), full).unwrap_or_else(PoisonError::into_inner);
            out.weight += weight;
            out.requests += 1;
        }
        let size = self.progress.size.load(Ordering::Relaxed);
        let inside =
            command == nbd::CMD_FLUSH || offset.checked_add(len).is_some_and(|end| end <= size && len > 0);
        if let (CMD_NAME, Some(made)) = (command, &self.made) {
            let errno = made.name().err().unwrap_or(0);
            return self.answer(simple(cookie, errno, Vec::new(), weight));
        }
        let writes = matches!(command, nbd::CMD_WRITE | nbd::CMD_TRIM | nbd::CMD_WRITE_ZEROES);
        let refused = |errno: Errno| self.answer(simple(cookie, errno, Vec::new(), weight));
        if writes && self.read_only {
            return refused(libc::EPERM);
        }
        if !inside {
            return refused(if writes { libc::ENOSPC } else { libc::EINVAL });
        }
        let work = match command {
            nbd::CMD_READ if len <= u64::from(LARGEST) => Work::Read(vec![0; len as usize]),
            nbd::CMD_WRITE => Work::Write(payload),
            nbd::CMD_TRIM => Work::Discard,
            nbd::CMD_WRITE_ZEROES => Work::Zero { allocated: flags & nbd::CMD_FLAG_NO_HOLE != 0 },
            nbd::CMD_FLUSH => Work::Flush,
            nbd::CMD_BLOCK_STATUS => return self.status(cookie, offset, len, weight),
            _ => return refused(libc::EINVAL),
        };
        let reads = command == nbd::CMD_READ;
        self.progress.of_kind(reads).begun.fetch_add(1, Ordering::Relaxed);
        let own = Arc::clone(self);
        let finish = move |result: isize, data: Vec<u8>| {
            own.progress.of_kind(reads).finished.fetch_add(1, Ordering::Relaxed);
            let errno = own.judge(result, data.len(), reads);
            let data = if reads && errno == 0 { data } else { Vec::new() };
            own.answer(simple(cookie, errno, data, weight));
        };
        self.image.submit(work, offset, len, Box::new(finish));
    }

    /// The error of a result; 0 where there is none.
    fn judge(&self, result: isize, len: usize, reads: bool) -> Errno {
        let errno = i32::try_from(-result.min(0)).unwrap_or(libc::EIO);
        match errno {
            // It is read short behind the end of an image that has shrunk.
            0 if reads && result.unsigned_abs() < len => libc::EIO,
            0 => 0,
            // The cluster accepts nothing of this client, or another one has the lock.
            libc::ESHUTDOWN | libc::EROFS => {
                self.progress.fenced.store(true, Ordering::Release);
                libc::EIO
            }
            libc::ENOSPC | libc::EDQUOT => libc::ENOSPC,
            libc::ENOMEM => libc::ENOMEM,
            _ => libc::EIO,
        }
    }

    /// Says what is allocated. librbd has no way to ask that without waiting, and only clients that wait ask.
    fn status(&self, cookie: u64, offset: u64, len: u64, weight: u64) {
        let Some(states) = states(&self.image, offset + len, offset, len) else {
            return self.answer(simple(cookie, libc::EIO, Vec::new(), weight));
        };
        let words = states.into_iter().flat_map(|(len, state)| [len, state]);
        let payload: Vec<u8> = [ALLOCATION].into_iter().chain(words).flat_map(u32::to_be_bytes).collect();
        let mut head = vec![0; Reply::CHUNK_SIZE];
        let reply = Reply::Chunk {
            flags: nbd::CHUNK_DONE,
            kind: nbd::CHUNK_BLOCK_STATUS,
            cookie,
            offset: 0,
            len: payload.len() as u64,
        };
        let size = reply.write(&mut head, false).unwrap_or(0);
        head.truncate(size);
        self.answer(Answer { head, data: payload, weight });
    }

    /// Sends a reply, or leaves it to the thread that sends already.
    fn answer(&self, answer: Answer) {
        let mut out = self.out();
        out.answers.push_back(answer);
        if out.sending {
            return;
        }
        out.sending = true;
        while !out.answers.is_empty() {
            let count = out.answers.len().min(BATCH);
            let batch: Vec<Answer> = out.answers.drain(..count).collect();
            let broken = out.broken;
            drop(out);
            let sent = !broken && send_all(&self.stream, &batch).is_ok();
            out = self.out();
            out.broken |= !sent;
            out.requests -= batch.len() as u64;
            out.weight -= batch.iter().map(|answer| answer.weight).sum::<u64>();
            self.changed.notify_all();
        }
        out.sending = false;
    }
}

/// What an image of so many bytes holds of a range, or of its beginning.
pub(crate) fn states(image: &Image, size: u64, offset: u64, len: u64) -> Option<Vec<State>> {
    let len = len.min(size.checked_sub(offset)?).min(LONGEST);
    let stored = image.stored(offset, len).ok()?;
    // Behind the last range that there is room for, anything may be stored.
    let rest = if stored.len() > RANGES { 0 } else { nbd::STATE_HOLE | nbd::STATE_ZERO };
    let mut states = Vec::new();
    let mut add = |len: u64, state: u32| {
        if len > 0 {
            states.push((len as u32, state));
        }
    };
    let (mut at, end) = (offset, offset + len);
    for (from, len) in stored.into_iter().take(RANGES) {
        let (from, to) = (from.clamp(at, end), (from + len).clamp(at, end));
        add(from - at, nbd::STATE_HOLE | nbd::STATE_ZERO);
        add(to - from, 0);
        at = to;
    }
    add(end - at, rest);
    Some(states)
}

/// Closes an image that others may still hold for a moment.
pub(crate) fn close(mut image: Arc<Image>) {
    let until = Instant::now() + ENDING;
    while let Err(still) = Arc::try_unwrap(image) {
        if Instant::now() >= until {
            return;
        }
        image = still;
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn simple(cookie: u64, errno: Errno, data: Vec<u8>, weight: u64) -> Answer {
    let mut head = vec![0; Reply::CHUNK_SIZE];
    let reply = Reply::Simple { error: errno.unsigned_abs(), cookie };
    let size = reply.write(&mut head, false).unwrap_or(0);
    head.truncate(size);
    Answer { head, data, weight }
}

fn send_all(stream: &UnixStream, answers: &[Answer]) -> io::Result<()> {
    let parts = answers.iter().flat_map(|answer| [&answer.head, &answer.data]);
    let mut parts: Vec<IoSlice<'_>> =
        parts.filter(|part| !part.is_empty()).map(|part| IoSlice::new(part)).collect();
    let mut rest = parts.as_mut_slice();
    while !rest.is_empty() {
        let mut none = SendAncillaryBuffer::default();
        let done = rustix::io::retry_on_intr(|| sendmsg(stream, rest, &mut none, SendFlags::NOSIGNAL))?;
        IoSlice::advance_slices(&mut rest, done);
    }
    Ok(())
}

/// Reads small parts of a stream by few calls.
struct Staged<'a> {
    stream: &'a UnixStream,
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Staged<'_> {
    fn fill(&mut self, buf: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < buf.len() {
            let ready = self.bytes.get(self.start..self.end).unwrap_or_default();
            let rest = buf.get_mut(filled..).unwrap_or_default();
            if !ready.is_empty() {
                let count = ready.len().min(rest.len());
                let (from, to) = (ready.get(..count), rest.get_mut(..count));
                if let (Some(from), Some(to)) = (from, to) {
                    to.copy_from_slice(from);
                }
                self.start += count;
                filled += count;
                continue;
            }
            // What is long goes to its place at once.
            let got = if rest.len() >= self.bytes.len() {
                let got = (&mut self.stream).read(rest);
                filled += *got.as_ref().unwrap_or(&0);
                got
            } else {
                let got = (&mut self.stream).read(&mut self.bytes);
                (self.start, self.end) = (0, *got.as_ref().unwrap_or(&0));
                got
            };
            match got {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}
