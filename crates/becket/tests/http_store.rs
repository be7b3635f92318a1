//! Images on web servers and the store: what has no room there, what is damaged there, and what lies over it.
//! Sends only to the loopback address.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a failed step fails the test")]

mod common;

use std::{fs, os::unix::fs::FileExt as _};

use becket_testkit::{origin::Origin, require_fuse};
use common::fetched::{BLOCK, random};
use common::scratch;
use common::web::run;

#[test]
fn fuse_an_overlay_of_a_url_is_found_again_by_its_url_and_version() {
    let name = "http_store::fuse_an_overlay_of_a_url_is_found_again_by_its_url_and_version";
    if !require_fuse(name) {
        return;
    }
    let place = scratch();
    let bytes = random(&place, 4 << 20);
    let origin = Origin::start(bytes.clone());
    let url = origin.url("/d.img");
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
