//! Kinds of origins against servers that are not what they should be. Sends only to the loopback address.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

use std::ffi::OsStr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use becket_fetch::{Error, Options, Place, Remote, Store, open};
use becket_testkit::origin::{Origin, Reply};

fn get(url: &str, store: &Path) -> Result<Remote, Error> {
    let options =
        Options { store: Some(store.to_owned()), patience: Duration::from_secs(2), ..Options::default() };
    open(&Place::parse(OsStr::new(url)).unwrap(), &options)
}

fn manifest(digest: &str, size: usize) -> Vec<u8> {
    let layer = format!(r#"{{"mediaType": "x", "digest": "{digest}", "size": {size}}}"#);
    format!(r#"{{"layers": [{layer}]}}"#).into_bytes()
}

fn with_body(body: Vec<u8>) -> Reply {
    Reply { body, ..Reply::status(200) }
}

const SIZE: usize = 200_000;
/// That of `SIZE` sevens.
const SEVENS: &str = "sha256:8cfcba83dcfc81a193bb4e52fd3161efb513906f52cbbe2328fac5f1a79c2b6e";

/// A registry with one image, and its URL.
fn registry_of_sevens() -> (Origin, String) {
    let origin = Origin::start(vec![7; SIZE]);
    let url = origin.url("/a/b:c").replacen("http", "oci", 1);
    origin.trick(|request, reply| match request.path.contains("manifests") {
        true => with_body(manifest(SEVENS, SIZE)),
        false => reply,
    });
    (origin, url)
}

/// A registry that wants a token, which it gives, and which is too old after a few requests.
#[test]
fn a_token_is_asked_for_and_replaced_when_it_is_too_old() {
    let store = tempfile::tempdir().unwrap();
    let origin = Origin::start(vec![7; SIZE]);
    let realm = origin.url("/token");
    // A token is good for three requests.
    let (granted, used) = (AtomicU64::new(0), AtomicU64::new(0));
    origin.trick(move |request, reply| {
        if request.path.starts_with("/token") {
            assert_eq!(request.path, "/token?service=s&scope=repository%3Aa%2Fb%3Apull");
            used.store(0, Ordering::Relaxed);
            let token = granted.fetch_add(1, Ordering::Relaxed) + 1;
            return with_body(format!(r#"{{"token": "t{token}"}}"#).into_bytes());
        }
        let fresh = format!("Bearer t{}", granted.load(Ordering::Relaxed));
        let old = used.fetch_add(1, Ordering::Relaxed) >= 3;
        if old || request.header("authorization") != Some(&fresh) {
            let asked = format!("Bearer realm=\"{realm}\",service=\"s\"");
            return Reply::status(401).with("WWW-Authenticate", &asked);
        }
        match request.path.contains("manifests") {
            true => with_body(manifest(SEVENS, SIZE)),
            false => reply.without("ETag"),
        }
    });
    let url = origin.url("/a/b:c").replacen("http", "oci", 1);
    let remote = get(&url, store.path()).unwrap();
    remote.bring_all().unwrap();
    for _ in 0..4 {
        assert_eq!(get(&url, store.path()).unwrap().size(), SIZE as u64);
    }
    assert!(origin.log().iter().filter(|request| request.path.starts_with("/token")).count() >= 5);
}

#[test]
fn what_a_registry_may_not_do_has_its_own_sentence() {
    let store = tempfile::tempdir().unwrap();
    let origin = Origin::start(vec![7; SIZE]);
    let url = origin.url("/a/b:c").replacen("http", "oci", 1);
    let refused = |sentence: &str, reply: Reply| {
        origin.trick(move |_, _| reply.clone());
        let error = get(&url, store.path()).unwrap_err().to_string();
        assert!(error.contains(sentence), "{sentence}: {error}");
    };
    let bearer =
        |realm: &str| Reply::status(401).with("WWW-Authenticate", &format!("Bearer realm=\"{realm}\""));
    refused("none that becket reads", with_body(b"<html>".to_vec()));
    refused("too much", with_body(vec![b' '; 5 << 20]));
    refused("has no a/b:c", Reply::status(404));
    refused("status 302", Reply::status(302).with("Location", "http://127.0.0.1:1/"));
    refused("not a web server", bearer("file:///etc/passwd"));
    refused("status 401", bearer(&origin.url("/token")));
    refused("cannot compare", with_body(manifest("sha256:12", SIZE)));
    refused("it is empty", with_body(manifest(SEVENS, 0)));
    refused("status 503", Reply::status(503));
    // The layer is longer than the manifest says.
    origin.trick(|request, reply| match request.path.contains("manifests") {
        true => with_body(manifest(SEVENS, SIZE - 1)),
        false => reply,
    });
    let error = get(&url, store.path()).unwrap_err().to_string();
    assert!(error.contains("another version"), "{error}");
}

#[test]
fn bytes_that_are_not_those_of_the_digest_do_not_count() {
    let store = tempfile::tempdir().unwrap();
    let (origin, url) = registry_of_sevens();
    let remote = get(&url, store.path()).unwrap();
    remote.bring_all().unwrap();
    drop(remote);
    origin.replace(vec![8; SIZE], "\"two\"");
    std::fs::remove_dir_all(store.path()).unwrap();
    let remote = get(&url, store.path()).unwrap();
    let error = remote.bring_all().unwrap_err().to_string();
    assert!(error.contains("not those of its digest"), "{error}");
    origin.replace(vec![7; SIZE], "\"three\"");
    remote.bring_all().unwrap();
    assert!(std::fs::read(&remote.file).unwrap() == vec![7; SIZE]);
}

/// No process sees all of it.
#[test]
fn what_several_have_brought_is_compared_as_a_whole_when_it_is_verified() {
    let dir = tempfile::tempdir().unwrap();
    let (origin, url) = registry_of_sevens();
    let bring = || {
        for range in [0..SIZE as u64 / 2, SIZE as u64 / 2..SIZE as u64] {
            get(&url, dir.path()).unwrap().bring_in_order(&[range]).unwrap();
        }
    };
    let verify = || {
        let store = Store::open(Some(dir.path())).unwrap();
        store.verify(&store.list().unwrap().remove(0), &mut |_| {}).unwrap()
    };
    origin.replace([&[7; SIZE - 1][..], &[8]].concat(), "\"two\"");
    bring();
    let verified = verify();
    assert_eq!((verified.good, verified.damaged), (0, SIZE as u64));
    assert_eq!(Store::open(Some(dir.path())).unwrap().list().unwrap()[0].stored, 0);
    origin.replace(vec![7; SIZE], "\"three\"");
    bring();
    assert_eq!(verify().good, SIZE as u64);
}

#[test]
fn a_part_that_is_fetched_again_is_compared_again() {
    let dir = tempfile::tempdir().unwrap();
    let (origin, url) = registry_of_sevens();
    let remote = get(&url, dir.path()).unwrap();
    remote.bring_all().unwrap();
    let file = std::fs::File::options().write(true).open(&remote.file).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"x", SIZE as u64 - 5).unwrap();
    drop(remote);
    let store = Store::open(Some(dir.path())).unwrap();
    let entry = store.list().unwrap().remove(0);
    assert!(store.verify(&entry, &mut |_| {}).unwrap().damaged > 0);
    origin.replace(vec![8; SIZE], "\"two\"");
    let error = get(&url, dir.path()).unwrap().bring_all().unwrap_err().to_string();
    assert!(error.contains("not those of its digest"), "{error}");
}
