//! No second writer: what the kernel itself writes to without a lock is not attached, unless the user says
//! `--shared`. Each test ends the other use by the command that the hint names, and attaches then.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{Scratch, image, require_device, require_loop, require_tools, tool, via};
use common::{below::Below, scratch};
use std::{fs, path::Path, process::Command};

/// Attaches, which must fail for that reason and with these words in its hint; with `--shared` it goes.
#[track_caller]
fn refused(place: &Scratch, words: &[&str], reason: &[&str]) {
    let via = via();
    let ran = place.run(["attach", "--via", &via].iter().chain(words));
    assert_eq!(ran.code, 1, "{words:?}: {ran:?}");
    for part in reason.iter().chain(&["--shared"]) {
        assert!(ran.err.contains(part), "{part}: {ran:?}");
    }
    assert!(place.devices().is_empty());
    place.ok(["attach", "--via", &via, "--shared", "--name", "shared"].iter().chain(words));
    place.ok(["detach", "shared"]);
}

#[track_caller]
fn accepted(place: &Scratch, words: &[&str]) {
    place.ok(["attach", "--via", &via(), "--name", "fine"].iter().chain(words));
    place.ok(["detach", "fine"]);
}

#[test]
fn what_is_mounted_through_a_loop_device_is_not_attached() {
    let name = "writers::what_is_mounted_through_a_loop_device_is_not_attached";
    if !require_device(name) || !require_loop(name) || !require_tools(name, &["mkfs.ext4", "mount"]) {
        return;
    }
    let place = scratch();
    image::ext4(&place.path("a.img"), 8 << 20, &place.dir("from"));
    let point = place.dir("a place");
    tool(Command::new("mount").args(["-o", "loop"]).arg(place.path("a.img")).arg(&point));
    let end = format!("umount '{}'", point.display());
    let mounted = format!("mounted on {}", point.display());
    for words in [&["a.img"][..], &["-r", "a.img"], &["--offset", "4096", "a.img"]] {
        refused(&place, words, &["/dev/loop", &mounted, &end]);
    }
    let ran = place.run(["run", "--via", &via(), "a.img", "--", "true"]);
    assert!(ran.code != 0 && ran.err.contains(&end), "{ran:?}");
    becket_testkit::umount(&point);
    accepted(&place, &["a.img"]);

    // A file system that is mounted read-only must not see its bytes change either, and readers do no harm.
    tool(Command::new("mount").args(["-o", "loop,ro"]).arg(place.path("a.img")).arg(&point));
    refused(&place, &["a.img"], &["read-only", &mounted, &end]);
    accepted(&place, &["-r", "a.img"]);
    becket_testkit::umount(&point);
}

#[test]
fn what_losetup_has_is_not_attached_but_other_partitions_are() {
    let name = "writers::what_losetup_has_is_not_attached_but_other_partitions_are";
    if !require_device(name) || !require_loop(name) || !require_tools(name, &["losetup", "sfdisk"]) {
        return;
    }
    let place = scratch();
    image::gpt(&place.path("disk.img"), 16 << 20);
    let (start, len) = image::GPT_PARTITIONS[1];
    let (start, len) = ((start * 512).to_string(), (len * 512).to_string());
    let below = Below::new(&place.path("disk.img"), &["--offset", &start, "--sizelimit", &len]);
    let end = format!("losetup --detach {}", below.path());
    for words in [&["disk.img"][..], &["disk.img/p2"], &["-r", "disk.img/p2"]] {
        refused(&place, words, &[below.path(), &end]);
    }
    accepted(&place, &["disk.img/p1"]);
    accepted(&place, &["-r", "disk.img/p1"]);
    // The link that stands for losetup does as losetup does.
    let again = place.ok(["losetup", "--find", "--show", "disk.img"]);
    place.ok(["losetup", "--detach", again.trim()]);
    drop(below);
    accepted(&place, &["disk.img/p2"]);
}

#[test]
fn a_loop_device_that_another_mount_namespace_has_bound_is_seen() {
    let name = "writers::a_loop_device_that_another_mount_namespace_has_bound_is_seen";
    if !require_device(name) || !require_loop(name) || !require_tools(name, &["losetup", "unshare"]) {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 1 << 20, 1);
    fs::create_dir(place.path("hidden")).unwrap();
    image::random(&place.path("renamed"), 1 << 20, 2);
    // By a path that is nowhere here, and by one that is another file here.
    for script in [
        "mount -t tmpfs none hidden; touch hidden/x; mount --bind a.img hidden/x; losetup --find --show hidden/x",
        "mount --bind a.img renamed; losetup --find --show renamed",
    ] {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-ec", script]);
        let bound = tool(command.current_dir(place.path("a.img").parent().unwrap()));
        let below = Below(bound.trim().into());
        refused(&place, &["a.img"], &[below.path(), "losetup --detach"]);
        accepted(&place, &["renamed"]);
        drop(below);
        accepted(&place, &["a.img"]);
    }
}

#[test]
fn swap_space_is_not_attached() {
    let name = "writers::swap_space_is_not_attached";
    if !require_device(name) || !require_tools(name, &["mkswap", "swapon", "swapoff"]) {
        return;
    }
    let place = scratch();
    let file = place.path("swap file");
    image::random(&file, 4 << 20, 1);
    tool(Command::new("chmod").arg("600").arg(&file));
    tool(Command::new("mkswap").arg(&file));
    if !Command::new("swapon").arg(&file).output().unwrap().status.success() {
        becket_testkit::skip(name, "this file system takes no swap files");
        return;
    }
    let end = format!("swapoff '{}'", file.display());
    let outcomes =
        ["-r", "--partitions=off"].map(|how| place.run(["attach", "--via", &via(), how, "swap file"]));
    tool(Command::new("swapoff").arg(&file));
    for ran in outcomes {
        assert!(ran.code == 1 && ran.err.contains(&end) && ran.err.contains("swap space"), "{ran:?}");
    }
    accepted(&place, &["swap file"]);
}

/// A block device carries no such file's lock, and the loop driver claims nothing of it.
#[test]
fn a_loop_device_over_a_block_device_is_seen() {
    let name = "writers::a_loop_device_over_a_block_device_is_seen";
    if !require_device(name) || !require_loop(name) || !require_tools(name, &["losetup"]) {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 1 << 20, 1);
    let lower = Below::new(&place.path("a.img"), &[]);
    let upper = Below::new(Path::new(lower.path()), &[]);
    refused(&place, &[lower.path()], &[upper.path(), "losetup --detach"]);
    drop(upper);
    accepted(&place, &[lower.path()]);
    drop(lower);
}
