//! Results of requests when operations on the backing fail, come short, are torn or late: the right error for
//! the right request, no effect on the others, and each held operation releases only its own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod script;

use std::{
    fs::File,
    os::fd::{AsRawFd, OwnedFd},
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use becket_engine::fault::{Affected, Fate, Faults, Interceptor, Operation, Rule, Struck};
use becket_engine::{IoThreads, Op, Serving};
use becket_image::{DirectIo, Map};
use rustix::{
    event::{EventfdFlags, eventfd},
    io::Errno,
};
use script::{BUFFER, PATIENCE, Random, begin, file_of, run, source_of, step, write};

const CERTAIN: u32 = 1_000_000;
const PAGE: u64 = 4096;

fn rule(kind: Affected, struck: Struck, chance: u32, range: Option<(u64, u64)>) -> Rule {
    Rule { kind, struck, chance, range }
}

fn plan(faults: Faults) -> Arc<impl Interceptor> {
    Arc::new(faults.of_queues(1).unwrap())
}

fn serving(
    file: &File,
    len: u64,
    direct: bool,
    interceptor: Arc<impl Interceptor + 'static>,
) -> Arc<Serving> {
    let files = vec![source_of(file, direct).into()];
    let serving = Serving::new(Map::contiguous(0, 0, len), files, false, 1);
    Arc::new(serving.intercepted_by(interceptor))
}

/// The kernel tells the first sync of lost pages, and no other; and that sync takes a while.
#[derive(Debug, Default)]
struct TellsOnce(AtomicBool);

impl Interceptor for TellsOnce {
    fn fate(&self, operation: &Operation<'_>) -> Fate {
        match operation.op {
            Op::Flush if operation.waited => Fate::Fail(Errno::IO),
            Op::Flush if !self.0.swap(true, Ordering::SeqCst) => Fate::Wait(Duration::from_millis(50)),
            _ => Fate::Pass,
        }
    }
}

#[test]
fn a_flush_beside_one_that_hears_of_lost_pages_fails_too() {
    let threads = IoThreads::start(1).unwrap();
    let file = file_of(&[0; PAGE as usize]);
    let serving = serving(&file, PAGE, false, Arc::new(TellsOnce::default()));
    let flushes = || vec![step(Op::Flush, 0, 0)];
    for (_, result, _) in run(&threads, 0, &serving, vec![flushes(), flushes(), flushes()]) {
        assert_eq!(result, Err(Errno::IO));
    }
}

#[test]
fn a_durable_write_through_the_cache_syncs_and_its_failure_stays() {
    let threads = IoThreads::start(1).unwrap();
    let file = file_of(&[0; PAGE as usize]);
    let serving = serving(&file, PAGE, false, Arc::new(TellsOnce::default()));
    let steps = vec![write(0, &[1; 512], true), step(Op::Flush, 0, 0)];
    for (_, result, _) in run(&threads, 0, &serving, vec![steps]) {
        assert_eq!(result, Err(Errno::IO));
    }
}

#[test]
fn short_late_and_interrupted_operations_are_nobodys_business() {
    const LANES: u64 = 4;
    const LANE: u64 = 512 << 10;
    let threads = IoThreads::start(1).unwrap();
    for variant in 0..8u64 {
        let (direct, nowait) = (variant & 1 != 0, variant & 2 != 0);
        let file = file_of(&vec![0; (LANES * LANE) as usize]);
        let mut files = source_of(&file, direct);
        files.facts.nowait = nowait;
        files.facts.sparse = variant & 4 != 0;
        let faults = Faults {
            rules: vec![
                rule(Affected::All, Struck::Delay(1), 50_000, None),
                rule(Affected::All, Struck::Error(4), 100_000, None), // EINTR
            ],
            short: 500_000,
            seed: variant,
            ..Faults::default()
        };
        let plan = plan(faults);
        let map = Map::contiguous(0, 0, LANES * LANE);
        let serving = Arc::new(Serving::new(map, vec![files.into()], false, 1).intercepted_by(plan));
        let mut random = Random(variant);
        let mut model = vec![0u8; (LANES * LANE) as usize];
        let mut expected: Vec<Vec<Option<Vec<u8>>>> = Vec::new();
        let mut scripts = Vec::new();
        for lane in 0..LANES {
            let (mut steps, mut answers) = (Vec::new(), Vec::new());
            for _ in 0..40 {
                let len = (1 + random.below(BUFFER as u64 / 512)) * 512;
                let offset = lane * LANE + random.below((LANE - len) / 512 + 1) * 512;
                let range = offset as usize..(offset + len) as usize;
                if random.below(2) == 0 {
                    steps.push(step(Op::Read, offset, len));
                    answers.push(Some(model[range].to_vec()));
                } else {
                    let salt = random.below(255) as u8;
                    let bytes: Vec<u8> = (0..len).map(|at| salt.wrapping_add((at / 511) as u8)).collect();
                    model[range].copy_from_slice(&bytes);
                    steps.push(write(offset, &bytes, random.below(4) == 0));
                    answers.push(None);
                }
            }
            scripts.push(steps);
            expected.push(answers);
        }
        let mut at = [0; LANES as usize];
        for (tag, result, bytes) in run(&threads, 0, &serving, scripts) {
            let lane = usize::from(tag);
            assert!(result.is_ok(), "variant {variant} lane {lane} step {}: {result:?}", at[lane]);
            if let Some(wanted) = &expected[lane][at[lane]] {
                assert!(
                    bytes == *wanted,
                    "variant {variant} lane {lane} step {} reads other bytes",
                    at[lane]
                );
            }
            at[lane] += 1;
        }
        let mut whole = vec![0; model.len()];
        file.read_exact_at(&mut whole, 0).unwrap();
        assert!(whole == model, "variant {variant}: the file differs from the model");
    }
}

#[test]
fn an_error_is_its_requests_and_keeps_its_number() {
    let threads = IoThreads::start(1).unwrap();
    for (number, direct) in [(5, false), (5, true), (28, false), (122, true), (61, false), (112, true)] {
        let file = file_of(&[1; 4 * PAGE as usize]);
        let bad = rule(Affected::All, Struck::Error(number), CERTAIN, Some((PAGE, 512)));
        let faults = Faults { rules: vec![bad], ..Faults::default() };
        let serving = serving(&file, 4 * PAGE, direct, plan(faults));
        let scripts = (0..4)
            .map(|page| {
                let at = page * PAGE;
                vec![step(Op::Read, at, PAGE), write(at, &[2; PAGE as usize], false), step(Op::Flush, 0, 0)]
            })
            .collect();
        let mut seen = [const { Vec::new() }; 4];
        for (tag, result, _) in run(&threads, 0, &serving, scripts) {
            seen[usize::from(tag)].push(result);
        }
        // A block device has no word for a quota.
        let reported = if number == 122 { 28 } else { number };
        let errno = Errno::from_raw_os_error(reported.into());
        for (page, results) in seen.iter().enumerate() {
            let wanted =
                if page == 1 { [Err(errno), Err(errno), Ok(0)] } else { [Ok(PAGE), Ok(PAGE), Ok(0)] };
            assert_eq!(results[..], wanted, "{errno}, direct {direct}, page {page}");
        }
        let mut bytes = vec![0; 4 * PAGE as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let kept = |page: usize| bytes[page * PAGE as usize..][..PAGE as usize].iter().all(|byte| *byte == 1);
        assert_eq!(
            [0, 1, 2, 3].map(kept),
            [false, true, false, false],
            "what failed has not reached the file"
        );
    }
}

#[test]
fn a_sync_that_failed_once_stays_failed() {
    let threads = IoThreads::start(1).unwrap();
    let file = file_of(&[1; PAGE as usize]);
    // The first number of this seed's sequence strikes, the next ones do not.
    let faults = Faults {
        rules: vec![rule(Affected::Flush, Struck::Error(5), 500_000, None)],
        seed: (0..).find(|seed| first_alone(*seed)).unwrap(),
        ..Faults::default()
    };
    let serving = serving(&file, PAGE, false, plan(faults));
    let flush = || step(Op::Flush, 0, 0);
    let steps = vec![flush(), write(0, &[2; 512], false), flush(), flush()];
    let results: Vec<_> =
        run(&threads, 0, &serving, vec![steps]).into_iter().map(|(_, result, _)| result).collect();
    assert_eq!(results, [Err(Errno::IO), Ok(512), Err(Errno::IO), Err(Errno::IO)]);
}

/// Whether of ten syncs with this seed the first alone is struck.
fn first_alone(seed: u64) -> bool {
    let rules = vec![rule(Affected::Flush, Struck::Error(5), 500_000, None)];
    let plan = Faults { rules, seed, ..Faults::default() }.of_queues(1).unwrap();
    let sync = Operation {
        queue: 0,
        tag: 0,
        op: Op::Flush,
        at: 0,
        len: 0,
        file: 0,
        offset: 0,
        unit: 1,
        bytes: &[],
        waited: false,
    };
    (0..5).map(|_| plan.fate(&sync) != Fate::Pass).eq([true, false, false, false, false])
}

#[test]
fn a_torn_write_fails_and_leaves_whole_sectors() {
    let threads = IoThreads::start(1).unwrap();
    for direct in [false, true] {
        let len = 16 * PAGE as usize;
        let file = file_of(&vec![1; len]);
        let faults = Faults { torn: CERTAIN, seed: 3, ..Faults::default() };
        let serving = serving(&file, len as u64, direct, plan(faults));
        let outcomes = run(&threads, 0, &serving, vec![vec![write(0, &vec![2; len], false)]]);
        assert_eq!(outcomes[0].1, Err(Errno::IO));
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let new = bytes.iter().take_while(|byte| **byte == 2).count();
        assert!(new > 0 && new < len && new.is_multiple_of(512), "{new} bytes of {len} are new");
        assert!(bytes[new..].iter().all(|byte| *byte == 1));
    }
}

#[test]
fn a_backing_without_room_says_so_to_writers_alone() {
    let threads = IoThreads::start(1).unwrap();
    let file = file_of(&vec![1; 8 * PAGE as usize]);
    let faults = Faults { enospc_after: Some(3 * PAGE), ..Faults::default() };
    let serving = serving(&file, 8 * PAGE, false, plan(faults));
    let wide = vec![2; 2 * PAGE as usize];
    let steps = vec![
        write(0, &wide, false),
        write(2 * PAGE, &wide, false),
        write(4 * PAGE, &wide, false),
        step(Op::Read, 4 * PAGE, PAGE),
        step(Op::Flush, 0, 0),
    ];
    let results: Vec<_> =
        run(&threads, 0, &serving, vec![steps]).into_iter().map(|(_, result, _)| result).collect();
    assert_eq!(results, [Ok(2 * PAGE), Err(Errno::NOSPC), Err(Errno::NOSPC), Ok(PAGE), Ok(0)]);
    let mut bytes = vec![0; 8 * PAGE as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let new = bytes.iter().take_while(|byte| **byte == 2).count();
    assert_eq!(new as u64, 3 * PAGE, "what fits is written");
}

/// Holds each operation on one page until the test says what becomes of it.
#[derive(Debug)]
struct Gate {
    page: u64,
    /// Can be read from once the test has decided.
    bell: OwnedFd,
    /// How often an operation came to the gate.
    came: AtomicU64,
    fate: Fate,
}

impl Interceptor for Gate {
    fn fate(&self, operation: &Operation<'_>) -> Fate {
        if operation.op == Op::Flush || operation.at / PAGE != self.page {
            return Fate::Pass;
        }
        self.came.fetch_add(1, Ordering::SeqCst);
        if operation.waited { self.fate } else { Fate::Until(self.bell.as_raw_fd()) }
    }
}

#[test]
fn who_waits_keeps_nobody_else() {
    let threads = IoThreads::start(1).unwrap();
    for (direct, fate) in [(false, Fate::Pass), (true, Fate::Pass), (true, Fate::Fail(Errno::TIMEDOUT))] {
        let file = file_of(&[1; 3 * PAGE as usize]);
        let bell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let gate = Arc::new(Gate { page: 1, bell, came: AtomicU64::new(0), fate });
        let serving = serving(&file, 3 * PAGE, direct, Arc::clone(&gate));
        let held = vec![write(PAGE, &[2; PAGE as usize], false)];
        let free =
            vec![step(Op::Read, 0, PAGE), write(2 * PAGE, &[3; PAGE as usize], true), step(Op::Flush, 0, 0)];
        let (_, seen, is_closed) = begin(&threads, 0, &serving, vec![held, free], &Arc::default());
        for _ in 0..3 {
            let (tag, result, _) = seen.recv_timeout(PATIENCE).expect("only one request is held");
            assert!(tag == 1 && result.is_ok(), "{tag} {result:?}");
        }
        assert_eq!(gate.came.load(Ordering::SeqCst), 1);
        assert!(seen.try_recv().is_err(), "it is held");
        let mut byte = [0];
        file.read_exact_at(&mut byte, PAGE).unwrap();
        assert_eq!(byte, [1], "what is held has not reached the file");
        rustix::io::write(&gate.bell, &1u64.to_ne_bytes()).unwrap();
        let (tag, result, _) = seen.recv_timeout(PATIENCE).expect("it goes on");
        let (wanted, there) = match fate {
            Fate::Fail(errno) => (Err(errno), 1),
            _ => (Ok(PAGE), 2),
        };
        assert_eq!((tag, result), (0, wanted));
        file.read_exact_at(&mut byte, PAGE).unwrap();
        assert_eq!(byte, [there]);
        is_closed.recv_timeout(PATIENCE).expect("the queue ends");
    }
}

#[test]
fn a_queue_is_changed_only_when_a_held_operation_has_ended() {
    let threads = IoThreads::start(1).unwrap();
    let file = file_of(&[1; PAGE as usize]);
    let bell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let gate = Arc::new(Gate { page: 0, bell, came: AtomicU64::new(0), fate: Fate::Pass });
    let serving = serving(&file, PAGE, true, Arc::clone(&gate));
    let (id, seen, is_closed) =
        begin(&threads, 0, &serving, vec![vec![step(Op::Read, 0, PAGE)]], &Arc::default());
    let other = Arc::new(serving.otherwise(Map::contiguous(0, 0, PAGE), true, DirectIo::Off));
    let refused = threads.change(&[id], &serving, &other, Duration::from_millis(50));
    assert!(matches!(refused, Err(becket_engine::Error::Busy { .. })), "{refused:?}");
    rustix::io::write(&gate.bell, &1u64.to_ne_bytes()).unwrap();
    assert_eq!(seen.recv_timeout(PATIENCE).unwrap().1, Ok(PAGE));
    is_closed.recv_timeout(PATIENCE).expect("the queue ends");
}

#[test]
fn a_late_operation_is_late_and_whole() {
    let threads = IoThreads::start(1).unwrap();
    let file = file_of(&[1; PAGE as usize]);
    let faults =
        Faults { rules: vec![rule(Affected::Read, Struck::Delay(50), CERTAIN, None)], ..Faults::default() };
    let serving = serving(&file, PAGE, true, plan(faults));
    let begun = Instant::now();
    let outcomes = run(&threads, 0, &serving, vec![vec![step(Op::Read, 0, PAGE)]; 64]);
    assert!(outcomes.iter().all(|(_, result, bytes)| *result == Ok(PAGE) && bytes[0] == 1));
    assert!(begun.elapsed() >= Duration::from_millis(50));
}
