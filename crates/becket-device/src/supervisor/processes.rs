//! The processes of workers: those that are started here, and those of a predecessor, which are found again
//! by their sockets in a directory.
//! A socket is removed only if nobody listens at it.

use std::fs;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use tracing::error;

use super::process::{WorkerProcess, remove};
use super::workers::{OnDeath, Orphan, Worker, Workers};
use crate::contract::Error;
use crate::record::runtime::Runtime;
use crate::system::process::ProcessId;
use crate::system::sync::lock;

/// Real processes.
pub(crate) struct Processes {
    dir: PathBuf,
    started: AtomicU32,
    /// Bytes of decoded blocks that each may keep until a device says otherwise; it chooses when not given.
    cache_size: Option<u64>,
    /// The workers with which nothing can be spoken, and why.
    strangers: Mutex<Vec<(ProcessId, String)>>,
}

impl Processes {
    pub(crate) fn new(runtime: &Runtime, cache_size: Option<u64>) -> Processes {
        Processes {
            dir: runtime.workers(),
            started: AtomicU32::new(0),
            cache_size,
            strangers: Mutex::default(),
        }
    }

    /// A path that no other worker has.
    fn place(&self) -> PathBuf {
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        self.dir.join(format!("{}-{number}", std::process::id()))
    }
}

impl Workers for Processes {
    fn start(&self, cgroup: Option<BorrowedFd<'_>>, on_death: OnDeath) -> Result<Arc<dyn Worker>, Error> {
        Ok(WorkerProcess::start(self.place(), self.cache_size, cgroup, on_death)?)
    }

    fn orphans(&self, on_death: &dyn Fn() -> OnDeath) -> Vec<Orphan> {
        let mut orphans = Vec::new();
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let path = entry.path();
            match WorkerProcess::adopt(path.clone(), on_death()) {
                Ok((worker, held)) => orphans.push(Orphan { worker, held }),
                Err((_, error)) if nobody(&error) => remove(&path),
                Err((worker, error)) => {
                    error!(
                        "the worker at {} cannot be taken over, its devices stay with it: {error}",
                        path.display()
                    );
                    if let Some(worker) = worker.filter(|_| error.kind() == io::ErrorKind::Unsupported) {
                        lock(&self.strangers).push((worker, error.to_string()));
                    }
                }
            }
        }
        orphans
    }

    fn strangers(&self) -> Vec<(ProcessId, String)> {
        lock(&self.strangers).clone()
    }
}

/// Whether there is no listener any more.
fn nobody(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}
