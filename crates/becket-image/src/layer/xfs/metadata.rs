//! The superblock and the inodes of XFS.
//! It never uses a superblock or an inode whose checksum is wrong.

use std::fmt;

use crc::{CRC_32_ISCSI, Crc, Table};

use crate::bytes::{be16_at, be32_at, be64_at, field, padded_text, part, u8_at, u32_at, uuid};
use crate::image::Image;
use crate::layer::{About, LayerError, NodeKind, Time, corrupt, unsupported};

const MAGIC: &[u8] = b"XFSB";
/// Bytes of the superblock that are used.
const SUPERBLOCK: usize = 512;
/// Features that change what is read here and are understood: types in directories, sparse inodes, a second
/// UUID, times of 64 bits, counts of 64 bits, exchanged ranges, pointers to parents.
const KNOWN: u32 = 0xef;
const FTYPE: u32 = 0x1;
const NEEDS_REPAIR: u32 = 0x10;

/// An open XFS.
pub(super) struct Xfs {
    pub(super) image: Image,
    pub(super) about: About,
    /// Whether metadata have checksums (version 5).
    pub(super) summed: bool,
    /// Whether entries of directories have a type.
    pub(super) typed: bool,
    /// Whether names that differ in case only are the same.
    pub(super) folds: bool,
    /// Bytes of a block, and of a block of a directory.
    pub(super) block_size: u64,
    pub(super) dir_block: usize,
    pub(super) root: u64,
    ag_blocks: u64,
    ag_count: u64,
    /// Logarithms: blocks of a group rounded up, inodes of a block.
    ag_bits: u32,
    inode_bits: u32,
    inode_size: usize,
}

impl fmt::Debug for Xfs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Xfs").field("about", &self.about).finish_non_exhaustive()
    }
}

/// What is needed of an inode.
pub(super) struct Inode {
    pub(super) number: u64,
    pub(super) mode: u16,
    pub(super) owner: (u32, u32),
    pub(super) links: u32,
    pub(super) modified: Time,
    pub(super) size: u64,
    /// Whether its data lie on a device for real-time data.
    pub(super) realtime: bool,
    pub(super) data: Fork,
    pub(super) attributes: Option<Fork>,
}

/// A fork of an inode: what it keeps, and in which form.
pub(super) struct Fork {
    pub(super) form: u8,
    pub(super) extents: u64,
    pub(super) bytes: Vec<u8>,
}

/// Forms of a fork.
pub(super) mod form {
    pub(in super::super) const DEVICE: u8 = 0;
    pub(in super::super) const LOCAL: u8 = 1;
    pub(in super::super) const EXTENTS: u8 = 2;
    pub(in super::super) const BTREE: u8 = 3;
}

impl Xfs {
    /// The file system in `image`, when there is one.
    pub(super) fn open(image: &Image) -> Result<Option<Xfs>, LayerError> {
        let sb = image.read_some(0, SUPERBLOCK)?;
        if sb.len() < SUPERBLOCK || !sb.starts_with(MAGIC) {
            return Ok(None);
        }
        let version = be16_at(&sb, 100);
        let (mut incompat, mut typed) = (0, be32_at(&sb, 200) & 0x200 != 0);
        let summed = match version & 0xf {
            4 => false,
            5 => {
                let sector = usize::from(be16_at(&sb, 102));
                if !sector.is_power_of_two() || !(512..=32 << 10).contains(&sector) {
                    return corrupt(format!("an XFS with sectors of {sector} bytes"));
                }
                check(&image.read_vec(0, sector)?, 224, || "the XFS superblock".to_owned())?;
                incompat = be32_at(&sb, 216);
                typed = incompat & FTYPE != 0;
                true
            }
            other => return unsupported(format!("XFS of version {other}")),
        };
        if incompat & NEEDS_REPAIR != 0 {
            return unsupported("an XFS that has to be repaired: run xfs_repair on it first");
        }
        if incompat & !KNOWN != 0 {
            return unsupported(format!("XFS with the incompatible features {:#x}", incompat & !KNOWN));
        }
        Xfs::parse(image, &sb, summed, typed).map(Some)
    }

    fn parse(image: &Image, sb: &[u8], summed: bool, typed: bool) -> Result<Xfs, LayerError> {
        let block_size = u64::from(be32_at(sb, 4));
        let bits = |at| u32::from(u8_at(sb, at));
        let (ag_blocks, ag_count) = (u64::from(be32_at(sb, 84)), u64::from(be32_at(sb, 88)));
        let (ag_bits, inode_bits, dir_bits) = (bits(124), bits(123), bits(192));
        let inode_size = u64::from(be16_at(sb, 104));
        let sound = block_size.is_power_of_two()
            && (512..=64 << 10).contains(&block_size)
            && (256..=2048).contains(&inode_size)
            && inode_size.is_power_of_two()
            && inode_size << inode_bits.min(16) == block_size
            && ag_bits <= 31
            && (1..=1 << ag_bits).contains(&ag_blocks)
            && ag_count > 0
            && dir_bits <= 7
            && block_size << dir_bits <= 64 << 10;
        if !sound {
            return corrupt("impossible values in the XFS superblock");
        }
        let short = |bytes: u64| usize::try_from(bytes).unwrap_or(0);
        let kind = if summed { "version 5" } else { "version 4" };
        let about = About {
            format: "xfs",
            label: padded_text(part(sb, 108, 12)),
            uuid: uuid(part(sb, 32, 16)),
            compression: None,
            notes: vec![kind.to_owned(), format!("blocks of {block_size}")],
        };
        Ok(Xfs {
            image: image.clone(),
            about,
            summed,
            typed,
            folds: be16_at(sb, 100) & 0x4000 != 0,
            block_size,
            dir_block: short(block_size << dir_bits),
            root: be64_at(sb, 56),
            ag_blocks,
            ag_count,
            ag_bits,
            inode_bits,
            inode_size: short(inode_size),
        })
    }

    /// Where `count` blocks from block `number` on are, in bytes. The upper bits of a number are a group.
    pub(super) fn byte_of(&self, number: u64, count: u64) -> Result<u64, LayerError> {
        let (group, block) = (number >> self.ag_bits, number & ((1 << self.ag_bits) - 1));
        let end = block.checked_add(count);
        if group >= self.ag_count || end.is_none_or(|end| end > self.ag_blocks) {
            return corrupt(format!("block {block} of group {group}, where none is"));
        }
        // Below 2^32 groups of 2^31 blocks: the product fits, and then bytes may not.
        (group * self.ag_blocks + block)
            .checked_mul(self.block_size)
            .ok_or_else(|| LayerError::Corrupt("a block beyond 2^64 bytes".to_owned()))
    }

    /// The bytes of a block.
    pub(super) fn block(&self, number: u64) -> Result<Vec<u8>, LayerError> {
        self.image.read_vec(self.byte_of(number, 1)?, usize::try_from(self.block_size).unwrap_or(0))
    }

    /// Refuses metadata whose checksum, at byte `at`, is wrong, where there are checksums.
    pub(super) fn check(&self, bytes: &[u8], at: usize, what: &str) -> Result<(), LayerError> {
        if self.summed { check(bytes, at, || what.to_owned()) } else { Ok(()) }
    }

    pub(super) fn inode(&self, number: u64) -> Result<Inode, LayerError> {
        let index = number & ((1 << self.inode_bits) - 1);
        let at = self.byte_of(number >> self.inode_bits, 1)? + index * self.inode_size as u64;
        let raw = self.image.read_vec(at, self.inode_size)?;
        if !raw.starts_with(b"IN") {
            return corrupt(format!("inode {number} has no magic number"));
        }
        let version = u8_at(&raw, 4);
        if !(1..=3).contains(&version) || (version == 3) != self.summed {
            return corrupt(format!("inode {number} is of version {version}"));
        }
        self.check(&raw, 100, "an inode")?;
        if self.summed && be64_at(&raw, 152) != number {
            return corrupt(format!("inode {number} says that it is another one"));
        }
        let flags2 = if self.summed { be64_at(&raw, 120) } else { 0 };
        let wide = flags2 & 1 << 4 != 0;
        let (extents, attribute_extents) = match wide {
            true => (be64_at(&raw, 24), u64::from(be32_at(&raw, 76))),
            false => (u64::from(be32_at(&raw, 76)), u64::from(be16_at(&raw, 80))),
        };
        let area = raw.get(if version == 3 { 176 } else { 100 }..).unwrap_or_default();
        let split = usize::from(u8_at(&raw, 82)) * 8;
        if split > area.len() {
            return corrupt(format!("inode {number} has its attributes behind its end"));
        }
        let (data, rest) = area.split_at(if split == 0 { area.len() } else { split });
        let attributes = (split > 0).then(|| Fork {
            form: u8_at(&raw, 83),
            extents: attribute_extents,
            bytes: rest.to_vec(),
        });
        let links = if version == 1 { be16_at(&raw, 6).into() } else { be32_at(&raw, 16) };
        Ok(Inode {
            number,
            mode: be16_at(&raw, 2),
            owner: (be32_at(&raw, 8), be32_at(&raw, 12)),
            links,
            modified: time(field(&raw, 40), flags2 & 1 << 3 != 0),
            size: be64_at(&raw, 56),
            realtime: be16_at(&raw, 90) & 1 != 0,
            data: Fork { form: u8_at(&raw, 5), extents, bytes: data.to_vec() },
            attributes,
        })
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

/// A time: seconds and nanoseconds, or (`big`) nanoseconds from the first moment on that the others can tell.
fn time(raw: [u8; 8], big: bool) -> Time {
    const SECOND: u64 = 1_000_000_000;
    let number = u64::from_be_bytes(raw);
    if big {
        let seconds = (number / SECOND).cast_signed() - (1 << 31);
        let nanoseconds = u32::try_from(number % SECOND).unwrap_or(0);
        return Time { seconds, nanoseconds };
    }
    let seconds = be32_at(&raw, 0).cast_signed().into();
    Time { seconds, nanoseconds: be32_at(&raw, 4).min(999_999_999) }
}

/// Refuses bytes whose checksum at `at` is not that of all the others.
fn check(bytes: &[u8], at: usize, what: impl Fn() -> String) -> Result<(), LayerError> {
    static CRC: Crc<u32, Table<16>> = Crc::<u32, Table<16>>::new(&CRC_32_ISCSI);
    let mut sum = CRC.digest();
    sum.update(part(bytes, 0, at));
    sum.update(&[0; 4]);
    sum.update(bytes.get(at + 4..).unwrap_or_default());
    if sum.finalize() == u32_at(bytes, at) {
        return Ok(());
    }
    corrupt(format!("the checksum of {} is wrong", what()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_both_kinds_are_read() {
        let old = time([0xff, 0xff, 0xff, 0xff, 0, 0, 0, 7], false);
        assert_eq!(old, Time { seconds: -1, nanoseconds: 7 });
        let big = |number: u64| time(number.to_be_bytes(), true);
        assert_eq!(big(0), Time { seconds: -(1 << 31), nanoseconds: 0 });
        assert_eq!(big(((1_u64 << 31) + 5) * 1_000_000_000 + 9), Time { seconds: 5, nanoseconds: 9 });
    }
}
