//! Goes through a directory of an image and hands each entry to whatever takes it: a directory of the host or
//! an archive. Never hands over a name that could lead out of the directory that it is in.

use super::inside::Node;
use crate::failure::Failure;
use becket_image::{
    Budget, Image, LayerError, NodeKind,
    budget::Held,
    layer::{Attributes, Xattrs},
    shown,
};
use std::{
    collections::{HashMap, HashSet},
    ops::ControlFlow,
};

/// Memory for an entry, beside its names, and what takes it.
const ENTRY: u64 = 160;
const NAMES: &str = "the files to copy";
/// The most directories inside each other, so that paths are ones that the host can open.
const DEPTH_MAX: usize = 1000;

/// What a file is and has, beside its bytes.
#[derive(Debug)]
pub(super) struct Meta {
    pub(super) attributes: Attributes,
    pub(super) xattrs: Xattrs,
}

/// What is copied.
pub(super) enum Item<'a> {
    Directory,
    File(&'a Image),
    /// A symbolic link, with its target.
    Symlink(Vec<u8>),
    /// Another name of the file that has this path already.
    Hard(&'a [u8]),
    /// A device or FIFO, by the type in its mode.
    Special,
}

/// Why an entry was not copied.
#[derive(Debug)]
pub(super) enum Refusal {
    /// Only this one: the others go on.
    Entry(Failure),
    /// No other can be copied, either.
    All(Failure),
}

/// What takes the copies. Paths have no `.`, `..` or empty name, and are relative.
pub(super) trait Sink {
    /// Takes one entry; directories come before what is in them.
    fn take(&mut self, path: &[u8], meta: Meta, item: Item<'_>) -> Result<(), Refusal>;
}

/// How much was copied.
#[derive(Debug, Default, serde::Serialize)]
pub(super) struct Count {
    pub(super) files: u64,
    pub(super) directories: u64,
    pub(super) links: u64,
    pub(super) others: u64,
    /// Lengths of the files.
    pub(super) bytes: u64,
    /// Devices and sockets that were left out.
    pub(super) skipped: u64,
}

/// A copy of one file or directory with all that is in it.
pub(super) struct Tree<'a> {
    pub(super) sink: &'a mut dyn Sink,
    pub(super) count: &'a mut Count,
    /// Whether devices are copied.
    pub(super) devices: bool,
    /// Reports an entry that could not be copied.
    pub(super) report: &'a mut dyn FnMut(Failure),
    node: Node,
    held: Held,
    /// The path in the image, safe to show.
    shown: String,
    /// Where the first name of each file with several is.
    firsts: HashMap<u64, Vec<u8>>,
    directories: HashSet<u64>,
}

/// A directory that is to be gone through.
struct Pending {
    /// Where its copy is.
    path: Vec<u8>,
    shown: String,
    node: u64,
    depth: usize,
}

impl<'a> Tree<'a> {
    pub(super) fn new(
        node: Node,
        shown: String,
        sink: &'a mut dyn Sink,
        count: &'a mut Count,
        devices: bool,
        report: &'a mut dyn FnMut(Failure),
    ) -> Result<Self, LayerError> {
        let held = node.image.budget().hold(0, NAMES)?;
        let (firsts, directories) = (HashMap::new(), HashSet::new());
        Ok(Self { sink, count, devices, report, node, held, shown, firsts, directories })
    }

    /// Copies it to `path`; a directory with an empty path is there already.
    pub(super) fn copy(mut self, path: Vec<u8>) -> Result<(), Failure> {
        let (node, shown) = (self.node.node, self.shown.clone());
        let mut pending = Vec::new();
        let first = Pending { path, shown, node, depth: 0 };
        self.entry(first, &mut pending)?;
        while let Some(dir) = pending.pop() {
            let from = pending.len();
            if let Err(error) = self.directory(&dir, &mut pending) {
                self.refused(&dir.shown, error)?;
            }
            // The first one comes first.
            pending.get_mut(from..).unwrap_or_default().reverse();
        }
        Ok(())
    }

    /// Copies what is in a directory; those in it become pending.
    fn directory(&mut self, dir: &Pending, pending: &mut Vec<Pending>) -> Result<(), Wrong> {
        let mut entries = Vec::new();
        let mut spent = Ok(());
        let held = &mut self.held;
        self.node.fs.list(dir.node, &mut |name, node| {
            spent = held.grow(ENTRY + name.len() as u64, NAMES);
            if spent.is_err() {
                return ControlFlow::Break(());
            }
            entries.push((name.to_vec(), node));
            ControlFlow::Continue(())
        })?;
        spent.map_err(LayerError::from)?;
        for (name, node) in entries {
            let shown = format!("{}/{}", dir.shown, shown(&name));
            if !is_name(&name) {
                let why = "its name is none that a file can have; it is left out";
                (self.report)(Failure::new("bad_name", format!("cannot copy {shown}: {why}")));
                continue;
            }
            let path = if dir.path.is_empty() { name } else { [&dir.path[..], b"/", &name].concat() };
            self.held.grow(path.len() as u64, NAMES).map_err(LayerError::from)?;
            self.entry(Pending { path, shown, node, depth: dir.depth + 1 }, pending)?;
        }
        Ok(())
    }

    /// Copies one entry, and reports if that fails.
    fn entry(&mut self, entry: Pending, pending: &mut Vec<Pending>) -> Result<(), Failure> {
        match self.try_entry(&entry) {
            Ok(true) => pending.push(entry),
            Ok(false) => {}
            Err(wrong) => self.refused(&entry.shown, wrong)?,
        }
        Ok(())
    }

    /// The same; whether it is a directory that is to be gone through.
    fn try_entry(&mut self, entry: &Pending) -> Result<bool, Wrong> {
        let Node { fs, image, .. } = &self.node;
        let attributes = fs.attributes(entry.node)?;
        let budget = image.budget().clone();
        let first = attributes.identity.and_then(|identity| self.firsts.get(&identity));
        if let Some(first) = first {
            let meta = Meta { attributes, xattrs: Xattrs::new() };
            budget.outside(|| self.sink.take(&entry.path, meta, Item::Hard(first)))?;
            self.count.links += 1;
            return Ok(false);
        }
        let meta = Meta { attributes, xattrs: fs.xattrs(entry.node)? };
        match attributes.kind {
            NodeKind::Directory => {
                if entry.depth > DEPTH_MAX {
                    return Err(LayerError::Limit(format!("more than {DEPTH_MAX} directories")).into());
                }
                self.held.grow(ENTRY, NAMES).map_err(LayerError::from)?;
                if !self.directories.insert(entry.node) {
                    return Err(LayerError::Corrupt("the directory has two places".to_owned()).into());
                }
                if !entry.path.is_empty() {
                    budget.outside(|| self.sink.take(&entry.path, meta, Item::Directory))?;
                    self.count.directories += 1;
                }
                return Ok(true);
            }
            NodeKind::File => {
                // Its bytes are no parsing: they are not counted.
                let contents = image.compose(fs.lay_out(entry.node)?)?.within(&Budget::unlimited());
                budget.outside(|| self.sink.take(&entry.path, meta, Item::File(&contents)))?;
                self.count.files += 1;
                self.count.bytes += contents.len();
            }
            NodeKind::Symlink => {
                let target = fs.read_link(entry.node)?;
                if target.is_empty() || target.contains(&0) {
                    return Err(LayerError::Corrupt("an impossible target of a symbolic link".to_owned()).into());
                }
                budget.outside(|| self.sink.take(&entry.path, meta, Item::Symlink(target)))?;
                self.count.links += 1;
            }
            NodeKind::Other => {
                let device = match attributes.mode.map_or(0, |mode| mode & 0xf000) {
                    0x1000 => false,
                    0x2000 | 0x6000 => true,
                    _ => {
                        self.count.skipped += 1;
                        return Ok(false);
                    }
                };
                if device && !self.devices {
                    self.count.skipped += 1;
                    return Ok(false);
                }
                budget.outside(|| self.sink.take(&entry.path, meta, Item::Special))?;
                self.count.others += 1;
            }
        }
        if let Some(identity) = attributes.identity {
            self.held.grow(ENTRY + entry.path.len() as u64, NAMES).map_err(LayerError::from)?;
            self.firsts.insert(identity, entry.path.clone());
        }
        Ok(false)
    }

    /// Reports what is wrong with one entry; fails if no other can be copied.
    fn refused(&mut self, shown: &str, wrong: Wrong) -> Result<(), Failure> {
        match wrong {
            Wrong::Sink(Refusal::Entry(failure)) => (self.report)(failure),
            Wrong::Sink(Refusal::All(failure)) | Wrong::All(failure) => return Err(failure),
            Wrong::Layer(source) => {
                let spent = matches!(source, LayerError::Spent(_));
                let error = becket_image::Error::Layer { image: shown.to_owned(), source };
                let failure = super::common::image_failure("copy", shown.as_ref(), error);
                if spent {
                    return Err(failure);
                }
                (self.report)(failure);
            }
        }
        Ok(())
    }
}

/// What can be wrong with an entry.
enum Wrong {
    Layer(LayerError),
    Sink(Refusal),
    All(Failure),
}

impl From<LayerError> for Wrong {
    fn from(error: LayerError) -> Self {
        Self::Layer(error)
    }
}

impl From<Refusal> for Wrong {
    fn from(refusal: Refusal) -> Self {
        Self::Sink(refusal)
    }
}

impl From<Failure> for Wrong {
    fn from(failure: Failure) -> Self {
        Self::All(failure)
    }
}

/// Whether a file on the host can have this name, in the directory that it is written to.
pub(super) fn is_name(name: &[u8]) -> bool {
    !name.is_empty() && name != b"." && name != b".." && !name.iter().any(|byte| matches!(byte, 0 | b'/'))
}
