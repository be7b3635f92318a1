//! Streams: a port receives from its socket into the staging buffer or into a frame, and sends many frames by
//! one operation.
//! Never lets the port look at memory that the kernel has.

use io_uring::{opcode, squeue};
use rustix::io::Errno;

use super::state::{Core, is_lent};
use crate::{
    Token,
    ring::{Ring, fixed},
    user_data::{Source, user_data},
};

impl Core {
    /// The staging buffer; empty while the kernel receives into it.
    pub(crate) fn staging(&mut self) -> &mut [u8] {
        match &mut self.stream {
            Some(stream) if !stream.receiving => stream.staging.slice(0),
            _ => &mut [],
        }
    }

    /// Copies bytes of the staging buffer into a frame.
    pub(crate) fn unstage(&mut self, tag: u16, from: usize, at: usize, len: usize) -> Result<(), Errno> {
        let free =
            self.slab.get(usize::from(tag)).is_some_and(|slot| !slot.busy) && !is_lent(&self.lent, tag);
        let stream = self.stream.as_mut().filter(|stream| free && !stream.receiving).ok_or(Errno::INVAL)?;
        let buffers = self.buffers.as_mut().ok_or(Errno::INVAL)?;
        let end = from.checked_add(len).ok_or(Errno::INVAL)?;
        let bytes = stream.staging.slice(0).get(from..end).ok_or(Errno::INVAL)?;
        let place = buffers.frame(tag.into()).get_mut(at..).and_then(|place| place.get_mut(..len));
        place.ok_or(Errno::INVAL)?.copy_from_slice(bytes);
        Ok(())
    }

    /// Receives into the staging buffer, from byte `from` on.
    pub(crate) fn receive_staged(&mut self, ring: &mut Ring, from: usize) -> Result<(), Errno> {
        let stream = self.stream.as_mut().filter(|stream| !stream.receiving).ok_or(Errno::INVAL)?;
        let room = stream.staging.size().checked_sub(from).filter(|room| *room > 0).ok_or(Errno::INVAL)?;
        let (address, len) = stream.staging.part(0, from, room).ok_or(Errno::INVAL)?;
        let entry = self.receives(address, len, 0);
        self.push(ring, &entry.user_data(self.port_word(Token::STAGED)))?;
        if let Some(stream) = &mut self.stream {
            stream.receiving = true;
        }
        Ok(())
    }

    /// Receives exactly so many bytes into the frame of the token's tag.
    pub(crate) fn receive_into(
        &mut self,
        ring: &mut Ring,
        token: Token,
        from: usize,
        len: usize,
    ) -> Result<(), Errno> {
        let tag = usize::from(token.tag);
        let free = self.slab.get(tag).is_some_and(|slot| !slot.busy) && self.lent.get(tag) == Some(&false);
        let buffers = self.buffers.as_ref().filter(|_| free).ok_or(Errno::INVAL)?;
        let (address, len) = buffers.part(tag, from, len).ok_or(Errno::INVAL)?;
        let entry = self.receives(address, len, libc::MSG_WAITALL);
        self.push(ring, &entry.user_data(self.port_word(token)))?;
        self.lent[tag] = true;
        Ok(())
    }

    /// Sends parts of frames, in this order: tag, first byte and number of bytes of each.
    pub(crate) fn send(&mut self, ring: &mut Ring, parts: &[(u16, usize, usize)]) -> Result<(), Errno> {
        let (Some(stream), Some(buffers)) = (&mut self.stream, &self.buffers) else {
            return Err(Errno::INVAL);
        };
        if !stream.sending.is_empty() || parts.is_empty() || parts.len() > stream.vectors.count() {
            return Err(Errno::INVAL);
        }
        for (index, (tag, from, len)) in parts.iter().enumerate() {
            let busy = self.slab.get(usize::from(*tag)).is_none_or(|slot| slot.busy);
            let part = buffers.part((*tag).into(), *from, *len);
            let Some((address, len)) = part.filter(|_| !busy && !is_lent(&self.lent, *tag)) else {
                return Err(Errno::INVAL);
            };
            stream.vectors.set(index, address, len);
        }
        let message = stream.vectors.message(parts.len());
        // The whole of it, unless the connection breaks; a broken one is an error and no signal.
        let flags = (libc::MSG_WAITALL | libc::MSG_NOSIGNAL).cast_unsigned();
        let entry = match self.unregistered_port() {
            Some(socket) => opcode::SendMsg::new(socket, message).flags(flags).build(),
            None => opcode::SendMsg::new(fixed(self.port), message).flags(flags).build(),
        };
        self.push(ring, &entry.user_data(self.port_word(Token::SENT)))?;
        if let Some(stream) = &mut self.stream {
            for (tag, _, _) in parts {
                stream.sending.push(*tag);
                self.lent[usize::from(*tag)] = true;
            }
        }
        Ok(())
    }

    /// The kernel has done with what the stream's own token stood for.
    pub(super) fn stream_returned(&mut self, token: Token) {
        let Some(stream) = &mut self.stream else { return };
        if token == Token::STAGED {
            stream.receiving = false;
        } else if token == Token::SENT {
            for tag in stream.sending.drain(..) {
                self.lent[usize::from(tag)] = false;
            }
        }
    }

    fn receives(&self, address: *mut u8, len: u32, flags: i32) -> squeue::Entry {
        match self.unregistered_port() {
            Some(socket) => opcode::Recv::new(socket, address, len).flags(flags).build(),
            None => opcode::Recv::new(fixed(self.port), address, len).flags(flags).build(),
        }
    }

    fn port_word(&self, token: Token) -> u64 {
        user_data(self.index, Source::Port(token))
    }
}
