//! How a process that can connect to nothing gets connections: it asks for one over a socket, and another
//! process answers with a connected socket.
//! It says neither where the connection leads nor reads from it.
//!
//! All who serve an image hold both ends of the channel, so it outlives each of the two processes. Who asks
//! keeps the request and asks again and again until it is answered: the process that has taken it may be
//! dead. An answer names its request. One that came too late, or that a dead process had asked for, is
//! nobody's.

mod maker;

use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

pub use maker::{Inherited, Legacy, begin, bequeath, give, give_up, next};

/// A request for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Which process asks: see [`own_session`].
    pub session: u64,
    /// Counts the requests of that process. becket 0.1.0 does not count them; its answers name none, and it
    /// asks once.
    pub number: Option<u64>,
    /// Nothing was written in this session yet, so the answer must say what became of earlier ones' bytes.
    pub first: bool,
}

/// What a process says that gets connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    /// It asks for one.
    Asks(Request),
    /// Whatever this session may have lost with connections that broke has been reported to its user.
    Reported(u64),
    /// A connection of this session, by its socket's inode, is not used any more.
    Left(u64, u64),
    /// It has questions about what the image holds, over the socket that comes with this: see
    /// [`states`](super::states).
    AsksStatus,
}

/// Requests of this process without an answer, each with the inode of the channel that it went over. Each
/// thread that waits has one of them; it takes the answer to any.
static OPEN: Mutex<Vec<(u64, Request)>> = Mutex::new(Vec::new());

fn open() -> MutexGuard<'static, Vec<(u64, Request)>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The session of this process: another number in each.
pub fn own_session() -> u64 {
    static OWN: OnceLock<u64> = OnceLock::new();
    *OWN.get_or_init(|| RandomState::new().hash_one(std::process::id()))
}

/// What became of the bytes that earlier sessions have written and not flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Earlier {
    /// There was none.
    None,
    /// The far side has them: a flush over the new connection covers them.
    Kept,
    /// They may be lost.
    Unknown,
}

/// A connection.
#[derive(Debug)]
pub struct Given {
    /// Connected and negotiated; nothing that was asked over it is unanswered.
    pub socket: OwnedFd,
    /// See [`Earlier`].
    pub earlier: Earlier,
    /// How long the user lets the server be away before requests fail; in whole seconds.
    pub patience: Option<Duration>,
}

/// Both ends: that of who asks, and that of who answers.
///
/// # Errors
/// The system has no more descriptors.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Asks for a connection and waits for it. `first` is [`Request::first`]. `stop` ends the waiting once it can
/// be read.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`]: the other process has given up. [`io::ErrorKind::Interrupted`]: it was to
/// stop. Or the channel is broken.
pub fn ask(channel: impl AsFd, first: bool, stop: Option<BorrowedFd<'_>>) -> io::Result<Given> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let channel = channel.as_fd();
    let inode = rustix::fs::fstat(channel)?.st_ino;
    let request =
        Request { session: own_session(), number: Some(NUMBER.fetch_add(1, Ordering::Relaxed)), first };
    open().push((inode, request));
    let heard =
        Said::Asks(request).send(channel, SendFlags::empty()).and_then(|()| wait(channel, inode, stop));
    heard.unwrap_or_else(|error| {
        forget(inode, request);
        Err(error)
    })
}

/// Says [`Said::Reported`] of this process.
///
/// # Errors
/// The channel is broken, or full: who is to read it has more than enough to read.
pub fn report(channel: impl AsFd) -> io::Result<()> {
    Said::Reported(own_session()).send(channel.as_fd(), SendFlags::DONTWAIT)
}

/// Says [`Said::Left`] of a connection of this process.
///
/// # Errors
/// As of [`report`].
pub fn left(channel: impl AsFd, socket: BorrowedFd<'_>) -> io::Result<()> {
    let inode = rustix::fs::fstat(socket)?.st_ino;
    Said::Left(own_session(), inode).send(channel.as_fd(), SendFlags::DONTWAIT)
}

/// Says [`Said::AsksStatus`], and sends the other end of the socket over which it will ask. A process that
/// does not know of questions closes it.
///
/// # Errors
/// As of [`report`].
pub fn ask_status(channel: impl AsFd, socket: BorrowedFd<'_>) -> io::Result<()> {
    send(channel, &Said::AsksStatus.encoded(), &[socket], SendFlags::DONTWAIT)
}

/// One thread less waits.
fn forget(inode: u64, request: Request) {
    let mut open = open();
    // Another thread may have taken its answer, and has left its own request.
    let own = open.iter().position(|known| *known == (inode, request));
    if let Some(at) = own.or_else(|| open.iter().position(|(channel, _)| *channel == inode)) {
        open.remove(at);
    }
}

/// Waits for the answer to a request of this process; the error is that of the channel or of the waiting.
fn wait(channel: BorrowedFd<'_>, inode: u64, stop: Option<BorrowedFd<'_>>) -> io::Result<io::Result<Given>> {
    let mut fds = vec![PollFd::new(&channel, PollFlags::IN)];
    fds.extend(stop.as_ref().map(|stop| PollFd::new(stop, PollFlags::IN)));
    loop {
        if rustix::io::retry_on_intr(|| poll(&mut fds, Some(&AGAIN)))? == 0 {
            let left: Vec<Request> = {
                let open = open();
                open.iter().filter(|(known, _)| *known == inode).map(|(_, request)| *request).collect()
            };
            for request in left {
                match Said::Asks(request).send(channel, SendFlags::DONTWAIT) {
                    // Who is to read it has more than enough to read.
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    other => other?,
                }
            }
            continue;
        }
        if fds.get(1).is_some_and(|stop| !stop.revents().is_empty()) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        match received(channel) {
            Ok((session, number, answer)) => {
                let mut open = open();
                let asked = |(known, request): &(u64, Request)| {
                    *known == inode && (request.session, request.number) == (session, Some(number))
                };
                if let Some(at) = open.iter().position(asked) {
                    open.remove(at);
                    return Ok(answer);
                }
            }
            // Another thread of this process was quicker.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

/// The session and the number of a request, and the answer.
type Answer = (u64, u64, io::Result<Given>);

fn received(channel: BorrowedFd<'_>) -> io::Result<Answer> {
    let mut bytes = [0; ANSWER + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = recvmsg(channel, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags)?;
    let mut socket = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            socket = fds.into_iter().next();
        }
    }
    let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, what);
    let nonsense = || invalid("what makes connections talks nonsense");
    let bytes = bytes.get(..got.bytes).unwrap_or_default();
    let (Some((kind, rest)), ANSWER) = (bytes.split_first_chunk::<2>(), bytes.len()) else {
        return Err(nonsense());
    };
    let number =
        |at| rest.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |n| u64::from_le_bytes(*n));
    let seconds = rest.last_chunk().map_or(0, |seconds| u32::from_le_bytes(*seconds));
    let given = |earlier| {
        let socket = socket.ok_or_else(|| invalid("no connection came along"))?;
        let patience = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
        Ok(Given { socket, earlier, patience })
    };
    let answer = match kind {
        [b'c', 0] => given(Earlier::None),
        [b'c', 1] => given(Earlier::Kept),
        [b'c', 2] => given(Earlier::Unknown),
        [b'x', _] => Err(io::Error::new(io::ErrorKind::TimedOut, "the server is away for too long")),
        _ => return Err(nonsense()),
    };
    Ok((number(0), number(8), answer))
}

/// Length of an answer in bytes; those to becket 0.1.0 end behind the first two.
const ANSWER: usize = 22;
/// How long a request is not answered until it is asked again.
const AGAIN: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Sends a message with descriptors.
fn send(channel: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(Legacy::MOST))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(channel, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL | flags)?;
    Ok(())
}

/// Leaves a connection for the first maker of connections: nothing that was asked over it is unanswered, and
/// simple replies were agreed on. `channel` is the end of who asks.
///
/// # Errors
/// The channel is full or broken.
pub(super) fn leave(channel: impl AsFd, socket: BorrowedFd<'_>) -> io::Result<()> {
    send(channel, b"........hu", &[socket], SendFlags::DONTWAIT)
}

impl Said {
    /// By sendmsg, which a worker may call.
    fn send(self, channel: BorrowedFd<'_>, flags: SendFlags) -> io::Result<()> {
        send(channel, &self.encoded(), &[], flags)
    }

    fn encoded(self) -> [u8; 17] {
        let (request, last) = match self {
            Said::Asks(request) => (request, u8::from(request.first)),
            Said::Reported(session) => (Request { session, number: None, first: false }, REPORTED),
            Said::Left(session, inode) => (Request { session, number: Some(inode), first: false }, LEFT),
            Said::AsksStatus => (Request { session: own_session(), number: None, first: false }, ASKS_STATUS),
        };
        let mut bytes = [last; 17];
        bytes.iter_mut().zip(request.name()).for_each(|(place, byte)| *place = byte);
        bytes
    }

    fn decoded(bytes: &[u8]) -> Option<Said> {
        let (session, rest) = bytes.split_first_chunk()?;
        let session = u64::from_le_bytes(*session);
        let (number, last) = match rest {
            [last] => (None, last),
            rest => {
                let (number, [last]) = rest.split_first_chunk()? else { return None };
                (Some(u64::from_le_bytes(*number)), last)
            }
        };
        match *last {
            first @ (0 | 1) => Some(Said::Asks(Request { session, number, first: first == 1 })),
            REPORTED => Some(Said::Reported(session)),
            LEFT => Some(Said::Left(session, number?)),
            ASKS_STATUS => Some(Said::AsksStatus),
            _ => None,
        }
    }
}

/// The last byte of a message that reports.
const REPORTED: u8 = 2;
/// That of one that says what is not used any more.
const LEFT: u8 = 3;
/// That of one that has questions.
const ASKS_STATUS: u8 = 4;

impl Request {
    /// Session and number.
    fn name(self) -> impl Iterator<Item = u8> {
        self.session.to_le_bytes().into_iter().chain(self.number.unwrap_or(0).to_le_bytes())
    }

    fn answer(self, kind: [u8; 2], seconds: u32) -> [u8; ANSWER] {
        let mut bytes = [0; ANSWER];
        let said = kind.into_iter().chain(self.name()).chain(seconds.to_le_bytes());
        bytes.iter_mut().zip(said).for_each(|(place, byte)| *place = byte);
        bytes
    }

    /// As much of an answer as the process reads that has asked.
    fn as_it_reads(self, answer: &[u8; ANSWER]) -> &[u8] {
        if self.number.is_some() { answer } else { answer.get(..2).unwrap_or(answer) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// The next request, which comes soon.
    fn request(answering: &OwnedFd) -> Request {
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some((Said::Asks(request), None)) = next(answering).unwrap() {
                return request;
            }
            assert!(Instant::now() < until, "nobody asks");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn inode(fd: impl AsFd) -> u64 {
        rustix::fs::fstat(fd).unwrap().st_ino
    }

    /// Asks on a thread of its own, which a test that fails leaves behind.
    fn asked(asking: &OwnedFd) -> std::thread::JoinHandle<io::Result<Given>> {
        let asking = asking.try_clone().unwrap();
        std::thread::spawn(move || ask(asking, true, None))
    }

    #[test]
    fn a_request_that_a_dead_maker_took_is_asked_of_the_next() {
        let (asking, answering) = pair().unwrap();
        assert!(begin(&answering, Duration::ZERO).unwrap().requests.is_empty());
        let thread = asked(&asking);
        // One dies that has taken it, and another one that has only begun.
        let first = request(&answering);
        assert!(begin(&answering, Duration::ZERO).unwrap().requests.is_empty());
        let again = request(&answering);
        assert_eq!(again, first);
        let (ours, _theirs) = pair().unwrap();
        give(&answering, again, ours.as_fd(), Earlier::Kept, Some(Duration::from_millis(7500))).unwrap();
        let given = thread.join().unwrap().unwrap();
        assert_eq!((given.earlier, given.patience), (Earlier::Kept, Some(Duration::from_secs(7))));
        assert_eq!(inode(&given.socket), inode(&ours));
    }

    #[test]
    fn an_answer_to_another_request_is_nobodys() {
        let (asking, answering) = pair().unwrap();
        let (stale, _far) = pair().unwrap();
        let (ours, _theirs) = pair().unwrap();
        let dead = Request { session: own_session() ^ 1, number: Some(0), first: true };
        give(&answering, dead, stale.as_fd(), Earlier::None, None).unwrap();
        let thread = asked(&asking);
        let request = request(&answering);
        let cancelled = Request { number: Some(u64::MAX), ..request };
        give(&answering, cancelled, stale.as_fd(), Earlier::None, None).unwrap();
        give(&answering, request, ours.as_fd(), Earlier::Unknown, None).unwrap();
        let given = thread.join().unwrap().unwrap();
        assert_eq!((given.earlier, inode(&given.socket)), (Earlier::Unknown, inode(&ours)));
    }

    #[test]
    fn a_worker_that_counts_nothing_is_answered_as_it_understands() {
        let (asking, answering) = pair().unwrap();
        let old = [7, 0, 0, 0, 0, 0, 0, 0, 1];
        rustix::net::send(&asking, &old, SendFlags::empty()).unwrap();
        let Inherited { requests, .. } = begin(&answering, Duration::ZERO).unwrap();
        assert_eq!(requests, [Request { session: 7, number: None, first: true }]);
        give(&answering, requests[0], asking.as_fd(), Earlier::Kept, None).unwrap();
        give_up(&answering, requests[0]).unwrap();
        for answer in [*b"c\x01", *b"x."] {
            let mut bytes = [0; 32];
            let got = rustix::net::recv(&asking, &mut bytes, RecvFlags::empty()).unwrap().0;
            assert_eq!(bytes[..got], answer);
        }
    }

    #[test]
    fn several_threads_get_one_answer_each() {
        let (asking, answering) = pair().unwrap();
        let threads: Vec<_> = (0..4).map(|_| asked(&asking)).collect();
        let requests: Vec<Request> = threads.iter().map(|_| request(&answering)).collect();
        let pairs: Vec<_> = requests.iter().map(|_| pair().unwrap()).collect();
        for (request, (ours, _)) in requests.iter().zip(&pairs).rev() {
            give(&answering, *request, ours.as_fd(), Earlier::Kept, None).unwrap();
        }
        let mut found: Vec<u64> =
            threads.into_iter().map(|thread| inode(thread.join().unwrap().unwrap().socket)).collect();
        let mut given: Vec<u64> = pairs.iter().map(|(ours, _)| inode(ours)).collect();
        found.sort_unstable();
        given.sort_unstable();
        assert_eq!(found, given);
    }

    #[test]
    fn what_one_maker_knows_the_next_one_reads() {
        let (asking, answering) = pair().unwrap();
        let (kept, far) = pair().unwrap();
        bequeath(&asking, Some(&Legacy { session: 9, sockets: vec![kept] })).unwrap();
        let request = Request { session: 9, number: Some(1), first: false };
        Said::Asks(request).send(asking.as_fd(), SendFlags::empty()).unwrap();
        let Inherited { requests, legacy, .. } = begin(&answering, Duration::ZERO).unwrap();
        assert_eq!(requests, [request]);
        let legacy = legacy.unwrap();
        assert_eq!((legacy.session, legacy.sockets.len()), (9, 1));
        rustix::net::send(&far, b"x", SendFlags::empty()).unwrap();
        assert_eq!(rustix::net::recv(&legacy.sockets[0], &mut [0; 2], RecvFlags::empty()).unwrap().0, 1);
        assert!(begin(&answering, Duration::ZERO).unwrap().legacy.is_none());
    }

    #[test]
    fn the_first_maker_gets_the_connection_by_which_the_image_was_opened() {
        let (asking, answering) = pair().unwrap();
        let (ours, _theirs) = pair().unwrap();
        leave(&asking, ours.as_fd()).unwrap();
        let found = begin(&answering, Duration::ZERO).unwrap();
        assert_eq!(found.unused.map(inode), Some(inode(&ours)));
        assert!(found.requests.is_empty() && found.legacy.is_none());
        assert!(begin(&answering, Duration::ZERO).unwrap().unused.is_none());
    }

    #[test]
    fn questions_come_with_their_socket_and_end_with_a_maker_that_does_not_know_of_them() {
        let (asking, answering) = pair().unwrap();
        let (ours, theirs) = pair().unwrap();
        ask_status(&asking, theirs.as_fd()).unwrap();
        let Some((Said::AsksStatus, Some(socket))) = next(&answering).unwrap() else { panic!() };
        assert_eq!(inode(socket), inode(&theirs));
        ask_status(&asking, theirs.as_fd()).unwrap();
        drop(theirs);
        assert!(begin(&answering, Duration::ZERO).unwrap().requests.is_empty());
        assert_eq!(rustix::net::recv(&ours, &mut [0; 8], RecvFlags::DONTWAIT).unwrap().0, 0);
    }

    #[test]
    fn a_maker_that_ends_later_is_waited_for_and_one_that_knows_nothing_says_so() {
        let (asking, answering) = pair().unwrap();
        let request = Request { session: 7, number: Some(1), first: true };
        Said::Asks(request).send(asking.as_fd(), SendFlags::empty()).unwrap();
        let (kept, _far) = pair().unwrap();
        let long = Duration::from_secs(60);
        std::thread::scope(|scope| {
            let heir = scope.spawn(|| begin(&answering, long).unwrap());
            std::thread::sleep(Duration::from_millis(50));
            assert!(!heir.is_finished());
            bequeath(&asking, Some(&Legacy { session: 9, sockets: vec![kept] })).unwrap();
            let Inherited { requests, legacy, .. } = heir.join().unwrap();
            assert_eq!((requests, legacy.map(|legacy| legacy.session)), (vec![request], Some(9)));
        });
        bequeath(&asking, None).unwrap();
        let began = Instant::now();
        let Inherited { requests, legacy, .. } = begin(&answering, long).unwrap();
        assert!(requests.is_empty() && legacy.is_none() && began.elapsed() < long);
        let Inherited { requests, legacy, .. } = begin(&answering, Duration::from_millis(20)).unwrap();
        assert!(requests.is_empty() && legacy.is_none());
    }

    #[test]
    fn waiting_ends_when_it_is_to_stop_or_the_other_gives_up() {
        let (asking, answering) = pair().unwrap();
        let (stop, end) = pair().unwrap();
        rustix::net::send(&end, b"x", SendFlags::empty()).unwrap();
        let stopped = ask(&asking, false, Some(stop.as_fd())).unwrap_err();
        assert_eq!(stopped.kind(), io::ErrorKind::Interrupted);
        let late = request(&answering);
        let thread = asked(&asking);
        // What comes too late for one is not the other's.
        give_up(&answering, late).unwrap();
        let own = request(&answering);
        assert_ne!(own, late);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!thread.is_finished());
        give_up(&answering, own).unwrap();
        assert_eq!(thread.join().unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
        rustix::net::send(&asking, b"nonsense that is too long to be a request", SendFlags::empty()).unwrap();
        assert_eq!(next(&answering).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(next(&answering).unwrap().is_none());
    }
}
