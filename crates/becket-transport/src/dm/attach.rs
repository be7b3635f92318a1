//! Making a device of device-mapper, and one for each of its partitions.
//! It never leaves one behind when it fails.

use std::fs::File;
use std::hash::{BuildHasher as _, RandomState};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use becket_image::{Opened, Partition, Source};
use becket_uapi::block;
use becket_uapi::dm as uapi;

use super::control::{name, open_control, uuid, uuid_of_partition};
use super::table;
use crate::node::KernelPartition;
use crate::{Error, Kind, node, sysfs};

/// Options of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DmOptions {
    /// The kernel removes it, and its partitions, when their last users, among them [`DmDevice::fds`], close
    /// them.
    pub autoclear: bool,
    /// The partitions of [`Opened::partitions`] become devices.
    pub partitions: bool,
}

/// A device that was attached. Dropping it detaches nothing, unless it is an autoclear device that no other
/// process has open.
#[derive(Debug)]
pub struct DmDevice {
    /// The kernel's number of the device, N in `dm-N`.
    pub number: u32,
    /// By which it is known again, also by others of becket's processes.
    pub mark: u64,
    /// Its node.
    pub path: PathBuf,
    /// The device, and of one with autoclear its partitions, open.
    pub fds: Vec<OwnedFd>,
    /// Its disk sequence number; 0 before Linux 5.15, where there is none.
    pub diskseq: u64,
    /// Its partitions.
    pub partitions: Vec<KernelPartition>,
    /// Some nodes had to be made, so nothing else removes them either.
    pub nodes_by_hand: bool,
}

/// Attaches an image that lies on block devices.
///
/// What the page cache still holds of these is written back first: device-mapper goes past it.
///
/// # Errors
/// The image does not fit, [`Error::Claimed`], nodes cannot be made, or the kernel refuses. Nothing stays
/// attached.
pub fn attach(opened: &Opened, options: &DmOptions) -> Result<DmDevice, Error> {
    let table = table::of(opened).map_err(|reason| Error::DoesNotFit {
        kind: Kind::Dm,
        image: opened.path.clone(),
        reason,
    })?;
    for file in opened.sources.iter().filter_map(Source::file) {
        block::flush_buffers(file.buffered.as_fd())
            .map_err(Error::io("write back the page cache of", &opened.path))?;
    }
    let control = open_control()?;
    let mut maker = Maker {
        control: &control,
        opened,
        autoclear: options.autoclear,
        made: Vec::new(),
        fds: Vec::new(),
        by_hand: false,
    };
    let mark = mark();
    let disk = maker.make(uuid(mark), None, &table)?;
    let promised = if options.partitions { opened.partitions.as_slice() } else { &[] };
    let partitions = promised
        .iter()
        .map(|promise| maker.partition(mark, disk.dev, promise))
        .collect::<Result<Vec<_>, _>>()?;
    let diskseq = maker.fds.first().and_then(|fd| block::diskseq(fd.as_fd()).ok()).unwrap_or(0);
    let nodes_by_hand = maker.by_hand;
    Ok(DmDevice {
        number: disk.number,
        mark,
        path: disk.node,
        fds: maker.keep(),
        diskseq,
        partitions,
        nodes_by_hand,
    })
}

/// A number that no other device has.
fn mark() -> u64 {
    // Its keys are random.
    RandomState::new().hash_one(std::process::id()).max(1)
}

/// A device that was made.
struct Made {
    number: u32,
    dev: u64,
    node: PathBuf,
}

/// Makes devices, and removes them again unless they are kept.
struct Maker<'a> {
    control: &'a File,
    opened: &'a Opened,
    autoclear: bool,
    made: Vec<String>,
    fds: Vec<OwnedFd>,
    by_hand: bool,
}

impl Maker<'_> {
    fn make(&mut self, uuid: String, minor: Option<u32>, table: &[uapi::Target]) -> Result<Made, Error> {
        let device = create(self.control, &uuid, minor, table, self.opened.read_only)
            .map_err(|error| error.into_error(&self.opened.path))?;
        self.made.push(uuid.clone());
        let made =
            Made { number: device.1, dev: rustix::fs::makedev(device.0, device.1), node: node_of(device.1) };
        self.by_hand |= node::ensure_block(&made.node, made.dev)?;
        // The disk is opened in any case, and before it takes I/O: from here on it cannot become another one.
        if self.autoclear || self.fds.is_empty() {
            let fd = File::open(&made.node).map_err(Error::io("open", &made.node))?;
            self.fds.push(fd.into());
        }
        if self.autoclear {
            // In use by us, so this only leaves the order.
            uapi::remove_deferred(self.control.as_fd(), &uuid)
                .map_err(Error::io("have the kernel remove at its last close", &made.node))?;
        }
        uapi::resume(self.control.as_fd(), &uuid, true).map_err(Error::io("start", &made.node))?;
        Ok(made)
    }

    fn partition(&mut self, mark: u64, disk: u64, promise: &Partition) -> Result<KernelPartition, Error> {
        let table = table::linear(disk, promise.start, promise.len);
        let made = self.make(uuid_of_partition(mark, promise.number), None, &table)?;
        Ok(KernelPartition {
            number: promise.number,
            start: promise.start,
            len: promise.len,
            node: made.node,
            dev: made.dev,
        })
    }

    fn keep(mut self) -> Vec<OwnedFd> {
        self.made.clear();
        std::mem::take(&mut self.fds)
    }
}

impl Drop for Maker<'_> {
    fn drop(&mut self) {
        self.fds.clear();
        // Partitions stand on the disk, which was made first. One with autoclear may be gone by itself.
        for uuid in self.made.iter().rev() {
            let _ = uapi::remove_deferred(self.control.as_fd(), uuid);
        }
    }
}

/// Why there is no device.
pub(super) enum Refused {
    /// A program or the kernel has claimed a device below.
    Claimed,
    /// The kernel's word.
    Io(&'static str, std::io::Error),
}

impl Refused {
    pub(super) fn into_error(self, image: &std::path::Path) -> Error {
        match self {
            Refused::Claimed => Error::Claimed { path: image.to_owned() },
            Refused::Io(doing, error) => Error::io(doing, image)(error),
        }
    }
}

/// Makes a device with a table that it does not use yet; its major and minor number.
pub(super) fn create(
    control: &File,
    uuid: &str,
    minor: Option<u32>,
    table: &[uapi::Target],
    read_only: bool,
) -> Result<(u32, u32), Refused> {
    let control = control.as_fd();
    let status = uapi::create(control, uuid, uuid, minor)
        .map_err(|error| Refused::Io("make a device of device-mapper for", error))?;
    match uapi::load(control, uuid, read_only, table) {
        Ok(()) => Ok(status.dev),
        Err(error) => {
            // It cannot have been opened: it has no disk yet.
            let _ = uapi::remove(control, uuid);
            Err(match error.raw_os_error() {
                Some(libc::EBUSY) => Refused::Claimed,
                _ => Refused::Io("load device-mapper's table for", error),
            })
        }
    }
}

pub(super) fn node_of(number: u32) -> PathBuf {
    sysfs::node(&name(number))
}
