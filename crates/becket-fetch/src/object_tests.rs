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
    let known = Known { version: Version::Etag("\"1\"".to_owned()), size: CHUNKS << 16 };
    let held = Store::open(Some(store.path())).unwrap().hold(&place, &known).unwrap();
    let client = Client::new(&place.url, &Access::of_user(&place.url).unwrap(), Duration::ZERO).unwrap();
    let presence = Presence::new(held.meta.size, held.meta.chunk).unwrap();
    Object::new(held, Supply::Server(client), known, presence, false)
}

/// Chunks come while a thread looks which of those that readers wait for nobody brings.
#[test]
fn a_look_for_work_ends_whatever_comes_meanwhile() {
    let store = tempfile::tempdir().unwrap();
    let object = Arc::new(object(&store));
    object.presence.ask(0, CHUNKS << 16);
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
