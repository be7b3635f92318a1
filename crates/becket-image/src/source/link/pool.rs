//! Connections to one server that threads share: each is used by one thread at a time.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::conn::{Connection, Failure};

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

    /// One that was taken is broken. Another one may take its place.
    fn lost(&self) {
        let mut state = self.state();
        state.all = state.all.saturating_sub(1);
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
