//! Where `becket copy` writes: a new file without a name until it is complete, a device, or a stream.
//! Never replaces anything unless that was asked for.

use super::bytes;
use crate::failure::Failure;
use becket_image::shown;
use becket_uapi::signal::SignalFd;
use rustix::{
    fs::{AtFlags, CWD, FileType, Mode, OFlags},
    io::Errno,
    process::Signal,
};
use std::{
    ffi::OsString,
    fs::File,
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    },
    path::{Path, PathBuf},
};

/// What ends a copy early.
const SIGNALS: [Signal; 3] = [Signal::INT, Signal::TERM, Signal::HUP];

/// What is written to.
pub(super) struct Target {
    path: PathBuf,
    file: File,
    pub(super) kind: Kind,
}

/// What kind of thing that is.
pub(super) enum Kind {
    /// A file that gets its name when it is complete.
    New(NewFile),
    /// A block device.
    Device,
    /// Standard output, a FIFO or a character device.
    Stream,
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
    /// Opens what `path` names, for `len` bytes or a qcow2.
    pub(super) fn open(path: &Path, force: bool, qcow2: bool, len: u64) -> Result<Self, Failure> {
        let made = |file, kind| Self { path: path.to_owned(), file, kind };
        let failed = |errno: Errno| write_failure(path, "it cannot be opened", &errno.into());
        let refused = |kind: &str, why: &str| {
            Failure::new(kind, format!("cannot write {}: {why}", shown(path.as_os_str().as_bytes())))
        };
        if path == Path::new("-") {
            return Ok(made(bytes::stdout()?, Kind::Stream));
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
                // Refused while it is mounted, or otherwise claimed.
                let device = File::from(open(OFlags::EXCL).map_err(failed)?);
                let room = rustix::fs::seek(&device, rustix::fs::SeekFrom::End(0)).map_err(failed)?;
                if room < len {
                    return Err(refused(
                        "unsupported",
                        &format!("it has {room} bytes, and {len} are copied"),
                    ));
                }
                Ok(made(device, Kind::Device))
            }
            Some(FileType::CharacterDevice | FileType::Fifo) => {
                Ok(made(open(OFlags::empty()).map_err(failed)?.into(), Kind::Stream))
            }
            found => {
                let (file, new) = NewFile::make(path, found.is_some()).map_err(failed)?;
                Ok(made(file, Kind::New(new)))
            }
        }
    }

    /// What is written to, again.
    pub(super) fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// The signals that must be waited for, because they would leave a part of a file.
    pub(super) fn signals(&self) -> Result<Option<SignalFd>, Failure> {
        let named = matches!(&self.kind, Kind::New(NewFile { temporary: Some(_), .. }));
        let blocked = named.then(|| SignalFd::block(&SIGNALS)).transpose();
        blocked.map_err(|error| Failure::io("cannot wait for signals", &error))
    }

    /// Brings all to the disk, and gives a new file its name. Returns how many bytes it takes there.
    pub(super) fn commit(&mut self) -> Result<Option<u64>, Failure> {
        let path = self.path.clone();
        let failed = |error: io::Error| write_failure(&path, "it cannot be written", &error);
        match self.file.sync_all() {
            // A pipe has nothing to bring there.
            Err(error) if matches!(self.kind, Kind::Stream) && is_no_file(&error) => {}
            synced => synced.map_err(failed)?,
        }
        let Kind::New(new) = &mut self.kind else { return Ok(None) };
        let allocated = self.file.metadata().map_err(failed)?.blocks() * 512;
        new.commit(&self.file).map_err(|errno| match errno {
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

fn is_no_file(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::INVAL | Errno::NOTSUP | Errno::ROFS))
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
                let temporary = Self::other_name(&name);
                let flags = flags | OFlags::CREATE | OFlags::EXCL;
                (rustix::fs::openat(&dir, &temporary, flags, mode)?, Some(temporary))
            }
            file => (file?, None),
        };
        Ok((file.into(), Self { dir, name, temporary, replace }))
    }

    /// A name that no other process takes at the same time.
    fn other_name(name: &OsString) -> OsString {
        let mut other = OsString::from(".");
        other.push(name);
        other.push(format!(".becket-{}", std::process::id()));
        other
    }

    fn commit(&mut self, file: &File) -> Result<(), Errno> {
        if self.temporary.is_none() {
            let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
            let name = if self.replace { Self::other_name(&self.name) } else { self.name.clone() };
            rustix::fs::linkat(CWD, itself, &self.dir, &name, AtFlags::SYMLINK_FOLLOW)?;
            self.temporary = self.replace.then_some(name);
        }
        if let Some(name) = &self.temporary {
            if self.replace {
                rustix::fs::renameat(&self.dir, name, &self.dir, &self.name)?;
            } else {
                let flags = rustix::fs::RenameFlags::NOREPLACE;
                match rustix::fs::renameat_with(&self.dir, name, &self.dir, &self.name, flags) {
                    // Network file systems have links instead.
                    Err(Errno::INVAL | Errno::NOSYS) => {
                        rustix::fs::linkat(&self.dir, name, &self.dir, &self.name, AtFlags::empty())?;
                        rustix::fs::unlinkat(&self.dir, name, AtFlags::empty())?;
                    }
                    renamed => renamed?,
                }
            }
            self.temporary = None;
        }
        rustix::fs::fsync(&self.dir)
    }
}
