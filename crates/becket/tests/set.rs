//! What `becket set` says of its changes, and that what it refuses is left alone.
//! Everything here runs over any transport that is tested; the changes themselves are the conformance
//! suite's.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{
    crc, crc_whole, image, require_device, require_fuse, require_loop, require_tools, require_ublk, tool,
    wait_until,
};
use common::{Small, scratch, text};
use serde_json::Value;
use std::fs::{File, OpenOptions, read_to_string};
use std::io::Write;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

#[test]
fn each_change_is_reported_with_how_it_was_made() {
    if !require_device("set::each_change_is_reported_with_how_it_was_made") {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    image::random(&image, 1 << 20, 1);
    let device = place.attach(&image, &["--name", "one"]);
    let device = device.to_str().unwrap();
    let reported = place.json(["set", "--read-only", "on", "--direct-io", "auto", device, "one"]);
    assert!(reported["errors"].as_array().unwrap().is_empty(), "{reported:#}");
    let words = |index: usize| -> Vec<[String; 3]> {
        let changes = reported["devices"][index]["changes"].as_array().unwrap();
        changes.iter().map(|one| ["what", "to", "how"].map(|key| text(one, key).to_owned())).collect()
    };
    assert_eq!(words(0)[0][..2], ["read_only", "on"]);
    assert!(["live", "drained"].contains(&words(0)[0][2].as_str()), "{reported:#}");
    assert_eq!(words(1)[0], ["read_only", "on", "unchanged"], "the same device by its name");
    assert_eq!(words(1)[1][0], "direct_io");
    assert_eq!(reported["devices"][1]["read_only"], Value::Bool(true));
    assert_eq!(std::fs::read_to_string(format!("/sys/class/block/{}/ro", &device[5..])).unwrap(), "1\n");

    // One that is refused does not keep the others from being changed.
    let output = place.becket().args(["set", "--json", "--block-size", "4096", device]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let refused: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(text(&refused["errors"][0], "kind"), "unsupported");
    assert!(text(&refused["errors"][0], "hint").contains("becket attach --block-size 4096"), "{refused:#}");
    let output = place.becket().args(["set", "--read-only", "off", "nobody", device]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(std::fs::read_to_string(format!("/sys/class/block/{}/ro", &device[5..])).unwrap(), "0\n");
}

/// What `--format` said at the attach counts whenever the image is opened again.
#[test]
fn the_format_of_the_attach_holds() {
    if !require_device("set::the_format_of_the_attach_holds") {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    // A foreign container, unless the user says otherwise.
    let bytes = [b"MComprHD".as_slice(), &image::random_bytes((1 << 20) - 8, 1)].concat();
    std::fs::write(&image, bytes).unwrap();
    assert_eq!(place.run(["attach", "a.img"]).code, 1);
    place.attach(&image, &["--name", "one", "--format", "raw", "--size-limit", "512K"]);
    place.ok(["set", "one", "--size-limit", "1M"]);
    let served = place.devices().remove(0);
    assert_eq!(served["size"], 1 << 20);
    place.ok(["detach", "one"]);
    if text(&served, "transport") == "ublk" || text(&served, "transport") == "fuse" {
        place.attach(&image, &["--name", "two", "--format", "raw", "--read-only"]);
        place.ok(["set", "two", "--read-only", "off"]);
        assert_eq!(place.devices()[0]["read_only"], false);
        let other = place.path("other.img");
        image::random(&other, 1 << 20, 2);
        place.ok(["set", "two", "--image", "other.img"]);
        place.ok(["set", "two", "--size-limit", "512K"]);
        let ran = place.run(["set", "two", "--image", "a.img"]);
        assert_eq!(ran.code, 1, "the format was that of the image before: {ran:?}");
        place.ok(["detach", "two"]);
    }
}

#[test]
fn one_image_cannot_be_that_of_two_devices() {
    let output = scratch().becket().args(["set", "--image", "x.img", "one", "two"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn what_cannot_be_written_back_keeps_a_device_writable() {
    if !require_device("set::what_cannot_be_written_back_keeps_a_device_writable") {
        return;
    }
    let place = scratch();
    let small = Small::mount(place.dir("small"));
    let image = small.0.join("sparse.img");
    image::sparse(&image, 1 << 20);
    let device = place.attach(&image, &["--direct-io", "off"]);
    let node = device.to_str().unwrap();
    let read_only = || read_to_string(format!("/sys/class/block/{}/ro", &node[5..])).unwrap();
    let freeze = || place.run(["set", "--read-only", "on", node]);
    let write = || {
        let mut writer = OpenOptions::new().write(true).open(&device).unwrap();
        writer.write_all(&image::random_bytes(1 << 20, 1)).unwrap();
        writer
    };

    // Still in the page cache: the change is who finds that there is no place for it.
    let writer = write();
    let ran = freeze();
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("write back"), "{ran:?}");
    assert_eq!(read_only(), "0\n");
    drop(writer);

    // Lost before, in a way that is not reported: it is over, and is not the change's failure.
    drop(write());
    tool(Command::new("blockdev").args(["--flushbufs", node]));
    let witness = File::open(&device).unwrap();
    let ran = freeze();
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(read_only(), "1\n");
    witness.sync_all().expect_err("there was an error that nobody had heard of");

    // The flag of the node is not the next image's.
    drop(witness);
    place.ok(["detach", node]);
    if node.starts_with("/dev/loop") {
        assert_eq!(read_only(), "0\n", "the number's next user may be anybody");
    }
    let again = place.attach(&image, &["--direct-io", "off"]);
    let ro = format!("/sys/class/block/{}/ro", again.file_name().unwrap().display());
    assert_eq!(read_to_string(ro).unwrap(), "0\n", "{}", again.display());
}

/// A privileged process can make a device writable or read-only to its users by an ioctl.
#[test]
fn a_flag_that_others_set_is_reported_and_where_becket_serves_opens_nothing() {
    let name = "set::a_flag_that_others_set_is_reported_and_where_becket_serves_opens_nothing";
    if !require_device(name) || !require_tools(name, &["blockdev"]) {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    image::random(&image, 1 << 20, 1);
    let device = place.attach(&image, &[]);
    let node = device.to_str().unwrap();
    let reported = || place.devices()[0]["read_only"].as_bool().unwrap();
    let blockdev = |what| tool(Command::new("blockdev").args([what, node]));
    let write = |byte: u8| {
        let file = OpenOptions::new().write(true).open(&device)?;
        file.write_all_at(&[byte; 4096], 0)?;
        file.sync_all()
    };
    let first = || std::fs::read(&image).unwrap()[0];

    blockdev("--setro");
    assert!(reported());
    write(1).expect_err("the kernel refuses it");
    place.ok(["set", "--read-only", "off", node]);
    assert!(!reported());
    write(2).unwrap();

    place.ok(["set", "--read-only", "on", node]);
    blockdev("--setrw");
    let outcome = write(3);
    if place.devices()[0]["transport"] == "loop" {
        // The kernel's driver has the image open for writing, and no other process is asked.
        assert!(!reported() && outcome.is_ok());
    } else {
        assert!(reported());
        outcome.expect_err("the worker refuses it");
        assert_eq!(first(), 2);
    }
    place.ok(["set", "--read-only", "off", node]);
    write(4).unwrap();
    assert_eq!(first(), 4);
}

#[test]
fn a_step_that_was_made_is_reported_though_the_next_one_failed() {
    if !require_loop("set::a_step_that_was_made_is_reported_though_the_next_one_failed") {
        return;
    }
    let place = scratch();
    let small = Small::mount(place.dir("small"));
    let image = small.0.join("sparse.img");
    image::sparse(&image, 1 << 20);
    let attached = place.json(["attach", "--via", "loop", "--direct-io", "off", image.to_str().unwrap()]);
    let node = text(&attached["devices"][0], "device");
    let _writer = {
        let mut writer = OpenOptions::new().write(true).open(node).unwrap();
        writer.write_all(&image::random_bytes(1 << 20, 1)).unwrap();
        writer
    };

    // There is no place for what is in the page cache; by then the driver goes past its own.
    let ran = place.run(["set", "--direct-io", "auto", "--read-only", "on", node]);
    assert_eq!(ran.code, 1, "{ran:?}");
    let kernel = read_to_string(format!("/sys/class/block/{}/loop/dio", &node[5..])).unwrap() == "1\n";
    let listed = place.json(["list"]);
    assert_eq!(listed["devices"][0]["direct_io"], Value::Bool(kernel), "{listed:#}");
    assert_eq!(listed["devices"][0]["read_only"], Value::Bool(false), "{listed:#}");
    assert!(kernel, "the file system of the test has direct I/O, or nothing was tested");
}

#[test]
fn an_image_that_lies_elsewhere_takes_no_place_in_loop() {
    if !require_loop("set::an_image_that_lies_elsewhere_takes_no_place_in_loop")
        || !require_tools("set::an_image_that_lies_elsewhere_takes_no_place_in_loop", &["sfdisk"])
    {
        return;
    }
    let place = scratch();
    let [(start, len), _] = image::GPT_PARTITIONS;
    for name in ["a.img", "b.img", "c.img"] {
        image::gpt(&place.path(name), 16 << 20);
    }
    let fill = |name: &str, at: u64, seed: u64| {
        let file = OpenOptions::new().write(true).open(place.path(name)).unwrap();
        file.write_all_at(&image::random_bytes((len * 512) as usize, seed), at * 512).unwrap();
    };
    fill("a.img", start, 1);
    fill("b.img", start, 2);
    let attached = place.json(["attach", "--via", "loop", "--read-only", "a.img/p1"]);
    let node = text(&attached["devices"][0], "device");
    let old = crc_whole(Path::new(node));

    for elsewhere in ["c.img/p2", "c.img"] {
        let ran = place.run(["set", "--image", elsewhere, node]);
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(
            ran.err.contains("in the place of the old one") && ran.err.contains("becket detach"),
            "{ran:?}"
        );
        assert_eq!(crc_whole(Path::new(node)), old);
    }
    place.ok(["set", "--image", "b.img/p1", node]);
    assert_eq!(crc_whole(Path::new(node)), (crc(&place.path("b.img"), start * 512, len * 512), len * 512));
}

#[test]
fn no_limit_lets_a_part_of_an_image_reach_its_neighbour() {
    if !require_device("set::no_limit_lets_a_part_of_an_image_reach_its_neighbour")
        || !require_tools("set::no_limit_lets_a_part_of_an_image_reach_its_neighbour", &["sfdisk"])
    {
        return;
    }
    let place = scratch();
    image::gpt(&place.path("disk.img"), 16 << 20);
    let len = image::GPT_PARTITIONS[0].1 * 512;
    let device = place.attach(&place.path("disk.img/p1"), &["--size-limit", "10G"]);
    let node = device.to_str().unwrap();
    for limit in ["none", "10G"] {
        let ran = place.run(["set", "--size-limit", limit, node]);
        assert_eq!(ran.code, 1, "{ran:?}");
        assert!(ran.err.contains("part of another image") && ran.err.contains(&len.to_string()), "{ran:?}");
        assert_eq!(crc_whole(&device).1, len);
    }
    place.ok(["refresh", node]);
    assert_eq!(place.devices()[0]["size_limit"], Value::from(len), "the part's end is a limit of its own");
}

/// What a device's queues need to decode, or to let an image grow, they get when they are made.
fn a_served_image_keeps_its_kind(name: &str, via: &str) {
    if !require_tools(name, &["mksquashfs", "qemu-img"]) {
        return;
    }
    let place = scratch();
    for name in ["raw.img", "free.img"] {
        image::random(&place.path(name), 1 << 20, 1);
    }
    let pages: Vec<u8> = (0..1_u32 << 20).map(|at| (at / 4096) as u8).collect();
    std::fs::write(place.dir("tree").join("other.img"), pages).unwrap();
    let path = |name: &str| place.path(name).to_str().unwrap().to_owned();
    tool(Command::new("mksquashfs").args([&path("tree"), &path("packed"), "-quiet", "-no-progress"]));
    tool(Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", &path("grows.qcow2"), "1M"]));
    let refused = |device: &str, to: &str, why: &str| {
        let before = crc_whole(&place.links().join(device));
        let ran = place.run(["set", "--json", "--image", &path(to), device]);
        assert_eq!(ran.code, 1, "{ran:?}");
        let reported = ran.json();
        let error = &reported["errors"][0];
        assert_eq!(text(error, "kind"), "unsupported", "{error:#}");
        assert!(text(error, "message").contains(why), "{error:#}");
        let way = format!("becket detach {device}; becket attach --name {device} {}", path(to));
        assert!(text(error, "hint").contains(&way), "{error:#}");
        let devices = place.devices();
        let listed = devices.iter().find(|one| text(one, "name") == device).unwrap();
        assert!(!text(listed, "image").ends_with(to), "{listed:#}");
        // Through the page cache and past it.
        tool(Command::new("blockdev").arg("--flushbufs").arg(place.links().join(device)));
        assert_eq!(crc_whole(&place.links().join(device)), before);
    };
    place.attach(&place.path("raw.img"), &["--via", via, "--name", "raw"]);
    refused("raw", "packed/other.img", "is encoded");
    refused("raw", "grows.qcow2", "grows while it is written");
    place.attach(&place.path("packed/other.img"), &["--via", via, "--name", "decoded"]);
    refused("decoded", "free.img", "the image of decoded is encoded");
    let ran = place.run(["set", "--read-only", "off", "decoded"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("would have to be read-only: ") && ran.err.contains("SquashFS"), "{ran:?}");
    place.attach(&place.path("grows.qcow2"), &["--via", via, "--name", "grows"]);
    refused("grows", "free.img", "the image of grows grows while it is written");
    place.ok(["detach", "grows"]);
    place.attach(&place.path("grows.qcow2"), &["--via", via, "--name", "grows", "--read-only"]);
    let ran = place.run(["set", "--read-only", "off", "grows"]);
    assert!(ran.code == 1 && ran.err.contains("grows while it is written"), "all of it is attached: {ran:?}");
    // As it was said.
    place.ok(["detach", "decoded"]);
    place.attach(&place.path("free.img"), &["--via", via, "--name", "decoded"]);
    assert_eq!(crc_whole(&place.links().join("decoded")), crc_whole(&place.path("free.img")));
    place.ok(["detach", "--all"]);
}

#[test]
fn ublk_an_encoded_image_and_a_raw_one_do_not_change_places() {
    let name = "set::ublk_an_encoded_image_and_a_raw_one_do_not_change_places";
    if require_ublk(name) {
        a_served_image_keeps_its_kind(name, "ublk");
    }
}

#[test]
fn fuse_an_encoded_image_and_a_raw_one_do_not_change_places() {
    let name = "set::fuse_an_encoded_image_and_a_raw_one_do_not_change_places";
    if require_fuse(name) {
        a_served_image_keeps_its_kind(name, "fuse");
    }
}

/// What a program reads of a device that it has open is of one image, unless the user insists.
fn an_image_stays_under_a_program(via: &str, options: &[&str], read_only: bool) {
    let place = scratch();
    let contents = [1, 1, 2].map(|seed| image::random_bytes(1 << 20, seed));
    for (name, content) in ["a.img", "equal.img", "other.img"].iter().zip(&contents) {
        std::fs::write(place.path(name), content).unwrap();
    }
    let options = [&["--via", via, "--name", "one"], options].concat();
    let device = place.attach(&place.path("a.img"), &options);
    let first = |file: &File| {
        let mut bytes = [0; 4096];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    let swap = |words: &[&str]| place.run([&["set", "one", "--image"], words].concat());

    let program = File::open(&device).unwrap();
    let ran = swap(&["other.img"]);
    assert_eq!(ran.code, 1, "{ran:?}");
    let user = format!("(pid {})", std::process::id());
    for part in [device.to_str().unwrap(), "is in use", "open by ", &user, "end the users", "--force"] {
        assert!(ran.err.contains(part), "{part}: {ran:?}");
    }
    assert_eq!(first(&program), contents[0][..4096]);
    // All that it reads stays the same.
    let ran = swap(&["equal.img"]);
    assert_eq!(ran.code, i32::from(!read_only), "{ran:?}");
    assert_eq!(first(&program), contents[0][..4096]);
    let ran = swap(&["other.img", "--force"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(first(&program), contents[2][..4096]);

    // One that looks at the device for a moment, as udev's do, is waited for.
    let soon = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(program);
    });
    let ran = swap(&["a.img"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    soon.join().unwrap();
    assert_eq!(first(&File::open(&device).unwrap()), contents[0][..4096]);
    place.ok(["detach", "one"]);
}

#[test]
fn loop_an_image_stays_under_a_program() {
    if require_loop("set::loop_an_image_stays_under_a_program") {
        an_image_stays_under_a_program("loop", &["--read-only"], true);
    }
}

#[test]
fn fuse_an_image_stays_under_a_program() {
    if require_fuse("set::fuse_an_image_stays_under_a_program") {
        an_image_stays_under_a_program("fuse", &[], false);
        an_image_stays_under_a_program("fuse", &["--read-only"], true);
    }
}

#[test]
fn ublk_an_image_stays_under_a_program() {
    if require_ublk("set::ublk_an_image_stays_under_a_program") {
        an_image_stays_under_a_program("ublk", &[], false);
    }
}

/// No command makes a disk of it, and nobody mounts it.
#[test]
fn an_export_is_spoken_of_as_one() {
    let name = "set::an_export_is_spoken_of_as_one";
    if !require_tools(name, &["qemu-img"]) {
        return;
    }
    let place = scratch();
    let path = |name: &str| place.path(name).to_str().unwrap().to_owned();
    for name in ["a b.img", "other.img"] {
        image::random(&place.path(name), 1 << 20, 1);
    }
    tool(Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", &path("grows.qcow2"), "1M"]));
    let address = format!("unix:{}", path("s.sock"));
    let made = |image: &str, options: &str, name: &str| {
        let image = becket_image::quoted(Path::new(&path(image)));
        format!("becket detach {name}; becket export {options}{image} --nbd {address} --name ")
    };
    let export = || {
        place.ok(["export", &path("a b.img"), "--nbd", &address, "--name", "my disk"]);
        common::nbd::Client::connect(&place.path("s.sock"), "my disk").unwrap()
    };
    let client = export();
    let refused = |words: &[&str], parts: &[&str]| {
        let ran = place.run([&["set", "nbd0"], words].concat());
        let hint = ran.err.split("hint: ").nth(1).unwrap_or_default().trim().to_owned();
        assert!(ran.code == 1 && parts.iter().all(|part| ran.err.contains(part)), "{words:?}: {ran:?}");
        for word in ["attach", "mount"] {
            assert!(!ran.err.contains(word), "{word}: {ran:?}");
        }
        hint
    };
    assert!(wait_until(Duration::from_secs(10), || place.devices()[0]["connections"] == 1));
    let users = ["connected", "have its clients disconnect first"];
    refused(&["--image", &path("other.img")], &users);
    refused(&["--size-limit", "512K"], &users);
    drop(client);
    assert!(wait_until(Duration::from_secs(10), || place.devices()[0]["connections"] == 0));
    refused(
        &["--image", &path("grows.qcow2")],
        &["grows while it is written", &made("grows.qcow2", "", "nbd0")],
    );
    let why = place.ok(["why", "nbd0"]);
    assert!(!why.contains("attach") && !why.contains("zero copy"), "{why}");
    assert_eq!(place.json(["why", "nbd0"])["devices"][0]["choices"].as_array().unwrap().len(), 0);
    // What is said makes that export.
    let hint = refused(&["--block-size", "4096"], &[&made("a b.img", "--block-size 4096 ", "nbd0")]);
    let bin = Path::new(env!("CARGO_BIN_EXE_becket")).parent().unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-ec", &hint]).env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap()));
    place.prepare(&mut shell);
    let ran = place.finish(&mut shell);
    assert_eq!(ran.code, 0, "{hint}: {ran:?}");
    let device = place.devices().remove(0);
    assert_eq!((text(&device["export"], "name"), &device["block_size"]), ("my disk", &Value::from(4096)));
    place.ok(["detach", "--all"]);
    // The socket of a virtual machine.
    place.ok(["export", &path("other.img"), "--vhost-user", &address]);
    let ran = place.run(["set", "vhost-user0", "--block-size", "4096"]);
    let way = format!("becket export --block-size 4096 {} --vhost-user {address}", path("other.img"));
    assert!(ran.code == 1 && ran.err.trim().ends_with(&way), "{ran:?}");
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_the_reason_of_a_refusal_is_the_true_one() {
    let name = "set::fuse_the_reason_of_a_refusal_is_the_true_one";
    if !require_fuse(name) || !require_tools(name, &["zstd"]) {
        return;
    }
    let place = scratch();
    image::random(&place.path("raw.img"), 40 << 20, 1);
    tool(Command::new("zstd").args(["-q", "-k"]).arg(place.path("raw.img")));
    let refused = |device: &str, options: &[&str], why: &str, hint: &str| {
        let ran = place.run([&["set", device], options].concat());
        assert!(ran.code == 1 && ran.err.contains(why) && ran.err.contains(hint), "{ran:?}");
    };
    place.attach(&place.path("raw.img"), &["--via", "fuse", "--read-only", "--name", "raw"]);
    refused(
        "raw",
        &["--read-only", "off"],
        "was attached read-only, and its loop device stays so",
        "becket detach /dev/",
    );
    refused("raw", &["--size-limit", "0"], "no block left", "--size-limit none");
    place.ok(["detach", "raw"]);
    place.attach(&place.path("raw.img.zst"), &["--via", "fuse", "--name", "packed"]);
    refused("packed", &["--read-only", "off"], "come into becket's store, which is only read", "--cow FILE");
    let image = place.path("raw.img");
    refused(
        "packed",
        &["--image", image.to_str().unwrap()],
        "comes while it is read, and no other",
        "becket detach",
    );
}
