//! Labels as blkid reads them, and impossible directories: the test writes the image's contents byte by byte.
//! It never needs a device.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use becket_image::layer::detect;
use becket_image::{Format, Image, LayerError, inspect};
use becket_testkit::{require_plain_machine, tool};

use crate::common::{dir, file, run};

fn image(bytes: &[u8]) -> Image {
    Image::raw(Arc::new(bytes.to_vec()), bytes.len() as u64, 512)
}

/// The label as becket and blkid have it.
#[track_caller]
fn same_label(path: &Path, bytes: &[u8], expected: Option<&str>) {
    fs::write(path, bytes).unwrap();
    let ours = detect(&image(bytes), Format::Auto).unwrap().about().label;
    assert_eq!(ours.as_deref(), expected);
    // Letters of other code pages are shown by each in its own way.
    if expected.is_none_or(str::is_ascii) {
        let theirs = run("/usr/sbin/blkid", &["-p", "-o", "export", path.to_str().unwrap()]);
        let theirs = theirs.lines().find_map(|line| line.strip_prefix("LABEL="));
        assert_eq!(theirs.map(|label| label.replace('\\', "")).as_deref(), expected, "blkid");
    }
}

#[test]
fn a_fat_has_the_label_of_its_root_directory() {
    let name = "labels::a_fat_has_the_label_of_its_root_directory";
    if !require_plain_machine(name, &["mkfs.vfat", "blkid"]) {
        return;
    }
    let dir = dir();
    let path = file(dir.path(), "fat", 4 << 20);
    tool(Command::new("/usr/sbin/mkfs.vfat").args(["-F", "12", "-n", "HELLO"]).arg(&path));
    let bytes = fs::read(&path).unwrap();
    let at = (0..bytes.len()).step_by(32).find(|at| bytes[*at..].starts_with(b"HELLO      \x08")).unwrap();
    for (place, byte, label) in [
        (11, 8, Some("HELLO")),
        (0, 0, None),
        (0, 5, Some("\u{fffd}ELLO")),
        (0, 0xe5, None),
        (11, 0x18, None),
        (26, 2, None),
    ] {
        let mut changed = bytes.clone();
        changed[at + place] = byte;
        same_label(&path, &changed, label);
    }
}

#[test]
fn an_iso_has_the_label_of_its_joliet_volume() {
    let name = "labels::an_iso_has_the_label_of_its_joliet_volume";
    if !require_plain_machine(name, &["genisoimage", "blkid"]) {
        return;
    }
    let dir = dir();
    let path = dir.path().join("iso");
    fs::create_dir(dir.path().join("tree")).unwrap();
    fs::write(dir.path().join("tree/a"), "a").unwrap();
    tool(
        Command::new("genisoimage")
            .args(["-quiet", "-J", "-V", "Primary", "-o"])
            .args([&path, &dir.path().join("tree")]),
    );
    let bytes = fs::read(&path).unwrap();
    let (primary, joliet) = (16 * 2048, 17 * 2048);
    for (text, first, expected) in [
        ("Joli", "PRIMARY", Some("Joli")),
        ("", "PRIMARY", None),
        ("abcdefghijklmnop", "ABCDEFGHIJKLMNOPQRST", Some("abcdefghijklmnopQRST")),
        ("abcdefghijklmnop", "XBCDEFGHIJKLMNOPQRST", Some("abcdefghijklmnop")),
    ] {
        let mut changed = bytes.clone();
        changed[joliet + 40..joliet + 72].fill(0);
        for (index, unit) in text.encode_utf16().enumerate() {
            changed[joliet + 40 + 2 * index..][..2].copy_from_slice(&unit.to_be_bytes());
        }
        changed[primary + 40..primary + 72].fill(b' ');
        changed[primary + 40..][..first.len()].copy_from_slice(first.as_bytes());
        same_label(&path, &changed, expected);
        let (before, after) = changed.split_at_mut(joliet);
        before[primary..].swap_with_slice(&mut after[..2048]);
        same_label(&path, &changed, expected);
    }
}

#[test]
fn a_directory_in_blocks_that_were_never_written_is_an_error() {
    let name = "labels::a_directory_in_blocks_that_were_never_written_is_an_error";
    if !require_plain_machine(name, &["mke2fs"]) {
        return;
    }
    let dir = dir();
    let path = file(dir.path(), "ext4", 4 << 20);
    tool(
        Command::new("/usr/sbin/mke2fs").args(["-q", "-F", "-t", "ext4", "-O", "^metadata_csum"]).arg(&path),
    );
    let mut bytes = fs::read(&path).unwrap();
    let list = |bytes: &[u8]| {
        let contents = detect(&image(bytes), Format::Ext).unwrap();
        let fs = contents.fs.unwrap();
        let mut names = 0;
        fs.list(fs.root(), &mut |_, _| {
            names += 1;
            ControlFlow::Continue(())
        })
        .map(|()| names)
    };
    assert_eq!(list(&bytes).unwrap(), 1, "lost+found");
    // The root directory is the only inode with this mode and an extent tree of one entry in its beginning.
    let root = (0..bytes.len() - 256)
        .step_by(128)
        .find(|at| bytes[*at..*at + 2] == [0xed, 0x41] && bytes[*at + 40..*at + 44] == [0x0a, 0xf3, 1, 0])
        .unwrap();
    bytes[root + 40 + 12 + 5] |= 0x80;
    bytes[root + 40 + 12 + 4] = 1;
    assert!(matches!(list(&bytes), Err(LayerError::Corrupt(why)) if why.contains("never written")));
}

#[test]
fn inspect_says_what_attach_warns_of() {
    let dir = dir();
    let path = crate::common::file(dir.path(), "cut.img", 1 << 20);
    let mut bytes = vec![0; 1 << 20];
    bytes[450] = 0xee;
    bytes[454] = 1;
    bytes[458] = 0xff;
    bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
    fs::write(&path, &bytes).unwrap();
    let options = becket_image::OpenOptions { partitions: true, ..Default::default() };
    let warned = becket_image::open(&path, &options).unwrap().warnings;
    assert!(warned[0].contains("the GPT that the protective MBR announces is not usable"), "{warned:?}");
    assert_eq!(inspect(&image(&bytes), "cut.img", Format::Auto).problems, warned);
}
