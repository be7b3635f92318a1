//! The front-end's side of a vhost-user connection: one message after another.
//! Knows nothing of what is in the rings.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use anyhow::{Context as _, Result, bail, ensure};
use becket_engine::GuestPart;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

const PROTOCOL: u64 = 1 << 30;
const P_MQ: u64 = 1 << 0;
const P_REPLY_ACK: u64 = 1 << 3;
const P_CONFIG: u64 = 1 << 9;
const P_INFLIGHT: u64 = 1 << 12;

/// A connection to a back-end.
#[derive(Debug)]
pub struct Front {
    socket: OwnedFd,
    /// What the device offers.
    pub offered: u64,
    protocol: u64,
}

/// The region in which a back-end notes requests.
#[derive(Debug)]
pub struct Inflight {
    payload: Vec<u8>,
    file: OwnedFd,
}

impl Front {
    /// Agrees with a back-end on features: those of `wanted` that it offers, and what the driver needs.
    ///
    /// # Errors
    /// The connection breaks, or a feature is missing.
    pub fn connect(socket: OwnedFd, wanted: u64) -> Result<Front> {
        let mut front = Front { socket, offered: 0, protocol: 0 };
        front.tell(3, &[], &[])?;
        front.offered = front.number(1)?;
        let needed = wanted | super::VERSION_1;
        ensure!(front.offered & needed == needed, "it lacks features: {:#x}", needed & !front.offered);
        if front.offered & PROTOCOL != 0 {
            let protocol = front.number(15)? & (P_MQ | P_REPLY_ACK | P_CONFIG | P_INFLIGHT);
            front.tell(16, &protocol.to_ne_bytes(), &[])?;
            front.protocol = protocol;
        }
        front.tell(2, &(needed | front.offered & PROTOCOL).to_ne_bytes(), &[])?;
        Ok(front)
    }

    /// How many vrings there can be.
    ///
    /// # Errors
    /// The connection breaks.
    pub fn queues(&self) -> Result<u64> {
        self.number(17)
    }

    /// The first bytes of the configuration space.
    ///
    /// # Errors
    /// The connection breaks.
    pub fn config(&self) -> Result<[u8; 60]> {
        let head = [0u32, 60, 0].map(u32::to_ne_bytes).concat();
        let (answer, _) = self.ask(24, &[&head[..], &[0; 60]].concat())?;
        answer.get(12..72).context("a short answer")?.try_into().context("a short answer")
    }

    pub(super) fn new_inflight(&self, queues: u16, count: u16) -> Result<Option<Inflight>> {
        if self.protocol & P_INFLIGHT == 0 {
            return Ok(None);
        }
        let asked = [&[0; 16][..], &queues.to_ne_bytes(), &count.to_ne_bytes(), &[0; 4]].concat();
        let (payload, file) = self.ask(31, &asked)?;
        Ok(Some(Inflight { payload, file: file.context("no file came along")? }))
    }

    pub(super) fn set_inflight(&self, inflight: &Inflight) -> Result<()> {
        use std::os::fd::AsFd as _;
        self.tell(32, &inflight.payload, &[inflight.file.as_fd()])
    }

    /// Shares memory.
    ///
    /// # Errors
    /// It is refused, or the connection breaks.
    pub fn set_memory(&self, parts: &[(GuestPart, BorrowedFd<'_>)]) -> Result<()> {
        let mut payload = [parts.len() as u32, 0].map(u32::to_ne_bytes).concat();
        for (part, _) in parts {
            payload.extend([part.guest, part.len, part.user, part.offset].map(u64::to_ne_bytes).concat());
        }
        let fds: Vec<_> = parts.iter().map(|(_, fd)| *fd).collect();
        self.tell(5, &payload, &fds)
    }

    /// Says where a vring is and which request is next.
    ///
    /// # Errors
    /// As above.
    pub fn set_vring(&self, vring: u32, count: u16, tables: [u64; 3], base: u32) -> Result<()> {
        let pair = |value: u32| [vring, value].map(u32::to_ne_bytes).concat();
        self.tell(8, &pair(count.into()), &[])?;
        self.tell(10, &pair(base), &[])?;
        let [descriptors, available, used] = tables;
        let tables = [descriptors, used, available, 0].map(u64::to_ne_bytes).concat();
        self.tell(9, &[pair(0), tables].concat(), &[])
    }

    /// Gives a vring its events.
    ///
    /// # Errors
    /// As above.
    pub fn set_events(&self, vring: u32, kick: BorrowedFd<'_>, call: BorrowedFd<'_>) -> Result<()> {
        self.tell(12, &u64::from(vring).to_ne_bytes(), &[kick])?;
        self.tell(13, &u64::from(vring).to_ne_bytes(), &[call])
    }

    /// Lets a vring run, or not.
    ///
    /// # Errors
    /// As above.
    pub fn enable(&self, vring: u32, on: bool) -> Result<()> {
        self.tell(18, &[vring, on.into()].map(u32::to_ne_bytes).concat(), &[])
    }

    /// Stops a vring: the index of the next request; of a packed ring its place, in both halves.
    ///
    /// # Errors
    /// The connection breaks.
    pub fn stop(&self, vring: u32) -> Result<u32> {
        let (answer, _) = self.ask(11, &[vring, 0].map(u32::to_ne_bytes).concat())?;
        Ok(u32::from_ne_bytes(answer.get(4..8).context("a short answer")?.try_into()?))
    }

    fn number(&self, request: u32) -> Result<u64> {
        let (answer, _) = self.ask(request, &[])?;
        Ok(u64::from_ne_bytes(answer.get(..8).context("a short answer")?.try_into()?))
    }

    /// A message that has no answer, or only whether it was carried out.
    ///
    /// # Errors
    /// It was refused, or the connection breaks.
    pub fn tell(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let confirmed = self.protocol & P_REPLY_ACK != 0;
        self.send(request, if confirmed { 1 | 8 } else { 1 }, payload, fds)?;
        if confirmed {
            let (answer, _) = self.receive(request)?;
            ensure!(answer == [0; 8], "message {request} was refused");
        }
        Ok(())
    }

    /// A message that has an answer.
    ///
    /// # Errors
    /// The connection breaks.
    pub fn ask(&self, request: u32, payload: &[u8]) -> Result<(Vec<u8>, Option<OwnedFd>)> {
        self.send(request, 1, payload, &[])?;
        self.receive(request)
    }

    /// Any message.
    ///
    /// # Errors
    /// The connection breaks.
    pub fn send(&self, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let head = [request, flags, payload.len() as u32].map(u32::to_ne_bytes).concat();
        let bytes = [&head[..], payload].concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let sent =
            rustix::net::sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
        ensure!(sent == bytes.len(), "a message was sent in pieces");
        Ok(())
    }

    fn receive(&self, request: u32) -> Result<(Vec<u8>, Option<OwnedFd>)> {
        let mut head = [0; 12];
        let fd = self.fill(&mut head)?;
        let word = |at: usize| -> Result<u32> { Ok(u32::from_ne_bytes(head[at..at + 4].try_into()?)) };
        ensure!((word(0)?, word(4)?) == (request, 5), "an answer to another message: {head:?}");
        let mut payload = vec![0; word(8)? as usize];
        let later = self.fill(&mut payload)?;
        Ok((payload, fd.or(later)))
    }

    fn fill(&self, into: &mut [u8]) -> Result<Option<OwnedFd>> {
        let (mut filled, mut fd) = (0, None);
        while filled < into.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut into[filled..])];
            let got = rustix::net::recvmsg(&self.socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(passed) = message {
                    fd = passed.last().or(fd);
                }
            }
            if got.bytes == 0 {
                bail!("the back-end has closed the connection");
            }
            filled += got.bytes;
        }
        Ok(fd)
    }

    /// Ends the connection.
    pub fn hang_up(&self) {
        // Fails only when it has ended already.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    /// Whether the back-end has closed the connection.
    pub fn is_closed(&self) -> bool {
        rustix::net::recv(&self.socket, &mut [0u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT)
            .is_ok_and(|(_, got)| got == 0)
    }
}
