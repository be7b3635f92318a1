//! Images built to cause trouble: directories and chains that contain themselves, partitions that share
//! bytes, images that are cut inside images. (Random damage is in `damage`, chains of files in `qcow2`.)
//! It never needs a device.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use becket_image::{End, ErrorKind, Format};
use becket_testkit::image::random_bytes;
use becket_testkit::{patience, require_plain_machine, tool};

use crate::common::{dir, file, look, open};

const PATIENCE: Duration = Duration::from_secs(20);

/// What a file inside images holds, or that it cannot be had; in time.
fn content(path: &Path, len: usize) -> Option<Vec<u8>> {
    let started = Instant::now();
    let walk = look(path, Format::Auto, &[]).ok().filter(|walk| walk.end == End::Image);
    let bytes = walk.and_then(|walk| walk.last().ok()?.image.read_some(0, len).ok());
    assert!(started.elapsed() < patience(PATIENCE), "{}: {:?}", path.display(), started.elapsed());
    bytes.map(|bytes| bytes.to_vec())
}

#[test]
fn a_directory_that_holds_itself_is_walked_as_far_as_the_path_says() {
    let name = "hostile::a_directory_that_holds_itself_is_walked_as_far_as_the_path_says";
    if !require_plain_machine(name, &["mke2fs", "debugfs"]) {
        return;
    }
    let dir = dir();
    let root = dir.path().join("tree");
    fs::create_dir_all(root.join("a/b")).unwrap();
    fs::write(root.join("a/b/file.img"), random_bytes(8192, 1)).unwrap();
    let image = file(dir.path(), "loop.ext4", 4 << 20);
    tool(Command::new("/usr/sbin/mke2fs").args(["-q", "-F", "-t", "ext4", "-d"]).args([&root, &image]));
    tool(Command::new("/usr/sbin/debugfs").args(["-w", "-R", "link /a /a/b/again"]).arg(&image));
    for rounds in [0, 1, 500] {
        let path = (0..rounds).fold(image.join("a/b"), |path, _| path.join("again/b"));
        assert!(
            content(&path.join("file.img"), 8192) == Some(random_bytes(8192, 1)),
            "{rounds} times around"
        );
        let walk = look(&path.join("again"), Format::Auto, &[]).unwrap();
        assert!(matches!(walk.end, End::Directory(_)), "{rounds} times around");
    }
    let started = Instant::now();
    let walk = look(&image, Format::Auto, &[]).unwrap();
    becket_image::inspect(&walk.last().unwrap().image, "loop.ext4", Format::Auto);
    assert!(started.elapsed() < patience(PATIENCE));
}

#[test]
fn a_chain_of_clusters_that_holds_itself_ends() {
    let name = "hostile::a_chain_of_clusters_that_holds_itself_ends";
    if !require_plain_machine(name, &["mkfs.vfat", "mmd", "mcopy"]) {
        return;
    }
    let dir = dir();
    let image = file(dir.path(), "fat", 16 << 20);
    tool(Command::new("/usr/sbin/mkfs.vfat").args(["-F", "16", "-s", "4"]).arg(&image));
    let bytes = random_bytes(10_000, 3);
    fs::write(dir.path().join("file.img"), &bytes).unwrap();
    let mtool = |words: &[&str]| {
        tool(Command::new(words[0]).current_dir(dir.path()).args(["-i", "fat"]).args(&words[1..]));
    };
    // The directory gets the first cluster, which is number 2, and the file the five behind it.
    mtool(&["mmd", "::/d"]);
    mtool(&["mcopy", "file.img", "::/file.img"]);
    assert!(content(&image.join("file.img"), bytes.len()).as_ref() == Some(&bytes));
    refused(&image.join("d/none"), "no entry \"d/none\"");
    let disk = fs::OpenOptions::new().read(true).write(true).open(&image).unwrap();
    let mut reserved = [0; 2];
    disk.read_exact_at(&mut reserved, 14).unwrap();
    let entry = |cluster: u64| u64::from(u16::from_le_bytes(reserved)) * 512 + cluster * 2;
    let mut next = [0; 2];
    for (cluster, wanted) in [(2, 0xffff_u16), (3, 4), (4, 5), (5, 6), (6, 7), (7, 0xffff)] {
        disk.read_exact_at(&mut next, entry(cluster)).unwrap();
        // Whatever ends a chain.
        assert_eq!(u16::from_le_bytes(next) | if wanted == 0xffff { 7 } else { 0 }, wanted, "{cluster}");
    }
    disk.write_all_at(&3_u16.to_le_bytes(), entry(5)).unwrap();
    // Its length ends the file; the loop in its chain yields the same bytes again.
    let found = content(&image.join("file.img"), bytes.len()).unwrap();
    assert!(found[..3 * 2048] == bytes[..3 * 2048] && found[3 * 2048..] == bytes[..bytes.len() - 3 * 2048]);
    disk.write_all_at(&2_u16.to_le_bytes(), entry(2)).unwrap();
    let started = Instant::now();
    assert!(look(&image.join("d/none"), Format::Auto, &[]).is_err());
    assert!(started.elapsed() < patience(PATIENCE));
}

#[track_caller]
fn refused(path: &Path, words: &str) {
    let error = look(path, Format::Auto, &[]).unwrap_err().to_string();
    assert!(error.contains(words), "no {words:?} in {error}");
}

#[test]
fn partitions_that_share_bytes_are_read_and_not_written_side_by_side() {
    let dir = dir();
    let disk = file(dir.path(), "disk.img", 1 << 20);
    let bytes = random_bytes(1 << 20, 4);
    let host = fs::OpenOptions::new().write(true).open(&disk).unwrap();
    host.write_all_at(&bytes[4096..], 4096).unwrap();
    host.write_all_at(&[0x55, 0xaa], 510).unwrap();
    for (number, first, sectors) in [(1_u64, 64_u32, 512_u32), (2, 256, 512), (3, 1024, 64)] {
        let mut entry = [0; 16];
        entry[4] = 0x83;
        entry[8..12].copy_from_slice(&first.to_le_bytes());
        entry[12..].copy_from_slice(&sectors.to_le_bytes());
        host.write_all_at(&entry, 446 + 16 * (number - 1)).unwrap();
    }
    let part = |number: u32| disk.join(format!("p{number}"));
    assert!(content(&part(1), 512 * 512).unwrap() == bytes[64 * 512..576 * 512]);
    assert!(content(&part(2), 512 * 512).unwrap() == bytes[256 * 512..768 * 512]);
    let first = open(&part(1)).unwrap();
    assert!(!first.read_only);
    assert_eq!(open(&part(2)).unwrap_err().kind(), ErrorKind::InUse, "it would be written by two");
    let third = open(&part(3)).unwrap();
    assert!(!third.read_only, "which shares nothing");
    drop(first);
    open(&part(2)).unwrap();
}

/// `outer.iso/squash.img/inner.ext4/file.img`, one of which was cut before it was packed: to this many of 32
/// parts.
fn nested(dir: &Path, cut: Option<(&str, u64)>) -> PathBuf {
    let shorten = |name: &str| {
        let path = dir.join(name);
        if let Some((_, part)) = cut.filter(|(cut, _)| *cut == name) {
            let len = fs::metadata(&path).unwrap().len();
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(len * part / 32).unwrap();
        }
        path
    };
    for name in ["inner.ext4", "squash.img", "outer.iso"] {
        let _ = fs::remove_file(dir.join(name));
    }
    let inner = file(dir, "inner.ext4", 1 << 20);
    tool(
        Command::new("/usr/sbin/mke2fs")
            .args(["-q", "-F", "-t", "ext2", "-d"])
            .args([&dir.join("tree"), &inner]),
    );
    let inner = shorten("inner.ext4");
    let squash = dir.join("squash.img");
    tool(Command::new("mksquashfs").args([&inner, &squash]).args(["-noappend", "-quiet", "-no-progress"]));
    let squash = shorten("squash.img");
    tool(Command::new("genisoimage").args(["-quiet", "-R", "-o"]).args([dir.join("outer.iso"), squash]));
    shorten("outer.iso").join("squash.img/inner.ext4/file.img")
}

#[test]
fn what_is_cut_at_any_level_is_an_error_or_whole() {
    let name = "hostile::what_is_cut_at_any_level_is_an_error_or_whole";
    if !require_plain_machine(name, &["mke2fs", "mksquashfs", "genisoimage"]) {
        return;
    }
    let dir = dir();
    let bytes = random_bytes(300_000, 5);
    fs::create_dir(dir.path().join("tree")).unwrap();
    fs::write(dir.path().join("tree/file.img"), &bytes).unwrap();
    assert!(content(&nested(dir.path(), None), bytes.len()).as_ref() == Some(&bytes), "uncut");
    for level in ["inner.ext4", "squash.img", "outer.iso"] {
        let mut errors = 0;
        for part in [0, 1, 2, 5, 11, 16, 23, 30, 31] {
            let found = content(&nested(dir.path(), Some((level, part))), bytes.len());
            errors += u32::from(found.is_none());
            assert!(found.is_none_or(|found| found == bytes), "{level} cut to {part} of 32 parts");
        }
        // Behind the file there may be nothing that is wanted.
        assert!(errors >= 4, "{level}: {errors}");
    }
}
