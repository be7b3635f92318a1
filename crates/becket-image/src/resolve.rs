//! Looks a path up once, and says what is wrong with it when that fails.
//! It never opens what it finds: a FIFO, a tape or a watchdog would notice.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::{BackingKind, Error};

/// An inode that can be an image, found but not opened.
#[derive(Debug)]
pub(crate) struct Found {
    /// An `O_PATH` descriptor.
    pub(crate) inode: OwnedFd,
    pub(crate) kind: BackingKind,
    pub(crate) stat: Stat,
}

/// A path in two parts: a file or device of this system, and names inside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Split {
    pub(crate) host: PathBuf,
    /// Empty when the path names the file itself.
    pub(crate) inside: Vec<OsString>,
}

/// Divides a path at the first regular file or block device on the way. A path that leads nowhere stays whole, and
/// [`resolve`] says what is wrong with it.
pub(crate) fn split(path: &Path) -> Split {
    let whole = || Split { host: path.to_owned(), inside: Vec::new() };
    if !matches!(rustix::fs::stat(path), Err(Errno::NOTDIR)) {
        return whole();
    }
    let mut host = PathBuf::new();
    let mut components = path.components();
    while let Some(component) = components.next() {
        host.push(component);
        let kind = rustix::fs::stat(&host).map(|stat| FileType::from_raw_mode(stat.st_mode));
        if let Ok(FileType::RegularFile | FileType::BlockDevice) = kind {
            let inside = components.map(|component| component.as_os_str().to_owned()).collect();
            return Split { host, inside };
        }
    }
    whole()
}

/// Finds what `path` names and checks that it is a regular file or a block device.
pub(crate) fn resolve(path: &Path) -> Result<Found, Error> {
    let inode = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(|errno| explain(path, errno))?;
    let stat = rustix::fs::fstat(&inode).map_err(|errno| io(path, "its status cannot be read", errno))?;
    let not_an_image = |what| Err(Error::NotAnImage { path: path.to_owned(), what });
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => BackingKind::Regular,
        FileType::BlockDevice => BackingKind::Block,
        FileType::Directory => return not_an_image("a directory"),
        FileType::Fifo => return not_an_image("a FIFO"),
        FileType::Socket => return not_an_image("a socket"),
        FileType::CharacterDevice => return not_an_image("a character device"),
        FileType::Symlink | FileType::Unknown => return not_an_image("something without bytes"),
    };
    Ok(Found { inode, kind, stat })
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

/// The first component that is not there, or is no directory although more follows.
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
