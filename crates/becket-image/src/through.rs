//! Paths that go through images, as if those were directories.
//! It never leaves the image that it is in: symbolic links are followed only inside it, and `..` ends at its
//! root.
//!
//! Every regular file that is followed by more path is opened as an image. In a partition table the names are
//! `p2`, `by-label/NAME` and `by-uuid/UUID`: the label and UUID of the partition or of what is in it. A
//! bootable ISO has both files and partitions: its files come first.

use std::ffi::OsString;
use std::ops::{ControlFlow, Range};
use std::os::unix::ffi::OsStrExt;

use crate::disk::unpack_disk;
use crate::error::PARTITIONS;
use crate::image::{Image, Layout, Role};
use crate::layer::packed::{self, Packing};
use crate::layer::{
    Contents, FileSystem, Format, LayerError, NodeKind, detect, find, foreign, known, recognise,
};
use crate::text::shown;
use crate::{Error, Identity, Partition};

/// Images inside images that are followed.
pub(crate) const DEPTH_MAX: usize = 16;
/// Symbolic links that are followed for one path, as the kernel does.
const LINKS_MAX: u32 = 40;
/// Where the descriptors of an ISO 9660 begin, in bytes.
const ISO_DESCRIPTORS: u64 = 32 << 10;
/// The most names that an error lists.
const TOLD_MAX: usize = 12;

/// One image on a path.
#[derive(Debug)]
pub struct Level {
    /// The path up to it, safe to show.
    pub path: String,
    /// Its bytes.
    pub image: Image,
    /// The range in the level before that holds these bytes; `None` for the first level, and if all of them
    /// are zeroes.
    pub span: Option<(u64, u64)>,
    /// What it holds, once the path went on in it.
    pub contents: Option<Contents>,
    /// Where it was found in the level before; nothing for the first, and for one that is packed in it.
    pub reached: Option<Reached>,
}

/// Where a path ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// At the last level's image.
    Image,
    /// At a directory in the last level's file system.
    Directory(u64),
}

/// A path that was walked.
#[derive(Debug)]
pub struct Walk {
    /// The images on the way, from the file on the host on; never empty.
    pub levels: Vec<Level>,
    /// What the path names.
    pub end: End,
    /// Why the image may only be read, when that is so whatever the host allows.
    pub read_only: Option<String>,
    /// The files and devices of the host that are read; none of them after [`Walk::on`].
    pub files: Vec<Identity>,
}

/// What a named format says of the file on the host, when `names` continue inside it: `raw` applies to the
/// image that the path names, which is taken as it is stored, and every other format to the file.
pub(crate) fn of_first(format: Format, names: &[OsString]) -> Format {
    if format == Format::Raw && !names.is_empty() { Format::Auto } else { format }
}

/// Walks `names` from `image`, which is known as `path`. For `format` see [`of_first`].
pub(crate) fn walk(image: Image, path: String, names: &[OsString], format: Format) -> Result<Walk, Error> {
    let stored = format == Format::Raw;
    let format = of_first(format, names).of_contents();
    let first = Level { path, image, span: None, contents: None, reached: None };
    let mut walk = Walk { levels: vec![first], end: End::Image, read_only: None, files: Vec::new() };
    let names: Vec<&[u8]> = names.iter().map(|name| name.as_bytes()).collect();
    let mut rest = names.as_slice();
    let mut links = LINKS_MAX;
    walk.unpack(format)?;
    if rest.is_empty() && walk.levels.len() == 1 {
        walk.is_really(format)?;
    }
    while !rest.is_empty() {
        let format = if walk.levels.len() == 1 { format } else { Format::Auto };
        let left = walk.descend(rest, format, stored, &mut links)?;
        rest = left;
        if !(stored && rest.is_empty()) {
            walk.unpack(Format::Auto)?;
        }
    }
    Ok(walk)
}

impl Walk {
    /// The level that the path ends in.
    ///
    /// # Errors
    /// Never in fact: there is always one.
    pub fn last(&self) -> Result<&Level, Error> {
        self.levels.last().ok_or_else(|| Error::NoContainer {
            image: String::new(),
            why: "no image".to_owned(),
            opens: None,
        })
    }

    /// Walks on by other names from the image that this walk ends in, which stays open and keeps its budget.
    /// With [`Format::Raw`] the file that they name is taken as it is stored.
    ///
    /// # Errors
    /// As [`crate::look`].
    pub fn on(&self, names: &[OsString], format: Format) -> Result<Walk, Error> {
        let level = self.last()?;
        walk(level.image.clone(), level.path.clone(), names, format)
    }

    /// The way to the image, from the file on the host on: two paths with the same steps name the same image.
    pub(crate) fn steps(&self) -> Vec<Reached> {
        let end = match self.end {
            End::Image => None,
            End::Directory(node) => Some(Reached::Directory(node)),
        };
        self.levels.iter().filter_map(|level| level.reached).chain(end).collect()
    }

    /// Whether the image is an ISO 9660 with a partition table that shows the same bytes: one of its
    /// partitions begins before the ISO's first descriptor. (The remains of an ISO on a disk that was
    /// repartitioned are none.)
    pub fn is_hybrid(&self) -> bool {
        let Ok(level) = self.last() else { return false };
        let Ok(contents) = detect(&level.image, Format::Auto) else { return false };
        let iso = contents.fs.as_ref().is_some_and(|fs| fs.about().format == "iso9660");
        let covers = |partition: &Partition| partition.start <= ISO_DESCRIPTORS;
        iso && contents.table.iter().flat_map(|table| &table.partitions).any(covers)
    }

    /// The bytes of the host's file that hold the image, as one range, if they are less than the whole file:
    /// the innermost level that lies there in one piece.
    pub(crate) fn range(&self) -> Option<Range<u64>> {
        let (host, inside) = self.levels.split_first()?;
        if host.image.stored().is_some() {
            // Its bytes come from several files, or are found by tables.
            return None;
        }
        let range = |level: &Level| level.image.map().single_range();
        let (_, offset, len) = inside.iter().rev().find_map(range)?;
        Some(offset..offset.saturating_add(len))
    }

    /// The level that the path names: before the one that it ends in, where that is packed.
    ///
    /// # Errors
    /// As [`Walk::last`].
    pub fn named(&self) -> Result<(usize, &Level), Error> {
        let packed =
            |level: &Level| level.contents.as_ref().is_some_and(|contents| contents.packed.is_some());
        let before = self.levels.iter().rev().skip(1).take_while(|level| packed(level)).count();
        let index = self.levels.len().saturating_sub(1 + before);
        match self.levels.get(index) {
            Some(level) => Ok((index, level)),
            None => self.last().map(|level| (index, level)),
        }
    }

    /// Refuses a format that was named and that the one image is not.
    fn is_really(&self, format: Format) -> Result<(), Error> {
        if matches!(format, Format::Auto | Format::Raw) {
            return Ok(());
        }
        let level = self.last()?;
        match detect(&level.image, format) {
            Err(source @ (LayerError::Corrupt(_) | LayerError::IsNot(_))) => {
                Err(Here { path: &level.path }.layer(source))
            }
            // What it is and cannot be read may still be attached.
            _ => Ok(()),
        }
    }

    /// Goes from the last image to the one that is packed in it, as often as there is one.
    fn unpack(&mut self, mut format: Format) -> Result<(), Error> {
        while self.end == End::Image {
            let count = self.levels.len();
            let Some(level) = self.levels.last_mut() else { return Ok(()) };
            let here = Here { path: &level.path };
            let Some(kind) = packed::kind_of(&level.image, format) else {
                if format == Format::Auto {
                    foreign::refuse(&level.image).map_err(|source| here.layer(source))?;
                }
                return Ok(());
            };
            if count > DEPTH_MAX {
                return Err(here.no_container(format!("more than {DEPTH_MAX} images inside each other")));
            }
            let contents = detect(&level.image, format).map_err(|source| here.layer(source))?;
            // With the magic of a packed one it can still be another.
            let Some(packed) = &contents.packed else { return Ok(()) };
            let inside = unpack_disk(&packed.image).map_err(|source| here.layer(source))?;
            let next = Level {
                path: level.path.clone(),
                image: inside.unwrap_or_else(|| packed.image.clone()),
                span: packed.span,
                contents: None,
                reached: None,
            };
            self.read_only = self.read_only.take().or_else(|| Some(compressed(kind)));
            level.contents = Some(contents);
            self.levels.push(next);
            format = Format::Auto;
        }
        Ok(())
    }

    /// Goes from the last image to the next, or to a directory in it. Returns the remaining names. With
    /// `stored` the image that the path names is taken as it is stored.
    fn descend<'a>(
        &mut self,
        names: &'a [&'a [u8]],
        format: Format,
        stored: bool,
        links: &mut u32,
    ) -> Result<&'a [&'a [u8]], Error> {
        let count = self.levels.len();
        let Some(level) = self.levels.last_mut() else { return Ok(&[]) };
        let here = Here { path: &level.path };
        if count > DEPTH_MAX {
            return Err(here.no_container(format!("more than {DEPTH_MAX} images inside each other")));
        }
        let contents = detect(&level.image, format).map_err(|source| here.layer(source))?;
        let table = contents.table.as_ref().map_or(&[][..], |table| &table.partitions);
        let found = match &contents.fs {
            Some(fs) => match reach(fs.as_ref(), names, links, &here) {
                // A bootable ISO, or the remains of an older file system: if there is no such file, the name
                // is a partition's.
                Err(_) if is_selector(names) && !table.is_empty() => None,
                other => Some(other?),
            },
            None if table.is_empty() => {
                let known = known::look(&level.image).map_err(|spent| here.layer(spent.into()))?;
                let Some(known) = known else {
                    return Err(
                        here.no_container("no partition table or file system is recognised".to_owned())
                    );
                };
                let why = format!("it is {}, which becket does not read", known.what);
                let (image, opens) = (here.path.to_owned(), Some(known.command));
                return Err(Error::NoContainer { image, why, opens });
            }
            None => None,
        };
        let failed = |source| here.layer(source);
        let mut layout = Layout::of(&level.image).map_err(failed)?;
        let (reached, used) = match found {
            Some(found) => found,
            None => {
                let (partition, used) = select(&level.image, table, names, &here)?;
                layout.role = Role::of(partition);
                (Reached::Part(partition.start, partition.len), used)
            }
        };
        match (reached, &contents.fs) {
            (Reached::Part(start, len), _) => layout.data(start, len).map_err(failed)?,
            (Reached::File(node), Some(fs)) => {
                layout = fs.lay_out(node).map_err(failed)?;
                let holes = layout.extents().iter().any(|e| !matches!(e.place, crate::Place::Data { .. }));
                let reason = match fs.writable(node) {
                    Ok(()) if holes => {
                        Err("parts of it are holes or were never written: only its file system can fill them"
                            .to_owned())
                    }
                    other => other,
                };
                self.read_only = self.read_only.take().or(reason.err());
            }
            (Reached::Directory(node), _) => {
                self.end = End::Directory(node);
                level.contents = Some(contents);
                return Ok(&[]);
            }
            (Reached::File(_), None) => return Ok(&[]),
        }
        let (taken, left) = names.split_at(used.min(names.len()));
        let path = taken.iter().fold(level.path.clone(), |path, name| format!("{path}/{}", shown(name)));
        let span = layout.span();
        let mut image = level.image.compose(layout).map_err(failed)?;
        if matches!(reached, Reached::Part(..)) {
            image = image.with_block_size(level.image.block_size());
        }
        let inside = |source| Error::Layer { image: path.clone(), source };
        if matches!(reached, Reached::File(_))
            && !(stored && left.is_empty())
            && let Some(disk) = unpack_disk(&image).map_err(inside)?
        {
            self.read_only = self.read_only.take().or_else(|| {
                let format = disk.stored().map_or("disk", |about| about.format);
                Some(format!("it is a {format} inside another image"))
            });
            image = disk;
        }
        level.contents = Some(contents);
        self.levels.push(Level { path, image, span, contents: None, reached: Some(reached) });
        Ok(left)
    }
}

/// Why nothing can be written to what is packed.
pub(crate) fn compressed(kind: Packing) -> String {
    format!("it is compressed by {}", kind.name())
}

/// What names lead to inside one image, whatever the names were.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reached {
    /// A regular file, by the file system's number of it.
    File(u64),
    /// A directory, likewise.
    Directory(u64),
    /// A partition: its first byte and its length.
    Part(u64, u64),
}

/// The image that is being searched, for errors.
struct Here<'a> {
    path: &'a str,
}

impl Here<'_> {
    fn layer(&self, source: LayerError) -> Error {
        Error::Layer { image: self.path.to_owned(), source }
    }

    fn no_container(&self, why: String) -> Error {
        Error::NoContainer { image: self.path.to_owned(), why, opens: None }
    }

    fn missing(&self, format: &'static str, missing: String, entries: Vec<String>) -> Error {
        Error::Missing { image: self.path.to_owned(), format, missing, entries }
    }
}

/// Follows `names` in a file system up to a regular file or to their end; how many of them that took.
fn reach(
    fs: &dyn FileSystem,
    names: &[&[u8]],
    links: &mut u32,
    here: &Here<'_>,
) -> Result<(Reached, usize), Error> {
    let mut inside = Inside { fs, stack: vec![fs.root()], links, here };
    let mut walked: Vec<u8> = Vec::new();
    for (index, name) in names.iter().enumerate() {
        if !walked.is_empty() {
            walked.push(b'/');
        }
        walked.extend_from_slice(name);
        if let Some(file) = inside.step(name, &walked)? {
            return Ok((Reached::File(file), index + 1));
        }
    }
    Ok((Reached::Directory(inside.dir()), names.len()))
}

/// A place in the directories of one file system.
struct Inside<'a> {
    fs: &'a dyn FileSystem,
    /// The directories from the root to here.
    stack: Vec<u64>,
    /// Symbolic links that may still be followed.
    links: &'a mut u32,
    here: &'a Here<'a>,
}

impl Inside<'_> {
    fn dir(&self) -> u64 {
        self.stack.last().copied().unwrap_or_else(|| self.fs.root())
    }

    /// Goes on by one name, which is part of `walked`: to a directory, or to the regular file that is
    /// returned.
    fn step(&mut self, name: &[u8], walked: &[u8]) -> Result<Option<u64>, Error> {
        let failed = |source| self.here.layer(source);
        match name {
            b"" | b"." => return Ok(None),
            b".." => {
                // The root is its own parent.
                if self.stack.len() > 1 {
                    self.stack.pop();
                }
                return Ok(None);
            }
            _ => {}
        }
        let dir = self.dir();
        let Some(node) = find(self.fs, dir, name).map_err(failed)? else {
            return Err(self.here.missing(self.fs.about().format, shown(walked), self.neighbours(dir)));
        };
        let no_way = |what: &str| {
            Err(self.here.no_container(format!("{} in its {} {what}", shown(walked), self.fs.about().format)))
        };
        match self.fs.stat(node).map_err(failed)?.kind {
            NodeKind::File => Ok(Some(node)),
            NodeKind::Directory => {
                self.stack.push(node);
                Ok(None)
            }
            NodeKind::Other => no_way("is a device, FIFO or socket"),
            NodeKind::Symlink => {
                if *self.links == 0 {
                    return no_way("leads through too many symbolic links");
                }
                *self.links -= 1;
                let target = self.fs.read_link(node).map_err(failed)?;
                if target.starts_with(b"/") {
                    self.stack.truncate(1);
                }
                let mut file = None;
                for name in target.split(|byte| *byte == b'/') {
                    if file.is_some() && !name.is_empty() {
                        return Err(self.here.no_container(format!(
                            "the symbolic link {} leads through a file, and links are followed inside one image only",
                            shown(walked)
                        )));
                    }
                    if file.is_none() {
                        file = self.step(name, walked).map_err(|error| match error {
                            Error::Missing { image, format, .. } => Error::DanglingInside {
                                image,
                                format,
                                link: shown(walked),
                                target: shown(&target),
                            },
                            other => other,
                        })?;
                    }
                }
                Ok(file)
            }
        }
    }

    /// Some of the names in a directory.
    fn neighbours(&self, dir: u64) -> Vec<String> {
        let mut names = Vec::new();
        // An unreadable directory is not reported here; the error at hand is another.
        let _ = self.fs.list(dir, &mut |name, _| {
            if names.len() == TOLD_MAX {
                names.push("...".to_owned());
                return ControlFlow::Break(());
            }
            names.push(shown(name));
            ControlFlow::Continue(())
        });
        names
    }
}

/// Whether names can be those of a partition.
fn is_selector(names: &[&[u8]]) -> bool {
    names.first().is_some_and(|name| number(name).is_some() || *name == b"by-label" || *name == b"by-uuid")
}

/// The number in `p2`.
fn number(name: &[u8]) -> Option<u32> {
    let digits = name.strip_prefix(b"p").filter(|digits| digits.iter().all(u8::is_ascii_digit))?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// The partition that the first names stand for; how many of them that took.
fn select<'a>(
    image: &Image,
    table: &'a [Partition],
    names: &[&[u8]],
    here: &Here<'_>,
) -> Result<(&'a Partition, usize), Error> {
    let first = names.first().copied().unwrap_or_default();
    let none = |missing: &[u8], entries| here.missing(PARTITIONS, shown(missing), entries);
    let by = match first {
        b"by-label" => Tag::Label,
        b"by-uuid" => Tag::Uuid,
        name => {
            let wanted = number(name);
            let found = table.iter().find(|partition| Some(partition.number) == wanted);
            let all = || table.iter().map(|partition| format!("p{}", partition.number)).collect();
            return found.map(|partition| (partition, 1)).ok_or_else(|| none(name, all()));
        }
    };
    let wanted = names.get(1).copied().unwrap_or_default();
    let mut matches = table.iter().filter(|partition| {
        tags(image, partition, by).iter().any(|tag| match by {
            Tag::Label => tag.as_bytes() == wanted,
            Tag::Uuid => tag.as_bytes().eq_ignore_ascii_case(wanted),
        })
    });
    let all =
        || table.iter().flat_map(|partition| tags(image, partition, by)).map(|tag| shown(tag.as_bytes()));
    match (matches.next(), matches.next()) {
        (Some(one), None) => Ok((one, 2)),
        (Some(one), Some(other)) => Err(Error::Ambiguous {
            image: here.path.to_owned(),
            name: shown(&[first, wanted].join(&b'/')),
            partitions: [one.number, other.number],
        }),
        (None, _) => Err(none(&[first, wanted].join(&b'/'), all().collect())),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tag {
    Label,
    Uuid,
}

/// The labels or UUIDs that a partition is known by: that of what is in it, and its own.
fn tags(image: &Image, partition: &Partition, by: Tag) -> Vec<String> {
    // A partition whose contents cannot be read still has its own.
    let contents = image.part(partition).ok().and_then(|image| recognise(&image, Format::Auto).ok());
    let about = contents.map(|contents| contents.about()).unwrap_or_default();
    let (inner, own) = match by {
        Tag::Label => (about.label, partition.label.clone()),
        Tag::Uuid => (about.uuid, partition.uuid.clone()),
    };
    let mut tags: Vec<String> = inner.into_iter().chain(own).collect();
    tags.dedup();
    tags
}
