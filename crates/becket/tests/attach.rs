//! Attaching, listing and detaching: what comes back is what went in, and what is reply is true.
//! Everything here runs over whichever transport is tested.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use becket_testkit::{
    crc, crc_whole, image, require_device, require_fuse, require_loop, require_tools, skip, tool, via,
    wait_until,
};
use common::{Use, alive, scratch, text};
use serde_json::json;
use std::{
    fs,
    io::{Read as _, Seek as _, SeekFrom, Write as _},
    path::PathBuf,
    process::Command,
    time::Duration,
};

/// Each library would be found, mapped and bound again for every image that a script attaches. The unwinder
/// of Rust's runtime is the one that a build with a shared libc needs. The command as it is shipped even
/// contains libc: no loader could list anything, and the command answers as usual.
#[test]
fn it_loads_no_library_but_libc() {
    let becket = env!("CARGO_BIN_EXE_becket");
    let said = Command::new(becket).arg("--version").env("LD_TRACE_LOADED_OBJECTS", "1").output().unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    if said.trim_end() == concat!("becket ", env!("CARGO_PKG_VERSION")) {
        return;
    }
    let known = ["linux-vdso", "libc.so", "libgcc_s.so", "ld-linux"];
    let others: Vec<&str> =
        said.lines().filter(|line| !known.iter().any(|name| line.contains(name))).collect();
    assert!(said.contains("libc.so") && (others.is_empty() || cfg!(sanitized)), "{said}");
}

#[test]
fn list_shows_what_is_meant() {
    if !require_device("attach::list_shows_what_is_meant") {
        return;
    }
    let place = scratch();
    image::random(&place.path("one.img"), 1 << 20, 1);
    image::random(&place.path("other.img"), 1 << 20, 2);
    for (name, image) in [("a", "one.img"), ("b", "one.img"), ("c", "other.img")] {
        place.ok(["attach", "--via", &via(), "-r", "--name", name, image]);
    }
    let listed = |targets: &[&str]| -> Vec<String> {
        let reply = place.json([&["list"], targets].concat());
        assert_eq!(reply["errors"], json!([]));
        reply["devices"].as_array().unwrap().iter().map(|info| text(info, "name").to_owned()).collect()
    };
    assert_eq!(listed(&["one.img"]), ["a", "b"], "all devices of an image");
    assert_eq!(listed(&["other.img", "a"]), ["a", "c"]);
    let ran = place.run(["list", "c", "nothing.img"]);
    assert_eq!((ran.code, ran.out.lines().count()), (1, 2), "{ran:?}");
    assert!(ran.out.contains("other.img") && ran.err.contains("nothing.img"), "{ran:?}");
    place.ok(["detach", "--all"]);
}

#[test]
fn round_trip() {
    if !require_device("attach::round_trip") {
        return;
    }
    let place = scratch();
    let image = place.path("disk.img");
    image::random(&image, 3 << 20, 1);
    let before = crc_whole(&image);

    let reply = place.json(["attach", "--via", &via(), "disk.img"]);
    let device = PathBuf::from(text(&reply["devices"][0], "device"));
    assert_eq!(reply["errors"], json!([]));
    let used = Use::of(&device);
    assert_eq!(crc_whole(&device), before, "the device shows the image");

    let devices = place.devices();
    assert_eq!(devices.len(), 1);
    let info = &devices[0];
    assert_eq!(text(info, "device"), device.to_str().unwrap());
    assert_eq!(text(info, "image"), fs::canonicalize(&image).unwrap().to_str().unwrap());
    assert_eq!(info["size"], json!(3 << 20));
    assert_eq!(info["read_only"], json!(false));
    assert_eq!(info["block_size"], json!(512));
    assert_eq!(text(info, "state"), "live");
    assert!(!text(info, "reason").is_empty(), "{info}");
    assert!(via() == "auto" || text(info, "transport") == via());
    assert_eq!(reply["devices"][0]["diskseq"], info["diskseq"]);

    let table = place.ok(["list"]);
    let mut lines = table.lines();
    let head: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
    assert_eq!(head, ["NAME", "DEVICE", "TRANSPORT", "SIZE", "RO", "DIO", "BLOCK", "STATE", "IMAGE"]);
    let row: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
    assert_eq!((row[1], row[3], row[4], row[7]), (device.to_str().unwrap(), "3M", "no", "live"));
    assert!(place.ok(["list", "-v"]).contains(text(info, "reason")));

    // What is written arrives in the file, and nowhere else.
    let mut file = fs::OpenOptions::new().read(true).write(true).open(&device).unwrap();
    file.seek(SeekFrom::Start(1 << 20)).unwrap();
    file.write_all(&[0xa5; 4096]).unwrap();
    file.sync_all().unwrap();
    drop(file);
    let gone = place.json(["detach", device.to_str().unwrap()]);
    assert_eq!(text(&gone["devices"][0], "device"), device.to_str().unwrap());
    assert!(!used.lasts(), "gone when detach returns");
    assert_eq!(place.devices(), Vec::<serde_json::Value>::new());
    assert_eq!(fs::metadata(&image).unwrap().len(), 3 << 20);
    let mut bytes = image::random_bytes(3 << 20, 1);
    bytes[1 << 20..(1 << 20) + 4096].fill(0xa5);
    assert!(fs::read(&image).unwrap() == bytes, "exactly the written bytes changed");
}

#[test]
fn many_at_once_in_the_order_given() {
    if !require_device("attach::many_at_once_in_the_order_given") {
        return;
    }
    let place = scratch();
    let names: Vec<String> = (0..32).map(|number| format!("many-{number}.img")).collect();
    for (number, name) in names.iter().enumerate() {
        image::random(&place.path(name), 64 << 10, 100 + number as u64);
    }
    let via = via();
    let out = place.ok(["attach", "--via", &via].into_iter().chain(names.iter().map(String::as_str)));
    let devices: Vec<PathBuf> = out.lines().map(PathBuf::from).collect();
    assert_eq!(devices.len(), names.len());
    let uses: Vec<Use> = devices.iter().map(|device| Use::of(device)).collect();
    assert!(uses.iter().all(Use::lasts));
    for (name, device) in names.iter().zip(&devices) {
        assert_eq!(crc_whole(device), crc_whole(&place.path(name)), "{name} is {}", device.display());
    }
    assert_eq!(place.devices().len(), names.len());
    // By device, by image, and the rest at once.
    place.ok(["detach", devices[0].to_str().unwrap(), devices[1].to_str().unwrap(), &names[2]]);
    assert_eq!(place.devices().len(), names.len() - 3);
    place.ok(["detach", "--all"]);
    assert!(place.devices().is_empty());
    assert!(!uses.iter().any(Use::lasts));
}

#[test]
fn one_that_fails_leaves_the_others_attached() {
    if !require_device("attach::one_that_fails_leaves_the_others_attached") {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 64 << 10, 1);
    image::random(&place.path("b.img"), 64 << 10, 2);
    let ran = place.run(["attach", "--via", &via(), "a.img", "missing.img", "b.img"]);
    assert_eq!(ran.code, 1);
    assert_eq!(ran.out.lines().count(), 2, "{ran:?}");
    assert!(ran.err.starts_with("becket: cannot attach missing.img: "), "{ran:?}");
    assert!(ran.err.contains("\n  hint: "), "{ran:?}");
    assert_eq!(place.devices().len(), 2);
    place.ok(["detach", "--all"]);

    let ran = place.run(["attach", "--json", "--via", &via(), "a.img", "missing.img"]);
    assert_eq!(ran.code, 1);
    let reply = ran.json();
    assert_eq!(reply["devices"].as_array().unwrap().len(), 1);
    assert_eq!(text(&reply["errors"][0], "image"), "missing.img");
    assert_eq!(text(&reply["errors"][0], "kind"), "not_found");
}

#[test]
fn names() {
    if !require_device("attach::names") {
        return;
    }
    let place = scratch();
    image::random(&place.path("a.img"), 64 << 10, 1);
    image::random(&place.path("b.img"), 64 << 10, 2);
    let device = place.attach(&place.path("a.img"), &["--name", "first"]);
    assert_eq!(fs::canonicalize(place.links().join("first")).unwrap(), device);
    assert_eq!(text(&place.devices()[0], "name"), "first");

    let ran = place.run(["attach", "--via", &via(), "--name", "first", "b.img"]);
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("the name first is in use") && ran.err.contains("hint: "), "{ran:?}");
    for bad in ["", "..", "a/b", "-x", "a b"] {
        let ran = place.run(["attach", "--via", &via(), &format!("--name={bad}"), "b.img"]);
        assert_eq!(ran.code, 1, "{bad:?}: {ran:?}");
        assert!(ran.err.contains("cannot be a device's name"), "{bad:?}: {ran:?}");
    }
    let ran = place.run(["attach", "--name", "x", "a.img", "b.img"]);
    assert_eq!(ran.code, 2, "{ran:?}");
    assert_eq!(place.devices().len(), 1, "the refused ones left nothing");

    place.ok(["detach", "first"]);
    assert!(!place.links().join("first").exists());
    assert_eq!(place.run(["detach", "first"]).code, 1);
}

#[test]
fn an_image_in_use_is_refused_unless_shared() {
    if !require_device("attach::an_image_in_use_is_refused_unless_shared") {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    image::random(&image, 64 << 10, 1);
    place.attach(&image, &["--name", "holder"]);
    let ran = place.run(["attach", "--json", "--via", &via(), "a.img"]);
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("already attached as holder") && ran.err.contains("--shared"), "{ran:?}");
    assert_eq!(text(&ran.json()["errors"][0], "kind"), "in_use");
    place.ok(["detach", "holder"]);

    let one = place.attach(&image, &["--shared"]);
    let two = place.attach(&image, &["--shared"]);
    assert_ne!(one, two);
    assert_eq!(place.devices().len(), 2);
    // The path is now ambiguous, and nothing is detached by guess.
    let ran = place.run(["detach", "a.img"]);
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("attached more than once"), "{ran:?}");
    place.ok(["detach", "--all"]);

    // Readers get along.
    place.attach(&image, &["-r"]);
    place.attach(&image, &["-r"]);
    assert_eq!(place.run(["attach", "--via", &via(), "a.img"]).code, 1, "but a writer beside them does not");
}

#[test]
fn read_only_refuses_writes() {
    if !require_device("attach::read_only_refuses_writes") {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    image::random(&image, 64 << 10, 1);
    let before = crc_whole(&image);
    let device = place.attach(&image, &["--read-only"]);
    assert_eq!(place.devices()[0]["read_only"], json!(true));
    let refused = fs::OpenOptions::new().write(true).open(&device).and_then(|mut file| {
        file.write_all(&[0; 512])?;
        file.sync_all()
    });
    assert!(refused.is_err());
    assert_eq!(crc_whole(&device), before);
    place.ok(["detach", "--all"]);
    assert_eq!(crc_whole(&image), before);
}

#[test]
fn offset_and_limit_touch_nothing_outside() {
    if !require_device("attach::offset_and_limit_touch_nothing_outside") {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    image::random(&image, 4 << 20, 1);
    let device = place.attach(&image, &["--offset", "1MiB", "--size-limit", "64K"]);
    assert_eq!(crc_whole(&device), (crc(&image, 1 << 20, 64 << 10), 64 << 10));
    let info = &place.devices()[0];
    assert_eq!((&info["offset"], &info["size_limit"]), (&json!(1 << 20), &json!(64 << 10)));
    let mut file = fs::OpenOptions::new().write(true).open(&device).unwrap();
    file.write_all(&vec![0; 64 << 10]).unwrap();
    file.sync_all().unwrap();
    assert!(file.write_all(&[1]).is_err(), "there is nothing behind the limit");
    drop(file);
    place.ok(["detach", "--all"]);
    let mut bytes = image::random_bytes(4 << 20, 1);
    bytes[1 << 20..(1 << 20) + (64 << 10)].fill(0);
    assert!(fs::read(&image).unwrap() == bytes);
}

#[test]
fn block_size() {
    if !require_device("attach::block_size") {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    image::random(&image, 64 << 10, 1);
    let device = place.attach(&image, &["--block-size", "4K"]);
    assert_eq!(place.devices()[0]["block_size"], json!(4096));
    let name = device.file_name().unwrap().to_str().unwrap().to_owned();
    let queue = fs::read_to_string(format!("/sys/block/{name}/queue/logical_block_size")).unwrap();
    assert_eq!(queue.trim(), "4096");
    assert_eq!(crc_whole(&device), crc_whole(&image));
}

#[test]
fn refresh_takes_over_a_new_size() {
    if !require_device("attach::refresh_takes_over_a_new_size") {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    image::random(&image, 1 << 20, 1);
    let device = place.attach(&image, &[]);
    fs::OpenOptions::new().write(true).open(&image).unwrap().set_len(2 << 20).unwrap();
    let ran = place.run(["refresh", "--json", "a.img"]);
    if ran.code != 0 && text(&ran.json()["errors"][0], "kind") == "unsupported" {
        becket_testkit::skip("attach::refresh_takes_over_a_new_size", ran.err.trim());
        return;
    }
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(ran.json()["devices"][0]["size"], json!(2 << 20));
    assert_eq!(crc_whole(&device), crc_whole(&image));
    assert_eq!(
        place.ok(["refresh", device.to_str().unwrap()]).trim_end(),
        format!("{}  2M", device.display())
    );
    let ran = place.run(["refresh", "nothing"]);
    assert_eq!(ran.code, 1);
    assert!(ran.err.starts_with("becket: cannot refresh nothing: "), "{ran:?}");
}

#[test]
fn autoclear_goes_with_the_last_user() {
    if !require_device("attach::autoclear_goes_with_the_last_user") {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    image::random(&image, 1 << 20, 1);
    let ran = place.run(["attach", "--via", &via(), "--autoclear", "a.img"]);
    if ran.code != 0 {
        // The kernel's loop driver clears a device that was not opened yet: refused, with another way.
        assert!(ran.err.contains("would clear an autoclear device"), "{ran:?}");
        assert!(ran.err.contains("hint: use `becket run` or `becket mount`"), "{ran:?}");
        assert!(place.devices().is_empty());
        return;
    }
    let device = PathBuf::from(ran.out.trim_end());
    let used = Use::of(&device);
    let mut file = fs::File::open(&device).unwrap();
    file.read_exact(&mut [0; 512]).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(place.devices().len(), 1, "it stays while it is used");
    drop(file);
    assert!(wait_until(Duration::from_secs(20), || place.devices().is_empty() && !used.lasts()));

    // One that was not used yet stays; one whose user was quick goes with it. A program that looks at all
    // block devices of a machine is a user, too, for a moment: then it went, or was never had, and that is
    // tried again.
    let unused = (0..5).find_map(|_| {
        let ran = place.run(["attach", "--via", &via(), "--autoclear", "a.img"]);
        if ran.code != 0 {
            assert!(ran.err.contains("would clear an autoclear device"), "{ran:?}");
            return None;
        }
        let device = PathBuf::from(ran.out.trim_end());
        let used = Use::of(&device);
        std::thread::sleep(Duration::from_secs(2));
        let stays = place.devices().len() == 1 && used.lasts();
        stays.then_some((device, used))
    });
    let (device, used) = unused.expect("it has had no user");
    drop(fs::File::open(&device).unwrap());
    assert!(wait_until(Duration::from_secs(20), || place.devices().is_empty() && !used.lasts()));
}

/// Each of a thousand would wake for itself, and a user may have 128 inotify queues.
#[test]
fn many_autoclear_devices_are_watched_by_one_thread() {
    const NAME: &str = "attach::many_autoclear_devices_are_watched_by_one_thread";
    if !require_device(NAME) {
        return;
    }
    if via() != "ublk" {
        return skip(NAME, "the kernel's loop driver would clear them at once");
    }
    let place = scratch();
    let names: Vec<String> = (0..16).map(|number| format!("{number}.img")).collect();
    for name in &names {
        image::random(&place.path(name), 1 << 20, 1);
    }
    let mut words = vec!["attach", "--autoclear"];
    words.extend(names.iter().map(String::as_str));
    let attached = place.json(words);
    let server = &attached["devices"][0]["server_pid"];
    let queues = || {
        let fds = fs::read_dir(format!("/proc/{server}/fd")).unwrap().flatten();
        fds.filter(|fd| fs::read_link(fd.path()).is_ok_and(|to| to.ends_with("anon_inode:inotify"))).count()
    };
    let threads = || fs::read_dir(format!("/proc/{server}/task")).unwrap().count();
    assert!(wait_until(Duration::from_secs(20), || threads() < names.len()), "{} threads", threads());
    // One for all devices, and one for the runtime directory.
    assert_eq!(queues(), 2);
    for device in attached["devices"].as_array().unwrap() {
        drop(fs::File::open(text(device, "device")).unwrap());
    }
    assert!(wait_until(Duration::from_secs(20), || place.devices().is_empty()), "{:?}", place.devices());
}

/// A mount opens the device without its node, after mount(8) has looked at it and let go.
#[test]
fn autoclear_goes_with_its_mount() {
    const NAME: &str = "attach::autoclear_goes_with_its_mount";
    if !require_device(NAME) || !require_tools(NAME, &["mkfs.ext4", "mount"]) {
        return;
    }
    if via() != "ublk" {
        return skip(NAME, "the kernel's loop driver would clear it at once");
    }
    let place = scratch();
    let (image, dir) = (place.path("a.img"), place.dir("mnt"));
    image::ext4(&image, 8 << 20, &place.dir("from"));
    let device = place.attach(&image, &["--autoclear"]);
    let used = Use::of(&device);
    tool(Command::new("mount").arg(&device).arg(&dir));
    // Looked at once a second, where nothing else keeps the machine busy.
    std::thread::sleep(Duration::from_secs(5));
    assert!(used.lasts(), "it stays while it is mounted");
    becket_testkit::umount(&dir);
    let gone = wait_until(Duration::from_secs(20), || place.devices().is_empty() && !used.lasts());
    let log = fs::read_to_string(place.runtime().join("log"));
    assert!(gone, "{:#?}, there: {}, {log:?}", place.devices(), used.lasts());
}

#[test]
fn losetup_agrees() {
    if !require_loop("attach::losetup_agrees") {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    image::random(&image, 1 << 20, 1);
    let device = place.attach(&image, &["--via", "loop", "--offset", "4K"]);
    let out =
        tool(Command::new("losetup").args(["--noheadings", "--output", "OFFSET,BACK-FILE"]).arg(&device));
    let words: Vec<&str> = out.split_whitespace().collect();
    assert_eq!(words, ["4096", fs::canonicalize(&image).unwrap().to_str().unwrap()]);
    // Gone behind our back: list does not tell of it, and detach says so.
    tool(Command::new("losetup").arg("--detach").arg(&device));
    assert!(wait_until(Duration::from_secs(5), || place.devices().is_empty()));
}

#[test]
fn a_device_outlives_its_server() {
    let name = "attach::a_device_outlives_its_server";
    if !require_device(name) {
        return;
    }
    let place = scratch();
    let image = place.path("a.img");
    let bytes = image::random_bytes(1 << 20, 1);
    fs::write(&image, &bytes).unwrap();
    let device = place.attach(&image, &[]);
    let used = Use::of(&device);
    let pid = |info: &serde_json::Value, of: &str| info[of].as_u64().map(|pid| pid as u32);
    if pid(&place.devices()[0], "worker_pid").is_none() {
        becket_testkit::skip(name, "this transport has no server");
        return;
    }
    for victim in ["worker_pid", "server_pid", "worker_pid"] {
        let dead = pid(&place.devices()[0], victim).expect("both serve it");
        assert!(alive(dead));
        tool(Command::new("kill").args(["-KILL", &dead.to_string()]));
        let replaced = || {
            place
                .devices()
                .first()
                .is_some_and(|info| info["state"] == "live" && pid(info, victim) != Some(dead))
        };
        assert!(wait_until(Duration::from_secs(30), replaced), "{victim}: {:?}", place.devices());
        assert!(
            used.lasts() && fs::read(&device).expect("it is read") == bytes,
            "after the {victim}'s death"
        );
    }
    assert_eq!(place.devices()[0]["recoveries"], 2);
    place.ok(["detach", device.to_str().unwrap()]);
    assert!(place.devices().is_empty() && !used.lasts());
}

/// What fills no block is no device's, but a server can show it, with zeroes behind.
#[test]
fn a_read_only_image_loses_no_byte_of_its_end() {
    let name = "attach::a_read_only_image_loses_no_byte_of_its_end";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    let content = image::random_bytes(3 * 4096 + 100, 7);
    fs::write(place.path("odd.img"), &content).unwrap();
    let padded = [&content[..], &[0; 412]].concat();
    for via in ["auto", "fuse"] {
        let reply = place.json(["attach", "--via", via, "-r", "--name", "odd", "odd.img"]);
        let info = &reply["devices"][0];
        assert!(fs::read(text(info, "device")).unwrap() == padded, "{via}: {info:#}");
        assert!(info["warnings"].to_string().contains("412 bytes of zeroes"), "{info:#}");
        place.ok(["detach", "odd"]);
    }
    // The loop driver cannot; and what is written has to have a place.
    for how in [["--via=loop", "-r"], ["--via=loop", "--partitions=off"], ["--via=fuse", "--partitions=off"]]
    {
        let reply = place.json(["attach", how[0], how[1], "--name", "odd", "odd.img"]);
        let info = &reply["devices"][0];
        assert!(fs::read(text(info, "device")).unwrap() == content[..3 * 4096], "{how:?}");
        assert!(info["warnings"].to_string().contains("the last 100 of"), "{info:#}");
        place.ok(["detach", "odd"]);
    }
}

#[test]
fn who_has_an_image_is_named_with_what_it_has() {
    let name = "attach::who_has_an_image_is_named_with_what_it_has";
    if !require_device(name) || !require_tools(name, &["sfdisk"]) {
        return;
    }
    let place = scratch();
    image::gpt(&place.path("disk.img"), 16 << 20);
    image::random(&place.path("raw.img"), 16 << 20, 1);
    let refused = |words: &[&str], why: &str, hint: &str| {
        let ran = place.run(words);
        let (first, second) = ran.err.split_once("\n  hint: ").unwrap_or((ran.err.as_str(), ""));
        assert!(ran.code == 1 && first.contains(why) && second.starts_with(hint), "{words:?}: {ran:?}");
    };

    place.attach(&place.path("disk.img/p1"), &["--name", "part"]);
    refused(&["attach", "disk.img"], "/disk.img/p1 is already attached as part (/dev/", "detach it first");
    refused(&["attach", "disk.img/p1"], "disk.img: already attached as part (/dev/", "use that device, or");
    refused(
        &["copy", "disk.img", "x"],
        "disk.img/p1 is already attached as part",
        "end that use first: becket detach part",
    );
    place.ok(["detach", "part"]);

    place.attach(&place.path("raw.img"), &["--name", "part", "--offset", "8M", "--size-limit", "1M"]);
    refused(
        &["attach", "raw.img"],
        "raw.img from byte 8388608 is already attached as part",
        "detach it first",
    );
    let list = place.ok(["list"]);
    assert!(list.contains("raw.img (offset 8M)"), "{list}");
    place.ok(["detach", "part"]);

    place.attach(&place.path("raw.img"), &["--name", "part", "--size-limit", "1M"]);
    refused(&["attach", "raw.img"], "raw.img is already attached as part", "detach it first");
    refused(
        &["attach", "--size-limit", "1M", "raw.img"],
        "raw.img: already attached as part",
        "use that device",
    );
    place.ok(["detach", "part"]);

    place.attach(&place.path("raw.img"), &["--name", "whole"]);
    refused(
        &["copy", "raw.img", "x"],
        "already attached as whole",
        "end that use first: becket detach whole",
    );
    fs::write(place.path("y"), "y").unwrap();
    refused(
        &["copy", "--force", "y", "raw.img"],
        "already attached as whole",
        "end that use first: becket detach whole\n",
    );
}
