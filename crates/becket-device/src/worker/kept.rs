//! What it takes to serve a device again: how it was served, and the descriptors that go with it.
//! It never holds the device's own ublkcN: the kernel waits for the last copy of that when a worker dies.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use becket_image::{Backing, Below};
use becket_transport::serve::Decoded;
use becket_transport::ublk::Setup;

use super::protocol::{Serve, nothing_left, take_backings, wrong};

/// A device as its supervisor and its worker keep it: either may die, and the other still has all of it.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) serve: Serve,
    /// In the order of `serve.files`. They carry the image's locks.
    pub(crate) files: Vec<Backing>,
    pub(crate) keepsakes: Keepsakes,
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
    /// Its descriptors in the order of the protocol: of each file the buffered one and the direct one where there is
    /// one, then the lease, then the control group, then the table of encoded blocks.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        descriptors(&self.files, &self.keepsakes)
    }

    /// Puts the descriptors back where they belong, which must be as many as announced.
    pub(crate) fn new(serve: Serve, fds: Vec<OwnedFd>) -> io::Result<Kept> {
        let mut fds = fds.into_iter();
        let files = take_backings(serve.files.clone(), &mut fds)?;
        let mut keepsake = |announced: bool| match announced {
            true => fds.next().map(Some).ok_or_else(|| wrong("a keepsake's descriptor is missing")),
            false => Ok(None),
        };
        let keepsakes = Keepsakes {
            lease: keepsake(serve.lease)?,
            cgroup: keepsake(serve.cgroup)?,
            table: keepsake(serve.encoded.is_some())?,
        };
        nothing_left(fds)?;
        Ok(Kept { serve, files, keepsakes })
    }

    /// Splits off what it takes to move the device's bytes.
    pub(crate) fn into_setup(
        self,
        char_device: OwnedFd,
        below: Option<Below>,
        decoded: Option<Decoded>,
    ) -> (Setup, Keepsakes) {
        let Serve { id, queues, depth, flags, geometry, map, direct_io, merge, .. } = self.serve;
        let files = self.files;
        let setup = Setup {
            id,
            queues,
            depth,
            flags,
            geometry,
            char_device,
            map,
            files,
            below,
            decoded,
            direct_io,
            merge,
        };
        (setup, self.keepsakes)
    }
}

/// See [`Kept::descriptors`].
pub(crate) fn descriptors<'a>(files: &'a [Backing], keepsakes: &'a Keepsakes) -> Vec<BorrowedFd<'a>> {
    let keepsakes = keepsakes.lease.iter().chain(&keepsakes.cgroup).chain(&keepsakes.table);
    descriptors_of(files).chain(keepsakes.map(AsFd::as_fd)).collect()
}

/// Those of files alone: of each the buffered one and the direct one where there is one.
pub(crate) fn descriptors_of(files: &[Backing]) -> impl Iterator<Item = BorrowedFd<'_>> {
    files
        .iter()
        .flat_map(|file| std::iter::once(file.buffered.as_fd()).chain(file.direct.as_ref().map(AsFd::as_fd)))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::control::{BelowFacts, FileFacts};
    use crate::worker::protocol::tests::{facts, serve};
    use crate::worker::protocol::{Order, pair, receive, send};

    #[test]
    fn a_device_arrives_with_its_descriptors_in_order() {
        let temp = tempfile::tempdir().unwrap();
        let open = |name: &str| OwnedFd::from(File::create(temp.path().join(name)).unwrap());
        let inode =
            |fd: BorrowedFd<'_>| File::from(fd.try_clone_to_owned().unwrap()).metadata().unwrap().ino();
        let files =
            vec![FileFacts { facts: facts(), direct: true }, FileFacts { facts: facts(), direct: false }];
        let encoded = Some(crate::table::Encoding { cache_size: None });
        let order = Serve { lease: true, cgroup: true, encoded, ..serve(files) };
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
        assert!(again.files[0].direct.is_some() && again.files[1].direct.is_none());
        let (setup, keepsakes) = again.into_setup(open("ublkc"), None, None);
        assert_eq!((setup.id, setup.files.len()), (3, 2));
        assert_eq!(keepsakes.lease.map(|fd| inode(fd.as_fd())), Some(inodes[3]));
    }

    #[test]
    fn the_way_below_comes_last_and_goes_no_further() {
        let temp = tempfile::tempdir().unwrap();
        let open = |name: &str| OwnedFd::from(File::create(temp.path().join(name)).unwrap());
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
        let mut fds: Vec<OwnedFd> = ["b", "keepsake", "disk", "lease"].map(open).into();
        let inodes: Vec<u64> = fds.iter().map(inode).collect();
        let below = BelowFacts {
            map: becket_image::Map::contiguous(1, 8192, 4096),
            untouched: becket_image::Untouched { size: 4096, changed: (-1, 999_999_999) },
            device: "/dev/x".into(),
        };
        let files = vec![FileFacts { facts: facts(), direct: false }];
        let sent = Serve { below: Some(below), lease: true, ..serve(files) };
        let text = serde_json::to_string(&sent).unwrap();
        let received: Serve = serde_json::from_str(&text).unwrap();
        assert_eq!(received, sent);
        let below = received.below.clone().unwrap().with(&mut fds).unwrap();
        assert_eq!(
            (inode(&below.disk), rustix::fs::fstat(&below.lease).unwrap().st_ino),
            (inodes[2], inodes[3])
        );
        let (setup, keepsakes) = Kept::new(received, fds).unwrap().into_setup(open("c"), Some(below), None);
        assert_eq!((inode(&setup.files[0].buffered), setup.files.len()), (inodes[0], 1));
        assert_eq!(keepsakes.lease.as_ref().map(inode), Some(inodes[1]));
        assert_eq!(setup.below.unwrap().lease.untouched().changed, (-1, 999_999_999));
        assert!(sent.below.unwrap().with(&mut vec![open("only")]).is_err());
    }

    #[test]
    fn too_few_and_too_many_descriptors_are_refused() {
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let one = || Serve { lease: true, ..serve(vec![FileFacts { facts: facts(), direct: true }]) };
        for count in [0, 1, 2, 4] {
            assert!(Kept::new(one(), (0..count).map(|_| null()).collect()).is_err(), "{count} descriptors");
        }
        Kept::new(one(), (0..3).map(|_| null()).collect()).unwrap();
    }
}
