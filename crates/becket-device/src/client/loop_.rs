//! A device of the kernel's loop driver.
//! It knows what the driver is asked and how that is taken back; records are the next room's.

use std::time::Duration;

use becket_image::{DirectIo, Opened, Source};
use becket_transport::loop_::{self, LoopOptions};
use becket_transport::{Error, node};

use crate::client::kernel_made::Made;
use crate::contract::{AttachOptions, Partitions};
use crate::record::judge::disk_name;

pub(crate) fn make(opened: &Opened, options: &AttachOptions, leased: bool) -> Result<Made, Error> {
    // Without a table there is nothing to wait for.
    let partitions = options.partitions != Partitions::Off && !opened.partitions.is_empty();
    let device = loop_::attach(
        opened,
        &LoopOptions {
            autoclear: leased,
            partitions,
            rereads: options.partitions != Partitions::Off,
            direct_io: options.direct_io,
            fixed_size: options.size_limit.is_some(),
        },
    )?;
    let disk = disk_name(becket_transport::Kind::Loop, device.number);
    Ok(Made {
        number: device.number,
        path: device.path,
        diskseq: device.diskseq,
        mark: 0,
        fds: vec![device.fd],
        direct_io: device.direct_io,
        direct_io_reason: direct_io_reason(opened, options.direct_io, device.direct_io),
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
    let facts = opened.sources.first().map(|Source::File(file)| &file.facts);
    match facts {
        Some(facts) if got => facts.direct_reason.clone(),
        _ if wanted == DirectIo::Off => "switched off".to_owned(),
        Some(facts) if facts.direct.is_none() => facts.direct_reason.clone(),
        _ => "the loop driver refuses it".to_owned(),
    }
}
