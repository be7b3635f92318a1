//! Binding a loop device: a free number and one LOOP_CONFIGURE with everything in it.
//! It never leaves a device behind that it does not return, and never hands out one that is not as demanded.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use becket_engine::Summary;
use becket_image::{DirectIo, Opened};
use becket_uapi::{block, loop_ as uapi};
use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::time::{ClockId, Timespec, clock_gettime};

use super::device::{control, is_absent, name, open_device, path};
use super::direct::{self, Wish};
use super::range::{Range, range_of};
use crate::node::Nodes;
use crate::{Error, node, sysfs};

/// How often a free device is asked for. Each failure means that another process succeeded, so this is only
/// reached in an endless storm.
const ATTEMPTS: u32 = 256;

/// Each so-manieth attempt asks the driver.
const PATIENT: u32 = 4;

/// How long promised partitions may take.
const PARTITIONS: Duration = Duration::from_secs(5);

/// Options of a loop device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoopOptions {
    /// The kernel clears it when its last user closes it; until then [`LoopDevice::fd`] is one.
    pub autoclear: bool,
    /// Those of [`Opened::partitions`], or else those that the kernel finds, are there when [`attach`]
    /// returns.
    pub partitions: bool,
    /// The kernel reads the partition table when a program asks it to (BLKRRPART), as sfdisk does after a
    /// change.
    pub rereads: bool,
    /// Whether the page cache of the backing is bypassed.
    pub direct_io: DirectIo,
    /// The length was chosen by the user, so [`refresh`](super::refresh) must not grow it.
    pub fixed_size: bool,
    /// By which [`marked`](super::marked) finds it; 0 for none.
    pub mark: u64,
}

impl Default for LoopOptions {
    fn default() -> LoopOptions {
        LoopOptions {
            autoclear: false,
            partitions: false,
            rereads: false,
            direct_io: DirectIo::Auto,
            fixed_size: false,
            mark: 0,
        }
    }
}

/// A loop device that was attached. Dropping it detaches nothing, unless it is an autoclear device that no
/// other process has open.
#[derive(Debug)]
pub struct LoopDevice {
    /// The kernel's number of the device.
    pub number: u32,
    /// Its node.
    pub path: PathBuf,
    /// The device, open as the image was: read-write or read-only.
    pub fd: OwnedFd,
    /// Its disk sequence number; 0 before Linux 5.15, where there is none.
    pub diskseq: u64,
    /// What the kernel had counted of the disk before; `None` where that is nothing.
    pub counted_before: Option<Summary>,
    /// Whether the page cache of the backing is bypassed.
    pub direct_io: bool,
    /// The nodes of its partitions: those promised, else those that the kernel found.
    pub partitions: Vec<PathBuf>,
    /// Some of these nodes had to be made, so nothing else removes them either.
    pub nodes_by_hand: bool,
    /// What is not as it was asked for.
    pub warnings: Vec<String>,
}

/// Attaches an image to a free loop device.
///
/// The device is bound to [`Backing::buffered`](becket_image::FileSource::buffered), whichever way its I/O
/// goes: the image's locks belong to that open file description, and the driver keeps it as long as the
/// device lives. The driver does direct I/O on it by itself.
///
/// # Errors
/// The image is not one range of one file, direct I/O was demanded and is refused, partitions do not come,
/// nodes cannot be made, or the kernel refuses. Nothing stays attached then.
pub fn attach(opened: &Opened, options: &LoopOptions) -> Result<LoopDevice, Error> {
    let range = range_of(opened)?;
    let direct = direct::wish(opened, &range, options.direct_io)?;
    let config = config_of(opened, options, &range, direct == Wish::Ask);
    // By the clock that the kernel writes down times of files with.
    let begun = clock_gettime(ClockId::RealtimeCoarse);
    let (number, device) = bind(control()?, &config, opened.read_only)?;
    let settled = writable(number, &device, opened.read_only)
        .and_then(|()| direct::settle(device.as_fd(), opened, options.direct_io, direct))
        .and_then(|direct| Ok((direct, partition_nodes(&name(number), opened, options)?)));
    match settled {
        Ok(((direct_io, warning), nodes)) => Ok(LoopDevice {
            number,
            path: path(number),
            diskseq: block::diskseq(device.as_fd()).unwrap_or(0),
            counted_before: counted_before(&device, number, begun),
            fd: device.into(),
            direct_io,
            partitions: nodes.paths,
            nodes_by_hand: nodes.by_hand,
            warnings: warning.into_iter().collect(),
        }),
        Err(error) => {
            // Ours for sure while it is open. Clearing can only fail when it is not bound any more.
            let _ = uapi::clr_fd(device.as_fd());
            Err(error)
        }
    }
}

/// What the kernel had counted of a disk that it had made before this attach began. A new disk has counted
/// nothing, and is not looked up in sysfs (0037): its node says how old it is.
fn counted_before(device: &File, number: u32, begun: Timespec) -> Option<Summary> {
    let node = statx(device, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME).ok();
    let made = node.filter(|node| node.stx_mask & StatxFlags::BTIME.bits() != 0).map(|node| node.stx_btime);
    if made.is_some_and(|made| (made.tv_sec, i64::from(made.tv_nsec)) >= (begun.tv_sec, begun.tv_nsec)) {
        return None;
    }
    sysfs::counted(&name(number)).filter(|counted| *counted != counted.since(counted))
}

/// Everything of the device, for one call.
fn config_of(opened: &Opened, options: &LoopOptions, range: &Range<'_>, direct: bool) -> uapi::LoopConfig {
    let mut info = uapi::LoopInfo64 { lo_offset: range.offset, ..uapi::LoopInfo64::default() };
    info.set_file_name(opened.path.as_os_str().as_bytes());
    if options.mark != 0 {
        info.set_mark(options.mark);
    }
    // The driver itself counts whole sectors up to the end of the file. If that is what is wanted there is no
    // limit, so that the device can grow with its file.
    let whole = range.file.facts.size.saturating_sub(range.offset) / 512 * 512 == range.len;
    info.lo_sizelimit = if whole && !options.fixed_size { 0 } else { range.len };
    for (wanted, flag) in [
        (opened.read_only, uapi::LO_FLAGS_READ_ONLY),
        (options.autoclear, uapi::LO_FLAGS_AUTOCLEAR),
        (options.partitions || options.rereads, uapi::LO_FLAGS_PARTSCAN),
        (direct, uapi::LO_FLAGS_DIRECT_IO),
    ] {
        if wanted {
            info.lo_flags |= flag;
        }
    }
    // A descriptor that is open is not negative.
    let fd = range.file.buffered.as_raw_fd().unsigned_abs();
    uapi::LoopConfig { fd, block_size: opened.block_size, info, reserved: [0; 8] }
}

/// Binds a free device before others can: the first one, or one behind those that this process has taken.
fn bind(control: &File, config: &uapi::LoopConfig, read_only: bool) -> Result<(u32, File), Error> {
    let binding = NUMBERS.begin();
    for attempt in 0..ATTEMPTS {
        let number = binding.next(attempt, || {
            uapi::ctl_get_free(control.as_fd())
                .map_err(Error::io("get a free device from", "/dev/loop-control"))
        })?;
        let device = match open_device(number, !read_only) {
            // There are no more yet. Another process may make it first, which is as good.
            Err(error) if is_absent(error.raw_os_error()) => {
                let _ = uapi::ctl_add(control.as_fd(), number);
                open_device(number, !read_only)
            }
            opened => opened,
        };
        let device = match device {
            Ok(device) => device,
            // Another program removed the device between the two calls.
            Err(error) if is_absent(error.raw_os_error()) => continue,
            Err(error) => return Err(error),
        };
        match uapi::configure(device.as_fd(), config) {
            Ok(()) => return Ok((number, device)),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EAGAIN)) => {
                drop(device);
                // At first at once; later out of step with those that do the same.
                if attempt >= 8 {
                    thread::sleep(Duration::from_micros(u64::from(attempt % 16) * 250));
                }
            }
            Err(error) => return Err(Error::io("configure", path(number))(error)),
        }
    }
    Err(Error::NoFreeLoop { attempts: ATTEMPTS })
}

/// Which numbers are tried. The driver names the first free device, and the same one to every process that
/// asks before it is bound. So of the threads of a process that bind devices at the same time one asks, and
/// the others try what lies behind its answer, each a number of its own.
struct Numbers {
    under_way: AtomicU32,
    next: AtomicU32,
}

static NUMBERS: Numbers = Numbers { under_way: AtomicU32::new(0), next: AtomicU32::new(0) };

impl Numbers {
    fn begin(&self) -> Binding<'_> {
        Binding { numbers: self, alone: self.under_way.fetch_add(1, Ordering::Relaxed) == 0 }
    }
}

/// One who binds a device.
struct Binding<'a> {
    numbers: &'a Numbers,
    /// No other thread did when it began.
    alone: bool,
}

impl Binding<'_> {
    /// The number to try; after some failures it is what the driver says.
    fn next(&self, attempt: u32, ask: impl FnOnce() -> Result<u32, Error>) -> Result<u32, Error> {
        let asks = if attempt == 0 { self.alone } else { attempt.is_multiple_of(PATIENT) };
        let behind = if asks { 0 } else { self.numbers.next.fetch_add(1, Ordering::Relaxed) };
        if behind != 0 {
            return Ok(behind);
        }
        let number = ask()?;
        self.numbers.next.store(number.saturating_add(1), Ordering::Relaxed);
        Ok(number)
    }
}

impl Drop for Binding<'_> {
    fn drop(&mut self) {
        self.numbers.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Makes the kernel take writes again if its node refuses them since another use: BLKROSET's setting outlives
/// that use.
fn writable(number: u32, device: &File, read_only: bool) -> Result<(), Error> {
    let io = |doing| Error::io(doing, path(number));
    if !read_only && block::read_only(device.as_fd()).map_err(io("look at"))? {
        block::set_read_only(device.as_fd(), false).map_err(io("make writable"))?;
    }
    Ok(())
}

/// The nodes of the promised partitions, else of those that the kernel found by itself.
fn partition_nodes(disk: &str, opened: &Opened, options: &LoopOptions) -> Result<Nodes, Error> {
    let mut nodes = Nodes::default();
    if !options.partitions {
        return Ok(nodes);
    }
    if !opened.partitions.is_empty() {
        return node::await_partitions(disk, &opened.partitions, PARTITIONS);
    }
    for partition in node::partitions(disk) {
        nodes.by_hand |= node::ensure_block(&partition.node, partition.dev)?;
        nodes.paths.push(partition.node);
    }
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_asks_and_the_others_try_what_is_behind() {
        let numbers = Numbers { under_way: AtomicU32::new(0), next: AtomicU32::new(0) };
        let never = || -> Result<u32, Error> { panic!("it need not ask") };
        let one = numbers.begin();
        assert_eq!(one.next(0, || Ok(7)).unwrap(), 7);
        let [two, three] = [numbers.begin(), numbers.begin()];
        assert_eq!((two.next(0, never).unwrap(), three.next(0, never).unwrap()), (8, 9));
        assert_eq!(one.next(1, never).unwrap(), 10, "somebody else had it");
        // All of these are taken.
        assert_eq!(two.next(PATIENT, || Ok(90)).unwrap(), 90);
        assert_eq!(three.next(1, never).unwrap(), 91);
        drop((one, two, three));
        assert_eq!(numbers.begin().next(0, || Ok(3)).unwrap(), 3, "the lowest again");
    }
}
