//! What a transport implements to have its requests served, and what it may do meanwhile.
//! A port never waits and never makes a system call of its own: everything goes through [`Io`].

use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::{
    Request,
    queue::{Core, Source, user_data},
    ring::Ring,
};

/// One queue's front: takes requests from a transport and gives back their results.
///
/// All methods run on the I/O thread that owns the queue.
pub trait Port: Send {
    /// The descriptor that [`Io::command`] commands go to.
    fn descriptor(&self) -> &OwnedFd;

    /// The queue's first commands are to be queued now.
    ///
    /// # Errors
    /// An error ends the queue before it began.
    fn start(&mut self, io: &mut Io<'_>) -> Result<(), Errno>;

    /// A command that was queued with [`Io::command`] has completed with `result`.
    fn completed(&mut self, io: &mut Io<'_>, token: Token, result: i32);

    /// The request that was begun under `tag` is whole (with its number of bytes) or has failed.
    fn finished(&mut self, io: &mut Io<'_>, tag: u16, result: Result<u64, Errno>);
}

/// Tells a port which of its commands has completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token {
    /// The port's own meaning.
    pub kind: u8,
    /// The request's tag.
    pub tag: u16,
}

/// What a port may do while it has the thread.
pub struct Io<'a> {
    pub(crate) ring: &'a mut Ring,
    pub(crate) core: &'a mut Core,
}

impl Io<'_> {
    /// Queues a command for the port's descriptor (`IORING_OP_URING_CMD` with 16 bytes of payload).
    ///
    /// `addr` is the entry's address field, which some commands use.
    ///
    /// # Errors
    /// The ring cannot be submitted to any more.
    pub fn command(
        &mut self,
        token: Token,
        op: u32,
        payload: [u8; 16],
        addr: Option<u64>,
    ) -> Result<(), Errno> {
        let word = user_data(self.core.index, Source::Port(token));
        let entry = self.core.port_command(op, payload, addr).user_data(word);
        self.core.push(self.ring, &entry)
    }

    /// Begins a request under a tag that has none.
    ///
    /// It ends in [`Port::finished`], always on a later turn and exactly once.
    pub fn begin(&mut self, tag: u16, request: Request) {
        self.core.begin(self.ring, tag, request);
    }

    /// Address of the queue's buffer for a tag; 0 when the queue has none.
    pub fn buffer_address(&self, tag: u16) -> u64 {
        self.core.buffer_address(tag)
    }

    /// The bytes of a tag's buffer; empty when the queue has none or a request is under way.
    pub fn buffer(&mut self, tag: u16) -> &mut [u8] {
        self.core.buffer(tag)
    }

    /// The index in the ring's table of registered buffers that belongs to a tag.
    pub fn registered_index(&self, tag: u16) -> u16 {
        self.core.registered_index(tag)
    }

    /// The queue ends as soon as nothing of it is in flight.
    pub fn close(&mut self) {
        self.core.close();
    }
}
