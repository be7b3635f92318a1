use proptest::prelude::*;

use super::*;

const READ: Operation<'static> = Operation {
    queue: 0,
    tag: 0,
    op: Op::Read,
    at: 8192,
    len: 4096,
    file: 0,
    offset: 8192,
    unit: 1,
    bytes: &[],
    waited: false,
};
const WRITE: Operation<'static> = Operation { op: Op::Write { durable: false }, ..READ };
const FLUSH: Operation<'static> = Operation { op: Op::Flush, at: 0, len: 0, offset: 0, ..READ };

fn plan(faults: Faults) -> impl Interceptor {
    faults.of_queues(2).unwrap()
}

fn rule(kind: Affected, struck: Struck, chance: u32, range: Option<(u64, u64)>) -> Faults {
    Faults { rules: vec![Rule { kind, struck, chance, range }], ..Faults::default() }
}

#[test]
fn nothing_goes_wrong_unless_it_is_asked_to() {
    let plan = plan(Faults::default());
    for operation in [READ, WRITE, FLUSH] {
        assert_eq!(plan.fate(&operation), Fate::Pass);
    }
}

#[test]
fn a_rule_strikes_its_kind_and_its_bytes_alone() {
    let (five, certain) = (Struck::Error(5), CERTAIN);
    let reads = plan(rule(Affected::Read, five, certain, None));
    assert_eq!(
        [READ, WRITE, FLUSH].map(|op| reads.fate(&op)),
        [Fate::Fail(Errno::IO), Fate::Pass, Fate::Pass]
    );
    let flushes = plan(rule(Affected::Flush, five, certain, None));
    assert_eq!([READ, FLUSH].map(|op| flushes.fate(&op)), [Fate::Pass, Fate::Fail(Errno::IO)]);
    let all = plan(rule(Affected::All, five, certain, None));
    assert!([READ, WRITE, FLUSH].iter().all(|op| all.fate(op) == Fate::Fail(Errno::IO)));
    // One bad sector, seen by what touches it.
    let sector = plan(rule(Affected::All, five, certain, Some((8192 + 512, 512))));
    let at = |at, len| sector.fate(&Operation { at, len, ..READ });
    assert_eq!(at(8192, 512), Fate::Pass);
    assert_eq!(at(8192, 513), Fate::Fail(Errno::IO));
    assert_eq!(at(8192 + 1023, 1), Fate::Fail(Errno::IO));
    assert_eq!(at(8192 + 1024, 4096), Fate::Pass);
    assert_eq!(sector.fate(&FLUSH), Fate::Pass, "a sync touches no byte");
}

#[test]
fn delays_add_up_and_come_once() {
    let mut faults = rule(Affected::All, Struck::Delay(10), CERTAIN, None);
    faults.rules.extend(rule(Affected::Read, Struck::Delay(5), CERTAIN, None).rules);
    faults.rules.extend(rule(Affected::Read, Struck::Error(5), CERTAIN, None).rules);
    let plan = plan(faults);
    assert_eq!(plan.fate(&READ), Fate::Wait(Duration::from_millis(15)));
    assert_eq!(plan.fate(&Operation { waited: true, ..READ }), Fate::Fail(Errno::IO));
}

#[test]
fn a_disk_without_room_takes_what_fits() {
    let plan = plan(Faults { enospc_after: Some(10_000), ..Faults::default() });
    let aligned = Operation { unit: 512, ..WRITE };
    assert_eq!(plan.fate(&aligned), Fate::Pass);
    assert_eq!(plan.fate(&aligned), Fate::Pass);
    assert_eq!(
        plan.fate(&aligned),
        Fate::Short(1536),
        "1808 bytes are left, of which direct I/O can use 1536"
    );
    assert_eq!(plan.fate(&aligned), Fate::Fail(Errno::NOSPC));
    assert_eq!(plan.fate(&READ), Fate::Pass);
}

#[test]
fn chance_keeps_its_word() {
    let plan = plan(rule(Affected::Read, Struck::Error(5), 10_000, None));
    let struck = (0..100_000).filter(|_| plan.fate(&READ) != Fate::Pass).count();
    assert!((900..1100).contains(&struck), "{struck} of 100,000 at one in a hundred");
}

#[test]
fn nonsense_is_refused() {
    for faults in [
        Faults { torn: CERTAIN + 1, ..Faults::default() },
        rule(Affected::Read, Struck::Error(5), CERTAIN + 1, None),
        rule(Affected::Read, Struck::Error(0), 1, None),
        rule(Affected::Read, Struck::Error(4096), 1, None),
        Faults {
            rules: vec![rule(Affected::Read, Struck::Delay(1), 1, None).rules.remove(0); 65],
            ..Faults::default()
        },
    ] {
        assert!(faults.check().is_err() && faults.clone().of_queues(1).is_err(), "{faults:?}");
    }
}

proptest! {
    #[test]
    fn the_same_seed_gives_the_same_faults(seed: u64, kinds in prop::collection::vec((0..2usize, 0..2usize), 1..200)) {
        let faults = Faults { torn: 200_000, short: 300_000, seed, ..rule(Affected::All, Struck::Error(5), 100_000, None) };
        let run = |only: Option<usize>| {
            let plan = plan(faults.clone());
            let asked = kinds.iter().filter(|(queue, _)| only.is_none_or(|only| only == *queue));
            let fates = asked.map(|&(queue, write)| {
                (queue, plan.fate(&Operation { queue, ..if write == 1 { WRITE } else { READ } }))
            });
            fates.collect::<Vec<_>>()
        };
        let both = run(None);
        prop_assert_eq!(&both, &run(None));
        // What one queue does moves nothing for the other.
        let of_one: Vec<_> = both.into_iter().filter(|(queue, _)| *queue == 1).collect();
        prop_assert_eq!(of_one, run(Some(1)));
    }

    #[test]
    fn parts_are_real_parts(seed: u64, units in 1..64u64, unit in prop::sample::select(vec![1u64, 512, 4096])) {
        let plan = plan(Faults { torn: 500_000, short: CERTAIN, seed, ..Faults::default() });
        let len = units * unit;
        for op in [READ, WRITE] {
            match plan.fate(&Operation { len, unit, ..op }) {
                Fate::Pass | Fate::Fail(Errno::IO) => {}
                Fate::Short(part) => prop_assert!(part > 0 && part < len && part % unit == 0),
                Fate::Torn(part, Errno::IO) => prop_assert!(part > 0 && part < len && part % unit.max(512) == 0),
                other => prop_assert!(false, "{other:?}"),
            }
        }
    }
}
