//! Device nodes and partitions, where users look for them, if the system has not made them.
//! It never decides which devices there should be and never reads an image.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use becket_image::Partition;
use becket_uapi::block;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use crate::{Error, Kind, sysfs};

/// How long devtmpfs gets before a node is made by hand. It makes nodes before the kernel call that adds the
/// device returns; what is left is the moment between sysfs's entry and the node.
const DEVTMPFS: Duration = Duration::from_millis(10);

/// A partition as the kernel has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelPartition {
    /// Its number, from 1.
    pub number: u32,
    /// First byte on the disk.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Where its node is, or should be.
    pub node: PathBuf,
    /// Its device number.
    pub dev: u64,
}

/// The nodes of a disk's partitions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Nodes {
    /// Where they are.
    pub paths: Vec<PathBuf>,
    /// Some had to be made, so nothing else removes them either.
    pub by_hand: bool,
}

/// Sees to it that `path` is the node of block device `dev`; `true` when it had to be made.
///
/// A node of another block device that still exists after devtmpfs had its chance was left behind in an
/// unmanaged `/dev` (a container's), and is replaced.
///
/// # Errors
/// Something else is there, or this process may not make nodes.
pub fn ensure_block(path: &Path, dev: u64) -> Result<bool, Error> {
    ensure(path, dev, FileType::BlockDevice)
}

/// The same for a character device.
///
/// # Errors
/// Those of [`ensure_block`].
pub fn ensure_char(path: &Path, dev: u64) -> Result<bool, Error> {
    ensure(path, dev, FileType::CharacterDevice)
}

/// Opens the control device `path` of a driver. If it has no node, a private node of number `dev` is opened,
/// in a tmpfs that is mounted nowhere: nothing is made in `/dev`. Opening may load the driver's module.
///
/// # Errors
/// That of the open, or [`Error::Unavailable`] if there is no node and this process may make none.
pub(crate) fn open_control(kind: Kind, path: &Path, dev: Option<u64>) -> Result<OwnedFd, Error> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty());
    let (Err(Errno::NOENT), Some(dev)) = (&opened, dev) else {
        return opened.map_err(Error::io("open", path));
    };
    let name = "control";
    let unseen = || -> rustix::io::Result<OwnedFd> {
        let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(context.as_fd())?;
        let dir = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
        rustix::fs::mknodat(&dir, name, FileType::CharacterDevice, Mode::RUSR | Mode::WUSR, dev)?;
        Ok(dir)
    };
    let dir = unseen().map_err(|errno| {
        let (path, why) = (path.display(), io::Error::from(errno));
        let (major, minor) = (rustix::fs::major(dev), rustix::fs::minor(dev));
        Error::Unavailable {
            kind,
            reason: format!("there is no {path}, and this process cannot make a node of its own: {why}"),
            fix: Some(format!("mknod {path} c {major} {minor}")),
        }
    })?;
    rustix::fs::openat(&dir, name, flags, Mode::empty()).map_err(Error::io("open", path))
}

/// Whether `path` is the node of character device `dev`.
pub(crate) fn is_char(path: &Path, dev: u64) -> bool {
    matches!(look(path, dev, FileType::CharacterDevice), Ok(AtPath::Right))
}

/// Major and minor number of an open device.
pub(crate) fn numbers_of(device: impl AsFd) -> Option<(u32, u32)> {
    let stat = rustix::fs::fstat(device).ok()?;
    Some((rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev)))
}

/// Waits until this user may read and write the node, to which udev gives access; returns whether that came.
pub fn await_given(path: &Path, timeout: Duration) -> bool {
    let started = Instant::now();
    loop {
        let access = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK;
        if rustix::fs::accessat(CWD, path, access, rustix::fs::AtFlags::EACCESS).is_ok() {
            return true;
        }
        if started.elapsed() > timeout {
            return false;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// What is at a path.
enum AtPath {
    Right,
    Nothing,
    OtherNode,
}

fn look(path: &Path, dev: u64, kind: FileType) -> Result<AtPath, Error> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(AtPath::Nothing),
        Err(error) => return Err(Error::io("look at", path)(error)),
    };
    let right_type = match kind {
        FileType::BlockDevice => metadata.file_type().is_block_device(),
        _ => metadata.file_type().is_char_device(),
    };
    match (right_type, metadata.rdev() == dev) {
        (true, true) => Ok(AtPath::Right),
        (true, false) => Ok(AtPath::OtherNode),
        (false, _) => Err(Error::NotANode { path: path.to_owned() }),
    }
}

fn ensure(path: &Path, dev: u64, kind: FileType) -> Result<bool, Error> {
    let started = Instant::now();
    loop {
        match look(path, dev, kind)? {
            AtPath::Right => return Ok(false),
            AtPath::OtherNode | AtPath::Nothing if started.elapsed() < DEVTMPFS => {
                thread::sleep(Duration::from_millis(1));
            }
            AtPath::OtherNode => {
                fs::remove_file(path).map_err(Error::io("replace the stale node", path))?;
                break;
            }
            AtPath::Nothing => break,
        }
    }
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(Error::io("make the directory", parent))?;
    }
    match rustix::fs::mknodat(CWD, path, kind, Mode::RUSR | Mode::WUSR, dev) {
        Ok(()) => {}
        // Another process was faster; it must be the right one now.
        Err(rustix::io::Errno::EXIST) => {
            return match look(path, dev, kind)? {
                AtPath::Right => Ok(false),
                _ => Err(Error::NotANode { path: path.to_owned() }),
            };
        }
        Err(error) => return Err(Error::io("make the node", path)(error)),
    }
    // Apart from mknod, whose mode the umask cuts.
    fs::set_permissions(path, fs::Permissions::from_mode(0o660))
        .map_err(Error::io("set the mode of", path))?;
    Ok(true)
}

/// The partitions that the kernel knows of a disk, in the order of their numbers.
pub fn partitions(disk: &str) -> Vec<KernelPartition> {
    let Ok(entries) = fs::read_dir(sysfs::directory(disk)) else { return Vec::new() };
    let mut found: Vec<_> = entries
        .flatten()
        .filter_map(|entry| {
            // A partition's directory has the disk's name in front, and only it has the attribute.
            let name = entry.file_name().into_string().ok().filter(|name| name.starts_with(disk))?;
            let number = sysfs::number(&name, "partition")?;
            Some(KernelPartition {
                number,
                start: sysfs::number::<u64>(&name, "start")?.checked_mul(512)?,
                len: sysfs::number::<u64>(&name, "size")?.checked_mul(512)?,
                node: sysfs::node(&name),
                dev: sysfs::dev(&name)?,
            })
        })
        .collect();
    found.sort_by_key(|partition| partition.number);
    found
}

/// Makes sure that the partitions an image promises exist, with their nodes, and returns these in the order
/// of `promised`. What the kernel did not find or has not found yet is added by hand. A partition that starts
/// past the end of the disk cannot exist and is left out; one that ends past it is cut, as the kernel does.
///
/// # Errors
/// The kernel has one elsewhere, refuses one, or they were not there in time.
pub fn await_partitions(disk: &str, promised: &[Partition], timeout: Duration) -> Result<Nodes, Error> {
    let path = sysfs::node(disk);
    if let Some(dev) = sysfs::dev(disk) {
        ensure_block(&path, dev)?;
    }
    let device = File::open(&path).map_err(Error::io("open", &path))?;
    let promised = within_disk(device.as_fd(), &path, promised)?;

    let started = Instant::now();
    loop {
        let kernel = partitions(disk);
        let found = |number| kernel.iter().find(|known| known.number == number);
        let missing: Vec<_> = promised.iter().filter(|promise| found(promise.number).is_none()).collect();
        if missing.is_empty() {
            let mut nodes = Nodes::default();
            for (promise, known) in
                promised.iter().filter_map(|promise| Some((promise, found(promise.number)?)))
            {
                nodes.by_hand |= ensure_as_promised(disk, promise, known)?;
                nodes.paths.push(known.node.clone());
            }
            return Ok(nodes);
        }
        if started.elapsed() > timeout {
            let numbers = missing.iter().map(|promise| promise.number).collect();
            return Err(Error::PartitionsMissing { disk: disk.to_owned(), numbers, waited: timeout });
        }
        for promise in missing {
            match block::partition_add(device.as_fd(), promise.number, promise.start, promise.len) {
                Ok(()) => {}
                // The kernel's own scan, which may run at this moment, came first.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EEXIST)) => {
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(Error::io("add a partition to", &path)(error)),
            }
        }
    }
}

/// Removes the partitions of a disk that are not as promised, and their nodes. One that only ends elsewhere
/// is resized, which the kernel allows while it is in use.
///
/// # Errors
/// One is in use (the others are done all the same), or the kernel refuses.
pub fn drop_partitions(disk: &str, promised: &[Partition]) -> Result<(), Error> {
    let path = sysfs::node(disk);
    if let Some(dev) = sysfs::dev(disk) {
        ensure_block(&path, dev)?;
    }
    let device = File::open(&path).map_err(Error::io("open", &path))?;
    let promised = within_disk(device.as_fd(), &path, promised)?;
    let mut kept = Ok(());
    let mut longer = Vec::new();
    for known in partitions(disk) {
        let KernelPartition { number, start, len, node, .. } = known;
        let done = match promised.iter().find(|promise| (promise.number, promise.start) == (number, start)) {
            Some(promise) if promise.len == len => continue,
            // Into room that others may still have.
            Some(promise) if promise.len > len => {
                longer.push((number, start, promise.len, node));
                continue;
            }
            Some(promise) => block::partition_resize(device.as_fd(), number, start, promise.len),
            None => block::partition_del(device.as_fd(), number).inspect(|()| drop(remove_stale(&node))),
        };
        kept = kept.and(done.map_err(|error| in_use(error, node)));
    }
    for (number, start, len, node) in longer {
        let done = block::partition_resize(device.as_fd(), number, start, len);
        kept = kept.and(done.map_err(|error| in_use(error, node)));
    }
    kept
}

fn in_use(error: io::Error, node: PathBuf) -> Error {
    match error.raw_os_error() {
        Some(libc::EBUSY) => Error::PartitionInUse { node },
        _ => Error::io("change the partition", node)(error),
    }
}

/// The promised partitions as the kernel takes them: without those that start past the end of the disk, and
/// cut there.
fn within_disk(device: BorrowedFd<'_>, path: &Path, promised: &[Partition]) -> Result<Vec<Partition>, Error> {
    let size = block::size64(device).map_err(Error::io("ask for the size of", path))?;
    let sector = block::logical_block_size(device).map_err(Error::io("ask for the block size of", path))?;
    let mut fit: Vec<Partition> =
        promised.iter().filter(|partition| partition.start < size).cloned().collect();
    for partition in &mut fit {
        partition.len = partition.len.min(size - partition.start);
        partition.len -= partition.len % u64::from(sector.max(1));
    }
    Ok(fit)
}

/// Removes the node of a block device that is gone from the kernel, where nothing else does so: in a
/// `/dev` that is not a devtmpfs. Says whether there was one.
///
/// # Errors
/// This process may not remove it.
pub fn remove_stale(path: &Path) -> Result<bool, Error> {
    remove_stale_below(Path::new("/"), path)
}

/// The same below the root of another process (`/proc/PID/root`), in whose mount namespace the node was made.
/// No link is followed there.
///
/// # Errors
/// Those of [`remove_stale`].
pub fn remove_stale_below(root: &Path, path: &Path) -> Result<bool, Error> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(false) };
    let device = name.to_string_lossy();
    if !sysfs::is_there() || sysfs::directory(&device).exists() {
        return Ok(false);
    }
    let inside = parent.strip_prefix("/").unwrap_or(parent);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(root, flags, Mode::empty()).and_then(|root| {
        let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        rustix::fs::openat2(&root, inside, flags, Mode::empty(), how)
    });
    let Ok(directory) = opened else { return Ok(false) };
    let stat = rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW);
    let Some(stat) = stat.ok().filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice)
    else {
        return Ok(false);
    };
    match rustix::fs::unlinkat(&directory, name, AtFlags::empty()) {
        Ok(()) => {}
        Err(rustix::io::Errno::NOENT) => return Ok(false),
        Err(errno) => return Err(Error::io("remove the stale node", path)(io::Error::from(errno))),
    }
    // A device of that name may have come in this moment, and may have found its node right.
    if sysfs::dev(&device) == Some(stat.st_rdev) {
        let mode = Mode::from_raw_mode(stat.st_mode & 0o777);
        let _ = rustix::fs::mknodat(&directory, name, FileType::BlockDevice, mode, stat.st_rdev);
    }
    Ok(true)
}

/// Sets whether a disk is read-only, its partitions with it. The kernel then refuses to open it for writing,
/// and refuses writes of processes that have it open; requests of a file system come all the same.
///
/// # Errors
/// The kernel refuses.
pub fn set_read_only(disk: &str, on: bool) -> Result<(), Error> {
    let path = sysfs::node(disk);
    if let Some(dev) = sysfs::dev(disk) {
        ensure_block(&path, dev)?;
    }
    let device = File::open(&path).map_err(Error::io("open", &path))?;
    let doing = if on { "make read-only" } else { "make writable" };
    block::set_read_only(device.as_fd(), on).map_err(Error::io(doing, &path))
}

/// Sees to the node of a partition that is where it was promised; `true` when it had to be made.
fn ensure_as_promised(disk: &str, promise: &Partition, known: &KernelPartition) -> Result<bool, Error> {
    if known.start != promise.start {
        return Err(Error::PartitionElsewhere {
            disk: disk.to_owned(),
            number: promise.number,
            expected: promise.start,
            found: known.start,
        });
    }
    ensure_block(&known.node, known.dev)
}

/// The disk's sequence number, which no other disk of this boot has or will have. `None` before Linux 5.15.
pub fn diskseq(disk: &str) -> Option<u64> {
    sysfs::number(disk, "diskseq")
}

#[cfg(test)]
#[path = "node_tests.rs"]
mod tests;
