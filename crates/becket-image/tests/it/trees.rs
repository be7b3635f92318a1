//! Random trees: made through the kernel, and what the kernel and becket show of them.
//! It never takes becket's own word for what a file system holds.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use becket_image::Image;
use becket_image::layer::{FileSystem, LayerError, NodeKind};
use becket_testkit::image::random_bytes;
use becket_testkit::tool;
use rustix::fs::{FallocateFlags, XattrFlags};

/// Changes that are made to a tree.
const STEPS: usize = 400;

/// What is known of a file, as text, so that a difference can be read.
pub(crate) type Tree = BTreeMap<Vec<u8>, (String, Vec<u8>)>;

/// Numbers by chance, the same for the same seed.
struct Dice(std::vec::IntoIter<u8>);

impl Dice {
    fn new(seed: u64) -> Dice {
        Dice(random_bytes(8 * 32 * STEPS, seed).into_iter())
    }

    fn pick(&mut self, below: usize) -> usize {
        let eight = std::array::from_fn(|_| self.0.next().unwrap());
        (u64::from_le_bytes(eight) >> 16) as usize % below
    }
}

/// Fills a mounted file system: directories of every form, files in few and in many pieces, links,
/// attributes of at most `most` bytes.
pub(crate) fn grow(root: &Path, seed: u64, most: usize) {
    let mut dice = Dice::new(seed);
    let mut dirs = vec![root.to_owned()];
    let mut files: Vec<PathBuf> = Vec::new();
    for step in 0..STEPS {
        let dir = dirs[dice.pick(dirs.len())].clone();
        let name = match dice.pick(4) {
            0 => format!("{step}"),
            1 => format!("wörk 文\n{step}"),
            _ => format!("{step} {}", "long".repeat(dice.pick(50))),
        };
        let path = dir.join(name);
        match dice.pick(20) {
            0..=1 => {
                fs::create_dir(&path).unwrap();
                dirs.push(path);
            }
            2..=3 => {
                let target = "t/".repeat(1 + dice.pick(if step % 2 == 0 { 500 } else { 60 }));
                symlink(target, &path).unwrap();
            }
            4 if !files.is_empty() => fs::hard_link(&files[dice.pick(files.len())], &path).unwrap(),
            5 if !files.is_empty() => {
                let from = &files[dice.pick(files.len())];
                // Not all kinds share blocks; then it is a copy.
                tool(Command::new("cp").arg("--reflink=auto").arg("--").arg(from).arg(&path));
                files.push(path);
            }
            6 => {
                tool(Command::new("mknod").arg(&path).args(["b", "259", "70000"]));
            }
            7 if !files.is_empty() => fs::remove_file(files.swap_remove(dice.pick(files.len()))).unwrap(),
            _ => {
                write(&path, &mut dice, seed + step as u64);
                files.push(path);
            }
        }
        let marked: &Path = match files.last() {
            Some(last) if step % 3 == 0 => last,
            _ => &dirs[dice.pick(dirs.len())],
        };
        for prefix in ["user", "trusted", "security"].iter().take(dice.pick(6)) {
            let value = random_bytes([3, 40, 300, 3000, most][dice.pick(5)], seed ^ step as u64);
            let name = format!("{prefix}.name-{step}-{}", "x".repeat(dice.pick(60)));
            rustix::fs::setxattr(marked, name, &value, XattrFlags::empty()).unwrap();
        }
        rustix::fs::chownat(
            rustix::fs::CWD,
            marked,
            Some(rustix::fs::Uid::from_raw(70_000 + step as u32)),
            Some(rustix::fs::Gid::from_raw(step as u32)),
            rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
        )
        .unwrap();
    }
    // Directories of many blocks, of which some are given back.
    for (name, count, removed) in [("few", 12, 0), ("some", 90, 10), ("many", 4000, 1000)] {
        let dir = root.join(format!("dir {name}"));
        fs::create_dir(&dir).unwrap();
        let name = |number| dir.join(format!("an entry with a long name, number {number:06}"));
        (0..count).for_each(|number| fs::write(name(number), format!("{number}")).unwrap());
        (count / 3..count / 3 + removed).for_each(|number| fs::remove_file(name(number)).unwrap());
    }
    // A file in so many pieces that its tree has two levels, and attributes in so many leaves that they have
    // a node above them.
    let file = File::create(root.join("pieces")).unwrap();
    (0..3000_u64).for_each(|piece| file.write_all_at(&piece.to_le_bytes(), piece * 16384).unwrap());
    for number in 0..300 {
        let name = format!("user.{number}-{}", "y".repeat(number % 90));
        rustix::fs::setxattr(root.join("pieces"), name, &random_bytes(number, 1), XattrFlags::empty())
            .unwrap();
    }
}

/// A file with holes, and with blocks that were reserved only.
fn write(path: &Path, dice: &mut Dice, seed: u64) {
    let file = File::create(path).unwrap();
    let size = [0, 1, 100, 511, 4096, 5000, 70_000, 400_001][dice.pick(8)];
    for piece in 0..1 + dice.pick(4) as u64 {
        let bytes = random_bytes(size, seed + piece);
        match dice.pick(4) {
            0 => file.set_len(file.metadata().unwrap().len() + size as u64).unwrap(),
            1 if size > 0 => {
                let flags = if piece % 2 == 0 { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() };
                rustix::fs::fallocate(&file, flags, piece * 65536, size as u64).unwrap();
            }
            _ => file.write_all_at(&bytes, piece * 50_000).unwrap(),
        }
    }
    let time = rustix::fs::Timespec { tv_sec: 1_000_000_000 + seed as i64, tv_nsec: seed as i64 % 999 };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    rustix::fs::futimens(&file, &times).unwrap();
}

/// What the kernel shows.
pub(crate) fn seen(dir: &Path, path: &mut Vec<u8>, tree: &mut Tree) {
    for entry in fs::read_dir(dir).unwrap() {
        let (entry, before) = (entry.unwrap(), path.len());
        path.push(b'/');
        path.extend_from_slice(entry.file_name().as_bytes());
        let at = entry.path();
        let meta = fs::symlink_metadata(&at).unwrap();
        let kind = meta.file_type();
        let bytes = if kind.is_symlink() {
            fs::read_link(&at).unwrap().as_os_str().as_bytes().to_vec()
        } else if kind.is_file() {
            fs::read(&at).unwrap()
        } else {
            Vec::new()
        };
        let rdev = matches!(meta.mode() & 0xf000, 0x6000 | 0x2000)
            .then(|| (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev())));
        let size = if kind.is_dir() { 0 } else { meta.size() };
        let said = describe(
            meta.mode() as u16,
            (meta.uid(), meta.gid()),
            meta.nlink() as u32,
            (meta.mtime(), meta.mtime_nsec() as u32),
            size,
            rdev,
            attributes(&at),
        );
        tree.insert(path.clone(), (said, bytes));
        if kind.is_dir() {
            seen(&at, path, tree);
        }
        path.truncate(before);
    }
}

fn describe(
    mode: u16,
    owner: (u32, u32),
    links: u32,
    modified: (i64, u32),
    size: u64,
    device: Option<(u32, u32)>,
    mut xattrs: Vec<(Vec<u8>, Vec<u8>)>,
) -> String {
    xattrs.sort();
    let xattrs: Vec<_> = xattrs
        .iter()
        .map(|(name, value)| format!("{}={} {:x?}", becket_image::shown(name), value.len(), sum(value)))
        .collect();
    format!("{mode:o} {owner:?} {links} {modified:?} {size} {device:?} {xattrs:?}")
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(7, |sum: u64, byte| sum.wrapping_mul(0x100_0000_01b3) ^ u64::from(*byte))
}

/// The extended attributes of a file by the kernel; access control lists under one name only.
fn attributes(path: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut names = vec![0; 1 << 16];
    let len = match rustix::fs::llistxattr(path, &mut names[..]) {
        // A file system without them.
        Err(rustix::io::Errno::OPNOTSUPP) => 0,
        len => len.unwrap(),
    };
    let names = names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    names
        .filter(|name| !name.starts_with(b"trusted.SGI_ACL"))
        .map(|name| {
            let mut value = vec![0; 1 << 16];
            let len = rustix::fs::lgetxattr(path, CString::new(name).unwrap(), &mut value[..]).unwrap();
            value.truncate(len);
            (name.to_vec(), value)
        })
        .collect()
}

#[track_caller]
fn sound<T>(path: &[u8], result: Result<T, LayerError>) -> T {
    result.unwrap_or_else(|error| panic!("{}: {error}", becket_image::shown(path)))
}

/// What becket finds.
pub(crate) fn found(image: &Image, fs: &dyn FileSystem, dir: u64, path: &mut Vec<u8>, tree: &mut Tree) {
    let mut entries = Vec::new();
    fs.list(dir, &mut |name, node| {
        entries.push((name.to_vec(), node));
        ControlFlow::Continue(())
    })
    .unwrap_or_else(|error| panic!("{}: {error}", becket_image::shown(path)));
    for (name, node) in entries {
        let before = path.len();
        path.push(b'/');
        path.extend_from_slice(&name);
        let known = sound(path, fs.attributes(node));
        let bytes = match known.kind {
            NodeKind::Symlink => sound(path, fs.read_link(node)),
            NodeKind::File => {
                let file = image.compose(sound(path, fs.lay_out(node))).unwrap();
                file.read_vec(0, file.len() as usize).unwrap()
            }
            _ => Vec::new(),
        };
        let modified = known.modified.map_or((0, 0), |time| (time.seconds, time.nanoseconds));
        let size = if known.kind == NodeKind::Directory { 0 } else { known.size };
        let said = describe(
            known.mode.unwrap_or(0),
            known.owner.unwrap_or((0, 0)),
            known.links.unwrap_or(0),
            modified,
            size,
            known.device,
            sound(path, fs.xattrs(node)),
        );
        tree.insert(path.clone(), (said, bytes));
        if known.kind == NodeKind::Directory {
            found(image, fs, node, path, tree);
        }
        path.truncate(before);
    }
}

/// Compares what becket finds in a file system with what the kernel showed of it; how many files that were.
pub(crate) fn compare((image, fs): (&Image, &dyn FileSystem), expected: &Tree, what: &str) -> usize {
    let mut tree = Tree::new();
    found(image, fs, fs.root(), &mut Vec::new(), &mut tree);
    same(&tree, expected, what);
    expected.len()
}

/// Compares two trees.
pub(crate) fn same(tree: &Tree, expected: &Tree, what: &str) {
    assert!(tree.keys().eq(expected.keys()), "{what}: other names");
    for (path, (said, bytes)) in expected {
        let (also_said, also_bytes) = &tree[path];
        assert_eq!(also_said, said, "{what}: {}", becket_image::shown(path));
        assert!(also_bytes == bytes, "{what}: {} differs", becket_image::shown(path));
    }
}
