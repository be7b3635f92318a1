//! From an image to a device: opened, planned, made, recorded, linked.
//! Whatever fails on the way, nothing stays behind: no device, no name, no link.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use becket_image::{Below, DirectIo, OpenOptions, Opened};
use becket_transport::loop_::{self, LoopDevice, LoopOptions};
use becket_transport::{Kind, node, sysfs};

use crate::control::{Attach, BelowFacts, FileFacts, OneDevice, client};
use crate::kernel::System;
use crate::list::lives;
use crate::process::ProcessId;
use crate::runtime::Runtime;
use crate::state::{self, Claim, Device, Store};
use crate::{
    AttachOptions, DeviceInfo, DeviceState, Error, GoBelow, PartitionInfo, Partitions, Plan, links, log,
    planner,
};

/// How long a device that nobody else uses may take to go when its lease ends.
const GONE_WITHIN: Duration = Duration::from_millis(200);

/// Keeps a device. When this is dropped, or its process dies, the device goes as soon as nobody else uses it.
#[derive(Debug)]
pub struct Lease {
    held: Option<Held>,
}

#[derive(Debug)]
pub(crate) enum Held {
    /// The device's own descriptors: the kernel takes the device away at its last close.
    Kernel { fds: Vec<OwnedFd>, store: Store, device: Box<Device> },
    /// The writing end of a pipe that the supervisor watches.
    Server { _pipe: OwnedFd },
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(Held::Kernel { fds, store, device }) = self.held.take() else { return };
        drop(fds);
        let deadline = Instant::now() + GONE_WITHIN;
        while lives(&System, &device) {
            if Instant::now() >= deadline {
                // It has a user: a mount that outlives us. `list` drops the record once it is gone.
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        forget(&store, &device);
    }
}

/// Attaches the image at `image`.
///
/// # Errors
/// The image cannot be opened, no transport takes it, the name is taken, or the device cannot be made.
pub fn attach(image: &Path, options: &AttachOptions) -> Result<DeviceInfo, Error> {
    Ok(attach_with(image, options, false)?.0)
}

/// Attaches the image at `image` for as long as the lease lives, and beyond that while somebody uses it.
///
/// # Errors
/// As [`attach`].
pub fn attach_leased(image: &Path, options: &AttachOptions) -> Result<(DeviceInfo, Lease), Error> {
    let options = AttachOptions { autoclear: true, ..options.clone() };
    let (info, held) = attach_with(image, &options, true)?;
    Ok((info, Lease { held }))
}

fn attach_with(
    image: &Path,
    options: &AttachOptions,
    leased: bool,
) -> Result<(DeviceInfo, Option<Held>), Error> {
    if let Some(name) = &options.name {
        state::check_name(name)?;
    }
    let store = Store::open(Runtime::open()?)?;
    let opened = open(&store, image, options)?;
    if options.partitions == Partitions::On && opened.partitions.is_empty() {
        return Err(Error::NoPartitions { image: image.to_owned() });
    }
    let mut plan = planner::plan_for(&opened, options, leased).map_err(|error| error.of_image(image))?;
    if plan.kind == Kind::Dm {
        match crate::dm::attach(&store, &opened, options, &plan, leased) {
            // Whether a device below can be claimed shows only when device-mapper claims it.
            Err(Error::Device(error)) if options.via.kind().is_none() && is_refusal(&error) => {
                plan = planner::plan_without((Kind::Dm, error.to_string()), &opened, options, leased)
                    .map_err(|error| error.of_image(image))?;
            }
            done => return done,
        }
    }
    match plan.kind {
        Kind::Loop => attach_loop(&store, &opened, options, &plan, leased),
        Kind::Ublk => attach_ublk(&store, opened, options, plan, leased),
        kind => Err(Error::Transport {
            image: opened.path,
            kind,
            reason: "it is not in this version of becket".to_owned(),
            mend: None,
        }),
    }
}

/// Whether a transport could not have this image, rather than failed.
fn is_refusal(error: &becket_transport::Error) -> bool {
    use becket_transport::ErrorKind::{InUse, Unsupported};
    matches!(error.kind(), InUse | Unsupported)
}

fn open(store: &Store, image: &Path, options: &AttachOptions) -> Result<Opened, Error> {
    let how = OpenOptions {
        read_only: options.read_only,
        direct_io: options.direct_io,
        offset: options.offset,
        size_limit: options.size_limit,
        block_size: options.block_size,
        shared: options.shared,
        partitions: options.partitions != Partitions::Off,
    };
    let opened = becket_image::open(image, &how).map_err(|error| blame(store, image, error))?;
    // Whoever writes has asked for the claim of the devices below, and readers for the locks; device-mapper has none.
    match becket_transport::dm::writer_over(&opened).filter(|_| opened.read_only && !options.shared) {
        Some(clash) => {
            let path = image.to_owned();
            Err(blame(store, image, becket_image::Error::InUse { path, clash }))
        }
        None => Ok(opened),
    }
}

/// Names the device of ours that holds the lock on an image, where it is one of ours.
fn blame(store: &Store, image: &Path, error: becket_image::Error) -> Error {
    if error.kind() != becket_image::ErrorKind::InUse {
        return Error::Image(error);
    }
    // What cannot be looked up leaves the message as it is.
    match crate::list::holder_of(store, image) {
        Ok(Some(info)) => {
            let source = Box::new(error);
            Error::Attached { image: image.to_owned(), name: info.name, device: info.device, source }
        }
        _ => Error::Image(error),
    }
}

fn attach_loop(
    store: &Store,
    opened: &Opened,
    options: &AttachOptions,
    plan: &Plan,
    leased: bool,
) -> Result<(DeviceInfo, Option<Held>), Error> {
    let claim = claim(store, options.name.as_deref(), opened)?;
    let how = LoopOptions {
        autoclear: leased,
        partitions: options.partitions != Partitions::Off && !opened.partitions.is_empty(),
        direct_io: options.direct_io,
        fixed_size: options.size_limit.is_some(),
    };
    let made = Unfinished(Some(loop_::attach(opened, &how).map_err(Error::Device)?));
    let Some(device) = &made.0 else {
        return Err(Error::Server { what: "lost a device".to_owned(), log: None });
    };
    let claim = match claim {
        Some(claim) => claim,
        None => claim_default(store, &format!("loop{}", device.number), &opened.path)?,
    };
    let mut record = Device {
        info: describe_loop(claim.name(), opened, options, plan, device),
        image: opened.identity,
        server: None,
        worker: None,
        keeper: leased.then(ProcessId::own),
        starting: false,
        mark: 0,
    };
    record.info.autoclear = leased;
    let recorded = record.clone();
    claim.fill(&record)?;
    record.info.warnings.extend(links::make(store.runtime(), &record.info));
    if record != recorded {
        store.update(&recorded, record.clone())?;
    }
    let info = record.info.clone();
    let fd = made.keep();
    let held = fd.filter(|_| leased).map(|fd| Held::Kernel {
        fds: vec![fd],
        store: store.clone(),
        device: Box::new(record),
    });
    Ok((info, held))
}

/// A loop device that is cleared again when something after its making fails.
struct Unfinished(Option<LoopDevice>);

impl Unfinished {
    fn keep(mut self) -> Option<OwnedFd> {
        self.0.take().map(|device| device.fd)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let Some(LoopDevice { number, diskseq, fd, path, .. }) = self.0.take() else { return };
        drop(fd);
        let diskseq = Some(diskseq).filter(|&diskseq| diskseq != 0);
        if let Err(error) = loop_::detach(number, diskseq, Some(Duration::from_secs(1))) {
            log::warn(format_args!("{} stays attached: {error}", path.display()));
        }
    }
}

fn describe_loop(
    name: &str,
    opened: &Opened,
    options: &AttachOptions,
    plan: &Plan,
    device: &LoopDevice,
) -> DeviceInfo {
    let disk = format!("loop{}", device.number);
    let facts = opened.files.first().map(|file| &file.facts);
    let mut warnings = opened.warnings.clone();
    warnings.extend(unasked_read_only(opened.read_only_reason.as_deref(), options));
    warnings.extend(device.warnings.iter().cloned());
    DeviceInfo {
        name: name.to_owned(),
        device: device.path.clone(),
        transport: Kind::Loop,
        reason: plan.reason.clone(),
        size: size_of(&disk).unwrap_or_else(|| opened.map.len()),
        read_only: opened.read_only,
        direct_io: device.direct_io,
        direct_io_reason: match (facts, device.direct_io) {
            (Some(facts), true) => facts.direct_reason.clone(),
            _ if options.direct_io == DirectIo::Off => "switched off".to_owned(),
            (Some(facts), false) if facts.direct.is_none() => facts.direct_reason.clone(),
            _ => "the loop driver refuses it".to_owned(),
        },
        below: None,
        block_size: opened.block_size,
        physical_block_size: sysfs::number(&disk, "queue/physical_block_size").unwrap_or(opened.block_size),
        state: DeviceState::Live,
        image: speakable(&opened.path),
        offset: options.offset,
        size_limit: options.size_limit,
        autoclear: false,
        partitions: partitions_of(&disk, &opened.partitions, options.partitions),
        queues: None,
        depth: None,
        mode: None,
        number: device.number,
        diskseq: Some(device.diskseq).filter(|&diskseq| diskseq != 0),
        server_pid: None,
        worker_pid: None,
        isolated: false,
        recoveries: 0,
        warnings,
    }
}

fn attach_ublk(
    store: &Store,
    opened: Opened,
    options: &AttachOptions,
    plan: Plan,
    leased: bool,
) -> Result<(DeviceInfo, Option<Held>), Error> {
    let below = look_below(&opened, options)?;
    let mut warnings = opened.warnings;
    warnings.extend(unasked_read_only(opened.read_only_reason.as_deref(), options));
    let mut fds = Vec::new();
    let mut files = Vec::new();
    for file in opened.files {
        files.push(FileFacts { facts: file.facts, direct: file.direct.is_some() });
        fds.push(file.buffered);
        fds.extend(file.direct);
    }
    let facts_below = below.as_ref().map(BelowFacts::of);
    if let Some(Below { disk, lease, .. }) = below {
        fds.extend([disk, lease.into()]);
    }
    let mut pipe = None;
    if leased {
        let (theirs, ours) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(Error::io("make a pipe to", "the server".as_ref()))?;
        fds.push(theirs);
        pipe = Some(Held::Server { _pipe: ours });
    }
    let group = options.cgroup.as_deref().filter(|_| options.isolate);
    let cgroup = group.and_then(|group| member_list(group, &mut warnings));
    let with_cgroup = cgroup.is_some();
    fds.extend(cgroup);
    let request = Attach {
        name: options.name.clone(),
        image: speakable(&opened.path),
        offset: options.offset,
        size_limit: options.size_limit,
        map: opened.map,
        files,
        below: facts_below,
        read_only: opened.read_only,
        block_size: opened.block_size,
        add_partitions: options.partitions != Partitions::Off,
        partitions: opened.partitions.into_iter().map(Into::into).collect(),
        queues: options.queues,
        depth: options.depth,
        mode: options.mode,
        merge: options.merge,
        direct_io: options.direct_io != DirectIo::Off,
        autoclear: options.autoclear,
        lease: leased,
        isolate: options.isolate,
        cgroup: with_cgroup,
        reason: plan.reason,
        warnings,
    };
    let reply: OneDevice = client::call(store.runtime(), "Attach", &request, &fds)?;
    Ok((reply.device, pipe))
}

/// The way below the image's file system, where it was asked for and there is one.
fn look_below(opened: &Opened, options: &AttachOptions) -> Result<Option<Below>, Error> {
    if options.below == GoBelow::Off {
        return Ok(None);
    }
    // Who wants the page cache wants it: below there is none. (The descriptor for direct I/O is there all the same, so that
    // the device can be switched to it later.)
    let found = match options.direct_io {
        DirectIo::Off => Err("no direct I/O is wanted, and there is no other way".to_owned()),
        _ => opened.look_below(),
    };
    match found {
        Ok(below) => Ok(Some(below)),
        Err(_) if options.below == GoBelow::Auto => Ok(None),
        Err(reason) => Err(Error::Below { image: opened.path.clone(), reason }),
    }
}

/// The member list of a control group, for the device's worker: what that does is then charged to the group.
fn member_list(group: &Path, warnings: &mut Vec<String>) -> Option<OwnedFd> {
    let path = group.join("cgroup.procs");
    match std::fs::OpenOptions::new().write(true).open(&path) {
        Ok(list) => Some(list.into()),
        Err(error) => {
            warnings.push(format!(
                "its process stays in the server's control group: {}: {error}",
                path.display()
            ));
            None
        }
    }
}

/// What is to be said of a device that is read-only although that was not asked for.
pub(crate) fn unasked_read_only(reason: Option<&str>, options: &AttachOptions) -> Option<String> {
    reason.filter(|_| !options.read_only).map(|reason| format!("attached read-only: {reason}"))
}

/// Takes the name that was asked for.
pub(crate) fn claim(store: &Store, name: Option<&str>, opened: &Opened) -> Result<Option<Claim>, Error> {
    name.map(|name| store.claim(name, &speakable(&opened.path), |device| lives(&System, device))).transpose()
}

/// Takes the kernel's name of a device, or that with a number behind it: somebody may have chosen this
/// very name for another device.
pub(crate) fn claim_default(store: &Store, name: &str, image: &Path) -> Result<Claim, Error> {
    let mut tried = store.claim(name, &speakable(image), |device| lives(&System, device));
    for number in 2..100 {
        match tried {
            Err(Error::NameInUse { .. }) => {
                let next = format!("{name}.{number}");
                tried = store.claim(&next, &speakable(image), |device| lives(&System, device));
            }
            other => return other,
        }
    }
    tried
}

/// Removes what is known of a device that is gone.
pub(crate) fn forget(store: &Store, device: &Device) {
    links::remove(store.runtime(), &device.info);
    if let Err(error) = store.remove(device) {
        log::warn(format_args!("the record of {} stays: {error}", device.info.name));
    }
}

/// The length of a disk by sysfs, in bytes.
pub(crate) fn size_of(disk: &str) -> Option<u64> {
    sysfs::number::<u64>(disk, "size")?.checked_mul(512)
}

/// The kernel's partitions of a disk, with what the image's table says of them.
pub(crate) fn partitions_of(
    disk: &str,
    promised: &[becket_image::Partition],
    wanted: Partitions,
) -> Vec<PartitionInfo> {
    // Without a table nobody has told the kernel to look for partitions.
    if wanted == Partitions::Off || promised.is_empty() {
        return Vec::new();
    }
    partitions_as(node::partitions(disk), promised)
}

/// Partitions that are there, with what the image's table says of them.
pub(crate) fn partitions_as(
    found: Vec<node::KernelPartition>,
    promised: &[becket_image::Partition],
) -> Vec<PartitionInfo> {
    let named = |number| promised.iter().find(|promise| promise.number == number);
    found
        .into_iter()
        .map(|found| PartitionInfo {
            number: found.number,
            device: found.node,
            start: found.start,
            size: found.len,
            label: named(found.number).and_then(|promise| promise.label.clone()),
            uuid: named(found.number).and_then(|promise| promise.uuid.clone()),
        })
        .collect()
}

/// Records and calls are text: a path that is none is shown as well as it can be. Such an image is still
/// found by its inode.
pub(crate) fn speakable(path: &Path) -> PathBuf {
    match path.to_str() {
        Some(_) => path.to_owned(),
        None => path.to_string_lossy().into_owned().into(),
    }
}
