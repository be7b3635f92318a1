//! `becket mount IMAGE DIR`: attach, mount what mount(8) detects, and leave the device to the mount.
//! Never leaves a device behind when the mount fails.

use super::common;
use crate::{args, failure::Failure, ui::Ui};
use becket_device::DeviceInfo;
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::Duration,
};

pub(crate) fn run(ui: &Ui, args: &args::Mount) -> Result<u8, Failure> {
    let (image, dir) = (args.image.display(), args.dir.display());
    match fs::metadata(&args.dir) {
        Ok(meta) if meta.is_dir() => {}
        Ok(_) => {
            return Err(Failure::new("not_a_directory", format!("cannot mount on {dir}: not a directory")));
        }
        Err(error) => {
            return Err(Failure::io(format!("cannot mount on {dir}"), &error).hint(format!("mkdir -p {dir}")));
        }
    }
    // The lease holds the device until the mount does; then it goes with the last of its mounts.
    let (info, lease) = becket_device::attach_leased(&args.image, &common::options(&args.device))
        .map_err(|error| Failure::device("attach", &image, &error))?;
    ui.explain(&info);
    let mounted = pick(&info, args.partition, &args.image).and_then(|node| {
        mount(args, &info, &node)?;
        Ok(node)
    });
    drop(lease);
    match mounted {
        Ok(node) => {
            if ui.json {
                ui.value(&json!({ "device": info, "source": node, "dir": args.dir }))?;
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

/// Which node holds the file system.
fn pick(info: &DeviceInfo, partition: Option<u32>, image: &Path) -> Result<PathBuf, Failure> {
    let image = image.display();
    let numbers: Vec<String> = info.partitions.iter().map(|partition| partition.number.to_string()).collect();
    let numbers = numbers.join(", ");
    match partition {
        Some(0) => Ok(info.device.clone()),
        None if info.partitions.is_empty() => Ok(info.device.clone()),
        None => {
            Err(Failure::new("partitioned", format!("cannot mount {image}: it has partitions: {numbers}"))
                .hint("say which one with --partition N; 0 is the whole device"))
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
                    [] => failure.hint("it has no partitions at all; leave --partition away"),
                    _ => failure.hint(format!("it has these: {numbers}")),
                }
            }),
    }
}

fn mount(args: &args::Mount, info: &DeviceInfo, node: &Path) -> Result<(), Failure> {
    let mut command = Command::new("mount");
    command.arg("-t").arg(&args.fs_type);
    if info.read_only {
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
    let failure = Failure::new("mount", format!("{what}: {}", last_words(&output, "mount")));
    Err(if args.fs_type == "auto" {
        failure.hint("is there a file system in it? `becket run IMAGE -- blkid -p {}` tells")
    } else {
        failure
            .hint("leave --type away to have the file system detected; the kernel's log may say more (dmesg)")
    })
}

/// Runs a tool whose complaints we tell as ours.
pub(super) fn said(command: &mut Command) -> std::io::Result<Output> {
    command.stdin(Stdio::null()).env("LC_ALL", "C.UTF-8").output()
}

pub(super) fn tool_missing(what: &str, tool: &str, error: &std::io::Error) -> Failure {
    Failure::io(format!("{what}: {tool}(8)"), error).hint("install util-linux")
}

/// What a tool said, without its name and without its advice on the following lines.
pub(super) fn last_words(output: &Output, tool: &str) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let first = first.trim().trim_start_matches(tool).trim_start_matches(": ");
    if first.is_empty() { format!("{tool} ended with {}", output.status) } else { first.to_owned() }
}
