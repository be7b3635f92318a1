//! Internal snapshots of qcow2 images, by their names, compared with what QEMU reads.

use std::fs;
use std::path::Path;
use std::process::Command;

use becket_image::{Error, Format, LayerError, OpenOptions, locate};
use becket_testkit::{require_plain_machine, tool};

use crate::common::{dir, look, open};

fn qemu(program: &str, words: &[&str], path: &Path) {
    tool(Command::new(program).args(words).arg(path));
}

fn bytes(path: &Path) -> Vec<u8> {
    let image = look(path, Format::Auto, &[]).unwrap().last().unwrap().image.clone();
    image.read_vec(0, usize::try_from(image.len()).unwrap()).unwrap()
}

/// A qcow2 of 4 MiB that changes from snapshot to snapshot, and grows.
fn made(at: &Path, options: &str) -> std::path::PathBuf {
    let path = at.join("disk.qcow2");
    let mut create = Command::new("qemu-img");
    tool(create.args(["create", "-q", "-f", "qcow2", "-o", options]).arg(&path).arg("4M"));
    for (number, name) in ["first", "with space", "a@b", "first"].into_iter().enumerate() {
        let write = format!("write -q -P {} {}k 700k", number + 1, number * 300);
        qemu("qemu-io", &["-f", "qcow2", "-c", &write], &path);
        qemu("qemu-img", &["snapshot", "-c", name], &path);
    }
    qemu("qemu-io", &["-f", "qcow2", "-c", "write -q -P 9 0 4M"], &path);
    path
}

#[test]
fn each_is_the_disk_as_it_was() {
    let tools = ["qemu-img", "qemu-io"];
    if !require_plain_machine("snapshots::each_is_the_disk_as_it_was", &tools) {
        return;
    }
    for options in ["compat=1.1", "compat=0.10", "compat=1.1,cluster_size=512"] {
        let place = dir();
        let path = made(place.path(), options);
        // By name, and by QEMU's number where none has it as its name.
        for (ours, theirs) in [
            ("first", "snapshot.id=1"),
            ("with space", "snapshot.name=with space"),
            ("a@b", "snapshot.name=a@b"),
            ("4", "snapshot.id=4"),
        ] {
            let raw = place.path().join("raw");
            let mut convert = Command::new("qemu-img");
            tool(convert.args(["convert", "-l", theirs, "-O", "raw"]).args([&path, &raw]));
            let name = place.path().join(format!("disk.qcow2@{ours}"));
            assert!(bytes(&name) == fs::read(&raw).unwrap(), "{options}: {ours}");
            let opened = open(&name).unwrap();
            assert_eq!(opened.read_only_reason.as_deref(), Some("a snapshot is only read"));
            assert!(opened.read_only && opened.path.ends_with(format!("disk.qcow2@{ours}")));
            assert_ne!(locate(&name).unwrap(), locate(&path).unwrap());
        }
        assert!(bytes(&path).iter().all(|byte| *byte == 9), "{options}: the disk itself");
    }
}

#[test]
fn what_is_none_is_refused_with_the_names_that_there_are() {
    let name = "snapshots::what_is_none_is_refused_with_the_names_that_there_are";
    if !require_plain_machine(name, &["qemu-img", "qemu-io"]) {
        return;
    }
    let place = dir();
    let path = made(place.path(), "compat=1.1");
    let at = |name: &str| place.path().join(name);
    let refused = |name: &str| open(&at(name)).unwrap_err();
    let error = refused("disk.qcow2@none");
    assert!(matches!(&error, Error::Snapshot { .. }), "{error:?}");
    assert!(error.to_string().ends_with("it has first, with space, a@b, first"), "{error}");
    assert!(matches!(refused("disk.qcow2@"), Error::NotFound { .. }));
    assert!(matches!(refused("other.qcow2@first"), Error::NotFound { .. }));
    fs::write(at("plain.img"), vec![0; 1 << 20]).unwrap();
    assert!(refused("plain.img@x").to_string().ends_with("only a qcow2 has some"));
    // A file of that name is a file.
    fs::write(at("plain.img@x"), vec![1; 1 << 20]).unwrap();
    assert!(bytes(&at("plain.img@x")).iter().all(|byte| *byte == 1));
    let overlay = OpenOptions { cow: Some(at("over.qcow2")), ..OpenOptions::default() };
    let error = becket_image::open(&at("disk.qcow2@first"), &overlay).unwrap_err();
    assert!(matches!(&error, Error::Snapshot { .. }), "{error:?}");
    assert!(!at("over.qcow2").exists());
    // Its entry is damaged: the table of its clusters lies behind the file's end.
    let mut file = fs::read(&path).unwrap();
    let table = usize::try_from(u64::from_be_bytes(file[64..72].try_into().unwrap())).unwrap();
    file[table..table + 8].copy_from_slice(&(1_u64 << 40).to_be_bytes());
    fs::write(&path, &file).unwrap();
    let error = refused("disk.qcow2@first");
    assert!(matches!(&error, Error::Layer { source: LayerError::Corrupt(_), .. }), "{error:?}");
    // And so is the table of all of them, which the disk itself does not need.
    file[table + 36..table + 40].copy_from_slice(&u32::MAX.to_be_bytes());
    fs::write(&path, &file).unwrap();
    assert!(matches!(refused("disk.qcow2@first"), Error::Layer { .. }));
    assert!(bytes(&path).iter().all(|byte| *byte == 9));
}
