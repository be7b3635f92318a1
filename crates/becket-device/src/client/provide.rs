//! Volumes for programs that ask by `io.systemd.StorageProvider`: a thread for each of them.
//! It ends when nobody has asked for a while and somebody else keeps the socket.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use super::doorway::Listening;
use crate::contract::{Error, ErrorKind};
use crate::control::volumes::{self, Volumes};

/// Programs that are served at once; the others wait.
const MOST: usize = 64;
/// How long nobody may ask until a process that systemd has started ends.
const IDLE: Duration = Duration::from_secs(30);
/// How often it is looked.
const LOOK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Hands out volumes at `unix:PATH`, `fd:N` or `systemd`. `ready` gets the address once it listens.
///
/// # Errors
/// The address cannot be listened at, or no more connections can be accepted.
pub fn provide(address: &str, ready: impl FnOnce(&str), volumes: &dyn Volumes) -> Result<(), Error> {
    if address.starts_with("tcp:") {
        return Err(Error::Failed {
            kind: ErrorKind::InvalidOption,
            message: "volumes are handed out as descriptors, so it needs a unix socket".to_owned(),
            hint: Some("use unix:PATH".to_owned()),
        });
    }
    let listening = Listening::at(address, true)?;
    let failed = |error: Errno| Error::io("accept connections at", Path::new(address))(error);
    rustix::io::ioctl_fionbio(&listening.listener, true).map_err(failed)?;
    ready(&listening.address);
    let served = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let mut last = Instant::now();
        loop {
            if served.load(Ordering::SeqCst) > 0 {
                last = Instant::now();
            } else if address == "systemd" && last.elapsed() > IDLE {
                return Ok(());
            }
            let full = served.load(Ordering::SeqCst) >= MOST;
            let events = if full { PollFlags::empty() } else { PollFlags::IN };
            let mut fds = [PollFd::from_borrowed_fd(listening.listener.as_fd(), events)];
            match poll(&mut fds, Some(&LOOK)) {
                Ok(0) | Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(failed(error)),
            }
            let stream = match accept_with(&listening.listener, SocketFlags::CLOEXEC) {
                Ok(socket) => UnixStream::from(socket),
                Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => continue,
                Err(error) => return Err(failed(error)),
            };
            served.fetch_add(1, Ordering::SeqCst);
            let conversation = || {
                log(volumes::converse(volumes, stream));
                served.fetch_sub(1, Ordering::SeqCst);
            };
            // Its connection ends with it: the program may ask again.
            if std::thread::Builder::new().spawn_scoped(scope, conversation).is_err() {
                served.fetch_sub(1, Ordering::SeqCst);
            }
        }
    })
}

fn log(outcome: io::Result<()>) {
    if let Err(error) = outcome {
        tracing::warn!("a connection ended: {error}");
    }
}
