//! The options by which an image becomes a device; attach, run and mount share them.
//! Never does anything: what they mean is said by `commands::common`.

use crate::units::{parse_block_size, parse_size};
use becket_device::DataMode;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// How an image becomes a device; attach, run and mount share these.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Device options")]
pub(crate) struct DeviceOptions {
    /// Transport to use
    #[arg(long, value_enum, default_value_t = Via::Auto)]
    pub(crate) via: Via,
    /// Refuse writes
    #[arg(short, long)]
    pub(crate) read_only: bool,
    /// Name of the device: /dev/becket/NAME
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// What the file is: auto, raw, qcow2, vmdk, disk, iso9660, ext4, fat, squashfs, erofs, xz, zstd, gzip
    ///
    /// With raw nothing in the file is looked at: for files that somebody else may have written.
    #[arg(long, default_value_t = becket_image::Format::Auto)]
    pub(crate) format: becket_image::Format,
    /// Allow backing files of a qcow2 in this directory, and not in the image's alone; may be given several times
    #[arg(long = "backing-dir", value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub(crate) backing_dirs: Vec<PathBuf>,
    /// Write to this qcow2 overlay and never to the image; it is made when it is not there
    ///
    /// The image is only read, so several overlays of one may be attached at once. What is there already must be an
    /// overlay of this very image; anything else is refused. `becket attach IMAGE --cow FILE` opens it again later.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub(crate) cow: Option<PathBuf>,
    /// Start this many bytes into the image
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, default_value = "0", value_parser = parse_size)]
    pub(crate) offset: u64,
    /// Offer at most this many bytes
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_size)]
    pub(crate) size_limit: Option<u64>,
    /// Logical block size, a power of two from 512 to the page size [default: what the image needs]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_block_size)]
    pub(crate) block_size: Option<u32>,
    /// Bypass the page cache of the file below: when it can, always or never
    ///
    /// With auto, what is stored compressed in a file that is only read goes through it all the same, so that the kernel
    /// reads ahead.
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = Toggle::Auto)]
    pub(crate) direct_io: Toggle,
    /// Offer partitions: when there is a table, always or never
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = Toggle::Auto)]
    pub(crate) partitions: Toggle,
    /// Detach when the last user closes the device
    #[arg(long)]
    pub(crate) autoclear: bool,
    /// Allow an image that is in use: no lock is taken, nothing keeps two writers apart
    #[arg(long)]
    pub(crate) shared: bool,
    /// Read below the image's file system (ublk, read-only, root): where that is safe, always or never
    ///
    /// From the block device that ext4 or an XFS without reflink lies on, for fewer instructions a read. Whoever opens
    /// the image for writing waits a moment, and the device reads through the file from then on.
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = Toggle::Off)]
    pub(crate) below: Toggle,
    /// Give the device a server process of its own, in your control group (ublk, fuse)
    #[arg(long)]
    pub(crate) isolate: bool,
    /// Memory for decoded blocks of compressed images, shared by all devices of the server (16M or more). As many bytes are
    /// kept; by default less where what was read once is not read again [default: up to 1/16 of memory, at most 1G]
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_size)]
    pub(crate) cache_size: Option<u64>,
    /// Number of queues (ublk, fuse) [default: up to one per CPU; one for a device among many]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) queues: Option<u16>,
    /// Requests in flight per queue (ublk, fuse) [default: 128; 64 where the kernel must copy; fewer for a
    /// device among many]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) depth: Option<u16>,
    /// How data and commands cross (ublk): copy, zero-copy, batch-copy, batch-zero-copy
    #[arg(long, hide = true)]
    pub(crate) mode: Option<DataMode>,
    /// Make one operation of requests that arrive together and go on where each other end (ublk, copying)
    #[arg(long, hide = true)]
    pub(crate) merge: bool,
    /// Have operations on the image fail, come short or late, for testing (served ones): error=write:EIO:0.01,delay=read:10ms
    #[arg(long, value_name = "FAULTS", value_parser = crate::faults::parse_faults)]
    pub(crate) fault: Option<becket_device::fault::Faults>,
}

/// As without any of them on the command line.
impl Default for DeviceOptions {
    fn default() -> Self {
        Self {
            via: Via::Auto,
            read_only: false,
            name: None,
            format: becket_image::Format::Auto,
            backing_dirs: Vec::new(),
            cow: None,
            offset: 0,
            size_limit: None,
            block_size: None,
            direct_io: Toggle::Auto,
            partitions: Toggle::Auto,
            autoclear: false,
            shared: false,
            below: Toggle::Off,
            isolate: false,
            cache_size: None,
            queues: None,
            depth: None,
            mode: None,
            merge: false,
            fault: None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Via {
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Toggle {
    Auto,
    On,
    Off,
}
