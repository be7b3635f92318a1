//! Images on NBD servers that take whole blocks only: every request that reaches such a server has them,
//! wherever the memory of the program lies.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{
    fs::{self, File},
    io::{IoSlice, IoSliceMut},
    os::unix::fs::FileExt as _,
    path::PathBuf,
    process::Command,
    thread,
};

use becket_testkit::{Scratch, image::random_bytes, require_fuse, require_tools, tool};
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
    let policy = ["blocksize-minimum=4096", "blocksize-preferred=4096", "blocksize-maximum=32M"];
    let policy = [&policy[..], &["blocksize-error-policy=error"]].concat();
    (Server::nbdkit_by(&image, &["--filter=blocksize-policy"], &policy), image)
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
