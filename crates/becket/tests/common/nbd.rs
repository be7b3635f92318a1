//! A small NBD client for tests (doc/proto.md of the NBD project): simple replies, one request at a time, and
//! whatever a client must not send.
//! It waits for no answer longer than a minute.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const OPTION: u64 = 0x4948_4156_454f_5054;
const REQUEST: u32 = 0x2560_9513;
pub(crate) const READ: u16 = 0;
pub(crate) const WRITE: u16 = 1;
pub(crate) const DISCONNECT: u16 = 2;
pub(crate) const FLUSH: u16 = 3;
pub(crate) const TRIM: u16 = 4;
pub(crate) const ZERO: u16 = 6;

/// A connection to an export.
pub(crate) struct Client {
    pub(crate) socket: UnixStream,
    cookie: u64,
    pub(crate) size: u64,
    pub(crate) flags: u16,
}

/// A request's header.
pub(crate) fn request(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    [
        &REQUEST.to_be_bytes()[..],
        &flags.to_be_bytes(),
        &command.to_be_bytes(),
        &cookie.to_be_bytes(),
        &offset.to_be_bytes(),
        &len.to_be_bytes(),
    ]
    .concat()
}

/// An option of the handshake.
pub(crate) fn option(number: u32, data: &[u8]) -> Vec<u8> {
    [&OPTION.to_be_bytes()[..], &number.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
}

/// A connection whose greeting was read, and which has said its flags.
pub(crate) fn greeted(path: &Path) -> io::Result<UnixStream> {
    let mut socket = UnixStream::connect(path)?;
    socket.set_read_timeout(Some(Duration::from_secs(60)))?;
    socket.set_write_timeout(Some(Duration::from_secs(60)))?;
    let mut greeting = [0; 18];
    socket.read_exact(&mut greeting)?;
    assert_eq!(&greeting[..8], b"NBDMAGIC");
    socket.write_all(&3u32.to_be_bytes())?;
    Ok(socket)
}

impl Client {
    /// Connects to an export by its name, in the oldest way.
    pub(crate) fn connect(path: &Path, name: &str) -> io::Result<Client> {
        let mut socket = greeted(path)?;
        socket.write_all(&option(1, name.as_bytes()))?;
        let mut answer = [0; 10];
        socket.read_exact(&mut answer)?;
        let size = u64::from_be_bytes(answer[..8].try_into().unwrap());
        Ok(Client { socket, cookie: 0, size, flags: u16::from_be_bytes([answer[8], answer[9]]) })
    }

    /// Sends a request, and returns the error number of the reply.
    pub(crate) fn call(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        len: u32,
        data: &[u8],
    ) -> io::Result<u32> {
        self.cookie += 1;
        let cookie = self.cookie;
        self.socket.write_all(&[&request(flags, command, cookie, offset, len)[..], data].concat())?;
        let (error, its) = self.reply()?;
        assert_eq!(its, cookie, "the reply to another request");
        Ok(error)
    }

    /// The error number of the next reply, and whose it is.
    pub(crate) fn reply(&mut self) -> io::Result<(u32, u64)> {
        let mut head = [0; 16];
        self.socket.read_exact(&mut head)?;
        assert_eq!(u32::from_be_bytes(head[..4].try_into().unwrap()), 0x6744_6698, "{head:?}");
        let error = u32::from_be_bytes(head[4..8].try_into().unwrap());
        Ok((error, u64::from_be_bytes(head[8..].try_into().unwrap())))
    }

    pub(crate) fn read(&mut self, offset: u64, len: u32) -> io::Result<Vec<u8>> {
        match self.call(READ, 0, offset, len, &[])? {
            0 => {
                let mut data = vec![0; len as usize];
                self.socket.read_exact(&mut data)?;
                Ok(data)
            }
            error => Err(io::Error::from_raw_os_error(error as i32)),
        }
    }

    pub(crate) fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        match self.call(WRITE, 0, offset, data.len() as u32, data)? {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error as i32)),
        }
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        match self.call(FLUSH, 0, 0, 0, &[])? {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error as i32)),
        }
    }

    /// Whether the server has ended the connection.
    pub(crate) fn ended(&mut self) -> bool {
        matches!(self.socket.read(&mut [0; 64]), Ok(0) | Err(_))
    }
}
