//! Images that the real tools compressed: reading them through the map returns the original bytes, or an
//! error.
//! It never compares with becket's own decoding of the whole: the original bytes are the reference.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use becket_image::{Error, ErrorKind, Format, Image, LayerError, OpenOptions, inspect};
use becket_testkit::image::{ext4, gpt, random_bytes};
use becket_testkit::{require_plain_machine, tool};

use crate::common::{dir, look, open_read_only};

/// What files are compressed with, from standard input to standard output, and in what becket's words are.
const PACKERS: [(&str, &str); 11] = [
    ("xz", "xz -1 -T2 --block-size=64KiB"),
    ("xz", "xz -9 -T1 --block-size=1MiB --check=crc32"),
    ("xz", "xz -1 --block-size=100000 --check=none"),
    ("xz", "xz -1 --block-size=100000 --check=sha256"),
    ("xz", "xz --x86 --lzma2=dict=1MiB --block-size=300000"),
    ("xz", "xz --delta=dist=4 --lzma2=preset=0 --block-size=300000"),
    // Two streams, an empty one, and padding.
    (
        "xz",
        "(head -c 70000 | xz -1 --block-size=20000; head -c 64 /dev/zero) >a; \
         xz -1 --block-size=64KiB >b; xz </dev/null >c; cat a c b; head -c 4096 /dev/zero",
    ),
    ("gzip", "bgzip -c"),
    ("gzip", "bgzip -c -l 1"),
    ("zstd", "split -b 300000 --filter='cat >$FILE; zstd -q -c --check $FILE' - part."),
    // Something to be passed over before each frame.
    (
        "zstd",
        "split -b 1000000 --filter='cat >$FILE; printf \"P*M\\030\\004\\0\\0\\0abcd\"; zstd -1 -q -c $FILE' - part.",
    ),
];

const TOOLS: [&str; 3] = ["xz", "zstd", "bgzip"];

/// Bytes of which some compress well and some do not.
fn content(size: usize, seed: u64) -> Vec<u8> {
    let mut bytes = random_bytes(size, seed);
    for (index, piece) in bytes.chunks_mut(50_000).enumerate() {
        match (index as u64 + seed) % 3 {
            0 => piece.fill(0),
            1 => piece.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 97) as u8),
            _ => {}
        }
    }
    bytes
}

/// Makes `name` of `bytes` by a line for the shell.
fn pack(dir: &Path, name: &str, bytes: &[u8], line: &str) -> PathBuf {
    let input = dir.join("input");
    fs::write(&input, bytes).unwrap();
    sh(dir, &format!("({line}) <input >{name}"));
    dir.join(name)
}

fn sh(dir: &Path, line: &str) {
    tool(Command::new("bash").current_dir(dir).args(["-e", "-o", "pipefail", "-c", line]));
}

/// The image that a path leads to.
fn unpacked(path: &Path) -> Result<Image, Error> {
    Ok(look(path, Format::Auto, &[])?.last()?.image.clone())
}

#[track_caller]
fn assert_holds(image: &Image, bytes: &[u8], seed: u64, what: &str) {
    assert_eq!(image.len(), bytes.len() as u64, "{what}");
    assert!(image.read_vec(0, bytes.len()).unwrap() == bytes, "{what}: all of it differs");
    for dice in random_bytes(8 * 12, seed).chunks_exact(8) {
        let from = u32::from_le_bytes(dice[..4].try_into().unwrap()) as usize % bytes.len();
        let len =
            u32::from_le_bytes(dice[4..].try_into().unwrap()) as usize % (bytes.len() - from).min(200_000);
        let part = image.read_vec(from as u64, len).unwrap();
        assert!(part == bytes[from..from + len], "{what}: {len} bytes at {from} differ");
    }
}

#[test]
fn packed_files_of_all_kinds() {
    if !require_plain_machine("packed::packed_files_of_all_kinds", &TOOLS) {
        return;
    }
    let dir = dir();
    for (seed, size) in [(1, 3), (2, 65_536), (3, 1_400_003)] {
        let bytes = content(size, seed);
        for (packer, line) in PACKERS {
            let what = format!("{size} bytes by {line}");
            let path = pack(dir.path(), "packed", &bytes, line);
            let image = unpacked(&path).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_holds(&image, &bytes, seed, &what);
            let report =
                inspect(&look(&path, Format::Auto, &[]).unwrap().levels[0].image, "packed", Format::Auto);
            assert_eq!(report.about.format, packer, "{what}");
            assert_eq!((report.children.len(), report.children[0].size), (1, size as u64), "{what}");
        }
    }
}

/// zstd's own command makes no seek table: it is written here, behind frames that zstd made.
#[test]
fn a_seek_table_is_used() {
    if !require_plain_machine("packed::a_seek_table_is_used", &["zstd"]) {
        return;
    }
    let dir = dir();
    let bytes = content(1_000_000, 7);
    // Compressed as a stream, so that the frames do not say how long they are.
    let frames: Vec<Vec<u8>> = bytes
        .chunks(300_000)
        .map(|piece| fs::read(pack(dir.path(), "frame", piece, "zstd -q -c")).unwrap())
        .collect();
    let lens = |frames: &[Vec<u8>]| frames.iter().map(|frame| frame.len() as u32).collect::<Vec<u32>>();
    let yields = [300_000, 300_000, 300_000, 100_000];
    let file = |lens: &[u32], yields: &[u32], checksums: bool| {
        let entries: Vec<u8> = lens
            .iter()
            .zip(yields)
            .flat_map(|(len, yields)| [*len, *yields, 7].into_iter().take(if checksums { 3 } else { 2 }))
            .flat_map(u32::to_le_bytes)
            .collect();
        let table = [
            &0x184d_2a5e_u32.to_le_bytes()[..],
            &(entries.len() as u32 + 9).to_le_bytes(),
            &entries,
            &(lens.len() as u32).to_le_bytes(),
            &[u8::from(checksums) << 7],
            &0x8f92_eab1_u32.to_le_bytes(),
        ]
        .concat();
        let path = dir.path().join("seekable.zst");
        fs::write(&path, [frames.concat(), table].concat()).unwrap();
        path
    };
    let lens = lens(&frames);
    for checksums in [false, true] {
        let path = file(&lens, &yields, checksums);
        assert_holds(&unpacked(&path).unwrap(), &bytes, 7, "seekable");
        fs::write(dir.path().join("expected"), &bytes).unwrap();
        sh(dir.path(), "zstd -q -dc seekable.zst | cmp - expected");
    }
    let refused =
        |lens: &[u32], yields: &[u32]| unpacked(&file(lens, yields, false)).unwrap_err().to_string();
    let wrong = [lens[0] - 1, lens[1], lens[2], lens[3]];
    assert!(refused(&wrong, &yields).contains("its seek table describes"));
    assert!(refused(&lens[..3], &yields[..3]).contains("its seek table describes"));
    assert!(refused(&lens, &[1 << 30; 4]).contains("at most 2097152 are taken"));
    // What only decoding shows.
    let short = unpacked(&file(&lens, &[300_000, 300_001, 299_999, 100_000], false)).unwrap();
    assert!(short.read_vec(300_000, 10).is_err() && short.read_vec(0, 300_000).is_ok());
}

#[test]
fn a_path_goes_on_in_what_is_packed() {
    let tools = [&TOOLS[..], &["mke2fs", "sfdisk"]].concat();
    if !require_plain_machine("packed::a_path_goes_on_in_what_is_packed", &tools) {
        return;
    }
    let dir = dir();
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("dir")).unwrap();
    let inner = content(300_000, 5);
    fs::write(tree.join("dir/file"), &inner).unwrap();
    // Compressed once more, inside.
    pack(dir.path(), "inner.xz", &inner, "xz -1 --block-size=32KiB");
    fs::copy(dir.path().join("inner.xz"), tree.join("dir/file.xz")).unwrap();
    let (disk, part) = (dir.path().join("disk.img"), dir.path().join("p1"));
    gpt(&disk, 8 << 20);
    ext4(&part, 8192 * 512, &tree);
    let mut bytes = fs::read(&disk).unwrap();
    bytes[2048 * 512..][..8192 * 512].copy_from_slice(&fs::read(&part).unwrap());
    for (_, line) in PACKERS {
        let path = pack(dir.path(), "disk.packed", &bytes, line);
        for (inside, expected) in [
            ("p1/dir/file", &inner[..]),
            ("p1/dir/file.xz", &inner),
            ("by-label/first", &bytes[1 << 20..5 << 20]),
        ] {
            let image = unpacked(&path.join(inside)).unwrap_or_else(|error| panic!("{line}: {error}"));
            assert!(image.read_vec(0, image.len() as usize).unwrap() == expected, "{inside} by {line}");
        }
        let opened =
            becket_image::open(&path, &OpenOptions { partitions: true, ..OpenOptions::default() }).unwrap();
        assert!(opened.read_only && opened.nested && opened.encoded.len() == 1, "{line}");
        assert!(opened.read_only_reason.as_ref().unwrap().contains("compressed by"));
        assert_eq!((opened.map.len(), opened.partitions.len()), (8 << 20, 2), "{line}");
        // Readers do not shut each other out.
        open_read_only(&path).unwrap();
        drop(opened);
        let raw = OpenOptions { format: Format::Raw, ..OpenOptions::default() };
        let raw = becket_image::open(&path, &raw).unwrap();
        assert_eq!((raw.map.len(), raw.read_only), (fs::metadata(&path).unwrap().len() & !511, false));
    }
    // A compressed file among others is listed if there is an image in it.
    pack(&tree, "disk.img.xz", &bytes, "xz -0 --block-size=1MiB");
    fs::remove_file(tree.join("input")).unwrap();
    ext4(&part, 8 << 20, &tree);
    let report = inspect(&unpacked(&part).unwrap(), "p1", Format::Auto);
    let names: Vec<&str> = report.children.iter().map(|child| child.name.as_str()).collect();
    assert_eq!(names, ["disk.img.xz"], "{report:?}");
    assert_eq!(report.children[0].children[0].about.format, "gpt");
}

#[test]
fn what_has_no_index_is_refused_with_commands_that_work() {
    let name = "packed::what_has_no_index_is_refused_with_commands_that_work";
    if !require_plain_machine(name, &TOOLS) {
        return;
    }
    let dir = dir();
    let bytes = content(2_100_000, 11);
    for (line, file, why) in [
        ("xz -1", "disk.img.xz", "a piece of it has 2100000 bytes"),
        ("xz -1", "no extension", "a piece of it has 2100000 bytes"),
        ("zstd -q -c", "disk.img.zst", "do not say how long they are"),
        ("zstd -q -c --stream-size=2100000", "disk.img.zst", "a piece of it has 2100000 bytes"),
        ("gzip -1", "disk.img.gz", "it has no index"),
    ] {
        let packed = pack(dir.path(), "packed", &bytes, line);
        let path = dir.path().join(file);
        fs::rename(packed, &path).unwrap();
        let error = unpacked(&path).unwrap_err();
        assert!(matches!(error, Error::Layer { source: LayerError::Sequential { .. }, .. }), "{error}");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains(why), "{error}");
        let hint = error.hint().unwrap();
        let mut commands: Vec<&str> = hint.split("; ").collect();
        assert!(commands.pop().unwrap().starts_with("--format raw"), "{hint}");
        assert_eq!(commands.len(), 2, "{hint}");
        for command in commands {
            let (_, command) = command.split_once(": ").unwrap();
            sh(dir.path(), command);
            let (_, made) = command.rsplit_once('>').unwrap();
            let made = dir.path().join(made.trim_matches('\''));
            assert_holds(&unpacked(&made).unwrap(), &bytes, 11, command);
            fs::remove_file(made).unwrap();
        }
    }
}

/// Whatever byte is another: an error, or the bytes that went in.
#[test]
fn damage_is_never_other_bytes() {
    if !require_plain_machine("packed::damage_is_never_other_bytes", &TOOLS) {
        return;
    }
    let dir = dir();
    let bytes = content(150_000, 3);
    for line in [
        "xz -1 --block-size=20000",
        "xz -1 --block-size=20000 --check=sha256",
        "bgzip -c",
        "split -b 20000 --filter='cat >$FILE; zstd -q -c --check $FILE' - part.",
    ] {
        let path = pack(dir.path(), "packed", &bytes, line);
        let sound = fs::read(&path).unwrap();
        let mut errors = 0;
        for dice in random_bytes(8 * 150, 5).chunks_exact(8) {
            let mut damaged = sound.clone();
            let dice = u64::from_le_bytes(dice.try_into().unwrap()) as usize;
            // Where lengths are: at both ends.
            let at = [dice % sound.len(), dice % 40, sound.len() - 1 - dice % 120][(dice >> 32) % 3];
            damaged[at] ^= 1 << (dice >> 60 & 7);
            fs::write(&path, &damaged).unwrap();
            let read = unpacked(&path).map(|image| image.read_vec(0, image.len() as usize));
            match read {
                // Without its magic number it is taken for what it is.
                Ok(Ok(read)) if read.len() == damaged.len() => {
                    assert!(read == damaged && at < 6, "{line}: byte {at}")
                }
                Ok(Ok(read)) => assert!(read == bytes, "{line}: byte {at} of {}", sound.len()),
                _ => errors += 1,
            }
        }
        assert!(errors > 100, "{line}: {errors}");
    }
}
