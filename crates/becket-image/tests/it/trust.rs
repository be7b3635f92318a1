//! References from an image to other files: who must have allowed that they are followed, and into which
//! directory.
//! It never opens as an attacker what the test itself could not: the point is what becket opens for another
//! user.

use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use becket_image::{Error, Format, Identity, OpenOptions, Opened};
use becket_testkit::image::random_bytes;
use becket_testkit::{require_plain_machine, require_root, tool};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::common::{LoopDevice, dir, file, look, open, skip, source_of};

const MIB: u64 = 1 << 20;

fn ready(name: &str) -> bool {
    require_plain_machine(&format!("trust::{name}"), &["qemu-img"])
}

fn qemu_img(dir: &Path, args: &[&str]) {
    tool(Command::new("qemu-img").current_dir(dir).args(args));
}

fn open_as(path: &Path, format: Format) -> Result<Opened, Error> {
    becket_image::open(path, &OpenOptions { format, ..OpenOptions::default() })
}

/// The whole of what a path shows.
fn bytes(path: &Path, format: Format) -> Vec<u8> {
    let walk = look(path, format, &[]).unwrap();
    let image = &walk.last().unwrap().image;
    image.read_vec(0, image.len() as usize).unwrap()
}

fn identity(path: &Path) -> Identity {
    let found = path.metadata().unwrap();
    Identity { dev: found.dev(), ino: found.ino() }
}

/// What a guest writes into its raw disk `victim`: the beginning of `header`.
fn overwrite(victim: &Path, header: &Path) {
    let header = fs::read(header).unwrap();
    fs::OpenOptions::new().write(true).open(victim).unwrap().write_all_at(&header, 0).unwrap();
}

#[track_caller]
fn refused_with_both_commands(path: &Path, format: &str) {
    for error in [open(path).unwrap_err(), look(path, Format::Auto, &[]).unwrap_err()] {
        assert!(error.to_string().contains("refers to other files"), "{error}");
        let hint = error.hint().unwrap();
        for command in [format!("becket attach --format {format} "), "becket attach --format raw ".to_owned()]
        {
            assert!(hint.contains(&command), "{hint}");
        }
    }
}

#[test]
fn a_guest_that_writes_a_header_opens_no_other_file() {
    if !ready("a_guest_that_writes_a_header_opens_no_other_file") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    fs::write(at.join("neighbour.img"), random_bytes(1 << 20, 1)).unwrap();
    let secret = fs::read(at.join("neighbour.img")).unwrap();
    qemu_img(at, &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "neighbour.img", "header.qcow2"]);
    // A guest with a partition table can make it look like one, too.
    let vmdk = "# Disk DescriptorFile\nRW 2048 FLAT \"neighbour.img\" 0\n";
    fs::write(at.join("header.vmdk"), vmdk).unwrap();
    for (name, header, format) in [
        ("disk.img", "header.qcow2", Format::Qcow2),
        ("disk.raw", "header.qcow2", Format::Qcow2),
        ("disk", "header.qcow2", Format::Qcow2),
        ("disk.vmdk.img", "header.vmdk", Format::Vmdk),
        ("flat.qcow2", "header.vmdk", Format::Vmdk),
        ("disk.vmdk", "header.qcow2", Format::Qcow2),
    ] {
        let path = file(at, name, if format == Format::Vmdk { 4096 } else { MIB });
        overwrite(&path, &at.join(header));
        refused_with_both_commands(&path, &format.to_string());
        let inner = open(&path.join("p1")).unwrap_err().to_string();
        assert!(inner.contains("refers to other files"), "{inner}");
        // As raw bytes it shows itself; if the user names the format, its reference is followed.
        let stored = fs::read(&path).unwrap();
        assert!(bytes(&path, Format::Raw) == stored);
        assert_eq!(open_as(&path, Format::Raw).unwrap().sources.len(), 1);
        assert!(bytes(&path, format) == secret, "{name}");
        assert_eq!(open_as(&path, format).unwrap().sources.len(), 2);
    }
    for name in ["header.qcow2", "header.vmdk"] {
        assert_eq!(open(&at.join(name)).unwrap().sources.len(), 2, "{name}");
    }
    // The name that the caller uses says it as well as that of the file.
    symlink("disk.img", at.join("link.qcow2")).unwrap();
    symlink("header.qcow2", at.join("link.img")).unwrap();
    for name in ["link.qcow2", "link.img"] {
        assert_eq!(open(&at.join(name)).unwrap().sources.len(), 2, "{name}");
    }
}

#[test]
fn a_block_device_has_no_suffix() {
    if !ready("a_block_device_has_no_suffix") || !require_root("trust::a_block_device_has_no_suffix") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    fs::write(at.join("base.raw"), random_bytes(1 << 20, 1)).unwrap();
    qemu_img(at, &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "volume.qcow2"]);
    fs::OpenOptions::new().write(true).open(at.join("volume.qcow2")).unwrap().set_len(2 * MIB).unwrap();
    let device = match LoopDevice::attach(&at.join("volume.qcow2"), &[]) {
        Ok(device) => device,
        Err(why) => return skip("trust::a_block_device_has_no_suffix", &why),
    };
    refused_with_both_commands(&device.0, "qcow2");
    // It has no directory of its own either.
    let error = open_as(&device.0, Format::Qcow2).unwrap_err().to_string();
    assert!(error.contains("outside"), "{error}");
}

#[test]
fn a_header_without_a_reference_changes_the_size_and_is_only_read() {
    if !ready("a_header_without_a_reference_changes_the_size_and_is_only_read") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    qemu_img(at, &["create", "-q", "-f", "qcow2", "cloud.img", "1G"]);
    let opened = open(&at.join("cloud.img")).unwrap();
    assert_eq!(opened.map.len(), 1 << 30);
    assert!(opened.read_only && !opened.grows, "the guest of a raw disk fills no file system by it");
    let why = opened.read_only_reason.unwrap();
    assert!(why.contains("--format qcow2") && why.contains("--format raw"), "{why}");
    drop(opened.sources);
    let named = open_as(&at.join("cloud.img"), Format::Qcow2).unwrap();
    assert!(named.grows && !named.read_only);
    drop(named);
    fs::rename(at.join("cloud.img"), at.join("cloud.qcow2")).unwrap();
    assert!(open(&at.join("cloud.qcow2")).unwrap().grows);
}

#[test]
fn what_is_below_is_what_the_header_or_its_name_says() {
    if !ready("what_is_below_is_what_the_header_or_its_name_says") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    fs::write(at.join("secret.raw"), random_bytes(1 << 20, 1)).unwrap();
    qemu_img(at, &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "secret.raw", "header.qcow2"]);
    // The raw base of a chain, to which a guest once wrote a header.
    let base = file(at, "base.raw", MIB);
    overwrite(&base, &at.join("header.qcow2"));
    qemu_img(at, &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "declared.qcow2"]);
    assert_eq!(open(&at.join("declared.qcow2")).unwrap().sources.len(), 2);
    assert!(bytes(&at.join("declared.qcow2"), Format::Auto) == fs::read(&base).unwrap());
    // The same declared as nothing; QEMU makes such no more, so the extension is removed by hand.
    let undeclared = |name: &str, backing: &str| {
        let path = at.join(name);
        qemu_img(at, &["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", backing, name, "1M"]);
        let mut header = fs::read(&path).unwrap();
        let at = header.windows(4).position(|word| word == 0xe279_2aca_u32.to_be_bytes()).unwrap();
        header[at..at + 4].copy_from_slice(&0x1234_5678_u32.to_be_bytes());
        fs::write(&path, header).unwrap();
        path
    };
    let error = open(&undeclared("a.qcow2", "base.raw")).unwrap_err().to_string();
    assert!(error.contains("begins like a qcow2"), "{error}");
    // With the suffix it is one, and its own reference counts.
    assert_eq!(open(&undeclared("b.qcow2", "header.qcow2")).unwrap().sources.len(), 3);
    fs::write(at.join("plain.qcow2"), random_bytes(1 << 20, 2)).unwrap();
    let error = open(&undeclared("c.qcow2", "plain.qcow2")).unwrap_err().to_string();
    assert!(error.contains("it is not a qcow2, although its name says so"), "{error}");
    qemu_img(at, &["create", "-q", "-f", "vdi", "v.vdi", "1M"]);
    let error = open(&undeclared("d.qcow2", "v.vdi")).unwrap_err().to_string();
    assert!(error.contains("VirtualBox"), "{error}");
    assert_eq!(open(&undeclared("e.qcow2", "secret.raw")).unwrap().sources.len(), 2);
    // What is declared raw stays raw, whatever it is.
    qemu_img(at, &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "v.vdi", "f.qcow2"]);
    assert!(bytes(&at.join("f.qcow2"), Format::Auto).starts_with(&fs::read(at.join("v.vdi")).unwrap()));
}

/// Exchanges two names without a pause while it lives.
fn while_exchanged(one: &Path, other: &Path, mut act: impl FnMut()) {
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !end.load(Ordering::Relaxed) {
                renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE).unwrap();
            }
        });
        act();
        end.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_directory_that_is_exchanged_for_a_link_leads_nowhere_else() {
    if !ready("a_directory_that_is_exchanged_for_a_link_leads_nowhere_else") {
        return;
    }
    let dir = dir();
    let at = dir.path();
    for place in ["own", "outside"] {
        fs::create_dir(at.join(place)).unwrap();
        fs::write(at.join(place).join("base.raw"), random_bytes(1 << 20, 1)).unwrap();
    }
    let own = at.join("own");
    qemu_img(&own, &["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw", "top.qcow2"]);
    fs::write(own.join("top.vmdk"), "# Disk DescriptorFile\nRW 2048 FLAT \"base.raw\" 0\n").unwrap();
    symlink("outside", at.join("link")).unwrap();
    let inside = identity(&own.join("base.raw"));
    for name in ["top.qcow2", "top.vmdk"] {
        let (mut right, mut wrong, mut tries) = (0, 0, 0);
        while_exchanged(&own, &at.join("link"), || {
            while tries < 100_000 && (tries < 4000 || right == 0) {
                tries += 1;
                let options = OpenOptions { shared: true, read_only: true, ..OpenOptions::default() };
                let Ok(opened) = becket_image::open(&own.join(name), &options) else { continue };
                let below = rustix::fs::fstat(&source_of(&opened, 1).buffered).unwrap();
                if (Identity { dev: below.st_dev, ino: below.st_ino }) == inside {
                    right += 1;
                } else {
                    wrong += 1;
                }
            }
        });
        assert_eq!(wrong, 0, "{name}: of {tries} tries {right} opened the right file");
        assert!(right > 0, "{name}: no try of {tries} opened anything");
    }
}
