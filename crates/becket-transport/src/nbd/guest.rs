//! A client that its server leaves: what it leaves behind, and when it is not waited for any longer.
//! A client that does not go on, in the middle of a write or of a reply, would keep all others of the device
//! from the next server. Its connection is shut down; one that goes on, if slowly, is waited for.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use becket_uapi::unsent;
use rustix::net::{Shutdown, shutdown};
use tracing::warn;

/// How long a client may stand still, neither sending nor taking anything, while its server wants to leave.
pub const STILL: Duration = Duration::from_secs(5);
/// How long it may take if it goes on.
const SLOW: Duration = Duration::from_secs(20);

/// What a port says of a client that it leaves.
#[derive(Debug, Default)]
pub(super) struct Parting {
    /// What it had sent that was not carried out; `None` where it has ended otherwise.
    unread: Mutex<Option<Vec<u8>>>,
    waits: AtomicBool,
    moves: AtomicU64,
}

impl Parting {
    pub(super) fn put(&self, unread: Vec<u8>) {
        *self.unread.lock().unwrap_or_else(PoisonError::into_inner) = Some(unread);
    }

    pub(super) fn take(&self) -> Option<Vec<u8>> {
        self.unread.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Whether the client is waited for, and not only the image.
    pub(super) fn waits(&self, waits: bool) {
        self.waits.store(waits, Ordering::Relaxed);
    }

    /// Something has come from the client, or has gone to it as a whole.
    pub(super) fn moved(&self) {
        self.moves.fetch_add(1, Ordering::Relaxed);
    }
}

/// A client, as it looks from outside of its port.
#[derive(Debug)]
pub(super) struct Guest {
    socket: Weak<OwnedFd>,
    parting: Arc<Parting>,
    /// When it was first seen to be waited for.
    first: Option<Instant>,
    /// How it looked last, and since when.
    last: Option<(Look, Instant)>,
    ended: bool,
}

/// What changes when a client goes on: what has come and gone, and what waits in its socket.
type Look = (u64, [u32; 2]);

impl Guest {
    pub(super) fn new(socket: &Arc<OwnedFd>, parting: &Arc<Parting>) -> Guest {
        let (socket, parting) = (Arc::downgrade(socket), Arc::clone(parting));
        Guest { socket, parting, first: None, last: None, ended: false }
    }

    /// Looks whether the client goes on, and ends its connection if it does not.
    pub(super) fn look(&mut self, now: Instant) {
        let Some(socket) = self.socket.upgrade().filter(|_| !self.ended) else { return };
        if !self.parting.waits.load(Ordering::Relaxed) {
            self.last = None;
            return;
        }
        let look = (self.parting.moves.load(Ordering::Relaxed), unsent::of(&*socket).unwrap_or_default());
        let since = match self.last {
            Some((last, since)) if last == look => since,
            _ => now,
        };
        self.last = Some((look, since));
        let first = *self.first.get_or_insert(now);
        if now.duration_since(since) >= STILL || now.duration_since(first) >= SLOW {
            self.ended = true;
            warn!("a client keeps its server from leaving: its connection is ended");
            // The port hears of it. One whose client has hung up meanwhile has heard of that.
            let _ = shutdown(&*socket, Shutdown::Both);
        }
    }
}
