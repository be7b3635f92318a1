//! Flat VMDKs made by qemu-img: every byte that becket finds is the one that went in.
//! It never takes becket's own word for what an image holds.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use becket_image::{Error, Format, Image};
use becket_testkit::image::{gpt, random_bytes};
use becket_testkit::{require_plain_machine, tool};

use crate::common::{dir, look, open};

fn ready(name: &str) -> bool {
    require_plain_machine(&format!("vmdk::{name}"), &["qemu-img", "sfdisk"])
}

/// A VMDK of `raw` by qemu-img.
fn convert(raw: &Path, to: &Path, subformat: &str) {
    let options = format!("subformat={subformat}");
    let mut convert = Command::new("qemu-img");
    tool(convert.args(["convert", "-f", "raw", "-O", "vmdk", "-o", &options]).args([raw, to]));
}

fn image(path: &Path) -> Result<Image, Error> {
    Ok(look(path, Format::Auto, &[])?.last()?.image.clone())
}

fn bytes(image: &Image) -> Vec<u8> {
    image.read_vec(0, image.len() as usize).unwrap()
}

#[test]
fn a_flat_disk_is_read_and_a_path_goes_on_in_it() {
    if !ready("a_flat_disk_is_read_and_a_path_goes_on_in_it") {
        return;
    }
    let dir = dir();
    let raw = dir.path().join("disk.raw");
    gpt(&raw, 8 << 20);
    let mut content = fs::read(&raw).unwrap();
    content[2 << 20..3 << 20].copy_from_slice(&random_bytes(1 << 20, 3));
    fs::write(&raw, &content).unwrap();
    for subformat in ["monolithicFlat", "twoGbMaxExtentFlat"] {
        let path = dir.path().join(format!("a disk {subformat}.vmdk"));
        convert(&raw, &path, subformat);
        assert!(bytes(&image(&path).unwrap()) == content, "{subformat}");
        assert!(bytes(&image(&path.join("p1")).unwrap()) == content[1 << 20..5 << 20], "{subformat}");
        let opened = open(&path).unwrap();
        assert!(opened.read_only && opened.nested && opened.sources.len() == 2);
        assert_eq!(opened.map.len(), 8 << 20);
        // Readers do not shut each other out, whether they asked for that or not.
        open(&path).unwrap();
    }
    // Several files, one of them in two pieces, and zeroes.
    fs::write(dir.path().join("one"), &content[..3 << 20]).unwrap();
    fs::write(dir.path().join("two"), &content[3 << 20..4 << 20]).unwrap();
    let text = "# Disk DescriptorFile\nRW 2048 FLAT \"one\" 4096\nRW 2048 ZERO\nRW 2048 FLAT \"two\" 0\nRW 1 FLAT \"one\"\n";
    let path = dir.path().join("pieces.vmdk");
    fs::write(&path, text).unwrap();
    let mib = 1 << 20;
    let expected =
        [&content[2 * mib..3 * mib], &vec![0; mib], &content[3 * mib..4 * mib], &content[..512]].concat();
    assert!(bytes(&image(&path).unwrap()) == expected);
    assert_eq!(open(&path).unwrap().sources.len(), 3);
}

#[test]
fn a_descriptor_opens_no_file_outside_its_directory() {
    let dir = dir();
    let (inner, secret) = (dir.path().join("inner"), dir.path().join("secret"));
    fs::create_dir(&inner).unwrap();
    fs::write(&secret, [7; 4096]).unwrap();
    symlink(&secret, inner.join("link")).unwrap();
    fs::write(inner.join("short"), [7; 512]).unwrap();
    fs::create_dir(inner.join("sub")).unwrap();
    let path = inner.join("disk.vmdk");
    let absolute = secret.display().to_string();
    for (name, why) in [
        ("../secret", "outside the directory"),
        (absolute.as_str(), "outside the directory"),
        ("link", "a symbolic link leads out"),
        ("absent", "there is no such file"),
        ("sub", "it is a directory"),
        ("nbd:host", "not the path of a file"),
        ("short", "reach beyond its end"),
    ] {
        fs::write(&path, format!("# Disk DescriptorFile\nRW 8 FLAT \"{name}\" 0\n")).unwrap();
        let error = image(&path).unwrap_err().to_string();
        assert!(error.contains(why), "{name}: {error}");
    }
}
