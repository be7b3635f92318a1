//! What is inside an image, and inside the images in it: a tree.
//! It never looks at more than it can do in a moment, and says so where it stopped.

use std::collections::HashSet;
use std::ops::ControlFlow;

use serde::Serialize;

use crate::image::Image;
use crate::layer::packed::Kind;
use crate::layer::{About, Contents, FileSystem, Format, NodeKind, detect};
use crate::qcow2;
use crate::text::shown;
use crate::through::DEPTH_MAX;

/// Files of one file system that are looked at for images in them.
const FILES_MAX: usize = 10_000;
/// Directories inside each other that are searched.
const DIRECTORIES_MAX: usize = 24;
/// The smallest file that is looked at, in bytes: the shortest SquashFS.
const SMALLEST: u64 = 4 << 10;
/// Images that are told of altogether: a file system can hold itself many times over.
const IMAGES_MAX: usize = 1000;
/// Files that are looked at altogether, in all of them.
const FILES_ALTOGETHER: usize = 100_000;
/// Bytes that the paths of one file system's files may take.
const PATHS_MAX: usize = 16 << 20;
/// Compressed files that are looked into to see whether they hold an image: each takes a block's decoding.
const PACKED_MAX: usize = 200;

/// The name of what is packed in a compressed file: no path needs one.
const UNPACKED: &str = "(unpacked)";

/// What may still be looked at, in the whole tree.
struct Left {
    images: usize,
    files: usize,
    packed: usize,
}

impl Left {
    /// Takes one image; whether there was one left.
    fn take(&mut self) -> bool {
        self.images.checked_sub(1).map(|rest| self.images = rest).is_some()
    }
}

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
    /// What is wrong with it, and what was not looked at.
    pub problems: Vec<String>,
    /// The images in it.
    pub children: Vec<Inspected>,
}

/// What is inside `image`, which is known as `name`, and inside what is in it.
pub fn inspect(image: &Image, name: &str, format: Format) -> Inspected {
    let mut left = Left { images: IMAGES_MAX, files: FILES_ALTOGETHER, packed: PACKED_MAX };
    look_into(image, name.to_owned(), format, 0, &mut left)
}

fn look_into(image: &Image, name: String, format: Format, depth: usize, left: &mut Left) -> Inspected {
    let encoded = image.map().extents().iter().filter(|e| matches!(e.place, crate::Place::Encoded { .. }));
    let mut told = Inspected {
        name,
        size: image.len(),
        about: About { format: "raw", ..About::default() },
        stored: image.stored().cloned(),
        extents: image.map().extents().len(),
        encoded: encoded.map(|extent| extent.len).sum(),
        partition_label: None,
        partition_uuid: None,
        problems: Vec::new(),
        children: Vec::new(),
    };
    let contents = match detect(image, format) {
        Ok(contents) => contents,
        Err(error) => {
            told.problems.push(error.to_string());
            return told;
        }
    };
    told.about = contents.about();
    if depth >= DEPTH_MAX {
        if depth == DEPTH_MAX && contents.is_container() {
            told.problems.push(format!("not looked into: {DEPTH_MAX} images inside each other"));
        }
        return told;
    }
    if let Some(packed) = &contents.packed {
        told.children.push(look_into(&packed.image, UNPACKED.to_owned(), Format::Auto, depth + 1, left));
    }
    partitions(image, &contents, depth, left, &mut told);
    if let Some(fs) = &contents.fs {
        files(image, fs.as_ref(), depth, left, &mut told);
    }
    told
}

fn partitions(image: &Image, contents: &Contents, depth: usize, left: &mut Left, told: &mut Inspected) {
    let Some(table) = &contents.table else { return };
    told.problems.extend(table.warnings.iter().cloned());
    for partition in &table.partitions {
        if !left.take() {
            return;
        }
        let name = format!("p{}", partition.number);
        let Ok(part) = image.slice(partition.start, partition.len) else { continue };
        // A partition that begins where the disk does, as on bootable ISOs, holds what was told already.
        let deeper = if partition.start == 0 { DEPTH_MAX + 1 } else { depth + 1 };
        let mut child = look_into(&part, name, Format::Auto, deeper, left);
        child.partition_label = partition.label.as_deref().map(|label| shown(label.as_bytes()));
        child.partition_uuid = partition.uuid.clone();
        told.children.push(child);
    }
}

/// Looks for images among the files of a file system.
fn files(image: &Image, fs: &dyn FileSystem, depth: usize, left: &mut Left, told: &mut Inspected) {
    let mut found = Vec::new();
    let mut search = Search {
        fs,
        room: FILES_MAX.min(left.files),
        seen: 0,
        nodes: HashSet::from([fs.root()]),
        paths: 0,
        found: &mut found,
        problem: None,
    };
    search.directory(fs.root(), &mut Vec::new(), 0);
    left.files = left.files.saturating_sub(search.seen);
    told.problems.extend(search.problem);
    found.sort();
    let mut skipped = 0;
    for (path, node) in found {
        let inner = fs.lay_out(node).and_then(|layout| image.compose(layout));
        // What cannot be opened, or holds nothing, is a file like others.
        let Ok(inner) = inner else { continue };
        let (inner, holds) = match (Kind::of(&inner, Format::Auto), qcow2::unpack_alone(&inner)) {
            (Some(_), _) if left.packed == 0 => {
                skipped += 1;
                continue;
            }
            (Some(_), _) => {
                left.packed -= 1;
                let holds = packs_an_image(&inner);
                (inner, holds)
            }
            (None, Ok(Some(disk))) => (disk, true),
            (None, Ok(None)) => {
                let holds = detect(&inner, Format::Auto).map_or(true, |contents| contents.is_container());
                (inner, holds)
            }
            (None, Err(_)) => (inner, true),
        };
        if !holds {
            continue;
        }
        if !left.take() {
            told.problems.push(format!("not looked further: more than {IMAGES_MAX} images"));
            return;
        }
        told.children.push(look_into(&inner, shown(&path), Format::Auto, depth + 1, left));
    }
    if skipped > 0 {
        told.problems.push(format!("{skipped} compressed files were not looked into"));
    }
}

/// Whether a compressed file holds an image that can be looked into. Most hold something else.
fn packs_an_image(file: &Image) -> bool {
    let contents = detect(file, Format::Auto).ok();
    let packed = contents.and_then(|contents| contents.packed);
    let inner = packed.and_then(|packed| detect(&packed.image, Format::Auto).ok());
    inner.is_some_and(|contents| contents.is_container())
}

struct Search<'a> {
    fs: &'a dyn FileSystem,
    /// Entries that are looked at.
    room: usize,
    seen: usize,
    /// What was looked at: no file is looked at by each of its names, and no directory in itself.
    nodes: HashSet<u64>,
    /// Bytes of the paths in `found`.
    paths: usize,
    /// Path and number of each file that may be an image.
    found: &'a mut Vec<(Vec<u8>, u64)>,
    problem: Option<String>,
}

impl Search<'_> {
    fn directory(&mut self, dir: u64, path: &mut Vec<u8>, depth: usize) {
        let mut entries = Vec::new();
        let room = self.room.saturating_sub(self.seen);
        let listed = self.fs.list(dir, &mut |name, node| {
            if entries.len() >= room {
                return ControlFlow::Break(());
            }
            entries.push((name.to_vec(), node));
            ControlFlow::Continue(())
        });
        if let Err(error) = listed {
            self.problem = Some(format!("/{}: {error}", shown(path)));
        }
        self.seen += entries.len();
        if entries.len() >= room || depth >= DIRECTORIES_MAX {
            self.problem = Some(format!("only the first {} files were looked at", self.seen));
        }
        for (name, node) in entries {
            if !self.nodes.insert(node) {
                continue;
            }
            let before = path.len();
            if before > 0 {
                path.push(b'/');
            }
            path.extend_from_slice(&name);
            match self.fs.stat(node) {
                Ok(stat) if stat.kind == NodeKind::File && stat.size >= SMALLEST => {
                    self.paths += path.len();
                    if self.paths > PATHS_MAX {
                        self.problem = Some("not looked further: its paths are too long".to_owned());
                        return;
                    }
                    self.found.push((path.clone(), node));
                }
                Ok(stat) if stat.kind == NodeKind::Directory && depth < DIRECTORIES_MAX => {
                    self.directory(node, path, depth + 1);
                }
                Ok(_) => {}
                Err(error) => self.problem = Some(format!("/{}: {error}", shown(path))),
            }
            path.truncate(before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::{Entry, LayerError, Stat};

    /// A directory that holds itself and one file, each under a hundred names.
    #[derive(Debug)]
    struct Knot;

    impl FileSystem for Knot {
        fn about(&self) -> &About {
            unreachable!()
        }
        fn root(&self) -> u64 {
            0
        }
        fn stat(&self, node: u64) -> Result<Stat, LayerError> {
            let kind = if node == 0 { NodeKind::Directory } else { NodeKind::File };
            Ok(Stat { kind, size: SMALLEST })
        }
        fn list(&self, _: u64, entry: &mut Entry<'_>) -> Result<(), LayerError> {
            let _ = (0..200).try_for_each(|name: u64| entry(name.to_string().as_bytes(), name % 2));
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

    #[test]
    fn nothing_is_looked_at_twice() {
        let mut found = Vec::new();
        let nodes = HashSet::from([0]);
        let mut search =
            Search { fs: &Knot, room: FILES_MAX, seen: 0, nodes, paths: 0, found: &mut found, problem: None };
        search.directory(0, &mut Vec::new(), 0);
        assert_eq!((search.seen, search.problem.take()), (200, None));
        assert_eq!(found, [(b"1".to_vec(), 1)]);
    }
}
