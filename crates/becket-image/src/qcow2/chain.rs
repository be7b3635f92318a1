//! A qcow2 on the host with the files below it: which of those may be opened, and which format each has.
//! It never opens a file only because an image refers to it: a hostile image must not show its reader other
//! people's files.
//!
//! # The rule
//!
//! - A reference is followed only if the caller named the format, or if the suffix of the file's name is that
//!   of the format ([`crate::suffix`]). A guest that writes a qcow2 header into its raw disk opens nothing.
//! - A backing file lies in the directory of the image that is attached, or below it; or in a directory that
//!   the user named (`--backing-dir`). Each directory is opened once, and stays open. The kernel resolves
//!   names there (`openat2`, `RESOLVE_BENEATH`), so neither `..` nor a symbolic link leads out, whatever is
//!   renamed meanwhile. In the image's own directory the backing file must be a regular file; an image that
//!   is a block device has no directory of its own. Names that are not paths (`nbd:...`, `json:...`) are
//!   refused.
//! - The header above states the format of a backing file, and a file that is declared raw is never probed.
//!   If the header states none, the suffix of the backing file's name decides; a file that begins like a
//!   qcow2 without a qcow2 suffix is refused.
//! - The file that the data of a qcow2 are in is found in the same way, and is raw.
//! - A chain has at most [`CHAIN_MAX`] files below the first, each of them once.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::scheme::Spoken;
use super::{Header, Verdict, Writing, snapshots, unpack_beside, unpack_for};
use crate::error::quoted;
use crate::image::Image;
use crate::layer::{LayerError, foreign};
use crate::resolve::{HostInode, kind_of};
use crate::source::file::facts::proc_path;
use crate::source::file::host::HostFile;
use crate::suffix;
use crate::text::shown;
use crate::{Error, FileKind, Format, is_remote};

/// The most files below the first: with two descriptors each they pass through one message.
const CHAIN_MAX: usize = 32;

/// Why a snapshot is not written.
pub(crate) const ONLY_READ: &str = "a snapshot is only read";

/// The file that a chain begins with.
#[derive(Debug)]
pub(crate) struct First<'a> {
    /// Its bytes as they are stored.
    pub(crate) image: &'a Image,
    /// As the caller gave it.
    pub(crate) host: &'a Path,
    pub(crate) file: &'a HostFile,
    /// What the caller takes it for.
    pub(crate) format: Format,
    /// Directories that the user allows beside the file's own.
    pub(crate) dirs: &'a [PathBuf],
    /// Its disk as it was when this snapshot was made; as it is now, when not given.
    pub(crate) snapshot: Option<&'a OsStr>,
    /// How to open it. The files that it refers to are only read.
    pub(crate) writing: Writing,
}

impl First<'_> {
    /// Whether the host says that it is of this format: by its caller, or by its name.
    pub(crate) fn is_said_to_be(&self, format: Format) -> bool {
        self.format == format
            || [self.host, self.file.path.as_path()].iter().any(|path| suffix::says(path, format))
    }

    /// Refuses a reference to a file in an image whose format was not confirmed on the host.
    ///
    /// # Errors
    /// It is such an image.
    pub(crate) fn may_refer(&self, format: Format, name: impl FnOnce() -> String) -> Result<(), Error> {
        if self.is_said_to_be(format) {
            return Ok(());
        }
        Err(Error::Reference { path: self.host.to_owned(), format, name: name() })
    }

    /// Why the snapshot cannot be had.
    pub(crate) fn no_snapshot(&self, why: String) -> Error {
        let name = self.snapshot.unwrap_or_default().as_bytes();
        Error::Snapshot { path: self.file.path.clone(), name: shown(name), why }
    }

    /// Why it is only read although its format could be written, for people.
    fn unnamed(&self) -> Option<String> {
        (!self.is_said_to_be(Format::Qcow2)).then(|| {
            "it begins like a qcow2, but is not named *.qcow2: --format qcow2 allows writes, --format raw attaches its bytes"
                .to_owned()
        })
    }
}

/// A disk, and the files beside the first that its map speaks of, in this order.
#[derive(Debug)]
pub(crate) struct Unpacked {
    pub(crate) image: Image,
    pub(crate) referenced: Vec<HostFile>,
    /// Length of the first file's clusters, in bytes.
    pub(crate) cluster: u64,
    /// Whether the first file may be written.
    pub(crate) verdict: Verdict,
}

impl Unpacked {
    /// A file as it is.
    pub(crate) fn plain(image: Image) -> Unpacked {
        Unpacked { image, referenced: Vec::new(), cluster: 0, verdict: Verdict::default() }
    }
}

/// The disk in a qcow2 and the files below it; `None` if the file is not a qcow2. `open` opens what was
/// found, for reading.
pub(crate) fn unpack_chain(
    first: &First<'_>,
    open: &mut dyn FnMut(&Path, HostInode) -> Result<HostFile, Error>,
) -> Result<Option<Unpacked>, Error> {
    let of = |path: &Path, source| Error::Layer { image: shown(path.as_os_str().as_bytes()), source };
    let header = match Header::read(first.image) {
        // What becket calls damaged may be a format of its own.
        Err(error) if first.format == Format::Auto => foreign::refuse(first.image).and(Err(error)),
        header => header,
    };
    let failed = |source| of(&first.file.path, source);
    let Some(mut header) = header.map_err(failed)? else { return Ok(None) };
    if let Some(name) = first.snapshot {
        let Some(old) = header.of_snapshot(first.image, name.as_bytes()).map_err(failed)? else {
            let there = snapshots::names(first.image, &header).map_err(failed)?;
            let there = if there.is_empty() { "it has none".to_owned() } else { format!("it has {there}") };
            return Err(first.no_snapshot(format!("there is none of this name; {there}")));
        };
        header = old;
    }
    for name in header.data.iter().chain(header.backing.as_ref().map(|backing| &backing.name)) {
        first.may_refer(Format::Qcow2, || shown(name))?;
    }
    let unnamed = first.unnamed();
    let old = first.snapshot.map(|_| ONLY_READ.to_owned());
    let beside = header.data.as_ref().map(|_| "its data are in another file".to_owned());
    let only_read = old.or(unnamed).or(beside);
    let writing = if only_read.is_some() { Writing::Never } else { first.writing };
    let cluster = header.cluster();
    let refers = header.backing.is_some() || header.data.is_some();
    let dirs = if refers { Dirs::new(first)? } else { Dirs::default() };
    let mut files = Files { first, dirs, referenced: Vec::new(), open };
    let data = files.data_of(&first.file.path, &header)?;
    let mut stack = vec![(first.file.path.clone(), first.image.clone(), data, header)];
    let (mut image, mut verdict) = (None, Verdict::default());
    while let Some((path, _, _, Header { backing: Some(name), .. })) = stack.last() {
        let refused = |why: String| refused(path, BACKING, &name.name, why);
        let (link, raw) = files.follow(path, BACKING, &name.name)?;
        let qcow2 = |said_by: &str| {
            let wrong = || LayerError::Corrupt(format!("it is not a qcow2, although {said_by} says so"));
            Some(Header::read(&raw).and_then(|header| header.ok_or_else(wrong)))
        };
        let suffixed = suffix::says(Path::new(std::ffi::OsStr::from_bytes(&name.name)), Format::Qcow2);
        let next = match name.format.as_deref() {
            Some(b"qcow2") => qcow2("the one above it"),
            Some(b"raw" | b"host_device") => None,
            None if suffixed => qcow2("its name"),
            // A damaged header is one, too.
            None if !matches!(Header::read(&raw), Ok(None)) => {
                return Err(Error::Backing {
                    image: path.clone(),
                    what: BACKING,
                    name: name.shown(),
                    why: "it begins like a qcow2, but the image does not say that it is one".to_owned(),
                    hint: Some(format!(
                        "if it is: qemu-img rebase -u -F qcow2 -b {} {}",
                        name.shown(),
                        shown(path.as_os_str().as_bytes())
                    )),
                    missing: false,
                });
            }
            None => {
                foreign::refuse(&raw).map_err(|source| of(&link, source))?;
                None
            }
            Some(other) => {
                return Err(refused(format!(
                    "its format is given as {}; becket knows raw and qcow2",
                    shown(other)
                )));
            }
        };
        match next {
            Some(header) => {
                let header = header.map_err(|source| of(&link, source))?;
                let data = files.data_of(&link, &header)?;
                stack.push((link, raw, data, header));
            }
            None => {
                image = Some(raw);
                break;
            }
        }
    }
    while let Some((path, file, data, header)) = stack.pop() {
        let unpacked = if stack.is_empty() && writing != Writing::Never {
            unpack_for(writing, &file, &header, image.as_ref()).map(|(disk, known)| {
                verdict = known;
                disk
            })
        } else {
            unpack_beside(&file, &header, data.as_ref(), image.as_ref())
        };
        image = Some(unpacked.map_err(|source| of(&path, source))?);
    }
    verdict.unwritable = only_read.or(verdict.unwritable);
    Ok(image.map(|image| Unpacked { image, referenced: files.referenced, cluster, verdict }))
}

/// What a file is to the image that names it.
const BACKING: &str = "backing file";
const DATA: &str = "data file";

fn refused(image: &Path, what: &'static str, name: &[u8], why: String) -> Error {
    let (image, name) = (image.to_owned(), shown(name));
    Error::Backing { image, what, name, why, hint: None, missing: false }
}

/// The files of a chain beside the first, in the order in which they are opened.
struct Files<'a> {
    first: &'a First<'a>,
    dirs: Dirs,
    referenced: Vec<HostFile>,
    open: &'a mut dyn FnMut(&Path, HostInode) -> Result<HostFile, Error>,
}

impl Files<'_> {
    /// Opens the file that an image names; where it is, and its bytes.
    fn follow(&mut self, image: &Path, what: &'static str, name: &[u8]) -> Result<(PathBuf, Image), Error> {
        if self.referenced.len() == CHAIN_MAX {
            let why = format!("there are more than {CHAIN_MAX} files below each other");
            return Err(refused(image, what, name, why));
        }
        let found = self.dirs.find(image, what, name)?;
        let same = |stat: &Stat| (stat.st_dev, stat.st_ino) == (found.stat.st_dev, found.stat.st_ino);
        if same(&self.first.file.stat) || self.referenced.iter().any(|link| same(&link.stat)) {
            let why = "it is in the chain already: the chain is a circle".to_owned();
            return Err(refused(image, what, name, why));
        }
        let link = (self.open)(image, found)?;
        let reader = link.fd.try_clone().map_err(|source| Error::Io {
            path: link.path.clone(),
            what: "its descriptor cannot be copied",
            source,
        })?;
        let raw = Image::raw(Arc::new(reader), link.size, 512).within(self.first.image.budget());
        let path = link.path.clone();
        self.referenced.push(link);
        Ok((path, raw))
    }

    /// The file that the data of a qcow2 are in, where that is another one.
    fn data_of(&mut self, image: &Path, header: &Header) -> Result<Option<Image>, Error> {
        let name = header.data.as_deref();
        name.map(|name| self.follow(image, DATA, name).map(|(_, raw)| raw)).transpose()
    }
}

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
    pub(crate) fn new(first: &First<'_>) -> Result<Dirs, Error> {
        let failed = |dir: &Path| {
            let (path, what) = (dir.to_owned(), "files that an image refers to cannot be looked for in it");
            move |source| Error::Io { path, what, source }
        };
        let own = match first.file.kind {
            FileKind::Regular => {
                let dir = first.file.path.parent().unwrap_or(Path::new("/"));
                Dir::holding(&first.file.path, &first.file.stat).map_err(failed(dir))?
            }
            FileKind::Block => None,
        };
        let named = |dir: &PathBuf| Dir::named(dir).map_err(failed(dir));
        let more = first.dirs.iter().map(named).collect::<Result<_, _>>()?;
        Ok(Dirs { own, more })
    }

    /// Finds the file that `image` names, without opening it. `what` it is to the image is for people.
    pub(crate) fn find(&self, image: &Path, what: &'static str, name: &[u8]) -> Result<HostInode, Error> {
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
            let over = said(image);
            let server = Path::new(OsStr::from_bytes(name));
            // What becket has said itself is no more believed: the user names the image that is to be opened.
            // Nor is what QEMU has said: to name a server is to allow it.
            let hint = match Spoken::of(name) {
                Some(spoken) => {
                    let (options, backing) = (spoken.options(), said(&spoken.within(dir)));
                    Some(format!("attach the image below it: becket attach {options}{backing} --cow {over}"))
                }
                None => (is_remote(server) && what == BACKING).then(|| {
                    format!("if you trust that server: becket attach {} --cow {over}", said(server))
                }),
            };
            let why = "it is not the path of a file, and nothing else is opened";
            return Err(failed(why.to_owned(), hint, false));
        }
        let wanted = flattened(&image.parent().unwrap_or(Path::new("/")).join(OsStr::from_bytes(name)));
        let own = self.own.iter().map(|dir| (dir, true));
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
