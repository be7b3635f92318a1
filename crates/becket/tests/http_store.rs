//! Images on web servers and the store: what has no room there, what is damaged there, and what lies over it.
//! Sends only to the loopback address.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{fs, os::unix::fs::FileExt as _, process::Command, time::Duration};

use becket_testkit::{
    Ran, Scratch,
    origin::{Origin, Reply},
    require_fuse, require_plain_machine, require_root, tool, wait_until,
};
use common::fetched::{BLOCK, attach, block_of, fetchers, open, random, read};
use common::scratch;
use common::web::{command, ok, run};

/// An image of so many random bytes on a server.
fn served(len: u64) -> (Scratch, Vec<u8>, Origin, String) {
    let place = scratch();
    let bytes = random(&place, len);
    let origin = Origin::start(bytes.clone());
    let url = origin.url("/d.img");
    (place, bytes, origin, url)
}

#[test]
fn fuse_an_overlay_of_a_url_is_found_again_by_its_url_and_version() {
    let name = "http_store::fuse_an_overlay_of_a_url_is_found_again_by_its_url_and_version";
    if !require_fuse(name) {
        return;
    }
    let (place, bytes, origin, url) = served(4 << 20);
    let words = |more: &[&'static str]| {
        let base = ["attach", "--via", "fuse", "--partitions", "off", "--cow", "o.qcow2"];
        [&base[..], more].concat().into_iter().map(str::to_owned).chain([url.clone()]).collect::<Vec<_>>()
    };
    let over = |more: &[&'static str]| {
        let words = words(more);
        run(&place, &words.iter().map(String::as_str).collect::<Vec<_>>())
    };
    for (round, more) in [&["--no-store"][..], &["--no-store"], &[], &["--store", "other"]].iter().enumerate()
    {
        let ran = over(more);
        assert_eq!(ran.code, 0, "{more:?}: {ran:?}");
        let disk = fs::File::options().read(true).write(true).open(ran.out.trim()).unwrap();
        let mut found = [0; BLOCK];
        if round == 0 {
            disk.write_all_at(&[7; BLOCK], 0).unwrap();
            disk.sync_all().unwrap();
        }
        disk.read_exact_at(&mut found, 0).unwrap();
        assert!(found == [7; BLOCK], "{more:?}");
        drop(disk);
        place.ok(["detach", "--all"]);
    }
    // The hint names the URL.
    let ran = run(&place, &["attach", "o.qcow2"]);
    assert!(ran.code == 1 && ran.err.contains(&format!("becket attach {url} --cow ")), "{ran:?}");
    origin.replace(bytes, "\"another\"");
    let ran = over(&[]);
    assert!(ran.code == 1 && ran.err.contains("it lies over version ") && ran.err.contains(&url), "{ran:?}");
    assert!(!ran.err.contains("rebase"), "{ran:?}");
}

#[test]
fn a_store_without_any_room_is_no_reason_to_stop_but_for_what_is_to_stay_there() {
    let name = "http_store::a_store_without_any_room_is_no_reason_to_stop_but_for_what_is_to_stay_there";
    if !require_root(name) {
        return;
    }
    let (place, bytes, _origin, url) = served(20 << 20);
    let small = place.dir("small");
    tool(Command::new("mount").args(["-t", "tmpfs", "-o", "size=8m", "none"]).arg(&small));
    let store = small.join("store");
    let store = store.to_str().unwrap();
    let prefetched = run(&place, &["store", "prefetch", "--store", store, &url]);
    let list = run(&place, &["--json", "store", "list", "--store", store]).json();
    ok(&place, &["store", "drop", "--all", "--store", store]);
    let mut full = fs::File::create(small.join("full")).unwrap();
    let _ = std::io::copy(&mut std::io::Read::take(std::io::repeat(7), 9 << 20), &mut full);
    drop(full);
    let got = command(&place, &["cat", "--store", store, &url]).output().unwrap();
    let again = run(&place, &["store", "prefetch", "--store", store, &url]);
    // Of what memory keeps nothing stays for later.
    let kept = ["--fill", "--record"].map(|option| run(&place, &["attach", option, "--store", store, &url]));
    becket_testkit::umount(&small);
    for ran in kept {
        assert!(ran.code == 1 && ran.err.contains("the store has no room for all of it"), "{ran:?}");
    }
    assert!(prefetched.code == 1 && prefetched.out.is_empty(), "{prefetched:?}");
    let stored = list["objects"][0]["stored"].as_u64().unwrap();
    assert!((4 << 20..8 << 20).contains(&stored), "{list:#}");
    assert!(prefetched.err.contains("the store has no room for all of it: "), "{prefetched:?}");
    assert!(
        prefetched.err.contains("--store DIR") && !prefetched.err.contains("--no-store"),
        "{prefetched:?}"
    );
    let said = String::from_utf8_lossy(&got.stderr);
    assert!(got.status.success() && got.stdout == bytes, "{said}");
    assert!(said.contains("the store has no room for it, so it is kept in memory"), "{said}");
    assert!(again.code == 1 && again.err.contains("the store has no room for all of it"), "{again:?}");
}

/// A URL with a signature of Amazon's, beside a parameter that is none.
fn signed(url: &str, signature: &str) -> String {
    let by =
        "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=K&X-Amz-Date=20261128T000000Z&X-Amz-Expires=60";
    format!("{url}?versionId=3&{by}&X-Amz-SignedHeaders=host&X-Amz-Signature={signature}")
}

#[test]
fn another_signature_is_for_the_same_object_and_none_is_written_down_or_shown() {
    let (place, bytes, origin, url) = served(1 << 20);
    let shown = |ran: Ran| {
        assert!(!ran.out.contains("secret") && !ran.err.contains("secret"), "{ran:?}");
        ran
    };
    let image = place.path("image");
    let copies = |signature: &str| {
        let url = signed(&url, signature);
        let ran = shown(run(&place, &["copy", "--force", &url, image.to_str().unwrap()]));
        assert_eq!(ran.code, 0, "{ran:?}");
        assert!(origin.log().last().unwrap().path.ends_with(signature), "the server gets it");
        fs::read(&image).unwrap()
    };
    assert!(copies("secret-1") == bytes);
    let sent = origin.sent();
    assert!(copies("secret-2") == bytes);
    assert!(origin.sent() - sent < 1 << 10, "{} bytes were fetched again", origin.sent() - sent);
    for words in [&["store", "list"][..], &["--json", "store", "list"], &["store", "verify"]] {
        assert_eq!(shown(run(&place, words)).code, 0);
    }
    // Another version is another object all the same, and so is what another parameter chooses.
    origin.replace(vec![5; 1 << 20], "\"two\"");
    assert!(copies("secret-3") == vec![5; 1 << 20]);
    let other = signed(&url, "secret-4").replace("versionId=3", "versionId=4");
    for words in [&["store", "drop", &other][..], &["store", "trace", &other], &["detach", &other]] {
        assert_eq!(shown(run(&place, words)).code, 1, "{words:?}");
    }
    shown(run(&place, &["--json", "list", &other]));
    let mut search = Command::new("grep");
    search.args(["-rlaF", "secret"]).args([place.path("store"), place.runtime()]);
    let found = search.output().unwrap();
    assert_eq!(String::from_utf8_lossy(&found.stdout), "", "no file has it");
    let dropped = shown(run(&place, &["--json", "store", "drop", &signed(&url, "secret-5")]));
    assert_eq!(dropped.json()["dropped"].as_array().unwrap().len(), 2, "{dropped:?}");
}

#[test]
fn what_only_a_fetched_image_can_have_is_refused_of_a_file_of_this_host() {
    let place = scratch();
    let image = place.path("random");
    random(&place, 1 << 20);
    fs::write(place.path("trace"), "# becket trace 1\n0 0 4096\n").unwrap();
    let socket = format!("unix:{}", place.path("s").display());
    let refused = |words: &[&str], option: &str| {
        let ran = run(&place, words);
        let why = format!("{option} is for an image that is fetched from a server, and this one is on this");
        assert!(ran.code == 1 && ran.err.contains(&why) && ran.err.contains("leave it away"), "{ran:?}");
        assert!(place.devices().is_empty());
        ran.err
    };
    for option in ["--fill", "--record", "--prefetch=trace"] {
        let name = option.split('=').next().unwrap();
        refused(&["attach", option, "random"], name);
        refused(&["attach", option, "--dry-run", "random"], name);
        if option != "--fill" {
            refused(&["export", "random", "--nbd", &socket, option], name);
        }
        let tab = place.path("tab");
        let line = option.trim_start_matches('-').replace("trace", place.path("trace").to_str().unwrap());
        fs::write(&tab, format!("one {} {line}\n", image.display())).unwrap();
        let said = refused(&["attach", &format!("--tab={}", tab.display()), "one"], name);
        assert!(said.contains("tab line 1: cannot attach "), "{said}");
        let ran = run(&place, &["attach", option, "none.img"]);
        assert!(ran.code == 1 && !ran.err.contains(name), "{ran:?}");
    }
}

#[test]
fn a_host_and_a_scheme_in_another_case_are_the_same() {
    // Guests look no names up.
    if !require_plain_machine("http_store::a_host_and_a_scheme_in_another_case_are_the_same", &[]) {
        return;
    }
    let (place, _, origin, _) = served(1 << 20);
    let url = |start: &str, path: &str| format!("{start}:{}{path}", origin.port());
    ok(&place, &["store", "prefetch", &url("http://localhost", "/d.img")]);
    let sent = origin.sent();
    ok(&place, &["store", "prefetch", &url("HTTP://LocalHost", "/d.img")]);
    assert_eq!(origin.sent() - sent, 1, "only the answer that shows the version");
    ok(&place, &["store", "prefetch", &url("http://localhost", "/D.img")]);
    let list = run(&place, &["--json", "store", "list"]).json();
    assert_eq!(list["objects"].as_array().map(Vec::len), Some(2), "a path has its case: {list:#}");
    let dropped = run(&place, &["--json", "store", "drop", &url("Http://LOCALHOST", "/d.img")]).json();
    assert_eq!(dropped["dropped"][0]["url"], url("http://localhost", "/d.img"), "{dropped:#}");
    origin.trick(|_, _| Reply::status(404));
    let ran = run(&place, &["cat", &url("HTTP://LOCALHOST", "/e.img")]);
    assert!(ran.err.matches("localhost").count() == 1 && !ran.err.contains("LOCALHOST"), "{ran:?}");
}

#[test]
fn fuse_a_device_goes_by_its_url_in_any_case_of_the_host() {
    let name = "http_store::fuse_a_device_goes_by_its_url_in_any_case_of_the_host";
    if !require_fuse(name) {
        return;
    }
    let (place, _, origin, _) = served(1 << 20);
    let starts = ["http://localhost", "HTTP://LocalHost"];
    for (one, other) in [(starts[0], starts[1]), (starts[1], starts[0])] {
        attach(&place, &[&format!("{one}:{}/d.img", origin.port())]);
        place.ok(["detach", &format!("{other}:{}/d.img", origin.port())]);
    }
}

#[test]
fn fuse_devices_share_a_fetcher_only_if_they_were_attached_alike() {
    let name = "http_store::fuse_devices_share_a_fetcher_only_if_they_were_attached_alike";
    if !require_fuse(name) {
        return;
    }
    let (place, bytes, origin, url) = served(16 << 20);
    let device = |name: &str, signature: &str, more: &[&str]| {
        let url = signed(&url, signature);
        let disk = open(&attach(&place, &[&["--name", name, &url], more].concat()));
        (disk, fetchers(&place).len())
    };
    let (patient, count) = device("patient", "secret-1", &[]);
    assert_eq!(count, 1);
    let (hasty, count) = device("hasty", "secret-1", &["--origin-timeout", "2s"]);
    assert_eq!(count, 2, "it has less time");
    let (newer, count) = device("newer", "secret-2", &[]);
    assert_eq!(count, 3, "it has another right");
    let (alike, count) = device("alike", "secret-1", &[]);
    assert_eq!(count, 3);
    origin.trick(|request, reply| match request.path.ends_with("secret-1") {
        true => Reply::status(403),
        false => reply,
    });
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| read(&patient, 1000).map(|found| found.0 == block_of(&bytes, 1000)));
        let failed = read(&hasty, 2000).map(drop).unwrap_err();
        assert!(read(&newer, 3000).unwrap().0 == block_of(&bytes, 3000));
        assert_eq!((failed.raw_os_error(), waits.is_finished()), (Some(5), false));
        // What one has stored is there for the others.
        assert!(read(&alike, 3000).unwrap().0 == block_of(&bytes, 3000));
        origin.honest();
        assert!(waits.join().unwrap().unwrap());
    });
    drop((patient, hasty, newer, alike));
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_what_is_damaged_below_a_device_is_not_said_to_be_whole_until_it_is_attached_again() {
    let name =
        "http_store::fuse_what_is_damaged_below_a_device_is_not_said_to_be_whole_until_it_is_attached_again";
    if !require_fuse(name) {
        return;
    }
    let (place, bytes, _origin, url) = served(4 << 20);
    let disk = attach(&place, &[&url]);
    assert!(fs::read(&disk).unwrap() == bytes);
    let list = run(&place, &["--json", "store", "list"]).json();
    let file = fs::File::options().write(true).open(list["objects"][0]["path"].as_str().unwrap()).unwrap();
    file.write_all_at(&[!bytes[1 << 20]], 1 << 20).unwrap();
    for round in 0..2 {
        let ran = run(&place, &["store", "verify"]);
        assert!(ran.code == 1 && ran.err.contains("8K are damaged, and what uses it"), "{round}: {ran:?}");
    }
    assert!(read(&open(&disk), 256).unwrap().0 != block_of(&bytes, 256), "the device has it still");
    place.ok(["detach", "--all"]);
    let disk = attach(&place, &[&url]);
    assert!(fs::read(&disk).unwrap() == bytes);
    ok(&place, &["store", "verify"]);
    place.ok(["detach", "--all"]);
}

#[test]
fn fuse_a_device_keeps_the_limit_of_the_store_and_says_that_it_is_filled_no_further() {
    let name = "http_store::fuse_a_device_keeps_the_limit_of_the_store_and_says_that_it_is_filled_no_further";
    if !require_fuse(name) {
        return;
    }
    let (place, bytes, origin, url) = served(48 << 20);
    let stored = || {
        let list = run(&place, &["--json", "store", "list"]).json();
        let all = list["objects"].as_array().unwrap();
        all.iter().map(|object| object["stored"].as_u64().unwrap()).sum::<u64>()
    };
    // What nobody uses makes way.
    ok(&place, &["store", "prefetch", &origin.url("/other.img")]);
    let disk = attach(&place, &["--fill", "--store-limit", "10M", &url]);
    let said = || place.ok(["stat", disk.to_str().unwrap()]);
    let rests = || said().contains("the rest waits for room in the store");
    assert!(wait_until(Duration::from_secs(20), rests), "{}", said());
    assert!((8 << 20..=10 << 20).contains(&stored()), "{}", stored());
    assert!(fs::read(&disk).unwrap() == bytes);
    assert!(stored() <= 10 << 20, "{}", stored());
    assert_eq!(place.json(["stat", disk.to_str().unwrap()])["devices"][0]["fetched"]["no_room"], true);
    place.ok(["detach", "--all"]);
    let ran = run(&place, &["store", "prefetch", "--store-limit", "10M", &url]);
    assert!(ran.code == 1 && ran.err.contains("--store-limit allows"), "{ran:?}");
    let ran = run(&place, &["store", "list", "--store-limit", "1M"]);
    assert!(ran.code == 2 && ran.err.contains("--store-limit"), "{ran:?}");
    let disk = attach(&place, &["--fill", &url]);
    let said = || place.ok(["stat", disk.to_str().unwrap()]);
    assert!(wait_until(Duration::from_secs(20), || said().contains("fetched: 48M of 48M;")), "{}", said());
    assert!(!said().contains("waits for room"), "{}", said());
    place.ok(["detach", "--all"]);
}
