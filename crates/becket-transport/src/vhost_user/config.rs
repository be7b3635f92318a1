//! What the virtio-blk device says of itself: features and configuration space.
//! It never reads what a driver says but the cache's mode, one byte.
//!
//! Source: Virtual I/O Device (VIRTIO) Version 1.3, 5.2 Block Device.

use becket_engine::Geometry;

/// Feature bits.
const SIZE_MAX: u64 = 1 << 1;
const SEG_MAX: u64 = 1 << 2;
const RO: u64 = 1 << 5;
const BLK_SIZE: u64 = 1 << 6;
pub(super) const FLUSH: u64 = 1 << 9;
const TOPOLOGY: u64 = 1 << 10;
pub(super) const CONFIG_WCE: u64 = 1 << 11;
const MQ: u64 = 1 << 12;
const DISCARD: u64 = 1 << 13;
const WRITE_ZEROES: u64 = 1 << 14;
const INDIRECT_DESC: u64 = 1 << 28;
pub(super) const EVENT_IDX: u64 = 1 << 29;
/// Of vhost-user: there are protocol features.
pub(super) const PROTOCOL: u64 = 1 << 30;
pub(super) const VERSION_1: u64 = 1 << 32;
pub(super) const RING_PACKED: u64 = 1 << 34;

/// Most ranges of memory that a request's data may have.
pub(super) const MOST_RANGES: u32 = 126;
/// Longest range, in bytes.
const LONGEST_RANGE: u32 = 4 << 20;
/// Most sectors of one discard or zeroing: whole file systems are discarded in few requests.
const MOST_SECTORS: u32 = 1 << 22;
/// Bytes of a sector, whatever the logical block.
pub(super) const SECTOR: u64 = 512;
/// Where the mode of the cache is.
pub(super) const WRITEBACK: u32 = 32;
/// Bytes of the space that mean something.
const SIZE: usize = 60;

/// The features of a device of so many queues.
pub(super) fn features(geometry: &Geometry) -> u64 {
    let always = SIZE_MAX | SEG_MAX | BLK_SIZE | FLUSH | TOPOLOGY | CONFIG_WCE | MQ;
    let ring = INDIRECT_DESC | EVENT_IDX | PROTOCOL | VERSION_1 | RING_PACKED;
    let optional =
        [(geometry.read_only, RO), (geometry.discard, DISCARD), (geometry.write_zeroes, WRITE_ZEROES)];
    optional.iter().filter(|(on, _)| *on).fold(always | ring, |features, (_, bit)| features | bit)
}

/// The configuration space of a device of `size` bytes.
pub(super) fn space(geometry: &Geometry, size: u64, queues: u16, writeback: bool) -> [u8; SIZE] {
    let mut space = [0; SIZE];
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(place) = space.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    let block = geometry.logical_block.max(512);
    let per_block = geometry.physical_block.max(block) / block;
    let blocks = |bytes: u32| bytes / block;
    put(0, &(size / SECTOR).to_le_bytes());
    put(8, &LONGEST_RANGE.to_le_bytes());
    put(12, &MOST_RANGES.to_le_bytes());
    put(20, &block.to_le_bytes());
    put(24, &[u8::try_from(per_block.ilog2()).unwrap_or(0), 0]);
    put(26, &u16::try_from(blocks(geometry.io_min)).unwrap_or(0).to_le_bytes());
    put(28, &blocks(geometry.io_opt).to_le_bytes());
    put(32, &[writeback.into()]);
    put(34, &queues.to_le_bytes());
    if geometry.discard {
        put(36, &MOST_SECTORS.to_le_bytes());
        put(40, &1u32.to_le_bytes());
        put(44, &(geometry.discard_granularity / 512).max(1).to_le_bytes());
    }
    if geometry.write_zeroes {
        put(48, &MOST_SECTORS.to_le_bytes());
        put(52, &1u32.to_le_bytes());
        put(56, &[1]);
    }
    space
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> Geometry {
        Geometry {
            size: 1 << 30,
            logical_block: 512,
            physical_block: 4096,
            io_min: 4096,
            io_opt: 65536,
            dma_align: 512,
            read_only: false,
            rotational: false,
            discard: true,
            discard_granularity: 4096,
            write_zeroes: true,
            max_io: 1 << 20,
        }
    }

    #[test]
    fn the_space_has_each_property_at_its_place() {
        let space = space(&geometry(), 1 << 30, 3, true);
        let word = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().unwrap());
        assert_eq!(u64::from_le_bytes(space[..8].try_into().unwrap()), 1 << 21);
        assert_eq!((word(8), word(12), word(20)), (LONGEST_RANGE, MOST_RANGES, 512));
        assert_eq!((space[24], space[26], word(28)), (3, 8, 128), "4 KiB, in blocks of 512 bytes");
        assert_eq!((space[32], space[34]), (1, 3));
        assert_eq!((word(36), word(40), word(44)), (MOST_SECTORS, 1, 8));
        assert_eq!((word(48), word(52), space[56]), (MOST_SECTORS, 1, 1));
    }

    #[test]
    fn only_what_the_image_can_do_is_offered() {
        let read_only = Geometry { read_only: true, discard: false, write_zeroes: false, ..geometry() };
        let (all, few) = (features(&geometry()), features(&read_only));
        assert_eq!(all & (RO | DISCARD | WRITE_ZEROES), DISCARD | WRITE_ZEROES);
        assert_eq!(few & (RO | DISCARD | WRITE_ZEROES), RO);
        assert_eq!(space(&read_only, 512, 1, true)[36..60], [0; 24]);
    }
}
