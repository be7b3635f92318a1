//! FUSE as an offer: connections with a loop device over their file, or a directory for users other than
//! root. It never waits for a worker that has died.
//!
//! | a device has | here |
//! | --- | --- |
//! | a number | ours |
//! | a descriptor that only the worker holds | the tether: it closes when the worker cannot reach the backing |
//! | requests, kept over a worker's death | the connection's descriptors: we hold copies |
//! | recovery | the kernel sends requests again on request (Linux 6.9) |
//! | a disk | the loop device; it alone keeps the file system, so with it everything goes |

mod disk;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use becket_engine::Geometry;
use becket_image::{Partition, Source};
use becket_transport::aside::begun;
use becket_transport::fuse::{self, Connection};
use becket_transport::loop_;
use becket_transport::{Abilities, Kind, node, sysfs};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags, fstat, major, minor};
use rustix::pipe::PipeFlags;

use crate::contract::kept::Kept;
use crate::contract::{self, Error};
use crate::record::device::Device;
use crate::supervisor::driver::{Added, Driver, NewDevice, Offer, PARTITIONS, READY, Settled};
use crate::system::inode::is_pipe;
use crate::system::sync::lock;
use disk::{detach_unused, end_left, find_disk, loop_number, set_read_only};

/// How often it is looked whether a server that is waited for still lives.
const LOOK: Duration = Duration::from_millis(20);
/// Numbers end there.
const MOST: u32 = 1 << 20;
/// What all devices have.
const ABILITIES: Abilities = Abilities::SERVED.with(Abilities::RESIZES);
/// `/dev/fuse`, by the kernel's `devices.txt`.
const FUSE: (u32, u32) = (10, 229);

pub(in crate::supervisor) const OFFER: Offer = Offer {
    open: |runtime| Ok(Arc::new(FuseDriver::new(runtime.files()))),
    numbered_here: true,
    ended_by_others: true,
    worker_has_partitions: true,
    end_left: Some(end_left),
    is_link,
    ..Offer::of(Kind::Fuse)
};

/// The connections of this user's becket.
struct FuseDriver {
    /// Where directories are made for those who are not root.
    places: PathBuf,
    links: Mutex<BTreeMap<u32, Link>>,
    /// Numbers of devices that are others'.
    reserved: Mutex<BTreeSet<u32>>,
}

/// A connection.
struct Link {
    connection: Arc<Connection>,
    added: Added,
    /// What is shown; before it is started, what it is shown from.
    face: Face,
    /// The end of the present worker's tether.
    tether: Option<Arc<OwnedFd>>,
    geometry: Option<Geometry>,
    image: PathBuf,
    promised: Vec<Partition>,
    /// Its partition table is read again when a program asks for that.
    rereads: bool,
    /// The loop device itself is for reading only.
    read_only: bool,
}

#[derive(Debug, Clone)]
enum Face {
    /// The root of a file system that is mounted nowhere.
    Root(Arc<OwnedFd>),
    /// The loop device over its file.
    Disk { number: u32, diskseq: Option<u64> },
    /// A directory with the file in it.
    Directory(PathBuf),
}

/// Why waiting ended without an answer.
enum Lost {
    /// The server that would have to answer is dead.
    Server,
    /// It took too long.
    Time,
}

impl FuseDriver {
    fn new(places: PathBuf) -> FuseDriver {
        FuseDriver { places, links: Mutex::default(), reserved: Mutex::default() }
    }

    fn with<T>(&self, id: u32, what: impl FnOnce(&mut Link) -> T) -> Result<T, Error> {
        lock(&self.links).get_mut(&id).map(what).ok_or_else(|| gone(id))
    }

    /// Owns a connection that a predecessor has made.
    ///
    /// Its link is the end of the worker's tether and the connection's descriptors. Nothing here may wait
    /// long for the loop device, as opening it does: its users may wait for us.
    fn take(&self, record: &Device, kept: &mut Kept) {
        let (mut fds, serve) = (std::mem::take(&mut kept.link), &kept.serve);
        if fds.is_empty() {
            return;
        }
        let tether = Arc::new(fds.remove(0));
        let resends = serve.abilities.has(Abilities::RECOVERS);
        let face = match loop_number(&record.info.device) {
            Some(number) => Face::Disk { number, diskseq: record.info.diskseq },
            // Our predecessor died before it could write down what it made.
            None if record.starting && rustix::process::geteuid().is_root() => {
                let number = fds.first().and_then(find_disk).unwrap_or(u32::MAX);
                Face::Disk { number, diskseq: None }
            }
            None if record.starting => Face::Directory(self.places.join(name(serve.id.number))),
            None => Face::Directory(record.info.device.parent().map(Path::to_owned).unwrap_or_default()),
        };
        let added = Added {
            number: serve.id.number,
            queues: serve.queues,
            depth: serve.depth,
            abilities: serve.abilities,
            mark: serve.mark,
            stopped: false,
        };
        let link = Link {
            connection: Arc::new(Connection::taken_over(fds, resends)),
            added,
            face,
            tether: Some(tether),
            geometry: Some(serve.geometry.clone()),
            image: record.info.spec.image.clone(),
            promised: Vec::new(),
            rereads: false,
            // The flag that its users see says nothing of how the disk was made.
            read_only: kept.sources.first().is_some_and(is_for_reading)
                && loop_number(&record.info.device)
                    .is_some_and(|number| sysfs::flag(&format!("loop{number}"), "ro").unwrap_or(false)),
        };
        lock(&self.links).insert(serve.id.number, link);
    }

    /// Runs work that waits for the server, as long as the server lives. Work that is left waiting ends when
    /// another server answers, or the connection ends.
    fn while_served<T: Send + 'static>(
        &self,
        id: u32,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Result<T, Lost>, Error> {
        self.await_served(id, &begun(work))
    }

    fn await_served<T>(&self, id: u32, answer: &Receiver<T>) -> Result<Result<T, Lost>, Error> {
        let tether = self.with(id, |link| link.tether.clone())?.ok_or_else(|| gone(id))?;
        let deadline = Instant::now() + READY;
        loop {
            match answer.recv_timeout(LOOK) {
                Ok(answer) => return Ok(Ok(answer)),
                Err(RecvTimeoutError::Timeout) if hung_up(&tether) => return Ok(Err(Lost::Server)),
                Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
                Err(_) => return Ok(Err(Lost::Time)),
            }
        }
    }

    fn disk(&self, id: u32) -> Result<(u32, Option<u64>), Error> {
        match self.with(id, |link| link.face.clone())? {
            Face::Disk { number, diskseq } => Ok((number, diskseq)),
            _ => Err(gone(id)),
        }
    }
}

/// Whether a file was opened for reading only.
fn is_for_reading(source: &Source) -> bool {
    let Some(file) = source.file() else { return !source.is_writable() };
    rustix::fs::fcntl_getfl(&file.buffered).is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RDONLY)
}

/// Whether no process holds the other end any more.
fn hung_up(tether: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(tether, PollFlags::empty())];
    let asked = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    asked.is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

fn gone(id: u32) -> Error {
    Error::NoDevice { target: name(id) }
}

fn lost(id: u32, lost: &Lost) -> Error {
    let what = match lost {
        Lost::Server => "died with",
        Lost::Time => "does not answer for",
    };
    Error::Worker { what: format!("{what} {}", name(id)) }
}

fn name(id: u32) -> String {
    format!("fuse{id}")
}

/// Whether these are the end of a tether and descriptors of FUSE: the supervisor writes to them.
fn is_link(link: &[OwnedFd]) -> bool {
    let is_fuse = |fd: &OwnedFd| {
        fstat(fd).is_ok_and(|stat| {
            FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
                && (major(stat.st_rdev), minor(stat.st_rdev)) == FUSE
        })
    };
    link.split_first().is_some_and(|(tether, devices)| is_pipe(tether) && devices.iter().all(is_fuse))
}

impl Driver for FuseDriver {
    fn abilities(&self) -> Result<Abilities, Error> {
        Ok(ABILITIES)
    }

    fn max_io(&self, _: Abilities, unit: u32) -> u32 {
        fuse::max_io(unit)
    }

    fn add(&self, wanted: NewDevice) -> Result<Added, Error> {
        let NewDevice { queues, depth, max_io, mark, .. } = wanted;
        // Held while it is made: the number must not be taken twice.
        let mut links = lock(&self.links);
        let reserved = lock(&self.reserved).clone();
        // A number that could not be read may be any of the first.
        let first = if reserved.contains(&u32::MAX) { 1 << 16 } else { 0 };
        let is_free = |id: &u32| !links.contains_key(id) && !reserved.contains(id);
        let Some(id) = (first..MOST).find(is_free) else {
            return Err(Error::Server { what: "has no number left".to_owned(), log: None });
        };
        let (connection, face) = if rustix::process::geteuid().is_root() {
            let made = Connection::detached(queues, depth, max_io).map_err(Error::Device)?;
            (made.0, Face::Root(Arc::new(made.1)))
        } else {
            let place = self.places.join(name(id));
            // One that a dead server left mounted answers no request.
            if matches!(fs::metadata(&place), Err(error) if error.kind() != ErrorKind::NotFound) {
                let _ = fuse::unmount(&place, true);
            }
            fs::create_dir_all(&place).map_err(Error::io("make the directory", &place))?;
            let made = Connection::on(&place, queues, depth, max_io).inspect_err(|_| {
                let _ = fs::remove_dir(&place);
            });
            (made.map_err(Error::Device)?, Face::Directory(place))
        };
        let mut abilities = wanted.abilities.with(ABILITIES);
        if connection.resends() {
            abilities = abilities.with(Abilities::RECOVERS);
        }
        let added = Added { number: id, queues, depth, abilities, mark, stopped: false };
        let connection = Arc::new(connection);
        let (tether, geometry, image, promised) = (None, None, PathBuf::new(), Vec::new());
        let read_only = false;
        links.insert(
            id,
            Link { connection, added, face, tether, geometry, image, promised, rereads: false, read_only },
        );
        Ok(added)
    }

    fn reserve(&self, ids: BTreeSet<u32>) {
        *lock(&self.reserved) = ids;
    }

    fn set_params(&self, id: u32, geometry: &Geometry) -> Result<(), Error> {
        self.with(id, |link| link.geometry = Some(geometry.clone()))
    }

    fn of_image(&self, id: u32, image: &Path, promised: &[Partition], read_only: bool) {
        // If there is no such device, the next step fails.
        let _ = self.with(id, |link| {
            link.image = image.to_owned();
            link.promised = promised.to_vec();
            link.read_only = read_only;
        });
    }

    fn rereads(&self, id: u32) {
        let _ = self.with(id, |link| link.rereads = true);
    }

    fn default_name(&self, id: u32) -> String {
        name(id)
    }

    fn node(&self, id: u32) -> PathBuf {
        match self.with(id, |link| link.face.clone()) {
            Ok(Face::Disk { number, .. }) => sysfs::node(&format!("loop{number}")),
            Ok(Face::Directory(place)) => place.join(fuse::IMAGE_NAME),
            // It has none yet.
            _ => PathBuf::new(),
        }
    }

    fn open(&self, id: u32) -> Result<Vec<OwnedFd>, Error> {
        let connection = self.with(id, |link| Arc::clone(&link.connection))?;
        let make = || -> std::io::Result<(OwnedFd, Vec<OwnedFd>)> {
            let (ours, theirs) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
            let mut fds = vec![theirs, ours.try_clone()?];
            for device in connection.devices() {
                fds.push(device.try_clone()?);
            }
            Ok((ours, fds))
        };
        let (ours, fds) = make().map_err(Error::io("tie to its devices", "the worker".as_ref()))?;
        self.with(id, |link| link.tether = Some(Arc::new(ours)))?;
        Ok(fds)
    }

    fn start(&self, id: u32, _: u32) -> Result<(), Error> {
        let parts = self.with(id, |link| match &link.face {
            Face::Root(root) => {
                let geometry = Geometry { read_only: link.read_only, ..link.geometry.clone()? };
                let root = root.try_clone();
                // From now on only requests that wait for an answer keep the file system.
                link.face = Face::Disk { number: u32::MAX, diskseq: None };
                let promised = std::mem::take(&mut link.promised);
                Some((root, geometry, link.image.clone(), promised, link.rereads))
            }
            _ => None,
        })?;
        let Some((root, geometry, image, promised, rereads)) = parts else { return Ok(()) };
        let root = root.map_err(Error::io("use the file system of", &image))?;
        let attach = move || fuse::attach_disk(root, &image, &geometry, &promised, rereads);
        let made = match self.while_served(id, attach)? {
            Ok(made) => made.map_err(Error::Device)?,
            Err(why) => {
                // Requests that still wait get an error: these are the last descriptors.
                self.abandon(id);
                return Err(lost(id, &why));
            }
        };
        let diskseq = Some(made.diskseq).filter(|diskseq| *diskseq != 0);
        self.with(id, |link| link.face = Face::Disk { number: made.number, diskseq })
    }

    fn settle(&self, number: u32, _: &[Partition]) -> Result<Settled, Error> {
        // The partitions came with the disk: its driver must know of them from the beginning, to remove them
        // at the end. The loop driver knows of no other unit than the one that it was given.
        let given =
            self.with(number, |link| link.geometry.as_ref().map(|geometry| geometry.logical_block))?;
        let disk = self.disk(number).ok().map(|(disk, _)| format!("loop{disk}"));
        let seen = disk.and_then(|disk| sysfs::number(&disk, "queue/physical_block_size"));
        Ok(Settled { diskseq: None, physical_block: seen.or(given) })
    }

    fn stop(&self, id: u32) -> Result<(), Error> {
        let face = self.with(id, |link| link.face.clone())?;
        match face {
            Face::Disk { number, diskseq } if number != u32::MAX => {
                let detached = begun(move || {
                    // Fails where it is gone already.
                    let _ = set_read_only(number, false);
                    loop_::detach(number, diskseq, Some(Duration::from_secs(1))).map(drop)
                });
                match self.await_served(id, &detached) {
                    Ok(Ok(detached)) => detached.map_err(Error::Device),
                    Ok(Err(Lost::Time)) => Err(lost(id, &Lost::Time)),
                    // No server will answer: its users get errors from now on, and so do we.
                    Ok(Err(Lost::Server)) | Err(_) => {
                        self.abandon(id);
                        detached.recv().unwrap_or(Ok(())).map_err(Error::Device)
                    }
                }
            }
            Face::Directory(place) => fuse::unmount(&place, true).map(drop).map_err(Error::Device),
            // Dropping the root ends it.
            _ => {
                self.abandon(id);
                Ok(())
            }
        }
    }

    fn stop_unused(&self, id: u32) -> Result<bool, Error> {
        let (number, diskseq) = match self.with(id, |link| link.face.clone())? {
            Face::Disk { number, diskseq } => (number, diskseq),
            Face::Directory(place) => return fuse::unmount(&place, false).map_err(Error::Device),
            Face::Root(_) => return Driver::stop(self, id).map(|()| true),
        };
        match self.while_served(id, move || detach_unused(number, diskseq))? {
            // Gone, and its number is in use by another program since we looked.
            Ok(Err(becket_transport::Error::OtherDevice { .. })) => Ok(true),
            Ok(detached) => detached.map_err(Error::Device),
            // Asked again once another server is there.
            Err(Lost::Server) => Ok(false),
            Err(Lost::Time) => Err(lost(id, &Lost::Time)),
        }
    }

    fn del(&self, id: u32) -> Result<(), Error> {
        let link = lock(&self.links).remove(&id);
        let Some(Link { face: Face::Directory(place), .. }) = link else { return Ok(()) };
        match fs::remove_dir(&place) {
            // It was never started, so it was not stopped: its file system goes as well.
            Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                fuse::unmount(&place, true).map_err(Error::Device)?;
                // An empty directory that stays is used again.
                let _ = fs::remove_dir(&place);
            }
            _ => {}
        }
        Ok(())
    }

    fn info(&self, id: u32) -> Result<Option<Added>, Error> {
        let mut links = lock(&self.links);
        // One that we let go of may still have its disk.
        let ended = |link: &Link| !link.connection.devices().is_empty() && link.connection.is_gone();
        if links.get(&id).is_some_and(ended) {
            links.remove(&id);
        }
        Ok(links.get(&id).map(|link| link.added))
    }

    fn start_recovery(&self, id: u32) -> Result<bool, Error> {
        self.with(id, |link| link.tether.as_ref().is_none_or(|tether| hung_up(tether)))
    }

    fn end_recovery(&self, id: u32, _: u32) -> Result<(), Error> {
        let connection = self.with(id, |link| Arc::clone(&link.connection))?;
        // Where the kernel cannot, a worker gives its device to another only after it has answered all that
        // it had read.
        if connection.resends() { connection.resend().map_err(Error::Device) } else { Ok(()) }
    }

    fn quiesces(&self, _: Abilities) -> bool {
        true
    }

    fn quiesce(&self, _: u32, leave: &dyn Fn() -> Result<(), Error>) -> Result<(), Error> {
        // What it does not read waits in the kernel for the next one.
        leave()
    }

    fn size(&self, id: u32) -> Option<u64> {
        // A file is as long as its server says. A disk's sectors always have 512 bytes.
        let (number, _) = self.disk(id).ok()?;
        sysfs::number::<u64>(&format!("loop{number}"), "size")?.checked_mul(512)
    }

    fn update_size(&self, id: u32, bytes: u64) -> Result<(), Error> {
        let connection = self.with(id, |link| Arc::clone(&link.connection))?;
        let number = self.disk(id).ok().map(|(number, _)| number);
        // The file first: its loop device must not show what cannot be read yet.
        let follow = move || {
            connection.lengthen(bytes)?;
            number.map(loop_::refresh).transpose()
        };
        match self.while_served(id, follow)? {
            // A file without a disk is as long as its server says.
            Ok(Ok(size)) if size.is_none_or(|size| size == bytes) => Ok(()),
            Ok(Ok(_)) => Err(Error::Device(becket_transport::Error::Fixed {
                device: self.node(id),
                why: "this kernel's loop driver does not ask its file for the length again (Linux 6.16 does)",
            })),
            Ok(Err(error)) => Err(Error::Device(error)),
            Err(why) => Err(lost(id, &why)),
        }
    }

    fn set_read_only(&self, id: u32, on: bool) -> Result<(), Error> {
        let Ok((number, _)) = self.disk(id) else { return Ok(()) };
        match (self.with(id, |link| link.read_only)?, on) {
            (true, true) => Ok(()),
            (true, false) => {
                let node = self.node(id);
                let node = node.display();
                Err(Error::Failed {
                    kind: contract::ErrorKind::Unsupported,
                    message: format!("{node} was attached read-only, and its loop device stays so"),
                    hint: Some(format!("becket detach {node}, and attach it again without --read-only")),
                })
            }
            (false, on) => set_read_only(number, on),
        }
    }

    fn repartition(&self, id: u32, promised: &[Partition]) -> Result<(), Error> {
        let Ok((number, _)) = self.disk(id) else { return Ok(()) };
        let (disk, promised) = (format!("loop{number}"), promised.to_vec());
        let replace = move || {
            node::drop_partitions(&disk, &promised)?;
            node::await_partitions(&disk, &promised, PARTITIONS).map(drop)
        };
        match self.while_served(id, replace)? {
            Ok(replaced) => replaced.map_err(Error::Device),
            Err(why) => Err(lost(id, &why)),
        }
    }

    fn follows_worker(&self) -> bool {
        true
    }

    fn abandon(&self, id: u32) {
        let _ = self.with(id, |link| link.connection = Arc::new(Connection::taken_over(Vec::new(), false)));
    }

    fn link(&self, id: u32) -> std::io::Result<Vec<OwnedFd>> {
        let links = lock(&self.links);
        let Some(Link { tether: Some(tether), connection, .. }) = links.get(&id) else {
            return Ok(Vec::new());
        };
        let mut fds = vec![tether.try_clone()?];
        for device in connection.devices() {
            fds.push(device.try_clone()?);
        }
        Ok(fds)
    }

    fn take_over(&self, record: &Device, kept: &mut Kept) {
        self.take(record, kept);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tether_tells_when_its_other_end_is_gone() {
        // Closed in what other tests start meanwhile.
        let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let copy = theirs.try_clone().unwrap();
        assert!(!hung_up(&ours));
        drop(theirs);
        assert!(!hung_up(&ours), "a copy holds it");
        drop(copy);
        assert!(becket_testkit::wait_until(std::time::Duration::from_secs(10), || hung_up(&ours)));
    }
}
