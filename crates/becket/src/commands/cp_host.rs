//! Copies into a directory of the host. Never writes outside of it: every path is opened from its descriptor,
//! beneath it and without symbolic links, and every file is new.

use super::{
    bytes::Trouble,
    cp_new::New,
    sink::{self, Item, Meta, Refusal, Sink},
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
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
    rc::Rc,
    sync::Arc,
};

/// Hidden names that are tried before one is free.
const HIDDEN_MAX: u32 = 100;

/// Directories that are kept open: those on the way to a file, mostly.
const LAST_MAX: usize = 16;

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
    /// The directories that were written to last, with their paths, the last one behind the others.
    last: Vec<(Vec<u8>, Rc<OwnedFd>)>,
    /// Hidden names that were taken.
    hidden: u32,
    /// Directories whose attributes are set last: writing to them would change some.
    directories: Vec<(Vec<u8>, Meta)>,
    /// What is copied from: never replaced.
    sources: Vec<Identity>,
}

impl Host {
    pub(super) fn new(root: OwnedFd, shown: String, keep: Keep) -> Self {
        Self { root, shown, keep, last: Vec::new(), hidden: 0, directories: Vec::new(), sources: Vec::new() }
    }

    /// Sets the attributes of the directories, the innermost first.
    pub(super) fn finish(mut self, report: &mut dyn FnMut(Failure)) {
        self.last.clear();
        for (path, meta) in std::mem::take(&mut self.directories).into_iter().rev() {
            let set = self.open_directory(&path).and_then(|dir| self.dress(dir.as_fd(), &meta));
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
                let why = "something on the way is not a directory";
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
        let at = self.last.iter().rposition(|(last, _)| last == parent);
        let known = match at {
            Some(at) => self.last.remove(at),
            None => (parent.to_vec(), Rc::new(self.open_directory(parent)?)),
        };
        let dir = Rc::clone(&known.1);
        self.last.push(known);
        if self.last.len() > LAST_MAX {
            self.last.remove(0);
        }
        Ok(dir)
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
    fn dress(&self, file: BorrowedFd<'_>, meta: &Meta) -> Result<(), Errno> {
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

    /// Makes what an entry is, under a name that is new.
    fn create(
        &self,
        dir: &OwnedFd,
        name: &[u8],
        attributes: &Attributes,
        item: &Item<'_>,
    ) -> Result<(), Errno> {
        match item {
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
        Ok(())
    }

    /// The same under the entry's own name; with `--force` under a hidden one where that is taken.
    fn make(
        &mut self,
        path: &[u8],
        create: impl Fn(&Self, &OwnedFd, &[u8]) -> Result<Option<File>, Errno>,
    ) -> Result<New, Refusal> {
        let (_, own) = split(path);
        let failed = |host: &Self, errno| host.refuse(path, "it cannot be made", errno);
        let dir = self.parent(path).map_err(|errno| failed(self, errno))?;
        match create(self, &dir, own) {
            Ok(file) => return Ok(New::made(dir, own.to_vec(), false, file)),
            Err(Errno::EXIST) if self.keep.force => self.may_replace(&dir, path)?,
            Err(errno) => return Err(failed(self, errno)),
        }
        for _ in 0..HIDDEN_MAX {
            self.hidden += 1;
            let name = format!(".becket-{}-{}", std::process::id(), self.hidden).into_bytes();
            match create(self, &dir, &name) {
                Err(Errno::EXIST) => {}
                made => {
                    let file = made.map_err(|errno| failed(self, errno))?;
                    return Ok(New::made(dir, name, true, file));
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
            _ => ("not_a_file", "it is not a file"),
        };
        let path = format!("{}/{}", self.shown, shown(path));
        Err(Refusal::Entry(Failure::new(kind, format!("cannot write {path}: {why}"))))
    }

    fn directory(&mut self, path: &[u8], meta: Meta) -> Result<(), Errno> {
        let dir = self.parent(path)?;
        match self.create(&dir, split(path).1, &meta.attributes, &Item::Directory) {
            Ok(()) => self.directories.push((path.to_vec(), meta)),
            // One that is there is filled, and stays as it is.
            Err(Errno::EXIST) => drop(self.open_directory(path)?),
            Err(errno) => return Err(errno),
        }
        Ok(())
    }

    /// Waits until a new file has its bytes, and gives it its attributes.
    fn complete(
        &self,
        path: &[u8],
        file: Arc<File>,
        meta: &Meta,
        contents: sink::File<'_>,
    ) -> Result<(), Refusal> {
        let failed = |trouble| match trouble {
            Trouble::Read(error) => {
                let shown = format!("cannot copy to {}/{}", self.shown, shown(path));
                Refusal::Entry(Failure::io(shown, &error))
            }
            Trouble::Write(error) => {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                self.refuse(path, "its bytes cannot be written", errno)
            }
        };
        let len = contents.image().len();
        if contents.written().map_err(failed)? < len {
            // A hole at its end.
            file.set_len(len).map_err(|error| failed(Trouble::Write(error)))?;
        }
        let dressed = self.dress(file.as_fd(), meta);
        // Network file systems say now whether they have room. Nothing else has it open any more.
        let closed = Arc::into_inner(file).map_or(Ok(()), |file| becket_uapi::close(file.into()));
        closed.map_err(|error| failed(Trouble::Write(error)))?;
        self.dressed(path, dressed)
    }

    /// No room for an attribute says nothing of the other files.
    fn dressed(&self, path: &[u8], dressed: Result<(), Errno>) -> Result<(), Refusal> {
        dressed.map_err(|errno| Refusal::Entry(self.failure(path, "its attributes cannot be set", errno)))
    }

    fn settle(&self, path: &[u8], new: New) -> Result<(), Refusal> {
        new.settle(split(path).1).map_err(|errno| self.refuse(path, "it cannot be renamed", errno))
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

    fn in_order(&self) -> bool {
        false
    }

    fn begin(&mut self, path: &[u8], attributes: &Attributes) -> Result<Option<New>, Refusal> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = self.first_mode(attributes, 0o600, 0o666);
        let create = |_: &Self, dir: &OwnedFd, name: &[u8]| {
            rustix::fs::openat(dir, name, flags, mode).map(|file| Some(file.into()))
        };
        self.make(path, create).map(Some)
    }

    fn file(&mut self, path: &[u8], meta: Meta, mut contents: sink::File<'_>) -> Result<(), Refusal> {
        let begun = contents.new.take().and_then(|mut new| Some((new.file.take()?, new)));
        let Some((file, new)) = begun else {
            return Err(self.refuse(path, "it was not begun", Errno::INVAL));
        };
        self.complete(path, file, &meta, contents)?;
        self.settle(path, new)
    }

    fn take(&mut self, path: &[u8], meta: Meta, item: Item<'_>) -> Result<(), Refusal> {
        if matches!(item, Item::Directory) {
            let made = self.directory(path, meta);
            return made.map_err(|errno| self.refuse(path, "it cannot be made", errno));
        }
        let new = self
            .make(path, |host, dir, name| host.create(dir, name, &meta.attributes, &item).map(|()| None))?;
        if !matches!(item, Item::Hard(_)) {
            self.dressed(path, self.dress_named(&new, &meta))?;
        }
        self.settle(path, new)
    }
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
