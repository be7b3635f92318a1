//! The last flush: a device has ended for good, and its server may hold finished writes that no flush covers.
//! The queues have left their connections; here a thread that may wait flushes over them, each for the writes
//! that went over it.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use becket_image::link::{
    LinkSource,
    channel::{Given, ask},
};
use becket_uapi::nbd::{self, Reply, Request};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

use super::line::Parted;
use crate::{aside, slot::errno_of};

/// How long a server may take for the last flush of a device, its connection included.
pub const FAREWELL: Duration = Duration::from_secs(8);
/// No request of a queue has this cookie: there are not so many connections.
const COOKIE: u64 = u64::MAX;

/// The connections of queues that have ended, over which finished writes may still have to be flushed.
#[derive(Debug, Default)]
pub(super) struct Parking(Mutex<Vec<Parted>>);

impl Parking {
    pub(super) fn take(&self) -> Vec<Parted> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn add(&self, parted: Parted) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(parted);
    }
}

/// Asks for a connection, which is there in time or is not.
pub(super) fn given(source: &Arc<LinkSource>, until: Instant) -> Result<Given, String> {
    let stop = eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| errno.to_string())?;
    let theirs = stop.try_clone().map_err(|error| error.to_string())?;
    let source = Arc::clone(source);
    let asked = aside::begun(move || ask(source.asks(), true, Some(theirs.as_fd())));
    match asked.recv_timeout(until.saturating_duration_since(Instant::now())) {
        Ok(given) => given.map_err(|error| error.to_string()),
        Err(_) => {
            // Its counter cannot be full.
            let _ = rustix::io::write(&stop, &1u64.to_ne_bytes());
            Err("it is away".to_owned())
        }
    }
}

/// Flushes over each of these connections, and returns what their server has failed with.
///
/// # Errors
/// One was not answered.
pub(super) fn flush(parked: &[Parted], until: Instant) -> io::Result<Option<Errno>> {
    let patience = parked.iter().filter_map(|parted| parted.patience).min();
    let until = patience.map_or(until, |patience| until.min(Instant::now() + patience));
    let asked: Vec<_> = parked.iter().map(|parted| asks(&parted.socket, until)).collect();
    let mut failed = None;
    for (parted, asked) in parked.iter().zip(asked) {
        asked?;
        match answers(&parted.socket, until)? {
            0 => {}
            error => failed = Some(i32::try_from(error).map_or(Errno::IO, |error| errno_of(-error))),
        }
    }
    Ok(failed)
}

/// Asks for a flush.
fn asks(socket: &OwnedFd, until: Instant) -> io::Result<()> {
    let mut bytes = [0; 32];
    let flush = Request { flags: 0, command: nbd::CMD_FLUSH, cookie: COOKIE, offset: 0, len: 0 };
    let size = flush.write(&mut bytes, false).unwrap_or(0);
    let mut rest = bytes.get(..size).unwrap_or_default();
    while !rest.is_empty() {
        awaits(socket, PollFlags::OUT, until)?;
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(socket, &[io::IoSlice::new(rest)], &mut SendAncillaryBuffer::default(), flags) {
            Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Waits for the answer: 0, or the server's error.
fn answers(socket: &OwnedFd, until: Instant) -> io::Result<u32> {
    let mut bytes = [0; Reply::SIMPLE_SIZE];
    let mut there = 0;
    while let Some(rest @ [_, ..]) = bytes.get_mut(there..) {
        awaits(socket, PollFlags::IN, until)?;
        match recv(socket, rest, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Err(io::Error::other("it has ended the connection")),
            Ok((_, got)) => there += got,
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    match Reply::read(&bytes) {
        Some(Reply::Simple { error, cookie: COOKIE }) => Ok(error),
        _ => Err(io::Error::other("it answers what it was not asked")),
    }
}

fn awaits(socket: &OwnedFd, what: PollFlags, until: Instant) -> io::Result<()> {
    let left = until.saturating_duration_since(Instant::now());
    let time = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
    match rustix::io::retry_on_intr(|| poll(&mut [PollFd::new(socket, what)], Some(&time)))? {
        0 => Err(io::Error::other("it does not answer")),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "farewell_tests.rs"]
mod tests;
