//! What several commands need.
//! Never prints anything.

use crate::args::{DeviceOptions, Toggle, Via};
use becket_device::{AttachOptions, DeviceInfo, GoBelow, Partitions};
use std::{
    os::unix::process::CommandExt as _,
    process::Command,
    thread,
    time::{Duration, Instant},
};

/// What was asked for, in the words of the device room.
pub(super) fn options(asked: &DeviceOptions) -> AttachOptions {
    AttachOptions {
        via: match asked.via {
            Via::Auto => becket_device::Via::Auto,
            Via::Ublk => becket_device::Via::Ublk,
            Via::Loop => becket_device::Via::Loop,
            Via::Dm => becket_device::Via::Dm,
            Via::Fuse => becket_device::Via::Fuse,
        },
        read_only: asked.read_only,
        name: asked.name.clone(),
        offset: asked.offset,
        size_limit: asked.size_limit,
        block_size: asked.block_size,
        direct_io: asked.direct_io.into(),
        below: match asked.below {
            Toggle::Auto => GoBelow::Auto,
            Toggle::On => GoBelow::On,
            Toggle::Off => GoBelow::Off,
        },
        queues: asked.queues,
        depth: asked.depth,
        partitions: match asked.partitions {
            Toggle::Auto => Partitions::Auto,
            Toggle::On => Partitions::On,
            Toggle::Off => Partitions::Off,
        },
        autoclear: asked.autoclear,
        shared: asked.shared,
        mode: asked.mode,
        merge: asked.merge,
        isolate: asked.isolate,
        cgroup: if asked.isolate { crate::cgroup::own() } else { None },
    }
}

/// This very program again, as a hidden subcommand of itself; also when its file was replaced meanwhile.
pub(super) fn ourselves(subcommand: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("becket").arg(subcommand);
    command
}

/// Whether the device, this very use of it, is gone within `patience`.
pub(super) fn await_gone(info: &DeviceInfo, patience: Duration) -> bool {
    let until = Instant::now() + patience;
    loop {
        match becket_device::list() {
            Ok(devices) if devices.iter().any(|device| same(device, info)) => {}
            // When they cannot be listed, waiting for them shows nothing.
            _ => return true,
        }
        if Instant::now() >= until {
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
