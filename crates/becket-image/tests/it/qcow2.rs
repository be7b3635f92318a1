//! qcow2 images made by QEMU's own tools: every byte that becket finds is the one that they read.
//! It never takes becket's own word for what an image holds.

use std::fs;
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use becket_image::layer::LayerError;
use becket_image::{
    End, Error, ErrorKind, Format, Grow as _, Grower, Image, Opened, Place, ReadAt as _, Source, Wanted,
    inspect,
};
use becket_testkit::image::random_bytes;
use becket_testkit::{require_plain_machine, tool};

use crate::common::{dir, file, look, open, open_read_only, source_of};

const MIB: u64 = 1 << 20;

fn ready(name: &str) -> bool {
    require_plain_machine(&format!("qcow2::{name}"), &["qemu-img", "qemu-io"])
}

/// Numbers by chance, the same for each seed.
struct Dice(std::vec::IntoIter<u8>);

impl Dice {
    fn new(seed: u64) -> Dice {
        Dice(random_bytes(1 << 16, seed).into_iter())
    }

    fn pick(&mut self, below: u64) -> u64 {
        let mut bytes = [0; 8];
        bytes.fill_with(|| self.0.next().unwrap());
        u64::from_le_bytes(bytes) % below
    }

    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.pick(of.len() as u64) as usize]
    }
}

fn qemu_img(dir: &Path, args: &[&str]) {
    tool(Command::new("qemu-img").current_dir(dir).args(args));
}

fn qemu_io(dir: &Path, image: &str, commands: &[String]) {
    let commands = commands.iter().flat_map(|command| ["-c", command.as_str()]);
    tool(Command::new("qemu-io").current_dir(dir).args(["-f", "qcow2"]).args(commands).arg(image));
}

/// What QEMU reads.
fn reference(dir: &Path, image: &str) -> Vec<u8> {
    qemu_img(dir, &["convert", "-O", "raw", image, "reference.raw"]);
    fs::read(dir.join("reference.raw")).unwrap()
}

/// What becket reads.
fn read(path: &Path) -> Vec<u8> {
    let walk = look(path, Format::Auto, &[]).unwrap();
    let image = &walk.last().unwrap().image;
    let mut bytes = vec![0; image.len() as usize];
    image.read_at(&mut bytes, 0).unwrap();
    bytes
}

#[track_caller]
fn assert_same(dir: &Path, image: &str) {
    let (found, expected) = (read(&dir.join(image)), reference(dir, image));
    assert_eq!(found.len(), expected.len(), "{image}");
    let differs = found.iter().zip(&expected).position(|(one, other)| one != other);
    assert_eq!(differs, None, "{image}: the first byte that differs");
}

/// Writes, zeroes and discards by chance, in a disk of `size` bytes.
fn scribble(dice: &mut Dice, size: u64, count: usize) -> Vec<String> {
    (0..count)
        .map(|_| {
            let from = dice.pick(size / 512) * 512;
            let len = (1 + dice.pick(300)) * 512;
            let len = len.min(size - from);
            match dice.pick(6) {
                0 => format!("write -z {from} {len}"),
                1 => format!("write -z -u {from} {len}"),
                2 => format!("discard {from} {len}"),
                _ => format!("write -P {} {from} {len}", 1 + dice.pick(255)),
            }
        })
        .collect()
}

/// A chain by chance, of which the uppermost image is returned.
fn chain(dir: &Path, seed: u64) -> String {
    let mut dice = Dice::new(seed);
    let mut below: Option<(String, &str, u64)> = None;
    for level in 0..=dice.pick(3) {
        // Lengths of which some are no multiples of a cluster, and longer or shorter than what is below.
        let size = (1 + dice.pick(12)) * MIB + dice.pick(200) * 512;
        let mut name = format!("{seed}-{level}.img");
        if level == 0 && dice.pick(2) == 0 {
            fs::write(dir.join(&name), random_bytes(size as usize, seed)).unwrap();
            below = Some((name, "raw", size));
            continue;
        }
        // What refers to others is followed by the suffix of its name.
        name = format!("{seed}-{level}.qcow2");
        let cluster = ["512", "4096", "65536", "65536", "2097152"][dice.pick(5) as usize];
        let compat = dice.one(&["compat=0.10", "compat=1.1", "compat=1.1,compression_type=zstd"]);
        let options = format!("cluster_size={cluster},{compat}");
        let size_text = size.to_string();
        let mut create = vec!["create", "-q", "-f", "qcow2", "-o", &options];
        if let Some((below, format, _)) = &below {
            create.extend(["-F", format, "-b", below]);
        }
        create.extend([&name, size_text.as_str()]);
        qemu_img(dir, &create);
        qemu_io(dir, &name, &scribble(&mut dice, size, 12));
        if dice.pick(3) == 0 {
            qemu_img(dir, &["snapshot", "-c", "before", &name]);
            qemu_io(dir, &name, &scribble(&mut dice, size, 6));
        }
        below = Some((name, "qcow2", size));
    }
    let (name, format, _) = below.unwrap();
    if format == "qcow2" && dice.pick(3) == 0 {
        let compression = dice.one(&["compression_type=zlib", "compression_type=zstd"]);
        let compressed = format!("{seed}-compressed.qcow2");
        qemu_img(dir, &["convert", "-c", "-O", "qcow2", "-o", compression, &name, &compressed]);
        qemu_io(dir, &compressed, &scribble(&mut dice, MIB, 3));
        return compressed;
    }
    name
}

#[test]
fn chains_by_chance_read_as_qemu_reads_them() {
    if !ready("chains_by_chance_read_as_qemu_reads_them") {
        return;
    }
    let dir = dir();
    let only = std::env::var("BECKET_QCOW2_SEED").ok().map(|seed| seed.parse().unwrap());
    for seed in only.map_or(0..8, |seed: u64| seed..seed + 1) {
        eprintln!("BECKET_QCOW2_SEED={seed}");
        let image = chain(dir.path(), seed);
        assert_same(dir.path(), &image);
    }
}

#[test]
fn committed_rebased_and_resized_images_read_the_same() {
    if !ready("committed_rebased_and_resized_images_read_the_same") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    qemu_img(at, &["create", "-q", "-f", "qcow2", "base.qcow2", "5M"]);
    qemu_io(at, "base.qcow2", &["write -P 1 0 3M".to_owned(), "write -P 2 3M 100k".to_owned()]);
    qemu_img(at, &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "base.qcow2", "top.qcow2"]);
    qemu_io(at, "top.qcow2", &["write -P 3 64k 10k".to_owned(), "discard 2M 64k".to_owned()]);
    qemu_img(at, &["resize", "-q", "top.qcow2", "7M"]);
    assert_same(at, "top.qcow2");
    let before = read(&at.join("top.qcow2"));
    qemu_img(at, &["commit", "-q", "top.qcow2"]);
    assert_same(at, "base.qcow2");
    assert!(read(&at.join("base.qcow2"))[..5 * MIB as usize] == before[..5 * MIB as usize]);
    qemu_img(at, &["rebase", "-q", "-b", "", "top.qcow2"]);
    assert_same(at, "top.qcow2");
}

#[test]
fn a_qcow2_is_opened_with_its_chain() {
    if !ready("a_qcow2_is_opened_with_its_chain") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    fs::write(at.join("base.raw"), random_bytes(2 * MIB as usize, 1)).unwrap();
    qemu_img(at, &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "top.qcow2"]);
    qemu_io(at, "top.qcow2", &["write -P 7 64k 64k".to_owned(), "write -z 1M 64k".to_owned()]);
    let opened = open(&at.join("top.qcow2")).unwrap();
    assert!(opened.grows && !opened.read_only && opened.nested && opened.encoded.is_empty());
    assert!(source_of(&opened, 0).facts.writable && !source_of(&opened, 1).facts.writable);
    assert_eq!((opened.map.len(), opened.sources.len()), (2 * MIB, 2));
    let kinds: Vec<_> =
        opened.map.extents().iter().map(|extent| (extent.start, extent.len, extent.place)).collect();
    let [(_, 65536, below), (65536, 65536, own), (_, _, _), (MIB, 65536, Place::Zero), (_, _, _)] = kinds[..]
    else {
        panic!("{kinds:?}")
    };
    assert!(
        matches!(below, Place::Data { source: 1, offset: 0 }) && matches!(own, Place::Data { source: 0, .. })
    );
    // Many may read it; as bytes it is a file like any other.
    assert_eq!(open_read_only(&at.join("top.qcow2")).unwrap_err().kind(), ErrorKind::InUse);
    drop(opened);
    let both = [(); 2].map(|()| open_read_only(&at.join("top.qcow2")).unwrap());
    assert!(both.iter().all(|one| one.read_only && !one.grows && one.read_only_reason.is_none()));
    drop(both);
    let raw = becket_image::OpenOptions { format: Format::Raw, ..Default::default() };
    let raw = becket_image::open(&at.join("top.qcow2"), &raw).unwrap();
    assert!(!raw.read_only && raw.map.single_range().is_some());
}

#[test]
fn a_large_disk_has_a_small_map() {
    if !ready("a_large_disk_has_a_small_map") {
        return;
    }
    let dir = dir();
    qemu_img(dir.path(), &["create", "-q", "-f", "qcow2", "large.qcow2", "1T"]);
    let writes: Vec<String> = (0..200).map(|n| format!("write -P 5 {}M 4M", n * 4)).collect();
    qemu_io(dir.path(), "large.qcow2", &writes);
    let Opened { map, .. } = open(&dir.path().join("large.qcow2")).unwrap();
    assert_eq!(map.len(), 1 << 40);
    assert!(map.extents().len() < 20, "{}", map.extents().len());
}

/// The image over `backing`, whatever that is; QEMU does not look at it.
fn over(at: &Path, image: &str, backing: &str, format: Option<&str>) -> PathBuf {
    let mut create = vec!["create", "-q", "-f", "qcow2", "-u", "-b", backing, "-F", format.unwrap_or("raw")];
    create.extend([image, "1M"]);
    qemu_img(at, &create);
    let path = at.join(image);
    if format.is_none() {
        // The extension becomes one that nobody knows.
        let mut bytes = fs::read(&path).unwrap();
        let at = bytes.windows(4).position(|four| four == [0xe2, 0x79, 0x2a, 0xca]).unwrap();
        bytes[at] = 0;
        fs::write(&path, bytes).unwrap();
    }
    path
}

#[track_caller]
fn refused(path: &Path, words: &str) -> Error {
    let error = open(path).unwrap_err();
    assert!(error.to_string().contains(words), "{error}");
    error
}

#[test]
fn an_image_names_no_files_of_others() {
    if !ready("an_image_names_no_files_of_others") {
        return;
    }
    let dir = dir();
    let at = fs::canonicalize(dir.path()).unwrap();
    let (inner, outer) = (at.join("images"), at.join("secrets"));
    fs::create_dir_all(inner.join("sub")).unwrap();
    fs::create_dir(&outer).unwrap();
    fs::write(outer.join("secret"), random_bytes(MIB as usize, 3)).unwrap();
    fs::copy(outer.join("secret"), inner.join("sub/base")).unwrap();
    symlink("../secrets/secret", inner.join("link-out")).unwrap();
    symlink("sub/base", inner.join("link-in")).unwrap();
    let secret = outer.join("secret").display().to_string();
    for name in [&secret, "../secrets/secret", "/etc/passwd", "sub/../../secrets/secret"] {
        let error = refused(&over(&inner, "a.qcow2", name, Some("raw")), "outside the directory");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains(name), "{error}");
        assert!(error.hint().is_some_and(|hint| hint.contains("--backing-dir")), "{:?}", error.hint());
    }
    refused(&over(&inner, "a.qcow2", "link-out", Some("raw")), "symbolic link leads out");
    refused(&over(&inner, "a.qcow2", "nbd:localhost:10809", Some("raw")), "neither the path of a file");
    refused(&over(&inner, "a.qcow2", "json:{}", Some("raw")), "neither the path of a file");
    refused(&over(&inner, "a.qcow2", "sub", Some("raw")), "a directory");
    let error = refused(&over(&inner, "a.qcow2", "absent", Some("raw")), "no such file");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    refused(&over(&inner, "a.qcow2", "sub/base", Some("vmdk")), "its format is given as vmdk");
    for name in ["sub/base", "link-in", "./sub/base"] {
        open(&over(&inner, "a.qcow2", name, Some("raw"))).unwrap();
    }
    // Where the user allows it.
    let image = over(&inner, "a.qcow2", &secret, Some("raw"));
    let allowed = becket_image::OpenOptions { backing_dirs: vec![outer.clone()], ..Default::default() };
    assert_eq!(becket_image::open(&image, &allowed).unwrap().sources.len(), 2);
    // A link to the image leads to the image's directory, not to its own.
    symlink(over(&inner, "a.qcow2", "secret", Some("raw")), outer.join("a.qcow2")).unwrap();
    refused(&outer.join("a.qcow2"), "no such file");
}

#[test]
fn what_is_below_is_never_guessed() {
    if !ready("what_is_below_is_never_guessed") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    fs::write(at.join("raw"), random_bytes(MIB as usize, 3)).unwrap();
    open(&over(at, "a.qcow2", "raw", None)).unwrap();
    qemu_img(at, &["create", "-q", "-f", "qcow2", "base.img", "1M"]);
    let error = refused(&over(at, "a.qcow2", "base.img", None), "does not say that it is one");
    assert!(error.hint().is_some_and(|hint| hint.contains("rebase -u -F qcow2")), "{:?}", error.hint());
    refused(&over(at, "a.qcow2", "raw", Some("qcow2")), "it is not a qcow2");
    // Said to be raw, it is bytes.
    let image = over(at, "a.qcow2", "base.img", Some("raw"));
    assert_eq!(read(&image)[..4], *b"QFI\xfb");
}

#[test]
fn circles_and_long_chains_end() {
    if !ready("circles_and_long_chains_end") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    // QEMU makes no such image under its own name.
    fs::rename(over(at, "other.qcow2", "self.qcow2", Some("qcow2")), at.join("self.qcow2")).unwrap();
    refused(&at.join("self.qcow2"), "circle");
    over(at, "one.qcow2", "two.qcow2", Some("qcow2"));
    over(at, "two.qcow2", "three.qcow2", Some("qcow2"));
    refused(&over(at, "three.qcow2", "one.qcow2", Some("qcow2")), "circle");
    qemu_img(at, &["create", "-q", "-f", "qcow2", "0.qcow2", "1M"]);
    for level in 1..=33 {
        over(at, &format!("{level}.qcow2"), &format!("{}.qcow2", level - 1), Some("qcow2"));
    }
    assert_eq!(open(&at.join("32.qcow2")).unwrap().sources.len(), 33);
    refused(&at.join("33.qcow2"), "more than 32 files");
}

#[test]
fn subclusters_are_read_as_qemu_reads_them_and_not_written() {
    if !ready("subclusters_are_read_as_qemu_reads_them_and_not_written") {
        return;
    }
    const SIZE: u64 = 6 * MIB + 512 * 33;
    for (seed, cluster) in [(1, "16k"), (2, "64k"), (3, "2M"), (4, "16k")] {
        let (dir, mut dice) = (dir(), Dice::new(seed));
        let at = dir.path();
        fs::write(at.join("base.raw"), random_bytes(5 * MIB as usize, seed)).unwrap();
        let options = format!("extended_l2=on,cluster_size={cluster}");
        let made = ["-f", "qcow2", "-o", &options, "-F", "raw", "-b", "base.raw", "x.qcow2"];
        qemu_img(at, &[&["create", "-q"][..], &made, &[&SIZE.to_string()]].concat());
        qemu_io(at, "x.qcow2", &scribble(&mut dice, SIZE, 60));
        assert_same(at, "x.qcow2");
        let error = open(&at.join("x.qcow2")).unwrap().read_only_reason;
        assert_eq!(error.as_deref(), Some("it has subclusters, which becket does not write"));
        // With compressed clusters below those that are written next.
        qemu_img(at, &["convert", "-c", "-O", "qcow2", "-o", &options, "x.qcow2", "y.qcow2"]);
        assert_same(at, "y.qcow2");
        qemu_io(at, "y.qcow2", &scribble(&mut dice, SIZE, 30));
        assert_same(at, "y.qcow2");
    }
}

/// An image with `bytes` at `offset`.
fn patched(at: &Path, offset: u64, bytes: &[u8]) -> PathBuf {
    let path = at.join("patched.qcow2");
    fs::copy(at.join("sound.qcow2"), &path).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().write_all_at(bytes, offset).unwrap();
    path
}

#[test]
fn what_is_not_known_or_cannot_be_is_refused_in_words() {
    if !ready("what_is_not_known_or_cannot_be_is_refused_in_words") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    qemu_img(at, &["create", "-q", "-f", "qcow2", "sound.qcow2", "1G"]);
    qemu_io(at, "sound.qcow2", &["write -P 1 0 64k".to_owned(), "write -P 1 600M 64k".to_owned()]);
    let bytes = fs::read(at.join("sound.qcow2")).unwrap();
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap());
    let l2 = u64::from_be_bytes(bytes[l1 as usize..][..8].try_into().unwrap()) & !(1 << 63);
    let far = (1_u64 << 40 | 1 << 63).to_be_bytes();
    for (offset, bytes, words) in [
        (7, &[1][..], "version 1"),
        (23, &[8], "2^8"),
        (23, &[22], "2^22"),
        (35, &[1], "encrypted"),
        (36, &[0xff; 4], "L1 table of"),
        (39, &[1], "too short"),
        (40, &far, "L1 table"),
        (24, &[0; 8], "0 bytes"),
        (72, &[1, 0, 0, 0, 0, 0, 0, 0], "not known here"),
        (79, &[8], "sound"),
        (l1, &far, "cut short"),
        (l1 + 7, &[1, 0], "sound"),
        (l1 + 8, &l2.to_be_bytes(), "share"),
        (l2, &far, "beyond the file's end"),
        (l2 + 6, &[2], "begins no cluster"),
    ] {
        let path = patched(at, offset, bytes);
        match open(&path) {
            Err(error) => assert!(error.to_string().contains(words), "{offset}: {error}"),
            Ok(_) => assert_eq!(words, "sound", "{offset} {bytes:?}"),
        }
    }
    // What is marked is still read.
    for (bit, words) in [(1, "closed cleanly"), (2, "corrupt")] {
        let path = patched(at, 79, &[bit]);
        let walk = look(&path, Format::Auto, &[]).unwrap();
        let report = inspect(&walk.last().unwrap().image, "x", Format::Auto);
        assert!(report.stored.is_some_and(|about| about.notes.iter().any(|note| note.contains(words))));
        assert!(open(&path).unwrap().read_only);
    }
    let forced = look(&file(at, "raw", MIB), Format::Qcow2, &[]).unwrap_err();
    assert!(matches!(forced, Error::Layer { source: LayerError::IsNot(_), .. }), "{forced}");
}

#[test]
fn paths_go_on_inside_and_images_may_lie_in_others() {
    if !require_plain_machine(
        "qcow2::paths_go_on_inside_and_images_may_lie_in_others",
        &["qemu-img", "qemu-io", "mke2fs"],
    ) {
        return;
    }
    let dir = dir();
    let at = dir.path();
    fs::create_dir(at.join("tree")).unwrap();
    fs::write(at.join("tree/hostname"), "becket\n").unwrap();
    let mke2fs = |tree: &str, image: &str| {
        tool(
            Command::new("/usr/sbin/mke2fs")
                .args(["-q", "-F", "-t", "ext4", "-d"])
                .args([at.join(tree), at.join(image)]),
        );
    };
    file(at, "inner.ext4", 4 * MIB);
    mke2fs("tree", "inner.ext4");
    fs::create_dir(at.join("outer")).unwrap();
    qemu_img(at, &["convert", "-c", "-O", "qcow2", "inner.ext4", "outer/disk.qcow2"]);
    over(&at.join("outer"), "backed.qcow2", "disk.qcow2", Some("qcow2"));
    file(at, "outer.ext4", 16 * MIB);
    mke2fs("outer", "outer.ext4");
    qemu_img(at, &["convert", "-O", "qcow2", "outer.ext4", "outer.qcow2"]);
    let path = at.join("outer.qcow2/disk.qcow2/hostname");
    let walk = look(&path, Format::Auto, &[]).unwrap();
    assert_eq!((walk.end, walk.levels.len()), (End::Image, 3));
    let mut bytes = [0; 7];
    walk.last().unwrap().image.read_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"becket\n");
    let walk = look(&at.join("outer.qcow2"), Format::Auto, &[]).unwrap();
    let report = inspect(&walk.last().unwrap().image, "outer.qcow2", Format::Auto);
    assert_eq!(report.about.format, "ext4");
    let disk = report.children.iter().find(|child| child.name == "disk.qcow2").unwrap();
    assert!(disk.stored.is_some() && disk.encoded > 0);
    assert_eq!(disk.about.format, "ext4");
    refused(&at.join("outer.qcow2/backed.qcow2"), "copy it out first");
}

/// Units whose bytes are to stay.
fn keeping(units: &[u64]) -> Vec<Wanted> {
    units.iter().map(|unit| Wanted { unit: *unit, zeroed: false }).collect()
}

/// Random writes as a worker does them, each time to a place of its own, into `image` and into what is
/// expected.
fn grow_by_chance(at: &Path, image: &str, expected: &mut [u8], seed: u64, crashes: bool) {
    let mut dice = Dice::new(seed);
    // The map is the client's, made before the first write; a worker after the first has the same.
    let opened = open(&at.join(image)).unwrap();
    assert!(opened.grows && !opened.read_only, "{:?}", opened.read_only_reason);
    for _ in 0..2 {
        let files = opened
            .sources
            .iter()
            .filter_map(Source::file)
            .map(|file| Arc::new(file.buffered.try_clone().unwrap()) as Arc<dyn becket_image::ReadAt>);
        let old = Image::assembled(opened.map.clone(), files.collect(), opened.encoded.clone()).unwrap();
        let file = source_of(&opened, 0).buffered.try_clone().unwrap();
        let mut grower = Grower::open(file, None, old).unwrap();
        let unit = grower.unit();
        let units = expected.len() as u64 / unit;
        for _ in 0..6 {
            let count = 1 + dice.pick(5);
            let first = dice.pick(units);
            let wanted: Vec<u64> = (0..count).map(|n| (first + n * n) % units).collect();
            let places = grower.place(&keeping(&wanted)).unwrap();
            assert_eq!(grower.place(&keeping(&wanted[..1])).unwrap(), places[..1], "a place stays");
            for (unit_number, place) in wanted.iter().zip(places) {
                let from = dice.pick(unit / 512) * 512;
                let bytes = random_bytes((unit - from) as usize / 2, dice.pick(1 << 32));
                rustix::io::pwrite(&source_of(&opened, 0).buffered, &bytes, place + from).unwrap();
                expected[(unit_number * unit + from) as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
        }
        // A cluster that is zeroed is not copied, unless another request needs it at the same time.
        let (zeroed, both) = (dice.pick(units), dice.pick(units));
        let wanted =
            [(zeroed, true), (both, true), (both, false)].map(|(unit, zeroed)| Wanted { unit, zeroed });
        let fresh = expected.len() as u64 >= 4 * unit && zeroed != both;
        if fresh {
            let mut own = Vec::new();
            grower.placed(&mut |unit, _| own.push(unit)).unwrap();
            grower.place(&wanted).unwrap();
            if !own.contains(&zeroed) {
                expected[(zeroed * unit) as usize..][..unit as usize].fill(0);
            }
        }
        let mut reported = 0;
        grower.placed(&mut |_, _| reported += 1).unwrap();
        assert!(reported > 0);
        if !crashes {
            grower.close().unwrap();
        }
    }
}

#[test]
fn what_is_written_is_what_qemu_reads_and_its_check_finds_nothing() {
    if !ready("what_is_written_is_what_qemu_reads_and_its_check_finds_nothing") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    let mut written = 0;
    for seed in 0..10 {
        let image = chain(at, seed);
        if open(&at.join(&image)).unwrap().read_only || !image.starts_with(&format!("{seed}-")) {
            continue;
        }
        if !fs::read(at.join(&image)).unwrap().starts_with(b"QFI\xfb") {
            continue;
        }
        let mut expected = reference(at, &image);
        let crashes = seed % 2 == 1;
        grow_by_chance(at, &image, &mut expected, seed, crashes);
        assert!(reference(at, &image) == expected, "seed {seed}");
        assert_same(at, &image);
        let check = Command::new("qemu-img").current_dir(at).args(["check", &image]).output().unwrap();
        let text = String::from_utf8_lossy(&check.stdout).into_owned();
        // 3: clusters that nobody uses, and nothing else.
        let allowed = if crashes { &[0, 3][..] } else { &[0] };
        assert!(allowed.contains(&check.status.code().unwrap()), "seed {seed}: {text}");
        if crashes {
            // The next that writes and ends cleanly returns them.
            grow_by_chance(at, &image, &mut expected, seed + 100, false);
            assert!(reference(at, &image) == expected, "seed {seed}");
            qemu_img(at, &["check", "-q", &image]);
        }
        written += 1;
    }
    assert!(written > 2, "{written}");
}

#[test]
fn small_clusters_outgrow_their_table_of_counts() {
    if !ready("small_clusters_outgrow_their_table_of_counts") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    qemu_img(at, &["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", "small.qcow2", "32M"]);
    let opened = open(&at.join("small.qcow2")).unwrap();
    assert!(opened.read_only_reason.is_some_and(|why| why.contains("512")), "a device would not write such");
    let file = fs::OpenOptions::new().read(true).write(true).open(at.join("small.qcow2")).unwrap();
    let old =
        Image::assembled(opened.map.clone(), vec![Arc::new(file.try_clone().unwrap())], Vec::new()).unwrap();
    let mut grower = Grower::open(file.try_clone().unwrap().into(), None, old).unwrap();
    let units: Vec<u64> = (0..40_000).collect();
    for (unit, place) in units.iter().zip(grower.place(&keeping(&units[..1])).unwrap().into_iter().chain(
        units[1..].chunks(500).flat_map(|units| grower.place(&keeping(units)).unwrap()).collect::<Vec<_>>(),
    )) {
        file.write_all_at(&unit.to_le_bytes(), place).unwrap();
    }
    grower.close().unwrap();
    drop((grower, opened.sources));
    qemu_img(at, &["check", "-q", "small.qcow2"]);
    assert_same(at, "small.qcow2");
}

#[test]
fn what_is_not_for_writing_says_why() {
    if !ready("what_is_not_for_writing_says_why") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    let why = |image: &str| open(&at.join(image)).unwrap().read_only_reason.unwrap();
    qemu_img(at, &["create", "-q", "-f", "qcow2", "-o", "refcount_bits=1", "bits.qcow2", "1M"]);
    assert!(why("bits.qcow2").contains("1 bits"), "{}", why("bits.qcow2"));
    qemu_img(at, &["create", "-q", "-f", "qcow2", "snap.qcow2", "1M"]);
    qemu_io(at, "snap.qcow2", &["write -P 1 0 64k".to_owned()]);
    qemu_img(at, &["snapshot", "-c", "s", "snap.qcow2"]);
    assert!(why("snap.qcow2").contains("snapshots"));
    qemu_img(at, &["create", "-q", "-f", "qcow2", "whole.qcow2", "1M"]);
    assert!(open(&at.join("whole.qcow2")).unwrap().grows);
    let part = becket_image::OpenOptions { offset: 65536, ..Default::default() };
    let part = becket_image::open(&at.join("whole.qcow2"), &part).unwrap();
    assert!(part.read_only_reason.is_some_and(|why| why.contains("whole")));
}
