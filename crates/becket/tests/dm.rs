//! Device-mapper: ranges of block devices without a server, their partitions, their end.
//! Every test stands on a loop device of its own, and leaves other people's tables alone.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{Scratch, image, require_dm, require_tools, tool, wait_until};
use common::{Use, WRITE_USE, below::Below, ended, numbers, scratch, text};
use serde_json::{Value, json};
use std::{
    fs,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

const MIB: u64 = 1 << 20;
const A_SECOND: Duration = Duration::from_secs(1);

/// A disk with two partitions, as an image and as a block device. The device must go after the place's
/// devices.
fn disk() -> (Below, Scratch) {
    disk_with(&[])
}

fn disk_with(losetup: &[&str]) -> (Below, Scratch) {
    let place = scratch();
    image::gpt(&place.path("a.img"), 8 * MIB);
    (Below::new(&place.path("a.img"), losetup), place)
}

fn attach(place: &Scratch, words: &[&str]) -> Value {
    place.json(["attach"].iter().chain(words))["devices"][0].clone()
}

fn node(info: &Value) -> PathBuf {
    text(info, "device").into()
}

/// All existing tables. dmsetup asks for one after the other, and fails when another test removes one in
/// between.
fn tables() -> String {
    let mut output = None;
    let asked = wait_until(10 * A_SECOND, || {
        let said = Command::new("dmsetup").arg("table").output().unwrap();
        output.insert(said).status.success()
    });
    assert!(asked, "{output:?}");
    String::from_utf8_lossy(&output.unwrap().stdout).into_owned()
}

/// The devices with all that is part of them.
fn uses(info: &Value) -> Vec<Use> {
    let partitions = info["partitions"].as_array().unwrap();
    std::iter::once(info).chain(partitions).map(|device| Use::of(&node(device))).collect()
}

#[test]
fn dm_is_the_first_choice_for_a_block_device() {
    if !require_dm("dm_is_the_first_choice_for_a_block_device") {
        return;
    }
    let (below, place) = disk();
    let info = attach(&place, &["--name", "disk", below.path()]);
    assert_eq!(text(&info, "transport"), "dm");
    assert!(text(&info, "reason").starts_with("the first choice"), "{info:#}");
    assert_eq!((&info["size"], &info["direct_io"]), (&json!(8 * MIB), &json!(true)));
    let places: Vec<_> =
        info["partitions"].as_array().unwrap().iter().map(|p| (&p["start"], &p["size"])).collect();
    let expected = image::GPT_PARTITIONS.map(|(start, len)| (json!(start * 512), json!(len * 512)));
    assert_eq!(places, expected.iter().map(|(start, len)| (start, len)).collect::<Vec<_>>());
    let uses = uses(&info);

    // What is written to a partition is in the image, at its place.
    let link = place.links().join("diskp2");
    assert_eq!(fs::read_link(&link).unwrap(), node(&info["partitions"][1]));
    let bytes = image::random_bytes(4096, 7);
    let device = fs::File::options().write(true).open(&link).unwrap();
    device.write_all_at(&bytes, 512).unwrap();
    device.sync_all().unwrap();
    drop(device);
    let mut found = vec![0; 4096];
    let at = image::GPT_PARTITIONS[1].0 * 512 + 512;
    fs::File::open(place.path("a.img")).unwrap().read_exact_at(&mut found, at).unwrap();
    assert!(found == bytes, "the image has other bytes");

    assert!(place.ok(["stat", "disk"]).contains("its partitions included"));
    place.ok(["detach", "disk"]);
    assert!(uses.iter().all(|used| !used.lasts()), "{uses:?}");
    assert_eq!(fs::read_dir(place.links()).unwrap().count(), 0);
}

#[test]
fn dm_a_use_of_a_partition_is_a_use_of_all() {
    if !require_dm("dm_a_use_of_a_partition_is_a_use_of_all") {
        return;
    }
    let (below, place) = disk();
    let info = attach(&place, &["--via", "dm", "--name", "disk", below.path()]);
    let uses = uses(&info);
    let held = node(&info["partitions"][1]);
    let mut holder = Command::new("sleep").arg("300").stdin(fs::File::open(held).unwrap()).spawn().unwrap();
    let ran = place.run(["detach", "disk"]);
    let refused = ran.code == 1 && ran.err.contains(&format!("open by sleep (pid {})", holder.id()));
    let stayed = uses.iter().all(Use::lasts);
    let lazy = place.json(["detach", "--lazy", "disk"]);
    let listed = place.devices();
    let lasts: Vec<_> = uses.iter().map(Use::lasts).collect();
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert!(refused, "{ran:?}");
    assert!(stayed, "what nobody used went, or came back as another: {uses:?}");
    assert_eq!(lazy["devices"][0]["state"], "detaching");
    assert_eq!(listed[0]["state"], "detaching");
    assert_eq!(lasts, [true, false, true], "the disk stays for the partition that is used");
    assert!(wait_until(A_SECOND, || uses.iter().all(|used| !used.lasts())), "{uses:?}");
    assert!(wait_until(A_SECOND, || place.devices().is_empty()));
}

/// A claim that another user has is seen only when the table is loaded.
#[test]
fn dm_falls_back_when_a_partition_is_mounted() {
    let name = "dm_falls_back_when_a_partition_is_mounted";
    if !require_dm(name) || !require_tools(name, &["mke2fs", "mount"]) {
        return;
    }
    let (below, place) = disk_with(&["--partscan"]);
    let whole = below.path();
    let partition = format!("{whole}p1");
    assert!(wait_until(A_SECOND, || Path::new(&partition).exists()), "this kernel reads no partition tables");
    tool(Command::new("/usr/sbin/mke2fs").args(["-q", "-F", &partition]));
    let point = place.dir("mnt");
    tool(Command::new("mount").arg(&partition).arg(&point));
    let auto = place.run(["attach", "--json", "--read-only", whole]);
    let insisted = place.run(["attach", "--read-only", "--via", "dm", whole]);
    becket_testkit::umount(&point);
    assert_eq!(auto.code, 0, "{auto:?}");
    let info = &auto.json()["devices"][0];
    assert_ne!(text(info, "transport"), "dm");
    let reason = text(info, "reason");
    assert!(
        reason.contains("dm would have been the first choice, but") && reason.contains("mounted"),
        "{reason}"
    );
    assert_eq!(insisted.code, 1);
    assert!(
        insisted.err.contains("is claimed") && insisted.err.contains("hint: see by what: lsblk"),
        "{insisted:?}"
    );
    let number =
        fs::read_to_string(Path::new("/sys/block").join(below.0.file_name().unwrap()).join("dev")).unwrap();
    let tables = tables();
    place.ok(["detach", "--all"]);
    assert!(
        !tables.contains(&format!(" {} ", number.trim())),
        "the failed attempts left something: {tables}"
    );
}

#[test]
fn dm_killed_run_leaves_no_device() {
    if !require_dm("dm_killed_run_leaves_no_device") {
        return;
    }
    let (below, place) = disk();
    let script = format!("{WRITE_USE}; echo $$ > pids; exec sleep 300");
    let mut command = place.becket();
    let mut child =
        command.args(["run", "--via", "dm", below.path(), "--", "sh", "-c", &script]).spawn().unwrap();
    numbers(&place.path("pids"), 1);
    let info = place.devices()[0].clone();
    assert_eq!(info["autoclear"], true);
    assert_eq!(info["state"], "live");
    let uses = uses(&info);
    assert_eq!(uses.len(), 3);
    tool(Command::new("kill").args(["-KILL", &child.id().to_string()]));
    ended(&mut child);
    assert!(wait_until(A_SECOND, || uses.iter().all(|used| !used.lasts())), "{uses:?}");
    assert!(wait_until(A_SECOND, || place.devices().is_empty()));

    // And without violence it is gone when `run` returns.
    let script = format!("{WRITE_USE}; exit 7");
    let ran = place.run(["run", "--via", "dm", below.path(), "--", "sh", "-c", &script]);
    assert_eq!(ran.code, 7, "{ran:?}");
    assert!(!Use::written(&place.path("device")).lasts());
}

#[test]
fn dm_a_mount_keeps_its_disk_and_takes_it_along() {
    let name = "dm_a_mount_keeps_its_disk_and_takes_it_along";
    if !require_dm(name) || !require_tools(name, &["mke2fs", "mount"]) {
        return;
    }
    let (below, place) = disk();
    let run = ["run", "--via", "dm", below.path(), "--", "sh", "-c"];
    let ran = place.run(run.iter().chain(&["/usr/sbin/mke2fs -q -F ${BECKET_PARTITIONS% *}"]));
    assert_eq!(ran.code, 0, "{ran:?}");
    let point = place.dir("mnt");
    place.ok(["mount", "--via", "dm", "--partition", "1", below.path(), point.to_str().unwrap()]);
    let disk = Use::of(&node(&place.devices()[0]));
    fs::write(point.join("hello"), "there").unwrap();
    place.ok(["umount", point.to_str().unwrap()]);
    assert!(!disk.lasts());
    assert!(place.devices().is_empty());
}

/// The locks of the image end with the command that attached it.
#[test]
fn dm_readers_are_kept_from_what_is_written() {
    if !require_dm("dm_readers_are_kept_from_what_is_written") {
        return;
    }
    let (below, place) = disk();
    let info = attach(&place, &["--via", "dm", "--name", "writer", below.path()]);
    for via in ["auto", "loop"] {
        let ran = place.run(["attach", "--read-only", "--via", via, below.path()]);
        assert_eq!(ran.code, 1, "{ran:?}");
        let why = format!("already attached as writer ({})", node(&info).display());
        assert!(ran.err.contains(&why) && ran.err.contains("--shared"), "{ran:?}");
    }
    let shared = attach(&place, &["--read-only", "--shared", "--via", "dm", below.path()]);
    assert_eq!(shared["read_only"], true);
    place.ok(["detach", "--all"]);
    attach(&place, &["--read-only", "--name", "reader", below.path()]);
    attach(&place, &["--read-only", below.path()]);
    let ran = place.run(["attach", below.path()]);
    assert!(ran.code == 1 && ran.err.contains("already attached as"), "readers keep writers away: {ran:?}");
}

#[test]
fn dm_takes_over_a_new_size_below() {
    if !require_dm("dm_takes_over_a_new_size_below") {
        return;
    }
    let (below, place) = disk();
    let info = attach(&place, &["--via", "dm", "--name", "disk", "--offset", "4096", below.path()]);
    assert_eq!(info["size"], json!(8 * MIB - 4096));
    let used = Use::of(&node(&info));
    for size in [32 * MIB, 6 * MIB] {
        fs::File::options().write(true).open(place.path("a.img")).unwrap().set_len(size).unwrap();
        tool(Command::new("losetup").args(["--set-capacity", below.path()]));
        assert_eq!(place.json(["refresh", "disk"])["devices"][0]["size"], json!(size - 4096));
        assert_eq!(place.devices()[0]["size"], json!(size - 4096));
    }
    assert!(used.lasts(), "the same device, live all the time");
    place.ok(["detach", "disk"]);
    let info = attach(&place, &["--via", "dm", "--name", "disk", "--size-limit", "1M", below.path()]);
    assert_eq!(info["size"], json!(MIB));
    place.ok(["refresh", "disk"]);
    assert_eq!(place.devices()[0]["size"], json!(MIB), "the limit stays");
}

/// The kernel never reads a table again for such a device.
#[test]
fn dm_partitions_follow_the_table_on_refresh() {
    let name = "dm_partitions_follow_the_table_on_refresh";
    if !require_dm(name) || !require_tools(name, &["sfdisk"]) {
        return;
    }
    let (below, place) = disk();
    let info = attach(&place, &["--via", "dm", "--name", "disk", below.path()]);
    let disk = node(&info);
    let sfdisk = |table: &str| {
        let script = format!("printf 'label: gpt\n{table}' | sfdisk --quiet --no-reread --no-tell-kernel $0");
        tool(Command::new("sh").args(["-c", &script]).arg(&disk));
    };
    let partitions = || place.devices()[0]["partitions"].as_array().unwrap().clone();
    let starts = || partitions().iter().map(|part| part["start"].as_u64().unwrap()).collect::<Vec<_>>();

    sfdisk("start=1MiB,size=2MiB\\nstart=3MiB,size=1MiB\\nstart=4MiB,size=1MiB\\n");
    assert_eq!(starts().len(), 2, "not before it is asked for");
    // The second time there is nothing to do.
    for _ in 0..2 {
        place.ok(["refresh", "disk"]);
        assert_eq!(starts(), [MIB, 3 * MIB, 4 * MIB]);
    }
    let third = node(&partitions()[2]);
    let link = place.links().join("diskp3");
    assert_eq!(fs::read_link(&link).unwrap(), third);
    let bytes = image::random_bytes(4096, 7);
    let held = fs::File::options().read(true).write(true).open(&third).unwrap();
    held.write_all_at(&bytes, 0).unwrap();
    held.sync_all().unwrap();
    let mut found = vec![0; 4096];
    fs::File::open(place.path("a.img")).unwrap().read_exact_at(&mut found, 4 * MIB).unwrap();
    assert!(found == bytes, "the image has other bytes");

    // One in use stays, and the error names it.
    sfdisk("start=1MiB,size=2MiB\\n");
    let ran = place.run(["refresh", "disk"]);
    assert!(ran.code == 1 && ran.err.contains(third.to_str().unwrap()), "{ran:?}");
    drop(held);
    place.ok(["refresh", "disk"]);
    assert_eq!(starts(), [MIB]);
    assert!(!link.is_symlink());
    let uses = uses(&place.devices()[0]);
    place.ok(["detach", "disk"]);
    assert!(uses.iter().all(|used| !used.lasts()), "{uses:?}");
}

#[test]
fn dm_does_not_take_what_no_table_can_say() {
    if !require_dm("dm_does_not_take_what_no_table_can_say") {
        return;
    }
    let (below, place) = disk();
    for (words, why) in [
        (["--offset", "1000"], "do not lie on the blocks of 512 bytes"),
        (["--block-size", "4096"], "512 bytes, not 4096"),
        (["--direct-io", "off"], "past the page cache"),
        (["--depth", "4"], "no queues, depth or mode"),
        (["--autoclear", "--read-only"], "as soon as this command ends"),
    ] {
        let ran = place.run(["attach", "--via", "dm"].iter().chain(&words).chain(&[below.path()]));
        assert!(ran.code == 1 && ran.err.contains(why), "{words:?}: {ran:?}");
    }
    let ran = place.run(["attach", "--via", "dm", "--shared", "a.img"]);
    assert!(ran.code == 1 && ran.err.contains("needs a block device"), "{ran:?}");
    let info = attach(&place, &["--offset", "1000", below.path()]);
    assert_ne!(text(&info, "transport"), "dm", "auto takes what can");
}

#[test]
fn dm_leaves_other_peoples_tables_alone() {
    let name = "dm_leaves_other_peoples_tables_alone";
    if !require_dm(name) || !require_tools(name, &["dmsetup"]) {
        return;
    }
    let (below, place) = disk();
    // With a name like ours, standing where ours stand.
    let foreign = format!("becket-{:016x}-part9", std::process::id());
    let table = format!("0 16 linear {} 0", below.path());
    tool(Command::new("dmsetup").args(["create", "--noudevsync", &foreign, "--table", &table]));
    let ours = attach(&place, &["--via", "dm", "--shared", "--name", "disk", below.path()]);
    let above = format!("{foreign}-above");
    let table = format!("0 16 linear {} 0", node(&ours).display());
    tool(Command::new("dmsetup").args(["create", "--noudevsync", &above, "--table", &table]));
    let busy = place.run(["detach", "disk"]);
    tool(Command::new("dmsetup").args(["remove", "--noudevsync", &above]));
    let gone = place.run(["detach", "--all"]);
    let left = tool(Command::new("dmsetup").arg("ls"));
    tool(Command::new("dmsetup").args(["remove", "--noudevsync", &foreign]));
    assert!(busy.code == 1 && busy.err.contains("held by dm-"), "{busy:?}");
    assert_eq!(gone.code, 0, "{gone:?}");
    assert!(left.contains(&foreign), "{left}");
}

#[test]
fn dm_is_examined_by_doctor() {
    if !require_dm("dm_is_examined_by_doctor") {
        return;
    }
    let (below, place) = disk();
    attach(&place, &["--via", "dm", below.path()]);
    let doctor = place.json(["doctor"]);
    let dm = doctor["transports"].as_array().unwrap().iter().find(|one| one["transport"] == "dm").unwrap();
    assert_eq!(dm["works"], true);
    assert!(text(&dm["details"], "targets loaded").contains("linear"), "{dm:#}");
    assert_ne!(text(&dm["details"], "devices attached"), "0");
}
