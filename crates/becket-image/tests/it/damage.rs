//! Images damaged at random and cut short: an error or other bytes, never a panic, an endless loop or much
//! memory.
//! It never takes long: the number of damaged images is fixed, and each is small.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use becket_image::layer::{FileSystem, NodeKind, detect};
use becket_image::{Format, Image, inspect, unpack_disk};
use becket_testkit::image::random_bytes;
use becket_testkit::{patience, require_plain_machine, tool};

use crate::common::{dir, file};

/// Damaged copies of each image.
const ROUNDS: u64 = 400;
/// Entries that are read of one image: a damaged directory may have very many.
const ENTRIES: usize = 2000;
/// Bytes of a file that are read.
const BYTES: usize = 1 << 20;
/// What one image may take, with a hundred times of room.
const PATIENCE: Duration = Duration::from_secs(20);

/// Reads what can be read; whether all of it could.
fn exercise(image: &Image) -> bool {
    let image = &match unpack_disk(image) {
        Ok(disk) => disk.unwrap_or_else(|| image.clone()),
        Err(_) => return false,
    };
    let Ok(contents) = detect(image, Format::Auto) else { return false };
    let mut whole = image.stored().is_none() || image.read_some(0, BYTES).is_ok();
    if let Some(packed) = &contents.packed {
        whole &= packed.image.read_some(0, BYTES).is_ok();
        whole &= exercise(&packed.image);
    }
    if let Some(fs) = &contents.fs {
        let mut left = ENTRIES;
        walk(image, fs.as_ref(), fs.root(), 0, &mut left, &mut whole);
    }
    inspect(image, "damaged", Format::Auto);
    whole && contents.is_container()
}

fn walk(image: &Image, fs: &dyn FileSystem, dir: u64, depth: usize, left: &mut usize, whole: &mut bool) {
    let mut nodes = Vec::new();
    let listed = fs.list(dir, &mut |_, node| {
        nodes.push(node);
        if nodes.len() < *left { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    *whole &= listed.is_ok();
    for node in nodes {
        let Some(rest) = left.checked_sub(1) else { return };
        *left = rest;
        *whole &= fs.attributes(node).is_ok() && fs.xattrs(node).is_ok();
        let Ok(stat) = fs.stat(node) else {
            *whole = false;
            continue;
        };
        match stat.kind {
            NodeKind::Directory if depth < 16 => walk(image, fs, node, depth + 1, left, whole),
            NodeKind::Symlink => *whole &= fs.read_link(node).is_ok(),
            NodeKind::File => {
                let read = fs.lay_out(node).and_then(|layout| image.compose(layout));
                *whole &= read.and_then(|file| file.read_some(0, BYTES)).is_ok();
            }
            _ => {}
        }
    }
}

/// Small images of every kind, by name, and where their metadata are likely to be.
fn images(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let root = dir.join("tree");
    fs::create_dir_all(root.join("sub/deeper")).unwrap();
    for (number, size) in [0, 10, 5000, 70_000, 140_000].into_iter().enumerate() {
        let mut bytes = random_bytes(size, number as u64);
        bytes.iter_mut().take(size / 2).for_each(|byte| *byte = 1);
        fs::write(root.join(format!("sub/a file with a long name {number}")), bytes).unwrap();
    }
    fs::write(root.join("sub/deeper/x"), "x").unwrap();
    std::os::unix::fs::symlink("deeper/x", root.join("sub/link")).unwrap();
    let path = |name: &str| dir.join(name);
    let (ext4, ext2, fat) =
        (file(dir, "ext4", 2 << 20), file(dir, "ext2", 1 << 20), file(dir, "fat", 1 << 20));
    tool(
        Command::new("/usr/sbin/mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-O", "^metadata_csum", "-d"])
            .args([&root, &ext4]),
    );
    tool(Command::new("/usr/sbin/mke2fs").args(["-q", "-F", "-t", "ext2", "-d"]).args([&root, &ext2]));
    tool(Command::new("genisoimage").args(["-quiet", "-R", "-J", "-o"]).args([path("iso"), root.clone()]));
    tool(Command::new("mksquashfs").args([&root, &path("squashfs")]).args([
        "-noappend",
        "-quiet",
        "-no-progress",
    ]));
    tool(Command::new("mkfs.erofs").args(["--chunksize", "4096"]).args([&path("erofs"), &root]));
    tool(Command::new("/usr/sbin/mkfs.vfat").args(["-F", "12"]).arg(&fat));
    fs::remove_file(root.join("sub/link")).unwrap();
    tool(Command::new("mcopy").args(["-s", "-Q", "-i"]).args([fat, root.join("sub"), "::/".into()]));
    let shell = |line: &str| tool(Command::new("bash").current_dir(dir).args(["-ec", line]));
    // In many small pieces, for it is the indices that are read without being decoded.
    shell("head -c 400000 fat >small; xz -c --block-size=4KiB small >xz; bgzip -c small >gzip");
    shell("split -b 4096 small part.; zstd -q part.*; cat part.*.zst >zstd");
    shell(
        "qemu-img convert -O qcow2 -o cluster_size=4096 ext2 qcow2; qemu-img convert -c -O qcow2 ext2 clusters",
    );
    // Smaller than mkfs.xfs makes one without being asked for a test.
    shell("{ echo /; echo 0 0; echo d--755 0 0; echo sub d--755 0 0; } >proto");
    shell(
        "for f in tree/sub/a*; do n=${f##* }; echo file-$n ---644 1 2 \"source-$n\" >>proto; cp \"$f\" source-$n; done",
    );
    shell("for n in {1..90}; do echo entry-$n ---600 0 0 tree/sub/deeper/x; done >>proto");
    shell("printf '$\nlink l--777 0 0 sub\n$\n' >>proto");
    for version in ["crc=0", "crc=1"] {
        let test = "TEST_DIR=/ TEST_DEV=/ QA_CHECK_FS=1 mkfs.xfs -q -f -p proto -l size=6m";
        shell(&format!(
            "PATH=$PATH:/usr/sbin; truncate -s 16M xfs-{version}; {test} -m {version} xfs-{version}"
        ));
    }
    // Its checksums are the ones that becket does not compute: damage gets through.
    shell(
        "PATH=$PATH:/usr/sbin; truncate -s 16M btrfs; \
         mkfs.btrfs -q -M -m single -n 4096 --csum xxhash --rootdir tree btrfs",
    );
    for (name, options) in [
        ("vmdk", "vmdk"),
        ("stream", "vmdk -o subformat=streamOptimized"),
        ("vdi", "vdi"),
        ("vhd", "vpc -o subformat=dynamic,force_size=on"),
        ("fixed", "vpc -o subformat=fixed,force_size=on"),
        ("vhdx", "vhdx -o block_size=1M"),
    ] {
        shell(&format!("qemu-img convert -f raw -O {options} ext2 {name}"));
    }
    [
        "ext4",
        "ext2",
        "iso",
        "squashfs",
        "erofs",
        "fat",
        "xz",
        "zstd",
        "gzip",
        "qcow2",
        "clusters",
        "vmdk",
        "stream",
        "vdi",
        "vhd",
        "fixed",
        "vhdx",
        "xfs-crc=0",
        "xfs-crc=1",
        "btrfs",
    ]
    .map(|name| (name.to_owned(), fs::read(path(name)).unwrap()))
    .into()
}

/// Places that hold something, where damage tells: few bytes of an image are metadata.
fn telling(bytes: &[u8]) -> Vec<usize> {
    let blocks = bytes.chunks(512).enumerate().filter(|(_, block)| {
        let zeroes = block.iter().filter(|byte| **byte == 0).count();
        zeroes > 64 && zeroes < block.len()
    });
    blocks
        .flat_map(|(index, block)| {
            block.iter().enumerate().filter(|(_, byte)| **byte != 0).map(move |(at, _)| index * 512 + at)
        })
        .collect()
}

#[test]
fn damage_is_an_error_and_nothing_worse() {
    let tools = [
        "mke2fs",
        "genisoimage",
        "mksquashfs",
        "mkfs.erofs",
        "mkfs.vfat",
        "mcopy",
        "xz",
        "zstd",
        "bgzip",
        "qemu-img",
        "mkfs.xfs",
        "mkfs.btrfs",
    ];
    if !require_plain_machine("damage::damage_is_an_error_and_nothing_worse", &tools) {
        return;
    }
    let dir = dir();
    for (name, bytes) in images(dir.path()) {
        let image = |bytes: Vec<u8>| {
            let len = bytes.len() as u64;
            Image::raw(Arc::new(bytes), len, 512)
        };
        assert!(exercise(&image(bytes.clone())), "{name} is sound");
        let places = telling(&bytes);
        assert!(places.len() > 100, "{name}: {}", places.len());
        let mut errors = 0;
        for round in 0..ROUNDS {
            let dice: Vec<usize> = random_bytes(8 * 64, round * 31 + name.len() as u64)
                .chunks_exact(8)
                .map(|eight| u64::from_le_bytes(eight.try_into().unwrap()) as usize)
                .collect();
            let mut damaged = bytes.clone();
            match round % 5 {
                // Cut short, at every length.
                0 => damaged.truncate(dice[0] % bytes.len()),
                // A number that is all ones: huge counts, places past the end.
                1 => damaged[(places[dice[0] % places.len()] & !3).min(bytes.len() - 4)..][..4].fill(0xff),
                // A block that is another: loops.
                2 => {
                    let [from, to] = [dice[0], dice[1]]
                        .map(|dice| (places[dice % places.len()] & !511).min(bytes.len() - 512));
                    damaged.copy_within(from..from + 512, to);
                }
                _ => dice.iter().skip(1).take(1 + dice[0] % 16).for_each(|dice| {
                    damaged[places[dice % places.len()]] = (dice >> 40) as u8;
                }),
            }
            let started = Instant::now();
            errors += u64::from(!exercise(&image(damaged)));
            assert!(started.elapsed() < patience(PATIENCE), "{name}, round {round}: {:?}", started.elapsed());
        }
        assert!(errors > ROUNDS / 10, "{name}: damage shows: {errors} of {ROUNDS}");
    }
}
