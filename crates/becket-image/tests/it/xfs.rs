//! XFS made by the kernel: random trees through becket's maps are what the mounted file system shows.
//! It never takes becket's own word for what a file system holds, and leaves no mount and no device behind.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;

use becket_image::Format;
use becket_testkit::image::random_bytes;
use becket_testkit::{require_plain_machine, require_root, tool};
use rustix::fs::XattrFlags;

use crate::common::{LoopDevice, Mount, dir, file, look, skip};
use crate::layers::fs_in;
use crate::trees::{self, Tree, found, grow, seen};

/// Trees of each kind; BECKET_XFS_ROUNDS asks for more.
const ROUNDS: u64 = 1;
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
        grow(&point, seed, 20_000);
        access_lists(&point);
        rustix::fs::syncfs(File::open(&point).unwrap()).unwrap();
        seen(&point, &mut Vec::new(), &mut expected);
    }
    let (image, fs) = fs_in(&image, Format::Xfs);
    assert_eq!(fs.about().label.as_deref(), Some("label"));
    Ok(trees::compare((&image, fs.as_ref()), &expected, &format!("{options:?}, seed {seed}")))
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
