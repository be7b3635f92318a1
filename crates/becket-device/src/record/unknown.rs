//! Records of a later becket: what can be shown of them, which is all that is done with them.
//! Nothing here renames, removes or takes anything.

use std::path::PathBuf;

use becket_image::Identity;
use serde::Deserialize;
use serde_json::Value;

use crate::contract::{DeviceInfo, DeviceState, Error, ErrorKind, Spec, shape, versions};
use crate::record::device::Device;

/// The part of a record that keeps its place and meaning in all versions.
#[derive(Debug, Deserialize)]
pub(crate) struct Head {
    pub(crate) version: u32,
    pub(crate) boot_id: String,
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) needs: Vec<String>,
    #[serde(default)]
    entry: Value,
}

/// A device that another version of becket has recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unknown {
    /// What people can be shown, as far as it could be read.
    pub(crate) info: DeviceInfo,
    /// The record, where it can be read as one of ours with something more.
    pub(crate) device: Option<Box<Device>>,
    /// The number that ublk keeps with the device, where it could be read.
    pub(crate) mark: Option<u64>,
    /// It only takes the name.
    pub(crate) is_claim: bool,
}

impl Unknown {
    pub(crate) fn new(head: Head) -> Unknown {
        let Head { version, name, needs, entry, .. } = head;
        let is_claim = entry["record"] == "claim";
        let mark = entry["mark"].as_u64();
        let device: Option<Box<Device>> = serde_json::from_value(entry.clone()).ok();
        let mut info = match &device {
            Some(device) => device.info.clone(),
            None => shown(&name, &entry["info"]),
        };
        info.state = DeviceState::UnknownVersion;
        info.warnings.insert(0, why(version, &needs));
        Unknown { info, device, mark, is_claim }
    }

    /// Why nothing can be done with it, and what can.
    pub(crate) fn error(&self) -> Error {
        of_unknown_version(&self.info)
    }
}

/// For a device with a record that no server of ours owns. `served`: its worker lives, and its users rely on
/// that.
pub(crate) fn not_owned(device: &Device, served: bool) -> Error {
    let name = &device.info.name;
    if let Some(why) = device.unspoken.as_ref().filter(|_| served) {
        let mut info = device.info.clone();
        info.warnings.insert(0, why.clone());
        return of_unknown_version(&info);
    }
    if !served {
        return Error::unserved(name);
    }
    Error::Failed {
        kind: ErrorKind::Server,
        message: format!("{name} is orphaned: its worker serves it, its server is dead"),
        hint: Some(format!(
            "do not detach it while it is in use: nothing is lost. A new server takes it over: becket refresh {name}"
        )),
    }
}

/// For a device that only another version of becket can handle.
pub(crate) fn of_unknown_version(info: &DeviceInfo) -> Error {
    let why = info.warnings.first().map_or("another version of becket attached it", String::as_str);
    Error::Failed {
        kind: ErrorKind::Unsupported,
        message: format!("{} is of an unknown version: {why}", info.name),
        hint: Some(
            "use the becket that attached it (becket --version), or a later one; the device goes on meanwhile"
                .to_owned(),
        ),
    }
}

fn why(version: u32, needs: &[String]) -> String {
    let ours = versions::record();
    if version > ours {
        return format!("its record is of version {version}, this becket reads up to {ours}");
    }
    match needs {
        [] => "its record says what this becket does not understand".to_owned(),
        needs => format!("its record needs what this becket does not know: {}", needs.join(", ")),
    }
}

/// What can be shown of a device whose record is too different.
fn shown(name: &str, info: &Value) -> DeviceInfo {
    let text = |key: &str| info[key].as_str().unwrap_or("?").to_owned();
    let number = |key: &str| info[key].as_u64();
    let block = number("block_size").and_then(|size| u32::try_from(size).ok()).unwrap_or(512);
    let device = PathBuf::from(text("device"));
    let transport = serde_json::from_value(info["transport"].clone()).unwrap_or(shape::UNKNOWN);
    let unit = number("number").and_then(|number| u32::try_from(number).ok()).unwrap_or(u32::MAX);
    DeviceInfo {
        spec: Spec {
            image: PathBuf::from(text("image")),
            offset: number("offset").unwrap_or(0),
            read_only: info["read_only"].as_bool().unwrap_or(false),
            block_size: block,
            ..Spec::default()
        },
        size: number("size").unwrap_or(0),
        direct_io: info["direct_io"].as_bool().unwrap_or(false),
        physical_block_size: block,
        state: DeviceState::UnknownVersion,
        ..DeviceInfo::bare(name.to_owned(), device, transport, unit)
    }
}

/// Which file its image is, where that could be read.
pub(crate) fn image_of(unknown: &Unknown) -> Option<Identity> {
    unknown.device.as_ref().map(|device| device.image)
}
