//! Files taken out of images are those that went in, attribute by attribute; and no image writes elsewhere.
//! Never attaches anything.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, File},
    os::unix::{
        ffi::OsStringExt as _,
        fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _, symlink},
    },
    path::{Path, PathBuf},
    process::Command,
};

use becket_testkit::{Scratch, image, require_plain_machine, require_root, tool};
use common::scratch;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng, seq::IndexedRandom as _};
use rustix::fs::{
    AtFlags, FileType, Mode, Timespec, Timestamps, XattrFlags, lgetxattr, llistxattr, makedev, mknodat,
    setxattr, utimensat,
};

const NAME_PARTS: [&str; 9] = ["a", "long name", "ünï", "-x", "~", "#1", "日本", "'q'", "tab\t"];

/// What the file systems under test can hold.
#[derive(Clone, Copy)]
struct Can {
    links: bool,
    hard: bool,
    owners: bool,
    xattrs: bool,
    /// Names of these, which FAT cannot have.
    odd_names: bool,
    /// Times before 1970, and what a step of a time is, in nanoseconds.
    old: bool,
    step: i64,
    holes: bool,
}

const ALL: Can = Can {
    links: true,
    hard: true,
    owners: true,
    xattrs: true,
    odd_names: true,
    old: true,
    step: 1,
    holes: true,
};

/// Makes a random tree.
fn plant(root: &Path, seed: u64, can: Can) {
    let random = &mut SmallRng::seed_from_u64(seed);
    fs::create_dir(root).unwrap();
    let mut dirs = vec![root.to_owned()];
    let mut files: Vec<PathBuf> = Vec::new();
    let mut all = Vec::new();
    for number in 0..70 {
        let part = if can.odd_names { NAME_PARTS.choose(random).unwrap() } else { "Long name" };
        let tail = if number % 20 == 3 { "n".repeat(200) } else { String::new() };
        let path = dirs.choose(random).unwrap().join(format!("{part}{number}{tail}"));
        match random.random_range(0..10) {
            0 | 1 if dirs.len() < 12 => {
                fs::create_dir(&path).unwrap();
                dirs.push(path.clone());
            }
            2 if can.links => {
                let target = "../t".repeat(random.random_range(1..40));
                symlink(target, &path).unwrap();
            }
            3 if can.hard && !files.is_empty() => {
                fs::hard_link(files.choose(random).unwrap(), &path).unwrap()
            }
            4 => {
                let file = File::create(&path).unwrap();
                file.set_len(3 << 20).unwrap();
                file.write_all_at(b"in the middle", 1 << 20).unwrap();
                file.write_all_at(&[7; 70_000], (2 << 20) + 5).unwrap();
                files.push(path.clone());
            }
            5 if can.owners => {
                let kind = [FileType::Fifo, FileType::CharacterDevice, FileType::BlockDevice][number % 3];
                let mode = Mode::from_raw_mode(0o640);
                mknodat(rustix::fs::CWD, &path, kind, mode, makedev(7, 300 + number as u32)).unwrap();
            }
            _ => {
                let len = *[0, 1, 59, 60, 4096, 5000, 131_072, 300_000].choose(random).unwrap();
                fs::write(&path, image::random_bytes(len, random.random())).unwrap();
                files.push(path.clone());
            }
        }
        all.push(path);
    }
    for path in all.iter().rev().chain([&root.to_owned()]) {
        let kind = fs::symlink_metadata(path).unwrap().file_type();
        if can.owners {
            let (user, group) = (random.random_range(0..70_000), random.random_range(0..70_000));
            std::os::unix::fs::lchown(path, Some(user), Some(group)).unwrap();
        }
        if can.owners && !kind.is_symlink() {
            let mode = random.random_range(0..0o10_000);
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
        if can.xattrs && (kind.is_file() || kind.is_dir()) && random.random_bool(0.3) {
            setxattr(path, "user.a comment", b"\0binary\xff", XattrFlags::empty()).unwrap();
            setxattr(path, "trusted.long", &[random.random(); 500], XattrFlags::empty()).unwrap();
            setxattr(path, "security.empty", b"", XattrFlags::empty()).unwrap();
        }
        let seconds = random.random_range(if can.old { -1_000_000_000 } else { 400_000_000 }..2_000_000_000);
        let time = Timespec { tv_sec: seconds, tv_nsec: random.random_range(0..1_000_000_000) };
        let times = Timestamps { last_access: time, last_modification: time };
        utimensat(rustix::fs::CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }
}

/// All that is compared of a file.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    mode: u32,
    owner: (u32, u32),
    /// Rounded to the step.
    time: i128,
    device: u64,
    /// The first path of the same file.
    same_as: PathBuf,
    contents: Option<u32>,
    len: u64,
    target: Option<PathBuf>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// What lies below a directory, by path; `.` is the directory itself.
fn look(root: &Path, can: Can) -> BTreeMap<PathBuf, Seen> {
    let mut seen = BTreeMap::new();
    let mut pending = vec![PathBuf::from(".")];
    let mut paths = Vec::new();
    while let Some(path) = pending.pop() {
        let full = root.join(&path);
        if fs::symlink_metadata(&full).unwrap().is_dir() {
            pending.extend(fs::read_dir(&full).unwrap().map(|entry| path.join(entry.unwrap().file_name())));
        }
        paths.push(path);
    }
    paths.sort();
    let mut firsts = BTreeMap::new();
    for path in paths {
        let full = root.join(&path);
        let meta = fs::symlink_metadata(&full).unwrap();
        let first = firsts.entry(meta.ino()).or_insert_with(|| path.clone()).clone();
        let kind = meta.file_type();
        let time = i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec());
        let is_device = kind.is_block_device() || kind.is_char_device();
        seen.insert(
            path.clone(),
            Seen {
                mode: if can.owners { meta.mode() } else { meta.mode() & 0o170_000 },
                owner: if can.owners { (meta.uid(), meta.gid()) } else { (0, 0) },
                time: if path == Path::new(".") && !can.owners {
                    0
                } else {
                    time.div_euclid(can.step.into())
                },
                device: if is_device { meta.rdev() } else { 0 },
                same_as: if can.hard { first } else { path },
                contents: kind.is_file().then(|| becket_testkit::crc_whole(&full).0),
                len: if kind.is_file() { meta.len() } else { 0 },
                target: kind.is_symlink().then(|| fs::read_link(&full).unwrap()),
                xattrs: if can.xattrs { xattrs(&full) } else { Vec::new() },
            },
        );
    }
    seen
}

fn xattrs(path: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut names = [0_u8; 4096];
    let len = llistxattr(path, &mut names).unwrap();
    let mut all = Vec::new();
    for name in names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let mut value = [0_u8; 4096];
        let len = lgetxattr(path, name, &mut value).unwrap();
        all.push((name.to_vec(), value[..len].to_vec()));
    }
    all.sort();
    all
}

#[track_caller]
fn assert_same(one: &BTreeMap<PathBuf, Seen>, other: &BTreeMap<PathBuf, Seen>, what: &str) {
    let names = |tree: &BTreeMap<PathBuf, Seen>| tree.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(one), names(other), "{what}");
    for (path, seen) in one {
        assert_eq!(seen, &other[path], "{what}: {}", path.display());
    }
}

/// Takes a tree out of an image in all ways, and compares it with what went in.
fn compare(place: &Scratch, name: &str, tree: &Path, can: Can) {
    let before = look(tree, can);
    let (out, tar) = (place.path(&format!("out-{name}")), place.path(&format!("tar-{name}")));
    fs::create_dir(&out).unwrap();
    // lost+found is mkfs's.
    let ran = place.run(["cp", "-rp", &format!("{name}/."), out.to_str().unwrap()]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{name}");
    let _ = fs::remove_dir(out.join("lost+found"));
    // The directory that was there stays as it was.
    let as_in = |at: &Path| {
        let meta = fs::metadata(tree).unwrap();
        std::os::unix::fs::chown(at, Some(meta.uid()), Some(meta.gid())).unwrap();
        fs::set_permissions(at, meta.permissions()).unwrap();
        let mut seen = look(at, can);
        seen.remove(Path::new("."));
        seen
    };
    let mut before_inside = before;
    before_inside.remove(Path::new("."));
    assert_same(&before_inside, &as_in(&out), name);

    let archive = place.path(&format!("{name}.tar"));
    let shell = format!("\"$BECKET\" cp -r --tar - {name}/. > {}", archive.display());
    let mut command = Command::new("sh");
    place.prepare(&mut command);
    let ran = place.finish(command.env("BECKET", env!("CARGO_BIN_EXE_becket")).args(["-c", &shell]));
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{name}");
    fs::create_dir(&tar).unwrap();
    let mut untar = Command::new("tar");
    untar.args(["-xpf"]).arg(&archive).arg("-C").arg(&tar).args(["--numeric-owner", "--xattrs"]);
    tool(untar.arg("--xattrs-include=*"));
    let _ = fs::remove_dir(tar.join("lost+found"));
    assert_same(&before_inside, &as_in(&tar), &format!("{name} by tar"));

    let mut holes = 0;
    for (path, seen) in &before_inside {
        if seen.contents.is_none() {
            continue;
        }
        let mut inside = OsString::from(format!("{name}/"));
        inside.push(path.strip_prefix(".").unwrap());
        let output = place.becket().current_dir(place.path("")).arg("cat").arg(inside).output().unwrap();
        assert!(output.status.success(), "{name}: {}: {output:?}", path.display());
        assert!(output.stdout == fs::read(tree.join(path)).unwrap(), "{name}: {}", path.display());
        if seen.len == 3 << 20 && can.holes {
            holes += 1;
            for copy in [&out, &tar] {
                let blocks = fs::metadata(copy.join(path)).unwrap().blocks();
                assert!(blocks < 1024, "{name}: {} has {blocks} sectors", path.display());
            }
        }
    }
    assert!(!can.holes || holes > 0, "no file has holes");
}

fn planted(name: &str, can: Can, tools: &[&str], seed: u64) -> Option<(Scratch, PathBuf)> {
    if !require_root(name) || !require_plain_machine(name, tools) {
        return None;
    }
    let place = scratch();
    let tree = place.path("tree");
    plant(&tree, seed, can);
    Some((place, tree))
}

#[test]
fn out_of_ext4_comes_what_went_in() {
    let name = "take_out::out_of_ext4_comes_what_went_in";
    let can = Can { step: 1_000_000_000, ..ALL };
    let Some((place, tree)) = planted(name, can, &["mke2fs", "tar"], 1) else { return };
    // Attributes behind the inode or in a block; blocks in lists, without room for times after 2038.
    for (name, options) in [
        ("a.ext4", &["-t", "ext4"][..]),
        ("b.ext4", &["-t", "ext4", "-I", "1024"]),
        ("c.ext2", &["-t", "ext2"]),
    ] {
        let mut mkfs = Command::new("mke2fs");
        mkfs.arg("-q").args(options).arg("-d").arg(&tree).arg(place.path(name)).arg("64M");
        tool(&mut mkfs);
        compare(&place, name, &tree, can);
    }
}

#[test]
fn out_of_squashfs_comes_what_went_in() {
    let name = "take_out::out_of_squashfs_comes_what_went_in";
    let can = Can { step: 1_000_000_000, old: false, ..ALL };
    let Some((place, tree)) = planted(name, can, &["mksquashfs", "tar"], 2) else { return };
    for (name, codec) in [("a.squashfs", "gzip"), ("b.squashfs", "zstd")] {
        let mut mksquashfs = Command::new("mksquashfs");
        mksquashfs.arg(&tree).arg(place.path(name)).args(["-quiet", "-no-progress", "-comp", codec]);
        tool(&mut mksquashfs);
        compare(&place, name, &tree, can);
    }
}

#[test]
fn out_of_erofs_comes_what_went_in() {
    let name = "take_out::out_of_erofs_comes_what_went_in";
    let can = Can { holes: false, ..ALL };
    let Some((place, tree)) = planted(name, can, &["mkfs.erofs", "tar"], 3) else { return };
    // Attributes are shared by files or stand with one; files lie in chunks.
    for (name, options, can) in [
        ("a.erofs", &["-x1"][..], can),
        ("b.erofs", &["--chunksize=4096", "-x100"], can),
        ("c.erofs", &["-x-1"], Can { xattrs: false, ..can }),
    ] {
        tool(Command::new("mkfs.erofs").args(options).arg(place.path(name)).arg(&tree));
        compare(&place, name, &tree, can);
    }
}

#[test]
fn out_of_iso9660_comes_what_went_in() {
    let name = "take_out::out_of_iso9660_comes_what_went_in";
    let can = Can { step: 1_000_000_000, hard: false, xattrs: false, holes: false, ..ALL };
    let Some((place, tree)) = planted(name, can, &["genisoimage", "tar"], 4) else { return };
    let mut iso = Command::new("genisoimage");
    tool(iso.args(["-quiet", "-R", "-D", "-o"]).arg(place.path("a.iso")).arg(&tree).env("TZ", "UTC"));
    compare(&place, "a.iso", &tree, can);
}

#[test]
fn out_of_fat_comes_what_went_in() {
    let name = "take_out::out_of_fat_comes_what_went_in";
    let can = Can {
        links: false,
        hard: false,
        owners: false,
        xattrs: false,
        odd_names: false,
        old: false,
        step: 2_000_000_000,
        holes: false,
    };
    let Some((place, tree)) = planted(name, can, &["mkfs.vfat", "mcopy", "tar"], 5) else { return };
    for (name, width) in [("a.fat", "16"), ("b.fat", "32")] {
        image::sparse(&place.path(name), 64 << 20);
        tool(Command::new("mkfs.vfat").args(["-F", width]).arg(place.path(name)));
        let mut copy = Command::new("mcopy");
        copy.args(["-s", "-m", "-i"]).arg(place.path(name)).env("TZ", "UTC");
        copy.args(fs::read_dir(&tree).unwrap().map(|entry| entry.unwrap().path()));
        tool(copy.arg("::"));
        compare(&place, name, &tree, can);
    }
}

#[test]
fn a_path_that_no_name_can_say_is_not_asked_for() {
    let place = scratch();
    let words = OsString::from_vec(b"nothing/\xff*".to_vec());
    let ran = place.run([OsString::from("cat"), words]);
    assert_eq!(ran.code, 1, "{ran:?}");
}
