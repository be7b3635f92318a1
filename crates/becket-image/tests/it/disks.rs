//! Disks in containers (VMDK, VDI, VHD, VHDX): becket reads the bytes that QEMU reads.
//! It never takes becket's own word for what a disk holds: qemu-img converts the same file.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;

use becket_image::layer::LayerError;
use becket_image::{Error, ErrorKind, Format, Image, inspect};
use becket_testkit::image::{ext4, gpt, partitioned, random_bytes};
use becket_testkit::{require_plain_machine, tool};

use crate::common::{dir, look, open};

const MIB: u64 = 1 << 20;
/// Histories of each kind; BECKET_DISK_ROUNDS asks for more.
const ROUNDS: u64 = 2;

fn ready(name: &str) -> bool {
    require_plain_machine(&format!("disks::{name}"), &["qemu-img", "qemu-io"])
}

/// A container: what QEMU calls it, its options, and how becket names it.
struct Kind {
    qemu: &'static str,
    options: &'static str,
    suffix: &'static str,
    /// Whether QEMU writes to it after it was made.
    written: bool,
}

const fn kind(qemu: &'static str, options: &'static str, suffix: &'static str, written: bool) -> Kind {
    Kind { qemu, options, suffix, written }
}

const KINDS: [Kind; 13] = [
    kind("vmdk", "subformat=monolithicSparse", "vmdk", true),
    kind("vmdk", "subformat=streamOptimized", "vmdk", false),
    kind("vmdk", "subformat=twoGbMaxExtentSparse", "vmdk", true),
    kind("vdi", "static=off", "vdi", true),
    kind("vdi", "static=on", "vdi", true),
    kind("vpc", "subformat=dynamic", "vhd", true),
    kind("vpc", "subformat=dynamic,force_size=on", "vhd", true),
    kind("vpc", "subformat=fixed,force_size=on", "vhd", true),
    kind("vpc", "subformat=fixed", "vhd", true),
    kind("vhdx", "subformat=dynamic,block_size=1M", "vhdx", true),
    kind("vhdx", "subformat=dynamic,block_size=16M", "vhdx", true),
    kind("vhdx", "subformat=fixed,block_size=2M", "vhdx", true),
    kind("vhdx", "subformat=dynamic,block_state_zero=off", "vhdx", true),
];

fn qemu_img(dir: &Path, args: &[&str]) {
    tool(Command::new("qemu-img").current_dir(dir).args(args));
}

/// A raw disk with random bytes, repeats and holes.
fn raw(path: &Path, seed: u64) {
    let dice = random_bytes(64, seed);
    let size = (1 + u64::from(dice[0] % 24)) * MIB + u64::from(dice[1]) * 512;
    let file = fs::File::create(path).unwrap();
    file.set_len(size).unwrap();
    for at in dice[4..].chunks_exact(4) {
        let from = u64::from(u16::from_le_bytes([at[0], at[1]])) * 1024 % size;
        let len = (usize::from(at[2]) * 2048).min((size - from) as usize);
        let mut bytes = random_bytes(len, seed.wrapping_add(at[3].into()));
        if at[3] % 2 == 0 {
            bytes.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index / 700) as u8);
        }
        file.write_all_at(&bytes, from).unwrap();
    }
}

/// Writes that qemu-io makes.
fn scribble(size: u64, seed: u64) -> Vec<String> {
    let dice = random_bytes(8 * 12, seed);
    let eight = |at: usize| u64::from_le_bytes(dice[at * 8..at * 8 + 8].try_into().unwrap());
    (0..12)
        .map(|number| {
            let from = eight(number) % (size / 512) * 512;
            let len = ((eight(number) >> 32) % (2 * MIB) / 512 * 512 + 512).min(size - from);
            let how = match eight(number) >> 60 {
                0..=2 => "write -z".to_owned(),
                3 => "discard".to_owned(),
                4 => "write -z -u".to_owned(),
                other => format!("write -P {}", other * 16),
            };
            format!("{how} {from} {len}")
        })
        .collect()
}

/// The disk by becket; its bytes are those that QEMU reads.
#[track_caller]
fn assert_same(dir: &Path, name: &str, qemu: &str) -> Image {
    qemu_img(dir, &["convert", "-f", qemu, "-O", "raw", name, "expected.raw"]);
    let expected = fs::read(dir.join("expected.raw")).unwrap();
    let image = look(&dir.join(name), Format::Auto, &[]).unwrap().last().unwrap().image.clone();
    assert_eq!(image.len(), expected.len() as u64, "{name}");
    let bytes = image.read_vec(0, expected.len()).unwrap();
    if bytes != expected {
        let at = bytes.iter().zip(&expected).position(|(one, other)| one != other);
        panic!("{name} differs from byte {at:?} on");
    }
    image
}

#[test]
fn histories_by_chance_read_as_qemu_reads_them() {
    if !ready("histories_by_chance_read_as_qemu_reads_them") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    let rounds = std::env::var("BECKET_DISK_ROUNDS").ok().map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    let mut compared = 0;
    for seed in 0..rounds {
        for (number, kind) in KINDS.iter().enumerate() {
            let seed = seed * 100 + number as u64;
            let work = at.join(seed.to_string());
            fs::create_dir(&work).unwrap();
            let name = format!("{seed}.{}", kind.suffix);
            raw(&work.join("in.raw"), seed);
            let size = work.join("in.raw").metadata().unwrap().len();
            if kind.written && seed.is_multiple_of(3) {
                let size = size.to_string();
                qemu_img(&work, &["create", "-q", "-f", kind.qemu, "-o", kind.options, &name, &size]);
            } else {
                let convert = ["convert", "-f", "raw", "-O", kind.qemu, "-o", kind.options, "in.raw", &name];
                qemu_img(&work, &convert);
            }
            if kind.written {
                let mut io = Command::new("qemu-io");
                io.current_dir(&work).args(["-f", kind.qemu]);
                for line in scribble(size, seed) {
                    io.args(["-c", &line]);
                }
                tool(io.arg(&name));
            }
            assert_same(&work, &name, kind.qemu);
            compared += 1;
            fs::remove_dir_all(&work).unwrap();
        }
    }
    assert_eq!(compared, rounds * KINDS.len() as u64);
    eprintln!("{compared} disks compared, 0 differences");
}

#[test]
fn a_disk_is_walked_attached_and_read_inside_others() {
    let name = "disks::a_disk_is_walked_attached_and_read_inside_others";
    if !require_plain_machine(name, &["qemu-img", "sfdisk", "mke2fs"]) {
        return;
    }
    let dir = dir();
    let at = dir.path();
    gpt(&at.join("disk.raw"), 8 * MIB);
    let file = fs::File::options().write(true).open(at.join("disk.raw")).unwrap();
    file.write_all_at(&random_bytes(2 << 20, 3), 2 << 20).unwrap();
    let content = fs::read(at.join("disk.raw")).unwrap();
    fs::create_dir(at.join("tree")).unwrap();
    for (number, kind) in KINDS.iter().enumerate() {
        // The name says nothing, except where a description names other files.
        let suffix = if kind.suffix == "vmdk" { "vmdk" } else { "img" };
        let name = format!("{number}.{suffix}");
        let path = at.join(&name);
        qemu_img(at, &["convert", "-f", "raw", "-O", kind.qemu, "-o", kind.options, "disk.raw", &name]);
        assert_same(at, &name, kind.qemu);
        let part = look(&path.join("p1"), Format::Auto, &[]).unwrap();
        let part = part.last().unwrap().image.read_vec(0, 4 << 20).unwrap();
        assert!(part == content[1 << 20..5 << 20], "{name}");
        let opened = open(&path).unwrap();
        let why = opened.read_only_reason.as_deref().unwrap();
        assert!(opened.read_only && opened.nested && !opened.grows && why.contains("only reads"), "{why}");
        assert_eq!(opened.encoded.len(), usize::from(kind.options.contains("stream")), "{name}");
        // Readers do not exclude each other.
        open(&path).unwrap();
        drop(opened);
        let format = kind.suffix.parse().unwrap();
        look(&path, format, &[]).unwrap();
        let wrong = look(&path, Format::Qcow2, &[]).unwrap_err().to_string();
        assert!(wrong.contains("does not read") || wrong.contains("it is not qcow2"), "{name}: {wrong}");
        let image = look(&path, Format::Auto, &[]).unwrap().last().unwrap().image.clone();
        let report = inspect(&image, &name, Format::Auto);
        assert_eq!(report.stored.unwrap().format, kind.suffix, "{name}");
        assert_eq!((report.about.format, report.children.len()), ("gpt", 2), "{name}");
        if !kind.options.contains("twoGb") {
            fs::copy(&path, at.join("tree").join(&name)).unwrap();
        }
    }
    ext4(&at.join("fs.img"), 128 * MIB, &at.join("tree"));
    for entry in fs::read_dir(at.join("tree")).unwrap() {
        let name = entry.unwrap().file_name();
        let walk = look(&at.join("fs.img").join(&name), Format::Auto, &[]).unwrap();
        let why = walk.read_only.as_deref().unwrap();
        assert!(why.contains("inside another image") || why.contains("holes"), "{name:?}: {why}");
        let inner = walk.last().unwrap().image.clone();
        let there = inner.read_vec(0, content.len()).unwrap();
        let differs = there.iter().zip(&content).position(|(one, other)| one != other);
        assert_eq!(differs, None, "{name:?}");
    }
}

/// Changes bytes of a file.
fn patch(path: &Path, at: u64, bytes: &[u8]) {
    fs::File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

#[track_caller]
fn refused(path: &Path, why: &str, with_hint: bool) {
    let error = look(path, Format::Auto, &[]).unwrap_err();
    assert!(error.to_string().contains(why), "{}: {error}", path.display());
    let foreign = matches!(error, Error::Layer { source: LayerError::Foreign { .. }, .. });
    assert_eq!(foreign, with_hint, "{error}");
    if with_hint {
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.hint().unwrap().contains("qemu-img convert"), "{error}");
    }
    // Its bytes can be had all the same.
    look(path, Format::Raw, &[]).unwrap();
}

/// CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

#[test]
fn what_lies_over_another_disk_is_refused_with_a_sentence() {
    if !ready("what_lies_over_another_disk_is_refused_with_a_sentence") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    fs::write(at.join("in.raw"), random_bytes(2 << 20, 5)).unwrap();
    let make = |kind: &str, options: &str, name: &str| {
        qemu_img(at, &["convert", "-f", "raw", "-O", kind, "-o", options, "in.raw", name]);
        at.join(name)
    };
    let vdi = make("vdi", "static=off", "a.vdi");
    patch(&vdi, 0x4c, &4_u32.to_le_bytes());
    refused(&vdi, "a snapshot over another disk", true);
    patch(&vdi, 0x4c, &1_u32.to_le_bytes());
    patch(&vdi, 0x1b8, &[7; 16]);
    refused(&vdi, "a snapshot over another disk", true);
    patch(&vdi, 0x1b8, &[0; 16]);
    patch(&vdi, 0x44, &0x10000_u32.to_le_bytes());
    refused(&vdi, "its version is 1.0", true);

    let vhd = make("vpc", "subformat=dynamic,force_size=on", "a.vhd");
    let mut footer = fs::read(&vhd).unwrap()[..512].to_vec();
    footer[60..64].copy_from_slice(&4_u32.to_be_bytes());
    footer[64..68].fill(0);
    let sum = !footer.iter().map(|byte| u32::from(*byte)).sum::<u32>();
    footer[64..68].copy_from_slice(&sum.to_be_bytes());
    let end = vhd.metadata().unwrap().len() - 512;
    patch(&vhd, 0, &footer);
    patch(&vhd, end, &footer);
    refused(&vhd, "a differencing disk over another one", true);
    // A wrong sum is not a footer: the file is recognised and not read.
    patch(&vhd, 70, &[1]);
    patch(&vhd, end + 70, &[1]);
    refused(&vhd, "a Virtual PC disk", true);

    qemu_img(at, &["create", "-q", "-f", "vmdk", "base.vmdk", "1M"]);
    qemu_img(at, &["create", "-q", "-f", "vmdk", "-F", "vmdk", "-b", "base.vmdk", "snap.vmdk"]);
    refused(&at.join("snap.vmdk"), "a snapshot over another disk", true);
    make("vmdk", "subformat=twoGbMaxExtentSparse", "split.vmdk");
    refused(&at.join("split-s001.vmdk"), "a piece of a disk", true);
    let split = fs::read_to_string(at.join("split.vmdk")).unwrap();
    fs::write(at.join("other.vmdk"), split.replace("split-s001", "absent")).unwrap();
    refused(&at.join("other.vmdk"), "no such file", false);
    fs::write(at.join("other.vmdk"), split.replace("split-s001.vmdk", "in.raw")).unwrap();
    refused(&at.join("other.vmdk"), "SPARSE is none", false);
    let stream = make("vmdk", "subformat=streamOptimized", "stream.vmdk");
    let cut = stream.metadata().unwrap().len() - 512;
    fs::File::options().write(true).open(&stream).unwrap().set_len(cut).unwrap();
    refused(&stream, "beyond the file's end", false);

    // A log with an entry: the newer header names it.
    let vhdx = make("vhdx", "subformat=dynamic,block_size=1M", "a.vhdx");
    let bytes = fs::read(&vhdx).unwrap();
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let at_header = if number((64 << 10) + 8) > number((128 << 10) + 8) { 64 << 10 } else { 128 << 10 };
    let mut header = bytes[at_header..at_header + 4096].to_vec();
    header[48..64].fill(0xa5);
    header[4..8].fill(0);
    let sum = crc32c(&header);
    header[4..8].copy_from_slice(&sum.to_le_bytes());
    patch(&vhdx, at_header as u64, &header);
    // Without an entry it is nothing to be replayed.
    assert_same_length(&vhdx, 2 << 20);
    let log = u64::from_le_bytes(header[72..80].try_into().unwrap());
    patch(&vhdx, log + 8192, b"loge");
    patch(&vhdx, log + 8192 + 32, &[0xa5; 16]);
    refused(&vhdx, "qemu-img check -r all", true);
    patch(&vhdx, 64 << 10, &[0; 4096]);
    patch(&vhdx, 128 << 10, &[0; 4096]);
    refused(&vhdx, "both headers", false);
}

fn assert_same_length(path: &Path, len: u64) {
    assert_eq!(look(path, Format::Auto, &[]).unwrap().last().unwrap().image.len(), len);
}

#[test]
fn the_header_at_the_end_of_a_stream_counts() {
    if !ready("the_header_at_the_end_of_a_stream_counts") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    raw(&at.join("in.raw"), 77);
    let content = fs::read(at.join("in.raw")).unwrap();
    qemu_img(
        at,
        &["convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=streamOptimized", "in.raw", "s.vmdk"],
    );
    // As VMware's own programs write it: what is written first does not know yet where the directory will be.
    let path = at.join("s.vmdk");
    let header = fs::read(&path).unwrap()[..512].to_vec();
    let end = path.metadata().unwrap().len().next_multiple_of(512);
    patch(&path, 56, &[0xff; 8]);
    patch(&path, 28 + 16, &[0xff; 4]);
    patch(&path, end + 12, &3_u32.to_le_bytes());
    patch(&path, end + 512, &header);
    patch(&path, end + 1024, &[0; 512]);
    let image = look(&path, Format::Auto, &[]).unwrap().last().unwrap().image.clone();
    assert!(image.read_vec(0, content.len()).unwrap() == content);
    patch(&path, end + 512, b"X");
    refused(&path, "the copy of the header at the end is missing", false);
}

#[test]
fn a_guest_that_writes_a_header_gets_its_own_bytes_only() {
    if !ready("a_guest_that_writes_a_header_gets_its_own_bytes_only") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    // A partition that begins like a container is a partition.
    fs::create_dir(at.join("tree")).unwrap();
    partitioned(&at.join("disk.img"), &at.join("tree"));
    qemu_img(at, &["create", "-q", "-f", "vdi", "v.vdi", "1M"]);
    let start = look(&at.join("disk.img/p1"), Format::Auto, &[]).unwrap().last().unwrap().span.unwrap().0;
    patch(&at.join("disk.img"), start, &fs::read(at.join("v.vdi")).unwrap()[..512]);
    let opened = open(&at.join("disk.img/p1")).unwrap();
    assert!(!opened.read_only && opened.map.len() > MIB);
}
