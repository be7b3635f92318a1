//! A driver without flushes, or with the cache in write-through mode: what has ended is on stable storage.

use becket_engine::fault::{Affected, Rule, Struck};

use super::*;

const CONFIG_WCE: u64 = 1 << 11;
/// `VHOST_USER_SET_CONFIG`.
const SET_CONFIG: u32 = 25;

/// How a driver comes to write through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// It does not: it flushes.
    Back,
    /// It cannot flush.
    NoFlush,
    /// It has set the mode of the cache.
    Set,
}

/// A driver of an image that can be written, but not synced.
fn driver(bench: &Bench, mode: Mode, layout: u64) -> Driver {
    let cache = match mode {
        Mode::NoFlush => 0,
        Mode::Back | Mode::Set => FLUSH | CONFIG_WCE,
    };
    let driver =
        bench.driver(Shape { features: SHAPE.features | DISCARD | WRITE_ZEROES | cache | layout, ..SHAPE });
    if mode == Mode::Set {
        let writeback = [[32u32, 1, 0].map(u32::to_ne_bytes).concat(), vec![0]].concat();
        driver.front.tell(SET_CONFIG, &writeback, &[]).unwrap();
    }
    driver
}

/// How many flushes there were, and how many failed. What a turn did is counted at its end, so that a later
/// one must come first.
fn flushes(bench: &Bench, driver: &mut Driver) -> (u64, Option<u64>) {
    assert_eq!(one(driver, IN, 8192, 512, &[]).0, 0);
    let flush = bench.export.served().stats().flush;
    (flush.operations, flush.errors)
}

#[test]
fn ranges_are_zeroed_durably_where_a_driver_does_not_flush() {
    let rule = Rule { kind: Affected::Flush, struck: Struck::Error(5), chance: 1_000_000, range: None };
    let faults = Faults { rules: vec![rule], ..Faults::default() };
    for mode in [Mode::Back, Mode::NoFlush, Mode::Set] {
        for (layout, op) in [(0, OP_WRITE_ZEROES), (PACKED, OP_DISCARD)] {
            let bench = Bench::with_faults(1, DirectIo::Off, Some(faults.clone()));
            bench.image.as_file().write_all_at(&[7; 8192], 0).unwrap();
            let mut driver = driver(&bench, mode, layout);
            let status = range(&mut driver, op, 0, 4096, 0);
            // The sync fails. The driver hears of that only if becket waits for it.
            let wanted = if mode == Mode::Back { 0 } else { 1 };
            assert_eq!(status, wanted, "{mode:?} {op}");
            assert!(bench.bytes()[..8192] == [[0; 4096], [7; 4096]].concat(), "it came before the sync");
            let syncs = u64::from(mode != Mode::Back);
            assert_eq!(flushes(&bench, &mut driver), (syncs, Some(syncs)), "{mode:?} {op}");
        }
    }
}

#[test]
fn ranges_that_are_zeroed_durably_end_once() {
    for layout in [0, PACKED] {
        let bench = Bench::new(1, DirectIo::Off);
        bench.image.as_file().write_all_at(&vec![7; SIZE], 0).unwrap();
        let mut driver = driver(&bench, Mode::NoFlush, layout);
        for round in 0..20u64 {
            let queue = &mut driver.queues[0];
            for slot in 0..16 {
                let op = if slot % 2 == 0 { OP_WRITE_ZEROES } else { OP_DISCARD };
                queue.submit_range(op, (round * 16 + slot) * 8192, 4096, 0).unwrap();
            }
            queue.announce();
            for _ in 0..16 {
                assert_eq!(queue.next_ended(PATIENCE).unwrap().status, 0);
            }
            assert_eq!(queue.under_way(), 0);
        }
        assert!(
            bench
                .bytes()
                .chunks(4096)
                .take(640)
                .enumerate()
                .all(|(at, page)| { page.iter().all(|byte| *byte == if at % 2 == 0 { 0 } else { 7 }) })
        );
        // What fails is not flushed, and fails.
        assert_eq!(range(&mut driver, OP_WRITE_ZEROES, SIZE as u64, 4096, 0), 1);
        assert_eq!(flushes(&bench, &mut driver), (320, Some(0)));
    }
}
