//! What a request needs first and next, entry by entry, on a ring of its own.

use std::{fs::File, os::fd::AsFd, sync::Arc};

use becket_image::{
    Alignment, Extent, Facts, FileKind, FileSource, Grow, Map, Place, Source, Wanted,
    encoded::{Block, Encoded},
};

use super::*;
use crate::Request;
use crate::Serving;
use crate::core::memory_files::{PIECE, zeroes};
use crate::core::{Memory, Parts};
use crate::decode::{Decoding, Frames, Key, Note, unheard};
use crate::ring::Ring;
use crate::slot::Slot;

const UNIT: u64 = 64 << 10;

/// Units 0 and 1 have their places, the wrong way round.
#[derive(Debug)]
struct Double;

impl Grow for Double {
    fn unit(&self) -> u64 {
        UNIT
    }
    fn placed(&mut self, tell: &mut dyn FnMut(u64, u64)) -> std::io::Result<()> {
        tell(0, 8 * UNIT);
        tell(1, 7 * UNIT);
        Ok(())
    }
    fn place(&mut self, _: &[Wanted]) -> std::io::Result<Vec<u64>> {
        Err(std::io::ErrorKind::StorageFull.into())
    }
    fn has_lost(&self) -> bool {
        false
    }
    fn close(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A file that is read and written past the page cache, as far as anybody asks.
fn file() -> Source {
    let facts = Facts {
        direct: Some(Alignment { memory: 512, offset: 512 }),
        nowait: true,
        ..Facts::unasked(FileKind::Regular, 16 * UNIT, true)
    };
    let open = || tempfile::tempfile().unwrap().into();
    FileSource::of(open(), Some(open()), facts).into()
}

/// A queue whose requests have registered pages; its port's descriptor never says anything.
fn core(ring: &mut Ring, serving: Serving) -> Core {
    let descriptor = File::open("/dev/null").unwrap();
    let parts = Parts {
        descriptor: descriptor.as_fd(),
        tether: None,
        bell: None,
        guest: None,
        depth: 4,
        number: 0,
        serving: &Arc::new(serving),
        memory: Memory::Registered,
        batch: None,
        stats: &Arc::default(),
        mailbox: &unheard(),
    };
    Core::new(ring, 0, &parts).unwrap()
}

/// What a request needs first.
fn first(core: &mut Core, tag: u16, op: Op, offset: u64, len: u64) -> Step {
    let request = Request { op, offset, len, data: Data::Registered };
    core.slab[usize::from(tag)] = Slot::begin(request, 0);
    core.next_operation(tag).unwrap()
}

/// An entry's bytes.
fn bytes(entry: &squeue::Entry) -> String {
    // All that the crate shows of it, and what it does not show.
    let words = crate::ring::words_of(entry);
    format!("{words:x?}")
}

/// The transfer of `len` bytes between `offset` of a file and the pages of `tag`, from their byte `done` on.
fn straight_to(core: &Core, tag: u16, way: Transfer, done: u64) -> String {
    bytes(&Transfer { address: done, buffer: Some(core.registered_index(tag)), ..way }.entry())
}

fn mixed() -> Map {
    let extent = |start, place| Extent { start, len: UNIT, place };
    let data = Place::Data { source: 0, offset: 3 * UNIT };
    let places = [Place::Zero, Place::Zero, data, Place::Zero];
    Map::from_extents((0..).zip(places).map(|(n, place)| extent(n * UNIT, place)).collect()).unwrap()
}

#[test]
fn what_has_its_place_in_an_image_that_grows_is_neither_copied_nor_waited_for() {
    let mut ring = Ring::new(0).unwrap();
    let serving = Serving::new(mixed(), vec![file()], false, 1).with_unit(512);
    let mut core = core(&mut ring, serving.growing_by(Box::new(Double), Box::new(())).unwrap());
    let direct = core.slots + 1;
    for (op, write) in [(Op::Read, false), (Op::Write { durable: false }, true)] {
        // A part of unit 0, all of unit 1, and what is left of 0 when both are asked for at once.
        for (offset, len, place, moved) in
            [(4096, 512, 8 * UNIT + 4096, 512), (UNIT, UNIT, 7 * UNIT, UNIT), (0, 2 * UNIT, 8 * UNIT, UNIT)]
        {
            let Step::Operate(entry) = first(&mut core, 1, op, offset, len) else {
                panic!("{op:?} {offset}")
            };
            let slot = &core.slab[1];
            assert!(slot.file.is_direct() && slot.way == Way::Free);
            let len = moved as u32;
            let way = Transfer { write, target: direct, offset: place, len, ..Transfer::default() };
            assert_eq!(bytes(&entry), straight_to(&core, 1, way, 0), "{op:?} {offset}");
        }
        assert_eq!(core.in_flight, 0, "nobody is asked for anything");
    }
    // The second part of a request comes from another place, to where the first ended.
    core.slab[1].done = UNIT;
    let Step::Operate(entry) = core.next_operation(1).unwrap() else { panic!() };
    assert!(core.slab[1].file.is_direct());
    let len = UNIT as u32;
    let way = Transfer { write: true, target: direct, offset: 7 * UNIT, len, ..Transfer::default() };
    assert_eq!(bytes(&entry), straight_to(&core, 1, way, UNIT));
    // What has no place is read where it is, and written only once it has one.
    assert!(matches!(first(&mut core, 2, Op::Read, 2 * UNIT, 4096), Step::Operate(_)));
    assert!(matches!(first(&mut core, 2, Op::Write { durable: false }, 2 * UNIT, 4096), Step::Waits));
    assert_eq!(core.in_flight, 1);
}

#[test]
fn holes_are_read_from_a_file_of_zeroes() {
    let mut ring = Ring::new(0).unwrap();
    let mut core = core(&mut ring, Serving::new(mixed(), vec![file()], true, 1));
    let target = ring.zeroes.unwrap();
    let Step::Deliver(entry) = first(&mut core, 3, Op::Read, 4096, 4 * UNIT - 4096) else { panic!() };
    let hole = 2 * UNIT - 4096;
    let way = Transfer { target, len: hole as u32, ..Transfer::default() };
    assert_eq!(bytes(&entry), straight_to(&core, 3, way, 0));
    core.slab[3].absorb(hole as i32).unwrap();
    assert!(matches!(core.next_operation(3), Ok(Step::Operate(_))), "and what is behind it from its file");
    core.slab[3].absorb(UNIT as i32).unwrap();
    let Ok(Step::Deliver(entry)) = core.next_operation(3) else { panic!() };
    let way = Transfer { target, len: UNIT as u32, ..Transfer::default() };
    assert_eq!(bytes(&entry), straight_to(&core, 3, way, hole + UNIT));
    // The next queue has the same.
    let other = zeroes(&mut ring).unwrap();
    assert_eq!(other, target);
}

#[test]
fn zeroes_are_read_without_a_thread() {
    let mut ring = Ring::new(0).unwrap();
    let target = zeroes(&mut ring).unwrap();
    let mut pages = vec![7_u8; 1 << 20];
    let (address, len) = (pages.as_mut_ptr() as u64, pages.len() as u32);
    let offset = MAX_OPERATION - u64::from(len);
    ring.push(&Transfer { target, offset, len, address, ..Transfer::default() }.entry()).unwrap();
    assert_eq!((ring.wait().unwrap(), ring.taken(0).result), (1, 1 << 20));
    assert!(pages.iter().all(|byte| *byte == 0));
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(entry.unwrap().path().join("comm")).unwrap_or_default()
    };
    // Those of other tests' rings have other numbers.
    let own = format!("iou-wrk-{}", rustix::thread::gettid());
    assert!(threads.map(name).all(|name| !name.starts_with(&own)));
}

#[test]
fn decoded_bytes_come_from_a_file_of_memory_piece_by_piece() {
    let mut ring = Ring::new(0).unwrap();
    let (len, input_len) = (160 << 10, 1000);
    let block = Block { start: 0, len, input: 0, input_len, skip: 0, yields: len };
    let below = Map::contiguous(0, 0, 4096);
    let layer = Encoded::new(becket_image::codec::Codec::Lz4, below, vec![block]).unwrap();
    let place = Place::Encoded { layer: 0, offset: 0 };
    let map = Map::from_extents(vec![Extent { start: 0, len: len.into(), place }]).unwrap();
    let decoding = Decoding::start(1, 1 << 20).unwrap();
    let serving = Serving::new(map, vec![file()], true, 1).decoded_by(&decoding, vec![layer]).unwrap();
    let key: Key = serving.layers().unwrap().key(0, 0);
    let mut core = core(&mut ring, serving);
    let mut frame = Frames::new(1 << 20).take(len as usize).ok().unwrap();
    (0..).zip(frame.bytes()).for_each(|(at, byte): (usize, &mut u8)| *byte = (at / 512 * 7) as u8);
    let wanted = frame.bytes().to_vec();
    let block = Arc::new(frame.filled(0, len as usize));

    let (from, asked) = (4096, 2 * PIECE as u64 + 512);
    assert!(matches!(first(&mut core, 2, Op::Read, from, asked), Step::Waits));
    let (_, slot) = core.memory_files.as_ref().unwrap().decoded.as_ref().unwrap();
    let target = *slot;
    let mut done = 0;
    for piece in [PIECE as u64, PIECE as u64, 512] {
        core.slab[2].way = Way::Waiting;
        let in_flight = core.in_flight;
        core.note_came(&mut ring, 2, Note::Block { key, result: Ok(Arc::clone(&block)) });
        assert_eq!(core.in_flight, in_flight, "the word has come, and the operation is begun");
        let at = (from + done) as usize;
        let staged = core.memory_files.as_mut().unwrap().buffer(2)[..piece as usize].to_vec();
        assert!(staged == wanted[at..at + piece as usize], "from {at}");
        // Once more, to see which it is.
        core.slab[2].staged = piece;
        let Ok(Step::Deliver(entry)) = core.next_operation(2) else { panic!() };
        let way = Transfer { target, offset: 2 * PIECE as u64, len: piece as u32, ..Transfer::default() };
        assert_eq!(bytes(&entry), straight_to(&core, 2, way, done));
        core.slab[2].absorb(piece as i32).unwrap();
        done += piece;
    }
    assert!(matches!(core.next_operation(2), Ok(Step::Whole)));
}
