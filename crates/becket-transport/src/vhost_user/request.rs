//! What a chain of descriptors asks of the block device.
//! Reads the header once, and the data never.
//!
//! Source: Virtual I/O Device (VIRTIO) Version 1.3, 5.2.6 Device Operation.

use becket_engine::{GuestMemory, GuestRange, Op};

use super::chain::Chain;
use super::config::SECTOR;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
const UNMAP: u32 = 1;

/// The last byte of a request.
pub(super) const OK: u8 = 0;
pub(super) const FAILED: u8 = 1;
pub(super) const UNSUPPORTED: u8 = 2;

/// Bytes of a header: type, priority, sector.
const HEADER: u32 = 16;
/// Bytes of a serial number.
pub(super) const SERIAL: usize = 20;

/// What a request wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Bytes in the ranges that are left of the chain, from this byte of the image on.
    Move { op: Op, offset: u64 },
    /// Something about a range of the image, and a flush after it if it is to be durable.
    Range { op: Op, offset: u64, len: u64, durable: bool },
    /// The serial number, into the writable ranges.
    Serial,
    /// Nothing: it ends at once, with that status.
    Ends(u8),
}

/// What a request wants, and where its status goes. Takes header and status away from the chain. `None` where
/// there is no room for a status, so the request cannot be answered.
pub(super) fn read(memory: &GuestMemory, chain: &mut Chain, durable: bool) -> Option<(Wanted, u64)> {
    let last = chain.writable.last_mut().filter(|last| last.len > 0)?;
    last.len -= 1;
    let status = last.address.checked_add(last.len.into())?;
    if last.len == 0 {
        chain.writable.pop();
    }
    let mut header = [0; HEADER as usize];
    if !take(memory, &mut chain.readable, &mut header) {
        return Some((Wanted::Ends(FAILED), status));
    }
    let word = u128::from_le_bytes(header);
    let (kind, sector) = (word as u32, (word >> 64) as u64);
    Some((wanted(memory, chain, (kind, sector), durable), status))
}

fn wanted(memory: &GuestMemory, chain: &mut Chain, (kind, sector): (u32, u64), durable: bool) -> Wanted {
    let whole = |ranges: &[GuestRange]| {
        let bytes = ranges.iter().map(|range| u64::from(range.len)).sum::<u64>();
        bytes > 0 && bytes.is_multiple_of(SECTOR)
    };
    let Some(offset) = sector.checked_mul(SECTOR) else { return Wanted::Ends(FAILED) };
    match kind {
        IN if whole(&chain.writable) && chain.readable.is_empty() => Wanted::Move { op: Op::Read, offset },
        OUT if whole(&chain.readable) && chain.writable.is_empty() => {
            Wanted::Move { op: Op::Write { durable }, offset }
        }
        IN | OUT => Wanted::Ends(FAILED),
        FLUSH => Wanted::Range { op: Op::Flush, offset: 0, len: 0, durable: false },
        GET_ID => Wanted::Serial,
        DISCARD | WRITE_ZEROES => {
            let mut range = [0; 16];
            if !take(memory, &mut chain.readable, &mut range) || !chain.readable.is_empty() {
                return Wanted::Ends(FAILED);
            }
            let word = u128::from_le_bytes(range);
            let (sector, sectors, flags) = (word as u64, (word >> 64) as u32, (word >> 96) as u32);
            let op = match (kind, flags) {
                (DISCARD, 0) => Op::Discard,
                (WRITE_ZEROES, 0 | UNMAP) => Op::WriteZeroes { keep_allocated: flags == 0 },
                _ => return Wanted::Ends(UNSUPPORTED),
            };
            match sector.checked_mul(SECTOR) {
                Some(offset) => Wanted::Range { op, offset, len: u64::from(sectors) * SECTOR, durable },
                None => Wanted::Ends(FAILED),
            }
        }
        _ => Wanted::Ends(UNSUPPORTED),
    }
}

/// Copies the first bytes of some ranges, and takes them away from there.
fn take(memory: &GuestMemory, ranges: &mut Vec<GuestRange>, into: &mut [u8]) -> bool {
    let (mut filled, mut gone) = (0, 0);
    for range in ranges.iter_mut() {
        let part = (into.len() - filled).min(range.len as usize);
        if !memory.read(range.address, &mut into[filled..filled + part]) {
            return false;
        }
        filled += part;
        range.len -= part as u32;
        range.address += part as u64;
        if range.len > 0 || filled == into.len() {
            gone += usize::from(range.len == 0);
            break;
        }
        gone += 1;
    }
    ranges.drain(..gone);
    filled == into.len()
}

/// Copies bytes to the first of some ranges; the number that had room.
pub(super) fn put(memory: &GuestMemory, ranges: &[GuestRange], bytes: &[u8]) -> usize {
    let mut done = 0;
    for range in ranges {
        let part = (bytes.len() - done).min(range.len as usize);
        if !memory.write(range.address, &bytes[done..done + part]) {
            break;
        }
        done += part;
    }
    done
}

#[cfg(test)]
mod tests {
    use becket_engine::GuestPart;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn memory(bytes: &[u8]) -> GuestMemory {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 1 << 16).unwrap();
        rustix::io::pwrite(&file, bytes, 0).unwrap();
        GuestMemory::map(&[(GuestPart { guest: 0, user: 0, len: 1 << 16, offset: 0 }, &file)]).unwrap()
    }

    fn chain(readable: &[(u64, u32)], writable: &[(u64, u32)]) -> Chain {
        let mut chain = Chain::with_room(8);
        let range = |(address, len): &(u64, u32)| GuestRange { address: *address, len: *len };
        chain.readable.extend(readable.iter().map(range));
        chain.writable.extend(writable.iter().map(range));
        chain
    }

    fn header(kind: u32, sector: u64) -> Vec<u8> {
        [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
    }

    #[test]
    fn a_read_is_its_data_without_header_and_status() {
        let memory = memory(&header(IN, 5));
        let mut usual = chain(&[(0, 16)], &[(4096, 4096), (100, 1)]);
        let op = Op::Read;
        assert_eq!(read(&memory, &mut usual, false), Some((Wanted::Move { op, offset: 2560 }, 100)));
        assert_eq!(usual.writable, [GuestRange { address: 4096, len: 4096 }]);
        // Any layout: the header in pieces, the status behind the data.
        let mut odd = chain(&[(0, 3), (3, 13)], &[(4096, 100), (8192, 413)]);
        assert_eq!(read(&memory, &mut odd, false), Some((Wanted::Move { op, offset: 2560 }, 8604)));
        assert_eq!(odd.writable[1].len, 412);
        assert!(odd.readable.is_empty());
    }

    #[test]
    fn a_write_s_data_may_lie_behind_its_header() {
        let memory = memory(&header(OUT, 0));
        let mut one = chain(&[(0, 16 + 512)], &[(4096, 1)]);
        let op = Op::Write { durable: true };
        assert_eq!(read(&memory, &mut one, true), Some((Wanted::Move { op, offset: 0 }, 4096)));
        assert_eq!(one.readable, [GuestRange { address: 16, len: 512 }]);
    }

    #[test]
    fn ranges_to_discard_and_to_zero_are_read() {
        let range = |sector: u64, sectors: u32, flags: u32| {
            [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
        };
        let ask = |kind, bytes: Vec<u8>| {
            let memory = memory(&[header(kind, 0), bytes].concat());
            read(&memory, &mut chain(&[(0, 16), (16, 16)], &[(4096, 1)]), false).unwrap().0
        };
        let wanted = |op| Wanted::Range { op, offset: 1024, len: 4096, durable: false };
        assert_eq!(ask(DISCARD, range(2, 8, 0)), wanted(Op::Discard));
        assert_eq!(ask(WRITE_ZEROES, range(2, 8, 1)), wanted(Op::WriteZeroes { keep_allocated: false }));
        assert_eq!(ask(WRITE_ZEROES, range(2, 8, 0)), wanted(Op::WriteZeroes { keep_allocated: true }));
        assert_eq!(ask(DISCARD, range(2, 8, 1)), Wanted::Ends(UNSUPPORTED));
        assert_eq!(ask(DISCARD, range(u64::MAX, 8, 0)), Wanted::Ends(FAILED));
    }

    #[test]
    fn what_changes_bytes_is_durable_where_a_driver_does_not_flush() {
        for (kind, is_durable) in [(DISCARD, true), (WRITE_ZEROES, true), (FLUSH, false)] {
            let range = [&2u64.to_le_bytes()[..], &8u32.to_le_bytes(), &[0; 4]].concat();
            let memory = memory(&[header(kind, 0), range].concat());
            let asked = read(&memory, &mut chain(&[(0, 16), (16, 16)], &[(4096, 1)]), true).unwrap().0;
            assert!(matches!(asked, Wanted::Range { durable, .. } if durable == is_durable), "{asked:?}");
        }
    }

    #[test]
    fn what_makes_no_sense_fails_and_never_moves_a_byte() {
        let memory = memory(&header(IN, u64::MAX));
        let ask = |mut chain: Chain| read(&memory, &mut chain, false).map(|(wanted, _)| wanted);
        assert_eq!(ask(chain(&[(0, 16)], &[(0, 512), (600, 1)])), Some(Wanted::Ends(FAILED)), "overflow");
        assert_eq!(ask(chain(&[(0, 15)], &[(600, 1)])), Some(Wanted::Ends(FAILED)), "half a header");
        assert_eq!(ask(chain(&[(1 << 20, 16)], &[(600, 1)])), Some(Wanted::Ends(FAILED)), "outside");
        assert_eq!(ask(chain(&[(0, 16)], &[])), None, "no place for a status");
        assert_eq!(ask(chain(&[(0, 16)], &[(1, 0)])), None);
        let odd = super::tests::memory(&header(IN, 0));
        let mut not_whole = chain(&[(0, 16)], &[(0, 511), (600, 1)]);
        assert_eq!(read(&odd, &mut not_whole, false).unwrap().0, Wanted::Ends(FAILED));
        let unknown = super::tests::memory(&header(99, 0));
        let mut any = chain(&[(0, 16)], &[(600, 1)]);
        assert_eq!(read(&unknown, &mut any, false).unwrap().0, Wanted::Ends(UNSUPPORTED));
    }
}
