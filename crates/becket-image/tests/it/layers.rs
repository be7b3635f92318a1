//! File systems made by the real tools: each file's bytes through its map are those that went in.
//! It never takes becket's own word for what an image holds: the tree on disk is the reference.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use becket_image::layer::{FileSystem, NodeKind, detect};
use becket_image::{Format, Image, Place, ReadAt as _};
use becket_testkit::image::random_bytes;
use becket_testkit::{require_plain_machine, tool};

use crate::common::{Dir, dir, file};

/// What a tree holds, by path: bytes of files, targets of links, nothing of directories.
type Tree = BTreeMap<Vec<u8>, Node>;

#[derive(Debug, Clone, PartialEq, Eq)]
enum Node {
    File(Vec<u8>),
    Link(Vec<u8>),
    Directory,
}

/// What a file system can keep.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keeps {
    links: bool,
    odd_names: bool,
}

const UNIX: Keeps = Keeps { links: true, odd_names: true };

/// A directory, and one in it that is to become an image.
fn rooted() -> (Dir, PathBuf) {
    let dir = dir();
    let root = dir.path().join("tree");
    fs::create_dir(&root).unwrap();
    (dir, root)
}

/// Makes a tree whose sizes lie around what blocks, clusters and fragments are measured in.
fn grow(root: &Path, seed: u64, keeps: Keeps) -> Tree {
    let mut random = random_bytes(4096, seed).into_iter();
    let mut pick = |n: usize| {
        usize::from(random.next().unwrap()) * 256 % n.max(1) + usize::from(random.next().unwrap()) % n.max(1)
    };
    let mut dirs =
        vec![PathBuf::new(), PathBuf::from("a"), PathBuf::from("a/deep dir"), PathBuf::from("many")];
    if keeps.odd_names {
        dirs.push(PathBuf::from("wörk 文"));
    }
    for dir in &dirs {
        fs::create_dir_all(root.join(dir)).unwrap();
    }
    let sizes = [0, 1, 59, 511, 512, 2048, 4095, 4096, 4097, 131_071, 131_072, 131_073, 400_001, 1 << 20];
    for number in 0..24_usize {
        let dir = &dirs[pick(dirs.len()) % dirs.len()];
        let size = sizes[number % sizes.len()] + if number >= sizes.len() { pick(9000) } else { 0 };
        let mut bytes = random_bytes(size, seed.wrapping_add(number as u64));
        if number % 3 == 1 {
            // What compresses well, in repeats that are no zeroes.
            for (at, byte) in bytes.iter_mut().enumerate() {
                *byte = (at / 97) as u8 | 1;
            }
        }
        if number % 5 == 2 && size > 300_000 {
            // A hole of whole blocks of every file system here.
            bytes[131_072..262_144].fill(0);
        }
        let name = match number % 4 {
            0 if keeps.odd_names => format!("new\nline {number}"),
            1 if keeps.odd_names => format!("ünï \\ {number}.img"),
            _ => format!("File with a long name number {number}.data"),
        };
        fs::write(root.join(dir).join(name), &bytes).unwrap();
    }
    for number in 0..300 {
        fs::write(root.join(format!("many/entry-{number:04}.txt")), format!("{number}")).unwrap();
    }
    if keeps.links {
        symlink("a/deep dir", root.join("short link")).unwrap();
        symlink(format!("../{}", ["x"; 100].join("/")), root.join("a/long link")).unwrap();
    }
    let mut tree = Tree::new();
    remember(root, &mut Vec::new(), &mut tree);
    tree
}

fn remember(dir: &Path, path: &mut Vec<u8>, tree: &mut Tree) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let before = path.len();
        path.push(b'/');
        path.extend_from_slice(entry.file_name().as_bytes());
        let kind = entry.file_type().unwrap();
        let node = if kind.is_symlink() {
            Node::Link(fs::read_link(entry.path()).unwrap().as_os_str().as_bytes().to_vec())
        } else if kind.is_dir() {
            remember(&entry.path(), path, tree);
            Node::Directory
        } else {
            Node::File(fs::read(entry.path()).unwrap())
        };
        tree.insert(path.clone(), node);
        path.truncate(before);
    }
}

/// Reads the whole tree of a file system, each file by its map.
fn harvest(image: &Image, fs: &dyn FileSystem, dir: u64, path: &mut Vec<u8>, tree: &mut Tree) {
    let mut entries = Vec::new();
    fs.list(dir, &mut |name, node| {
        entries.push((name.to_vec(), node));
        ControlFlow::Continue(())
    })
    .unwrap();
    for (name, node) in entries {
        let before = path.len();
        path.push(b'/');
        path.extend_from_slice(&name);
        let stat = fs.stat(node).unwrap();
        let found = match stat.kind {
            NodeKind::Directory => {
                harvest(image, fs, node, path, tree);
                Node::Directory
            }
            NodeKind::Symlink => Node::Link(fs.read_link(node).unwrap()),
            NodeKind::File => {
                let file = image
                    .compose(fs.lay_out(node).unwrap_or_else(|error| {
                        panic!("{}: node {node}: {error}", becket_image::shown(path))
                    }))
                    .unwrap();
                assert_eq!(file.len(), stat.size, "{}", String::from_utf8_lossy(path));
                Node::File(file.read_vec(0, file.len() as usize).unwrap())
            }
            NodeKind::Other => panic!("{}", String::from_utf8_lossy(path)),
        };
        tree.insert(path.clone(), found);
        path.truncate(before);
    }
}

pub(crate) fn raw(path: &Path) -> Image {
    let file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len();
    Image::raw(Arc::new(file), len, 512)
}

/// The file system in `path`, with what it is in.
pub(crate) fn fs_in(path: &Path, format: Format) -> (Image, Arc<dyn FileSystem>) {
    let image = raw(path);
    let contents = detect(&image, Format::Auto).unwrap();
    let forced = detect(&image, format).unwrap();
    assert_eq!(contents.about(), forced.about(), "what is detected is what it is");
    (image, contents.fs.unwrap_or_else(|| panic!("{} is not recognised", path.display())))
}

#[track_caller]
fn assert_same(path: &Path, format: Format, expected: &Tree) {
    let (image, fs) = fs_in(path, format);
    let mut found = Tree::new();
    harvest(&image, fs.as_ref(), fs.root(), &mut Vec::new(), &mut found);
    found.retain(|path, _| path != b"/lost+found");
    assert_equal(&found, expected);
}

#[track_caller]
fn assert_equal(found: &Tree, expected: &Tree) {
    let names = |tree: &Tree| -> Vec<String> { tree.keys().map(|path| becket_image::shown(path)).collect() };
    assert_eq!(names(found), names(expected));
    for (path, node) in expected {
        // Not by `assert_eq`: nobody reads a million bytes.
        assert!(found[path] == *node, "{} differs", becket_image::shown(path));
    }
}

#[test]
fn ext_of_all_kinds() {
    if !require_plain_machine("layers::ext_of_all_kinds", &["mke2fs"]) {
        return;
    }
    let dir = dir();
    let root = dir.path().join("tree");
    let tree = grow(&root, 1, UNIX);
    for (number, options) in [
        &["-t", "ext4"][..],
        &["-t", "ext4", "-b", "1024", "-O", "metadata_csum,64bit,flex_bg"],
        &["-t", "ext4", "-O", "meta_bg,^resize_inode,^metadata_csum", "-I", "128"],
        &["-t", "ext4", "-O", "bigalloc", "-C", "16384"],
        &["-t", "ext4", "-b", "4096", "-O", "bigalloc", "-C", "131072"],
        &["-t", "ext4", "-O", "sparse_super2,metadata_csum_seed"],
        &["-t", "ext3", "-b", "1024"],
        &["-t", "ext2", "-b", "1024", "-I", "128"],
        &["-t", "ext2", "-b", "4096"],
    ]
    .into_iter()
    .enumerate()
    {
        let path = file(dir.path(), &format!("{number}.ext"), 64 << 20);
        tool(
            Command::new("/usr/sbin/mke2fs")
                .args(["-q", "-F", "-L", "label"])
                .args(options)
                .arg("-d")
                .args([&root, &path]),
        );
        assert_same(&path, Format::Ext, &tree);
        let about = fs_in(&path, Format::Ext).1.about().clone();
        assert_eq!(about.format, options[1], "{options:?}");
        assert_eq!(about.label.as_deref(), Some("label"));
        let blkid =
            tool(Command::new("/usr/sbin/blkid").args(["-p", "-o", "value", "-s", "UUID"]).arg(&path));
        assert_eq!(about.uuid.as_deref(), Some(blkid.trim()));
    }
}

#[test]
fn iso_of_all_kinds() {
    if !require_plain_machine("layers::iso_of_all_kinds", &["genisoimage"]) {
        return;
    }
    let dir = dir();
    let root = dir.path().join("tree");
    let tree = grow(&root, 2, UNIX);
    let deep = root.join("1/2/3/4/5/6/7/8/9/10");
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("down here"), "found").unwrap();
    let mut whole = Tree::new();
    remember(&root, &mut Vec::new(), &mut whole);
    assert!(whole.len() > tree.len());
    let path = dir.path().join("rock.iso");
    // Deep directories are moved and linked to.
    let make = |options: &[&str], path: &Path| {
        tool(
            Command::new("genisoimage")
                .args(["-quiet", "-V", "LABEL"])
                .args(options)
                .arg("-o")
                .args([path, &root]),
        );
    };
    make(&["-R"], &path);
    let (image, fs) = fs_in(&path, Format::Iso9660);
    let mut found = Tree::new();
    harvest(&image, fs.as_ref(), fs.root(), &mut Vec::new(), &mut found);
    // genisoimage shows the place where it moves them to.
    found.retain(|path, _| !path.starts_with(b"/rr_moved"));
    assert_equal(&found, &whole);
    assert_eq!(fs.about().label.as_deref(), Some("LABEL"));
    make(&["-R", "-D"], &path);
    assert_same(&path, Format::Iso9660, &whole);

    fs::remove_dir_all(&root).unwrap();
    let plain = grow(&root, 3, Keeps { links: false, odd_names: false });
    make(&["-J", "-joliet-long"], &path);
    assert_same(&path, Format::Iso9660, &plain);
    make(&["-l"], &path);
    let (_, fs) = fs_in(&path, Format::Iso9660);
    let mut names = Vec::new();
    fs.list(fs.root(), &mut |name, _| {
        names.push(String::from_utf8(name.to_vec()).unwrap());
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(names.contains(&"MANY".to_owned()), "{names:?}");
    assert!(fs.same_name(b"MANY", b"many"));
}

#[test]
fn squashfs_of_all_kinds() {
    if !require_plain_machine("layers::squashfs_of_all_kinds", &["mksquashfs"]) {
        return;
    }
    let dir = dir();
    let root = dir.path().join("tree");
    let tree = grow(&root, 4, UNIX);
    let path = dir.path().join("s.squashfs");
    for options in [
        &["-comp", "gzip"][..],
        &["-comp", "xz", "-b", "256K"],
        &["-comp", "xz", "-Xbcj", "x86"],
        &["-comp", "lz4"],
        &["-comp", "lzo"],
        &["-comp", "zstd", "-Xcompression-level", "1", "-b", "4096"],
        &["-comp", "zstd", "-Xcompression-level", "1", "-no-fragments"],
        &["-comp", "gzip", "-always-use-fragments", "-b", "1M"],
        &["-comp", "gzip", "-noD", "-noF", "-noI"],
    ] {
        let mut mksquashfs = Command::new("mksquashfs");
        tool(mksquashfs.args([&root, &path]).args(["-noappend", "-no-progress", "-quiet"]).args(options));
        assert_same(&path, Format::Squashfs, &tree);
        assert_eq!(fs_in(&path, Format::Squashfs).1.about().compression, Some(options[1]));
        let (image, fs) = fs_in(&path, Format::Squashfs);
        let files = tree.iter().filter(|(_, node)| matches!(node, Node::File(_))).map(|(path, _)| &path[1..]);
        let encoded = files.filter(|name| {
            let file = image.compose(fs.lay_out(find(fs.as_ref(), name)).unwrap()).unwrap();
            file.encoded().len() > 0
        });
        assert_eq!(
            encoded.count() == 0,
            options.contains(&"-noF"),
            "what is stored as it is is data: {options:?}"
        );
    }
}

/// The node at a path.
pub(crate) fn find(fs: &dyn FileSystem, path: &[u8]) -> u64 {
    path.split(|byte| *byte == b'/').fold(fs.root(), |dir, name| {
        let mut found = None;
        fs.list(dir, &mut |entry, node| {
            found = found.or((entry == name).then_some(node));
            ControlFlow::Continue(())
        })
        .unwrap();
        found.unwrap_or_else(|| panic!("no {}", String::from_utf8_lossy(name)))
    })
}

#[test]
fn fat_of_all_kinds() {
    if !require_plain_machine("layers::fat_of_all_kinds", &["mkfs.vfat", "mcopy"]) {
        return;
    }
    let dir = dir();
    let root = dir.path().join("tree");
    let tree = grow(&root, 5, Keeps { links: false, odd_names: false });
    for (format, size, options) in [
        ("fat12", 12, &["-F", "12", "-s", "8"][..]),
        ("fat16", 32, &["-F", "16", "-s", "2"]),
        ("fat16", 80, &["-F", "16", "-S", "1024"]),
        ("fat32", 80, &["-F", "32", "-s", "1"]),
    ] {
        let path = file(dir.path(), &format!("{format}-{size}"), size << 20);
        tool(
            Command::new("/usr/sbin/mkfs.vfat")
                .args(["-n", "LABEL", "-i", "1234abcd"])
                .args(options)
                .arg(&path),
        );
        let entries = fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path());
        tool(Command::new("mcopy").args(["-s", "-Q", "-i"]).arg(&path).args(entries).arg("::/"));
        assert_same(&path, Format::Fat, &tree);
        let (image, fs) = fs_in(&path, Format::Fat);
        let about = fs.about();
        assert_eq!((about.format, about.label.as_deref()), (format, Some("LABEL")));
        assert_eq!(about.uuid.as_deref(), Some("1234-ABCD"));
        let node = find(fs.as_ref(), b"many/entry-0007.txt");
        assert_eq!(fs.writable(node), Ok(()), "mkfs leaves it clean");
        // A file with fragmented clusters: one between two others is removed, and a longer one takes its
        // place.
        let mtool = |name: &str, words: &[&str]| tool(Command::new(name).arg("-i").arg(&path).args(words));
        mtool("mdel", &["::/many/entry-0100.txt", "::/many/entry-0200.txt"]);
        let long = dir.path().join("long");
        fs::write(&long, random_bytes(100_000, 9)).unwrap();
        mtool("mcopy", &["-o", long.to_str().unwrap(), "::/"]);
        let fs = fs_in(&path, Format::Fat).1;
        let found = image.compose(fs.lay_out(find(fs.as_ref(), b"long")).unwrap()).unwrap();
        assert!(found.read_vec(0, 100_000).unwrap() == random_bytes(100_000, 9));
        assert!(fs.same_name(b"Long", b"lOng"));
    }
}

/// What encryption and fs-verity need is kept as attributes that the kernel lists for nobody.
#[test]
fn ext_attributes_of_other_kinds() {
    if !require_plain_machine("layers::ext_attributes_of_other_kinds", &["mke2fs", "debugfs"]) {
        return;
    }
    let (dir, root) = rooted();
    fs::write(root.join("file"), "what is in it").unwrap();
    let path = dir.path().join("e.ext4");
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-t", "ext4", "-O", "^metadata_csum", "-d"]).args([&root, &path]);
    tool(mke2fs.arg("8M"));
    for name in ["user.verity-of-old", "user.another"] {
        let set = format!("ea_set /file {name} value");
        tool(Command::new("debugfs").args(["-w", "-R", &set]).arg(&path));
    }
    let (_, ext) = fs_in(&path, Format::Ext);
    assert_eq!(ext.xattrs(find(ext.as_ref(), b"file")).unwrap().len(), 2);
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.windows(13).position(|name| name == b"verity-of-old").unwrap();
    for kind in [9, 11, 200] {
        bytes[at - 15] = kind; // The number of its prefix.
        fs::write(&path, &bytes).unwrap();
        let (image, ext) = fs_in(&path, Format::Ext);
        let file = find(ext.as_ref(), b"file");
        assert_eq!(ext.xattrs(file).unwrap(), [(b"user.another".to_vec(), b"value".to_vec())], "{kind}");
        assert_eq!(
            image.compose(ext.lay_out(file).unwrap()).unwrap().read_vec(0, 13).unwrap(),
            b"what is in it"
        );
    }
}

#[test]
fn erofs_of_all_kinds() {
    if !require_plain_machine("layers::erofs_of_all_kinds", &["mkfs.erofs"]) {
        return;
    }
    let dir = dir();
    let root = dir.path().join("tree");
    let tree = grow(&root, 6, UNIX);
    let path = dir.path().join("e.erofs");
    for options in [
        &[][..],
        &["-E", "force-inode-extended"],
        &["-E", "noinline_data"],
        &["--chunksize", "65536"],
        &["-zlz4"],
        &["-zlz4hc,12", "-E", "legacy-compress"],
        &["-zlz4hc", "-C65536"],
        &["-zlz4", "-C1048576", "-E", "legacy-compress"],
        &["-zlz4hc", "-C16384", "-E", "ztailpacking"],
        &["-zlz4", "-E", "legacy-compress,ztailpacking"],
    ] {
        let _ = fs::remove_file(&path);
        tool(Command::new("mkfs.erofs").args(options).args([&path, &root]));
        assert_same(&path, Format::Erofs, &tree);
        let (image, fs) = fs_in(&path, Format::Erofs);
        let files = tree.iter().filter(|(_, node)| matches!(node, Node::File(_)));
        let compressed = files.filter(|(path, _)| {
            let layout = fs.lay_out(find(fs.as_ref(), &path[1..])).unwrap();
            image.compose(layout).unwrap().encoded().len() > 0
        });
        let expected = if options.first().is_some_and(|option| option.starts_with("-z")) { 4 } else { 0 };
        assert!(compressed.count() >= expected, "what compresses well is compressed: {options:?}");
    }
}

/// Long runs of equal bytes, of which mkfs.erofs makes pieces of almost 4 MiB (EROFS allows 12).
#[test]
fn erofs_whose_pieces_yield_megabytes() {
    if !require_plain_machine("layers::erofs_whose_pieces_yield_megabytes", &["mkfs.erofs"]) {
        return;
    }
    let (dir, root) = rooted();
    let runs = [vec![0; 15 << 20], random_bytes(300_000, 9), vec![7; 13_000_001]].concat();
    fs::write(root.join("runs"), &runs).unwrap();
    let path = dir.path().join("e.erofs");
    for options in [["-zlz4", "-C65536"], ["-zlz4hc", "-C1048576"]] {
        let _ = fs::remove_file(&path);
        tool(Command::new("mkfs.erofs").args(options).args([&path, &root]));
        let (image, fs) = fs_in(&path, Format::Erofs);
        let file = image.compose(fs.lay_out(find(fs.as_ref(), b"runs")).unwrap()).unwrap();
        let blocks = file.encoded().flat_map(|layer| layer.blocks().iter().map(|block| block.yields));
        assert!(blocks.max().unwrap() > 3 << 20, "{options:?}");
        assert!(file.read_vec(0, file.len() as usize).unwrap() == runs, "{options:?}");
        let (from, len) = (20_000_000, 4096);
        assert!(file.read_vec(from as u64, len).unwrap() == runs[from..from + len], "{options:?}");
    }
}

/// Images that the mkfs.erofs of this machine may be too old to make; `tests/fuzz/seeds.sh` made them.
#[test]
fn erofs_of_later_tools() {
    // The images are among the sources.
    if !require_plain_machine("layers::erofs_of_later_tools", &[]) {
        return;
    }
    let line = |number: u64| format!("line {} of some text\n", number * number);
    let text = |range: std::ops::Range<u64>| range.map(line).collect::<String>().into_bytes();
    let two = [&b"another start\n"[..], &text(300..1500)].concat();
    let expected = [("one", text(0..2000)), ("two", two), ("three", text(1..3))];
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus/erofs");
    for (image, codecs) in [
        ("new-lzma", &["lzma"][..]),
        ("new-zstd", &["zstd"]),
        ("new-deflate", &["deflate"]),
        ("new-lz4", &["lz4"]),
    ] {
        let (image, fs) = fs_in(&corpus.join(image), Format::Erofs);
        assert_eq!(fs.about().compression, Some(codecs[0]));
        for (name, bytes) in &expected {
            let file = image.compose(fs.lay_out(find(fs.as_ref(), name.as_bytes())).unwrap()).unwrap();
            assert!(file.read_vec(0, file.len() as usize).unwrap() == *bytes, "{codecs:?} {name}");
            if bytes.len() > 1000 {
                let found: Vec<String> = file.encoded().map(|layer| layer.codec().to_string()).collect();
                assert_eq!(found, codecs, "{name}");
            }
        }
    }
}

#[test]
fn names_longer_than_the_kernel_takes_are_damage() {
    let name = "layers::names_longer_than_the_kernel_takes_are_damage";
    if !require_plain_machine(name, &["mksquashfs", "mkfs.erofs"]) {
        return;
    }
    let dir = dir();
    let root = dir.path().join("tree");
    fs::create_dir_all(&root).unwrap();
    let (one, other) = ("a".repeat(200), "b".repeat(200));
    fs::write(root.join(&one), "").unwrap();
    fs::write(root.join(&other), "").unwrap();
    let list = |path: &Path, format| {
        let (_, fs) = fs_in(path, format);
        let mut longest = 0;
        fs.list(fs.root(), &mut |name, _| {
            longest = longest.max(name.len());
            ControlFlow::Continue(())
        })
        .map(|()| longest)
    };
    let spoil = |path: &Path, name: &str, back: usize, value: u16| {
        let mut bytes = fs::read(path).unwrap();
        let at = bytes.windows(name.len()).position(|bytes| bytes == name.as_bytes()).unwrap();
        bytes[at - back..][..2].copy_from_slice(&value.to_le_bytes());
        fs::write(path, bytes).unwrap();
    };

    let squash = dir.path().join("s.squashfs");
    tool(Command::new("mksquashfs").args([&root, &squash]).args([
        "-noappend",
        "-quiet",
        "-no-progress",
        "-noI",
    ]));
    assert_eq!(list(&squash, Format::Squashfs).unwrap(), 200);
    // The name's length less one stands in front of it.
    spoil(&squash, &one, 2, 256);
    let error = list(&squash, Format::Squashfs).unwrap_err().to_string();
    assert!(error.contains("a name of 257 bytes"), "{error}");

    let erofs = dir.path().join("e.erofs");
    tool(Command::new("mkfs.erofs").args([&erofs, &root]));
    assert_eq!(list(&erofs, Format::Erofs).unwrap(), 200);
    // Behind four entries and `.` and `..` come both names: the last entry's now starts where the third's
    // does.
    spoil(&erofs, &one, 51 - 44, 51);
    let error = list(&erofs, Format::Erofs).unwrap_err().to_string();
    assert!(error.contains("a name of 400 bytes"), "{error}");
}

/// xorriso makes such files only of more than 4 GiB; here two neighbours are made one, in their records.
#[test]
fn a_file_of_several_extents_is_one() {
    if !require_plain_machine("layers::a_file_of_several_extents_is_one", &["genisoimage"]) {
        return;
    }
    let (dir, root) = rooted();
    let bytes = random_bytes(4096 + 77, 5);
    fs::write(root.join("A.BIN"), &bytes[..4096]).unwrap();
    fs::write(root.join("B.BIN"), &bytes[4096..]).unwrap();
    fs::write(root.join("C.BIN"), "another").unwrap();
    let path = dir.path().join("two.iso");
    tool(Command::new("genisoimage").args(["-quiet", "-o"]).args([&path, &root]));
    let mut iso = fs::read(&path).unwrap();
    let name_of = |iso: &[u8], name: &[u8]| iso.windows(name.len()).position(|part| part == name).unwrap();
    let first = name_of(&iso, b"A.BIN;1");
    iso[first - 33 + 25] |= 0x80;
    let second = name_of(&iso, b"B.BIN;1");
    iso[second..second + 7].copy_from_slice(b"A.BIN;1");
    fs::write(&path, iso).unwrap();
    let expected = Tree::from([
        (b"/A.BIN".to_vec(), Node::File(bytes)),
        (b"/C.BIN".to_vec(), Node::File(b"another".to_vec())),
    ]);
    assert_same(&path, Format::Iso9660, &expected);
}

#[test]
fn a_map_of_a_vast_sparse_file_is_small() {
    if !require_plain_machine("layers::a_map_of_a_vast_sparse_file_is_small", &["mke2fs", "debugfs"]) {
        return;
    }
    let (dir, root) = rooted();
    let vast = file(&root, "vast", 1 << 40);
    use std::os::unix::fs::FileExt as _;
    let handle = fs::OpenOptions::new().write(true).open(&vast).unwrap();
    for at in [4096, 1 << 39, (1 << 40) - 4096] {
        handle.write_all_at(&[7; 4096], at).unwrap();
    }
    let path = file(dir.path(), "vast.ext4", 64 << 20);
    tool(Command::new("/usr/sbin/mke2fs").args(["-q", "-F", "-t", "ext4", "-d"]).args([&root, &path]));
    let (image, fs) = fs_in(&path, Format::Ext);
    let mut found = None;
    fs.list(fs.root(), &mut |name, node| {
        found = found.or((name == b"vast").then_some(node));
        ControlFlow::Continue(())
    })
    .unwrap();
    let vast = image.compose(fs.lay_out(found.unwrap()).unwrap()).unwrap();
    assert_eq!(vast.len(), 1 << 40);
    assert!(vast.map().extents().len() <= 7, "{:?}", vast.map());
    let data = vast.map().extents().iter().filter(|extent| matches!(extent.place, Place::Data { .. }));
    assert_eq!(data.map(|extent| extent.len).sum::<u64>(), 3 * 4096);
    let mut bytes = [1; 8192];
    vast.read_at(&mut bytes, 1 << 39).unwrap();
    assert!(bytes[..4096] == [7; 4096] && bytes[4096..] == [0; 4096]);
}
