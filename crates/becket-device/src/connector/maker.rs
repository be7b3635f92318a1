//! What makes the connections of a connector.
//! It knows no worker and no supervisor.

use std::os::fd::OwnedFd;
use std::thread::JoinHandle;

use becket_image::link::channel::{Earlier, Legacy};
use becket_image::link::states::State;

/// Why there is no connection.
#[derive(Debug, Clone)]
pub enum Failure {
    /// The server cannot be reached now: it is tried again.
    Away(String),
    /// It cannot be reached by this process any more, but perhaps by another one: this one ends.
    Spent(String),
    /// It is of no use to try again: requests fail.
    Over(String),
    /// The same, because another image is there.
    Replaced(String),
}

/// What a connector leaves when it ends.
#[derive(Debug, Default)]
pub struct Left {
    /// What another one has to know.
    pub legacy: Option<Legacy>,
    /// Threads that go on: see `link::relay`.
    pub relays: Vec<JoinHandle<()>>,
}

/// Says what a range of bytes holds.
pub type Describes = Box<dyn FnMut(u64, u64) -> Vec<State> + Send>;

/// Makes connections.
pub trait Maker {
    /// A connection is about to be made for a session. Says whether it is better to wait a little.
    fn prepares(&mut self, session: u64) -> bool;

    /// What a session may have lost has been reported to its user.
    fn reported(&mut self, _session: u64) {}

    /// A session does not use the connection any more whose socket has that inode.
    fn left(&mut self, _session: u64, _inode: u64) {}

    /// Says what ranges of the image hold, on a thread of its own; `None` where that is not known.
    fn describes(&self) -> Option<Describes> {
        None
    }

    /// Makes one, and says what became of the bytes of earlier ones.
    ///
    /// # Errors
    /// See [`Failure`].
    fn attempt(&mut self, session: u64) -> Result<(OwnedFd, Earlier), Failure>;

    /// How many bytes the image had when the last connection was made, if that is known only then.
    fn size(&self) -> Option<u64> {
        None
    }

    /// Looks whether the server can be reached again, for which nobody has asked.
    ///
    /// # Errors
    /// See [`Failure`].
    fn look(&mut self) -> Result<(), Failure>;

    /// The connector ends. `over`: no other one follows, because the device is detached.
    fn ends(self: Box<Self>, over: bool) -> Left;
}
