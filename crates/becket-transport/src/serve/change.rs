//! A live device is served otherwise: another map, other sources, read-only or not, past the page cache or
//! through it.
//! It decides nothing: which request sees what is the engine's rule (see its `core::hold`).

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use becket_engine::{IoThreads, Serving};
use becket_image::{DirectIo, Map, Source};

use super::{ServeError, Served};
use crate::aside;

/// How long requests that are under way may take to end before a change is given up.
const PATIENCE: Duration = Duration::from_secs(10);

/// How a device should be served.
#[derive(Debug)]
pub struct Change {
    /// Where the bytes are.
    pub map: Map,
    /// The sources that the map speaks of; those that the device has when none are given.
    pub sources: Option<Vec<Source>>,
    /// Refuse what would change them.
    pub read_only: bool,
    /// What goes past the page cache where that is possible.
    pub direct_io: DirectIo,
}

impl Served {
    /// Serves requests otherwise, without losing any: those under way end as they began, later ones begin
    /// anew.
    ///
    /// A device that grows is changed before the kernel hears of its size, one that shrinks afterwards.
    ///
    /// # Errors
    /// What is under way does not end, a table is full, or what was written could not be synced: the device
    /// goes on as before. Or an I/O thread has ended.
    pub fn change(&self, threads: &IoThreads, change: Change) -> Result<(), ServeError> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        // A device whose queues have ended has no requests left.
        let Some(old) = self.serving() else { return Ok(()) };
        let Change { map, sources, read_only, direct_io } = change;
        let new = match sources {
            None => old.otherwise(map, read_only, direct_io),
            Some(sources) => Serving::new(map, sources, read_only, self.stats.len())
                .intercepted_as(&old)
                .with_unit(old.unit())
                .with_direct_io(direct_io),
        };
        let new = Arc::new(new);
        let queues = self.live().all();
        threads
            .change(&queues, &old, &new, PATIENCE)
            .map_err(|source| ServeError::Change { id: self.id, source })?;
        self.serves(&new);
        aside::close(move || drop(old));
        Ok(())
    }
}
