//! Connects to a server and negotiates, all of it by one deadline.
//! It connects only to what it is given: nothing that an image or a server says is a place to connect to.

use std::io::{self, BufRead as _, Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use rustls::ClientConnection;

use super::error::DialError;
use super::handshake::{Agreed, Handshake, Next, Wanted};
use super::helper::{self, Reached, Way};
use super::relay;
use super::tls::{self, Trust};
use super::uri::{Endpoint, Server};

/// How long a server that does not answer is waited for before the connection counts as broken, where the
/// kernel can tell. A server that is busy answers at this level all the same.
const SILENCE: Duration = Duration::from_secs(60);

/// A connection to an export. Nothing of the transmission was read from it.
#[derive(Debug)]
pub struct Dialed {
    /// It has no deadlines. Over TLS it is the near end of a relay.
    pub socket: OwnedFd,
    /// What was agreed on with the server.
    pub agreed: Agreed,
    /// The thread that relays, where one does: the connection ends with its process.
    pub relay: Option<JoinHandle<()>>,
}

/// A connected socket. One of TCP is held as a unix one: reading, writing and deadlines are the same calls.
fn connected(server: &Server, until: Instant) -> io::Result<UnixStream> {
    match server {
        Server::Unix(path) => {
            // One that accepts nobody has no room for more some day.
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            sockopt::set_socket_timeout(&socket, Timeout::Send, Some(left(until)?))?;
            let reached = rustix::net::connect(&socket, &SocketAddrUnix::new(path)?);
            reached.map_err(|errno| if errno == Errno::AGAIN { silent() } else { errno.into() })?;
            Ok(UnixStream::from(socket))
        }
        Server::Rbd(_) => Err(io::ErrorKind::Unsupported.into()),
        Server::Tcp { host, port } => {
            let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
            for address in (host.as_str(), *port).to_socket_addrs()? {
                match TcpStream::connect_timeout(&address, left(until)?) {
                    Ok(stream) => {
                        stream.set_nodelay(true)?;
                        keep_alive(&stream)?;
                        return Ok(OwnedFd::from(stream).into());
                    }
                    Err(error) => last = error,
                }
            }
            Err(last)
        }
    }
}

/// Has the kernel notice a host that is gone.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, SILENCE / 4)?;
    sockopt::set_tcp_keepintvl(stream, SILENCE / 12)?;
    let millis = u32::try_from(SILENCE.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(stream, millis)?;
    Ok(())
}

/// What is left of the time; never nothing, which would mean no deadline.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(silent()) } else { Ok(left) }
}

fn silent() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the server does not answer")
}

/// Connects to an export within that time. Whether TLS is wanted is the endpoint's to say: `trust` is needed
/// there, and then nothing but the wish for it goes in the clear.
///
/// # Errors
/// There is no such server or export, it refuses, speaks another protocol, or does not answer in time.
pub fn dial(
    endpoint: &Endpoint,
    wanted: Wanted,
    trust: Option<&Trust>,
    patience: Duration,
) -> Result<Dialed, DialError> {
    if let Server::Rbd(rbd) = &endpoint.server {
        let way = Way::of(wanted);
        let Reached { sockets, agreed, .. } = helper::connect(rbd, way, wanted.structured, patience)?;
        let socket = sockets.into_iter().next();
        let socket = socket.ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))?;
        return Ok(Dialed { socket, agreed, relay: None });
    }
    let until = Instant::now() + patience;
    let stream = connected(&endpoint.server, until)?;
    let mut wire = Wire { stream, tls: None };
    let agreed = negotiate(&mut wire, endpoint, wanted, trust, until)?;
    let Wire { stream, tls } = wire;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    match tls {
        None => Ok(Dialed { socket: stream.into(), agreed, relay: None }),
        Some(tls) => {
            let (ours, theirs) = UnixStream::pair()?;
            stream.set_nonblocking(true)?;
            ours.set_nonblocking(true)?;
            let thread = thread::Builder::new().name("becket-tls".to_owned()).stack_size(relay::STACK);
            // Why it ends is of no use to anybody: the near end hears that it does.
            let relay = thread.spawn(move || drop(relay::relay((*tls).into(), stream, ours)))?;
            Ok(Dialed { socket: theirs.into(), agreed, relay: Some(relay) })
        }
    }
}

fn negotiate(
    wire: &mut Wire,
    endpoint: &Endpoint,
    wanted: Wanted,
    trust: Option<&Trust>,
    until: Instant,
) -> Result<Agreed, DialError> {
    let mut shake = Handshake::new(&endpoint.export, Wanted { tls: endpoint.tls.is_some(), ..wanted });
    let mut bytes = Vec::new();
    loop {
        wire.send(&shake.outgoing(), endpoint, until)?;
        bytes.resize(shake.wants(), 0);
        // A server that sends single bytes is held to the deadline, too.
        let mut rest = bytes.as_mut_slice();
        while !rest.is_empty() {
            let done = wire.read(rest, endpoint, until)?;
            rest = rest.get_mut(done..).unwrap_or_default();
        }
        match shake.feed(&bytes)? {
            Next::Done(agreed) => return Ok(agreed),
            Next::More => {}
            Next::StartTls => {
                let missing =
                    || io::Error::new(io::ErrorKind::InvalidInput, "there are no certificates for TLS");
                wire.secure(trust.ok_or_else(missing)?, endpoint, until)?;
                shake.tls_started();
            }
        }
    }
}

/// A connection while it is negotiated on.
struct Wire {
    stream: UnixStream,
    tls: Option<Box<ClientConnection>>,
}

impl Wire {
    /// Starts TLS, and goes on only when the server has proved who it is.
    fn secure(&mut self, trust: &Trust, endpoint: &Endpoint, until: Instant) -> Result<(), DialError> {
        let tls = self.tls.insert(Box::new(trust.begin(endpoint)?));
        while tls.is_handshaking() {
            flush(&mut self.stream, tls, until)?;
            if tls.is_handshaking() && !hear(&mut self.stream, tls, endpoint, until)? {
                let why = "the server ended the connection in the middle of TLS".to_owned();
                return Err(DialError::Tls { why, hint: Some(tls::CLIENT) });
            }
        }
        Ok(())
    }

    fn send(&mut self, bytes: &[u8], endpoint: &Endpoint, until: Instant) -> Result<(), DialError> {
        match &mut self.tls {
            None if bytes.is_empty() => Ok(()),
            None => {
                self.stream.set_write_timeout(Some(left(until)?))?;
                Ok(self.stream.write_all(bytes).map_err(explained)?)
            }
            Some(tls) => {
                tls.writer().write_all(bytes)?;
                flush(&mut self.stream, tls, until).or_else(|error| {
                    // What it has said before it went tells more.
                    hear(&mut self.stream, tls, endpoint, until).and(Err(error))
                })
            }
        }
    }

    /// Reads some bytes.
    fn read(&mut self, buf: &mut [u8], endpoint: &Endpoint, until: Instant) -> Result<usize, DialError> {
        let Some(tls) = &mut self.tls else {
            loop {
                self.stream.set_read_timeout(Some(left(until)?))?;
                match self.stream.read(buf) {
                    Ok(0) => {
                        let why = "the server ended the connection while it was negotiated";
                        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why).into());
                    }
                    Ok(done) => return Ok(done),
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(explained(error).into()),
                }
            }
        };
        loop {
            match tls.reader().read(buf) {
                Ok(done) if done > 0 => return Ok(done),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // A server that does not like a client's certificate may go without a word.
                Ok(_) | Err(_) => return Err(gone()),
            }
            flush(&mut self.stream, tls, until)?;
            if !hear(&mut self.stream, tls, endpoint, until)?
                && tls.reader().fill_buf().is_ok_and(<[u8]>::is_empty)
            {
                return Err(gone());
            }
        }
    }
}

fn gone() -> DialError {
    let why = "the server ended the connection over TLS".to_owned();
    DialError::Tls { why, hint: Some(tls::CLIENT) }
}

fn broken(error: io::Error) -> DialError {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => gone(),
        _ => explained(error).into(),
    }
}

/// Sends what TLS has to send.
fn flush(stream: &mut UnixStream, tls: &mut ClientConnection, until: Instant) -> Result<(), DialError> {
    while tls.wants_write() {
        stream.set_write_timeout(Some(left(until)?))?;
        match tls.write_tls(stream) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(broken(error)),
            _ => {}
        }
    }
    Ok(())
}

/// Takes in what has come; whether the connection goes on.
fn hear(
    stream: &mut UnixStream,
    tls: &mut ClientConnection,
    endpoint: &Endpoint,
    until: Instant,
) -> Result<bool, DialError> {
    stream.set_read_timeout(Some(left(until)?))?;
    let heard = match tls.read_tls(stream) {
        Ok(heard) => heard,
        Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(true),
        Err(error) => return Err(broken(error)),
    };
    if let Err(error) = tls.process_new_packets() {
        // The alert says what is wrong, if the server still reads.
        let _ = flush(stream, tls, until);
        return Err(tls::explained(&error, endpoint));
    }
    Ok(heard > 0)
}

fn explained(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => silent(),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_accepts_nobody_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let reach = || connected(&Server::Unix(path.clone()), Instant::now() + Duration::from_millis(200));
        let room: Vec<_> = std::iter::from_fn(|| reach().ok()).take(10).collect();
        assert!((1..10).contains(&room.len()), "{room:?}");
        assert_eq!(reach().unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
