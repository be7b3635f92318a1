//! What several commands need.
//! Knows no command: what is done to a target, and how it is reported, comes from there.

use super::fetched::{self, Local};
use crate::{
    args::{DeviceOptions, Export, LookOptions, OriginOptions, Toggle, TraceOptions, Via},
    failure::{BROKEN_PIPE, Failure},
    ui::Ui,
};
use becket_device::{AttachOptions, DeviceInfo, DeviceState, Partitions, Spec};
use becket_image::{Format, OpenOptions, Walk};
use serde::Serialize;
use serde_json::json;
use std::{
    ffi::{OsStr, OsString},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

/// One image to attach.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) image: PathBuf,
    pub(super) options: AttachOptions,
    /// How it is reached, if it is not on this host.
    pub(super) store: OriginOptions,
    /// What of that is noted, or known.
    pub(super) trace: TraceOptions,
    /// How it is exported, when it is not a block device.
    pub(super) export: Option<Box<Export>>,
    /// The key of the LUKS volume on it, which is opened.
    pub(super) key_file: Option<PathBuf>,
    /// Where it was asked for, when not on the command line.
    pub(super) origin: Option<String>,
}

/// A name that leads to no image.
#[derive(Debug)]
pub(super) struct Missing {
    pub(super) name: PathBuf,
    pub(super) failure: Failure,
}

/// One image to attach, as it was asked for.
pub(super) type Asked = Result<Job, Missing>;

/// What an error about it names.
pub(super) fn shown(asked: &Asked) -> &Path {
    match asked {
        Ok(job) => &job.image,
        Err(missing) => &missing.name,
    }
}

/// What was asked for, in the words of the device room.
pub(super) fn options(asked: &DeviceOptions) -> AttachOptions {
    AttachOptions {
        open: OpenOptions {
            read_only: asked.read_only,
            direct_io: asked.image.direct_io.into(),
            offset: asked.image.offset,
            size_limit: asked.image.size_limit,
            block_size: asked.image.block_size,
            shared: asked.image.shared,
            format: asked.image.format,
            backing_dirs: asked.image.backing_dirs.clone(),
            drop_bitmaps: asked.image.drop_bitmaps,
            cow: asked.image.cow.clone(),
            no_limits: asked.image.limits.no_limits,
            patience: asked.image.store.objects.origin_timeout,
            ..OpenOptions::default()
        },
        spec: Spec {
            queues: asked.queues,
            depth: asked.image.depth,
            mode: asked.mode,
            faults: asked.image.fault.clone(),
            origin_timeout: asked.image.store.objects.origin_timeout.map(|time| time.as_secs().max(1)),
            autoclear: asked.autoclear,
            ..Spec::default()
        },
        via: match asked.via {
            Via::Auto => becket_device::Via::Auto,
            Via::Ublk => becket_device::Via::Ublk,
            Via::Loop => becket_device::Via::Loop,
            Via::Dm => becket_device::Via::Dm,
            Via::Fuse => becket_device::Via::Fuse,
        },
        cut: false,
        name: asked.name.clone(),
        partitions: match asked.partitions {
            Toggle::Auto => Partitions::Auto,
            Toggle::On => Partitions::On,
            Toggle::Off => Partitions::Off,
        },
        isolate: asked.isolate,
        cache_size: asked.image.cache_size,
        fill: asked.fill,
        cgroup: if asked.isolate { crate::cgroup::own() } else { None },
    }
}

/// Does the same to each of several targets, even if some of them fail, and reports every result: `show`
/// prints for people and is passed whether the result is the first. Returns the exit status.
pub(super) fn each<T: Serialize>(
    ui: &Ui,
    verb: &str,
    targets: &[OsString],
    act: impl Fn(&OsString) -> Result<T, becket_device::Error>,
    show: impl Fn(&T, bool) -> Result<(), Failure>,
) -> Result<u8, Failure> {
    let mut devices = Vec::new();
    let mut errors = Vec::new();
    for target in targets {
        match act(target) {
            Ok(reported) => {
                if !ui.json {
                    show(&reported, devices.is_empty())?;
                }
                devices.push(reported);
            }
            Err(error) => {
                let failure = Failure::device(verb, target.display(), &error);
                ui.failure(&failure);
                errors.push(failure.to_json_of(target));
            }
        }
    }
    if ui.json {
        ui.value(&json!({ "devices": devices, "errors": errors }))?;
    }
    Ok(u8::from(!errors.is_empty()))
}

/// Why the results of making these devices could not be printed, and how to be rid of the devices, which are
/// there all the same: nothing else would name them.
pub(super) fn unprinted<'a>(failure: Failure, devices: impl IntoIterator<Item = &'a DeviceInfo>) -> Failure {
    let names = |info: &DeviceInfo| (format!("{} ({})", info.name, info.device.display()), info.name.clone());
    let (shown, named): (Vec<_>, Vec<_>) = devices.into_iter().map(names).unzip();
    if named.is_empty() {
        return failure;
    }
    let failure = match failure.kind.as_str() {
        // Otherwise that is the reader's own affair.
        BROKEN_PIPE => Failure::new("io", "cannot write to standard output: broken pipe"),
        _ => failure,
    };
    let (shown, named) = (shown.join(", "), named.join(" "));
    failure.hint(format!("attached all the same: {shown}; to undo that: becket detach {named}"))
}

/// How long a change may take until it is said what it waits for.
const QUIET: Duration = Duration::from_secs(1);

/// Says `what` a change of a device does, if that takes long. The change calls what it is passed when it says
/// so itself.
pub(super) fn waiting<T>(ui: &Ui, target: &OsStr, what: &str, change: impl FnOnce(&dyn Fn()) -> T) -> T {
    let (goes_on, heard) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            if heard.recv_timeout(QUIET) == Err(RecvTimeoutError::Timeout) {
                ui.note(format!("{}: {what}", target.display()));
            }
        });
        change(&move || {
            // It may have said it already.
            let _ = goes_on.send(());
        })
    })
}

/// Walks a path through images, for inspection, by a format that the command chooses.
pub(super) fn look_at(
    local: &Local<'_>,
    asked: &LookOptions,
    format: Format,
) -> Result<Walk, becket_image::Error> {
    let options = OpenOptions {
        fillers: local.fillers.clone(),
        backing_urls: local.backing_urls.clone(),
        ..fetched::open_options(asked, format)
    };
    becket_image::look_by(&local.path, &options)
}

/// An error of becket-image, reported as the failure to `verb` (like `list`) the image at `path`.
pub(super) fn image_failure(verb: &str, path: &Path, error: becket_image::Error) -> Failure {
    let error = becket_device::blamed(path, error);
    let failure = Failure::device(verb, becket_fetch::named(path.as_os_str()), &error);
    // No device is attached here. Only a copy can be made beside other users.
    let beside = if verb == "copy" { "; or copy with --shared, even if it changes meanwhile" } else { "" };
    let end = match &error {
        becket_device::Error::Attached { name, .. } => format!("becket detach {name}"),
        becket_device::Error::Image(becket_image::Error::UsedByKernel { end, .. }) => end.clone(),
        becket_device::Error::Image(becket_image::Error::InUse { .. }) => "see `becket list`".to_owned(),
        _ => return failure,
    };
    failure.hint(format!("end that use first: {end}{beside}"))
}

/// This very program again, as a hidden subcommand of itself; also when its file was replaced meanwhile.
pub(super) fn ourselves(subcommand: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("becket").arg(subcommand);
    command
}

/// How long a server may take to close the image of an unused device. It gives up sooner.
const CLOSED_WITHIN: Duration = Duration::from_secs(30);

/// Whether the device, this very use of it, is gone within `patience`, and its image is free for the next
/// program. A device that is on its way out is waited for longer.
pub(super) fn await_gone(info: &DeviceInfo, patience: Duration) -> bool {
    let begun = Instant::now();
    loop {
        let leaving = match becket_device::list() {
            Ok(devices) => match devices.into_iter().find(|device| same(device, info)) {
                Some(device) => device.state == DeviceState::Detaching && !device.device.exists(),
                None => return true,
            },
            // When they cannot be listed, waiting for them shows nothing.
            Err(_) => return true,
        };
        if begun.elapsed() >= if leaving { CLOSED_WITHIN.max(patience) } else { patience } {
            return false;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Numbers and names are used again; the sequence number is not.
fn same(one: &DeviceInfo, other: &DeviceInfo) -> bool {
    one.device == other.device && one.diskseq == other.diskseq
}

impl From<Toggle> for becket_image::DirectIo {
    fn from(toggle: Toggle) -> Self {
        match toggle {
            Toggle::Auto => becket_image::DirectIo::Auto,
            Toggle::On => becket_image::DirectIo::On,
            Toggle::Off => becket_image::DirectIo::Off,
        }
    }
}
