//! What the supervisor asks of the driver of an offer, in terms of disks and their numbers.
//! It knows no offer: each implements [`Driver`] in a file of its own, below `offers`.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use becket_engine::Geometry;
use becket_image::Partition;
use becket_transport::{Abilities, Kind};

use super::workers::{Arrival, Worker};
use crate::contract::kept::Kept;
use crate::contract::{DeviceId, Error, Spec};
use crate::record::device::Device;
use crate::record::runtime::Runtime;

/// How long a worker that reports its FETCHes may keep the kernel waiting: one that died meanwhile does for
/// ever.
pub(super) const READY: Duration = Duration::from_secs(30);
/// How long promised partitions may take.
pub(super) const PARTITIONS: Duration = Duration::from_secs(5);

/// See [`Offer::end_left`].
pub(crate) type EndLeft = fn(&Device) -> Result<bool, Error>;

/// What the supervisor knows of an offer before it has its driver.
pub(crate) struct Offer {
    pub(crate) kind: Kind,
    /// Opens its driver.
    pub(crate) open: fn(&Runtime) -> Result<Arc<dyn Driver>, Error>,
    /// The numbers of all its devices in the kernel, if the kernel lists them without being opened.
    pub(crate) present: fn() -> Vec<u32>,
    /// The supervisor and not the kernel gives its devices their numbers.
    pub(crate) numbered_here: bool,
    /// Other programs can end what a device stands on.
    pub(crate) ended_by_others: bool,
    /// The worker shows the partitions itself.
    pub(crate) worker_has_partitions: bool,
    /// Ends what is left of a device whose worker and supervisor are dead, where its driver knows nothing of
    /// it any more; `false` when it is in use.
    pub(crate) end_left: Option<EndLeft>,
    /// Whether these are what the worker holds of a device for its supervisor's successor.
    pub(crate) is_link: fn(&[OwnedFd]) -> bool,
}

impl Offer {
    /// One whose devices the kernel numbers and keeps.
    pub(crate) const fn of(kind: Kind) -> Offer {
        Offer {
            kind,
            open: |_| Err(Error::NoDevice { target: String::new() }),
            present: Vec::new,
            numbered_here: false,
            ended_by_others: false,
            worker_has_partitions: false,
            end_left: None,
            is_link: <[OwnedFd]>::is_empty,
        }
    }
}

/// A device to be added.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewDevice {
    pub(crate) queues: u16,
    pub(crate) depth: u16,
    pub(crate) abilities: Abilities,
    /// Longest request in bytes.
    pub(crate) max_io: u32,
    /// A number by which the device is known for ours.
    pub(crate) mark: u64,
}

/// A device as its driver has it, which may have granted less than was wished for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Added {
    pub(crate) number: u32,
    pub(crate) queues: u16,
    pub(crate) depth: u16,
    pub(crate) abilities: Abilities,
    /// The mark that it was added with, also by another program.
    pub(crate) mark: u64,
    /// It shows users nothing: it was not started yet, or is stopped.
    pub(crate) stopped: bool,
}

/// What was seen of a disk once its nodes are there.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Settled {
    /// The disk's sequence number.
    pub(crate) diskseq: Option<u64>,
    /// Its physical block size in bytes, where that is not what was asked for.
    pub(crate) physical_block: Option<u32>,
}

/// What the supervisor asks of a driver. A device goes by its own number, among those of its kind.
pub(crate) trait Driver: Send + Sync {
    /// What its devices can have.
    fn abilities(&self) -> Result<Abilities, Error>;
    fn add(&self, wanted: NewDevice) -> Result<Added, Error>;
    /// Reserves these numbers, where the kernel does not: another worker serves devices with them.
    fn reserve(&self, _ids: BTreeSet<u32>) {}
    fn set_params(&self, number: u32, geometry: &Geometry) -> Result<(), Error>;
    /// What a worker needs of a device; the first of them the supervisor must not keep.
    fn open(&self, number: u32) -> Result<Vec<OwnedFd>, Error>;
    fn start(&self, number: u32, pid: u32) -> Result<(), Error>;
    /// Makes sure of the nodes of the disk and of its promised partitions.
    fn settle(&self, _number: u32, _promised: &[Partition]) -> Result<Settled, Error> {
        Ok(Settled::default())
    }
    /// Removes the disk, even if it is in use.
    fn stop(&self, number: u32) -> Result<(), Error>;
    /// Removes the disk unless it is in use: then `false`.
    fn stop_unused(&self, number: u32) -> Result<bool, Error>;
    /// Deletes a stopped device; does not wait for those who still have its dead disk open.
    fn del(&self, number: u32) -> Result<(), Error>;
    /// What the driver says of a device; nothing where there is none.
    fn info(&self, number: u32) -> Result<Option<Added>, Error>;
    /// The numbers of all devices, also of those that are not ours.
    fn numbers(&self) -> Vec<u32> {
        Vec::new()
    }
    /// The process that has started a device last, by the number that the kernel keeps.
    fn server(&self, _number: u32) -> Option<u32> {
        None
    }
    /// Whether a process has a device open in order to serve it, which only one at a time can.
    fn is_held(&self, _number: u32) -> bool {
        false
    }
    /// Begins to give a device to another worker; `false` while the kernel has not let go of the last one.
    fn start_recovery(&self, number: u32) -> Result<bool, Error>;
    /// Lets the requests of a device go to the worker that has it now.
    fn end_recovery(&self, number: u32, pid: u32) -> Result<(), Error>;
    /// Whether a live device with these abilities can be taken from its worker without a request being lost
    /// or failing.
    fn quiesces(&self, abilities: Abilities) -> bool {
        abilities.quiesces()
    }
    /// Holds a live device's new requests back, and has its worker end those that it has and close it, which
    /// `leave` asks the worker for. Repeated as long as that has not closed.
    fn quiesce(&self, number: u32, leave: &dyn Fn() -> Result<(), Error>) -> Result<(), Error>;
    /// Has an old kernel notice soon that a worker died with all its tags in use.
    fn watchful(&self, _number: u32) {}
    /// How many bytes users see of a disk.
    fn size(&self, _number: u32) -> Option<u64> {
        None
    }
    /// Gives a live disk another size, in bytes.
    fn update_size(&self, number: u32, bytes: u64) -> Result<(), Error>;
    /// Whether a disk is read-only or not for as long as it lives, so that it must be added that way.
    fn stays_read_only(&self) -> bool {
        false
    }
    /// Announces to users of a disk and of its partitions whether it is read-only; the worker refuses writes
    /// by itself.
    fn set_read_only(&self, _number: u32, _on: bool) -> Result<(), Error> {
        Ok(())
    }
    /// Replaces the partitions of an unused disk; those that are as promised stay.
    fn repartition(&self, _number: u32, _promised: &[Partition]) -> Result<(), Error> {
        Ok(())
    }
    /// Longest request of a device with these abilities, in bytes. What is behind the device takes requests
    /// in multiples of `unit` bytes only.
    fn max_io(&self, abilities: Abilities, _unit: u32) -> u32 {
        abilities.data_mode().max_io()
    }
    /// Receives which image a device shows, for display, which partitions of it, and whether it is read-only.
    fn of_image(&self, _number: u32, _image: &Path, _promised: &[Partition], _read_only: bool) {}
    /// The kernel may read the partition table of this device whenever a program asks for that.
    fn rereads(&self, _number: u32) {}
    /// Whether the kernel shows its devices as disks; another offer shows a socket, for example. What speaks
    /// of disks and their partitions need not be implemented by a driver without any.
    fn has_disk(&self) -> bool {
        true
    }
    /// The name of a device that was given none.
    fn default_name(&self, number: u32) -> String;
    /// Where a device is found.
    fn node(&self, number: u32) -> PathBuf;
    /// Whether a disk asks its worker for its length, so that the worker must know first, whether it grows or
    /// shrinks.
    fn follows_worker(&self) -> bool {
        false
    }
    /// Releases a device that will not be served again: its users get errors.
    fn abandon(&self, _number: u32) {}
    /// What a successor needs of a device besides its backing, in copies: what [`Driver::take_over`] takes.
    fn link(&self, _number: u32) -> std::io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }
    /// Takes over what a worker has held of a device for its supervisor's successor.
    fn take_over(&self, _record: &Device, _kept: &mut Kept) {}
    /// Receives what users reach a new device at, where that is a socket.
    fn take_door(&self, _number: u32, _spec: &Spec, _door: Vec<OwnedFd>) -> Result<(), Error> {
        Ok(())
    }
    /// Whether a worker does not notice that a device is stopped, and has to be asked to leave it.
    fn leaves_when_asked(&self) -> bool {
        false
    }
    /// The worker that serves a device from now on, and the clients that the one before has had to leave.
    fn welcome(&self, _number: u32, _worker: &Arc<dyn Worker>, _left: Vec<Arrival>) {}
    /// How many clients each device without a disk has.
    fn visitors(&self) -> Vec<(DeviceId, u64)> {
        Vec::new()
    }
}
