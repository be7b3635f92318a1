//! The core over a store file that a double of the fetcher fills.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use becket_image::filled::{FilledSource, Lent, Presence};
use becket_image::{Alignment, Facts, FileKind, FileSource, Map};
use rustix::io::Errno;

use super::bench::{Bench, PAGE, WRITE};
use crate::{Data, Op, Request, Serving};

const CHUNKS: u64 = 8;

/// A store file of chunks of a page, nothing of which is there.
struct Store {
    file: File,
    presence: Arc<Presence>,
    bench: Bench,
}

impl Store {
    fn new() -> Store {
        let file = tempfile::tempfile().unwrap();
        file.set_len(CHUNKS * PAGE).unwrap();
        let align = Alignment { memory: 512, offset: 512 };
        let facts = Facts {
            nowait: true,
            direct: Some(align),
            ..Facts::unasked(FileKind::Regular, CHUNKS * PAGE, false)
        };
        let copy = || OwnedFd::from(file.try_clone().unwrap());
        let source = FileSource { buffered: copy(), direct: Some(copy()), facts };
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let lent = Lent { chunk: PAGE, table: null(), order: null(), good: Vec::new() };
        let source = FilledSource::new(source, lent).unwrap();
        let presence = Arc::clone(source.presence());
        let map = Map::contiguous(0, 0, CHUNKS * PAGE);
        let bench = Bench::new(&Arc::new(Serving::new(map, vec![source.into()], true, 1)));
        Store { file, presence, bench }
    }

    /// What a fetcher does.
    fn fill(&self, chunk: u64) {
        self.file.write_all_at(&[chunk as u8 + 1; PAGE as usize], chunk * PAGE).unwrap();
        self.presence.put(chunk);
        self.presence.tell();
    }

    fn read(&mut self, tag: u16, chunk: u64, chunks: u64) {
        self.bench.core.buffer(tag).fill(0xee);
        let (offset, len) = (chunk * PAGE, chunks * PAGE);
        let request = Request { op: Op::Read, offset, len, data: Data::Buffer };
        self.bench.core.begin(&mut self.bench.ring, tag, request);
    }

    /// Takes in the notes that come until there are so many.
    fn notes(&mut self, count: usize) {
        let (mut all, mut list, began) = (0, Vec::new(), Instant::now());
        while all < count {
            assert!(began.elapsed() < Duration::from_secs(20), "{all} notes of {count}");
            self.bench.core.mailbox.take(&mut list);
            all += list.len();
            for ((_, tag), note) in list.drain(..) {
                self.bench.core.note_came(&mut self.bench.ring, tag, note);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn has_note(&self) -> bool {
        let mut list = Vec::new();
        self.bench.core.mailbox.take(&mut list);
        !list.is_empty()
    }

    fn holds(&mut self, tag: u16, chunk: u64) -> bool {
        self.bench.core.buffer(tag)[..PAGE as usize].iter().all(|byte| *byte == chunk as u8 + 1)
    }
}

#[test]
fn a_chunk_is_waited_for_by_all_who_want_it_and_by_nobody_else() {
    let mut store = Store::new();
    store.fill(0);
    store.read(0, 2, 1);
    store.read(1, 1, 2);
    assert_eq!(store.presence.next_wanted(0, false), Some(1));
    assert_eq!(store.presence.next_wanted(2, false), Some(2));
    store.read(2, 0, 1);
    assert_eq!(store.bench.await_all(&[2]), [Ok(PAGE)], "it does not wait");
    assert!(store.holds(2, 0));
    store.fill(2);
    store.notes(1);
    assert_eq!(store.bench.await_all(&[0]), [Ok(PAGE)]);
    assert!(store.holds(0, 2) && store.bench.core.slab[1].busy);
    store.fill(1);
    store.notes(1);
    assert_eq!(store.bench.await_all(&[1]), [Ok(2 * PAGE)]);
    assert!(store.holds(1, 1));
    store.read(0, 1, 2);
    assert_eq!(store.bench.await_all(&[0]), [Ok(2 * PAGE)]);
    assert_eq!(store.presence.next_wanted(0, false), None);
    assert!(!store.has_note());
}

#[test]
fn the_straight_way_ends_where_nothing_is_there() {
    let mut store = Store::new();
    [1, 2, 4].into_iter().for_each(|chunk| store.fill(chunk));
    store.read(0, 1, 1);
    assert_eq!(store.bench.await_all(&[0]), [Ok(PAGE)]);
    let way = store.bench.core.straight;
    assert_eq!((way.start, way.len, way.writes), (PAGE, 2 * PAGE, false));
    for absent in [0, 3] {
        store.read(0, absent, 1);
        assert!(store.presence.is_wanted(absent), "chunk {absent} is read though it is not there");
        store.fill(absent);
        store.notes(1);
        assert_eq!(store.bench.await_all(&[0]), [Ok(PAGE)]);
        assert!(store.holds(0, absent));
    }
    store.read(0, 0, 1);
    assert_eq!(store.bench.await_all(&[0]), [Ok(PAGE)]);
    assert_eq!(store.bench.core.straight.len, 5 * PAGE, "it goes as far as all is there");
}

#[test]
fn reads_that_nobody_wants_are_given_up_and_later_ones_wait() {
    let mut store = Store::new();
    store.read(0, 3, 1);
    store.read(1, 4, 2);
    store.bench.core.give_up_reads(&mut store.bench.ring);
    store.notes(2);
    assert_eq!(store.bench.await_all(&[0, 1]), [Err(Errno::IO); 2]);
    store.read(0, 3, 1);
    assert!(!store.has_note());
    store.fill(3);
    store.notes(1);
    assert_eq!(store.bench.await_all(&[0]), [Ok(PAGE)]);
}

#[test]
fn what_cannot_be_had_is_an_error_and_what_is_there_stays() {
    let mut store = Store::new();
    store.fill(5);
    store.read(0, 6, 1);
    store.presence.set_fails(true);
    store.notes(1);
    assert_eq!(store.bench.await_all(&[0]), [Err(Errno::IO)]);
    store.read(0, 5, 1);
    store.read(1, 7, 1);
    assert_eq!(store.bench.await_all(&[0, 1]), [Ok(PAGE), Err(Errno::IO)]);
    store.presence.set_fails(false);
    store.read(1, 7, 1);
    assert!(store.bench.core.slab[1].busy, "it waits again");
    store.fill(7);
    store.notes(1);
    assert_eq!(store.bench.await_all(&[1]), [Ok(PAGE)]);
}

#[test]
fn a_queue_that_ends_waits_for_nothing() {
    let mut store = Store::new();
    store.read(0, 6, 1);
    store.read(1, 7, 1);
    store.bench.core.close();
    store.notes(2);
    assert_eq!(store.bench.await_all(&[0, 1]), [Err(Errno::IO), Err(Errno::IO)]);
    store.read(0, 6, 1);
    assert_eq!(store.bench.await_all(&[0]), [Err(Errno::IO)]);
    assert!(store.bench.core.has_ended());
}

#[test]
fn nothing_is_written() {
    let mut store = Store::new();
    (0..2).for_each(|chunk| store.fill(chunk));
    assert_eq!(store.bench.does(WRITE), Err(Errno::ROFS));
    assert_eq!(store.bench.does(Op::Flush), Ok(0));
}
