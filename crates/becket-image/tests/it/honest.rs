//! Large images that nobody made to waste time: none comes near the limits of its budget.
//! It never believes an estimate: what was used is what the budget has counted.

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;

use becket_image::budget::Limits;
use becket_image::{Budget, End, Format, inspect, look};
use becket_testkit::image::ext4;
use becket_testkit::{require_plain_machine, tool};

use crate::common::{dir, file};

/// Names in the directory of the test. A larger one must need less than a quarter of the budget, too.
const NAMES: u64 = 3000;

/// What it costs to look at what a path names: a directory as `becket ls` does, anything else as `inspect`.
fn used(path: &Path) -> Limits {
    let budget = Budget::default();
    let walk = look(path, Format::Auto, &[], &budget).unwrap_or_else(|error| panic!("{error}"));
    let level = walk.last().unwrap();
    match (walk.end, &level.contents) {
        (End::Directory(dir), Some(contents)) => {
            let fs = contents.fs.as_ref().unwrap();
            let (mut held, mut nodes) = (budget.hold(0, "names").unwrap(), Vec::new());
            fs.list(dir, &mut |name, node| {
                held.grow(192 + name.len() as u64, "names").unwrap();
                nodes.push(node);
                ControlFlow::Continue(())
            })
            .unwrap();
            nodes.iter().for_each(|node| _ = fs.stat(*node).unwrap());
            let used = budget.used().unwrap();
            println!("{}: {} names, {used:?}", path.display(), nodes.len());
            used
        }
        _ => {
            let report = inspect(&level.image, "image", Format::Auto);
            let used = budget.used().unwrap();
            println!("{}: {used:?}, {:?}", path.display(), report.problems);
            budget.check().unwrap();
            used
        }
    }
}

/// Less than a quarter of each limit, for `times` as much. Processor time follows these, on an idle machine.
#[track_caller]
fn is_little(used: Limits, times: u64) {
    let Limits { bytes, steps, memory, .. } = Limits::default();
    assert!(used.bytes * times < bytes / 4, "{used:?} times {times}");
    assert!(used.steps * times < steps / 4, "{used:?} times {times}");
    assert!(used.memory * times < memory / 4, "{used:?} times {times}");
}

#[test]
fn honest_images_take_less_than_a_quarter_of_the_budget() {
    if !require_plain_machine(
        "honest::honest_images_take_less_than_a_quarter_of_the_budget",
        &["mke2fs", "mksquashfs", "mkfs.erofs", "genisoimage", "qemu-img"],
    ) {
        return;
    }
    let dir = dir();
    let at = dir.path();
    fs::create_dir_all(at.join("tree/many")).unwrap();
    for number in 0..NAMES {
        let bytes: &[u8] = if number % 10 == 0 { &[b'x'; 100] } else { b"" };
        fs::write(at.join(format!("tree/many/name-of-a-file-{number:07}.dat")), bytes).unwrap();
    }
    ext4(&at.join("ext4.img"), 64 << 20, &at.join("tree"));
    let make = |program: &str, args: &[&str]| tool(Command::new(program).current_dir(at).args(args));
    make("mksquashfs", &["tree", "tree.squashfs", "-quiet", "-no-progress"]);
    make("mkfs.erofs", &["tree.erofs", "tree"]);
    make("genisoimage", &["-quiet", "-R", "-J", "-joliet-long", "-o", "tree.iso", "tree"]);
    let large =
        [("ext4.img", 300_000), ("tree.squashfs", 300_000), ("tree.erofs", 300_000), ("tree.iso", 100_000)];
    for (name, names) in large {
        is_little(used(&at.join(name)), 1);
        is_little(used(&at.join(name).join("many")), names / NAMES);
        is_little(used(&at.join(name).join("many/name-of-a-file-0002990.dat")), names / NAMES);
    }
    // All tables of the disk, without its data.
    let full = ["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", "full.qcow2", "64G"];
    make("qemu-img", &full);
    is_little(used(&at.join("full.qcow2")), 16);
}

/// A FAT16 whose root directory is as full as it can be.
#[test]
fn a_full_directory_of_fat_takes_less_than_a_quarter_of_the_budget() {
    if !require_plain_machine("honest::a_full_directory_of_fat_takes_less_than_a_quarter_of_the_budget", &[])
    {
        return;
    }
    const ENTRIES: u16 = 65_520;
    let dir = dir();
    let path = file(dir.path(), "full.fat", 40 << 20);
    let image = File::options().write(true).open(&path).unwrap();
    let fields: [(u64, &[u8]); 11] = [
        (0, b"\xeb\x3c\x90"),
        (11, &512_u16.to_le_bytes()),
        (13, &[4]),
        (14, &1_u16.to_le_bytes()),
        (16, &[1]),
        (17, &ENTRIES.to_le_bytes()),
        (21, &[0xf8]),
        (22, &80_u16.to_le_bytes()),
        (32, &81_920_u32.to_le_bytes()),
        (510, &[0x55, 0xaa]),
        (512, &[0xf8, 0xff, 0xff, 0xff]),
    ];
    fields.iter().for_each(|(at, bytes)| image.write_all_at(bytes, *at).unwrap());
    let entry = |number: u16| [format!("F{number:07}DAT").as_bytes(), &[0x20], &[0; 20]].concat();
    let entries: Vec<u8> = (0..ENTRIES).flat_map(entry).collect();
    image.write_all_at(&entries, 512 * 81).unwrap();
    is_little(used(&path), 1);
    is_little(used(&path.join("F0065519.DAT")), 1);
}
