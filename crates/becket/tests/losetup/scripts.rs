//! losetup as other people's scripts call it, and where becket's must be better.
//! Never leaves a device: each test detaches what it attached, by losetup.

use crate::{DEVICES, left_below, links, scratch};
use becket_testkit::{
    Ran, Scratch, image, require_loop, require_root, require_tools, require_ublk, skip, wait_until,
};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, RwLockReadGuard};
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// A place with becket under the name losetup.
struct Case {
    losetup: PathBuf,
    place: Scratch,
    _stay: RwLockReadGuard<'static, ()>,
}

impl Case {
    fn new(name: &str) -> Option<Case> {
        if !require_loop(name) || !require_tools(name, &["losetup"]) {
            return None;
        }
        let stay = DEVICES.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let place = scratch();
        let [_, losetup] = links(&place);
        Some(Case { losetup, place, _stay: stay })
    }

    fn run(&self, line: &str) -> Ran {
        let mut command = Command::new(&self.losetup);
        self.place.prepare(&mut command);
        command.env_remove("BECKET_LOSETUP_VIA");
        self.place.finish(command.args(line.split_whitespace()))
    }

    #[track_caller]
    fn ok(&self, line: &str) -> String {
        let ran = self.run(line);
        assert_eq!((ran.code, unusual(&ran.err)), (0, None), "{line}: {ran:?}");
        ran.out.trim_end().to_owned()
    }

    /// A script that finds becket's losetup first.
    fn script(&self, text: &str) -> Ran {
        let mut command = Command::new("sh");
        self.place.prepare(&mut command);
        let path = format!("{}:{}", self.place.path("bin").display(), std::env::var("PATH").expect("a PATH"));
        command.env("PATH", path).env_remove("BECKET_LOSETUP_VIA");
        self.place.finish(command.args(["-euc", text]))
    }

    fn image(&self, name: &str, size: u64) -> PathBuf {
        let path = self.place.path(name);
        image::sparse(&path, size);
        path
    }
}

/// What was said besides that a device is in use for a moment: a program that lists all devices has ours
/// open.
fn unusual(said: &str) -> Option<&str> {
    said.lines().find(|line| !line.contains("open by losetup"))
}

impl Drop for Case {
    fn drop(&mut self) {
        let left = left_below(self.place.path("x").parent().expect("a directory"));
        for node in &left {
            let _ = Command::new(&self.losetup).arg("-d").arg(node).status();
        }
        assert!(std::thread::panicking() || left.is_empty(), "left behind: {left:?}");
    }
}

/// xfstests tries direct I/O with the sector size of the disk below, and takes what it gets.
#[test]
fn xfstests() {
    let Some(case) = Case::new("losetup_xfstests") else { return };
    case.image("img", 8 * MIB);
    let ran = case.script(
        "try() { losetup --direct-io=on \"$@\" -f --show img 2>/dev/null || losetup \"$@\" -f --show img; }
        for size in '' --sector-size=4096; do
            dev=$(try $size)
            test -b $dev; blockdev --getss $dev
            losetup -n -O DIO $dev | tr -d ' '
            cat /sys/block/${dev#/dev/}/loop/dio
            losetup -d $dev
        done",
    );
    assert_eq!(ran.code, 0, "{ran:?}");
    let reported: Vec<&str> = ran.out.lines().collect();
    assert_eq!((reported[0], reported[3]), ("512", "4096"), "{ran:?}");
    assert_eq!((reported[1], reported[4]), (reported[2], reported[5]), "the kernel's own word: {ran:?}");
}

/// pi-gen maps the partitions of its image one by one, and finds them again by their file.
#[test]
fn pi_gen() {
    let Some(case) = Case::new("losetup_pi_gen") else { return };
    let path = case.image("a b.img", 8 * MIB);
    let ran = case.script(
        "boot=$(losetup --show --find --offset 1048576 --sizelimit 2097152 'a b.img')
        root=$(losetup --show --find --offset 3145728 --sizelimit 4194304 'a b.img')
        blockdev --getsize64 $boot $root
        for dev in $(losetup -j 'a b.img' | cut -d: -f1); do losetup -d $dev; done
        # Other tests list all devices, and have ours open for a moment.
        for try in $(seq 100); do [ -z \"$(losetup -j 'a b.img')\" ] && break; sleep 0.1; done
        losetup -j 'a b.img'",
    );
    assert_eq!((ran.code, ran.out.as_str()), (0, "2097152\n4194304\n"), "{ran:?}");
    assert_eq!(left_below(path.parent().unwrap()), Vec::<PathBuf>::new());
}

/// osbuild and mkosi read JSON, and name columns.
#[test]
fn osbuild() {
    let Some(case) = Case::new("losetup_osbuild") else { return };
    let path = case.image("disk.img", 4 * MIB);
    let device = case.ok("--find --show --offset 512 --read-only disk.img");
    let reported: serde_json::Value =
        serde_json::from_str(&case.ok(&format!("--json --list {device}"))).unwrap();
    let one = &reported["loopdevices"][0];
    assert_eq!(
        (&one["name"], &one["back-file"], &one["offset"], &one["ro"]),
        (&device.clone().into(), &path.display().to_string().into(), &512.into(), &true.into())
    );
    let all: serde_json::Value =
        serde_json::from_str(&case.ok("--json --list --output NAME,BACK-FILE")).unwrap();
    assert!(
        all["loopdevices"].as_array().unwrap().iter().any(|row| row["name"] == device.as_str()),
        "{all:#}"
    );
    assert_eq!(
        case.ok(&format!("--list --noheadings --output BACK-FILE {device}")),
        path.display().to_string()
    );
    case.ok(&format!("--detach {device}"));
    assert_eq!(left_below(path.parent().unwrap()), Vec::<PathBuf>::new());
    assert_eq!(case.ok("-j disk.img"), "");
}

/// libguestfs, systemd-nspawn's users: partitions must be there when losetup returns.
#[test]
fn partitions_are_there_at_once() {
    let Some(case) =
        Case::new("losetup_partitions").filter(|_| require_tools("losetup_partitions", &["sfdisk"]))
    else {
        return;
    };
    image::gpt(&case.place.path("disk.img"), 16 * MIB);
    let device = case.ok("--find --show --partscan disk.img");
    for (number, (_, sectors)) in (1..).zip(image::GPT_PARTITIONS) {
        let node = format!("{device}p{number}");
        assert!(fs::metadata(&node).unwrap().file_type().is_block_device(), "{node}");
        let name = node.trim_start_matches("/dev/");
        let size = fs::read_to_string(format!("/sys/class/block/{name}/size")).unwrap();
        assert_eq!(size.trim(), sectors.to_string());
    }
    assert_eq!(case.ok(&format!("-n -O PARTSCAN {device}")).trim(), "1");
    case.ok(&format!("-d {device}"));
}

#[test]
fn who_uses_a_busy_device_is_said() {
    let Some(case) = Case::new("losetup_busy") else { return };
    case.image("img", MIB);
    let device = case.ok("-f --show img");
    let mut user = Command::new("sleep").arg("60").stdin(File::open(&device).unwrap()).spawn().unwrap();
    let ran = case.run(&format!("-d {device}"));
    let autoclear = case.ok(&format!("-n -O AUTOCLEAR {device}"));
    user.kill().unwrap();
    user.wait().unwrap();
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.err.contains(&format!("open by sleep (pid {})", user.id())), "{ran:?}");
    assert_eq!(autoclear.trim(), "1");
    let left = left_below(case.place.path("x").parent().unwrap());
    assert!(left.is_empty(), "it goes with its user: {left:?}");
}

/// What becket attached is a loop device like others; detached by losetup, it is in no record any more.
#[test]
fn beckets_own_devices_are_losetups_too() {
    let Some(case) = Case::new("losetup_own") else { return };
    let path = case.image("img", MIB);
    let device = case.place.attach(&path, &["--via", "loop", "--name", "own"]);
    assert!(case.ok("-j img").starts_with(&format!("{}: [", device.display())));
    case.ok(&format!("-d {}", case.place.links().join("own").display()));
    let named = |path: &Path| fs::symlink_metadata(path).is_ok();
    assert!(
        !named(&case.place.links().join("own")) && !named(&case.place.runtime().join("devices/own.json"))
    );
    assert_eq!(case.place.devices().len(), 0);
}

/// A `/dev` with nothing in it, as in a container: nodes are made, or it is said what stands against that.
#[test]
fn a_containers_empty_dev() {
    let Some(case) = Case::new("losetup_container") else { return };
    let tools = ["unshare", "sfdisk", "setpriv"];
    if !require_tools("losetup_container", &tools) {
        return;
    }
    image::gpt(&case.place.path("disk.img"), 16 * MIB);
    let within = |script: &str| {
        let empty = "mount -t tmpfs -o mode=755 tmpfs /dev && mknod -m 666 /dev/null c 1 3";
        let mut command = Command::new("unshare");
        case.place.prepare(&mut command);
        let path = format!("{}:{}", case.place.path("bin").display(), std::env::var("PATH").expect("a PATH"));
        case.place.finish(command.env("PATH", path).args([
            "--mount",
            "sh",
            "-euc",
            &format!("{empty}\n{script}"),
        ]))
    };
    let ran = within(
        "dev=$(losetup -P -f --show disk.img)
        test -b $dev; test -b ${dev}p1; test -b ${dev}p2
        rm $dev; losetup -j disk.img | grep -q ' (lost): '; losetup -l | grep -q \"^$dev (lost) \"
        losetup -d $dev; test -b $dev
        for try in $(seq 100); do [ -z \"$(losetup -j disk.img)\" ] && break; sleep 0.1; done
        losetup -j disk.img; test -b $(losetup -f)",
    );
    assert_eq!((ran.code, ran.out.as_str(), unusual(&ran.err)), (0, "", None), "{ran:?}");

    // The nodes of one call are there for the next, so this needs a /dev of its own.
    let ran = within(
        "mknod /dev/loop-control c 10 237
        setpriv --bounding-set=-mknod losetup -f --show disk.img",
    );
    assert_eq!((ran.code, ran.out.as_str()), (1, ""), "{ran:?}");
    assert!(ran.err.contains("CAP_MKNOD") && ran.err.contains("/dev/loop"), "{ran:?}");
    assert_eq!(left_below(case.place.path("x").parent().unwrap()), Vec::<PathBuf>::new());

    // A stale node is not a device, and asking makes none.
    let ran =
        within("mknod /dev/loop987654 b 7 987654\nlosetup /dev/loop987654 || losetup -d /dev/loop987654");
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("stale: the kernel has no such device"), "{ran:?}");
    assert!(!Path::new("/sys/block/loop987654").exists(), "asking made it");
}

/// Sixty-four at a time, each on its own file.
/// By the device, not by what its node is called.
#[test]
fn what_is_removed_is_the_device_of_the_node() {
    let Some(case) = Case::new("losetup::what_is_removed_is_the_device_of_the_node") else { return };
    // So high that it is never given out as a free one.
    let number = 5000 + std::process::id() % 1000;
    let (node, disk) = (format!("/dev/loop{number}"), format!("/sys/block/loop{number}"));
    case.image("img", MIB);
    case.ok(&format!("{node} img"));
    case.ok(&format!("-d {node}"));
    assert!(wait_until(Duration::from_secs(10), || !Path::new(&disk).join("loop").exists()));
    let (other, same) = (case.place.path(&format!("loop{number}")), case.place.path("disk"));
    std::os::unix::fs::symlink("/dev/null", &other).unwrap();
    std::os::unix::fs::symlink(&node, &same).unwrap();
    let ran = case.run(&format!("--remove {}", other.display()));
    assert!(ran.code == 1 && ran.err.contains("No such device"), "{ran:?}");
    assert!(Path::new(&disk).exists());
    case.ok(&format!("--remove {}", same.display()));
    assert!(!Path::new(&disk).exists());
    let ran = case.run(&format!("--remove {node}"));
    assert!(ran.code == 1 && ran.err.contains("No such device"), "{ran:?}");
}

#[test]
fn a_storm_of_finders_loses_none() {
    let Some(case) = Case::new("losetup_storm") else { return };
    let (files, rounds) = if becket_testkit::via() == "auto" { (512, rounds()) } else { (48, 1) };
    for file in 0..files {
        case.image(&format!("f{file:03}"), MIB);
    }
    for round in 0..rounds {
        let queue = Mutex::new(0..files);
        let found = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            for _ in 0..64 {
                scope.spawn(|| {
                    loop {
                        let Some(file) = queue.lock().unwrap().next() else { return };
                        let mut command = Command::new(&case.losetup);
                        command.args(["-f", "--show"]).arg(case.place.path(&format!("f{file:03}")));
                        let output = command.stdin(Stdio::null()).output().unwrap();
                        let (out, err) = (output.stdout, output.stderr);
                        let reported =
                            [out, err].map(|text| String::from_utf8_lossy(&text).trim().to_owned());
                        found.lock().unwrap().push((file, output.status.code(), reported));
                    }
                });
            }
        });
        let found = found.into_inner().unwrap();
        let errors: Vec<_> =
            found.iter().filter(|(_, code, [_, err])| *code != Some(0) || !err.is_empty()).collect();
        assert!(errors.is_empty(), "round {round}: {errors:?}");
        let devices: BTreeSet<&String> = found.iter().map(|(.., [out, _])| out).collect();
        println!(
            "round {round}: {} distinct devices of {files} files, {} errors",
            devices.len(),
            errors.len()
        );
        assert_eq!(devices.len(), files, "round {round}");
        for (file, _, [device, _]) in &found {
            let name = device.trim_start_matches("/dev/");
            let backing = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).unwrap();
            assert_eq!(backing.trim_end(), case.place.path(&format!("f{file:03}")).display().to_string());
        }
        let devices: Vec<String> = devices.into_iter().cloned().collect();
        case.ok(&format!("-d {}", devices.join(" ")));
    }
}

/// Rounds of the storm; BECKET_LOSETUP_ROUNDS says how many.
fn rounds() -> u32 {
    std::env::var("BECKET_LOSETUP_ROUNDS").ok().map_or(1, |text| text.parse().expect("a number"))
}

/// Only where all devices are the test's.
#[test]
fn detaching_all_leaves_none() {
    let name = "losetup_detach_all";
    if !require_root(name) {
        return;
    }
    if becket_testkit::via() == "auto" {
        return skip(name, "it would detach other people's devices");
    }
    let _alone = DEVICES.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let place = scratch();
    let [_, losetup] = links(&place);
    let run = |words: &[&str]| {
        let mut command = Command::new(&losetup);
        place.prepare(&mut command);
        place.finish(command.args(words))
    };
    for file in ["a", "b"] {
        image::sparse(&place.path(file), MIB);
        assert_eq!(run(&["-f", file]).code, 0);
    }
    assert_eq!(run(&["-a"]).out.lines().count(), 2);
    let ran = run(&["-D"]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""));
    assert_eq!(run(&["-a"]).out, "");
    assert_eq!(run(&["-D"]).code, 0, "none is well, too");
}

/// The same words over ublk, as far as its nodes go.
#[test]
fn over_ublk() {
    let name = "losetup_ublk";
    if !require_root(name) {
        return;
    }
    if !require_ublk(name) {
        return;
    }
    let place = scratch();
    let [_, losetup] = links(&place);
    let run = |words: &[&str]| {
        let mut command = Command::new(&losetup);
        place.prepare(&mut command);
        place.finish(command.env("BECKET_LOSETUP_VIA", "ublk").args(words))
    };
    image::random(&place.path("img"), 4 * MIB, 7);
    let ran = run(&["--find", "--show", "--offset", "1M", "--sizelimit", "2M", "img"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let device = ran.out.trim_end();
    assert!(device.starts_with("/dev/ublkb"), "{ran:?}");
    assert_eq!(
        fs::read(device).unwrap(),
        fs::read(place.path("img")).unwrap()[MIB as usize..3 * MIB as usize]
    );

    let json = run(&["-J", "-l", device]).json();
    let row = &json["loopdevices"][0];
    assert_eq!(
        (&row["name"], &row["offset"], &row["sizelimit"]),
        (&device.into(), &(MIB).into(), &(2 * MIB).into())
    );
    assert_eq!(row["back-file"], place.path("img").display().to_string());
    assert_eq!((&row["ro"], &row["log-sec"]), (&false.into(), &512.into()));
    assert!(run(&["-j", "img"]).out.starts_with(&format!("{device}: [")));
    assert!(run(&["-a"]).out.contains(&format!("{device}: [")));

    let same = run(&["-f", "-L", "--show", "-o", "1M", "--sizelimit", "2M", "img"]);
    assert_eq!((same.code, same.out.trim_end()), (0, device), "{same:?}");
    let some = run(&["-f", "-L", "--show", "-o", "2M", "img"]);
    assert_eq!(some.code, 1);
    assert!(some.err.contains("overlapping loop device exists"), "{some:?}");

    for refused in [&["-b", "4096", device][..], &["--remove", device], &[device, "img"]] {
        assert_eq!(run(refused).code, 1, "{refused:?}");
    }
    assert_eq!(run(&["--direct-io=off", device]).code, 0);
    let ran = run(&["-d", device]);
    assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{ran:?}");
    assert_eq!(run(&["-j", "img"]).out, "");
    assert_eq!(run(&["-d", device]).code, 1);
}
