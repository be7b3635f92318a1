//! The worst images of NTFS and exFAT, and of EROFS with compressed files.

use std::path::{Path, PathBuf};

use super::images::{MIB, Made};

const CLUSTER: u64 = 4096;
/// Where the records of NTFS begin, and how many there are.
const RECORDS: u64 = 4 * CLUSTER;
const COUNT: u64 = 9000;

/// An attribute: its kind, flags of its value, name, and value, or its runs with a length.
fn attribute(kind: u32, flags: u16, name: &str, value: &[u8], runs: Option<(u8, u64)>) -> Vec<u8> {
    let name: Vec<u8> = name.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let head = if runs.is_some() { 64 } else { 24 };
    let start = head + name.len().next_multiple_of(8);
    let mut raw = vec![0; start];
    let len = (start + value.len()).next_multiple_of(8);
    raw[..4].copy_from_slice(&kind.to_le_bytes());
    raw[4..8].copy_from_slice(&(len as u32).to_le_bytes());
    raw[8] = runs.is_some().into();
    raw[9] = (name.len() / 2) as u8;
    raw[10..12].copy_from_slice(&(head as u16).to_le_bytes());
    raw[12..14].copy_from_slice(&flags.to_le_bytes());
    raw[head..head + name.len()].copy_from_slice(&name);
    match runs {
        None => {
            raw[16..20].copy_from_slice(&(value.len() as u32).to_le_bytes());
            raw[20..22].copy_from_slice(&(start as u16).to_le_bytes());
        }
        Some((unit, size)) => {
            raw[32..34].copy_from_slice(&(start as u16).to_le_bytes());
            raw[34] = unit;
            raw[48..56].copy_from_slice(&size.to_le_bytes());
            raw[56..64].copy_from_slice(&size.to_le_bytes());
        }
    }
    raw.extend(value);
    raw.resize(len, 0);
    raw
}

/// Puts the marks of a write, which are zeroes, at the ends of a record's sectors, and their own bytes aside.
fn marked(magic: &[u8], mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.resize(CLUSTER as usize, 0);
    bytes[..4].copy_from_slice(magic);
    bytes[4..8].copy_from_slice(&[0x30, 0, 9, 0]);
    for sector in 0..8 {
        let end = (sector + 1) * 512 - 2;
        let own: [u8; 2] = bytes[end..end + 2].try_into().unwrap();
        bytes[0x32 + 2 * sector..][..2].copy_from_slice(&own);
        bytes[end..end + 2].fill(0);
    }
    bytes
}

fn record(made: &Made, number: u64, base: u64, directory: bool, attributes: &[u8]) {
    let mut raw = vec![0; 0x48];
    raw[16] = 1;
    raw[20] = 0x48;
    raw[22] = 1 | u8::from(directory) << 1;
    raw[24..28].copy_from_slice(&(0x48 + 8 + attributes.len() as u32).to_le_bytes());
    raw[32..40].copy_from_slice(&(if base == 0 { 0 } else { base | 1 << 48 }).to_le_bytes());
    raw.extend(attributes);
    raw.extend([0xff; 4]);
    made.put(RECORDS + number * CLUSTER, &marked(b"FILE", raw));
}

/// The entry of a directory.
fn entry(number: u64, name: &str) -> Vec<u8> {
    let name: Vec<u8> = name.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let len = (16 + 66 + name.len()).next_multiple_of(8);
    let mut raw = vec![0; len];
    raw[..8].copy_from_slice(&(number | 1 << 48).to_le_bytes());
    raw[8..10].copy_from_slice(&(len as u16).to_le_bytes());
    raw[10..12].copy_from_slice(&((66 + name.len()) as u16).to_le_bytes());
    raw[16 + 64] = (name.len() / 2) as u8;
    raw[16 + 65] = 1;
    raw[82..82 + name.len()].copy_from_slice(&name);
    raw
}

/// The list of entries behind a head of so many bytes.
fn index(head: usize, entries: &[Vec<u8>]) -> Vec<u8> {
    let mut raw = vec![0; head];
    let entries = [entries.concat(), vec![0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 2, 0, 0, 0]].concat();
    raw[..4].copy_from_slice(&(head as u32).to_le_bytes());
    raw[4..8].copy_from_slice(&((head + entries.len()) as u32).to_le_bytes());
    raw.extend(entries);
    raw
}

/// A run of clusters, in the widest form.
fn run(len: u64, cluster: Option<u64>) -> Vec<u8> {
    let mut raw = vec![if cluster.is_some() { 0x88 } else { 0x08 }];
    raw.extend(len.to_le_bytes());
    raw.extend(cluster.map(u64::to_le_bytes).into_iter().flatten());
    raw
}

/// A file in eight thousand records full of streams; a compressed one that is a hole of 2^62 bytes; one in as
/// many runs as its records can hold; a directory in which all names mean the first.
pub(crate) fn ntfs(dir: &Path) -> PathBuf {
    let made = Made::new(dir, "worst.ntfs", 256 * MIB);
    made.put(0, b"\xeb\x52\x90NTFS    ");
    for (at, number, len) in [(11, 512, 2), (13, 8, 1), (48, 4, 8), (64, 1, 1), (68, 1, 1), (510, 0xaa55, 2)]
    {
        made.le(at, number, len);
    }
    let standard = attribute(0x10, 0, "", &[0; 48], None);
    let table = [run(COUNT, Some(4)), vec![0]].concat();
    record(
        &made,
        0,
        0,
        false,
        &[&standard[..], &attribute(0x80, 0, "", &table, Some((0, COUNT * CLUSTER)))].concat(),
    );
    let version = attribute(0x70, 0, "", &[0, 0, 0, 0, 0, 0, 0, 0, 3, 1, 0, 0], None);
    record(&made, 3, 0, false, &[&standard[..], &version].concat());
    let list = |first: u64, count: u64, at: u64| {
        let entries: Vec<u8> = (first..first + count)
            .flat_map(|number| {
                let mut raw = vec![0; 26];
                raw[..4].copy_from_slice(&0x80_u32.to_le_bytes());
                raw[4] = 26;
                raw[16..24].copy_from_slice(&(number | 1 << 48).to_le_bytes());
                raw
            })
            .collect();
        made.put(at * CLUSTER, &entries);
        let runs = [run(64, Some(at)), vec![0]].concat();
        attribute(0x20, 0, "", &runs, Some((0, entries.len() as u64)))
    };
    // Streams that share the records of the second file's runs.
    let (many, streams, holes, runs) = (16, 17, 18, 19);
    let behind = RECORDS / CLUSTER + COUNT;
    record(&made, many, 0, false, &standard);
    record(&made, streams, 0, false, &[&standard[..], &list(100, 7000, behind)].concat());
    let stream = attribute(0x80, 0, "x", b"", None).repeat(120);
    (100..7100).for_each(|number| record(&made, number, streams, false, &stream));
    let hole = attribute(0x80, 1, "", &[run(1 << 50, None), vec![0]].concat(), Some((4, 1 << 62)));
    record(&made, holes, 0, false, &[&standard[..], &hole].concat());
    record(&made, runs, 0, false, &[&standard[..], &list(7100, 1800, behind + 64)].concat());
    for number in 0..1800_u64 {
        let pairs: Vec<u8> = (0..1200).flat_map(|n| [0x11, 1, if n % 2 == 0 { 3 } else { 0xfd }]).collect();
        let mut part = attribute(0x80, 0, "", &[pairs, vec![0]].concat(), Some((0, 1 << 40)));
        part[16..24].copy_from_slice(&(number * 1200).to_le_bytes());
        record(&made, 7100 + number, runs, false, &part);
    }
    let root = [vec![0; 8], (CLUSTER as u32).to_le_bytes().to_vec(), vec![0; 4], index(16, &[])].concat();
    let blocks = 10_000;
    let at = behind + 200;
    let rooted = [
        standard,
        attribute(0x90, 0, "$I30", &root, None),
        attribute(0xa0, 0, "$I30", &[run(blocks, Some(at)), vec![0]].concat(), Some((0, blocks * CLUSTER))),
        attribute(0xb0, 0, "$I30", &vec![0xff; (blocks / 8) as usize], None),
    ];
    record(&made, 5, 0, true, &rooted.concat());
    let named = [entry(streams, "streams"), entry(holes, "holes"), entry(runs, "runs")];
    let all: Vec<Vec<u8>> = named.into_iter().chain((0..30).map(|n| entry(many, &format!("{n}")))).collect();
    let block = marked(b"INDX", [vec![0; 24], index(48, &all)].concat());
    (0..blocks).for_each(|number| made.put((at + number) * CLUSTER, &block));
    made.path
}

/// A directory of 64 MiB that is full, and a file whose chain goes to and fro.
pub(crate) fn exfat(dir: &Path) -> PathBuf {
    let made = Made::new(dir, "worst.exfat", 80 * MIB);
    made.put(0, b"\xeb\x76\x90EXFAT   ");
    let fields = [(80, 8, 4), (84, 1024, 4), (88, 2048, 4), (92, 130_000, 4), (96, 2, 4), (104, 0x100, 2)];
    for (at, number, len) in fields.into_iter().chain([(108, 9, 1), (110, 1, 1), (510, 0xaa55, 2)]) {
        made.le(at, number, len);
    }
    let (table, heap) = (8 * 512, 2048 * 512);
    // The root is one cluster; clusters 4 and 6 follow each other for ever.
    for (cluster, next) in [(2, 0xffff_ffff_u64), (4, 6), (6, 4)] {
        made.le(table + cluster * 4, next, 4);
    }
    let set = |name: &str, directory: bool, flags: u8, cluster: u32, size: u64| {
        let mut raw = vec![0; 96];
        (raw[0], raw[1], raw[4]) = (0x85, 2, if directory { 0x10 } else { 0x20 });
        (raw[32], raw[33], raw[35], raw[64]) = (0xc0, flags, name.len() as u8, 0xc1);
        raw[40..48].copy_from_slice(&size.to_le_bytes());
        raw[52..56].copy_from_slice(&cluster.to_le_bytes());
        raw[56..64].copy_from_slice(&size.to_le_bytes());
        for (at, byte) in name.bytes().enumerate() {
            raw[66 + 2 * at] = byte;
        }
        raw
    };
    let root = [set("full", true, 3, 100, 60 * MIB), set("circle", false, 1, 4, 1 << 60)].concat();
    made.put(heap, &root);
    let file = set("f", false, 3, 8, 512);
    let full = file.repeat((60 * MIB / 96) as usize);
    made.put(heap + 98 * 512, &full);
    made.path
}

/// A compressed file of 2^50 bytes whose index is a hole, or says that all is the middle of one piece.
pub(crate) fn erofs(dir: &Path, name: &str, filled: bool) -> PathBuf {
    let made = Made::new(dir, name, 1 << 40);
    let fields = [(0, 0xe0f5_e1e2_u64, 4), (12, 12, 1), (14, 36, 2), (80, 3, 4), (84, 1, 2)];
    fields.into_iter().for_each(|(at, number, len)| made.le(1024 + at, number, len));
    // The root directory, with one entry, in the block behind.
    let root = 36 * 32;
    for (at, number, len) in [(0, 0, 2), (4, 0x41ed, 2), (8, 4096, 4), (16, 1, 4)] {
        made.le(root + at, number, len);
    }
    let block = 4096;
    made.le(block, 256, 8);
    made.le(block + 8, 12, 2);
    made.put(block + 12, b"file");
    let inode = 256 * 32;
    // A long inode, compressed, with a long index.
    for (at, number, len) in [(0, 1 | 1 << 1, 2), (4, 0x81a4, 2), (8, 1 << 50, 8), (44, 1, 4)] {
        made.le(inode + at, number, len);
    }
    if filled {
        let index = inode + 64 + 16;
        made.put(index, &[1, 0, 0, 0, 8, 0, 0, 0]);
        made.put(index + 8, &[2, 0, 0, 0, 1, 0, 1, 0].repeat(4 << 20));
    }
    made.path
}
