//! A device of device-mapper.
//! It knows what the driver is asked and how that is taken back; records are the next room's.

use becket_image::Opened;
use becket_transport::Error;
use becket_transport::dm::{self, DmOptions};

use crate::client::kernel_made::Made;
use crate::contract::{AttachOptions, Partitions};

pub(crate) fn make(opened: &Opened, options: &AttachOptions, leased: bool) -> Result<Made, Error> {
    let how = DmOptions { autoclear: leased, partitions: options.partitions != Partitions::Off };
    let device = dm::attach(opened, &how)?;
    Ok(Made {
        number: device.number,
        path: device.path,
        diskseq: device.diskseq,
        mark: device.mark,
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
