//! Images on NBD servers that take whole blocks only: every request that reaches such a server has them,
//! wherever the memory of the program lies.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs::{self, File},
    io::{IoSlice, IoSliceMut},
    os::unix::fs::{FileExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use becket_testkit::{
    Scratch, image::random_bytes, require_fuse, require_plain_machine, require_tools, tool,
};
use common::nbd_server::{Server, attach};
use common::page::direct as open;
use common::scratch;
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;
const SECTOR: usize = 512;
const LONGEST: usize = 4 * MIB;
/// The most parts that the kernel takes in one call.
const PARTS: usize = 1024;

/// A server of an image of so many MiB that refuses anything but whole blocks.
fn strict(place: &Scratch, mib: usize) -> (Server, PathBuf) {
    let image = place.path("d.img");
    File::create(&image).unwrap().set_len((mib * MIB) as u64).unwrap();
    (strict_of(&image), image)
}

/// The same of an image that is there.
fn strict_of(image: &Path) -> Server {
    let policy = ["blocksize-minimum=4096", "blocksize-preferred=4096", "blocksize-maximum=32M"];
    let policy = [&policy[..], &["blocksize-error-policy=error"]].concat();
    Server::nbdkit_by(image, &["--filter=blocksize-policy"], &policy)
}

/// Memory whose parts lie anywhere in their pages.
struct Memory(Vec<u8>);

impl Memory {
    fn new() -> Self {
        // A part has a page before it, and may begin and end within one.
        Self(vec![0; 2 * LONGEST + (PARTS + 2) * 2 * BLOCK])
    }

    /// So many bytes that begin `at` bytes behind the start of a page.
    fn whole(&mut self, at: usize, len: usize) -> &mut [u8] {
        let from = self.0.as_ptr().align_offset(BLOCK) + at;
        &mut self.0[from..from + len]
    }

    /// So many bytes, in parts of multiples of `unit` bytes, no two of them beside each other.
    fn parts(&mut self, random: &mut SmallRng, len: usize, unit: usize) -> Vec<&mut [u8]> {
        let mut rest = self.whole(0, 2 * LONGEST + PARTS * 2 * BLOCK);
        let (mut parts, mut left) = (Vec::new(), len);
        // As short as can be, or long where short ones would be too many.
        let shortest = len / unit <= PARTS && random.random_bool(0.5);
        let most = if shortest { 1 } else { (len * 3 / PARTS / unit).max(8) };
        while left > 0 {
            let last = parts.len() + 1 == PARTS;
            let part = if last { left } else { left.min(random.random_range(1..=most) * unit) };
            let at = random.random_range(0..8) * SECTOR;
            let room = (at + part).next_multiple_of(BLOCK) + BLOCK;
            let (here, behind) = std::mem::take(&mut rest).split_at_mut(room);
            parts.push(&mut here[at..at + part]);
            (rest, left) = (behind, left - part);
        }
        parts
    }
}

/// The smallest part of memory of a direct read: whole blocks, from Linux 6.18 on sectors.
fn smallest_part(disk: &File) -> usize {
    let mut memory = Memory::new();
    let (first, second) = memory.whole(0, BLOCK).split_at_mut(SECTOR);
    let mut parts = [IoSliceMut::new(first), IoSliceMut::new(second)];
    if rustix::io::preadv(disk, &mut parts, 0).is_ok() { SECTOR } else { BLOCK }
}

/// Reads and writes the bytes from `start` on that `model` has.
fn exercise(disk: &File, start: usize, model: &mut [u8], seed: u64) {
    let mut random = SmallRng::seed_from_u64(seed);
    let (mut memory, unit) = (Memory::new(), smallest_part(disk));
    for round in 0..150 {
        let most = if round % 3 == 0 { LONGEST } else { LONGEST / 8 };
        let len = random.random_range(1..=most / BLOCK) * BLOCK;
        let at = random.random_range(0..=(model.len() - len) / BLOCK) * BLOCK;
        let (place, model) = ((start + at) as u64, &mut model[at..at + len]);
        let one = random.random_bool(0.5);
        let writes = random.random_bool(0.5);
        let offset = random.random_range(0..8) * SECTOR;
        let what = format!("seed {seed}, round {round}: {len} bytes at {place}, memory at {offset}, {one}");
        if writes {
            model.copy_from_slice(&random_bytes(len, seed * 1000 + round));
        }
        match (writes, one) {
            (true, true) => {
                let bytes = memory.whole(offset, len);
                bytes.copy_from_slice(model);
                disk.write_all_at(bytes, place).unwrap_or_else(|error| panic!("write, {what}: {error}"));
            }
            (false, true) => {
                let bytes = memory.whole(offset, len);
                disk.read_exact_at(bytes, place).unwrap_or_else(|error| panic!("read, {what}: {error}"));
                assert!(bytes == model, "{what}");
            }
            (true, false) => {
                let mut parts = memory.parts(&mut random, len, unit);
                let mut rest = &*model;
                for part in &mut parts {
                    let (here, behind) = rest.split_at(part.len());
                    part.copy_from_slice(here);
                    rest = behind;
                }
                let slices: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
                let done = rustix::io::pwritev(disk, &slices, place);
                assert_eq!(done, Ok(len), "writev, {what}, {} parts", slices.len());
            }
            (false, false) => {
                let mut parts = memory.parts(&mut random, len, unit);
                let mut slices: Vec<_> = parts.iter_mut().map(|part| IoSliceMut::new(part)).collect();
                let done = rustix::io::preadv(disk, &mut slices, place);
                assert_eq!(done, Ok(len), "readv, {what}, {} parts", parts.len());
                assert!(parts.concat() == model, "{what}");
            }
        }
    }
}

#[test]
fn fuse_whole_blocks_are_asked_for_wherever_memory_lies() {
    let name = "nbd_blocks::fuse_whole_blocks_are_asked_for_wherever_memory_lies";
    if !require_fuse(name) || !require_tools(name, &["nbdkit"]) {
        return;
    }
    let place = scratch();
    let (server, image) = strict(&place, 32);
    let disk = attach(&place, &[&server.uri(""), "--origin-timeout", "5s"]);
    let mut model = vec![0; 32 * MIB];
    // Side by side, with neighbouring blocks.
    thread::scope(|scope| {
        for (number, half) in model.chunks_mut(16 * MIB).enumerate() {
            let disk = open(&disk);
            scope.spawn(move || exercise(&disk, number * 16 * MIB, half, number as u64 + 1));
        }
    });
    let mut memory = Memory::new();
    let file = open(&disk);
    for (number, expected) in model.chunks(LONGEST).enumerate() {
        let bytes = memory.whole(SECTOR, LONGEST);
        file.read_exact_at(bytes, (number * LONGEST) as u64).unwrap();
        assert!(bytes == expected, "what lies from {} on", number * LONGEST);
    }
    file.sync_all().unwrap();
    drop(file);
    place.ok(["detach", "--all"]);
    drop(server);
    assert!(fs::read(&image).unwrap() == model, "the image holds what was written");
}

#[test]
fn fuse_a_file_system_is_made_and_written_in_whole_blocks() {
    let name = "nbd_blocks::fuse_a_file_system_is_made_and_written_in_whole_blocks";
    if !require_fuse(name) || !require_tools(name, &["nbdkit", "mke2fs", "e2fsck"]) {
        return;
    }
    let place = scratch();
    let (server, image) = strict(&place, 64);
    let disk = attach(&place, &[&server.uri(""), "--origin-timeout", "5s"]);
    tool(Command::new("mke2fs").args(["-q", "-t", "ext4"]).arg(&disk));
    let point = place.dir("mnt");
    let mount = || tool(Command::new("mount").args([&disk, &point]));
    mount();
    let bytes = random_bytes(LONGEST, 9);
    let mut memory = Memory::new();
    // The file system hands the memory of a direct write on as it is.
    memory.whole(SECTOR, LONGEST).copy_from_slice(&bytes);
    fs::write(point.join("direct"), []).unwrap();
    let file = open(&point.join("direct"));
    file.write_all_at(memory.whole(SECTOR, LONGEST), 0).unwrap();
    file.sync_all().unwrap();
    drop(file);
    for number in 0..40_usize {
        fs::write(point.join(number.to_string()), &bytes[..number * 9999]).unwrap();
    }
    becket_testkit::umount(&point);
    mount();
    let read = memory.whole(3 * SECTOR, LONGEST);
    open(&point.join("direct")).read_exact_at(read, 0).unwrap();
    assert!(read == bytes);
    for number in 0..40_usize {
        assert!(fs::read(point.join(number.to_string())).unwrap() == bytes[..number * 9999]);
    }
    becket_testkit::umount(&point);
    tool(Command::new("e2fsck").args(["-fn"]).arg(&disk));
    place.ok(["detach", "--all"]);
    drop(server);
    tool(Command::new("e2fsck").args(["-fn"]).arg(&image));
}

/// A device would get EIO for each request that is not in whole blocks of its server.
#[test]
fn fuse_what_is_in_smaller_blocks_than_its_server_is_refused() {
    let name = "nbd_blocks::fuse_what_is_in_smaller_blocks_than_its_server_is_refused";
    if !require_fuse(name) || !require_tools(name, &["nbdkit", "mke2fs", "setpriv"]) {
        return;
    }
    let place = scratch();
    let (server, image) = strict(&place, 16);
    let (uri, other) = (server.uri(""), strict_of(&ext4_of_small_blocks(&place)));
    let inside = format!("{}#odd.img", other.uri(""));
    for (words, unfit) in [
        (&["--offset", "512", &uri][..], "the image does not lie on such blocks"),
        (&["--block-size", "512", &uri], "the blocks of the device have 512"),
        (&["--read-only", &inside], "the image does not lie on such blocks"),
    ] {
        let ran = place.run([&["attach", "--via", "fuse"], words].concat());
        let said = format!("the server takes requests in multiples of 4096 bytes only, and {unfit}");
        assert!(ran.code == 1 && ran.err.contains(&said), "{words:?}: {ran:?}");
        assert!(ran.err.contains("becket copy "), "{ran:?}");
    }
    // Without a device it can be read.
    assert_eq!(place.ok(["cat", &inside]).len(), 100 << 10);
    let disk = attach(&place, &["--offset", "4096", &uri]);
    assert_eq!(fs::read(&disk).unwrap().len(), 16 * MIB - BLOCK);
    place.ok(["detach", "--all"]);

    // A file, as users without root have it, is read at any byte.
    fs::set_permissions(place.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(image.with_extension("nbdkit"), fs::Permissions::from_mode(0o777)).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_becket"), place.path("becket")).unwrap();
    let home = place.dir("home");
    tool(Command::new("chown").arg("65534:65534").arg(&home));
    let mut command = Command::new("setpriv");
    place.prepare(&mut command);
    command.env("BECKET_RUNTIME_DIR", home.join("run"));
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(place.path("becket"));
    let ran = place.finish(command.args(["attach", "--via", "fuse", &uri]));
    assert!(ran.code == 1 && ran.err.contains("a file, which is read at any byte"), "{ran:?}");
}

#[test]
fn an_export_of_whole_blocks_says_so() {
    let name = "nbd_blocks::an_export_of_whole_blocks_says_so";
    if !require_plain_machine(name, &["nbdkit", "nbdinfo"]) {
        return;
    }
    let place = scratch();
    let (server, _) = strict(&place, 16);
    let uri = place.ok(["export", "--nbd", &format!("unix:{}", place.path("s").display()), &server.uri("")]);
    let printed = tool(Command::new("nbdinfo").args(["--json", uri.trim()]));
    let shown: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(shown["exports"][0]["block_size_minimum"], BLOCK, "{shown}");
    place.ok(["detach", "--all"]);
}

/// A compressed cluster of a qcow2 lies anywhere in its file.
#[test]
fn fuse_compressed_clusters_are_read_in_whole_blocks() {
    let name = "nbd_blocks::fuse_compressed_clusters_are_read_in_whole_blocks";
    if !require_fuse(name) || !require_tools(name, &["nbdkit", "qemu-img"]) {
        return;
    }
    let place = scratch();
    let (raw, qcow2) = (place.path("raw"), place.path("c.qcow2"));
    let half = |at: usize| if at.is_multiple_of(3) { 0 } else { (at / 7 % 251) as u8 };
    let bytes: Vec<u8> = (0..2 * MIB).map(half).collect();
    fs::write(&raw, &bytes).unwrap();
    tool(Command::new("qemu-img").args(["convert", "-c", "-O", "qcow2"]).args([&raw, &qcow2]));
    let file = File::options().write(true).open(&qcow2).unwrap();
    file.set_len(file.metadata().unwrap().len().next_multiple_of(BLOCK as u64)).unwrap();
    let server = strict_of(&qcow2);
    let disk = attach(&place, &["--read-only", &server.uri("")]);
    assert!(fs::read(&disk).unwrap() == bytes);
    place.ok(["detach", "--all"]);
}

/// An ext4 of blocks of 1 KiB with a file of 100 of them, most of which lie between two of the server's.
fn ext4_of_small_blocks(place: &Scratch) -> PathBuf {
    let (tree, image) = (place.dir("tree"), place.path("small.ext4"));
    fs::write(tree.join("a"), [1; 1024]).unwrap();
    fs::write(tree.join("odd.img"), [b'x'; 100 << 10]).unwrap();
    File::create(&image).unwrap().set_len(16 * MIB as u64).unwrap();
    let make = ["-q", "-t", "ext4", "-b", "1024", "-d"];
    tool(Command::new("mke2fs").args(make).args([&tree, &image]));
    image
}
