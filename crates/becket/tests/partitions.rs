//! Partitions: their nodes are there when attach returns, with the right bytes, and go with the device.
//! Nothing waits for udev, and nothing needs it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{
    Scratch, crc, crc_whole, image, require_device, require_fuse, require_loop, require_tools, tool, via,
    wait_until,
};
use common::{Use, scratch, text};
use serde_json::json;
use std::{
    fs,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

const MIB: u64 = 1 << 20;

fn ready(test: &str, tools: &[&str]) -> bool {
    let name = format!("partitions::{test}");
    require_device(&name) && require_tools(&name, tools)
}

#[test]
fn are_there_at_return() {
    if !ready("are_there_at_return", &["sfdisk"]) {
        return;
    }
    let place = scratch();
    let disk = place.path("disk.img");
    image::gpt(&disk, 16 << 20);
    // Something to find in them.
    let mut bytes = fs::read(&disk).unwrap();
    for (number, (start, len)) in image::GPT_PARTITIONS.into_iter().enumerate() {
        let (start, len) = (start as usize * 512, len as usize * 512);
        bytes[start..start + len].copy_from_slice(&image::random_bytes(len, number as u64));
    }
    fs::write(&disk, bytes).unwrap();

    let reported = place.json(["attach", "--via", &via(), "--name", "disk", "disk.img"]);
    let info = &reported["devices"][0];
    let partitions = info["partitions"].as_array().unwrap();
    assert_eq!(partitions.len(), 2, "{info:#}");
    for (number, (partition, (start, len))) in partitions.iter().zip(image::GPT_PARTITIONS).enumerate() {
        let node = Path::new(text(partition, "device"));
        assert_eq!(partition["number"], json!(number + 1));
        assert_eq!(partition["start"], json!(start * 512));
        assert_eq!(text(partition, "label"), ["first", "second"][number]);
        assert_eq!(crc_whole(node), (crc(&disk, start * 512, len * 512), len * 512));
        let link = place.links().join(format!("diskp{}", number + 1));
        assert_eq!(fs::canonicalize(link).unwrap(), node);
    }
    let nodes: Vec<&str> = partitions.iter().map(|partition| text(partition, "device")).collect();
    let used = Use::of(Path::new(text(info, "device")));
    place.ok(["detach", "disk"]);
    assert!(!place.links().join("diskp1").exists());
    for node in nodes {
        let name = Path::new(node).file_name().unwrap().to_str().unwrap();
        let there = Path::new("/sys/class/block").join(name).exists();
        assert!(!there || used.is_anothers(), "{name} is gone with its disk");
    }
}

/// The disk's image becomes longer, the disk follows, and the usual tools move the end of a partition to the
/// new end.
#[test]
fn the_last_grows_with_its_disk() {
    if !ready("the_last_grows_with_its_disk", &["sfdisk", "partx"]) {
        return;
    }
    let place = scratch();
    let disk = place.path("disk.img");
    image::gpt(&disk, 16 << 20);
    let device = place.attach(&disk, &["--name", "disk"]);
    let node = fs::canonicalize(place.links().join("diskp2")).unwrap();
    // In use all the while, as a mounted one is.
    let used = fs::File::options().read(true).write(true).open(&node).unwrap();
    fs::File::options().write(true).open(&disk).unwrap().set_len(32 << 20).unwrap();
    place.ok(["refresh", "disk"]);
    tool(
        Command::new("sfdisk")
            .args(["--quiet", "--no-reread", "--no-tell-kernel"])
            .args(["--relocate", "gpt-bak-std"])
            .arg(&device),
    );
    let grow =
        "echo ', 24MiB' | sfdisk --quiet --no-reread --no-tell-kernel -N 2 $0 && partx --update --nr 2 $0";
    tool(Command::new("sh").args(["-c", grow]).arg(&device));
    let (start, len) = (image::GPT_PARTITIONS[1].0 * 512, 24 << 20);
    let last = [0x5a; 4096];
    used.write_all_at(&last, len - 4096).unwrap();
    used.sync_all().unwrap();
    assert!(used.write_all_at(&last, len).is_err(), "and no further");
    drop(used);
    let mut bytes = [0; 4096];
    fs::File::open(&disk).unwrap().read_exact_at(&mut bytes, start + len - 4096).unwrap();
    assert_eq!(bytes, last);
    let second = &place.devices()[0]["partitions"][1];
    assert_eq!((text(second, "device"), &second["size"]), (node.to_str().unwrap(), &json!(len)));
    place.ok(["detach", "disk"]);
}

#[test]
fn run_tells_them_to_the_command() {
    if !ready("run_tells_them_to_the_command", &["sfdisk"]) {
        return;
    }
    let place = scratch();
    image::gpt(&place.path("disk.img"), 16 << 20);
    let ran = place.run([
        "run",
        "--via",
        &via(),
        "disk.img",
        "--",
        "sh",
        "-c",
        "echo $BECKET_PARTITIONS; test -b ${BECKET_DEVICE}p1 && test -b {}p2",
    ]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let nodes: Vec<&str> = ran.out.split_whitespace().collect();
    assert!(nodes.len() == 2 && nodes[1].ends_with("p2"), "{ran:?}");
}

#[test]
fn off_means_off() {
    if !ready("off_means_off", &["sfdisk"]) {
        return;
    }
    let place = scratch();
    image::gpt(&place.path("disk.img"), 16 << 20);
    let device = place.attach(&place.path("disk.img"), &["--partitions", "off"]);
    let name = device.file_name().unwrap().to_str().unwrap();
    assert!(!Path::new("/sys/class/block").join(format!("{name}p1")).exists());
    assert_eq!(place.devices()[0]["partitions"], json!([]));
}

/// In a container nothing else makes device nodes: becket does.
#[test]
fn nodes_that_nobody_made() {
    if !ready("nodes_that_nobody_made", &["sfdisk", "unshare", "mknod"]) {
        return;
    }
    let place = scratch();
    let disk = place.path("disk.img");
    image::gpt(&disk, 16 << 20);
    let script = "set -e; mount -t tmpfs none /dev; mknod /dev/null c 1 3; mkdir /dev/shm; \
        [ -z \"$1\" ] || mknod /dev/loop-control c 10 237; [ -z \"$2\" ] || mknod /dev/ublk-control c $2; \
        dev=$(\"$BECKET\" attach --via \"$0\" disk.img); test -b $dev; test -b ${dev}p1; test -b ${dev}p2; \
        cmp -n 16777216 $dev disk.img; cmp -i 1048576:0 -n 4194304 disk.img ${dev}p1; \
        \"$BECKET\" detach $dev; \"$BECKET\" run --via \"$0\" disk.img -- sh -c 'test -b {}p1'; echo fine";
    let has_loop = if Path::new("/dev/loop-control").exists() { "yes" } else { "" };
    let misc = fs::read_to_string("/sys/class/misc/ublk-control/dev").unwrap_or_default();
    let mut command = Command::new("unshare");
    place.prepare(&mut command);
    command.args(["--mount", "--propagation", "private", "sh", "-c", script, &via(), has_loop]);
    let ran = place.finish(command.arg(misc.trim().replace(':', " ")));
    assert_eq!((ran.code, ran.out.as_str()), (0, "fine\n"), "{ran:?}");
    assert!(place.devices().is_empty());
}

/// Makes sfdisk change the table on a device, and ask the kernel to read it again; whether that did so. It
/// does not for ublk, whose server has no privileges, nor for device-mapper: there `becket refresh` is the
/// only way.
#[track_caller]
fn sfdisk(device: &Path, args: &str, table: &str) -> bool {
    let said = tool(
        Command::new("sh").args(["-c", &format!("printf '{table}' | sfdisk {args} $0 2>&1")]).arg(device),
    );
    let failed = said.contains("Re-reading the partition table failed");
    assert!(!failed || !device.to_string_lossy().contains("loop"), "{said}");
    !failed
}

/// Number and first byte of each partition that `list --json` shows.
fn listed(place: &Scratch) -> Vec<(u64, u64)> {
    let devices = place.devices();
    let parts = devices[0]["partitions"].as_array().unwrap();
    parts.iter().map(|part| (part["number"].as_u64().unwrap(), part["start"].as_u64().unwrap())).collect()
}

/// What image builders do all day, also with a kernel that reads no tables itself.
#[test]
fn a_blank_image_is_partitioned_in_place() {
    if !ready("a_blank_image_is_partitioned_in_place", &["sfdisk"]) {
        return;
    }
    let place = scratch();
    let image = place.path("new.img");
    image::sparse(&image, 64 << 20);
    let device = place.attach(&image, &["--name", "new"]);
    let node = |number: u32| PathBuf::from(format!("{}p{number}", device.display()));
    let link = |number: u32| place.links().join(format!("newp{number}"));
    sfdisk(&device, "", "label: gpt\\n1MiB,4MiB\\n8MiB,4MiB\\n16MiB,4MiB\\n");
    place.ok(["refresh", "new"]);
    assert_eq!(listed(&place), [(1, MIB), (2, 8 * MIB), (3, 16 * MIB)]);
    let second = fs::File::options().read(true).write(true).open(node(2)).unwrap();
    second.write_all_at(&[0x5a; 4096], 0).unwrap();
    second.sync_all().unwrap();
    let mut bytes = [0; 4096];
    fs::File::open(&image).unwrap().read_exact_at(&mut bytes, 8 * MIB).unwrap();
    assert_eq!(bytes, [0x5a; 4096]);
    assert_eq!(fs::canonicalize(link(2)).unwrap(), node(2));
    drop(second);

    // A kernel that reads tables has the others now, another one none; a partition that is gone is not shown.
    let reread = sfdisk(&device, "", "label: gpt\\nstart=8MiB,size=4MiB\\nstart=16MiB,size=4MiB\\n");
    assert!(!reread || listed(&place).iter().all(|(_, start)| *start != MIB));
    place.ok(["refresh", "new"]);
    assert_eq!(listed(&place), [(1, 8 * MIB), (2, 16 * MIB)]);
    let reread = sfdisk(&device, "--delete", "");
    assert!(!reread || listed(&place).is_empty());
    place.ok(["refresh", "new"]);
    assert_eq!(listed(&place), []);
    assert!(!node(1).exists() && !link(1).is_symlink() && !link(3).is_symlink());
    sfdisk(
        &device,
        "",
        "label: gpt\\nstart=1MiB,size=4MiB\\nstart=8MiB,size=4MiB\\nstart=16MiB,size=4MiB\\n",
    );
    place.ok(["refresh", "new"]);
    tool(Command::new("sfdisk").arg("--delete").arg(&device).arg("1"));
    place.ok(["refresh", "new"]);
    assert_eq!(listed(&place), [(2, 8 * MIB), (3, 16 * MIB)]);
    assert!(!node(1).exists() && !link(1).is_symlink() && node(2).exists() && link(3).is_symlink());
    place.ok(["refresh", "new"]);

    // One in use stays, the others follow, and one that only grows does so in use.
    let third = fs::File::open(node(3)).unwrap();
    sfdisk(&device, "--no-reread --no-tell-kernel", "label: gpt\\nstart=2MiB,size=1MiB\\n");
    let ran = place.run(["refresh", "new"]);
    let (third_node, hint) = (node(3).display().to_string(), "becket refresh");
    assert!(ran.code == 1 && ran.err.contains(&third_node) && ran.err.contains(hint), "{ran:?}");
    drop(third);
    place.ok(["refresh", "new"]);
    assert_eq!(listed(&place), [(1, 2 * MIB)]);
    let first = fs::File::open(node(1)).unwrap();
    sfdisk(&device, "--no-reread --no-tell-kernel", "label: gpt\\nstart=2MiB,size=9MiB\\n");
    place.ok(["refresh", "new"]);
    assert_eq!(place.devices()[0]["partitions"][0]["size"], json!(9 * MIB));
    drop(first);
    place.ok(["detach", "new"]);
    assert!(!link(1).is_symlink());
}

/// The length of what grows in a qcow2 is fixed; its partitions are not.
#[test]
fn an_overlay_is_partitioned_in_place() {
    let name = "partitions::an_overlay_is_partitioned_in_place";
    if !require_fuse(name) || !require_tools(name, &["sfdisk"]) {
        return;
    }
    let place = scratch();
    image::sparse(&place.path("base.img"), 64 << 20);
    let device = place.attach(
        &place.path("base.img"),
        &["--via", "fuse", "--name", "new", "--cow", place.path("over.qcow2").to_str().unwrap()],
    );
    sfdisk(&device, "", "label: gpt\\n1MiB,4MiB\\n8MiB,4MiB\\n");
    // A second time there is nothing to do.
    for _ in 0..2 {
        place.ok(["refresh", "new"]);
        assert_eq!(listed(&place), [(1, MIB), (2, 8 * MIB)]);
    }
    place.ok(["detach", "new"]);
}

#[test]
fn off_stays_off() {
    if !ready("off_stays_off", &["sfdisk"]) {
        return;
    }
    let place = scratch();
    image::gpt(&place.path("disk.img"), 16 << 20);
    place.attach(&place.path("disk.img"), &["--partitions", "off", "--name", "off"]);
    place.ok(["refresh", "off"]);
    assert_eq!(listed(&place), []);
    place.ok(["detach", "off"]);
}

/// In a private `/dev` nothing removes nodes, and a number may be another disk's later. The last device
/// is detached from outside of the container that attached it.
#[test]
fn nodes_that_nobody_removes() {
    let name = "partitions::nodes_that_nobody_removes";
    if !require_loop(name) || !require_tools(name, &["sfdisk", "unshare", "mknod"]) {
        return;
    }
    let place = scratch();
    image::gpt(&place.path("disk.img"), 16 << 20);
    let script = "set -e; mount -t tmpfs none /dev; mknod /dev/null c 1 3; mkdir /dev/shm; \
        mknod /dev/loop-control c 10 237; none() { ! ls /dev/loop*p* 2>/dev/null; }; \
        dev=$(\"$BECKET\" attach --via loop disk.img); test -b ${dev}p1; test -b ${dev}p2; \
        \"$BECKET\" detach $dev; none; \
        dev=$(\"$BECKET\" attach --via loop --name left disk.img); test -b ${dev}p1; touch there; \
        while [ ! -e go ]; do sleep 0.05; done; none; echo fine";
    let mut command = Command::new("unshare");
    place.prepare(&mut command);
    command.args(["--mount", "--propagation", "private", "sh", "-c", script]);
    command.stdout(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let there = || place.path("there").exists() || child.try_wait().unwrap().is_some();
    assert!(wait_until(Duration::from_secs(30), there));
    place.ok(["detach", "left"]);
    fs::write(place.path("go"), "").unwrap();
    let output = child.wait_with_output().unwrap();
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && out.ends_with("fine\n"), "{output:?}");
    assert!(place.devices().is_empty());
}

#[test]
fn devices_are_listed_as_people_count() {
    let name = "partitions::devices_are_listed_as_people_count";
    if !require_device(name) {
        return;
    }
    let place = scratch();
    for name in ["disk10", "disk2", "disk1"] {
        image::random(&place.path(name), 64 << 10, 1);
        place.attach(&place.path(name), &["--name", name]);
    }
    let names: Vec<String> = place.devices().iter().map(|device| text(device, "name").to_owned()).collect();
    assert_eq!(names, ["disk1", "disk2", "disk10"]);
    place.ok(["detach", "--all"]);
}

/// The partition's own node and the path through the disk are one image, whichever is attached first.
fn one_image_by_two_ways(name: &str, via: &str) {
    if !require_tools(name, &["sfdisk"]) {
        return;
    }
    let place = scratch();
    let disk = place.path("disk.img");
    image::gpt(&disk, 16 << 20);
    let below = place.ok(["attach", "--via", "loop", "--name", "below", "disk.img"]);
    let below = below.trim();
    let ways = [format!("{below}/p2"), format!("{below}p2")];
    for (first, second) in [(&ways[0], &ways[1]), (&ways[1], &ways[0])] {
        for options in [&[][..], &["--read-only"]] {
            place.ok(["attach", "--via", via, "--name", "part", first]);
            let ran =
                place.run(["attach", "--via", via].iter().chain(options).copied().chain([second.as_str()]));
            assert!(
                ran.code == 1 && ran.err.contains("already attached as part"),
                "{first} before {second}: {ran:?}"
            );
            let other = place.ok(["attach", "--via", via, &format!("{below}p1")]);
            place.ok(["detach", other.trim()]);
            place.ok(["detach", "part"]);
        }
    }
    place.ok(["detach", "below"]);
}

#[test]
fn a_node_and_the_path_through_its_disk_are_one_image() {
    let name = "partitions::a_node_and_the_path_through_its_disk_are_one_image";
    if require_loop(name) {
        one_image_by_two_ways(name, "loop");
    }
}

#[test]
fn fuse_a_node_and_the_path_through_its_disk_are_one_image() {
    let name = "partitions::fuse_a_node_and_the_path_through_its_disk_are_one_image";
    if require_loop(name) && require_fuse(name) {
        one_image_by_two_ways(name, "fuse");
    }
}

/// The link of `d`'s first partition has the name that a device may have.
fn one_link_for_two(name: &str, via: &str) {
    let place = scratch();
    image::gpt(&place.path("disk.img"), 16 << 20);
    image::sparse(&place.path("x.img"), 16 << 20);
    let refused = |words: &[&str], other: &str, hint: &str| {
        for dry in [&["--dry-run"][..], &[]] {
            let ran = place.run([&["attach", "--via", via], dry, words].concat());
            assert!(ran.code == 1 && ran.err.contains(other) && ran.err.contains(hint), "{name}: {ran:?}");
        }
    };
    let leads = |link: &str| fs::canonicalize(place.links().join(link)).unwrap();
    let attach = |image: &str, words: &[&str]| {
        PathBuf::from(place.ok([&["attach", "--via", via, image], words].concat()).trim_end())
    };

    let x = attach("x.img", &["--name", "dp1"]);
    refused(&["--name", "d", "disk.img"], &x.display().to_string(), "becket detach dp1");
    assert_eq!(leads("dp1"), x);
    // Without that partition there is nothing to clash.
    attach("disk.img", &["--name", "d", "--partitions", "off"]);
    place.ok(["detach", "d", "dp1"]);

    let d = attach("disk.img", &["--name", "d"]);
    let first = leads("dp1");
    refused(
        &["--name", "dp1", "x.img"],
        &format!("partition 1 of d has it ({})", d.display()),
        "becket detach d\n",
    );
    assert_eq!(leads("dp1"), first);
    // No partition has such a number, or is called so.
    for free in ["dp3", "dp01", "dp"] {
        attach("x.img", &["--name", free]);
        place.ok(["detach", free]);
    }
    place.ok(["detach", "d"]);
    assert!(!place.links().join("dp1").is_symlink());

    // What appears later gets no link that another device has.
    let x = attach("x.img", &["--name", "newp1"]);
    image::sparse(&place.path("new.img"), 16 << 20);
    let new = attach("new.img", &["--name", "new"]);
    sfdisk(&new, "", "label: gpt\\n1MiB,4MiB\\n8MiB,4MiB\\n");
    let ran = place.run(["refresh", "new"]);
    let said = ran.err.contains("newp1") && ran.err.contains(&x.display().to_string());
    assert!(ran.code == 0 && said, "{ran:?}");
    assert_eq!((leads("newp1"), leads("newp2")), (x, PathBuf::from(format!("{}p2", new.display()))));
    place.ok(["refresh", "newp1"]);
    place.ok(["detach", "new"]);
    assert!(place.links().join("newp1").exists() && !place.links().join("newp2").is_symlink());
    place.ok(["detach", "newp1"]);
}

#[test]
fn a_link_is_that_of_one_device() {
    if !require_loop("partitions::a_link_is_that_of_one_device")
        || !ready("a_link_is_that_of_one_device", &["sfdisk"])
    {
        return;
    }
    one_link_for_two("loop", "loop");
}

#[test]
fn fuse_a_link_is_that_of_one_device() {
    let name = "partitions::fuse_a_link_is_that_of_one_device";
    if !require_fuse(name) || !require_tools(name, &["sfdisk"]) {
        return;
    }
    one_link_for_two("fuse", "fuse");
}
