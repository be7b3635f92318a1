//! Raw images: one range of a file, written in place.

use std::sync::Arc;

use becket_engine::fault::Faults;
use becket_engine::{Op, Serving};
use becket_image::Map;
use proptest::prelude::*;

use crate::file::State;
use crate::record::{Event, Log, Step, all_faults, lists, serve, steps, without_syncs};
use crate::script::{file_of, source_of};
use crate::{LANES, LEN, SECTOR, losses, runs};

/// Serves these steps by the engine, and returns what happened.
fn recorded(lanes: &[Vec<Step>], faults: Faults, direct: bool) -> Vec<Event> {
    let log = Log::default();
    let file = file_of(&[0; LEN]);
    let mut source = source_of(&file, direct);
    source.facts.sparse = false;
    let serving = Serving::new(Map::contiguous(0, 0, LEN as u64), vec![source.into()], false, 1);
    serve(serving, 0, lists(lanes, 0), faults, &log);
    Arc::into_inner(log).unwrap().into_inner().unwrap().events
}

fn lost(events: &[Event], seed: u64) -> Option<String> {
    losses(&[0; LEN], events, seed, |state: &State| Ok(state.bytes()))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: runs(48), failure_persistence: None, max_shrink_iters: 100, ..ProptestConfig::default() })]
    #[test]
    fn a_power_cut_takes_nothing_that_was_promised(
        lanes in steps(),
        direct: bool,
        seed: u64,
        faulty: bool,
    ) {
        let faults = if faulty { all_faults(seed) } else { Faults::default() };
        let lost = lost(&recorded(&lanes, faults, direct), seed);
        prop_assert!(lost.is_none(), "{}", lost.unwrap());
    }
}

/// The checker itself: without what makes writes safe it must find what is lost.
#[test]
fn a_lie_about_safety_is_found() {
    let write = |durable| Step::Write { at: 0, sectors: 8, durable };
    let flushed = vec![vec![write(false), Step::Flush]; LANES as usize];
    let durable = vec![vec![write(true), write(true)]; LANES as usize];
    for (lanes, lie) in [(flushed, true), (durable, false)] {
        let honest = recorded(&lanes, Faults::default(), true);
        assert_eq!(lost(&honest, 1), None);
        let mut lying = honest.clone();
        if lie {
            // An engine that completes a flush without a sync.
            lying = without_syncs(&honest, |_| true);
        } else {
            // An engine that drops FUA on the way to the file.
            for event in &mut lying {
                if let Event::Writes(_, durable, ..) = event {
                    *durable = false;
                }
            }
        }
        assert!(lost(&lying, 1).is_some(), "nobody noticed");
    }
}

fn write_and_flush(syncs_early: bool, sync_is_well: bool) -> Vec<Event> {
    let bytes = 7u64.to_le_bytes().repeat(SECTOR / 8);
    let write = Op::Write { durable: false };
    let mut events = vec![
        Event::Asked(0, write, 0, bytes.clone()),
        Event::Writes(0, false, 0, bytes),
        Event::Ended(0, true),
        Event::Answered(0, true),
        Event::Asked(1, Op::Flush, 0, Vec::new()),
        Event::Syncs(1),
        Event::Ended(1, sync_is_well),
        Event::Answered(1, true),
    ];
    if syncs_early {
        events[2..6].rotate_right(1);
    }
    events
}

/// A sync that began before a write had ended says nothing of that write.
#[test]
fn an_early_sync_is_no_proof() {
    assert_eq!(lost(&write_and_flush(false, true), 1), None);
    assert!(lost(&write_and_flush(true, true), 1).is_some_and(|lost| lost.contains("after event 7")));
}

/// What a sync has failed to bring to the disk, a later one that succeeds does not bring either.
#[test]
fn a_sync_after_one_that_failed_is_no_proof() {
    let mut events = write_and_flush(false, false);
    events.pop();
    events.extend([Event::Answered(1, false), Event::Asked(1, Op::Flush, 0, Vec::new()), Event::Syncs(1)]);
    events.extend([Event::Ended(1, true), Event::Answered(1, true)]);
    assert!(lost(&events, 1).is_some_and(|lost| lost.contains("after event 11")));
}
