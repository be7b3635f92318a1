//! A live device changes how it is served: all of its queues at once, between two requests. It never leaves a
//! queue held, and never lets requests of two configurations overlap in time (`core::hold` has the rule and
//! why).

use std::{
    io,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use super::{IoThreads, Order, QueueId};
use crate::{Error, Serving, aside};

/// Longest that writing back dirty data may take while requests are still served. A page cache full of it
/// takes long, and a retry finds less; a file system that does not answer takes for ever.
const SETTLING: Duration = Duration::from_secs(30);

impl IoThreads {
    /// Has all queues of a device, which serve by `old`, serve by `new` instead, for at most a pause of what
    /// is under way.
    ///
    /// What can fail is done while they still serve: the descriptors of `new` are put into the rings' tables.
    /// Then all are held until nothing is under way in any of them; requests that come meanwhile wait. Where
    /// `new` will not sync what was written by `old`, that is synced first: most of it before the queues are
    /// held.
    ///
    /// # Errors
    /// Requests do not end within `patience`, a table is full, or a sync failed or does not end: all queues
    /// go on as before. Or a thread has ended.
    pub fn change(
        &self,
        queues: &[QueueId],
        old: &Arc<Serving>,
        new: &Arc<Serving>,
        patience: Duration,
    ) -> Result<(), Error> {
        let settles = new.read_only || !new.has_sources_of(old);
        let settle = |time| if settles { sync_within(old, time) } else { Ok(()) };
        let ready = queues.iter().try_for_each(|queue| self.prepare(*queue, new));
        let ready = ready.and_then(|()| settle(SETTLING));
        let outcome = ready.and_then(|()| {
            let held: Vec<_> = queues.iter().map(|queue| self.hold(*queue)).collect::<Result<_, _>>()?;
            await_drained(held, patience)?;
            settle(patience)
        });
        // All of them, whatever has failed: a queue that stays held serves no request.
        let let_go = queues.iter().map(|queue| self.let_go(*queue, outcome.is_ok()));
        let let_go = let_go.fold(Ok(()), Result::and);
        outcome.and(let_go)
    }

    /// A queue that has ended needs no preparation.
    fn prepare(&self, queue: QueueId, new: &Arc<Serving>) -> Result<(), Error> {
        self.ask(queue.thread, |reply| Order::Prepare(queue.serial, Arc::clone(new), reply))?.map(drop)
    }

    /// The receiver hears when nothing of the queue is under way, or that the sender is gone because it has
    /// ended.
    fn hold(&self, queue: QueueId) -> Result<Receiver<bool>, Error> {
        self.tell(queue.thread, |reply| Order::Hold(queue.serial, reply))
    }

    fn let_go(&self, queue: QueueId, change: bool) -> Result<(), Error> {
        self.ask(queue.thread, |reply| Order::LetGo(queue.serial, change, reply)).map(drop)
    }
}

/// Syncs what was written, on a thread of its own: its file system may never answer, and the supervisor that
/// ordered the change takes a silent worker for dead. A sync that completes later counts all the same, and so
/// does its failure.
fn sync_within(old: &Arc<Serving>, time: Duration) -> Result<(), Error> {
    let syncing = Arc::clone(old);
    let outcome = aside::begun(move || {
        let outcome = syncing.sync_now();
        // Before the result is sent: the caller closes the old files itself.
        drop(syncing);
        outcome
    });
    match outcome.recv_timeout(time) {
        Ok(outcome) => outcome.map_err(|errno| Error::Unsynced { source: errno.into() }),
        Err(RecvTimeoutError::Timeout) => Err(Error::Syncing { seconds: time.as_secs() }),
        Err(RecvTimeoutError::Disconnected) => {
            Err(Error::Unsynced { source: io::Error::other("no thread can be had for it") })
        }
    }
}

/// Waits until nothing is under way in any of the queues.
fn await_drained(held: Vec<Receiver<bool>>, patience: Duration) -> Result<(), Error> {
    let deadline = Instant::now() + patience;
    for drained in held {
        let left = deadline.saturating_duration_since(Instant::now());
        // A queue that has ended lets go of the sender, and has nothing under way either.
        if drained.recv_timeout(left) == Err(RecvTimeoutError::Timeout) {
            return Err(Error::Busy { seconds: patience.as_secs() });
        }
    }
    Ok(())
}
