//! Who uses a device that is about to change, and what its page cache holds.
//! It only asks the kernel: it takes a free claim for the time of the change, so that no other process can
//! claim the device.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use becket_image::Opened;
use becket_transport::aside::within;
use becket_transport::{node, sysfs};
use becket_uapi::block;

use super::changes::Changes;
use super::compare::{self, Progress};
use crate::client::detach::users_at;
use crate::contract::{DeviceInfo, Error, ErrorKind, User, WRITE_BACK, ending, shape};
use crate::control::health;
use crate::record::judge::disk_of;
use crate::record::runtime::Runtime;
use crate::record::store::Store;
use crate::system::users;

/// Longest that what programs have written to a device may take to reach its image.
const ANSWER: Duration = Duration::from_secs(60);

/// Whether the kernel or a program has claimed a device or a partition of it: mounted, swap, part of another
/// device.
pub(super) enum Use {
    /// It is not claimed, and cannot be while this lives.
    Free {
        /// An export or a file has none.
        _claim: Option<File>,
    },
    Held,
}

impl Use {
    pub(super) fn of(info: &DeviceInfo) -> Result<Use, Error> {
        if info.is_file() {
            // Nothing claims a file.
            return Ok(Use::Free { _claim: None });
        }
        if !info.has_disk() {
            let runtime = Runtime::existing()?;
            let clients = runtime.and_then(|runtime| health::connections(&runtime, info));
            return Ok(if clients.unwrap_or(0) > 0 { Use::Held } else { Use::Free { _claim: None } });
        }
        let exclusive = rustix::fs::OFlags::EXCL.bits().cast_signed();
        match File::options().read(true).custom_flags(exclusive).open(&info.device) {
            Ok(claim) => Ok(Use::Free { _claim: Some(claim) }),
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()) => {
                Ok(Use::Held)
            }
            Err(error) => Err(Error::io("open", &info.device)(error)),
        }
    }

    /// Who uses a device that is about to change, checked where that matters: hold it until all is done.
    ///
    /// # Errors
    /// Its users rely on what would go.
    pub(super) fn allowing(
        info: &DeviceInfo,
        changes: &Changes,
        replaces: bool,
        len: u64,
    ) -> Result<Option<Use>, Error> {
        let freezes = changes.read_only == Some(true) && !info.spec.read_only;
        if !replaces && len >= info.size && !freezes {
            return Ok(None);
        }
        let using = Use::of(info)?;
        may_shrink(info, using.is_held(), len, changes.force)?;
        if freezes {
            may_become_read_only(info, using.is_held(), changes.force)?;
        }
        Ok(Some(using))
    }

    pub(super) fn is_held(&self) -> bool {
        matches!(self, Use::Held)
    }
}

/// A device may become shorter when it is unused and no partition ends behind its new end.
pub(super) fn may_shrink(info: &DeviceInfo, held: bool, len: u64, force: bool) -> Result<(), Error> {
    if force || len >= info.size {
        return Ok(());
    }
    if held {
        let end = shape::of(info.transport).users.end;
        let hint = format!("{end}; where what is on it was made smaller already: --force");
        return Err(busy(info, "and would become shorter", users::claims(&disk_of(info)), &hint));
    }
    let partitions: Vec<(PathBuf, u64)> = match info.is_file() {
        true => info.partitions.iter().map(|part| (part.device.clone(), part.start + part.size)).collect(),
        false => {
            let all = node::partitions(&disk_of(info)).into_iter();
            all.map(|part| (part.node, part.start + part.len)).collect()
        }
    };
    match partitions.iter().find(|(_, end)| *end > len) {
        None => Ok(()),
        Some((node, end)) => Err(Error::Failed {
            kind: ErrorKind::InvalidOption,
            message: format!(
                "{} ends at byte {end}, behind the new end of {} at {len}",
                node.display(),
                info.name
            ),
            hint: Some("make the partition smaller or remove it first, or insist with --force".to_owned()),
        }),
    }
}

/// A device may become read-only when no file system on it is mounted for writing.
pub(super) fn may_become_read_only(info: &DeviceInfo, held: bool, force: bool) -> Result<(), Error> {
    if force || !held || info.spec.read_only {
        return Ok(());
    }
    match users::writers(&disk_of(info)) {
        writers if writers.is_empty() => Ok(()),
        writers => {
            let hint = "mount it read-only first (mount -o remount,ro DIR), or insist with --force";
            Err(busy(info, "for writing", writers, hint))
        }
    }
}

/// A device may get an image with other bytes when nobody has it open: who has may have read of the old one
/// what decides what is written next. A program that opens it a moment later sees both: nothing keeps it from
/// that.
pub(super) fn may_get(
    store: &Store,
    info: &DeviceInfo,
    held: bool,
    opened: &Opened,
    force: bool,
    progress: &mut Progress<'_>,
) -> Result<(), Error> {
    if force && !held {
        return Ok(());
    }
    let users = users_at(store, info, !held);
    if !held && users.is_empty() {
        return Ok(());
    }
    let end = match shape::has_disk(info.transport) {
        true => ending(&users),
        false => shape::of(info.transport).users.end.to_owned(),
    };
    let insist = if held { "" } else { ", or insist with --force" };
    // What clients of an export read cannot be compared.
    if !info.spec.read_only || !shape::has_disk(info.transport) {
        return Err(busy(info, "and would show another image", users, &format!("{end}{insist}")));
    }
    match compare::difference(info, opened, progress)? {
        None => Ok(()),
        Some(how) => {
            let what = format!("and {} {how}", opened.path.display());
            let hint = format!("{end}: a device in use gets only an equal copy of its image{insist}");
            Err(busy(info, &what, users, &hint))
        }
    }
}

fn busy(info: &DeviceInfo, what: &str, users: Vec<User>, hint: &str) -> Error {
    let who: Vec<String> = users.iter().map(ToString::to_string).collect();
    let who = match who.is_empty() {
        true => shape::of(info.transport).users.some.to_owned(),
        false => who.join(", "),
    };
    let message = format!("{} is in use {what}: {who}", info.device.display());
    Error::Failed { kind: ErrorKind::Busy, message, hint: Some(hint.to_owned()) }
}

/// The disk and its partitions, each of which has a page cache of its own.
fn nodes(info: &DeviceInfo) -> impl Iterator<Item = PathBuf> {
    let blocks = if info.has_disk() { users::blocks(&disk_of(info)) } else { Vec::new() };
    let partitions = blocks.into_iter().skip(1).map(|block| sysfs::node(&block.name));
    let disk = info.has_disk().then(|| info.device.clone());
    disk.into_iter().chain(partitions)
}

/// The page caches of a device, of whose old errors nothing will be heard any more.
///
/// Opening a device reports the last failed write-back that has not been reported yet, however old: a write
/// that met the device just when it became read-only leaves one (a direct write goes through the page cache
/// where a page is busy). The kernel reports a failure once and takes its pages for clean, so what is
/// reported after this is a new loss.
///
/// What waits for the image is done on another thread: the image may be one that does not answer, and is
/// being replaced for that.
pub(super) struct Caches(Vec<(PathBuf, File)>);

impl Caches {
    pub(super) fn of(info: &DeviceInfo) -> Result<Caches, Error> {
        let caches = Caches::open(info)?;
        caches.0.iter().try_for_each(|(path, device)| {
            // An earlier error is taken here, and does not count.
            aside(path, device, |device| block::await_write_back(device.as_fd())).map(drop)
        })?;
        Ok(caches)
    }

    fn open(info: &DeviceInfo) -> Result<Caches, Error> {
        let open = |path: PathBuf| match File::open(&path) {
            Ok(device) => Ok((path, device)),
            Err(error) => Err(Error::io("open", &path)(error)),
        };
        nodes(info).map(open).collect::<Result<_, _>>().map(Caches)
    }

    /// Whether they have what has not reached the device, as far as the kernel says that.
    fn may_be_dirty(&self) -> bool {
        self.0.iter().any(|(_, device)| block::is_dirty(device.as_fd()).unwrap_or(true))
    }

    /// Writes back what programs have written to the device through them.
    pub(super) fn write_back(&self) -> Result<(), Error> {
        self.0.iter().try_for_each(|(path, device)| {
            aside(path, device, File::sync_all)?.map_err(Error::io(WRITE_BACK, path))
        })
    }
}

/// Has something done to a device that waits for its image, but not for ever.
fn aside<T: Send + 'static>(
    path: &Path,
    device: &File,
    work: impl FnOnce(&File) -> T + Send + 'static,
) -> Result<T, Error> {
    let own = device.try_clone().map_err(Error::io("keep", path))?;
    within(ANSWER, move || work(&own))
        .ok_or_else(|| Error::Device(becket_transport::Error::Silent { device: path.to_owned() }))
}

/// Has the kernel refuse writes to the device. What programs have written by then reaches the image; if that
/// is `away`, nothing may have been.
pub(super) fn freeze(info: &DeviceInfo, away: &mut Option<Error>) -> Result<(), Error> {
    if !info.has_disk() {
        // Its worker refuses writes, and has no page cache above it.
        return Ok(());
    }
    let disk = disk_of(info);
    // Before: what is refused from then on is not an old error.
    let caches = if away.is_some() { Caches::open(info) } else { Caches::of(info) }?;
    node::set_read_only(&disk, true).map_err(Error::Device)?;
    let written = match away {
        None => caches.write_back(),
        Some(_) if caches.may_be_dirty() => away.take().map_or(Ok(()), Err),
        Some(_) => Ok(()),
    };
    written.inspect_err(|_| {
        // Best effort: what counts is the error that led here.
        let _ = node::set_read_only(&disk, false);
    })
}

/// Drops what the page cache of the device holds, so that nothing of an image is read that it no longer has,
/// and makes udev and others probe the device again.
pub(super) fn forget_cached(info: &DeviceInfo) -> Result<(), Error> {
    for path in nodes(info) {
        let device = File::open(&path).map_err(Error::io("open", &path))?;
        block::flush_buffers(device.as_fd()).map_err(Error::io("drop the page cache of", &path))?;
    }
    if !info.has_disk() {
        return Ok(());
    }
    // Without a listener nothing is lost.
    let _ = std::fs::write(sysfs::directory(&disk_of(info)).join("uevent"), "change");
    Ok(())
}
