//! Whether the server at the other end of a new connection answers requests at all.
//! It reads the export's first block and throws it away. A server that hangs may well accept a connection and
//! negotiate.

use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use becket_uapi::nbd::{self, Reply, Request};

use super::handshake::Agreed;

/// No worker's request has this one.
const COOKIE: u64 = u64::MAX;

/// Waits for one answer over a connection on which nothing was asked yet, and for which simple replies were
/// agreed on. An error is an answer, too: the range may be bad and the others not.
///
/// # Errors
/// It does not answer within that time, ends the connection, or breaks the protocol.
pub fn probe(socket: &OwnedFd, agreed: &Agreed, patience: Duration) -> io::Result<()> {
    let len = u64::from(agreed.smallest.max(1)).min(agreed.size);
    if len == 0 {
        return Ok(());
    }
    // Reading, writing and deadlines are the same calls for all kinds of sockets.
    let mut stream = UnixStream::from(socket.try_clone()?);
    let until = Instant::now() + patience;
    stream.set_write_timeout(Some(patience))?;
    let mut header = [0; 32];
    let request = Request { flags: 0, command: nbd::CMD_READ, cookie: COOKIE, offset: 0, len };
    let size = request.write(&mut header, false).unwrap_or_default();
    stream.write_all(header.get(..size).unwrap_or_default()).map_err(explained)?;
    let mut reply = [0; Reply::SIMPLE_SIZE];
    receive(&mut stream, &mut reply, until)?;
    match Reply::read(&reply) {
        Some(Reply::Simple { error: 0, cookie: COOKIE }) => {
            // A server's smallest block is no more than 64 KiB.
            receive(&mut stream, &mut vec![0; len as usize], until)?;
        }
        Some(Reply::Simple { error: 108, cookie: COOKIE }) => {
            return Err(io::Error::other("the server is shutting down"));
        }
        Some(Reply::Simple { cookie: COOKIE, .. }) => {}
        _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "the server answers what was not asked")),
    }
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)
}

fn receive(stream: &mut UnixStream, bytes: &mut [u8], until: Instant) -> io::Result<()> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left))?;
        match stream.read(rest) {
            Ok(0) => {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server ends its connections"));
            }
            // A server that sends single bytes is held to the deadline, too.
            Ok(_) if Instant::now() >= until => return Err(explained(io::ErrorKind::TimedOut.into())),
            Ok(done) => rest = rest.get_mut(done..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(explained(error)),
        }
    }
    Ok(())
}

fn explained(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            io::Error::new(io::ErrorKind::TimedOut, "the server takes connections and answers no request")
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What becomes of a server that answers with these bytes, and then says nothing more.
    fn probed(size: u64, answer: &[u8]) -> io::Result<()> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (&theirs).write_all(answer).unwrap();
        let agreed = Agreed { size, smallest: 4, ..Agreed::default() };
        let probed = probe(&ours.into(), &agreed, Duration::from_millis(50));
        let mut request = [0; Request::SIZE];
        theirs.set_nonblocking(true).unwrap();
        let asked = (&theirs).read(&mut request).unwrap_or(0);
        assert_eq!(asked, if size == 0 { 0 } else { request.len() });
        probed
    }

    fn reply(error: u32, cookie: u64) -> Vec<u8> {
        let mut bytes = vec![0; Reply::SIMPLE_SIZE];
        Reply::Simple { error, cookie }.write(&mut bytes, false).unwrap();
        bytes
    }

    #[test]
    fn an_answer_is_an_answer_and_silence_is_none() {
        let whole = [reply(0, COOKIE), b"four".to_vec()].concat();
        probed(8, &whole).unwrap();
        probed(8, &reply(5, COOKIE)).unwrap();
        probed(0, b"").unwrap();
        probed(3, &whole[..whole.len() - 1]).unwrap();
        for (answer, says) in [
            (&b""[..], "answers no request"),
            (&whole[..18], "answers no request"),
            (&reply(0, 7), "not asked"),
            (&[0; 16], "not asked"),
            (&reply(108, COOKIE), "shutting down"),
        ] {
            let error = probed(8, answer).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
