//! The engine against real files, through a port that plays the transport's part.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod script;

use std::{
    fs::File,
    io::{Read, Seek},
    os::fd::OwnedFd,
    os::unix::fs::{FileExt, MetadataExt},
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    time::Duration,
};

use becket_engine::{
    Answer, Data, Io, IoThreads, Memory, NewQueue, Op, Port, QueueId, QueueStats, Request, Serving, Summary,
    Token,
};
use becket_image::{Alignment, DirectIo, Extent, Facts, FileSource, Map, Place};
use rustix::io::Errno;
use script::{
    BUFFER, PATIENCE, Random, Step, begin, facts, file_of, run, run_counted, source_of, step, write,
};

#[test]
fn random_requests_agree_with_a_model() {
    const LANE: u64 = 1 << 20;
    const LANES: u64 = 8;
    let threads = IoThreads::start(2).unwrap();
    // Every way that an operation can go: direct or not, tried first or governed at once, uncached or not.
    for variant in 0..8 {
        let direct = variant & 1 != 0;
        // Two files and a map that jumps between them, so that requests are split; the lanes share nothing.
        let files = [file_of(&vec![0; 4 << 20]), file_of(&vec![0; 4 << 20])];
        let extents = (0..64)
            .map(|index| Extent {
                start: index * (128 << 10),
                len: 128 << 10,
                place: Place::Data { source: (index % 2) as u32, offset: (63 - index) / 2 * (128 << 10) },
            })
            .collect();
        let map = Map::from_extents(extents).unwrap();
        assert_eq!(map.len(), LANE * LANES);
        let sources = files.iter().map(|file| {
            let mut source = source_of(file, direct);
            source.facts.nowait = variant & 2 != 0;
            source.facts.uncached = variant & 4 != 0;
            source.into()
        });
        let serving = Arc::new(Serving::new(map.clone(), sources.collect(), false, 1));
        let seed = 0xb3c4e7 + variant;
        let mut random = Random(seed);
        let mut model = vec![0u8; (LANE * LANES) as usize];
        let mut expected: Vec<Vec<Option<Vec<u8>>>> = Vec::new();
        let mut scripts = Vec::new();
        for lane in 0..LANES {
            let mut steps = Vec::new();
            let mut answers = Vec::new();
            for _ in 0..100 {
                let unit = if random.below(2) == 0 { 4096 } else { 512 };
                let len = (1 + random.below(BUFFER as u64 / unit)) * unit;
                let offset = lane * LANE + random.below((LANE - len) / unit + 1) * unit;
                let range = offset as usize..(offset + len) as usize;
                match random.below(10) {
                    0..4 => {
                        steps.push(step(Op::Read, offset, len));
                        answers.push(Some(model[range].to_vec()));
                    }
                    4..8 => {
                        let fill = random.below(255) as u8 + 1;
                        let bytes: Vec<u8> = (0..len).map(|i| fill.wrapping_add((i / 512) as u8)).collect();
                        model[range].copy_from_slice(&bytes);
                        steps.push(write(offset, &bytes, random.below(4) == 0));
                        answers.push(None);
                    }
                    8 => {
                        model[range].fill(0);
                        let op = match random.below(3) {
                            0 => Op::Discard,
                            1 => Op::WriteZeroes { keep_allocated: false },
                            _ => Op::WriteZeroes { keep_allocated: true },
                        };
                        steps.push(step(op, offset, len));
                        answers.push(None);
                    }
                    _ => {
                        steps.push(step(Op::Flush, 0, 0));
                        answers.push(None);
                    }
                }
            }
            scripts.push(steps);
            expected.push(answers);
        }
        let outcomes = run(&threads, usize::from(direct), &serving, scripts);
        let mut at = vec![0; LANES as usize];
        for (tag, result, bytes) in outcomes {
            let lane = usize::from(tag);
            assert!(result.is_ok(), "seed {seed:x} lane {lane} step {}: {result:?}", at[lane]);
            if let Some(wanted) = &expected[lane][at[lane]] {
                assert!(bytes == *wanted, "seed {seed:x} lane {lane} step {} reads other bytes", at[lane]);
            }
            at[lane] += 1;
        }
        let mut whole = vec![0; model.len()];
        for extent in map.extents() {
            let Place::Data { source, offset } = extent.place else { unreachable!() };
            let range = extent.start as usize..(extent.start + extent.len) as usize;
            files[source as usize].read_exact_at(&mut whole[range], offset).unwrap();
        }
        assert!(whole == model, "seed {seed:x}: the files differ from the model");
    }
}

#[test]
fn what_must_not_reach_the_backing_does_not() {
    let threads = IoThreads::start(1).unwrap();
    let file = file_of(&[7; 8192]);
    let map = Map::contiguous(0, 0, 4096);
    let plain = Arc::new(Serving::new(map.clone(), vec![source_of(&file, false).into()], false, 1));
    let steps = vec![
        write(4096, &[1; 512], false),
        write(3584, &[1; 1024], false),
        step(Op::Read, 0, 0),
        step(Op::Read, u64::MAX - 511, 512),
        step(Op::Read, 0, BUFFER as u64 + 512),
        step(Op::Discard, 4096, 4096),
        (Request { op: Op::Read, offset: 0, len: 512, data: Data::Registered }, Vec::new()),
        (Request { op: Op::Read, offset: 0, len: 512, data: Data::None }, Vec::new()),
    ];
    for (_, result, _) in run(&threads, 0, &plain, vec![steps]) {
        assert_eq!(result, Err(Errno::INVAL));
    }
    let read_only = Arc::new(Serving::new(map, vec![source_of(&file, false).into()], true, 1));
    let steps = vec![
        write(0, &[1; 512], false),
        step(Op::Discard, 0, 512),
        step(Op::WriteZeroes { keep_allocated: true }, 0, 512),
    ];
    for (_, result, _) in run(&threads, 0, &read_only, vec![steps]) {
        assert_eq!(result, Err(Errno::ROFS));
    }
    let flushed = run(&threads, 0, &read_only, vec![vec![step(Op::Flush, 0, 0)]]);
    assert_eq!(flushed[0].1, Ok(0));
    let mut bytes = Vec::new();
    (&file).rewind().unwrap();
    (&file).read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, [7; 8192]);
}

#[test]
fn holes_of_the_map_read_as_zeroes_and_refuse_writes() {
    let threads = IoThreads::start(1).unwrap();
    let file = file_of(&[9; 4096]);
    let extents = vec![
        Extent { start: 0, len: 4096, place: Place::Zero },
        Extent { start: 4096, len: 4096, place: Place::Data { source: 0, offset: 0 } },
    ];
    let map = Map::from_extents(extents).unwrap();
    let serving = Arc::new(Serving::new(map, vec![source_of(&file, false).into()], false, 1));
    let steps = vec![step(Op::Read, 2048, 4096), write(0, &[1; 512], false), step(Op::Discard, 0, 4096)];
    let outcomes = run(&threads, 0, &serving, vec![steps]);
    assert_eq!(outcomes[0].1, Ok(4096));
    assert!(outcomes[0].2[..2048].iter().all(|byte| *byte == 0));
    assert!(outcomes[0].2[2048..].iter().all(|byte| *byte == 9));
    assert_eq!(outcomes[1].1, Err(Errno::IO));
    assert_eq!(outcomes[2].1, Ok(4096));
}

#[test]
fn a_file_truncated_behind_our_back_gives_errors_and_nothing_worse() {
    let threads = IoThreads::start(1).unwrap();
    let file = file_of(&[5; 65536]);
    let map = Map::contiguous(0, 0, 65536);
    let serving = Arc::new(Serving::new(map, vec![source_of(&file, true).into()], false, 1));
    file.set_len(6144).unwrap();
    let steps = vec![step(Op::Read, 0, 4096), step(Op::Read, 4096, 8192), step(Op::Read, 32768, 4096)];
    let outcomes = run(&threads, 0, &serving, vec![steps]);
    assert_eq!(outcomes[0].1, Ok(4096));
    assert_eq!(outcomes[1].1, Err(Errno::IO));
    assert_eq!(outcomes[2].1, Err(Errno::IO));
}

#[test]
fn discard_gives_space_back() {
    let threads = IoThreads::start(1).unwrap();
    let file = file_of(&vec![3; 1 << 20]);
    file.sync_all().unwrap();
    let before = file.metadata().unwrap().blocks();
    let map = Map::contiguous(0, 0, 1 << 20);
    let serving = Arc::new(Serving::new(map, vec![source_of(&file, false).into()], false, 1));
    let steps = vec![step(Op::Discard, 0, 1 << 20), step(Op::Flush, 0, 0)];
    for (_, result, _) in run(&threads, 0, &serving, vec![steps]) {
        assert!(result.is_ok());
    }
    assert!(before >= 2048, "the file was allocated: {before}");
    assert!(file.metadata().unwrap().blocks() < before / 2);
}

#[test]
fn a_full_device_says_so() {
    let threads = IoThreads::start(1).unwrap();
    let full = std::fs::OpenOptions::new().read(true).write(true).open("/dev/full").unwrap();
    let map = Map::contiguous(0, 0, 4096);
    let serving = Arc::new(Serving::new(map, vec![source_of(&full, false).into()], false, 1));
    let outcomes = run(&threads, 0, &serving, vec![vec![write(0, &[1; 512], false)]]);
    assert_eq!(outcomes[0].1, Err(Errno::NOSPC));
}

#[test]
fn a_failed_flush_is_never_forgotten() {
    let threads = IoThreads::start(1).unwrap();
    // fdatasync of a character device is EINVAL: a stand-in for a backing that cannot be synced.
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").unwrap();
    let map = Map::contiguous(0, 0, 4096);
    let serving = Arc::new(Serving::new(map, vec![source_of(&null, false).into()], false, 1));
    let steps = vec![step(Op::Flush, 0, 0), step(Op::Flush, 0, 0)];
    for (_, result, _) in run(&threads, 0, &serving, vec![steps]) {
        assert_eq!(result, Err(Errno::INVAL));
    }
}

#[test]
fn hundreds_of_queues_come_and_go_on_one_thread() {
    let threads = IoThreads::start(1).unwrap();
    let file = file_of(&[1; 4096]);
    for _ in 0..300 {
        let map = Map::contiguous(0, 0, 4096);
        let serving = Arc::new(Serving::new(map, vec![source_of(&file, false).into()], false, 1));
        let outcomes = run(&threads, 0, &serving, vec![vec![step(Op::Read, 0, 4096)]; 4]);
        assert!(outcomes.iter().all(|(_, result, bytes)| *result == Ok(4096) && *bytes == [1; 4096]));
    }
}

/// Reads the block at 4096 again and again until it succeeds, which it does once the map has grown.
struct PatientPort {
    descriptor: OwnedFd,
    refused: Sender<()>,
    reported: bool,
}

impl Port for PatientPort {
    fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    fn start(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        io.begin(0, Request { op: Op::Read, offset: 0, len: 4096, data: Data::Buffer });
        Ok(())
    }

    fn completed(&mut self, _: &mut Io<'_>, _: Token, _: Answer) {}

    fn finished(&mut self, io: &mut Io<'_>, tag: u16, result: Result<u64, Errno>) {
        let grown = Request { op: Op::Read, offset: 4096, len: 4096, data: Data::Buffer };
        match result {
            Ok(_) if self.reported && io.buffer(tag)[0] == 2 => io.close(),
            Err(errno) => {
                assert_eq!(errno, Errno::INVAL);
                if !std::mem::replace(&mut self.reported, true) {
                    self.refused.send(()).unwrap();
                }
                // Through the ring and not at once, so that orders are seen meanwhile.
                io.begin(tag, Request { offset: 0, ..grown });
            }
            Ok(_) => io.begin(tag, grown),
        }
    }
}

#[test]
fn a_live_queue_takes_another_map() {
    let threads = IoThreads::start(1).unwrap();
    let file = file_of(&[[1; 4096], [2; 4096]].concat());
    let serving =
        Arc::new(Serving::new(Map::contiguous(0, 0, 4096), vec![source_of(&file, false).into()], false, 1));
    let (refused, was_refused) = channel();
    let (closed, is_closed) = channel();
    let queue = NewQueue {
        port: Box::new(PatientPort {
            descriptor: File::open("/dev/null").unwrap().into(),
            refused,
            reported: false,
        }),
        depth: 1,
        number: 0,
        serving: Arc::clone(&serving),
        memory: Memory::Buffers(BUFFER),
        batch: None,
        stats: Arc::default(),
        on_closed: Box::new(move || closed.send(()).unwrap()),
    };
    let id = threads.add(0, queue).unwrap();
    was_refused.recv_timeout(PATIENCE).expect("beyond the map is refused");
    let larger = Arc::new(serving.otherwise(Map::contiguous(0, 0, 8192), false, DirectIo::Auto));
    threads.change(&[id], &serving, &larger, PATIENCE).unwrap();
    is_closed.recv_timeout(PATIENCE).expect("the larger map is used");
    threads.change(&[id], &larger, &serving, PATIENCE).expect("a queue that has ended is not an obstacle");
}

/// Hands a command to the kernel and then says that it cannot begin.
struct HalfStartedPort(OwnedFd);

impl Port for HalfStartedPort {
    fn descriptor(&self) -> &OwnedFd {
        &self.0
    }

    fn start(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        io.command(Token { kind: 0, tag: 0 }, 0, [0; 16], None)?;
        Err(Errno::NOMEM)
    }

    fn completed(&mut self, _: &mut Io<'_>, _: Token, _: Answer) {}

    fn finished(&mut self, _: &mut Io<'_>, _: u16, _: Result<u64, Errno>) {}
}

#[test]
fn a_port_that_fails_half_way_is_an_error_and_still_ends() {
    let threads = IoThreads::start(1).unwrap();
    let file = file_of(&[1; 4096]);
    let serving =
        Arc::new(Serving::new(Map::contiguous(0, 0, 4096), vec![source_of(&file, false).into()], false, 1));
    let (closed, is_closed) = channel();
    let queue = NewQueue {
        port: Box::new(HalfStartedPort(File::open("/dev/null").unwrap().into())),
        depth: 1,
        number: 0,
        serving,
        memory: Memory::Buffers(BUFFER),
        batch: None,
        stats: Arc::default(),
        on_closed: Box::new(move || closed.send(()).unwrap()),
    };
    let refused = threads.add(0, queue);
    assert!(refused.is_err(), "the caller would wait for a queue that never serves");
    is_closed.recv_timeout(Duration::from_secs(120)).expect("it ends when its command has come back");
}

#[test]
fn what_was_done_is_counted() {
    const PAGE: u64 = 4096;
    let threads = IoThreads::start(1).unwrap();
    let file = file_of(&[7; 4 * PAGE as usize]);
    let serving = Arc::new(Serving::new(
        Map::contiguous(0, 0, 4 * PAGE),
        vec![source_of(&file, false).into()],
        false,
        1,
    ));
    let stats = Arc::new(QueueStats::default());
    let reads = vec![step(Op::Read, 0, PAGE), step(Op::Read, PAGE, 2 * PAGE), step(Op::Read, 4 * PAGE, PAGE)];
    let others = vec![
        write(512, &[2; 1024], true),
        write(0, &[1; 512], false),
        step(Op::Flush, 0, 0),
        step(Op::Discard, 2 * PAGE, PAGE),
        step(Op::WriteZeroes { keep_allocated: true }, 3 * PAGE, PAGE),
    ];
    let began = std::time::Instant::now();
    run_counted(&threads, 0, &serving, vec![reads, others], &stats);
    let took = began.elapsed().as_nanos() as u64;
    let summary = Summary::of(std::iter::once(&*stats));
    let zeroed = summary.write_zeroes.unwrap();
    let counted = [&summary.read, &summary.write, &summary.flush, &summary.discard, &zeroed]
        .map(|kind| (kind.operations, kind.bytes));
    assert_eq!(counted, [(3, 3 * PAGE), (2, 1536), (1, 0), (1, PAGE), (1, PAGE)]);
    assert_eq!(summary.read.errors, Some(1), "beyond the end");
    assert_eq!((summary.write.errors, summary.flush.errors, summary.in_flight), (Some(0), Some(0), 0));
    for kind in [&summary.read, &summary.write, &summary.flush] {
        let max = kind.max_ns.unwrap();
        assert!(max <= took, "{max} ns of {took}");
        assert!(kind.p50_ns <= kind.max_ns && kind.mean_ns <= kind.max_ns);
    }
    // A sync goes to the disk; that takes time on any machine, and more than one turn.
    assert!(summary.flush.max_ns > Some(0), "{:?}", summary.flush);
}

/// A backing whose reads wait until data is written to the pipe that comes with it.
fn stuck() -> (Arc<Serving>, OwnedFd) {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let facts = Facts { writable: false, nowait: false, ..facts(None) };
    let source = FileSource::of(reader, None, facts).into();
    (Arc::new(Serving::new(Map::contiguous(0, 0, 1 << 20), vec![source], true, 1)), writer)
}

#[test]
fn nobody_waits_for_operations_that_block_but_those_like_them() {
    const BLOCKED: usize = 40;
    let threads = IoThreads::start(1).unwrap();
    let (serving, writer) = stuck();
    let reads = vec![vec![step(Op::Read, 0, 512)]; BLOCKED];
    let flush = vec![step(Op::Flush, 0, 0)];
    let scripts = reads.into_iter().chain([flush]).collect();
    let (_, seen, is_closed) = begin(&threads, 0, &serving, scripts, &Arc::default());
    let (tag, result, _) = seen.recv_timeout(Duration::from_secs(60)).expect("the flush waits for reads");
    assert_eq!((usize::from(tag), result), (BLOCKED, Ok(0)));

    // Another device of the same ring, with operations that block too.
    let file = file_of(&[3; 8192]);
    let mut other = source_of(&file, false);
    other.facts.nowait = false;
    let other = Arc::new(Serving::new(Map::contiguous(0, 0, 8192), vec![other.into()], false, 1));
    let scripts =
        vec![vec![step(Op::Read, 0, 4096), write(4096, &[4; 4096], true), step(Op::Discard, 0, 4096)]; 8];
    for (_, result, _) in run(&threads, 0, &other, scripts) {
        assert_eq!(result, Ok(4096));
    }

    assert!(seen.try_recv().is_err(), "nothing was there to be read");
    rustix::io::write(&writer, &[7; BLOCKED * 512]).unwrap();
    is_closed.recv_timeout(Duration::from_secs(60)).expect("all come to their turn");
    let mut tags: Vec<u16> = seen
        .iter()
        .map(|(tag, result, bytes)| {
            assert_eq!((result, bytes.as_slice()), (Ok(512), [7; 512].as_slice()));
            tag
        })
        .collect();
    tags.sort_unstable();
    assert_eq!(tags, (0..BLOCKED as u16).collect::<Vec<_>>());
}

#[test]
fn switching_to_and_fro_loses_no_sector_of_a_shared_page() {
    const SECTOR: u64 = 512;
    const LANES: u64 = 8;
    const PAGES: u64 = 4;
    const ROUNDS: u64 = 400;
    let threads = IoThreads::start(2).unwrap();
    for nowait in [true, false] {
        let file = file_of(&vec![0; (LANES * PAGES * SECTOR) as usize]);
        let mut files = source_of(&file, true);
        files.facts.direct = Some(Alignment { memory: 512, offset: 512 });
        files.facts.nowait = nowait;
        files.facts.uncached = !nowait;
        let map = Map::contiguous(0, 0, LANES * PAGES * SECTOR);
        let serving =
            Arc::new(Serving::new(map.clone(), vec![files.into()], false, 2).with_direct_io(DirectIo::Off));
        // Each lane has a sector of its own in each page, and reads what it has written.
        let byte = |lane: u64, round: u64| (lane * 31 + round * 7 + 1) as u8;
        let place = |lane: u64, round: u64| ((round % PAGES) * LANES + lane) * SECTOR;
        let script = |lane: u64| -> Vec<Step> {
            let rounds = (0..ROUNDS).flat_map(|round| {
                let at = place(lane, round);
                [write(at, &[byte(lane, round); SECTOR as usize], false), step(Op::Read, at, SECTOR)]
            });
            rounds.collect()
        };
        // Two queues on two threads, with every other sector each.
        let queues: Vec<_> = (0..2)
            .map(|number| {
                let scripts = (0..LANES / 2).map(|lane| script(2 * lane + number)).collect();
                begin(&threads, number as usize, &serving, scripts, &Arc::default())
            })
            .collect();
        let ids: Vec<QueueId> = queues.iter().map(|(id, ..)| *id).collect();
        let ways = [DirectIo::Off, DirectIo::Auto];
        let mut switches = 0;
        let mut ended = [false; 2];
        while ended.contains(&false) {
            switches += 1;
            let new = Arc::new(serving.otherwise(map.clone(), false, ways[switches % 2]));
            threads.change(&ids, &serving, &new, PATIENCE).unwrap();
            for (ended, (_, _, is_closed)) in ended.iter_mut().zip(&queues) {
                *ended |= is_closed.try_recv().is_ok();
            }
            assert!(switches < 1_000_000, "the queues never end");
        }
        assert!(switches > 4, "only {switches} switches");
        for (number, (_, seen, _)) in queues.iter().enumerate() {
            let mut steps = [0; LANES as usize / 2];
            for (tag, result, bytes) in seen.iter() {
                let lane = 2 * u64::from(tag) + number as u64;
                let (round, reads) = (steps[usize::from(tag)] / 2, steps[usize::from(tag)] % 2 == 1);
                steps[usize::from(tag)] += 1;
                assert_eq!(result, Ok(SECTOR), "lane {lane} round {round}");
                assert!(!reads || bytes == [byte(lane, round); SECTOR as usize], "lane {lane} round {round}");
            }
            assert!(steps.iter().all(|steps| *steps == 2 * ROUNDS), "{steps:?}");
        }
        for lane in 0..LANES {
            for round in ROUNDS - PAGES..ROUNDS {
                let mut bytes = [0; SECTOR as usize];
                file.read_exact_at(&mut bytes, place(lane, round)).unwrap();
                assert_eq!(bytes, [byte(lane, round); SECTOR as usize], "lane {lane} in the file");
            }
        }
    }
}
