//! Containers that becket does not read, recognised so that none is attached as if it were the raw bytes of a
//! disk.
//! It never refuses what can be a raw disk: a LUKS header, an unknown file system and random bytes stay raw.
//!
//! A new format is one line in [`FORMATS`]. A magic number must be so long, or be checked against so many
//! other fields, that random bytes match it less often than once in 2^20 disks: `--format raw` helps, but a
//! false refusal is a failed boot.

use super::{Foreign, Format, LayerError, detect};
use crate::bytes::field;
use crate::disk::ends::Ends;
use crate::image::{Image, Role};

/// One of [`FORMATS`].
struct Known {
    format: Foreign,
    magic: fn(&Ends) -> bool,
}

const fn known(format: Foreign, magic: fn(&Ends) -> bool) -> Known {
    Known { format, magic }
}

const fn disk(
    name: &'static str,
    what: &'static str,
    command: &'static str,
    magic: fn(&Ends) -> bool,
) -> Known {
    known(container(name, what, command), magic)
}

const fn packed(
    name: &'static str,
    what: &'static str,
    command: &'static str,
    magic: fn(&Ends) -> bool,
) -> Known {
    Known { format: Foreign { name, what, disk: false, command }, magic }
}

/// What the description of a VMDK begins with, in any case of letters.
pub(crate) const VMDK_TITLE: &[u8] = b"# disk descriptorfile";

/// Disks that [`crate::disk`] reads, but not all of them: it refuses the others with these. They are in the
/// table, too, for a file that nobody has said to be one (a backing file) is none.
pub(crate) const VDI: Foreign =
    container("vdi", "a VirtualBox disk (VDI)", "qemu-img convert -f vdi -O raw IN OUT");
pub(crate) const VHDX: Foreign =
    container("vhdx", "a Hyper-V disk (VHDX)", "qemu-img convert -f vhdx -O raw IN OUT");
pub(crate) const VHD: Foreign =
    container("vhd", "a Virtual PC disk (VHD)", "qemu-img convert -f vpc -O raw IN OUT");
pub(crate) const VMDK: Foreign =
    container("vmdk", "a VMware disk (VMDK)", "qemu-img convert -f vmdk -O raw IN OUT");

const fn container(name: &'static str, what: &'static str, command: &'static str) -> Foreign {
    Foreign { name, what, disk: true, command }
}

/// All formats, in the order in which they are tried.
#[rustfmt::skip]
static FORMATS: [Known; 36] = [
    known(VDI, |e| field(&e.head, 0x40) == *b"\x7f\x10\xda\xbe" && matches!(e.le32(0x44), 1 | 0x1_0000 | 0x1_0001)),
    known(VHDX, |e| e.begins(b"vhdxfile")),
    // A fixed one is the disk with a footer behind it; the footer of old versions has 511 bytes.
    known(VHD, |e| vhd(&e.head) || vhd(&e.tail) || vhd(e.tail.get(1..).unwrap_or_default())),
    disk("qed", "a QED disk", "qemu-img convert -f qed -O raw IN OUT",
        |e| e.begins(b"QED\0") && e.le32(4).is_power_of_two() && (1 << 12..=1 << 26).contains(&e.le32(4))),
    disk("parallels", "a Parallels disk", "qemu-img convert -f parallels -O raw IN OUT",
        |e| e.begins(b"WithoutFreeSpace") || e.begins(b"WithouFreSpacExt")),
    disk("qcow", "a disk of QEMU's first format (qcow, version 1)", "qemu-img convert -f qcow -O raw IN OUT",
        |e| e.begins(b"QFI\xfb\0\0\0\x01")),
    known(VMDK, |e| e.begins(b"KDMV") && (1..=3).contains(&e.le32(4)) || e.begins(b"COWD\x01\0\0\0")
            || e.begins(b"\xbe\xba\xfe\xca\0\0\0\0\x01\0\0\0\x02\0\0\0")),
    disk("vmdk", "the description of a VMware disk (VMDK)", "qemu-img convert -f vmdk -O raw IN OUT",
        |e| e.head.get(..VMDK_TITLE.len()).is_some_and(|head| head.eq_ignore_ascii_case(VMDK_TITLE))),
    disk("dmg", "an Apple disk image (UDIF, dmg)", "qemu-img convert -f dmg -O raw IN OUT",
        |e| e.tail.starts_with(b"koly\0\0\0\x04\0\0\x02\0")),
    disk("sparseimage", "an Apple sparse image", "hdiutil convert IN -format UDTO -o OUT",
        |e| e.begins(b"sprs\0\0\0\x03")),
    disk("asif", "an Apple sparse image (ASIF)", "diskutil image attach -nomount IN; dd if=/dev/diskN of=OUT",
        |e| e.begins(b"shdw\0\0\0\x01\0\0\x02\0")),
    disk("bochs", "a Bochs disk", "qemu-img convert -f bochs -O raw IN OUT",
        |e| e.begins(b"Bochs Virtual HD Image\0")),
    disk("cloop", "a compressed loop image (cloop)", "qemu-img convert -f cloop -O raw IN OUT",
        |e| e.begins(b"#!/bin/sh\n#V") && e.head.windows(14).any(|text| text == b"modprobe cloop")),
    disk("ewf", "an EnCase image (EWF, E01)", "ewfexport -u -f raw -t OUT IN",
        |e| e.begins(b"EVF\x09\r\n\xff\0") || e.begins(b"EVF2\r\n\x81\0")),
    packed("ewf", "an EnCase archive of files (EWF, L01)", "ewfexport -u -f files -t OUT IN",
        |e| e.begins(b"LVF\x09\r\n\xff\0") || e.begins(b"LEF2\r\n\x81\0")),
    disk("aff", "an AFF image", "affcat IN >OUT", |e| e.begins(b"AFF10\r\n\0")),
    disk("aff4", "an AFF4 image", "aff4imager -i IN --export_dir OUT -e '*'",
        |e| zip(e) && field(&e.head, 30) == *b"container.description"),
    disk("simg", "an Android sparse image", "simg2img IN OUT",
        |e| e.begins(b"\x3a\xff\x26\xed\x01\0") && e.le32(8) == 0x000c_001c),
    disk("partclone", "a Partclone image", "partclone.restore -C --restore_raw_file -s IN -o OUT",
        |e| e.begins(b"partclone-image")),
    disk("ntfsclone", "an ntfsclone image", "ntfsclone --restore-image --overwrite OUT IN",
        |e| e.begins(b"\0ntfsclone-image")),
    disk("chd", "a MAME disk (CHD)", "chdman extracthd -i IN -o OUT", |e| e.begins(b"MComprHD")),
    packed("bzip2", "a file compressed by bzip2", "bzip2 -dc IN >OUT",
        |e| e.begins(b"BZh") && (b'1'..=b'9').contains(&e.byte(3))
            && matches!(&field(&e.head, 4), b"1AY&SY" | b"\x17rE8P\x90")),
    packed("lz4", "a file compressed by lz4", "lz4 -dc IN >OUT",
        |e| e.begins(b"\x04\x22\x4d\x18") && e.byte(4) & 0xc2 == 0x40 && e.byte(5) & 0x8f == 0
            || e.begins(b"\x02\x21\x4c\x18")),
    packed("lzip", "a file compressed by lzip", "lzip -dc IN >OUT",
        |e| e.begins(b"LZIP\x01") && (12..=29).contains(&(e.byte(5) & 0x1f))),
    packed("lzma", "a file compressed by lzma", "xz --format=lzma -dc IN >OUT", lzma),
    packed("lzop", "a file compressed by lzop", "lzop -dc IN >OUT", |e| e.begins(b"\x89LZO\0\r\n\x1a\n")),
    packed("compress", "a file compressed by compress", "gzip -dc IN >OUT",
        |e| e.begins(b"\x1f\x9d") && e.byte(2) & 0xe0 == 0x80 && (9..=16).contains(&(e.byte(2) & 0x1f))),
    packed("zip", "a zip archive", "unzip IN", |e| zip(e) || e.begins(b"PK\x05\x06\0\0\0\0")),
    packed("7z", "a 7z archive", "7z x IN", |e| e.begins(b"7z\xbc\xaf\x27\x1c\0")),
    packed("rar", "a RAR archive", "unrar x IN",
        |e| e.begins(b"Rar!\x1a\x07\0") || e.begins(b"Rar!\x1a\x07\x01\0")),
    packed("tar", "a tar archive", "tar -xf IN", tar),
    packed("cpio", "a cpio archive", "cpio -id <IN", |e| e.begins(b"070701") || e.begins(b"070702")),
    packed("ar", "an ar archive", "ar x IN", |e| e.begins(b"!<arch>\n")),
    packed("vma", "a Proxmox backup (VMA)", "vma extract IN OUT", |e| e.begins(b"VMA\0\0\0\0\x01")),
    packed("wim", "a Windows image (WIM)", "wimapply IN 1 OUT", |e| e.begins(b"MSWIM\0\0\0")),
    packed("cab", "a cabinet archive", "cabextract IN", |e| e.begins(b"MSCF\0\0\0\0") && e.le32(12) == 0),
];

/// Cookie, and the only version that there is.
fn vhd(bytes: &[u8]) -> bool {
    bytes.starts_with(b"conectix") && field(bytes, 12) == [0, 1, 0, 0]
}

/// The header of a file in a zip, of a version and by a method that exist.
fn zip(ends: &Ends) -> bool {
    ends.begins(b"PK\x03\x04") && ends.byte(4) <= 63 && ends.byte(9) == 0
}

/// There is no magic number. It checks the properties that every encoder writes: a dictionary that xz
/// accepts, a length that is unknown or below 256 GiB, and the first byte of the range coder, which is always
/// zero.
fn lzma(ends: &Ends) -> bool {
    let (dictionary, length) = (ends.le32(1), ends.le64(5));
    let alone = dictionary.is_power_of_two() || (dictionary / 3).is_power_of_two() && dictionary % 3 == 0;
    ends.begins(b"\x5d\0\0")
        && (alone || dictionary == u32::MAX)
        && (length == u64::MAX || (1..1 << 38).contains(&length))
        && ends.byte(13) == 0
}

/// A POSIX or GNU header with a correct checksum: the sum of its bytes, with spaces in place of the checksum.
fn tar(ends: &Ends) -> bool {
    let octal = ends.head.get(148..156).unwrap_or_default();
    let digits = octal.iter().skip_while(|byte| **byte == b' ').take_while(|byte| byte.is_ascii_digit());
    let said = digits.fold(0_u32, |sum, digit| sum.wrapping_mul(8).wrapping_add(u32::from(digit - b'0')));
    let sum = |bytes: Option<&[u8]>| bytes.unwrap_or_default().iter().copied().map(u32::from).sum::<u32>();
    let all = sum(Some(&ends.head)) - sum(Some(octal)) + 8 * u32::from(b' ');
    field(&ends.head, 257) == *b"ustar" && ends.byte(0) != 0 && said == all
}

/// What `image` is, where that is a container that becket does not read.
///
/// A file system or partition table that begins at the same byte takes precedence over an archive or a
/// compressed file: such a disk may have any bytes in its boot sector. It does not over a disk container,
/// which holds the table of its disk.
///
/// # Errors
/// The image's budget is spent.
pub fn find(image: &Image) -> Result<Option<&'static Foreign>, LayerError> {
    // The disk in a container is one, whatever its user has written there.
    if image.role() != Role::File {
        return Ok(None);
    }
    let Some(ends) = Ends::of(image)? else { return Ok(None) };
    let Some(Known { format, .. }) = FORMATS.iter().find(|known| (known.magic)(&ends)) else {
        return Ok(None);
    };
    let holds = || detect(image, Format::Auto).is_ok_and(|contents| contents.is_container());
    Ok((format.disk || !holds()).then_some(format))
}

/// Refuses such a container.
///
/// # Errors
/// It is one.
pub(crate) fn refuse(image: &Image) -> Result<(), LayerError> {
    match find(image)? {
        Some(format) => Err(LayerError::Foreign { format, why: None }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const LEN: usize = 64 << 10;
    /// How the footer of a VHD begins.
    const VHD: &[u8] = b"conectix\0\0\0\x02\0\x01\0\0";

    fn found(bytes: Vec<u8>) -> Option<&'static str> {
        let len = bytes.len() as u64;
        find(&Image::raw(Arc::new(bytes), len, 512)).unwrap().map(|format| format.name)
    }

    fn with(at: usize, magic: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        bytes[at..at + magic.len()].copy_from_slice(magic);
        bytes
    }

    #[test]
    fn each_magic_number_is_recognised() {
        for (name, at, magic) in [
            ("vdi", 0x40, &b"\x7f\x10\xda\xbe\x01\0\x01\0"[..]),
            ("vhdx", 0, b"vhdxfile"),
            ("vhd", 0, VHD),
            ("vhd", LEN - 512, VHD),
            ("vhd", LEN - 511, VHD),
            ("qed", 0, b"QED\0\0\0\x01\0"),
            ("parallels", 0, b"WithoutFreeSpace"),
            ("parallels", 0, b"WithouFreSpacExt"),
            ("qcow", 0, b"QFI\xfb\0\0\0\x01"),
            ("vmdk", 0, b"KDMV\x01\0\0\0"),
            ("vmdk", 0, b"COWD\x01\0\0\0"),
            ("vmdk", 0, b"\xbe\xba\xfe\xca\0\0\0\0\x01\0\0\0\x02\0\0\0"),
            ("vmdk", 0, b"# disk DESCRIPTORFile\nversion=1\n"),
            ("dmg", LEN - 512, b"koly\0\0\0\x04\0\0\x02\0"),
            ("sparseimage", 0, b"sprs\0\0\0\x03"),
            ("asif", 0, b"shdw\0\0\0\x01\0\0\x02\0"),
            ("bochs", 0, b"Bochs Virtual HD Image\0"),
            ("cloop", 0, b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount"),
            ("ewf", 0, b"EVF\x09\r\n\xff\0"),
            ("ewf", 0, b"EVF2\r\n\x81\0"),
            ("ewf", 0, b"LVF\x09\r\n\xff\0"),
            ("ewf", 0, b"LEF2\r\n\x81\0"),
            ("aff", 0, b"AFF10\r\n\0"),
            ("aff4", 0, b"PK\x03\x04\x14\0\0\0\0\0aaaabbbbccccdddd\x15\0\0\0container.description"),
            ("simg", 0, b"\x3a\xff\x26\xed\x01\0\0\0\x1c\0\x0c\0"),
            ("partclone", 0, b"partclone-image"),
            ("ntfsclone", 0, b"\0ntfsclone-image"),
            ("chd", 0, b"MComprHD"),
            ("bzip2", 0, b"BZh91AY&SY"),
            ("lz4", 0, b"\x04\x22\x4d\x18\x64\x40"),
            ("lz4", 0, b"\x02\x21\x4c\x18"),
            ("lzip", 0, b"LZIP\x01\x0c"),
            ("lzma", 0, b"\x5d\0\0\x80\0\xff\xff\xff\xff\xff\xff\xff\xff\0"),
            ("lzop", 0, b"\x89LZO\0\r\n\x1a\n"),
            ("compress", 0, b"\x1f\x9d\x90"),
            ("zip", 0, b"PK\x03\x04\x14\0\0\0\x08\0"),
            ("7z", 0, b"7z\xbc\xaf\x27\x1c\0\x04"),
            ("rar", 0, b"Rar!\x1a\x07\x01\0"),
            ("cpio", 0, b"070701"),
            ("ar", 0, b"!<arch>\n"),
            ("vma", 0, b"VMA\0\0\0\0\x01"),
            ("wim", 0, b"MSWIM\0\0\0"),
            ("cab", 0, b"MSCF\0\0\0\0"),
        ] {
            assert_eq!(found(with(at, magic)), Some(name), "{name} at {at}");
        }
    }

    #[test]
    fn what_can_be_a_raw_disk_is_none_of_them() {
        for (what, at, magic) in [
            ("zeroes", 0, &b""[..]),
            ("LUKS 1", 0, b"LUKS\xba\xbe\0\x01"),
            ("LUKS 2", 0, b"LUKS\xba\xbe\0\x02"),
            ("XFS", 0, b"XFSB\0\0\x10\0"),
            ("NTFS", 0, b"\xeb\x52\x90NTFS    "),
            ("LVM", 512, b"LABELONE"),
            ("a script", 0, b"#!/bin/sh\necho\n"),
            ("a cookie in the middle", 4096, VHD),
            ("a cookie without version", LEN - 512, b"conectix"),
            ("QED with an impossible cluster", 0, b"QED\0\x01\0\0\0"),
            ("lzma with an impossible dictionary", 0, b"\x5d\0\0\x81\0\xff\xff\xff\xff\xff\xff\xff\xff\0"),
            ("ustar without a checksum", 257, b"ustar\x0000"),
            ("bzip2 without a block", 0, b"BZh9"),
            ("compress with a reserved bit", 0, b"\x1f\x9d\xb0"),
        ] {
            assert_eq!(found(with(at, magic)), None, "{what}");
        }
        assert_eq!(found(vec![b'B'; 100]), None, "too short");
    }

    #[test]
    fn random_bytes_are_none_of_them() {
        use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
        // The same bytes each time: three bytes of some of the magics come by chance once in a million.
        let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let mut runner = TestRunner::new_with_rng(Config { cases: 20_000, ..Config::default() }, rng);
        let bytes = proptest::collection::vec(proptest::num::u8::ANY, 512);
        runner
            .run(&bytes, |bytes| {
                proptest::prop_assert_eq!(found(bytes), None);
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn an_archive_gives_way_to_a_partition_table_and_a_disk_does_not() {
        let table = |magic: &[u8], at: usize| {
            let mut bytes = with(at, magic);
            bytes[450] = 0x83;
            bytes[454..462].copy_from_slice(&[8, 0, 0, 0, 8, 0, 0, 0]);
            bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
            bytes
        };
        assert_eq!(found(table(b"\x1f\x9d\x90", 0)), None);
        assert_eq!(found(table(VHD, LEN - 512)), Some("vhd"));
    }
}
