//! An image is exported to a driver that speaks vhost-user in this process: what it writes and reads, what a
//! hostile one does, and what happens to its requests when the back-end is killed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use becket_engine::{Faults, GuestPart, IoThreads};
use becket_image::{DirectIo, OpenOptions as ImageOptions, Opened};
use becket_transport::geometry;
use becket_transport::serve::{Change, Content, Setup};
use becket_transport::vhost_user::{Departure, Hooks, VhostUser};
use becket_virtio::{
    BASE, DISCARD, Driver, EVENT_IDX, FLUSH, IN, INDIRECT, OP_DISCARD, OP_FLUSH, OP_ID, OP_WRITE_ZEROES, OUT,
    PACKED, Shape, USER, WRITE_ZEROES,
};
use rand::{Rng as _, SeedableRng as _, rngs::SmallRng};

#[path = "vhost_user/durable.rs"]
mod durable;
#[path = "vhost_user/endless.rs"]
mod endless;

const SIZE: usize = 4 << 20;
const PATIENCE: Duration = Duration::from_secs(60);
const SHAPE: Shape =
    Shape { queues: 1, count: 64, depth: 16, buffer: 64 << 10, features: INDIRECT | EVENT_IDX };

/// An image, and who exports it.
struct Bench {
    image: tempfile::NamedTempFile,
    export: VhostUser,
    threads: Arc<IoThreads>,
    tether: OwnedFd,
    closed: Receiver<()>,
    gone: Receiver<()>,
    ended: std::sync::mpsc::Sender<()>,
}

fn opened(path: &Path) -> Opened {
    becket_image::open(path, &ImageOptions { shared: true, ..ImageOptions::default() }).unwrap()
}

fn export(
    path: &Path,
    threads: &Arc<IoThreads>,
    (tether, queues): (OwnedFd, u16),
    (direct_io, faults): (DirectIo, Option<Faults>),
    on_closed: Box<dyn FnOnce() + Send>,
) -> VhostUser {
    let Opened { map, sources, block_size, read_only, .. } = opened(path);
    let geometry = geometry(&map, &sources, block_size, read_only, 1 << 20);
    let content = Content { faults, ..Content::plain(map, sources, direct_io) };
    let setup = Setup { id: 1, first: 0, queues, depth: 64, geometry, content };
    VhostUser::serve(threads, setup, "serial-1", tether, on_closed).unwrap()
}

fn hooks(ended: impl FnOnce() + Send + 'static) -> Hooks {
    let ended = Box::new(move |left| {
        drop(left);
        ended();
    });
    Hooks { keep: Box::new(drop), ended }
}

impl Bench {
    fn new(queues: u16, direct_io: DirectIo) -> Bench {
        Bench::with_faults(queues, direct_io, None)
    }

    fn with_faults(queues: u16, direct_io: DirectIo, faults: Option<Faults>) -> Bench {
        let place = std::env::var_os("BECKET_SCRATCH").map_or_else(std::env::temp_dir, Into::into);
        let image = tempfile::NamedTempFile::new_in(place).unwrap();
        image.as_file().set_len(SIZE as u64).unwrap();
        let threads = Arc::new(IoThreads::start(2).unwrap());
        let (reader, tether) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        let (closed, is_closed) = channel();
        let on_closed = Box::new(move || _ = closed.send(()));
        let export = export(image.path(), &threads, (tether, queues), (direct_io, faults), on_closed);
        let (ended, gone) = channel();
        Bench { image, export, threads, tether: reader, closed: is_closed, gone, ended }
    }

    fn socket(&self) -> OwnedFd {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let ended = self.ended.clone();
        self.export.connect(Departure::new(theirs.into()), hooks(move || _ = ended.send(())));
        ours.into()
    }

    fn driver(&self, shape: Shape) -> Driver {
        Driver::start(self.socket(), shape).unwrap()
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.image.path()).unwrap()
    }
}

/// Carries one request out.
fn one(driver: &mut Driver, op: u32, offset: u64, len: u32, fill: &[u8]) -> (u8, Vec<u8>) {
    let queue = &mut driver.queues[0];
    queue.submit(op, offset, len, &[], fill).unwrap();
    queue.announce();
    let ended = queue.next_ended(PATIENCE).unwrap();
    let mut bytes = vec![0; len as usize];
    queue.bytes_of(ended.slot, &mut bytes);
    (ended.status, bytes)
}

fn range(driver: &mut Driver, op: u32, offset: u64, len: u64, flags: u32) -> u8 {
    let queue = &mut driver.queues[0];
    queue.submit_range(op, offset, len, flags).unwrap();
    queue.announce();
    queue.next_ended(PATIENCE).unwrap().status
}

#[test]
fn any_requests_do_to_the_image_what_they_do_to_a_model() {
    for round in 0..6 {
        let direct_io = [DirectIo::Off, DirectIo::Auto, DirectIo::Off][round % 3];
        let bench = Bench::new(1, direct_io);
        // Chains of three descriptors in the ring, or tables of many; all kicks and calls, or those wanted.
        let features = [INDIRECT | EVENT_IDX | DISCARD | WRITE_ZEROES, INDIRECT, EVENT_IDX][round % 3]
            | if round < 3 { 0 } else { PACKED };
        let mut driver = bench.driver(Shape { features, ..SHAPE });
        let mut random = SmallRng::seed_from_u64(round as u64 + 1);
        let mut model = vec![0; SIZE];
        let mut reads = std::collections::BTreeMap::new();
        // Requests that are under way together do not overlap.
        for _ in 0..120 {
            let lanes = SIZE / 16;
            for lane in 0..16 {
                let sectors = random.random_range(1..=128usize);
                let from = lane * lanes + random.random_range(0..lanes / 512 - sectors) * 512;
                let len = sectors * 512;
                let mut cuts: Vec<u32> = Vec::new();
                if features & INDIRECT != 0 && random.random_bool(0.5) {
                    let many = random.random_range(1..100);
                    cuts = (0..many).map(|_| random.random_range(1..len as u32)).collect();
                    cuts.sort_unstable();
                }
                let queue = &mut driver.queues[0];
                if random.random_bool(0.5) {
                    let bytes: Vec<u8> = (0..len).map(|_| random.random()).collect();
                    model[from..from + len].copy_from_slice(&bytes);
                    queue.submit(OUT, from as u64, len as u32, &cuts, &bytes).unwrap();
                } else {
                    let slot = queue.submit(IN, from as u64, len as u32, &cuts, &[]).unwrap();
                    reads.insert(slot, from..from + len);
                }
            }
            let queue = &mut driver.queues[0];
            queue.announce();
            while queue.under_way() > 0 {
                let ended = queue.next_ended(PATIENCE).unwrap();
                assert_eq!(ended.status, 0);
                let Some(range) = reads.remove(&ended.slot) else {
                    assert_eq!(ended.written, 1);
                    continue;
                };
                let mut bytes = vec![0; range.len()];
                queue.bytes_of(ended.slot, &mut bytes);
                assert_eq!(ended.written as usize, bytes.len() + 1);
                assert!(bytes == model[range.clone()], "{range:?}");
            }
        }
        assert!(bench.bytes() == model);
    }
}

#[test]
fn what_is_no_read_or_write_is_carried_out_or_refused() {
    let bench = Bench::new(2, DirectIo::Off);
    let features = INDIRECT | FLUSH | DISCARD | WRITE_ZEROES;
    let mut driver = bench.driver(Shape { features, ..SHAPE });
    assert_eq!(driver.front.queues().unwrap(), 2);
    let config = driver.front.config().unwrap();
    assert_eq!(u64::from_le_bytes(config[..8].try_into().unwrap()), SIZE as u64 / 512);
    assert_eq!(one(&mut driver, OUT, 0, 8192, &[7; 8192]).0, 0);
    assert_eq!(range(&mut driver, OP_FLUSH, 0, 0, 0), 0);
    assert_eq!(range(&mut driver, OP_DISCARD, 0, 4096, 0), 0);
    assert_eq!(one(&mut driver, IN, 0, 8192, &[]), (0, [[0; 4096], [7; 4096]].concat()));
    assert_eq!(range(&mut driver, OP_WRITE_ZEROES, 4096, 512, 1), 0);
    assert_eq!(range(&mut driver, OP_WRITE_ZEROES, 4608, 512, 0), 0);
    assert_eq!(one(&mut driver, IN, 4096, 2048, &[]), (0, [[0; 1024], [7; 1024]].concat()));
    let (status, serial) = one(&mut driver, OP_ID, 0, 20, &[]);
    assert_eq!((status, &serial[..9]), (0, &b"serial-1\0"[..]));
    assert_eq!(one(&mut driver, IN, SIZE as u64, 512, &[]).0, 1, "beyond the end");
    assert_eq!(one(&mut driver, OUT, SIZE as u64 - 512, 1024, &[0; 1024]).0, 1, "across it");
    assert_eq!(one(&mut driver, IN, 0, 100, &[]).0, 1, "no whole sector");
    assert_eq!(one(&mut driver, 77, 0, 512, &[]).0, 2, "unknown");
    assert_eq!(range(&mut driver, OP_DISCARD, 0, 4096, 1), 2, "an unknown flag");
    assert_eq!(one(&mut driver, IN, 0, 512, &[]).0, 0, "and all goes on");
    let stats = bench.export.served().stats();
    assert!(stats.read.operations >= 3 && stats.flush.operations == 1, "{stats:?}");
}

#[test]
fn rings_stop_and_go_on_where_they_stopped() {
    for layout in [0, PACKED] {
        stop_and_go_on(Shape { features: SHAPE.features | layout, ..SHAPE });
    }
}

fn stop_and_go_on(shape: Shape) {
    let bench = Bench::new(1, DirectIo::Off);
    let mut driver = bench.driver(shape);
    for round in 0..5u8 {
        for at in 0..7u64 {
            assert_eq!(one(&mut driver, OUT, at * 4096, 4096, &[round; 4096]).0, 0);
        }
        let requests = 7 * (u32::from(round) + 1);
        let place = (requests | 1 << 15) * 0x1_0001;
        assert_eq!(
            driver.front.stop(0).unwrap(),
            if shape.features & PACKED == 0 { requests } else { place }
        );
        // Nobody takes this one until the ring runs again.
        driver.queues[0].submit(IN, 0, 4096, &[], &[]).unwrap();
        driver.queues[0].announce();
        driver.queues[0].kick();
        assert!(driver.queues[0].next_ended(Duration::from_millis(20)).is_err());
        driver.queues[0].kick();
        let queue = &driver.queues[0];
        let (kick, call) = (queue.kick.as_fd(), queue.call.as_fd());
        driver.front.set_events(0, kick, call).unwrap();
        assert_eq!(driver.queues[0].next_ended(PATIENCE).unwrap().status, 0);
        // One more was taken, so that the numbers above hold.
        driver = {
            drop(driver);
            bench.gone.recv_timeout(PATIENCE).unwrap();
            let mut driver = bench.driver(shape);
            for at in 0..7 * (u64::from(round) + 1) {
                assert_eq!(one(&mut driver, IN, at % 7 * 4096, 4096, &[]), (0, vec![round; 4096]));
            }
            driver
        };
    }
}

#[test]
fn memory_and_events_may_change_while_requests_are_under_way() {
    let bench = Bench::new(1, DirectIo::Auto);
    let mut driver = bench.driver(SHAPE);
    let len = rustix::fs::fstat(driver.file()).unwrap().st_size as u64;
    let part = GuestPart { guest: BASE, user: USER, len, offset: 0 };
    for round in 0..50u64 {
        for slot in 0..8u64 {
            let bytes = [round as u8; 4096];
            driver.queues[0].submit(OUT, (round * 8 + slot) % 1024 * 4096, 4096, &[], &bytes).unwrap();
        }
        driver.queues[0].announce();
        driver.front.set_memory(&[(part, driver.file().as_fd())]).unwrap();
        let queue = &driver.queues[0];
        driver.front.set_events(0, queue.kick.as_fd(), queue.call.as_fd()).unwrap();
        while driver.queues[0].under_way() > 0 {
            assert_eq!(driver.queues[0].next_ended(PATIENCE).unwrap().status, 0);
        }
    }
    for (at, page) in bench.bytes().chunks(4096).take(400).enumerate() {
        assert!(page == [(at / 8) as u8; 4096], "page {at}");
    }
}

/// What a hostile driver does to a ring; the device may do anything to the driver, and nothing to others.
fn hostile(driver: &mut Driver, kind: u32, random: &mut SmallRng) {
    const NEXT: u64 = 1 << 32;
    const WRITES: u64 = 2 << 32;
    const TABLE: u64 = 4 << 32;
    let page = BASE + 4096;
    let queue = &mut driver.queues[0];
    let mut post = |descriptors: &[(u64, u64)]| {
        for (index, (address, rest)) in descriptors.iter().enumerate() {
            queue.describe(index as u16, *address, *rest);
        }
        queue.make_available(0);
        queue.announce();
        queue.kick();
    };
    match kind {
        0 => post(&[(page, 16 | NEXT), (page, 16 | NEXT | 1 << 48)]),
        1 => post(&[(page, 16 | NEXT | 60_000 << 48)]),
        2 => post(&[(u64::MAX - 7, 16)]),
        3 => post(&[(0, 1 | WRITES)]),
        4 => post(&[(page, 16 | TABLE)]),
        5 => post(&[(page, 15 | TABLE)]),
        6 => post(&[(u64::MAX - 15, 4096 | TABLE)]),
        7 => post(&[(page, 16 | TABLE | NEXT)]),
        8 => {
            // A table that goes in circles, with ranges that the device writes.
            for index in 0..250u64 {
                let rest = 512 | NEXT | WRITES | ((index + 1) % 250) << 48;
                assert!(queue_write(driver, BASE + 65536 + 16 * index, page, rest));
            }
            let queue = &mut driver.queues[0];
            queue.describe(0, BASE + 65536, 4000 | TABLE);
            queue.make_available(0);
            queue.announce();
            queue.kick();
        }
        9 => {
            queue.make_available(64);
            queue.announce();
            queue.kick();
        }
        10 => {
            queue.announce_as(40_000);
            queue.kick();
        }
        // A header and no place for the status.
        11 => post(&[(page, 16)]),
        12 => post(&[(page, 16 | NEXT | 1 << 48), (page, u64::from(u32::MAX) | WRITES)]),
        13 => post(&[(page, NEXT | 1 << 48), (page, WRITES)]),
        // Anything.
        _ => {
            let flags = || [0, NEXT, WRITES, NEXT | WRITES, TABLE, TABLE | NEXT];
            let descriptors: Vec<_> = (0..16)
                .map(|_| {
                    let address = match random.random_range(0..4) {
                        0 => random.random(),
                        1 => u64::MAX - random.random_range(0..64),
                        _ => BASE + random.random_range(0..1 << 20),
                    };
                    let len = match random.random_range(0..3) {
                        0 => u64::from(random.random::<u32>()),
                        _ => random.random_range(0..70) * 16,
                    };
                    let next = random.random_range(0..20u64) << 48;
                    (address, len | flags()[random.random_range(0..6)] | next)
                })
                .collect();
            post(&descriptors);
        }
    }
}

fn queue_write(driver: &Driver, at: u64, address: u64, rest: u64) -> bool {
    driver.memory().write(at, &[address.to_le_bytes(), rest.to_le_bytes()].concat())
}

#[test]
fn a_hostile_driver_harms_itself_alone() {
    let bench = Bench::new(1, DirectIo::Off);
    bench.image.as_file().write_all_at(&vec![5; SIZE], 0).unwrap();
    let mut random = SmallRng::seed_from_u64(7);
    for kind in 0..400 {
        let layout = if kind % 2 == 0 { 0 } else { PACKED };
        let mut driver = bench.driver(Shape { features: SHAPE.features | layout, ..SHAPE });
        hostile(&mut driver, kind / 2, &mut random);
        // The ring is heard and stopped all the same.
        driver.front.stop(0).unwrap();
        drop(driver);
        bench.gone.recv_timeout(PATIENCE).unwrap();
    }
    let mut driver = bench.driver(SHAPE);
    assert_eq!(one(&mut driver, IN, 8192, 4096, &[]), (0, vec![5; 4096]));
}

#[test]
fn memory_that_is_taken_away_ends_a_ring_and_no_process() {
    let bench = Bench::new(1, DirectIo::Off);
    let mut driver = bench.driver(SHAPE);
    assert_eq!(one(&mut driver, OUT, 0, 4096, &[1; 4096]).0, 0);
    driver.queues[0].submit(IN, 0, 4096, &[], &[]).unwrap();
    // The tables stay, the requests and their buffers go.
    rustix::fs::ftruncate(driver.file(), 16384).unwrap();
    driver.queues[0].announce();
    driver.queues[0].kick();
    driver.front.stop(0).unwrap();
    drop(driver);
    bench.gone.recv_timeout(PATIENCE).unwrap();
    let mut driver = bench.driver(SHAPE);
    assert_eq!(one(&mut driver, IN, 0, 4096, &[]), (0, vec![1; 4096]), "the next machine is served");
}

#[test]
fn a_front_end_that_talks_nonsense_loses_its_connection() {
    let bench = Bench::new(1, DirectIo::Off);
    let mut random = SmallRng::seed_from_u64(3);
    for round in 0..300u32 {
        let driver = bench.driver(SHAPE);
        let len = random.random_range(0..64usize);
        let bytes: Vec<u8> = (0..len).map(|_| random.random()).collect();
        let request = if round < 50 { round } else { random.random_range(0..40) };
        // Whether it is refused, answered or taken, the export lives.
        driver.front.send(request, 1, &bytes, &[]).unwrap();
        drop(driver);
        bench.gone.recv_timeout(PATIENCE).unwrap();
    }
    let silent = bench.driver(SHAPE);
    silent.front.send(1, 7, &[], &[]).unwrap();
    bench.gone.recv_timeout(PATIENCE).expect("another version ends the connection");
    assert!(silent.front.is_closed());
    let mut driver = bench.driver(SHAPE);
    assert_eq!(one(&mut driver, IN, 0, 4096, &[]).0, 0);
}

#[test]
fn a_disk_changes_under_its_front_end() {
    let bench = Bench::new(1, DirectIo::Off);
    let mut driver = bench.driver(SHAPE);
    assert_eq!(one(&mut driver, IN, SIZE as u64, 512, &[]).0, 1);
    // The back-end's own channel, over which it says that something has changed.
    let (ours, theirs) = UnixStream::pair().unwrap();
    driver.front.tell(21, &[], &[theirs.as_fd()]).unwrap();
    drop(theirs);
    bench.image.as_file().set_len(2 * SIZE as u64).unwrap();
    let Opened { map, sources, block_size, .. } = opened(bench.image.path());
    let larger = geometry(&map, &sources, block_size, false, 1 << 20);
    let change = Change { map, sources: Some(sources), read_only: false, direct_io: DirectIo::Off };
    bench.export.served().change(&bench.threads, change).unwrap();
    bench.export.changed(larger);
    let mut message = [0; 12];
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    std::io::Read::read_exact(&mut &ours, &mut message).unwrap();
    assert_eq!(message, [2u32, 1, 0].map(u32::to_ne_bytes).concat()[..], "CONFIG_CHANGE_MSG");
    assert_eq!(one(&mut driver, IN, SIZE as u64, 512, &[]), (0, vec![0; 512]));
    let config = driver.front.config().unwrap();
    assert_eq!(u64::from_le_bytes(config[..8].try_into().unwrap()), 2 * SIZE as u64 / 512);
    // A later ring serves the larger image, too.
    drop(driver);
    bench.gone.recv_timeout(PATIENCE).unwrap();
    assert_eq!(one(&mut bench.driver(SHAPE), OUT, SIZE as u64, 512, &[1; 512]).0, 0);
}

#[test]
fn an_export_that_is_left_ends_and_lets_go_of_its_tether() {
    let bench = Bench::new(1, DirectIo::Off);
    rustix::io::ioctl_fionbio(&bench.tether, true).unwrap();
    let mut driver = bench.driver(SHAPE);
    assert_eq!(one(&mut driver, OUT, 0, 512, &[1; 512]).0, 0);
    assert_eq!(rustix::io::read(&bench.tether, &mut [0u8]), Err(rustix::io::Errno::AGAIN));
    bench.export.leave();
    bench.closed.recv_timeout(PATIENCE).expect("it ends");
    assert_eq!(rustix::io::read(&bench.tether, &mut [0u8]), Ok(0));
    assert!(driver.front.is_closed());
    let (late, _theirs) = UnixStream::pair().unwrap();
    let (ended, gone) = channel();
    bench.export.connect(Departure::new(late.into()), hooks(move || ended.send(()).unwrap()));
    gone.recv_timeout(PATIENCE).expect("one that comes too late is turned away");
}

/// Serves the bench's image anew, with the front-end that was left.
fn again(bench: &mut Bench, front: Departure, hooks: Hooks) {
    let (reader, tether) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let (closed, is_closed) = channel();
    let on_closed = Box::new(move || _ = closed.send(()));
    let how = (DirectIo::Off, None);
    bench.export = export(bench.image.path(), &bench.threads, (tether, 1), how, on_closed);
    (bench.tether, bench.closed) = (reader, is_closed);
    bench.export.connect(front, hooks);
}

#[test]
fn a_front_end_goes_from_one_back_end_to_the_next() {
    for layout in [0, PACKED] {
        goes_to_the_next(Shape { features: SHAPE.features | layout, ..SHAPE });
    }
}

fn goes_to_the_next(shape: Shape) {
    let mut bench = Bench::new(1, DirectIo::Off);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let (left, is_left) = channel();
    let (kept, is_kept) = channel();
    let hooks = || {
        let (left, kept) = (left.clone(), kept.clone());
        let keep = Box::new(move |departure: Option<Departure>| _ = kept.send(departure));
        Hooks { keep, ended: Box::new(move |departure| _ = left.send(departure)) }
    };
    bench.export.connect(Departure::new(theirs.into()), hooks());
    let mut driver = Driver::start(ours.into(), shape).unwrap();
    for round in 1..=5u8 {
        assert_eq!(one(&mut driver, OUT, u64::from(round) * 4096, 4096, &[round; 4096]).0, 0);
        bench.export.leave();
        bench.closed.recv_timeout(PATIENCE).expect("it ends");
        // What the driver wants meanwhile waits in its ring.
        for slot in 0..8 {
            driver.queues[0].submit(OUT, (64 + slot) * 4096, 4096, &[], &[round; 4096]).unwrap();
        }
        driver.queues[0].announce();
        let front = is_left.recv_timeout(PATIENCE).unwrap().expect("it is given back");
        assert!(!front.agreed.is_empty() && front.fds.len() >= 4, "{front:?}");
        again(&mut bench, front, hooks());
        while driver.queues[0].under_way() > 0 {
            assert_eq!(driver.queues[0].next_ended(PATIENCE).unwrap().status, 0);
        }
        // It is the same connection, on which all is as it was.
        driver.front.config().unwrap();
        let bytes = bench.bytes();
        assert!(bytes[usize::from(round) * 4096..][..4096] == [round; 4096]);
        assert!(bytes[64 * 4096..72 * 4096].iter().all(|byte| *byte == round));
    }
    // What is kept for the case of a death is taken back before more is said, and comes again.
    let mut all = Vec::new();
    let mut until = |ends: &[bool]| {
        while !all.ends_with(ends) {
            all.push(is_kept.recv_timeout(PATIENCE).expect("it is said").is_some());
            all.extend(is_kept.try_iter().map(|kept| kept.is_some()));
        }
        assert!(all.windows(2).all(|pair| pair[0] || pair[1]), "{all:?}");
        all.clear();
    };
    until(&[true]);
    driver.front.config().unwrap();
    until(&[false, true]);
    drop(driver);
    assert!(is_left.recv_timeout(PATIENCE).unwrap().is_none(), "it has gone by itself");
}

#[test]
fn what_another_back_end_says_is_trusted_no_more_than_a_front_end() {
    let message = |request: u32, payload: &[u8]| {
        let head = [request, 1, payload.len() as u32].map(u32::to_ne_bytes).concat();
        [&head, payload].concat()
    };
    let cut = message(2, &(1u64 << 32).to_ne_bytes());
    let wrong = [
        cut[..cut.len() - 1].to_vec(),
        vec![0; 12],
        vec![1, 2, 3],
        // A legacy driver's features, memory without descriptors, a ring that is too large.
        message(2, &[0; 8]),
        message(5, &[[1u32, 0].map(u32::to_ne_bytes).concat(), vec![0; 32]].concat()),
        message(8, &[0, 1 << 20].map(u32::to_ne_bytes).concat()),
    ];
    let bench = Bench::new(1, DirectIo::Off);
    for agreed in wrong {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (ended, gone) = channel();
        let front = Departure { socket: theirs.into(), agreed, fds: Vec::new() };
        bench.export.connect(front, hooks(move || ended.send(()).unwrap()));
        gone.recv_timeout(PATIENCE).expect("it is turned away");
        drop(ours);
    }
    // The next one is served.
    assert_eq!(one(&mut bench.driver(SHAPE), OUT, 0, 512, &[1; 512]).0, 0);
}

/// The back-end of a campaign, in a process of its own: standard input listens, standard output is the
/// tether.
fn back_end(image: &Path) {
    let listener = UnixListener::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let tether = std::io::stdout().as_fd().try_clone_to_owned().unwrap();
    let threads = Arc::new(IoThreads::start(1).unwrap());
    let export = export(image, &threads, (tether, 2), (DirectIo::Auto, None), Box::new(|| {}));
    for socket in listener.incoming() {
        export.connect(Departure::new(socket.unwrap().into()), hooks(|| {}));
    }
}

const CHILD: &str = "BECKET_TEST_BACK_END";

/// A back-end, which is killed whatever becomes of the test.
struct BackEnd(Child);

impl Drop for BackEnd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A back-end, and the end of its tether.
fn start_back_end(test: &str, listener: &UnixListener, image: &Path) -> (BackEnd, File) {
    let (reader, tether) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(CHILD, image)
        .stdin(OwnedFd::from(listener.try_clone().unwrap()))
        .stdout(tether)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    (BackEnd(child), File::from(reader))
}

#[test]
fn a_killed_back_end_s_requests_are_done_once_by_the_next() {
    let test = "a_killed_back_end_s_requests_are_done_once_by_the_next";
    if let Some(image) = std::env::var_os(CHILD) {
        return back_end(Path::new(&image));
    }
    // Tables or chains of descriptors in one table; in a packed ring they are written over.
    for features in [SHAPE.features, SHAPE.features | PACKED, EVENT_IDX | PACKED] {
        kill_back_ends(test, Shape { queues: 2, count: 128, depth: 32, buffer: 4096, features });
    }
}

fn kill_back_ends(test: &str, shape: Shape) {
    let kills: u32 = std::env::var("BECKET_TEST_KILLS").map_or(12, |text| text.parse().unwrap());
    const PAGE: usize = 4096;
    let pages = 256u64;
    let place = std::env::var_os("BECKET_SCRATCH").map_or_else(std::env::temp_dir, Into::into);
    let image = tempfile::NamedTempFile::new_in(place).unwrap();
    image.as_file().set_len(pages * PAGE as u64 * 2).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let connect = || OwnedFd::from(UnixStream::connect(&path).unwrap());

    let (mut child, mut tether) = start_back_end(test, &listener, image.path());
    let mut driver = Driver::start(connect(), shape).unwrap();
    let mut random = SmallRng::seed_from_u64(11);
    // Which generation each page has, of what was acknowledged; which page a slot writes; reads to be
    // checked.
    let mut written = vec![0u64; 2 * pages as usize];
    let mut slots = vec![[None::<(usize, u64, bool)>; 32]; 2];
    let mut generation = 0u64;
    let bytes_of = |page: usize, generation: u64| -> Vec<u8> {
        [(page as u64).to_le_bytes(), generation.to_le_bytes()].concat().repeat(PAGE / 16)
    };
    let (mut ended_ones, mut again) = (0u64, 0u64);
    for kill in 0..=kills {
        let stop_after = random.random_range(1..400);
        let mut ended_now = 0;
        let began = std::time::Instant::now();
        // In the last round all are waited for: what was not acknowledged may be in the image or not.
        while ended_now < stop_after || kill == kills {
            let under_way: u16 = driver.queues.iter().map(becket_virtio::Queue::under_way).sum();
            assert!(began.elapsed() < PATIENCE, "{under_way} requests never end");
            for (number, queue) in driver.queues.iter_mut().enumerate() {
                // Each queue has pages of its own, and at most one request for each.
                while queue.has_room() && kill < kills {
                    let page = number * pages as usize + random.random_range(0..pages as usize);
                    if slots[number].iter().flatten().any(|(other, ..)| *other == page) {
                        break;
                    }
                    let at = (page * PAGE) as u64;
                    let write = written[page] == 0 || random.random_bool(0.7);
                    generation += 1;
                    let (op, fill) = if write { (OUT, bytes_of(page, generation)) } else { (IN, Vec::new()) };
                    let slot = queue.submit(op, at, PAGE as u32, &[], &fill).unwrap();
                    slots[number][usize::from(slot)] =
                        Some((page, if write { generation } else { written[page] }, write));
                }
                queue.announce();
                while let Some(ended) = queue.ended() {
                    assert_eq!(ended.status, 0, "no request fails");
                    let (page, generation, write) =
                        slots[number][usize::from(ended.slot)].take().expect("it is answered once");
                    if write {
                        written[page] = generation;
                    } else {
                        let mut bytes = vec![0; PAGE];
                        queue.bytes_of(ended.slot, &mut bytes);
                        assert!(bytes == bytes_of(page, generation), "page {page}");
                    }
                    ended_now += 1;
                    ended_ones += 1;
                }
            }
            if kill == kills && driver.queues.iter().all(|queue| queue.under_way() == 0) {
                break;
            }
        }
        if kill == kills {
            break;
        }
        drop(child);
        again += driver.queues.iter().map(|queue| u64::from(queue.under_way())).sum::<u64>();
        // Nothing of the dead one can reach the image any more.
        std::io::copy(&mut tether, &mut std::io::sink()).unwrap();
        (child, tether) = start_back_end(test, &listener, image.path());
        driver.reconnect(connect()).unwrap();
    }
    drop(child);
    let bytes = std::fs::read(image.path()).unwrap();
    for (page, generation) in written.iter().enumerate().filter(|(_, generation)| **generation > 0) {
        assert!(bytes[page * PAGE..][..PAGE] == bytes_of(page, *generation), "page {page}");
    }
    assert!(again > 0, "no back-end was killed over a request");
    eprintln!(
        "{:#x}: {kills} kills, {ended_ones} requests, {again} of them begun by a back-end that was killed",
        shape.features
    );
}
