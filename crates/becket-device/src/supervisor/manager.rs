//! A service manager, seen from the server that it started: the socket it hands over, and the messages it
//! waits for.
//! It never fails: a manager that does not listen gets no message, and a socket that was not handed over is
//! absent.
//!
//! The protocols are those of sd_listen_fds(3) and sd_notify(3), few enough lines to need no crate.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener};

use becket_uapi::handover::inherited_fd;
use rustix::net::{AddressFamily, sockopt};

const NOTIFY: &str = "NOTIFY_SOCKET";
const PID: &str = "LISTEN_PID";
const FDS: &str = "LISTEN_FDS";
/// The first descriptor that is handed over.
const FIRST: i32 = 3;
/// More than one socket is nothing that our units ask for.
const MOST: i32 = 16;

/// Whether a service manager looks after this process: it starts the next one, and ends this one to do so.
///
/// Our units hand over a socket, and only to the process that they name. The address for messages alone is
/// inherited by every process that a service starts, which its manager does not know.
pub(crate) fn looks_after_us() -> bool {
    cares(|name| std::env::var_os(name)?.into_string().ok(), std::process::id())
}

fn cares(variable: impl Fn(&str) -> Option<String>, pid: u32) -> bool {
    let hears = variable(NOTIFY).is_some_and(|path| !path.is_empty());
    hears && handed(variable, pid) > 0
}

/// How many descriptors have been handed over to the process with that id.
fn handed(variable: impl Fn(&str) -> Option<String>, pid: u32) -> i32 {
    let number = |name| variable(name)?.parse::<i32>().ok();
    // Otherwise they are meant for another process: our parent's environment.
    let ours = number(PID).is_some_and(|meant| meant.unsigned_abs() == pid);
    number(FDS).filter(|_| ours).unwrap_or(0).clamp(0, MOST)
}

/// Whether a service manager listens.
pub(crate) fn hears_us() -> bool {
    std::env::var_os(NOTIFY).is_some_and(|path| !path.is_empty())
}

/// Tells it, in lines of `KEY=VALUE`.
pub(crate) fn tell(words: &str) {
    let Some(path) = std::env::var_os(NOTIFY).filter(|path| !path.is_empty()) else { return };
    // It may be gone, or this a mount namespace without its socket: the manager then has a time limit of its
    // own.
    let _ = send(&path.into_vec(), words);
}

fn send(path: &[u8], words: &str) -> io::Result<()> {
    let address = match path.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(path))?,
    };
    UnixDatagram::unbound()?.send_to_addr(words.as_bytes(), &address).map(drop)
}

/// The socket on which it has begun to listen for us, where there is one.
pub(crate) fn listener() -> Option<UnixListener> {
    let count = handed(|name| std::env::var(name).ok(), std::process::id());
    // All are taken: what is not wanted is closed.
    let taken: Vec<OwnedFd> = (FIRST..FIRST + count).filter_map(|fd| inherited_fd(fd).ok()).collect();
    taken.into_iter().find(is_listener).map(UnixListener::from)
}

fn is_listener(fd: &OwnedFd) -> bool {
    let unix = sockopt::socket_domain(fd.as_fd()).is_ok_and(|domain| domain == AddressFamily::UNIX);
    unix && sockopt::socket_acceptconn(fd.as_fd()).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_arrive_at_both_kinds_of_address() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("notify");
        let name = format!("becket-test-{}", std::process::id());
        let by_path = UnixDatagram::bind(&path).unwrap();
        let abstract_name = SocketAddr::from_abstract_name(&name).unwrap();
        let by_name = UnixDatagram::bind_addr(&abstract_name).unwrap();
        for (socket, address) in
            [(by_path, path.as_os_str().as_bytes().to_vec()), (by_name, format!("@{name}").into_bytes())]
        {
            send(&address, "READY=1\nSTATUS=x").unwrap();
            let mut words = [0; 64];
            let len = socket.recv(&mut words).unwrap();
            assert_eq!(&words[..len], b"READY=1\nSTATUS=x");
        }
        assert!(send(b"/nowhere/at/all", "READY=1").is_err());
    }

    #[test]
    fn a_manager_looks_after_whom_it_handed_a_socket() {
        let given = |pid: &'static str, fds: &'static str, notify: &'static str| {
            let variable = move |name: &str| {
                let value = match name {
                    PID => pid,
                    FDS => fds,
                    NOTIFY => notify,
                    _ => return None,
                };
                (value != "unset").then(|| value.to_owned())
            };
            cares(variable, 77)
        };
        assert!(given("77", "1", "/run/notify"));
        // A command inside another service, or one that inherited what was meant for its parent.
        assert!(!given("unset", "unset", "/run/notify"));
        assert!(!given("76", "1", "/run/notify"));
        assert!(!given("77", "0", "/run/notify"));
        assert!(!given("77", "x", "/run/notify"));
        // A socket unit without a listener.
        assert!(!given("77", "1", "unset"));
        assert!(!given("77", "1", ""));
    }

    #[test]
    fn only_a_socket_that_listens_is_one() {
        let temp = tempfile::tempdir().unwrap();
        let listens = UnixListener::bind(temp.path().join("a")).unwrap();
        assert!(is_listener(&listens.into()));
        assert!(!is_listener(&UnixDatagram::bind(temp.path().join("b")).unwrap().into()));
        assert!(!is_listener(&std::fs::File::open("/dev/null").unwrap().into()));
    }
}
