//! A device that the kernel alone serves, of whichever driver: named, made, recorded, linked, leased.
//! It never leaves one behind that is not in a record, unless it is killed by SIGKILL: then the next command
//! that looks for devices finds it by a note (`unfinished`).

use std::fs;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::PathBuf;

use becket_engine::Summary;
use becket_image::{Opened, Partition, Source};
use becket_transport::node::KernelPartition;
use becket_uapi::block;
use becket_uapi::signal::Held;
use rustix::process::Signal;
use tracing::warn;

use crate::client::lease;
use crate::contract::{AttachOptions, DeviceInfo, Error, Partitions, Plan, versions};
use crate::record::device::Device;
use crate::record::judge::disk_name;
use crate::record::store::{Note, Store};
use crate::record::{links, mark, nodes, register};
use crate::system::describe::{partitions_as, unasked_read_only};
use crate::system::process::ProcessId;

/// What would end this process between the making of a device and its record; the last one comes of a limit
/// on the size of files.
const ENDING: [Signal; 5] = [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM, Signal::XFSZ];

/// A driver of the kernel's by which the client makes devices that need no server.
pub(crate) trait KernelDriver: Sync {
    /// Makes a device of an image, one with that mark where the driver is given any.
    fn make(
        &self,
        opened: &Opened,
        options: &AttachOptions,
        leased: bool,
        mark: u64,
    ) -> Result<KernelDevice, becket_transport::Error>;
    /// Whether only trying shows that it can have an image.
    fn may_refuse(&self) -> bool;
    /// Whether requests go past becket's choices to the device below: there is no cache to choose, and image
    /// and rights are fixed.
    fn is_fixed(&self) -> bool;
    /// Removes an unused device; `false` when it is in use.
    fn detach_unused(&self, device: &Device) -> Result<bool, becket_transport::Error>;
    /// Removes a device with its last user; whether it is gone already.
    fn detach_lazily(&self, device: &Device) -> Result<bool, becket_transport::Error>;
    /// Takes over the length of the image; the device's new length.
    fn refresh(&self, device: &Device) -> Result<u64, becket_transport::Error>;
    /// The partitions that the kernel has, as the device's table says where they begin.
    fn partitions(&self, info: &DeviceInfo, table: &[Partition]) -> Vec<KernelPartition>;
    /// Has the kernel take over a table, and says in the device's record what came of it.
    fn repartition(&self, device: &mut Device, table: &[Partition]) -> Result<(), becket_transport::Error>;
    /// Detaches the device that was noted, whose maker died before it was in a record; its node, where there
    /// was one. One in use goes with its last user.
    fn abandoned(&self, _: &Note) -> Result<Option<PathBuf>, becket_transport::Error> {
        Ok(None)
    }
    /// Clears what a device that others removed has left behind.
    fn removed(&self, _: &Device) {}
    /// What the kernel's numbers of a device are, for people.
    fn counts(&self) -> &'static str;
}

/// What a driver has made of an image.
pub(crate) struct KernelDevice {
    pub(crate) number: u32,
    pub(crate) path: PathBuf,
    /// 0 where there is none.
    pub(crate) diskseq: u64,
    /// By which the driver knows it, where it does.
    pub(crate) mark: u64,
    /// What the kernel had counted of the disk before; `None` where that is nothing.
    pub(crate) counted_before: Option<Summary>,
    /// The device, and with a lease what keeps it: open.
    pub(crate) fds: Vec<OwnedFd>,
    pub(crate) direct_io: bool,
    pub(crate) direct_io_reason: String,
    pub(crate) partitions: Vec<KernelPartition>,
    /// Their nodes were made by becket, because nothing else does so here.
    pub(crate) nodes_by_hand: bool,
    pub(crate) warnings: Vec<String>,
    /// Takes it away again.
    pub(crate) undo: fn(&KernelDevice) -> Result<(), becket_transport::Error>,
}

/// Has a device made of an image. Whatever fails after the driver has made it takes it away again.
pub(crate) fn attach(
    store: &Store,
    opened: &Opened,
    options: &AttachOptions,
    plan: &Plan,
    leased: bool,
    driver: &dyn KernelDriver,
) -> Result<(DeviceInfo, Option<lease::Held>), Error> {
    let numbers = opened.partitions.iter().map(|partition| partition.number);
    let claim = register::claim(store, options.name.as_deref(), &opened.path, numbers)?;
    // What ends this process waits until the device is in a record, or gone. Nothing delays SIGKILL: the note
    // says what to look for then.
    let _held = Held::back(&ENDING).map_err(Error::io("hold back signals for", &opened.path))?;
    let mark = mark::new(store.runtime());
    let _note = store.note(mark, backing_of(opened))?;
    let mut made = Unfinished {
        made: driver.make(opened, options, leased, mark).map_err(Error::Device)?,
        finished: false,
    };
    let disk = disk_name(plan.kind, made.made.number);
    let info = describe(opened, options, plan, &mut made.made);
    let mut record = Device {
        keeper: leased.then(ProcessId::own),
        whole: options.partitions == Partitions::Off,
        nodes_in: made.made.nodes_by_hand.then(nodes::namespace).flatten(),
        format: options.open.format.chosen(),
        needs: versions::needs_of_new_devices(None),
        ..Device::bare(info, opened.identity, made.made.mark)
    };
    let written = register::record(store, claim, &disk, &mut record)?;
    let warnings = links::make(store, &record.info);
    if !warnings.is_empty() {
        let recorded = record.clone();
        record.info.warnings.extend(warnings);
        store.amend(&recorded, &written, &record)?;
    }
    let fds = made.finish();
    let info = record.info.clone();
    let held = leased.then(|| lease::Held::Kernel { fds, store: store.clone(), device: Box::new(record) });
    Ok((info, held))
}

/// What the kernel calls the file that the device is over.
fn backing_of(opened: &Opened) -> PathBuf {
    let file = opened.sources.first().and_then(Source::file).map(|file| file.buffered.as_raw_fd());
    let named = file.and_then(|fd| fs::read_link(format!("/proc/self/fd/{fd}")).ok());
    named.unwrap_or_else(|| opened.path.clone())
}

/// A device that is taken away again when something after its making fails.
struct Unfinished {
    made: KernelDevice,
    finished: bool,
}

impl Unfinished {
    fn finish(mut self) -> Vec<OwnedFd> {
        self.finished = true;
        std::mem::take(&mut self.made.fds)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        self.made.fds.clear();
        if let Err(error) = (self.made.undo)(&self.made) {
            warn!("{} stays attached: {error}", self.made.path.display());
        }
    }
}

/// What is known of it, without its name.
fn describe(opened: &Opened, options: &AttachOptions, plan: &Plan, made: &mut KernelDevice) -> DeviceInfo {
    let mut warnings = opened.warnings.clone();
    warnings.extend(unasked_read_only(opened.read_only_reason.as_deref(), options));
    warnings.append(&mut made.warnings);
    // Asked of the device that is open: in sysfs each would have to be found and opened.
    let open = made.fds.first().map(AsFd::as_fd);
    let size = open.and_then(|device| block::size64(device).ok());
    let physical_block_size = open.and_then(|device| block::physical_block_size(device).ok());
    DeviceInfo {
        spec: options.spec_of(opened, plan),
        size: size.unwrap_or_else(|| opened.map.len()),
        direct_io: made.direct_io,
        direct_io_reason: std::mem::take(&mut made.direct_io_reason),
        physical_block_size: physical_block_size.unwrap_or(opened.block_size),
        partitions: partitions_as(std::mem::take(&mut made.partitions), &opened.partitions),
        diskseq: Some(made.diskseq).filter(|&diskseq| diskseq != 0),
        counted_before: made.counted_before.take().map(Box::new),
        warnings,
        ..DeviceInfo::bare(String::new(), made.path.clone(), plan.kind, made.number)
    }
}
