use std::thread;

use proptest::prelude::*;

use super::*;
use crate::decode::{frames::Frames, mailbox::tests::unheard};

const SIZE: usize = 100;

/// A cache over memory for `blocks` blocks, used as the decoding threads do.
struct Bench {
    cache: Cache,
    frames: Arc<Frames>,
    waiter: Waiter,
}

impl Bench {
    fn of(blocks: usize) -> Bench {
        let bytes = blocks * SIZE;
        let waiter = Waiter { mailbox: unheard(), whom: (0, 0) };
        Bench { cache: Cache::new(bytes), frames: Frames::new(bytes), waiter }
    }

    /// Uses a block; whether it was there.
    fn get(&self, block: u32) -> bool {
        let key = key(block);
        match self.cache.look(key, Some(&self.waiter), true) {
            Lookup::Here(found) => {
                assert_eq!(found.bytes(), vec![block as u8; SIZE]);
                true
            }
            Lookup::Yours => {
                let mut frame = loop {
                    match self.frames.take(SIZE) {
                        Ok(frame) => break frame,
                        Err(_) => assert!(self.cache.evict().is_some(), "nobody holds a block"),
                    }
                };
                frame.bytes().fill(block as u8);
                self.cache.finish(key, Ok(frame.filled(0, SIZE)), None);
                // The word about it holds it, too.
                self.waiter.mailbox.take(&mut Vec::new());
                false
            }
            Lookup::Coming | Lookup::Absent => panic!("nobody else loads"),
        }
    }

    fn get_all(&self, blocks: Range<u32>) {
        for block in blocks {
            self.get(block);
        }
    }

    fn has(&self, block: u32) -> bool {
        matches!(self.cache.look(key(block), None, false), Lookup::Here(_))
    }
}

fn key(block: u32) -> Key {
    Key { layer: 7, block }
}

#[test]
fn a_scan_leaves_what_is_used() {
    let bench = Bench::of(100);
    // Used, used again later, and so of the main queue.
    for _ in 0..3 {
        bench.get_all(0..40);
    }
    // Many times what fits, each once and in pieces.
    for block in 1000..1000 + SCAN * 100 {
        for _ in 0..32 {
            bench.get(block);
        }
    }
    let left = (0..40).filter(|block| bench.has(*block)).count();
    assert!(left >= 36, "{left} of 40 are left");
}

#[test]
fn a_block_that_comes_back_soon_stays() {
    let bench = Bench::of(20);
    bench.get_all(0..40);
    // The last blocks that went are ghosts.
    let gone: Vec<u32> = (0..40).filter(|block| !bench.has(*block)).collect();
    let back = *gone.last().unwrap();
    assert!(!bench.get(back));
    bench.get_all(100..200);
    assert!(bench.has(back), "block {back}");
}

#[test]
fn names_of_what_has_gone_do_not_pile_up() {
    let bench = Bench::of(10);
    bench.get_all(0..5_000);
    let state = bench.cache.state();
    let most = 2 * state.entries.len() + FEWEST_GHOSTS + 1;
    assert!(state.small.keys.len() <= most && state.main.keys.len() <= most);
}

#[test]
fn what_fails_is_reported_and_not_kept() {
    let bench = Bench::of(4);
    assert!(matches!(bench.cache.look(key(1), Some(&bench.waiter), true), Lookup::Yours));
    let other = Waiter { whom: (0, 1), ..bench.waiter.clone() };
    assert!(matches!(bench.cache.look(key(1), Some(&other), true), Lookup::Coming));
    assert!(matches!(bench.cache.look(key(2), Some(&other), false), Lookup::Absent));
    bench.cache.finish(key(1), Err(Errno::IO), None);
    let mut notes = Vec::new();
    bench.waiter.mailbox.take(&mut notes);
    let seen: Vec<_> = notes
        .iter()
        .map(|(whom, note)| (whom.1, matches!(note, Note::Block { result: Err(Errno::IO), .. })))
        .collect();
    assert_eq!(seen, [(0, true), (1, true)]);
    assert!(!bench.get(1), "the next one tries again");
}

#[test]
fn what_is_forgotten_gives_its_memory_back() {
    let bench = Bench::of(10);
    bench.get_all(0..10);
    bench.cache.forget(&(0..7));
    assert!(bench.has(9));
    bench.cache.forget(&(7..8));
    assert!(!bench.has(9));
    assert!(bench.cache.evict().is_none());
    let whole = bench.frames.take(10 * SIZE);
    assert!(whole.is_ok());
}

/// Many threads want the same blocks at the same moment: each is decoded once.
#[test]
fn many_readers_decode_once() {
    const READERS: u32 = 8;
    const BLOCKS: u32 = 50;
    let bench = Bench::of(BLOCKS as usize);
    let barrier = std::sync::Barrier::new(READERS as usize);
    let loads: u32 = thread::scope(|scope| {
        let readers = (0..READERS).map(|_| {
            scope.spawn(|| {
                let waiter = Waiter { mailbox: unheard(), whom: (0, 0) };
                let mut notes = Vec::new();
                let (mut loads, mut seen) = (0, 0);
                barrier.wait();
                for block in 0..BLOCKS {
                    match bench.cache.look(key(block), Some(&waiter), true) {
                        Lookup::Here(_) => seen += 1,
                        Lookup::Yours => {
                            loads += 1;
                            let frame = bench.frames.take(SIZE).ok().unwrap();
                            bench.cache.finish(key(block), Ok(frame.filled(0, SIZE)), None);
                        }
                        Lookup::Coming | Lookup::Absent => {}
                    }
                }
                barrier.wait();
                waiter.mailbox.take(&mut notes);
                assert_eq!(seen + notes.len(), BLOCKS as usize, "everybody gets every block");
                loads
            })
        });
        let readers: Vec<_> = readers.collect();
        readers.into_iter().map(|reader| reader.join().unwrap()).sum()
    });
    assert_eq!(loads, BLOCKS);
}

/// Miri is some thousand times slower.
const MOST_READS: usize = if cfg!(miri) { 40 } else { 400 };
/// How often a scan is longer than what fits.
const SCAN: u32 = if cfg!(miri) { 2 } else { 10 };

proptest! {
    #[test]
    fn the_bound_holds_whatever_is_read(
        blocks in 1usize..30, reads in prop::collection::vec(0u32..60, 1..MOST_READS), held in 0usize..3,
    ) {
        let bench = Bench::of(blocks + held);
        let mut hands = VecDeque::new();
        for block in reads {
            bench.get(block);
            prop_assert!(bench.frames.total() <= (blocks + held) * SIZE);
            // A request still copies from it when it is evicted.
            if held > 0 && let Lookup::Here(found) = bench.cache.look(key(block), None, false) {
                hands.push_back(found);
                hands.truncate(held);
            }
            let state = bench.cache.state();
            let ready = state.entries.len();
            let named = |queue: &Fifo| {
                let is = |(key, stamp): &&(Key, u64)| matches!(state.entries.get(key), Some(Entry::Ready(one)) if one.stamp == *stamp);
                queue.keys.iter().filter(is).count()
            };
            prop_assert_eq!(ready, named(&state.small) + named(&state.main));
            prop_assert_eq!(ready * SIZE, state.small.bytes + state.main.bytes);
            prop_assert!(state.ghosts.known.len() <= state.ghosts.keys.len());
        }
        prop_assert!(bench.frames.peak() <= (blocks + held) * SIZE);
    }
}
