//! What it takes to serve a device again: how it was served, and the descriptors that go with it. Supervisor,
//! worker and guard have a copy each.
//! It never holds the device's own ublkcN: the kernel waits for the last copy of that when a worker dies.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use becket_image::{Grow, Source};
use becket_transport::Kind;
use becket_transport::serve::{Content, Decoded, Setup};

use crate::contract::protocol::Serve;
use crate::contract::shape;
use crate::contract::spec::{nothing_left, take_sources};
use crate::contract::wrong;

/// A device as its supervisor and its worker keep it: either may die, and the other still has all of it.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) serve: Serve,
    /// In the order of `serve.backing.files`. They carry the image's locks.
    pub(crate) sources: Vec<Source>,
    pub(crate) keepsakes: Keepsakes,
    /// On the way to a supervisor's successor: what the device hangs on beside its backing, from its worker
    /// ([`Serve::link_descriptors`]) or a guard, which may have more.
    pub(crate) link: Vec<OwnedFd>,
}

/// A device's own descriptors, from which its kernel side lives.
#[derive(Debug)]
pub(crate) enum Own {
    Ublk { char_device: OwnedFd },
    Fuse { tether: OwnedFd, devices: Vec<OwnedFd> },
    Nbd { tether: OwnedFd },
    VhostUser { tether: OwnedFd },
}

impl Own {
    /// Those of a device, which must be as many as it has.
    pub(crate) fn new(serve: &Serve, fds: Vec<OwnedFd>) -> io::Result<Own> {
        let missing = || wrong("the device's descriptor is missing");
        if fds.len() != serve.own_descriptors() {
            return Err(missing());
        }
        let mut fds = fds.into_iter();
        let first = fds.next().ok_or_else(missing)?;
        match serve.kind {
            // The other end of the tether is for the supervisor's successor only.
            Kind::Fuse => Ok(Own::Fuse { tether: first, devices: fds.skip(1).collect() }),
            Kind::Ublk => Ok(Own::Ublk { char_device: first }),
            Kind::Nbd => Ok(Own::Nbd { tether: first }),
            Kind::VhostUser => Ok(Own::VhostUser { tether: first }),
            Kind::Loop | Kind::Dm => Err(wrong("the kernel serves such a device")),
        }
    }
}

/// Descriptors that serve no I/O: a worker only holds them for its supervisor's successor.
#[derive(Debug, Default)]
pub(crate) struct Keepsakes {
    /// The reading end of the pipe whose closing ends the device.
    pub(crate) lease: Option<OwnedFd>,
    /// The `cgroup.procs` that an isolated worker belongs in.
    pub(crate) cgroup: Option<OwnedFd>,
    /// The table of the image's encoded blocks.
    pub(crate) table: Option<OwnedFd>,
}

impl Kept {
    /// Its descriptors in the order of the protocol: of each file the buffered one and the direct one if
    /// there is one, then the lease, then the control group, then the table of encoded blocks.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        descriptors(descriptors_of(&self.sources), &self.keepsakes)
    }

    /// Puts the descriptors back where they belong, which must be as many as announced.
    pub(crate) fn new(serve: Serve, fds: Vec<OwnedFd>) -> io::Result<Kept> {
        let mut fds = fds.into_iter();
        let sources = take_sources(serve.backing.files.clone(), &mut fds)?;
        let mut keepsake = |announced: bool| match announced {
            true => fds.next().map(Some).ok_or_else(|| wrong("a keepsake's descriptor is missing")),
            false => Ok(None),
        };
        let keepsakes = Keepsakes {
            lease: keepsake(serve.backing.lease)?,
            cgroup: keepsake(serve.backing.cgroup)?,
            table: keepsake(serve.backing.encoded.is_some())?,
        };
        nothing_left(fds)?;
        Ok(Kept { serve, sources, keepsakes, link: Vec::new() })
    }

    /// The same of what a worker tells of a device that it serves.
    pub(crate) fn held(serve: Serve, fds: Vec<OwnedFd>) -> io::Result<Kept> {
        let link = serve.link_descriptors();
        Kept::with_link(serve, fds, link)
    }

    /// The same of what a guard has kept.
    pub(crate) fn guarded(serve: Serve, fds: Vec<OwnedFd>) -> io::Result<Kept> {
        let link = serve.link_descriptors() + shape::of(serve.kind).kept_descriptors;
        Kept::with_link(serve, fds, link)
    }

    fn with_link(serve: Serve, mut fds: Vec<OwnedFd>, link: usize) -> io::Result<Kept> {
        let first = fds.len().checked_sub(link);
        let link = fds.split_off(first.ok_or_else(|| wrong("a descriptor of the connection is missing"))?);
        Ok(Kept { link, ..Kept::new(serve, fds)? })
    }

    /// Splits off what it takes to move the device's bytes, whichever its transport.
    pub(crate) fn into_setup(
        self,
        decoded: Option<Decoded>,
        grow: Option<Box<dyn Grow>>,
    ) -> (Setup, Keepsakes) {
        let Serve { id, first, queues, depth, geometry, map, backing, faults, .. } = self.serve;
        let direct_io = backing.direct_io;
        let content = Content { map, sources: self.sources, decoded, grow, direct_io, faults };
        (Setup { id: id.number, first, queues, depth, geometry, content }, self.keepsakes)
    }
}

/// See [`Kept::descriptors`]; those of its sources come first.
pub(crate) fn descriptors<'a>(
    sources: impl Iterator<Item = BorrowedFd<'a>>,
    keepsakes: &'a Keepsakes,
) -> Vec<BorrowedFd<'a>> {
    let keepsakes = keepsakes.lease.iter().chain(&keepsakes.cgroup).chain(&keepsakes.table);
    sources.chain(keepsakes.map(AsFd::as_fd)).collect()
}

/// Those of sources alone.
pub(crate) fn descriptors_of(sources: &[Source]) -> impl Iterator<Item = BorrowedFd<'_>> {
    sources.iter().flat_map(Source::descriptors)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::contract::protocol::tests::{facts, serve};
    use crate::contract::protocol::{Order, pair, receive, send};
    use crate::contract::spec::Backing;
    use becket_image::FileFacts;

    #[test]
    fn a_device_arrives_with_its_descriptors_in_order() {
        let temp = tempfile::tempdir().unwrap();
        let open = |name: &str| OwnedFd::from(File::create(temp.path().join(name)).unwrap());
        let inode =
            |fd: BorrowedFd<'_>| File::from(fd.try_clone_to_owned().unwrap()).metadata().unwrap().ino();
        let files = vec![
            FileFacts { facts: facts(), direct: true, heard: false }.into(),
            FileFacts { facts: facts(), direct: false, heard: false }.into(),
        ];
        let encoded = Some(crate::contract::table::Encoding { cache_size: None, direct_io: false });
        let backing = Backing { lease: true, cgroup: true, encoded, files, ..Backing::default() };
        let order = Serve { backing, ..serve(Vec::new()) };
        let fds: Vec<OwnedFd> = ["buffered", "direct", "other", "lease", "cgroup", "table"].map(open).into();
        let inodes: Vec<u64> = fds.iter().map(|fd| inode(fd.as_fd())).collect();
        let kept = Kept::new(order, fds).unwrap();
        assert_eq!(kept.descriptors().iter().map(|fd| inode(*fd)).collect::<Vec<_>>(), inodes);

        let (a, b) = pair().unwrap();
        send(&a, &Order::Serve(Box::new(kept.serve.clone())), &kept.descriptors()).unwrap();
        let (Order::Serve(received), passed) = receive::<Order>(&b).unwrap().unwrap() else { panic!() };
        assert_eq!(*received, kept.serve);
        let again = Kept::new(*received, passed).unwrap();
        assert_eq!(again.descriptors().iter().map(|fd| inode(*fd)).collect::<Vec<_>>(), inodes);
        for fd in again.descriptors() {
            assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        }
        let direct = again.sources.iter().map(Source::is_direct);
        assert_eq!(direct.collect::<Vec<_>>(), [true, false]);
        let (setup, keepsakes) = again.into_setup(None, None);
        assert_eq!((setup.id, setup.content.sources.len()), (3, 2));
        assert_eq!(keepsakes.lease.map(|fd| inode(fd.as_fd())), Some(inodes[3]));
    }

    #[test]
    fn a_connection_goes_to_the_worker_and_comes_back_for_a_successor() {
        let temp = tempfile::tempdir().unwrap();
        let open = |name: &str| OwnedFd::from(File::create(temp.path().join(name)).unwrap());
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
        let sent = || Serve {
            kind: Kind::Fuse,
            partitions: vec![(1, 512, 1024)],
            ..serve(vec![FileFacts { facts: facts(), direct: false, heard: false }.into()])
        };
        let own: Vec<OwnedFd> = ["tether", "end", "queue 0", "queue 1"].map(open).into();
        let inodes: Vec<u64> = own.iter().map(inode).collect();
        assert_eq!(own.len(), sent().own_descriptors());
        Kept::new(sent(), vec![open("image")]).unwrap();
        let Own::Fuse { tether, devices } = Own::new(&sent(), own).unwrap() else { panic!() };
        assert_eq!(inode(&tether), inodes[0]);
        assert_eq!(devices.iter().map(inode).collect::<Vec<_>>(), inodes[2..]);

        let held = ["image", "end", "queue 0", "queue 1"].map(open).into();
        let kept = Kept::held(sent(), held).unwrap();
        assert_eq!(kept.link.iter().map(inode).collect::<Vec<_>>(), inodes[1..]);
        for count in [0, 1, 3, 5] {
            let held = (0..count).map(|_| open("any")).collect();
            assert!(Kept::held(sent(), held).is_err(), "{count} descriptors");
        }
        assert!(Own::new(&sent(), vec![open("any")]).is_err());
    }

    #[test]
    fn too_few_and_too_many_descriptors_are_refused() {
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let files = || vec![FileFacts { facts: facts(), direct: true, heard: false }.into()];
        let backing = || Backing { lease: true, files: files(), ..Backing::default() };
        let one = || Serve { backing: backing(), ..serve(Vec::new()) };
        for count in [0, 1, 2, 4] {
            assert!(Kept::new(one(), (0..count).map(|_| null()).collect()).is_err(), "{count} descriptors");
        }
        Kept::new(one(), (0..3).map(|_| null()).collect()).unwrap();
    }
}
