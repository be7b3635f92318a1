//! Where `becket copy` writes: a new file without a name until it is complete, a device, a stream, or an
//! export of a server.
//! Never replaces anything unless that was asked for.

use super::{bytes, common, fetched, interrupts::Interrupts};
use crate::{args, failure::Failure};
use becket_image::{Claimed, Identity, Opened, Source, Split, link::LinkWriter, shown};
use rustix::{
    fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid, XattrFlags},
    io::Errno,
};
use std::{
    ffi::OsString,
    fs::File,
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    },
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

/// The longest value of an extended attribute, in bytes.
const ACL_MAX: usize = 64 << 10;

/// What is written to.
pub(super) struct Target {
    path: PathBuf,
    pub(super) kind: Goal,
    /// What is written, where that is a file of this host.
    file: Option<File>,
    /// Locks what is overwritten, as long as this is there.
    _claim: Option<Claimed>,
    /// What the user should know although it can be written.
    pub(super) warnings: Vec<String>,
}

/// What kind of thing that is.
pub(super) enum Goal {
    /// A file that gets its name when it is complete.
    New(NewFile),
    /// A block device.
    Device,
    /// Standard output, a FIFO or a character device.
    Stream,
    /// An export of a server, or an image of Ceph.
    Export(LinkWriter),
}

/// A file in its directory.
pub(super) struct NewFile {
    dir: OwnedFd,
    name: OsString,
    /// The name that it has meanwhile, where its file system takes no file without one.
    temporary: Option<OsString>,
    replace: bool,
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(name) = &self.temporary {
            // It is not complete. What went wrong before is reported.
            let _ = rustix::fs::unlinkat(&self.dir, name, AtFlags::empty());
        }
    }
}

impl Target {
    /// Opens what the arguments name, for `len` bytes of `source` or a qcow2.
    pub(super) fn open(args: &args::Copy, qcow2: bool, source: &Opened, len: u64) -> Result<Self, Failure> {
        let (path, force) = (args.target.as_path(), args.force);
        let mut warnings = Vec::new();
        let made = |file, kind| {
            let file = Some(file);
            Self { path: path.to_owned(), kind, file, _claim: None, warnings: Vec::new() }
        };
        let failed = |errno: Errno| write_failure(path, "it cannot be opened", &errno.into());
        let refused = |kind: &str, why: &str| refused(path, kind, why);
        if path == Path::new("-") {
            return Ok(made(bytes::stdout()?, Goal::Stream));
        }
        if becket_image::is_remote(path) {
            if qcow2 {
                return Err(refused("not_a_file", "a qcow2 is written to a file only"));
            }
            let export = export(args, source, len)?;
            let kind = Goal::Export(export);
            return Ok(Self { path: path.to_owned(), kind, file: None, _claim: None, warnings });
        }
        if becket_fetch::is_remote(path.as_os_str()) {
            return Err(refused("unsupported", "what is on a web server is only read"));
        }
        let found = match rustix::fs::stat(path) {
            Ok(stat) => Some(FileType::from_raw_mode(stat.st_mode)),
            // A link that leads nowhere has its name, too.
            Err(Errno::NOENT) => rustix::fs::lstat(path).ok().map(|_| FileType::Symlink),
            Err(errno) => return Err(failed(errno)),
        };
        let open = |flags| rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC | flags, Mode::empty());
        match found {
            Some(FileType::Directory) => Err(refused("not_a_file", "it is a directory")),
            Some(_) if !force => {
                Err(refused("exists", "it exists").hint("--force replaces a file, and writes to a device"))
            }
            Some(FileType::BlockDevice | FileType::CharacterDevice | FileType::Fifo) if qcow2 => {
                Err(refused("not_a_file", "a qcow2 is written to a file only"))
            }
            Some(FileType::BlockDevice) => {
                let claim = becket_image::claim(path, &mut warnings)
                    .map_err(|error| common::image_failure("write", path, error))?;
                let number = rustix::fs::fstat(&claim).map_err(failed)?.st_rdev;
                if source.sources.iter().filter_map(Source::file).any(|file| overlaps(&file.buffered, number))
                {
                    return Err(refused("in_use", "it holds what is copied"));
                }
                // The same device, whatever the path leads to meanwhile; kept from being mounted.
                let itself = format!("/proc/self/fd/{}", claim.as_fd().as_raw_fd());
                let flags = OFlags::WRONLY | OFlags::EXCL | OFlags::CLOEXEC;
                let device = File::from(rustix::fs::open(itself, flags, Mode::empty()).map_err(failed)?);
                let room = rustix::fs::seek(&device, rustix::fs::SeekFrom::End(0)).map_err(failed)?;
                if room < len {
                    return Err(refused(
                        "unsupported",
                        &format!("it has {room} bytes, and {len} are copied"),
                    )
                    .hint("copy to a device that is at least as long, or make the image shorter first"));
                }
                Ok(Self { _claim: Some(claim), warnings, ..made(device, Goal::Device) })
            }
            Some(FileType::CharacterDevice | FileType::Fifo) => {
                let stream = open(OFlags::NOCTTY).map_err(failed)?;
                let stat = rustix::fs::fstat(&stream).map_err(failed)?;
                match FileType::from_raw_mode(stat.st_mode) {
                    FileType::CharacterDevice | FileType::Fifo => Ok(made(stream.into(), Goal::Stream)),
                    // Nothing else is written to where it is.
                    _ => Err(refused("not_a_file", "it was replaced meanwhile")),
                }
            }
            found => {
                if is_around(path, &args.source) {
                    return Err(refused("in_use", "it is copied from").hint(
                        "copy to another name: only a part of it is copied, and the rest would be lost",
                    ));
                }
                let claim = claim_old(args, source, &mut warnings)?;
                let (file, new) = NewFile::make(path, found.is_some()).map_err(failed)?;
                if found.is_some() {
                    dress(&file, path).map_err(failed)?;
                }
                Ok(Self { _claim: claim, warnings, ..made(file, Goal::New(new)) })
            }
        }
    }

    /// What is written to, again.
    pub(super) fn file(&self) -> io::Result<File> {
        self.file.as_ref().ok_or(io::ErrorKind::Unsupported)?.try_clone()
    }

    /// The signals that must be waited for, because they would leave a part of a file.
    pub(super) fn interrupts(&self) -> Result<Option<Interrupts>, Failure> {
        let named = matches!(&self.kind, Goal::New(NewFile { temporary: Some(_), .. }));
        named.then(Interrupts::block).transpose()
    }

    /// Brings all to the disk, and gives a new file its name. Returns how many bytes it takes there.
    pub(super) fn commit(&mut self) -> Result<Option<u64>, Failure> {
        let path = self.path.clone();
        let failed = |error: io::Error| write_failure(&path, "it cannot be written", &error);
        let Some(file) = &self.file else {
            let Goal::Export(export) = &self.kind else { return Ok(None) };
            return export.finish().map(|()| None).map_err(failed);
        };
        match file.sync_all() {
            // A pipe has nothing to bring there.
            Err(error) if matches!(self.kind, Goal::Stream) && is_no_file(&error) => {}
            synced => synced.map_err(failed)?,
        }
        let Goal::New(new) = &mut self.kind else { return Ok(None) };
        let allocated = file.metadata().map_err(failed)?.blocks() * 512;
        new.commit(file).map_err(|errno| match errno {
            Errno::EXIST => failed(errno.into()).hint("--force replaces it"),
            errno => failed(errno.into()),
        })?;
        Ok(Some(allocated))
    }

    /// That it could not be written.
    pub(super) fn failure(&self, what: &str, error: &io::Error) -> Failure {
        write_failure(&self.path, what, error)
    }
}

/// Connects to the export that is to hold `len` bytes of `source`, or has it made.
fn export(args: &args::Copy, source: &Opened, len: u64) -> Result<LinkWriter, Failure> {
    let path = fetched::written(&args.target, &args.options.store);
    let refused = |kind: &str, why: &str| refused(&path, kind, why);
    // Before it is connected to: the server may take one client.
    if becket_image::holds(&path, source) {
        return Err(refused("in_use", "it holds what is copied"));
    }
    let export = becket_image::open_to_write(&path, len, args.options.store.objects.origin_timeout);
    let export = export.map_err(|error| common::image_failure("write", &path, error))?;
    if !args.force && !export.is_new() {
        return Err(refused("exists", "it exists").hint("--force replaces its bytes"));
    }
    if export.size() < len {
        return Err(refused("unsupported", &format!("it has {} bytes, and {len} are copied", export.size())));
    }
    Ok(export)
}

/// Whether the file at `target` holds the image `source` as a part. A symbolic link is replaced itself.
fn is_around(target: &Path, source: &Path) -> bool {
    let Split { host, inside } = becket_image::split(source);
    if inside.is_empty() {
        return false;
    }
    match (rustix::fs::lstat(target), rustix::fs::stat(&host)) {
        (Ok(target), Ok(host)) => (target.st_dev, target.st_ino) == (host.st_dev, host.st_ino),
        _ => false,
    }
}

/// Locks the file that a new one will replace. A symbolic link is replaced itself. An image that replaces
/// itself is locked already, unless that is not wanted.
fn claim_old(
    args: &args::Copy,
    source: &Opened,
    warnings: &mut Vec<String>,
) -> Result<Option<Claimed>, Failure> {
    let path = args.target.as_path();
    let Ok(stat) = rustix::fs::lstat(path) else { return Ok(None) };
    let itself = source.identity == Identity { dev: stat.st_dev, ino: stat.st_ino };
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || itself && !args.shared {
        return Ok(None);
    }
    let claim = becket_image::claim(path, warnings);
    claim.map(Some).map_err(|error| common::image_failure("write", path, error))
}

/// Gives a file the owner, the mode and the access list of the regular file at `path`.
fn dress(file: &File, path: &Path) -> Result<(), Errno> {
    const ACL: &str = "system.posix_acl_access";
    let old = rustix::fs::lstat(path)?;
    if FileType::from_raw_mode(old.st_mode) != FileType::RegularFile {
        return Ok(());
    }
    let (user, group) = (Some(Uid::from_raw(old.st_uid)), Some(Gid::from_raw(old.st_gid)));
    let owned = rustix::fs::fchown(file, user, group).or_else(|_| rustix::fs::fchown(file, None, group));
    // What its group and others may do means nothing for another group.
    let kept = if owned.is_ok() { 0o777 } else { 0o700 };
    rustix::fs::fchmod(file, Mode::from_raw_mode(old.st_mode & kept))?;
    let mut list = vec![0; ACL_MAX];
    let missing = |errno: Errno| matches!(errno, Errno::NODATA | Errno::NOTSUP);
    match rustix::fs::lgetxattr(path, ACL, list.as_mut_slice()) {
        Ok(len) if owned.is_ok() => {
            rustix::fs::fsetxattr(file, ACL, list.get(..len).unwrap_or_default(), XattrFlags::empty())
        }
        Err(errno) if !missing(errno) => Err(errno),
        // Nor the default one of its directory.
        _ => rustix::fs::fremovexattr(file, ACL).or_else(|errno| missing(errno).then_some(()).ok_or(errno)),
    }
}

/// Whether `file` is a block device that shares bytes with that of this number: the same one, or a partition
/// of it, or the disk that it is a partition of.
fn overlaps(file: &OwnedFd, number: u64) -> bool {
    let Ok(stat) = rustix::fs::fstat(file) else { return false };
    if FileType::from_raw_mode(stat.st_mode) != FileType::BlockDevice {
        return false;
    }
    let place = |number| {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        std::fs::canonicalize(format!("/sys/dev/block/{major}:{minor}"))
    };
    match (place(stat.st_rdev), place(number)) {
        (Ok(one), Ok(other)) => one.starts_with(&other) || other.starts_with(&one),
        _ => stat.st_rdev == number,
    }
}

fn is_no_file(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::INVAL | Errno::NOTSUP | Errno::ROFS))
}

fn refused(path: &Path, kind: &str, why: &str) -> Failure {
    Failure::new(kind, format!("cannot write {}: {why}", shown(path.as_os_str().as_bytes())))
}

fn write_failure(path: &Path, what: &str, error: &io::Error) -> Failure {
    Failure::io(format!("cannot write {}: {what}", shown(path.as_os_str().as_bytes())), error)
}

impl NewFile {
    fn make(path: &Path, replace: bool) -> Result<(File, Self), Errno> {
        let name = path.file_name().ok_or(Errno::ISDIR)?.to_owned();
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(parent.unwrap_or(Path::new(".")), flags, Mode::empty())?;
        let mode = Mode::from_raw_mode(0o666);
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let (file, temporary) = match rustix::fs::openat(&dir, ".", flags | OFlags::TMPFILE, mode) {
            // File systems without such files.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => {
                let temporary = Self::other_name();
                let flags = flags | OFlags::CREATE | OFlags::EXCL;
                (rustix::fs::openat(&dir, &temporary, flags, mode)?, Some(temporary))
            }
            file => (file?, None),
        };
        Ok((file.into(), Self { dir, name, temporary, replace }))
    }

    /// A name that no other process takes at the same time, no longer than any file system allows.
    fn other_name() -> OsString {
        // Processes of other containers may have the same number.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.subsec_nanos());
        format!(".becket-{}-{now:x}", std::process::id()).into()
    }

    fn commit(&mut self, file: &File) -> Result<(), Errno> {
        if self.temporary.is_none() {
            let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
            let name = if self.replace { Self::other_name() } else { self.name.clone() };
            rustix::fs::linkat(CWD, itself, &self.dir, &name, AtFlags::SYMLINK_FOLLOW)?;
            self.temporary = self.replace.then_some(name);
        }
        if let Some(name) = &self.temporary {
            if self.replace {
                rustix::fs::renameat(&self.dir, name, &self.dir, &self.name)?;
            } else {
                let flags = rustix::fs::RenameFlags::NOREPLACE;
                match rustix::fs::renameat_with(&self.dir, name, &self.dir, &self.name, flags) {
                    // Some network and FUSE file systems only replace: first a name of our own.
                    Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => self.rename_new(name)?,
                    renamed => renamed?,
                }
            }
            self.temporary = None;
        }
        rustix::fs::fsync(&self.dir)
    }

    /// Gives the file its name, which must be free, where a rename replaces what has it.
    fn rename_new(&self, temporary: &OsString) -> Result<(), Errno> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        drop(rustix::fs::openat(&self.dir, &self.name, flags, Mode::RUSR | Mode::WUSR)?);
        rustix::fs::renameat(&self.dir, temporary, &self.dir, &self.name).inspect_err(|_| {
            // The rename is what failed. This is empty, and ours.
            let _ = rustix::fs::unlinkat(&self.dir, &self.name, AtFlags::empty());
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_name_is_taken_only_if_it_is_free_without_a_rename_that_looks() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new");
        let (_, mut new) = NewFile::make(&path, false).unwrap();
        let temporary = OsString::from(".temporary");
        fs::write(dir.path().join(&temporary), "all").unwrap();
        fs::write(&path, "old").unwrap();
        assert_eq!(new.rename_new(&temporary), Err(Errno::EXIST));
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        fs::remove_file(&path).unwrap();
        new.rename_new(&temporary).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "all");
        // The temporary file is gone, and what cannot be renamed leaves no empty one.
        fs::remove_file(&path).unwrap();
        assert_eq!(new.rename_new(&temporary), Err(Errno::NOENT));
        assert!(!path.exists());
        new.temporary = None;
    }
}
