//! Live changes of a device that becket serves: the new state is computed first, then kernel and worker
//! follow.
//! It never lets the kernel see bytes that the worker does not know yet, nor the other way round.

use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use becket_image::{DirectIo, FileKind, FileSource, Identity, Map, Partition, Source};
use becket_transport::aside::{self, within};
use becket_transport::{Abilities, node};
use tracing::{info, warn};

use super::devices::{Busy, Supervisor};
use super::driver::Driver;
use super::make::{check_files, check_map, direct_io};
use super::owned::Owning;
use super::workers::Worker;
use crate::contract::kept::{Kept, descriptors_of};
use crate::contract::messages::NewImage;
use crate::contract::protocol::Change;
use crate::contract::spec::{Backing, all_sources, facts_of};
use crate::contract::{DeviceId, DeviceInfo, Error, ErrorKind, shape};
use crate::record::device::Device;
use crate::record::judge::disk_of;
use crate::system::describe::partitions_as;
use crate::system::sync::lock;

/// Longest that a file system may take to say how long an image is: the device is locked meanwhile.
const ANSWER: Duration = Duration::from_secs(10);

/// What is wished for; what is not given stays.
#[derive(Debug, Default)]
pub(super) struct Wish {
    pub(super) direct_io: Option<DirectIo>,
    pub(super) read_only: Option<bool>,
    pub(super) length: Option<Length>,
    /// Fewest bytes that it may be left with where it becomes shorter.
    pub(super) shortest: u64,
    pub(super) image: Option<Replacement>,
    /// What its partition table says by now.
    pub(super) partitions: Option<Vec<Partition>>,
}

/// The device's new length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Length {
    /// As its image allows, within the limit that it has.
    Measured,
    /// As its image allows, within another limit or none.
    Limit(Option<u64>),
    /// As its image allows, which has so many bytes, as the program says that reaches it.
    Served(u64),
}

/// Says what is another than it was.
fn say_change(old: &DeviceInfo, new: &DeviceInfo) {
    let name = &new.name;
    if old.size != new.size {
        info!(event = "resized", device = name, "had {} bytes and has {} now", old.size, new.size);
    }
    let image = |info: &DeviceInfo| info.spec.image.display().to_string();
    if old.spec.image != new.spec.image {
        info!(event = "changed", device = name, "has another image: {}", image(new));
    }
    if old.spec.read_only != new.spec.read_only {
        let writes = if new.spec.read_only { "refuses writes" } else { "accepts writes" };
        info!(event = "changed", device = name, "{writes} now");
    }
    if old.direct_io != new.direct_io {
        let direct = if new.direct_io { "on" } else { "off" };
        info!(event = "changed", device = name, "direct I/O is {direct} now");
    }
}

/// Another image, opened by the client.
#[derive(Debug)]
pub(super) struct Replacement {
    pub(super) path: PathBuf,
    pub(super) format: Option<String>,
    pub(super) map: Map,
    pub(super) sources: Vec<Source>,
    pub(super) identity: Identity,
    pub(super) partitions: Vec<Partition>,
}

/// What the device is to become, with nothing of it done yet.
#[derive(Debug)]
struct Target {
    pub(super) device: Device,
    pub(super) change: Change,
    /// Where the image is another one.
    pub(super) sources: Option<Vec<Source>>,
    pub(super) partitions: Option<Vec<Partition>>,
    /// Whether the kernel's read-only flag is set or cleared.
    read_only: Option<bool>,
}

/// Takes what a client has opened, believing nothing that can be looked at.
pub(super) fn take_image(
    image: NewImage,
    fds: Vec<OwnedFd>,
    block: u32,
    read_only: bool,
) -> Result<Replacement, Error> {
    let bad = |what: &str| Error::Failed {
        kind: ErrorKind::InvalidOption,
        message: format!("the image makes no sense: {what}"),
        hint: None,
    };
    let NewImage { path, format, map, files, partitions } = image;
    let sources = all_sources(files, fds.into_iter()).map_err(|error| bad(&error.to_string()))?;
    if sources.iter().any(|source| source.file().is_none()) {
        return Err(bad("only an image in files takes the place of another"));
    }
    let identity = check_files(&sources, read_only).map_err(bad)?;
    check_map(&map, &sources, block, false).map_err(bad)?;
    if map.len() % u64::from(block.max(1)) != 0 {
        return Err(bad("its length is not a whole number of blocks"));
    }
    let partitions = partitions.into_iter().map(Into::into).collect();
    Ok(Replacement { path, format, map, sources, identity, partitions })
}

/// Works out what the device is to become, or why it cannot.
fn plan(state: &Owning, wish: Wish) -> Result<Target, Error> {
    let Owning { device, kept, .. } = state;
    let mut device = device.clone();
    let info = &mut device.info;
    let mut change = Change::none(&kept.serve);
    let mut sources = None;
    let mut partitions = wish.partitions;
    if let Some(Length::Limit(limit)) = wish.length {
        info.spec.size_limit = limit;
    }
    if let Some(image) = wish.image {
        let (name, anew) = (&info.name, info.anew("", &image.path));
        // The engine refuses each; this error has a hint, and comes before the kernel is given another size.
        let made = match &kept.serve.backing {
            Backing { grows: true, .. } => Some("grows while it is written"),
            Backing { encoded: Some(_), .. } => Some("is encoded"),
            _ if kept.sources.iter().any(|source| source.link().is_some()) => Some("is on a server"),
            _ if kept.sources.iter().any(|source| source.filled().is_some()) => {
                Some("comes while it is read")
            }
            _ => None,
        };
        if let Some(made) = made {
            return Err(unsupported(
                format!("the image of {name} {made}, and no other takes its place while the device lives"),
                &anew,
            ));
        }
        change.map = image.map;
        change.files = Some(facts_of(&image.sources));
        info.spec.image = image.path;
        info.spec.cow = None;
        device.image = image.identity;
        device.format = image.format;
        (sources, partitions) = (Some(image.sources), Some(image.partitions));
    } else if let Some(length) = wish.length {
        change.map = remeasured(&device, length, &kept.serve.map, &kept.sources, kept.serve.backing.grows)?;
    }
    let info = &mut device.info;
    let now = sources.as_ref().unwrap_or(&kept.sources);
    if let Some(read_only) = wish.read_only {
        // Of one that grows only the first source is written.
        let written = if kept.serve.backing.grows && sources.is_none() { 1 } else { now.len() };
        if !read_only && now.iter().take(written).any(|source| !source.is_writable()) {
            return Err(Error::Failed {
                kind: ErrorKind::ReadOnly,
                message: format!("the image of {} is open for reading only", info.name),
                hint: Some("the one who changes it must be allowed to write to the image".to_owned()),
            });
        }
        change.read_only = read_only;
    }
    let chosen = match kept.serve.backing.direct_io {
        // A device that uses the page cache without need was attached with `--direct-io off`.
        DirectIo::Off if !kept.sources.iter().all(Source::is_direct) => DirectIo::Auto,
        chosen => chosen,
    };
    let (direct, reason) =
        direct_io(now, wish.direct_io.unwrap_or(chosen), kept.serve.backing.encoded.is_some());
    let on = direct != DirectIo::Off;
    if wish.direct_io == Some(DirectIo::On) && !on {
        return Err(unsupported(
            format!("{} cannot do direct I/O: {reason}", info.name),
            "--direct-io auto takes it where it can be had",
        ));
    }
    if wish.direct_io.is_some() || sources.is_some() {
        change.direct_io = direct;
        (info.direct_io, info.direct_io_reason) = (on, reason);
    }
    let len = change.map.len();
    if len < info.size.min(wish.shortest) {
        return Err(Error::Failed {
            kind: ErrorKind::InvalidOption,
            message: format!(
                "{} has room for {len} bytes by now, and {} has {}",
                info.spec.image.display(),
                info.name,
                info.size
            ),
            hint: Some(format!(
                "becket refresh {} takes over the length, or make the image longer again",
                info.name
            )),
        });
    }
    info.size = len;
    info.spec.read_only = change.read_only;
    Ok(Target { device, change, sources, partitions, read_only: wish.read_only })
}

/// Has kernel and worker follow.
///
/// A device that grows is changed before the kernel hears of its size, one that shrinks afterwards. The
/// kernel's flag says that it is read-only before the worker refuses writes, and that it is writable
/// afterwards.
///
/// A worker that dies meanwhile, or is ended because it does not answer, may already have served the device
/// in its new state, so this counts as done: the next worker serves it so from its first request on.
fn apply(driver: &dyn Driver, worker: &dyn Worker, kept: &Kept, target: &Target) -> Result<(), Error> {
    let id = kept.serve.id.number;
    let (old, new) = (Change { files: None, ..Change::none(&kept.serve) }, &target.change);
    let (before, after) = (old.map.len(), new.map.len());
    if before != after {
        resizable(driver, id, &target.device.info.name)?;
    }
    let tell = |read_only: bool| match target.read_only {
        Some(wanted) if wanted == read_only => driver.set_read_only(id, read_only),
        _ => Ok(()),
    };
    tell(true)?;
    let first = after < before && !driver.follows_worker();
    let shrunk = if first { driver.update_size(id, after) } else { Ok(()) };
    let changed = shrunk.and_then(|()| match *new == old {
        true => Ok(()),
        false => order(worker, new, target.sources.as_deref()).inspect_err(|_| {
            if first {
                undo("size", driver.update_size(id, before));
            }
        }),
    });
    let grown = changed.and_then(|()| match after != before && !first {
        true => driver.update_size(id, after).inspect_err(|_| {
            let sources = target.sources.is_some().then_some(&*kept.sources);
            undo("worker", order(worker, &Change { files: sources.map(facts_of), ..old.clone() }, sources));
        }),
        false => Ok(()),
    });
    grown.inspect_err(|_| {
        if !old.read_only && target.read_only == Some(true) {
            undo("read-only flag", driver.set_read_only(id, false));
        }
    })?;
    tell(false)
}

fn order(worker: &dyn Worker, change: &Change, sources: Option<&[Source]>) -> Result<(), Error> {
    let fds: Vec<BorrowedFd<'_>> = sources.into_iter().flat_map(descriptors_of).collect();
    match worker.change(change.clone(), &fds) {
        Err(error) if !worker.alive() => {
            warn!("{error} while it was changed; its devices recover as they are to be");
            Ok(())
        }
        other => other,
    }
}

/// What cannot be taken back is said: the device is then neither as it was nor as it was to be.
fn undo(what: &str, outcome: Result<(), Error>) {
    if let Err(error) = outcome {
        warn!("the {what} of a device could not be changed back: {error}");
    }
}

fn resizable(driver: &dyn Driver, id: u32, name: &str) -> Result<(), Error> {
    if driver.info(id)?.is_some_and(|added| added.abilities.has(Abilities::RESIZES)) {
        return Ok(());
    }
    Err(unsupported(
        format!("this kernel's ublk driver cannot resize {name} while it lives"),
        "Linux 6.16 can; until then detach it and attach it again, or use --via loop",
    ))
}

/// How long an image is now.
enum Now<'a> {
    /// So many bytes, as the program says that reaches it.
    Said(u64),
    /// As long as its file, which is asked.
    Of(&'a FileSource),
}

/// The map that the image's present length gives. A disk whose length is not that of a file keeps its own.
fn remeasured(
    device: &Device,
    length: Length,
    map: &Map,
    sources: &[Source],
    grows: bool,
) -> Result<Map, Error> {
    let info = &device.info;
    let now = match (length, sources) {
        (Length::Served(size), [_]) => Some(Now::Said(size)),
        // Behind it may be the disk around a partition.
        (_, [source, ..]) => source.file().map(Now::Of),
        _ => None,
    };
    let keeps = !matches!(length, Length::Limit(_));
    let (Some((0, offset, _)), Some(now), false) = (map.single_range(), now, grows) else {
        if keeps || info.spec.size_limit == Some(map.len()) {
            return Ok(map.clone());
        }
        let image = info.spec.cow.as_ref().unwrap_or(&info.spec.image);
        let (shown, name, again) = (image.display(), &info.name, info.making().command);
        let message =
            format!("the disk in {shown} is {} bytes long, whatever the length of its file", map.len());
        let hint = if grows {
            format!("to change that: becket detach {name}; qemu-img resize {shown} SIZE; {again} it again")
        } else {
            format!("{} offers a part of it", info.anew("--size-limit SIZE ", image))
        };
        return Err(unsupported(message, &hint));
    };
    // An image inside another has had a limit from the start: behind it lie its neighbour's bytes.
    if offset != info.spec.offset && info.spec.size_limit.is_none() {
        if keeps {
            return Ok(map.clone());
        }
        let message = format!("the size of {} is that of a part of {}", info.name, info.spec.image.display());
        return Err(unsupported(message, &info.again("")));
    }
    let size = match now {
        Now::Said(size) => size,
        Now::Of(file) => length_of(file, info)?,
    };
    let block = u64::from(info.spec.block_size.max(1));
    let len = size.saturating_sub(offset).min(info.spec.size_limit.unwrap_or(u64::MAX)) / block * block;
    if len == 0 {
        let message = format!("{} would have no block left", info.name);
        return Err(unsupported(message, "make the image or its limit longer, or detach the device"));
    }
    Ok(Map::contiguous(0, offset, len))
}

/// How long a file is now, in bytes.
fn length_of(file: &FileSource, info: &DeviceInfo) -> Result<u64, Error> {
    match file.facts.kind {
        FileKind::Regular => {
            let own = file.buffered.try_clone().map_err(Error::io("keep", &info.spec.image))?;
            let silent = || becket_transport::Error::Silent { device: info.device.clone() };
            let stat =
                within(ANSWER, move || rustix::fs::fstat(&own)).ok_or_else(|| Error::Device(silent()))?;
            let stat = stat.map_err(Error::io("look at", &info.spec.image))?;
            Ok(u64::try_from(stat.st_size).unwrap_or(0))
        }
        FileKind::Block => becket_uapi::block::size64(file.buffered.as_fd())
            .map_err(Error::io("ask for the size of", &info.spec.image)),
    }
}

impl Supervisor {
    /// Changes a device that lives. The record says what is, so nothing is written there before it is done.
    pub(super) fn change(
        &self,
        name: &str,
        wish: impl FnOnce(&DeviceInfo) -> Result<Wish, Error>,
    ) -> Result<DeviceInfo, Error> {
        let owned = self.owned(name).ok_or_else(|| self.not_owned(name))?;
        let mut state = lock(&owned.state);
        if state.gone {
            return Err(Error::NoDevice { target: name.to_owned() });
        }
        state.responds()?;
        let target = plan(&state, wish(&state.device.info)?)?;
        self.carry_out(&mut state, target)
    }

    /// Has a device follow the length that its image is said to have now.
    pub(super) fn follow(&self, state: &mut Owning, size: u64) -> Result<(), Error> {
        let _busy = Busy::begin(self);
        let target = plan(state, Wish { length: Some(Length::Served(size)), ..Wish::default() })?;
        if target.device.info.size == state.device.info.size {
            return Ok(());
        }
        state.responds()?;
        self.carry_out(state, target).map(drop)
    }

    fn carry_out(&self, state: &mut Owning, target: Target) -> Result<DeviceInfo, Error> {
        let driver = self.driver(state.device.info.transport)?;
        apply(&*driver, &*state.worker, &state.kept, &target)?;
        let Target { mut device, change, sources, partitions, .. } = target;
        change.apply(&mut state.kept.serve);
        if let Some(sources) = sources {
            // With the old ones go the locks of the old image.
            let old = mem::replace(&mut state.kept.sources, sources);
            aside::close(move || drop(old));
            self.guard.forget(state.device.mark);
        }
        self.keep(state);
        if let Some(promised) = partitions {
            const STALE: &str = "its partitions are not those of its image";
            device.info.warnings.retain(|warning| !warning.starts_with(STALE));
            if let Err(error) = driver.repartition(state.kept.serve.id.number, &promised) {
                device.info.warnings.push(format!("{STALE}: {error}"));
            }
            device.info.partitions = partitions_as(node::partitions(&disk_of(&device.info)), &promised);
        }
        let unrecorded = match self.store.update(&state.device, &device) {
            Ok(true) => None,
            Ok(false) => Some("its record is gone".to_owned()),
            Err(error) => Some(error.to_string()),
        };
        // Kernel and worker have changed, and a successor trusts the worker: an outdated record undoes
        // nothing.
        say_change(&state.device.info, &device.info);
        let resized = state.device.info.size != device.info.size;
        state.device = device;
        let mut info = state.device.info.clone();
        let notice = shape::of(info.transport).users.resized.filter(|_| resized);
        let is_visited = |(id, clients): &(DeviceId, u64)| *id == DeviceId::of(&info) && *clients > 0;
        if let Some(notice) = notice
            && driver.visitors().iter().any(is_visited)
        {
            info.warnings.push(notice.to_owned());
        }
        if let Some(why) = unrecorded {
            let warning = format!("{} is changed, but that could not be recorded: {why}", info.name);
            warn!("{warning}");
            info.warnings.push(warning);
        }
        Ok(info)
    }
}

fn unsupported(message: String, hint: &str) -> Error {
    Error::Failed { kind: ErrorKind::Unsupported, message, hint: Some(hint.to_owned()) }
}

#[cfg(test)]
#[path = "change_tests.rs"]
mod tests;
