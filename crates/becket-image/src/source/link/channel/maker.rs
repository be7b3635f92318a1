//! The channel as the process sees it that makes connections: it takes requests, and answers them.
//! What it knows of connections that it has made it leaves to the next one.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg};

use super::{Earlier, Request, Said, send};

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

/// Leaves what is known, or that nothing is, for the next maker of connections, which reads it by [`begin`].
/// `channel` is the end of who asks.
///
/// # Errors
/// There are too many connections, or the channel is full or broken.
pub fn bequeath(channel: impl AsFd, legacy: Option<&Legacy>) -> io::Result<()> {
    let sockets = legacy.map(|legacy| legacy.sockets.as_slice()).unwrap_or_default();
    let fds: Vec<BorrowedFd<'_>> = sockets.iter().map(AsFd::as_fd).collect();
    let mut bytes = if legacy.is_some() { [b'h'; 10] } else { *b"........hn" };
    if let (Some(number), Some(legacy)) = (bytes.first_chunk_mut::<8>(), legacy) {
        *number = legacy.session.to_le_bytes();
    }
    send(channel, &bytes, &fds, SendFlags::DONTWAIT)
}

/// What a maker of connections finds when it begins.
#[derive(Debug, Default)]
pub struct Inherited {
    /// What was asked before, in that order.
    pub requests: Vec<Request>,
    /// What a predecessor has left.
    pub legacy: Option<Legacy>,
    /// The connection by which the image was opened. No worker has had it.
    pub unused: Option<OwnedFd>,
}

/// Begins to make connections. What a predecessor leaves is waited for as long as `patience`.
///
/// # Errors
/// The channel is broken.
pub fn begin(channel: impl AsFd, patience: Duration) -> io::Result<Inherited> {
    let (mut inherited, mut said) = (Inherited::default(), false);
    let until = Instant::now() + patience;
    loop {
        let mut bytes = [0; 32];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(Legacy::MOST))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = match recvmsg(&channel, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags) {
            Ok(got) if got.bytes == 0 => return Ok(inherited),
            Ok(got) => got.bytes,
            Err(rustix::io::Errno::AGAIN) => {
                let left = until.saturating_duration_since(Instant::now());
                if said || left.is_zero() {
                    return Ok(inherited);
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
                (inherited.legacy, said) = (Some(Legacy { session, sockets }), true);
            }
            Some([.., b'h', b'n']) => said = true,
            Some([.., b'h', b'u']) => inherited.unused = sockets.pop(),
            bytes => match bytes.and_then(Said::decoded) {
                Some(Said::Asks(request)) => inherited.requests.push(request),
                // It was about connections of a predecessor, which has left nothing that depends on it. Who
                // asks for the status asks again.
                Some(Said::Reported(_) | Said::Left(..) | Said::AsksStatus) | None => {}
            },
        }
    }
}

/// Takes what was said next, if anything was, with the socket that came along. A request can come more than
/// once, and is answered once.
///
/// # Errors
/// The channel is broken, or what came is nonsense: then it is gone.
pub fn next(channel: impl AsFd) -> io::Result<Option<(Said, Option<OwnedFd>)>> {
    let mut bytes = [0; 32];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = match recvmsg(&channel, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags) {
        Ok(got) => got.bytes,
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    let mut socket = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            socket = fds.into_iter().next();
        }
    }
    match bytes.get(..got).and_then(Said::decoded) {
        Some(said) => Ok(Some((said, socket))),
        None => Err(io::Error::new(io::ErrorKind::InvalidData, "a worker talks nonsense")),
    }
}

/// Answers a request with a connection.
///
/// # Errors
/// The channel is broken.
pub fn give(
    channel: impl AsFd,
    request: Request,
    socket: BorrowedFd<'_>,
    earlier: Earlier,
    patience: Option<Duration>,
) -> io::Result<()> {
    let seconds = u32::try_from(patience.map_or(0, |time| time.as_secs())).unwrap_or(u32::MAX);
    let earlier = match earlier {
        Earlier::None => 0,
        Earlier::Kept => 1,
        Earlier::Unknown => 2,
    };
    let bytes = request.answer([b'c', earlier], seconds);
    send(channel, request.as_it_reads(&bytes), &[socket], SendFlags::empty())
}

/// Answers a request: there will be none.
///
/// # Errors
/// The channel is broken.
pub fn give_up(channel: impl AsFd, request: Request) -> io::Result<()> {
    let bytes = request.answer(*b"x.", 0);
    rustix::net::send(channel, request.as_it_reads(&bytes), SendFlags::NOSIGNAL)?;
    Ok(())
}
