//! Workers as the supervisor asks for them: a shared one, one of its own for a device, and those of a predecessor.
//! It never waits for a worker that does not speak.

use std::fs;
use std::io::{self, Write as _};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use becket_engine::Summary;
use becket_image::Map;

use super::process::WorkerProcess;
use crate::process::ProcessId;
use crate::runtime::Runtime;
use crate::worker::kept::Kept;
use crate::worker::protocol::Serve;
use crate::{Error, log};

/// Who moves the bytes of devices.
pub(crate) trait Server: Send + Sync {
    fn id(&self) -> ProcessId;
    /// Precautions that the environment did not allow it.
    fn notes(&self) -> &[String];
    /// Whether it can be given devices.
    fn alive(&self) -> bool;
    /// Hands it a device and returns when the device can be started. The first descriptor is the device's ublkcN.
    fn serve(&self, serve: Serve, fds: &[BorrowedFd<'_>]) -> Result<(), Error>;
    /// Has it look a device's requests up in another map of the same files; returns when it does.
    fn remap(&self, id: u32, map: Map) -> Result<(), Error>;
    /// Has it send a device's requests past the page cache, or through it; returns when it does.
    fn direct_io(&self, id: u32, on: bool) -> Result<(), Error>;
    /// What it has done for a device. Only one caller at a time may ask about the same.
    fn stats(&self, id: u32) -> Result<Summary, Error>;
    /// Waits until it has closed everything of a device; `false` when that took too long. A dead one has.
    fn await_closed(&self, id: u32, timeout: Duration) -> bool;
    /// Takes leave of it: it ends once it has no device.
    fn dismiss(&self);
    /// Ends it at once, whatever it is doing.
    fn kill(&self);
}

/// Is told once that a worker has died.
pub(crate) type OnDeath = Box<dyn FnOnce(ProcessId) + Send>;

/// A worker of a predecessor, with what it serves.
pub(crate) struct Orphan {
    pub(crate) server: Arc<dyn Server>,
    pub(crate) held: Vec<Kept>,
}

/// Where workers come from.
pub(crate) trait Workers: Send + Sync {
    /// Starts one, in the group of that `cgroup.procs` where one is given.
    fn start(&self, cgroup: Option<BorrowedFd<'_>>, on_death: OnDeath) -> Result<Arc<dyn Server>, Error>;
    /// Finds those that a predecessor has left behind.
    fn orphans(&self, on_death: &dyn Fn() -> OnDeath) -> Vec<Orphan>;
    /// Lets time pass before the next attempt to have a device served.
    fn rest(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// Real processes, which are found again by sockets in a directory.
pub(crate) struct Processes {
    dir: PathBuf,
    started: AtomicU32,
}

impl Processes {
    pub(crate) fn new(runtime: &Runtime) -> Processes {
        Processes { dir: runtime.workers(), started: AtomicU32::new(0) }
    }

    /// A path that no other worker has.
    fn place(&self) -> PathBuf {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        self.dir.join(format!("{}-{number}", std::process::id()))
    }
}

impl Workers for Processes {
    fn start(&self, cgroup: Option<BorrowedFd<'_>>, on_death: OnDeath) -> Result<Arc<dyn Server>, Error> {
        Ok(WorkerProcess::start(self.place(), cgroup, on_death)?)
    }

    fn orphans(&self, on_death: &dyn Fn() -> OnDeath) -> Vec<Orphan> {
        let mut orphans = Vec::new();
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let path = entry.path();
            match WorkerProcess::adopt(path.clone(), on_death()) {
                Ok((server, held)) => orphans.push(Orphan { server, held }),
                Err(error) if nobody(&error) => remove(&path),
                Err(error) => log::warn(format_args!(
                    "the worker at {} cannot be taken over, its devices stay with it: {error}",
                    path.display()
                )),
            }
        }
        orphans
    }
}

/// Whether nobody listens there any more.
fn nobody(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}

/// Removes a worker's socket.
pub(super) fn remove(path: &Path) {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            log::warn(format_args!("{} stays: {error}", path.display()));
        }
        _ => {}
    }
}

/// Moves a process into the group of a `cgroup.procs`.
pub(super) fn join(cgroup: BorrowedFd<'_>, pid: u32) -> io::Result<()> {
    fs::File::from(cgroup.try_clone_to_owned()?).write_all(pid.to_string().as_bytes())
}
