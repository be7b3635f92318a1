//! From what a file system says of a file's extents to a map.
//! It never believes an extent that is not plain, and never more of them than a map should have.

use std::io;

use becket_uapi::extents::{FIEMAP_EXTENT_LAST, FIEMAP_EXTENT_MERGED, FIEMAP_EXTENT_UNWRITTEN, FileExtent};

use crate::{Extent, Map, Place};

/// More extents than this cost more than they bring: a request would be cut into many.
const MOST: usize = 4096;
/// What an extent may be and still lie on the device byte by byte.
const PLAIN: u32 = FIEMAP_EXTENT_LAST | FIEMAP_EXTENT_MERGED;

/// The device that extents lie on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    /// Its index in the map.
    pub(super) disk: u32,
    /// Its length in bytes.
    pub(super) size: u64,
    /// Its logical block size in bytes.
    pub(super) unit: u64,
}

/// The map of `len` bytes from byte `offset` of a file on. Holes, and what was allocated but never written, stay with
/// the file; `ask` brings the first extents of a range.
pub(super) fn map(
    room: &Room,
    offset: u64,
    len: u64,
    mut ask: impl FnMut(u64, u64) -> io::Result<Vec<FileExtent>>,
) -> Result<Map, String> {
    let end = offset.checked_add(len).ok_or("it is too long")?;
    let mut pieces = Vec::new();
    let mut at = offset;
    'file: while at < end {
        let found = ask(at, end - at).map_err(|error| format!("its extents are not told: {error}"))?;
        if found.is_empty() {
            break;
        }
        for extent in found {
            if extent.logical >= end {
                break 'file;
            }
            let until = check(room, &extent)?.min(end);
            let from = extent.logical.max(offset);
            if from < at || until <= from {
                return Err("its extents overlap".to_owned());
            }
            if from > at {
                pieces.push(piece(offset, at, from, Place::Data { file: 0, offset: at }));
            }
            let place = match extent.flags & FIEMAP_EXTENT_UNWRITTEN {
                0 => Place::Data { file: room.disk, offset: extent.physical + (from - extent.logical) },
                _ => Place::Data { file: 0, offset: from },
            };
            pieces.push(piece(offset, from, until, place));
            at = until;
            if extent.flags & FIEMAP_EXTENT_LAST != 0 {
                break 'file;
            }
        }
        if pieces.len() > 4 * MOST {
            return Err("it is in too many pieces".to_owned());
        }
    }
    if at < end {
        pieces.push(piece(offset, at, end, Place::Data { file: 0, offset: at }));
    }
    let map = Map::from_extents(pieces).map_err(|error| format!("its extents make no sense: {error}"))?;
    if map.extents().len() > MOST {
        return Err(format!("it is in {} pieces", map.extents().len()));
    }
    let on_disk = |extent: &Extent| matches!(extent.place, Place::Data { file, .. } if file == room.disk);
    if map.extents().iter().any(on_disk) { Ok(map) } else { Err("nothing of it was ever written".to_owned()) }
}

fn piece(origin: u64, from: u64, until: u64, place: Place) -> Extent {
    Extent { start: from - origin, len: until - from, place }
}

/// Where a plain extent ends in its file.
fn check(room: &Room, extent: &FileExtent) -> Result<u64, String> {
    let strange = extent.flags & !(PLAIN | FIEMAP_EXTENT_UNWRITTEN);
    if strange != 0 {
        return Err(format!("an extent of it is shared, encoded or not in place (flags {strange:#x})"));
    }
    let aligned = (extent.logical | extent.physical | extent.length) & (room.unit.max(1) - 1) == 0;
    let on_disk = extent.physical.checked_add(extent.length).is_some_and(|end| end <= room.size);
    match extent.logical.checked_add(extent.length) {
        Some(end) if aligned && on_disk && extent.length > 0 => Ok(end),
        _ => Err("an extent of it lies where none can".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROOM: Room = Room { disk: 1, size: 1 << 40, unit: 512 };

    fn extent(logical: u64, physical: u64, length: u64, flags: u32) -> FileExtent {
        let mut extent = FileExtent::default();
        (extent.logical, extent.physical, extent.length, extent.flags) = (logical, physical, length, flags);
        extent
    }

    /// Answers as the kernel does, a few extents at a time.
    fn kernel(all: &[FileExtent], at_once: usize) -> impl FnMut(u64, u64) -> io::Result<Vec<FileExtent>> {
        move |start, len| {
            let overlaps = |one: &&FileExtent| one.logical + one.length > start && one.logical < start + len;
            Ok(all.iter().filter(overlaps).take(at_once).copied().collect())
        }
    }

    fn places(map: &Map) -> Vec<(u64, u64, u32, u64)> {
        let place = |extent: &Extent| match extent.place {
            Place::Data { file, offset } => (extent.start, extent.len, file, offset),
            other => panic!("{other:?}"),
        };
        map.extents().iter().map(place).collect()
    }

    #[test]
    fn holes_and_what_was_never_written_stay_with_the_file() {
        let all = [
            extent(0, 1 << 20, 8192, 0),
            extent(16384, 2 << 20, 4096, FIEMAP_EXTENT_UNWRITTEN),
            extent(20480, 3 << 20, 8192, FIEMAP_EXTENT_MERGED | FIEMAP_EXTENT_LAST),
        ];
        for at_once in [1, 2, 128] {
            let map = map(&ROOM, 4096, 28672, kernel(&all, at_once)).unwrap();
            let wanted = [
                (0, 4096, 1, (1 << 20) + 4096),
                (4096, 12288, 0, 8192),
                (16384, 8192, 1, 3 << 20),
                (24576, 4096, 0, 28672),
            ];
            assert_eq!(places(&map), wanted);
        }
    }

    #[test]
    fn what_is_not_plain_is_refused() {
        // FIEMAP_EXTENT_UNKNOWN, DELALLOC, ENCODED, DATA_ENCRYPTED, NOT_ALIGNED, DATA_INLINE, DATA_TAIL, SHARED, and
        // one that is not invented yet.
        for flag in [0x2, 0x4, 0x8, 0x80, 0x100, 0x200, 0x400, 0x2000, 0x8000_0000] {
            let all = [extent(0, 1 << 20, 4096, 0), extent(4096, 2 << 20, 4096, flag)];
            let error = map(&ROOM, 0, 8192, kernel(&all, 9)).unwrap_err();
            assert!(error.contains("not in place"), "{flag:#x}: {error}");
        }
        for odd in [
            extent(0, 256, 4096, 0),
            extent(0, 4096, 0, 0),
            extent(0, ROOM.size - 512, 1024, 0),
            extent(0, u64::MAX - 511, 512, 0),
            extent(100, 4096, 4096, 0),
        ] {
            assert!(map(&ROOM, 0, 4096, |_, _| Ok(vec![odd])).is_err(), "{odd:?}");
        }
        let twice = [extent(0, 1 << 20, 8192, 0), extent(4096, 2 << 20, 8192, 0)];
        assert!(map(&ROOM, 0, 8192, |_, _| Ok(twice.to_vec())).is_err());
    }

    #[test]
    fn an_empty_or_shattered_file_is_refused() {
        assert!(map(&ROOM, 0, 4096, |_, _| Ok(Vec::new())).unwrap_err().contains("written"));
        let all: Vec<_> = (0..5000).map(|n| extent(n * 4096, (6000 - n) * 8192, 4096, 0)).collect();
        assert!(map(&ROOM, 0, 5000 * 4096, kernel(&all, 128)).unwrap_err().contains("5000 pieces"));
    }

    #[test]
    fn a_kernel_that_repeats_itself_does_not_hold_us_up() {
        let first = extent(0, 1 << 20, 4096, 0);
        assert!(map(&ROOM, 0, 1 << 30, |_, _| Ok(vec![first])).is_err());
    }

    proptest! {
        /// Whatever is answered: no panic, and a map of the right length or none.
        #[test]
        fn any_answer_is_survived(
            answer in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>(), 0_u32..4), 0..20),
            len in 1_u64..1 << 40,
        ) {
            let mut calls = 0;
            let made = map(&ROOM, 0, len, |_, _| {
                calls += 1;
                if calls > 3 { return Ok(Vec::new()) }
                Ok(answer.iter().map(|(a, b, c, d)| extent(*a, *b, *c, *d & 1)).collect())
            });
            if let Ok(map) = made {
                prop_assert_eq!(map.len(), len);
            }
        }

        /// Every byte of the map is where the extents say it is.
        #[test]
        fn every_byte_is_where_it_was_said_to_be(
            blocks in prop::collection::vec(prop::option::of((0_u64..1000, any::<bool>())), 1..60),
            skip in 0_u64..3,
            at_once in 1_usize..9,
        ) {
            let all: Vec<_> = blocks.iter().enumerate().filter_map(|(n, block)| {
                let flags = |unwritten| if unwritten { FIEMAP_EXTENT_UNWRITTEN } else { 0 };
                block.map(|(at, unwritten)| extent(n as u64 * 4096, at * 4096, 4096, flags(unwritten)))
            }).collect();
            let total = blocks.len() as u64 * 4096;
            let offset = (skip * 4096).min(total - 4096);
            let Ok(map) = map(&ROOM, offset, total - offset, kernel(&all, at_once)) else {
                let first = usize::try_from(offset / 4096).unwrap();
                prop_assert!(blocks[first..].iter().all(|block| block.is_none_or(|(_, unwritten)| unwritten)));
                return Ok(());
            };
            for (n, block) in blocks.iter().enumerate().skip(usize::try_from(offset / 4096).unwrap()) {
                let at = n as u64 * 4096 + 512;
                let wanted = match block {
                    Some((physical, false)) => Place::Data { file: 1, offset: physical * 4096 + 512 },
                    _ => Place::Data { file: 0, offset: at },
                };
                prop_assert_eq!(map.lookup(at - offset).unwrap().place, wanted);
            }
        }
    }
}
