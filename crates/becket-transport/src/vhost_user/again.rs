//! What a session has agreed on, as the messages by which another back-end comes to agree on the same. They
//! are a front-end's own messages, so the next back-end trusts them no more than a front-end.
//! Touches no socket.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use super::config::{CONFIG_WCE, WRITEBACK};
use super::message::{HEAD, Head, Wanted, number, pair, said};
use super::session::{Refused, Rings, Session, Vring};

/// Requests of the protocol (`VHOST_USER_*`).
const SET_FEATURES: u32 = 2;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;
const SET_CONFIG: u32 = 25;
const SET_INFLIGHT_FD: u32 = 32;

/// Messages one after another, and their descriptors in order.
#[derive(Debug, Default)]
pub(super) struct Messages<'a> {
    pub(super) bytes: Vec<u8>,
    pub(super) fds: Vec<BorrowedFd<'a>>,
}

impl<'a> Messages<'a> {
    fn say(&mut self, request: u32, payload: &[u8], fds: impl IntoIterator<Item = &'a OwnedFd>) {
        self.bytes.extend(said(request, payload));
        self.fds.extend(fds.into_iter().map(|fd| fd.as_fd()));
    }

    fn say_vring(&mut self, index: u32, vring: &'a Vring) {
        if vring.count > 0 {
            self.say(SET_VRING_NUM, &pair(index, vring.count.into()), []);
        }
        if let Some(address) = &vring.address {
            self.say(SET_VRING_ADDR, &address.bytes(index), []);
        }
        self.say(SET_VRING_BASE, &pair(index, vring.base), []);
        self.say(SET_VRING_ENABLE, &pair(index, vring.enabled.into()), []);
        for (request, event) in [(SET_VRING_CALL, &vring.call), (SET_VRING_KICK, &vring.kick)] {
            if let Some(event) = event {
                self.say(request, &number(index.into()), [&**event]);
            }
        }
    }
}

impl Session {
    /// What another back-end must hear to go on where the rings of this one were stopped, or where their
    /// [notes](Session::is_noted) say.
    pub(super) fn messages(&self) -> Messages<'_> {
        let mut messages = Messages::default();
        if self.features != 0 {
            messages.say(SET_FEATURES, &number(self.features), []);
        }
        messages.say(SET_PROTOCOL_FEATURES, &number(self.protocol), []);
        if let Some((parts, files)) = &self.table {
            let mut payload = pair(u32::try_from(parts.len()).unwrap_or(0), 0);
            let words = parts.iter().flat_map(|part| [part.guest, part.len, part.user, part.offset]);
            payload.extend(words.flat_map(u64::to_ne_bytes));
            messages.say(SET_MEM_TABLE, &payload, files);
        }
        if let Some(notes) = &self.inflight {
            messages.say(SET_INFLIGHT_FD, &notes.place.bytes(), [&notes.file]);
        }
        for (index, vring) in self.vrings.iter().enumerate() {
            messages.say_vring(u32::try_from(index).unwrap_or(u32::MAX), vring);
        }
        if let Some(channel) = &self.channel {
            messages.say(SET_BACKEND_REQ_FD, &[], [&**channel]);
        }
        if self.has(CONFIG_WCE) {
            let place = [WRITEBACK, 1, 0].map(u32::to_ne_bytes).concat();
            messages.say(SET_CONFIG, &[place, vec![self.writeback.into()]].concat(), []);
        }
        messages
    }

    /// Carries out such messages. What is wrong with them is wrong as it would be from a front-end.
    pub(super) fn hear_again(
        &mut self,
        rings: &mut impl Rings,
        mut bytes: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<(), Refused> {
        let mut fds = fds.into_iter();
        while let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() {
            let head = Head::read(*head).ok_or_else(broken)?;
            let (payload, rest) = rest.split_at_checked(head.size).ok_or_else(broken)?;
            let wanted = Wanted::read(&head, payload);
            let its: Vec<OwnedFd> = fds.by_ref().take(wanted.descriptors()).collect();
            self.carry_out(rings, wanted, its)?;
            bytes = rest;
        }
        if bytes.is_empty() && fds.next().is_none() { Ok(()) } else { Err(broken()) }
    }
}

fn broken() -> Refused {
    Refused("what it had agreed on with another worker is not whole".to_owned())
}
