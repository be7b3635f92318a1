//! What the supervisor asks of the ublk driver, behind a trait so that each step can fail in tests.
//! It decides nothing but how an old kernel is asked whether a disk is in use.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use becket_engine::Geometry;
use becket_image::Partition;
use becket_transport::ublk::DataMode;
use becket_transport::ublk::control::{self, AddRequest, Control, DevInfo};
use becket_transport::{node, sysfs};
use becket_uapi::ublk::{UBLK_F_BATCH_IO, UBLK_F_QUIESCE};

use crate::contract::Error;
use crate::contract::kept::Kept;
use crate::record::store::Device;
use crate::system::users;

/// How long a worker that reports its FETCHes may keep the kernel waiting: one that died meanwhile does for
/// ever.
pub(super) const READY: Duration = Duration::from_secs(30);
/// How long one order to hold requests back may wait for tags that have none.
const QUIET: Duration = Duration::from_secs(1);
/// How long promised partitions may take.
pub(super) const PARTITIONS: Duration = Duration::from_secs(5);

/// What the supervisor asks of a driver. A device goes by its own number, among those of its kind.
pub(crate) trait Driver: Send + Sync {
    fn features(&self) -> Result<u64, Error>;
    fn add(&self, request: AddRequest) -> Result<DevInfo, Error>;
    /// Reserves these numbers, where the kernel does not: another worker serves devices with them.
    fn reserve(&self, _ids: BTreeSet<u32>) {}
    fn set_params(&self, id: u32, geometry: &Geometry) -> Result<(), Error>;
    /// What a worker needs of a device; the first of them the supervisor must not keep.
    fn open(&self, id: u32) -> Result<Vec<OwnedFd>, Error>;
    fn start(&self, id: u32, pid: u32) -> Result<(), Error>;
    /// Makes sure of the nodes of the disk and of its promised partitions; with the disk's sequence number if
    /// it was seen.
    fn settle(&self, id: u32, promised: &[Partition]) -> Result<Option<u64>, Error>;
    /// Removes the disk, even if it is in use.
    fn stop(&self, id: u32) -> Result<(), Error>;
    /// Removes the disk unless it is in use: then `false`.
    fn stop_unused(&self, id: u32) -> Result<bool, Error>;
    /// Deletes a stopped device; does not wait for those who still have its dead disk open.
    fn del(&self, id: u32) -> Result<(), Error>;
    fn info(&self, id: u32) -> Result<Option<DevInfo>, Error>;
    /// The numbers of all devices, also of those that are not ours.
    fn numbers(&self) -> Vec<u32> {
        Vec::new()
    }
    /// Begins to give a device to another worker; `false` while the kernel has not let go of the last one.
    fn start_recovery(&self, id: u32) -> Result<bool, Error>;
    /// Lets the requests of a device go to the worker that has it now.
    fn end_recovery(&self, id: u32, pid: u32) -> Result<(), Error>;
    /// Whether a live device with those flags can be taken from its worker without a request being lost or
    /// failing.
    fn can_quiesce(&self, flags: u64) -> bool {
        // With batch commands at least Linux 7.0 to 7.3 fail the requests that come after QUIESCE_DEV (it
        // sets `force_abort`, as for a device that is stopped).
        flags & (UBLK_F_QUIESCE | UBLK_F_BATCH_IO) == UBLK_F_QUIESCE
    }
    /// Holds a live device's new requests back, and has its worker end those that it has and close it, which
    /// `leave` asks the worker for. Repeated as long as that has not closed.
    fn quiesce(&self, id: u32, leave: &dyn Fn() -> Result<(), Error>) -> Result<(), Error>;
    /// Has an old kernel notice soon that a worker died with all its tags in use.
    fn watchful(&self, id: u32);
    /// How many bytes users see of a disk.
    fn size(&self, id: u32) -> Option<u64>;
    /// Gives a live disk another size, in bytes.
    fn update_size(&self, id: u32, bytes: u64) -> Result<(), Error>;
    /// Whether a disk is read-only or not for as long as it lives, so that it must be added that way.
    fn stays_read_only(&self) -> bool {
        false
    }
    /// Announces to users of a disk and of its partitions whether it is read-only; the worker refuses writes
    /// by itself.
    fn set_read_only(&self, id: u32, on: bool) -> Result<(), Error>;
    /// Replaces the partitions of an unused disk; those that are as promised stay.
    fn repartition(&self, id: u32, promised: &[Partition]) -> Result<(), Error>;
    /// Longest request of a device with those flags, in bytes.
    fn max_io(&self, flags: u64) -> u32 {
        DataMode::of(flags).max_io()
    }
    /// Receives which image a device shows, for display, which partitions of it, and whether it is read-only.
    fn of_image(&self, _id: u32, _image: &Path, _promised: &[Partition], _read_only: bool) {}
    /// The kernel may read the partition table of this device whenever a program asks for that.
    fn rereads(&self, _id: u32) {}
    /// The name of a device that was given none.
    fn default_name(&self, id: u32) -> String {
        disk(id)
    }
    /// Where a device is found.
    fn node(&self, id: u32) -> PathBuf {
        sysfs::node(&disk(id))
    }
    /// Whether a disk asks its worker for its length, so that the worker must know first, whether it grows or
    /// shrinks.
    fn follows_worker(&self) -> bool {
        false
    }
    /// Releases a device that will not be served again: its users get errors.
    fn abandon(&self, _id: u32) {}
    /// What a successor needs of a device besides its backing, in copies: what [`Driver::take_over`] takes.
    fn link(&self, _id: u32) -> std::io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }
    /// Takes over what a worker has held of a device for its supervisor's successor.
    fn take_over(&self, _record: &Device, _kept: &mut Kept) {}
}

impl Driver for Control {
    fn features(&self) -> Result<u64, Error> {
        self.granted().map_err(Error::Device)
    }

    fn add(&self, request: AddRequest) -> Result<DevInfo, Error> {
        Control::add(self, request).map_err(Error::Device)
    }

    fn set_params(&self, id: u32, geometry: &Geometry) -> Result<(), Error> {
        Control::set_params(self, id, geometry).map_err(Error::Device)
    }

    fn open(&self, id: u32) -> Result<Vec<OwnedFd>, Error> {
        self.open_char(id).map(|char_device| vec![char_device]).map_err(Error::Device)
    }

    fn start(&self, id: u32, pid: u32) -> Result<(), Error> {
        Control::start(self, id, pid, READY).map_err(Error::Device)
    }

    fn settle(&self, id: u32, promised: &[Partition]) -> Result<Option<u64>, Error> {
        let disk = disk(id);
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
        Ok(known.and_then(|(_, diskseq)| diskseq))
    }

    fn stop(&self, id: u32) -> Result<(), Error> {
        Control::stop(self, id).map_err(Error::Device)
    }

    fn stop_unused(&self, id: u32) -> Result<bool, Error> {
        match self.try_stop(id) {
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::OPNOTSUPP.raw_os_error()) => {}
            other => return other.map_err(Error::Device),
        }
        // Before Linux 7.0. Mounts, swap and stacked devices hold a disk exclusively; plain descriptors are
        // found by looking. A program that opens the disk between the look and the stop loses it: there is no
        // better way on such a kernel.
        if held(id) || users::any(&disk(id)) {
            return Ok(false);
        }
        Driver::stop(self, id).map(|()| true)
    }

    fn del(&self, id: u32) -> Result<(), Error> {
        // Its char device is gone when this returns. Waiting for the number as well would wait for a mount
        // that a dead worker left behind, for as long as it lasts.
        self.del_async(id).map_err(Error::Device)
    }

    fn info(&self, id: u32) -> Result<Option<DevInfo>, Error> {
        Control::info(self, id).map_err(Error::Device)
    }

    fn numbers(&self) -> Vec<u32> {
        control::numbers()
    }

    fn start_recovery(&self, id: u32) -> Result<bool, Error> {
        match Control::start_recovery(self, id) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()) => Ok(false),
            Err(error) => Err(Error::Device(error)),
        }
    }

    fn end_recovery(&self, id: u32, pid: u32) -> Result<(), Error> {
        Control::end_recovery(self, id, pid, READY).map_err(Error::Device)
    }

    fn quiesce(&self, id: u32, _: &dyn Fn() -> Result<(), Error>) -> Result<(), Error> {
        Control::quiesce(self, id, QUIET).map_err(Error::Device)
    }

    fn watchful(&self, id: u32) {
        // Such a kernel looks for a dead worker when a request has taken too long, after 30 s unless
        // configured otherwise. A living worker's requests may take any time. Without the attribute only such
        // a recovery takes longer.
        let path = sysfs::directory(&disk(id)).join("queue/io_timeout");
        let _ = std::fs::write(path, "1000");
    }

    fn size(&self, id: u32) -> Option<u64> {
        // Its sectors always have 512 bytes.
        sysfs::number::<u64>(&disk(id), "size")?.checked_mul(512)
    }

    fn update_size(&self, id: u32, bytes: u64) -> Result<(), Error> {
        Control::update_size(self, id, bytes).map_err(Error::Device)
    }

    fn stays_read_only(&self) -> bool {
        // The kernel takes BLKROSET from root only.
        self.is_unprivileged()
    }

    fn set_read_only(&self, id: u32, on: bool) -> Result<(), Error> {
        node::set_read_only(&disk(id), on).map_err(Error::Device)
    }

    fn repartition(&self, id: u32, promised: &[Partition]) -> Result<(), Error> {
        node::drop_partitions(&disk(id), promised).map_err(Error::Device)?;
        Driver::settle(self, id, promised).map(drop)
    }
}

/// The name of a device's disk in sysfs.
pub(crate) fn disk(id: u32) -> String {
    format!("ublkb{id}")
}

fn held(id: u32) -> bool {
    let exclusive = i32::try_from(rustix::fs::OFlags::EXCL.bits()).unwrap_or_default();
    let opened = OpenOptions::new().read(true).custom_flags(exclusive).open(sysfs::node(&disk(id)));
    opened.is_err_and(|error| error.raw_os_error() == Some(rustix::io::Errno::BUSY.raw_os_error()))
}
