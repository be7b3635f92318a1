//! The line: no request is lost or overtaken, and a place is never left empty while one waits.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const CLASSES: [Class; 3] = [Class::Read, Class::Write, Class::Space];

#[test]
fn classes_do_not_wait_for_each_other() {
    let mut governor = Governor::new(64);
    let mut tag = 0;
    while governor.admit(Class::Space, 0, tag) {
        tag += 1;
    }
    assert!(governor.admit(Class::Read, 0, 40));
    assert!(governor.admit(Class::Write, 0, 41));
    assert_eq!(governor.next(Class::Space), None, "the window is full");
    governor.ended(Class::Space, 1, 1);
    assert_eq!(governor.next(Class::Space), Some(tag));
}

#[test]
fn trying_is_given_up_by_and_by_and_taken_up_again() {
    let mut governor = Governor::new(8);
    let mut attempts = 0;
    for _ in 0..1000 {
        if governor.tries(Class::Read) {
            attempts += 1;
            governor.tried(Class::Read, true);
        }
    }
    assert!((10..30).contains(&attempts), "{attempts} attempts of 1000 that were all refused");
    while !governor.tries(Class::Read) {}
    governor.tried(Class::Read, false);
    for _ in 0..100 {
        assert!(governor.tries(Class::Read), "what is not refused is tried each time");
        governor.tried(Class::Read, false);
    }
}

proptest! {
    /// Requests arrive and end in any order on a backing of any speed; each is begun once, in the order of
    /// its class.
    #[test]
    fn everybody_comes_to_his_turn_in_order(
        depth in 1u16..100,
        steps in prop::collection::vec((any::<bool>(), 0usize..3, any::<prop::sample::Index>(), 0u64..20_000_000), 1..600),
    ) {
        let mut governor = Governor::new(depth);
        let mut idle: VecDeque<u16> = (0..depth).collect();
        let mut waiting: [VecDeque<u16>; 3] = Default::default();
        let mut running: [Vec<u16>; 3] = Default::default();
        let mut now = 0;
        let end_one = |governor: &mut Governor, kind: usize, which: usize, now: u64,
                           running: &mut [Vec<u16>; 3], waiting: &mut [VecDeque<u16>; 3]| {
            let tag = running[kind].swap_remove(which);
            governor.ended(CLASSES[kind], now, work(CLASSES[kind], 4096));
            while let Some(next) = governor.next(CLASSES[kind]) {
                assert_eq!(Some(next), waiting[kind].pop_front(), "the first in line");
                assert!(governor.admit(CLASSES[kind], now, next), "a request that was called is admitted");
                running[kind].push(next);
            }
            assert!(waiting[kind].is_empty() || !running[kind].is_empty(), "somebody waits for nobody");
            tag
        };
        for (arrives, kind, which, passed) in steps {
            now += passed;
            if arrives && let Some(tag) = idle.pop_front() {
                if governor.admit(CLASSES[kind], now, tag) {
                    prop_assert!(waiting[kind].is_empty(), "nobody overtakes");
                    running[kind].push(tag);
                } else {
                    prop_assert!(!running[kind].is_empty(), "the only one need not wait");
                    waiting[kind].push_back(tag);
                }
            } else if !running[kind].is_empty() {
                let which = which.index(running[kind].len());
                idle.push_back(end_one(&mut governor, kind, which, now, &mut running, &mut waiting));
            }
        }
        for kind in 0..3 {
            while !running[kind].is_empty() {
                now += 1_000_000;
                idle.push_back(end_one(&mut governor, kind, 0, now, &mut running, &mut waiting));
            }
            prop_assert!(waiting[kind].is_empty());
        }
        let mut all: Vec<u16> = idle.into_iter().collect();
        all.sort_unstable();
        prop_assert_eq!(all, (0..depth).collect::<Vec<_>>());
    }
}
