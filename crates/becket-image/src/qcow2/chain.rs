//! A qcow2 on the host with the files below it: which of those may be opened, and what they are taken for.
//! It never opens a file on the word of an image alone: a hostile image must not show its reader other people's files.
//!
//! # The rule
//!
//! - A backing file lies in the directory of the image that is attached, or below it; or in a directory that the user
//!   named (`--backing-dir`). Names are resolved there by the kernel (`openat2`, `RESOLVE_BENEATH`), so neither `..` nor a
//!   symbolic link leads out. In the image's own directory it is a regular file; an image that is a block device has
//!   no directory of its own. Names that are no paths (`nbd:...`, `json:...`) are refused.
//! - What a backing file is, its user says in the header. Where that says nothing it is taken for raw, and refused when it
//!   begins like a qcow2: who could write to a raw disk could otherwise make a chain of it.
//! - A chain has at most [`CHAIN_MAX`] files below the first, each of them once.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::header::BackingName;
use super::scheme::Spoken;
use super::writer::unwritable;
use super::{Header, unpack};
use crate::error::quoted;
use crate::host::Link;
use crate::image::Image;
use crate::layer::LayerError;
use crate::resolve::{Found, kind_of};
use crate::text::shown;
use crate::{BackingKind, Error};

/// The most files below the first: with two descriptors each they pass through one message.
const CHAIN_MAX: usize = 32;

/// The file that a chain begins with.
#[derive(Debug)]
pub(crate) struct First<'a> {
    pub(crate) image: &'a Image,
    /// Absolute, without symbolic links.
    pub(crate) path: &'a Path,
    pub(crate) kind: BackingKind,
    pub(crate) stat: &'a Stat,
    /// Directories that the user allows beside the file's own.
    pub(crate) dirs: &'a [PathBuf],
}

/// A disk, and the files below the first that its map speaks of, in this order.
#[derive(Debug)]
pub(crate) struct Unpacked {
    pub(crate) image: Image,
    pub(crate) below: Vec<Link>,
    /// Length of the first file's clusters, in bytes.
    pub(crate) cluster: u64,
    /// Why it can only be read, for people.
    pub(crate) unwritable: Option<String>,
}

/// The disk in a qcow2 and in those below it; `None` where the file is none. `open` opens what was found, for reading.
pub(crate) fn unpack_chain(
    first: &First<'_>,
    open: &mut dyn FnMut(&Path, Found) -> Result<Link, Error>,
) -> Result<Option<Unpacked>, Error> {
    let of = |path: &Path, source| Error::Layer { image: shown(path.as_os_str().as_bytes()), source };
    let header = Header::read(first.image).map_err(|source| of(first.path, source))?;
    let Some(header) = header else { return Ok(None) };
    let unwritable = unwritable(first.image, &header).map_err(|source| of(first.path, source))?;
    let cluster = header.cluster();
    let dirs = Dirs::new(first)?;
    let mut stack = vec![(first.path.to_owned(), first.image.clone(), header)];
    let mut below: Vec<Link> = Vec::new();
    let mut image = None;
    while let Some((path, _, Header { backing: Some(name), .. })) = stack.last() {
        let refused = |why: String| Error::Backing {
            image: path.clone(),
            name: name.shown(),
            why,
            hint: None,
            missing: false,
        };
        if below.len() == CHAIN_MAX {
            return Err(refused(format!("there are more than {CHAIN_MAX} files below each other")));
        }
        let found = dirs.find(path, name)?;
        let same = |stat: &Stat| (stat.st_dev, stat.st_ino) == (found.stat.st_dev, found.stat.st_ino);
        if same(first.stat) || below.iter().any(|link| same(&link.stat)) {
            return Err(refused("it is a file that lies above it: the chain is a circle".to_owned()));
        }
        let link = open(path, found)?;
        let reader = link.fd.try_clone().map_err(|source| Error::Io {
            path: link.path.clone(),
            what: "its descriptor cannot be copied",
            source,
        })?;
        let raw = Image::raw(Arc::new(reader), link.size, 512);
        let header = Header::read(&raw);
        let next = match name.format.as_deref() {
            Some(b"qcow2") => Some(header.and_then(|header| {
                header
                    .ok_or_else(|| LayerError::Corrupt("it is no qcow2, as the one above it says".to_owned()))
            })),
            Some(b"raw" | b"host_device") => None,
            // A damaged header is one, too.
            None if !matches!(header, Ok(None)) => {
                return Err(Error::Backing {
                    image: path.clone(),
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
            None => None,
            Some(other) => {
                return Err(refused(format!("it is said to be {}; raw and qcow2 are known", shown(other))));
            }
        };
        let path = link.path.clone();
        below.push(link);
        match next {
            Some(header) => {
                let header = header.map_err(|source| of(&path, source))?;
                stack.push((path, raw, header));
            }
            None => {
                image = Some(raw);
                break;
            }
        }
    }
    while let Some((path, file, header)) = stack.pop() {
        image = Some(unpack(&file, &header, image.as_ref()).map_err(|source| of(&path, source))?);
    }
    Ok(image.map(|image| Unpacked { image, below, cluster, unwritable }))
}

/// Directories that backing files may lie in.
pub(crate) struct Dirs {
    /// That of the first file, where it has one.
    own: Option<PathBuf>,
    more: Vec<PathBuf>,
}

impl Dirs {
    pub(crate) fn new(first: &First<'_>) -> Result<Dirs, Error> {
        let own = (first.kind == BackingKind::Regular).then(|| first.path.parent()).flatten();
        let real = |dir: &PathBuf| {
            let what = "backing files cannot be looked for in it";
            std::fs::canonicalize(dir).map_err(|source| Error::Io { path: dir.clone(), what, source })
        };
        let more = first.dirs.iter().map(real).collect::<Result<_, _>>()?;
        Ok(Dirs { own: own.map(Path::to_owned), more })
    }

    /// Finds the file that `image` names, without opening it.
    pub(crate) fn find(&self, image: &Path, backing: &BackingName) -> Result<Found, Error> {
        let failed = |why: String, hint: Option<String>, missing: bool| Error::Backing {
            image: image.to_owned(),
            name: backing.shown(),
            why,
            hint,
            missing,
        };
        let name = Path::new(std::ffi::OsStr::from_bytes(&backing.name));
        let before_slash = backing.name.split(|byte| *byte == b'/').next().unwrap_or_default();
        if before_slash.contains(&b':') || backing.name.contains(&0) {
            let dir = image.parent().unwrap_or(Path::new("/"));
            // What becket has said itself is no more believed: the user names the image that is to be opened.
            let hint = Spoken::of(&backing.name).map(|spoken| {
                let below = dir.join(&spoken.path);
                let [below, over] = [below.as_path(), image]
                    .map(|path| quoted(Path::new(&shown(path.as_os_str().as_bytes()))));
                format!("name what it lies over: becket attach {}{below} --cow {over}", spoken.options())
            });
            let why = "it is no path of a file, and nothing else is opened";
            return Err(failed(why.to_owned(), hint, false));
        }
        let wanted = flattened(&image.parent().unwrap_or(Path::new("/")).join(name));
        let own = self.own.iter().map(|dir| (dir, true));
        let mut dirs = own.chain(self.more.iter().map(|dir| (dir, false)));
        let place = dirs.find_map(|(dir, own)| Some((dir, wanted.strip_prefix(dir).ok()?, own)));
        let Some((dir, rest, own)) = place else {
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
        let base =
            rustix::fs::open(dir.as_path(), flags | OFlags::DIRECTORY, Mode::empty()).map_err(within)?;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let inode =
            rustix::io::retry_on_intr(|| rustix::fs::openat2(&base, rest, flags, Mode::empty(), resolve))
                .map_err(within)?;
        let stat = rustix::fs::fstat(&inode).map_err(within)?;
        match kind_of(&stat) {
            Ok(BackingKind::Block) if own => {
                Err(failed("it is a block device in the image's own directory".to_owned(), None, false))
            }
            Ok(kind) => Ok(Found { inode, kind, stat }),
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
