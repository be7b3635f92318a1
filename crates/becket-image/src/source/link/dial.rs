//! Connects to a server and negotiates, all of it by one deadline.
//! It connects only to what it is given: nothing that an image or a server says is a place to connect to.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::sockopt;

use super::failure::DialError;
use super::handshake::{Agreed, Handshake, Next, Refused, Wanted};
use super::helper;
use super::uri::{Endpoint, Server};

/// How long a server that does not answer is waited for before the connection counts as broken, where the
/// kernel can tell. A server that is busy answers at this level all the same.
const SILENCE: Duration = Duration::from_secs(60);

/// A connected socket. One of TCP is held as a unix one: reading, writing and deadlines are the same calls.
fn connected(server: &Server, until: Instant) -> io::Result<UnixStream> {
    match server {
        Server::Unix(path) => UnixStream::connect(path),
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

/// Connects to an export within that time. The socket has no deadlines afterwards, and nothing of the
/// transmission was read from it.
///
/// # Errors
/// There is no such server or export, it refuses, speaks another protocol, or does not answer in time.
pub fn dial(endpoint: &Endpoint, wanted: Wanted, patience: Duration) -> Result<(OwnedFd, Agreed), DialError> {
    if let Server::Rbd(rbd) = &endpoint.server {
        return helper::connect(rbd, wanted, patience);
    }
    if endpoint.tls {
        let why = "NBD over TLS (nbds://) is not supported yet";
        return Err(io::Error::new(io::ErrorKind::Unsupported, why).into());
    }
    let until = Instant::now() + patience;
    let mut stream = connected(&endpoint.server, until)?;
    let agreed = negotiate(&mut stream, endpoint, Wanted { tls: false, ..wanted }, until)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok((stream.into(), agreed))
}

fn negotiate(
    stream: &mut UnixStream,
    endpoint: &Endpoint,
    wanted: Wanted,
    until: Instant,
) -> Result<Agreed, DialError> {
    let mut shake = Handshake::new(&endpoint.export, wanted);
    let mut bytes = Vec::new();
    loop {
        let out = shake.outgoing();
        if !out.is_empty() {
            stream.set_write_timeout(Some(left(until)?))?;
            stream.write_all(&out).map_err(explained)?;
        }
        bytes.resize(shake.wants(), 0);
        // A server that sends single bytes is held to the deadline, too.
        let mut rest = bytes.as_mut_slice();
        while !rest.is_empty() {
            stream.set_read_timeout(Some(left(until)?))?;
            match stream.read(rest) {
                Ok(0) => {
                    let why = "the server ended the connection while it was negotiated";
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why).into());
                }
                Ok(done) => rest = rest.get_mut(done..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(explained(error).into()),
            }
        }
        match shake.feed(&bytes)? {
            Next::Done(agreed) => return Ok(agreed),
            Next::More => {}
            Next::StartTls => return Err(Refused::NoTls.into()),
        }
    }
}

fn explained(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => silent(),
        _ => error,
    }
}
