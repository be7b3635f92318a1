//! Encoded extents through the whole engine: blocks of a few kilobytes in a file, at one depth and at two.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::{
    fs::File,
    io::Write,
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    time::Duration,
};

use becket_engine::{
    Answer, Data, Decoding, Decodings, Io, IoThreads, LEAST_CACHE, Memory, NewQueue, Op, Port, QueueStats,
    Request, Serving, Summary, Token,
};
use becket_image::{
    Alignment, DirectIo, Encoded, Extent, Facts, FileKind, FileSource, Map, Place, codec::Codec,
    encoded::Block,
};
use rustix::io::Errno;

/// What the blocks of each layer yield, in bytes.
const BLOCK: usize = 8192;
const DEPTH: u16 = 16;
/// Longest request.
const BUFFER: usize = 64 << 10;

/// Reads ranges, as many at once as there are tags, and reports each outcome.
struct Reader {
    descriptor: OwnedFd,
    ranges: Vec<(u64, u64)>,
    current: [(u64, u64); DEPTH as usize],
    busy: usize,
    outcomes: Sender<(u64, Result<Vec<u8>, Errno>)>,
}

impl Reader {
    fn next(&mut self, io: &mut Io<'_>, tag: u16) {
        if let Some((offset, len)) = self.ranges.pop() {
            self.current[usize::from(tag)] = (offset, len);
            self.busy += 1;
            io.begin(tag, Request { op: Op::Read, offset, len, data: Data::Buffer });
        } else if self.busy == 0 {
            io.close();
        }
    }
}

impl Port for Reader {
    fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    fn start(&mut self, io: &mut Io<'_>) -> Result<(), Errno> {
        (0..DEPTH).for_each(|tag| self.next(io, tag));
        Ok(())
    }

    fn completed(&mut self, _: &mut Io<'_>, _: Token, _: Answer) {}

    fn finished(&mut self, io: &mut Io<'_>, tag: u16, result: Result<u64, Errno>) {
        let (offset, len) = self.current[usize::from(tag)];
        let bytes = result.map(|got| {
            assert_eq!(got, len);
            io.buffer(tag)[..len as usize].to_vec()
        });
        self.outcomes.send((offset, bytes)).unwrap();
        self.busy -= 1;
        self.next(io, tag);
    }
}

/// Layers in a file under construction.
#[derive(Default)]
struct Packer {
    file: Vec<u8>,
    layers: Vec<Encoded>,
}

impl Packer {
    /// Puts bytes as they are.
    fn store(&mut self, bytes: &[u8]) -> Map {
        let offset = self.file.len() as u64;
        self.file.extend_from_slice(bytes);
        Map::contiguous(0, offset, bytes.len() as u64)
    }

    /// Encodes `plain` into blocks that lie one behind the other, which `put` stores: the map that yields
    /// `plain`, as the image of one more layer.
    fn encode(&mut self, codec: Codec, plain: &[u8], put: impl FnOnce(&mut Packer, &[u8]) -> Map) -> Map {
        let mut stored = Vec::new();
        let mut blocks = Vec::new();
        for (index, part) in plain.chunks(BLOCK).enumerate() {
            // What comes before the wanted bytes stands for other files of the same block.
            let skip = if index % 3 == 1 { 100 } else { 0 };
            let encoded = compress(codec, &[&vec![0xee; skip], part].concat());
            blocks.push(Block {
                start: (index * BLOCK) as u64,
                len: part.len() as u32,
                input: stored.len() as u64,
                input_len: encoded.len() as u32,
                skip: skip as u32,
                yields: (skip + part.len()) as u32,
            });
            stored.extend(encoded);
        }
        let below = put(self, &stored);
        let layer = self.layers.len() as u32;
        self.layers.push(Encoded::new(codec, below, blocks).unwrap());
        let place = Place::Encoded { layer, offset: 0 };
        Map::from_extents(vec![Extent { start: 0, len: plain.len() as u64, place }]).unwrap()
    }

    fn serving(self, decoding: &Arc<Decoding>, map: Map, direct_io: DirectIo) -> Arc<Serving> {
        let mut file = tempfile::NamedTempFile::new_in(place()).unwrap();
        file.write_all(&self.file).unwrap();
        file.as_file().sync_all().unwrap();
        let direct = direct_io != DirectIo::Off;
        let facts = Facts {
            size: self.file.len() as u64,
            direct: direct.then_some(Alignment { memory: 512, offset: 4096 }),
            nowait: true,
            ..Facts::unasked(FileKind::Regular, 0, false)
        };
        let open = |flags| {
            let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC | flags;
            rustix::fs::open(file.path(), flags, rustix::fs::Mode::empty()).unwrap()
        };
        let (buffered, direct) =
            (open(rustix::fs::OFlags::empty()), direct.then(|| open(rustix::fs::OFlags::DIRECT)));
        let file = FileSource::of(buffered, direct, facts);
        let serving = Serving::new(map, vec![file.into()], true, 2).with_direct_io(direct_io);
        Arc::new(serving.decoded_by(decoding, self.layers).unwrap())
    }
}

fn compress(codec: Codec, plain: &[u8]) -> Vec<u8> {
    if codec == Codec::Lz4 {
        return lz4_flex::block::compress(plain);
    }
    assert_eq!(codec, Codec::Zstd);
    zstd::bulk::compress(plain, 1).unwrap()
}

/// Cargo's own place for files of tests, on a disk; the system's where the tests run without cargo.
fn place() -> std::path::PathBuf {
    let cargos = std::path::PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    if cargos.is_dir() { cargos } else { std::env::temp_dir() }
}

/// Bytes that compress by about a half.
fn plain(len: usize) -> Vec<u8> {
    let mut random = Random(7);
    (0..len).map(|at| if at % 2 == 0 { random.below(256) as u8 } else { (at >> 8) as u8 }).collect()
}

/// A small generator that repeats from its seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % end
    }
}

fn ranges(len: u64, count: usize) -> Vec<(u64, u64)> {
    let mut random = Random(count as u64);
    (0..count)
        .map(|_| {
            let offset = random.below(len);
            (offset, 1 + random.below((len - offset).min(BUFFER as u64)))
        })
        .collect()
}

type Outcomes = Vec<(u64, Result<Vec<u8>, Errno>)>;

/// Reads ranges through a queue on each of two threads, at the same time.
fn read(serving: &Arc<Serving>, lists: [Vec<(u64, u64)>; 2]) -> (Outcomes, Decodings) {
    let threads = IoThreads::start(2).unwrap();
    let (outcomes, seen) = channel();
    let (closed, is_closed) = channel();
    let mut stats = Vec::new();
    for (number, ranges) in lists.into_iter().enumerate() {
        let descriptor = File::open("/dev/null").unwrap().into();
        let outcomes = outcomes.clone();
        let closed = closed.clone();
        let counted = Arc::<QueueStats>::default();
        stats.push(Arc::clone(&counted));
        let current = [(0, 0); DEPTH as usize];
        let queue = NewQueue {
            port: Box::new(Reader { descriptor, ranges, current, busy: 0, outcomes }),
            depth: DEPTH,
            number,
            serving: Arc::clone(serving),
            memory: Memory::Buffers(BUFFER),
            batch: None,
            stats: counted,
            on_closed: Box::new(move || closed.send(()).unwrap()),
        };
        threads.add(number, queue).unwrap();
    }
    for _ in 0..2 {
        is_closed.recv_timeout(Duration::from_secs(120)).expect("a queue ends when all is read");
    }
    drop(outcomes);
    let summary = Summary::of(stats.iter().map(|stats| &**stats));
    assert_eq!(summary.in_flight, 0);
    (seen.iter().collect(), summary.decoded.unwrap_or_default())
}

fn agree(outcomes: &Outcomes, plain: &[u8]) {
    for (offset, result) in outcomes {
        let bytes = result.as_ref().unwrap();
        assert!(bytes == &plain[*offset as usize..][..bytes.len()], "{} bytes at {offset}", bytes.len());
    }
}

#[test]
fn what_is_read_is_what_was_encoded_at_any_depth() {
    let plain = plain(3 << 20);
    for direct_io in [DirectIo::Off, DirectIo::Auto, DirectIo::On] {
        let decoding = Decoding::start(2, 0).unwrap();
        let mut packer = Packer::default();
        // Not at a multiple of anything.
        packer.store(&[1; 777]);
        let map = packer.encode(Codec::Zstd, &plain, |packer, stored| {
            packer.encode(Codec::Lz4, stored, |packer, stored| packer.store(stored))
        });
        let serving = packer.serving(&decoding, map, direct_io);
        let lists = [ranges(plain.len() as u64, 400), ranges(plain.len() as u64, 401)];
        let (outcomes, counted) = read(&serving, lists);
        assert_eq!(outcomes.len(), 801);
        agree(&outcomes, &plain);
        let blocks = 2 * plain.len().div_ceil(BLOCK) as u64;
        assert_eq!(counted.errors, 0);
        // All fits: each block is decoded once, however many wanted it.
        assert!(counted.blocks <= blocks, "{counted:?}");
        assert!(counted.hits > 0 && counted.waits > 0, "{counted:?}");
    }
}

#[test]
fn what_does_not_fit_is_decoded_again() {
    let plain = plain(LEAST_CACHE as usize + (4 << 20));
    let decoding = Decoding::start(2, 0).unwrap();
    let mut packer = Packer::default();
    let map = packer.encode(Codec::Lz4, &plain, |packer, stored| packer.store(stored));
    let serving = packer.serving(&decoding, map, DirectIo::On);
    // Both read all of it, in order: what one has decoded the other finds, or waits for.
    let whole: Vec<_> =
        (0..plain.len() / BUFFER).rev().map(|at| ((at * BUFFER) as u64, BUFFER as u64)).collect();
    let (outcomes, counted) = read(&serving, [whole.clone(), whole.clone()]);
    agree(&outcomes, &plain);
    let blocks = plain.len().div_ceil(BLOCK) as u64;
    assert!(counted.blocks >= blocks && counted.blocks < 2 * blocks, "{counted:?}");
    assert!(counted.ahead > 0, "{counted:?}");
    let (outcomes, counted) = read(&serving, [whole, Vec::new()]);
    agree(&outcomes, &plain);
    assert!(counted.blocks > 0, "{counted:?}");
}

/// Whether the page cache has the first pages of a file. A non-blocking read would be no proof: it makes the
/// kernel begin to read, and in an emulator that may end before the kernel looks.
fn is_cached(file: BorrowedFd<'_>, pages: usize) -> Vec<bool> {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let len = pages * rustix::param::page_size();
    let mut there = vec![0; pages];
    // SAFETY: a mapping of its own, never read and unmapped again; the answer has a byte for each page.
    let answer = unsafe {
        let base = mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, 0).unwrap();
        let answer = libc::mincore(base, len, there.as_mut_ptr());
        munmap(base, len).unwrap();
        answer
    };
    assert_eq!(answer, 0);
    there.into_iter().map(|flags| flags & 1 == 1).collect()
}

#[test]
fn stored_bytes_go_through_the_page_cache_or_past_it() {
    let plain = plain(64 * BLOCK);
    let whole: Vec<_> = (0..64).map(|block| (block * BLOCK as u64, BLOCK as u64)).collect();
    for direct_io in [DirectIo::Auto, DirectIo::On] {
        let decoding = Decoding::start(1, 0).unwrap();
        let mut packer = Packer::default();
        let map = packer.encode(Codec::Zstd, &plain, |packer, stored| packer.store(stored));
        let serving = packer.serving(&decoding, map, direct_io);
        let file = serving.descriptors().next().unwrap()[0].unwrap();
        rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        assert_eq!(is_cached(file, 8), [false; 8]);
        let (outcomes, _) = read(&serving, [whole.clone(), Vec::new()]);
        agree(&outcomes, &plain);
        assert_eq!(is_cached(file, 8), [direct_io == DirectIo::Auto; 8]);
    }
}

#[test]
fn a_damaged_block_is_an_error_for_its_readers_alone() {
    let plain = plain(64 * BLOCK);
    let decoding = Decoding::start(2, 0).unwrap();
    let mut packer = Packer::default();
    let map = packer.encode(Codec::Zstd, &plain, |packer, stored| packer.store(stored));
    let damaged = packer.layers[0].blocks()[5];
    packer.file[damaged.input as usize..][..8].fill(0xff);
    let serving = packer.serving(&decoding, map, DirectIo::Off);
    let each: Vec<_> = (0..64).map(|block| (block * BLOCK as u64, BLOCK as u64)).collect();
    let (outcomes, counted) = read(&serving, [each.clone(), each]);
    for (offset, result) in outcomes {
        match result {
            Ok(bytes) => assert!(bytes == plain[offset as usize..][..BLOCK]),
            Err(errno) => assert_eq!((errno, offset), (Errno::IO, 5 * BLOCK as u64)),
        }
    }
    assert!((1..=2).contains(&counted.errors), "{counted:?}");
}

#[test]
fn what_ends_too_early_is_an_error_for_those_who_need_it_at_every_depth() {
    let plain = plain(200 * BLOCK);
    let decoding = Decoding::start(1, 0).unwrap();
    let mut packer = Packer::default();
    let map = packer.encode(Codec::Zstd, &plain, |packer, stored| {
        packer.encode(Codec::Lz4, stored, |packer, stored| packer.store(stored))
    });
    // Truncated behind our back.
    let half = packer.file.len() / 2;
    let serving = packer.serving(&decoding, map, DirectIo::Off);
    let file = serving.descriptors().next().unwrap()[0].unwrap();
    let file = File::from(file.try_clone_to_owned().unwrap());
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    // The file has no name any more; its inode has one here.
    File::options().write(true).open(path).unwrap().set_len(half as u64).unwrap();
    let each: Vec<_> = (0..200).map(|block| (block * BLOCK as u64, BLOCK as u64)).collect();
    let (outcomes, counted) = read(&serving, [each, Vec::new()]);
    let (good, bad): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(|(_, result)| result.is_ok());
    agree(&good, &plain);
    assert!(good.len() > 50 && bad.len() > 50, "{} good, {} bad", good.len(), bad.len());
    assert!(bad.iter().all(|(_, result)| result == &Err(Errno::IO)));
    assert!(counted.errors > 0);
}

#[test]
fn writes_and_layers_that_are_not_there_are_errors() {
    let decoding = Decoding::start(1, 0).unwrap();
    let mut packer = Packer::default();
    let map = packer.encode(Codec::Lz4, &plain(BLOCK), |packer, stored| packer.store(stored));
    let longer = Extent { len: 2 * BLOCK as u64, ..map.extents()[0] };
    let nowhere = Extent { start: longer.len, len: 4096, place: Place::Encoded { layer: 9, offset: 0 } };
    let map = Map::from_extents(vec![longer, nowhere]).unwrap();
    let serving = packer.serving(&decoding, map, DirectIo::Off);
    let (outcomes, _) =
        read(&serving, [vec![(0, 100), (BLOCK as u64, 4096), (longer.len, 4096)], Vec::new()]);
    for (offset, result) in outcomes {
        assert_eq!(result.is_ok(), offset == 0, "at {offset}");
    }
}
