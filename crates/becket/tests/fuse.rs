//! FUSE: a loop device over a file that becket serves. In use, with its image cut, compressed; its end.
//! What every transport must do is the conformance suite's; deaths under load are in `survival.rs`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{Scratch, crc_whole, image, require_fuse, require_tools, tool, wait_until};
use common::{Use, alive, scratch, text};
use serde_json::{Value, json};
use std::{
    fs,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

fn attach(place: &Scratch, image: &Path) -> (PathBuf, Value) {
    let device = place.attach(image, &["--via", "fuse"]);
    let info = place.devices().remove(0);
    assert_eq!((text(&info, "transport"), text(&info, "device")), ("fuse", device.to_str().unwrap()));
    (device, info)
}

/// Reads a page; past the page cache, for nobody has read it before.
fn read(device: &Path, at: u64) -> std::io::Result<Vec<u8>> {
    let mut page = vec![0; 4096];
    let file = fs::File::open(device)?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random)?;
    file.read_exact_at(&mut page, at).map(|()| page)
}

#[test]
fn fuse_device_in_use_stays_and_goes_with_its_last_user() {
    if !require_fuse("fuse::fuse_device_in_use_stays_and_goes_with_its_last_user") {
        return;
    }
    let place = scratch();
    let path = place.path("a.img");
    image::random(&path, MIB, 1);
    let (device, info) = attach(&place, &path);
    let used = Use::of(&device);
    let holder = fs::File::open(&device).unwrap();
    let ran = place.run(["detach", "--json", device.to_str().unwrap()]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert_eq!(text(&ran.json()["errors"][0], "kind"), "busy");
    assert_eq!(ran.json()["errors"][0]["users"][0]["pid"], json!(std::process::id()), "{ran:?}");
    assert_eq!(crc_whole(&device), crc_whole(&path), "it is unharmed");

    place.ok(["detach", "--lazy", device.to_str().unwrap()]);
    assert!(used.lasts(), "its user still has it");
    let mut page = [0; 4096];
    holder.read_exact_at(&mut page, MIB - 4096).expect("it is served until its last user lets go");
    drop(holder);
    assert!(wait_until(PATIENCE, || !used.lasts() && place.devices().is_empty()), "{:?}", place.devices());
    let worker = u32::try_from(info["worker_pid"].as_u64().unwrap()).unwrap();
    assert!(wait_until(PATIENCE, || !alive(worker)), "no worker is left without a device");
}

#[test]
fn fuse_mounted_file_system_is_named() {
    let name = "fuse::fuse_mounted_file_system_is_named";
    if !require_fuse(name) || !require_tools(name, &["mke2fs", "mount"]) {
        return;
    }
    let place = scratch();
    image::ext4(&place.path("fs.img"), 8 * MIB, &place.dir("empty"));
    let point = place.dir("mnt");
    let (device, _) = attach(&place, &place.path("fs.img"));
    let used = Use::of(&device);
    tool(Command::new("mount").args([&device, &point]));
    let ran = place.run(["detach", device.to_str().unwrap()]);
    let still = fs::metadata(point.join("lost+found")).is_ok();
    tool(Command::new("umount").arg(&point));
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains(&format!("mounted on {}", point.display())), "{ran:?}");
    assert!(still, "the file system is still there");
    place.ok(["detach", "fs.img"]);
    assert!(!used.lasts());
}

/// What is not there any more is an error, and nothing else is; neither process minds.
#[test]
fn fuse_image_that_was_cut_is_an_error_where_it_was_cut() {
    if !require_fuse("fuse::fuse_image_that_was_cut_is_an_error_where_it_was_cut") {
        return;
    }
    let place = scratch();
    let path = place.path("a.img");
    image::random(&path, 4 * MIB, 1);
    let (device, info) = attach(&place, &path);
    let before = fs::read(&path).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(2 * MIB).unwrap();
    let error = read(&device, 3 * MIB).expect_err("bytes that are not there");
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()));
    assert_eq!(read(&device, MIB).unwrap(), before[MIB as usize..][..4096]);
    file.set_len(4 * MIB).unwrap();
    assert_eq!(read(&device, 3 * MIB).unwrap(), [0; 4096], "it has grown again, and is empty there");
    let now = place.devices().remove(0);
    assert_eq!((&now["worker_pid"], &now["state"]), (&info["worker_pid"], &json!("live")));
    place.ok(["detach", device.to_str().unwrap()]);
}

/// Somebody who detaches the loop device has detached the whole: nothing is left that serves it.
#[test]
fn fuse_device_that_losetup_detached_leaves_nothing() {
    let name = "fuse::fuse_device_that_losetup_detached_leaves_nothing";
    if !require_fuse(name) || !require_tools(name, &["losetup"]) {
        return;
    }
    let place = scratch();
    let path = place.path("a.img");
    image::random(&path, MIB, 1);
    let (device, info) = attach(&place, &path);
    tool(Command::new("losetup").arg("--detach").arg(&device));
    assert!(wait_until(PATIENCE, || place.devices().is_empty()), "{:?}", place.devices());
    let worker = u32::try_from(info["worker_pid"].as_u64().unwrap()).unwrap();
    assert!(wait_until(PATIENCE, || !alive(worker)), "no worker is left without a device");
    // Its locks are gone with it.
    let (device, _) = attach(&place, &path);
    place.ok(["detach", device.to_str().unwrap()]);
}
