//! A device of the kernel's loop driver.
//! It knows what the driver is asked and how that is taken back; records are the next room's.

use std::path::PathBuf;
use std::time::Duration;

use becket_image::{DirectIo, Opened, Partition, Source};
use becket_transport::Error;
use becket_transport::loop_::{self, Cleared, LoopOptions};
use becket_transport::node::{self, KernelPartition};
use becket_transport::sysfs;

use crate::client::kernel_made::{KernelDevice, KernelDriver};
use crate::contract::{AttachOptions, DeviceInfo, Partitions};
use crate::record::device::Device;
use crate::record::judge::disk_of;
use crate::record::nodes;
use crate::record::store::Note;
use crate::system::describe::partitions_as;

/// How long partitions that the kernel has been given may take to appear.
const APPEAR: Duration = Duration::from_secs(5);

/// The driver.
pub(crate) struct Loop;

impl KernelDriver for Loop {
    fn make(
        &self,
        opened: &Opened,
        options: &AttachOptions,
        leased: bool,
        mark: u64,
    ) -> Result<KernelDevice, Error> {
        make(opened, options, leased, mark)
    }

    fn abandoned(&self, note: &Note) -> Result<Option<PathBuf>, Error> {
        let Some((number, diskseq)) = loop_::marked(note.mark, &note.backing)? else { return Ok(None) };
        gone(loop_::detach(number, Some(diskseq), Some(Duration::from_secs(1))).map(|_| true))?;
        Ok(Some(sysfs::node(&format!("loop{number}"))))
    }

    fn may_refuse(&self) -> bool {
        false
    }

    fn is_fixed(&self) -> bool {
        false
    }

    fn detach_unused(&self, device: &Device) -> Result<bool, Error> {
        gone(loop_::detach_unused(device.info.number, device.info.diskseq))
    }

    fn detach_lazily(&self, device: &Device) -> Result<bool, Error> {
        let cleared = loop_::detach(device.info.number, device.info.diskseq, None);
        gone(cleared.map(|cleared| cleared == Cleared::Gone))
    }

    fn refresh(&self, device: &Device) -> Result<u64, Error> {
        loop_::refresh(device.info.number)
    }

    fn partitions(&self, info: &DeviceInfo, _: &[Partition]) -> Vec<KernelPartition> {
        node::partitions(&disk_of(info))
    }

    fn repartition(&self, device: &mut Device, table: &[Partition]) -> Result<(), Error> {
        let disk = disk_of(&device.info);
        let done = node::drop_partitions(&disk, table)
            .and_then(|()| node::await_partitions(&disk, table, APPEAR))
            .map(|made| {
                if made.by_hand {
                    device.nodes_in = nodes::namespace();
                }
            });
        device.info.partitions = partitions_as(node::partitions(&disk), table);
        done
    }

    fn removed(&self, device: &Device) {
        // Its number keeps the flag for the next device that has it.
        if device.info.spec.read_only {
            loop_::thaw(device.info.number);
        }
    }

    fn counts(&self) -> &'static str {
        "counted by the kernel; the kernel's loop driver keeps no latencies beyond a mean, and counts no errors"
    }
}

fn gone(gone: Result<bool, Error>) -> Result<bool, Error> {
    match gone {
        // Gone, and its number is in use by another program since we looked.
        Err(Error::OtherDevice { .. }) => Ok(true),
        other => other,
    }
}

fn make(opened: &Opened, options: &AttachOptions, leased: bool, mark: u64) -> Result<KernelDevice, Error> {
    // Without a table there is nothing to wait for.
    let partitions = options.partitions != Partitions::Off && !opened.partitions.is_empty();
    let device = loop_::attach(
        opened,
        &LoopOptions {
            autoclear: leased,
            partitions,
            rereads: options.partitions != Partitions::Off,
            direct_io: options.open.direct_io,
            fixed_size: options.open.size_limit.is_some(),
            mark,
        },
    )?;
    let disk = format!("loop{}", device.number);
    Ok(KernelDevice {
        number: device.number,
        path: device.path,
        diskseq: device.diskseq,
        mark,
        counted_before: device.counted_before,
        fds: vec![device.fd],
        direct_io: device.direct_io,
        direct_io_reason: direct_io_reason(opened, options.open.direct_io, device.direct_io),
        partitions: if partitions { node::partitions(&disk) } else { Vec::new() },
        nodes_by_hand: device.nodes_by_hand,
        warnings: device.warnings,
        undo: |made| {
            let diskseq = Some(made.diskseq).filter(|&diskseq| diskseq != 0);
            loop_::detach(made.number, diskseq, Some(Duration::from_secs(1))).map(drop)
        },
    })
}

fn direct_io_reason(opened: &Opened, wanted: DirectIo, got: bool) -> String {
    let facts = opened.sources.first().map(Source::facts);
    match facts {
        Some(facts) if got => facts.direct_reason.clone(),
        _ if wanted == DirectIo::Off => "switched off".to_owned(),
        Some(facts) if facts.direct.is_none() => facts.direct_reason.clone(),
        _ => "the loop driver refuses it".to_owned(),
    }
}
