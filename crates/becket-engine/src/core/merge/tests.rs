//! Runs as a ring sees them: what is in flight after a turn says how many operations its requests became.

use std::{
    collections::HashMap,
    fs::File,
    io::Write,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileExt,
    },
    sync::{Arc, mpsc::sync_channel},
};

use becket_image::{Alignment, BackingKind, Facts, Map};
use rustix::io::Errno;

use super::*;
use crate::{
    Backing, Data, Memory, Summary,
    core::{Finished, Parts},
    user_data::source_of,
};

const PAGE: u64 = 4096;
const DEPTH: u16 = 64;
const READ: Op = Op::Read;
const WRITE: Op = Op::Write { durable: false };

/// A queue by itself, the ring that it is on, and the file below it.
struct Bench {
    core: Core,
    ring: Ring,
    file: File,
    stats: Arc<crate::QueueStats>,
}

impl Bench {
    /// The map has `pages`, the file has `bytes`. Direct operations go to `direct`, or to the file.
    fn new(bytes: &[u8], pages: u64, direct: Option<OwnedFd>, merge: bool) -> Bench {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        let facts = Facts {
            direct: Some(Alignment { memory: 512, offset: 512 }),
            discard: true,
            discard_granularity: 4096,
            write_zeroes: true,
            nowait: true,
            ..Facts::unasked(BackingKind::Regular, bytes.len() as u64, true)
        };
        // Nothing here needs the page cache to be left out: the rules are those of direct operations all the same.
        let direct = direct.unwrap_or_else(|| file.try_clone().unwrap().into());
        let files = vec![becket_image::Backing {
            buffered: file.try_clone().unwrap().into(),
            direct: Some(direct),
            facts,
        }];
        let backing = Arc::new(Backing::new(Map::contiguous(0, 0, pages * PAGE), files, false, 1));
        let port = File::open("/dev/null").unwrap();
        let stats = Arc::default();
        let parts = Parts {
            descriptor: port.as_fd(),
            tether: None,
            depth: DEPTH,
            number: 0,
            backing: &backing,
            memory: Memory::Buffers(256 << 10),
            batch: None,
            below: None,
            merge,
            stats: &stats,
            mailbox: &crate::decode::unheard(),
        };
        let mut ring = Ring::new(0).unwrap();
        let core = Core::new(&mut ring, 0, &parts).unwrap();
        Bench { core, ring, file, stats }
    }

    /// The same, after a first request has shown the queue where operations can go straight.
    fn warm(bytes: &[u8], pages: u64, direct: Option<OwnedFd>) -> Bench {
        let mut bench = Bench::new(bytes, pages, direct, true);
        bench.begin(0, READ, 0, PAGE);
        bench.turn(1);
        bench.finish();
        bench
    }

    fn begin(&mut self, tag: u16, op: Op, offset: u64, len: u64) {
        self.core.begin(&mut self.ring, tag, Request { op, offset, len, data: Data::Buffer });
    }

    /// Begins a request and fills its buffer first.
    fn write(&mut self, tag: u16, op: Op, offset: u64, len: u64, byte: u8) {
        self.core.buffer(tag)[..len as usize].fill(byte);
        self.begin(tag, op, offset, len);
    }

    /// Ends the turn in which the requests began; they must have become so many operations.
    fn turn(&mut self, operations: usize) {
        self.core.send_run(&mut self.ring);
        assert_eq!(self.core.in_flight, operations, "operations");
    }

    /// Takes completions until nothing is under way, and returns what came of each request.
    fn finish(&mut self) -> HashMap<u16, Result<u64, Errno>> {
        let mut told = HashMap::new();
        loop {
            let finished: Finished = self.core.take_finished();
            for (tag, result) in &finished {
                assert_eq!(told.insert(*tag, *result), None, "tag {tag} finishes once");
            }
            self.core.give_list_back(finished);
            if self.core.in_flight == 0 {
                break;
            }
            for index in 0..self.ring.wait().unwrap() {
                let completion = self.ring.taken(index);
                let (_, Source::Backing { tag }) = source_of(completion.user_data) else { unreachable!() };
                self.core.operated(&mut self.ring, tag, completion.result);
            }
        }
        self.core.turn_ended(false);
        told
    }
}

/// Each page has its number in all its bytes.
fn numbered(pages: u64) -> Vec<u8> {
    (0..pages * PAGE).map(|at| (at / PAGE) as u8).collect()
}

#[test]
fn neighbours_become_one_operation_and_each_gets_its_own_bytes() {
    let mut bench = Bench::warm(&numbered(16), 16, None);
    // Tags and lengths in no order; places one behind the other.
    let members = [(9, 0, 1), (3, 1, 2), (60, 3, 1), (0, 4, 4)];
    for (tag, page, pages) in members {
        bench.begin(tag, READ, page * PAGE, pages * PAGE);
    }
    bench.turn(1);
    let told = bench.finish();
    assert_eq!(told.len(), members.len());
    for (tag, page, pages) in members {
        assert_eq!(told[&tag], Ok(pages * PAGE));
        assert!(
            bench.core.buffer(tag)[..(pages * PAGE) as usize]
                == numbered(16)[(page * PAGE) as usize..][..(pages * PAGE) as usize]
        );
    }
    for (tag, page) in [(5, 2), (6, 3), (7, 4)] {
        bench.write(tag, WRITE, page * PAGE, PAGE, 0x50 + tag as u8);
    }
    bench.turn(1);
    assert_eq!(bench.finish().values().filter(|result| **result == Ok(PAGE)).count(), 3);
    let mut bytes = vec![0; 5 * PAGE as usize];
    bench.file.read_exact_at(&mut bytes, PAGE).unwrap();
    let seen: Vec<u8> = bytes.iter().copied().step_by(PAGE as usize).collect();
    assert_eq!(seen, [1, 0x55, 0x56, 0x57, 5]);
    // Counted as requests, however many operations they were.
    let told = Summary::of(std::iter::once(&*bench.stats));
    let counted =
        (told.read.operations, told.read.bytes, told.write.operations, told.write.bytes, told.in_flight);
    assert_eq!(counted, (1 + 4, 9 * PAGE, 3, 3 * PAGE, 0));
}

#[test]
fn only_neighbours_of_one_kind_are_merged() {
    let mut bench = Bench::warm(&numbered(16), 16, None);
    for (what, second) in [
        ("a gap", (READ, 2 * PAGE, PAGE)),
        ("backwards", (READ, 0, PAGE)),
        ("an overlap", (READ, PAGE + 512, PAGE)),
        ("another direction", (WRITE, 2 * PAGE, PAGE)),
        ("a durable write", (Op::Write { durable: true }, 2 * PAGE, PAGE)),
        ("not aligned", (READ, 2 * PAGE, 100)),
    ] {
        let (op, offset, len) = second;
        bench.begin(1, READ, PAGE, if what == "a gap" { 512 } else { PAGE });
        bench.begin(2, op, offset, len);
        bench.turn(2);
        assert_eq!(bench.finish().len(), 2, "{what}");
    }
    // A durable write takes nobody with it either, and one in between does not part its neighbours.
    bench.begin(1, WRITE, 0, PAGE);
    bench.begin(2, Op::Write { durable: true }, PAGE, PAGE);
    bench.begin(3, WRITE, PAGE, PAGE);
    bench.turn(2);
    assert_eq!(bench.finish().len(), 3);
    // Turns are apart.
    bench.begin(1, READ, 0, PAGE);
    bench.turn(1);
    bench.begin(2, READ, PAGE, PAGE);
    bench.turn(2);
    assert_eq!(bench.finish().len(), 2);
}

#[test]
fn runs_are_bounded() {
    let mut bench = Bench::warm(&numbered(2 * 256), 2 * 256, None);
    for tag in 0..MOST as u16 + 1 {
        bench.begin(tag, READ, u64::from(tag) * PAGE, PAGE);
    }
    bench.turn(2);
    assert_eq!(bench.finish().len(), MOST + 1);
    // Each a quarter of what a run may have.
    for tag in 0..5 {
        bench.begin(tag, READ, u64::from(tag) * MOST_BYTES / 4, MOST_BYTES / 4);
    }
    bench.turn(2);
    assert_eq!(bench.finish().len(), 5);
}

#[test]
fn nothing_is_merged_unless_asked_for() {
    let mut bench = Bench::new(&numbered(4), 4, None, false);
    for tag in 0..4 {
        bench.begin(tag, READ, u64::from(tag) * PAGE, PAGE);
    }
    bench.turn(4);
    assert_eq!(bench.finish().len(), 4);
}

#[test]
fn a_short_operation_leaves_each_member_its_own_result() {
    // Two and a half pages of file below four of the image.
    let mut bench = Bench::warm(&numbered(3)[..PAGE as usize * 5 / 2], 4, None);
    for tag in 0..4 {
        bench.begin(10 + tag, READ, u64::from(tag) * PAGE, PAGE);
    }
    bench.turn(1);
    let told = bench.finish();
    let wanted = [(10, Ok(PAGE)), (11, Ok(PAGE)), (12, Err(Errno::IO)), (13, Err(Errno::IO))];
    assert_eq!(told, HashMap::from(wanted));
    for (tag, byte) in [(10, 0), (11, 1)] {
        assert!(bench.core.buffer(tag)[..PAGE as usize].iter().all(|found| *found == byte));
    }
    // Nothing is left of the run.
    bench.begin(10, READ, 0, PAGE);
    bench.begin(11, READ, PAGE, PAGE);
    bench.turn(1);
    assert_eq!(bench.finish(), HashMap::from([(10, Ok(PAGE)), (11, Ok(PAGE))]));
}

#[test]
fn a_failed_operation_leaves_each_member_its_own_error() {
    let readers = tempfile::NamedTempFile::new().unwrap();
    readers.as_file().write_all(&numbered(4)).unwrap();
    let direct = File::open(readers.path()).unwrap().into();
    let mut bench = Bench::warm(&numbered(4), 4, Some(direct));
    for tag in 0..3 {
        bench.write(tag, WRITE, u64::from(tag) * PAGE, PAGE, 9);
    }
    bench.turn(1);
    // A failed write counts as one all the same: the flush after it has to sync.
    assert_eq!(bench.finish(), HashMap::from([0, 1, 2].map(|tag| (tag, Err(Errno::BADF)))));
    assert!(bench.core.backing.next_to_sync(0).unwrap().is_some());
}

#[test]
fn members_that_direct_io_refuses_go_through_the_page_cache() {
    // A name space's file cannot be read: EINVAL.
    let refuses = File::open("/proc/self/ns/mnt").unwrap().into();
    let mut bench = Bench::warm(&numbered(4), 4, Some(refuses));
    for tag in 0..4 {
        bench.begin(tag, READ, u64::from(tag) * PAGE, PAGE);
    }
    bench.turn(1);
    let told = bench.finish();
    for tag in 0..4u16 {
        assert_eq!(told[&tag], Ok(PAGE));
        assert!(bench.core.buffer(tag)[..PAGE as usize].iter().all(|byte| *byte == tag as u8));
    }
}

#[test]
fn a_held_queue_waits_for_all_members() {
    // Once the run is sent before the queue is held, once after; once it succeeds, once it is short.
    for (sent, pages) in [(true, 4), (false, 4), (true, 2), (false, 2)] {
        let mut bench = Bench::warm(&numbered(pages), 4, None);
        for tag in 0..4 {
            bench.begin(tag, READ, u64::from(tag) * PAGE, PAGE);
        }
        if sent {
            bench.turn(1);
        }
        let (drained, is_drained) = sync_channel(1);
        bench.core.hold(drained);
        bench.turn(1);
        assert!(is_drained.try_recv().is_err(), "four are under way");
        // One that comes meanwhile does not begin.
        bench.begin(4, READ, 0, PAGE);
        let told = bench.finish();
        assert_eq!(is_drained.try_recv(), Ok(true), "nothing is");
        assert_eq!(told.len(), 4);
        assert!(bench.core.let_go(&mut bench.ring, false).unwrap());
        assert_eq!(bench.finish(), HashMap::from([(4, Ok(PAGE))]));
        for tag in 0..4u16 {
            let wanted = if u64::from(tag) < pages { Ok(PAGE) } else { Err(Errno::IO) };
            assert_eq!(told[&tag], wanted, "tag {tag}, sent {sent}");
        }
    }
}

/// A small generator that repeats from its seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % end
    }
}

#[test]
fn random_turns_agree_with_a_model() {
    const PAGES: u64 = 256;
    let mut model = numbered(PAGES);
    let mut bench = Bench::warm(&model, PAGES, None);
    let mut random = Random(0x3e26e);
    let (mut requests, mut operations) = (0, 0);
    for turn in 0..400 {
        // Requests of a turn are under way together, so they must not overlap: each page is used once.
        let mut used = [false; PAGES as usize];
        let mut expected = Vec::new();
        let mut at = 0;
        let mut tags: Vec<u16> = (0..DEPTH).collect();
        for _ in 0..random.below(DEPTH.into()) {
            let tag = tags.swap_remove(random.below(tags.len() as u64) as usize);
            // Mostly where the last one ended.
            if random.below(4) == 0 {
                at = random.below(PAGES);
            }
            let pages = 1 + random.below(4);
            if at + pages > PAGES || used[at as usize..(at + pages) as usize].contains(&true) {
                at = random.below(PAGES);
                continue;
            }
            used[at as usize..(at + pages) as usize].fill(true);
            let range = (at * PAGE) as usize..((at + pages) * PAGE) as usize;
            let (offset, len) = (at * PAGE, pages * PAGE);
            match random.below(8) {
                0..4 => {
                    bench.begin(tag, READ, offset, len);
                    expected.push((tag, len, Some(model[range].to_vec())));
                }
                kind => {
                    let byte = random.below(256) as u8;
                    model[range].fill(byte);
                    bench.write(tag, Op::Write { durable: kind == 4 }, offset, len, byte);
                    expected.push((tag, len, None));
                }
            }
            at += pages;
        }
        bench.core.send_run(&mut bench.ring);
        requests += expected.len();
        operations += bench.core.in_flight;
        let told = bench.finish();
        assert_eq!(told.len(), expected.len(), "turn {turn}");
        for (tag, len, bytes) in expected {
            assert_eq!(told[&tag], Ok(len), "turn {turn} tag {tag}");
            let read = &bench.core.buffer(tag)[..len as usize];
            assert!(bytes.is_none_or(|bytes| bytes == read), "turn {turn} tag {tag} reads other bytes");
        }
    }
    let mut whole = vec![0; model.len()];
    bench.file.read_exact_at(&mut whole, 0).unwrap();
    assert!(whole == model, "the file differs from the model");
    assert!(operations < requests * 4 / 5, "{operations} operations for {requests} requests");
}
