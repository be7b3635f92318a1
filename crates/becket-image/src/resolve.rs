//! Looks a path up once, and says what is wrong with it when that fails.
//! It never opens what it finds: a FIFO, a tape or a watchdog would notice.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::source::link;
use crate::{Error, FileKind};

/// An inode that can be an image, found but not opened.
#[derive(Debug)]
pub(crate) struct HostInode {
    /// An `O_PATH` descriptor.
    pub(crate) inode: OwnedFd,
    pub(crate) kind: FileKind,
    pub(crate) stat: Stat,
    /// The snapshot that the path names.
    pub(crate) snapshot: Option<OsString>,
}

/// A path in two parts: a file or device of this system, and names inside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// The file or device.
    pub host: PathBuf,
    /// Empty when the path names the file itself.
    pub inside: Vec<OsString>,
}

/// Splits a path at the first regular file or block device on the way; `FILE/..` is the directory of the
/// file, as if the file were a directory. A path that leads nowhere stays whole, and `resolve` reports what
/// is wrong with it.
pub fn split(path: &Path) -> Split {
    let whole = || Split { host: path.to_owned(), inside: Vec::new() };
    if link::is_link(path) {
        let (host, inside) = link::split_inside(path.as_os_str());
        return Split { host: host.into(), inside };
    }
    if !matches!(rustix::fs::stat(path), Err(Errno::NOTDIR | Errno::NOENT)) {
        return whole();
    }
    let mut host = PathBuf::new();
    let mut components = path.components().peekable();
    while let Some(component) = components.next() {
        host.push(component);
        let kind = rustix::fs::stat(&host).map(|stat| FileType::from_raw_mode(stat.st_mode));
        if kind == Err(Errno::NOENT) {
            if at_snapshot(&host).is_none() {
                return whole();
            }
            let inside = components.map(|component| component.as_os_str().to_owned()).collect();
            return Split { host, inside };
        }
        if let Ok(FileType::RegularFile | FileType::BlockDevice) = kind {
            if components.next_if_eq(&Component::ParentDir).is_some() {
                host.pop();
                continue;
            }
            let inside = components.map(|component| component.as_os_str().to_owned()).collect();
            return Split { host, inside };
        }
    }
    // Of a file of the working directory it has left nothing.
    if host.as_os_str().is_empty() {
        host.push(".");
    }
    // Only by such a `..` does the walk end without a file on the way: at a directory, which is not an image.
    if path.components().any(|component| component == Component::ParentDir) && host.is_dir() {
        return Split { host, inside: Vec::new() };
    }
    whole()
}

/// Finds what `path` names and checks that it is a regular file or a block device.
pub(crate) fn resolve(path: &Path) -> Result<HostInode, Error> {
    resolve_at(rustix::fs::CWD, path, path)
}

/// The same for an image that is read: `FILE@SNAPSHOT` is one, where no file has that name.
pub(crate) fn resolve_image(path: &Path) -> Result<HostInode, Error> {
    let found = resolve(path);
    if matches!(found, Err(Error::NotFound { .. }))
        && let Some((file, snapshot)) = at_snapshot(path)
    {
        return Ok(HostInode { snapshot: Some(snapshot), ..resolve(&file)? });
    }
    found
}

/// The two parts of `FILE@SNAPSHOT`, where there is such a file: the longest of several.
fn at_snapshot(path: &Path) -> Option<(PathBuf, OsString)> {
    let name = path.file_name()?.as_bytes();
    let places = (1..name.len()).rev().filter(|at| name.get(*at) == Some(&b'@'));
    let parts = places.filter_map(|at| Some((name.get(..at)?, name.get(at + 1..)?)));
    let mut found = parts.filter(|(_, snapshot)| !snapshot.is_empty()).filter_map(|(file, snapshot)| {
        let file = path.with_file_name(OsStr::from_bytes(file));
        let kind = FileType::from_raw_mode(rustix::fs::stat(&file).ok()?.st_mode);
        let is_image = matches!(kind, FileType::RegularFile | FileType::BlockDevice);
        is_image.then(|| (file, OsStr::from_bytes(snapshot).to_owned()))
    });
    found.next()
}

/// The same for a name in a directory that is open; `path` is for messages.
pub(crate) fn resolve_at(
    dir: impl AsFd,
    name: impl rustix::path::Arg,
    path: &Path,
) -> Result<HostInode, Error> {
    let inode = rustix::fs::openat(dir, name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| explain(path, errno))?;
    let stat = rustix::fs::fstat(&inode).map_err(|errno| io(path, "its status cannot be read", errno))?;
    let kind = kind_of(&stat).map_err(|what| Error::NotAnImage { path: path.to_owned(), what })?;
    Ok(HostInode { inode, kind, stat, snapshot: None })
}

/// What kind of backing an inode can be; what it is instead where it can be none, with its article.
pub(crate) fn kind_of(stat: &Stat) -> Result<FileKind, &'static str> {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(FileKind::Regular),
        FileType::BlockDevice => Ok(FileKind::Block),
        FileType::Directory => Err("a directory"),
        FileType::Fifo => Err("a FIFO"),
        FileType::Socket => Err("a socket"),
        FileType::CharacterDevice => Err("a character device"),
        FileType::Symlink | FileType::Unknown => Err("something without bytes"),
    }
}

/// An [`Error::Io`] about `path`.
pub(crate) fn io(path: &Path, what: &'static str, errno: impl Into<std::io::Error>) -> Error {
    Error::Io { path: path.to_owned(), what, source: errno.into() }
}

/// Why the lookup failed. Walks the path again, for the message only: nothing is opened by what it sees.
fn explain(path: &Path, errno: Errno) -> Error {
    match errno {
        Errno::LOOP => Error::LinkLoop { path: path.to_owned() },
        Errno::ACCESS | Errno::PERM => Error::Permission { path: path.to_owned(), source: errno.into() },
        Errno::NOENT | Errno::NOTDIR => {
            culprit(path).unwrap_or_else(|| io(path, "it cannot be looked up", errno))
        }
        errno => io(path, "it cannot be looked up", errno),
    }
}

/// The first component that is not there, or is not a directory although more follows.
fn culprit(path: &Path) -> Option<Error> {
    let path_given = path.to_owned();
    let mut deepest = PathBuf::from(if path.is_absolute() { "/" } else { "." });
    let mut so_far = PathBuf::new();
    for component in path.components() {
        so_far.push(component);
        if matches!(component, Component::RootDir | Component::CurDir) {
            continue;
        }
        let missing = component.as_os_str().to_string_lossy().into_owned();
        match rustix::fs::stat(&so_far) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode).is_dir() => deepest.clone_from(&so_far),
            Ok(_) => return Some(Error::NotADirectory { path: path_given, component: so_far }),
            Err(Errno::NOENT) => {
                return Some(match std::fs::read_link(&so_far) {
                    Ok(target) => Error::DanglingLink { path: path_given, link: so_far, target },
                    Err(_) => Error::NotFound { path: path_given, deepest, missing },
                });
            }
            Err(_) => return None,
        }
    }
    // An empty path has no component and names nothing.
    so_far.as_os_str().is_empty().then(|| Error::NotFound {
        path: path_given,
        deepest,
        missing: String::new(),
    })
}
