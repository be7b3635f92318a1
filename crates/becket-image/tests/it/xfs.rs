//! XFS made by the kernel: random trees through becket's maps are what the mounted file system shows.
//! It never takes becket's own word for what a file system holds, and leaves no mount and no device behind.

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use becket_image::layer::{FileSystem, LayerError, NodeKind};
use becket_image::{Format, Image};
use becket_testkit::image::random_bytes;
use becket_testkit::{require_plain_machine, require_root, tool};
use rustix::fs::{FallocateFlags, XattrFlags};

use crate::common::{LoopDevice, Mount, dir, file, look, skip};
use crate::layers::fs_in;

/// Trees of each kind; BECKET_XFS_ROUNDS asks for more.
const ROUNDS: u64 = 1;
/// Changes that are made to a tree.
const STEPS: usize = 400;

/// What is known of a file, as text, so that a difference can be read.
type Tree = BTreeMap<Vec<u8>, (String, Vec<u8>)>;

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
/// attributes.
fn grow(root: &Path, seed: u64) {
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
            let value = random_bytes([3, 40, 300, 3000, 20_000][dice.pick(5)], seed ^ step as u64);
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
fn seen(dir: &Path, path: &mut Vec<u8>, tree: &mut Tree) {
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
    let len = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
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
fn found(image: &Image, fs: &dyn FileSystem, dir: u64, path: &mut Vec<u8>, tree: &mut Tree) {
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
        let modified = known.modified.map(|time| (time.seconds, time.nanoseconds)).unwrap();
        let size = if known.kind == NodeKind::Directory { 0 } else { known.size };
        let said = describe(
            known.mode.unwrap(),
            known.owner.unwrap(),
            known.links.unwrap(),
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

/// Gives a file and a directory access control lists, in the form in which the kernel takes them.
fn access_lists(point: &Path) {
    let list = |named: (u16, u32)| {
        let mut list = 2_u32.to_le_bytes().to_vec();
        for (tag, permissions, id) in
            [(1_u16, 6_u16, !0), (named.0, 7, named.1), (4, 4, !0_u32), (16, 7, !0), (32, 4, !0)]
        {
            list.extend(tag.to_le_bytes().into_iter().chain(permissions.to_le_bytes()));
            list.extend(id.to_le_bytes());
        }
        list
    };
    let set = |name: &str, kind: &str, list: Vec<u8>| {
        rustix::fs::setxattr(point.join(name), kind, &list, XattrFlags::empty()).unwrap();
    };
    set("pieces", "system.posix_acl_access", list((2, 12)));
    // Groups come behind the owner's group.
    let mut default = list((8, 7));
    let entries = default[4..].to_vec();
    default.truncate(4);
    [0, 2, 1, 3, 4].iter().for_each(|at| default.extend_from_slice(&entries[at * 8..at * 8 + 8]));
    set("dir few", "system.posix_acl_default", default);
}

/// Makes a file system with these options, lets the kernel fill it, and compares; how many files that were.
fn compare(dir: &Path, options: &[&str], seed: u64) -> Result<usize, String> {
    let image = file(dir, "xfs.img", 512 << 20);
    let point = dir.join("point");
    fs::create_dir_all(&point).unwrap();
    tool(Command::new("/usr/sbin/mkfs.xfs").args(["-q", "-f", "-L", "label"]).args(options).arg(&image));
    let mut expected = Tree::new();
    {
        let device = LoopDevice::attach(&image, &[])?;
        let _mount = Mount::new(&["-t", "xfs", device.0.to_str().unwrap()], &point)?;
        grow(&point, seed);
        access_lists(&point);
        rustix::fs::syncfs(File::open(&point).unwrap()).unwrap();
        seen(&point, &mut Vec::new(), &mut expected);
    }
    let (image, fs) = fs_in(&image, Format::Xfs);
    assert_eq!(fs.about().label.as_deref(), Some("label"));
    let mut tree = Tree::new();
    found(&image, fs.as_ref(), fs.root(), &mut Vec::new(), &mut tree);
    assert!(tree.keys().eq(expected.keys()), "{options:?}, seed {seed}: other names");
    for (path, (said, bytes)) in &expected {
        let (also_said, also_bytes) = &tree[path];
        assert_eq!(also_said, said, "{options:?}, seed {seed}: {}", becket_image::shown(path));
        assert!(also_bytes == bytes, "{options:?}, seed {seed}: {} differs", becket_image::shown(path));
    }
    Ok(expected.len())
}

#[test]
fn random_trees_are_what_the_kernel_shows() {
    let name = "xfs::random_trees_are_what_the_kernel_shows";
    if !require_root(name) || !require_plain_machine(name, &["mkfs.xfs"]) {
        return;
    }
    let rounds = std::env::var("BECKET_XFS_ROUNDS").ok().map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    let dir = dir();
    let (mut compared, mut trees) = (0, 0);
    for seed in 0..rounds {
        for (number, options) in [
            &[][..],
            &["-b", "size=1024", "-m", "reflink=1", "-i", "size=512"],
            &["-i", "nrext64=1", "-n", "size=8192", "-m", "bigtime=1"],
            &["-m", "bigtime=0", "-d", "agcount=6"],
        ]
        .into_iter()
        .enumerate()
        {
            match compare(dir.path(), options, seed * 100 + number as u64) {
                Ok(files) => {
                    compared += files;
                    trees += 1;
                }
                // A kernel without XFS.
                Err(reason) => return skip(name, &reason),
            }
        }
    }
    assert!(compared > trees * 3000, "{compared} files of {trees} trees");
    eprintln!("{trees} trees, {compared} files compared, 0 differences");
}

/// Version 4 by a prototype: new kernels do not mount it.
#[test]
fn trees_of_version_4_are_what_went_in() {
    let name = "xfs::trees_of_version_4_are_what_went_in";
    if !require_plain_machine(name, &["mkfs.xfs"]) {
        return;
    }
    let dir = dir();
    let at = dir.path();
    let mut expected = BTreeMap::new();
    let mut proto = "/\n0 0\nd--755 0 0\n".to_owned();
    // In the inode, in a block, in many blocks.
    for (name, count) in [("few", 3), ("some", 60), ("many", 3000)] {
        proto += &format!("{name} d--750 1 2\n");
        for number in 0..count {
            let size = if number % 50 == 1 { number * 97 } else { number % 7 };
            let source = at.join(format!("source-{size}"));
            fs::write(&source, random_bytes(size, size as u64)).unwrap();
            proto += &format!("an-entry-{number} ---644 {number} 7 {}\n", source.display());
            let path = format!("/{name}/an-entry-{number}");
            expected.insert(path.into_bytes(), (size, random_bytes(size, size as u64)));
        }
        proto += "$\n";
    }
    let long = "target/".repeat(100);
    proto += &format!("short l--777 0 0 few\nlong l--777 0 0 {long}\n$\n");
    fs::write(at.join("proto"), proto).unwrap();
    for options in [
        &["-m", "crc=0", "-n", "ftype=0"][..],
        &["-m", "crc=0", "-n", "ftype=1", "-b", "size=512", "-d", "agcount=3"],
        &["-m", "crc=0", "-n", "size=16384", "-b", "size=1024"],
    ] {
        let image = file(at, "xfs.img", 400 << 20);
        let mut mkfs = Command::new("/usr/sbin/mkfs.xfs");
        tool(mkfs.args(["-q", "-f", "-p"]).arg(at.join("proto")).args(options).arg(&image));
        let (image, fs) = fs_in(&image, Format::Xfs);
        assert!(fs.about().notes.iter().any(|note| note == "version 4"), "{options:?}");
        let mut tree = Tree::new();
        found(&image, fs.as_ref(), fs.root(), &mut Vec::new(), &mut tree);
        assert_eq!(tree.len(), expected.len() + 5, "{options:?}");
        assert_eq!(tree[&b"/long"[..]].1, long.as_bytes(), "{options:?}");
        assert_eq!(tree[&b"/short"[..]].1, b"few", "{options:?}");
        for (path, (size, bytes)) in &expected {
            let (said, also) = &tree[path];
            assert!(also == bytes && said.contains(&format!(" {size} None")), "{options:?} {said}");
        }
    }
}

#[test]
fn a_path_goes_through_it_and_nothing_is_written() {
    let name = "xfs::a_path_goes_through_it_and_nothing_is_written";
    if !require_plain_machine(name, &["mkfs.xfs"]) {
        return;
    }
    let dir = dir();
    let at = dir.path();
    fs::write(at.join("inner.img"), random_bytes(300_000, 8)).unwrap();
    // A prototype makes a tree without a mount.
    let proto = format!(
        "/\n0 0\nd--755 0 0\nsub d--755 3 4\ninner.img ---644 5 6 {}\nlink l--777 0 0 inner.img\n$\n$\n",
        at.join("inner.img").display()
    );
    fs::write(at.join("proto"), proto).unwrap();
    let image = file(at, "xfs.img", 300 << 20);
    tool(Command::new("/usr/sbin/mkfs.xfs").args(["-q", "-p"]).args([&at.join("proto"), &image]));
    let uuid = tool(Command::new("/usr/sbin/blkid").args(["-p", "-o", "value", "-s", "UUID"]).arg(&image));
    let (_, fs) = fs_in(&image, Format::Xfs);
    assert_eq!(fs.about().uuid.as_deref(), Some(uuid.trim()));
    for inside in ["sub/inner.img", "sub/link"] {
        let walk = look(&image.join(inside), Format::Auto, &[]).unwrap();
        let bytes = walk.last().unwrap().image.read_vec(0, 300_000).unwrap();
        assert!(bytes == random_bytes(300_000, 8), "{inside}");
        assert_eq!(walk.read_only.as_deref(), Some("becket only reads files in XFS"));
    }
    let error = look(&image.join(OsStr::new("sub/none")), Format::Auto, &[]).unwrap_err().to_string();
    assert!(error.contains("none"), "{error}");
    // A wrong checksum is damage, wherever it is.
    let broken = File::options().write(true).open(&image).unwrap();
    broken.write_all_at(b"x", 110).unwrap();
    let error = look(&image.join("sub"), Format::Auto, &[]).unwrap_err().to_string();
    assert!(error.contains("the checksum of the XFS superblock is wrong"), "{error}");
}
