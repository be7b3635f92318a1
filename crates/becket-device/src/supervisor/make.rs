//! Making a device that becket serves: from an image that a client opened to a disk that users can open.
//! Whatever fails on the way, nothing stays behind: no device, no record, no link, no name.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use becket_engine::Geometry;
use becket_image::link::LinkSource;
use becket_image::{DirectIo, FileKind, FileSource, Identity, Map, Partition, Place, Source, SourceFacts};
use becket_transport::ublk::MOST_DEPTH;
use becket_transport::{Abilities, geometry, node};
use rustix::fs::{FileType, OFlags};
use rustix::net::SocketType;
use tracing::warn;

use super::driver::{Added, Driver, NewDevice, Offer, Settled};
use super::links::Connector;
use super::smaller::{smaller, usual};
use super::workers::Worker;
use crate::contract::kept::{Keepsakes, Kept};
use crate::contract::messages::Attach;
use crate::contract::protocol::Serve;
use crate::contract::sealed::{self, is_sealed};
use crate::contract::spec::{Spec, all_sources, needs_of_new_device};
use crate::contract::{DeviceId, DeviceInfo, Error, ErrorKind, PartitionInfo, Partitions};
use crate::record::device::Device;
use crate::record::judge::disk_of;
use crate::record::register::{claim, forget, record};
use crate::record::store::Store;
use crate::record::{links, mark};
use crate::system::describe::partitions_of;
use crate::system::inode;
use crate::system::process::ProcessId;

/// How long the worker may take to let go of a device.
pub(super) const CLOSING: Duration = Duration::from_secs(10);

/// A device, and what must be kept for it.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) device: Device,
    pub(crate) kept: Kept,
    pub(crate) connector: Option<Connector>,
}

/// See [`Maker::connect`].
pub(crate) type Connect<'a> = dyn Fn(&Attach, &mut [Source], u64) -> Result<Option<Connector>, Error> + 'a;

/// Who makes devices, and with what.
#[derive(Clone, Copy)]
pub(crate) struct Maker<'a> {
    pub(crate) store: &'a Store,
    pub(crate) offer: &'a Offer,
    pub(crate) driver: &'a dyn Driver,
    pub(crate) worker: &'a dyn Worker,
    /// Starts what connects to the server of an image, of a device with that mark.
    pub(crate) connect: &'a Connect<'a>,
    /// How many devices are there already.
    pub(crate) owned: usize,
}

impl Maker<'_> {
    /// Makes a device, a smaller one where the worker has no room for it as it was asked for.
    pub(crate) fn make(
        self,
        request: Attach,
        fds: &[OwnedFd],
        cgroup: Option<&OwnedFd>,
        door: &[OwnedFd],
    ) -> Result<Made, Error> {
        let mut wanted = request.clone();
        loop {
            let copies: Result<_, _> = fds.iter().map(OwnedFd::try_clone).collect();
            let copies = copies.map_err(Error::io("duplicate the descriptors of", &request.spec.image))?;
            let place = cgroup.map(OwnedFd::try_clone).transpose();
            let place = place.map_err(Error::io("duplicate the cgroup of", &request.spec.image))?;
            let door: Result<_, _> = door.iter().map(OwnedFd::try_clone).collect();
            let door = door.map_err(Error::io("duplicate the socket of", &request.spec.image))?;
            match self.make_as(wanted.clone(), copies, place, door) {
                Err(Error::Full { what, room: Some(room) }) => {
                    // How deep its queues are was settled when it was added, so it is added anew.
                    let copying = self.driver.abilities()?.copying();
                    let full = Error::Full { what, room: Some(room) };
                    wanted = smaller(&request, &wanted, room, copying).ok_or(full)?;
                }
                other => return other,
            }
        }
    }

    /// Makes a device. The order matters: what has been done is in a record before the disk is visible.
    fn make_as(
        self,
        request: Attach,
        fds: Vec<OwnedFd>,
        cgroup: Option<OwnedFd>,
        door: Vec<OwnedFd>,
    ) -> Result<Made, Error> {
        let Maker { store, driver, worker, .. } = self;
        let Checked { mut request, mut sources, identity, mut keepsakes } = check(request, fds)?;
        keepsakes.cgroup = cgroup;
        let spec = &request.spec;
        let numbers = request.partitions.iter().filter(|_| request.add_partitions).map(|part| part.number);
        let named = claim(store, request.name.as_deref(), &spec.image, numbers)?;

        let all = driver.abilities()?;
        // Of an image on an NBD server: whether it takes several connections.
        let links = sources.iter().find_map(Source::link).map(LinkSource::is_multi_conn);
        // What goes to a socket is in memory of the worker's own.
        let mode = spec.mode.or_else(|| links.map(|_| all.copying()));
        let abilities = all.for_device(mode, &request.map).map_err(unsupported)?;
        if links.is_some() && abilities.data_mode().is_zero_copy() {
            return Err(Error::Failed {
                kind: ErrorKind::Unsupported,
                message: "an image on a server cannot be served without a copy".to_owned(),
                hint: Some("omit --mode".to_owned()),
            });
        }
        // A file and a block device are also served through the page cache, which takes any bytes.
        let max_io = driver.max_io(abilities, Source::smallest_unit(&sources).unwrap_or(1));
        let geometry = geometry(&request.map, &sources, spec.block_size, spec.read_only, max_io);
        let mark = mark::new(store.runtime());
        let connector = (self.connect)(&request, &mut sources, mark)?;
        let usual = usual(self.owned, abilities.data_mode(), cpus());
        let (queues, depth) = (spec.queues.unwrap_or(usual.0), spec.depth.unwrap_or(usual.1));
        // Without that, a second one may wait for the end of the first, and a flush over one would say
        // nothing about what was written over the other.
        let queues = if links == Some(false) { 1 } else { queues };
        let added = driver.add(NewDevice { queues, depth, abilities, max_io, mark })?;
        let number = added.number;
        let id = DeviceId { kind: request.transport, number };
        let mut undo = Undo { by: self, id, stage: Stage::Added, device: None };

        // The driver's read-only setting is final; the flag that users of the disk see can change.
        let read_only = geometry.read_only && driver.stays_read_only();
        driver.set_params(number, &Geometry { read_only, ..geometry })?;
        driver.take_door(number, spec, door)?;
        let adds = request.add_partitions && driver.has_disk();
        let table = std::mem::take(&mut request.partitions).into_iter().filter(|_| adds);
        let promised: &[Partition] = &table.map(Into::into).collect::<Vec<_>>();
        driver.of_image(number, &spec.image, promised, spec.read_only);
        if request.add_partitions {
            driver.rereads(number);
        }
        let wanted = request.backing.direct_io;
        let (direct, reason) = direct_io(&sources, wanted, request.backing.encoded.is_some());
        request.backing.direct_io = direct;
        let mut first = describe(&request, identity, reason, &geometry, &added, worker);
        first.info.device = driver.node(number);
        let written = record(store, named, &driver.default_name(number), &mut first)?;
        undo.device = Some(first.clone());

        let serve = Serve {
            kind: request.transport,
            id,
            first: number,
            queues: added.queues,
            depth: added.depth,
            abilities: added.abilities,
            geometry,
            map: request.map,
            backing: request.backing,
            faults: request.spec.faults,
            mark,
            isolated: request.isolate,
            partitions: match self.offer.worker_has_partitions {
                true => promised.iter().map(|part| (part.number, part.start, part.len)).collect(),
                false => Vec::new(),
            },
            needs: first.needs.clone(),
            below: (),
        };
        let mut kept = Kept { serve, sources, keepsakes, link: Vec::new() };
        kept.serve.first = with_char_device(driver, number, &kept, |fds| {
            undo.stage = Stage::Served;
            worker.serve(kept.serve.clone(), fds)
        })?;
        driver.start(number, std::process::id())?;
        undo.stage = Stage::Started;
        if first.info.spec.read_only && !driver.stays_read_only() {
            driver.set_read_only(number, true)?;
        }
        if !added.abilities.has(Abilities::QUIESCES) {
            driver.watchful(number);
        }
        let settled = driver.settle(number, promised)?;

        let mut device = first.clone();
        device.info.device = driver.node(number);
        let device = if driver.has_disk() { complete(device, promised, settled) } else { started(device) };
        if !store.amend(&first, &written, &device)? {
            let what = format!("found the record of {} taken away while it was made", device.info.name);
            return Err(Error::Server { what, log: None });
        }
        undo.device = Some(device.clone());
        let mut made = Made { device, kept, connector };
        made.device.info.warnings.extend(links::make(store, &made.device.info));
        undo.stage = Stage::Done;
        Ok(made)
    }
}

/// How many CPUs this process may use. Asked once: the answer is made of two files and a look for a third.
fn cpus() -> usize {
    static CPUS: OnceLock<usize> = OnceLock::new();
    *CPUS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Opens a device (its ublkcN, for example) and passes it on with its other descriptors. Our copy is closed
/// before anything else happens: the kernel waits for the last one when the device ends, and when its worker
/// dies.
pub(super) fn with_char_device<T>(
    driver: &dyn Driver,
    id: u32,
    kept: &Kept,
    pass: impl FnOnce(&[BorrowedFd<'_>]) -> Result<T, Error>,
) -> Result<T, Error> {
    let opened = driver.open(id)?;
    let fds: Vec<_> = opened.iter().map(AsFd::as_fd).chain(kept.descriptors()).collect();
    pass(&fds)
}

/// Undoes what was done, in reverse.
struct Undo<'a> {
    by: Maker<'a>,
    id: DeviceId,
    stage: Stage,
    device: Option<Device>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// The kernel has a number for it.
    Added,
    /// The worker may have descriptors of it.
    Served,
    /// It has a disk.
    Started,
    /// It is as it was asked for.
    Done,
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if self.stage == Stage::Done {
            return;
        }
        if let Err(error) = end(self.by.driver, self.by.worker, self.id, self.stage >= Stage::Served) {
            // Its record stays, so that `list` shows it as lost and `detach` tries again.
            return warn!("{} could not be undone: {error}", self.id);
        }
        if let Some(device) = &self.device {
            forget(self.by.store, device);
        }
    }
}

/// Takes the disk away, waits for the worker to let go, and deletes the number.
pub(crate) fn end(driver: &dyn Driver, worker: &dyn Worker, id: DeviceId, served: bool) -> Result<(), Error> {
    if served {
        driver.stop(id.number)?;
        if driver.leaves_when_asked() {
            // One that is dead has left.
            let _ = worker.leave(id);
        }
        closed(worker, id, CLOSING)?;
    }
    driver.del(id.number)
}

/// Waits for the worker to let go of a stopped device. Deleting it before would wait in the kernel.
pub(crate) fn closed(worker: &dyn Worker, id: DeviceId, patience: Duration) -> Result<(), Error> {
    if worker.await_closed(id, patience) {
        return Ok(());
    }
    let what = format!(
        "does not let go of {}: the file system of its image may not answer, and it goes when that does",
        id
    );
    Err(Error::Worker { what })
}

fn unsupported(error: becket_transport::serve::ServeError) -> Error {
    Error::Failed {
        kind: ErrorKind::Unsupported,
        message: error.to_string(),
        hint: Some("see `becket doctor`; --via loop needs no ublk".to_owned()),
    }
}

/// A request of which all has been looked at: its map is in it, and its descriptors have their places.
struct Checked {
    request: Attach,
    sources: Vec<Source>,
    /// Which file the image is.
    identity: Identity,
    keepsakes: Keepsakes,
}

/// Believes nothing of a request that can be looked at.
fn check(mut request: Attach, mut fds: Vec<OwnedFd>) -> Result<Checked, Error> {
    let bad = |what: &str| Error::Failed {
        kind: ErrorKind::InvalidOption,
        message: format!("the request makes no sense: {what}"),
        hint: None,
    };
    request.backing = request.backing.understood();
    let Attach { spec, backing, map, map_aside, .. } = &mut request;
    let lease = match backing.lease {
        true => Some(fds.pop().filter(inode::is_pipe).ok_or_else(|| bad("its lease is not a pipe"))?),
        false => None,
    };
    if *map_aside {
        let aside = fds.pop().ok_or_else(|| bad("its map is missing"))?;
        *map = sealed::read_json(&aside).map_err(|error| bad(&format!("its map: {error}")))?;
    }
    let table = match backing.encoded {
        Some(_) => {
            Some(fds.pop().filter(is_sealed).ok_or_else(|| bad("its table of encoded blocks is none"))?)
        }
        None => None,
    };
    let sources =
        all_sources(backing.files.clone(), fds.into_iter()).map_err(|error| bad(&error.to_string()))?;
    let identity = check_sources(&sources, backing.grows, spec.read_only).map_err(bad)?;
    let page = rustix::param::page_size();
    let block = spec.block_size;
    if !block.is_power_of_two() || !(512..=page).contains(&usize::try_from(block).unwrap_or(0)) {
        return Err(bad("its block size is impossible"));
    }
    let decodes = table.is_some() && (spec.read_only || backing.grows);
    check_map(map, &sources, block, decodes).map_err(bad)?;
    if spec.queues == Some(0) || spec.depth.is_some_and(|depth| depth == 0 || depth > MOST_DEPTH) {
        return Err(bad("its queues or their depth are impossible"));
    }
    Ok(Checked { request, sources, identity, keepsakes: Keepsakes { lease, cgroup: None, table } })
}

/// Looks at the descriptors of an image, which may be one that grows, and says which file it is.
pub(super) fn check_sources(
    sources: &[Source],
    grows: bool,
    read_only: bool,
) -> Result<Identity, &'static str> {
    // Of an image that grows only the first source is written.
    let written = if grows { 1 } else { sources.len() };
    let (first, others) = sources.split_at(written.min(sources.len()));
    let identity = check_files(first, read_only)?;
    if grows && (read_only || !first.iter().all(is_regular)) {
        return Err("an image grows that cannot");
    }
    if !others.is_empty() {
        check_files(others, true)?;
    }
    Ok(identity)
}

fn is_regular(source: &Source) -> bool {
    source.file().is_some_and(|file| file.facts.kind == FileKind::Regular)
}

/// Looks at all descriptors of an image, and says which file it is.
pub(super) fn check_files(sources: &[Source], read_only: bool) -> Result<Identity, &'static str> {
    let found = sources.iter().map(|source| check_source(source, read_only));
    let found = found.collect::<Result<Vec<_>, _>>()?;
    found.first().copied().ok_or("it has no file")
}

/// Whether a map speaks of these sources and of nothing else, but for encoded layers where they are decoded.
pub(super) fn check_map(
    map: &Map,
    sources: &[Source],
    block: u32,
    decodes: bool,
) -> Result<(), &'static str> {
    if map.len() < u64::from(block) {
        return Err("it is shorter than a block");
    }
    let foreign = |place: &Place| match place {
        Place::Data { source, .. } => sources.get(*source as usize).is_none(),
        Place::Zero => false,
        // What is in their table is the worker's to read.
        Place::Encoded { .. } => !decodes,
    };
    if map.extents().iter().any(|extent| foreign(&extent.place)) {
        return Err("its map names a file that is not there");
    }
    Ok(())
}

fn check_source(source: &Source, read_only: bool) -> Result<Identity, &'static str> {
    match source {
        Source::File(file) => check_file(file, read_only),
        Source::Link(link) => check_link(link),
        // It is only read, whatever lies over it.
        Source::Filled(filled) => check_file(filled.file(), true),
    }
}

/// Looks at the two ends of an export's channel.
fn check_link(link: &LinkSource) -> Result<Identity, &'static str> {
    for end in [link.asks(), link.answers()] {
        match rustix::net::sockopt::socket_type(end) {
            Ok(SocketType::SEQPACKET) => {}
            _ => return Err("a descriptor is not a channel for connections"),
        }
    }
    Ok(link.identity())
}

/// Looks at the descriptors of a file: what they are, how they were opened, and that both are of one inode.
fn check_file(file: &FileSource, read_only: bool) -> Result<Identity, &'static str> {
    let mut identities = Vec::new();
    for (fd, direct) in
        std::iter::once((&file.buffered, false)).chain(file.direct.as_ref().map(|fd| (fd, true)))
    {
        let (kind, identity) = inode::of(fd).map_err(|_| "a descriptor cannot be looked at")?;
        let kind = match kind {
            FileType::RegularFile => FileKind::Regular,
            FileType::BlockDevice => FileKind::Block,
            _ => return Err("a descriptor is neither of a file nor of a block device"),
        };
        if kind != file.facts.kind {
            return Err("a descriptor is not of the kind it is said to be");
        }
        let flags = rustix::fs::fcntl_getfl(fd).map_err(|_| "a descriptor cannot be looked at")?;
        let access = flags & OFlags::RWMODE;
        if access == OFlags::WRONLY || (!read_only && access != OFlags::RDWR) || flags.contains(OFlags::PATH)
        {
            return Err("a descriptor was not opened for what is to be done with it");
        }
        if flags.contains(OFlags::APPEND) {
            return Err("a descriptor writes at the end only");
        }
        if direct && !flags.contains(OFlags::DIRECT) {
            return Err("a descriptor is not for direct I/O");
        }
        identities.push(identity);
    }
    match identities.as_slice() {
        [one] => Ok(*one),
        [one, other] if one == other => Ok(*one),
        _ => Err("a file's descriptors are not of one file"),
    }
}

/// What is known of the device before it has a disk, without its name.
fn describe(
    request: &Attach,
    identity: Identity,
    direct_io_reason: String,
    geometry: &Geometry,
    added: &Added,
    worker: &dyn Worker,
) -> Device {
    let (server, notes) = (ProcessId::own(), worker.notes());
    // What a worker lacks is in the log. It is also shown to users who asked for a worker of its own; exports
    // and remote images always have one.
    let link = request.backing.files.iter().any(SourceFacts::is_talkative);
    let remote = request.spec.export.is_some() || link;
    let shows_notes = request.isolate && !remote;
    let worker = worker.id();
    let known = DeviceInfo {
        spec: Spec {
            queues: Some(added.queues),
            depth: Some(added.depth),
            mode: Some(added.abilities.data_mode()),
            ..request.spec.clone()
        },
        size: geometry.size,
        direct_io: request.backing.direct_io != DirectIo::Off,
        direct_io_reason,
        physical_block_size: geometry.physical_block,
        server_pid: Some(server.pid),
        worker_pid: Some(worker.pid),
        isolated: request.isolate,
        warnings: request.warnings.iter().chain(notes.iter().filter(|_| shows_notes)).cloned().collect(),
        // Its node is what it is before it has a disk, for the caller to say.
        ..DeviceInfo::bare(String::new(), PathBuf::new(), request.transport, added.number)
    };
    Device {
        server: Some(server),
        worker: Some(worker),
        starting: true,
        whole: !request.add_partitions,
        format: request.format.clone(),
        needs: needs_of_new_device(request.transport, &request.backing),
        ..Device::bare(known, identity, added.mark)
    }
}

/// Whether a device goes past the page cache where that is or is not wanted, and why, for people.
pub(crate) fn direct_io(sources: &[Source], wanted: DirectIo, encoded: bool) -> (DirectIo, String) {
    let facts = || sources.iter().map(Source::facts);
    let can = sources.iter().all(Source::is_direct);
    let mut reasons: Vec<&str> = Vec::new();
    for facts in facts() {
        let reason = facts.direct_reason.as_str();
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    let mut reason =
        if can && wanted == DirectIo::Off { "switched off".to_owned() } else { reasons.join("; ") };
    let direct = if can { wanted } else { DirectIo::Off };
    if direct == DirectIo::Off && !encoded && facts().all(|facts| facts.uncached) {
        reason.push_str("; what passes through the page cache does not stay in it");
    }
    if direct == DirectIo::Auto && encoded && facts().any(|facts| facts.caches_stored(direct)) {
        reason.push_str("; what is stored compressed goes through the page cache, which reads ahead");
    }
    (direct, reason)
}

/// What is known of any device that users can have.
fn started(device: Device) -> Device {
    Device { starting: false, ..device }
}

/// What is known of it now that it has a disk.
fn complete(mut device: Device, promised: &[Partition], settled: Settled) -> Device {
    device = started(device);
    let disk = disk_of(&device.info);
    let wanted = if promised.is_empty() { Partitions::Off } else { Partitions::Auto };
    device.info.diskseq = settled.diskseq.or_else(|| node::diskseq(&disk));
    if let Some(block) = settled.physical_block {
        device.info.physical_block_size = block;
    }
    device.info.partitions = match device.info.is_file() {
        true => promised.iter().map(|part| file_of(&device.info.device, part)).collect(),
        false => partitions_of(&disk, promised, wanted),
    };
    if device.info.is_file() {
        device.info.warnings.push(
            "this is a file and no block device, which would need root: mkfs, debugfs and the like work on it"
                .to_owned(),
        );
    }
    device
}

/// A partition that is a file beside the image's.
fn file_of(image: &Path, part: &Partition) -> PartitionInfo {
    PartitionInfo {
        number: part.number,
        device: image.with_file_name(format!("p{}", part.number)),
        start: part.start,
        size: part.len,
        label: part.label.clone(),
        uuid: part.uuid.clone(),
    }
}

#[cfg(test)]
#[path = "make_tests.rs"]
mod tests;
