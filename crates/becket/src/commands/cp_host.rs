//! Copies into a directory of the host. Never writes outside of it: every path is opened from its descriptor,
//! beneath it and without symbolic links, and every file is new.

use super::{
    bytes::Trouble,
    tree::{self, Item, Meta, Refusal, Sink},
};
use crate::failure::Failure;
use becket_image::{
    Identity, NodeKind,
    layer::{Attributes, Xattrs},
    shown,
};
use rustix::{
    fs::{AtFlags, Dev, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags},
    io::Errno,
};
use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::fs::FileExt as _,
    },
    rc::Rc,
};

/// Hidden names that are tried before one is free.
const HIDDEN_MAX: u32 = 100;

/// What of the attributes is kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct Keep {
    /// All bits of the mode that a user may set, whatever the umask; as root everything.
    pub(super) all: bool,
    /// Whether this is root.
    pub(super) root: bool,
    /// Bits that new files do not get.
    pub(super) umask: u32,
    /// Replaces files that exist.
    pub(super) force: bool,
}

/// The directory that the copies go to.
pub(super) struct Host {
    root: OwnedFd,
    /// Its path, safe to show.
    shown: String,
    keep: Keep,
    /// The directory that was written to last, with its path.
    last: Option<(Vec<u8>, Rc<OwnedFd>)>,
    /// Directories whose attributes are set last: writing to them would change some.
    directories: Vec<(Vec<u8>, Meta)>,
    /// What is copied from: never replaced.
    sources: Vec<Identity>,
}

/// Something that was made and is not complete.
struct New {
    dir: Rc<OwnedFd>,
    name: Vec<u8>,
    /// The name is not its own, which another file has until this one replaces it.
    hidden: bool,
    /// It, if it is a file.
    file: Option<File>,
}

impl Host {
    pub(super) fn new(root: OwnedFd, shown: String, keep: Keep) -> Self {
        Self { root, shown, keep, last: None, directories: Vec::new(), sources: Vec::new() }
    }

    /// Sets the attributes of the directories, the innermost first.
    pub(super) fn finish(mut self, report: &mut dyn FnMut(Failure)) {
        self.last = None;
        for (path, meta) in std::mem::take(&mut self.directories).into_iter().rev() {
            let set = self.open_directory(&path).and_then(|dir| self.dress(&dir, &meta));
            if let Err(errno) = set {
                report(self.failure(&path, "its attributes cannot be set", errno));
            }
        }
    }

    fn failure(&self, path: &[u8], what: &str, errno: Errno) -> Failure {
        let path = format!("{}/{}", self.shown, shown(path));
        match errno {
            Errno::EXIST => Failure::new("exists", format!("cannot write {path}: it exists"))
                .hint("--force replaces files that exist"),
            Errno::LOOP | Errno::NOTDIR | Errno::XDEV => {
                let why = "something on the way is no directory";
                Failure::new("not_a_directory", format!("cannot write {path}: {why}"))
            }
            errno => Failure::io(format!("cannot write {path}: {what}"), &errno.into()),
        }
    }

    /// A directory beneath the root; an empty path is the root.
    fn open_directory(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let path = if path.is_empty() { b"." } else { path };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve)
    }

    /// The directory that a path lies in.
    fn parent(&mut self, path: &[u8]) -> Result<Rc<OwnedFd>, Errno> {
        let (parent, _) = split(path);
        if self.last.as_ref().is_none_or(|(last, _)| last != parent) {
            self.last = Some((parent.to_vec(), Rc::new(self.open_directory(parent)?)));
        }
        self.last.as_ref().map(|(_, dir)| Rc::clone(dir)).ok_or(Errno::NOENT)
    }

    /// Permission bits that a copy gets; `None` where the image has none.
    fn mode(&self, attributes: &Attributes) -> Option<Mode> {
        let mode = u32::from(attributes.mode?);
        Some(Mode::from_raw_mode(match self.keep {
            Keep { all: true, root: true, .. } => mode & 0o7777,
            Keep { all: true, .. } => mode & 0o777,
            Keep { umask, .. } => mode & 0o777 & !umask,
        }))
    }

    /// The mode of a new file: nobody else may look into it before it has its own, which is set last.
    fn first_mode(&self, attributes: &Attributes, closed: u32, default: u32) -> Mode {
        Mode::from_raw_mode(if attributes.mode.is_some() { closed } else { default & !self.keep.umask })
    }

    fn owner(&self, attributes: &Attributes) -> Option<(Uid, Gid)> {
        let (user, group) = attributes.owner.filter(|_| self.keep.all && self.keep.root)?;
        // The highest number would mean that it stays as it is.
        let known = |id: u32| id != u32::MAX;
        (known(user) && known(group)).then(|| (Uid::from_raw(user), Gid::from_raw(group)))
    }

    fn kept<'a>(&self, xattrs: &'a Xattrs) -> impl Iterator<Item = &'a (Vec<u8>, Vec<u8>)> {
        let all = self.keep.all && self.keep.root;
        xattrs.iter().filter(move |(name, _)| all || name.starts_with(b"user."))
    }

    /// Gives an open file its attributes. Owners come first, for a change of them clears bits of the mode.
    fn dress(&self, file: &OwnedFd, meta: &Meta) -> Result<(), Errno> {
        if let Some((user, group)) = self.owner(&meta.attributes) {
            rustix::fs::fchown(file, Some(user), Some(group))?;
        }
        for (name, value) in self.kept(&meta.xattrs) {
            match rustix::fs::fsetxattr(file, name.as_slice(), value, XattrFlags::empty()) {
                // The file system of the host has none.
                Err(Errno::OPNOTSUPP) => {}
                set => set?,
            }
        }
        if let Some(mode) = self.mode(&meta.attributes) {
            rustix::fs::fchmod(file, mode)?;
        }
        if let Some(times) = times(&meta.attributes) {
            rustix::fs::futimens(file, &times)?;
        }
        Ok(())
    }

    /// The same of what cannot be opened for reading: a link or a special file.
    fn dress_named(&self, new: &New, meta: &Meta) -> Result<(), Errno> {
        let (owner, mode) = (self.owner(&meta.attributes), self.mode(&meta.attributes));
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let inode = rustix::fs::openat(&new.dir, &new.name, flags, Mode::empty())?;
        // A path that leads to this very inode, whatever its name has become.
        let itself = format!("/proc/self/fd/{}", inode.as_raw_fd());
        if let Some((user, group)) = owner {
            rustix::fs::chownat(&inode, c"", Some(user), Some(group), AtFlags::EMPTY_PATH)?;
        }
        for (name, value) in self.kept(&meta.xattrs).filter(|(name, _)| !name.starts_with(b"user.")) {
            match rustix::fs::setxattr(&itself, name.as_slice(), value, XattrFlags::empty()) {
                Err(Errno::OPNOTSUPP) => {}
                set => set?,
            }
        }
        if let Some(mode) = mode.filter(|_| meta.attributes.kind != NodeKind::Symlink) {
            rustix::fs::chmod(&itself, mode)?;
        }
        if let Some(times) = times(&meta.attributes) {
            rustix::fs::utimensat(&inode, c"", &times, AtFlags::EMPTY_PATH)?;
        }
        Ok(())
    }

    /// Makes what an entry is, under a name that is new; a file is empty.
    fn create(
        &self,
        dir: &OwnedFd,
        name: &[u8],
        attributes: &Attributes,
        item: &Item<'_>,
    ) -> Result<Option<File>, Errno> {
        match item {
            Item::File(_) => {
                let flags =
                    OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let mode = self.first_mode(attributes, 0o600, 0o666);
                return Ok(Some(rustix::fs::openat(dir, name, flags, mode)?.into()));
            }
            Item::Directory => rustix::fs::mkdirat(dir, name, self.first_mode(attributes, 0o700, 0o777))?,
            Item::Symlink(target) => rustix::fs::symlinkat(target.as_slice(), dir, name)?,
            Item::Hard(first) => {
                let (parent, first) = split(first);
                rustix::fs::linkat(self.open_directory(parent)?, first, dir, name, AtFlags::empty())?;
            }
            Item::Special => {
                let kind = FileType::from_raw_mode(attributes.mode.unwrap_or(0).into());
                let (major, minor) = attributes.device.unwrap_or((0, 0));
                let device: Dev = rustix::fs::makedev(major, minor);
                let mode = self.mode(attributes).unwrap_or(Mode::from_raw_mode(0o600));
                rustix::fs::mknodat(dir, name, kind, mode, device)?;
            }
        }
        Ok(None)
    }

    /// The same under the entry's own name; with `--force` under a hidden one where that is taken.
    fn make(&mut self, path: &[u8], attributes: &Attributes, item: &Item<'_>) -> Result<New, Refusal> {
        let (_, own) = split(path);
        let failed = |host: &Self, errno| host.refuse(path, "it cannot be made", errno);
        let dir = self.parent(path).map_err(|errno| failed(self, errno))?;
        match self.create(&dir, own, attributes, item) {
            Ok(file) => return Ok(New { dir, name: own.to_vec(), hidden: false, file }),
            Err(Errno::EXIST) if self.keep.force => self.may_replace(&dir, path)?,
            Err(errno) => return Err(failed(self, errno)),
        }
        for number in 0..HIDDEN_MAX {
            let name = format!(".becket-{}-{number}", std::process::id()).into_bytes();
            match self.create(&dir, &name, attributes, item) {
                Err(Errno::EXIST) => {}
                made => {
                    let file = made.map_err(|errno| failed(self, errno))?;
                    return Ok(New { dir, name, hidden: true, file });
                }
            }
        }
        Err(failed(self, Errno::EXIST))
    }

    /// Whether a copy may replace what has its name: a directory has more than was asked for in it.
    fn may_replace(&self, dir: &OwnedFd, path: &[u8]) -> Result<(), Refusal> {
        let found = rustix::fs::statat(dir, split(path).1, AtFlags::SYMLINK_NOFOLLOW);
        let found = found.map_err(|errno| self.refuse(path, "it cannot be replaced", errno))?;
        let (kind, why) = match FileType::from_raw_mode(found.st_mode) {
            FileType::RegularFile
                if self.sources.contains(&Identity { dev: found.st_dev, ino: found.st_ino }) =>
            {
                ("in_use", "it is copied from")
            }
            FileType::RegularFile | FileType::Symlink => return Ok(()),
            FileType::Directory => return Err(self.refuse(path, "it cannot be replaced", Errno::EXIST)),
            _ => ("not_a_file", "it is no file"),
        };
        let path = format!("{}/{}", self.shown, shown(path));
        Err(Refusal::Entry(Failure::new(kind, format!("cannot write {path}: {why}"))))
    }

    fn directory(&mut self, path: &[u8], meta: Meta) -> Result<(), Errno> {
        let dir = self.parent(path)?;
        match self.create(&dir, split(path).1, &meta.attributes, &Item::Directory) {
            Ok(_) => self.directories.push((path.to_vec(), meta)),
            // One that is there is filled, and stays as it is.
            Err(Errno::EXIST) => drop(self.open_directory(path)?),
            Err(errno) => return Err(errno),
        }
        Ok(())
    }

    /// Gives something new its bytes and attributes.
    fn complete(&self, path: &[u8], new: &mut New, meta: &Meta, item: Item<'_>) -> Result<(), Refusal> {
        let unwritten = |errno| self.refuse(path, "its bytes cannot be written", errno);
        let dressed = match (item, new.file.take()) {
            (Item::Hard(_), _) => Ok(()),
            (Item::File(contents), Some(file)) => {
                fill(contents, &file).map_err(|trouble| match trouble {
                    Trouble::Read(error) => {
                        let shown = format!("cannot copy to {}/{}", self.shown, shown(path));
                        Refusal::Entry(Failure::io(shown, &error))
                    }
                    Trouble::Write(error) => unwritten(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
                })?;
                let file = OwnedFd::from(file);
                let dressed = self.dress(&file, meta);
                // Network file systems say now whether they have room.
                let closed = becket_uapi::close(file);
                closed.map_err(|error| unwritten(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
                dressed
            }
            _ => self.dress_named(new, meta),
        };
        // No room for an attribute says nothing of the other files.
        dressed.map_err(|errno| Refusal::Entry(self.failure(path, "its attributes cannot be set", errno)))
    }

    /// Gives something new its own name, or takes it away where it is not complete.
    fn settle(&self, path: &[u8], new: &New, done: Result<(), Refusal>) -> Result<(), Refusal> {
        let New { dir, name, hidden, .. } = new;
        let renamed = done.and_then(|()| match hidden {
            true => rustix::fs::renameat(dir, name, dir, split(path).1)
                .map_err(|errno| self.refuse(path, "it cannot be renamed", errno)),
            false => Ok(()),
        });
        if renamed.is_err() || *hidden {
            // Two names of one file both stay when renamed. The error at hand is reported, not this one.
            let _ = rustix::fs::unlinkat(dir, name, AtFlags::empty());
        }
        renamed
    }

    fn refuse(&self, path: &[u8], what: &str, errno: Errno) -> Refusal {
        let failure = self.failure(path, what, errno);
        match errno {
            Errno::NOSPC | Errno::DQUOT | Errno::ROFS => Refusal::All(failure),
            _ => Refusal::Entry(failure),
        }
    }
}

impl Sink for Host {
    fn spare(&mut self, files: &[Identity]) {
        self.sources.extend(files);
    }

    fn take(&mut self, path: &[u8], meta: Meta, item: Item<'_>) -> Result<(), Refusal> {
        if matches!(item, Item::Directory) {
            let made = self.directory(path, meta);
            return made.map_err(|errno| self.refuse(path, "it cannot be made", errno));
        }
        let mut new = self.make(path, &meta.attributes, &item)?;
        let done = self.complete(path, &mut new, &meta, item);
        self.settle(path, &new, done)
    }
}

/// Writes a file's bytes to an empty one, whose holes are the image's.
fn fill(contents: tree::File<'_>, file: &File) -> Result<(), Trouble> {
    let len = contents.image().len();
    let mut written = 0;
    contents.each(|at, bytes| {
        written = at + bytes.len() as u64;
        file.write_all_at(bytes, at)
    })?;
    // A hole at its end is not written.
    if written < len { file.set_len(len).map_err(Trouble::Write) } else { Ok(()) }
}

/// The directory of a path, and the name in it.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (path.get(..at).unwrap_or_default(), path.get(at + 1..).unwrap_or_default()),
        None => (&[], path),
    }
}

/// The time of the last change, as it is set; that of the last access stays.
fn times(attributes: &Attributes) -> Option<Timestamps> {
    let time = attributes.modified?;
    let omit = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };
    let modified = Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds.into() };
    Some(Timestamps { last_access: omit, last_modification: modified })
}

/// Takes the umask away, so that a mode is set as it is given; it is returned, for modes to be given by it.
pub(super) fn take_umask() -> u32 {
    rustix::process::umask(Mode::empty()).as_raw_mode()
}

/// Opens a directory of the host, as its user names it.
pub(super) fn open_root(path: &std::path::Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}
