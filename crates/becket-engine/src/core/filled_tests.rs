//! The core over a store file that a double of the fetcher fills.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use becket_image::filled::{FilledSource, Lent, Presence, Where};
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
        let source = FileSource::of(copy(), Some(copy()), facts);
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let presence = Presence::new(CHUNKS * PAGE, PAGE).unwrap();
        let lent = Lent { presence, table: null(), order: null(), packed: Vec::new() };
        let source = FilledSource::new(source, lent).unwrap();
        let presence = Arc::clone(source.presence());
        let map = Map::contiguous(0, 0, CHUNKS * PAGE);
        let bench = Bench::new(&Arc::new(Serving::new(map, vec![source.into()], true, 1)));
        Store { file, presence, bench }
    }

    /// What a fetcher does.
    fn fill(&self, chunk: u64) {
        self.file.write_all_at(&[chunk as u8 + 1; PAGE as usize], chunk * PAGE).unwrap();
        self.presence.put(chunk, Where::File);
        self.presence.tell();
    }

    /// The same where the file has no room.
    fn fill_memory(&self, chunk: u64) {
        self.presence.memory().write(&[chunk as u8 + 1; PAGE as usize], chunk * PAGE).unwrap();
        self.presence.put(chunk, Where::Memory);
        self.presence.tell();
    }

    fn depart(&self, chunk: u64) {
        self.presence.depart(chunk..chunk + 1);
        self.presence.memory().free(chunk * PAGE, PAGE).unwrap();
    }

    fn read(&mut self, tag: u16, chunk: u64, chunks: u64) {
        self.bench.core.buffer(tag).fill(0xee);
        let (offset, len) = (chunk * PAGE, chunks * PAGE);
        let request = Request { op: Op::Read, offset, len, data: Data::Buffer };
        self.bench.core.begin(&mut self.bench.ring, tag, request);
    }

    /// Takes in the notes that have come; says how many.
    fn some_notes(&mut self) -> usize {
        let mut list = Vec::new();
        self.bench.core.mailbox.take(&mut list);
        let count = list.len();
        for ((_, tag), note) in list {
            self.bench.core.note_came(&mut self.bench.ring, tag, note);
        }
        count
    }

    /// Takes in the notes that come until there are so many.
    fn notes(&mut self, count: usize) {
        let (mut all, began) = (0, Instant::now());
        while all < count {
            assert!(began.elapsed() < Duration::from_secs(20), "{all} notes of {count}");
            all += self.some_notes();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Turns until the first page of a request has been read.
    fn begins_to_come(&mut self, tag: u16) {
        while self.bench.core.slab[usize::from(tag)].done < PAGE {
            self.bench.turn();
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

    fn holds_all(&mut self, tag: u16, chunk: u64, chunks: u64) -> bool {
        let buffer = self.bench.core.buffer(tag)[..(chunks * PAGE) as usize].iter();
        (0..).zip(buffer).all(|(at, byte): (u64, _)| u64::from(*byte) == chunk + at / PAGE + 1)
    }
}

#[test]
fn a_chunk_is_waited_for_by_all_who_want_it_and_by_nobody_else() {
    let mut store = Store::new();
    store.fill(0);
    store.read(0, 2, 1);
    store.read(1, 1, 2);
    assert_eq!(store.presence.next_wanted(0, false, &mut |_| true), Some(1));
    assert_eq!(store.presence.next_wanted(2, false, &mut |_| true), Some(2));
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
    assert_eq!(store.presence.next_wanted(0, false, &mut |_| true), None);
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
    let began = store.bench.core.slab[0].began;
    store.bench.core.give_up_reads(&mut store.bench.ring, began);
    assert!(!store.has_note(), "it began no earlier");
    store.bench.core.give_up_reads(&mut store.bench.ring, u64::MAX);
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

#[test]
fn what_is_in_memory_is_read_there_and_the_rest_in_the_file() {
    let mut store = Store::new();
    [0, 1, 4].into_iter().for_each(|chunk| store.fill(chunk));
    [2, 3, 5].into_iter().for_each(|chunk| store.fill_memory(chunk));
    for first in 0..5 {
        store.read(0, first, 2);
        assert_eq!(store.bench.await_all(&[0]), [Ok(2 * PAGE)]);
        assert!(store.holds_all(0, first, 2), "chunks {first} and the next");
    }
    store.read(0, 1, 1);
    assert_eq!(store.bench.await_all(&[0]), [Ok(PAGE)]);
    let way = store.bench.core.straight;
    assert_eq!((way.start, way.len), (0, 2 * PAGE), "the straight way is the file's");
    store.read(1, 2, 1);
    assert_eq!(store.bench.await_all(&[1]), [Ok(PAGE)]);
    assert!(store.holds(1, 2));
}

#[test]
fn what_goes_from_memory_while_it_is_read_is_read_again() {
    let mut store = Store::new();
    (0..3).for_each(|chunk| store.fill_memory(chunk));
    store.read(0, 0, 2);
    store.read(1, 2, 1);
    // Nothing has been taken in of what was begun.
    store.depart(0);
    store.fill(0);
    assert_eq!(store.bench.await_all(&[1, 0]), [Ok(PAGE), Ok(2 * PAGE)]);
    assert!(store.holds_all(0, 0, 2) && store.holds(1, 2));
    store.read(0, 2, 1);
    store.depart(2);
    while !store.presence.is_wanted(2) {
        store.bench.turn();
    }
    store.fill(2);
    store.notes(1);
    assert_eq!(store.bench.await_all(&[0]), [Ok(PAGE)]);
    assert!(store.holds(0, 2));
}

#[test]
fn a_read_whose_parts_are_never_there_together_goes_on() {
    let mut store = Store::new();
    store.read(0, 0, 2);
    store.fill_memory(1);
    store.depart(1);
    store.fill_memory(0);
    store.notes(1);
    store.begins_to_come(0);
    store.depart(0);
    store.fill_memory(1);
    store.notes(1);
    assert_eq!(store.bench.await_all(&[0]), [Ok(2 * PAGE)]);
    assert!(store.holds_all(0, 0, 2));
    // Its first part comes and goes before anybody looks.
    store.read(1, 4, 2);
    store.presence.put(4, Where::Memory);
    store.depart(4);
    store.presence.tell();
    let began = Instant::now();
    while !store.presence.is_wanted(4) {
        assert!(began.elapsed() < Duration::from_secs(20), "it is not asked for again");
        // The waiting thread may have seen the chunk before it left.
        store.some_notes();
        std::thread::sleep(Duration::from_millis(1));
    }
    store.fill_memory(4);
    store.notes(1);
    store.begins_to_come(1);
    store.fill(5);
    store.notes(1);
    assert_eq!(store.bench.await_all(&[1]), [Ok(2 * PAGE)]);
    assert!(store.holds_all(1, 4, 2));
}
