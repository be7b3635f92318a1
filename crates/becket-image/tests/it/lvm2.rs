//! LVM2: volumes made by its own tools lie where these say that they lie.
//! It never activates a volume, and lets LVM see no other device than the test's own.

use std::fs;
use std::ops::ControlFlow;
use std::sync::Arc;

use becket_image::layer::{FileSystem, LayerError, NodeKind, detect};
use becket_image::{Budget, Format, Image, ReadAt as _};
use becket_testkit::lvm::Lab;
use becket_testkit::require_plain_machine;

use crate::common::dir;

const MIB: u64 = 1 << 20;

/// The image of a physical volume, and what is in it.
fn look(lab: &Lab, number: usize) -> (Image, Arc<dyn FileSystem>) {
    opened(lab.bytes(number))
}

/// Where the extents of a volume lie, as LVM says: device, first and last.
fn ranges(lab: &Lab, volume: &str) -> Vec<(String, u64, u64)> {
    let lines = lab.lvm(&format!("lvs --noheadings -o seg_pe_ranges {volume}"));
    let one = |word: &str| {
        let (device, range) = word.split_once(':').unwrap();
        let (first, last) = range.split_once('-').unwrap();
        (device.to_owned(), first.parse().unwrap(), last.parse().unwrap())
    };
    lines.split_whitespace().map(one).collect()
}

fn opened(bytes: Vec<u8>) -> (Image, Arc<dyn FileSystem>) {
    let len = bytes.len() as u64;
    let image = Image::raw(Arc::new(bytes), len, 512).within(&Budget::default());
    let fs = detect(&image, Format::Auto).unwrap().fs.unwrap();
    (image, fs)
}

fn names(fs: &dyn FileSystem, dir: u64) -> Vec<(String, u64)> {
    let mut names = Vec::new();
    fs.list(dir, &mut |name, node| {
        names.push((String::from_utf8(name.to_vec()).unwrap(), node));
        ControlFlow::Continue(())
    })
    .unwrap();
    names
}

fn node(fs: &dyn FileSystem, volume: &str) -> u64 {
    let (_, group) = names(fs, fs.root()).into_iter().next().expect("a group");
    names(fs, group).into_iter().find(|(name, _)| name == volume).expect("the volume").1
}

fn read(image: &Image, fs: &dyn FileSystem, volume: &str) -> Result<Vec<u8>, LayerError> {
    let file = image.compose(fs.lay_out(node(fs, volume))?)?;
    let mut bytes = vec![0; usize::try_from(file.len()).unwrap()];
    file.read_at(&mut bytes, 0)?;
    Ok(bytes)
}

/// The bytes that LVM's list of extents stands for, stripe by stripe.
fn expected(bytes: &[u8], extent: u64, ranges: &[(String, u64, u64)]) -> Vec<u8> {
    let part = |(_, first, last): &(String, u64, u64)| {
        let (from, to) = (MIB + first * extent, MIB + (last + 1) * extent);
        &bytes[usize::try_from(from).unwrap()..usize::try_from(to).unwrap()]
    };
    ranges.iter().flat_map(|range| part(range).iter().copied()).collect()
}

#[test]
fn volumes_lie_where_lvm_says() {
    let dir = dir();
    if !require_plain_machine("lvm2::volumes_lie_where_lvm_says", &[]) {
        return;
    }
    let Some(lab) = Lab::new("lvm2::volumes_lie_where_lvm_says", dir.path(), 1) else { return };
    let device = lab.device(0).to_owned();
    lab.lvm(&format!("pvcreate -q --dataalignment 1m {device}"));
    let (_, fs) = look(&lab, 0);
    assert_eq!((names(fs.as_ref(), fs.root()), fs.about().format), (vec![], "lvm2"), "in no group yet");
    lab.lvm(&format!("vgcreate -q -s 256k vg-one {device}"));
    assert!(names(look(&lab, 0).1.as_ref(), 1).is_empty(), "no volume yet");
    lab.create("-n root -L 5m vg-one");
    lab.create("-n my-home -L 3m vg-one");
    lab.create("-n stripe --alloc anywhere -i 2 -I 64k -L 4m vg-one");
    lab.lvm("lvextend -q -L +2m vg-one/root");
    lab.lvm("lvremove -q -y vg-one/my-home");
    lab.lvm(&format!("lvextend -q -l +12 vg-one/root {device}:20-31"));

    let (image, fs) = look(&lab, 0);
    let about = fs.about();
    let shown = lab.lvm("pvs --noheadings -o pv_uuid,vg_name");
    let shown: Vec<&str> = shown.split_whitespace().collect();
    assert_eq!([about.uuid.as_deref().unwrap(), about.label.as_deref().unwrap()], shown[..]);
    let listed: Vec<String> = names(fs.as_ref(), 1).into_iter().map(|(name, _)| name).collect();
    assert_eq!(
        (names(fs.as_ref(), fs.root()), listed.len()),
        (vec![("vg-one".to_owned(), 1)], 2),
        "{listed:?}"
    );

    let bytes = lab.bytes(0);
    let found = ranges(&lab, "vg-one/root");
    assert!(found.len() >= 3, "{found:?}");
    let root = read(&image, fs.as_ref(), "root").unwrap();
    assert!(root == expected(&bytes, 256 << 10, &found), "{found:?}");
    let attributes = fs.attributes(node(fs.as_ref(), "root")).unwrap();
    assert_eq!((attributes.kind, attributes.size), (NodeKind::File, root.len() as u64));
    assert!(attributes.modified.is_some_and(|time| time.seconds > 1_700_000_000));
    fs.writable(node(fs.as_ref(), "root")).unwrap();
    let mut written = bytes.clone();
    let first = usize::try_from(MIB + found[0].1 * (256 << 10)).unwrap();
    written[first..first + 4].copy_from_slice(b"\x1f\x8b\x08\0");
    let (image, fs) = opened(written);
    let volume = image.compose(fs.lay_out(node(fs.as_ref(), "root")).unwrap()).unwrap();
    assert!(detect(&volume, Format::Auto).unwrap().packed.is_none(), "its bytes are its user's");

    let found = ranges(&lab, "vg-one/stripe");
    assert_eq!(found.len(), 2, "{found:?}");
    let [one, two] = [0, 1].map(|stripe| expected(&bytes, 256 << 10, &found[stripe..=stripe]));
    let turns = one.chunks(64 << 10).zip(two.chunks(64 << 10));
    let whole: Vec<u8> = turns.flat_map(|(one, two)| [one, two]).flatten().copied().collect();
    assert!(read(&image, fs.as_ref(), "stripe").unwrap() == whole, "{found:?}");
}

#[test]
fn what_is_not_there_or_not_to_be_written_says_so() {
    let dir = dir();
    let name = "lvm2::what_is_not_there_or_not_to_be_written_says_so";
    if !require_plain_machine(name, &[]) {
        return;
    }
    let Some(lab) = Lab::new(name, dir.path(), 2) else { return };
    let (one, two) = (lab.device(0).to_owned(), lab.device(1).to_owned());
    lab.lvm(&format!("pvcreate -q {one} {two}"));
    lab.lvm(&format!("vgcreate -q vg {one} {two}"));
    lab.create(&format!("-n here -L 8m vg {one}"));
    lab.create(&format!("-n there -L 8m vg {two}"));
    lab.create("-n both -i 2 -L 8m vg");
    lab.create("-n frozen -p r -L 4m vg");
    lab.create(&format!("-n kept -L 4m vg {one}"));
    // A snapshot takes device-mapper to be made, but none to be described.
    let text = dir.path().join("text");
    lab.create(&format!("-n store -L 4m vg {one}"));
    lab.lvm(&format!("vgcfgbackup -q -f {} vg", text.display()));
    let described = fs::read_to_string(&text).unwrap();
    let snapshot = "snapshot0 {\nid = \"aaaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg\"\nstatus = [\"READ\", \"WRITE\"]\n\
        flags = []\nsegment_count = 1\nsegment1 {\nstart_extent = 0\nextent_count = 1\ntype = \"snapshot\"\n\
        chunk_size = 8\norigin = \"kept\"\ncow_store = \"store\"\n}\n}\n";
    let at = described.find("logical_volumes {").unwrap() + "logical_volumes {".len();
    fs::write(&text, [&described[..at], "\n", snapshot, &described[at..]].concat()).unwrap();
    lab.lvm(&format!("vgcfgrestore -q -f {} vg", text.display()));
    let seen = lab.lvm("lvs --noheadings -o lv_name,origin vg");
    let pairs: Vec<&str> = seen.split_whitespace().collect();
    assert!(pairs.windows(2).any(|pair| pair == ["store", "kept"]), "{seen}");

    let (image, fs) = look(&lab, 0);
    let all: Vec<String> = names(fs.as_ref(), 1).into_iter().map(|(name, _)| name).collect();
    for name in ["here", "there", "both", "frozen", "kept", "store"] {
        assert!(all.iter().any(|known| known == name), "{name} of {all:?}");
    }
    assert_eq!(all.len(), 6, "{all:?}");
    assert!(fs.about().notes.iter().any(|note| note == "one of 2 physical volumes"), "{:?}", fs.about());
    assert_eq!(read(&image, fs.as_ref(), "here").unwrap().len() as u64, 8 * MIB);
    let refused = |name: &str| read(&image, fs.as_ref(), name).unwrap_err().to_string();
    let elsewhere = "not supported: the volume there: a part of it lies on the physical volume pv1";
    assert_eq!(refused("there"), elsewhere);
    assert_eq!(refused("both"), elsewhere.replace("there", "both"));
    assert_eq!(refused("store"), "not supported: the volume store: it is a snapshot");
    let written = |name: &str| fs.writable(node(fs.as_ref(), name));
    assert_eq!(written("here"), Ok(()));
    assert_eq!(written("frozen"), Err("LVM has made the volume frozen read-only".to_owned()));
    assert_eq!(written("kept"), Err("the volume kept has a snapshot, which writing would change".to_owned()));
}

#[test]
fn the_newest_sound_text_counts() {
    let dir = dir();
    if !require_plain_machine("lvm2::the_newest_sound_text_counts", &[]) {
        return;
    }
    let Some(lab) = Lab::new("lvm2::the_newest_sound_text_counts", dir.path(), 1) else { return };
    let device = lab.device(0).to_owned();
    lab.lvm(&format!("pvcreate -q --metadatacopies 2 --metadatasize 32k --dataalignment 4k {device}"));
    lab.lvm(&format!("vgcreate -q vg {device}"));
    lab.create("-n first -L 4m vg");
    // Each change is a new text behind the last; some go on at the start of the area.
    let mut wrapped = 0;
    for number in 0..48 {
        lab.lvm(&format!("vgchange -q --addtag tag{number} vg"));
        let (_, fs) = look(&lab, 0);
        assert_eq!(names(fs.as_ref(), 1).len(), 1, "after {number} changes");
        let bytes = lab.bytes(0);
        let number_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        wrapped += u64::from(number_at(4096 + 40) + number_at(4096 + 48) > number_at(4096 + 32));
    }
    assert!(wrapped > 0, "no text went on at the start of its area");

    // The first area may be lost, or tell of an older state; without both the volumes are not known.
    let older = lab.bytes(0);
    lab.create("-n second -L 4m vg");
    let newer = lab.bytes(0);
    let count = |bytes: &[u8]| names(opened(bytes.to_vec()).1.as_ref(), 1).len();
    assert_eq!((count(&older), count(&newer)), (1, 2));
    let mut mixed = newer.clone();
    mixed[4096..MIB as usize].copy_from_slice(&older[4096..MIB as usize]);
    assert_eq!(count(&mixed), 2, "the second area is newer");
    mixed[4096 + 100] ^= 1;
    assert_eq!(count(&mixed), 2, "the first area is damaged");
    let last = mixed.windows(16).rposition(|bytes| bytes == b" LVM2 x[5A%r0N*>").unwrap();
    mixed[last] ^= 0xff;
    let image = Image::raw(Arc::new(mixed.clone()), mixed.len() as u64, 512);
    let error = detect(&image, Format::Lvm2).unwrap_err().to_string();
    assert_eq!(error, "it is damaged: a metadata area of LVM has no sound header");
    mixed = newer;
    mixed[512 + 300] ^= 1;
    let image = Image::raw(Arc::new(mixed.clone()), mixed.len() as u64, 512);
    let error = detect(&image, Format::Lvm2).unwrap_err().to_string();
    assert_eq!(error, "it is damaged: the label of the LVM physical volume has a wrong checksum");
}
