//! What makes the connections of a connector.
//! It knows no worker and no supervisor.

use std::os::fd::OwnedFd;

use becket_image::link::channel::{Earlier, Legacy};

/// Why there is no connection.
#[derive(Debug)]
pub enum Failure {
    /// The server cannot be reached now: it is tried again.
    Away(String),
    /// It is of no use to try again: requests fail.
    Over(String),
}

/// Makes connections.
pub trait Maker {
    /// A connection is about to be made for a session. Says whether it is better to wait a little.
    fn prepares(&mut self, session: u64) -> bool;

    /// Makes one, and says what became of the bytes of earlier ones.
    ///
    /// # Errors
    /// See [`Failure`].
    fn attempt(&mut self, session: u64) -> Result<(OwnedFd, Earlier), Failure>;

    /// The connector ends; says what another one has to know. `over`: there will be none, because the device
    /// is detached.
    fn ends(self: Box<Self>, over: bool) -> Option<Legacy>;
}
