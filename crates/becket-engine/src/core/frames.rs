//! Frames: messages that a port reads and writes itself, each in a tag's buffer and the head before it.
//! Never lets the port look at a frame that the kernel has.

use io_uring::{opcode, squeue};
use rustix::io::Errno;

use super::state::{Core, is_lent};
use crate::{
    Token,
    ring::{Ring, Transfer, fixed, unanswered},
    user_data::{NOBODY, Source, user_data},
};

impl Core {
    /// The bytes of a frame; empty while the kernel has it, or a request is under way in it.
    pub(crate) fn frame(&mut self, tag: u16) -> &mut [u8] {
        match (&mut self.buffers, self.slab.get(usize::from(tag))) {
            (Some(buffers), Some(slot)) if !slot.busy && !is_lent(&self.lent, tag) => {
                buffers.frame(tag.into())
            }
            _ => &mut [],
        }
    }

    /// Reads a message of the port's descriptor into the frame of the token's tag.
    pub(crate) fn receive(&mut self, ring: &mut Ring, token: Token) -> Result<(), Errno> {
        let len = self.buffers.as_ref().map_or(0, |buffers| buffers.frame_size());
        self.pass(ring, token, false, 0, len)
    }

    /// Writes a part of that frame to the port's descriptor.
    pub(crate) fn reply(
        &mut self,
        ring: &mut Ring,
        token: Token,
        from: usize,
        len: usize,
    ) -> Result<(), Errno> {
        self.pass(ring, token, true, from, len)
    }

    fn pass(
        &mut self,
        ring: &mut Ring,
        token: Token,
        write: bool,
        from: usize,
        len: usize,
    ) -> Result<(), Errno> {
        let tag = usize::from(token.tag);
        let free = self.slab.get(tag).is_some_and(|slot| !slot.busy) && self.lent.get(tag) == Some(&false);
        let buffers = self.buffers.as_mut().filter(|_| free).ok_or(Errno::INVAL)?;
        if !write {
            buffers.touch(tag);
        }
        let (address, len) = buffers.part(tag, from, len).ok_or(Errno::INVAL)?;
        // Such entries do not wait (see [`Ring::register_unwaiting`]), so they may use the table; before
        // Linux 6.12 reads do, and descriptors that this ring has let go of stay open until the next request.
        let target = self.port;
        let way = Transfer { write, target, address: address as u64, len, ..Transfer::default() };
        let entry = way.entry().user_data(self.word(token));
        self.push(ring, &entry)?;
        self.lent[tag] = true;
        Ok(())
    }

    /// The kernel has done with what a token stood for.
    #[inline]
    pub(crate) fn returned(&mut self, token: Token) {
        match self.lent.get_mut(usize::from(token.tag)) {
            Some(lent) => *lent = false,
            None => self.stream_returned(token),
        }
    }

    /// Waits until the port's descriptor can be read from, or is of no use any more.
    pub(crate) fn await_readable(&mut self, ring: &mut Ring, kind: u8) -> Result<(), Errno> {
        let events = u32::from(libc::POLLIN.cast_unsigned());
        let entry: squeue::Entry = match self.unregistered_port() {
            Some(descriptor) => opcode::PollAdd::new(descriptor, events).build(),
            None => opcode::PollAdd::new(fixed(self.port), events).build(),
        };
        let entry = entry.user_data(self.word(Token { kind, tag: Token::NO_TAG }));
        self.push(ring, &entry)
    }

    /// Answers each time that the port's descriptor, an event, is written to.
    pub(crate) fn await_events(&mut self, ring: &mut Ring, kind: u8) -> Result<(), Errno> {
        let events = u32::from(libc::POLLIN.cast_unsigned());
        let entry: squeue::Entry = match self.unregistered_port() {
            Some(descriptor) => opcode::PollAdd::new(descriptor, events).multi(true).build(),
            None => opcode::PollAdd::new(fixed(self.port), events).multi(true).build(),
        };
        let entry = entry.user_data(self.word(Token { kind, tag: Token::NO_TAG }));
        self.push(ring, &entry)
    }

    /// Takes back what was written to it.
    pub(crate) fn take_events(&mut self, ring: &mut Ring, kind: u8) -> Result<(), Errno> {
        let address = std::ptr::from_mut(&mut *self.event_word) as u64;
        let way = Transfer { target: self.port, address, len: 8, ..Transfer::default() };
        let token = Token { kind, tag: Token::NO_TAG };
        self.push(ring, &way.entry().user_data(self.word(token)))
    }

    /// Writes to the bell, if the port has one; whether a token follows. Of a bell that does not block only
    /// failures would be said, and to nobody: what is written is never freed, so nothing has to wait for it.
    pub(crate) fn ring_bell(&mut self, ring: &mut Ring, kind: u8) -> Result<bool, Errno> {
        static ONE: [u8; 8] = 1u64.to_ne_bytes();
        let Some((target, quiet)) = self.bell else { return Ok(false) };
        let address = ONE.as_ptr() as u64;
        let entry = Transfer { write: true, target, address, len: 8, ..Transfer::default() }.entry();
        if quiet {
            let pushed = ring.push(&unanswered(entry).user_data(NOBODY));
            return pushed.map(|()| false).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO));
        }
        let token = Token { kind, tag: Token::NO_TAG };
        self.push(ring, &entry.user_data(self.word(token))).map(|()| true)
    }

    /// Ends what waits for the port's descriptor and goes by that token.
    pub(crate) fn cancel(&mut self, ring: &mut Ring, token: Token, kind: u8) -> Result<(), Errno> {
        let entry = opcode::AsyncCancel::new(self.word(token)).build();
        self.push(ring, &entry.user_data(self.word(Token { kind, tag: Token::NO_TAG })))
    }

    fn word(&self, token: Token) -> u64 {
        user_data(self.index, Source::Port(token))
    }
}
