//! A device of device-mapper, from a plan to a record, and its end.
//! It never keeps a process for it: a lease is descriptors, everything else is the kernel's.

use becket_image::Opened;
use becket_transport::dm::{self, DmDevice, DmOptions};
use becket_transport::{Kind, sysfs};

use crate::attach::{Held, claim, claim_default, partitions_as, size_of, speakable, unasked_read_only};
use crate::process::ProcessId;
use crate::state::{Device, Store};
use crate::{AttachOptions, DeviceInfo, DeviceState, Error, Partitions, Plan, links, log};

pub(crate) fn attach(
    store: &Store,
    opened: &Opened,
    options: &AttachOptions,
    plan: &Plan,
    leased: bool,
) -> Result<(DeviceInfo, Option<Held>), Error> {
    let claim = claim(store, options.name.as_deref(), opened)?;
    let how = DmOptions { autoclear: leased, partitions: options.partitions != Partitions::Off };
    let mut made = Unfinished(Some(dm::attach(opened, &how).map_err(Error::Device)?));
    let Some(device) = &mut made.0 else {
        return Err(Error::Server { what: "lost a device".to_owned(), log: None });
    };
    let claim = match claim {
        Some(claim) => claim,
        None => claim_default(store, &format!("dm-{}", device.number), &opened.path)?,
    };
    let mut record = Device {
        info: describe(claim.name(), opened, options, plan, device),
        image: opened.identity,
        server: None,
        worker: None,
        keeper: leased.then(ProcessId::own),
        starting: false,
        mark: device.mark,
    };
    record.info.autoclear = leased;
    let recorded = record.clone();
    claim.fill(&record)?;
    record.info.warnings.extend(links::make(store.runtime(), &record.info));
    if record != recorded {
        store.update(&recorded, record.clone())?;
    }
    let info = record.info.clone();
    let held = made.keep().filter(|_| leased).map(|device| Held::Kernel {
        fds: device.fds,
        store: store.clone(),
        device: Box::new(record),
    });
    Ok((info, held))
}

/// A device that is removed again when something after its making fails.
struct Unfinished(Option<DmDevice>);

impl Unfinished {
    fn keep(mut self) -> Option<DmDevice> {
        self.0.take()
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let Some(DmDevice { mark, fds, path, .. }) = self.0.take() else { return };
        drop(fds);
        // Programs that look at every new device may have it open: it goes with them.
        if let Err(error) = dm::detach_lazily(mark) {
            log::warn(format_args!("{} stays attached: {error}", path.display()));
        }
    }
}

fn describe(
    name: &str,
    opened: &Opened,
    options: &AttachOptions,
    plan: &Plan,
    device: &mut DmDevice,
) -> DeviceInfo {
    let disk = format!("dm-{}", device.number);
    let mut warnings = opened.warnings.clone();
    warnings.extend(unasked_read_only(opened.read_only_reason.as_deref(), options));
    DeviceInfo {
        name: name.to_owned(),
        device: device.path.clone(),
        transport: Kind::Dm,
        reason: plan.reason.clone(),
        size: size_of(&disk).unwrap_or_else(|| opened.map.len()),
        read_only: opened.read_only,
        direct_io: true,
        direct_io_reason: "device-mapper hands requests to the device below as they are".to_owned(),
        below: None,
        block_size: opened.block_size,
        physical_block_size: sysfs::number(&disk, "queue/physical_block_size").unwrap_or(opened.block_size),
        state: DeviceState::Live,
        image: speakable(&opened.path),
        offset: options.offset,
        size_limit: options.size_limit,
        autoclear: false,
        partitions: partitions_as(std::mem::take(&mut device.partitions), &opened.partitions),
        queues: None,
        depth: None,
        mode: None,
        number: device.number,
        diskseq: Some(device.diskseq).filter(|&diskseq| diskseq != 0),
        server_pid: None,
        worker_pid: None,
        isolated: false,
        recoveries: 0,
        warnings,
    }
}
