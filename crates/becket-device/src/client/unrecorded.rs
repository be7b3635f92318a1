//! Loop devices of becket's without a record: their runtime directory was removed, and no server made it
//! again.
//! A device is known as becket's by its link: one to which no link of becket's leads is left alone.

use std::fs;
use std::path::{Path, PathBuf};

use becket_transport::loop_::{self, Cleared};
use becket_transport::{Kind, sysfs};

use crate::contract::{DetachOptions, DeviceInfo, DeviceState, Error, Spec};
use crate::record::links;
use crate::system::describe::size_of;
use crate::system::users;

/// Detaches the device whose node is at `target`; `None` when it is none of ours.
pub(crate) fn detach(
    runtime: &crate::record::runtime::Runtime,
    target: &Path,
    options: &DetachOptions,
) -> Result<Option<DeviceInfo>, Error> {
    let Some(info) = find(runtime.links(), target) else { return Ok(None) };
    let cleared = if options.lazy {
        loop_::detach(info.number, info.diskseq, None).map(|cleared| cleared == Cleared::Gone)
    } else {
        loop_::detach_unused(info.number, info.diskseq)
    };
    match cleared.map_err(Error::Device)? {
        true => {
            links::remove(runtime, &info);
            Ok(Some(info))
        }
        false if options.lazy => Ok(Some(DeviceInfo { state: DeviceState::Detaching, ..info })),
        false => Err(Error::Busy { users: users::of(&format!("loop{}", info.number)), device: info.device }),
    }
}

/// What is known of such a device: the name of its link, and what the kernel says.
pub(crate) fn find(links: &Path, target: &Path) -> Option<DeviceInfo> {
    let device = fs::canonicalize(target).ok()?;
    let disk = device.strip_prefix("/dev").ok()?.to_str()?.to_owned();
    let number = disk.strip_prefix("loop")?.parse().ok()?;
    let name = linked(links, &device)?;
    let image = sysfs::text(&disk, "loop/backing_file")?;
    Some(DeviceInfo {
        spec: Spec {
            image: PathBuf::from(image),
            read_only: sysfs::flag(&disk, "ro").unwrap_or(false),
            block_size: sysfs::number(&disk, "queue/logical_block_size").unwrap_or(512),
            reason: "it has no record".to_owned(),
            ..Spec::default()
        },
        size: size_of(&disk).unwrap_or(0),
        direct_io: sysfs::flag(&disk, "loop/dio").unwrap_or(false),
        physical_block_size: sysfs::number(&disk, "queue/physical_block_size").unwrap_or(512),
        state: DeviceState::Lost,
        diskseq: sysfs::number(&disk, "diskseq"),
        ..DeviceInfo::bare(name, device, Kind::Loop, number)
    })
}

/// The name under which a link leads to the node.
fn linked(links: &Path, device: &Path) -> Option<String> {
    let found = fs::read_dir(links).ok()?.flatten();
    let mut ours = found.filter(|link| fs::read_link(link.path()).is_ok_and(|to| to == device));
    ours.next()?.file_name().into_string().ok()
}
