//! A live device changes between direct I/O and the page cache.
//! It never leaves a queue held, and never lets the two ways overlap in time (the engine's `governor::hold` says why).

use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use becket_engine::IoThreads;

use super::{ServeError, Served};

/// How long operations that are under way may take to end before a switch is given up.
const PATIENCE: Duration = Duration::from_secs(10);

impl Served {
    /// Sends requests past the page cache from now on, or through it, without losing any.
    ///
    /// All queues are held until nothing of the device is under way on its backing, for the two ways must not overlap in
    /// time; requests that arrive meanwhile wait for this moment. Afterwards all go on.
    ///
    /// # Errors
    /// An operation on the backing does not end, and the device goes on as before; or an I/O thread has ended.
    pub fn switch(&self, threads: &IoThreads, direct: bool) -> Result<(), ServeError> {
        let failed = |source| ServeError::Engine { id: self.id, source };
        let deadline = Instant::now() + PATIENCE;
        let held: Result<Vec<_>, _> = self.queues.iter().map(|queue| threads.hold(*queue)).collect();
        let drained = held.as_ref().is_ok_and(|held| {
            held.iter().all(|drained| {
                let left = deadline.saturating_duration_since(Instant::now());
                // A queue that has ended lets go of the sender, and has nothing under way either.
                !matches!(drained.recv_timeout(left), Err(RecvTimeoutError::Timeout))
            })
        });
        // The block device below the file is only ever read past its page cache, which knows nothing of the file's.
        let from_file = if drained && !direct {
            self.queues.iter().try_for_each(|queue| threads.return_to_file(*queue).map(drop))
        } else {
            Ok(())
        };
        let drained = drained && from_file.is_ok();
        if drained {
            self.direct_io.store(direct, Ordering::Relaxed);
        }
        let now = self.direct_io.load(Ordering::Relaxed);
        // All of them, whatever has failed: a queue that stays held serves nobody.
        let let_go = self.queues.iter().map(|queue| threads.let_go(*queue, now).map(drop));
        let let_go = let_go.fold(Ok(()), Result::and);
        held.and(from_file).and(let_go).map_err(failed)?;
        if drained { Ok(()) } else { Err(ServeError::Busy { id: self.id }) }
    }
}
