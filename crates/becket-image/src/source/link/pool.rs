//! Connections to one server that threads share: each is used by one thread at a time.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use becket_uapi::nbd;

use super::conn::{Connection, Failure};
use super::dial::{Dialed, dial};
use super::error::DialError;
use super::handshake::{Agreed, CONNECTIONS, Wanted};
use super::helper::{self, Reached, Way};
use super::tls::Trust;
use super::uri::{Endpoint, Server};

/// How long a server may take for an answer, and for a negotiation, if the user does not say it.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);
/// How long it may take for each connection but the first: it may take no more.
pub(super) const SHORT: Duration = Duration::from_secs(2);

/// The first connections to an export: one, or all that the program gives which reaches it; and whether it
/// was made for them.
pub(super) fn first(
    endpoint: &Endpoint,
    wanted: Wanted,
    trust: Option<&Trust>,
    patience: Duration,
) -> Result<(Vec<Connection>, Agreed, bool), DialError> {
    let Reached { sockets, agreed, new } = match &endpoint.server {
        Server::Rbd(rbd) => helper::connect(rbd, Way::of(wanted), wanted.structured, patience)?,
        _ => {
            let Dialed { socket, agreed, .. } = dial(endpoint, wanted, trust, patience)?;
            Reached { sockets: vec![socket], agreed, new: false }
        }
    };
    let connections = sockets.into_iter().map(|socket| Connection::new(socket, agreed, Some(patience)));
    Ok((connections.collect::<io::Result<_>>()?, agreed, new))
}

/// Up to how many connections more are made. For an image of Ceph each would be a program of its own.
pub(super) fn most(endpoint: &Endpoint, agreed: &Agreed) -> usize {
    let shares = agreed.has(nbd::CAN_MULTI_CONN) && !matches!(endpoint.server, Server::Rbd(_));
    if shares { CONNECTIONS } else { 1 }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Pool {
    state: Mutex<State>,
    /// A connection is free, or gone.
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    free: Vec<Connection>,
    /// How many there are, those in use among them.
    all: usize,
    most: usize,
}

impl Pool {
    /// These connections, and as many more as make `most`.
    pub(super) fn of(connections: Vec<Connection>, most: usize) -> Pool {
        let state = State { all: connections.len(), free: connections, most };
        Pool { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many connections there are.
    pub(super) fn count(&self) -> usize {
        self.state().all
    }

    /// Has something done over a connection that nobody else uses meanwhile; see [`Pool::take`]. One that
    /// breaks is gone.
    ///
    /// # Errors
    /// What the server says, that the connection is broken, or that there is none.
    pub(super) fn with<T>(
        &self,
        make: impl Fn(bool) -> io::Result<Connection>,
        what: impl FnOnce(&mut Connection) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let mut connection = self.take(make).map_err(Failure::Unmade)?;
        let done = what(&mut connection);
        match done {
            Err(Failure::Broken(_) | Failure::Unmade(_)) => {
                drop(connection);
                self.lost();
            }
            Ok(_) | Err(Failure::Said(_)) => self.put(connection),
        }
        done
    }

    /// One that nobody uses: a free one, a new one that `make` makes, or the first to come back. `make` hears
    /// whether it is the only one. A server that takes no more than there are is not asked again.
    ///
    /// # Errors
    /// There is none, and none can be made.
    fn take(&self, make: impl Fn(bool) -> io::Result<Connection>) -> io::Result<Connection> {
        let mut state = self.state();
        loop {
            if let Some(connection) = state.free.pop() {
                return Ok(connection);
            }
            if state.all < state.most {
                let only = state.all == 0;
                state.all += 1;
                drop(state);
                let made = make(only);
                let Err(error) = made else { return made };
                state = self.state();
                state.all -= 1;
                if state.all == 0 {
                    self.changed.notify_all();
                    return Err(error);
                }
                state.most = state.all;
                continue;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// It is free again.
    fn put(&self, connection: Connection) {
        self.state().free.push(connection);
        self.changed.notify_one();
    }

    /// One that was taken is broken, and so are most likely those that nobody uses. Others may take their
    /// place.
    fn lost(&self) {
        let mut state = self.state();
        let free = std::mem::take(&mut state.free);
        state.all = state.all.saturating_sub(1 + free.len());
        drop(state);
        self.changed.notify_one();
    }

    /// Takes one that is free out of it, and ends the others that are.
    pub(super) fn let_go(&self) -> Option<Connection> {
        let mut state = self.state();
        let free = std::mem::take(&mut state.free);
        state.all = state.all.saturating_sub(free.len());
        free.into_iter().next()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A connection, and the server's end.
    fn pair() -> (Connection, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Connection::new(ours.into(), Agreed::default(), Some(PATIENCE)).unwrap(), theirs)
    }

    #[test]
    fn one_that_breaks_takes_those_along_that_nobody_uses_and_one_is_made_for_all() {
        let (connections, far): (Vec<_>, Vec<_>) = (0..4).map(|_| pair()).unzip();
        let pool = Pool::of(connections, 1);
        drop(far);
        let none = |_| Err(io::ErrorKind::NotConnected.into());
        assert!(matches!(pool.with(none, Connection::flush), Err(Failure::Broken(_))));
        assert_eq!(pool.count(), 0);
        let (connection, _far) = pair();
        let (made, uses) = (Mutex::new(vec![connection]), |_: &mut Connection| Ok(()));
        for _ in 0..3 {
            let make = |only: bool| {
                assert!(only);
                made.lock().unwrap().pop().ok_or(io::ErrorKind::NotConnected.into())
            };
            assert!(pool.with(make, uses).is_ok());
            assert_eq!(pool.count(), 1);
        }
    }
}
