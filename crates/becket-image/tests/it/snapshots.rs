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
    assert!(error.to_string().contains("snapshot \"first\": no overlay can lie over one"), "{error}");
    assert!(!at("over.qcow2").exists());
    // A slash ends the name of a file.
    qemu("qemu-img", &["snapshot", "-c", "a/b"], &path);
    let error = refused("disk.qcow2@a/b").to_string();
    assert!(error.ends_with("a/b (named @5)"), "{error}");
    assert_eq!(open(&at("disk.qcow2@5")).unwrap().map.len(), 4 << 20);
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

/// Not a snapshot, but another thing of a qcow2 that is only read.
#[test]
fn data_in_another_file_are_read_as_qemu_reads_them() {
    let tools = ["qemu-img", "qemu-io"];
    if !require_plain_machine("snapshots::data_in_another_file_are_read_as_qemu_reads_them", &tools) {
        return;
    }
    for options in ["data_file_raw=off", "data_file_raw=on", "data_file_raw=off,cluster_size=4096"] {
        let place = dir();
        let (at, elsewhere) = (&place.path().join("here"), &place.path().join("elsewhere"));
        [at, elsewhere].into_iter().for_each(|dir| fs::create_dir(dir).unwrap());
        let (base, top, raw) = (at.join("base.qcow2"), at.join("top.qcow2"), at.join("raw"));
        let data = at.join("base.data");
        let mut create = Command::new("qemu-img");
        create.current_dir(at).args(["create", "-q", "-f", "qcow2", "-o"]);
        tool(create.arg(format!("data_file=base.data,{options}")).arg(&base).arg("8M"));
        let writes =
            ["write -q -P 1 3M 100k", "write -q -P 2 0 70k", "write -q -z 3M 30k", "write -q -P 3 7M 1M"];
        // QEMU looks for the file from where it is itself.
        let there = |program: &str, words: &[&str], paths: &[&Path]| {
            tool(Command::new(program).current_dir(at).args(words).args(paths));
        };
        writes.iter().for_each(|write| there("qemu-io", &["-f", "qcow2", "-c", write], &[&base]));
        let convert = |from: &Path| {
            there("qemu-img", &["convert", "-O", "raw"], &[from, &raw]);
            fs::read(&raw).unwrap()
        };
        assert!(bytes(&base) == convert(&base), "{options}");
        let opened = open(&base).unwrap();
        assert_eq!(opened.read_only_reason.as_deref(), Some("its data are in another file"));
        assert_eq!(opened.sources.len(), 2);
        drop(opened);
        // Below another, and over one.
        there("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"], &[&base, &top]);
        there("qemu-io", &["-f", "qcow2", "-c", "write -q -P 4 50k 100k"], &[&top]);
        assert!(bytes(&top) == convert(&top), "{options}");
        assert!(!open(&top).unwrap().read_only, "only the file below it has its data elsewhere");
        // What an image names is opened beside it only, and only where its own name says what it is.
        fs::rename(&data, elsewhere.join("base.data")).unwrap();
        let error = open(&base).unwrap_err();
        assert!(matches!(&error, Error::Backing { what: "data file", missing: true, .. }), "{error}");
        std::os::unix::fs::symlink(elsewhere.join("base.data"), &data).unwrap();
        let error = open(&base).unwrap_err().to_string();
        assert!(error.contains("its data file base.data: a symbolic link leads out of"), "{error}");
        let other = at.join("disk.img");
        fs::rename(&base, &other).unwrap();
        assert!(matches!(open(&other), Err(Error::Reference { .. })), "its name says nothing");
    }
    // Nobody names a file for what lies in an image, or is an overlay of the user's own.
    let place = dir();
    let (inner, outer) = (place.path().join("in.qcow2"), place.path().join("out.ext4"));
    let mut create = Command::new("qemu-img");
    create.current_dir(place.path()).args(["create", "-q", "-f", "qcow2", "-o", "data_file=in.data"]);
    tool(create.arg(&inner).arg("1M"));
    let tree = place.path().join("tree");
    fs::create_dir(&tree).unwrap();
    fs::copy(&inner, tree.join("in.qcow2")).unwrap();
    tool(Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(&tree).arg(&outer).arg("4M"));
    let error = open(&outer.join("in.qcow2")).unwrap_err();
    assert!(error.to_string().contains("a qcow2 whose data are in another file"), "{error}");
}
