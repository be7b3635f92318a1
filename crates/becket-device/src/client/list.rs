//! Which devices there are: the records, each held against the kernel.
//! It asks about the devices it has records of, and about others only whether they are ours.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use becket_image::Location;
use becket_transport::aside::within;
use becket_transport::sysfs;
use tracing::warn;

use crate::client::{kernel_drivers, partitions, unfinished};
use crate::contract::messages::{Devices, Nothing};
use crate::contract::{DeviceInfo, DeviceState, Error, ErrorKind, Spec};
use crate::control::client;
use crate::control::health::{self, Concerns};
use crate::record::device::Device;
use crate::record::judge::{Verdict, disk_of, judge, lives};
use crate::record::register::forget;
use crate::record::runtime::Runtime;
use crate::record::store::{Entry, Store};
use crate::record::unknown::{Unknown, image_of, of_unknown_version};
use crate::record::{links, mark};
use crate::system::describe::size_of;
use crate::system::kernel::{Kernel, System};
use crate::system::many;
use crate::system::users;

/// Longest that a file system may take to say what a path leads to.
const ANSWER: Duration = Duration::from_secs(10);

/// All devices, sorted by name as people count: `loop2` before `loop10`. Records of devices that are gone are
/// dropped on the way.
///
/// # Errors
/// The records cannot be read.
pub fn list() -> Result<Vec<DeviceInfo>, Error> {
    let store = Store::open(Runtime::open()?)?;
    let Records { mut devices, unknown } = found(&store)?;
    health::examine(store.runtime(), &mut devices);
    let partitioned = sysfs::partitioned();
    let seen = |device: Device| as_users_see(device.info, &partitioned);
    let mut infos: Vec<DeviceInfo> = many::each(devices, seen);
    infos.extend(unknown.into_iter().map(|unknown| unknown.info));
    infos.sort_by(|one, other| partitions::counted(&one.name).cmp(&partitions::counted(&other.name)));
    Ok(infos)
}

/// What records stand for.
struct Records {
    devices: Vec<Device>,
    /// What another version of becket has recorded, and is there as far as can be said.
    unknown: Vec<Unknown>,
}

/// A device as its users find it: any privileged process can make it read-only or writable with `BLKROSET`,
/// and move the ends of its partitions.
///
/// This is for display. Decisions use the record: the kernel only warns of writes to what it calls read-only,
/// and a file system that was mounted for writing before goes on writing.
fn as_users_see(mut info: DeviceInfo, partitioned: &HashSet<String>) -> DeviceInfo {
    if info.state != DeviceState::Lost
        && let Some(reported) = sysfs::flag(&disk_of(&info), "ro")
    {
        let refused = info.spec.read_only && info.transport.is_served();
        info.spec.read_only = reported || refused;
    }
    info.partitions = partitions::as_they_are(&info, partitioned);
    info
}

/// When a device last came, went or changed, by its record; `None` where becket keeps no records. As long as
/// it stays the same, a new [`list`] shows nothing new but what the kernel and stopped processes do by
/// themselves.
pub fn last_change() -> Option<std::time::SystemTime> {
    fs::metadata(Runtime::existing().ok()??.records()).ok()?.modified().ok()
}

/// The devices whose supervisor or worker does not respond, or is of another version. Creates nothing where
/// becket keeps no records.
///
/// # Errors
/// The records cannot be read.
pub fn ailing() -> Result<Vec<DeviceInfo>, Error> {
    if Runtime::present().is_none() {
        return Ok(Vec::new());
    }
    let ails =
        |info: &DeviceInfo| matches!(info.state, DeviceState::NotResponding | DeviceState::UnknownVersion);
    Ok(list()?.into_iter().filter(ails).collect())
}

/// Drops the records of devices that are gone, as [`list`] does; makes nothing where becket keeps no records.
pub fn tidy() {
    let tidied = Runtime::present()
        .map_or(Ok(()), |runtime| Store::open(runtime).and_then(|store| devices(&store)).map(drop));
    if let Err(error) = tidied {
        warn!("records of devices that are gone stay: {error}");
    }
}

/// The device that goes by a NAME, a path under /dev, or the path of its image.
///
/// # Errors
/// There is none, or more than one.
pub fn find(target: impl AsRef<Path>) -> Result<DeviceInfo, Error> {
    let store = Store::open(Runtime::open()?)?;
    Ok(resolve(&store, target.as_ref())?.info)
}

/// The records of devices, brought up to date. Devices of becket's without a record are given one first.
pub(crate) fn devices(store: &Store) -> Result<Vec<Device>, Error> {
    Ok(found(store)?.devices)
}

fn found(store: &Store) -> Result<Records, Error> {
    unfinished::clear(store);
    let found = recorded(store)?;
    if !lacks_records(store, &found) {
        return Ok(found);
    }
    // The server knows what it owns, and finds the others.
    match client::call::<_, Devices>(store.runtime(), "List", &Nothing {}, &[], Concerns::Server) {
        Ok(_) => recorded(store),
        Err(error) => {
            warn!("devices without a record are not listed: {error}");
            Ok(found)
        }
    }
}

/// Whether the kernel has a live device of ours that no record speaks of.
fn lacks_records(store: &Store, found: &Records) -> bool {
    // Which device such a record speaks of is not known for certain: none counts as without a record.
    if found.unknown.iter().any(|unknown| unknown.mark.is_none()) {
        return false;
    }
    let infos = || {
        let devices = found.devices.iter().map(|device| &device.info);
        devices.chain(found.unknown.iter().map(|unknown| &unknown.info))
    };
    let known = |kind, number| infos().any(|info| info.transport == kind && info.number == number);
    let mut marks = becket_transport::live_marks(&known);
    marks.retain(|mark| mark::is_of(store.runtime(), *mark));
    // Those that came while the records were read have one by now.
    let recorded: Vec<u64> = match marks.is_empty() {
        true => Vec::new(),
        false => store.entries().iter().flatten().filter_map(|(_, entry)| mark::recorded(entry)).collect(),
    };
    marks.iter().any(|mark| !recorded.contains(mark))
}

fn recorded(store: &Store) -> Result<Records, Error> {
    let (mut devices, mut unknown) = (Vec::new(), Vec::new());
    for (name, entry) in store.entries()? {
        match entry {
            Entry::Device(device) => devices.push(*device),
            Entry::Unknown(other) => unknown.extend(is_there(&other).then_some(*other)),
            Entry::Claim { claimant, .. } if claimant.alive() => {}
            claim @ Entry::Claim { .. } => {
                if let Err(error) = store.remove_claim(&name, &claim) {
                    warn!("the name {name} stays claimed: {error}");
                }
            }
        }
    }
    let devices = many::each(devices, |device| current(store, &System, device));
    Ok(Records { devices: devices.into_iter().flatten().collect(), unknown })
}

/// Whether the device of another version's record can still be there. The record stays in any case.
fn is_there(unknown: &Unknown) -> bool {
    !unknown.is_claim && unknown.device.as_ref().is_none_or(|device| lives(&System, device))
}

/// A record as it stands now; `None` when its device is gone and it was dropped.
fn current(store: &Store, kernel: &impl Kernel, mut device: Device) -> Option<Device> {
    match judge(kernel, &device) {
        Verdict::Gone => {
            forget(store, &device);
            if let Some(driver) = kernel_drivers::of(device.info.transport) {
                driver.removed(&device);
            }
            None
        }
        Verdict::NotYet => None,
        Verdict::There(state) => {
            device.info.state = state;
            if state == DeviceState::UnknownVersion {
                device.info.warnings.insert(0, device.unspoken.clone().unwrap_or_default());
            }
            if state != DeviceState::Lost
                && let Some(size) = size_of(&disk_of(&device.info)).filter(|&size| size > 0)
            {
                device.info.size = size;
            }
            Some(device)
        }
    }
}

/// Finds a device by what a person calls it. One of an unknown version is refused: nothing may be done to it.
pub(crate) fn resolve(store: &Store, path: &Path) -> Result<Device, Error> {
    let device = resolve_any(store, path)?;
    match device.info.state {
        DeviceState::UnknownVersion => Err(of_unknown_version(&device.info)),
        _ => Ok(device),
    }
}

fn resolve_any(store: &Store, path: &Path) -> Result<Device, Error> {
    // A name is never a path, and a name that is also a file here means the name.
    if let Some(name) = path.to_str() {
        if let Some(device) = named(store, name)? {
            return Ok(device);
        }
        if let Some(unknown) = store.unknown(name)?.filter(|unknown| is_there(unknown)) {
            return Err(unknown.error());
        }
    }
    let is_path = |device: &Device| {
        device.info.device == path || links::path(store.runtime(), &device.info.name) == path
    };
    // Most devices go by the name of their node: then no other record need be looked at.
    if let Some(name) = path.file_name().and_then(|name| name.to_str())
        && let Some(device) = named(store, name)?.filter(is_path)
    {
        return Ok(device);
    }
    let Records { devices, unknown } = found(store)?;
    // Before files: of one below a directory that is called like a scheme nothing is known here.
    for goes_by in [is_shown_as, is_on_server_as] {
        let found: Vec<Device> =
            devices.iter().filter(|device| goes_by(&device.info.spec, path)).cloned().collect();
        if !found.is_empty() {
            return one(found, path);
        }
    }
    let Some(Seen { number, id, real, located }) = seen(path) else { return unseen(devices, path) };
    let is_meant = |other: &&Unknown| {
        let node = number.is_some() && sysfs_number(&disk_of(&other.info)) == number;
        let image = image_of(other).map(|image| (image.dev, image.ino));
        node || other.info.device == path || other.info.spec.image == real || (id.is_some() && image == id)
    };
    let of_unknown = unknown.iter().find(is_meant).map(Unknown::error);
    let is_node = |device: &Device| {
        let node = number.is_some() && sysfs_number(&disk_of(&device.info)) == number;
        // The node of a lost device may be gone; its paths still name it.
        node || is_path(device)
    };
    let found: Vec<Device> = devices.iter().filter(|device| is_node(device)).cloned().collect();
    if !found.is_empty() {
        return one(found, path);
    }
    let is_image = |device: &&Device| id == Some((device.image.dev, device.image.ino));
    let found: Vec<Device> = devices.iter().filter(is_image).cloned().collect();
    // Images inside a file have its inode, too: its own device comes before theirs.
    let own: Vec<Device> = found.iter().filter(|device| device.info.spec.image == real).cloned().collect();
    if !found.is_empty() {
        return one(if own.is_empty() { found } else { own }, path);
    }
    // An image inside another, or one that was removed or replaced under its device, is known by its path.
    let found: Vec<Device> =
        devices.iter().filter(|device| device.info.spec.image == real).cloned().collect();
    match (located, of_unknown) {
        (_, Some(error)) if found.is_empty() => Err(error),
        (Some(located), _) if found.is_empty() => one(at_the_same_place(devices, located), path),
        _ => one(found, path),
    }
}

/// Whether an image that is on a server, or was decoded, is shown under that name.
fn is_shown_as(spec: &Spec, path: &Path) -> bool {
    let shown = |name: &Path| name == path || std::path::absolute(path).is_ok_and(|path| name == path);
    match &spec.url {
        Some(url) => shown(Path::new(url)),
        None => becket_image::is_remote(&spec.image) && spec.image == path,
    }
}

/// Whether an image that is on a server was named so, or means the same there.
fn is_on_server_as(spec: &Spec, path: &Path) -> bool {
    match &spec.url {
        Some(url) => {
            path.to_str().and_then(without_query).is_some_and(|typed| without_query(url) == Some(typed))
        }
        None => becket_image::goes_by(&spec.image, path),
    }
}

/// A URL as records have it: a query may be a signature, and is in none. The path inside the image stays.
fn without_query(url: &str) -> Option<String> {
    let url = becket_image::one_case(url);
    let (of_server, inside) =
        url.split_once('#').map_or((url.as_str(), None), |(url, inside)| (url, Some(inside)));
    let (place, _) = of_server.split_once('?').unwrap_or((of_server, ""));
    let inside = inside.map_or_else(String::new, |inside| format!("#{inside}"));
    place.contains("://").then(|| format!("{place}{inside}"))
}

/// The devices whose image is at that place, by whatever names it was found there.
fn at_the_same_place(devices: Vec<Device>, place: Location) -> Vec<Device> {
    let looked = within(ANSWER, move || {
        let same =
            |device: &Device| becket_image::locate(&device.info.spec.image).is_ok_and(|other| other == place);
        devices.into_iter().filter(same).collect()
    });
    // A file system that does not answer shows no image.
    looked.unwrap_or_default()
}

/// What a path leads to.
struct Seen {
    /// `MAJOR:MINOR`, of a block device's node.
    number: Option<String>,
    /// Device and inode number, where there is a file.
    id: Option<(u64, u64)>,
    real: PathBuf,
    /// Where the image is that a path through a file names.
    located: Option<Location>,
}

/// Looks at a path; `None` when its file system does not answer.
fn seen(path: &Path) -> Option<Seen> {
    let path = path.to_owned();
    within(ANSWER, move || {
        let id = fs::metadata(&path);
        let through = id.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotADirectory);
        Seen {
            number: users::number_of(&path),
            id: id.ok().map(|id| (id.dev(), id.ino())),
            real: real(&path),
            located: through.then(|| becket_image::locate(&path).ok()).flatten(),
        }
    })
}

/// The device whose image had that path when it was attached. No link can be followed, so it may miss some.
fn unseen(devices: Vec<Device>, path: &Path) -> Result<Device, Error> {
    let same = |device: &Device| std::path::absolute(path).is_ok_and(|path| device.info.spec.image == path);
    let found: Vec<Device> = devices.into_iter().filter(same).collect();
    if found.is_empty() {
        let (path, seconds) = (path.display(), ANSWER.as_secs());
        return Err(Error::Failed {
            kind: ErrorKind::Timeout,
            message: format!("{path}: its file system has not answered for {seconds} s"),
            hint: Some("say which device by its name or node: becket list".to_owned()),
        });
    }
    one(found, path)
}

/// The path without links, also of what is gone from its directory or lies inside an image.
fn real(path: &Path) -> PathBuf {
    let Ok(absolute) = std::path::absolute(path) else { return path.to_owned() };
    let deepest = absolute.ancestors().find_map(|ancestor| {
        let rest = absolute.strip_prefix(ancestor).ok()?;
        let real = fs::canonicalize(ancestor).ok()?;
        Some(if rest.as_os_str().is_empty() { real } else { real.join(rest) })
    });
    deepest.unwrap_or_else(|| path.to_owned())
}

/// The device of that name.
fn named(store: &Store, name: &str) -> Result<Option<Device>, Error> {
    Ok(store.device(name)?.and_then(|device| current(store, &System, device)))
}

fn one(mut found: Vec<Device>, target: &Path) -> Result<Device, Error> {
    if found.len() > 1 {
        let names = found.into_iter().map(|device| device.info.name).collect();
        return Err(Error::Ambiguous { target: target.display().to_string(), names });
    }
    found.pop().ok_or_else(|| nothing(target))
}

fn nothing(target: &Path) -> Error {
    Error::NoDevice { target: target.display().to_string() }
}

fn sysfs_number(disk: &str) -> Option<String> {
    sysfs::text(disk, "dev")
}
