//! qcow2 images that a write could damage: bitmaps, tables that overlap with data, clusters that a crash has
//! leaked.
//! In the spirit of QEMU's test 060: bytes of images that qemu-img has made are changed, and nothing may be
//! destroyed.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use becket_image::{Grow as _, Grower, Image, OpenOptions, Opened, Source, Wanted};
use becket_testkit::{require_plain_machine, tool};

use crate::common::{dir, open, source_of};

const COPIED: u64 = 1 << 63;
const CLUSTER: u64 = 64 << 10;
/// Where qemu-img puts things in the images of these tests, in clusters of 64 KiB.
const COUNTS: u64 = CLUSTER;
const BLOCK: u64 = 2 * CLUSTER;
const L1: u64 = 3 * CLUSTER;
const L2: u64 = 4 * CLUSTER;
const DATA: u64 = 5 * CLUSTER;
const L2_FAR: u64 = 6 * CLUSTER;
const DATA_FAR: u64 = 7 * CLUSTER;

fn ready(name: &str) -> bool {
    require_plain_machine(&format!("qcow2_guard::{name}"), &["qemu-img", "qemu-io"])
}

fn qemu_img(dir: &Path, args: &[&str]) {
    tool(Command::new("qemu-img").current_dir(dir).args(args));
}

/// `qemu-img check`: its exit status and its words. 0 is sound, 3 is sound with leaked clusters.
fn check(image: &Path) -> (Option<i32>, String) {
    let ran = Command::new("qemu-img").args(["check", "-U"]).arg(image).output().unwrap();
    (ran.status.code(), String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned())
}

/// A disk of 1 GiB with a cluster of data in each of its two L2 tables.
fn sound(at: &Path) -> PathBuf {
    qemu_img(at, &["create", "-q", "-f", "qcow2", "sound.qcow2", "1G"]);
    let writes = ["-c", "write -P 1 0 64k", "-c", "write -P 2 600M 64k"];
    tool(Command::new("qemu-io").current_dir(at).args(["-f", "qcow2"]).args(writes).arg("sound.qcow2"));
    let path = at.join("sound.qcow2");
    let bytes = fs::read(&path).unwrap();
    let number = |at: u64| u64::from_be_bytes(bytes[at as usize..][..8].try_into().unwrap()) & !COPIED;
    // 600 MiB are 88 MiB behind the beginning of the second table's part.
    let far = number(L2_FAR + (88 << 20) / CLUSTER * 8);
    let places = [number(48), number(COUNTS), number(40), number(L1), number(L2), number(L1 + 8), far];
    let expected = [COUNTS, BLOCK, L1, L2, DATA, L2_FAR, DATA_FAR];
    assert_eq!(places, expected, "qemu-img lays images out otherwise by now");
    path
}

fn with_bitmaps(opened: &Path) -> Opened {
    becket_image::open(opened, &OpenOptions { drop_bitmaps: true, ..OpenOptions::default() }).unwrap()
}

/// The writer of an image that is open, as the worker makes it.
fn grower(opened: &Opened) -> Grower {
    let files = opened
        .sources
        .iter()
        .filter_map(Source::file)
        .map(|file| Arc::new(file.buffered.try_clone().unwrap()) as Arc<dyn becket_image::ReadAt>);
    let old = Image::assembled(opened.map.clone(), files.collect(), opened.encoded.clone()).unwrap();
    Grower::open(source_of(opened, 0).buffered.try_clone().unwrap(), None, old).unwrap()
}

/// All units that the writer says to be placed.
fn placed(grower: &mut Grower) -> Vec<(u64, u64)> {
    let mut placed = Vec::new();
    grower.placed(&mut |unit, place| placed.push((unit, place))).unwrap();
    placed
}

fn keeping(units: impl IntoIterator<Item = u64>) -> Vec<Wanted> {
    units.into_iter().map(|unit| Wanted { unit, zeroed: false }).collect()
}

#[test]
fn an_image_whose_data_lie_on_its_tables_is_not_written() {
    if !ready("an_image_whose_data_lie_on_its_tables_is_not_written") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    let path = sound(at);
    let bytes = fs::read(&path).unwrap();
    assert!(open(&path).unwrap().grows);
    let end = bytes.len() as u64;
    let alone = |place: u64| (place | COPIED).to_be_bytes();
    // In clusters of 64 KiB the length of compressed data begins at bit 54.
    let compressed = |place: u64| ((1_u64 << 62) | (3 << 54) | place).to_be_bytes();
    let marked = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        bytes[79] |= 2;
        bytes
    };
    for (what, offset, value, words) in [
        ("data on the L1 table", L2, alone(L1), "both the L1 table and data of the disk"),
        ("data on the refcount table", L2, alone(COUNTS), "both the refcount table and data"),
        ("data on a refcount block", L2, alone(BLOCK), "both data of the disk and a refcount block"),
        ("data on its own L2 table", L2, alone(L2), "both an L2 table and data"),
        ("data on another L2 table", L2, alone(L2_FAR), "L2 table"),
        ("data on other data", L2, alone(DATA_FAR), "both data of the disk and data of the disk"),
        ("data with another user on other data", L2, DATA_FAR.to_be_bytes(), "both data of the disk"),
        ("data twice in one table", L2 + 8, alone(DATA), "both data of the disk and data of the disk"),
        ("zeroes with a place on the L1 table", L2 + 8, alone(L1 | 1), "both the L1 table and data"),
        ("zeroes with a place behind the end", L2 + 8, alone(end | 1), "beyond the file's end"),
        ("zeroes with a place that begins no cluster", L2 + 8, alone((DATA + 512) | 1), "begins no cluster"),
        ("compressed data on the L1 table", L2 + 8, compressed(L1 + 512), "both the L1 table and compressed"),
        ("compressed data on data", L2 + 8, compressed(DATA + 1024), "compressed data"),
        ("compressed data across the end", L2 + 8, compressed(end - 512), "beyond the file's end"),
        ("an L2 table on the refcount table", L1, alone(COUNTS), "refcount table"),
        (
            "a refcount block on the L1 table",
            COUNTS,
            L1.to_be_bytes(),
            "both the L1 table and a refcount block",
        ),
        (
            "a refcount block on the header",
            COUNTS + 8,
            CLUSTER.to_be_bytes(),
            "both the refcount table and a refcount block",
        ),
        ("a refcount block on data", COUNTS, DATA.to_be_bytes(), "refcount block"),
        (
            "a refcount block twice",
            COUNTS + 8,
            BLOCK.to_be_bytes(),
            "both a refcount block and a refcount block",
        ),
        ("a refcount block that begins no cluster", COUNTS, (BLOCK + 512).to_be_bytes(), "begins no cluster"),
        ("a refcount block behind the end", COUNTS + 8, end.to_be_bytes(), "beyond the file's end"),
        ("the refcount table on the L1 table", 48, L1.to_be_bytes(), "the L1 table"),
    ] {
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&value, offset).unwrap();
        let patched = fs::read(&path).unwrap();
        // QEMU marks an image as corrupt where a write would change its tables.
        let marks = !["other data", "twice in one table", "compressed", "begins no cluster", "end"]
            .iter()
            .any(|other| what.contains(other));
        for (drop_bitmaps, shared) in [(false, true), (false, false), (true, false)] {
            let options = OpenOptions { drop_bitmaps, shared, ..OpenOptions::default() };
            let opened =
                becket_image::open(&path, &options).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(opened.read_only && !opened.grows && !source_of(&opened, 0).facts.writable, "{what}");
            let why = opened.read_only_reason.unwrap();
            assert!(why.contains(words) && why.contains("qemu-img check"), "{what}: {why}");
            let marks = marks && !shared;
            assert_eq!(why.contains("marked as corrupt now"), marks, "{what}: {why}");
            let expected = if marks { marked(&patched) } else { patched.clone() };
            assert!(fs::read(&path).unwrap() == expected, "{what}: {shared}");
            file.write_all_at(&patched, 0).unwrap();
        }
        file.write_all_at(&bytes, 0).unwrap();
    }
    assert!(open(&path).unwrap().grows, "and the sound image is written again");
}

/// As QEMU's test 060 asks: the mark stays until the image is repaired, and until then no program writes to
/// it.
#[test]
fn an_image_that_was_marked_as_corrupt_is_not_written_until_it_is_repaired() {
    if !ready("an_image_that_was_marked_as_corrupt_is_not_written_until_it_is_repaired") {
        return;
    }
    let dir = dir();
    let path = sound(dir.path());
    let bytes = fs::read(&path).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let write = || {
        let words = ["-f", "qcow2", "-c", "write 0 64k"];
        Command::new("qemu-io").args(words).arg(&path).output().unwrap()
    };
    for (what, offset, value, sound_again) in [
        ("a refcount block on the L1 table", COUNTS, L1, true),
        ("data on a refcount block", L2, BLOCK | COPIED, true),
        ("data on the L1 table", L2, L1 | COPIED, false),
    ] {
        file.set_len(0).unwrap();
        file.write_all_at(&bytes, 0).unwrap();
        file.write_all_at(&value.to_be_bytes(), offset).unwrap();
        // Nobody asked to write to it.
        let reader = OpenOptions { read_only: true, ..OpenOptions::default() };
        becket_image::open(&path, &reader).unwrap();
        let patched = fs::read(&path).unwrap();
        assert_eq!(patched[79], 0, "{what}");
        let why = open(&path).unwrap().read_only_reason.unwrap();
        assert!(why.contains("marked as corrupt now") && why.contains("check -r all"), "{what}: {why}");
        let marked = fs::read(&path).unwrap();
        let why = open(&path).unwrap().read_only_reason.unwrap();
        assert!(why.contains("marked as corrupt: qemu-img check -r all"), "{what}: {why}");
        assert!(fs::read(&path).unwrap() == marked, "{what}: it is marked once");
        let ran = write();
        let said = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
        assert!(said.contains("Image is corrupt; cannot be opened read/write"), "{what}: {said}");
        assert!(fs::read(&path).unwrap() == marked, "{what}");
        qemu_img(dir.path(), &["check", "-q", "-r", "all", "sound.qcow2"]);
        // QEMU allows data on a table if a write makes a copy of it. becket stays read-only without a mark.
        let opened = open(&path).unwrap();
        assert_eq!(opened.grows, sound_again, "{what}: {:?}", opened.read_only_reason);
        assert!(sound_again || opened.read_only_reason.unwrap().contains("qemu-img convert"), "{what}");
        assert_eq!(fs::read(&path).unwrap()[79], 0, "{what}");
    }
    // Version 2 has no features.
    file.set_len(0).unwrap();
    file.write_all_at(&bytes, 0).unwrap();
    qemu_img(dir.path(), &["amend", "-f", "qcow2", "-o", "compat=0.10", "sound.qcow2"]);
    file.write_all_at(&(L1 | COPIED).to_be_bytes(), L2).unwrap();
    let before = fs::read(&path).unwrap();
    assert!(open(&path).unwrap().read_only_reason.unwrap().contains("both the L1 table and data"));
    assert!(fs::read(&path).unwrap() == before);
}

/// Tables that cannot be read as tables are an error already when they are read.
#[test]
fn an_l2_table_on_other_metadata_is_refused() {
    if !ready("an_l2_table_on_other_metadata_is_refused") {
        return;
    }
    let dir = dir();
    let path = sound(dir.path());
    for place in [BLOCK, L1, DATA] {
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&(place | COPIED).to_be_bytes(), L1).unwrap();
        assert!(open(&path).map_or(true, |opened| opened.read_only), "{place}");
    }
}

#[test]
fn what_the_counts_call_free_is_not_given_to_anybody() {
    if !ready("what_the_counts_call_free_is_not_given_to_anybody") {
        return;
    }
    let dir = dir();
    let path = sound(dir.path());
    // All clusters of the file are free, says its block of reference counts.
    let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.write_all_at(&[0; 64], BLOCK).unwrap();
    let before = fs::read(&path).unwrap();
    let opened = open(&path).unwrap();
    assert!(opened.grows);
    let mut grower = grower(&opened);
    placed(&mut grower);
    for place in grower.place(&keeping(1..100)).unwrap() {
        assert!(place >= before.len() as u64, "{place} is in use");
        file.write_all_at(&[0xff; CLUSTER as usize], place).unwrap();
    }
    grower.close().unwrap();
    let after = fs::read(&path).unwrap();
    for table in [0, COUNTS, L1, DATA, L2_FAR, DATA_FAR] {
        let range = table as usize..(table + CLUSTER) as usize;
        assert!(after[range.clone()] == before[range], "what lies at {table} was changed");
    }
}

/// Attached and detached without a write, an image stays identical; what a write clears, the first write
/// clears.
#[test]
fn bitmaps_and_unknown_features_end_with_the_first_write() {
    if !ready("bitmaps_and_unknown_features_end_with_the_first_write") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    let path = sound(at);
    for name in ["b0", "b1"] {
        qemu_img(at, &["bitmap", "--add", "sound.qcow2", name]);
    }
    let info = || {
        let ran = Command::new("qemu-img").args(["info", "--output=json"]).arg(&path).output().unwrap();
        String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned()
    };
    assert!(info().contains("b1"));
    for unknown in [false, true] {
        if unknown {
            // A feature that nobody knows, beside that of the bitmaps.
            fs::OpenOptions::new().write(true).open(&path).unwrap().write_all_at(&[0x80], 88).unwrap();
        }
        let before = fs::read(&path).unwrap();
        let opened = open(&path).unwrap();
        let why = opened.read_only_reason.clone().unwrap();
        assert!(why.contains("2 persistent bitmaps") && why.contains("--drop-bitmaps"), "{why}");
        assert!(opened.read_only && opened.warnings.is_empty());
        drop(opened);
        let opened = with_bitmaps(&path);
        assert!(opened.grows && opened.read_only_reason.is_none());
        assert!(
            opened.warnings.iter().any(|warning| warning.contains("2 persistent bitmaps")),
            "{:?}",
            opened.warnings
        );
        let mut writer = grower(&opened);
        assert!(writer.is_untouched() && placed(&mut writer).is_empty());
        writer.close().unwrap();
        drop((writer, opened));
        assert!(fs::read(&path).unwrap() == before, "nothing was written");
    }
    let opened = with_bitmaps(&path);
    let mut writer = grower(&opened);
    placed(&mut writer);
    // A cluster that is there, one that is not.
    assert_eq!(writer.place(&keeping([0, 5])).unwrap()[0], DATA);
    assert!(!writer.is_untouched());
    assert_eq!(placed(&mut writer).len(), 3);
    assert_eq!(fs::read(&path).unwrap()[88..96], [0; 8]);
    writer.close().unwrap();
    drop((writer, opened));
    assert_eq!(check(&path).0, Some(0), "{}", check(&path).1);
    assert!(!info().contains("b1") && !info().contains("inconsistent"), "{}", info());
    // Nothing is left that would have to be guarded.
    assert!(open(&path).unwrap().grows);
}

/// The file of an image may end in the middle of its last cluster. Nothing is added to it before the first
/// write.
#[test]
fn a_file_that_is_cut_grows_with_the_first_write() {
    if !ready("a_file_that_is_cut_grows_with_the_first_write") {
        return;
    }
    let dir = dir();
    let path = sound(dir.path());
    let cut = fs::metadata(&path).unwrap().len() - 4096;
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(cut).unwrap();
    let opened = open(&path).unwrap();
    let mut writer = grower(&opened);
    assert!(placed(&mut writer).is_empty());
    writer.close().unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), cut);
    let mut writer = grower(&opened);
    placed(&mut writer);
    writer.place(&keeping([0])).unwrap();
    writer.close().unwrap();
    assert_eq!((fs::metadata(&path).unwrap().len(), placed(&mut writer).len()), (cut + 4096, 2));
    assert_eq!(check(&path).0, Some(0), "{}", check(&path).1);
}

/// The next writer returns what a killed writer has leaked when it closes, if it has written or serves the
/// same device.
#[test]
fn leaked_clusters_are_returned_at_the_next_clean_end() {
    if !ready("leaked_clusters_are_returned_at_the_next_clean_end") {
        return;
    }
    let dir = dir();
    let path = sound(dir.path());
    let opened = open(&path).unwrap();
    let mut writer = grower(&opened);
    placed(&mut writer);
    writer.place(&keeping([1, 2, 9000])).unwrap();
    drop(writer);
    let (status, words) = check(&path);
    assert!(status == Some(3) && words.contains("leaked clusters"), "{words}");
    // The next worker of the same device writes nothing.
    let mut writer = grower(&opened);
    assert_eq!(placed(&mut writer).len(), 5);
    writer.close().unwrap();
    drop((writer, opened));
    assert_eq!(check(&path).0, Some(0), "{}", check(&path).1);

    // The next device: nothing without a write, and all of it with one.
    let opened = open(&path).unwrap();
    let mut writer = grower(&opened);
    placed(&mut writer);
    writer.place(&keeping([3, 4])).unwrap();
    drop((writer, opened));
    let before = fs::read(&path).unwrap();
    let opened = open(&path).unwrap();
    let mut writer = grower(&opened);
    placed(&mut writer);
    writer.close().unwrap();
    assert!(fs::read(&path).unwrap() == before, "nothing was written");
    let mut writer = grower(&opened);
    placed(&mut writer);
    writer.place(&keeping([5])).unwrap();
    writer.close().unwrap();
    assert_eq!(check(&path).0, Some(0), "{}", check(&path).1);
}

/// What may own clusters that becket does not know of keeps them.
#[test]
fn clusters_of_what_is_not_known_are_left_alone() {
    if !ready("clusters_of_what_is_not_known_are_left_alone") {
        return;
    }
    let dir = dir();
    let path = sound(dir.path());
    let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    // A compatible feature, and a cluster at the end that only it knows of.
    file.write_all_at(&[0x40], 80).unwrap();
    let end = file.metadata().unwrap().len();
    file.set_len(end + CLUSTER).unwrap();
    file.write_all_at(&[0, 1], BLOCK + end / CLUSTER * 2).unwrap();
    let opened = open(&path).unwrap();
    let mut writer = grower(&opened);
    placed(&mut writer);
    writer.place(&keeping([5])).unwrap();
    writer.close().unwrap();
    let mut count = [0; 2];
    file.read_exact_at(&mut count, BLOCK + end / CLUSTER * 2).unwrap();
    assert_eq!(count, [0, 1]);
}

/// A small qcow2 in clusters of 512 bytes whose table of reference counts has so many clusters, and whose
/// file ends a little before what the table can count.
fn with_table_of(at: &Path, name: &str, clusters: u64) -> PathBuf {
    qemu_img(at, &["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", name, "1M"]);
    let path = at.join(name);
    let bytes = fs::read(&path).unwrap();
    let old = u64::from_be_bytes(bytes[48..56].try_into().unwrap());
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    // Each entry of it counts 256 clusters, by a block of them.
    file.set_len((clusters * 64 * 256 - 10) * 512).unwrap();
    let table = (bytes.len() as u64).next_multiple_of(512);
    file.write_all_at(&bytes[old as usize..][..512], table).unwrap();
    file.write_all_at(&table.to_be_bytes(), 48).unwrap();
    file.write_all_at(&u32::try_from(clusters).unwrap().to_be_bytes(), 56).unwrap();
    path
}

/// QEMU opens no image whose table of reference counts is longer than 8 MiB.
#[test]
fn the_table_of_counts_is_never_longer_than_qemu_takes() {
    if !ready("the_table_of_counts_is_never_longer_than_qemu_takes") {
        return;
    }
    let dir = dir();
    let longest = (8 << 20) / 512;
    let reads = |path: &Path| {
        let ran = Command::new("qemu-io").args(["-r", "-f", "qcow2", "-c", "read 0 1M"]).arg(path).output();
        let ran = ran.unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()));
    };
    for (name, clusters, fits) in [("near.qcow2", 10_000, true), ("full.qcow2", longest, false)] {
        let path = with_table_of(dir.path(), name, clusters);
        reads(&path);
        let opened = open(&path).unwrap();
        let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let readers: Vec<Arc<dyn becket_image::ReadAt>> = vec![Arc::new(file.try_clone().unwrap())];
        let old = Image::assembled(opened.map.clone(), readers, Vec::new()).unwrap();
        let mut writer = Grower::open(file.try_clone().unwrap().into(), None, old).unwrap();
        let head = |file: &fs::File| {
            let mut bytes = vec![0; 1 << 20];
            file.read_exact_at(&mut bytes, 0).unwrap();
            (file.metadata().unwrap().len(), bytes)
        };
        let before = head(&file);
        let placed = writer.place(&keeping([0, 1]));
        if fits {
            placed.unwrap();
        } else {
            let error = placed.unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::StorageFull, "{error}");
            assert!(error.to_string().contains("reference counts"), "{error}");
            assert!(!writer.has_lost() && head(&file) == before, "nothing was changed");
        }
        writer.close().unwrap();
        let mut count = [0; 4];
        file.read_exact_at(&mut count, 56).unwrap();
        let count = u64::from(u32::from_be_bytes(count));
        assert!(count >= clusters && count <= longest, "{name}: {count} clusters");
        assert_eq!(count > clusters, fits, "{name}");
        reads(&path);
    }
}
