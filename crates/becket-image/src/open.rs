//! Opens an image: one path lookup, then only descriptors.
//! It never blocks on a FIFO and never follows the path a second time.

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::facts::{self, Known, open_quietly};
use crate::layer::packed::Kind;
use crate::locks::{self, Refused};
use crate::partition::{self, Table};
use crate::qcow2::chain::{First, Link, Unpacked, unpack_chain};
use crate::resolve::{Found, Split, io, resolve, split};
use crate::text::shown;
use crate::through::{self, End, Walk};
use crate::vmdk;
use crate::{
    BackingKind, DirectIo, Encoded, Error, Facts, Format, Image, LayerError, Map, Partition, ReadAt as _,
};

/// How an image is to be opened. All sizes are bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OpenOptions {
    /// Never write, even where it would be possible.
    pub read_only: bool,
    /// Whether to go past the page cache.
    pub direct_io: DirectIo,
    /// Where the image starts in the file.
    pub offset: u64,
    /// Longest image, for a file that goes on behind it.
    pub size_limit: Option<u64>,
    /// Logical block size; chosen by the rules of [`open()`] when not given.
    pub block_size: Option<u32>,
    /// Exclude nobody, and let nobody's locks stand in the way.
    pub shared: bool,
    /// Read the partition table.
    pub partitions: bool,
    /// What the file is, for paths that go on inside it.
    pub format: Format,
    /// Where backing files may lie, beside the directory of the image that names them.
    pub backing_dirs: Vec<PathBuf>,
}

/// An image that is open.
#[derive(Debug)]
pub struct Opened {
    /// Where the file is: absolute, without symbolic links.
    pub path: PathBuf,
    /// Which byte of the image lives where.
    pub map: Map,
    /// The backings that the map speaks of.
    pub files: Vec<Backing>,
    /// The layers of encoded blocks that the map speaks of; each speaks of those before it only.
    pub encoded: Vec<Encoded>,
    /// Whether it is an image inside another, whose length is not that of the file.
    pub nested: bool,
    /// Whether it gets room for what is written while it is written: its writer is [`crate::Grower`].
    pub grows: bool,
    /// Whether writes must be refused.
    pub read_only: bool,
    /// Why, for people, when that was not asked for.
    pub read_only_reason: Option<String>,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Which file it is, whatever its path.
    pub identity: Identity,
    /// What the partition table names; empty when none was asked for or found.
    pub partitions: Vec<Partition>,
    /// What the user should know although it went well.
    pub warnings: Vec<String>,
}

/// Device and inode of the file; of a block device, those of its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// Number of the device that the file is on (`st_dev`).
    pub dev: u64,
    /// Number of the inode.
    pub ino: u64,
}

/// A file or device that holds bytes of the image.
#[derive(Debug)]
pub struct Backing {
    /// Goes through the page cache; carries the locks.
    pub buffered: OwnedFd,
    /// The same inode with `O_DIRECT`, where that is possible: whether it is used can change while it is open.
    pub direct: Option<OwnedFd>,
    /// What it can do.
    pub facts: Facts,
}

/// Opens the image at `path`, locked against other programs (see `shared`), and asks what it can do.
///
/// - The path is looked up once. A directory, FIFO, socket or character device is refused without being
///   opened; everything after that goes through descriptors. All of them close on exec.
/// - A path may go on inside a file or device, and inside the images in it (`through` has the rules). What
///   is read on the way comes through the same descriptor, with the locks held.
/// - What cannot be opened for writing is opened for reading, with [`Opened::read_only_reason`].
/// - The logical block size is the one asked for; else that of the block device below; else that of the GPT
///   inside, when it speaks 4096; else 512. A tail that fills no block is left out, with a warning.
/// - Direct I/O that is impossible is an error only when it was insisted on.
pub fn open(path: &Path, options: &OpenOptions) -> Result<Opened, Error> {
    check_block_size(options.block_size)?;
    let Split { host, inside } = split(path);
    let found = resolve(&host)?;
    if inside.is_empty() || options.read_only {
        return open_inside(&host, &found, &inside, options.read_only, None, options);
    }
    // What is inside decides whether anything may be written, and readers must not shut each other out.
    let walked = look_inside(&host, &found, &inside, options.format, &options.backing_dirs)?;
    let reason = walked
        .read_only
        .or_else(|| if options.shared { None } else { loop_over(Path::new("/sys/block"), &host) });
    match reason {
        Some(reason) => open_inside(&host, &found, &inside, true, Some(reason), options),
        None => open_inside(&host, &found, &inside, false, None, options),
    }
}

/// Walks a path without locks and for reading only: to see what is there. See [`OpenOptions::backing_dirs`].
///
/// # Errors
/// As [`open()`].
pub fn look(path: &Path, format: Format, backing_dirs: &[PathBuf]) -> Result<Walk, Error> {
    let Split { host, inside } = split(path);
    look_inside(&host, &resolve(&host)?, &inside, format, backing_dirs)
}

/// The same from the file or device that was found at `host`.
fn look_inside(
    host: &Path,
    found: &Found,
    inside: &[OsString],
    format: Format,
    backing_dirs: &[PathBuf],
) -> Result<Walk, Error> {
    let Found { inode, kind, stat } = found;
    let (fd, _) = open_inode(host, inode, *kind, true)?;
    let size = size_of(host, &fd, *kind)?;
    let block_size = natural_block_size(host, &fd, *kind)?;
    let file = OpenFile { host, fd: &fd, kind: *kind, stat, size, block_size };
    let disk = disk_in(&file, format, backing_dirs, inside.is_empty(), &mut |_, _, _| Ok(()))?;
    let mut walk = through::walk(disk.image, shown(host.as_os_str().as_bytes()), inside, format)?;
    walk.read_only = disk.read_only.or(walk.read_only);
    Ok(walk)
}

/// A file or device that a path names, open.
struct OpenFile<'a> {
    host: &'a Path,
    fd: &'a OwnedFd,
    kind: BackingKind,
    stat: &'a Stat,
    size: u64,
    block_size: u32,
}

/// What a file holds, when it is taken for what `format` says.
struct Disk {
    image: Image,
    /// The files below it.
    below: Vec<Link>,
    /// It is not the file as it is.
    unpacked: bool,
    /// Why it may only be read, whatever the file allows.
    read_only: Option<String>,
}

/// The disk in a file: the file itself, or what a qcow2 and those below it hold. `whole` says that nothing but all of it is wanted, and `lock` has a word
/// about each of the files below.
fn disk_in(
    file: &OpenFile<'_>,
    format: Format,
    dirs: &[PathBuf],
    whole: bool,
    lock: &mut dyn FnMut(&Path, &OwnedFd, BackingKind) -> Result<(), Error>,
) -> Result<Disk, Error> {
    let OpenFile { host, fd, kind, stat, size, block_size } = *file;
    let reader = fd.try_clone().map_err(|error| io(host, "its descriptor cannot be copied", error))?;
    let image = Image::raw(Arc::new(reader), size, block_size);
    let as_it_is = |image| Disk { image, below: Vec::new(), unpacked: false, read_only: None };
    if !matches!(format, Format::Auto | Format::Qcow2 | Format::Vmdk) {
        return Ok(as_it_is(image));
    }
    let path = real_path(host, fd)?;
    let first = First { image: &image, path: &path, kind, stat, dirs };
    let mut open = |path: &Path, found: Found| {
        let Found { inode, kind, stat } = found;
        let (fd, _) = open_inode(path, &inode, kind, true)?;
        lock(path, &fd, kind)?;
        let size = size_of(path, &fd, kind)?;
        Ok(Link { path: real_path(path, &fd)?, fd, kind, stat, size })
    };
    let qcow2 = if format == Format::Vmdk { None } else { unpack_chain(&first, &mut open)? };
    let unpacked = match qcow2 {
        None if format != Format::Qcow2 => vmdk::unpack(&first, &mut open)?,
        qcow2 => qcow2,
    };
    match unpacked {
        Some(Unpacked { image, below, cluster, unwritable }) => {
            let part =
                || (!whole).then(|| "only the whole of a qcow2 is written, and this is a part".to_owned());
            let device = || {
                (kind == BackingKind::Block)
                    .then(|| "it is a qcow2 on a block device, which cannot grow".to_owned())
            };
            // Tables are written through the page cache and data past it, which must not meet in one page or block.
            let unit =
                rustix::fs::fstatfs(fd).ok().and_then(|fs| u64::try_from(fs.f_bsize).ok()).unwrap_or(0);
            let unit = unit.max(rustix::param::page_size() as u64);
            let small = || {
                (cluster < unit).then(|| {
                    format!(
                        "its clusters of {cluster} bytes are shorter than what is written at once, {unit}"
                    )
                })
            };
            let read_only = unwritable.or_else(part).or_else(device).or_else(small);
            Ok(Disk { image, below, unpacked: true, read_only })
        }
        None if format != Format::Auto => Err(Error::Layer {
            image: shown(host.as_os_str().as_bytes()),
            source: LayerError::Corrupt(format!("it is not {format}")),
        }),
        None => Ok(as_it_is(image)),
    }
}

/// Why a file can only be read, by its first bytes: what the walk will say, before anything else is looked at.
fn only_read(file: &OwnedFd, format: Format) -> Option<String> {
    if let Some(packed) = Kind::of(file, format) {
        return Some(through::compressed(packed));
    }
    let mut head = [0; vmdk::TITLE.len()];
    file.read_at(&mut head, 0).ok()?;
    let wanted = |kind| format == Format::Auto || format == kind;
    (wanted(Format::Vmdk) && head.eq_ignore_ascii_case(vmdk::TITLE)).then(|| vmdk::ONLY_READ.to_owned())
}

/// Where an open file is: absolute, without symbolic links.
fn real_path(path: &Path, fd: &OwnedFd) -> Result<PathBuf, Error> {
    std::fs::read_link(proc_path(fd))
        .map_err(|error| io(path, "its name cannot be read from /proc/self/fd", error))
}

/// Opens what was found at `host`, and the image in it that `inside` names. The path itself is not looked up again.
fn open_inside(
    host: &Path,
    found: &Found,
    inside: &[OsString],
    read_only: bool,
    reason: Option<String>,
    options: &OpenOptions,
) -> Result<Opened, Error> {
    let (kind, stat) = (found.kind, found.stat);
    let (buffered, unwritable) = open_inode(host, &found.inode, kind, read_only)?;
    if !read_only
        && inside.is_empty()
        && let Some(reason) = only_read(&buffered, options.format)
    {
        // Known before anything is locked, for readers must not shut each other out.
        return open_inside(host, found, inside, true, Some(reason), options);
    }
    let read_only_reason = reason.or(unwritable);
    let read_only = read_only || read_only_reason.is_some();
    let mut warnings = Vec::new();
    lock_fd(host, &buffered, kind, read_only, options.shared, &mut warnings)?;

    let size = size_of(host, &buffered, kind)?;
    let natural = natural_block_size(host, &buffered, kind)?;
    let file = OpenFile { host, fd: &buffered, kind, stat: &stat, size, block_size: natural };
    let whole = inside.is_empty() && options.offset == 0 && options.size_limit.is_none();
    let Disk { image, below, unpacked, read_only: unwritable } =
        disk_in(&file, options.format, &options.backing_dirs, whole, &mut |path, fd, kind| {
            lock_fd(path, fd, kind, true, options.shared, &mut warnings)
        })?;
    let walked = through::walk(image, shown(host.as_os_str().as_bytes()), inside, options.format)?;
    let level = walked.last()?;
    let named = |host: PathBuf| inside.iter().fold(host, |path, name| path.join(name));
    if walked.end != End::Image {
        return Err(Error::NotAnImage { path: named(host.to_owned()), what: "a directory" });
    }
    // It may have changed since it was looked at without a lock, or was not looked at. Readers take readers' locks only.
    if let Some(reason) = walked.read_only.clone().or(unwritable).filter(|_| !read_only) {
        drop((walked, buffered));
        return open_inside(host, found, inside, true, Some(reason), options);
    }
    let Layout { offset, len, block_size, partitions } =
        lay_out(&named(host.to_owned()), &level.image, natural, options, &mut warnings)?;
    let image = level.image.slice(offset, len).map_err(|error| Error::Layer {
        image: level.path.clone(),
        source: LayerError::Corrupt(error.to_string()),
    })?;

    // Of pieces some may be aligned and others not: the engine looks at each.
    let start = image.map().single_range().map_or(0, |(_, offset, _)| offset);
    let known = Known { fd: buffered.as_fd(), stat: &stat, kind, size, writable: !read_only, offset: start };
    let resolved = real_path(host, &buffered)?;
    let mut files = vec![backing(host, &known, options.direct_io)?];
    for Link { path, fd, kind, stat, size } in &below {
        let known = Known { fd: fd.as_fd(), stat, kind: *kind, size: *size, writable: false, offset: 0 };
        files.push(backing(path, &known, options.direct_io)?);
    }
    let descriptors = std::iter::once(buffered).chain(below.into_iter().map(|link| link.fd));
    let files = descriptors.zip(files).map(|(buffered, (facts, direct))| Backing { buffered, direct, facts });
    let mut files: Vec<Backing> = files.collect();
    let grows = unpacked && !read_only;
    if let Some(first) = files.first_mut().filter(|_| grows) {
        // What is behind its end now will be holes.
        first.facts.sparse = true;
    }
    Ok(Opened {
        path: named(resolved),
        map: image.map().clone(),
        files,
        encoded: image.encoded().cloned().collect(),
        grows,
        nested: unpacked || walked.levels.len() > 1,
        read_only,
        read_only_reason,
        block_size,
        identity: Identity { dev: stat.st_dev, ino: stat.st_ino },
        partitions,
        warnings,
    })
}

/// What a file of an image can do, and its direct descriptor.
fn backing(path: &Path, known: &Known<'_>, wanted: DirectIo) -> Result<(Facts, Option<OwnedFd>), Error> {
    let (facts, direct) = facts::ask(known);
    if wanted == DirectIo::On && direct.is_none() {
        return Err(Error::DirectIo { path: path.to_owned(), reason: facts.direct_reason });
    }
    if direct.is_some() && wanted != DirectIo::Off && known.kind == BackingKind::Regular {
        forget_cached(known.fd);
    }
    Ok((facts, direct))
}

/// Why a file system inside a file may be in use although nobody holds a lock: a loop device of somebody else's.
/// What is bound to a file that the kernel does not name counts as one. `disks` is sysfs' directory of them.
fn loop_over(disks: &Path, host: &Path) -> Option<String> {
    let host = std::fs::canonicalize(host).ok()?;
    let identity = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let ours = identity(&host);
    std::fs::read_dir(disks).ok()?.flatten().find_map(|disk| {
        let taken = match std::fs::read(disk.path().join("loop/backing_file")) {
            Ok(text) => {
                let path = Path::new(OsStr::from_bytes(text.strip_suffix(b"\n").unwrap_or(&text)));
                // The same file may have other names.
                path == host || ours.is_some() && identity(path) == ours
            }
            // No loop device, or none that is bound (any more).
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => error.raw_os_error() != Some(Errno::NODEV.raw_os_error()),
        };
        taken.then(|| format!("{} shows the image to others, who may write to it", disk.path().display()))
    })
}

/// Drops what the page cache holds of a file that will be gone past.
///
/// As long as one page is cached (reading a partition table is enough), the kernel looks for pages to invalidate at
/// each direct write: 9 per cent of a 4 KiB write's instructions were seen to go there.
fn forget_cached(file: BorrowedFd<'_>) {
    // Only advice: dirty pages stay until they are written, and nothing depends on it.
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
}

/// Takes the locks of an image that was opened `shared`, now that those who stood in the way are gone.
///
/// # Errors
/// They are not.
pub fn lock(path: &Path, file: &Backing, write: bool) -> Result<(), Error> {
    // Without locks it was opened with a warning already.
    lock_fd(path, &file.buffered, file.facts.kind, !write, false, &mut Vec::new())
}

/// Keeps other programs away from the image, as far as the file system lets us.
fn lock_fd(
    path: &Path,
    fd: &OwnedFd,
    kind: BackingKind,
    read_only: bool,
    shared: bool,
    warnings: &mut Vec<String>,
) -> Result<(), Error> {
    if !shared && kind == BackingKind::Block && !read_only {
        refuse_claimed(path, fd)?;
    }
    match locks::take(fd.as_fd(), !read_only, shared, locks::a_moment) {
        Ok(()) => Ok(()),
        Err(Refused::Clash(clash)) => Err(Error::InUse { path: path.to_owned(), clash }),
        Err(Refused::Unsupported(error)) => {
            warnings.push(format!(
                "not locked against other programs: the file system has no such locks ({error})"
            ));
            Ok(())
        }
        Err(Refused::Io(error)) => Err(io(path, "it cannot be locked", error)),
    }
}

/// What of an image is offered, and in which units.
struct Layout {
    offset: u64,
    len: u64,
    block_size: u32,
    partitions: Vec<Partition>,
}

/// The logical block size of the backing by itself.
fn natural_block_size(path: &Path, fd: &OwnedFd, kind: BackingKind) -> Result<u32, Error> {
    match kind {
        BackingKind::Regular => Ok(512),
        BackingKind::Block => becket_uapi::block::logical_block_size(fd.as_fd())
            .map(|size| size.max(512))
            .map_err(|error| io(path, "its block size cannot be read", error)),
    }
}

/// Chooses block size and length of what is offered of `image`, on a backing with blocks of `natural` bytes.
fn lay_out(
    path: &Path,
    image: &Image,
    natural: u32,
    options: &OpenOptions,
    warnings: &mut Vec<String>,
) -> Result<Layout, Error> {
    let size = image.len();
    let offset = options.offset.min(size);
    let room = (size - offset).min(options.size_limit.unwrap_or(u64::MAX));
    // An image whose first sectors cannot be read may be attached just to rescue the rest.
    let table = image
        .slice(offset, room)
        .map_err(std::io::Error::other)
        .and_then(|window| partition::read(&window, room, options.block_size.unwrap_or(natural)))
        .unwrap_or_else(|error| {
            let warning = format!("its partition table cannot be read: {error}");
            Table { warnings: vec![warning], ..Table::default() }
        });
    let spoken = table.sector.filter(|sector| *sector <= largest_block_size()).unwrap_or(512);
    let block_size = options.block_size.unwrap_or(natural.max(spoken));
    let len = room - room % u64::from(block_size);
    if len == 0 {
        return Err(nothing_left(path, options, size, block_size));
    }
    if len < room {
        let tail = room - len;
        warnings.push(format!(
            "the last {tail} of {room} bytes are left out: they do not fill a block of {block_size}"
        ));
    }
    let partitions =
        if options.partitions { usable_partitions(table, len, block_size, warnings) } else { Vec::new() };
    Ok(Layout { offset, len, block_size, partitions })
}

/// Where a descriptor of this process can be opened anew or asked for its name.
pub(crate) fn proc_path(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

/// The largest logical block that a device can have: the page size.
fn largest_block_size() -> u32 {
    u32::try_from(rustix::param::page_size()).unwrap_or(4096)
}

fn check_block_size(asked: Option<u32>) -> Result<(), Error> {
    let largest = largest_block_size();
    match asked {
        Some(size) if !size.is_power_of_two() || !(512..=largest).contains(&size) => {
            Err(Error::BlockSize { block_size: size, largest })
        }
        _ => Ok(()),
    }
}

/// Opens the inode for what is possible; the reason when that is less than what was asked for.
fn open_inode(
    path: &Path,
    inode: &OwnedFd,
    kind: BackingKind,
    read_only: bool,
) -> Result<(OwnedFd, Option<String>), Error> {
    let inode = proc_path(inode);
    let reopen = |access: OFlags| open_quietly(&inode, access | OFlags::CLOEXEC);
    let failed = |errno| match errno {
        Errno::ACCESS | Errno::PERM => Error::Permission { path: path.to_owned(), source: errno.into() },
        Errno::NOENT => io(path, "it cannot be opened through /proc/self/fd; is /proc mounted?", errno),
        errno => io(path, "it cannot be opened", errno),
    };
    let mut reason = None;
    if !read_only {
        match reopen(OFlags::RDWR) {
            Ok(fd)
                if kind == BackingKind::Block
                    && becket_uapi::block::read_only(fd.as_fd()).unwrap_or(false) =>
            {
                reason = Some("the device is read-only".to_owned());
            }
            Ok(fd) => return Ok((fd, None)),
            Err(errno) => reason = Some(why_read_only(errno, kind).ok_or_else(|| failed(errno))?.to_owned()),
        }
    }
    reopen(OFlags::RDONLY).map(|fd| (fd, reason)).map_err(failed)
}

/// What kept a file from being opened for writing; `None` when reading is no way out.
fn why_read_only(errno: Errno, kind: BackingKind) -> Option<&'static str> {
    match (errno, kind) {
        (Errno::ROFS, BackingKind::Regular) => Some("it lies on a read-only file system"),
        (Errno::ACCESS, BackingKind::Regular) => Some("this user may not write to it"),
        (Errno::ROFS | Errno::ACCESS, BackingKind::Block) => {
            Some("the device is read-only, or this user may not write to it")
        }
        (Errno::PERM, _) => Some("it is immutable, sealed or append-only"),
        (Errno::TXTBSY, _) => Some("it is being executed, or used as swap space"),
        _ => None,
    }
}

/// Refuses a block device that the kernel itself uses: mounted, swapped to, or part of another device.
///
/// Only a question: the claim is given back, because whatever is built on the device next (device-mapper)
/// must be able to make its own. Programs are kept apart by the locks.
fn refuse_claimed(path: &Path, device: &OwnedFd) -> Result<(), Error> {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    match rustix::io::retry_on_intr(|| rustix::fs::open(proc_path(device), flags, Mode::empty())) {
        Err(Errno::BUSY) => Err(Error::Claimed { path: path.to_owned() }),
        _ => Ok(()),
    }
}

fn size_of(path: &Path, fd: &OwnedFd, kind: BackingKind) -> Result<u64, Error> {
    let size = match kind {
        BackingKind::Regular => rustix::fs::fstat(fd)
            .map(|stat| u64::try_from(stat.st_size).unwrap_or(0))
            .map_err(|errno| io(path, "its size cannot be read", errno))?,
        BackingKind::Block => becket_uapi::block::size64(fd.as_fd())
            .map_err(|error| io(path, "its size cannot be read", error))?,
    };
    if size == 0 { Err(Error::Empty { path: path.to_owned() }) } else { Ok(size) }
}

/// The error for an image without a single block.
fn nothing_left(path: &Path, options: &OpenOptions, size: u64, block_size: u32) -> Error {
    match options.size_limit {
        Some(limit) if limit < block_size.into() => Error::SizeLimit { limit, block_size },
        _ => Error::NothingLeft { path: path.to_owned(), size, offset: options.offset, block_size },
    }
}

/// The partitions that a device of `len` bytes in blocks of `block_size` can have.
fn usable_partitions(table: Table, len: u64, block_size: u32, warnings: &mut Vec<String>) -> Vec<Partition> {
    warnings.extend(table.warnings);
    if let Some(sector) = table.sector.filter(|sector| *sector != block_size) {
        warnings.push(format!(
            "the partition table counts in sectors of {sector} bytes, the device has blocks of {block_size}: \
             others may not see the partitions; --block-size {sector} would fit"
        ));
    }
    let block = u64::from(block_size);
    let (usable, left_out): (Vec<_>, Vec<_>) = table.partitions.into_iter().partition(|partition| {
        let end = partition.start.saturating_add(partition.len);
        partition.start % block == 0 && partition.len % block == 0 && end <= len
    });
    warnings.extend(left_out.iter().map(|partition| {
        format!("partition {} is left out: it does not lie on blocks of {block_size} bytes", partition.number)
    }));
    usable
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_device_is_seen_whatever_its_file_is_called() {
        let dir = tempfile::tempdir().unwrap();
        let root = std::fs::canonicalize(dir.path()).unwrap();
        let host = root.join(OsStr::from_bytes(b"im\xffage"));
        let link = root.join("other name");
        std::fs::write(&host, "").unwrap();
        std::fs::hard_link(&host, &link).unwrap();
        let disks = root.join("block");
        let backing = disks.join("loop0/loop/backing_file");
        std::fs::create_dir_all(disks.join("sda")).unwrap();
        std::fs::create_dir_all(backing.parent().unwrap()).unwrap();
        let taken = || loop_over(&disks, &host).is_some();
        assert!(!taken(), "nothing is bound");
        for (path, expected) in [(&host, true), (&link, true), (&root.join("another"), false)] {
            let line = [path.as_os_str().as_bytes(), b"\n"].concat();
            std::fs::write(&backing, line).unwrap();
            assert_eq!(taken(), expected, "{}", path.display());
        }
        std::fs::remove_file(&backing).unwrap();
        std::fs::create_dir(&backing).unwrap();
        assert!(taken(), "what cannot be read may be the image");
    }
}
