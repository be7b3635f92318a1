//! Which request sees which configuration, step by step on a ring of its own.

use std::{
    fs::File,
    io::Write as _,
    os::fd::AsFd,
    os::unix::fs::FileExt,
    sync::mpsc::{Receiver, sync_channel},
};

use becket_image::{DirectIo, Extent, Facts, FileKind, FileSource, Map, Place};
use rustix::io::Errno;

use super::*;
use crate::{
    Data, Memory, Op, Request,
    core::Parts,
    user_data::{Source, source_of},
};

const PAGE: u64 = 4096;
const WRITE: Op = Op::Write { durable: false };

/// An image of two pages, each of which is an extent of its own and lies in the other's place.
struct Image(File);

impl Image {
    fn new(byte: u8) -> Image {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[byte; 2 * PAGE as usize]).unwrap();
        Image(file)
    }

    fn map() -> Map {
        let page = |at| Extent { start: at, len: PAGE, place: Place::Data { source: 0, offset: PAGE - at } };
        Map::from_extents(vec![page(0), page(PAGE)]).unwrap()
    }

    fn serving(&self, read_only: bool) -> Arc<Serving> {
        let facts = Facts { nowait: true, ..Facts::unasked(FileKind::Regular, 2 * PAGE, true) };
        let file = FileSource { buffered: self.0.try_clone().unwrap().into(), direct: None, facts };
        Arc::new(Serving::new(Image::map(), vec![file.into()], read_only, 1))
    }

    fn holds(&self, byte: u8) -> bool {
        let mut bytes = [0; 2 * PAGE as usize];
        self.0.read_exact_at(&mut bytes, 0).unwrap();
        bytes == [byte; 2 * PAGE as usize]
    }
}

struct Bench {
    core: Core,
    ring: Ring,
}

impl Bench {
    fn new(serving: &Arc<Serving>) -> Bench {
        let (port, _writer) = rustix::pipe::pipe().unwrap();
        let parts = Parts {
            descriptor: port.as_fd(),
            tether: None,
            mailbox: &crate::decode::unheard(),
            depth: 4,
            number: 0,
            serving,
            memory: Memory::Buffers(2 * PAGE as usize),
            batch: None,
            stats: &Arc::default(),
        };
        let mut ring = Ring::new(0).unwrap();
        let core = Core::new(&mut ring, 0, &parts).unwrap();
        Bench { core, ring }
    }

    /// Begins to fill the image.
    fn fill(&mut self, tag: u16, byte: u8) {
        self.core.buffer(tag).fill(byte);
        self.begin(tag, WRITE);
    }

    fn begin(&mut self, tag: u16, op: Op) {
        let request = Request { op, offset: 0, len: 2 * PAGE, data: Data::Buffer };
        self.core.begin(&mut self.ring, tag, request);
    }

    fn hold(&mut self) -> Receiver<bool> {
        let (drained, is_drained) = sync_channel(1);
        self.core.hold(drained);
        is_drained
    }

    /// Turns until these have finished, and returns what came of them.
    fn await_all(&mut self, tags: &[u16]) -> Vec<Result<u64, Errno>> {
        let mut results = std::collections::BTreeMap::new();
        while !tags.iter().all(|tag| results.contains_key(tag)) {
            if !self.core.has_finished() {
                for index in 0..self.ring.wait().unwrap() {
                    let completion = self.ring.taken(index);
                    let (_, Source::Serving { tag }) = source_of(completion.user_data) else {
                        unreachable!()
                    };
                    self.core.operated(&mut self.ring, tag, completion.result);
                }
            }
            let finished = self.core.take_finished();
            for (tag, result) in &finished {
                assert_eq!(results.insert(*tag, *result), None, "tag {tag} finishes once");
            }
            self.core.give_list_back(finished);
            self.core.turn_ended(false);
        }
        tags.iter().map(|tag| results[tag]).collect()
    }
}

#[test]
fn what_has_begun_ends_in_the_old_image_and_what_comes_later_begins_in_the_new_one() {
    let (old, new) = (Image::new(b'o'), Image::new(b'n'));
    let serving = old.serving(false);
    let mut bench = Bench::new(&serving);
    bench.core.prepare(&mut bench.ring, new.serving(false)).unwrap();
    // Two operations, of which only the first is on its way when the queue is held.
    bench.fill(0, b'1');
    let is_drained = bench.hold();
    bench.fill(1, b'2');
    assert!(is_drained.try_recv().is_err(), "one has begun");
    assert_eq!(bench.await_all(&[0]), [Ok(2 * PAGE)]);
    assert_eq!(is_drained.try_recv(), Ok(true));
    assert!(
        old.holds(b'1') && new.holds(b'n'),
        "nothing of it is in the new image, and nothing else has begun"
    );
    assert!(bench.core.let_go(&mut bench.ring, true).unwrap());
    assert_eq!(bench.await_all(&[1]), [Ok(2 * PAGE)]);
    assert!(old.holds(b'1') && new.holds(b'2'));
    assert_eq!(Arc::strong_count(&serving), 1, "the queue has let go of the old one");
}

#[test]
fn what_was_prepared_can_be_given_up() {
    let (old, new) = (Image::new(b'o'), Image::new(b'n'));
    let mut bench = Bench::new(&old.serving(false));
    let other = new.serving(false);
    bench.core.prepare(&mut bench.ring, Arc::clone(&other)).unwrap();
    assert_eq!(bench.hold().try_recv(), Ok(true), "nothing is under way");
    bench.fill(0, b'1');
    assert!(bench.core.let_go(&mut bench.ring, false).unwrap());
    assert_eq!(bench.await_all(&[0]), [Ok(2 * PAGE)]);
    assert!(old.holds(b'1') && new.holds(b'n'));
    assert_eq!(Arc::strong_count(&other), 1, "it is forgotten");
    // What was not held does not change.
    bench.core.prepare(&mut bench.ring, Arc::clone(&other)).unwrap();
    assert!(!bench.core.let_go(&mut bench.ring, true).unwrap());
    assert_eq!(Arc::strong_count(&other), 1);
}

#[test]
fn a_device_that_becomes_read_only_refuses_what_was_held_back() {
    let image = Image::new(b'o');
    let serving = image.serving(false);
    let mut bench = Bench::new(&serving);
    let frozen = Arc::new(serving.otherwise(Image::map(), true, DirectIo::Auto));
    bench.core.prepare(&mut bench.ring, frozen).unwrap();
    bench.fill(0, b'1');
    let is_drained = bench.hold();
    bench.fill(1, b'2');
    assert_eq!(bench.await_all(&[0]), [Ok(2 * PAGE)], "it had begun");
    assert_eq!(is_drained.try_recv(), Ok(true));
    serving.sync_now().unwrap();
    bench.core.let_go(&mut bench.ring, true).unwrap();
    assert_eq!(bench.await_all(&[1]), [Err(Errno::ROFS)]);
    bench.begin(2, Op::Read);
    assert_eq!(bench.await_all(&[2]), [Ok(2 * PAGE)]);
    assert!(image.holds(b'1'));
}
