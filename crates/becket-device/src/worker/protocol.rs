//! The words between supervisor and worker: one JSON object per packet, descriptors beside it.
//! It never accepts a packet that was cut, a part of its descriptors, nor any that nobody announced.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use becket_engine::{Geometry, Summary};
use becket_image::{Backing, Map};
use becket_transport::ublk::Setup;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::control::{BelowFacts, FileFacts};

/// Longest packet in bytes; a map of some 30,000 extents fits.
const LARGEST: usize = 4 << 20;
/// The kernel passes no more descriptors at once (SCM_MAX_FD).
const MOST_FDS: usize = 253;

/// What the supervisor tells the worker.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Order {
    /// Serve a device. The descriptors: its ublkcN, then of each file the buffered one and the direct one
    /// where there is one, then those of [`BelowFacts`] where there are such.
    Serve(Box<Serve>),
    /// Look the requests of a device up in another map of the same files. Answered like `Serve`.
    Remap { id: u32, map: Map },
    /// Send the requests of a device past the page cache, or through it. Answered like `Serve`.
    DirectIo { id: u32, on: bool },
    /// Say what a device has done. Answered by `Counted`.
    Stat { id: u32 },
}

/// A device to be served: [`Setup`] without its descriptors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Serve {
    pub(crate) id: u32,
    pub(crate) queues: u16,
    pub(crate) depth: u16,
    pub(crate) flags: u64,
    pub(crate) geometry: Geometry,
    pub(crate) map: Map,
    pub(crate) files: Vec<FileFacts>,
    pub(crate) below: Option<BelowFacts>,
    pub(crate) direct_io: bool,
}

/// What the worker tells the supervisor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Report {
    /// It has given up its rights and waits for orders; the notes are precautions that the environment forbids.
    Started { threads: usize, notes: Vec<String> },
    /// It will not serve at all.
    Refused { why: String },
    /// Every queue of the device has fetched: it may be started.
    Ready { id: u32 },
    /// The device could not be served. `Closed` still follows.
    Failed { id: u32, why: String },
    /// What the device has done; nothing when it is not served here.
    Counted { id: u32, stats: Option<Box<Summary>> },
    /// Every descriptor of the device is closed.
    Closed { id: u32 },
}

/// Two ends of a connection that keeps packets apart; both are close-on-exec.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (a, b) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    for end in [&a, &b] {
        // The default holds some 200 KiB. Where this is capped, only very long maps are affected: EMSGSIZE.
        rustix::net::sockopt::set_socket_send_buffer_size_force(end, LARGEST)
            .or_else(|_| rustix::net::sockopt::set_socket_send_buffer_size(end, LARGEST))?;
    }
    Ok((a, b))
}

/// Sends one packet, whole or not at all.
pub(crate) fn send<T: Serialize>(socket: impl AsFd, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let packet = serde_json::to_vec(message)?;
    if packet.len() > LARGEST || fds.len() > MOST_FDS {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the image is in too many pieces"));
    }
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the image has too many files"));
    }
    loop {
        match rustix::net::sendmsg(&socket, &[IoSlice::new(&packet)], &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Waits for one packet; `None` when the other side is gone.
pub(crate) fn receive<T: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let Some(len) = next_length(&socket)? else { return Ok(None) };
    let mut packet = vec![0; len.min(LARGEST)];
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut buffers = [IoSliceMut::new(&mut packet)];
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
        // This process may not have that many open. The words are whole: who needs descriptors misses them and says so.
        fds.clear();
    }
    let text = packet.get(..received.bytes).unwrap_or_default();
    Ok(Some((serde_json::from_slice(text)?, fds)))
}

/// Waits for a packet and says how long it is, without taking it; `None` when the other side is gone.
fn next_length(socket: impl AsFd) -> io::Result<Option<usize>> {
    loop {
        match rustix::net::recv(&socket, &mut [0; 1], RecvFlags::PEEK | RecvFlags::TRUNC) {
            Ok((_, 0)) | Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            Ok((_, len)) => return Ok(Some(len)),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

impl Serve {
    /// Puts the descriptors back where they belong.
    pub(crate) fn with(self, mut fds: Vec<OwnedFd>) -> io::Result<Setup> {
        let below = self.below.map(|below| below.with(&mut fds)).transpose()?;
        let mut fds = fds.into_iter();
        let char_device = fds.next().ok_or_else(|| wrong("the device's descriptor is missing"))?;
        let files = backings(self.files, fds)?;
        let Serve { id, queues, depth, flags, geometry, map, direct_io, .. } = self;
        Ok(Setup { id, queues, depth, flags, geometry, char_device, map, files, below, direct_io })
    }
}

/// Joins what is said of files with their descriptors, which must be as many as announced.
pub(crate) fn backings(
    files: Vec<FileFacts>,
    mut fds: impl Iterator<Item = OwnedFd>,
) -> io::Result<Vec<Backing>> {
    let mut next = || fds.next().ok_or_else(|| wrong("a file's descriptor is missing"));
    let mut joined = Vec::with_capacity(files.len());
    for FileFacts { facts, direct } in files {
        let buffered = next()?;
        let direct = if direct { Some(next()?) } else { None };
        joined.push(Backing { buffered, direct, facts });
    }
    match fds.next() {
        None => Ok(joined),
        Some(_) => Err(wrong("there are more descriptors than files")),
    }
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    use becket_engine::Activity;
    use becket_image::{BackingKind, Facts};

    use super::*;

    pub(crate) fn facts() -> Facts {
        Facts {
            kind: BackingKind::Regular,
            size: 4096,
            writable: true,
            direct: None,
            direct_reason: "off".into(),
            physical_block_size: 512,
            io_min: 512,
            io_opt: 0,
            rotational: false,
            discard: false,
            discard_granularity: 0,
            write_zeroes: false,
            nowait: true,
            sparse: false,
            uncached: false,
        }
    }

    fn serve(files: Vec<FileFacts>) -> Serve {
        Serve {
            id: 3,
            queues: 2,
            depth: 64,
            flags: u64::MAX,
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
            files,
            below: None,
            direct_io: true,
        }
    }

    #[test]
    fn an_order_arrives_with_its_descriptors_in_order() {
        let temp = tempfile::tempdir().unwrap();
        let open = |name: &str| File::create(temp.path().join(name)).unwrap();
        let (char_device, buffered, direct, other) = (open("c"), open("b"), open("d"), open("o"));
        let files =
            vec![FileFacts { facts: facts(), direct: true }, FileFacts { facts: facts(), direct: false }];
        let sent = serve(files);
        let (a, b) = pair().unwrap();
        let fds = [char_device.as_fd(), buffered.as_fd(), direct.as_fd(), other.as_fd()];
        send(&a, &Order::Serve(Box::new(sent.clone())), &fds).unwrap();
        let (Order::Serve(received), passed) = receive::<Order>(&b).unwrap().unwrap() else { panic!() };
        assert_eq!(*received, sent);
        let setup = received.with(passed).unwrap();
        let inode =
            |fd: BorrowedFd<'_>| File::from(fd.try_clone_to_owned().unwrap()).metadata().unwrap().ino();
        assert_eq!(inode(setup.char_device.as_fd()), inode(char_device.as_fd()));
        assert_eq!(inode(setup.files[0].buffered.as_fd()), inode(buffered.as_fd()));
        assert_eq!(inode(setup.files[0].direct.as_ref().unwrap().as_fd()), inode(direct.as_fd()));
        assert_eq!(inode(setup.files[1].buffered.as_fd()), inode(other.as_fd()));
        assert!(setup.files[1].direct.is_none());
        for fd in [setup.char_device.as_fd(), setup.files[0].buffered.as_fd()] {
            assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        }
    }

    #[test]
    fn the_way_below_comes_last() {
        let temp = tempfile::tempdir().unwrap();
        let open = |name: &str| OwnedFd::from(File::create(temp.path().join(name)).unwrap());
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
        let fds = ["c", "b", "disk", "lease"].map(open);
        let inodes = fds.each_ref().map(inode);
        let mut sent = serve(vec![FileFacts { facts: facts(), direct: false }]);
        sent.below = Some(BelowFacts {
            map: Map::contiguous(1, 8192, 4096),
            untouched: becket_image::Untouched { size: 4096, changed: (-1, 999_999_999) },
            device: "/dev/x".into(),
        });
        let text = serde_json::to_string(&sent).unwrap();
        let received: Serve = serde_json::from_str(&text).unwrap();
        assert_eq!(received, sent);
        let setup = received.with(fds.into()).unwrap();
        let below = setup.below.unwrap();
        assert_eq!(
            [inode(&setup.char_device), inode(&setup.files[0].buffered), inode(&below.disk)],
            inodes[..3]
        );
        assert_eq!(rustix::fs::fstat(&below.lease).unwrap().st_ino, inodes[3]);
        assert_eq!(below.lease.untouched().changed, (-1, 999_999_999));
        sent.files.clear();
        assert!(sent.with(vec![open("only")]).is_err());
    }

    #[test]
    fn too_few_and_too_many_descriptors_are_refused() {
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let one = vec![FileFacts { facts: facts(), direct: true }];
        for count in [0, 1, 2, 4] {
            let fds = (0..count).map(|_| null()).collect();
            assert!(serve(one.clone()).with(fds).is_err(), "{count} descriptors");
        }
        serve(one).with((0..3).map(|_| null()).collect()).unwrap();
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
        };
        let (read, write, flush, discard) = (activity(), activity(), activity(), activity());
        Summary { in_flight: 3, read, write, flush, discard, write_zeroes: Some(activity()) }
    }

    #[test]
    fn an_order_for_numbers_arrives() {
        let (a, b) = pair().unwrap();
        send(&a, &Order::Stat { id: 7 }, &[]).unwrap();
        let (order, fds) = receive::<Order>(&b).unwrap().unwrap();
        assert!(matches!(order, Order::Stat { id: 7 }) && fds.is_empty());
    }

    #[test]
    fn reports_keep_their_borders_and_the_end_is_seen() {
        let (a, b) = pair().unwrap();
        let reports = [
            Report::Started { threads: 2, notes: vec!["n".into()] },
            Report::Ready { id: 1 },
            Report::Failed { id: 1, why: "x".into() },
            Report::Counted { id: 1, stats: Some(Box::new(counted())) },
            Report::Counted { id: 2, stats: None },
            Report::Closed { id: 1 },
            Report::Refused { why: "y".into() },
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
        let (reader, writer) = rustix::pipe::pipe().unwrap();
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
                place: becket_image::Place::Data { file: 0, offset: (10_000 - n) * 8192 },
            })
            .collect();
        let mut order = serve(Vec::new());
        order.map = Map::from_extents(extents).unwrap();
        let (a, b) = pair().unwrap();
        send(&a, &Order::Serve(Box::new(order.clone())), &[]).unwrap();
        let (Order::Serve(received), _) = receive::<Order>(&b).unwrap().unwrap() else { panic!() };
        assert_eq!(received.map, order.map);
    }
}
