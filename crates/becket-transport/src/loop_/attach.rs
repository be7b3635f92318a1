//! Binding a loop device: a free number and one LOOP_CONFIGURE with everything in it.
//! It never leaves a device behind that it does not return, and never hands out one that is not as demanded.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use becket_image::{Backing, DirectIo, Opened};
use becket_uapi::{block, loop_ as uapi};

use super::{name, open_control, open_device, path, status};
use crate::{Error, Kind, node};

/// How often a free device is asked for. Each failure means that somebody else succeeded, so this is only reached in
/// a storm that never ends.
const ATTEMPTS: u32 = 256;

/// How long promised partitions may take.
const PARTITIONS: Duration = Duration::from_secs(5);

/// How a loop device is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoopOptions {
    /// The kernel clears it when its last user closes it; until then [`LoopDevice::fd`] is one.
    pub autoclear: bool,
    /// Partitions are looked for, and those of [`Opened::partitions`] are there when [`attach`] returns.
    pub partitions: bool,
    /// Whether the page cache of the backing is bypassed.
    pub direct_io: DirectIo,
    /// The length was chosen by the user, so [`refresh`](super::refresh) must not grow it.
    pub fixed_size: bool,
}

impl Default for LoopOptions {
    fn default() -> LoopOptions {
        LoopOptions { autoclear: false, partitions: false, direct_io: DirectIo::Auto, fixed_size: false }
    }
}

/// A loop device that was attached. Dropping it detaches nothing, unless it is an autoclear device that nobody else
/// has open.
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
    /// Whether the page cache of the backing is bypassed.
    pub direct_io: bool,
    /// The nodes of its partitions: those promised, else those that the kernel found.
    pub partitions: Vec<PathBuf>,
    /// What is not as it was asked for.
    pub warnings: Vec<String>,
}

/// Attaches an image to a free loop device.
///
/// The device is bound to [`Backing::buffered`], whichever way its I/O goes: the image's locks belong to that open
/// file description, and the driver keeps it as long as the device lives. The driver does direct I/O on it by itself.
///
/// # Errors
/// The image is not one range of one file, direct I/O was demanded and is refused, partitions do not come, nodes
/// cannot be made, or the kernel refuses. Nothing stays attached then.
pub fn attach(opened: &Opened, options: &LoopOptions) -> Result<LoopDevice, Error> {
    let (config, backing) = config_of(opened, options)?;
    let control = open_control()?;
    let (number, device) = bind(&control, &config, opened.read_only)?;
    match settle(number, device.as_fd(), opened, options, backing) {
        Ok(settled) => Ok(LoopDevice {
            number,
            path: path(number),
            diskseq: block::diskseq(device.as_fd()).unwrap_or(0),
            fd: device.into(),
            direct_io: settled.direct_io,
            partitions: settled.partitions,
            warnings: settled.warnings,
        }),
        Err(error) => {
            // Ours for sure while it is open. Clearing can only fail when it is not bound any more.
            let _ = uapi::clr_fd(device.as_fd());
            Err(error)
        }
    }
}

/// The configuration for an image, and the backing it binds.
fn config_of<'a>(
    opened: &'a Opened,
    options: &LoopOptions,
) -> Result<(uapi::LoopConfig, &'a Backing), Error> {
    let does_not_fit = |reason: &str| Error::DoesNotFit {
        kind: Kind::Loop,
        image: opened.path.clone(),
        reason: reason.to_owned(),
    };
    let range = opened.map.single_range();
    let (file, offset, len) =
        range.ok_or_else(|| does_not_fit("it is not one contiguous range of one file"))?;
    let backing = opened
        .files
        .get(file as usize)
        .ok_or_else(|| does_not_fit("its map names a file that is not open"))?;

    let mut info = uapi::LoopInfo64 { lo_offset: offset, ..uapi::LoopInfo64::default() };
    info.set_file_name(opened.path.as_os_str().as_bytes());
    // The driver itself counts whole sectors up to the end of the file. Where that is what is wanted there is no
    // limit, so that the device can grow with its file.
    let whole = backing.facts.size.saturating_sub(offset) / 512 * 512 == len;
    info.lo_sizelimit = if whole && !options.fixed_size { 0 } else { len };

    let direct = wants_direct_io(options, backing);
    for (wanted, flag) in [
        (opened.read_only, uapi::LO_FLAGS_READ_ONLY),
        (options.autoclear, uapi::LO_FLAGS_AUTOCLEAR),
        (options.partitions, uapi::LO_FLAGS_PARTSCAN),
        (direct, uapi::LO_FLAGS_DIRECT_IO),
    ] {
        if wanted {
            info.lo_flags |= flag;
        }
    }
    let fd = u32::try_from(backing.buffered.as_raw_fd()).map_err(|_| does_not_fit("its file is not open"))?;
    Ok((uapi::LoopConfig { fd, block_size: opened.block_size, info, reserved: [0; 8] }, backing))
}

/// Binds the first free device that nobody else takes first.
fn bind(control: &File, config: &uapi::LoopConfig, read_only: bool) -> Result<(u32, File), Error> {
    for attempt in 0..ATTEMPTS {
        let number = uapi::ctl_get_free(control.as_fd())
            .map_err(Error::io("get a free device from", "/dev/loop-control"))?;
        let device = match open_device(number, !read_only) {
            Ok(device) => device,
            // Another program removed the device between the two calls.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV)) => continue,
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

/// What came of the wishes that the driver may not grant.
struct Settled {
    direct_io: bool,
    partitions: Vec<PathBuf>,
    warnings: Vec<String>,
}

fn settle(
    number: u32,
    device: BorrowedFd<'_>,
    opened: &Opened,
    options: &LoopOptions,
    backing: &Backing,
) -> Result<Settled, Error> {
    let wanted = wants_direct_io(options, backing);
    let refusal = if wanted { direct_io_refusal(number, device, opened, backing)? } else { None };
    let direct_io = wanted && refusal.is_none();
    let mut warnings = Vec::new();
    match refusal {
        Some(reason) if options.direct_io == DirectIo::On => {
            return Err(Error::NoDirectIo { image: opened.path.clone(), reason });
        }
        Some(reason) => warnings
            .push(format!("I/O goes through the page cache: the loop driver refuses direct I/O ({reason})")),
        None => {}
    }
    let partitions = if options.partitions { partition_nodes(&name(number), opened)? } else { Vec::new() };
    Ok(Settled { direct_io, partitions, warnings })
}

fn wants_direct_io(options: &LoopOptions, backing: &Backing) -> bool {
    match options.direct_io {
        DirectIo::On => true,
        DirectIo::Off => false,
        DirectIo::Auto => backing.facts.direct.is_some(),
    }
}

/// Why direct I/O did not come to be, if it did not: the driver drops the wish in silence. Asking once more gets its
/// refusal in words.
fn direct_io_refusal(
    number: u32,
    device: BorrowedFd<'_>,
    opened: &Opened,
    backing: &Backing,
) -> Result<Option<String>, Error> {
    let works = || -> Result<bool, Error> {
        let info = uapi::get_status64(device).map_err(Error::io("ask for the state of", path(number)))?;
        Ok(status::does_direct_io(&name(number), &info))
    };
    if works()? {
        return Ok(None);
    }
    let refusal = match uapi::set_direct_io(device, true) {
        Ok(()) if works()? => return Ok(None),
        Ok(()) => "it ignores the request".to_owned(),
        Err(error) => error.to_string(),
    };
    let why = match backing.facts.direct {
        Some(align) if align.offset > opened.block_size => {
            format!(
                "the backing wants units of {} bytes, the blocks have {}",
                align.offset, opened.block_size
            )
        }
        Some(_) => refusal,
        None => backing.facts.direct_reason.clone(),
    };
    Ok(Some(why))
}

/// The nodes of the promised partitions, else of those that the kernel found by itself.
fn partition_nodes(disk: &str, opened: &Opened) -> Result<Vec<PathBuf>, Error> {
    if !opened.partitions.is_empty() {
        return node::await_partitions(disk, &opened.partitions, PARTITIONS);
    }
    node::partitions(disk)
        .into_iter()
        .map(|partition| node::ensure_block(&partition.node, partition.dev).map(|_| partition.node))
        .collect()
}
