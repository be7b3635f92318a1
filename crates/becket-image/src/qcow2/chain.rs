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
//!   is a block device has no directory of its own, nor has one on a server.
//! - A backing name that is a URL is followed if the user allows it ([`crate::OpenOptions::backing_urls`]).
//!   Other names that are not paths (`nbd:...`, `json:...`) are refused.
//! - The header above states the format of a backing file, and a file that is declared raw is never probed.
//!   If the header states none, the suffix of the backing file's name decides; a file that begins like a
//!   qcow2 without a qcow2 suffix is refused.
//! - The file that the data of a qcow2 are in is found in the same way, and is raw.
//! - A chain has at most [`CHAIN_MAX`] files below the first, each of them once.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::dirs::{BACKING, Dirs};
use super::header::BackingName;
use super::scheme::Spoken;
use super::{Header, Verdict, Writing, snapshots, unpack_beside, unpack_for};
use crate::backing::Linked;
use crate::backing_url::{Allowed, BackingUrl, WantedUrl, is_url};
use crate::disk::unpack_disk;
use crate::error::quoted;
use crate::image::Image;
use crate::layer::{LayerError, foreign};
use crate::resolve::{HostInode, resolve};
use crate::source::file::host::HostFile;
use crate::source::link::split_inside;
use crate::text::shown;
use crate::{Error, Format, Identity, ReadAt, connected, suffix, through};

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
    /// What the user allows beside the file's own directory.
    pub(crate) allowed: Allowed<'a>,
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

    /// Whether its bytes come from elsewhere: the directory of its file is not its own.
    pub(crate) fn is_far(&self) -> bool {
        self.allowed.fillers.has(self.file.identity())
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
    pub(crate) referenced: Vec<Linked>,
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
    let Some(chain) = Chain::follow(first, false, open)? else { return Ok(None) };
    chain.unpack(first).map(Some)
}

/// The first URL that a qcow2 or one below it names, and that is not open yet. `open` as above; only what
/// can name another one is opened.
pub(crate) fn wanted_url(
    first: &First<'_>,
    open: &mut dyn FnMut(&Path, HostInode) -> Result<HostFile, Error>,
) -> Result<Option<WantedUrl>, Error> {
    match Chain::follow(first, true, open) {
        Err(Error::BackingUrl { wanted, .. }) => Ok(Some(wanted)),
        Err(error) => Err(error),
        Ok(_) => Ok(None),
    }
}

/// A qcow2 in a chain.
struct Link {
    path: PathBuf,
    /// See [`First::is_far`].
    far: bool,
    /// Its bytes as they are stored, and those of its data where they are in another file.
    file: Image,
    data: Option<Image>,
    header: Header,
    /// What the one above it means of its disk.
    view: View,
}

/// What an overlay of becket's means of the image below it.
#[derive(Debug, Default)]
struct View {
    /// Its name is becket's, and what becket finds in the image is meant.
    contents: bool,
    inside: Vec<OsString>,
    part: Option<(u64, Option<u64>)>,
}

impl View {
    /// What is meant of an image that was unpacked.
    fn of(&self, image: Image, path: &Path) -> Result<Image, Error> {
        if !self.contents {
            return Ok(image);
        }
        let failed = |source| Error::Layer { image: shown(path.as_os_str().as_bytes()), source };
        let walk = through::walk(image, shown(path.as_os_str().as_bytes()), &self.inside, Format::Auto)?;
        let level = walk.last()?;
        if walk.end != through::End::Image {
            return Err(Error::NotAnImage { path: PathBuf::from(&level.path), what: "a directory" });
        }
        let Some((offset, limit)) = self.part else { return Ok(level.image.clone()) };
        let len = level.image.len().saturating_sub(offset);
        level.image.slice(offset, limit.map_or(len, |limit| limit.min(len))).map_err(failed)
    }
}

/// The qcow2s of a chain, the first one at the start, and what is below the last.
struct Chain {
    links: Vec<Link>,
    bottom: Option<Image>,
    referenced: Vec<Linked>,
    cluster: u64,
    only_read: Option<String>,
}

impl Chain {
    /// `None` if the first file is no qcow2. With `probe` what names no other file is not opened.
    fn follow(
        first: &First<'_>,
        probe: bool,
        open: &mut dyn FnMut(&Path, HostInode) -> Result<HostFile, Error>,
    ) -> Result<Option<Chain>, Error> {
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
                let there =
                    if there.is_empty() { "it has none".to_owned() } else { format!("it has {there}") };
                return Err(first.no_snapshot(format!("there is none of this name; {there}")));
            };
            header = old;
        }
        for name in header.data.iter().chain(header.backing.as_ref().map(|backing| &backing.name)) {
            first.may_refer(Format::Qcow2, || shown(name))?;
        }
        let old = first.snapshot.map(|_| ONLY_READ.to_owned());
        let beside = header.data.as_ref().map(|_| "its data are in another file".to_owned());
        let only_read = old.or(first.unnamed()).or(beside);
        let cluster = header.cluster();
        let refers = header.backing.is_some() || header.data.is_some();
        let dirs =
            if refers { Dirs::new(first.file, first.is_far(), first.allowed.dirs)? } else { Dirs::default() };
        let mut files = Files { first, dirs, referenced: Vec::new(), open };
        let (path, far) = (first.file.path.clone(), first.is_far());
        let data = files.data_of(&path, far, &header)?;
        let view = View::default();
        let mut links = vec![Link { path, far, file: first.image.clone(), data, header, view }];
        let mut bottom = None;
        while let Some(Link { path, far, header: Header { backing: Some(name), .. }, .. }) = links.last() {
            let url = Named::of(&name.name);
            let is_raw = name.format.as_deref().is_some_and(|format| format != b"qcow2");
            if probe && is_raw && url.as_ref().is_none_or(|url| url.opened(first).is_some()) {
                break;
            }
            let OpenedBelow { at, raw, is_url } = match &url {
                Some(url) => files.connect(path, &name.name, url)?,
                None => files.follow(path, *far, BACKING, &name.name)?,
            };
            let view = url.map(|url| url.view).unwrap_or_default();
            match format_of(path, name, &at, &raw, &view)? {
                Some(header) => {
                    let data = files.data_of(&at, is_url, &header)?;
                    links.push(Link { path: at, far: is_url, file: raw, data, header, view });
                }
                None => {
                    let disk = if view.contents { unpack_disk(&raw) } else { Ok(None) };
                    let disk = disk.map_err(|source| of(&at, source))?;
                    bottom = Some(view.of(disk.unwrap_or(raw), &at)?);
                    break;
                }
            }
        }
        Ok(Some(Chain { links, bottom, referenced: files.referenced, cluster, only_read }))
    }

    /// The disk in the first of them.
    fn unpack(self, first: &First<'_>) -> Result<Unpacked, Error> {
        let Chain { mut links, bottom: mut image, referenced, cluster, only_read } = self;
        let of = |path: &Path, source| Error::Layer { image: shown(path.as_os_str().as_bytes()), source };
        let writing = if only_read.is_some() { Writing::Never } else { first.writing };
        let mut verdict = Verdict::default();
        while let Some(Link { path, file, data, header, view, .. }) = links.pop() {
            let unpacked = if links.is_empty() && writing != Writing::Never {
                unpack_for(writing, &file, &header, image.as_ref()).map(|(disk, known)| {
                    verdict = known;
                    disk
                })
            } else {
                unpack_beside(&file, &header, data.as_ref(), image.as_ref())
            };
            image = Some(view.of(unpacked.map_err(|source| of(&path, source))?, &path)?);
        }
        verdict.unwritable = only_read.or(verdict.unwritable);
        // There was at least one.
        let image = image.unwrap_or_else(|| first.image.clone());
        Ok(Unpacked { image, referenced, cluster, verdict })
    }
}

/// The header of a file `at` that `image` names, if it is a qcow2; `None` if it is raw.
fn format_of(
    image: &Path,
    name: &BackingName,
    at: &Path,
    raw: &Image,
    view: &View,
) -> Result<Option<Header>, Error> {
    let of = |source| Error::Layer { image: shown(at.as_os_str().as_bytes()), source };
    let qcow2 = |said_by: &str| {
        let wrong = || LayerError::Corrupt(format!("it is not a qcow2, although {said_by} says so"));
        Header::read(raw).and_then(|header| header.ok_or_else(wrong)).map(Some).map_err(of)
    };
    // A becket that makes an overlay says of contents that they are raw, whatever they are found in.
    let format = name.format.as_deref().filter(|_| !view.contents);
    match format {
        Some(b"qcow2") => qcow2("the one above it"),
        Some(b"raw" | b"host_device") => Ok(None),
        None if says_qcow2(at) => qcow2("its name"),
        // A damaged header is one, too.
        None if !matches!(Header::read(raw), Ok(None)) => Err(Error::Backing {
            image: image.to_owned(),
            what: BACKING,
            name: name.shown(),
            why: "it begins like a qcow2, but the image does not say that it is one".to_owned(),
            hint: Some(match view.contents {
                true => format!("if it is: becket attach {} --cow {}", quoted(at), quoted(image)),
                false => format!(
                    "if it is: qemu-img rebase -u -F qcow2 -b {} {}",
                    name.shown(),
                    shown(image.as_os_str().as_bytes())
                ),
            }),
            missing: false,
        }),
        None => {
            // A container that becket reads is meant by becket's own names only.
            if !view.contents {
                foreign::refuse(raw).map_err(of)?;
            }
            Ok(None)
        }
        Some(other) => {
            let why = format!("its format is given as {}; becket knows raw and qcow2", shown(other));
            Err(refused(image, BACKING, &name.name, why))
        }
    }
}

/// Whether the name of a file, or of a URL without its query, says that it is a qcow2.
fn says_qcow2(at: &Path) -> bool {
    let text = at.as_os_str().as_bytes();
    let end = if std::str::from_utf8(text).is_ok_and(is_url) {
        text.split(|byte| *byte == b'?').next()
    } else {
        None
    };
    suffix::says(Path::new(OsStr::from_bytes(end.unwrap_or(text))), Format::Qcow2)
}

/// A backing name that is a URL.
struct Named {
    /// Without the path inside it.
    url: PathBuf,
    view: View,
    version: Option<String>,
}

impl Named {
    fn of(name: &[u8]) -> Option<Named> {
        let Some(Spoken { part, version, path }) = Spoken::of(name) else {
            let url = std::str::from_utf8(name).ok().filter(|text| is_url(text))?;
            return Some(Named { url: url.into(), view: View::default(), version: None });
        };
        let (url, inside) = split_inside(path.as_os_str());
        url.to_str().filter(|text| is_url(text))?;
        Some(Named { url: url.into(), view: View { contents: true, inside, part }, version })
    }

    /// What was opened of it because the user allows it.
    fn opened<'a>(&self, first: &First<'a>) -> Option<&'a BackingUrl> {
        first.allowed.urls.iter().find(|opened| opened.url == self.url)
    }
}

/// See [`BACKING`].
const DATA: &str = "data file";

fn refused(image: &Path, what: &'static str, name: &[u8], why: String) -> Error {
    let (image, name) = (image.to_owned(), shown(name));
    Error::Backing { image, what, name, why, hint: None, missing: false }
}

/// The files of a chain beside the first, in the order in which they are opened.
struct Files<'a> {
    first: &'a First<'a>,
    dirs: Dirs,
    referenced: Vec<Linked>,
    open: &'a mut dyn FnMut(&Path, HostInode) -> Result<HostFile, Error>,
}

/// A file or a URL that an image names, opened.
struct OpenedBelow {
    /// Where it is.
    at: PathBuf,
    /// Its bytes as they are stored.
    raw: Image,
    is_url: bool,
}

impl Files<'_> {
    /// Opens the file that an image names. A `far` image has no directory of its own.
    fn follow(
        &mut self,
        image: &Path,
        far: bool,
        what: &'static str,
        name: &[u8],
    ) -> Result<OpenedBelow, Error> {
        self.has_room(image, what, name)?;
        let found = self.dirs.find(image, far, what, name)?;
        self.open(image, None, what, name, found)
    }

    /// Opens the URL that an image names, if the user allows that.
    fn connect(&mut self, image: &Path, name: &[u8], url: &Named) -> Result<OpenedBelow, Error> {
        self.has_room(image, BACKING, name)?;
        let Some(opened) = url.opened(self.first) else { return Err(not_allowed(image, name, url)) };
        if let (Some(theirs), Some(ours)) = (&url.version, &opened.version)
            && ours != theirs
        {
            let [theirs, ours] = [theirs, ours].map(|version| shown(version.as_bytes()));
            let why = format!("it lies over version {theirs} of it, and this is version {ours}");
            return Err(refused(image, BACKING, name, why));
        }
        if !connected::is_remote(&opened.place) {
            let found = resolve(&opened.place)?;
            return self.open(image, Some(&opened.url), BACKING, name, found);
        }
        let Allowed { to_serve, patience, .. } = self.first.allowed;
        let budget = self.first.image.budget();
        let remote = connected::connect_below(&opened.place, to_serve, patience, budget)?;
        self.is_new(image, BACKING, name, remote.identity())?;
        let raw = remote.image.clone();
        self.referenced.push(Linked::Server(Box::new(remote)));
        Ok(OpenedBelow { at: opened.url.clone(), raw, is_url: true })
    }

    fn open(
        &mut self,
        image: &Path,
        url: Option<&Path>,
        what: &'static str,
        name: &[u8],
        found: HostInode,
    ) -> Result<OpenedBelow, Error> {
        let identity = Identity { dev: found.stat.st_dev, ino: found.stat.st_ino };
        self.is_new(image, what, name, identity)?;
        let link = (self.open)(image, found)?;
        let reader: Arc<dyn ReadAt> = match self.first.allowed.fillers.of(identity) {
            Some(filler) => filler,
            None => Arc::new(link.fd.try_clone().map_err(|source| Error::Io {
                path: link.path.clone(),
                what: "its descriptor cannot be copied",
                source,
            })?),
        };
        let raw = Image::raw(reader, link.size, 512).within(self.first.image.budget());
        let at = url.unwrap_or(&link.path).to_owned();
        self.referenced.push(Linked::File(link));
        Ok(OpenedBelow { at, raw, is_url: url.is_some() })
    }

    fn has_room(&self, image: &Path, what: &'static str, name: &[u8]) -> Result<(), Error> {
        if self.referenced.len() < CHAIN_MAX {
            return Ok(());
        }
        Err(refused(image, what, name, format!("there are more than {CHAIN_MAX} files below each other")))
    }

    fn is_new(&self, image: &Path, what: &'static str, name: &[u8], it: Identity) -> Result<(), Error> {
        if self.first.file.identity() != it && self.referenced.iter().all(|link| link.identity() != it) {
            return Ok(());
        }
        let why = "it is in the chain already: the chain is a circle".to_owned();
        Err(refused(image, what, name, why))
    }

    /// The file that the data of a qcow2 are in, where that is another one.
    fn data_of(&mut self, image: &Path, far: bool, header: &Header) -> Result<Option<Image>, Error> {
        let name = header.data.as_deref();
        name.map(|name| self.follow(image, far, DATA, name).map(|found| found.raw)).transpose()
    }
}

/// Refuses a URL that the user has not allowed.
fn not_allowed(image: &Path, name: &[u8], url: &Named) -> Error {
    let said = |path: &Path| quoted(Path::new(&shown(path.as_os_str().as_bytes())));
    let view = &url.view;
    // What becket or QEMU has said itself is no more believed: to name a server is to allow it.
    let (options, whole) = match Spoken::of(name) {
        Some(spoken) => (spoken.options(), spoken.path),
        None => (String::new(), url.url.clone()),
    };
    Error::BackingUrl {
        image: image.to_owned(),
        name: shown(name),
        wanted: WantedUrl { url: url.url.clone(), contents: view.contents },
        instead: format!("becket attach {options}{} --cow {}", said(&whole), said(image)),
    }
}
