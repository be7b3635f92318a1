//! How a process that can connect to nothing gets connections: it asks for one over a socket, and another
//! process answers with a connected socket.
//! It says neither where the connection leads nor reads from it.
//!
//! All who serve an image hold both ends of the channel. So it outlives each of the two processes, and a
//! request that one has asked and not the other answered is still there for the next.

use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

/// A request for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Which process asks: see [`own_session`].
    pub session: u64,
    /// Nothing was written in this session yet, so the answer must say what became of earlier ones' bytes.
    pub first: bool,
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

/// Asks for a connection and waits for it. `stop` ends the waiting once it can be read.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`]: the other process has given up. [`io::ErrorKind::Interrupted`]: it was to
/// stop. Or the channel is broken.
pub fn ask(channel: impl AsFd, request: Request, stop: Option<BorrowedFd<'_>>) -> io::Result<Given> {
    let channel = channel.as_fd();
    // By sendmsg, which a worker may call.
    sendmsg(
        channel,
        &[IoSlice::new(&request.encoded())],
        &mut SendAncillaryBuffer::default(),
        SendFlags::NOSIGNAL,
    )?;
    let mut fds = vec![PollFd::new(&channel, PollFlags::IN)];
    fds.extend(stop.as_ref().map(|stop| PollFd::new(stop, PollFlags::IN)));
    loop {
        rustix::io::retry_on_intr(|| poll(&mut fds, None))?;
        if fds.get(1).is_some_and(|stop| !stop.revents().is_empty()) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        match received(channel) {
            // Another one of this process was quicker.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            answer => return answer,
        }
    }
}

fn received(channel: BorrowedFd<'_>) -> io::Result<Given> {
    let mut bytes = [0; 6];
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
    let [kind, earlier, seconds @ ..] = bytes;
    // Older builds set no time.
    let seconds = if got.bytes == bytes.len() { u32::from_le_bytes(seconds) } else { 0 };
    let earlier = match (kind, earlier) {
        _ if got.bytes < 2 => return Err(io::ErrorKind::InvalidData.into()),
        (b'c', 0) => Earlier::None,
        (b'c', 1) => Earlier::Kept,
        (b'c', 2) => Earlier::Unknown,
        (b'x', _) => {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "the server is away for too long"));
        }
        _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "what makes connections talks nonsense")),
    };
    let socket =
        socket.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no connection came along"))?;
    let patience = (seconds > 0).then(|| Duration::from_secs(seconds.into()));
    Ok(Given { socket, earlier, patience })
}

/// What a maker of connections knows of those that it has made, for the next one.
#[derive(Debug)]
pub struct Legacy {
    /// The session that has them.
    pub session: u64,
    /// The connections that were not seen to end; no more than [`Legacy::MOST`].
    pub sockets: Vec<OwnedFd>,
}

impl Legacy {
    /// The most connections that are passed on.
    pub const MOST: usize = 128;
}

/// Leaves what is known, or that nothing is, for the next maker of connections, which reads it by
/// [`inherit`]. `channel` is the end of who asks.
///
/// # Errors
/// There are too many connections, or the channel is full or broken.
pub fn bequeath(channel: impl AsFd, legacy: Option<&Legacy>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(Legacy::MOST))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let sockets = legacy.map(|legacy| legacy.sockets.as_slice()).unwrap_or_default();
    let fds: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut bytes = if legacy.is_some() { [b'h'; 10] } else { *b"........hn" };
    if let (Some(number), Some(legacy)) = (bytes.first_chunk_mut::<8>(), legacy) {
        *number = legacy.session.to_le_bytes();
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(channel, &[IoSlice::new(&bytes)], &mut ancillary, flags)?;
    Ok(())
}

/// Takes all that was asked before the caller began, and what its predecessor has left, which is waited for
/// as long as `patience`. The requests are the caller's to answer, without [`done`].
///
/// # Errors
/// The channel is broken.
pub fn inherit(channel: impl AsFd, patience: Duration) -> io::Result<(Vec<Request>, Option<Legacy>)> {
    let (mut requests, mut legacy, mut said) = (Vec::new(), None, false);
    let until = Instant::now() + patience;
    loop {
        let mut bytes = [0; 16];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(Legacy::MOST))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = match recvmsg(&channel, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags) {
            Ok(got) if got.bytes == 0 => return Ok((requests, legacy)),
            Ok(got) => got.bytes,
            Err(rustix::io::Errno::AGAIN) => {
                let left = until.saturating_duration_since(Instant::now());
                if said || left.is_zero() {
                    return Ok((requests, legacy));
                }
                let time =
                    Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
                rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(&channel, PollFlags::IN)], Some(&time)))?;
                continue;
            }
            Err(errno) => return Err(errno.into()),
        };
        let mut sockets = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                sockets.extend(fds);
            }
        }
        match bytes.get(..got) {
            Some([session @ .., b'h', b'h']) if session.len() == 8 => {
                let session = u64::from_le_bytes(session.try_into().unwrap_or_default());
                (legacy, said) = (Some(Legacy { session, sockets }), true);
            }
            Some([.., b'h', b'n']) => said = true,
            bytes => requests.extend(bytes.and_then(Request::decoded)),
        }
    }
}

/// The next request, if there is one; it stays until [`done`], so that another process answers it where this
/// one dies meanwhile.
///
/// # Errors
/// The channel is broken, or what came is no request: then it is gone.
pub fn next(channel: impl AsFd) -> io::Result<Option<Request>> {
    let mut bytes = [0; 16];
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let got = match rustix::net::recv(&channel, &mut bytes, flags) {
        Ok((got, _)) => got,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    match bytes.get(..got).and_then(Request::decoded) {
        Some(request) => Ok(Some(request)),
        None => {
            done(&channel)?;
            Err(io::Error::new(io::ErrorKind::InvalidData, "a worker talks nonsense"))
        }
    }
}

/// The request that [`next`] has shown is answered.
///
/// # Errors
/// The channel is broken.
pub fn done(channel: impl AsFd) -> io::Result<()> {
    match rustix::net::recv(&channel, &mut [0; 16], RecvFlags::DONTWAIT) {
        Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Answers with a connection.
///
/// # Errors
/// The channel is broken.
pub fn give(
    channel: impl AsFd,
    socket: BorrowedFd<'_>,
    earlier: Earlier,
    patience: Option<Duration>,
) -> io::Result<()> {
    // Older builds read the first two bytes.
    let seconds = u32::try_from(patience.map_or(0, |time| time.as_secs())).unwrap_or(u32::MAX);
    let earlier = match earlier {
        Earlier::None => 0,
        Earlier::Kept => 1,
        Earlier::Unknown => 2,
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = [socket];
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let [a, b, c, d] = seconds.to_le_bytes();
    let bytes = [b'c', earlier, a, b, c, d];
    sendmsg(channel, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Answers that there will be none.
///
/// # Errors
/// The channel is broken.
pub fn give_up(channel: impl AsFd) -> io::Result<()> {
    rustix::net::send(channel, b"x.", SendFlags::NOSIGNAL)?;
    Ok(())
}

impl Request {
    fn encoded(self) -> [u8; 9] {
        let mut bytes = [u8::from(self.first); 9];
        if let Some(number) = bytes.first_chunk_mut::<8>() {
            *number = self.session.to_le_bytes();
        }
        bytes
    }

    fn decoded(bytes: &[u8]) -> Option<Request> {
        match bytes {
            [session @ .., first @ (0 | 1)] => {
                Some(Request { session: u64::from_le_bytes(session.try_into().ok()?), first: *first == 1 })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_stays_until_it_is_answered() {
        let (asking, answering) = pair().unwrap();
        assert_eq!(next(&answering).unwrap(), None);
        let request = Request { session: 7, first: true };
        let (ours, _theirs) = pair().unwrap();
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| ask(&asking, request, None));
            rustix::event::poll(&mut [PollFd::new(&answering, PollFlags::IN)], None).unwrap();
            assert_eq!(next(&answering).unwrap(), Some(request));
            assert_eq!(next(&answering).unwrap(), Some(request), "who looks does not take it");
            give(&answering, ours.as_fd(), Earlier::Kept, Some(Duration::from_millis(7500))).unwrap();
            done(&answering).unwrap();
            let given = asked.join().unwrap().unwrap();
            assert_eq!(given.earlier, Earlier::Kept);
            assert_eq!(given.patience, Some(Duration::from_secs(7)));
            let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
            assert_eq!(inode(&given.socket), inode(&ours));
        });
        assert_eq!(next(&answering).unwrap(), None);
    }

    #[test]
    fn what_one_maker_knows_the_next_one_reads() {
        let (asking, answering) = pair().unwrap();
        let request = Request { session: 7, first: true };
        rustix::net::send(&asking, &request.encoded(), SendFlags::empty()).unwrap();
        let (kept, far) = pair().unwrap();
        bequeath(&asking, Some(&Legacy { session: 9, sockets: vec![kept] })).unwrap();
        let (requests, legacy) = inherit(&answering, Duration::ZERO).unwrap();
        assert_eq!(requests, [request]);
        let legacy = legacy.unwrap();
        assert_eq!((legacy.session, legacy.sockets.len()), (9, 1));
        rustix::net::send(&far, b"x", SendFlags::empty()).unwrap();
        assert_eq!(rustix::net::recv(&legacy.sockets[0], &mut [0; 2], RecvFlags::empty()).unwrap().0, 1);
        assert!(inherit(&answering, Duration::ZERO).unwrap().0.is_empty());
    }

    #[test]
    fn a_maker_that_ends_later_is_waited_for_and_one_that_knows_nothing_says_so() {
        let (asking, answering) = pair().unwrap();
        let request = Request { session: 7, first: true };
        rustix::net::send(&asking, &request.encoded(), SendFlags::empty()).unwrap();
        let (kept, _far) = pair().unwrap();
        let long = Duration::from_secs(60);
        std::thread::scope(|scope| {
            let heir = scope.spawn(|| inherit(&answering, long).unwrap());
            std::thread::sleep(Duration::from_millis(50));
            assert!(!heir.is_finished());
            bequeath(&asking, Some(&Legacy { session: 9, sockets: vec![kept] })).unwrap();
            let (requests, legacy) = heir.join().unwrap();
            assert_eq!((requests, legacy.map(|legacy| legacy.session)), (vec![request], Some(9)));
        });
        bequeath(&asking, None).unwrap();
        let began = Instant::now();
        let (requests, legacy) = inherit(&answering, long).unwrap();
        assert!(requests.is_empty() && legacy.is_none() && began.elapsed() < long);
        let (requests, legacy) = inherit(&answering, Duration::from_millis(20)).unwrap();
        assert!(requests.is_empty() && legacy.is_none());
    }

    #[test]
    fn waiting_ends_when_it_is_to_stop_or_the_other_gives_up() {
        let (asking, answering) = pair().unwrap();
        let request = Request { session: 7, first: false };
        let (stop, _end) = pair().unwrap();
        rustix::net::send(&_end, b"x", SendFlags::empty()).unwrap();
        let stopped = ask(&asking, request, Some(stop.as_fd())).unwrap_err();
        assert_eq!(stopped.kind(), io::ErrorKind::Interrupted);
        give_up(&answering).unwrap();
        assert_eq!(ask(&asking, request, None).unwrap_err().kind(), io::ErrorKind::TimedOut);
        rustix::net::send(&asking, b"nonsense that is too long", SendFlags::empty()).unwrap();
        (0..2).for_each(|_| done(&answering).unwrap());
        assert_eq!(next(&answering).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(next(&answering).unwrap(), None);
    }
}
