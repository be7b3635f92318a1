//! What a device has done: its worker's own numbers, or the kernel's where the kernel serves it.
//! It changes nothing and stops nothing.

use std::path::{Path, PathBuf};

use becket_engine::Summary;
use becket_transport::{Kind, sysfs};
use serde::{Deserialize, Serialize};

use crate::client::kernel_drivers;
use crate::client::list::resolve;
use crate::contract::messages::{Counted, Stat};
use crate::contract::{DeviceInfo, DeviceState, Error};
use crate::control::client;
use crate::control::health::{self, Concerns};
use crate::record::judge::disk_of;
use crate::record::runtime::Runtime;
use crate::record::store::Store;
use crate::record::unknown;

/// From so many devices on, the counters of all disks are read at once.
const MANY: usize = 8;

/// What a device has done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceStats {
    /// The device's name.
    pub name: String,
    /// Its node.
    #[serde(with = "crate::contract::path_text::one")]
    pub device: PathBuf,
    /// How it is offered.
    pub transport: Kind,
    /// What must be known of the numbers, for people.
    pub note: Option<String>,
    /// The numbers, since the device was attached.
    #[serde(flatten)]
    pub stats: Summary,
}

/// What each of these devices has done, over one connection to the server; `None` where there is nothing to
/// know: the device is gone, is not served, or its server does not respond.
pub fn counters(infos: &[DeviceInfo]) -> Vec<Option<Summary>> {
    let Some(runtime) = Runtime::present() else { return vec![None; infos.len()] };
    let by_kernel = infos.iter().filter(|info| kernel_drivers::of(info.transport).is_some()).count();
    let all = (by_kernel >= MANY).then(sysfs::all_counted);
    let of = |info: &DeviceInfo| match (kernel_drivers::of(info.transport), info.state) {
        (Some(_), _) => match &all {
            Some(all) => all.get(&disk_of(info)).map(|now| since_attach(info, now.clone())),
            None => counted(info),
        },
        (None, DeviceState::Live | DeviceState::Detaching) => {
            let request = Stat { name: info.name.clone() };
            let concerns = Concerns::Worker(info.worker_pid);
            // A device can go at any moment; an error of one device hides no other device.
            client::call_running::<_, Counted>(&runtime, "Stat", &request, concerns).ok()?.map(|it| it.stats)
        }
        (None, _) => None,
    };
    infos.iter().map(of).collect()
}

/// What the kernel has counted of a device since it was attached.
fn counted(info: &DeviceInfo) -> Option<Summary> {
    sysfs::counted(&disk_of(info)).map(|now| since_attach(info, now))
}

fn since_attach(info: &DeviceInfo, now: Summary) -> Summary {
    match &info.counted_before {
        Some(before) => now.since(before),
        None => now,
    }
}

/// What the device has done that goes by a NAME, a path under /dev, or the path of its image.
///
/// # Errors
/// There is none, or more than one, or it has no server.
pub fn stat(target: impl AsRef<Path>) -> Result<DeviceStats, Error> {
    let store = Store::open(Runtime::open()?)?;
    let device = resolve(&store, target.as_ref())?;
    let info = &device.info;
    let (stats, note) = match kernel_drivers::of(info.transport) {
        None => {
            let request = Stat { name: info.name.clone() };
            health::running(&device)?;
            let concerns = Concerns::Worker(info.worker_pid);
            let served = info.state != DeviceState::Lost;
            let reply: Option<Counted> = client::call_running(store.runtime(), "Stat", &request, concerns)?;
            (reply.ok_or_else(|| unknown::not_owned(&device, served))?.stats, None)
        }
        Some(driver) => {
            let unknown = || Error::Failed {
                kind: crate::contract::ErrorKind::Unsupported,
                message: format!("the kernel does not show what {} has done", info.device.display()),
                hint: Some("mount sysfs: mount -t sysfs sysfs /sys".to_owned()),
            };
            (counted(info).ok_or_else(unknown)?, Some(driver.counts().to_owned()))
        }
    };
    let DeviceInfo { name, device, transport, .. } = device.info;
    Ok(DeviceStats { name, device, transport, note, stats })
}
