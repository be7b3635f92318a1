//! Detaching: a device in use is refused, and its users are named; lazily it goes with its last user.
//! Nothing is ever pulled away from under a user.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{crc_whole, image, require_device, require_loop, require_tools, via, wait_until};
use common::{Use, a_mount_is_named, scratch, text};
use serde_json::json;
use std::{
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt as _,
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

#[test]
fn a_device_in_use_names_its_users() {
    if !require_device("detach::a_device_in_use_names_its_users") {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 1 << 20, 1);
    let device = place.attach(&place.path("a.img"), &["--name", "busy"]);
    let used = Use::of(&device);
    let mut holder =
        Command::new("sleep").arg("300").stdin(fs::File::open(&device).unwrap()).spawn().unwrap();
    let ran = place.run(["detach", "--json", "busy"]);
    assert_eq!(ran.code, 1);
    let why = format!("becket: cannot detach busy: {} is in use: ", device.display());
    assert!(ran.err.starts_with(&why), "{ran:?}");
    assert!(ran.err.contains("sleep") && ran.err.contains(&format!("pid {}", holder.id())), "{ran:?}");
    assert!(ran.err.contains("--lazy"), "{ran:?}");
    let error = &ran.json()["errors"][0];
    assert_eq!(text(error, "kind"), "busy");
    assert_eq!(error["users"][0]["pid"], json!(holder.id()));
    assert_eq!(crc_whole(&device), crc_whole(&place.path("a.img")), "it is unharmed");

    let ran = place.run(["detach", "--lazy", "busy"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(used.lasts(), "its user still has it");
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert!(wait_until(Duration::from_secs(1), || !used.lasts()), "it goes when its last user lets go");
    assert!(wait_until(Duration::from_secs(1), || place.devices().is_empty()));
}

#[test]
fn only_a_detach_names_the_way_to_detach_what_is_not_beckets() {
    let place = scratch();
    for words in [&["detach"][..], &["detach", "--dry-run"], &["stat"], &["list"], &["why"], &["refresh"]] {
        let ran = place.run([words, &["/dev/loop99999"]].concat());
        assert_eq!(ran.code, 1, "{words:?}: {ran:?}");
        assert!(ran.err.contains("becket list"), "{words:?}: {ran:?}");
        assert_eq!(ran.err.contains("losetup --detach"), words[0] == "detach", "{words:?}: {ran:?}");
    }
}

#[test]
fn a_device_that_is_exported_names_its_export() {
    if !require_device("detach::a_device_that_is_exported_names_its_export") {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 1 << 20, 1);
    let device = place.attach(&place.path("a.img"), &["--name", "below"]);
    let address = format!("unix:{}", place.path("s.sock").display());
    place.ok(["export", device.to_str().unwrap(), "--nbd", &address, "--name", "above"]);
    let ran = place.run(["detach", "--json", "below"]);
    assert_eq!(ran.code, 1);
    assert_eq!(ran.json()["errors"][0]["users"].as_array().unwrap().len(), 1, "{ran:?}");
    assert!(ran.err.contains("image of above") && ran.err.contains("becket detach above,"), "{ran:?}");
    place.ok(["detach", "above"]);
    place.ok(["detach", "below"]);
}

#[test]
fn a_mounted_device_names_its_mount() {
    let name = "detach::a_mounted_device_names_its_mount";
    if !require_device(name) || !require_tools(name, &["mke2fs", "mount"]) {
        return;
    }
    let place = scratch();
    image::ext4(&place.path("fs.img"), 8 << 20, &place.dir("empty"));
    let device = place.attach(&place.path("fs.img"), &[]);
    a_mount_is_named(&place, "fs.img", &device);
}

#[test]
fn a_user_who_leaves_in_time_is_waited_for_or_named() {
    if !require_device("detach::a_user_who_leaves_in_time_is_waited_for_or_named") {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 1 << 20, 1);
    let device = place.attach(&place.path("a.img"), &[]);
    let mut holder =
        Command::new("sleep").arg("300").stdin(fs::File::open(&device).unwrap()).spawn().unwrap();
    let begun = Instant::now();
    let ran = place.run(["detach", "--timeout", "0", device.to_str().unwrap()]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(begun.elapsed() < becket_testkit::patience(Duration::from_secs(5)), "no patience was asked for");
    holder.kill().unwrap();
    holder.wait().unwrap();
    place.ok(["detach", device.to_str().unwrap()]);
}

/// Whatever the program is called: only how long it stays tells those who merely look at a new device.
#[test]
fn a_passing_user_is_waited_for() {
    let name = "detach::a_passing_user_is_waited_for";
    if !require_device(name) {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 1 << 20, 1);
    let device = place.attach(&place.path("a.img"), &[]);
    let used = Use::of(&device);
    let mut passing =
        Command::new("sleep").arg("0.3").stdin(fs::File::open(&device).unwrap()).spawn().unwrap();
    let ran = place.run(["detach", device.to_str().unwrap()]);
    passing.wait().unwrap();
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(!used.lasts());
}

/// A refused detach is none: the device must not go later.
#[test]
fn a_refused_detach_leaves_no_trace() {
    if !require_device("detach::a_refused_detach_leaves_no_trace") {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 1 << 20, 1);
    let device = place.attach(&place.path("a.img"), &[]);
    let used = Use::of(&device);
    let before = place.devices();
    let holder = fs::File::open(&device).unwrap();
    assert_eq!(place.run(["detach", device.to_str().unwrap()]).code, 1);
    assert_eq!(place.devices(), before);
    drop(holder);
    assert!(!wait_until(Duration::from_millis(500), || !used.lasts()), "it went with its last user");
    place.ok(["detach", device.to_str().unwrap()]);
}

#[test]
fn all_goes_on_after_one_in_use() {
    if !require_device("detach::all_goes_on_after_one_in_use") {
        return;
    }
    let place = scratch();
    for name in ["a", "b", "c"] {
        image::random(&place.path(&format!("{name}.img")), 64 << 10, 1);
        place.attach(&place.path(&format!("{name}.img")), &["--name", name]);
    }
    let held = fs::File::open(place.links().join("b")).unwrap();
    let ran = place.run(["detach", "--all", "--timeout", "1s"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    let left = place.devices();
    assert_eq!(left.len(), 1);
    assert_eq!(text(&left[0], "name"), "b");
    drop(held);
    place.ok(["detach", "--all"]);
    // With nothing left it is still right.
    place.ok(["detach", "--all"]);
}

/// A device under another one is in use by the kernel, without any process; `--all` takes the upper one
/// first.
#[test]
fn devices_upon_devices() {
    let name = "detach::devices_upon_devices";
    if !require_loop(name) {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 1 << 20, 1);
    let lower = place.attach(&place.path("a.img"), &["--name", "a"]);
    let upper =
        PathBuf::from(place.ok(["attach", "--via", "loop", "--name", "b", lower.to_str().unwrap()]).trim());
    let (lower, upper) = (Use::of(&lower), Use::of(&upper));
    let ran = place.run(["detach", "a"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains(&format!("image of {}", upper.device().display())), "{ran:?}");
    place.ok(["detach", "--all"]);
    assert!(!lower.lasts() && !upper.lasts());
}

/// By any path that can name a device's image, also when the image is gone, replaced, or its name is not
/// UTF-8.
#[test]
fn images_with_odd_names_and_without_any() {
    if !require_device("detach::images_with_odd_names_and_without_any") {
        return;
    }
    let place = scratch();
    let odd = place.path("x").with_file_name(OsStr::from_bytes(b"no\xfft\next.img"));
    image::random(&odd, 64 << 10, 1);
    let used = Use::of(&place.attach(&odd, &[]));
    place.ok([OsStr::new("detach"), odd.as_os_str()]);
    assert!(!used.lasts());

    // Removed: the path still means it. Replaced and attached again: the path means the file that is there.
    let image = place.path("a.img");
    image::random(&image, 64 << 10, 1);
    let first = Use::of(&place.attach(&image, &[]));
    fs::remove_file(&image).unwrap();
    image::random(&image, 64 << 10, 2);
    let second = Use::of(&place.attach(&image, &[]));
    place.ok(["detach", "a.img"]);
    assert!(first.lasts() && !second.lasts());
    fs::remove_file(&image).unwrap();
    place.ok(["detach", "a.img"]);
    assert!(!first.lasts());
}

/// The second of two who detach at once finds it gone; neither hangs, neither harms.
#[test]
fn two_at_once() {
    if !require_device("detach::two_at_once") {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 64 << 10, 1);
    for _ in 0..5 {
        let used = Use::of(&place.attach(&place.path("a.img"), &[]));
        let start = || {
            let mut command = place.becket();
            command.args(["detach", "a.img"]).stderr(Stdio::piped()).spawn().unwrap()
        };
        let both = [start(), start()];
        let ended: Vec<_> = both.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        assert!(ended.iter().any(|output| output.status.success()), "{ended:?}");
        for output in &ended {
            assert!(output.status.success() || output.status.code() == Some(1), "{output:?}");
        }
        assert!(!used.lasts(), "{}", via());
    }
}
