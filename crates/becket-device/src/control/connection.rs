//! A connection to the supervisor, and one call over it.
//! It starts no server, and never sends descriptors to another user's.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::socket::{Patience, Socket, no_longer};
use crate::contract::messages::{Failure, INTERFACE, Nothing, Pulse};
use crate::contract::rendezvous;
use crate::contract::varlink::{Call, SERVICE};
use crate::contract::{Error, ErrorKind};
use crate::record::runtime::Runtime;

/// How long the supervisor may take to answer a client that asks whether it responds.
const ANSWER: Duration = Duration::from_millis(2500);

/// Asks the supervisor which of its workers do not respond; `None` when no supervisor runs, an error when it
/// does not itself answer in time.
pub(super) fn ping(runtime: &Runtime) -> Result<Option<Pulse>, ()> {
    let stream = match connect(runtime) {
        Ok(Some(stream)) => stream,
        Ok(None) => return Ok(None),
        Err(error) => return if error.kind() == ErrorKind::Timeout { Err(()) } else { Ok(None) },
    };
    if limit(&stream, ANSWER).is_err() {
        return Ok(None);
    }
    match exchange(&mut Socket::new(stream), "Ping", &Nothing {}, &[], &mut no_longer) {
        Ok(Some(reply)) => Ok(Some(result(&reply).unwrap_or_default())),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(()),
        // It answers, though an older one does not know the question; or it is ending.
        _ => Ok(Some(Pulse::default())),
    }
}

/// Limits how long a stream waits at once.
pub(super) fn limit(stream: &UnixStream, time: Duration) -> io::Result<()> {
    stream.set_read_timeout(Some(time))?;
    stream.set_write_timeout(Some(time))
}

/// `None` when no server listens.
pub(super) fn connect(runtime: &Runtime) -> Result<Option<UnixStream>, Error> {
    let path = runtime.socket();
    match reach(&path) {
        Ok(stream) => {
            // Descriptors of images are for our own server only.
            rendezvous::trusted(&stream).map_err(Error::io("talk to the server at", &path))?;
            Ok(Some(stream))
        }
        Err(error) if gone(&error) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(Error::Failed {
            kind: ErrorKind::Timeout,
            message: "becket's server takes no more connections: it does not respond".to_owned(),
            hint: Some("becket list shows its process and whether it is stopped".to_owned()),
        }),
        Err(error) => Err(Error::io("connect to", &path)(error)),
    }
}

/// Connects in a limited time: a server that is stopped has no room for more callers some day.
fn reach(path: &Path) -> io::Result<UnixStream> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(ANSWER))?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_write_timeout(None)?;
    Ok(stream)
}

fn gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// Sends a call and returns the reply; `None` when the server hung up before that.
pub(super) fn exchange(
    socket: &mut Socket,
    method: &str,
    parameters: &impl Serialize,
    fds: &[BorrowedFd<'_>],
    patience: Patience<'_>,
) -> io::Result<Option<Vec<u8>>> {
    let method = format!("{INTERFACE}.{method}");
    let call =
        serde_json::to_vec(&Call { method, parameters: Some(parameters), oneway: false, more: false })?;
    socket.send(call, fds, patience)?;
    // None of becket's replies comes with descriptors.
    Ok(socket.receive(patience)?.map(|(reply, _)| reply))
}

/// What a reply says.
pub(super) fn result<R: DeserializeOwned>(reply: &[u8]) -> Result<R, Error> {
    #[derive(Deserialize)]
    struct Reply<'a> {
        error: Option<String>,
        #[serde(borrow)]
        parameters: Option<&'a RawValue>,
    }
    let Reply { error, parameters } = serde_json::from_slice(reply).map_err(broken)?;
    let parameters = parameters.map_or("{}", RawValue::get);
    let Some(error) = error else { return serde_json::from_str(parameters).map_err(broken) };
    match serde_json::from_slice::<Failure>(reply) {
        Ok(failure) => Err(failure.into()),
        Err(_) if error.starts_with(SERVICE) => Err(Error::Failed {
            kind: ErrorKind::Server,
            message: format!("becket's server refuses the call: {error} {parameters}"),
            hint: Some(
                "it may be of another version: `becket serve --takeover --until-idle` replaces it, and its \
                 devices go on"
                    .to_owned(),
            ),
        }),
        Err(_) => Err(broken(format_args!("it answers {error} {parameters}"))),
    }
}

pub(super) fn broken(error: impl std::fmt::Display) -> Error {
    Error::Server { what: format!("cannot be talked to: {error}"), log: None }
}

pub(super) fn hung_up(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}
