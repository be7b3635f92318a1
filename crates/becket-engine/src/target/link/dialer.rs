//! How queues get connections: a thread of the device asks for them and leaves them as notes.
//! No I/O thread waits here; this thread makes no connection itself. It also has the queues look now and then
//! whether their servers say anything.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc::sync_channel};

use becket_image::link::{
    LinkSource,
    channel::{ask, left, report},
};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use super::{group::Group, line::LOOK};
use crate::decode::{Note, Waiter};

/// Little: a worker's memory is locked.
const STACK: usize = 128 << 10;

/// Gets connections for the queues of one device.
#[derive(Debug)]
pub(crate) struct Dialer(Arc<Shared>);

struct Shared {
    source: Arc<LinkSource>,
    group: Arc<Group>,
    orders: Mutex<Orders>,
    arrived: Condvar,
}

#[derive(Default)]
struct Orders {
    line: VecDeque<(Waiter, bool)>,
    /// Of whom the thread is asking for a connection now, and what stops that.
    asking: Option<(u32, u16)>,
    /// After how many breaks all that may be lost was reported, where the connector could not hear of it: it
    /// is said again at the next look.
    unheard: Option<u32>,
    stop: Option<Arc<OwnedFd>>,
    /// Every queue that has asked and has not ended, for a flush and for looks.
    known: Vec<Waiter>,
    /// Connections of queues that have ended.
    left: Vec<OwnedFd>,
    started: bool,
    ends: bool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dialer").finish_non_exhaustive()
    }
}

impl Dialer {
    pub(super) fn new(source: Arc<LinkSource>, group: Arc<Group>) -> Dialer {
        let (orders, arrived) = Default::default();
        Dialer(Arc::new(Shared { source, group, orders, arrived }))
    }

    /// Has a connection made for a queue, which hears of it by [`Note::Linked`]; `first` for the queue's
    /// first.
    pub(crate) fn ask(&self, waiter: Waiter, first: bool) {
        let mut orders = self.0.orders();
        if first {
            orders.known.push(waiter.clone());
        }
        if !orders.started {
            let shared = Arc::clone(&self.0);
            let thread = std::thread::Builder::new().name("becket-link".to_owned()).stack_size(STACK);
            if thread.spawn(move || shared.work()).is_err() {
                waiter.mailbox.leave(waiter.whom, Note::Linked(Err(Errno::NOMEM)), None);
                return;
            }
            orders.started = true;
        }
        orders.line.push_back((waiter, first));
        drop(orders);
        self.0.arrived.notify_one();
    }

    /// Asks no more for that queue, which hears of it.
    pub(crate) fn cancel(&self, waiter: &Waiter) {
        let mut orders = self.0.orders();
        if let Some(at) = orders.line.iter().position(|(asked, _)| asked.is(waiter)) {
            let waiter = orders.line.remove(at);
            drop(orders);
            if let Some((waiter, _)) = waiter {
                waiter.mailbox.leave(waiter.whom, Note::Linked(Err(Errno::CANCELED)), None);
            }
        } else if orders.asking == Some(waiter.whom)
            && let Some(stop) = &orders.stop
        {
            // Its counter cannot be full.
            let _ = rustix::io::write(&**stop, &1u64.to_ne_bytes());
        }
    }

    /// That queue ends: it hears nothing more.
    pub(crate) fn forget(&self, waiter: &Waiter) {
        let other = |known: &Waiter| !known.is(waiter);
        self.0.orders().known.retain(other);
    }

    /// A queue has ended, and this connection of its is not used any more: who made it hears that.
    pub(crate) fn left(&self, socket: OwnedFd) {
        self.0.orders().left.push(socket);
        self.0.arrived.notify_one();
    }

    /// Has every queue that has asked look at what has become of the others' connections.
    pub(super) fn rouse(&self) {
        self.0.orders().leave_all(|| Note::Regrouped);
    }

    /// Has the connector hear that all is reported that may be lost with so many breaks. It waits for nobody.
    pub(super) fn report(&self, breaks: u32) {
        self.0.report(&mut self.0.orders(), breaks);
    }

    /// Flushes over the first queue that has asked for a connection, and waits for it.
    ///
    /// # Errors
    /// That of the server, or [`Errno::NOTCONN`]: it was not asked.
    pub(super) fn flush(&self) -> Result<(), Errno> {
        let waiter = self.0.orders().known.first().cloned().ok_or(Errno::NOTCONN)?;
        let (reply, answer) = sync_channel(1);
        waiter.mailbox.leave(waiter.whom, Note::Flush(reply), None);
        answer.recv().unwrap_or(Err(Errno::NOTCONN))
    }
}

impl Drop for Dialer {
    fn drop(&mut self) {
        let mut orders = self.0.orders();
        orders.ends = true;
        if let Some(stop) = &orders.stop {
            let _ = rustix::io::write(&**stop, &1u64.to_ne_bytes());
        }
        drop(orders);
        self.0.arrived.notify_one();
    }
}

impl Orders {
    /// Says to the connector that all is reported, or has it said again.
    fn says(&mut self, breaks: u32, say: impl FnOnce() -> io::Result<()>) {
        self.unheard = say().is_err().then_some(breaks);
    }

    fn leave_all(&self, note: impl Fn() -> Note) {
        self.known.iter().for_each(|waiter| waiter.mailbox.leave(waiter.whom, note(), None));
    }
}

impl Shared {
    fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Under the lock, which a later break's request for a connection has to take: the connector hears this
    /// before.
    fn report(&self, orders: &mut Orders, breaks: u32) {
        if self.group.breaks() == breaks {
            orders.says(breaks, || report(self.source.asks()));
        }
    }

    /// Is called now and then, when there is nothing else to do.
    fn look(&self, orders: &mut Orders) {
        if let Some(breaks) = orders.unheard.take() {
            self.report(orders, breaks);
        }
        orders.leave_all(|| Note::Look);
    }

    fn work(&self) {
        loop {
            let idle = |orders: &mut Orders| orders.line.is_empty() && orders.left.is_empty() && !orders.ends;
            let waited = self.arrived.wait_timeout_while(self.orders(), LOOK, idle);
            let (mut orders, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if orders.ends {
                return;
            }
            for socket in std::mem::take(&mut orders.left) {
                // Without it, who made it keeps a connection that nobody uses.
                let _ = left(self.source.asks(), socket.as_fd());
            }
            let Some((waiter, first)) = orders.line.pop_front() else {
                self.look(&mut orders);
                continue;
            };
            let stop = eventfd(0, EventfdFlags::CLOEXEC).map(Arc::new);
            orders.asking = Some(waiter.whom);
            orders.stop = stop.as_ref().ok().map(Arc::clone);
            drop(orders);
            let given = match &stop {
                Ok(stop) => {
                    ask(self.source.asks(), first, Some(stop.as_fd())).map_err(|error| match error.kind() {
                        io::ErrorKind::Interrupted => Errno::CANCELED,
                        _ => {
                            tracing::warn!("a connection to an NBD server cannot be had: {error}");
                            Errno::IO
                        }
                    })
                }
                Err(errno) => Err(*errno),
            };
            let mut orders = self.orders();
            (orders.asking, orders.stop) = (None, None);
            drop(orders);
            waiter.mailbox.leave(waiter.whom, Note::Linked(given), None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_connector_could_not_hear_is_said_again() {
        let mut orders = Orders::default();
        orders.says(7, || Err(io::ErrorKind::WouldBlock.into()));
        assert_eq!(orders.unheard, Some(7));
        orders.says(7, || Ok(()));
        assert_eq!(orders.unheard, None, "once");
    }
}
