//! Objects of servers that are honest, and of servers that are not: what is read, what is fetched again, and
//! what is refused. Sends only to the loopback address.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

use std::{
    ffi::OsStr,
    fs::File,
    os::unix::fs::FileExt as _,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use becket_fetch::{Options, Place, Remote, Store, open};
use becket_testkit::origin::{Origin, Reply};

/// What is fetched together, in bytes, and the smallest chunk.
const CHUNK: usize = 64 << 10;
const SMALLEST: u64 = 8 << 10;

/// Bytes that differ everywhere, so that a wrong place shows.
fn body(chunks: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let words = std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_le_bytes()
    });
    words.take(chunks * CHUNK / 8).flatten().chain([7; 100]).collect()
}

fn options(store: &Path) -> Options {
    Options { store: Some(store.to_owned()), patience: Duration::from_secs(2), ..Options::default() }
}

fn place(url: &str) -> Place {
    Place::parse(OsStr::new(url)).unwrap()
}

fn get(origin: &Origin, store: &Path) -> Result<Remote, becket_fetch::Error> {
    open(&place(&origin.url("/disk.img")), &options(store))
}

/// Reads through what fills the file.
fn read(remote: &Remote, at: usize, len: usize) -> std::io::Result<Vec<u8>> {
    let file = File::open(&remote.file).unwrap();
    let meta = std::os::unix::fs::MetadataExt::dev(&file.metadata().unwrap());
    let ino = std::os::unix::fs::MetadataExt::ino(&file.metadata().unwrap());
    let filler = remote.fillers.of(becket_image::Identity { dev: meta, ino }).unwrap();
    let mut bytes = vec![0; len];
    filler.read_at(&mut bytes, at as u64)?;
    Ok(bytes)
}

/// Says whether the bytes are in the file then.
fn bring(remote: &Remote, range: std::ops::Range<usize>) -> std::io::Result<bool> {
    let file = File::open(&remote.file).unwrap().metadata().unwrap();
    let (dev, ino) = (std::os::unix::fs::MetadataExt::dev(&file), std::os::unix::fs::MetadataExt::ino(&file));
    let filler = remote.fillers.of(becket_image::Identity { dev, ino }).unwrap();
    filler.bring(range.start as u64..range.end as u64)
}

#[test]
fn only_what_is_read_is_fetched_and_only_once() {
    let (bytes, store) = (body(64, 1), tempfile::tempdir().unwrap());
    let origin = Origin::start(bytes.clone());
    let remote = get(&origin, store.path()).unwrap();
    assert_eq!((origin.log().len(), remote.size()), (1, bytes.len() as u64), "one request says all");
    assert_eq!(read(&remote, 10, 1000).unwrap(), bytes[10..1010]);
    assert_eq!(origin.log().len(), 1, "the first bytes came with it");
    let at = 20 * CHUNK - 5;
    assert_eq!(read(&remote, at, 10).unwrap(), bytes[at..at + 10]);
    assert_eq!(origin.log().len(), 2, "neighbours are one request");
    assert_eq!(read(&remote, bytes.len() - 3, 3).unwrap(), bytes[bytes.len() - 3..]);
    assert!(read(&remote, bytes.len() - 3, 4).is_err(), "beyond the end");
    assert_eq!(origin.sent(), (3 * CHUNK + 100) as u64);
    drop(remote);
    let again = get(&origin, store.path()).unwrap();
    assert_eq!(read(&again, at, 10).unwrap(), bytes[at..at + 10]);
    assert_eq!(again.fetched(), 1, "the first answer shows the version, and has no more bytes than it must");
    assert!(bring(&again, 0..bytes.len()).unwrap());
    assert_eq!(std::fs::read(&again.file).unwrap(), bytes);
}

#[test]
fn readers_of_one_chunk_share_its_request() {
    let (bytes, store) = (body(8, 2), tempfile::tempdir().unwrap());
    let origin = Origin::start(bytes.clone());
    let remote = get(&origin, store.path()).unwrap();
    origin.latency(Duration::from_millis(100));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                assert_eq!(read(&remote, 5 * CHUNK, 10).unwrap(), bytes[5 * CHUNK..5 * CHUNK + 10])
            });
        }
    });
    assert_eq!(origin.log().len(), 2);
}

#[test]
fn a_sequential_reader_is_fetched_ahead_and_a_random_one_is_not() {
    let (bytes, store) = (body(64, 3), tempfile::tempdir().unwrap());
    let origin = Origin::start(bytes.clone());
    let remote = get(&origin, store.path()).unwrap();
    for at in (0..bytes.len() - 100).step_by(16 << 10) {
        assert_eq!(read(&remote, at, 16 << 10).unwrap(), bytes[at..at + (16 << 10)]);
    }
    assert!(origin.log().len() < 12, "{} requests for 64 chunks", origin.log().len());
    let (other, store) = (Origin::start(bytes), tempfile::tempdir().unwrap());
    let remote = get(&other, store.path()).unwrap();
    for n in 1..20 {
        read(&remote, (n * 37 % 64) * CHUNK, 100).unwrap();
    }
    assert_eq!(other.sent(), 20 * CHUNK as u64);
}

#[test]
fn a_replaced_object_is_never_mixed_with_the_old_one() {
    let (old, new) = (body(16, 4), body(16, 5));
    let store = tempfile::tempdir().unwrap();
    let origin = Origin::start(old.clone());
    let remote = get(&origin, store.path()).unwrap();
    read(&remote, 3 * CHUNK, 10).unwrap();
    origin.replace(new.clone(), "\"two\"");
    let failed = read(&remote, 8 * CHUNK, 10).unwrap_err().to_string();
    assert!(failed.contains("source changed"), "{failed}");
    assert_eq!(read(&remote, 3 * CHUNK, 10).unwrap(), old[3 * CHUNK..3 * CHUNK + 10], "what is there stays");
    // A server that ignores the condition, and one whose length alone changes.
    origin.trick(|_, reply| reply);
    let next = get(&origin, store.path()).unwrap();
    assert_eq!(read(&next, 3 * CHUNK, 10).unwrap(), new[3 * CHUNK..3 * CHUNK + 10]);
    assert_ne!(next.file, remote.file);
    origin.trick(|_, reply| Reply { status: 206, ..reply }.with("ETag", "\"three\""));
    let failed = read(&next, 12 * CHUNK, 10).unwrap_err().to_string();
    assert!(failed.contains("source changed"), "{failed}");
    origin.trick(|_, reply| {
        let longer = reply.headers.iter().find(|(name, _)| name == "Content-Range").unwrap().1.clone() + "0";
        reply.with("Content-Range", &longer)
    });
    let failed = read(&next, 12 * CHUNK, 10).unwrap_err().to_string();
    assert!(failed.contains("source changed"), "{failed}");
}

#[test]
fn what_breaks_off_goes_on_where_it_ended() {
    let (bytes, store) = (body(32, 6), tempfile::tempdir().unwrap());
    let origin = Origin::start(bytes.clone());
    origin.trick(|request, reply| match request.number % 3 {
        1 => Reply { cut: Some(reply.body.len() / 2), ..reply },
        2 => Reply::status(503).with("Retry-After", "0"),
        _ => reply,
    });
    let remote = get(&origin, store.path()).unwrap();
    assert!(bring(&remote, 0..bytes.len()).unwrap());
    assert_eq!(std::fs::read(&remote.file).unwrap(), bytes);
    assert!(origin.log().iter().all(|request| request.number == 0 || request.header("if-match").is_some()));
    assert_eq!(origin.sent(), bytes.len() as u64, "no byte came twice");
}

#[test]
fn a_server_that_comes_back_in_time_is_waited_for_and_no_other() {
    let (bytes, store) = (body(8, 7), tempfile::tempdir().unwrap());
    let origin = Origin::start(bytes.clone());
    let remote = get(&origin, store.path()).unwrap();
    let begun = Instant::now();
    origin.trick(move |_, reply| {
        if begun.elapsed() < Duration::from_millis(700) { Reply { cut: Some(0), ..reply } } else { reply }
    });
    assert_eq!(read(&remote, 4 * CHUNK, 10).unwrap(), bytes[4 * CHUNK..4 * CHUNK + 10]);
    // The last pause is a short one, also where the server asks for a long one.
    for (busy, at) in [(Reply::status(503), 2), (Reply::status(503).with("Retry-After", "999999"), 5)] {
        let begun = Instant::now();
        let back = Duration::from_millis(1800);
        origin.trick(move |_, reply| if begun.elapsed() < back { busy.clone() } else { reply });
        assert_eq!(read(&remote, at * CHUNK, 10).unwrap(), bytes[at * CHUNK..at * CHUNK + 10]);
    }
    origin.trick(|_, _| Reply::status(500));
    let begun = Instant::now();
    let failed = read(&remote, 6 * CHUNK, 10).unwrap_err();
    assert_eq!(failed.kind(), std::io::ErrorKind::TimedOut, "{failed}");
    assert!(
        failed.to_string().contains("status 500") && begun.elapsed() < Duration::from_secs(8),
        "{failed}"
    );
    origin.honest();
    assert_eq!(
        read(&remote, 6 * CHUNK, 10).unwrap(),
        bytes[6 * CHUNK..6 * CHUNK + 10],
        "nothing stays broken"
    );
}

#[test]
fn each_thing_that_a_server_cannot_do_has_its_own_sentence() {
    let store = tempfile::tempdir().unwrap();
    let origin = Origin::start(body(8, 8));
    type Case = (&'static str, fn(Reply) -> Reply);
    let cases: [Case; 15] = [
        ("sends the whole object", |_| Reply { status: 200, body: vec![1; 1000], ..Reply::default() }),
        ("neither an ETag nor a date", |reply| reply.without("ETag")),
        ("its ETag is none that", |reply| reply.with("ETag", "W/\"one\"")),
        ("compresses the object", |reply| reply.with("Content-Encoding", "gzip")),
        ("does not say which bytes", |reply| reply.without("Content-Range")),
        ("does not say which bytes", |reply| reply.with("Content-Range", "bytes 0-65535/*")),
        ("other bytes than", |reply| reply.with("Content-Range", "bytes 1-65536/524388")),
        ("contradicts itself", |reply| reply.with("Content-Range", "bytes 0-100/524388")),
        ("it is empty", |_| Reply::status(416).with("Content-Range", "bytes */0")),
        ("no range of it", |_| Reply::status(416)),
        ("no such object", |_| Reply::status(404)),
        ("does not allow it", |_| Reply::status(403)),
        ("without a place", |_| Reply::status(302)),
        ("not HTTP", |reply| reply.with("x: y\r\n\0", "z")),
        ("more than 32768 bytes", |reply| reply.with("x", &"y".repeat(100_000))),
    ];
    for (sentence, trick) in cases {
        origin.trick(move |_, reply| trick(reply));
        let failed = get(&origin, store.path()).unwrap_err().to_string();
        assert!(failed.contains(sentence), "{sentence}: {failed}");
    }
    origin.trick(|_, mut reply| {
        reply.body.extend([9; 10]);
        reply.with("Transfer-Encoding", "chunked")
    });
    let failed = get(&origin, store.path()).unwrap_err().to_string();
    assert!(failed.contains("more bytes than"), "{failed}");
}

/// Its body has no length before it has ended.
#[test]
fn nothing_stays_of_an_answer_that_is_longer_than_it_says() {
    let (bytes, dir) = (body(16, 6), tempfile::tempdir().unwrap());
    let origin = Origin::start(bytes.clone());
    let remote = get(&origin, dir.path()).unwrap();
    origin.trick(|_, reply| {
        let body = [&vec![9; reply.body.len()][..], b"more"].concat();
        Reply { body, ..reply }.with("Transfer-Encoding", "chunked")
    });
    let failed = read(&remote, 4 * CHUNK, 8 * CHUNK).unwrap_err().to_string();
    assert!(failed.contains("sends more bytes than it was asked for"), "{failed}");
    assert!(get(&origin, dir.path().join("other").as_path()).is_err());
    // One that is as long as it says is taken, and of one that breaks off what has come.
    origin.trick(|request, reply| {
        let cut = request.number.is_multiple_of(2).then_some(0);
        Reply { cut, ..reply }.with("Transfer-Encoding", "chunked")
    });
    assert_eq!(read(&remote, 4 * CHUNK, 8 * CHUNK).unwrap(), bytes[4 * CHUNK..12 * CHUNK]);
    origin.honest();
    assert!(bring(&remote, 0..bytes.len()).unwrap());
    assert_eq!(std::fs::read(&remote.file).unwrap(), bytes);
}

#[test]
fn redirects_have_bounds_and_lead_to_no_file() {
    let store = tempfile::tempdir().unwrap();
    let bytes = body(4, 9);
    let (origin, other) = (Origin::start(bytes.clone()), Origin::start(bytes.clone()));
    let to = other.url("/there.img");
    origin.trick(move |_, _| Reply::status(302).with("Location", &to));
    let remote = get(&origin, store.path()).unwrap();
    assert_eq!(read(&remote, 2 * CHUNK, 10).unwrap(), bytes[2 * CHUNK..2 * CHUNK + 10]);
    assert_eq!((origin.log().len(), other.log().len()), (1, 2), "the place is remembered");
    for (location, sentence) in [
        ("/disk.img", "redirects more than"),
        ("file:///etc/passwd", "not a web address"),
        ("ftp://127.0.0.1/x", "not a web address"),
        ("http://me:secret@127.0.0.1/x", "password"),
    ] {
        origin.trick(move |_, _| Reply::status(301).with("Location", location));
        let failed = get(&origin, store.path()).unwrap_err().to_string();
        assert!(failed.contains(sentence) && !failed.contains("secret"), "{location}: {failed}");
    }
}

#[test]
fn a_server_may_not_drip() {
    let store = tempfile::tempdir().unwrap();
    let origin = Origin::start(body(4, 10));
    let served = AtomicU64::new(0);
    origin.trick(move |_, reply| {
        // Each answer brings a little, and ends.
        served.fetch_add(1, Ordering::Relaxed);
        Reply { cut: Some(10), ..reply }
    });
    let begun = Instant::now();
    let failed = get(&origin, store.path()).unwrap_err();
    assert_eq!(failed.kind(), "origin_away", "{failed}");
    assert!(begun.elapsed() < Duration::from_secs(8));
    // Or it is whole, and says that it is a part.
    let bytes = body(4, 10);
    origin.trick(move |request, reply| {
        let range = request.header("range").unwrap().trim_start_matches("bytes=");
        let start: usize = range.split('-').next().unwrap().parse().unwrap();
        let body = bytes[start..start + 10].to_vec();
        let part = format!("bytes {start}-{}/{}", start + 9, bytes.len());
        Reply { body, ..reply.without("Content-Range").with("Content-Range", &part) }
    });
    let begun = Instant::now();
    let failed = get(&origin, store.path()).unwrap_err();
    assert_eq!(failed.kind(), "origin_away", "{failed}");
    assert!(begun.elapsed() < Duration::from_secs(8));
}

#[test]
fn a_flipped_bit_is_fetched_again_and_a_damaged_object_is_made_anew() {
    let (bytes, store) = (body(8, 11), tempfile::tempdir().unwrap());
    let origin = Origin::start(bytes.clone());
    let remote = get(&origin, store.path()).unwrap();
    assert!(bring(&remote, 0..bytes.len()).unwrap());
    let path = remote.file.clone();
    drop(remote);
    let flip = |path: &Path, at: u64| {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    };
    flip(&path, 5 * CHUNK as u64 + 77);
    let kept = Store::open(Some(store.path())).unwrap();
    let sent = origin.sent();
    let remote = get(&origin, store.path()).unwrap();
    assert!(bring(&remote, 0..bytes.len()).unwrap());
    assert_eq!(std::fs::read(&path).unwrap(), bytes);
    assert_eq!(origin.sent() - sent, 1 + SMALLEST, "the first answer and the damaged chunk");
    drop(remote);
    flip(&path, 3);
    let meta = path.parent().unwrap().parent().unwrap().join("meta.json");
    let long_ago = std::time::UNIX_EPOCH + Duration::from_secs(1_000_000);
    File::open(meta).unwrap().set_modified(long_ago).unwrap();
    let entry = kept.list().unwrap().remove(0);
    let verified = kept.verify(&entry, &mut |_| {}).unwrap();
    assert_eq!((verified.damaged, verified.good), (SMALLEST, bytes.len() as u64 - SMALLEST));
    assert_eq!(kept.list().unwrap().remove(0).used, 1_000_000, "that is no use");
    // Every other file of it.
    let dir = path.parent().unwrap().parent().unwrap().to_owned();
    let damages: [fn(&Path, &Path); 4] = [
        |dir, _| std::fs::write(dir.join("meta.json"), "{}").unwrap(),
        |dir, _| std::fs::write(dir.join("table"), "short").unwrap(),
        |_, data| std::fs::write(data, "short").unwrap(),
        |dir, _| flip_all(&dir.join("table")),
    ];
    for damage in damages {
        damage(&dir, &path);
        let remote = get(&origin, store.path()).unwrap();
        assert_eq!(read(&remote, 6 * CHUNK, 100).unwrap(), bytes[6 * CHUNK..6 * CHUNK + 100]);
        assert!(bring(&remote, 0..bytes.len()).unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
    }
}

#[test]
fn an_object_that_lost_a_file_is_made_anew_and_can_be_removed() {
    let (bytes, dir) = (body(8, 8), tempfile::tempdir().unwrap());
    let origin = Origin::start(bytes.clone());
    let object = get(&origin, dir.path()).unwrap().file.ancestors().nth(2).unwrap().to_owned();
    let store = Store::open(Some(dir.path())).unwrap();
    let data = object.join("data/disk.img");
    let lose: [&dyn Fn(); 5] = [
        &|| std::fs::remove_file(&data).unwrap(),
        &|| {
            std::fs::remove_file(&data).unwrap();
            std::fs::create_dir(&data).unwrap();
        },
        &|| std::fs::remove_file(object.join("table")).unwrap(),
        &|| std::fs::remove_dir_all(object.join("data")).unwrap(),
        &|| {
            std::fs::remove_dir_all(&object).unwrap();
            std::fs::write(&object, "").unwrap();
        },
    ];
    for (number, lose) in lose.iter().enumerate() {
        lose();
        let remote = get(&origin, dir.path()).unwrap_or_else(|error| panic!("{number}: {error}"));
        assert_eq!(read(&remote, 20, 1000).unwrap(), bytes[20..1020], "{number}");
        drop(remote);
        if number < 4 {
            lose();
            let entry = store.list().unwrap().remove(0);
            assert_eq!(store.verify(&entry, &mut |_| {}).unwrap().good, 0, "{number}");
            assert_eq!(store.remove(vec![entry]).unwrap().gone.len(), 1, "{number}");
            assert!(!object.exists() && store.list().unwrap().is_empty(), "{number}");
            get(&origin, dir.path()).unwrap();
        }
    }
}

fn flip_all(path: &Path) {
    let bytes: Vec<u8> = std::fs::read(path).unwrap().iter().map(|byte| !byte).collect();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn an_object_in_use_stays_and_the_one_used_longest_ago_goes_first() {
    let store = tempfile::tempdir().unwrap();
    let origin = Origin::start(body(4, 12));
    let hold = |path: &str| open(&place(&origin.url(path)), &options(store.path())).unwrap();
    let (one, two) = (hold("/one.img"), hold("/two.img"));
    for remote in [&one, &two] {
        assert!(bring(remote, 0..4 * CHUNK).unwrap());
    }
    let kept = Store::open(Some(store.path())).unwrap();
    assert_eq!(kept.shrink(0).unwrap().gone.len(), 0, "both are in use");
    drop(one);
    let all = kept.list().unwrap();
    assert_eq!(all.iter().filter(|entry| entry.in_use).count(), 1);
    let dropped = kept.shrink(5 * CHUNK as u64).unwrap();
    assert!(dropped.gone.len() == 1 && dropped.gone[0].url.ends_with("one.img"), "{dropped:?}");
    // What a device holds open is locked as any image is.
    let options = becket_image::OpenOptions { read_only: true, ..Default::default() };
    let device = becket_image::open(&two.file, &options).unwrap();
    drop(two);
    assert_eq!(kept.shrink(0).unwrap().kept.len(), 1);
    drop(device);
    assert_eq!(kept.shrink(0).unwrap().gone.len(), 1);
    assert!(kept.list().unwrap().is_empty());
}

#[test]
fn a_store_keeps_its_limit_while_it_is_filled_and_what_is_not_in_use_makes_way() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = body(48, 14);
    let origin = Origin::start(bytes.clone());
    let limit = 100 * CHUNK as u64;
    let hold = |path: &str, limit, must_keep| {
        let options = Options { limit: Some(limit), must_keep, ..options(dir.path()) };
        open(&place(&origin.url(path)), &options).unwrap()
    };
    let store = Store::open(Some(dir.path())).unwrap();
    let total = || store.list().unwrap().iter().map(|entry| entry.stored).sum::<u64>();
    for path in ["/one.img", "/two.img", "/three.img"] {
        hold(path, limit, true).bring_all().unwrap();
        assert!(total() <= limit, "{} after {path}", total());
        // The time of the last use is in seconds.
        std::thread::sleep(Duration::from_millis(1100));
    }
    let urls: Vec<_> = store.list().unwrap().into_iter().map(|entry| entry.url).collect();
    assert!(urls.len() == 2 && !urls.iter().any(|url| url.ends_with("one.img")), "{urls:?}");
    // What is in use stays, and what cannot be kept is an error, or in memory.
    let small = 10 * CHUNK as u64;
    let error = hold("/four.img", small, true).bring_all().unwrap_err();
    assert!(error.to_string().contains("--store-limit allows 655360 bytes"), "{error}");
    assert!(error.fix().unwrap().contains("--store-limit"));
    assert!((small / 2..=small).contains(&total()), "{}", total());
    let five = hold("/five.img", small, false);
    assert!(!bring(&five, 0..bytes.len()).unwrap());
    assert!(read(&five, 0, bytes.len()).unwrap() == bytes);
    assert!((small / 2..=small).contains(&total()), "{}", total());
}

#[test]
fn a_store_that_others_can_write_to_is_not_used() {
    use std::os::unix::fs::PermissionsExt as _;
    let store = tempfile::tempdir().unwrap();
    Store::open(Some(store.path())).unwrap();
    let layout = store.path().join("v1");
    std::fs::set_permissions(&layout, std::fs::Permissions::from_mode(0o777)).unwrap();
    assert!(Store::open(Some(store.path())).is_err());
}

fn without_store() -> Options {
    Options { no_store: true, patience: Duration::from_secs(2), ..Options::default() }
}

#[test]
fn without_a_store_what_is_read_is_in_memory_and_nothing_is_left() {
    let bytes = body(64, 8);
    let origin = Origin::start(bytes.clone());
    let remote = open(&place(&origin.url("/disk.img")), &without_store()).unwrap();
    assert_eq!(read(&remote, 10, 1000).unwrap(), bytes[10..1010]);
    assert_eq!(origin.log().len(), 1, "the first bytes came with it");
    let (at, len) = (5 * CHUNK - 7, 20 * CHUNK);
    for _ in 0..2 {
        assert_eq!(read(&remote, at, len).unwrap(), bytes[at..at + len]);
        assert_eq!(origin.sent(), 22 * CHUNK as u64, "what is in memory is not fetched again");
    }
    let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&remote.file).unwrap());
    assert_eq!(blocks, 0, "nothing is in the file");
    assert!(!bring(&remote, 0..bytes.len()).unwrap(), "the file reads as zeroes");
    let (dir, file) = (remote.file.ancestors().nth(4).unwrap().to_owned(), remote.file.clone());
    assert!(dir.file_name().unwrap().to_str().unwrap().starts_with("becket-nostore-"), "{}", dir.display());
    drop(remote);
    assert!(!file.exists() && !dir.exists());
}

#[test]
fn more_than_fits_into_memory_is_fetched_again_by_all_who_read_it() {
    // The bound is 256 MiB.
    let chunks = (300 << 20) / CHUNK;
    let bytes = body(chunks, 9);
    let origin = Origin::start(bytes.clone());
    let remote = open(&place(&origin.url("/disk.img")), &without_store()).unwrap();
    assert!(read(&remote, 0, bytes.len()).unwrap() == bytes);
    let once = origin.sent();
    assert!(once < bytes.len() as u64 * 11 / 10, "{once}");
    assert!(
        read(&remote, bytes.len() - (100 << 20), 100 << 20).unwrap() == bytes[bytes.len() - (100 << 20)..]
    );
    assert_eq!(origin.sent(), once, "what came last is still there");
    std::thread::scope(|scope| {
        for first in 0..4 {
            let (remote, bytes) = (&remote, &bytes);
            scope.spawn(move || {
                for step in 0..40 {
                    let len = 3 * CHUNK + 11;
                    let at = ((first * 1009 + step * 613) % (chunks - 8)) * CHUNK + 77 * step;
                    assert!(read(remote, at, len).unwrap() == bytes[at..at + len], "at {at}");
                }
            });
        }
        let part = 40 << 20;
        for at in (0..bytes.len() - part).step_by(part) {
            assert!(read(&remote, at, part).unwrap() == bytes[at..at + part], "at {at}");
        }
    });
    assert!(origin.sent() > once, "what had gone was fetched again");
}

#[test]
fn an_answer_that_is_late_is_asked_for_again() {
    let (bytes, store) = (body(64, 10), tempfile::tempdir().unwrap());
    let origin = Origin::start(bytes.clone());
    let patient = Options { patience: Duration::from_secs(60), ..options(store.path()) };
    let remote = open(&place(&origin.url("/disk.img")), &patient).unwrap();
    // One of many servers behind a name hangs.
    let late = |request: &becket_testkit::origin::Request, good: Reply| match request.number {
        3 | 5 | 6 => Reply { late: Some(Duration::from_secs(50)), ..good },
        _ => good,
    };
    origin.trick(late);
    let began = Instant::now();
    for chunk in (1..60).step_by(13) {
        assert_eq!(read(&remote, chunk * CHUNK, 100).unwrap(), bytes[chunk * CHUNK..chunk * CHUNK + 100]);
    }
    assert!(began.elapsed() < Duration::from_secs(40), "none of them was waited for: {:?}", began.elapsed());
    assert!(origin.log().len() >= 1 + 5 + 3, "each late answer was asked for once more");
    assert_eq!(remote.fetched(), 6 * CHUNK as u64);
}
