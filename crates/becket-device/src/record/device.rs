//! A device as its record knows it. Whether that is still so is for the kernel to say (`judge`).

use becket_image::Identity;
use serde::{Deserialize, Serialize};

use crate::contract::DeviceInfo;
use crate::system::process::ProcessId;

/// A device as its record knows it: what people see, and what tells it from others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Device {
    pub(crate) info: DeviceInfo,
    /// Which file the image is, whatever its path.
    pub(crate) image: Identity,
    /// ublk: the supervisor that made it.
    pub(crate) server: Option<ProcessId>,
    /// ublk: the worker that serves it.
    pub(crate) worker: Option<ProcessId>,
    /// loop under a lease: the process that keeps it.
    pub(crate) keeper: Option<ProcessId>,
    /// ublk: added to the kernel but not started yet, so it has no disk.
    pub(crate) starting: bool,
    /// The number that the kernel keeps with the device, by which it is known for ours; 0 in records of loop
    /// devices of older versions.
    pub(crate) mark: u64,
    /// Its user wants no partitions of it (`--partitions off`), or the kernel allows none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) whole: bool,
    /// The mount namespace in which becket made device nodes by hand, by its inode number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) nodes_in: Option<u64>,
    /// The `--format` that the image was opened with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) format: Option<String>,
    /// The features that a becket must know to handle the device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) needs: Vec<String>,
    /// Why the last supervisor that came could not take the device over: its worker is of another version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) unspoken: Option<String>,
    /// As what the programs that reached its image's cluster were known there: whose lock is this device's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) clients: Vec<String>,
}

impl Device {
    /// One of which only this is known: it has no server or keeper, and any becket can handle it.
    pub(crate) fn bare(info: DeviceInfo, image: Identity, mark: u64) -> Device {
        Device {
            info,
            image,
            server: None,
            worker: None,
            keeper: None,
            starting: false,
            mark,
            whole: false,
            nodes_in: None,
            format: None,
            needs: Vec::new(),
            unspoken: None,
            clients: Vec::new(),
        }
    }
}
