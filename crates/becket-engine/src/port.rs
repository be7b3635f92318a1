//! What a transport implements to have its requests served, and what it may do meanwhile.
//! A port never waits and never makes a system call of its own: everything goes through [`Io`].

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use crate::{
    Answer, GuestMemory, GuestRange, Op, Request, Token,
    core::Core,
    ring::{Ring, multishot_into},
    user_data::{Source, user_data},
};

/// One queue's front: takes requests from a transport and gives back their results.
///
/// All methods run on the I/O thread that owns the queue.
pub trait Port: Send {
    /// The descriptor that [`Io::command`] commands go to.
    fn descriptor(&self) -> &OwnedFd;

    /// A descriptor that is open as long as anything of the queue's ring may still reach the backing.
    ///
    /// When the process dies the kernel closes it only once every operation of the ring has ended: who holds
    /// the other end of a pipe knows then that no late write will come.
    fn tether(&self) -> Option<&OwnedFd> {
        None
    }

    /// An event that the port rings by [`Io::ring_bell`].
    fn bell(&self) -> Option<&OwnedFd> {
        None
    }

    /// Where the bytes of its requests are, for a queue of [`Memory::Guest`](crate::Memory::Guest).
    fn memory(&self) -> Option<Arc<GuestMemory>> {
        None
    }

    /// Queue the queue's first commands now.
    ///
    /// # Errors
    /// An error ends the queue before it began.
    fn start(&mut self, io: &mut Io<'_>) -> Result<(), Errno>;

    /// A command of this port has completed, or has answered and will answer again.
    fn completed(&mut self, io: &mut Io<'_>, token: Token, answer: Answer);

    /// The request that was begun under `tag` is whole (with its number of bytes) or has failed.
    fn finished(&mut self, io: &mut Io<'_>, tag: u16, result: Result<u64, Errno>);

    /// Tells of all requests that have finished in one turn: one call through the table of methods for them
    /// together.
    fn all_finished(&mut self, io: &mut Io<'_>, finished: &[(u16, Result<u64, Errno>)]) {
        for (tag, result) in finished {
            self.finished(io, *tag, *result);
        }
    }

    /// Take no more requests: those that were are still finished, and then the port
    /// [closes](Io::close). One whose transport signals that itself need not implement this.
    fn leave(&mut self, _io: &mut Io<'_>) {}

    /// Everything that had completed by now has been reported; what the port queues now goes to the kernel
    /// with it.
    fn turn_ended(&mut self, _io: &mut Io<'_>) {}
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

    /// Queues a command whose address field points to one of the queue's lists.
    ///
    /// The list belongs to the kernel until the command has completed: [`Io::list`] must leave it alone.
    ///
    /// # Errors
    /// There is no such list, or the ring cannot be submitted to any more.
    pub fn command_with_list(
        &mut self,
        token: Token,
        op: u32,
        payload: [u8; 16],
        list: u16,
    ) -> Result<(), Errno> {
        let address = self.core.list_address(list).ok_or(Errno::INVAL)?;
        self.command(token, op, payload, Some(address))
    }

    /// Queues a command that answers many times, each time into a buffer that the kernel picks.
    ///
    /// # Errors
    /// The queue has no such buffers, or the ring cannot be submitted to any more.
    pub fn multishot(&mut self, token: Token, op: u32, payload: [u8; 16]) -> Result<(), Errno> {
        let group = self.ring.picks_group().ok_or(Errno::INVAL)?;
        let word = user_data(self.core.index, Source::Port(token));
        let entry = self.core.port_command(op, payload, None).user_data(word);
        let entry = multishot_into(entry, group);
        self.core.push(self.ring, &entry)
    }

    /// The bytes of one of the queue's lists, for commands that carry many elements; empty when there is
    /// none.
    pub fn list(&mut self, list: u16) -> &mut [u8] {
        self.core.list(list)
    }

    /// Copies what the kernel put into a picked buffer and gives the buffer back; returns the number of
    /// bytes.
    pub fn picked(&mut self, answer: Answer, into: &mut [u8]) -> usize {
        self.ring.picked(answer, into)
    }

    /// Begins a request under a tag that has none.
    ///
    /// It ends in [`Port::finished`], exactly once, and never while the port is being called.
    #[inline]
    pub fn begin(&mut self, tag: u16, request: Request) {
        self.core.begin(self.ring, tag, request);
    }

    /// Address of the queue's buffer for a tag; 0 when the queue has none.
    #[inline]
    pub fn buffer_address(&self, tag: u16) -> u64 {
        self.core.buffer_address(tag)
    }

    /// Size of each of these buffers, which lie one behind the other; 0 when the queue has none.
    #[inline]
    pub fn buffer_size(&self) -> u64 {
        self.core.buffer_size()
    }

    /// The bytes of a tag's buffer; empty when the queue has none or a request is under way.
    pub fn buffer(&mut self, tag: u16) -> &mut [u8] {
        self.core.buffer(tag)
    }

    /// The bytes of a tag's frame: the head that [`Memory::Framed`](crate::Memory::Framed) asked for, and the
    /// buffer behind it. Empty while a request is under way in it, or the kernel has it.
    pub fn frame(&mut self, tag: u16) -> &mut [u8] {
        self.core.frame(tag)
    }

    /// Reads one message of the port's descriptor into the frame of the token's tag, which is the kernel's
    /// until the token comes back. The descriptor must be one that does not block.
    ///
    /// # Errors
    /// There is no such frame, it is in use, or the ring cannot be submitted to any more.
    pub fn receive(&mut self, token: Token) -> Result<(), Errno> {
        self.core.receive(self.ring, token)
    }

    /// Writes `len` bytes of that frame, from byte `from` on, to the port's descriptor.
    ///
    /// # Errors
    /// As [`Io::receive`].
    pub fn reply(&mut self, token: Token, from: usize, len: usize) -> Result<(), Errno> {
        self.core.reply(self.ring, token, from, len)
    }

    /// Has a token of that kind, whose tag is [`Token::NO_TAG`], come back once the port's descriptor can be
    /// read from or has ended; its result are the events.
    ///
    /// # Errors
    /// The ring cannot be submitted to any more.
    pub fn await_readable(&mut self, kind: u8) -> Result<(), Errno> {
        self.core.await_readable(self.ring, kind)
    }

    /// Has a token of that kind come back each time that the port's descriptor, an event, is written to,
    /// until it is cancelled ([`Answer::more`]).
    ///
    /// # Errors
    /// The ring cannot be submitted to any more.
    pub fn await_events(&mut self, kind: u8) -> Result<(), Errno> {
        self.core.await_events(self.ring, kind)
    }

    /// Takes back what was written to the port's descriptor, an event; a token of that kind follows.
    ///
    /// # Errors
    /// The ring cannot be submitted to any more.
    pub fn take_events(&mut self, kind: u8) -> Result<(), Errno> {
        self.core.take_events(self.ring, kind)
    }

    /// Writes to the port's [bell](Port::bell), if it has one. Whether a token of that kind follows, which it
    /// does if writing may block: it must be waited for then.
    ///
    /// # Errors
    /// The ring cannot be submitted to any more.
    pub fn ring_bell(&mut self, kind: u8) -> Result<bool, Errno> {
        self.core.ring_bell(self.ring, kind)
    }

    /// Begins a request under a tag that has none, whose bytes are in these ranges of the port's
    /// [memory](Port::memory), one after another. It is as long as they are together.
    ///
    /// # Errors
    /// There is no such tag or it is in use, or a range is not in the memory, or there are too many; nothing
    /// was begun.
    #[inline]
    pub fn begin_in_guest(
        &mut self,
        tag: u16,
        op: Op,
        offset: u64,
        ranges: &[GuestRange],
    ) -> Result<(), Errno> {
        self.core.begin_in_guest(self.ring, tag, (op, offset), ranges)
    }

    /// Has a message or a waiting that is still to come, and goes by that token, come back now, with an
    /// error; what has come already comes as it is. A token of kind `kind` follows in any case.
    ///
    /// # Errors
    /// The ring cannot be submitted to any more.
    pub fn cancel(&mut self, token: Token, kind: u8) -> Result<(), Errno> {
        self.core.cancel(self.ring, token, kind)
    }

    /// The staging buffer of [`Memory::Stream`](crate::Memory::Stream); empty while the kernel receives into
    /// it.
    pub fn staging(&mut self) -> &mut [u8] {
        self.core.staging()
    }

    /// Receives some bytes of the port's socket into the staging buffer, from byte `from` on;
    /// [`Token::STAGED`] comes back.
    ///
    /// # Errors
    /// There is no room, it is in use, or the ring cannot be submitted to any more.
    pub fn receive_staged(&mut self, from: usize) -> Result<(), Errno> {
        self.core.receive_staged(self.ring, from)
    }

    /// Receives `len` bytes of the port's socket into the frame of the token's tag, from byte `from` of the
    /// frame on: all of them, or fewer if the stream ends. No token may have a kind of the engine's own.
    ///
    /// # Errors
    /// As [`Io::receive`].
    pub fn receive_into(&mut self, token: Token, from: usize, len: usize) -> Result<(), Errno> {
        self.core.receive_into(self.ring, token, from, len)
    }

    /// Sends parts of frames over the port's socket, in this order, each as tag, first byte of the frame and
    /// number of bytes. The frames are the kernel's until [`Token::SENT`] comes back. One such operation may
    /// be under way.
    ///
    /// # Errors
    /// A part is none, a frame is in use, another operation is under way, or the ring cannot be submitted to
    /// any more. Nothing is sent then.
    pub fn send(&mut self, parts: &[(u16, usize, usize)]) -> Result<(), Errno> {
        self.core.send(self.ring, parts)
    }

    /// Copies bytes of the staging buffer, from byte `from` on, into the frame of a tag, from byte `at` on.
    ///
    /// # Errors
    /// They are not there, or one of the two is in use.
    pub fn unstage(&mut self, tag: u16, from: usize, at: usize, len: usize) -> Result<(), Errno> {
        self.core.unstage(tag, from, at, len)
    }

    /// How far the bytes of the image from byte `offset` on are of one state, up to `len`: the number of
    /// bytes, and whether they take no room and whether they read as zeroes. It may ask a file system, which
    /// takes a system call: not for reads and writes. `None`: that is for [`Io::ask_status`] to find out, and
    /// was `asked` for the request of that tag, or not. Without an answer they count as data.
    pub fn status(&mut self, tag: u16, asked: bool, offset: u64, len: u64) -> (u64, Option<(bool, bool)>) {
        self.core.status(tag, asked, offset, len)
    }

    /// Has a server say what these bytes hold. It ends in [`Port::finished`] for the tag, which must have no
    /// request, exactly once, and [`Io::status`] must be called there. The answer is gone afterwards.
    pub fn ask_status(&mut self, tag: u16, offset: u64, len: u64) {
        self.core.ask_status(tag, offset, len);
    }

    /// Length of the image at present, in bytes.
    pub fn length(&self) -> u64 {
        self.core.map.len()
    }

    /// Whether writes are refused at present.
    pub fn is_read_only(&self) -> bool {
        self.core.serving.read_only
    }

    /// The index in the ring's table of registered buffers that belongs to a tag.
    #[inline]
    pub fn registered_index(&self, tag: u16) -> u16 {
        self.core.registered_index(tag)
    }

    /// The queue ends as soon as nothing of it is in flight.
    pub fn close(&mut self) {
        self.core.close();
    }
}
