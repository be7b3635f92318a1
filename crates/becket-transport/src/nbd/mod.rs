//! The image as an export over NBD (doc/proto.md of the NBD project): the handshake, and connections that
//! come and go, each of them one queue on an I/O thread.
//! Knows nothing of image formats. A client is not trusted: what it sends is bounded in memory and work, and
//! can harm only its own connection.
//!
//! | file | what it has |
//! | --- | --- |
//! | `guest` | a client that is left: what it leaves behind, and when it is not waited for any longer |
//! | `handshake` | until a client has chosen an export; without a socket |
//! | `port` | a connection's front: from requests to the engine and back |
//! | `requests` | what requests want, and how they are answered; without a socket |
//!
//! A flush on one connection covers what all have finished writing, because the engine counts the syncs of a
//! file for the whole device. So every client may use several connections (`CAN_MULTI_CONN`).

#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod guest;
mod handshake;
mod port;
mod requests;

pub use guest::STILL;
pub use handshake::{Agreed, Handshake, LARGEST, STRANGER, Shown, Step};

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use becket_engine::{IoThreads, Memory};

use crate::serve::{Finally, ServeError, Served, Setup};
use guest::{Guest, Parting};
use port::NbdPort;
use requests::{HEAD, PIECE, STAGING};

/// What ends a connection: with the client that was left, where the queue was asked to leave.
pub type Ended = Box<dyn FnOnce(Option<Departure>) + Send>;

/// A client that was left between two replies, for the next worker.
#[derive(Debug)]
pub struct Departure {
    /// Its connection.
    pub socket: OwnedFd,
    /// What was agreed on with it.
    pub agreed: Agreed,
    /// What it has sent that was not carried out.
    pub unread: Vec<u8>,
}

/// An image that is exported over NBD.
#[derive(Debug)]
pub struct Nbd {
    served: Arc<Served>,
    tether: Mutex<Option<Arc<OwnedFd>>>,
    /// The places of queues that are free.
    free: Arc<Mutex<BTreeSet<u16>>>,
    /// The clients that are connected, by their places.
    guests: Arc<Mutex<BTreeMap<u16, Guest>>>,
    depth: u16,
    /// The backing gives ranges back.
    punches: bool,
}

impl Nbd {
    /// Makes an image ready for clients, without one. `setup.queues` is the most connections at once, and
    /// `setup.depth` the requests of each. `tether` stays open as long as anything may still reach the
    /// backing (see [`becket_engine::Port::tether`]). `on_closed` runs once it is [left](Nbd::leave) and
    /// the last connection has ended.
    ///
    /// # Errors
    /// The image cannot be served; `on_closed` still runs.
    pub fn serve(
        setup: Setup,
        tether: OwnedFd,
        on_closed: Box<dyn FnOnce() + Send>,
    ) -> Result<Nbd, ServeError> {
        let (queues, depth, punches) = (setup.queues, setup.depth, setup.geometry.discard);
        let served = setup.serve_none(1, Finally::new(on_closed))?;
        Ok(Nbd {
            served: Arc::new(served),
            tether: Mutex::new(Some(Arc::new(tether))),
            free: Arc::new(Mutex::new((0..queues).collect())),
            guests: Arc::default(),
            depth: depth.max(1),
            punches,
        })
    }

    /// What is served.
    pub fn served(&self) -> &Arc<Served> {
        &self.served
    }

    /// Serves a client that has agreed on this export. `unread` is what it has sent since. The socket must
    /// block. `ended` runs when its connection has ended; at once, if it cannot be served.
    pub fn connect(
        &self,
        threads: &IoThreads,
        socket: OwnedFd,
        agreed: Agreed,
        unread: Vec<u8>,
        ended: Ended,
    ) -> Result<(), ServeError> {
        let tether = lock(&self.tether).clone();
        let place = lock(&self.free).pop_first();
        let (Some(tether), Some(number)) = (tether, place) else {
            if let Some(number) = place {
                lock(&self.free).insert(number);
            }
            ended(None);
            return Ok(());
        };
        let parting = Arc::new(Parting::default());
        let socket = Arc::new(socket);
        let port = NbdPort::new(
            Arc::clone(&socket),
            tether,
            (self.depth, self.punches),
            &agreed,
            unread,
            Arc::clone(&parting),
        );
        lock(&self.guests).insert(number, Guest::new(&socket, &parting));
        let (free, guests) = (Arc::clone(&self.free), Arc::clone(&self.guests));
        let on_closed = Box::new(move || {
            // First, for a look at a guest takes its socket meanwhile.
            lock(&guests).remove(&number);
            lock(&free).insert(number);
            let unread = parting.take();
            let departure = unread.and_then(|unread| {
                // Nobody else has it any more.
                let socket = Arc::into_inner(socket)?;
                Some(Departure { socket, agreed, unread })
            });
            ended(departure);
        });
        let memory = Memory::Stream { head: HEAD, size: PIECE, staging: STAGING };
        self.served.add(threads, number, (self.depth, memory), Box::new(port), on_closed).map(drop)
    }

    /// Takes no more requests, finishes those that were taken, gives its clients back, and ends; returns
    /// before that. Called again while that lasts, it ends the connections of clients that do not go on (see
    /// [`STILL`]).
    ///
    /// # Errors
    /// An I/O thread has ended.
    pub fn leave(&self, threads: &IoThreads) -> Result<(), ServeError> {
        drop(lock(&self.tether).take());
        let now = Instant::now();
        lock(&self.guests).values_mut().for_each(|guest| guest.look(now));
        self.served.leave(threads)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
