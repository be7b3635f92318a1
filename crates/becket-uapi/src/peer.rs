//! Which process is at the other end of a unix socket (`SO_PEERCRED`, unix(7)).

use std::io;
use std::os::fd::AsFd;

use crate::socket_option;

/// The process that made the connection or listened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its number; `None` where it is in a PID namespace that this process does not see.
    pub pid: Option<u32>,
    /// Its effective user.
    pub uid: u32,
}

/// Asks the kernel.
///
/// # Errors
/// The descriptor is not a socket.
pub fn of(socket: impl AsFd) -> io::Result<Peer> {
    let found = socket_option::read(socket, libc::SO_PEERCRED, libc::ucred { pid: 0, uid: 0, gid: 0 })?;
    Ok(Peer { pid: u32::try_from(found.pid).ok().filter(|pid| *pid > 0), uid: found.uid })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_is_of_this_process() {
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let own = Peer { pid: Some(std::process::id()), uid: rustix::process::geteuid().as_raw() };
        assert_eq!(of(&one).unwrap(), own);
        assert!(of(std::fs::File::open("/dev/null").unwrap()).is_err());
    }
}
