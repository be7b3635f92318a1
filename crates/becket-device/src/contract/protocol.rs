//! The messages between supervisor and worker: one JSON object per packet, with descriptors. What is too long
//! for a packet (the map of an image in many pieces) is in a memfd, whose descriptor comes first.
//! It never accepts a packet that was truncated, only a part of its descriptors, nor any that were not
//! announced.
//!
//! # The introduction
//!
//! A successor's first message is a [`Speech`](crate::contract::versions::Speech), and the last message of a
//! worker's introduction is [`Report::Handed`]. Both keep their shape for ever, and unknown fields are
//! ignored in them. All messages between and after them are of the newest version that both speak; a worker
//! that shares no version with a successor sends `Handed` alone and waits for another successor. A device is
//! handed over only to a successor that understands what it [`Serve::needs`].

use std::cell::RefCell;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use becket_engine::{Faults, Geometry, Summary};
use becket_image::{DirectIo, Map, SourceFacts};
use becket_transport::{Abilities, Kind};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::contract::DeviceId;
use crate::contract::export::{Visitor, Visits};
use crate::contract::sealed;
use crate::contract::shape;
use crate::contract::spec::Backing;

/// Longest packet in bytes: what a socket takes by default; a map of some 1,500 extents fits.
pub(crate) const LARGEST: usize = 128 << 10;
/// What stands in a packet for words that lie in a file.
const ASIDE: &[u8] = b"aside";
/// The kernel passes no more descriptors at once (SCM_MAX_FD).
pub(crate) const MOST_FDS: usize = 253;

/// What the supervisor tells the worker.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Order {
    /// Serve a device. The descriptors: [its own](Serve::own_descriptors), then those of
    /// [`Kept`](super::kept::Kept).
    Serve(Box<Serve>),
    /// Take the next supervisor's call here, once this one is gone. The descriptor: a socket that listens.
    Await,
    /// Serve a device otherwise, from one request to the next. The descriptors: those of its files, if any
    /// are given. Answered like `Serve`; a device for which it answers `Failed` goes on as before.
    Change(Box<Change>),
    /// Take no more requests of a FUSE device or an export and finish those that were taken. `Closed`
    /// follows. The kernel side of FUSE keeps the others for the next worker; the clients of an export are
    /// reported as `Left`.
    Leave { id: DeviceId },
    /// Serve a client of an export. The descriptors: its socket, and those of the visitor. The client's end
    /// is reported by `Visits`.
    Connect { id: DeviceId, visitor: Visitor },
    /// Have the reads of a device fail that began before a moment (`moment`) and wait for its server: nobody
    /// wants their bytes any more.
    GiveUpReads { id: DeviceId, before: u64 },
    /// A device is about to end for good, or stays after all. Answered like `Serve`. What its end may lose is
    /// reported by `Unsaved`. Given to workers that have the feature.
    Expect { id: DeviceId, end: bool },
    /// Say what a device has done. Answered by `Counted`.
    Stat { id: DeviceId },
}

/// A device to be served: [`becket_transport::serve::Setup`] without its descriptors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Serve {
    /// How it is offered: over ublk or FUSE.
    pub(crate) kind: Kind,
    pub(crate) id: DeviceId,
    /// Where its queues begin; see [`becket_transport::serve::Setup::first`].
    #[serde(default)]
    pub(crate) first: u32,
    pub(crate) queues: u16,
    pub(crate) depth: u16,
    /// What it can do, as it was settled when it was added.
    #[serde(rename = "flags")]
    pub(crate) abilities: Abilities,
    pub(crate) geometry: Geometry,
    pub(crate) map: Map,
    #[serde(flatten)]
    pub(crate) backing: Backing,
    /// Workers of builds that had `--below` say null. Nothing else is understood.
    #[serde(default, skip_serializing)]
    pub(crate) below: (),
    #[serde(default)]
    pub(crate) faults: Option<Faults>,
    /// The number that the kernel keeps with the device.
    pub(crate) mark: u64,
    /// The worker serves this device alone.
    pub(crate) isolated: bool,
    /// FUSE: partitions that are files too, by number, first byte and length.
    pub(crate) partitions: Vec<(u32, u64, u64)>,
    /// The features without which it cannot be served. A new field is omitted where it says nothing new, and
    /// has a feature of its own where it must not be ignored.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) needs: Vec<String>,
}

impl Serve {
    /// How many descriptors of the device itself come first: its ublkcN; or the worker's end of the tether,
    /// the other end, and one of the connection for each queue.
    pub(crate) fn own_descriptors(&self) -> usize {
        let (always, each_queue) = shape::of(self.kind).descriptors;
        always + each_queue * usize::from(self.queues)
    }

    /// How many of these a successor of the supervisor needs.
    pub(crate) fn link_descriptors(&self) -> usize {
        self.own_descriptors().saturating_sub(1)
    }
}

/// How a served device is served from now on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Change {
    pub(crate) id: DeviceId,
    pub(crate) map: Map,
    pub(crate) read_only: bool,
    #[serde(with = "crate::contract::switch")]
    pub(crate) direct_io: DirectIo,
    /// Other files than it has.
    pub(crate) files: Option<Vec<SourceFacts>>,
}

impl Change {
    /// None yet.
    pub(crate) fn none(serve: &Serve) -> Change {
        Change {
            id: serve.id,
            map: serve.map.clone(),
            read_only: serve.geometry.read_only,
            direct_io: serve.backing.direct_io,
            files: None,
        }
    }

    /// How the device is served afterwards, by whomever.
    pub(crate) fn apply(&self, serve: &mut Serve) {
        serve.geometry.size = self.map.len();
        serve.geometry.read_only = self.read_only;
        serve.map = self.map.clone();
        serve.backing.direct_io = self.direct_io;
        if let Some(files) = &self.files {
            serve.backing.files.clone_from(files);
        }
    }
}

/// How a worker ends its introduction. Its shape never changes: see the head of this module.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Handed {
    /// The version that is spoken from now on. If there is none that both know: the newest that the worker
    /// speaks.
    pub(crate) version: u32,
    /// The features that the worker understands; said to a successor that speaks of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) features: Vec<String>,
    /// How many devices it keeps to itself, since the successor does not understand them.
    #[serde(default, skip_serializing_if = "is_none")]
    pub(crate) withheld: u32,
}

/// Nothing is said of what is not there: an older successor would not understand it.
fn is_none(withheld: &u32) -> bool {
    *withheld == 0
}

/// What the worker tells the supervisor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Report {
    /// It has dropped its privileges and waits for orders; the notes are precautions that the environment
    /// forbids.
    Started { threads: usize, notes: Vec<String> },
    /// It will not serve at all.
    Refused { why: String },
    /// Every queue of the device has fetched, and they begin there: it may be started.
    Ready { id: DeviceId, first: u32 },
    /// The device could not be served. `Closed` still follows.
    Failed { id: DeviceId, why: String },
    /// The same, because a table is full; if less of the device would fit, how deep its queues could be
    /// without copying.
    Full { id: DeviceId, why: String, room: Option<u16> },
    /// What the device has done; nothing when it is not served here.
    Counted { id: DeviceId, stats: Option<Box<Summary>> },
    /// Finished writes of a device may be lost that has ended for good, and why. `Closed` follows.
    Unsaved { id: DeviceId, why: String },
    /// Every descriptor of the device is closed.
    Closed { id: DeviceId },
    /// How many clients an export has had; said whenever that changes.
    Visits { id: DeviceId, visits: Visits },
    /// A client that it had when it was asked to leave, between two requests; or the front-end that it has,
    /// in place of what was said of that before: this is what another worker must know of it. The
    /// descriptors: its socket, and those of the visitor.
    Left { id: DeviceId, visitor: Visitor },
    /// What was said of its front-end does not hold any more.
    Stays { id: DeviceId },
    /// To a successor: a device that it serves. The descriptors: those of [`Kept`](super::kept::Kept), then
    /// those of its own [that are needed](Serve::link_descriptors).
    Held(Box<Serve>),
    /// To a successor: all has been said.
    Handed(Handed),
}

impl Report {
    /// The device that it speaks of; `None` where it speaks of the worker.
    pub(crate) fn device(&self) -> Option<DeviceId> {
        match self {
            Report::Ready { id, .. }
            | Report::Failed { id, .. }
            | Report::Full { id, .. }
            | Report::Counted { id, .. }
            | Report::Visits { id, .. }
            | Report::Left { id, .. }
            | Report::Stays { id }
            | Report::Unsaved { id, .. }
            | Report::Closed { id } => Some(*id),
            Report::Held(serve) => Some(serve.id),
            Report::Started { .. } | Report::Refused { .. } | Report::Handed(_) => None,
        }
    }
}

/// Two ends of a connection that keeps packets apart; both are close-on-exec.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// Sends one packet, whole or not at all.
pub(crate) fn send<T: Serialize>(socket: impl AsFd, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut packet = serde_json::to_vec(message)?;
    let mut fds = fds.to_vec();
    let aside;
    if packet.len() > LARGEST {
        aside = sealed::file("becket-words", |file| io::Write::write_all(file, &packet))?;
        fds.insert(0, aside.as_fd());
        ASIDE.clone_into(&mut packet);
    }
    send_packet(socket, &packet, &fds, SendFlags::NOSIGNAL).map(drop)
}

/// Sends the bytes of one packet, or some of them over a stream, and says how many.
pub(crate) fn send_packet(
    socket: impl AsFd,
    packet: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> io::Result<usize> {
    if fds.len() > MOST_FDS {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the image has too many files"));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the image has too many files"));
    }
    loop {
        match rustix::net::sendmsg(&socket, &[IoSlice::new(packet)], &mut control, flags) {
            Ok(sent) => return Ok(sent),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Waits for one packet; `None` when the other side is gone.
pub(crate) fn receive<T: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    thread_local! {
        /// Those who listen do nothing else for long: they ask nobody how long the next packet is.
        static PACKET: RefCell<Vec<u8>> = RefCell::new(vec![0; LARGEST]);
    }
    PACKET.with_borrow_mut(|packet| {
        let Some((len, mut fds)) = receive_packet(packet, socket)? else { return Ok(None) };
        let text = packet.get(..len).unwrap_or_default();
        if text == ASIDE {
            let missing = || io::Error::new(io::ErrorKind::InvalidData, "the words of a packet are missing");
            let aside = if fds.is_empty() { return Err(missing()) } else { fds.remove(0) };
            return Ok(Some((sealed::read_json(&aside)?, fds)));
        }
        Ok(Some((serde_json::from_slice(text)?, fds)))
    })
}

/// Waits for the bytes of one packet, or some of a stream, and says how many; `None` when the other side is
/// gone.
pub(crate) fn receive_packet(
    packet: &mut [u8],
    socket: impl AsFd,
) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut buffers = [IoSliceMut::new(packet)];
        match rustix::net::recvmsg(&socket, &mut buffers, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => break received,
            Err(rustix::io::Errno::INTR) => {}
            // The other side died with packets of ours unread.
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    };
    // Taken out first: whatever follows, they are closed and not leaked.
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            fds.extend(passed);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a packet was cut"));
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        // This process may not have that many open. The message is whole: its reader misses the descriptors
        // and reports that.
        fds.clear();
    }
    Ok(Some((received.bytes, fds)))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs::File;

    use becket_engine::{Activity, Decodings, Fetched};
    use becket_image::{Facts, FileKind};

    use super::*;

    pub(crate) fn facts() -> Facts {
        Facts { direct_reason: "off".into(), nowait: true, ..Facts::unasked(FileKind::Regular, 4096, true) }
    }

    pub(crate) fn serve(files: Vec<SourceFacts>) -> Serve {
        Serve {
            kind: Kind::Ublk,
            id: 3.into(),
            first: 3,
            queues: 2,
            depth: 64,
            abilities: Abilities::of_flags(u64::MAX),
            geometry: Geometry {
                size: 4096,
                logical_block: 512,
                physical_block: 512,
                io_min: 512,
                io_opt: 0,
                dma_align: 1,
                read_only: false,
                rotational: false,
                discard: false,
                discard_granularity: 0,
                write_zeroes: true,
                max_io: 65536,
            },
            map: Map::contiguous(0, 0, 4096),
            backing: Backing { files, ..Backing::default() },
            faults: Some(Faults::default()),
            mark: 7,
            isolated: false,
            partitions: Vec::new(),
            needs: Vec::new(),
            below: (),
        }
    }

    /// As workers of earlier builds send it: a removed field must not keep their devices from being taken
    /// over.
    #[test]
    fn what_older_workers_hold_is_understood() {
        let held = serve(Vec::new());
        let mut text = serde_json::to_value(Report::Held(Box::new(held.clone()))).unwrap();
        let fields = text["held"].as_object_mut().unwrap();
        assert!(!fields.contains_key("needs"), "an older supervisor would not understand it");
        fields.insert("below".to_owned(), serde_json::Value::Null);
        assert_eq!(serde_json::from_value::<Report>(text.clone()).unwrap(), Report::Held(Box::new(held)));
        text["held"]["below"] = serde_json::json!({"device": "/dev/vda"});
        assert!(serde_json::from_value::<Report>(text).is_err());
        let handed = Report::Handed(Handed { version: 3, features: Vec::new(), withheld: 0 });
        assert_eq!(serde_json::to_string(&handed).unwrap(), "{\"handed\":{\"version\":3}}");
    }

    /// Each number another one, and as large as numbers are.
    fn counted() -> Summary {
        let mut next = u64::MAX;
        let mut next = || {
            next -= 1;
            next
        };
        let mut activity = || Activity {
            operations: next(),
            bytes: next(),
            errors: Some(next()),
            mean_ns: Some(next()),
            p50_ns: Some(next()),
            p90_ns: Some(next()),
            p99_ns: Some(next()),
            p999_ns: None,
            max_ns: Some(next()),
            below: Some([next(); 12]),
            window: Some(next()),
        };
        let (read, write, flush, discard) = (activity(), activity(), activity(), activity());
        let decoded = Some(Decodings { hits: 1, waits: 2, blocks: 3, bytes: u64::MAX, ahead: 5, errors: 6 });
        let (fetched, write_zeroes) = (Some(Fetched { waits: 7, ..Fetched::default() }), Some(activity()));
        Summary { in_flight: 3, read, write, flush, discard, write_zeroes, decoded, fetched }
    }

    #[test]
    fn an_order_for_numbers_arrives() {
        let (a, b) = pair().unwrap();
        send(&a, &Order::Stat { id: 7.into() }, &[]).unwrap();
        let (order, fds) = receive::<Order>(&b).unwrap().unwrap();
        assert!(matches!(order, Order::Stat { id } if id == 7.into()) && fds.is_empty());
    }

    #[test]
    fn reports_keep_their_borders_and_the_end_is_seen() {
        let (a, b) = pair().unwrap();
        let reports = [
            Report::Started { threads: 2, notes: vec!["n".into()] },
            Report::Ready { id: 1.into(), first: 2 },
            Report::Failed { id: 1.into(), why: "x".into() },
            Report::Counted { id: 1.into(), stats: Some(Box::new(counted())) },
            Report::Counted { id: 2.into(), stats: None },
            Report::Closed { id: 1.into() },
            Report::Refused { why: "y".into() },
            Report::Held(Box::new(serve(Vec::new()))),
            Report::Handed(Handed { version: 3, features: Vec::new(), withheld: 0 }),
            Report::Handed(Handed { version: 4, features: vec!["x".to_owned()], withheld: 2 }),
        ];
        for report in &reports {
            send(&a, report, &[]).unwrap();
        }
        drop(a);
        for report in &reports {
            assert_eq!(&receive::<Report>(&b).unwrap().unwrap().0, report);
        }
        assert!(receive::<Report>(&b).unwrap().is_none());
    }

    #[test]
    fn nonsense_is_an_error_and_closes_what_came_with_it() {
        let (a, b) = pair().unwrap();
        let file = File::open("/dev/null").unwrap();
        send(&a, &"nonsense", &[file.as_fd()]).unwrap();
        assert!(receive::<Order>(&b).is_err());
        // A writer's end that came along must be closed: its reader sees the end.
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        send(&a, &"nonsense", &[writer.as_fd()]).unwrap();
        drop(writer);
        assert!(receive::<Order>(&b).is_err());
        assert_eq!(rustix::io::read(&reader, &mut [0u8; 1]).unwrap(), 0);
    }

    #[test]
    fn a_long_map_fits_in_a_packet() {
        let extents = (0..10_000)
            .map(|n| becket_image::Extent {
                start: n * 4096,
                len: 4096,
                place: becket_image::Place::Data { source: 0, offset: (10_000 - n) * 8192 },
            })
            .collect();
        let mut order = serve(Vec::new());
        order.map = Map::from_extents(extents).unwrap();
        let (a, b) = pair().unwrap();
        send(&a, &Order::Serve(Box::new(order.clone())), &[]).unwrap();
        let (Order::Serve(received), _) = receive::<Order>(&b).unwrap().unwrap() else { panic!() };
        assert_eq!(received.map, order.map);
    }

    #[test]
    fn a_map_too_long_for_a_packet_lies_beside_it() {
        let extents = (0..50_000)
            .map(|n| becket_image::Extent {
                start: n * 4096,
                len: 4096,
                place: becket_image::Place::Data { source: 0, offset: (50_000 - n) * 8192 },
            })
            .collect();
        let mut order = serve(Vec::new());
        order.map = Map::from_extents(extents).unwrap();
        let (a, b) = pair().unwrap();
        let own = rustix::fs::memfd_create("own", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
        send(&a, &Order::Serve(Box::new(order.clone())), &[own.as_fd()]).unwrap();
        let (Order::Serve(received), fds) = receive::<Order>(&b).unwrap().unwrap() else { panic!() };
        assert_eq!(received.map, order.map);
        assert_eq!(fds.iter().map(inode).collect::<Vec<_>>(), [inode(&own)]);
        // A message without a file, or with one that can change, is refused.
        for fds in [&[][..], &[own.as_fd()]] {
            let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
            rustix::net::sendmsg(&a, &[IoSlice::new(ASIDE)], &mut control, SendFlags::NOSIGNAL).unwrap();
            assert_eq!(receive::<Order>(&b).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }
}
