//! The superblock of btrfs.
//! It never uses one whose checksum is wrong.

use super::tree::{Key, Root, Sum, Trees, kind};
use crate::bytes::{field, padded_text, part, u8_at, u16_at, u32_at, u64_at, uuid};
use crate::image::Image;
use crate::layer::{About, LayerError, corrupt, unsupported};

/// Where it is, its length, and the place of its magic number, in bytes.
const PLACE: u64 = 64 << 10;
const LEN: usize = 4096;
const MAGIC: (usize, &[u8]) = (64, b"_BHRfS_M");
/// Its part for the first chunks.
const CHUNKS: (usize, usize) = (811, 2048);
/// Features that change what is read here and are understood, or do not matter to who only reads: all up to
/// 4 copies of RAID 1, without RAID 5 and 6, and simple quotas.
const KNOWN: u64 = 0xf7f | 0x1_0000;
/// Nodes have the UUID of the metadata, which is not that of the file system.
const METADATA_UUID: u64 = 0x400;
/// The number of the top-level subvolume.
pub(super) const TOP: u64 = 5;
/// The directory in the tree of roots, and its entry `default` by the hash of that name.
const DEFAULT: Key = Key { object: 6, kind: kind::DIR_ITEM, offset: 2_378_154_706 };

/// The file system in `image`, when there is one: what it says of itself, its trees, and the tree of roots.
pub(super) fn open(image: &Image) -> Result<Option<(About, Trees, Root)>, LayerError> {
    let sb = image.read_some(PLACE, LEN)?;
    if sb.len() < LEN || part(&sb, MAGIC.0, MAGIC.1.len()) != MAGIC.1 {
        return Ok(None);
    }
    let (sum, sum_name) = match u16_at(&sb, 196) {
        0 => (Sum::Crc32c, "crc32c"),
        1 => (Sum::Other("xxhash"), "xxhash"),
        2 => (Sum::Sha256, "sha256"),
        3 => (Sum::Other("blake2b"), "blake2b"),
        other => return unsupported(format!("btrfs with checksums of type {other}")),
    };
    sum.check(&sb, "the btrfs superblock")?;
    let features = u64_at(&sb, 188);
    if features & !KNOWN != 0 {
        return unsupported(format!("btrfs with the incompatible features {:#x}", features & !KNOWN));
    }
    let (sector, node_size) = (u32_at(&sb, 144), u32_at(&sb, 148));
    let chunks = usize::try_from(u32_at(&sb, 160)).unwrap_or(usize::MAX);
    let sound = node_size.is_power_of_two()
        && (4096..=64 << 10).contains(&node_size)
        && sector.is_power_of_two()
        && (4096..=64 << 10).contains(&sector)
        && chunks <= CHUNKS.1;
    if !sound {
        return corrupt("impossible values in the btrfs superblock");
    }
    let id = if features & METADATA_UUID == 0 { 32 } else { 571 };
    let root = |address, level| Root { address: u64_at(&sb, address), level: u8_at(&sb, level) };
    let trees = Trees::new(
        (image.clone(), sum, usize::try_from(node_size).unwrap_or(0), sector),
        (u64_at(&sb, 201), field(&sb, id)),
        part(&sb, CHUNKS.0, chunks),
        root(88, 199),
    )?;
    let roots = root(80, 198);
    let mut notes = vec![format!("blocks of {sector}")];
    let devices = u64_at(&sb, 136);
    if devices > 1 {
        notes.push(format!("one of {devices} devices"));
    }
    if let Sum::Other(name) = sum {
        notes.push(format!("checksums by {name} are not verified"));
    } else if sum_name != "crc32c" {
        notes.push(format!("checksums by {sum_name}"));
    }
    let default = trees.find(roots, DEFAULT)?.map_or(TOP, |entry| Key::at(&entry, 0).object);
    if default != TOP {
        notes.push(format!("subvolume {default} is mounted by default"));
    }
    if u64_at(&sb, 96) != 0 {
        notes.push("was not unmounted: what its log has is not seen".to_owned());
    }
    let about = About {
        format: "btrfs",
        label: padded_text(part(&sb, 299, 256)),
        uuid: uuid(part(&sb, 32, 16)),
        compression: None,
        notes,
    };
    Ok(Some((about, trees, roots)))
}
