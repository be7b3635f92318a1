//! Targets of detach, set, stat and refresh: a device is found by what its name resolves to, however it is
//! written.
//! Never depends on the transport.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{Scratch, image, require_fuse, require_root, require_tools, via};
use common::{ready, scratch, text};
use std::{ffi::OsStr, fs, os::unix::ffi::OsStrExt as _};

const MIB: u64 = 1 << 20;

/// A disk with an ext4 labelled `first` in its first partition, which holds `dir/nested.img` and a link to
/// it.
fn disk(place: &Scratch) {
    let tree = place.dir("tree/dir");
    image::random(&tree.join("nested.img"), MIB, 7);
    std::os::unix::fs::symlink("dir/nested.img", place.path("tree/link.img")).unwrap();
    image::partitioned(&place.path("disk.img"), &place.path("tree"));
}

#[test]
fn an_image_inside_another_goes_by_all_its_names() {
    if !ready("targets::an_image_inside_another_goes_by_all_its_names") {
        return;
    }
    let place = scratch();
    disk(&place);
    fs::create_dir(place.path("sub")).unwrap();
    std::os::unix::fs::symlink("../disk.img", place.path("sub/link.img")).unwrap();
    let same = [
        ("disk.img/by-label/second", "disk.img/p2"),
        ("disk.img/p2", "./disk.img/by-label/second"),
        ("disk.img/p2", "sub/link.img/p2"),
        ("disk.img/p2", "./disk.img/../disk.img/p2"),
        ("disk.img/p1/link.img", "disk.img/p1/dir/nested.img"),
        ("disk.img/p1/dir/../dir/nested.img", "sub/../disk.img/p1/link.img"),
    ];
    for (attached, meant) in same {
        place.ok(["attach", "--via", &via(), attached]);
        for wrong in ["disk.img", "disk.img/p1", "disk.img/by-label/none"] {
            let ran = place.run(["stat", wrong]);
            assert!(ran.code == 1 || wrong == "disk.img", "{wrong} is another image: {ran:?}");
        }
        place.ok(["stat", meant]);
        place.ok(["refresh", meant]);
        place.ok(["detach", meant]);
        assert!(place.devices().is_empty(), "{attached} went by {meant}");
    }
}

#[test]
fn a_file_with_a_dot_dot_behind_it_is_its_directory() {
    if !ready("targets::a_file_with_a_dot_dot_behind_it_is_its_directory") {
        return;
    }
    let place = scratch();
    disk(&place);
    place.ok(["attach", "--via", &via(), "disk.img/p1"]);
    place.ok(["attach", "--via", &via(), "-r", "--shared", "./disk.img/../disk.img"]);
    place.ok(["detach", "tree/../disk.img/../disk.img"]);
    assert_eq!(place.devices().len(), 1, "the partition of it is another image");
    place.ok(["detach", "disk.img/by-label/first"]);
    let ran = place.run(["attach", "disk.img/.."]);
    assert!(ran.code == 1 && ran.err.contains("a directory"), "{ran:?}");
}

/// The path of a file whose name is not UTF-8, and its end in JSON.
const UNSPEAKABLE: (&[u8], &str) = (b"a \xff%.img", "/a%20%FF%25.img");

#[test]
fn a_path_that_is_not_utf_8_is_kept_in_json() {
    if !ready("targets::a_path_that_is_not_utf_8_is_kept_in_json") {
        return;
    }
    let place = scratch();
    let (name, shown) = (OsStr::from_bytes(UNSPEAKABLE.0), UNSPEAKABLE.1);
    image::sparse(&place.dir("x").join(name), MIB);
    fs::rename(place.path("x").join(name), place.path("").join(name)).unwrap();
    let mut vias = vec![via()];
    if require_fuse("targets::a_path_that_is_not_utf_8_is_kept_in_json") {
        vias.push("fuse".to_owned());
    }
    for via in vias {
        let words: [&OsStr; 5] = ["attach".as_ref(), "--json".as_ref(), "--via".as_ref(), via.as_ref(), name];
        let attached = place.run(words);
        assert_eq!(attached.code, 0, "{attached:?}");
        for info in [&attached.json()["devices"][0], &place.devices()[0]] {
            let image = text(info, "image");
            assert!(image.starts_with("file:/") && image.ends_with(shown), "{image}");
        }
        place.ok(["detach".as_ref(), name]);
        let ran = place.run(["detach".as_ref(), "--json".as_ref(), name]);
        assert_eq!(text(&ran.json()["errors"][0], "target"), format!("file:{}", &shown[1..]));
    }
    let ran = place.run(["attach".as_ref(), "--json".as_ref(), OsStr::from_bytes(b"no\xfe")]);
    assert_eq!(text(&ran.json()["errors"][0], "image"), "file:no%FE");
}

#[test]
fn mount_and_umount_print_the_same_json() {
    let name = "targets::mount_and_umount_print_the_same_json";
    if !ready(name) || !require_tools(name, &["mount"]) {
        return;
    }
    let place = scratch();
    image::ext4(&place.path("fs.img"), 4 * MIB, &place.dir("tree"));
    let point = place.dir("mnt").join(OsStr::from_bytes(b"\xff"));
    fs::create_dir(&point).unwrap();
    let via = via();
    let words: [&OsStr; 6] = [
        "mount".as_ref(),
        "--json".as_ref(),
        "--via".as_ref(),
        via.as_ref(),
        "fs.img".as_ref(),
        point.as_ref(),
    ];
    let mounted = place.run(words);
    let unmounted = place.run(["umount".as_ref(), "--json".as_ref(), point.as_os_str()]);
    assert_eq!((mounted.code, unmounted.code), (0, 0), "{mounted:?} {unmounted:?}");
    let (mounted, unmounted) = (mounted.json(), unmounted.json());
    for key in ["source", "dir"] {
        assert_eq!(mounted[key], unmounted[key], "{key}");
    }
    assert!(text(&mounted, "dir").ends_with("/mnt/%FF"), "{mounted}");
    assert_eq!(mounted["device"]["device"], unmounted["device"]["device"]);
    assert_eq!(unmounted["detached"], true);
}

#[test]
fn doctor_creates_nothing() {
    let place = scratch();
    let runtime = place.path("nowhere/run");
    for words in [&["doctor"][..], &["doctor", "--json"]] {
        let mut command = place.becket();
        command.env("BECKET_RUNTIME_DIR", &runtime).args(words);
        let ran = place.finish(&mut command);
        assert!(ran.code == 0 && ran.out.contains("server"), "{ran:?}");
    }
    assert!(!place.path("nowhere").exists());
}

/// In a `/dev` that has nothing, as a container's: what a node is missing for works all the same.
#[test]
fn doctor_makes_no_device_nodes() {
    let test = "doctor_makes_no_device_nodes";
    if !require_root(test) || !require_tools(test, &["unshare"]) {
        return;
    }
    let place = scratch();
    let script =
        "mount -t tmpfs tmpfs /dev && mknod /dev/null c 1 3 && $BECKET doctor --json && find /dev >&2";
    let mut command = std::process::Command::new("unshare");
    command.args(["--mount", "sh", "-c", script]).env("BECKET", place.becket().get_program());
    let ran = place.finish(&mut command);
    assert!(ran.code == 0 && ran.err == "/dev\n/dev/null\n", "{ran:?}");
    let found = |out: &str| {
        let doctor: serde_json::Value = serde_json::from_str(out).unwrap();
        let works = |one: &serde_json::Value| one["works"].as_bool().unwrap();
        doctor["transports"].as_array().unwrap().iter().map(works).collect::<Vec<_>>()
    };
    assert_eq!(found(&ran.out), found(&place.run(["doctor", "--json"]).out));
}
