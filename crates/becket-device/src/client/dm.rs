//! A device of device-mapper.
//! It knows what the driver is asked and how that is taken back; records are the next room's.

use becket_image::{Opened, Partition};
use becket_transport::Error;
use becket_transport::dm::{self, DmOptions};
use becket_transport::node::KernelPartition;

use crate::client::kernel_made::{KernelDevice, KernelDriver};
use crate::contract::{AttachOptions, DeviceInfo, Partitions};
use crate::record::device::Device;
use crate::record::judge::disk_of;
use crate::system::describe::partitions_as;

/// The driver.
pub(crate) struct Mapper;

impl KernelDriver for Mapper {
    fn make(
        &self,
        opened: &Opened,
        options: &AttachOptions,
        leased: bool,
        _: u64,
    ) -> Result<KernelDevice, Error> {
        make(opened, options, leased)
    }

    fn may_refuse(&self) -> bool {
        // Whether a device below can be claimed shows only when device-mapper claims it.
        true
    }

    fn is_fixed(&self) -> bool {
        true
    }

    fn detach_unused(&self, device: &Device) -> Result<bool, Error> {
        dm::detach_unused(device.mark)
    }

    fn detach_lazily(&self, device: &Device) -> Result<bool, Error> {
        dm::detach_lazily(device.mark)
    }

    fn refresh(&self, device: &Device) -> Result<u64, Error> {
        dm::refresh(device.mark, device.info.spec.size_limit)
    }

    /// They are disks of their own: their starts are in the table, or else in the record.
    fn partitions(&self, info: &DeviceInfo, table: &[Partition]) -> Vec<KernelPartition> {
        let starts = |number| {
            let entry = table.iter().find(|entry| entry.number == number).map(|entry| entry.start);
            entry.or_else(|| info.partitions.iter().find(|part| part.number == number).map(|part| part.start))
        };
        let found = dm::partitions(&disk_of(info)).into_iter();
        found.filter_map(|(number, name)| dm::partition(number, &name, starts(number).unwrap_or(0))).collect()
    }

    fn repartition(&self, device: &mut Device, table: &[Partition]) -> Result<(), Error> {
        let done = dm::repartition(device.mark, table);
        device.info.partitions = partitions_as(self.partitions(&device.info, table), table);
        done
    }

    fn counts(&self) -> &'static str {
        "counted by the kernel since this device was attached, those of its partitions included; device-mapper keeps \
         no latencies beyond a mean, and counts no errors"
    }
}

fn make(opened: &Opened, options: &AttachOptions, leased: bool) -> Result<KernelDevice, Error> {
    let how = DmOptions { autoclear: leased, partitions: options.partitions != Partitions::Off };
    let device = dm::attach(opened, &how)?;
    Ok(KernelDevice {
        number: device.number,
        path: device.path,
        diskseq: device.diskseq,
        mark: device.mark,
        // Its disk is new.
        counted_before: None,
        fds: device.fds,
        direct_io: true,
        direct_io_reason: "device-mapper hands requests to the device below as they are".to_owned(),
        partitions: device.partitions,
        nodes_by_hand: device.nodes_by_hand,
        warnings: Vec::new(),
        // Programs that look at every new device may have it open: it goes with them.
        undo: |made| dm::detach_lazily(made.mark).map(drop),
    })
}
