//! LUKS on a device: cryptsetup(8) and the kernel's dm-crypt open it.
//! Nothing here reads a key or a header: the key's file goes to cryptsetup by its name.

use super::tool::{last_words, said};
use crate::failure::Failure;
use becket_device::{DetachOptions, DeviceInfo};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

/// Where the nodes of device-mapper are.
const NODES: &str = "/dev/mapper";
/// The names of mappings: this and the name of the device below.
const PREFIX: &str = "luks-";

/// The decrypted disk above a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mapping {
    name: String,
    /// Its number, where it was found.
    pub(super) number: Option<(u32, u32)>,
}

/// That LUKS can be opened here at all. Asked before anything is attached.
pub(super) fn ready(image: &Path) -> Result<(), Failure> {
    let probe = becket_device::dm_crypt();
    if probe.works {
        return Ok(());
    }
    let where_to_look =
        "it needs a kernel with device-mapper and dm-crypt; `becket doctor` shows what this one has";
    let failure = Failure::new("unsupported", format!("{}: {}", cannot(image), probe.reason));
    Err(failure.hint(probe.fix.unwrap_or_else(|| where_to_look.to_owned())))
}

/// Opens what is encrypted on a node of a device; `-` reads the key from the standard input.
pub(super) fn open(info: &DeviceInfo, node: &Path, key: &Path, image: &Path) -> Result<Mapping, Failure> {
    let mapping = Mapping { name: format!("{PREFIX}{}", info.name), number: None };
    let mut command = Command::new("cryptsetup");
    command.args(["open", "--type", "luks", "--batch-mode"]);
    if info.spec.read_only {
        command.arg("--readonly");
    }
    command.arg("--key-file").arg(key).arg("--").arg(node).arg(&mapping.name);
    let what = cannot(image);
    command.stdin(if key == Path::new("-") { Stdio::inherit() } else { Stdio::null() });
    let output = command.env("LC_ALL", "C.UTF-8").output().map_err(|error| missing(&what, &error))?;
    if output.status.success() {
        return Ok(mapping);
    }
    let words = last_words(&output, "cryptsetup");
    let hint = match &*words {
        words if words.contains("already exists") || words.contains("create ioctl") => {
            format!("another volume is open as {}: give the device another --name", mapping.name)
        }
        words if words.contains("not a valid LUKS") && !info.partitions.is_empty() => {
            "`becket ls` lists its partitions: give the path of the encrypted one".to_owned()
        }
        words if words.contains("not a valid LUKS") => {
            "omit --key-file: it is not encrypted by LUKS".to_owned()
        }
        _ => "attach it without --key-file: `cryptsetup luksDump` on the device lists its keys".to_owned(),
    };
    Err(Failure::new("luks", format!("{what}: {}", words.trim_end_matches('.'))).hint(hint))
}

/// Without what a URL says of keys.
fn cannot(image: &Path) -> String {
    format!("cannot open LUKS on {}", becket_fetch::named(image.as_os_str()))
}

fn missing(what: &str, error: &std::io::Error) -> Failure {
    Failure::io(format!("{what}: cryptsetup(8)"), error).hint("install cryptsetup-bin")
}

impl Mapping {
    /// Its node.
    pub(super) fn node(&self) -> PathBuf {
        Path::new(NODES).join(&self.name)
    }

    /// Closes it: now, or where that is `deferred`, when its last user has closed it.
    pub(super) fn close(&self, deferred: bool) -> Result<(), Failure> {
        let mut command = Command::new("cryptsetup");
        command.arg("close").args(deferred.then_some("--deferred")).arg("--").arg(&self.name);
        let what = format!("cannot close {}", self.node().display());
        let output = said(&mut command).map_err(|error| missing(&what, &error))?;
        match output.status.success() {
            true => Ok(()),
            false => Err(Failure::new("luks", format!("{what}: {}", last_words(&output, "cryptsetup")))),
        }
    }
}

/// What [`open`] has opened on a device or one of its partitions, if it is still there.
pub(super) fn mapping(info: &DeviceInfo) -> Option<Mapping> {
    let name = format!("{PREFIX}{}", info.name);
    let mut nodes = info.partitions.iter().map(|partition| &partition.device).chain([&info.device]);
    let number = nodes.find_map(|node| holder(node, &name))?;
    Some(Mapping { name, number: Some(number) })
}

/// The number of device-mapper's device of that name, if it lies on a node.
fn holder(node: &Path, name: &str) -> Option<(u32, u32)> {
    let disk = fs::canonicalize(node).ok()?;
    let holders = Path::new("/sys/class/block").join(disk.file_name()?).join("holders");
    let mut holders = fs::read_dir(holders).ok()?.flatten().map(|holder| holder.path());
    let holder = holders.find(|holder| {
        fs::read_to_string(holder.join("dm/name")).is_ok_and(|found| found.trim_end() == name)
    })?;
    let number = fs::read_to_string(holder.join("dev")).ok()?;
    let (major, minor) = number.trim_end().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Detaches a device, and closes before what becket has opened on it. The node of that stands for the device.
pub(super) fn detach(target: &Path, options: &DetachOptions) -> Result<DeviceInfo, becket_device::Error> {
    let name =
        target.strip_prefix(NODES).ok().and_then(Path::to_str).and_then(|name| name.strip_prefix(PREFIX));
    let target = name.map_or(target, Path::new);
    // Without device-mapper there is none, and nothing is looked up.
    if Path::new("/sys/class/misc/device-mapper").exists()
        && let Ok(info) = becket_device::find(target)
        && let Some(mapping) = mapping(&info)
    {
        // If it cannot, the device is in use, and by whom is said by who detaches it.
        let _ = mapping.close(options.lazy);
    }
    becket_device::detach(target, options)
}
