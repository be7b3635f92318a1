//! Workers as the supervisor needs them: a shared one, one of its own for a device, and those of a
//! predecessor.
//! It never waits for a worker that does not respond.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use becket_engine::Summary;

use crate::contract::export::{Visitor, Visits};
use crate::contract::kept::Kept;
use crate::contract::protocol::{Change, Serve};
use crate::contract::{DeviceId, Error};
use crate::system::process::ProcessId;

/// A client of an export, with its socket and the descriptors of what was agreed on with it.
pub(crate) type Arrival = (Visitor, Vec<OwnedFd>);

/// Who moves the bytes of devices.
pub(crate) trait Worker: Send + Sync {
    fn id(&self) -> ProcessId;
    /// Precautions that the environment did not allow it.
    fn notes(&self) -> &[String];
    /// Whether it can be given devices.
    fn alive(&self) -> bool;
    /// Whether it died by itself, and was not ended because it did not answer.
    fn died(&self) -> bool {
        !self.alive()
    }
    /// Whether it answers in that time, in the thread that takes its orders.
    fn responds(&self, _patience: Duration) -> bool {
        true
    }
    /// Hands it a device and returns when the device can be started: where its queues begin, for the next
    /// worker. The first descriptor is the device's ublkcN.
    fn serve(&self, serve: Serve, fds: &[BorrowedFd<'_>]) -> Result<u32, Error>;
    /// Makes it serve a device otherwise; returns when it does. The descriptors are those of the files that
    /// are given.
    ///
    /// # Errors
    /// The device goes on as before, unless the worker has died: then it is unknown how it was served last.
    fn change(&self, change: Change, fds: &[BorrowedFd<'_>]) -> Result<(), Error>;
    /// What it has done for a device. Only one caller at a time may ask about the same.
    fn stats(&self, id: DeviceId) -> Result<Summary, Error>;
    /// Makes it take no more requests of a FUSE device, finish those that it has, and close it; returns
    /// before that.
    fn leave(&self, id: DeviceId) -> Result<(), Error>;
    /// Has it know that a device is about to end for good, or stays after all. It then has the server of its
    /// image flush, in at most [`FAREWELL`](becket_engine::FAREWELL).
    fn expect(&self, _id: DeviceId, _end: bool) -> Result<(), Error> {
        Ok(())
    }
    /// Why finished writes may be lost of a device that has ended for good. It is returned once.
    fn take_unsaved(&self, _id: DeviceId) -> Option<String> {
        None
    }
    /// Makes the reads of a device fail that wait for its server; returns before that.
    fn give_up_reads(&self, _id: DeviceId, _before: u64) {}
    /// Gives it a client of an export; returns before it is served.
    fn connect(&self, id: DeviceId, _visitor: &Visitor, _fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        Err(Error::Worker { what: format!("takes no clients of {id}") })
    }
    /// Has `hook` called with the number of an export's clients, now and whenever that changes.
    fn follow(&self, _id: DeviceId, _hook: Hook) {}
    /// The clients that it had of an export that it has left, or that can do without it now that it is dead.
    /// They are returned once.
    fn take_left(&self, _id: DeviceId) -> Vec<Arrival> {
        Vec::new()
    }
    /// Waits until it has closed everything of a device; `false` when that took too long. A dead one has.
    fn await_closed(&self, id: DeviceId, timeout: Duration) -> bool;
    /// Whether it serves devices that it keeps to itself, since they are of a later version.
    fn withholds(&self) -> bool {
        false
    }

    /// Has the worker listen for the next supervisor at a new socket, after its socket was removed.
    fn announce(&self) -> io::Result<()> {
        Ok(())
    }
    /// Takes leave of it: it ends once it has no device.
    fn dismiss(&self);
    /// Ends it at once, whatever it is doing.
    fn kill(&self);
}

/// Called with the number of an export's clients. It must not wait.
pub(crate) type Hook = Arc<dyn Fn(Visits) + Send + Sync>;

/// Called once when a worker has died.
pub(crate) type OnDeath = Box<dyn FnOnce(ProcessId) + Send>;

/// A worker of a predecessor, with what it serves.
pub(crate) struct Orphan {
    pub(crate) worker: Arc<dyn Worker>,
    pub(crate) held: Vec<Kept>,
}

/// Where workers come from.
pub(crate) trait Workers: Send + Sync {
    /// Starts one, in the group of that `cgroup.procs` where one is given.
    fn start(&self, cgroup: Option<BorrowedFd<'_>>, on_death: OnDeath) -> Result<Arc<dyn Worker>, Error>;
    /// Finds those that a predecessor has left behind.
    fn orphans(&self, on_death: &dyn Fn() -> OnDeath) -> Vec<Orphan>;
    /// Those of them with which no version is common, and why. They go on serving.
    fn strangers(&self) -> Vec<(ProcessId, String)> {
        Vec::new()
    }
    /// Lets time pass before the next attempt to have a device served.
    fn rest(&self, time: Duration) {
        std::thread::sleep(time);
    }
}
