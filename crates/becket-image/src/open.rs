//! Opens an image: one path lookup, then only descriptors.
//! It never blocks on a FIFO and never follows the path a second time.

use std::ffi::OsString;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::backing::Linked;
use crate::backing_url::Allowed;
use crate::bytes::field;
use crate::connected;
use crate::cow::{self, Base};
use crate::disk::ends::Ends;
use crate::disk::{self, vmdk};
use crate::geometry::{self, Geometry};
use crate::layer::foreign;
use crate::layer::packed;
use crate::opened::{Location, Opened};
use crate::options::{OpenOptions, Tail};
use crate::qcow2::chain::{self, First, ONLY_READ, Unpacked, unpack_chain};
use crate::qcow2::{Verdict, Writing, mark_corrupt};
use crate::remote;
use crate::resolve::{HostInode, Split, io, resolve, resolve_image, split};
use crate::source::file::host::{
    HostFile, natural_block_size, open_inode, read_as_it_comes, read_here_and_there, real_path, size_of,
};
use crate::source::file::locks::{self, Claim};
use crate::source::file::outer::{OuterDisk, lock_fd};
use crate::text::shown;
use crate::through::{self, End, Walk};
use crate::{
    Budget, DirectIo, Error, FileKind, Fillers, Format, Identity, Image, LayerError, ReadAt as _, Source,
    WantedUrl,
};

/// How often an image that moves meanwhile is looked for.
const LOOKS: u32 = 8;

/// Opens the image at `path`, locked against other programs (see `shared`), and asks what it can do.
///
/// - The path is looked up once. A directory, FIFO, socket or character device is refused without being
///   opened; everything after that goes through descriptors. All of them close on exec.
/// - A path may go on inside a file or device, and inside the images in it (`through` has the rules). What
///   is read on the way comes through the same descriptor, with the locks held.
/// - What cannot be opened for writing is opened for reading, with [`Opened::read_only_reason`].
/// - The logical block size is the one asked for; else that of the block device below; else that of the GPT
///   inside, when it speaks 4096; else 512. A tail that fills no block is treated as [`Tail`] says,
///   with a warning.
/// - Direct I/O that is impossible is an error only when it was insisted on.
pub fn open(path: &Path, options: &OpenOptions) -> Result<Opened, Error> {
    let mut opened = open_partly(path, options)?;
    opened.complete(options.direct_io);
    Ok(opened)
}

/// The same, but asks of the files only what the kernel's drivers need to know: [`Opened::complete`] asks the
/// rest, which takes longer than everything else here.
///
/// # Errors
/// As [`open()`].
pub fn open_partly(path: &Path, options: &OpenOptions) -> Result<Opened, Error> {
    open_for(path, options, false)
}

/// The same as [`open_partly`] for an image that another process is to serve: that gets the connection to a
/// server by which it was opened.
///
/// # Errors
/// As [`open()`].
pub fn open_to_serve(path: &Path, options: &OpenOptions) -> Result<Opened, Error> {
    open_for(path, options, true)
}

/// `to_serve`: another process is to have what is opened.
fn open_for(path: &Path, options: &OpenOptions, to_serve: bool) -> Result<Opened, Error> {
    geometry::check_block_size(options.block_size)?;
    if connected::is_remote(path) {
        return remote::open(path, options, to_serve);
    }
    let Split { host, inside } = split(path);
    let found = resolve_image(&host)?;
    let (budget, allowed) = (&options.budget(), options.allowed(to_serve));
    let target = Target { host: &host, found: &found, inside: &inside, budget, allowed };
    let read_only = options.read_only || options.cow.is_some();
    for _ in 0..LOOKS {
        // What is inside decides which bytes are locked, and whether writing is allowed: readers must not
        // exclude each other.
        let old =
            found.snapshot.as_ref().map(|_| ONLY_READ.to_owned()).or_else(|| options.unwritable.clone());
        let (mut range, mut reason) = (None, old);
        if !inside.is_empty() {
            let walked = look_inside(&target, options.format)?;
            range = walked.range();
            reason = reason.or(walked.read_only);
        }
        let (reason, read_only) = if read_only { (None, true) } else { (reason.clone(), reason.is_some()) };
        if let Some(opened) = open_inside(&target, read_only, reason, range, options)? {
            return Ok(opened);
        }
    }
    Err(io(path, "its place in the file changes while it is opened", std::io::ErrorKind::ResourceBusy))
}

/// Finds what a path names, for reading only and without locks, to compare it with what other paths name.
///
/// # Errors
/// As [`open()`].
pub fn locate(path: &Path) -> Result<Location, Error> {
    if connected::is_remote(path) {
        return Ok(remote::locate(path));
    }
    let Split { host, inside } = split(path);
    let found = resolve_image(&host)?;
    let identity = Identity { dev: found.stat.st_dev, ino: found.stat.st_ino };
    let (budget, options) = (&Budget::default(), OpenOptions::default());
    let allowed = options.allowed(false);
    let target = Target { host: &host, found: &found, inside: &inside, budget, allowed };
    let inside = match inside.is_empty() {
        true => Vec::new(),
        // As it is stored: what becket cannot read, and attached by `--format raw`, has a place, too.
        false => look_inside(&target, Format::Raw)?.steps(),
    };
    Ok(Location { host: identity, snapshot: found.snapshot, inside })
}

/// Opens the file or device at `path` and locks all of it, for a program that overwrites or replaces it:
/// excludes what [`open()`] of a writer excludes. What cannot be written is locked as by a reader. The locks
/// last as long as what is returned.
///
/// # Errors
/// It is in use, is neither a file nor a block device, or cannot be opened.
pub fn claim(path: &Path, warnings: &mut Vec<String>) -> Result<Claimed, Error> {
    let HostInode { inode, kind, .. } = resolve(path)?;
    let (fd, unwritable) = open_inode(path, &inode, kind, false)?;
    let outer = lock_fd(path, &fd, kind, &Claim::of_all(unwritable.is_none(), false), warnings)?;
    Ok(Claimed { fd, _outer: outer })
}

/// A file or device that is locked.
#[derive(Debug)]
pub struct Claimed {
    fd: OwnedFd,
    _outer: Option<OuterDisk>,
}

impl AsFd for Claimed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Walks a path without locks and for reading only, for inspection. See [`OpenOptions::backing_dirs`].
///
/// # Errors
/// As [`open()`].
pub fn look(path: &Path, format: Format, backing_dirs: &[PathBuf], budget: &Budget) -> Result<Walk, Error> {
    let backing_dirs = backing_dirs.to_vec();
    look_within(path, &OpenOptions { format, backing_dirs, ..OpenOptions::default() }, budget)
}

/// The same by all that options say of it.
///
/// # Errors
/// As [`open()`].
pub fn look_by(path: &Path, options: &OpenOptions) -> Result<Walk, Error> {
    look_within(path, options, &options.budget())
}

fn look_within(path: &Path, options: &OpenOptions, budget: &Budget) -> Result<Walk, Error> {
    if connected::is_remote(path) {
        return remote::look(path, options.format, options.patience, budget);
    }
    let Split { host, inside } = split(path);
    let (found, allowed) = (&resolve_image(&host)?, options.allowed(false));
    let target = Target { host: &host, found, inside: &inside, budget, allowed };
    look_inside(&target, options.format)
}

/// What to open, and what parsing it may cost.
struct Target<'a> {
    /// The path of the file or device, and what was found there.
    host: &'a Path,
    found: &'a HostInode,
    /// How the path goes on inside it.
    inside: &'a [OsString],
    budget: &'a Budget,
    allowed: Allowed<'a>,
}

/// The first URL that the image at a path, or one below it, names below itself, and that is not among those
/// which are open. A caller that allows it opens it, adds it to them, and asks again. Nothing is locked.
///
/// # Errors
/// What is below the image cannot be opened.
pub fn wanted_url(path: &Path, options: &OpenOptions) -> Result<Option<WantedUrl>, Error> {
    if connected::is_remote(path) {
        return Ok(None);
    }
    let Split { host, inside } = split(path);
    let found = resolve_image(&host)?;
    let format = through::of_first(options.format, &inside);
    if !matches!(format, Format::Auto | Format::Qcow2) {
        return Ok(None);
    }
    let (fd, _) = open_inode(&host, &found.inode, found.kind, true)?;
    let file = host_file(&host, fd, &found)?;
    let (image, _) = stored_image(&host, &file, &options.budget(), &options.fillers)?;
    let first = First {
        image: &image,
        host: &host,
        file: &file,
        format,
        allowed: options.allowed(false),
        snapshot: found.snapshot.as_deref(),
        writing: Writing::Never,
    };
    chain::wanted_url(&first, &mut |path, found| {
        let (fd, _) = open_inode(path, &found.inode, found.kind, true)?;
        host_file(path, fd, &found)
    })
}

/// Walks from the file or device that was found.
fn look_inside(target: &Target<'_>, format: Format) -> Result<Walk, Error> {
    let Target { host, found, inside, budget, allowed } = *target;
    let fillers = allowed.fillers;
    let (fd, _) = open_inode(host, &found.inode, found.kind, true)?;
    let file = host_file(host, fd, found)?;
    let (image, _) = stored_image(host, &file, budget, fillers)?;
    let (format_of_file, snapshot) = (through::of_first(format, inside), found.snapshot.as_deref());
    let first = First {
        image: &image,
        host,
        file: &file,
        format: format_of_file,
        allowed,
        snapshot,
        writing: Writing::Never,
    };
    let Unpacked { image, referenced, verdict, .. } =
        disk_in(&first, if inside.is_empty() { u64::MAX } else { 0 }, &mut |_, _, _| Ok(()))?;
    let files = std::iter::once(file.identity()).chain(referenced.iter().map(Linked::identity)).collect();
    let mut walk = through::walk(image, called(host, &file, fillers), inside, format)?;
    walk.read_only = verdict.unwritable.or(walk.read_only);
    walk.files = files;
    Ok(walk)
}

/// What is known of an inode that is open now.
fn host_file(path: &Path, fd: OwnedFd, found: &HostInode) -> Result<HostFile, Error> {
    let HostInode { kind, stat, .. } = *found;
    let size = size_of(path, &fd, kind)?;
    Ok(HostFile { path: real_path(path, &fd)?, fd, kind, stat, size })
}

/// The bytes of a file or device as they are stored, and its logical block size.
fn stored_image(
    host: &Path,
    file: &HostFile,
    budget: &Budget,
    fillers: &Fillers,
) -> Result<(Image, u32), Error> {
    let block_size = natural_block_size(host, &file.fd, file.kind)?;
    if let Some(filler) = fillers.of(file.identity()) {
        return Ok((Image::raw(filler, file.size, block_size).within(budget), block_size));
    }
    let reader = file.fd.try_clone().map_err(|error| io(host, "its descriptor cannot be copied", error))?;
    Ok((Image::raw(Arc::new(reader), file.size, block_size).within(budget), block_size))
}

/// What people know a file by: its path, or where its bytes come from.
fn called(host: &Path, file: &HostFile, fillers: &Fillers) -> String {
    fillers.name_of(file.identity()).unwrap_or_else(|| shown(host.as_os_str().as_bytes()))
}

/// The disk in a file: the file itself, or what a container and the files that it refers to hold. So many of
/// its first bytes are `used` as they are, none for a part elsewhere; `lock` is called for each of those
/// files.
fn disk_in(
    first: &First<'_>,
    used: u64,
    lock: &mut dyn FnMut(&Path, &OwnedFd, FileKind) -> Result<(), Error>,
) -> Result<Unpacked, Error> {
    let First { image, host, file, format, .. } = *first;
    let as_it_is = || Unpacked::plain(image.clone());
    let no_snapshots = || first.no_snapshot("only a qcow2 has some".to_owned());
    if format != Format::Auto && !format.is_disk() {
        return if first.snapshot.is_some() { Err(no_snapshots()) } else { Ok(as_it_is()) };
    }
    let mut open = |path: &Path, found: HostInode| {
        let (fd, _) = open_inode(path, &found.inode, found.kind, true)?;
        lock(path, &fd, found.kind)?;
        host_file(path, fd, &found)
    };
    let wanted = |kind| format == Format::Auto || format == kind;
    let mut unpacked = None;
    if wanted(Format::Qcow2) {
        unpacked = unpack_chain(first, &mut open)?;
    }
    if unpacked.is_none() && first.snapshot.is_some() {
        return Err(no_snapshots());
    }
    if unpacked.is_none() && wanted(Format::Vmdk) {
        unpacked = vmdk::unpack(first, &mut open)?;
    }
    if unpacked.is_none() && format != Format::Qcow2 {
        let failed = |source| Error::Layer { image: shown(host.as_os_str().as_bytes()), source };
        unpacked = disk::unpack(image, format).map_err(failed)?.map(|(image, unwritable)| {
            let verdict = Verdict { unwritable, ..Verdict::default() };
            Unpacked { verdict, ..Unpacked::plain(image) }
        });
    }
    match unpacked {
        Some(mut unpacked) => {
            let is_part = used < unpacked.image.len();
            let part =
                || is_part.then(|| "only the whole of a qcow2 is written, and this is a part".to_owned());
            let device = || {
                (file.kind == FileKind::Block)
                    .then(|| "it is a qcow2 on a block device, which cannot grow".to_owned())
            };
            let short = || cow::too_short(unpacked.cluster, &file.fd);
            let unwritable = unpacked.verdict.unwritable.take();
            unpacked.verdict.unwritable = unwritable.or_else(part).or_else(device).or_else(short);
            Ok(unpacked)
        }
        None if format != Format::Auto => {
            let known = foreign::refuse(image);
            let source = known.err().unwrap_or_else(|| LayerError::IsNot(format.to_string()));
            Err(Error::Layer { image: shown(host.as_os_str().as_bytes()), source })
        }
        None => Ok(as_it_is()),
    }
}

/// Why a file can only be read, judged by its first and last bytes: what the walk will report, before
/// anything else is checked.
fn only_read(file: &OwnedFd, len: u64, format: Format) -> Option<String> {
    let Ok(Some(ends)) = Ends::read(file, len) else {
        let mut head = [0; foreign::VMDK_TITLE.len()];
        file.read_at(&mut head, 0).ok()?;
        return only_read_head(&head, format);
    };
    only_read_head(&ends.head, format).or_else(|| disk::only_read(&ends, format))
}

/// The same by the first bytes alone, of which a short file has no more.
fn only_read_head(head: &[u8], format: Format) -> Option<String> {
    if let Some(packed) = packed::kind_of_head(field(head, 0), format) {
        return Some(through::compressed(packed));
    }
    let wanted = format == Format::Auto || format == Format::Vmdk;
    let title = head.get(..foreign::VMDK_TITLE.len()).unwrap_or_default();
    (wanted && title.eq_ignore_ascii_case(foreign::VMDK_TITLE)).then(|| vmdk::ONLY_READ.to_owned())
}

/// Opens what was found at `host`, and the image in it that `inside` names, which lies in `range` of it
/// (anywhere, without a range); `None` if it no longer does. The path itself is not looked up again.
fn open_inside(
    target: &Target<'_>,
    read_only: bool,
    reason: Option<String>,
    range: Option<Range<u64>>,
    options: &OpenOptions,
) -> Result<Option<Opened>, Error> {
    let Target { host, found, inside, budget, allowed } = *target;
    let fillers = allowed.fillers;
    let HostInode { kind, stat, .. } = *found;
    let (buffered, unwritable) = open_inode(host, &found.inode, kind, read_only)?;
    // What can be written is not a layer that would be read through here.
    let flat = inside.is_empty() && !read_only;
    if flat {
        read_here_and_there(buffered.as_fd());
    }
    if !read_only
        && inside.is_empty()
        && let Some(reason) = only_read(&buffered, size_of(host, &buffered, kind)?, options.format)
    {
        // Known before anything is locked, for readers must not shut each other out.
        return open_inside(target, true, Some(reason), range, options);
    }
    let read_only_reason = reason.or(unwritable);
    let read_only = read_only || read_only_reason.is_some();
    let mut warnings = Vec::new();
    let claim =
        Claim { write: !read_only, shared: options.shared, range: range.clone().unwrap_or(locks::WHOLE) };
    let mut outer: Vec<OuterDisk> =
        lock_fd(host, &buffered, kind, &claim, &mut warnings)?.into_iter().collect();

    let file = host_file(host, buffered, found)?;
    let (stored, natural) = stored_image(host, &file, budget, fillers)?;
    let from_start = inside.is_empty() && options.offset == 0;
    let whole = from_start && options.size_limit.is_none();
    let used = if from_start { options.size_limit.unwrap_or(u64::MAX) } else { 0 };
    let first = First {
        image: &stored,
        host,
        file: &file,
        format: through::of_first(options.format, inside),
        allowed,
        snapshot: found.snapshot.as_deref(),
        writing: Writing::new(read_only, options.drop_bitmaps),
    };
    let Unpacked { image, referenced, verdict, .. } = disk_in(&first, used, &mut |path, fd, kind| {
        outer.extend(lock_fd(path, fd, kind, &Claim::of_all(false, options.shared), &mut warnings)?);
        Ok(())
    })?;
    let Verdict { unwritable, corrupt, warning } = verdict;
    let unpacked = image.stored().is_some();
    let walked = through::walk(image, called(host, &file, fillers), inside, options.format)?;
    if !inside.is_empty() && walked.range() != range {
        return Ok(None);
    }
    let level = walked.last()?;
    let named = |host: PathBuf| inside.iter().fold(host, |path, name| path.join(name));
    if walked.end != End::Image {
        return Err(Error::NotAnImage { path: named(host.to_owned()), what: "a directory" });
    }
    // It may have changed since it was read without a lock, or was not read. Readers take readers' locks
    // only.
    if let Some(mut reason) = walked.read_only.clone().or(unwritable).filter(|_| !read_only) {
        // Beside another writer its tables may just be changing.
        if corrupt && !options.shared && !options.rehearsal {
            reason = mark_corrupt(&file.fd, &reason);
        }
        drop((walked, stored, file, outer));
        return open_inside(target, true, Some(reason), range, options);
    }
    warnings.extend(warning);
    let mut wanted = options.clone();
    if !read_only || options.cow.is_some() {
        wanted.tail = Tail::Cut;
    }
    let path = named(file.path_of(found.snapshot.as_deref()));
    if found.snapshot.is_some() && options.cow.is_some() {
        let why = "no overlay can lie over one: QEMU would take it for one of the whole image".to_owned();
        return Err(first.no_snapshot(why));
    }
    let part_of = |image: &Image, offset, len| {
        let slice = image.slice(offset, len);
        slice.map_err(|source| Error::Layer { image: level.path.clone(), source })
    };
    let mut image = level.image.clone();
    let mut links = vec![Linked::File(file)];
    links.extend(referenced);
    let servers = || links.iter().filter_map(Linked::server);
    let below = servers().map(|remote| remote.uri.clone()).next();
    if let Some(uri) = below.clone().filter(|_| options.direct_io == DirectIo::On) {
        let reason = "it is on a server, not in a file of this host".to_owned();
        return Err(Error::DirectIo { path: uri, reason });
    }
    let natural = servers().map(|remote| remote.natural).fold(natural, u32::max);
    let (mut read_only, mut read_only_reason, mut overlay) = (read_only, read_only_reason, None);
    if let Some(file) = &options.cow {
        let (offset, len) = geometry::window(&path, image.len(), &wanted)?;
        let part =
            (wanted.offset != 0 || wanted.size_limit.is_some()).then_some((wanted.offset, wanted.size_limit));
        // Bytes of a store file may be missing, which no other program sees.
        let stored = links.first().is_some_and(|link| fillers.has(link.identity()));
        let plain = (whole && walked.levels.len() == 1 && !stored)
            .then(|| image.stored().map_or("raw", |about| disk::name_to_qemu(about.format)));
        let image_part = part_of(&image, offset, len)?;
        let kept = options.below.clone();
        let inside = inside.to_vec();
        let base = Base { image: image_part, links, remote: None, inside, part, below: kept, plain };
        let stack = cow::lay_over(base, file, options, &mut warnings)?;
        (image, links, overlay) = (stack.image, stack.links, Some(stack.overlay));
        read_only = options.read_only || stack.read_only.is_some();
        read_only_reason = stack.read_only;
        (wanted.offset, wanted.size_limit) = (0, None);
    }
    let Geometry { offset, len, padding, block_size, partitions } =
        geometry::choose(&path, &image, natural, &wanted, &mut warnings)?;
    let image = part_of(&image, offset, len)?;
    let image = image.padded(padding).map_err(|source| Error::Layer { image: level.path.clone(), source })?;
    // Parsers that go on without what cannot be read have not seen all of it.
    let failed = |spent| Error::Layer { image: level.path.clone(), source: LayerError::Spent(spent) };
    budget.check().map_err(failed)?;

    if flat && let Some(file) = links.first().and_then(Linked::file) {
        read_as_it_comes(file.fd.as_fd());
    }
    // Of pieces some may be aligned and others not: the engine looks at each.
    let start = image.map().single_range();
    let grows = (unpacked || overlay.is_some()) && !read_only;
    let identity = links.first().map_or(Identity { dev: stat.st_dev, ino: stat.st_ino }, Linked::identity);
    let encoded = image.encoded().next().is_some();
    let files = links.into_iter().enumerate().map(|(index, link)| {
        let offset = start.filter(|(file, ..)| *file as usize == index).map_or(0, |(_, offset, _)| offset);
        let source = link.into_source(index == 0 && !read_only, offset, options.direct_io)?;
        // Of one with encoded blocks it is said later whether it is read through the page cache.
        if let Source::File(file) = &source
            && !encoded
        {
            file.forget(options.direct_io);
        }
        Ok(source)
    });
    let mut sources = files.collect::<Result<Vec<_>, Error>>()?;
    if let Some(Source::File(first)) = sources.first_mut().filter(|_| grows) {
        // What is behind its end now will be holes.
        first.facts.sparse = true;
    }
    Ok(Some(Opened {
        path,
        map: image.map().clone(),
        sources,
        outer,
        encoded: image.encoded().cloned().collect(),
        grows,
        nested: unpacked || overlay.is_some() || walked.levels.len() > 1,
        read_only,
        read_only_reason,
        block_size,
        identity,
        partitions,
        overlay,
        range,
        below,
        warnings,
    }))
}
