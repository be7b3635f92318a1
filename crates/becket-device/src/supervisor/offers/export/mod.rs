//! Exports as offers: images that clients reach at a socket. There is no disk, and the kernel knows nothing
//! of them. It never reads a byte of a connection.
//!
//! | an export has | here |
//! | --- | --- |
//! | a number | ours |
//! | a descriptor that only the worker holds | the tether: it closes when the worker cannot reach the backing |
//! | a socket that listens | at its [`Door`], with a doorman process; other exports may share it |
//! | clients, kept over a worker's death | a virtual machine's front-end, as far as its worker has said what the next one needs; of NBD none |
//! | clients, kept over an upgrade | all: the old worker gives them back between two replies |
//!
//! A client that has agreed with the doorman is a [`Visitor`]. The export's worker gets it; while there is no
//! worker, visitors wait. Of the locks here, that of a door's line comes before that of the exports.

mod door;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use becket_engine::Geometry;
use becket_transport::{Abilities, Kind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, FileType, fstat, statat, unlinkat};
use rustix::net::{AddressFamily, sockopt};
use rustix::pipe::PipeFlags;
use tracing::warn;

use crate::contract::export::{Export, Shown, Visitor, Visits};
use crate::contract::kept::Kept;
use crate::contract::sealed::is_sealed;
use crate::contract::{DeviceId, Error, ErrorKind, Spec};
use crate::record::device::Device;
use crate::record::runtime::Runtime;
use crate::supervisor::driver::{Added, Driver, NewDevice, Offer};
use crate::supervisor::workers::{Arrival, Worker};
use crate::system::inode::is_pipe;
use crate::system::sync::lock;
use door::{Attendance, Door, Hall, House};

/// What all exports have.
const ABILITIES: Abilities = Abilities::SERVED.with(Abilities::RECOVERS).with(Abilities::RESIZES);
/// Numbers end there.
const MOST: u32 = 1 << 20;
/// The most visitors that wait while an export has no worker. More are turned away.
const MOST_WAITING: usize = 64;
/// Bytes of replies that a client's socket takes before it has read any; the kernel doubles them.
const ROOM: usize = 4 << 20;
/// Longest request, in bytes, that a client may ask for.
const MAX_IO: u32 = 32 << 20;
/// Most requests in flight of one connection over NBD: each has a buffer of 256 KiB, and a connection must
/// not take more than 64 MiB.
const MOST_DEPTH: u16 = 128;

pub(in crate::supervisor) const NBD: Offer = Offer {
    open: |_: &Runtime| Ok(Arc::new(ExportDriver::new(Kind::Nbd, Attendance::Doorman))),
    numbered_here: true,
    end_left: Some(end_left),
    is_link,
    ..Offer::of(Kind::Nbd)
};

pub(in crate::supervisor) const VHOST_USER: Offer = Offer {
    open: |_: &Runtime| Ok(Arc::new(ExportDriver::new(Kind::VhostUser, Attendance::Direct))),
    numbered_here: true,
    end_left: Some(end_left),
    is_link,
    ..Offer::of(Kind::VhostUser)
};

/// The exports of one kind.
struct ExportDriver {
    attendance: Attendance,
    exports: Arc<Exports>,
    /// The doors that are open, by their sockets.
    doors: Mutex<BTreeMap<u64, Arc<Door>>>,
    /// Numbers of exports that are others'.
    reserved: Mutex<BTreeSet<u32>>,
}

/// What the driver and its doors share.
struct Exports {
    kind: Kind,
    all: Mutex<BTreeMap<u32, Exported>>,
}

/// One export.
struct Exported {
    added: Added,
    geometry: Option<Geometry>,
    export: Export,
    /// The end of the present worker's tether.
    tether: Option<Arc<OwnedFd>>,
    /// What it is reached at.
    hall: Option<Hall>,
    door: Option<Arc<Door>>,
    /// Who gets its visitors.
    worker: Option<Arc<dyn Worker>>,
    /// How many that worker was given, and what it says of them.
    sent: u64,
    visits: Visits,
    waiting: Vec<Arrival>,
}

impl Exported {
    fn open(&self) -> u64 {
        self.sent.max(self.visits.begun).saturating_sub(self.visits.ended)
    }

    fn used(&self) -> bool {
        self.open() > 0 || !self.waiting.is_empty()
    }
}

impl Exports {
    fn with<T>(&self, number: u32, what: impl FnOnce(&mut Exported) -> T) -> Result<T, Error> {
        lock(&self.all).get_mut(&number).map(what).ok_or_else(|| gone(self.kind, number))
    }

    /// Passes a client of an export on to its worker, or has it wait for one.
    fn admit(&self, number: u32, visitor: Visitor, fds: Vec<OwnedFd>) {
        fds.first().into_iter().for_each(make_room);
        let to = self.with(number, |exported| {
            if exported.added.stopped {
                return None;
            }
            match exported.worker.clone().filter(|worker| worker.alive()) {
                Some(worker) => {
                    exported.sent += 1;
                    Some((worker, visitor, fds))
                }
                None if exported.waiting.len() < MOST_WAITING => {
                    exported.waiting.push((visitor, fds));
                    None
                }
                None => None,
            }
        });
        if let Ok(Some((worker, visitor, fds))) = to
            && let Err(error) =
                worker.connect(self.id(number), &visitor, &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>())
        {
            warn!("a client is turned away: {error}");
            let _ = self.with(number, |exported| exported.sent = exported.sent.saturating_sub(1));
        }
    }

    fn id(&self, number: u32) -> DeviceId {
        DeviceId { kind: self.kind, number }
    }
}

/// Has replies wait in a client's socket, so that they leave the worker by one call and it goes on. TCP finds
/// its own size; a supervisor without the right to more gets what everybody may have.
fn make_room(socket: &OwnedFd) {
    if sockopt::socket_domain(socket) == Ok(AddressFamily::UNIX)
        && sockopt::set_socket_send_buffer_size_force(socket, ROOM).is_err()
        && let Err(errno) = sockopt::set_socket_send_buffer_size(socket, ROOM)
    {
        warn!("replies to a client go in small parts: {errno}");
    }
}

impl House for Exports {
    fn visit(&self, door: u64, number: u32, visitor: Visitor, fds: Vec<OwnedFd>) {
        let its = |exported: &mut Exported| exported.door.as_ref().is_some_and(|its| its.key() == door);
        if self.with(number, its).unwrap_or(false) {
            self.admit(number, visitor, fds);
        } else {
            warn!("a client of another address is turned away");
        }
    }

    fn at(&self, door: u64) -> (Vec<Shown>, u32) {
        let all = lock(&self.all);
        let its = || {
            all.iter().filter(|(_, exported)| {
                !exported.added.stopped && exported.door.as_ref().is_some_and(|its| its.key() == door)
            })
        };
        let open: u64 = its().map(|(_, exported)| exported.open() + exported.waiting.len() as u64).sum();
        let shown = its().filter_map(|(number, exported)| {
            let geometry = exported.geometry.as_ref()?;
            Some(Shown {
                number: *number,
                name: exported.export.name.clone(),
                size: geometry.size,
                read_only: geometry.read_only,
                block_size: exported.export.smallest.unwrap_or(1),
                preferred: geometry.physical_block.max(4096),
                rotational: geometry.rotational,
                discards: geometry.discard,
            })
        });
        (shown.collect(), u32::try_from(open).unwrap_or(u32::MAX))
    }
}

impl ExportDriver {
    fn new(kind: Kind, attendance: Attendance) -> ExportDriver {
        let exports = Arc::new(Exports { kind, all: Mutex::default() });
        ExportDriver { attendance, exports, doors: Mutex::default(), reserved: Mutex::default() }
    }

    /// Lets clients of an export in, at the door of its socket.
    fn open_door(&self, number: u32) -> Result<(), Error> {
        let failed = |error: std::io::Error| Error::io("listen for", "clients".as_ref())(error);
        let hall = self.exports.with(number, |exported| exported.hall.as_ref().map(Hall::try_clone))?;
        let hall = match hall {
            Some(hall) => hall.map_err(failed)?,
            None => return Ok(()),
        };
        let key = key_of(&hall.listener).map_err(failed)?;
        let export = self.exports.with(number, |exported| exported.export.clone())?;
        let door = {
            let house: Arc<dyn House> = self.exports.clone();
            let house = Arc::downgrade(&house);
            let mut doors = lock(&self.doors);
            let door = doors.entry(key).or_insert_with(|| Door::new(key, hall, &export, house));
            Arc::clone(door)
        };
        self.exports.with(number, |exported| {
            exported.door = Some(Arc::clone(&door));
            exported.added.stopped = false;
        })?;
        door.attend(self.attendance)
    }

    /// No more clients of an export are let in. With the last export of its door goes the socket.
    fn close_door(&self, number: u32) -> Result<(), Error> {
        let door = self.exports.with(number, |exported| {
            exported.added.stopped = true;
            exported.waiting.clear();
            exported.hall = None;
            exported.door.take().map(|door| (door, exported.export.clone()))
        })?;
        let Some((door, export)) = door else { return Ok(()) };
        let mut doors = lock(&self.doors);
        let last = !lock(&self.exports.all)
            .values()
            .any(|exported| exported.door.as_ref().is_some_and(|its| its.key() == door.key()));
        if last {
            doors.remove(&door.key());
        }
        drop(doors);
        match last {
            true => {
                door.close();
                remove_socket(&door.hall().dir, &export);
            }
            false => door.show(),
        }
        Ok(())
    }

    /// Owns an export that a predecessor has made.
    fn take(&self, record: &Device, kept: &mut Kept) {
        let mut fds = std::mem::take(&mut kept.link);
        let Some(export) = record.info.spec.export.clone().filter(|_| !fds.is_empty()) else { return };
        let tether = Some(Arc::new(fds.remove(0)));
        let serve = &kept.serve;
        let added = Added {
            number: serve.id.number,
            queues: serve.queues,
            depth: serve.depth,
            abilities: serve.abilities,
            mark: serve.mark,
            stopped: false,
        };
        let exported = Exported {
            added,
            geometry: Some(serve.geometry.clone()),
            export,
            tether,
            hall: Hall::of(fds),
            door: None,
            worker: None,
            sent: 0,
            visits: Visits::default(),
            waiting: Vec::new(),
        };
        if exported.hall.is_none() {
            warn!(device = record.info.name, "nobody kept its socket: it takes no more clients");
        }
        lock(&self.exports.all).insert(serve.id.number, exported);
        // Its clients are let in once it has been taken over as a whole: see `welcome`.
    }
}

/// What tells one socket from another.
fn key_of(socket: &OwnedFd) -> std::io::Result<u64> {
    Ok(fstat(socket)?.st_ino)
}

fn gone(kind: Kind, number: u32) -> Error {
    Error::NoDevice { target: name(kind, number) }
}

fn name(kind: Kind, number: u32) -> String {
    format!("{kind}{number}")
}

/// Removes the file of a unix socket, if it is still that one.
fn remove_socket(dir: &OwnedFd, export: &Export) {
    let Some(file) = &export.socket else { return };
    let same = statat(dir, &file.name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (file.dev, file.ino));
    if same && let Err(error) = unlinkat(dir, &file.name, AtFlags::empty()) {
        warn!("the socket {} stays: {error}", export.address);
    }
}

/// The same of an export whose supervisor, guard and worker are dead. The directory is not at hand: only a
/// path that this process sees is removed.
fn end_left(device: &Device) -> Result<bool, Error> {
    let export = device.info.spec.export.as_ref();
    let path = export.and_then(|export| export.path().zip(export.socket.as_ref()));
    if let Some((path, file)) = path
        && rustix::fs::lstat(path).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (file.dev, file.ino))
    {
        // What cannot be removed is in nobody's way: the next export replaces a socket without a listener.
        let _ = std::fs::remove_file(path);
    }
    Ok(true)
}

/// Whether these are the end of a tether, and as a guard keeps them also what the export is reached by.
fn is_link(link: &[OwnedFd]) -> bool {
    match link {
        [tether] => is_pipe(tether),
        [tether, listener, words, dir] => is_pipe(tether) && is_hall(listener, words, dir),
        _ => false,
    }
}

/// Whether a socket listens and accepts streams, its words cannot change, and the last is a directory.
fn is_hall(listener: &OwnedFd, words: &OwnedFd, dir: &OwnedFd) -> bool {
    let stream = sockopt::socket_type(listener).is_ok_and(|kind| kind == rustix::net::SocketType::STREAM);
    let listens = sockopt::socket_acceptconn(listener).unwrap_or(false);
    let is_dir = fstat(dir).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory);
    stream && listens && is_sealed(words) && is_dir
}

/// Whether no process holds the other end any more.
fn hung_up(tether: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(tether, PollFlags::empty())];
    let asked = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    asked.is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

impl Driver for ExportDriver {
    fn abilities(&self) -> Result<Abilities, Error> {
        Ok(ABILITIES)
    }

    fn max_io(&self, _: Abilities, _: u32) -> u32 {
        MAX_IO
    }

    fn has_disk(&self) -> bool {
        false
    }

    fn leaves_when_asked(&self) -> bool {
        true
    }

    fn add(&self, wanted: NewDevice) -> Result<Added, Error> {
        let NewDevice { queues, depth, abilities, mark, .. } = wanted;
        let mut all = lock(&self.exports.all);
        let reserved = lock(&self.reserved).clone();
        let first = if reserved.contains(&u32::MAX) { 1 << 16 } else { 0 };
        let is_free = |number: &u32| !all.contains_key(number) && !reserved.contains(number);
        let Some(number) = (first..MOST).find(is_free) else {
            return Err(Error::Server { what: "has no number left".to_owned(), log: None });
        };
        let abilities = abilities.with(ABILITIES);
        let depth = match self.attendance {
            Attendance::Doorman => depth.min(MOST_DEPTH),
            // Its clients bring their own memory.
            Attendance::Direct => depth,
        };
        let added = Added { number, queues, depth, abilities, mark, stopped: true };
        let exported = Exported {
            added,
            geometry: None,
            export: Export::default(),
            tether: None,
            hall: None,
            door: None,
            worker: None,
            sent: 0,
            visits: Visits::default(),
            waiting: Vec::new(),
        };
        all.insert(number, exported);
        // What is made is not stopped: it has no clients yet.
        Ok(Added { stopped: false, ..added })
    }

    fn reserve(&self, numbers: BTreeSet<u32>) {
        *lock(&self.reserved) = numbers;
    }

    fn take_door(&self, number: u32, spec: &Spec, door: Vec<OwnedFd>) -> Result<(), Error> {
        let bad = |what: &str| Error::Failed {
            kind: ErrorKind::InvalidOption,
            message: format!("the request makes no sense: {what}"),
            hint: None,
        };
        let export = spec.export.clone().ok_or_else(|| bad("an export without an address"))?;
        let hall = Hall::of(door).ok_or_else(|| bad("the descriptors of its socket are missing"))?;
        if !is_hall(&hall.listener, &hall.words, &hall.dir) {
            return Err(bad("its socket does not listen"));
        }
        let key = key_of(&hall.listener).map_err(Error::io("look at", "a socket".as_ref()))?;
        let mut all = lock(&self.exports.all);
        let same = |other: &Exported| {
            let its = other.hall.as_ref().and_then(|hall| key_of(&hall.listener).ok());
            its == Some(key) && other.export.name == export.name
        };
        if all.values().any(same) {
            return Err(Error::NameInUse { name: export.name, image: None, device: None });
        }
        let exported = all.get_mut(&number).ok_or_else(|| gone(self.exports.kind, number))?;
        (exported.export, exported.hall) = (export, Some(hall));
        Ok(())
    }

    fn set_params(&self, number: u32, geometry: &Geometry) -> Result<(), Error> {
        self.exports.with(number, |exported| exported.geometry = Some(geometry.clone()))
    }

    fn default_name(&self, number: u32) -> String {
        name(self.exports.kind, number)
    }

    fn node(&self, number: u32) -> PathBuf {
        let shown = |exported: &mut Exported| match self.attendance {
            Attendance::Doorman => PathBuf::from(exported.export.uri()),
            Attendance::Direct => exported.export.path().map(PathBuf::from).unwrap_or_default(),
        };
        self.exports.with(number, shown).unwrap_or_default()
    }

    fn open(&self, number: u32) -> Result<Vec<OwnedFd>, Error> {
        let make = || -> std::io::Result<_> {
            let (ours, theirs) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
            let copy = ours.try_clone()?;
            Ok((ours, vec![theirs, copy]))
        };
        let (ours, fds) = make().map_err(Error::io("tie to its exports", "the worker".as_ref()))?;
        let door = self.exports.with(number, |exported| {
            exported.tether = Some(Arc::new(ours));
            // Those of the last worker ended with it, or come back.
            (exported.worker, exported.sent, exported.visits) = (None, 0, Visits::default());
            exported.door.clone()
        })?;
        door.inspect(|door| door.count());
        Ok(fds)
    }

    fn start(&self, number: u32, _: u32) -> Result<(), Error> {
        self.open_door(number)
    }

    fn stop(&self, number: u32) -> Result<(), Error> {
        self.close_door(number)
    }

    fn stop_unused(&self, number: u32) -> Result<bool, Error> {
        // Under one lock: nobody is let in between the look and the closing.
        let unused = self.exports.with(number, |exported| {
            let unused = !exported.used();
            exported.added.stopped |= unused;
            unused
        })?;
        if unused {
            self.close_door(number)?;
        }
        Ok(unused)
    }

    fn del(&self, number: u32) -> Result<(), Error> {
        // One that was never started has no door.
        let removed = lock(&self.exports.all).remove(&number);
        // Clients that were left have nowhere to go.
        removed.and_then(|exported| exported.worker).map(|worker| worker.take_left(self.exports.id(number)));
        Ok(())
    }

    fn info(&self, number: u32) -> Result<Option<Added>, Error> {
        Ok(lock(&self.exports.all).get(&number).map(|exported| exported.added))
    }

    fn start_recovery(&self, number: u32) -> Result<bool, Error> {
        self.exports.with(number, |exported| exported.tether.as_ref().is_none_or(|tether| hung_up(tether)))
    }

    fn end_recovery(&self, _: u32, _: u32) -> Result<(), Error> {
        Ok(())
    }

    fn quiesces(&self, _: Abilities) -> bool {
        true
    }

    fn quiesce(&self, number: u32, leave: &dyn Fn() -> Result<(), Error>) -> Result<(), Error> {
        // Who comes from now on waits for the next worker.
        self.exports.with(number, |exported| exported.worker = None)?;
        leave()
    }

    fn size(&self, number: u32) -> Option<u64> {
        self.exports.with(number, |exported| Some(exported.geometry.as_ref()?.size)).ok()?
    }

    fn update_size(&self, number: u32, bytes: u64) -> Result<(), Error> {
        self.update(number, |geometry| geometry.size = bytes)
    }

    fn set_read_only(&self, number: u32, on: bool) -> Result<(), Error> {
        self.update(number, |geometry| geometry.read_only = on)
    }

    fn link(&self, number: u32) -> std::io::Result<Vec<OwnedFd>> {
        let all = lock(&self.exports.all);
        let Some(Exported { tether: Some(tether), hall: Some(hall), .. }) = all.get(&number) else {
            return Err(std::io::Error::other("it has no socket"));
        };
        let Hall { listener, words, dir } = hall.try_clone()?;
        Ok(vec![tether.try_clone()?, listener, words, dir])
    }

    fn take_over(&self, record: &Device, kept: &mut Kept) {
        self.take(record, kept);
    }

    fn welcome(&self, number: u32, worker: &Arc<dyn Worker>, left: Vec<Arrival>) {
        let exports = Arc::downgrade(&self.exports);
        let id = self.exports.id(number);
        let pid = worker.id();
        let hook = Arc::new(move |visits: Visits| {
            let Some(exports) = exports.upgrade() else { return };
            let door = exports.with(number, |exported| {
                // A worker that was replaced still says how its last clients end.
                let present = exported.worker.as_ref().is_some_and(|worker| worker.id() == pid);
                if present {
                    exported.visits = visits;
                }
                exported.door.clone().filter(|_| present)
            });
            if let Ok(Some(door)) = door {
                door.count();
            }
        });
        let waiting = self.exports.with(number, |exported| {
            exported.worker = Some(Arc::clone(worker));
            (exported.sent, exported.visits) = (0, Visits::default());
            std::mem::take(&mut exported.waiting)
        });
        worker.follow(id, hook);
        let _ = self.exports.with(number, |exported| exported.sent = exported.visits.begun);
        for (visitor, fds) in left.into_iter().chain(waiting.unwrap_or_default()) {
            self.exports.admit(number, visitor, fds);
        }
        // One that was taken over has no door yet.
        let doorless =
            self.exports.with(number, |exported| exported.door.is_none() && !exported.added.stopped);
        if doorless.unwrap_or(false)
            && let Err(error) = self.open_door(number)
        {
            warn!("{id} takes no more clients: {error}");
        }
    }

    fn visitors(&self) -> Vec<(DeviceId, u64)> {
        let all = lock(&self.exports.all);
        // Of the front-ends of virtual machines one is served, and the others wait until it has gone.
        let most = match self.attendance {
            Attendance::Doorman => u64::MAX,
            Attendance::Direct => 1,
        };
        let served = |exported: &Exported| exported.open().min(most);
        all.iter().map(|(number, exported)| (self.exports.id(*number), served(exported))).collect()
    }
}

impl ExportDriver {
    fn update(&self, number: u32, change: impl FnOnce(&mut Geometry)) -> Result<(), Error> {
        let door = self.exports.with(number, |exported| {
            exported.geometry.as_mut().map(change);
            exported.door.clone()
        })?;
        // Clients that are connected keep what they learned when they came.
        door.inspect(|door| door.show());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_room_for_more_replies_than_by_default() {
        let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
        let near = OwnedFd::from(near);
        let before = sockopt::socket_send_buffer_size(&near).unwrap();
        make_room(&near);
        assert!(sockopt::socket_send_buffer_size(&near).unwrap() > before);
    }
}
