//! What an object does without a server.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::*;
use crate::access::Access;
use crate::place::Place;
use crate::store::Store;
use crate::version::Version;

const CHUNKS: u64 = 4096;

/// An object of which nothing is there, in a store of its own.
fn object(store: &tempfile::TempDir) -> Object {
    let place = Place::parse("http://127.0.0.1:1/x".as_ref()).unwrap();
    let known = Known { version: Version::Etag("\"1\"".to_owned()), size: CHUNKS << 13 };
    let held = Store::open(Some(store.path())).unwrap().hold(&place, &known).unwrap();
    let client =
        Client::new(&place.url, &Access::of_user(&place.url).unwrap(), Duration::ZERO, Duration::MAX)
            .unwrap();
    let presence = Presence::new(held.meta.size, held.meta.chunk).unwrap();
    Object::new(held, Supply::Server(client), known, presence, false)
}

/// Chunks come while a thread looks which of those that readers wait for nobody brings.
#[test]
fn a_look_for_work_ends_whatever_comes_meanwhile() {
    let store = tempfile::tempdir().unwrap();
    let object = Arc::new(object(&store));
    object.presence.ask(0, CHUNKS << 13);
    assert_eq!(object.claim(0, false, CHUNKS, &|_| true), Some(0..CHUNKS));
    let (looks, ends) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let until = Instant::now() + Duration::from_secs(2);
    let looked = |count: u64| {
        let began = Instant::now();
        while looks.load(Ordering::Relaxed) < count {
            assert!(began.elapsed() < Duration::from_secs(5), "a look does not end");
        }
    };
    let thread = std::thread::spawn({
        let (object, looks, ends) = (Arc::clone(&object), Arc::clone(&looks), Arc::clone(&ends));
        move || {
            while !ends.load(Ordering::Relaxed) {
                assert_eq!(object.claim(0, false, CHUNKS, &|_| true), None);
                looks.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    while Instant::now() < until {
        object.presence.put(0, Where::Memory);
        looked(looks.load(Ordering::Relaxed) + 2);
        object.presence.depart(0..1);
        object.presence.ask(0, 1);
        looked(looks.load(Ordering::Relaxed) + 1);
    }
    ends.store(true, Ordering::Relaxed);
    thread.join().unwrap();
}

/// Readers ask for what they need; what is beside it comes with it, unless a trace says otherwise.
#[test]
fn what_is_taken_is_free_and_is_beside_what_is_wanted() {
    let store = tempfile::tempdir().unwrap();
    let mut object = object(&store);
    let unit = UNIT / object.held.meta.chunk;
    assert_eq!(unit, 8);
    object.presence.ask(19 << 13, 1);
    assert_eq!(object.claim(0, false, CHUNKS, &|_| true), Some(19..CHUNKS), "all of them are wanted");
    object.chunks.mark(19..CHUNKS, Chunk::Unknown);
    assert_eq!(object.claim(0, false, CHUNKS, &|at| object.presence.is_wanted(at)), Some(19..20));
    assert_eq!(object.widen(19..20), 16..24);
    assert_eq!(object.chunks.take_up_to(24, 26), 26);
    assert_eq!(object.chunks.take_up_to(24, 26), 24, "they are taken");
    assert_eq!(object.chunks.take_in(10..30, 4), 10..14);
    assert_eq!(object.chunks.take_in(10..30, 4), 14..16, "the next is taken");
    assert_eq!(object.chunks.take_in(10..30, 4), 26..30);
    assert!(object.chunks.take_in(10..30, 4).is_empty());
    object.chunks.mark(8..32, Chunk::Unknown);
    assert_eq!(object.chunks.take_in(11..12, 1), 11..12);
    assert_eq!(object.chunks.take_in(13..14, 1), 13..14);
    assert_eq!(object.widen(13..14), 12..16, "no further than what another thread looks at");
    object.exact = true;
    assert_eq!(object.chunks.take_in(27..28, 1), 27..28);
    assert_eq!(object.widen(27..28), 27..28);
    object.exact = false;
    assert_eq!(object.chunks.take_in(CHUNKS - 1..CHUNKS, 1), CHUNKS - 1..CHUNKS);
    assert_eq!(object.widen(CHUNKS - 1..CHUNKS), CHUNKS - 8..CHUNKS);
}

/// Earlier versions of becket made chunks of 64 KiB.
#[test]
fn an_object_keeps_the_chunks_that_it_was_made_with() {
    let store = tempfile::tempdir().unwrap();
    let first = object(&store);
    let made = &first.held;
    assert_eq!(made.meta.chunk, 8 << 10);
    let described = made.path.ancestors().nth(2).unwrap().join("meta.json");
    let text = std::fs::read_to_string(&described).unwrap();
    std::fs::write(&described, text.replace("\"chunk\":8192", "\"chunk\":65536")).unwrap();
    made.table.set(1, &[7], true).unwrap();
    drop(first);
    let again = object(&store);
    let again = &again.held;
    assert_eq!((again.meta.chunk, again.table.get(1)), (64 << 10, Some(7)));
}
