//! The words that a device's life is described in: what is asked for, what came of it.
//! No behaviour beyond conversions; nothing here touches the system.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use becket_engine::Summary;
use becket_image::{OpenOptions, Opened};
use becket_transport::{Kind, Probe};
use serde::{Deserialize, Serialize};

use crate::contract::shape::{self, Disk};
use crate::contract::spec::Spec;

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
    /// How the image is opened. Whether its table is read, and its last block filled up, is for `partitions`
    /// and `cut` to say.
    pub open: OpenOptions,
    /// What was chosen of the offer. The rest of it follows from `open` and the image.
    pub spec: Spec,
    /// Which transport.
    pub via: Via,
    /// Leave bytes out that fill no block, as the loop driver does, also where a server could fill it up with
    /// zeroes.
    pub cut: bool,
    /// Name of the device; the kernel's own when not given.
    pub name: Option<String>,
    /// Whether partitions appear.
    pub partitions: Partitions,
    /// A process of its own moves the device's bytes (ublk).
    pub isolate: bool,
    /// Bytes of decoded blocks that the server may keep for all its devices, where parts of the image are
    /// compressed; the server chooses when it is not given.
    pub cache_size: Option<u64>,
    /// Have all bytes of a remote image fetched, also those that nobody reads.
    pub fill: bool,
    /// The directory of the control group that this process belongs in; the server's own when not given.
    pub cgroup: Option<PathBuf>,
}

impl AttachOptions {
    /// The whole offer, now that the image is open and a transport was taken.
    pub(crate) fn spec_of(&self, opened: &Opened, plan: &Plan) -> Spec {
        let below = opened.below.as_deref().and_then(|uri| uri.to_str());
        Spec {
            image: opened.path.clone(),
            backing_url: below.map(str::to_owned).or_else(|| self.spec.backing_url.clone()),
            cow: opened.overlay.as_ref().map(|overlay| overlay.path.clone()),
            offset: self.open.offset,
            size_limit: self.open.size_limit,
            read_only: opened.read_only,
            block_size: opened.block_size,
            reason: plan.reason.clone(),
            ..self.spec.clone()
        }
    }
}

/// How a device should be detached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DetachOptions {
    /// A device in use goes when its last user closes it, instead of being refused.
    pub lazy: bool,
    /// The connections of an export's clients are ended. Block devices are refused.
    pub force: bool,
    /// How long to wait until it is really gone.
    pub timeout: Duration,
}

impl Default for DetachOptions {
    fn default() -> Self {
        DetachOptions { lazy: false, force: false, timeout: Duration::from_secs(10) }
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
    /// What is offered, as it was granted.
    #[serde(flatten)]
    pub spec: Spec,
    /// Length.
    pub size: u64,
    /// The backing is accessed past the page cache.
    pub direct_io: bool,
    /// Why, or why not.
    pub direct_io_reason: String,
    /// Physical block size.
    pub physical_block_size: u32,
    /// What it is doing.
    pub state: DeviceState,
    /// Its partitions.
    pub partitions: Vec<PartitionInfo>,
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
    /// How many clients an export has, as far as its server answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connections: Option<u64>,
    /// How much is in the store of an image that comes while it is read, as far as its server answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<Part>,
    /// What keeps the server of its image from being reached, and since when, while it is away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub away: Option<String>,
    /// Why bytes may be lost that were written to it and not flushed, where it was detached and that is so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unsaved: Option<String>,
    /// What the kernel had counted of its disk before the image came, where that was anything. The numbers of
    /// `stat` are without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counted_before: Option<Box<Summary>>,
    /// What the user should know although it went well.
    pub warnings: Vec<String>,
}

/// How much there is of something.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Bytes that are there.
    pub bytes: u64,
    /// Bytes of all of it.
    pub size: u64,
}

impl DeviceInfo {
    /// One of which only this is known. The rest is what most devices have: nothing.
    pub(crate) fn bare(name: String, device: PathBuf, transport: Kind, number: u32) -> DeviceInfo {
        DeviceInfo {
            name,
            device,
            transport,
            spec: Spec { block_size: 512, ..Spec::default() },
            size: 0,
            direct_io: false,
            direct_io_reason: String::new(),
            physical_block_size: 512,
            state: DeviceState::Live,
            partitions: Vec::new(),
            number,
            diskseq: None,
            server_pid: None,
            worker_pid: None,
            isolated: false,
            recoveries: 0,
            connections: None,
            stored: None,
            away: None,
            unsaved: None,
            counted_before: None,
            warnings: Vec::new(),
        }
    }

    /// Was detached, and bytes may be lost that were written to it.
    pub(crate) fn loses(&mut self, why: String) {
        let image = self.spec.url.clone().unwrap_or_else(|| self.spec.image.display().to_string());
        self.warnings.push(format!(
            "what was written to {image} since its last flush may be lost: {why}; {} is detached: check the \
             image on its server, and write again what it lacks",
            self.name
        ));
        self.unsaved = Some(why);
    }

    /// It is a disk of the kernel.
    pub(crate) fn has_disk(&self) -> bool {
        shape::has_disk(self.transport) && !self.is_file()
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

/// What one transport would say to an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// Which.
    pub transport: Kind,
    /// It can take the image here and now, with the options that were given.
    pub possible: bool,
    /// Why, or why not.
    pub reason: String,
    /// What would make it possible, where that is known.
    pub fix: Option<String>,
}

/// Whether one transport works here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportReport {
    /// Which.
    pub kind: Kind,
    /// What was found.
    pub probe: Probe,
}
