//! Where clients find a supervisor: the socket in its runtime directory, and the lock beside it.
//! If that directory is removed under a living server, it is made again, with all that others look for there.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tracing::{error, info};

use super::devices::Supervisor;
use crate::contract::Error;
use crate::contract::RUNS_ALREADY;
use crate::record::runtime::{Runtime, lock_file};
use crate::system::log;

/// Where clients knock.
pub(super) struct Place {
    pub(super) socket: UnixListener,
    /// Made by us. That of a service manager stays when we end: it waits for the next client there.
    pub(super) ours: bool,
    runtime: Runtime,
    /// The socket's file, as clients found it when it was looked at last.
    seen: Option<(u64, u64)>,
    /// Can be read when something has gone from the directory.
    pub(super) watch: Option<OwnedFd>,
    /// The lock in the directory that was made again.
    lock: Option<File>,
    /// When that was first seen to have gone.
    lost: Option<Instant>,
    /// That it cannot be made again has been said.
    said: bool,
}

/// How long a removal may take before the directory is made again.
const SETTLED: Duration = Duration::from_millis(500);

impl Place {
    pub(super) fn new(handed: Option<UnixListener>, runtime: &Runtime) -> Result<Place, Error> {
        let ours = handed.is_none();
        let socket = handed.map_or_else(|| listen(runtime), Ok)?;
        socket.set_nonblocking(true).map_err(Error::io("listen at", &runtime.socket()))?;
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
        let runtime = runtime.clone();
        let mut place =
            Place { socket, ours, runtime, seen: None, watch, lock: None, lost: None, said: false };
        place.look();
        Ok(place)
    }

    /// Remembers what clients find, and watches over it. Without inotify it is looked at once in a while.
    fn look(&mut self) {
        self.seen = file_at(&self.runtime.socket());
        let gone =
            WatchFlags::DELETE | WatchFlags::DELETE_SELF | WatchFlags::MOVED_FROM | WatchFlags::MOVE_SELF;
        if let Some(watch) = &self.watch {
            let _ = inotify::add_watch(watch, self.runtime.dir(), gone);
        }
    }

    /// Whether what clients look for is not there any more.
    pub(super) fn is_lost(&self) -> bool {
        self.seen.is_some()
            && (file_at(&self.runtime.socket()) != self.seen || !self.runtime.records().is_dir())
    }

    /// Makes it again where it is lost.
    pub(super) fn keep(&mut self, supervisor: &Supervisor) {
        if let Some(watch) = &self.watch {
            let mut words = [0; 4096];
            while rustix::io::read(watch, &mut words).is_ok_and(|read| read > 0) {}
        }
        if !self.is_lost() {
            self.lost = None;
            return;
        }
        if self.lost.get_or_insert_with(Instant::now).elapsed() < SETTLED {
            return;
        }
        let dir = self.runtime.dir().display().to_string();
        let count = supervisor.owns();
        match self.again(supervisor) {
            Ok(()) => info!("{dir} was removed: made again, with the records of {count} devices"),
            Err(error) if !self.said => {
                self.said = true;
                error!(
                    "{dir} was removed and cannot be made again: {error}; {count} devices are \
                     served but not listed"
                );
            }
            Err(_) => {}
        }
    }

    fn again(&mut self, supervisor: &Supervisor) -> Result<(), Error> {
        let runtime = Runtime::at(self.runtime.dir().to_owned(), self.runtime.links().to_owned())?;
        log::reopen();
        if self.lock.as_ref().is_none_or(|lock| file_at(&runtime.lock()) != of(lock)) {
            let lock = lock_file(&runtime.lock())?;
            // A command may have started another server, which ends when it has no device.
            rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)
                .map_err(|_| Error::Server { what: RUNS_ALREADY.to_owned(), log: None })?;
            self.lock = Some(lock);
        }
        // Before a client can ask.
        supervisor.reappear();
        supervisor.forget_twins();
        let socket = listen(&runtime)?;
        socket.set_nonblocking(true).map_err(Error::io("listen at", &runtime.socket()))?;
        (self.socket, self.ours, self.said) = (socket, true, false);
        self.look();
        Ok(())
    }
}

fn listen(runtime: &Runtime) -> Result<UnixListener, Error> {
    let path = runtime.socket();
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(Error::io("replace", &path)(error));
        }
        _ => {}
    }
    // The directory is ours alone, so no other user connects before the mode is set.
    let listener = UnixListener::bind(&path).map_err(Error::io("listen at", &path))?;
    fs::set_permissions(&path, Permissions::from_mode(0o600)).map_err(Error::io("protect", &path))?;
    Ok(listener)
}

fn file_at(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

fn of(file: &File) -> Option<(u64, u64)> {
    file.metadata().ok().map(|meta| (meta.dev(), meta.ino()))
}
