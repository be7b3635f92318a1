//! The clients of exports in a worker: counted, handed to what serves them, and given back when it leaves.
//! It reads nothing of what they send.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use becket_engine::{Geometry, IoThreads};
use becket_transport::nbd::{self, Nbd};
use becket_transport::serve::ServeError;
use becket_transport::vhost_user::{self, VhostUser};
use tracing::warn;

use crate::contract::DeviceId;
use crate::contract::export::{Visitor, Visits};
use crate::contract::protocol::Report;
use crate::system::sync::lock;

/// Tells the supervisor something, with descriptors.
pub(super) type Tell = Arc<dyn Fn(&Report, &[BorrowedFd<'_>]) + Send + Sync>;

/// What takes the clients of an export, and how many it has had.
#[derive(Clone)]
pub(super) struct Front {
    taker: Taker,
    count: Arc<Count>,
}

#[derive(Clone)]
pub(super) enum Taker {
    Nbd(Arc<Nbd>),
    VhostUser(Arc<VhostUser>),
}

impl Front {
    pub(super) fn new(taker: Taker, count: Arc<Count>) -> Front {
        Front { taker, count }
    }

    /// Serves a client, whose socket is the first descriptor; one that cannot be served is turned away.
    pub(super) fn connect(
        self,
        id: DeviceId,
        threads: &Arc<IoThreads>,
        visitor: Visitor,
        fds: Vec<OwnedFd>,
        tell: &Tell,
    ) {
        let mut fds = fds.into_iter();
        let Some(socket) = fds.next() else { return warn!("a client of {id} is turned away") };
        let Front { taker, count } = self;
        count.begin();
        match (taker, visitor) {
            (Taker::VhostUser(taker), Visitor::VhostUser) => {
                take_in(&taker, id, vhost_user::Departure::new(socket), count, tell);
            }
            (Taker::VhostUser(taker), Visitor::VhostUserAgain { agreed }) => {
                let again = vhost_user::Departure { socket, agreed, fds: fds.collect() };
                take_in(&taker, id, again, count, tell);
            }
            (Taker::Nbd(nbd), Visitor::Nbd { terms, unread }) => {
                let agreed = match serde_json::from_value(terms) {
                    Ok(agreed) => agreed,
                    Err(error) => {
                        count.end();
                        return warn!("a client of {id} is turned away: {error}");
                    }
                };
                let tell = Arc::clone(tell);
                let ended = move |departure: Option<nbd::Departure>| {
                    departure.into_iter().for_each(|departure| give_back(id, departure, &tell));
                    count.end();
                };
                if let Err(error) = nbd.connect(threads, socket, agreed, unread, Box::new(ended)) {
                    warn!("a client of {id} is turned away: {error}");
                }
            }
            _ => {
                warn!("a client of {id} speaks another protocol");
                count.end();
            }
        }
    }

    /// The device looks like this now.
    pub(super) fn changed(&self, geometry: Geometry) {
        if let Taker::VhostUser(taker) = &self.taker {
            taker.changed(geometry);
        }
    }

    /// Begins to release the export: its clients are given back.
    pub(super) fn leave(&self, threads: &IoThreads) -> Result<(), ServeError> {
        match &self.taker {
            Taker::VhostUser(taker) => {
                taker.leave();
                Ok(())
            }
            Taker::Nbd(nbd) => nbd.leave(threads),
        }
    }

    /// Says again what a supervisor must know.
    pub(super) fn say(&self) {
        self.count.say();
        if let Taker::VhostUser(taker) = &self.taker {
            taker.say();
        }
    }
}

/// Serves the front-end of a virtual machine, and has the supervisor know what the next worker needs.
fn take_in(taker: &VhostUser, id: DeviceId, front: vhost_user::Departure, count: Arc<Count>, tell: &Tell) {
    let tell = Arc::clone(tell);
    let keep = move |front: Option<vhost_user::Departure>| {
        let Some(vhost_user::Departure { socket, agreed, fds }) = front else {
            return tell(&Report::Stays { id }, &[]);
        };
        let visitor = match agreed.is_empty() {
            true => Visitor::VhostUser,
            false => Visitor::VhostUserAgain { agreed },
        };
        let fds: Vec<_> = std::iter::once(&socket).chain(&fds).map(|fd| fd.as_fd()).collect();
        tell(&Report::Left { id, visitor }, &fds);
    };
    let last = keep.clone();
    let ended = move |front| {
        last(front);
        count.end();
    };
    taker.connect(front, vhost_user::Hooks { keep: Box::new(keep), ended: Box::new(ended) });
}

/// A client that was left goes to the next worker.
fn give_back(id: DeviceId, departure: nbd::Departure, tell: &Tell) {
    let nbd::Departure { socket, agreed, unread } = departure;
    match serde_json::to_value(agreed) {
        Ok(terms) => tell(&Report::Left { id, visitor: Visitor::Nbd { terms, unread } }, &[socket.as_fd()]),
        Err(error) => warn!("a client of {id} is lost: {error}"),
    }
}

/// How many clients an export has had. Each change is reported in the order in which it happens.
pub(super) struct Count {
    visits: Mutex<Visits>,
    report: Box<dyn Fn(Visits) + Send + Sync>,
}

impl Count {
    pub(super) fn new(report: impl Fn(Visits) + Send + Sync + 'static) -> Arc<Count> {
        Arc::new(Count { visits: Mutex::default(), report: Box::new(report) })
    }

    /// A client has come.
    pub(super) fn begin(&self) {
        self.change(|visits| visits.begun += 1);
    }

    /// One has gone.
    pub(super) fn end(&self) {
        self.change(|visits| visits.ended += 1);
    }

    /// Says again how many there are.
    pub(super) fn say(&self) {
        self.change(|_| {});
    }

    fn change(&self, change: impl FnOnce(&mut Visits)) {
        // Held while it is reported, so that the last report is the last count.
        let mut visits = lock(&self.visits);
        change(&mut visits);
        (self.report)(*visits);
    }
}
