//! `becket mount IMAGE DIR`: attach, mount what mount(8) detects, and leave the device to the mount.
//! Never leaves a device behind when the mount fails.

use super::{
    common,
    fetched::{self, Local},
    luks,
    mount_hints::{Refused, found_on},
    tool::{last_words, said, tool_missing},
};
use crate::{args, failure::Failure, ui::Ui};
use becket_device::{DeviceInfo, path_text};
use becket_image::OpenOptions;
use rustix::thread::{CapabilitySet, capabilities};
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

pub(crate) fn run(ui: &Ui, args: &args::Mount) -> Result<u8, Failure> {
    let dir = args.dir.display();
    match fs::metadata(&args.dir) {
        Ok(meta) if meta.is_dir() => {}
        Ok(_) => {
            return Err(Failure::new("not_a_directory", format!("cannot mount on {dir}: not a directory")));
        }
        Err(error) => {
            return Err(Failure::io(format!("cannot mount on {dir}"), &error).hint(format!("mkdir -p {dir}")));
        }
    }
    allowed(&args.image)?;
    args.device.key_file.iter().try_for_each(|_| luks::ready(&args.image))?;
    // The lease holds the device until the mount does; then it goes with the last of its mounts.
    let asked = common::options(&args.device);
    let (path, options, decoded) =
        fetched::for_device(&args.image, &asked, &args.device.image.store, &args.device.image.trace)?;
    let (info, lease) = becket_device::attach_leased(&path, &options)
        .map_err(|error| Failure::device("attach", becket_fetch::named(args.image.as_os_str()), &error))?;
    ui.explain(&info);
    let OpenOptions { fillers, below, backing_urls, .. } = options.open;
    let local = Local { path, fillers, below, backing_urls, decoded };
    let mounted = pick(&info, args, &local).and_then(|node| {
        let opened = args.device.key_file.as_ref();
        let opened = opened.map(|key| luks::open(&info, &node, key, &args.image)).transpose()?;
        let node = opened.as_ref().map_or(node, luks::Mapping::node);
        let mounted = mount(args, &info, &node);
        // It goes with its last user: the mount, if there is one.
        let closed = opened.iter().try_for_each(|mapping| mapping.close(true));
        mounted.and(closed).map(|()| node)
    });
    drop(lease);
    match mounted {
        Ok(node) => {
            if ui.json {
                let dir = fs::canonicalize(&args.dir).unwrap_or_else(|_| args.dir.clone());
                ui.value(&reported(&info, &node, &dir))?;
            }
            Ok(0)
        }
        Err(failure) => {
            if !common::await_gone(&info, Duration::from_secs(5)) {
                ui.note(format!("warning: {} is still in use", info.device.display()));
            }
            Err(failure)
        }
    }
}

/// What `mount` and `umount` print for programs.
pub(super) fn reported(info: &DeviceInfo, source: &Path, dir: &Path) -> Value {
    json!({ "device": info, "source": path_text(source), "dir": path_text(dir) })
}

/// Which node holds the file system.
fn pick(info: &DeviceInfo, args: &args::Mount, local: &Local<'_>) -> Result<PathBuf, Failure> {
    let (partition, image) = (args.partition, args.image.display());
    let numbers: Vec<String> = info.partitions.iter().map(|partition| partition.number.to_string()).collect();
    let numbers = numbers.join(", ");
    match partition {
        Some(0) => Ok(info.device.clone()),
        None if info.partitions.is_empty() || is_hybrid(args, local) => Ok(info.device.clone()),
        None => {
            Err(Failure::new("partitioned", format!("cannot mount {image}: it has partitions: {numbers}"))
                .hint("choose one with --partition N; 0 is the whole device"))
        }
        Some(number) => info
            .partitions
            .iter()
            .find(|partition| partition.number == number)
            .map(|partition| partition.device.clone())
            .ok_or_else(|| {
                let failure = Failure::new(
                    "no_partition",
                    format!("cannot mount {image}: it has no partition {number}"),
                );
                match info.partitions.as_slice() {
                    [] => failure.hint("it has no partitions: omit --partition"),
                    _ => failure.hint(format!("it has these: {numbers}")),
                }
            }),
    }
}

/// Whether the image is a bootable ISO whose partitions are there for firmware: people mean the ISO as a
/// whole.
fn is_hybrid(args: &args::Mount, local: &Local<'_>) -> bool {
    let device = &args.device;
    let walk = || {
        let open = common::options(device).open;
        becket_image::look_by(
            &local.path,
            &OpenOptions { fillers: local.fillers.clone(), backing_urls: local.backing_urls.clone(), ..open },
        )
    };
    device.image.offset == 0 && device.image.cow.is_none() && walk().is_ok_and(|walk| walk.is_hybrid())
}

fn mount(args: &args::Mount, info: &DeviceInfo, node: &Path) -> Result<(), Failure> {
    let mut command = Command::new("mount");
    command.arg("-t").arg(&args.fs_type);
    if info.spec.read_only {
        command.arg("-r");
    }
    if let Some(options) = &args.options {
        command.arg("-o").arg(options);
    }
    command.arg("--").arg(node).arg(&args.dir);
    let what = format!("cannot mount {} on {}", args.image.display(), args.dir.display());
    let output = said(&mut command).map_err(|error| tool_missing(&what, "mount", &error))?;
    if output.status.success() {
        return Ok(());
    }
    let words = last_words(&output, "mount");
    // mount(8) names the directory first, as an absolute path.
    let said =
        words.split_once(": ").filter(|(first, _)| first.starts_with('/')).map_or(&*words, |(_, rest)| rest);
    let found = found_on(node);
    let (image, dir) = (args.image.display().to_string(), args.dir.display().to_string());
    let (fs_type, options) = (args.fs_type.as_str(), args.options.is_some());
    let refused = Refused { said, found: found.as_deref(), image: &image, dir: &dir, fs_type, options };
    Err(Failure::new("mount", format!("{what}: {}", refused.reason())).hint(refused.hint()))
}

/// Only root mounts block devices; a user learns that before anything is attached.
fn allowed(image: &Path) -> Result<(), Failure> {
    let admin = capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN));
    if admin {
        return Ok(());
    }
    let image = image.display();
    Err(Failure::new("permission", format!("cannot mount {image}: mounting needs root (CAP_SYS_ADMIN)"))
        .hint(format!(
            "run it as root: sudo becket mount ...; to look inside without root: becket ls {image}"
        )))
}
