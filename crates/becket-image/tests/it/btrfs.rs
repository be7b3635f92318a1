//! btrfs made by the kernel: random trees in subvolumes, snapshots and compressed files are what it shows.
//! It never takes becket's own word for what a file system holds, and leaves no mount and no device behind.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;

use becket_image::Format;
use becket_testkit::image::random_bytes;
use becket_testkit::{require_plain_machine, require_root, tool};

use crate::common::{LoopDevice, Mount, dir, file, look, skip};
use crate::layers::fs_in;
use crate::trees::{self, Tree, grow, seen};

/// Trees of each kind; BECKET_BTRFS_ROUNDS asks for more.
const ROUNDS: u64 = 1;
/// The largest extended attribute, in bytes: one has to fit a node.
const ATTRIBUTE_MAX: usize = 3500;

/// Files that compress well, one of them into many extents, and pieces of them that are written again.
fn text(root: &Path, seed: u64) {
    let line = |number: u64| format!("{seed}: line {number} of a text that compresses well\n");
    for (name, lines) in [("short", 3), ("page", 90), ("long", 30_000)] {
        let text: String = (0..lines).map(line).collect();
        let file = File::create(root.join(format!("text {name}"))).unwrap();
        file.write_all_at(text.as_bytes(), 0).unwrap();
        file.sync_all().unwrap();
        if name == "long" {
            for place in 0..40 {
                file.write_all_at(&random_bytes(5000, seed + place), place * 37_000).unwrap();
            }
            tool(
                Command::new("cp")
                    .arg("--reflink=always")
                    .args([&root.join("text long"), &root.join("reflink")]),
            );
            file.write_all_at(b"changed behind the reflink", 200_000).unwrap();
        }
    }
}

/// Makes a file system, lets the kernel fill it, and compares; how many files that were.
fn compare(dir: &Path, (made, mounted): (&[&str], &str), seed: u64) -> Result<usize, String> {
    let image = file(dir, "btrfs.img", 700 << 20);
    let point = dir.join("point");
    fs::create_dir_all(&point).unwrap();
    tool(Command::new("/usr/sbin/mkfs.btrfs").args(["-q", "-f", "-L", "label"]).args(made).arg(&image));
    let mut expected = Tree::new();
    {
        let device = LoopDevice::attach(&image, &[])?;
        let _mount = Mount::new(&["-t", "btrfs", "-o", mounted, device.0.to_str().unwrap()], &point)?;
        let btrfs = |args: &[&str]| {
            tool(Command::new("/usr/bin/btrfs").arg("-q").args(args).current_dir(&point));
        };
        btrfs(&["subvolume", "create", "home"]);
        grow(&point.join("home"), seed, ATTRIBUTE_MAX);
        text(&point.join("home"), seed);
        btrfs(&["subvolume", "create", "home/below"]);
        fs::write(point.join("home/below/file"), "in a subvolume below one").unwrap();
        // There, `below` is an empty directory.
        btrfs(&["subvolume", "snapshot", "-r", "home", "snapshot"]);
        text(&point.join("home"), seed + 1);
        text(&point, seed + 2);
        rustix::fs::syncfs(File::open(&point).unwrap()).unwrap();
        seen(&point, &mut Vec::new(), &mut expected);
    }
    // The kernel makes up owner and times of the empty directory.
    let (image, fs) = fs_in(&image, Format::Btrfs);
    assert_eq!(fs.about().label.as_deref(), Some("label"));
    let below = expected.remove(&b"/snapshot/below"[..]).unwrap();
    assert!(below.0.starts_with("40755 "), "{}", below.0);
    let mut tree = Tree::new();
    trees::found(&image, fs.as_ref(), fs.root(), &mut Vec::new(), &mut tree);
    assert!(tree.remove(&b"/snapshot/below"[..]).is_some());
    trees::same(&tree, &expected, &format!("{made:?}, {mounted}, seed {seed}"));
    Ok(expected.len())
}

#[test]
fn random_trees_are_what_the_kernel_shows() {
    let name = "btrfs::random_trees_are_what_the_kernel_shows";
    if !require_root(name) || !require_plain_machine(name, &["mkfs.btrfs", "btrfs"]) {
        return;
    }
    let rounds = std::env::var("BECKET_BTRFS_ROUNDS").ok().map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    let dir = dir();
    let (mut compared, mut trees) = (0, 0);
    for seed in 0..rounds {
        for (number, kind) in [
            (&[][..], "compress=zstd"),
            (&["-M", "-n", "4096"], "compress=zlib"),
            (&["--csum", "sha256", "-O", "^no-holes", "-n", "65536"], "max_inline=0"),
            (&["--csum", "xxhash", "-d", "dup"], "compress-force=zstd"),
            (&[], "compress=lzo"),
        ]
        .into_iter()
        .enumerate()
        {
            match compare(dir.path(), kind, seed * 100 + number as u64) {
                Ok(files) => {
                    compared += files;
                    trees += 1;
                }
                // A kernel without btrfs.
                Err(reason) => return skip(name, &reason),
            }
        }
    }
    assert!(compared > trees * 6000, "{compared} files of {trees} trees");
    eprintln!("{trees} trees, {compared} files compared, 0 differences");
}

/// The kernel compresses what a file has at that moment. If the file is longer when its size is written down,
/// the last block of its extent yields less than it has room for.
#[test]
fn an_extent_that_yields_less_than_its_blocks_ends_in_zeroes() {
    let name = "btrfs::an_extent_that_yields_less_than_its_blocks_ends_in_zeroes";
    if !require_root(name) || !require_plain_machine(name, &["mkfs.btrfs"]) {
        return;
    }
    const SIZE: u64 = 9040;
    let blocks = SIZE.next_multiple_of(4096);
    let dir = dir();
    let point = dir.path().join("point");
    fs::create_dir(&point).unwrap();
    let text: Vec<u8> = (0..SIZE).map(|at| b'a' + (at / 100 % 26) as u8).collect();
    for method in ["zlib", "lzo", "zstd"] {
        let image = file(dir.path(), "btrfs.img", 300 << 20);
        // Its checksums are not verified, so that a size can be changed.
        tool(Command::new("/usr/sbin/mkfs.btrfs").args(["-q", "-f", "--csum", "xxhash"]).arg(&image));
        {
            let device = match LoopDevice::attach(&image, &[]) {
                Ok(device) => device,
                Err(reason) => return skip(name, &reason),
            };
            let options = format!("compress-force={method}");
            let mounted = Mount::new(&["-t", "btrfs", "-o", &options, device.0.to_str().unwrap()], &point);
            let Ok(_mount) = mounted else { return skip(name, "this kernel has no btrfs") };
            fs::write(point.join("file"), &text).unwrap();
        }
        // In an inode the size stands before the bytes of its blocks.
        let sizes = [SIZE.to_le_bytes(), blocks.to_le_bytes()].concat();
        let (mut bytes, mut changed) = (fs::read(&image).unwrap(), 0);
        while let Some(at) = bytes.windows(sizes.len()).position(|found| found == sizes) {
            bytes[at..at + 8].copy_from_slice(&blocks.to_le_bytes());
            changed += 1;
        }
        assert!(changed > 0, "{method}");
        fs::write(&image, &bytes).unwrap();
        let (image, fs) = fs_in(&image, Format::Btrfs);
        let node = crate::layers::find(fs.as_ref(), b"file");
        let file = image.compose(fs.lay_out(node).unwrap()).unwrap();
        let found: Vec<String> = file.encoded().map(|layer| layer.codec().to_string()).collect();
        assert_eq!(found, [if method == "zlib" { "gzip" } else { method }]);
        let zeroes = vec![0; (blocks - SIZE) as usize];
        assert!(file.read_vec(0, blocks as usize).unwrap() == [&text[..], &zeroes].concat(), "{method}");
    }
}

#[test]
fn a_path_goes_through_it_and_nothing_is_written() {
    let name = "btrfs::a_path_goes_through_it_and_nothing_is_written";
    if !require_plain_machine(name, &["mkfs.btrfs"]) {
        return;
    }
    let dir = dir();
    let at = dir.path();
    fs::create_dir_all(at.join("tree/sub")).unwrap();
    fs::write(at.join("tree/sub/inner.img"), random_bytes(300_000, 8)).unwrap();
    std::os::unix::fs::symlink("inner.img", at.join("tree/sub/link")).unwrap();
    let image = file(at, "btrfs.img", 200 << 20);
    tool(Command::new("/usr/sbin/mkfs.btrfs").args(["-q", "--rootdir"]).args([&at.join("tree"), &image]));
    let uuid = tool(Command::new("/usr/sbin/blkid").args(["-p", "-o", "value", "-s", "UUID"]).arg(&image));
    let (_, fs) = fs_in(&image, Format::Btrfs);
    assert_eq!(fs.about().uuid.as_deref(), Some(uuid.trim()));
    for inside in ["sub/inner.img", "sub/link"] {
        let walk = look(&image.join(inside), Format::Auto, &[]).unwrap();
        let bytes = walk.last().unwrap().image.read_vec(0, 300_000).unwrap();
        assert!(bytes == random_bytes(300_000, 8), "{inside}");
        assert_eq!(walk.read_only.as_deref(), Some("becket only reads files in btrfs"));
    }
    // A wrong checksum is damage, wherever it is.
    let broken = File::options().write(true).open(&image).unwrap();
    broken.write_all_at(b"x", (64 << 10) + 400).unwrap();
    let error = look(&image.join("sub"), Format::Auto, &[]).unwrap_err().to_string();
    assert!(error.contains("the checksum of the btrfs superblock is wrong"), "{error}");
}

#[test]
fn a_part_of_several_devices_is_refused_where_it_is_not_whole() {
    let name = "btrfs::a_part_of_several_devices_is_refused_where_it_is_not_whole";
    if !require_root(name) || !require_plain_machine(name, &["mkfs.btrfs"]) {
        return;
    }
    let dir = dir();
    let at = dir.path();
    let pair = ["one.img", "two.img"].map(|name| file(at, name, 400 << 20));
    let point = at.join("point");
    fs::create_dir_all(&point).unwrap();
    for (profile, whole) in [("raid1", true), ("raid0", false)] {
        let mut mkfs = Command::new("/usr/sbin/mkfs.btrfs");
        tool(mkfs.args(["-q", "-f", "-m", "raid1", "-d", profile]).args(&pair));
        {
            let devices = match pair.each_ref().map(|image| LoopDevice::attach(image, &[])) {
                [Ok(one), Ok(two)] => [one, two],
                [Err(reason), _] | [_, Err(reason)] => return skip(name, &reason),
            };
            let [one, two] = devices.each_ref().map(|device| device.0.to_str().unwrap());
            let _mount = match Mount::new(&["-t", "btrfs", "-o", &format!("device={two}"), one], &point) {
                Ok(mount) => mount,
                Err(reason) => return skip(name, &reason),
            };
            fs::write(point.join("file"), random_bytes(300_000, 8)).unwrap();
        }
        for image in &pair {
            let read = look(&image.join("file"), Format::Auto, &[]);
            if whole {
                let bytes = read.unwrap().last().unwrap().image.read_vec(0, 300_000).unwrap();
                assert!(bytes == random_bytes(300_000, 8), "each has a copy");
            } else {
                let error = read.unwrap_err().to_string();
                assert!(error.contains("a btrfs on several devices: attach them all"), "{error}");
            }
        }
    }
}
