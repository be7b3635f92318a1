//! `becket umount DIR`: unmount, and detach the device that was under it.
//! Never unmounts what is not becket's, and never detaches a device that another mount still needs.

use super::{
    common, luks,
    mount::reported,
    tool::{last_words, said, tool_missing},
};
use crate::{
    args,
    failure::Failure,
    mounts::{self, Mount},
    ui::Ui,
};
use becket_device::{DetachOptions, DeviceInfo, ErrorKind};
use rustix::fs::{major, minor};
use serde_json::json;
use std::{
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::Path,
    process::Command,
    time::Duration,
};

/// How long a device that goes by itself is given before it is detached.
const BY_ITSELF: Duration = Duration::from_millis(500);

pub(crate) fn run(ui: &Ui, args: &args::Umount) -> Result<u8, Failure> {
    let dir = args.dir.display();
    let what = format!("cannot unmount {dir}");
    let point = fs::canonicalize(&args.dir)
        .map_err(|error| Failure::io(&what, &error).hint("`findmnt` shows what is mounted where"))?;
    let mount = mounts::at(&point)
        .map_err(|error| Failure::io("cannot read the mounts", &error))?
        .ok_or_else(|| {
            Failure::new("not_mounted", format!("{what}: nothing is mounted there"))
                .hint("`findmnt` shows what is mounted where")
        })?;
    let devices = becket_device::list().map_err(|error| Failure::device("list", "the devices", &error))?;
    let info = devices.into_iter().find(|info| is_of(&mount, info)).ok_or_else(|| {
        let source = mount.source.display();
        Failure::new("not_ours", format!("{what}: it is {source}, which is not a device of becket"))
            .hint(format!("umount {dir}"))
    })?;

    let output = said(Command::new("umount").arg("--").arg(&point))
        .map_err(|error| tool_missing(&what, "umount", &error))?;
    if !output.status.success() {
        return Err(Failure::new("umount", format!("{what}: {}", last_words(&output, "umount")))
            .hint(format!("see what uses it: fuser -vm {dir}")));
    }
    let still = mounts::all().unwrap_or_default().into_iter().find(|mount| is_of(mount, &info));
    let unsaved = match &still {
        Some(mount) => {
            ui.note(format!(
                "{} stays attached: it is also mounted on {}",
                info.device.display(),
                mount.point.display()
            ));
            None
        }
        None => detach(&info, args.timeout)?.filter(|gone| ui.unsaved(gone)),
    };
    if ui.json {
        let mut value = reported(&info, &mount.source, &point);
        value["detached"] = json!(still.is_none());
        if let Some(gone) = &unsaved {
            value["unsaved"] = json!(gone.unsaved);
        }
        ui.value(&value)?;
    }
    Ok(u8::from(unsaved.is_some()))
}

/// The device as it was at its end, where nobody else has detached it.
fn detach(info: &DeviceInfo, timeout: Duration) -> Result<Option<DeviceInfo>, Failure> {
    // A server detaches it, too, but says to us alone what may be lost with it.
    if info.server_pid.is_none() && info.spec.autoclear && common::await_gone(info, BY_ITSELF) {
        return Ok(None);
    }
    match luks::detach(Path::new(&info.name), &DetachOptions { timeout, ..DetachOptions::default() }) {
        Ok(gone) => Ok(Some(gone)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Failure::device("detach", info.device.display(), &error)),
    }
}

/// Whether a mount is of the device, of one of its partitions, or of what becket has opened on one of them.
fn is_of(mount: &Mount, info: &DeviceInfo) -> bool {
    // Its node may have gone with the promise to close it.
    let opened = luks::mapping(info).and_then(|mapping| mapping.number);
    let nodes = || {
        let partitions = info.partitions.iter().map(|partition| &partition.device);
        std::iter::once(&info.device).chain(partitions)
    };
    // btrfs and its like show a number that belongs to no device; their source is the device.
    let dev = if mount.dev.0 == 0 { number(&mount.source) } else { Some(mount.dev) };
    dev.is_some() && (opened == dev || nodes().any(|node| number(node) == dev))
}

fn number(node: &Path) -> Option<(u32, u32)> {
    let meta = fs::metadata(node).ok().filter(|meta| meta.file_type().is_block_device())?;
    Some((major(meta.rdev()), minor(meta.rdev())))
}
