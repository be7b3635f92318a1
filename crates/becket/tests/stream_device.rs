//! Devices over files compressed as one piece: what can be read while the rest is decoded, and what becomes
//! of readers where a stream is damaged or processes die.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use becket_testkit::{
    Scratch, image,
    origin::{Origin, Reply},
    require_fuse, require_loop, require_plain_machine, require_root, tool, wait_until,
};
use common::fetched::{BLOCK, attach, block_of, fetchers, kills, open, random, read, read_and_kill};
use common::one::only;
use common::scratch;
use common::web::{ok, run};

const MIB: usize = 1 << 20;

fn ready(name: &str) -> bool {
    require_root(name)
        && require_fuse(name)
        && require_loop(name)
        && require_plain_machine(name, &["zstd", "gzip", "xz", "mke2fs"])
}

/// What a program makes of some bytes.
fn packed(place: &Scratch, bytes: &[u8], words: &[&str]) -> Vec<u8> {
    let (plain, packed) = (place.path("plain"), place.path("packed"));
    fs::write(&plain, bytes).unwrap();
    let mut command = Command::new(words[0]);
    tool(command.args(&words[1..]).arg(&plain).stdout(Stdio::from(fs::File::create(&packed).unwrap())));
    fs::read(packed).unwrap()
}

fn zstd(place: &Scratch, bytes: &[u8]) -> Vec<u8> {
    packed(place, bytes, &["zstd", "-1", "-q", "-c"])
}

/// Some bytes, what zstd makes of them, a server that has that, and its URL there.
fn on_a_server(place: &Scratch, len: u64) -> (Vec<u8>, Vec<u8>, Origin, String) {
    let bytes = random(place, len);
    let stream = zstd(place, &bytes);
    let origin = Origin::start(stream.clone());
    let url = origin.url("/d.img.zst");
    (bytes, stream, origin, url)
}

/// How many bytes of the only device are there.
fn there(place: &Scratch) -> u64 {
    let name = only(place)["name"].as_str().unwrap().to_owned();
    let stat = run(place, &["--json", "stat", &name]).json();
    stat["devices"][0]["fetched"]["bytes"].as_u64().unwrap_or_else(|| panic!("{stat:#}"))
}

/// That this is shown for why bytes are missing.
#[track_caller]
fn assert_away(place: &Scratch, how: &str) {
    let is = || only(place)["away"].as_str().is_some_and(|away| away.contains(how));
    assert!(wait_until(Duration::from_secs(20), is), "{:?}", only(place));
}

#[test]
fn fuse_what_is_decoded_is_read_while_the_rest_is_still_elsewhere() {
    let name = "stream_device::fuse_what_is_decoded_is_read_while_the_rest_is_still_elsewhere";
    if !ready(name) {
        return;
    }
    let place = scratch();
    let (bytes, stream, origin, url) = on_a_server(&place, 64 << 20);
    // Only its first third can be had, and its end, by which becket knows what it is.
    let (from, to) = (20 << 20, 60 << 20);
    origin.trick(move |request, reply| match request.range() {
        Some((start, _)) if (from..to).contains(&start) => Reply::status(503),
        _ => reply,
    });
    let path = attach(&place, &[&url]);
    let disk = open(&path);
    for block in [0, 1, 1000, 3000] {
        assert!(read(&disk, block).unwrap().0 == block_of(&bytes, block), "block {block}");
    }
    let waits = thread::spawn({
        let disk = disk.try_clone().unwrap();
        move || read(&disk, 12_000).map(|found| found.0)
    });
    assert_away(&place, "waiting for 127.0.0.1");
    let some = there(&place);
    assert!((12_000_000..40 << 20).contains(&some), "{some} bytes are there");
    assert!(!waits.is_finished(), "it waits");
    assert!(read(&disk, 3001).unwrap().0 == block_of(&bytes, 3001), "what is there is read");
    let list = run(&place, &["--json", "store", "list"]).json();
    assert_eq!(list["objects"].as_array().unwrap().len(), 2, "the stream and what it yields: {list:#}");
    assert!(list["objects"].as_array().unwrap().iter().all(|object| object["in_use"] == true), "{list:#}");
    assert_eq!(run(&place, &["store", "drop", "--all"]).code, 1);
    origin.honest();
    assert!(waits.join().unwrap().unwrap() == block_of(&bytes, 12_000));
    assert!(fs::read(&path).unwrap() == bytes);
    assert!(wait_until(Duration::from_secs(20), || only(&place)["away"].is_null()), "{:?}", only(&place));
    let sent = origin.sent();
    assert!(sent < stream.len() as u64 + (2 << 20), "{sent} bytes of {}", stream.len());
    drop(disk);
    ok(&place, &["detach", "--all"]);
    // It is complete now, and like any other file.
    let disk = ok(&place, &["attach", "--via", "loop", &url]);
    assert!(fs::read(disk.trim()).unwrap() == bytes);
    ok(&place, &["detach", "--all"]);
    assert!(origin.sent() < sent + (256 << 10), "{} bytes", origin.sent());
}

#[test]
fn fuse_readers_of_a_stream_see_no_error_when_processes_die() {
    let name = "stream_device::fuse_readers_of_a_stream_see_no_error_when_processes_die";
    if !ready(name) {
        return;
    }
    let place = scratch();
    let (bytes, _, origin, url) = on_a_server(&place, 64 << 20);
    origin.latency(Duration::from_millis(200));
    let disk = open(&attach(&place, &[&url]));
    // Another device of the same stream: both share one fetcher.
    let other = open(&attach(&place, &[&url, "--name", "other"]));
    let done = read_and_kill(&place, &[&disk, &disk, &other], &bytes, kills());
    assert!(done > 300, "only {done} reads");
    assert!(wait_until(Duration::from_secs(20), || fetchers(&place).len() == 1));
    drop((disk, other));
    ok(&place, &["detach", "--all"]);
    ok(&place, &["store", "verify"]);
}

/// A stream on this host, and a device over it.
fn on_this_host(place: &Scratch, name: &str, stream: &[u8]) -> (PathBuf, PathBuf) {
    let file = place.path(name);
    fs::write(&file, stream).unwrap();
    let disk = attach(place, &[file.to_str().unwrap()]);
    (file, disk)
}

#[test]
fn fuse_what_comes_before_a_damaged_place_is_read_and_the_rest_is_an_error() {
    let name = "stream_device::fuse_what_comes_before_a_damaged_place_is_read_and_the_rest_is_an_error";
    if !ready(name) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 40 << 20);
    let stream = zstd(&place, &bytes);
    for round in 0..2 {
        let (_, path) = on_this_host(&place, "cut.img.zst", &stream[..stream.len() / 2]);
        let disk = open(&path);
        assert!(read(&disk, 100).unwrap().0 == block_of(&bytes, 100), "round {round}");
        let late = read(&disk, 40 * MIB / BLOCK - 1).map(drop).unwrap_err();
        assert_eq!(late.raw_os_error(), Some(5), "round {round}");
        assert_away(&place, "source damaged");
        assert_away(&place, "it is cut short: ");
        assert!(ok(&place, &["list"]).contains("source damaged"));
        assert!(read(&disk, 1000).unwrap().0 == block_of(&bytes, 1000), "what is there stays");
        drop(disk);
        ok(&place, &["detach", "--all"]);
    }
}

#[test]
fn fuse_a_stream_that_yields_more_than_it_says_is_decoded_before_it_is_used_again() {
    let name =
        "stream_device::fuse_a_stream_that_yields_more_than_it_says_is_decoded_before_it_is_used_again";
    if !ready(name) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 42 << 20);
    let (first, second) = bytes.split_at(40 * MIB);
    let stream = [zstd(&place, first), zstd(&place, second)].concat();
    // On this host it costs little to see that more frames follow.
    let (_, path) = on_this_host(&place, "two.img.zst", &stream);
    assert_eq!(only(&place)["size"].as_u64(), Some(bytes.len() as u64));
    assert!(fs::read(&path).unwrap() == bytes);
    ok(&place, &["detach", "--all"]);
    let origin = Origin::start(stream);
    let url = origin.url("/two.img.zst");
    let path = attach(&place, &[&url]);
    let disk = open(&path);
    assert!(read(&disk, 5000).unwrap().0 == block_of(&bytes, 5000));
    assert_eq!(read(&disk, 40 * MIB / BLOCK - 1).map(drop).unwrap_err().raw_os_error(), Some(5));
    assert_away(&place, "it yields more than the 41943040 bytes that it says");
    drop(disk);
    ok(&place, &["detach", "--all"]);
    let path = attach(&place, &[&url]);
    assert_eq!(only(&place)["size"].as_u64(), Some(bytes.len() as u64));
    assert!(fs::read(&path).unwrap() == bytes);
    ok(&place, &["detach", "--all"]);
}

#[test]
fn fuse_each_packer_s_stream_is_attached_before_it_is_decoded() {
    let name = "stream_device::fuse_each_packer_s_stream_is_attached_before_it_is_decoded";
    if !ready(name) {
        return;
    }
    let place = scratch();
    let tree = place.dir("tree");
    // Half of its bits are random, so that xz has to decode each byte.
    let halves: Vec<u8> = image::random_bytes(40 << 20, 4).iter().map(|byte| byte & 15).collect();
    fs::write(tree.join("big"), halves).unwrap();
    let plain = place.path("d.img");
    tool(Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(&tree).arg(&plain).arg("100M"));
    let bytes = fs::read(&plain).unwrap();
    // The level makes xz slow.
    for (suffix, words) in [
        ("gz", &["gzip", "-1", "-c"][..]),
        ("xz", &["xz", "-0", "-T1", "-c"]),
        ("zst", &["zstd", "-1", "-q", "-c"]),
        ("lz4", &["lz4", "-1", "-q", "-c", "--content-size"]),
    ] {
        let stream = packed(&place, &bytes, words);
        let began = Instant::now();
        let (file, path) = on_this_host(&place, &format!("d.img.{suffix}"), &stream);
        let (early, list) = (there(&place), ok(&place, &["list"]));
        // The others may be through by now, on a machine that has other things to do.
        if suffix == "xz" {
            assert!(list.contains(" % stored"), "{list}");
            assert!(early < bytes.len() as u64, "all was decoded within {:?}", began.elapsed());
        }
        assert!(fs::read(&path).unwrap() == bytes, "{suffix}");
        assert_eq!(there(&place), bytes.len() as u64, "{suffix}");
        assert!(only(&place)["away"].is_null(), "{suffix}: {:?}", only(&place));
        ok(&place, &["detach", "--all"]);
        ok(&place, &["store", "verify"]);
        // Others have to wait until all is decoded.
        ok(&place, &["store", "drop", "--all"]);
        let disk = ok(&place, &["attach", "--via", "loop", file.to_str().unwrap()]);
        assert!(fs::read(disk.trim()).unwrap() == bytes, "{suffix}");
        ok(&place, &["detach", "--all"]);
        ok(&place, &["store", "drop", "--all"]);
        fs::remove_file(file).unwrap();
    }
}

#[test]
fn fuse_a_store_that_is_too_small_for_what_a_stream_yields_is_waited_for_or_an_error() {
    let name =
        "stream_device::fuse_a_store_that_is_too_small_for_what_a_stream_yields_is_waited_for_or_an_error";
    if !ready(name) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 64 << 20);
    let file = place.path("d.img.zst");
    fs::write(&file, zstd(&place, &bytes)).unwrap();
    let file = file.to_str().unwrap();
    let small = place.dir("small");
    tool(Command::new("mount").args(["-t", "tmpfs", "-o", "size=40m,mode=700", "small"]).arg(&small));
    let path = attach(&place, &["--store", small.to_str().unwrap(), file]);
    let disk = open(&path);
    assert!(read(&disk, 1000).unwrap().0 == block_of(&bytes, 1000));
    assert_away(&place, "the store has too little room for it: ");
    assert!(only(&place)["away"].as_str().unwrap().starts_with("waiting since 2"), "{:?}", only(&place));
    tool(Command::new("mount").args(["-o", "remount,size=100m"]).arg(&small));
    assert!(fs::read(&path).unwrap() == bytes);
    assert!(wait_until(Duration::from_secs(20), || only(&place)["away"].is_null()), "{:?}", only(&place));
    drop(disk);
    ok(&place, &["detach", "--all"]);
    // A command without a device does not wait for room.
    ok(&place, &["store", "drop", "--all", "--store", small.to_str().unwrap()]);
    tool(Command::new("mount").args(["-o", "remount,size=40m"]).arg(&small));
    let ran = run(&place, &["copy", "--store", small.to_str().unwrap(), file, "copied"]);
    assert!(ran.code == 1 && ran.err.contains("the store has too little room for it"), "{ran:?}");
    becket_testkit::umount(&small);

    // The user's own limit is no matter of waiting.
    let disk = open(&attach(&place, &["--store-limit", "20MiB", file]));
    assert!(read(&disk, 1000).unwrap().0 == block_of(&bytes, 1000));
    assert_eq!(read(&disk, 16_000).map(drop).unwrap_err().raw_os_error(), Some(5));
    assert_away(&place, "it yields more than the 20971520 bytes that the store may have");
    drop(disk);
    ok(&place, &["detach", "--all"]);
}

/// Where bytes of a store file are missing, no program takes it for the image: neither by its path, nor below
/// an overlay.
#[test]
fn fuse_a_file_of_the_store_that_is_not_complete_is_never_taken_for_the_image() {
    let name = "stream_device::fuse_a_file_of_the_store_that_is_not_complete_is_never_taken_for_the_image";
    if !ready(name) || !require_plain_machine(name, &["qemu-img"]) {
        return;
    }
    let place = scratch();
    let (bytes, _, packed, url) = on_a_server(&place, 48 << 20);
    let raw = Origin::start(bytes.clone());
    for url in [raw.url("/d.img"), url] {
        packed.trick(|request, reply| match request.range() {
            Some((start, _)) if (16 << 20..44 << 20).contains(&start) => Reply::status(503),
            _ => reply,
        });
        let path = attach(&place, &["--cow", "o.qcow2", &url]);
        let disk = fs::File::options().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&disk, &[7; BLOCK], 0).unwrap();
        disk.sync_all().unwrap();
        drop(disk);
        let file = PathBuf::from(only(&place)["image"].as_str().unwrap());
        assert!(file.starts_with(place.path("store")), "{}", file.display());
        ok(&place, &["detach", "--all"]);
        for words in [&["attach", "--via", "fuse", "-r"][..], &["cat"], &["copy"]] {
            let target = if words[0] == "copy" { &["copied"][..] } else { &[] };
            let ran = run(&place, &[words, &[file.to_str().unwrap()], target].concat());
            assert!(ran.code == 1 && ran.err.contains(&format!("name {url} instead")), "{words:?}: {ran:?}");
        }
        // The store lies below the overlay's directory, so that only its name keeps others from it.
        let ran = run(&place, &["attach", "--via", "fuse", "o.qcow2"]);
        assert!(ran.code == 1 && ran.err.contains("--cow"), "{ran:?}");
        let mut qemu = Command::new("qemu-img");
        place.prepare(&mut qemu);
        let ran = place.finish(qemu.args(["convert", "-O", "raw", "o.qcow2", "converted"]));
        assert_eq!(ran.code, 1, "{ran:?}");
        packed.honest();
        // Once all is there it has the same name still.
        for round in 0..3 {
            let path = attach(&place, &["--cow", "o.qcow2", &url]);
            let found = fs::read(&path).unwrap();
            assert!(found[..BLOCK] == [7; BLOCK] && found[BLOCK..] == bytes[BLOCK..], "round {round}");
            ok(&place, &["detach", "--all"]);
        }
        // By its path, too.
        let path = attach(&place, &["--cow", "o.qcow2", file.to_str().unwrap()]);
        assert!(fs::read(&path).unwrap()[BLOCK..] == bytes[BLOCK..]);
        ok(&place, &["detach", "--all"]);
        attach(&place, &[file.to_str().unwrap()]);
        assert_eq!(only(&place)["read_only"], true, "the store is never written to");
        ok(&place, &["detach", "--all"]);
        fs::remove_file(place.path("o.qcow2")).unwrap();
    }
}
