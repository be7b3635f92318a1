//! Where a worker and the successor of its supervisor meet: a socket in the runtime directory that listens.
//! Only the worker's own user and root are ever answered, on either side.
//!
//! The supervisor makes the socket and hands it to the worker, which opens nothing itself. The worker does
//! not listen to it before the supervisor's own connection is gone: an earlier caller waits.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use becket_uapi::peer::{self, Peer};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, socket_with,
};

use crate::contract::protocol;
use crate::contract::versions::Speech;
use crate::contract::wrong;

/// Callers that may wait: successors that died while they waited are among them.
const BACKLOG: i32 = 8;
/// How long a caller may take to say what it wants, and wait until it can. Nothing else is done meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);

/// Makes the socket at a path. The directory keeps others out.
pub(crate) fn open(path: &Path) -> io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// In the worker: from now on callers learn of this process and not of the one that made the socket.
pub(crate) fn take_over(socket: impl AsFd) -> io::Result<()> {
    Ok(listen(socket, BACKLOG)?)
}

/// In the successor: calls a worker and hands it one end of a new connection, whose other end is returned
/// with the worker's number.
///
/// # Errors
/// `ConnectionRefused` or `NotFound`: no worker listens there any more.
pub(crate) fn call(path: &Path) -> io::Result<(OwnedFd, u32)> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // One that is stopped has no room for more callers some day.
    set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    let worker = trusted(&socket)?;
    // Made here, because only a privileged process may give a socket buffers that hold long maps.
    let (ours, theirs) = protocol::pair()?;
    protocol::send(&socket, &Speech::ours(), &[theirs.as_fd()])?;
    Ok((ours, worker))
}

/// In the worker: takes a call and returns the new connection, and what the caller speaks.
pub(crate) fn answer(socket: impl AsFd) -> io::Result<(OwnedFd, Speech)> {
    let caller = accept_with(socket, SocketFlags::CLOEXEC)?;
    trusted(&caller)?;
    set_socket_timeout(&caller, Timeout::Recv, Some(PATIENCE))?;
    let (speech, fds) = protocol::receive::<Speech>(&caller)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    let [connection] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| wrong("no connection came along"))?;
    Ok((connection, speech))
}

/// The other side's process, when it is one of our own user or root.
pub(crate) fn trusted(socket: impl AsFd) -> io::Result<u32> {
    let Peer { pid, uid } = peer::of(socket)?;
    if uid != rustix::process::geteuid().as_raw() && uid != 0 {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is another user's"));
    }
    pid.ok_or_else(|| {
        io::Error::other(
            "its process is not to be seen from this container, which needs the host's (hostPID)",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::protocol::{Handed, Report};

    #[test]
    fn a_successor_and_a_worker_find_each_other() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("worker");
        assert_eq!(call(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        let socket = open(&path).unwrap();
        take_over(&socket).unwrap();
        // The call waits; it is answered later, on a connection of its own.
        let (ours, pid) = call(&path).unwrap();
        assert_eq!(pid, std::process::id());
        let (theirs, speech) = answer(&socket).unwrap();
        assert_eq!(speech, Speech::ours());
        let handed = Report::Handed(Handed { version: speech.version, features: Vec::new(), withheld: 0 });
        protocol::send(&theirs, &handed, &[]).unwrap();
        let (said, _) = protocol::receive::<Report>(&ours).unwrap().unwrap();
        assert_eq!(said, handed);
        // A caller that says nothing sensible is an error and nothing more.
        let stranger =
            socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        connect(&stranger, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        protocol::send(&stranger, &Speech::ours(), &[]).unwrap();
        assert!(answer(&socket).is_err(), "it brought no connection");
        drop(socket);
        assert_eq!(call(&path).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }
}
