//! Between a stream over TLS and a process that knows nothing of TLS: one thread for each connection, until
//! it has ended.
//! It looks into nothing that it passes on, and holds a bounded number of bytes of each direction.

use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::Connection;

/// Most bytes of one direction that wait here. A record of TLS has 16 KiB.
const ROOM: usize = 256 << 10;
/// How long the rest may take once one side has ended.
const PATIENCE: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
/// Bytes of a thread's stack.
pub const STACK: usize = 256 << 10;

/// Passes bytes on in both directions. `far` is over TLS, `near` is not; both must not block.
///
/// For a server, it ends once `near` has, and what that has sent was passed on. For a client it ends once
/// `far` has: until then a server may carry out what it was sent.
///
/// # Errors
/// Why a connection has not ended in order.
pub fn relay(mut tls: Connection, far: UnixStream, near: UnixStream) -> io::Result<()> {
    tls.set_buffer_limit(Some(ROOM));
    Relay { tls, far, near, inward: Vec::new(), far_ended: false, near_ended: false }.pass_on()
}

struct Relay {
    tls: Connection,
    far: UnixStream,
    near: UnixStream,
    /// What `far` has sent and `near` has not taken yet.
    inward: Vec<u8>,
    /// Nothing more comes from there.
    far_ended: bool,
    near_ended: bool,
}

impl Relay {
    fn is_client(&self) -> bool {
        matches!(self.tls, Connection::Client(_))
    }

    fn pass_on(mut self) -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        let (mut near_told, mut far_told) = (false, false);
        loop {
            let progress = self.hear_far(&mut buffer)? | self.feed_near()? | self.hear_near(&mut buffer)?;
            let sent = self.feed_far()?;
            if self.far_ended && self.inward.is_empty() {
                if self.is_client() {
                    return Ok(());
                }
                if !near_told {
                    near_told = true;
                    // It answers what it has, and ends then.
                    let _ = self.near.shutdown(Shutdown::Write);
                }
            }
            if self.near_ended && !self.tls.wants_write() {
                if !self.is_client() {
                    return Ok(());
                }
                if !far_told {
                    far_told = true;
                    let _ = self.far.shutdown(Shutdown::Write);
                }
            }
            if !(progress || sent) {
                self.wait()?;
            }
        }
    }

    fn wait(&self) -> io::Result<()> {
        let mut far = PollFlags::empty();
        far.set(PollFlags::IN, !self.far_ended && self.inward.len() < ROOM);
        far.set(PollFlags::OUT, self.tls.wants_write());
        let mut near = PollFlags::empty();
        near.set(PollFlags::IN, !self.near_ended && !self.tls.wants_write());
        near.set(PollFlags::OUT, !self.inward.is_empty());
        // One that has ended for good is not polled: it would be ready for ever.
        let far_fd = PollFd::new(&self.far, far);
        let near_fd = PollFd::new(&self.near, near);
        // Once one side is done, the other one is not waited for without end.
        let ends = self.near_ended || (self.far_ended && self.is_client());
        let patience = ends.then_some(&PATIENCE);
        let outcome = match (far.is_empty(), near.is_empty()) {
            (true, _) => poll(&mut [near_fd], patience),
            (_, true) => poll(&mut [far_fd], patience),
            _ => poll(&mut [far_fd, near_fd], patience),
        };
        match outcome {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn hear_far(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        let mut progress = false;
        if !self.far_ended && self.inward.len() < ROOM {
            match self.tls.read_tls(&mut self.far) {
                Ok(0) => self.far_ended = true,
                Ok(_) => progress = true,
                Err(error) if is_later(&error) => {}
                Err(error) => return Err(error),
            }
            let state = self.tls.process_new_packets().map_err(io::Error::other);
            if state.is_err() {
                // The alert says what is wrong, if the far side still reads.
                let _ = self.feed_far();
            }
            if state?.peer_has_closed() {
                self.far_ended = true;
            }
        }
        while self.inward.len() < ROOM {
            match self.tls.reader().read(buffer) {
                Ok(0) => {
                    self.far_ended = true;
                    break;
                }
                Ok(len) => {
                    self.inward.extend_from_slice(buffer.get(..len).unwrap_or_default());
                    progress = true;
                }
                // Also where the connection was cut without a word.
                Err(_) => break,
            }
        }
        Ok(progress)
    }

    fn feed_near(&mut self) -> io::Result<bool> {
        let mut progress = false;
        while !self.inward.is_empty() {
            match self.near.write(&self.inward) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(len) => {
                    self.inward.drain(..len);
                    progress = true;
                }
                Err(error) if is_later(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(progress)
    }

    fn hear_near(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        let mut progress = false;
        // What TLS still has to send keeps the near side waiting, so what waits here has a bound.
        while !self.near_ended && !self.tls.wants_write() {
            match self.near.read(buffer) {
                Ok(0) => {
                    self.near_ended = true;
                    self.tls.send_close_notify();
                }
                Ok(len) => {
                    self.tls.writer().write_all(buffer.get(..len).unwrap_or_default())?;
                    progress = true;
                }
                Err(error) if is_later(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(progress)
    }

    fn feed_far(&mut self) -> io::Result<bool> {
        let mut progress = false;
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut self.far) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(_) => progress = true,
                Err(error) if is_later(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(progress)
    }
}

fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
