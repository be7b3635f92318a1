//! The words that a device's life is described in: what is asked for, what came of it.
//! No behaviour beyond conversions; nothing here touches the system.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use becket_engine::Faults;
use becket_image::{DirectIo, Format};
use becket_transport::{Kind, Probe};
use serde::{Deserialize, Serialize};

use crate::contract::shape::{self, Disk};

/// Which transport is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Via {
    /// The best that works here and fits the image.
    #[default]
    Auto,
    /// Only ublk.
    Ublk,
    /// Only the kernel's loop driver.
    Loop,
    /// Only device-mapper.
    Dm,
    /// Only FUSE.
    Fuse,
}

impl Via {
    /// The one transport that is insisted on.
    pub fn kind(self) -> Option<Kind> {
        match self {
            Via::Auto => None,
            Via::Ublk => Some(Kind::Ublk),
            Via::Loop => Some(Kind::Loop),
            Via::Dm => Some(Kind::Dm),
            Via::Fuse => Some(Kind::Fuse),
        }
    }
}

impl fmt::Display for Via {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.kind().map_or("auto", Kind::as_str))
    }
}

impl FromStr for Via {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        [Via::Auto, Via::Ublk, Via::Loop, Via::Dm, Via::Fuse]
            .into_iter()
            .find(|via| via.to_string() == word)
            .ok_or_else(|| format!("{word:?} is none of auto, ublk, loop, dm, fuse"))
    }
}

/// Whether the partitions of the image are to appear as devices of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Partitions {
    /// Where there is a partition table.
    #[default]
    Auto,
    /// Yes, or the attach fails when the image has no partition table.
    On,
    /// No.
    Off,
}

impl FromStr for Partitions {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        match word {
            "auto" => Ok(Partitions::Auto),
            "on" => Ok(Partitions::On),
            "off" => Ok(Partitions::Off),
            _ => Err(format!("{word:?} is none of auto, on, off")),
        }
    }
}

impl fmt::Display for Partitions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Partitions::Auto => "auto",
            Partitions::On => "on",
            Partitions::Off => "off",
        })
    }
}

pub use becket_transport::ublk::DataMode;

/// How an image should be attached. All sizes are bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AttachOptions {
    /// Which transport.
    pub via: Via,
    /// Refuse writes, even where the image could be written.
    pub read_only: bool,
    /// Leave bytes out that fill no block, as the loop driver does, also where a server could fill it up with
    /// zeroes.
    pub cut: bool,
    /// Name of the device; the kernel's own when not given.
    pub name: Option<String>,
    /// What the file is, for paths that go on inside it.
    pub format: Format,
    /// Where backing files may lie, beside the directory of the image that names them.
    pub backing_dirs: Vec<PathBuf>,
    /// The qcow2 over the image that takes what is written.
    pub cow: Option<PathBuf>,
    /// Parse the image whatever that costs.
    pub no_limits: bool,
    /// Attach a qcow2 writable although the first write removes its persistent bitmaps.
    pub drop_bitmaps: bool,
    /// Where the image starts in its file.
    pub offset: u64,
    /// Longest device, for a file that goes on behind it.
    pub size_limit: Option<u64>,
    /// Logical block size; taken from the image when not given.
    pub block_size: Option<u32>,
    /// Whether to go past the page cache.
    pub direct_io: DirectIo,
    /// Number of queues (ublk).
    pub queues: Option<u16>,
    /// Requests in flight of one queue (ublk).
    pub depth: Option<u16>,
    /// Whether partitions appear.
    pub partitions: Partitions,
    /// Detach when the last user closes the device.
    pub autoclear: bool,
    /// Take no locks that would exclude other programs from the image.
    pub shared: bool,
    /// How bytes travel (ublk); the best that the kernel has when not given.
    pub mode: Option<DataMode>,
    /// What goes wrong with its backing on purpose, for testing what is above it.
    pub faults: Option<Faults>,
    /// A process of its own moves the device's bytes (ublk).
    pub isolate: bool,
    /// Bytes of decoded blocks that the server may keep for all its devices, where parts of the image are
    /// compressed; the server chooses when it is not given.
    pub cache_size: Option<u64>,
    /// The directory of the control group that this process belongs in; the server's own when not given.
    pub cgroup: Option<PathBuf>,
}

/// How a device should be detached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DetachOptions {
    /// A device in use goes when its last user closes it, instead of being refused.
    pub lazy: bool,
    /// How long to wait until it is really gone.
    pub timeout: Duration,
}

impl Default for DetachOptions {
    fn default() -> Self {
        DetachOptions { lazy: false, timeout: Duration::from_secs(10) }
    }
}

/// What a device is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceState {
    /// It serves.
    Live,
    /// Its worker died and another one is about to take over. Requests wait.
    Recovering,
    /// Its workers die repeatedly; retries become ever rarer. Requests wait, and `detach` makes them fail.
    Failing,
    /// No server moves its bytes any more: its worker died, and none can take over. `detach` cleans up.
    Lost,
    /// It serves, but its supervisor died. `detach` still works.
    Orphaned,
    /// It goes when its last user closes it.
    Detaching,
    /// The process that serves it, or its supervisor, is stopped or does not answer. Requests wait.
    NotResponding,
    /// Another version of becket attached it, and this one does not understand its record or its worker. It
    /// is left alone.
    UnknownVersion,
}

impl fmt::Display for DeviceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DeviceState::Live => "live",
            DeviceState::Recovering => "recovering",
            DeviceState::Failing => "failing",
            DeviceState::Lost => "lost",
            DeviceState::Orphaned => "orphaned",
            DeviceState::Detaching => "detaching",
            DeviceState::NotResponding => "not responding",
            DeviceState::UnknownVersion => "unknown version",
        })
    }
}

/// A partition of a device. Places are bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionInfo {
    /// Its number in the partition table, from 1.
    pub number: u32,
    /// The kernel's node.
    #[serde(with = "crate::contract::path_text::one")]
    pub device: PathBuf,
    /// Where it starts on the device.
    pub start: u64,
    /// How long it is.
    pub size: u64,
    /// Its name in the partition table.
    pub label: Option<String>,
    /// Its UUID in the partition table.
    pub uuid: Option<String>,
}

/// A device, as `list` shows it. Sizes are bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// Name, unique among becket's devices.
    pub name: String,
    /// The kernel's node.
    #[serde(with = "crate::contract::path_text::one")]
    pub device: PathBuf,
    /// How it is offered.
    pub transport: Kind,
    /// Why this transport was taken.
    pub reason: String,
    /// Length.
    pub size: u64,
    /// Writes are refused.
    pub read_only: bool,
    /// The backing is accessed past the page cache.
    pub direct_io: bool,
    /// Why, or why not.
    pub direct_io_reason: String,
    /// Logical block size.
    pub block_size: u32,
    /// Physical block size.
    pub physical_block_size: u32,
    /// What it is doing.
    pub state: DeviceState,
    /// The file that holds the image.
    #[serde(with = "crate::contract::path_text::one")]
    pub image: PathBuf,
    /// The qcow2 over it that takes what is written.
    #[serde(default, with = "crate::contract::path_text::maybe")]
    pub cow: Option<PathBuf>,
    /// Where the image starts in that file.
    pub offset: u64,
    /// The limit that was asked for.
    pub size_limit: Option<u64>,
    /// It goes when its last user closes it.
    pub autoclear: bool,
    /// Its partitions.
    pub partitions: Vec<PartitionInfo>,
    /// Number of queues, where becket serves them.
    pub queues: Option<u16>,
    /// Requests in flight of one queue, where becket serves them.
    pub depth: Option<u16>,
    /// How bytes travel, where becket moves them.
    pub mode: Option<String>,
    /// The kernel's number of it (`3` of `loop3`).
    pub number: u32,
    /// The kernel's sequence number of this use of the node; never used twice while the system runs.
    pub diskseq: Option<u64>,
    /// The supervisor, where there is one.
    pub server_pid: Option<u32>,
    /// The process that moves the bytes, where there is one.
    pub worker_pid: Option<u32>,
    /// That process has no other device.
    pub isolated: bool,
    /// How often the process that moves the bytes had to be replaced.
    pub recoveries: u32,
    /// What goes wrong with its backing on purpose.
    #[serde(default)]
    pub faults: Option<Faults>,
    /// What the user should know although it went well.
    pub warnings: Vec<String>,
}

impl DeviceInfo {
    /// One of which only this is known. The rest is what most devices have: nothing.
    pub(crate) fn bare(name: String, device: PathBuf, transport: Kind, number: u32) -> DeviceInfo {
        DeviceInfo {
            name,
            device,
            transport,
            reason: String::new(),
            size: 0,
            read_only: false,
            direct_io: false,
            direct_io_reason: String::new(),
            block_size: 512,
            physical_block_size: 512,
            state: DeviceState::Live,
            image: PathBuf::new(),
            cow: None,
            offset: 0,
            size_limit: None,
            autoclear: false,
            partitions: Vec::new(),
            queues: None,
            depth: None,
            mode: None,
            number,
            diskseq: None,
            server_pid: None,
            worker_pid: None,
            isolated: false,
            recoveries: 0,
            faults: None,
            warnings: Vec::new(),
        }
    }

    /// It is a file, and no block device.
    pub fn is_file(&self) -> bool {
        shape::of(self.transport).disk == Disk::OfNode && !self.device.starts_with("/dev")
    }
}

/// Which transport is taken for an image, and why not the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The one taken.
    pub kind: Kind,
    /// Why, in one sentence.
    pub reason: String,
    /// The others that were looked at, in the order of preference, each with why not.
    pub rejected: Vec<(Kind, String)>,
}

/// Whether one transport works here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportReport {
    /// Which.
    pub kind: Kind,
    /// What was found.
    pub probe: Probe,
}
