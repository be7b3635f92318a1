//! What is known of a connection: its requests, their pieces, what is being received and what is sent.
//! Decides nothing: `port` takes requests in, and `replies` answers them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use crate::nbd::guest::Parting;
use crate::nbd::handshake::Agreed;
use crate::nbd::requests::{Action, Style};

/// A request of the client, while any piece of it is under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    pub(super) kind: Action,
    pub(super) cookie: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Bytes that pieces were begun for, or that were received for it.
    pub(super) begun: u64,
    /// Pieces that are under way.
    pub(super) pieces: u16,
    /// The first error.
    pub(super) error: Option<Errno>,
    /// The flush after it has begun; of a long read, its last piece is ready, or the error that ends it; of a
    /// question about ranges, the server was asked.
    pub(super) flushed: bool,
}

/// A piece of one.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Piece {
    pub(super) asked: u16,
    pub(super) offset: u64,
    pub(super) len: u32,
}

/// What is to be received next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Inward {
    /// A header.
    Head,
    /// The data of a write, whose tag they go to piece by piece.
    Data { asked: u16 },
    /// The rest of a piece is being received into its tag.
    Receiving,
    /// Bytes of a request that was refused are passed over; then its tag answers it. There are clients that
    /// take no answer before they have sent all of a request.
    Drain { asked: u16, tag: u16, left: u64 },
    /// Nothing more: the client has said so, or its connection has ended.
    Nothing,
}

/// One connection.
pub(in crate::nbd) struct NbdPort {
    pub(super) socket: Arc<OwnedFd>,
    pub(super) tether: Arc<OwnedFd>,
    pub(super) style: Style,
    pub(super) allocation: bool,
    /// The backing gives ranges back, and so zeroes them fast.
    pub(super) punches: bool,
    pub(super) parting: Arc<Parting>,
    /// What the last server of the client had not understood.
    pub(super) unread: Vec<u8>,
    pub(super) pieces: Box<[Piece]>,
    pub(super) asked: Box<[Option<Asked>]>,
    pub(super) free: Vec<u16>,
    pub(super) free_asked: Vec<u16>,
    /// A read that is answered piece by piece, since its replies are simple and it is longer than one.
    /// Nothing else may be sent between its pieces.
    pub(super) long: Option<u16>,
    /// Others that wait for that.
    pub(super) longs: VecDeque<u16>,
    /// Questions about ranges that wait for their server.
    pub(super) asking: usize,
    pub(super) inward: Inward,
    /// What is in the staging buffer.
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) staging: bool,
    /// How many bytes of a piece are being received into its tag.
    pub(super) missing: usize,
    pub(super) receiving: u16,
    /// Replies that wait to be sent, those that are being sent, and the bytes of these.
    pub(super) ready: VecDeque<(u16, usize, usize)>,
    pub(super) sending: Vec<(u16, usize, usize)>,
    pub(super) sent: usize,
    pub(super) leaving: bool,
    pub(super) broken: bool,
    pub(super) given_up: bool,
}

impl NbdPort {
    pub(in crate::nbd) fn new(
        socket: Arc<OwnedFd>,
        tether: Arc<OwnedFd>,
        (depth, punches): (u16, bool),
        agreed: &Agreed,
        unread: Vec<u8>,
        parting: Arc<Parting>,
    ) -> NbdPort {
        let count = usize::from(depth);
        NbdPort {
            socket,
            tether,
            style: Style { structured: agreed.structured || agreed.extended, extended: agreed.extended },
            allocation: agreed.allocation,
            punches,
            parting,
            unread,
            pieces: vec![Piece::default(); count].into_boxed_slice(),
            asked: vec![None; count].into_boxed_slice(),
            free: (0..depth).rev().collect(),
            free_asked: (0..depth).rev().collect(),
            long: None,
            longs: VecDeque::with_capacity(count),
            asking: 0,
            inward: Inward::Head,
            from: 0,
            to: 0,
            staging: false,
            missing: 0,
            receiving: 0,
            ready: VecDeque::with_capacity(count),
            sending: Vec::with_capacity(count),
            sent: 0,
            leaving: false,
            broken: false,
            given_up: false,
        }
    }

    pub(super) fn asked(&mut self, index: u16) -> Option<&mut Asked> {
        self.asked.get_mut(usize::from(index))?.as_mut()
    }
}
