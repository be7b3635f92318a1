//! `--cow`: an image that is only read, and a qcow2 over it that takes what is written.
//! It never writes to a file that is not an overlay of this very image, and never replaces one.
//!
//! # What an overlay says of the image below it
//!
//! - If QEMU takes a whole file or device for the same disk (raw, qcow2, flat VMDK): its path and format.
//!   Every program that knows qcow2 can open such an overlay.
//! - For everything else (a path through images, a compressed image, a part of an image): a name like
//!   `becket:PATH` ([`crate::qcow2::scheme`]). That is neither a path nor a protocol, so a program that needs
//!   the backing data reports that it cannot open it. No program takes the file on the way for the disk, or
//!   reads zeroes where nothing was written.
//!
//! - For what is fetched or decoded into a file that nobody knows: the same with its URL, or the path of the
//!   compressed file, and its version ([`Below`]), which must be the same.
//!
//! The path is relative (to the overlay) if the file lies in the overlay's directory or below it, so that
//! both can be moved together.
//! Here, too, an overlay opens nothing by that name: the name is only compared with the image that the user
//! names.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, MemfdFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::backing::Linked;
use crate::error::quoted;
use crate::image::Image;
use crate::qcow2::header::BackingName;
use crate::qcow2::{self, Header, Writing, create::write_empty, mark_corrupt, scheme::Spoken};
use crate::resolve::{io, resolve_at};
use crate::source::file::host::{HostFile, open_inode, real_path, size_of, unit_of};
use crate::source::file::locks::Claim;
use crate::source::file::outer::lock_fd;
use crate::text::shown;
use crate::{Below, Error, FileKind, OpenOptions};

/// Length of an overlay's clusters in bytes, where its file system is not written in longer units.
const CLUSTER: u64 = 64 << 10;
const CLUSTER_MAX: u64 = 2 << 20;

/// The image that is only read.
#[derive(Debug)]
pub(crate) struct Base {
    pub(crate) image: Image,
    /// What its map speaks of; its path enters the first.
    pub(crate) links: Vec<Linked>,
    /// The URI of the image, with the path inside, where it is on no file of this host.
    pub(crate) remote: Option<PathBuf>,
    /// The path inside that file.
    pub(crate) inside: Vec<OsString>,
    /// Which bytes of what the path names, where not all: the first, and at most how many.
    pub(crate) part: Option<(u64, Option<u64>)>,
    /// What it is known by, where its first file only keeps its bytes.
    pub(crate) below: Option<Below>,
    /// What QEMU takes the first file for, where that is the same disk.
    pub(crate) plain: Option<&'static str>,
}

/// An image with its overlay.
#[derive(Debug)]
pub(crate) struct Stack {
    pub(crate) image: Image,
    /// The overlay's file, then what is below it.
    pub(crate) links: Vec<Linked>,
    /// Why the overlay can only be read.
    pub(crate) read_only: Option<String>,
    pub(crate) overlay: Overlay,
}

/// The file that takes what is written to an image.
#[derive(Debug)]
pub struct Overlay {
    /// Where it is: absolute, without symbolic links.
    pub path: PathBuf,
    fresh: Option<Fresh>,
}

impl Overlay {
    /// It stays, although it may have been made just now.
    pub fn keep(&mut self) {
        if let Some(fresh) = &mut self.fresh {
            fresh.kept = true;
        }
    }
}

/// A file that was made just now, and goes again unless it is kept.
#[derive(Debug)]
struct Fresh {
    dir: OwnedFd,
    name: OsString,
    ino: u64,
    kept: bool,
}

impl Drop for Fresh {
    fn drop(&mut self) {
        let found = || rustix::fs::statat(&self.dir, &self.name, AtFlags::SYMLINK_NOFOLLOW);
        if !self.kept && found().is_ok_and(|stat| stat.st_ino == self.ino) {
            // Best effort: what stays is an overlay without a byte, which the next attempt uses.
            let _ = rustix::fs::unlinkat(&self.dir, &self.name, AtFlags::empty());
        }
    }
}

/// Lays the overlay in `file` over an image. The overlay is created if there is no such file and writing is
/// allowed.
///
/// # Errors
/// The file is something else, is in use, or cannot be made.
pub(crate) fn lay_over(
    base: Base,
    file: &Path,
    options: &OpenOptions,
    warnings: &mut Vec<String>,
) -> Result<Stack, Error> {
    let OpenOptions { read_only, shared, drop_bitmaps, rehearsal, .. } = *options;
    let place = Place::of(file, read_only)?;
    let made = if read_only { None } else { create(&base, file, &place, rehearsal, warnings)? };
    let (link, fresh, unwritable) = match made {
        Some((link, fresh)) => (link, Some(fresh), None),
        None => {
            let (link, unwritable) = find(&base, file, &place, read_only, shared, warnings)?;
            (link, None, unwritable)
        }
    };
    let reader = link.fd.try_clone().map_err(|error| io(file, "its descriptor cannot be copied", error))?;
    let raw = Image::raw(Arc::new(reader), link.size, 512).within(base.image.budget());
    let damaged = |source| Error::Layer { image: shown(file.as_os_str().as_bytes()), source };
    let Some(header) = Header::read(&raw).map_err(damaged)? else {
        return Err(base.refused(file, "it is not a qcow2".to_owned(), None));
    };
    base.check(&header, file, &link.path)?;
    let cluster = header.cluster();
    let writing = Writing::new(read_only || unwritable.is_some(), drop_bitmaps);
    let (image, verdict) = qcow2::unpack_for(writing, &raw, &header, Some(&base.image)).map_err(damaged)?;
    let marked = |why: String| if verdict.corrupt && !rehearsal { mark_corrupt(&link.fd, &why) } else { why };
    let unwritable = unwritable.or(verdict.unwritable.map(marked));
    let read_only = unwritable.or_else(|| too_short(cluster, &link.fd).filter(|_| !read_only));
    if read_only.is_none() {
        warnings.extend(verdict.warning);
    }
    let overlay = Overlay { path: link.path.clone(), fresh };
    let links = std::iter::once(Linked::File(link)).chain(base.links).collect();
    Ok(Stack { image, links, read_only, overlay })
}

/// Why clusters of this length cannot be written in this file: tables are written through the page cache and
/// data past it, which must not meet in one page or block.
pub(crate) fn too_short(cluster: u64, file: &OwnedFd) -> Option<String> {
    let unit = unit_of(file);
    (cluster < unit)
        .then(|| format!("its clusters of {cluster} bytes are shorter than what is written at once, {unit}"))
}

/// The directory of an overlay, which is looked up once and held, and the overlay's name in it.
struct Place {
    dir: OwnedFd,
    name: OsString,
}

impl Place {
    fn of(file: &Path, read_only: bool) -> Result<Place, Error> {
        let name = file.file_name().ok_or_else(|| not_an_image(file))?.to_owned();
        let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // To be synced it must be open for reading; to find a file in it, it need not be readable.
        let access = if read_only { OFlags::PATH } else { OFlags::RDONLY };
        let flags = access | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::io::retry_on_intr(|| rustix::fs::open(parent, flags, Mode::empty()))
            .map_err(|errno| io(file, "its directory cannot be opened", errno))?;
        Ok(Place { dir, name })
    }
}

/// Creates an overlay; `None` if the name exists already. The file and its name are on the disk when this
/// returns; in a rehearsal the file has no name.
fn create(
    base: &Base,
    file: &Path,
    place: &Place,
    rehearsal: bool,
    warnings: &mut Vec<String>,
) -> Result<Option<(HostFile, Fresh)>, Error> {
    let Place { dir, name } = place;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    let opened = match rehearsal {
        true => nameless(place, mode),
        false => rustix::io::retry_on_intr(|| rustix::fs::openat(dir, name, flags, mode)),
    };
    let fd = match opened {
        Ok(fd) => fd,
        Err(Errno::EXIST) => return Ok(None),
        Err(errno @ (Errno::ACCESS | Errno::PERM)) => {
            return Err(Error::Permission { path: file.to_owned(), source: errno.into() });
        }
        Err(errno) => return Err(io(file, "it cannot be created", errno)),
    };
    let failed = |error: std::io::Error| io(file, "the overlay cannot be created", error);
    let stat = rustix::fs::fstat(&fd).map_err(|errno| failed(errno.into()))?;
    let dir = dir.try_clone().map_err(failed)?;
    let fresh = Fresh { dir, name: name.clone(), ino: stat.st_ino, kept: false };
    let within = real_path(file, &fresh.dir)?;
    lock_fd(file, &fd, FileKind::Regular, &Claim::of_all(true, false), warnings)?;
    let cluster = unit_of(&fd).next_power_of_two().clamp(CLUSTER, CLUSTER_MAX);
    let handle = File::from(fd.try_clone().map_err(failed)?);
    write_empty(&handle, base.image.len().next_multiple_of(512), cluster, &base.name_in(&within))
        .map_err(failed)?;
    rustix::fs::fsync(&fresh.dir).map_err(|errno| failed(errno.into()))?;
    let size = size_of(file, &fd, FileKind::Regular)?;
    Ok(Some((HostFile { path: within.join(name), fd, kind: FileKind::Regular, stat, size }, fresh)))
}

/// A file without a name where an overlay could be created, or why none could.
fn nameless(place: &Place, mode: Mode) -> Result<OwnedFd, Errno> {
    match rustix::fs::statat(&place.dir, &place.name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => return Err(Errno::EXIST),
        Err(Errno::NOENT) => {}
        Err(errno) => return Err(errno),
    }
    match rustix::fs::openat(&place.dir, ".", OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode) {
        // Some file systems have no files without a name. What is in memory shows as much, but for rights.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {
            rustix::fs::memfd_create("becket-rehearsal", MemfdFlags::CLOEXEC)
        }
        opened => opened,
    }
}

/// Opens a file that is there; and why it can only be read.
fn find(
    base: &Base,
    file: &Path,
    place: &Place,
    read_only: bool,
    shared: bool,
    warnings: &mut Vec<String>,
) -> Result<(HostFile, Option<String>), Error> {
    let found = resolve_at(&place.dir, &place.name, file)?;
    if found.kind != FileKind::Regular {
        return Err(base.refused(file, "it is a block device, which cannot grow".to_owned(), None));
    }
    if base.links.iter().any(|link| link.is(&found.stat)) {
        return Err(base.refused(file, "the image itself is in this file".to_owned(), None));
    }
    let (fd, unwritable) = open_inode(file, &found.inode, found.kind, read_only)?;
    let write = !read_only && unwritable.is_none();
    // Two processes that allocate clusters in one file destroy it, so a writer has the file to itself.
    lock_fd(file, &fd, found.kind, &Claim::of_all(write, shared && !write), warnings)?;
    // An empty file is not an overlay, and says so.
    let size = rustix::fs::fstat(&fd).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
    Ok((HostFile { path: real_path(file, &fd)?, fd, kind: found.kind, stat: found.stat, size }, unwritable))
}

fn not_an_image(file: &Path) -> Error {
    Error::NotAnImage { path: file.to_owned(), what: "a directory" }
}

impl Base {
    /// Refuses an overlay of something else; `path` is where it really is.
    fn check(&self, header: &Header, file: &Path, path: &Path) -> Result<(), Error> {
        let Some(backing) = header.backing() else {
            return Err(self.refused(file, "it is a qcow2 without a backing file".to_owned(), None));
        };
        let dir = path.parent().unwrap_or(Path::new("/"));
        if self.is_named(backing, dir) {
            return Ok(());
        }
        let said =
            backing.format.as_deref().map_or_else(String::new, |format| format!(" ({})", shown(format)));
        let spoken = Spoken::of(&backing.name);
        let (ours, theirs) = (self.spoken(dir).version, spoken.as_ref().and_then(|it| it.version.clone()));
        if let (Some(ours), Some(theirs)) = (&ours, &theirs)
            && ours != theirs
        {
            let why = format!(
                "it lies over version {} of {}, and this is version {}",
                shown(theirs.as_bytes()),
                shown(spoken.unwrap_or_default().within(dir).as_os_str().as_bytes()),
                shown(ours.as_bytes())
            );
            let hint = "what was written belongs to the contents that it lies over: attach those with it";
            return Err(self.refused(file, why, Some(hint.to_owned())));
        }
        let mut hint = "attach that image with it".to_owned();
        // That the contents are the same is for the user to say, but where versions do.
        if ours == theirs {
            let BackingName { name, format } = self.name_in(dir);
            hint += &format!(
                "; or, if this is the same image under another name: qemu-img rebase -u -F {} -b {} {}",
                shown(format.as_deref().unwrap_or_default()),
                quoted(Path::new(OsStr::from_bytes(&name))),
                quoted(file),
            );
        }
        Err(self.refused(file, format!("it lies over {}{said}", shown(&backing.name)), Some(hint)))
    }

    fn refused(&self, file: &Path, why: String, hint: Option<String>) -> Error {
        Error::Overlay { path: file.to_owned(), image: self.path(), why, hint }
    }

    /// What people know it by.
    fn path(&self) -> PathBuf {
        self.below.as_ref().map_or_else(|| self.place(), |below| below.name.clone())
    }

    /// Where it is, through images.
    fn place(&self) -> PathBuf {
        if let Some(uri) = &self.remote {
            return uri.clone();
        }
        let host =
            self.links.first().and_then(Linked::file).map(|file| file.path.clone()).unwrap_or_default();
        self.inside.iter().fold(host, |path, name| path.join(name))
    }

    /// What an overlay in a directory says of it in becket's words.
    fn spoken(&self, dir: &Path) -> Spoken {
        let version = self.below.as_ref().map(|below| below.version.clone());
        Spoken { part: self.part, version, path: self.path_in(dir) }
    }

    fn path_in(&self, dir: &Path) -> PathBuf {
        let path = self.path();
        path.strip_prefix(dir).map(Path::to_owned).unwrap_or(path)
    }

    /// What an overlay in a directory says of it.
    fn name_in(&self, dir: &Path) -> BackingName {
        let path = self.path_in(dir);
        let name = match self.plain {
            None => self.spoken(dir).name(),
            // QEMU knows the same URIs.
            Some(_) if self.remote.is_some() => path.into_os_string().into_vec(),
            // What has a colon before its first slash is a protocol to QEMU.
            Some(_) if path.is_relative() && path.as_os_str().as_bytes().contains(&b':') => {
                Path::new(".").join(path).into_os_string().into_vec()
            }
            Some(_) => path.into_os_string().into_vec(),
        };
        BackingName { name, format: Some(self.plain.unwrap_or("raw").into()) }
    }

    /// Whether an overlay that lies in a directory speaks of this image.
    fn is_named(&self, backing: &BackingName, dir: &Path) -> bool {
        let Some(plain) = self.plain else {
            // Earlier versions of becket named the file that keeps its bytes.
            let place = self.place();
            let early = |dir: &&Path| {
                let path = place.strip_prefix(dir).unwrap_or(&place).to_owned();
                Spoken { part: self.part, version: None, path }.name() == backing.name
            };
            // Or kept the case of a web address as it was typed.
            let name =
                Spoken::of(&backing.name).map_or_else(|| backing.name.clone(), |said| said.in_one_case());
            let dirs = [dir, Path::new("")];
            return dirs.iter().any(|dir| self.name_in(dir).name == name) || dirs.iter().any(early);
        };
        let format = match backing.format.as_deref() {
            None | Some(b"raw" | b"file" | b"host_device") => b"raw",
            Some(other) => other,
        };
        if let Some(uri) = &self.remote {
            return format == plain.as_bytes() && backing.name == uri.as_os_str().as_bytes();
        }
        let named = rustix::fs::stat(dir.join(OsStr::from_bytes(&backing.name)));
        format == plain.as_bytes()
            && named.is_ok_and(|named| self.links.first().is_some_and(|first| first.is(&named)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::resolve;

    /// An image in the file `host` of a directory that is there.
    fn base(host: &Path, inside: &[&str], plain: Option<&'static str>) -> Base {
        std::fs::write(host, [7; 4096]).unwrap();
        let found = resolve(host).unwrap();
        let (fd, _) = open_inode(host, &found.inode, found.kind, true).unwrap();
        let link = HostFile {
            path: real_path(host, &fd).unwrap(),
            fd,
            kind: found.kind,
            stat: found.stat,
            size: 4096,
        };
        Base {
            image: Image::raw(Arc::new(vec![7_u8; 4096]), 4096, 512),
            links: vec![Linked::File(link)],
            remote: None,
            inside: inside.iter().map(OsString::from).collect(),
            part: None,
            below: None,
            plain,
        }
    }

    fn named(base: &Base, dir: &Path) -> String {
        String::from_utf8(base.name_in(dir).name).unwrap()
    }

    #[test]
    fn an_overlay_names_what_it_lies_over() {
        let temp = tempfile::tempdir().unwrap();
        let dir = std::fs::canonicalize(temp.path()).unwrap();
        let absolute = dir.join("disk.img").display().to_string();
        let elsewhere = Path::new("/elsewhere");

        let mut disk = base(&dir.join("disk.img"), &[], Some("raw"));
        assert_eq!((named(&disk, &dir), named(&disk, elsewhere)), ("disk.img".to_owned(), absolute.clone()));
        for name in ["disk.img", "./disk.img", &absolute] {
            let said = |format: Option<&str>| BackingName {
                name: name.into(),
                format: format.map(|format| format.as_bytes().to_vec()),
            };
            assert!(disk.is_named(&said(Some("raw")), &dir) && disk.is_named(&said(None), &dir), "{name}");
            assert!(!disk.is_named(&said(Some("qcow2")), &dir), "{name}");
        }
        std::fs::write(dir.join("copy.img"), [7; 4096]).unwrap();
        assert!(!disk.is_named(&BackingName { name: b"copy.img".to_vec(), format: None }, &dir));

        disk = base(&dir.join("disk.img"), &["p2", "app.img"], None);
        assert_eq!(named(&disk, &dir), "becket:./disk.img/p2/app.img");
        assert_eq!(named(&disk, elsewhere), format!("becket:{absolute}/p2/app.img"));
        assert!(disk.is_named(&disk.name_in(&dir), &dir) && disk.is_named(&disk.name_in(elsewhere), &dir));
        assert!(!disk.is_named(&disk.name_in(&dir), elsewhere));
        disk.part = Some((512, None));
        assert_eq!(named(&disk, &dir), "becket:512+:./disk.img/p2/app.img");
        disk.part = Some((512, Some(1024)));
        assert_eq!(named(&disk, &dir), "becket:512+1024:./disk.img/p2/app.img");

        let colon = base(&dir.join("a:b"), &[], Some("raw"));
        assert_eq!(named(&colon, &dir), "./a:b");
    }

    #[test]
    fn what_is_kept_in_a_store_is_named_by_where_it_came_from_and_its_version() {
        let temp = tempfile::tempdir().unwrap();
        let dir = std::fs::canonicalize(temp.path()).unwrap();
        let of = |name: &str, version: &str| Base {
            below: Some(Below { name: name.into(), version: version.to_owned() }),
            ..base(&dir.join("stored"), &["p1"], None)
        };
        let url = of("https://h/d.img#p1", "a7");
        assert_eq!(named(&url, &dir), "becket:=a7:https://h/d.img#p1");
        let local = of(dir.join("d.gz/p1").to_str().unwrap(), "a7");
        assert_eq!(named(&local, &dir), "becket:=a7:./d.gz/p1");
        for early in ["becket:./stored/p1".to_owned(), format!("becket:{}/stored/p1", dir.display())] {
            assert!(url.is_named(&BackingName { name: early.into(), format: None }, &dir));
        }
        let typed = |name: &str| url.is_named(&BackingName { name: name.into(), format: None }, &dir);
        assert!(typed("becket:=a7:HTTPS://H/d.img#p1") && !typed("becket:=a7:https://h/D.img#p1"));
        let file = dir.join("over.qcow2");
        let over = |base: Base| lay_over(base, &file, &OpenOptions::default(), &mut Vec::new());
        over(url).unwrap().overlay.keep();
        over(of("https://h/d.img#p1", "a7")).unwrap();
        let refused = |base: Base| {
            let Error::Overlay { why, hint, .. } = over(base).unwrap_err() else { panic!("another error") };
            (why, hint.unwrap())
        };
        let (why, hint) = refused(of("https://h/d.img#p1", "b8"));
        assert_eq!(why, "it lies over version a7 of https://h/d.img#p1, and this is version b8");
        assert!(!hint.contains("rebase"), "{hint}");
        let (why, hint) = refused(of("https://other/d.img#p1", "a7"));
        assert!(why.contains("a7:https://h/d.img#p1") && hint.contains("rebase -u"), "{why}: {hint}");
        let (_, hint) = refused(base(&dir.join("stored"), &[], None));
        assert!(!hint.contains("rebase"), "{hint}");
    }

    #[test]
    fn a_fresh_file_goes_unless_it_is_kept() {
        let temp = tempfile::tempdir().unwrap();
        let base = || base(&temp.path().join("disk.img"), &[], Some("raw"));
        let file = temp.path().join("over.qcow2");
        let over = || lay_over(base(), &file, &OpenOptions::default(), &mut Vec::new());
        drop(over().unwrap());
        assert!(!file.exists());

        let mut stack = over().unwrap();
        stack.overlay.keep();
        drop(stack);
        let stack = over().unwrap();
        assert!(stack.overlay.fresh.is_none() && stack.read_only.is_none());
        drop(stack);
        assert!(file.exists(), "what was there stays");

        // Another file has taken its place meanwhile.
        std::fs::remove_file(&file).unwrap();
        let stack = over().unwrap();
        std::fs::write(temp.path().join("other"), "").unwrap();
        std::fs::rename(temp.path().join("other"), &file).unwrap();
        drop(stack);
        assert!(file.exists());
    }
}
