//! From an image to a device: opened, planned, made, recorded, linked.
//! Whatever fails on the way, nothing stays behind: no device, no name, no link.

use serde::de::IgnoredAny;
use std::os::fd::OwnedFd;
use std::path::Path;

use becket_image::{OpenOptions, Opened, Overlay, Place, Source, SourceFacts, Tail, syncs};
use becket_transport::Kind;

use crate::client::doorway::Doorway;
use crate::client::holder::blame;
use crate::client::kernel_made;
use crate::client::lease::{Held, Lease};
use crate::client::{kernel_drivers, planner, unfinished, user_devices};
use crate::contract::messages::{Attach, OneDevice};
use crate::contract::sealed;
use crate::contract::spec::{Backing, facts_of};
use crate::contract::table::{self, Encoding};
use crate::contract::{AttachOptions, DeviceInfo, Error, ErrorKind, Export, Partitions, Plan};
use crate::control::client;
use crate::control::health::Concerns;
use crate::record::runtime::Runtime;
use crate::record::store::{self, Store};
use crate::system::describe::unasked_read_only;

/// The most extents of a map that is sent inside a message: varlink's reader and writer handle long ones
/// slowly.
const MAP_IN_MESSAGE: usize = 256;

/// Attaches the image at `image`.
///
/// # Errors
/// The image cannot be opened, no transport takes it, the name is taken, or the device cannot be made.
pub fn attach(image: &Path, options: &AttachOptions) -> Result<DeviceInfo, Error> {
    Ok(attach_with(image, options, false, None)?.0)
}

/// Exports the image at `image` as `name`, where the doorway listens. Clients can connect when this returns.
///
/// # Errors
/// As [`attach`]; and when another export has that name at the same address.
pub fn export(
    image: &Path,
    options: &AttachOptions,
    doorway: &Doorway,
    name: &str,
) -> Result<DeviceInfo, Error> {
    Ok(export_with(image, options, doorway, name, false)?.0)
}

/// The same for as long as the lease lives, and beyond that while it has clients.
///
/// # Errors
/// As [`export`].
pub fn export_leased(
    image: &Path,
    options: &AttachOptions,
    doorway: &Doorway,
    name: &str,
) -> Result<(DeviceInfo, Lease), Error> {
    let (info, held) = export_with(image, options, doorway, name, true)?;
    Ok((info, Lease { held }))
}

fn export_with(
    image: &Path,
    options: &AttachOptions,
    doorway: &Doorway,
    name: &str,
    leased: bool,
) -> Result<(DeviceInfo, Option<Held>), Error> {
    let mut options = AttachOptions { isolate: true, partitions: Partitions::Off, ..options.clone() };
    let (name, smallest) = (name.to_owned(), options.open.block_size);
    options.spec.export = Some(Export { name, smallest, ..doorway.export.clone() });
    options.spec.queues = options.spec.queues.or(doorway.queues());
    attach_with(image, &options, leased, Some(doorway))
}

/// Attaches the image at `image` for as long as the lease lives, and beyond that while it is in use.
///
/// # Errors
/// As [`attach`].
pub fn attach_leased(image: &Path, options: &AttachOptions) -> Result<(DeviceInfo, Lease), Error> {
    let mut options = options.clone();
    options.spec.autoclear = true;
    let (info, held) = attach_with(image, &options, true, None)?;
    Ok((info, Lease { held }))
}

fn attach_with(
    image: &Path,
    options: &AttachOptions,
    leased: bool,
    doorway: Option<&Doorway>,
) -> Result<(DeviceInfo, Option<Held>), Error> {
    if let Some(name) = &options.name {
        store::check_name(name)?;
    }
    let store = Store::open(Runtime::open()?)?;
    let options = &mut options.clone();
    let mut opened = prepare(&store, image, options, leased, doorway.is_some())?;
    if let Some(export) = &mut options.spec.export {
        // A server that takes whole blocks only gets the requests of clients as they are.
        export.smallest =
            export.smallest.max(Source::smallest_unit(&opened.sources).filter(|unit| *unit > 1));
    }
    if let Some(doorway) = doorway {
        let reason = format!("it is exported at {}", doorway.export.address);
        let plan = Plan { kind: doorway.kind, reason, rejected: Vec::new() };
        return attach_served(&store, opened, options, plan, leased, Some(doorway));
    }
    let mut plan = planner::plan_for(&opened, options, leased).map_err(|error| error.of_image(image))?;
    if !plan.kind.is_served() {
        keep_overlay(&mut opened.overlay);
    }
    while let Some(driver) = kernel_drivers::of(plan.kind) {
        let may_refuse = driver.may_refuse() && options.via.kind().is_none();
        match kernel_made::attach(&store, &opened, options, &plan, leased, driver) {
            Err(Error::Device(error)) if may_refuse && is_refusal(&error) => {
                plan = planner::plan_without((plan.kind, error.to_string()), &opened, options, leased)
                    .map_err(|error| error.of_image(image))?;
            }
            done => return done,
        }
    }
    attach_served(&store, opened, options, plan, leased, None)
}

/// Faults are injected into operations on files, and an NBD server has none that becket makes.
fn no_faults(image: &Path) -> Error {
    Error::Failed {
        kind: ErrorKind::InvalidOption,
        message: format!(
            "no faults can be injected here: {} is on an NBD server, which does the operations itself",
            image.display()
        ),
        hint: Some("inject them there, for example by nbdkit --filter=error or --filter=delay".to_owned()),
    }
}

/// One process reaches the server of a device, and knows one.
fn several_servers(image: &Path) -> Error {
    Error::Failed {
        kind: ErrorKind::Unsupported,
        message: format!(
            "{}: its bytes come from several servers or compressed files, and a device has one",
            image.display()
        ),
        hint: Some("copy it first: becket copy IMAGE disk.qcow2 with the same options".to_owned()),
    }
}

/// Opens an image as the device wants it that is to be made of it, and completes the options by what it is.
pub(crate) fn prepare(
    store: &Store,
    image: &Path,
    options: &mut AttachOptions,
    leased: bool,
    exported: bool,
) -> Result<Opened, Error> {
    // Only a server can show zeroes behind the end of a file. The locks of a reader who opens again are a
    // reader's.
    let pad = !options.cut && options.via.kind().is_none_or(Kind::is_served);
    let tail = if pad { Tail::Pad } else { Tail::Cut };
    let mut how =
        OpenOptions { tail, partitions: options.partitions != Partitions::Off, ..options.open.clone() };
    let filled = |how: &OpenOptions| {
        let mut opened = open(store, image, how)?;
        opened.fill(&how.fillers, options.fill).map_err(Error::io("share what is fetched of", image))?;
        Ok::<_, Error>(opened)
    };
    let mut opened = filled(&how)?;
    let elsewhere = |source: &&Source| source.file().is_none();
    if opened.sources.iter().filter(elsewhere).count() > 1 {
        return Err(several_servers(image));
    }
    if options.spec.faults.is_some() && opened.sources.iter().any(|source| source.link().is_some()) {
        return Err(no_faults(image));
    }
    let padded =
        pad && opened.read_only && opened.map.extents().last().is_some_and(|last| last.place == Place::Zero);
    if padded && !exported && planner::plan_for(&opened, options, leased).is_err() {
        how.tail = Tail::Cut;
        opened = filled(&how)?;
    }
    // The length of an image inside another is not the file's, so it never follows that.
    if opened.nested {
        options.open.size_limit = Some(opened.map.len());
    }
    if options.partitions == Partitions::On && opened.partitions.is_empty() {
        return Err(Error::NoPartitions { image: image.to_owned() });
    }
    Ok(opened)
}

/// Whether a transport could not have this image, rather than failed.
fn is_refusal(error: &becket_transport::Error) -> bool {
    use becket_transport::ErrorKind::{InUse, Unsupported};
    matches!(error.kind(), InUse | Unsupported)
}

/// Opens an image as far as the planner has to know it; who serves it completes that.
pub(crate) fn open(store: &Store, image: &Path, how: &OpenOptions) -> Result<Opened, Error> {
    let again = |error: becket_image::Error| match error.kind() {
        // Perhaps by what a command has left that was killed.
        becket_image::ErrorKind::InUse if unfinished::clear(store) => becket_image::open_to_serve(image, how),
        _ => Err(error),
    };
    let opened = becket_image::open_to_serve(image, how).or_else(again);
    let opened = opened.map_err(|error| blame(store, image, how, error))?;
    // A writer has asked for the claim of the devices below, and readers for the locks; device-mapper has
    // none.
    match becket_transport::dm::writer_over(&opened).filter(|_| opened.read_only && !how.shared) {
        Some(clash) => {
            let path = image.to_owned();
            Err(blame(store, image, how, becket_image::Error::InUse { path, clash, readers: false }))
        }
        None => Ok(opened),
    }
}

fn attach_served(
    store: &Store,
    mut opened: Opened,
    options: &AttachOptions,
    plan: Plan,
    leased: bool,
    doorway: Option<&Doorway>,
) -> Result<(DeviceInfo, Option<Held>), Error> {
    opened.keep_outer();
    opened.complete(options.open.direct_io);
    if opened.grows {
        let path = opened.overlay.as_ref().map_or(&opened.path, |overlay| &overlay.path);
        syncs::open(&mut opened.sources).map_err(Error::io("open once more", path))?;
    }
    let spec = options.spec_of(&opened, &plan);
    let (add_partitions, without) =
        user_devices::partitions(plan.kind, options, !opened.partitions.is_empty())?;
    let mut warnings = opened.warnings;
    warnings.extend(without);
    warnings.extend(unasked_read_only(opened.read_only_reason.as_deref(), options));
    let files = facts_of(&opened.sources);
    let mut fds: Vec<OwnedFd> = opened.sources.into_iter().flat_map(Source::into_descriptors).collect();
    let table = table::pack(&opened.encoded).map_err(|error| match error.kind() {
        std::io::ErrorKind::FileTooLarge => Error::Transport {
            image: opened.path.clone(),
            kind: plan.kind,
            reason: format!("the table of its compressed blocks exceeds {} MiB", sealed::LARGEST >> 20),
            fix: Some("unpack it, or compress it in larger blocks".to_owned()),
        },
        _ => Error::io("make a table of encoded blocks for", "the server".as_ref())(error),
    })?;
    let encoded = table.as_ref().map(|_| Encoding { cache_size: options.cache_size, direct_io: false });
    fds.extend(table);
    let mut map = opened.map;
    let map_aside = map.extents().len() > MAP_IN_MESSAGE;
    if map_aside {
        let aside = sealed::write_json("becket-map", &std::mem::take(&mut map));
        fds.push(aside.map_err(Error::io("write the map of the image for", "the server".as_ref()))?);
    }
    let mut pipe = None;
    if leased {
        let (theirs, ours) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(Error::io("make a pipe to", "the server".as_ref()))?;
        fds.push(theirs);
        pipe = Some(Held::Server { _pipe: ours });
    }
    keep_overlay(&mut opened.overlay);
    let group = options.cgroup.as_deref().filter(|_| options.isolate);
    let cgroup = group.and_then(|group| member_list(group, &mut warnings));
    let talkative = files.iter().any(SourceFacts::is_talkative);
    let backing = Backing {
        files,
        encoded,
        grows: opened.grows,
        direct_io: options.open.direct_io,
        lease: leased,
        cgroup: cgroup.is_some(),
        ..Backing::default()
    };
    fds.extend(cgroup);
    if let Some(doorway) = doorway {
        fds.extend(
            doorway.descriptors().map_err(Error::io("duplicate the socket for", "the server".as_ref()))?,
        );
    }
    let request = Attach {
        name: options.name.clone(),
        spec,
        format: options.open.format.chosen(),
        map,
        map_aside,
        backing: backing.said(),
        below: IgnoredAny,
        add_partitions,
        partitions: opened.partitions.into_iter().map(Into::into).collect(),
        // No worker that talks to a stranger has an image of others.
        isolate: options.isolate || talkative,
        alone: (!options.open.shared).then_some(true),
        transport: plan.kind,
        warnings,
    };
    // A device with its own worker gets a worker that was just started.
    let concerns = if options.isolate { Concerns::Server } else { Concerns::Shared };
    let reply: OneDevice = client::call(store.runtime(), "Attach", &request, &fds, concerns)?;
    if let Some(doorway) = doorway {
        doorway.keep();
    }
    Ok((reply.device, pipe))
}

/// From here on the overlay may be written to, even if this command fails.
fn keep_overlay(overlay: &mut Option<Overlay>) {
    if let Some(overlay) = overlay {
        overlay.keep();
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
