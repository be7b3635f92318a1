//! The superblock, the group descriptors and the inodes of ext2, ext3 and ext4.
//! It never uses an inode whose checksum is wrong.

use std::sync::{Mutex, PoisonError};

use crc::{CRC_32_ISCSI, Crc, Table};

use crate::bytes::{field, padded_text, part, u16_at, u32_at, uuid};
use crate::image::Image;
use crate::layer::{About, LayerError, NodeKind, corrupt, unsupported};

const SUPERBLOCK: u64 = 1024;
const SUPERBLOCK_LEN: usize = 1024;
const MAGIC: u16 = 0xef53;
pub(super) const ROOT: u64 = 2;
/// What every inode has; the rest of ext4's inodes is extra.
pub(super) const INODE_LEN: usize = 128;

/// Features that change what is read here, and that are understood.
pub(super) mod feature {
    pub(in super::super) const HAS_JOURNAL: u32 = 0x4;
    pub(in super::super) const SPARSE_SUPER2: u32 = 0x200;

    pub(in super::super) const RECOVER: u32 = 0x4;
    pub(in super::super) const META_BG: u32 = 0x10;
    pub(in super::super) const SIXTY_FOUR: u32 = 0x80;
    pub(in super::super) const CSUM_SEED: u32 = 0x2000;
    pub(in super::super) const CASEFOLD: u32 = 0x20000;
    /// FILETYPE, RECOVER, META_BG, EXTENTS, 64BIT, MMP, FLEX_BG, EA_INODE, CSUM_SEED, LARGEDIR, INLINE_DATA,
    /// ENCRYPT, CASEFOLD.
    pub(in super::super) const INCOMPAT_KNOWN: u32 = 0x3e7d6;

    pub(in super::super) const SPARSE_SUPER: u32 = 0x1;
    pub(in super::super) const BIGALLOC: u32 = 0x200;
    pub(in super::super) const METADATA_CSUM: u32 = 0x400;
    /// SPARSE_SUPER, LARGE_FILE, BTREE_DIR, HUGE_FILE, GDT_CSUM, DIR_NLINK, EXTRA_ISIZE, QUOTA, BIGALLOC,
    /// METADATA_CSUM, PROJECT, VERITY.
    pub(in super::super) const RO_COMPAT_WRITABLE: u32 = 0xa77f;
}

/// Flags of inodes.
pub(super) mod flag {
    pub(in super::super) const COMPRESSED: u32 = 0x4;
    pub(in super::super) const IMMUTABLE: u32 = 0x10;
    pub(in super::super) const APPEND: u32 = 0x20;
    pub(in super::super) const ENCRYPTED: u32 = 0x800;
    pub(in super::super) const JOURNALLED: u32 = 0x4000;
    pub(in super::super) const EXTENTS: u32 = 0x80000;
    pub(in super::super) const VERITY: u32 = 0x10_0000;
    pub(in super::super) const INLINE: u32 = 0x1000_0000;
}

/// An open ext file system.
#[derive(Debug)]
pub(super) struct Ext {
    pub(super) image: Image,
    pub(super) about: About,
    /// Bytes.
    pub(super) block_size: u64,
    /// In the file system, by its superblock.
    blocks: u64,
    first_block: u64,
    blocks_per_group: u64,
    inodes: u32,
    inodes_per_group: u32,
    inode_size: u64,
    descriptor_size: u64,
    compat: u32,
    pub(super) incompat: u32,
    ro_compat: u32,
    /// Groups whose backups exist when only two have them.
    backups: [u32; 2],
    first_meta_bg: u64,
    /// Start of all checksums, where there are any.
    seed: Option<u32>,
    /// Why nothing of it may be written, when nothing may.
    pub(super) unclean: Option<&'static str>,
    /// The block of descriptors that was read last, with its number.
    last_descriptors: Mutex<Option<(u64, Vec<u8>)>>,
}

/// What is needed of an inode.
#[derive(Debug)]
pub(super) struct Inode {
    pub(super) mode: u16,
    pub(super) flags: u32,
    pub(super) size: u64,
    /// The 60 bytes that hold block numbers, an extent tree or a short link.
    pub(super) block: [u8; 60],
    /// Start of the checksums of its blocks.
    pub(super) seed: Option<u32>,
    /// All of it.
    pub(super) raw: Vec<u8>,
}

impl Ext {
    /// The file system in `image`, when there is one.
    pub(super) fn open(image: &Image) -> Result<Option<Ext>, LayerError> {
        let sb = image.read_some(SUPERBLOCK, SUPERBLOCK_LEN)?;
        if sb.len() < SUPERBLOCK_LEN || u16_at(&sb, 56) != MAGIC {
            return Ok(None);
        }
        Ext::parse(image, &sb).map(Some)
    }

    fn parse(image: &Image, sb: &[u8]) -> Result<Ext, LayerError> {
        let old = u32_at(sb, 76) == 0;
        let (compat, incompat, ro_compat) =
            if old { (0, 0, 0) } else { (u32_at(sb, 92), u32_at(sb, 96), u32_at(sb, 100)) };
        let unknown = incompat & !feature::INCOMPAT_KNOWN;
        if unknown != 0 {
            return unsupported(format!("ext with the incompatible features {unknown:#x}"));
        }
        let csum = ro_compat & feature::METADATA_CSUM != 0;
        if csum && crc32c(!0, part(sb, 0, 0x3fc)) != u32_at(sb, 0x3fc) {
            return corrupt("the checksum of the ext superblock is wrong");
        }
        let shift = u32_at(sb, 24);
        if shift > 6 {
            return corrupt(format!("blocks of 2^{} bytes", u64::from(shift) + 10));
        }
        let block_size = 1024_u64 << shift;
        let wide = incompat & feature::SIXTY_FOUR != 0;
        let high = if wide { u64::from(u32_at(sb, 0x150)) << 32 } else { 0 };
        let descriptor_size = if wide { u64::from(u16_at(sb, 254)) } else { 32 };
        let inode_size = if old { 128 } else { u64::from(u16_at(sb, 88)) };
        let seed = csum.then(|| match incompat & feature::CSUM_SEED {
            0 => crc32c(!0, part(sb, 104, 16)),
            _ => u32_at(sb, 0x270),
        });
        let ext = Ext {
            image: image.clone(),
            about: about(sb, compat, incompat, ro_compat, block_size),
            block_size,
            blocks: high | u64::from(u32_at(sb, 4)),
            first_block: u32_at(sb, 20).into(),
            blocks_per_group: u32_at(sb, 32).into(),
            inodes: u32_at(sb, 0),
            inodes_per_group: u32_at(sb, 40),
            inode_size,
            descriptor_size,
            compat,
            incompat,
            ro_compat,
            backups: [u32_at(sb, 0x24c), u32_at(sb, 0x250)],
            first_meta_bg: u32_at(sb, 0x104).into(),
            seed,
            unclean: unclean(sb, incompat, ro_compat),
            last_descriptors: Mutex::new(None),
        };
        // One bitmap block covers a group: its blocks, or with bigalloc its clusters of 2^ratio blocks.
        let (in_bitmap, ratio) = match ro_compat & feature::BIGALLOC {
            0 => (ext.blocks_per_group, Some(0)),
            _ => (u32_at(sb, 36).into(), u32_at(sb, 28).checked_sub(shift).filter(|ratio| *ratio <= 20)),
        };
        let sound = ext.blocks_per_group > 0
            && in_bitmap <= 8 * block_size
            && ratio.is_some_and(|ratio| ext.blocks_per_group == in_bitmap << ratio)
            && ext.inodes_per_group > 0
            && (INODE_LEN as u64..=block_size).contains(&inode_size)
            && inode_size.is_power_of_two()
            && (32..=1024).contains(&descriptor_size)
            && descriptor_size.is_power_of_two()
            && ext.blocks > ext.first_block;
        if sound { Ok(ext) } else { corrupt("impossible values in the ext superblock") }
    }

    /// Bytes of one block.
    pub(super) fn block(&self, number: u64) -> Result<Vec<u8>, LayerError> {
        let at = self.byte_of(number)?;
        self.image.read_vec(at, usize::try_from(self.block_size).unwrap_or(0))
    }

    /// Where a block is, in bytes.
    pub(super) fn byte_of(&self, number: u64) -> Result<u64, LayerError> {
        if number >= self.blocks || number < self.first_block {
            return corrupt(format!("block {number} of {}", self.blocks));
        }
        // Cannot overflow: the block count has been compared with nothing yet, so it is checked.
        number
            .checked_mul(self.block_size)
            .ok_or_else(|| LayerError::Corrupt(format!("block {number} is beyond 2^64 bytes")))
    }

    /// The block that holds the descriptor of a group.
    fn descriptor_block(&self, group: u64) -> u64 {
        let per_block = self.block_size / self.descriptor_size;
        let meta = group / per_block;
        // Where clusters are larger than blocks of 1 KiB, block 0 is part of the first group though the
        // superblock is not in it.
        let superblock = SUPERBLOCK / self.block_size;
        if self.incompat & feature::META_BG == 0 || meta < self.first_meta_bg || meta == 0 {
            return superblock + 1 + meta;
        }
        let first = meta * per_block;
        let start = self.first_block.saturating_add(first.saturating_mul(self.blocks_per_group));
        start.saturating_add(u64::from(self.has_superblock(first)))
    }

    fn has_superblock(&self, group: u64) -> bool {
        if group == 0 {
            return true;
        }
        if self.compat & feature::SPARSE_SUPER2 != 0 {
            return self.backups.iter().any(|backup| u64::from(*backup) == group);
        }
        let power_of = |base: u64| {
            let mut rest = group;
            while rest.is_multiple_of(base) {
                rest /= base;
            }
            rest == 1
        };
        self.ro_compat & feature::SPARSE_SUPER == 0 || group == 1 || power_of(3) || power_of(5) || power_of(7)
    }

    /// Calls `with` for a block of descriptors. The last one is cached: a directory's inodes lie in few
    /// groups.
    fn descriptors<T>(&self, number: u64, with: impl FnOnce(&[u8]) -> T) -> Result<T, LayerError> {
        let mut last = self.last_descriptors.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, block)) = last.as_ref().filter(|(kept, _)| *kept == number) {
            return Ok(with(block));
        }
        let block = self.block(number)?;
        let answer = with(&block);
        *last = Some((number, block));
        Ok(answer)
    }

    pub(super) fn inode(&self, number: u64) -> Result<Inode, LayerError> {
        let number = u32::try_from(number).ok().filter(|number| (1..=self.inodes).contains(number));
        let Some(number) = number else { return corrupt("an inode's number is out of range") };
        let (group, index) = ((number - 1) / self.inodes_per_group, (number - 1) % self.inodes_per_group);
        let per_block = self.block_size / self.descriptor_size;
        let at = usize::try_from(u64::from(group) % per_block * self.descriptor_size).unwrap_or(0);
        let (low, high) = self.descriptors(self.descriptor_block(group.into()), |block| {
            let high = if self.descriptor_size >= 64 { u32_at(block, at + 0x28) } else { 0 };
            (u32_at(block, at + 8), high)
        })?;
        let inodes = self.byte_of(u64::from(high) << 32 | u64::from(low))?;
        let at = inodes.checked_add(u64::from(index) * self.inode_size);
        let at = at.ok_or_else(|| LayerError::Corrupt("an inode beyond 2^64 bytes".to_owned()))?;
        let raw = self.image.read_vec(at, usize::try_from(self.inode_size).unwrap_or(INODE_LEN))?;
        let seed = self.seed.map(|seed| {
            let seed = crc32c(seed, &number.to_le_bytes());
            crc32c(seed, part(&raw, 100, 4))
        });
        if let Some(seed) = seed {
            check_inode(&raw, seed, number)?;
        }
        let size = u64::from(u32_at(&raw, 108)) << 32 | u64::from(u32_at(&raw, 4));
        Ok(Inode { mode: u16_at(&raw, 0), flags: u32_at(&raw, 32), size, block: field(&raw, 40), seed, raw })
    }

    pub(super) fn inode_of(&self, number: u64, kind: NodeKind, what: &str) -> Result<Inode, LayerError> {
        let inode = self.inode(number)?;
        if NodeKind::of_mode(inode.mode) == kind {
            Ok(inode)
        } else {
            corrupt(format!("this is not a {what}"))
        }
    }
}

/// Why nothing may be written in place, by the superblock.
fn unclean(sb: &[u8], incompat: u32, ro_compat: u32) -> Option<&'static str> {
    const CLEAN: u16 = 1;
    const ERRORS: u16 = 2;
    if incompat & feature::RECOVER != 0 {
        return Some(
            "the journal of the ext file system has to be replayed first (it is mounted, or was not unmounted)",
        );
    }
    match u16_at(sb, 58) {
        state if state & ERRORS != 0 => Some("the ext file system has errors: run fsck on it first"),
        state if state & CLEAN == 0 => {
            Some("the ext file system is mounted or was not unmounted: run fsck on it first")
        }
        _ if ro_compat & !feature::RO_COMPAT_WRITABLE != 0 => {
            Some("the ext file system has features that forbid writing to it")
        }
        _ => None,
    }
}

fn about(sb: &[u8], compat: u32, incompat: u32, ro_compat: u32, block_size: u64) -> About {
    let journal = compat & feature::HAS_JOURNAL != 0;
    // The rule of blkid: ext4 is what ext3's driver would refuse.
    let new = incompat & !0x16 != 0 || ro_compat & !0x7 != 0;
    let format = match (new, journal) {
        (true, _) => "ext4",
        (false, true) => "ext3",
        (false, false) => "ext2",
    };
    let mut notes = vec![format!("blocks of {block_size}")];
    notes.extend(unclean(sb, incompat, ro_compat).map(str::to_owned));
    About {
        format,
        label: padded_text(part(sb, 120, 16)),
        uuid: uuid(part(sb, 104, 16)),
        compression: None,
        notes,
    }
}

/// Compares an inode with its checksum, of which small inodes have only half.
fn check_inode(raw: &[u8], seed: u32, number: u32) -> Result<(), LayerError> {
    const LOW: usize = 0x7c;
    const HIGH: usize = 0x82;
    let wide = raw.len() > INODE_LEN && u16_at(raw, INODE_LEN) >= 4;
    let mut crc = crc32c(seed, part(raw, 0, LOW));
    crc = crc32c(crc, &[0; 2]);
    let rest = LOW + 2;
    let (stored, mask) = if wide {
        crc = crc32c(crc, part(raw, rest, HIGH - rest));
        crc = crc32c(crc, &[0; 2]);
        crc = crc32c(crc, raw.get(HIGH + 2..).unwrap_or_default());
        (u32::from(u16_at(raw, HIGH)) << 16 | u32::from(u16_at(raw, LOW)), !0)
    } else {
        crc = crc32c(crc, raw.get(rest..).unwrap_or_default());
        (u16_at(raw, LOW).into(), 0xffff)
    };
    if crc & mask == stored { Ok(()) } else { corrupt(format!("the checksum of inode {number} is wrong")) }
}

/// CRC-32C without the final inversion, as ext4 counts it.
pub(super) fn crc32c(start: u32, bytes: &[u8]) -> u32 {
    static CRC: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_ISCSI);
    let mut digest = CRC.digest_with_initial(start.reverse_bits());
    digest.update(bytes);
    !digest.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_value_of_crc32c() {
        assert_eq!(!crc32c(!0, b"123456789"), 0xe306_9283);
    }
}
