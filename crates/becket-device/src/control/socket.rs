//! The connection between a command and the supervisor. Both ends speak in turns, each on a thread of its
//! own, so both wait in the kernel. It parses no message.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::SendFlags;

use super::frames::{Frames, LONGEST};
use crate::contract::protocol::{receive_packet, send_packet};
use crate::contract::wrong;

/// Bytes that are read at once: more than most messages have.
const READ: usize = 16 << 10;

/// Asked when a stream has waited as long as it may at once; an error ends the wait.
pub(super) type Patience<'a> = &'a mut dyn FnMut() -> io::Result<()>;

/// For a stream without a time limit, or with one that is an error.
pub(super) fn no_longer() -> io::Result<()> {
    Err(io::ErrorKind::TimedOut.into())
}

/// A stream of messages, which blocks.
pub(super) struct Socket {
    stream: UnixStream,
    frames: Frames<OwnedFd>,
}

impl Socket {
    pub(super) fn new(stream: UnixStream) -> Socket {
        Socket { stream, frames: Frames::new() }
    }

    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends a message, with descriptors.
    pub(super) fn send(
        &mut self,
        mut message: Vec<u8>,
        mut fds: &[BorrowedFd<'_>],
        patience: Patience<'_>,
    ) -> io::Result<()> {
        if message.len() > LONGEST {
            return Err(wrong("a message is too long"));
        }
        message.push(0);
        let mut rest = message.as_slice();
        while !rest.is_empty() {
            match send_packet(&self.stream, rest, fds, SendFlags::NOSIGNAL) {
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    patience()?;
                    continue;
                }
                Err(error) => return Err(error),
            }
            // They went with the first byte.
            fds = &[];
        }
        Ok(())
    }

    /// Waits for a message and its descriptors; `None` when the other end has hung up.
    pub(super) fn receive(&mut self, patience: Patience<'_>) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        loop {
            if let Some(frame) = self.frames.take() {
                return Ok(Some(frame));
            }
            let mut buffer = [0; READ];
            match receive_packet(&mut buffer, &self.stream) {
                Ok(Some((len, fds))) => self.frames.add(buffer.get(..len).unwrap_or_default(), fds)?,
                Ok(None) => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => patience()?,
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use rustix::io::FdFlags;

    use super::*;

    #[test]
    fn a_reader_that_waits_in_vain_is_asked_whether_to_go_on() {
        let (one, _other) = UnixStream::pair().unwrap();
        one.set_read_timeout(Some(std::time::Duration::from_millis(5))).unwrap();
        let mut asked = 0;
        let mut patience = || {
            asked += 1;
            if asked < 4 { Ok(()) } else { no_longer() }
        };
        assert!(Socket::new(one).receive(&mut patience).is_err());
        assert_eq!(asked, 4);
    }

    #[test]
    fn descriptors_come_once_with_their_message_and_close_on_exec() {
        let (one, other) = UnixStream::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        // Longer than a socket holds, so that it goes in several pieces.
        let long = vec![7; 4 << 20];
        let writer = std::thread::spawn(move || {
            let mut writer = Socket::new(one);
            writer.send(b"before".to_vec(), &[], &mut no_longer).unwrap();
            writer.send(long, &[file.as_fd(), file.as_fd()], &mut no_longer).unwrap();
            writer.send(b"behind".to_vec(), &[], &mut no_longer).unwrap();
        });
        let mut reader = Socket::new(other);
        let mut next = || reader.receive(&mut no_longer).unwrap();
        let (bytes, fds) = next().unwrap();
        assert_eq!((bytes.as_slice(), fds.len()), (b"before".as_slice(), 0));
        let (bytes, fds) = next().unwrap();
        assert!(bytes == vec![7; 4 << 20] && fds.len() == 2);
        assert!(rustix::io::fcntl_getfd(&fds[0]).unwrap().contains(FdFlags::CLOEXEC));
        let (bytes, fds) = next().unwrap();
        assert_eq!((bytes.as_slice(), fds.len()), (b"behind".as_slice(), 0));
        assert!(next().is_none(), "the end is seen");
        writer.join().unwrap();
    }

    #[test]
    fn a_peer_that_has_gone_is_an_error() {
        let (one, other) = UnixStream::pair().unwrap();
        drop(other);
        assert!(Socket::new(one).send(b"x".to_vec(), &[], &mut no_longer).is_err());
    }
}
