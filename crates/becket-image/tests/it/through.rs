//! Paths that go through images: where they lead, and where they must not.
//! It never needs a device.

use std::fs;
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::Path;
use std::process::Command;

use becket_image::{End, Error, ErrorKind, Format, OpenOptions};
use becket_testkit::image::random_bytes;
use becket_testkit::{require_plain_machine, tool};

use crate::common::{dir, file, look, open};

/// Puts an MBR with these partitions into a file: number, first sector, sectors.
fn mbr(path: &Path, partitions: &[(u64, u32, u32)]) {
    let disk = fs::OpenOptions::new().write(true).open(path).unwrap();
    disk.write_all_at(&[0x55, 0xaa], 510).unwrap();
    for (number, first, sectors) in partitions {
        let mut entry = [0; 16];
        entry[4] = 0x83;
        entry[8..12].copy_from_slice(&first.to_le_bytes());
        entry[12..].copy_from_slice(&sectors.to_le_bytes());
        disk.write_all_at(&entry, 446 + 16 * (number - 1)).unwrap();
    }
}

#[track_caller]
fn refused(path: impl AsRef<Path>, words: &[&str]) {
    let error = look(path.as_ref(), Format::Auto, &[]).unwrap_err().to_string();
    for word in words {
        assert!(error.contains(word), "no {word:?} in {error}");
    }
}

#[test]
fn links_stay_inside_their_image() {
    if !require_plain_machine("through::links_stay_inside_their_image", &["mke2fs"]) {
        return;
    }
    let dir = dir();
    let root = dir.path().join("tree");
    fs::create_dir_all(root.join("a/b")).unwrap();
    fs::write(root.join("a/b/file.img"), random_bytes(8192, 1)).unwrap();
    for (link, target) in [
        ("absolute", "/a/b"),
        ("up", "../../../../a"),
        ("a/chain", "../absolute/./file.img"),
        ("outside", "/etc/passwd"),
        ("one", "other"),
        ("other", "one"),
        ("through", "a/b/file.img/inside"),
    ] {
        symlink(target, root.join(link)).unwrap();
    }
    let image = file(dir.path(), "root.ext4", 4 << 20);
    tool(Command::new("/usr/sbin/mke2fs").args(["-q", "-F", "-t", "ext4", "-d"]).args([&root, &image]));
    for path in ["a/b/file.img", "absolute/file.img", "up/b/file.img", "a/chain", "a/../../a/b/file.img"] {
        let walk = look(&image.join(path), Format::Auto, &[]).unwrap();
        assert_eq!((walk.levels.len(), walk.end), (2, End::Image), "{path}");
        let bytes = walk.last().unwrap().image.read_vec(0, 8192).unwrap();
        assert!(bytes == random_bytes(8192, 1), "{path}");
    }
    assert!(matches!(look(&image.join("absolute"), Format::Auto, &[]).unwrap().end, End::Directory(_)));
    refused(
        image.join("outside"),
        &["link \"outside\" in its ext4 leads to \"/etc/passwd\", which is not in it"],
    );
    let outside = look(&image.join("outside"), Format::Auto, &[]).unwrap_err();
    assert_eq!(outside.kind(), ErrorKind::NotFound);
    assert_eq!(
        outside.hint().unwrap(),
        format!("see where the links lead: becket ls -l {}", image.display())
    );
    refused(image.join("one"), &["too many symbolic links"]);
    refused(image.join("through"), &["leads through a file"]);
    assert!(
        matches!(look(&image.join("a/none"), Format::Auto, &[]), Err(Error::Missing { missing, entries, .. })
        if missing == "a/none" && entries == ["b", "chain"])
    );
}

#[test]
fn a_disk_that_holds_itself_is_refused_in_time() {
    let dir = dir();
    let disk = file(dir.path(), "disk.img", 1 << 20);
    mbr(&disk, &[(1, 0, 2048)]);
    let inside = |depth: usize| (0..depth).fold(disk.clone(), |path, _| path.join("p1"));
    assert_eq!(look(&inside(16), Format::Auto, &[]).unwrap().levels.len(), 17);
    refused(inside(17), &["more than 16 images inside each other"]);
    let walk = look(&disk, Format::Auto, &[]).unwrap();
    let report = becket_image::inspect(&walk.last().unwrap().image, "disk.img", Format::Auto);
    assert_eq!(report.children.len(), 1);
    assert!(report.children[0].children.is_empty() && report.children[0].problems.is_empty(), "{report:?}");
}

#[test]
fn what_is_left_of_an_older_file_system_hides_no_partition() {
    let dir = dir();
    let disk = file(dir.path(), "disk.img", 1 << 20);
    mbr(&disk, &[(2, 64, 128)]);
    // The magic of ext, with nothing else that would make sense.
    fs::OpenOptions::new().write(true).open(&disk).unwrap().write_all_at(&[0x53, 0xef], 1024 + 56).unwrap();
    let opened = open(&disk.join("p2")).unwrap();
    assert_eq!(opened.map.single_range(), Some((0, 64 * 512, 128 * 512)));
    assert!(opened.nested && !opened.read_only);
    assert_eq!(opened.path, fs::canonicalize(&disk).unwrap().join("p2"));
    refused(disk.join("p1"), &["no entry \"p1\"", "there is: p2"]);
}

#[test]
fn a_bootable_iso_has_files_and_partitions() {
    if !require_plain_machine("through::a_bootable_iso_has_files_and_partitions", &["genisoimage"]) {
        return;
    }
    let dir = dir();
    let root = dir.path().join("tree");
    fs::create_dir(&root).unwrap();
    fs::write(root.join("p2"), "a file of that name").unwrap();
    fs::write(root.join("efi.img"), random_bytes(4096, 2)).unwrap();
    let iso = dir.path().join("boot.iso");
    tool(Command::new("genisoimage").args(["-quiet", "-R", "-o"]).args([&iso, &root]));
    mbr(&iso, &[(1, 0, 128), (2, 64, 16)]);
    let len = |path: &str| look(&iso.join(path), Format::Auto, &[]).unwrap().last().unwrap().image.len();
    assert_eq!(len("efi.img"), 4096);
    assert_eq!(len("p1"), 128 * 512);
    assert_eq!(len("p2"), 19, "its files come first");
    let all = OpenOptions { read_only: true, format: Format::Disk, ..OpenOptions::default() };
    assert_eq!(becket_image::open(&iso.join("p2"), &all).unwrap().map.len(), 16 * 512);
}

#[test]
fn a_label_that_two_partitions_have_is_refused() {
    if !require_plain_machine("through::a_label_that_two_partitions_have_is_refused", &["mke2fs"]) {
        return;
    }
    let dir = dir();
    let disk = file(dir.path(), "disk.img", 4 << 20);
    mbr(&disk, &[(1, 2048, 2048), (2, 4096, 2048), (3, 6144, 1024)]);
    let target = fs::OpenOptions::new().write(true).open(&disk).unwrap();
    for (number, label) in [(1, "same"), (2, "same"), (3, "own")] {
        let part = file(dir.path(), "part", if number == 3 { 512 << 10 } else { 1 << 20 });
        tool(Command::new("/usr/sbin/mke2fs").args(["-q", "-F", "-t", "ext2", "-L", label]).arg(&part));
        target.write_all_at(&fs::read(&part).unwrap(), number * (1 << 20)).unwrap();
    }
    let found = open(&disk.join("by-label/own")).unwrap();
    assert_eq!(found.map.single_range(), Some((0, 3 << 20, 512 << 10)));
    // Its lock is the whole file's.
    drop(found);
    let error = open(&disk.join("by-label/same")).unwrap_err();
    assert!(error.to_string().ends_with("disk.img: by-label/same is partition 1 and partition 2"), "{error}");
    assert_eq!(error.hint().unwrap(), "name it by its number: p1 or p2");
    refused(disk.join("by-label/none"), &["by-label/none", "same, same, own"]);
    let uuid = look(&disk.join("p3"), Format::Auto, &[]).unwrap();
    let about = becket_image::inspect(&uuid.last().unwrap().image, "", Format::Auto).about;
    let found = open(&disk.join("by-uuid").join(about.uuid.unwrap().to_uppercase())).unwrap();
    assert_eq!(found.map.single_range(), Some((0, 3 << 20, 512 << 10)));
}
