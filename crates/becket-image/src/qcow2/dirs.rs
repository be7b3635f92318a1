//! The directories that files may lie in which an image names: looked up once, and held.
//! It opens no file: what it finds has no rights yet.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::scheme::Spoken;
use crate::error::quoted;
use crate::resolve::{HostInode, kind_of};
use crate::source::file::facts::proc_path;
use crate::source::file::host::HostFile;
use crate::text::shown;
use crate::{Error, FileKind};

/// What a file is to the image that names it, where it is not a file of data.
pub(super) const BACKING: &str = "backing file";

/// Directories that backing files may lie in.
#[derive(Debug, Default)]
pub(crate) struct Dirs {
    /// That of the first file, where it has one.
    own: Option<Dir>,
    more: Vec<Dir>,
}

/// A directory that is held open, so that nothing that is renamed meanwhile puts another in its place.
#[derive(Debug)]
struct Dir {
    fd: OwnedFd,
    /// Where it was when it was opened.
    path: PathBuf,
}

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl Dir {
    /// The directory that holds an open file. It may have been replaced by another since the file was found,
    /// so it counts only if that very file is in it.
    fn holding(path: &Path, file: &Stat) -> io::Result<Option<Dir>> {
        let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { return Ok(None) };
        let fd = rustix::fs::open(dir, DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?;
        let found = rustix::fs::statat(&fd, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if (found.st_dev, found.st_ino) != (file.st_dev, file.st_ino) {
            return Err(io::Error::other("the image is not in it any more"));
        }
        Ok(Some(Dir { fd, path: dir.to_owned() }))
    }

    /// A directory that the user named.
    fn named(path: &Path) -> io::Result<Dir> {
        let fd = rustix::fs::open(path, DIRECTORY, Mode::empty())?;
        let path = std::fs::read_link(proc_path(&fd))?;
        Ok(Dir { fd, path })
    }
}

impl Dirs {
    /// Of the image in this file, which has no directory of its own if it is from far away; and those that
    /// the user allows.
    pub(crate) fn new(file: &HostFile, is_far: bool, allowed: &[PathBuf]) -> Result<Dirs, Error> {
        let failed = |dir: &Path| {
            let (path, what) = (dir.to_owned(), "files that an image refers to cannot be looked for in it");
            move |source| Error::Io { path, what, source }
        };
        let own = match file.kind {
            FileKind::Regular if !is_far => {
                let dir = file.path.parent().unwrap_or(Path::new("/"));
                Dir::holding(&file.path, &file.stat).map_err(failed(dir))?
            }
            _ => None,
        };
        let named = |dir: &PathBuf| Dir::named(dir).map_err(failed(dir));
        let more = allowed.iter().map(named).collect::<Result<_, _>>()?;
        Ok(Dirs { own, more })
    }

    /// Finds the file that `image` names, without opening it. A `far` image has no directory of its own.
    /// `what` it is to the image is for people.
    pub(crate) fn find(
        &self,
        image: &Path,
        far: bool,
        what: &'static str,
        name: &[u8],
    ) -> Result<HostInode, Error> {
        let failed = |why: String, hint: Option<String>, missing: bool| Error::Backing {
            image: image.to_owned(),
            what,
            name: shown(name),
            why,
            hint,
            missing,
        };
        let before_slash = name.split(|byte| *byte == b'/').next().unwrap_or_default();
        if before_slash.contains(&b':') || name.contains(&0) {
            let dir = image.parent().unwrap_or(Path::new("/"));
            let said = |path: &Path| quoted(Path::new(&shown(path.as_os_str().as_bytes())));
            // What becket has said itself is no more believed: the user names the image that is to be opened.
            let hint = Spoken::of(name).map(|spoken| {
                let (options, backing) = (spoken.options(), said(&spoken.within(dir)));
                format!("attach the image below it: becket attach {options}{backing} --cow {}", said(image))
            });
            let why = match what == BACKING {
                true => "it is neither the path of a file nor a URL, and nothing else is opened",
                false => "it is not the path of a file, and nothing else is opened",
            };
            return Err(failed(why.to_owned(), hint, false));
        }
        if far && !name.starts_with(b"/") {
            let why = "it is a path below the image, and an image on a server has no directory here";
            return Err(failed(why.to_owned(), None, false));
        }
        let wanted = flattened(&image.parent().unwrap_or(Path::new("/")).join(OsStr::from_bytes(name)));
        let own = self.own.iter().filter(|_| !far).map(|dir| (dir, true));
        let mut dirs = own.chain(self.more.iter().map(|dir| (dir, false)));
        let place = dirs.find_map(|(dir, own)| Some((dir, wanted.strip_prefix(&dir.path).ok()?, own)));
        let Some((Dir { fd: base, path: dir }, rest, own)) = place else {
            let dir = wanted.parent().unwrap_or(Path::new("/"));
            return Err(failed(
                "it lies outside the directory of the image, where an image could name any file".to_owned(),
                Some(format!("if you trust the image: --backing-dir {}", shown(dir.as_os_str().as_bytes()))),
                false,
            ));
        };
        let within = |errno: Errno| match errno {
            Errno::NOENT | Errno::NOTDIR => failed("there is no such file".to_owned(), None, true),
            Errno::XDEV | Errno::LOOP => failed(
                format!("a symbolic link leads out of {}", shown(dir.as_os_str().as_bytes())),
                None,
                false,
            ),
            errno => failed(format!("it cannot be looked up: {errno}"), None, false),
        };
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let inode =
            rustix::io::retry_on_intr(|| rustix::fs::openat2(base, rest, flags, Mode::empty(), resolve))
                .map_err(within)?;
        let stat = rustix::fs::fstat(&inode).map_err(within)?;
        match kind_of(&stat) {
            Ok(FileKind::Block) if own => {
                Err(failed("it is a block device in the image's own directory".to_owned(), None, false))
            }
            Ok(kind) => Ok(HostInode { inode, kind, stat, snapshot: None }),
            Err(what) => Err(failed(format!("it is {what}"), None, false)),
        }
    }
}

/// A path without `.` and `..`, by its letters alone: the kernel has the last word about what it names.
fn flattened(path: &Path) -> PathBuf {
    let mut flat = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                flat.pop();
            }
            Component::CurDir => {}
            other => flat.push(other),
        }
    }
    flat
}
