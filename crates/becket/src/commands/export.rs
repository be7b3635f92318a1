//! `becket export IMAGE...`: images behind a socket, one URI a line in the order given.
//! Never takes an address from a program that listens there, nor an export back that others may use already.

use super::{
    common, fetched,
    interrupts::{self, Interrupts, Watched},
    run,
};
use crate::{
    args::{self, ImageOptions},
    failure::Failure,
    ui::Ui,
};
use becket_device::{AttachOptions, DetachOptions, DeviceInfo, DoorOptions, Doorway, Export};
use serde_json::json;
use std::{collections::HashSet, path::Path, time::Duration};

/// How long an export that is taken back may take to go.
const GONE_WITHIN: Duration = Duration::from_secs(10);

pub(crate) fn run(ui: &Ui, args: &args::Export) -> Result<u8, Failure> {
    check(args)?;
    if !args.command.is_empty() {
        return run_with(ui, args);
    }
    // As with `attach`, one alone is ended by a signal.
    let watched = (args.images.len() > 1).then(|| Interrupts::block()?.watch(*ui)).transpose()?;
    let interrupted = || match watched.as_ref().and_then(Watched::came) {
        Some(signal) => {
            let message = "the export was interrupted: what was exported is detached again";
            Err(interrupts::failure(message, signal))
        }
        None => Ok(()),
    };
    let doorway = doorway(args)?;
    let options = common::options(&args.device());
    let mut exports: Vec<DeviceInfo> = Vec::new();
    for image in &args.images {
        let name = match &args.name {
            Some(name) => name.clone(),
            None => name_of(image),
        };
        let offered = offer(image, &options, &args.image, &doorway, &name);
        match offered.and_then(|info| {
            exports.push(info);
            interrupted()
        }) {
            Ok(()) => {}
            Err(failure) => {
                // All or none: an address with half of its exports is no use.
                take_back(ui, &exports);
                return Err(failure);
            }
        }
    }
    exports.iter().for_each(|info| ui.explain(info));
    let printed = match ui.json {
        true => ui.value(&json!({ "devices": exports, "errors": [] })),
        false => exports.iter().try_for_each(|info| ui.line(info.device.display().to_string())),
    };
    printed.map(|()| 0).map_err(|failure| common::unprinted(failure, &exports))
}

/// Exports an image exactly as long as a command runs.
fn run_with(ui: &Ui, args: &args::Export) -> Result<u8, Failure> {
    let [image] = args.images.as_slice() else {
        return Err(Failure::usage("with a command exactly one image can be exported: it gets one URI")
            .hint(
                "name one image; or export all without a command, and detach them when they are not needed",
            ));
    };
    // Before there are other threads: see there.
    let signals = run::signals()?;
    let doorway = doorway(args)?;
    let name = args.name.clone().unwrap_or_else(|| name_of(image));
    let asked = common::options(&args.device());
    let (path, options, _decoded) = fetched::for_device(image, &asked, &args.image.store, &args.image.trace)?;
    let (info, lease) = becket_device::export_leased(&path, &options, &doorway, &name)
        .map_err(|error| Failure::device("export", fetched::named(image), &error))?;
    ui.explain(&info);
    let status = run::guarded(ui, &info, &args.command, &signals);
    // What the command has left of clients ends with it.
    let options = DetachOptions { force: true, timeout: GONE_WITHIN, ..DetachOptions::default() };
    match becket_device::detach(&info.name, &options) {
        Err(error) if error.kind() != becket_device::ErrorKind::NotFound => {
            ui.failure(&Failure::device("detach", info.device.display(), &error));
        }
        Err(_) => {}
        Ok(gone) => _ = ui.unsaved(&gone),
    }
    drop(lease);
    status
}

/// Exports one image at a doorway of its own, as a line of the machine's table wants it.
pub(super) fn at(args: &args::Export, image: &Path, options: &AttachOptions) -> Result<DeviceInfo, Failure> {
    let name = args.name.clone().unwrap_or_else(|| name_of(image));
    offer(image, options, &args.image, &doorway(args)?, &name)
}

fn offer(
    image: &Path,
    options: &AttachOptions,
    asked: &ImageOptions,
    doorway: &Doorway,
    name: &str,
) -> Result<DeviceInfo, Failure> {
    let (path, options, _decoded) = fetched::for_device(image, options, &asked.store, &asked.trace)?;
    becket_device::export(&path, &options, doorway, name)
        .map_err(|error| Failure::device("export", fetched::named(image), &error))
}

/// What the parser cannot see.
fn check(args: &args::Export) -> Result<(), Failure> {
    let many = args.images.len() > 1;
    let alone = |what: &str, why: &str| Err(Failure::usage(format!("one {what} {why}")));
    if many && args.name.is_some() {
        return alone("--name", "cannot name several exports");
    }
    if many && args.image.cow.is_some() {
        return alone("--cow", "cannot be the overlay of several images");
    }
    if many && args.vhost_user.is_some() {
        return alone("--vhost-user socket", "is the socket of one disk");
    }
    if let Some(name) = &args.name {
        Export::check_name(name).map_err(|error| Failure::usage(format!("--name: {error}")))?;
    }
    let mut names = HashSet::new();
    let twice = args.images.iter().map(|image| name_of(image)).find(|name| !names.insert(name.clone()));
    match twice.filter(|_| many) {
        Some(name) => Err(Failure::usage(format!("two of the images are called {name}"))
            .hint("clients tell exports at one address apart by name: use another address for one of them")),
        None => Ok(()),
    }
}

fn doorway(args: &args::Export) -> Result<Doorway, Failure> {
    let made = match (&args.nbd, &args.vhost_user) {
        (Some(address), _) => Doorway::nbd(
            address,
            &DoorOptions {
                max_connections: args.max_connections,
                tls: args.tls.clone(),
                verify: args.tls_verify,
                allow: args.tls_allow.clone(),
                insecure: args.insecure,
            },
        ),
        (None, Some(address)) => Doorway::vhost_user(address),
        (None, None) => return Err(Failure::usage("an export needs --nbd or --vhost-user")),
    };
    made.map_err(|error| Failure::device("listen at", args.address(), &error))
}

/// What clients call an image that was given no name.
fn name_of(image: &Path) -> String {
    // The mark of a query that is not shown.
    let named = fetched::named(image).replace("?...", "");
    let image = Path::new(&named);
    image.file_name().unwrap_or(image.as_os_str()).to_string_lossy().into_owned()
}

/// Detaches what was exported, the last one first.
fn take_back(ui: &Ui, exports: &[DeviceInfo]) {
    let options = DetachOptions { timeout: GONE_WITHIN, ..DetachOptions::default() };
    for info in exports.iter().rev() {
        match becket_device::detach(&info.name, &options) {
            Ok(gone) => _ = ui.unsaved(&gone),
            Err(error) if error.kind() == becket_device::ErrorKind::NotFound => {}
            Err(error) => ui.failure(&Failure::device("detach", info.device.display(), &error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_is_called_like_its_file() {
        assert_eq!(name_of(Path::new("/srv/a b.img")), "a b.img");
        assert_eq!(name_of(Path::new("disk.img/p1")), "p1");
        assert_eq!(name_of(Path::new("/")), "/");
        assert_eq!(name_of(Path::new("https://host/a/disk.img?signature=x")), "disk.img");
    }
}
