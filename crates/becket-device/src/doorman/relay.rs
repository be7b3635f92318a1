//! Between a client over TLS and the worker of its export: one thread for each client, until one side ends.
//! It looks into nothing that it passes on, and holds a bounded number of bytes of each direction.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::ServerConnection;
use tracing::debug;

/// Most bytes of one direction that wait here. A record of TLS has 16 KiB.
const ROOM: usize = 256 << 10;
/// How long a client may take nothing once its worker is done.
const PATIENCE: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
/// Bytes of a thread's stack.
pub(super) const STACK: usize = 256 << 10;

/// Passes bytes on in both directions, until both have ended. Both sockets must not block.
pub(super) fn run(mut tls: ServerConnection, client: UnixStream, worker: UnixStream) {
    tls.set_buffer_limit(Some(ROOM));
    let relay = Relay { tls, client, worker, inward: Vec::new(), client_ended: false, worker_ended: false };
    if let Err(error) = relay.pass_on() {
        debug!("a client's connection over TLS ends: {error}");
    }
}

struct Relay {
    tls: ServerConnection,
    client: UnixStream,
    worker: UnixStream,
    /// What the client has sent and the worker has not taken yet.
    inward: Vec<u8>,
    /// Nothing more comes from there.
    client_ended: bool,
    worker_ended: bool,
}

impl Relay {
    fn pass_on(mut self) -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        let mut said_end = false;
        loop {
            let progress =
                self.hear_client(&mut buffer)? | self.feed_worker()? | self.hear_worker(&mut buffer)?;
            let sent = self.feed_client()?;
            if self.client_ended && self.inward.is_empty() && !said_end {
                said_end = true;
                // The worker answers what it has, and ends then.
                let _ = self.worker.shutdown(std::net::Shutdown::Write);
            }
            if self.worker_ended && !self.tls.wants_write() {
                return Ok(());
            }
            if !(progress || sent) {
                self.wait()?;
            }
        }
    }

    fn wait(&self) -> io::Result<()> {
        let mut client = PollFlags::empty();
        client.set(PollFlags::IN, !self.client_ended && self.inward.len() < ROOM);
        client.set(PollFlags::OUT, self.tls.wants_write());
        let mut worker = PollFlags::empty();
        worker.set(PollFlags::IN, !self.worker_ended && !self.tls.wants_write());
        worker.set(PollFlags::OUT, !self.inward.is_empty());
        // One that has ended for good is not polled: it would be ready for ever.
        let client_fd = PollFd::new(&self.client, client);
        let worker_fd = PollFd::new(&self.worker, worker);
        // Once the worker is done, a client that does not take the rest is not waited for without end.
        let patience = self.worker_ended.then_some(&PATIENCE);
        let outcome = match (client.is_empty(), worker.is_empty()) {
            (true, _) => poll(&mut [worker_fd], patience),
            (_, true) => poll(&mut [client_fd], patience),
            _ => poll(&mut [client_fd, worker_fd], patience),
        };
        match outcome {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn hear_client(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        let mut progress = false;
        if !self.client_ended && self.inward.len() < ROOM {
            match self.tls.read_tls(&mut self.client) {
                Ok(0) => self.client_ended = true,
                Ok(_) => progress = true,
                Err(error) if is_later(&error) => {}
                Err(error) => return Err(error),
            }
            let state = self.tls.process_new_packets().map_err(io::Error::other);
            if state.is_err() {
                // The alert says what is wrong, if the client still reads.
                let _ = self.feed_client();
            }
            if state?.peer_has_closed() {
                self.client_ended = true;
            }
        }
        while self.inward.len() < ROOM {
            match self.tls.reader().read(buffer) {
                Ok(0) => {
                    self.client_ended = true;
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

    fn feed_worker(&mut self) -> io::Result<bool> {
        let mut progress = false;
        while !self.inward.is_empty() {
            match self.worker.write(&self.inward) {
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

    fn hear_worker(&mut self, buffer: &mut [u8]) -> io::Result<bool> {
        let mut progress = false;
        // What TLS still has to send keeps the worker waiting, so what waits here has a bound.
        while !self.worker_ended && !self.tls.wants_write() {
            match self.worker.read(buffer) {
                Ok(0) => {
                    self.worker_ended = true;
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

    fn feed_client(&mut self) -> io::Result<bool> {
        let mut progress = false;
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut self.client) {
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
