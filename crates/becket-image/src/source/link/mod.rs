//! A source that is an export of an NBD server: its length, what it can do, and how a process that serves it
//! gets connections.
//! A process that serves it connects to nothing by itself, and knows no name of the server's.
//!
//! Uses go down this list: `states` for what is allocated, for a process that may not wait; `reader` and
//! `writer` for one that may, `channel` to ask another process for connections, `pool` for several, `conn`,
//! `dial` and `probe` for one, `relay` and `tls` where it is secure, `handshake` for the negotiation or
//! `helper` for a program in its place, `uri` and `rbd` for names.

pub mod channel;
mod conn;
mod dial;
mod error;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod handshake;
pub mod helper;
mod names;
mod pool;
mod probe;
pub mod rbd;
mod reader;
mod relay;
pub mod states;
mod tls;
mod uri;
mod writer;

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use becket_uapi::nbd;
use serde::{Deserialize, Serialize};

pub use self::conn::Connection;
pub use self::dial::{Dialed, dial};
pub use self::error::DialError;
pub use self::handshake::{Agreed, CONNECTIONS, Handshake, Next, Refused, Wanted};
pub use self::names::{split_inside, with_inside};
pub use self::probe::probe;
use self::reader::LinkReader;
pub use self::relay::{STACK, relay};
pub use self::tls::{Trust, trusted};
pub use self::uri::{Endpoint, Server, Tls, is_link};
pub use self::writer::LinkWriter;
use super::file::facts::{Facts, FileKind};
use super::kind::{Identity, SourceKind};
use crate::ReadAt;

/// The feature of devices with such a source.
pub const FEATURE: &str = "link";
/// The feature of those that are reached over TLS.
pub const TLS_FEATURE: &str = "link-tls";
/// The feature of devices with one whose finished writes are durable, and which a program of its own reaches.
pub const FEATURE_RBD: &str = "rbd";
/// The feature of those that are below an image of this host, which names them; it implies the others.
pub const FEATURE_BELOW: &str = "link-below";
/// In place of a device number: sources that are not files of this host.
pub(crate) const NOWHERE: u64 = u64::MAX;

/// What is said of an export to another process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkFacts {
    link: Said,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Said {
    #[serde(flatten)]
    agreed: Agreed,
    writable: bool,
    identity: u64,
    /// It is reached over TLS.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    tls: bool,
    /// See [`LinkSource::is_durable`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    durable: bool,
    /// See [`LinkSource::is_below`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    below: bool,
}

/// In place of an inode's number: what a URI hashes to.
pub(crate) fn identity_of(uri: &Path) -> u64 {
    number_of(uri.as_os_str().as_bytes())
}

/// A number for a name, which is the same in every build (FNV-1a).
pub fn number_of(name: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    name.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

impl LinkFacts {
    /// See `SourceFacts::join`: the asking and the answering end of the channel, and an envelope where TLS is
    /// used.
    pub(super) fn join(self, fds: &mut impl Iterator<Item = OwnedFd>) -> Option<LinkSource> {
        let channel = (fds.next()?, fds.next()?);
        let envelope = if self.link.tls { Some(fds.next()?) } else { None };
        Some(LinkSource::of(self.link, channel, envelope, None))
    }

    /// See `SourceFacts::descriptors`.
    pub(super) fn descriptors(&self) -> usize {
        2 + usize::from(self.link.tls)
    }

    /// See `SourceFacts::feature`.
    pub(super) fn feature(&self) -> &'static str {
        match (self.link.durable, self.link.tls) {
            _ if self.link.below => FEATURE_BELOW,
            (true, _) => FEATURE_RBD,
            (false, true) => TLS_FEATURE,
            (false, false) => FEATURE,
        }
    }
}

/// An export of an NBD server.
#[derive(Debug)]
pub struct LinkSource {
    said: Said,
    facts: Facts,
    /// See [`channel`]: the end of who asks, and that of who answers.
    channel: (OwnedFd, OwnedFd),
    /// What the process that makes connections proves and asks for over TLS: see [`Trust`]. The worker holds
    /// it for its successor and cannot read it.
    envelope: Option<OwnedFd>,
    /// The connection of the process that has opened it.
    reader: Option<Arc<LinkReader>>,
}

impl LinkSource {
    /// Connects to an export. `to_serve`: a worker is to have it. It is not asked what is allocated then, and
    /// the worker gets this connection: there are servers that take one client. A server that brings no
    /// answer within `patience` is given up; within 30 s without one.
    ///
    /// # Errors
    /// See [`dial()`].
    pub(crate) fn open(
        endpoint: &Endpoint,
        read_only: bool,
        to_serve: bool,
        patience: Option<Duration>,
    ) -> Result<LinkSource, DialError> {
        let trust = endpoint.tls.as_ref().map(Trust::of).transpose()?;
        let wanted = Wanted { structured: !to_serve, writes: !read_only, ..Wanted::default() };
        let reader =
            LinkReader::connect(endpoint, wanted, trust.as_ref(), patience.unwrap_or(pool::PATIENCE))?;
        let agreed = *reader.agreed();
        let writable = !read_only && !agreed.has(nbd::READ_ONLY);
        let identity = identity_of(endpoint.plainly().as_ref());
        let envelope = trust.map(|trust| trust.sealed()).transpose()?;
        let durable = matches!(endpoint.server, Server::Rbd(_));
        let said = Said { agreed, writable, identity, tls: envelope.is_some(), durable, below: false };
        Ok(LinkSource::of(said, channel::pair()?, envelope, Some(Arc::new(reader))))
    }

    fn of(
        said: Said,
        channel: (OwnedFd, OwnedFd),
        envelope: Option<OwnedFd>,
        reader: Option<Arc<LinkReader>>,
    ) -> LinkSource {
        let Said { agreed, writable, .. } = said;
        let trims = writable && agreed.has(nbd::SEND_TRIM);
        let facts = Facts {
            direct_reason: "it is reached over a network, without a page cache of this host".to_owned(),
            physical_block_size: agreed.smallest.max(512),
            io_min: agreed.preferred.max(512),
            rotational: agreed.has(nbd::ROTATIONAL),
            discard: trims,
            discard_granularity: if trims { agreed.smallest.max(512) } else { 0 },
            write_zeroes: writable && agreed.has(nbd::SEND_WRITE_ZEROES),
            ..Facts::unasked(FileKind::Regular, agreed.size, writable)
        };
        LinkSource { said, facts, channel, envelope, reader }
    }

    /// What was agreed on with the server.
    pub fn agreed(&self) -> &Agreed {
        &self.said.agreed
    }

    /// Whether it may be written.
    pub fn may_write(&self) -> bool {
        self.said.writable
    }

    /// Whether finished writes are durable: a connection that breaks loses none of them.
    pub fn is_durable(&self) -> bool {
        self.said.durable
    }

    /// Whether an image of this host names it below itself: its URI is not the path of the image.
    pub fn is_below(&self) -> bool {
        self.said.below
    }

    /// It is below an image of this host.
    pub(crate) fn lies_below(&mut self) {
        self.said.below = true;
    }

    /// Whether several connections may be used at once: the server takes them, and a flush over one of them
    /// covers the writes of all.
    pub fn is_multi_conn(&self) -> bool {
        self.agreed().has(nbd::CAN_MULTI_CONN)
    }

    /// In place of a file's: what its URI hashes to.
    pub fn identity(&self) -> Identity {
        Identity { dev: NOWHERE, ino: self.said.identity }
    }

    /// The end of the channel by which connections are asked for.
    pub fn asks(&self) -> BorrowedFd<'_> {
        self.channel.0.as_fd()
    }

    /// The end by which they are answered.
    pub fn answers(&self) -> BorrowedFd<'_> {
        self.channel.1.as_fd()
    }

    /// A closed envelope for the process that makes connections, where they are secure.
    pub fn envelope(&self) -> Option<BorrowedFd<'_>> {
        self.envelope.as_ref().map(OwnedFd::as_fd)
    }

    /// See `Source::described`.
    pub(super) fn described(&self) -> LinkFacts {
        LinkFacts { link: self.said }
    }

    /// See `Source::into_descriptors`. Its connection goes with them.
    pub(super) fn into_descriptors(self) -> Vec<OwnedFd> {
        if let Some(socket) = self.reader.as_ref().and_then(|reader| reader.let_go()) {
            // Without it, who makes the worker's connections begins with one of its own.
            let _ = channel::leave(self.asks(), socket.as_fd());
        }
        [self.channel.0, self.channel.1].into_iter().chain(self.envelope).collect()
    }
}

impl SourceKind for LinkSource {
    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn len(&self) -> u64 {
        self.facts.size
    }

    fn identity(&self) -> Option<Identity> {
        Some(LinkSource::identity(self))
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        [self.asks(), self.answers()].into_iter().chain(self.envelope()).collect()
    }

    fn is_writable(&self) -> bool {
        self.facts.writable
    }

    fn reader(&self) -> io::Result<Arc<dyn ReadAt>> {
        Ok(match &self.reader {
            Some(reader) => Arc::clone(reader) as Arc<dyn ReadAt>,
            None => {
                // What a worker gets answers by simple replies.
                let agreed = Agreed { structured: false, allocation: None, ..self.said.agreed };
                Arc::new(LinkReader::of_channel(self.channel.0.try_clone()?, agreed))
            }
        })
    }

    fn unlock(&self) {}
}
