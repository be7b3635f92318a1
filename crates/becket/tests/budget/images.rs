//! The worst images that we can think of, one function for each reader: small ones that ask for much.
//! They are made by hand, without any tool, mostly of holes.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

pub(crate) const MIB: u64 = 1 << 20;

/// An image that is being made.
pub(crate) struct Made {
    file: File,
    pub(crate) path: PathBuf,
}

impl Made {
    pub(crate) fn new(dir: &Path, name: &str, len: u64) -> Made {
        let path = dir.join(name);
        let file = File::create(&path).unwrap();
        file.set_len(len).unwrap();
        Made { file, path }
    }

    pub(crate) fn put(&self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, at).unwrap();
    }

    pub(crate) fn le(&self, at: u64, number: u64, len: usize) {
        self.put(at, &number.to_le_bytes()[..len]);
    }

    fn be(&self, at: u64, number: u64, len: usize) {
        self.put(at, &number.to_be_bytes()[8 - len..]);
    }
}

pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

/// An ext2 with blocks of 4 KiB, whose inode table is in block 4: inode 2 is the root directory, in block 8.
fn ext2(dir: &Path, name: &str, len: u64) -> Made {
    let made = Made::new(dir, name, len);
    for (at, number, size) in
        [(0, 1024, 4), (4, len / 4096, 4), (24, 2, 4), (28, 2, 4), (32, 32768, 4), (36, 32768, 4)]
            .into_iter()
            .chain([(40, 1024, 4), (56, 0xef53, 2), (58, 1, 2), (76, 1, 4), (88, 256, 2), (96, 0x2, 4)])
    {
        made.le(1024 + at, number, size);
    }
    made.le(4096 + 8, 4, 4);
    inode(&made, 2, 0x41ed, 4096, &[8]);
    made
}

/// An inode with these block numbers, which do not follow each other.
fn inode(made: &Made, number: u64, mode: u64, size: u64, blocks: &[u32]) {
    let at = 4 * 4096 + (number - 1) * 256;
    made.le(at, mode, 2);
    made.le(at + 4, size & 0xffff_ffff, 4);
    made.le(at + 108, size >> 32, 4);
    (0_u64..).zip(blocks).for_each(|(index, block)| made.le(at + 40 + index * 4, (*block).into(), 4));
}

/// An entry of a directory; the last one reaches to the end of its block.
fn entry(inode: u32, len: u16, name: &str) -> Vec<u8> {
    let mut entry =
        [&inode.to_le_bytes()[..], &len.to_le_bytes(), &[name.len() as u8, 0], name.as_bytes()].concat();
    entry.resize(usize::from(len), 0);
    entry
}

/// A file of 2^30 blocks: one block of numbers of holes stands for all of them, a million times.
pub(crate) fn ext_lists(dir: &Path) -> PathBuf {
    let made = ext2(dir, "lists.ext2", MIB);
    made.put(8 * 4096, &entry(12, 4096, "file"));
    let mut blocks = [0; 15];
    blocks[14] = 10;
    inode(&made, 12, 0x81a4, 1 << 42, &blocks);
    for (level, next) in [(10_u64, 11_u32), (11, 12), (12, 0)] {
        made.put(level * 4096, &next.to_le_bytes().repeat(1024));
    }
    made.path
}

/// A file in as many pieces as it has blocks.
pub(crate) fn ext_pieces(dir: &Path) -> PathBuf {
    let made = ext2(dir, "pieces.ext2", MIB);
    made.put(8 * 4096, &entry(12, 4096, "file"));
    let mut blocks = [20; 15];
    blocks[12..].copy_from_slice(&[12, 11, 10]);
    inode(&made, 12, 0x81a4, 1 << 42, &blocks);
    for (level, next) in [(10_u64, 11_u32), (11, 12), (12, 20)] {
        made.put(level * 4096, &next.to_le_bytes().repeat(1024));
    }
    made.path
}

/// An extent tree whose nodes have 340 times the same child, and no extent of the file.
pub(crate) fn ext_tree(dir: &Path) -> PathBuf {
    let made = ext2(dir, "tree.ext4", MIB);
    made.put(8 * 4096, &entry(12, 4096, "file"));
    inode(&made, 12, 0x81a4, 4096, &[]);
    let at = 4 * 4096 + 11 * 256;
    made.le(at + 32, 0x80000, 4);
    let node = |at: u64, count: u64, depth: u64, child: u64| {
        for (place, number) in [(0, 0xf30a), (2, count), (4, count), (6, depth)] {
            made.le(at + place, number, 2);
        }
        (1..=count).for_each(|index| match depth {
            // Behind the end of the file.
            0 => made.put(at + index * 12, &[&1_u32.to_le_bytes()[..], &[1, 0, 0, 0, 20, 0, 0, 0]].concat()),
            _ => made.le(at + index * 12 + 4, child, 4),
        });
    };
    node(at + 40, 4, 5, 10);
    (0..5).for_each(|level| node((10 + level) * 4096, 340, 4 - level, 11 + level));
    made.path
}

/// A directory of 64 MiB with millions of names, all in the same block; and a file that is the image itself.
pub(crate) fn ext_names(dir: &Path) -> PathBuf {
    let made = ext2(dir, "names.ext2", MIB);
    let names: Vec<u8> =
        (0..340_u32).flat_map(|number| entry(12 + number % 2, 12, &format!("{number:03}"))).collect();
    made.put(8 * 4096, &[entry(13, 16, "small"), entry(11, 4080, "big")].concat());
    made.put(20 * 4096, &[&names[..], &entry(12, 16, "last")].concat());
    let mut blocks = [20; 15];
    blocks[12..].copy_from_slice(&[12, 11, 0]);
    inode(&made, 11, 0x41ed, 64 * MIB, &blocks);
    for (level, next) in [(11_u64, 12_u32), (12, 20)] {
        made.put(level * 4096, &next.to_le_bytes().repeat(1024));
    }
    // The image itself, as one extent.
    inode(&made, 12, 0x81a4, MIB, &[]);
    let at = 4 * 4096 + 11 * 256;
    made.le(at + 32, 0x80000, 4);
    made.put(at + 40, &[0x0a, 0xf3, 1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    inode(&made, 13, 0x41ed, 4096, &[21]);
    made.put(21 * 4096, &entry(12, 4096, "self"));
    made.path
}

/// An ISO 9660 with records of this many bytes, each of the same length and at the end of a sector zeroes;
/// its root directory is in sector 20 and has `len` bytes.
fn iso(dir: &Path, name: &str, size: u64, len: u32, rock_ridge: bool) -> Made {
    let made = Made::new(dir, name, size);
    made.put(16 * 2048, b"\x01CD001\x01");
    made.le(16 * 2048 + 128, 2048, 2);
    made.put(16 * 2048 + 156, &record(20, len, 2, b"\0", b""));
    made.put(17 * 2048, b"\xffCD001\x01");
    let own = if rock_ridge { &b"SP\x07\x01\xbe\xef\0"[..] } else { b"" };
    made.put(20 * 2048, &record(20, len, 2, b"\0", own));
    made
}

fn record(sector: u32, size: u32, flags: u8, name: &[u8], system_use: &[u8]) -> Vec<u8> {
    let mut record = vec![0; 33];
    record[2..6].copy_from_slice(&sector.to_le_bytes());
    record[10..14].copy_from_slice(&size.to_le_bytes());
    record[25] = flags;
    record[32] = name.len() as u8;
    record.extend_from_slice(name);
    record.resize(record.len().next_multiple_of(2), 0);
    record.extend_from_slice(system_use);
    record.resize(record.len().next_multiple_of(2), 0);
    record[0] = record.len() as u8;
    record
}

/// A million files, each of which is the whole image.
pub(crate) fn iso_itself(dir: &Path) -> PathBuf {
    let len = 32 * MIB;
    let made = iso(dir, "itself.iso", len + 20 * 2048, len as u32, false);
    let sector = |number: u64| {
        let each = |index: u64| record(0, len as u32, 0, format!("{number:05}{index:02}.;1").as_bytes(), b"");
        (0..40).flat_map(each).take(2048 - 2048 % 44).collect::<Vec<u8>>()
    };
    (21..20 + len / 2048).for_each(|number| made.put(number * 2048, &sector(number)));
    made.path
}

/// Records whose system use fields go on and on.
pub(crate) fn iso_continuations(dir: &Path) -> PathBuf {
    let len = 32 * MIB;
    let made = iso(dir, "continuations.iso", len + 20 * 2048, len as u32, true);
    let mut area = b"CE\x1c\x01".to_vec();
    for number in [19_u32, 0, 28] {
        area.extend(number.to_le_bytes());
        area.extend(number.to_be_bytes());
    }
    let one = record(0, 0, 0, b"A", &area);
    let sector = one.repeat(2048 / one.len());
    (21..20 + len / 2048).for_each(|number| made.put(number * 2048, &sector));
    made.put(19 * 2048, &[&b"NM\x07\x01\0xx"[..]; 4].concat());
    made.path
}

/// A file of a million extents, under as many names as there are.
pub(crate) fn iso_extents(dir: &Path) -> PathBuf {
    let len = 32 * MIB;
    let made = iso(dir, "extents.iso", len + 20 * 2048, len as u32, false);
    let one = record(18, 2048, 0x80, b"A", b"");
    let sector = one.repeat(2048 / one.len());
    (21..20 + len / 2048).for_each(|number| made.put(number * 2048, &sector));
    made.path
}

/// A FAT16 with 60,000 files, each of which holds partitions inside partitions.
pub(crate) fn fat(dir: &Path) -> PathBuf {
    let made = Made::new(dir, "nested.fat", 34 * MIB);
    made.put(0, b"\xeb\x3c\x90");
    for (at, number, len) in
        [(11, 512, 2), (13, 1, 1), (14, 1, 2), (16, 1, 1), (17, 60_000, 2), (21, 0xf8, 1)]
            .into_iter()
            .chain([(22, 256, 2), (32, 34 * 2048, 4), (510, 0xaa55, 2)])
    {
        made.le(at, number, len);
    }
    // All clusters but the last are one chain.
    let chain: Vec<u8> =
        (0..65_536_u32).flat_map(|cluster| (cluster as u16).wrapping_add(1).to_le_bytes()).collect();
    made.put(512, &chain);
    let entries = (0..60_000_u32).flat_map(|number| {
        let mut entry = format!("{number:08}IMG").into_bytes();
        entry.resize(32, 0);
        entry[26] = 2;
        entry[28..32].copy_from_slice(&(4 * MIB as u32).to_le_bytes());
        entry
    });
    made.put(512 * 257, &entries.collect::<Vec<u8>>());
    let nested = fs::read(mbr(dir)).unwrap();
    made.put(512 * (257 + 60_000 / 16), &nested);
    made.path
}

/// An EROFS with a directory of 64 MiB, whose blocks are one, and symbolic links through it.
pub(crate) fn erofs(dir: &Path) -> PathBuf {
    let made = Made::new(dir, "huge.erofs", 80 * MIB);
    made.le(1024, 0xe0f5_e1e2, 4);
    made.le(1024 + 12, 12, 1);
    made.le(1024 + 14, 36, 2);
    let inode = |nid: u64, mode: u64, size: u64, block: u64| {
        let at = nid * 32;
        made.le(at + 4, mode, 2);
        made.le(at + 8, size, 4);
        made.le(at + 16, block, 4);
    };
    inode(36, 0x41ed, 64 * MIB, 16);
    inode(37, 0xa1ff, 4096, 3);
    inode(38, 0x81a4, 4096, 3);
    made.put(3 * 4096, "link/".repeat(1000).as_bytes());
    let block = |number: u64| {
        let names = 300_u64;
        let mut block: Vec<u8> = (0..names)
            .flat_map(|index| {
                let node = if index == 299 { 37_u64 } else { 36 };
                let place = (names * 12 + index) as u16;
                [&node.to_le_bytes()[..], &place.to_le_bytes(), &[2, 0]].concat()
            })
            .collect();
        block.resize(4096, b'x');
        if number == 16 * 1024 - 1 {
            block.truncate(3600 + 299);
            block.extend(b"link");
            block.resize(4096, 0);
        }
        block
    };
    let usual = block(0).repeat(256);
    (0..64).for_each(|mib| made.put(16 * 4096 + mib * MIB, &usual));
    made.put(16 * 4096 + 64 * MIB - 4096, &block(16 * 1024 - 1));
    made.path
}

/// A SquashFS with a file of 2^58 bytes, whose million blocks of sizes are two that follow each other, and a
/// directory of names.
pub(crate) fn squashfs(dir: &Path) -> PathBuf {
    let made = Made::new(dir, "sizes.squashfs", 600 * MIB);
    made.put(0, b"hsqs");
    for (at, number, len) in
        [(4, 9, 4), (12, 4096, 4), (20, 1, 2), (22, 12, 2), (28, 4, 2), (40, 600 * MIB, 8)]
            .into_iter()
            .chain([(32, 0, 8), (64, 4096, 8), (72, 128, 8), (80, 128, 8)])
    {
        made.le(at, number, len);
    }
    // Inodes: the root directory, and at 32 the file; all that follows are blocks of zeroes, stored as they
    // are.
    made.le(4096, 0x8000 | 8192, 2);
    let at = 4098;
    made.le(at, 1, 2);
    made.le(at + 24, 3 + 12 + 8 + 4, 2);
    made.le(at + 32, 9, 2);
    made.le(at + 32 + 16, 0, 8);
    made.le(at + 32 + 24, 1 << 58, 8);
    made.le(at + 32 + 16 + 28, 0xffff_ffff, 4);
    (1..70_000_u64).for_each(|block| made.le(4096 + block * 8194, 0x8000 | 8192, 2));
    // Directories: one header with one entry.
    made.le(128, 0x8000 | 100, 2);
    made.le(130, 0, 4);
    made.le(142, 32, 2);
    made.le(148, 3, 2);
    made.put(150, b"file");
    made.path
}

/// In each sector a boot record: four partitions from the next sector on, and in each of them again.
pub(crate) fn mbr(dir: &Path) -> PathBuf {
    let made = Made::new(dir, "nested.mbr", 64 * 512);
    for number in 0..63_u8 {
        let mut sector = vec![0; 512];
        for index in 0..4_usize {
            let at = 446 + index * 16;
            sector[at + 4] = 0x83;
            sector[at + 8] = 1;
            sector[at + 12] = 63 - number;
        }
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        made.put(u64::from(number) * 512, &sector);
    }
    made.path
}

/// A GPT with 255 partitions over the same bytes, in which lies an ext2 of a million names.
pub(crate) fn gpt(dir: &Path) -> PathBuf {
    let inner = fs::read(ext_names(dir)).unwrap();
    let made = Made::new(dir, "same.gpt", 2 * MIB);
    made.put(MIB, &inner);
    made.put(446, &[0, 0, 0, 0, 0xee, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xf, 0, 0]);
    made.put(510, &[0x55, 0xaa]);
    let entry = |number: u8| {
        let mut entry = vec![0; 128];
        entry[0] = 1;
        entry[16] = number;
        entry[32..40].copy_from_slice(&2048_u64.to_le_bytes());
        entry[40..48].copy_from_slice(&4095_u64.to_le_bytes());
        entry
    };
    let entries: Vec<u8> = (0..255).flat_map(entry).collect();
    let mut header = vec![0; 92];
    header[..12].copy_from_slice(b"EFI PART\0\0\x01\0");
    for (at, number) in [(12, 92), (24, 1), (32, 4095), (40, 100), (48, 4095), (72, 2)] {
        header[at..at + 4].copy_from_slice(&u32::to_le_bytes(number));
    }
    for (at, number) in [(80, 255), (84, 128), (88, crc32(&entries))] {
        header[at..at + 4].copy_from_slice(&number.to_le_bytes());
    }
    let sum = crc32(&header);
    header[16..20].copy_from_slice(&sum.to_le_bytes());
    made.put(512, &header);
    made.put(1024, &entries);
    made.path
}

/// Streams of .xz without a block, with so much padding behind each.
fn xz(dir: &Path, name: &str, streams: usize, padding: usize) -> PathBuf {
    let flags = [0, 1];
    let mut stream = b"\xfd7zXZ\0".to_vec();
    stream.extend(flags);
    stream.extend(crc32(&flags).to_le_bytes());
    let index = [0, 0, 0, 0];
    stream.extend(index);
    stream.extend(crc32(&index).to_le_bytes());
    let footer = [1, 0, 0, 0, 0, 1];
    stream.extend(crc32(&footer).to_le_bytes());
    stream.extend(footer);
    stream.extend(b"YZ");
    let step = stream.len() + padding;
    let made = Made::new(dir, name, (streams * step) as u64);
    if padding == 0 {
        let many = stream.repeat(4096);
        (0..streams / 4096).for_each(|part| made.put((part * many.len()) as u64, &many));
    } else {
        (0..streams).for_each(|number| made.put((number * step) as u64, &stream));
    }
    made.path
}

pub(crate) fn xz_streams(dir: &Path) -> PathBuf {
    xz(dir, "streams.xz", 5 << 18, 0)
}

pub(crate) fn xz_padding(dir: &Path) -> PathBuf {
    xz(dir, "padding.xz", 8000, (1 << 20) - 64)
}

/// Frames that are passed over, and frames of blocks without a byte.
pub(crate) fn zstd(dir: &Path) -> PathBuf {
    let frame = [&[0x28, 0xb5, 0x2f, 0xfd, 0x20, 1][..], &[0; 3 * 1000], &[1, 0, 0]].concat();
    let many = [&b"\x50\x2a\x4d\x18\0\0\0\0"[..].repeat(4096), &frame.repeat(300)[..]].concat();
    let made = Made::new(dir, "frames.zst", many.len() as u64 * 100);
    (0..100).for_each(|part| made.put(part * many.len() as u64, &many));
    made.path
}

/// Members of BGZF that yield nothing.
pub(crate) fn bgzf(dir: &Path) -> PathBuf {
    let member = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x06\0BC\x02\0\x1b\0\x03\0\0\0\0\0\0\0\0\0";
    let many = member.repeat(1 << 16);
    let made = Made::new(dir, "empty.gz", many.len() as u64 * 80);
    (0..80).for_each(|part| made.put(part * many.len() as u64, &many));
    made.path
}

/// A qcow2 of clusters of 512 bytes with so many L2 tables, each at a place of its own; over `backing`.
fn qcow2(
    dir: &Path,
    name: &str,
    tables: u64,
    backing: Option<&str>,
    table: &dyn Fn(u64) -> Vec<u8>,
) -> PathBuf {
    let (l1, first) = (4096_u64, 64 * MIB);
    let made = Made::new(dir, name, first + 2 * tables * 512);
    let head = [
        (0, 0x5146_49fb, 4),
        (4, 3, 4),
        (20, 9, 4),
        (24, tables * 64 * 512, 8),
        (36, tables, 4),
        (40, l1, 8),
    ];
    for (at, number, len) in head.into_iter().chain([(96, 4, 4), (100, 104, 4)]) {
        made.be(at, number, len);
    }
    if let Some(backing) = backing {
        made.be(8, 300, 8);
        made.be(16, backing.len() as u64, 4);
        made.put(300, backing.as_bytes());
        made.put(104, b"\xe2\x79\x2a\xca\0\0\0\x05qcow2\0\0\0");
    }
    let entries: Vec<u8> = (0..tables).flat_map(|index| (first + index * 512).to_be_bytes()).collect();
    made.put(l1, &entries);
    let all: Vec<u8> = (0..tables).flat_map(table).collect();
    made.put(first, &all);
    made.path
}

/// Four million L2 tables that say nothing.
pub(crate) fn qcow2_tables(dir: &Path) -> PathBuf {
    qcow2(dir, "tables.qcow2", 4 << 20, None, &|_| Vec::new())
}

/// A chain, in each file of which every second cluster is compressed.
pub(crate) fn qcow2_chain(dir: &Path) -> PathBuf {
    let tables = 4096;
    let table = |_| {
        // A sector at byte 512 of the file, compressed, and a cluster that is the backing file's.
        [&((1_u64 << 62) | 512).to_be_bytes()[..], &[0; 8]].concat().repeat(32)
    };
    let mut below = None;
    for number in 0..30 {
        let name = format!("chain{number}.qcow2");
        qcow2(dir, &name, tables, below.as_deref(), &table);
        below = Some(name);
    }
    dir.join("chain29.qcow2")
}

/// A descriptor of a thousand pieces of one file, which is itself in pieces.
pub(crate) fn vmdk(dir: &Path) -> PathBuf {
    Made::new(dir, "flat.bin", MIB);
    let pieces: String =
        (0..1024).map(|index| format!("RW 8 FLAT \"flat.bin\" {}\n", index * 16 % 2000)).collect();
    let path = dir.join("pieces.vmdk");
    fs::write(&path, format!("# Disk DescriptorFile\nversion=1\nparentCID=ffffffff\n{pieces}")).unwrap();
    path
}

/// A physical volume of LVM with 4 MiB of metadata: as many volumes as fit, each in two segments, and one
/// that is cut into stripes of a sector.
pub(crate) fn lvm2(dir: &Path) -> PathBuf {
    let made = Made::new(dir, "huge.lvm2", 80 * MIB);
    let sum = |bytes: &[u8]| {
        let step = |crc: u32, _| crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
        bytes.iter().fold(0xf597_a6cf, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
    };
    let volume = |name: &str, stripes: &str| {
        format!(
            "{name}{{status=[\"VISIBLE\"]1{{start_extent=0 extent_count=2048 type=\"striped\" stripe_size=1 \
             stripes=[{stripes}]}}}}"
        )
    };
    let mut text = "vg{seqno=1 extent_size=32 physical_volumes{p{id=\"aaaaaabbbbccccddddeeeeffffgggggg\" \
                    pe_start=16384 pe_count=4096}}logical_volumes{"
        .to_owned();
    text += &volume("striped", "\"p\",0,\"p\",1024");
    for number in 0_u64.. {
        let next = volume(&format!("v{number}"), "\"p\",0");
        if text.len() + next.len() + 2 > 4 << 20 {
            break;
        }
        text += &next;
    }
    text += "}}";
    let mut header = vec![0; 508];
    header[..16].copy_from_slice(b" LVM2 x[5A%r0N*>");
    for (at, number) in [(16, 1), (20, 4096), (28, 5 * MIB), (36, 512), (44, text.len() as u64)] {
        header[at..at + 8].copy_from_slice(&number.to_le_bytes());
    }
    header[52..56].copy_from_slice(&sum(text.as_bytes()).to_le_bytes());
    made.le(4096, sum(&header).into(), 4);
    made.put(4100, &header);
    made.put(4096 + 512, text.as_bytes());
    let mut label = vec![0; 492];
    label[0] = 32;
    label[4..12].copy_from_slice(b"LVM2 001");
    label[12..44].copy_from_slice(b"aaaaaabbbbccccddddeeeeffffgggggg");
    for (at, number) in [(44, 80 * MIB), (52, 8 * MIB), (84, 4096), (92, 5 * MIB)] {
        label[at..at + 8].copy_from_slice(&number.to_le_bytes());
    }
    made.put(512, b"LABELONE\x01");
    made.le(512 + 16, sum(&label).into(), 4);
    made.put(512 + 20, &label);
    made.path
}
