//! What is inside an image, and inside the images in it: a tree.
//! It never looks at more than the image's budget allows, and says so where it stopped.
//!
//! Partition tables are read before any file system is searched, so that a large one hides no other
//! partition.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use serde::Serialize;

use crate::Error;
use crate::budget::{Budget, Held};
use crate::disk::{self, unpack_disk};
use crate::image::{Image, Role};
use crate::layer::packed;
use crate::layer::{About, Contents, FileSystem, Format, LayerError, NodeKind, detect, foreign, recognise};
use crate::text::shown;
use crate::through::DEPTH_MAX;

/// Files of one file system that are looked at for images in them, unless there are no limits: what a person
/// waits for.
const FILES_MAX: usize = 10_000;
/// Compressed files that are looked into to see whether they hold an image, likewise: each takes a block's
/// decoding.
const PACKED_MAX: usize = 200;
/// The smallest file that is looked at, in bytes: the shortest SquashFS.
const SMALLEST: u64 = 4 << 10;
/// Memory for an entry of the lists that are made of a file system, and for an image of the tree, beside
/// their names.
const ENTRY: u64 = 128;
const IMAGE: u64 = 2048;

/// The name of what is packed in a compressed file: no path needs one.
const UNPACKED: &str = "(unpacked)";
/// What takes the memory, for people.
const NAMES: &str = "names of files";
const IMAGES: &str = "images inside images";

/// An image and the images in it.
#[derive(Debug, Clone, Serialize)]
pub struct Inspected {
    /// Its name below the image that holds it: a path, or `p2`; the whole path of the first.
    pub name: String,
    /// Length in bytes.
    pub size: u64,
    /// What it says of itself.
    #[serde(flatten)]
    pub about: About,
    /// What it is stored as, where it is not stored as it is.
    pub stored: Option<About>,
    /// The number of pieces that it lies in, in the host's file.
    pub extents: usize,
    /// How many of its bytes are stored compressed.
    pub encoded: u64,
    /// The partition's own name, where it has one.
    pub partition_label: Option<String>,
    /// The partition's own UUID, where it has one.
    pub partition_uuid: Option<String>,
    /// The partition's type: a UUID, or a byte as `0x83`.
    pub partition_type: Option<String>,
    /// What that type is called, where it is known.
    pub partition_type_name: Option<&'static str>,
    /// What is wrong with it, and what was not looked at.
    pub problems: Vec<String>,
    /// The images in it.
    pub children: Vec<Inspected>,
}

/// What is inside `image`, which is known as `name`, and inside what is in it.
pub fn inspect(image: &Image, name: &str, format: Format) -> Inspected {
    let budget = image.budget().clone();
    let unlimited = budget.used().is_none();
    let mut look = Look {
        held: budget.held(),
        files: if unlimited { usize::MAX } else { FILES_MAX },
        packed: if unlimited { usize::MAX } else { PACKED_MAX },
    };
    let mut node = look.describe(image, name.to_owned(), format, 0);
    look.search(&mut node);
    let mut report = node.report;
    if let Err(spent) = budget.check() {
        report.problems.push(format!("not searched further: {spent}; --no-limits searches all of it"));
    }
    report
}

/// An image that was recognised, and what is still to be searched of it.
struct Node {
    report: Inspected,
    fs: Option<(Image, Arc<dyn FileSystem>)>,
    /// What is in it by a table: partitions, or what is packed.
    parts: Vec<Node>,
    depth: usize,
}

/// What may still be looked at.
struct Look {
    held: Held,
    /// Files of each file system, and compressed files altogether.
    files: usize,
    packed: usize,
}

impl Look {
    /// What an image is, and the images that it holds without a file system.
    fn describe(&mut self, image: &Image, name: String, format: Format, depth: usize) -> Node {
        let found = format == Format::Auto;
        let taken = self.held.grow(IMAGE + name.len() as u64, IMAGES).map_err(LayerError::from);
        let is_file = found && image.role() == Role::File;
        let disk = taken.and_then(|()| if is_file { unpack_disk(image) } else { Ok(None) });
        let (container, unpacked) = (image, disk.as_ref().ok().cloned().flatten());
        let image = unpacked.as_ref().unwrap_or(image);
        let encoded =
            image.map().extents().iter().filter(|e| matches!(e.place, crate::Place::Encoded { .. }));
        let report = Inspected {
            name,
            size: image.len(),
            about: About { format: "raw", ..About::default() },
            stored: image.stored().cloned(),
            extents: image.map().extents().len(),
            encoded: encoded.map(|extent| extent.len).sum(),
            partition_label: None,
            partition_uuid: None,
            partition_type: None,
            partition_type_name: None,
            problems: Vec::new(),
            children: Vec::new(),
        };
        let mut node = Node { report, fs: None, parts: Vec::new(), depth };
        if disk.is_err() {
            node.report.about.format = disk::name_of(container).unwrap_or("raw");
        }
        let foreign = disk.and_then(|_| if found { foreign::refuse(image) } else { Ok(()) });
        let contents = match foreign.and_then(|()| recognise(image, format)) {
            Ok(contents) => contents,
            Err(error) => {
                node.report.problem(error);
                return node;
            }
        };
        node.report.about = contents.about();
        if depth >= DEPTH_MAX {
            if depth == DEPTH_MAX && contents.is_container() {
                node.report.problems.push(format!("not looked into: {DEPTH_MAX} images inside each other"));
            }
            return node;
        }
        node.report.problems.extend(contents.warnings.iter().cloned());
        if let Some(packed) = &contents.packed {
            node.parts.push(self.describe(&packed.image, UNPACKED.to_owned(), Format::Auto, depth + 1));
        }
        self.partitions(image, &contents, &mut node);
        node.fs = contents.fs.map(|fs| (image.clone(), fs));
        node
    }

    fn partitions(&mut self, image: &Image, contents: &Contents, node: &mut Node) {
        let Some(table) = &contents.table else { return };
        node.report.problems.extend(table.warnings.iter().cloned());
        for partition in &table.partitions {
            if image.budget().check().is_err() {
                return;
            }
            let name = format!("p{}", partition.number);
            let Ok(part) = image.part(partition) else { continue };
            // A partition that begins where the disk does, as on bootable ISOs, was reported already.
            let deeper = if partition.start == 0 { DEPTH_MAX + 1 } else { node.depth + 1 };
            let mut child = self.describe(&part, name, Format::Auto, deeper);
            child.report.partition_label = partition.label.as_deref().map(|label| shown(label.as_bytes()));
            child.report.partition_uuid = partition.uuid.clone();
            child.report.partition_type = Some(partition.type_.clone());
            child.report.partition_type_name = partition.type_name();
            node.parts.push(child);
        }
    }

    /// Searches an image's files for images, and those of the images in it.
    fn search(&mut self, node: &mut Node) {
        for mut part in std::mem::take(&mut node.parts) {
            self.search(&mut part);
            node.report.children.push(part.report);
        }
        if let Some((image, fs)) = node.fs.take().filter(|_| node.depth < DEPTH_MAX) {
            self.files(&image, fs.as_ref(), node);
        }
    }

    /// Looks for images among the files of a file system.
    fn files(&mut self, image: &Image, fs: &dyn FileSystem, node: &mut Node) {
        let budget = image.budget();
        let mut found = Candidates::new(budget);
        found.search(fs, self.files, &mut node.report);
        found.files.sort();
        let mut skipped = 0;
        for (path, file) in found.files {
            if budget.check().is_err() {
                break;
            }
            let inner = fs.lay_out(file).and_then(|layout| image.compose(layout));
            // What cannot be opened, or holds nothing, is a file like others.
            let Ok(inner) = inner else { continue };
            let Some(inner) = self.holds(inner, &mut skipped) else { continue };
            let mut child = self.describe(&inner, shown(&path), Format::Auto, node.depth + 1);
            self.search(&mut child);
            node.report.children.push(child.report);
        }
        if skipped > 0 {
            node.report
                .problems
                .push(format!("{skipped} compressed files were not looked into (--no-limits does)"));
        }
    }

    /// The image that a file is, when it is one.
    fn holds(&mut self, file: Image, skipped: &mut usize) -> Option<Image> {
        if packed::kind_of(&file, Format::Auto).is_some() {
            let Some(left) = self.packed.checked_sub(1) else {
                *skipped += 1;
                return None;
            };
            self.packed = left;
            return packs_an_image(&file).then_some(file);
        }
        disk_in(file)
    }
}

impl Inspected {
    /// Records a problem, with what to do if another program reads the image. A spent budget is reported
    /// once, for the whole tree.
    fn problem(&mut self, source: LayerError) {
        let hint = match &source {
            LayerError::Spent(_) => return,
            LayerError::Foreign { format, .. } => {
                self.about.format = format.name;
                true
            }
            LayerError::Sequential { packer, .. } => {
                self.about.format = packer;
                true
            }
            _ => false,
        };
        let text = source.to_string();
        let hint = hint.then(|| Error::Layer { image: self.name.clone(), source }.hint()).flatten();
        self.problems.push(hint.map_or(text.clone(), |hint| format!("{text}; {hint}")));
    }
}

/// The disk or file system that a file is or contains; the file itself where that cannot be read.
fn disk_in(file: Image) -> Option<Image> {
    let found = unpack_disk(&file).and_then(|disk| match disk {
        Some(disk) => Ok(Some(disk)),
        None => match foreign::find(&file)? {
            Some(format) => Ok(format.disk.then(|| file.clone())),
            None => Ok(holds_a_layer(&file)?.then(|| file.clone())),
        },
    });
    match found {
        Ok(found) => found,
        Err(LayerError::Spent(_)) => None,
        // What is damaged is an image, too.
        Err(_) => Some(file),
    }
}

/// Whether a file is a disk or file system that is read, or recognised for another program. What is only
/// recognised takes long to be looked for, so only in files of whole sectors, which disks are.
fn holds_a_layer(file: &Image) -> Result<bool, LayerError> {
    let contents = if file.len().is_multiple_of(512) { recognise } else { detect };
    let contents = contents(file, Format::Auto)?;
    Ok(contents.is_container() || contents.known.is_some())
}

/// Whether a compressed file holds an image that can be looked into. Most hold something else.
fn packs_an_image(file: &Image) -> bool {
    let packed = detect(file, Format::Auto).ok().and_then(|contents| contents.packed);
    packed.is_some_and(|packed| disk_in(packed.image).is_some())
}

/// The files of a file system that may be images.
struct Candidates {
    /// Path and number of each.
    files: Vec<(Vec<u8>, u64)>,
    held: Held,
}

impl Candidates {
    fn new(budget: &Budget) -> Candidates {
        Candidates { files: Vec::new(), held: budget.held() }
    }

    /// Goes through all directories, as long as there are no more than so many files in them.
    fn search(&mut self, fs: &dyn FileSystem, room: usize, report: &mut Inspected) {
        // No file is looked at by each of its names, and no directory in itself.
        let mut nodes = HashSet::from([fs.root()]);
        let mut pending = vec![(Vec::new(), fs.root())];
        let (mut seen, mut full) = (0_usize, false);
        while let Some((path, dir)) = pending.pop() {
            let mut entries = Vec::new();
            let listed = fs.list(dir, &mut |name, node| {
                full = seen >= room;
                let cost = ENTRY + name.len() as u64;
                if full || self.held.grow(cost, NAMES).is_err() {
                    return ControlFlow::Break(());
                }
                seen += 1;
                entries.push((name.to_vec(), node));
                ControlFlow::Continue(())
            });
            let mut problem = |error| match error {
                LayerError::Spent(_) => {}
                error => report.problems.push(format!("/{}: {error}", shown(&path))),
            };
            let _ = listed.map_err(&mut problem);
            // The first one is searched first.
            for (name, node) in entries.into_iter().rev() {
                if !nodes.insert(node) {
                    continue;
                }
                let whole = if path.is_empty() { name } else { [&path[..], b"/", &name].concat() };
                let stat = self.held.grow(ENTRY + whole.len() as u64, NAMES).map_err(LayerError::from);
                match stat.and_then(|()| fs.stat(node)) {
                    Ok(stat) if stat.kind == NodeKind::File && stat.size >= SMALLEST => {
                        self.files.push((whole, node));
                    }
                    Ok(stat) if stat.kind == NodeKind::Directory => pending.push((whole, node)),
                    Ok(_) => {}
                    Err(LayerError::Spent(_)) => return,
                    Err(error) => problem(error),
                }
            }
            if full {
                report
                    .problems
                    .push(format!("only the first {seen} files were looked at (--no-limits looks at all)"));
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::{Entry, Stat};

    /// Directories, each of which holds itself and the next one under a hundred names, down to the last.
    #[derive(Debug)]
    struct Knot(u64);

    impl FileSystem for Knot {
        fn about(&self) -> &About {
            unreachable!()
        }
        fn root(&self) -> u64 {
            0
        }
        fn stat(&self, node: u64) -> Result<Stat, LayerError> {
            let kind = if node < self.0 { NodeKind::Directory } else { NodeKind::File };
            Ok(Stat { kind, size: SMALLEST })
        }
        fn list(&self, dir: u64, entry: &mut Entry<'_>) -> Result<(), LayerError> {
            let _ = (0..200).try_for_each(|name: u64| entry(name.to_string().as_bytes(), dir + name % 2));
            Ok(())
        }
        fn read_link(&self, _: u64) -> Result<Vec<u8>, LayerError> {
            unreachable!()
        }
        fn lay_out(&self, _: u64) -> Result<crate::Layout, LayerError> {
            unreachable!()
        }
        fn writable(&self, _: u64) -> Result<(), String> {
            unreachable!()
        }
    }

    fn search(fs: &Knot, room: usize) -> (Vec<(Vec<u8>, u64)>, Vec<String>) {
        let image = Image::raw(Arc::new(vec![0; 512]), 512, 512);
        let mut report = inspect(&image, "", Format::Raw);
        let mut found = Candidates::new(&Budget::default());
        found.search(fs, room, &mut report);
        (found.files, report.problems)
    }

    #[test]
    fn nothing_is_looked_at_twice() {
        assert_eq!(search(&Knot(1), FILES_MAX), (vec![(b"199".to_vec(), 1)], Vec::new()));
    }

    #[test]
    fn directories_lie_as_deep_as_they_like_and_what_is_left_out_is_said_with_its_reason() {
        let (files, problems) = search(&Knot(40), FILES_MAX);
        assert_eq!((files.len(), problems), (1, Vec::new()));
        assert_eq!(files[0].0.split(|byte| *byte == b'/').count(), 40);
        let (_, problems) = search(&Knot(40), 1000);
        assert_eq!(problems, ["only the first 1000 files were looked at (--no-limits looks at all)"]);
    }
}
