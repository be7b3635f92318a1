//! The connection between a command and the supervisor, as zlink wants it. Both ends speak in turns, each on
//! a thread of its own, so both wait in the kernel: no reactor's thread has to be woken for each message.
//! It frames nothing and parses nothing.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use zlink::connection::PassedCredentials;
use zlink::connection::socket::{ReadHalf, ReadResult, Socket, UnixSocket, WriteHalf};

/// The most descriptors that the kernel carries at once (`SCM_MAX_FD`).
const MOST_FDS: usize = 253;

/// A connection that waits in the kernel.
pub(super) type Connection = zlink::Connection<Waiting>;

/// A socket whose reads and writes wait, on the thread that wants them.
pub(super) struct Waiting {
    stream: Arc<UnixStream>,
    /// Asked whenever the stream has waited for as long as it may at once.
    patience: Option<Patience>,
}

/// An error when there is nothing more to wait for.
pub(super) type Patience = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Waiting").field(&self.stream).finish()
    }
}

impl Waiting {
    /// A connection over a stream that blocks, which is the default.
    pub(super) fn connection(stream: UnixStream) -> Connection {
        Connection::new(Waiting { stream: Arc::new(stream), patience: None })
    }

    /// The same over one whose reads and writes wait for a limited time: it is then asked whether to go on.
    pub(super) fn patient(stream: UnixStream, patience: Patience) -> Connection {
        Connection::new(Waiting { stream: Arc::new(stream), patience: Some(patience) })
    }

    /// Whether to go on waiting; without a check, a time limit is an error.
    fn go_on(&self) -> io::Result<()> {
        self.patience.as_ref().map_or(Err(io::ErrorKind::TimedOut.into()), |patience| patience())
    }
}

impl Socket for Waiting {
    type ReadHalf = Waiting;
    type WriteHalf = Waiting;

    const CAN_TRANSFER_FDS: bool = true;

    fn split(self) -> (Waiting, Waiting) {
        let (stream, patience) = (Arc::clone(&self.stream), self.patience.clone());
        (Waiting { stream, patience }, self)
    }
}

impl AsFd for Waiting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl UnixSocket for Waiting {}

impl ReadHalf for Waiting {
    async fn read(&mut self, buf: &mut [u8]) -> zlink::Result<ReadResult> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut buffers = [IoSliceMut::new(buf)];
            // Received descriptors are close-on-exec from the beginning: a worker that is started must not
            // inherit an image and its locks.
            match rustix::net::recvmsg(&self.stream, &mut buffers, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => self.go_on()?,
                other => break other.map_err(io::Error::from)?,
            }
        };
        let mut fds: Vec<OwnedFd> = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = message {
                fds.extend(passed);
            }
        }
        Ok(ReadResult::new(received.bytes).set_fds(fds))
    }
}

impl WriteHalf for Waiting {
    /// No credentials are passed here: the kernel says who the peer is.
    async fn write(
        &mut self,
        buf: &[u8],
        fds: &[impl AsFd],
        _credentials: Option<&PassedCredentials>,
    ) -> zlink::Result<()> {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors for a call").into());
        }
        let mut rest = buf;
        while !rest.is_empty() {
            match rustix::net::sendmsg(&self.stream, &[IoSlice::new(rest)], &mut control, SendFlags::NOSIGNAL)
            {
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::AGAIN) => {
                    self.go_on()?;
                    continue;
                }
                Err(error) => return Err(io::Error::from(error).into()),
            }
            // They went with the first byte.
            control.clear();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use rustix::io::FdFlags;

    use super::*;

    fn waiting(stream: UnixStream) -> Waiting {
        Waiting { stream: Arc::new(stream), patience: None }
    }

    /// Who waits is asked again and again, until there is nobody to wait for.
    #[test]
    fn one_who_waits_in_vain_is_asked_whether_to_go_on() {
        let (one, _other) = UnixStream::pair().unwrap();
        one.set_read_timeout(Some(std::time::Duration::from_millis(5))).unwrap();
        let asked = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let patience: Patience = {
            let asked = Arc::clone(&asked);
            Arc::new(move || match asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
                0..3 => Ok(()),
                _ => Err(io::ErrorKind::TimedOut.into()),
            })
        };
        let mut reader = Waiting { stream: Arc::new(one), patience: Some(patience) };
        assert!(block_on(reader.read(&mut [0; 8])).is_err());
        assert_eq!(asked.load(std::sync::atomic::Ordering::SeqCst), 4);
    }

    #[test]
    fn descriptors_come_once_with_the_first_byte_and_close_on_exec() {
        let (one, other) = UnixStream::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        // Longer than a socket holds, so that it goes in several pieces.
        let long = vec![7; 4 << 20];
        let writer = std::thread::spawn(move || {
            block_on(waiting(one).write(&long, &[file], None)).unwrap();
        });
        let (mut reader, mut buf) = (waiting(other), vec![0; 1 << 20]);
        let (mut bytes, mut fds) = (0, Vec::new());
        while bytes < 4 << 20 {
            let read = block_on(reader.read(&mut buf)).unwrap();
            assert!(read.bytes_read() > 0);
            bytes += read.bytes_read();
            fds.extend(read.into_fds());
        }
        writer.join().unwrap();
        assert_eq!(fds.len(), 1);
        assert!(rustix::io::fcntl_getfd(&fds[0]).unwrap().contains(FdFlags::CLOEXEC));
        assert_eq!(block_on(reader.read(&mut buf)).unwrap().bytes_read(), 0, "the end is seen");
    }

    #[test]
    fn a_peer_that_has_gone_is_an_error() {
        let (one, other) = UnixStream::pair().unwrap();
        drop(other);
        assert!(block_on(waiting(one).write(b"x", &[] as &[OwnedFd], None)).is_err());
    }
}
