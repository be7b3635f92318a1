//! Where other threads leave notes for an I/O thread: one bell for all that has gathered.
//! A sender never waits for the thread, and the thread never for a sender beyond moving a list.

use std::{
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc::SyncSender},
};

use becket_image::link::channel::Given;
use rustix::io::Errno;

use super::{
    block::{Key, Staging},
    frames::Decoded,
};

/// A note to an I/O thread.
pub(crate) enum Note {
    /// A block that a request waits for is there, or cannot be had.
    Block { key: Key, result: Result<Arc<Decoded>, Errno> },
    /// What else a request waits for is there (a unit has a place), or cannot be had.
    There(Result<(), Errno>),
    /// A connection to an NBD server is there, or cannot be had. In place of a tag: the line.
    Linked(Result<Given, Errno>),
    /// The queue is to flush over that line, for a thread that waits.
    Flush(SyncSender<Result<(), Errno>>),
    /// The queue is to look whether the server at the other end of that line says anything.
    Look,
    /// The queue is to look what has become of other queues' connections to the same server.
    Regrouped,
    /// The memory of a load comes back, with the bytes that its block yielded: the load has ended.
    Loaded { staging: Staging, yielded: Option<u32> },
}

/// Who of an I/O thread is meant: a queue by its index, and a tag of it.
pub(crate) type Addressee = (u32, u16);

/// One I/O thread's mailbox.
pub(crate) struct Mailbox {
    notes: Mutex<Vec<(Addressee, Note)>>,
    bell: Arc<OwnedFd>,
}

impl Mailbox {
    pub(crate) fn new(bell: Arc<OwnedFd>) -> Mailbox {
        Mailbox { notes: Mutex::default(), bell }
    }

    /// Leaves a note. The bell rings when the box was empty: what comes before the thread looks needs no
    /// second ring.
    ///
    /// It does not ring for the owner of `own`, who looks into that one next.
    pub(crate) fn leave(&self, whom: Addressee, note: Note, own: Option<&Arc<Mailbox>>) {
        let mut notes = self.notes();
        notes.push((whom, note));
        let first = notes.len() == 1;
        drop(notes);
        if first && own.is_none_or(|own| !std::ptr::eq(&raw const **own, self)) {
            // Full means that it rings already; nothing else can go wrong with an eventfd of ours.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    /// Exchanges what has gathered for an empty list, so that the memory of both is used again.
    pub(crate) fn take(&self, list: &mut Vec<(Addressee, Note)>) {
        std::mem::swap(&mut *self.notes(), list);
    }

    /// A thread that panics ends the process.
    fn notes(&self) -> MutexGuard<'_, Vec<(Addressee, Note)>> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    /// A mailbox that no thread reads.
    pub(crate) fn unheard() -> Arc<Mailbox> {
        Arc::new(Mailbox::new(Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap())))
    }

    #[test]
    fn the_bell_rings_once_for_all_that_gathers() {
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        let mailbox = Mailbox::new(Arc::clone(&bell));
        let rings = || {
            let mut count = [0; 8];
            rustix::io::read(&bell, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
        };
        let note = || Note::Block { key: Key { layer: 1, block: 2 }, result: Err(Errno::IO) };
        mailbox.leave((1, 2), note(), None);
        mailbox.leave((1, 3), note(), Some(&unheard()));
        assert_eq!(rings(), 1);
        let mut list = Vec::new();
        mailbox.take(&mut list);
        assert_eq!(list.iter().map(|(whom, _)| *whom).collect::<Vec<_>>(), [(1, 2), (1, 3)]);
        list.clear();
        mailbox.leave((1, 4), note(), None);
        assert_eq!(rings(), 1, "an empty box rings again");
        let mailbox = Arc::new(mailbox);
        mailbox.take(&mut list);
        mailbox.leave((1, 5), note(), Some(&mailbox));
        assert_eq!(rings(), 0, "its owner knows");
    }
}
