//! Doors for fuzzers: a front-end's messages and a driver's rings, from any bytes.
//! Nothing is judged here but that reading ends, without a panic.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use becket_engine::{Geometry, GuestMemory, GuestPart};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::chain::Chain;
use super::config::MOST_RANGES;
use super::message::{HEAD, Head, MOST_FDS, VringAddress, Wanted};
use super::request;
use super::ring::{Layout, Ring};
use super::session::{Rings, Session};

/// Bytes of the driver's memory.
const SIZE: usize = 1 << 16;

struct NoRings;

impl Rings for NoRings {
    fn stop(&mut self, _: usize) -> Option<u32> {
        None
    }

    fn device(&self) -> (u64, Geometry) {
        let geometry = Geometry {
            size: 1 << 20,
            logical_block: 512,
            physical_block: 4096,
            io_min: 512,
            io_opt: 0,
            dma_align: 512,
            read_only: false,
            rotational: false,
            discard: true,
            discard_granularity: 512,
            write_zeroes: true,
            max_io: 1 << 20,
        };
        (geometry.size, geometry)
    }
}

/// One message after another, each with as many descriptors as its first byte says. Whether all of them were
/// accepted; then another session agrees on the same.
pub fn messages(mut bytes: &[u8]) -> bool {
    let mut session = Session::new(2);
    while let Some((kind, rest)) = bytes.split_first() {
        let Some(head) = rest.first_chunk::<HEAD>().and_then(|head| Head::read(*head)) else { return false };
        let Some(payload) = rest[HEAD..].get(..head.size) else { return false };
        bytes = &rest[HEAD + head.size..];
        let fd = || match kind & 0x10 {
            0 => memfd_create("fuzz", MemfdFlags::CLOEXEC)
                .and_then(|file| ftruncate(&file, 1 << 16).map(|()| file)),
            _ => eventfd(0, EventfdFlags::CLOEXEC),
        };
        let count = usize::from(kind & 0xf).min(MOST_FDS);
        let Ok(fds) = (0..count).map(|_| fd()).collect::<Result<Vec<_>, _>>() else { return false };
        let wanted = Wanted::read(&head, payload);
        if session.take(&mut NoRings, &head, wanted, fds).is_err() {
            return false;
        }
        for vring in 0..3 {
            let _ = session.notes(vring);
            if let Some(ready) = session.ready(usize::from(vring)) {
                let (memory, vring) = (Arc::clone(ready.memory), ready.vring);
                let _ =
                    Ring::new(session.layout(), memory, (vring.count, ready.address), vring.base, true, None);
            }
        }
    }
    let agreed = session.messages();
    let Ok(fds) = agreed.fds.iter().map(|fd| fd.try_clone_to_owned()).collect() else { return false };
    let mut next = Session::new(2);
    let heard = next.hear_again(&mut NoRings, &agreed.bytes, fds);
    assert!(heard.is_ok() && next.messages().bytes == agreed.bytes, "{heard:?}");
    true
}

/// A driver's memory, which begins with the place of its tables, the size of the ring and where it begins.
/// Whether it kept to the rules.
pub fn rings(bytes: &[u8]) -> bool {
    let word = |at: usize| bytes.get(at..at + 2).map_or(0, |word| u16::from_le_bytes([word[0], word[1]]));
    let [descriptors, used, available] = [0, 2, 4].map(|at| u64::from(word(at)));
    let count = 1 << (word(6) % 8);
    let map = || -> Option<Arc<GuestMemory>> {
        let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).ok()?;
        ftruncate(&file, SIZE as u64).ok()?;
        rustix::io::pwrite(&file, bytes.get(..bytes.len().min(SIZE))?, 0).ok()?;
        let part = GuestPart { guest: 0, user: 0, len: SIZE as u64, offset: 0 };
        GuestMemory::map(&[(part, file.as_fd())]).ok().map(Arc::new)
    };
    let Some(memory) = map() else { return false };
    let address = VringAddress { descriptors, used, available };
    // Its notes are the driver's own memory here, so that those are any bytes, too.
    let notes = memory.area(1 << 15, 64 + 32 * usize::from(count), 8, true).filter(|_| word(8) & 1 == 1);
    let (layout, base) = match word(8) & 4 {
        0 => (Layout::Split, word(10).into()),
        _ => (Layout::Packed, u32::from(word(10)) | u32::from(word(12)) << 16),
    };
    let ring = Ring::new(layout, Arc::clone(&memory), (count, &address), base, word(8) & 2 == 2, notes);
    let Ok(mut ring) = ring else { return false };
    let mut chain = Chain::with_room(MOST_RANGES as usize + 2);
    for _ in 0..4 * usize::from(count) {
        match ring.take(&mut chain) {
            Ok(true) => {}
            Ok(false) => break,
            Err(_) => return false,
        }
        let head = chain.head;
        let Some((_, status)) = request::read(&memory, &mut chain, false) else { return false };
        if !memory.write(status, &[request::OK]) {
            return false;
        }
        let _ = request::put(&memory, &chain.writable, &[1; request::SERIAL]);
        ring.give(head, 1);
        ring.publish();
        ring.listen();
    }
    true
}
