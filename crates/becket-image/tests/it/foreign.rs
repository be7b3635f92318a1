//! Containers that becket does not read: each is refused, with a command that makes of it what it holds.
//! It never takes becket's own word for what a file is: other programs make all of them.

use std::fs;
use std::path::Path;
use std::process::Command;

use becket_image::{Error, ErrorKind, Format, Image, OpenOptions, inspect};
use becket_testkit::image::{ext4, gpt, partitioned, random_bytes};
use becket_testkit::{require_plain_machine, tool};

use crate::common::{dir, file, look, open};

const MIB: u64 = 1 << 20;

fn sh(dir: &Path, line: &str) {
    tool(Command::new("bash").current_dir(dir).args(["-e", "-o", "pipefail", "-c", line]));
}

fn raw(path: &Path) -> Result<becket_image::Opened, Error> {
    becket_image::open(path, &OpenOptions { format: Format::Raw, ..OpenOptions::default() })
}

/// The image that a path names.
fn seen(path: &Path, format: Format) -> Image {
    look(path, format, &[]).unwrap().last().unwrap().image.clone()
}

fn bytes(image: &Image) -> Vec<u8> {
    image.read_vec(0, image.len() as usize).unwrap()
}

#[test]
fn a_container_is_refused_and_its_command_works() {
    if !require_plain_machine(
        "foreign::a_container_is_refused_and_its_command_works",
        &[
            "qemu-img", "sfdisk", "bzip2", "lz4", "lzip", "lzop", "xz", "gzip", "zip", "unzip", "7z", "tar",
            "cpio", "ar",
        ],
    ) {
        return;
    }
    let dir = dir();
    let at = dir.path();
    gpt(&at.join("disk.raw"), 8 * MIB);
    let mut content = fs::read(at.join("disk.raw")).unwrap();
    content[2 << 20..3 << 20].copy_from_slice(&random_bytes(1 << 20, 3));
    fs::write(at.join("disk.raw"), &content).unwrap();
    let qemu = |format: &str| format!("qemu-img convert -f raw -O {format} disk.raw");
    // An archive is unpacked, and the disk is a file in it.
    for (name, inspected, make, converts) in [
        ("v.qed", "qed", format!("{} v.qed", qemu("qed")), true),
        ("v.hds", "parallels", format!("{} v.hds", qemu("parallels")), true),
        ("v.qcow", "qcow", format!("{} v.qcow", qemu("qcow")), true),
        ("disk.img.bz2", "bzip2", "bzip2 -c disk.raw >disk.img.bz2".to_owned(), true),
        ("disk.img.lz", "lzip", "lzip -c disk.raw >disk.img.lz".to_owned(), true),
        ("disk.img.lzo", "lzop", "lzop -c disk.raw >disk.img.lzo".to_owned(), true),
        ("disk.img.lz4", "lz4", "lz4 -q disk.raw disk.img.lz4".to_owned(), true),
        ("legacy.img.lz4", "lz4", "lz4 -q -l disk.raw legacy.img.lz4".to_owned(), true),
        ("disk.img.lzma", "lzma", "xz --format=lzma -c disk.raw >disk.img.lzma".to_owned(), true),
        ("disk.img.gz", "gzip", "gzip -c disk.raw >disk.img.gz".to_owned(), true),
        ("disk.zip", "zip", "zip -q disk.zip disk.raw".to_owned(), false),
        ("disk.7z", "7z", "7z a -bso0 -bsp0 disk.7z disk.raw".to_owned(), false),
        ("disk.cpio", "cpio", "echo disk.raw | cpio --quiet -o -H newc >disk.cpio".to_owned(), false),
        ("disk.a", "ar", "ar -qc disk.a disk.raw".to_owned(), false),
        ("disk.tar", "tar", "tar -cf disk.tar disk.raw".to_owned(), false),
        ("disk.posix.tar", "tar", "tar --format=posix -cf disk.posix.tar disk.raw".to_owned(), false),
    ] {
        let path = at.join(name);
        sh(at, &make);
        let error = open(&path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{name}: {error}");
        assert!(error.to_string().contains("it is "), "{name}: {error}");
        let hint = error.hint().unwrap();
        assert!(hint.contains("--format raw"), "{name}: {hint}");
        look(&path, Format::Auto, &[]).unwrap_err();
        look(&path.join("p1"), Format::Auto, &[]).unwrap_err();
        // By its own user's word it is bytes, and can be written.
        let opened = raw(&path).unwrap();
        assert!(!opened.read_only, "{name}");
        let attached = opened.map.len();
        drop(opened);
        assert_eq!(attached, path.metadata().unwrap().len() / 512 * 512, "{name}");
        let report = inspect(&seen(&path, Format::Raw), path.to_str().unwrap(), Format::Auto);
        assert_eq!(report.about.format, inspected, "{name}");
        assert!(
            report.problems[0].contains("--format raw") && report.children.is_empty(),
            "{name}: {report:?}"
        );
        let command = hint.split("; ").next().unwrap().split_once(": ").unwrap().1;
        let out = if converts { at.to_owned() } else { at.join(format!("from {name}")) };
        fs::create_dir_all(&out).unwrap();
        let files = || fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().path());
        let before: Vec<_> = files().collect();
        sh(&out, command);
        let made: Vec<_> = files().filter(|path| !before.contains(path)).collect();
        let [made] = made.as_slice() else { panic!("{name}: {command} made {made:?}") };
        assert!(converts || made.ends_with("disk.raw"), "{name}: {command} made {made:?}");
        assert!(fs::read(made).unwrap() == content, "{name}: {command}");
        let opened =
            becket_image::open(made, &OpenOptions { partitions: true, ..OpenOptions::default() }).unwrap();
        assert!(!opened.read_only && opened.map.len() == content.len() as u64, "{name}: {command}");
        assert!(!opened.partitions.is_empty(), "{name}: {command}");
    }
    // The second conversion of one name overwrites nothing.
    let again = open(&at.join("v.qed")).unwrap_err().hint().unwrap();
    assert!(again.contains("v.raw.raw"), "{again}");
}

#[test]
fn what_nobody_knows_is_a_raw_disk() {
    if !require_plain_machine("foreign::what_nobody_knows_is_a_raw_disk", &["cryptsetup"]) {
        return;
    }
    let dir = dir();
    let at = dir.path();
    fs::write(at.join("key"), "key").unwrap();
    for kind in ["luks1", "luks2"] {
        let path = file(at, kind, 32 * MIB);
        sh(
            at,
            &format!(
                "cryptsetup -q luksFormat --type {kind} --pbkdf pbkdf2 --pbkdf-force-iterations 1000 {kind} key"
            ),
        );
        assert!(fs::read(&path).unwrap().starts_with(b"LUKS"));
        assert!(!open(&path).unwrap().read_only, "{kind}");
    }
    for (name, content) in [("random", random_bytes(1 << 20, 9)), ("text", b"becket\n".repeat(1000))] {
        fs::write(at.join(name), content).unwrap();
        assert!(!open(&at.join(name)).unwrap().read_only, "{name}");
    }
}

#[test]
fn inside_an_image_the_same_holds_and_raw_gives_what_is_stored() {
    if !require_plain_machine(
        "foreign::inside_an_image_the_same_holds_and_raw_gives_what_is_stored",
        &["qemu-img", "mke2fs", "sfdisk", "xz", "zip"],
    ) {
        return;
    }
    let dir = dir();
    let at = dir.path();
    fs::create_dir(at.join("tree")).unwrap();
    fs::write(at.join("disk.raw"), random_bytes(64 << 10, 3)).unwrap();
    sh(at, "qemu-img convert -f raw -O qed disk.raw tree/v.qed");
    sh(at, "qemu-img convert -f raw -O qcow2 disk.raw tree/v.qcow2");
    sh(at, "xz --block-size=16KiB -c disk.raw >tree/v.raw.xz; xz -c tree/v.qed >tree/v.qed.xz");
    sh(at, "zip -q tree/v.zip disk.raw");
    sh(
        at,
        "printf '# Disk DescriptorFile\\nRW 8 FLAT \"/etc/passwd\"\\n' >tree/v.vmdk; truncate -s 4K tree/v.vmdk",
    );
    partitioned(&at.join("disk.img"), &at.join("tree"));
    let inside = at.join("disk.img/p1");
    for name in ["v.qed", "v.zip", "v.vmdk", "v.qed.xz"] {
        let error = open(&inside.join(name)).unwrap_err();
        assert!(error.to_string().contains("which becket does not read"), "{name}: {error}");
        assert!(name == "v.qed.xz" || error.hint().unwrap().contains("copy it out"), "{name}");
    }
    for name in ["v.qed", "v.zip", "v.vmdk", "v.qcow2", "v.raw.xz"] {
        let stored = fs::read(at.join("tree").join(name)).unwrap();
        assert!(bytes(&seen(&inside.join(name), Format::Raw)) == stored, "{name}");
        let opened = raw(&inside.join(name)).unwrap();
        assert!(opened.encoded.is_empty(), "{name}");
        let why = opened.read_only_reason.unwrap_or_default();
        assert!(!opened.read_only || why.contains("holes"), "{name}: {why}");
    }
    // Without it, what is stored in it.
    for name in ["v.qcow2", "v.raw.xz"] {
        let disk = fs::read(at.join("disk.raw")).unwrap();
        assert!(bytes(&seen(&inside.join(name), Format::Auto)) == disk, "{name}");
    }
    // An archive among a file system's files is not an image; a disk that becket does not read is one.
    let report = inspect(&seen(&inside, Format::Auto), "p1", Format::Auto);
    let qed = report.children.iter().find(|child| child.name == "v.qed").unwrap();
    assert!(qed.about.format == "qed" && qed.problems[0].contains("copy it out"), "{qed:?}");
    assert!(!report.children.iter().any(|child| child.name == "v.zip"), "{report:?}");
}

/// What a guest writes at the start of its disk says nothing about the file that the disk is in.
#[test]
fn a_disk_or_partition_that_begins_like_a_compressed_file_is_a_disk() {
    let name = "foreign::a_disk_or_partition_that_begins_like_a_compressed_file_is_a_disk";
    if !require_plain_machine(name, &["qemu-img", "sfdisk", "gzip", "xz", "zstd"]) {
        return;
    }
    let dir = dir();
    let at = dir.path();
    fs::write(at.join("input"), random_bytes(300_000, 5)).unwrap();
    for packer in ["gzip -c", "xz --block-size=64KiB -c", "xz -c", "zstd -q -c"] {
        sh(at, &format!("{packer} input >packed"));
        let mut stored = fs::read(at.join("packed")).unwrap();
        stored.resize(stored.len().next_multiple_of(512), 0);
        fs::write(at.join("disk"), &stored).unwrap();
        sh(at, "rm -f d.*; for f in qcow2 vmdk vdi vhdx; do qemu-img convert -f raw -O $f disk d.$f; done");
        sh(at, "qemu-img create -q -f qcow2 -b disk -F raw d.over.qcow2");
        sh(at, "truncate -s 2M gpt; echo start=1024 | sfdisk -q -X gpt gpt");
        let mut disk = fs::read(at.join("gpt")).unwrap();
        disk[1024 * 512..][..stored.len()].copy_from_slice(&stored);
        fs::write(at.join("gpt"), &disk).unwrap();
        for place in ["d.qcow2", "d.vmdk", "d.vdi", "d.vhdx", "d.over.qcow2", "gpt/p1"] {
            let path = at.join(place);
            let opened = open(&path).unwrap_or_else(|error| panic!("{packer} in {place}: {error}"));
            assert!(opened.map.len() >= stored.len() as u64, "{packer} in {place}");
            let image = seen(&path, Format::Auto);
            assert!(bytes(&image)[..stored.len()] == stored, "{packer} in {place}");
            let report = inspect(&image, place, Format::Auto);
            let said = (report.about.format, report.problems.len(), report.children.len());
            assert_eq!(said, ("raw", 0, 0), "{packer} in {place}");
        }
        let report = inspect(&seen(&at.join("gpt"), Format::Auto), "gpt", Format::Auto);
        assert_eq!((report.children[0].about.format, report.children[0].problems.len()), ("raw", 0));
    }
}

#[test]
fn images_in_a_file_system_that_cannot_be_read_are_named_with_the_reason() {
    let name = "foreign::images_in_a_file_system_that_cannot_be_read_are_named_with_the_reason";
    if !require_plain_machine(name, &["qemu-img", "mke2fs", "sfdisk", "mkswap", "xz"]) {
        return;
    }
    let dir = dir();
    let at = dir.path();
    fs::create_dir(at.join("tree")).unwrap();
    gpt(&at.join("disk.raw"), 8 * MIB);
    let mut content = fs::read(at.join("disk.raw")).unwrap();
    content[2 << 20..][..64 << 10].copy_from_slice(&random_bytes(64 << 10, 3));
    fs::write(at.join("disk.raw"), &content).unwrap();
    sh(at, "qemu-img convert -f raw -O qcow2 disk.raw tree/a.qcow2");
    sh(at, "qemu-img create -q -f qcow2 -u -b disk.raw -F raw tree/over.qcow2 8M");
    sh(at, "qemu-img create -q -f qcow2 -o data_file=tree/data tree/beside.qcow2 64K; rm tree/data");
    sh(
        at,
        "qemu-img create -q -f qcow2 --object secret,id=s,data=x \
         -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 tree/secret.qcow2 64K",
    );
    sh(at, "xz --block-size=64KiB -c tree/a.qcow2 >tree/a.qcow2.xz");
    sh(at, "truncate -s 64K tree/swap.img; mkswap -q tree/swap.img");
    sh(at, "(printf 'LUKS\\272\\276\\0\\2'; head -c 65528 /dev/zero) >tree/luks.img");
    partitioned(&at.join("disk.img"), &at.join("tree"));
    let report = inspect(&seen(&at.join("disk.img/p1"), Format::Auto), "p1", Format::Auto);
    let child = |name: &str| {
        let found = report.children.iter().find(|child| child.name == name);
        found.unwrap_or_else(|| panic!("{name}: {report:?}"))
    };
    for (name, format, why) in [
        ("over.qcow2", "qcow2", "backing file"),
        ("beside.qcow2", "qcow2", "data are in another file"),
        ("secret.qcow2", "qcow2", "encrypted"),
    ] {
        let child = child(name);
        let [problem] = child.problems.as_slice() else { panic!("{child:?}") };
        assert!(child.about.format == format && problem.contains(why), "{child:?}");
    }
    for (name, format) in [("swap.img", "swap"), ("luks.img", "crypto_LUKS")] {
        assert_eq!((child(name).about.format, child(name).problems.len()), (format, 0));
    }
    let [disk, unpacked] = [child("a.qcow2"), &child("a.qcow2.xz").children[0]];
    for disk in [disk, unpacked] {
        let stored = disk.stored.as_ref().map(|about| about.format);
        assert_eq!((disk.about.format, disk.size, stored), ("gpt", 8 * MIB, Some("qcow2")), "{disk:?}");
    }
}

#[test]
fn a_format_that_was_named_is_held_to() {
    if !require_plain_machine("foreign::a_format_that_was_named_is_held_to", &["mke2fs", "sfdisk"]) {
        return;
    }
    let dir = dir();
    let at = dir.path();
    fs::create_dir(at.join("tree")).unwrap();
    ext4(&at.join("fs.img"), 8 * MIB, &at.join("tree"));
    gpt(&at.join("disk.img"), 8 * MIB);
    let as_ = |name: &str, format| {
        becket_image::open(&at.join(name), &OpenOptions { format, ..OpenOptions::default() })
    };
    for format in [Format::Ext, Format::Auto, Format::Raw] {
        as_("fs.img", format).unwrap();
    }
    as_("disk.img", Format::Disk).unwrap();
    for format in [Format::Fat, Format::Squashfs, Format::Xz, Format::Gzip, Format::Disk, Format::Vmdk] {
        let error = as_("fs.img", format).unwrap_err().to_string();
        assert!(error.contains(&format!("it is not {format}")), "{error}");
    }
    assert!(as_("disk.img", Format::Ext).unwrap_err().to_string().contains("it is not ext4"));
}
