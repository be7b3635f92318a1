//! ublk as an offer: devices of the kernel's `ublk_drv`, whose numbers and marks the kernel keeps.
//! It decides nothing but how an old kernel is asked whether a disk is in use.

use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use becket_engine::Geometry;
use becket_image::Partition;
use becket_transport::ublk::control::{self, AddRequest, Control, DevInfo};
use becket_transport::{Abilities, Kind, node, sysfs};

use crate::contract::Error;
use crate::supervisor::driver::{Added, Driver, NewDevice, Offer, PARTITIONS, READY, Settled};
use crate::system::users;

/// How long one order to hold requests back may wait for tags that have none.
const QUIET: Duration = Duration::from_secs(1);

pub(in crate::supervisor) const OFFER: Offer = Offer {
    open: |_| Ok(Arc::new(Control::open().map_err(Error::Device)?)),
    present: control::numbers,
    ..Offer::of(Kind::Ublk)
};

impl Driver for Control {
    fn abilities(&self) -> Result<Abilities, Error> {
        self.granted().map(Abilities::of_flags).map_err(Error::Device)
    }

    fn add(&self, wanted: NewDevice) -> Result<Added, Error> {
        let NewDevice { queues, depth, abilities, max_io, mark } = wanted;
        let request = AddRequest { id: None, queues, depth, flags: abilities.flags(), max_io, mark };
        Control::add(self, request).map(|info| added(&info)).map_err(Error::Device)
    }

    fn set_params(&self, number: u32, geometry: &Geometry) -> Result<(), Error> {
        Control::set_params(self, number, geometry).map_err(Error::Device)
    }

    fn open(&self, number: u32) -> Result<Vec<OwnedFd>, Error> {
        self.open_char(number).map(|char_device| vec![char_device]).map_err(Error::Device)
    }

    fn start(&self, number: u32, pid: u32) -> Result<(), Error> {
        Control::start(self, number, pid, READY).map_err(Error::Device)
    }

    fn settle(&self, number: u32, promised: &[Partition]) -> Result<Settled, Error> {
        let disk = disk(number);
        let node = sysfs::node(&disk);
        if self.is_unprivileged() && !node::await_given(&node, PARTITIONS) {
            let what = format!("has waited for udev to give this user {}", node.display());
            return Err(Error::Server { what, log: None });
        }
        let known = sysfs::virtual_disk(&disk);
        if let Some(dev) = known.map(|(dev, _)| dev).or_else(|| sysfs::dev(&disk)) {
            node::ensure_block(&node, dev).map_err(Error::Device)?;
        }
        if !promised.is_empty() {
            node::await_partitions(&disk, promised, PARTITIONS).map_err(Error::Device)?;
        }
        Ok(Settled { diskseq: known.and_then(|(_, diskseq)| diskseq), physical_block: None })
    }

    fn stop(&self, number: u32) -> Result<(), Error> {
        Control::stop(self, number).map_err(Error::Device)
    }

    fn stop_unused(&self, number: u32) -> Result<bool, Error> {
        match self.try_stop(number) {
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::OPNOTSUPP.raw_os_error()) => {}
            other => return other.map_err(Error::Device),
        }
        // Before Linux 7.0. Mounts, swap and stacked devices hold a disk exclusively; plain descriptors are
        // found by looking. A program that opens the disk between the look and the stop loses it: there is no
        // better way on such a kernel.
        if held(number) || users::any(&disk(number)) {
            return Ok(false);
        }
        Driver::stop(self, number).map(|()| true)
    }

    fn del(&self, number: u32) -> Result<(), Error> {
        // Its char device is gone when this returns. Waiting for the number as well would wait for a mount
        // that a dead worker left behind, for as long as it lasts.
        self.del_async(number).map_err(Error::Device)
    }

    fn info(&self, number: u32) -> Result<Option<Added>, Error> {
        Control::info(self, number).map(|info| info.as_ref().map(added)).map_err(Error::Device)
    }

    fn numbers(&self) -> Vec<u32> {
        control::numbers()
    }

    fn server(&self, number: u32) -> Option<u32> {
        let info = Control::info(self, number).ok().flatten()?;
        u32::try_from(info.ublksrv_pid).ok().filter(|pid| *pid > 0)
    }

    fn is_held(&self, number: u32) -> bool {
        // The kernel names nobody, but refuses a second one. Ours is closed at once.
        let busy = Some(rustix::io::Errno::BUSY.raw_os_error());
        self.open_char(number).is_err_and(|error| error.raw_os_error() == busy)
    }

    fn start_recovery(&self, number: u32) -> Result<bool, Error> {
        match Control::start_recovery(self, number) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()) => Ok(false),
            Err(error) => Err(Error::Device(error)),
        }
    }

    fn end_recovery(&self, number: u32, pid: u32) -> Result<(), Error> {
        Control::end_recovery(self, number, pid, READY).map_err(Error::Device)
    }

    fn quiesce(&self, number: u32, _: &dyn Fn() -> Result<(), Error>) -> Result<(), Error> {
        Control::quiesce(self, number, QUIET).map_err(Error::Device)
    }

    fn watchful(&self, number: u32) {
        // Such a kernel looks for a dead worker when a request has taken too long, after 30 s unless
        // configured otherwise. A living worker's requests may take any time. Without the attribute only such
        // a recovery takes longer.
        let path = sysfs::directory(&disk(number)).join("queue/io_timeout");
        let _ = std::fs::write(path, "1000");
    }

    fn size(&self, number: u32) -> Option<u64> {
        // Its sectors always have 512 bytes.
        sysfs::number::<u64>(&disk(number), "size")?.checked_mul(512)
    }

    fn update_size(&self, number: u32, bytes: u64) -> Result<(), Error> {
        Control::update_size(self, number, bytes).map_err(Error::Device)
    }

    fn stays_read_only(&self) -> bool {
        // The kernel takes BLKROSET from root only.
        self.is_unprivileged()
    }

    fn set_read_only(&self, number: u32, on: bool) -> Result<(), Error> {
        node::set_read_only(&disk(number), on).map_err(Error::Device)
    }

    fn repartition(&self, number: u32, promised: &[Partition]) -> Result<(), Error> {
        node::drop_partitions(&disk(number), promised).map_err(Error::Device)?;
        Driver::settle(self, number, promised).map(drop)
    }

    fn default_name(&self, number: u32) -> String {
        disk(number)
    }

    fn node(&self, number: u32) -> PathBuf {
        sysfs::node(&disk(number))
    }
}

fn added(info: &DevInfo) -> Added {
    Added {
        number: info.dev_id,
        queues: info.nr_hw_queues,
        depth: info.queue_depth,
        abilities: Abilities::of_flags(info.flags),
        mark: info.ublksrv_flags,
        stopped: info.is_dead(),
    }
}

/// The name of a device's disk in sysfs.
fn disk(number: u32) -> String {
    format!("ublkb{number}")
}

fn held(number: u32) -> bool {
    let exclusive = i32::try_from(rustix::fs::OFlags::EXCL.bits()).unwrap_or_default();
    let opened = OpenOptions::new().read(true).custom_flags(exclusive).open(sysfs::node(&disk(number)));
    opened.is_err_and(|error| error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()))
}
