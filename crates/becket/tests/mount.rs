//! `becket mount` and `becket umount`: one command from an image to its files, and nothing left afterwards.
//! A plain umount(8) must do as well.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{Scratch, image, require_device, require_tools, tool, via, wait_until};
use common::{Use, scratch, text};
use std::{
    fs,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

const TOOLS: [&str; 4] = ["debugfs", "mke2fs", "mount", "sfdisk"];

/// A place with a file system image `fs.img` that holds `hello`, and a directory to mount it on.
fn place() -> (Scratch, PathBuf) {
    let place = scratch();
    let content = place.dir("content");
    fs::write(content.join("hello"), "from inside").unwrap();
    image::ext4(&place.path("fs.img"), 8 << 20, &content);
    let point = place.dir("mnt");
    (place, point)
}

fn mounted(point: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(4) == point.to_str())
}

/// A failing test leaves no mount behind, or its scratch directory could not go.
struct Unmount(PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        if mounted(&self.0) {
            let _ = Command::new("umount").arg(&self.0).output();
        }
    }
}

#[test]
fn there_and_back() {
    let name = "mount::there_and_back";
    if !require_device(name) || !require_tools(name, &TOOLS) {
        return;
    }
    let (place, point) = place();
    let _unmount = Unmount(point.clone());
    let reported = place.json(["mount", "--via", &via(), "fs.img", "mnt"]);
    assert_eq!(fs::read_to_string(point.join("hello")).unwrap(), "from inside");
    let used = Use::of(Path::new(text(&reported["device"], "device")));
    let devices = place.devices();
    assert_eq!(devices.len(), 1, "it outlives the command");
    assert_eq!(text(&devices[0], "state"), "live", "it was not detached");
    assert_eq!(devices[0]["autoclear"], true, "it goes with its mount");
    fs::write(point.join("more"), "written").unwrap();
    let reported = place.json(["umount", "mnt"]);
    assert_eq!(reported["detached"], true);
    assert!(!mounted(&point) && !used.lasts() && place.devices().is_empty());

    // What was written is in the image.
    place.ok(["mount", "-r", "--via", &via(), "fs.img", "mnt"]);
    assert_eq!(fs::read_to_string(point.join("more")).unwrap(), "written");
    assert!(fs::write(point.join("no"), "").is_err(), "read-only");
    place.ok(["umount", "mnt"]);
}

#[test]
fn a_plain_umount_is_enough() {
    let name = "mount::a_plain_umount_is_enough";
    if !require_device(name) || !require_tools(name, &TOOLS) {
        return;
    }
    let (place, point) = place();
    let _unmount = Unmount(point.clone());
    let reported = place.json(["mount", "--via", &via(), "fs.img", "mnt"]);
    let used = Use::of(Path::new(text(&reported["device"], "device")));
    becket_testkit::umount(&point);
    assert!(wait_until(Duration::from_secs(2), || !used.lasts()));
    assert!(wait_until(Duration::from_secs(2), || place.devices().is_empty()));
}

#[test]
fn failures_leave_nothing() {
    let name = "mount::failures_leave_nothing";
    if !require_device(name) || !require_tools(name, &TOOLS) {
        return;
    }
    let (place, point) = place();
    let _unmount = Unmount(point.clone());
    image::random(&place.path("noise.img"), 1 << 20, 1);
    image::gpt(&place.path("disk.img"), 16 << 20);
    // The beginning of LUKS1 is all that blkid looks at.
    image::sparse(&place.path("luks.img"), 4 << 20);
    let luks = fs::OpenOptions::new().write(true).open(place.path("luks.img")).unwrap();
    luks.write_all_at(b"LUKS\xba\xbe\x00\x01", 0).unwrap();
    // The journal must be replayed.
    fs::copy(place.path("fs.img"), place.path("dirty.img")).unwrap();
    let feature = ["-w", "-R", "feature needs_recovery", "dirty.img"];
    tool(Command::new("debugfs").args(feature).current_dir(place.path("")));
    let via = via();
    for (words, parts) in [
        (
            &["noise.img", "mnt"][..],
            &["noise.img on mnt: no file system is recognised", "becket inspect noise.img"][..],
        ),
        (
            &["luks.img", "mnt"],
            &["cannot mount luks.img on mnt: ", "crypto_LUKS", "becket mount --key-file FILE luks.img mnt"],
        ),
        (&["-r", "--via", "loop", "dirty.img", "mnt"], &["read-only", "omit -r", "-o noload", "--cow FILE"]),
        (&["-t", "ext4", "luks.img", "mnt"], &["it holds crypto_LUKS, not ext4", "omit --type"]),
        (&["fs.img", "nowhere"], &["cannot mount on nowhere: no such file", "mkdir"]),
        (&["fs.img", "fs.img"], &["not a directory"]),
        (&["missing.img", "mnt"], &["cannot attach missing.img: "]),
        (&["-t", "ext4", "-o", "nosuchoption", "fs.img", "mnt"], &["refuses this ext4", "check --options"]),
        (&["disk.img", "mnt"], &["it has partitions: 1, 2", "--partition N"]),
        (&["--partition", "7", "disk.img", "mnt"], &["no partition 7", "1, 2"]),
        (&["--partition", "1", "fs.img", "mnt"], &["no partition 1", "omit --partition"]),
    ] {
        let via = if words.contains(&"--via") { &[][..] } else { &["--via", &via] };
        let ran = place.run(["mount", "--json"].iter().chain(via).chain(words));
        assert_eq!(ran.code, 1, "{words:?}: {ran:?}");
        for part in parts {
            assert!(ran.err.contains(part), "{words:?}: no {part:?} in {ran:?}");
        }
        assert!(ran.json()["error"]["kind"].is_string());
        assert!(!mounted(&point) && place.devices().is_empty(), "{words:?}");
    }
}

#[test]
fn a_partition() {
    let name = "mount::a_partition";
    if !require_device(name) || !require_tools(name, &TOOLS) {
        return;
    }
    let (place, point) = place();
    let _unmount = Unmount(point.clone());
    let disk = place.path("disk.img");
    image::gpt(&disk, 16 << 20);
    let (start, len) = image::GPT_PARTITIONS[0];
    image::ext4(&place.path("part.img"), len * 512, &place.path("content"));
    let mut bytes = fs::read(&disk).unwrap();
    let (start, len) = (start as usize * 512, len as usize * 512);
    bytes[start..start + len].copy_from_slice(&fs::read(place.path("part.img")).unwrap());
    fs::write(&disk, bytes).unwrap();
    let reported = place.json(["mount", "--via", &via(), "--partition", "1", "disk.img", "mnt"]);
    assert!(text(&reported, "source").ends_with("p1"), "{reported:#}");
    assert_eq!(fs::read_to_string(point.join("hello")).unwrap(), "from inside");
    place.ok(["umount", "mnt"]);
    assert!(place.devices().is_empty());
}

#[test]
fn umount_takes_only_what_is_ours() {
    let name = "mount::umount_takes_only_what_is_ours";
    if !require_device(name) || !require_tools(name, &TOOLS) {
        return;
    }
    let (place, point) = place();
    let _unmount = Unmount(point.clone());
    let ran = place.run(["umount", "mnt"]);
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("nothing is mounted there") && ran.err.contains("findmnt"), "{ran:?}");
    assert!(place.run(["umount", "nowhere"]).err.contains("cannot unmount nowhere: no such file"));
    tool(Command::new("mount").args(["-t", "tmpfs", "none"]).arg(&point));
    let ran = place.run(["umount", "mnt"]);
    assert!(mounted(&point));
    becket_testkit::umount(&point);
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("not a device of becket"), "{ran:?}");
}

#[test]
fn a_device_with_two_mounts_stays_until_the_second_goes() {
    let name = "mount::a_device_with_two_mounts_stays_until_the_second_goes";
    if !require_device(name) || !require_tools(name, &TOOLS) {
        return;
    }
    let (place, point) = place();
    let second = place.dir("second");
    let _unmount = (Unmount(point.clone()), Unmount(second.clone()));
    let device = place.attach(&place.path("fs.img"), &[]);
    let used = Use::of(&device);
    tool(Command::new("mount").args([&device, &point]));
    tool(Command::new("mount").args([&device, &second]));
    let busy = fs::File::open(second.join("hello")).unwrap();
    let ran = place.run(["umount", "second"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("busy") && ran.err.contains("fuser -vm"), "{ran:?}");
    drop(busy);
    let ran = place.run(["umount", "--json", "second"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(ran.json()["detached"], false);
    assert!(ran.err.contains("stays attached"), "{ran:?}");
    assert!(used.lasts());
    place.ok(["umount", "mnt"]);
    assert!(!used.lasts(), "attached or mounted by becket: umount detaches");
}
