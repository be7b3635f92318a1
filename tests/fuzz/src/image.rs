//! Any bytes as an image: opened as one format, walked and read.
//! It never reads all of what a directory or a file claims to hold.

use std::ops::ControlFlow;
use std::sync::Arc;

use becket_image::budget::Limits;
use becket_image::codec::Codec;
use becket_image::layer::{FileSystem, NodeKind, detect, find_foreign};
use becket_image::{Budget, Format, Image, LayerError, encoded, inspect};

use crate::checksums;

/// Entries that are looked at, and bytes of each file that are read.
const ENTRIES: usize = 200;
const BYTES: usize = 256 << 10;

pub(crate) fn partitions(bytes: &[u8]) -> bool {
    let mut bytes = bytes.to_vec();
    checksums::gpt(&mut bytes);
    read(bytes, Format::Disk)
}

pub(crate) fn iso9660(bytes: &[u8]) -> bool {
    read(bytes.to_vec(), Format::Iso9660)
}

pub(crate) fn squashfs(bytes: &[u8]) -> bool {
    read(bytes.to_vec(), Format::Squashfs)
}

pub(crate) fn ext(bytes: &[u8]) -> bool {
    read(bytes.to_vec(), Format::Ext)
}

/// Of version 4, whose metadata have no checksums; the forms are those of version 5.
pub(crate) fn xfs(bytes: &[u8]) -> bool {
    read(bytes.to_vec(), Format::Xfs)
}

/// From the superblock on, with checksums by an algorithm that becket does not compute.
pub(crate) fn btrfs(bytes: &[u8]) -> bool {
    read([&[0; 64 << 10], bytes].concat(), Format::Btrfs)
}

pub(crate) fn fat(bytes: &[u8]) -> bool {
    read(bytes.to_vec(), Format::Fat)
}

pub(crate) fn exfat(bytes: &[u8]) -> bool {
    read(bytes.to_vec(), Format::ExFat)
}

pub(crate) fn ntfs(bytes: &[u8]) -> bool {
    read(bytes.to_vec(), Format::Ntfs)
}

pub(crate) fn erofs(bytes: &[u8]) -> bool {
    read(bytes.to_vec(), Format::Erofs)
}

pub(crate) fn lvm2(bytes: &[u8]) -> bool {
    let mut bytes = bytes.to_vec();
    checksums::lvm2(&mut bytes);
    read(bytes, Format::Lvm2)
}

/// The files of packers, whose magic numbers tell them apart.
pub(crate) fn packed(bytes: &[u8]) -> bool {
    let mut bytes = bytes.to_vec();
    checksums::xz(&mut bytes);
    [Format::Xz, Format::Zstd, Format::Gzip].into_iter().any(|format| read(bytes.clone(), format))
}

/// A qcow2 without a backing file.
pub(crate) fn qcow2(bytes: &[u8]) -> bool {
    let disk = becket_image::unpack_alone(&image(bytes.to_vec()));
    disk.is_ok_and(|disk| disk.is_some_and(|disk| disk.read_some(0, BYTES).is_ok()))
}

/// The disk in another container that needs no other file.
pub(crate) fn disks(bytes: &[u8]) -> bool {
    let mut bytes = bytes.to_vec();
    checksums::vhd(&mut bytes);
    checksums::vhdx(&mut bytes);
    let disk = becket_image::unpack_disk(&image(bytes));
    disk.is_ok_and(|disk| disk.is_some_and(|disk| disk.read_some(0, BYTES).is_ok()))
}

/// A container that becket does not read: known by its ends, whatever lies between them.
pub(crate) fn foreign(bytes: &[u8]) -> bool {
    let limits = Limits { bytes: 1 << 20, steps: 4096, memory: 1 << 20, ..Limits::default() };
    let budget = Budget::new(limits);
    let found = find_foreign(&image(bytes.to_vec()).within(&budget));
    assert!(!matches!(found, Err(LayerError::Spent(_))), "{found:?} after {:?}", budget.used());
    found.is_ok_and(|found| found.is_some_and(|format| !format.name.is_empty() && !format.what.is_empty()))
}

/// Whatever it seems to be, and what is in it.
pub(crate) fn anything(bytes: &[u8]) -> bool {
    inspect(&image(bytes.to_vec()), "fuzz", Format::Auto).about.format != "raw"
}

/// One block: the first byte says how it is encoded, the next two how much it yields.
pub(crate) fn codecs(bytes: &[u8]) -> bool {
    const CODECS: [Codec; 13] = [
        Codec::Gzip,
        Codec::Xz,
        Codec::Lz4,
        Codec::Zstd,
        Codec::GzipMember,
        Codec::XzBlock,
        Codec::Lzo,
        Codec::FilledLzo,
        Codec::Lznt1,
        Codec::PaddedLz4,
        Codec::PaddedLzma,
        Codec::PaddedDeflate,
        Codec::PaddedZstd,
    ];
    let [codec, low, high, input @ ..] = bytes else { return false };
    let Some(codec) = CODECS.get(usize::from(*codec) % CODECS.len()) else { return false };
    let mut input = input.to_vec();
    if *codec == Codec::XzBlock {
        checksums::xz_block(&mut input);
    }
    let yields = u32::from(u16::from_le_bytes([*low, *high])).max(1);
    let input_len = u32::try_from(input.len()).unwrap_or(0);
    // As much as it yields is wanted, and it may be less than there is room for.
    let block = encoded::Block { start: 0, len: 1, input: 0, input_len, skip: 0, yields };
    encoded::decode(&block, &input, codec.decoder().as_mut(), &mut Vec::new()).is_ok()
}

fn image(bytes: Vec<u8>) -> Image {
    let len = bytes.len() as u64;
    Image::raw(Arc::new(bytes), len, 512)
}

/// Whether all that was looked at could be read.
fn read(bytes: Vec<u8>, format: Format) -> bool {
    let image = image(bytes);
    let Ok(contents) = detect(&image, format) else { return false };
    let packed = contents.packed.as_ref().is_none_or(|packed| {
        let end = packed.image.len().saturating_sub(10);
        packed.image.read_some(0, BYTES).is_ok() && packed.image.read_some(end, 10).is_ok()
    });
    let files = contents.fs.as_ref().is_none_or(|fs| {
        let mut left = ENTRIES;
        walk(&image, fs.as_ref(), fs.root(), 0, &mut left) && left < ENTRIES
    });
    packed && files
}

fn walk(image: &Image, fs: &dyn FileSystem, dir: u64, depth: usize, left: &mut usize) -> bool {
    let mut nodes = Vec::new();
    let listed = fs.list(dir, &mut |_, node| {
        nodes.push(node);
        if nodes.len() < *left { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    let mut whole = listed.is_ok();
    for node in nodes {
        let Some(rest) = left.checked_sub(1) else { break };
        *left = rest;
        whole &= fs.attributes(node).is_ok() && fs.xattrs(node).is_ok();
        whole &= match fs.stat(node).map(|stat| stat.kind) {
            Ok(NodeKind::Directory) => depth >= 8 || walk(image, fs, node, depth + 1, left),
            Ok(NodeKind::Symlink) => fs.read_link(node).is_ok(),
            Ok(NodeKind::File) => {
                let file = fs.lay_out(node).and_then(|layout| image.compose(layout));
                file.and_then(|file| file.read_some(0, BYTES)).is_ok()
            }
            Ok(NodeKind::Other) => true,
            Err(_) => false,
        };
    }
    whole
}
