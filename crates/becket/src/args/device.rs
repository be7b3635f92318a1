//! The options by which an image becomes a device; attach, run and mount share them.
//! Never does anything: what they mean is said by `commands::common`.

use std::path::PathBuf;

use becket_device::DataMode;
use clap::{Args, ValueEnum};

use super::image::{ImageOptions, Toggle};

/// Options of attach, run and mount: how the image is offered as a device.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Device options")]
pub(crate) struct DeviceOptions {
    #[command(flatten)]
    pub(crate) image: ImageOptions,
    /// Choose the transport
    #[arg(long, value_enum, default_value_t = Via::Auto)]
    pub(crate) via: Via,
    /// Make the device read-only
    #[arg(short, long)]
    pub(crate) read_only: bool,
    /// Name the device: it also appears as /dev/becket/NAME
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Create partition devices: if there is a partition table (auto), always (on) or never (off)
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = Toggle::Auto)]
    pub(crate) partitions: Toggle,
    /// Detach when the last user closes the device
    #[arg(long)]
    pub(crate) autoclear: bool,
    /// Open the LUKS volume on it by cryptsetup with the key in this file (`-`: the standard input); the
    /// device is then the decrypted one
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, conflicts_with = "autoclear")]
    pub(crate) key_file: Option<PathBuf>,
    /// Serve the device in a process of its own, in your control group (ublk and fuse only)
    #[arg(long)]
    pub(crate) isolate: bool,
    /// Fetch all of a remote image in the background, so that its server is not needed afterwards
    #[arg(long, conflicts_with = "no_store")]
    pub(crate) fill: bool,
    /// Set the number of queues (ublk and fuse only) [default: up to one per CPU; one if there are many
    /// devices]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) queues: Option<u16>,
    /// How data and commands cross (ublk): copy, zero-copy, batch-copy, batch-zero-copy
    #[arg(long, hide = true)]
    pub(crate) mode: Option<DataMode>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Via {
    #[default]
    Auto,
    Ublk,
    Loop,
    Dm,
    Fuse,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}
